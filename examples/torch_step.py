"""The PPO step of benchmark.py in PyTorch, eager, on the CPU: what tinyrlhf is measured against.

    python examples/torch_step.py small      seconds of each phase as one JSON line (needs torch)

Written as a careful user would: GPT-2 under its usual names, a preallocated KV cache while
sampling, log-probs recorded there, the head only where it is read, one log-softmax a pass,
scaled_dot_product_attention, fused Adam. Shapes and settings are benchmark.py's and PPOConfig's;
test_benchmark.py holds logits, sampling and update against tinyrlhf. No torch.compile.
"""
import copy
import json
import sys
import time
from types import SimpleNamespace

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
except ImportError:
    sys.exit("torch_step.py needs torch: pip install torch")

from benchmark import EOS, GAE_SHAPE, GOOD, SIZES, STEP, Parser, best_of, loop_gae, spent, t


class Block(nn.Module):
    """Attention and MLP, a LayerNorm before each, added to the residual stream (B, n, D)."""

    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.ln_1, self.ln_2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(d, 3 * d), "c_proj": nn.Linear(d, d)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(d, 4 * d), "c_proj": nn.Linear(4 * d, d)})

    def forward(self, x, cache=None, start=0):
        B, n, D = x.shape
        qkv = self.attn.c_attn(self.ln_1(x)).view(B, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv  # (B, H, n, d) each
        if cache is not None:  # (2, B, H, T, d)
            cache[..., start:start + n, :] = qkv[1:]
            k, v = cache[..., :start + n, :]
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=n > 1)
        x = x + self.attn.c_proj(heads.transpose(1, 2).reshape(B, n, D))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """The policy: tokens (B, T) -> logits (B, T, V), the head tied to the input."""

    def __init__(self, size):
        super().__init__()
        self.wte = nn.Embedding(size.vocab, size.d)
        self.wpe = nn.Embedding(size.prompt + size.new, size.d)
        self.h = nn.ModuleList(Block(size.d, size.heads) for _ in range(size.layers))
        self.ln_f = nn.LayerNorm(size.d)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def hidden_states(self, tokens, cache=None, start=0):
        """What the head reads, (B, n, D); with a cache (L, 2, B, H, T, d) from `start` on."""
        x = self.wte(tokens) + self.wpe.weight[start:start + tokens.shape[1]]
        for i, block in enumerate(self.h):
            x = block(x, None if cache is None else cache[i], start)
        return self.ln_f(x)

    def head(self, hidden):
        return F.linear(hidden, self.wte.weight)

    def forward(self, tokens):
        return self.head(self.hidden_states(tokens))


class Critic(GPT):
    """The same trunk with one number a position: (B, T) -> (B, T)."""

    def __init__(self, size):
        super().__init__(size)
        self.value_head = nn.Linear(size.d, 1)

    def head(self, hidden):
        return self.value_head(hidden)[..., 0]


def log_probs(logits, tokens):
    """log pi of every id, (B, T-1, V), and of the tokens that came, (B, T-1)."""
    logp = torch.log_softmax(logits[:, :-1], dim=-1)
    return logp, logp.gather(-1, tokens[:, 1:, None])[..., 0]


@torch.no_grad()
def sample(policy, prompts, new):
    """Responses of up to `new` tokens -> tokens (B, T), mask and log-probs (B, T-1)."""
    (B, P), D, heads = prompts.shape, policy.wte.embedding_dim, policy.h[0].heads
    tokens = F.pad(prompts, (0, new), value=EOS)
    mask, logp = torch.zeros(B, P + new - 1), torch.zeros(B, P + new - 1)
    cache = torch.empty(len(policy.h), 2, B, heads, P + new, D // heads)
    live, start = torch.ones(B, dtype=torch.bool), 0
    for i in range(P, P + new):
        hidden = policy.hidden_states(tokens[:, start:i], cache, start)[:, -1]
        scores = torch.log_softmax(policy.head(hidden), dim=-1)  # (B, V)
        chosen = torch.multinomial(scores.exp(), 1).masked_fill(~live[:, None], EOS)
        tokens[:, i], mask[:, i - 1] = chosen[:, 0], live
        logp[:, i - 1] = scores.gather(1, chosen)[:, 0] * live
        live, start = live & (chosen[:, 0] != EOS), i
    return tokens, mask, logp


def advantages_and_returns(roll, cfg):
    """Rewards with the KL in them -> GAE, whitened over the response."""
    rows, last = torch.arange(len(roll.mask)), (roll.mask.cumsum(1) * roll.mask).argmax(1)
    rewards = -cfg.beta * (roll.old - roll.ref) * roll.mask
    rewards[rows, last] += roll.scores
    adv, returns = loop_gae(rewards, roll.values, roll.mask, cfg.gamma, cfg.lam)
    inside = adv[roll.mask.bool()]
    return (adv - inside.mean()) / (inside.std(correction=0) + 1e-8) * roll.mask, returns


def update(policy, critic, opt, roll, cfg):
    """cfg.ppo_epochs steps -> clip fraction, entropy, value loss, gradient norm of each."""
    (adv, returns), seen = advantages_and_returns(roll, cfg), []
    mean = lambda x: (x * roll.mask).sum() / roll.mask.sum()
    for _ in range(cfg.ppo_epochs):
        logp_all, logp = log_probs(policy(roll.tokens), roll.tokens)
        ratio, eps = (logp - roll.old).exp(), cfg.clip_eps
        loss = -mean(torch.min(ratio * adv, ratio.clamp(1 - eps, 1 + eps) * adv))
        values, eps_v = critic(roll.tokens)[:, :-1], cfg.value_clip_eps
        near = roll.values + (values - roll.values).clamp(-eps_v, eps_v)
        v_loss = mean(torch.max((values - returns) ** 2, (near - returns) ** 2)) / 2
        opt.zero_grad()
        (loss + cfg.vf_coef * v_loss).backward()
        params = [p for group in opt.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(params, cfg.max_grad_norm)
        opt.step()
        with torch.no_grad():
            entropy = mean(-(logp_all.exp() * logp_all).sum(-1))
            clipped = mean(((ratio - 1).abs() > cfg.clip_eps).float())
        seen.append([float(x) for x in (clipped, entropy, v_loss.detach(), norm)])
    return seen


def ppo_step(policy, ref, critic, opt, prompts, new, cfg):
    """Rollout, scoring, update -> the seconds of each, under the names of PPOStats."""
    marks = [time.perf_counter()]
    tokens, mask, old = sample(policy, prompts, new)
    marks.append(time.perf_counter())
    with torch.no_grad():
        roll = SimpleNamespace(tokens=tokens, mask=mask, old=old, values=critic(tokens)[:, :-1],
                               ref=log_probs(ref(tokens), tokens)[1],
                               scores=((tokens[:, 1:] == GOOD) * mask).sum(1))
    marks.append(time.perf_counter())
    update(policy, critic, opt, roll, cfg)
    marks.append(time.perf_counter())
    return {phase: b - a for phase, a, b in zip(STEP, marks, marks[1:])}


def main():
    """Seconds of the fastest step at a size, after one of two rows, and of GAE."""
    parser = Parser(description="seconds of each phase of a PPO step in PyTorch")
    parser.add_argument("size", choices=SIZES)
    size, cfg = SIZES[parser.parse_args().size], t.PPOConfig()
    torch.manual_seed(0)
    policy, critic = GPT(size), Critic(size)
    ref, params = copy.deepcopy(policy), [*policy.parameters(), *critic.parameters()]
    opt = torch.optim.Adam(params, cfg.lr, fused=True)
    prompts = torch.randint(1, size.vocab, (size.rows, size.prompt))
    step = lambda rows: ppo_step(policy, ref, critic, opt, prompts[:rows], size.new, cfg)
    step(2)
    seconds = min((step(size.rows) for _ in range(size.steps)), key=spent)
    r, v, mask = torch.randn(GAE_SHAPE), torch.randn(GAE_SHAPE), torch.ones(GAE_SHAPE)
    print(json.dumps(seconds | {"gae": best_of(3, lambda: loop_gae(r, v, mask))}))


if __name__ == "__main__":
    main()
