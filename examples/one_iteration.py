"""One PPO iteration on two short responses, every intermediate number in a table.

    python examples/one_iteration.py

Question: what exactly happens between "the policy writes two responses" and "its weights moved"?

Found: in epoch 1 every ratio is 1, nothing is clipped and the gradient is -A/n. After one Adam step
(lr .03, so that a small example moves visibly) 4 of 6 tokens are outside [.8, 1.2]: three had moved
the way their advantage wants and get no gradient ("clipped"), one had moved the wrong way and keeps
its own ("outside"). The clip is no wall: row 0's <end> was at 1.843 times its old probability in
epoch 2, and without a gradient of its own the other tokens' took it to .139 from .165, against its
advantage. ppo_update reports clip_frac 0.333, the mean of 0 and 66.7 %, and moves every weight to
the same bits as the steps made here by hand. The chapter's four tokens return 1.58.
"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402
from common import Parser, cell, title  # noqa: E402

WORDS = "<end> film was very good bad".split()
PROMPT, EOS = [1, 2], 0  # "film was"
CFG = t.PPOConfig(max_new_tokens=4, beta=0.1, lr=0.03, ppo_epochs=2)
SEED = 15


def models(seed=SEED):
    """Policy, reference, critic in float64; the policy has moved off the reference already."""
    rng = np.random.default_rng(seed)
    shape = t.ToyLMConfig(len(WORDS), max_len=8, d_model=8, n_layers=1, n_heads=1, dtype="float64")
    ref, critic = t.TinyCausalLM(shape, rng).frozen_copy(), t.TinyCritic(shape, rng)
    policy = ref.copy()
    for p in policy.parameters():
        p.data += rng.normal(0, 0.3, p.shape)
    critic.params["value_head.weight"].data += rng.normal(0, 0.3, (8, 1))
    return policy, ref, critic


def judge(tokens, token_mask):
    """The reward of a whole response: +1 for each "good", -1 for each "bad"."""
    worth = np.array([{"good": 1.0, "bad": -1.0}.get(word, 0.0) for word in WORDS])
    return (worth[tokens] * token_mask).sum(axis=1)


def print_rows(roll, columns, digits=3):
    """One line a response token: where it stands, the token, then a column for each array."""
    print(f"{'row':>3} {'t':>2} {'action':>7}" + "".join(f"{name:>9}" for name in columns))
    for b, i in np.argwhere(roll.mask):
        word = WORDS[roll.tokens[b, i + 1]]
        cells = [x[b, i] if x.dtype.kind in "US" else float(x[b, i]) for x in columns.values()]
        print(f"{b:3} {i:2} {word:>7}" + "".join(cell(x, 9, digits) for x in cells))


def show_tokens(roll, scores):
    """The two responses, and the mask over their actions: column t holds the action t + 1."""
    title("1. Rollout: tokens, mask, score")
    print(f"{'':26}" + "".join(f"{f't={i}':>7}" for i in range(roll.mask.shape[1])))
    for b, row in enumerate(roll.tokens):
        print(f"row {b} state ends with" + " " * 6 + "".join(f"{WORDS[w]:>7}" for w in row[:-1]))
        print("      action" + " " * 14 + "".join(f"{WORDS[w]:>7}" for w in row[1:]))
        print("      response_mask" + " " * 7 + "".join(f"{int(m):7}" for m in roll.mask[b])
              + f"   score {scores[b]:.1f}")


def show_rewards(roll, scores):
    """Log-probs, the KL paid by token, the score once; then values, delta, advantages, returns."""
    title("2. R_t = -beta (log pi - log ref), plus the score on the last token; beta = "
          f"{CFG.beta}")
    rewards = t.shaped_rewards(scores, roll.logp_old, roll.logp_ref, roll.mask, CFG.beta)
    kl = t.kl_estimates(roll.logp_old, roll.logp_ref, "k1")
    score_at = np.zeros_like(kl)
    score_at[[0, 1], t.last_response_index(roll.mask)] = scores
    print_rows(roll, {"log pi": roll.logp_old, "log ref": roll.logp_ref, "kl": kl,
                      "-beta kl": -CFG.beta * kl, "score": score_at, "R": rewards})
    print(f"KL of the batch: {t.sequence_kl(roll):.3f} nats per sequence")
    title("3. delta_t = R_t + V_t+1 - V_t; A_t = delta_t + .95 A_t+1; G_t = A_t + V_t; whitened")
    delta, _ = t.gae(rewards, roll.values_old, roll.mask, CFG.gamma, 0.0)  # lambda 0: delta itself
    advantages, returns = t.gae(rewards, roll.values_old, roll.mask, CFG.gamma, CFG.lam)
    white = t.whiten(advantages, roll.mask)
    print_rows(roll, {"R": rewards, "V": roll.values_old, "delta": delta, "A": advantages,
                      "G": returns, "white A": white})
    inner = advantages[roll.mask > 0]
    print(f"mean {inner.mean():.3f} and standard deviation {inner.std():.3f} of A over the "
          f"{inner.size} tokens make it white")
    return white, returns


def epoch(policy, critic, opt, roll, advantages, returns):
    """One pass: the ratios, both losses by token, their gradients, one clipped Adam step."""
    opt.zero_grad()
    logits = policy(roll.tokens)
    logp = t.token_log_probs(logits, roll.tokens)
    values = critic(roll.tokens)[:, :-1]
    pg_loss, clip_frac = t.ppo_clip_loss(logp, roll.logp_old, advantages, roll.mask, CFG.clip_eps)
    v_loss = t.value_loss(values, roll.values_old, returns, roll.mask, CFG.value_clip_eps)
    loss = pg_loss + CFG.vf_coef * v_loss
    parts = {"policy loss": float(pg_loss), "value loss": float(v_loss), "loss": float(loss)}
    seen = logp.data.copy(), values.data.copy(), logits.data.copy()
    loss.backward()
    parts["gradient norm"] = t.clip_grad_norm(opt.params, CFG.max_grad_norm)
    opt.step()
    return seen, parts, clip_frac


def term_gradient(logp, roll, advantages):
    """d(policy loss) / d(log pi of each token), by backward."""
    leaf = t.Tensor(logp, requires_grad=True)
    t.ppo_clip_loss(leaf, roll.logp_old, advantages, roll.mask, CFG.clip_eps)[0].backward()
    return leaf.grad


def value_terms(values, roll, returns):
    """What each token adds to the mean of the value loss: the loss of that token alone."""
    terms = np.zeros_like(values)
    for b, i in np.argwhere(roll.mask):
        alone = np.zeros_like(roll.mask)
        alone[b, i] = 1
        terms[b, i] = float(t.value_loss(values, roll.values_old, returns, alone,
                                         CFG.value_clip_eps))
    return terms


def show_epoch(number, seen, parts, clip_frac, roll, advantages, returns):
    """Ratio, clipped or not, the terms of both losses, and the gradient that is left."""
    title(f"{number + 3}. Epoch {number}: ratio = exp(log pi - log pi_old), eps = {CFG.clip_eps}")
    logp = seen[0]
    ratio = np.exp(np.where(roll.mask, logp - roll.logp_old, 0))
    bound = np.clip(ratio, 1 - CFG.clip_eps, 1 + CFG.clip_eps) * advantages
    grad = term_gradient(logp, roll, advantages)
    flat = np.where(grad == 0, "clipped", "")
    flat[(grad != 0) & (abs(ratio - 1) > CFG.clip_eps)] = "outside"
    print_rows(roll, {"log pi": logp, "ratio": ratio, "white A": advantages,
                      "ratio A": ratio * advantages, "clip A": bound,
                      "min": np.minimum(ratio * advantages, bound), "dL/dlogp": grad,
                      "": flat, "V term": value_terms(seen[1], roll, returns)})
    text = "  ".join(f"{name} {value:.4f}" for name, value in parts.items())
    print(f"{text}  clip fraction {clip_frac:.1%}")
    if "clipped" in flat:
        print("clipped: moved by eps the way A wants, gradient 0; outside: the other way, it stays")


def show_logits(seen, roll, advantages):
    """The gradient into the logits behind one token, by hand and by backward."""
    b, i = 0, int(t.last_response_index(roll.mask)[0])
    n, action = roll.mask.sum(), roll.tokens[b, i + 1]
    title(f"The gradient into the logits of row {b}, t = {i} (action {WORDS[action]}), epoch 1")
    logits = t.Tensor(seen[2], requires_grad=True)
    logp = t.token_log_probs(logits, roll.tokens)
    t.ppo_clip_loss(logp, roll.logp_old, advantages, roll.mask, CFG.clip_eps)[0].backward()
    z = seen[2][b, i]
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    by_hand = -advantages[b, i] / n * ((np.arange(len(p)) == action) - p)
    for name, x in (("", WORDS), ("pi", p), ("-A/n (1[action] - pi)", by_hand),
                    ("by backward", logits.grad[b, i])):
        print(f"{name:24}" + "".join(cell(v if name == "" else float(v), 10, 5) for v in x))


def show_effect(policy, critic, roll, advantages):
    """Log-probs and values under the new weights, beside those of the rollout."""
    title("6. The new weights, after both epochs")
    with t.no_grad():
        logp = t.token_log_probs(policy(roll.tokens), roll.tokens).data
        values = critic(roll.tokens).data[:, :-1]
    moved = np.where((logp - roll.logp_old) * advantages > 0, "with A", "against")
    print_rows(roll, {"white A": advantages, "pi old": np.exp(roll.logp_old), "pi new":
                      np.exp(logp), "moved": moved, "V old": roll.values_old, "V new": values})


def check(roll, scores, policy, critic):
    """The same iteration by ppo_update: how far its weights are from those made by hand."""
    again, _, twin = models()
    opt = t.Adam(again.parameters() + twin.parameters(), CFG.lr)
    stats = t.ppo_update(again, twin, opt, roll, scores, CFG.beta, CFG)
    gap = max(np.abs(p.data - q.data).max() for model, other in ((policy, again), (critic, twin))
              for p, q in zip(model.parameters(), other.parameters()))
    print("\nppo_update does the same in one call: the largest difference of a weight is "
          f"{gap:.0e}.\nIt reports clip_frac {stats.clip_frac:.3f} (mean of the epochs), "
          f"clip_frac_first {stats.clip_frac_first:.3f}, ratio_max {stats.ratio_max:.3f}.")


def chapter_table():
    """The four tokens of the chapter's section 1."""
    title("The chapter's four tokens: beta = .1, score 1.5")
    logp, ref = np.array([[-1.0, -0.5, -2.0, -0.1]]), np.array([[-1.2, -0.5, -1.0, -0.1]])
    mask = np.ones((1, 4))
    price = t.shaped_rewards([0.0], logp, ref, mask, 0.1)[0]
    rewards = t.shaped_rewards([1.5], logp, ref, mask, 0.1)[0]
    print(f"{'t':>3}{'log pi':>9}{'log ref':>9}{'-beta kl':>10}{'score':>8}{'R_t':>8}")
    for i in range(4):
        print(f"{i + 1:3}{logp[0, i]:9.1f}{ref[0, i]:9.1f}{cell(float(price[i]), 10, 2)}"
              f"{rewards[i] - price[i]:8.2f}{cell(float(rewards[i]), 8, 2)}")
    print(f"return of the episode: {rewards.sum():.2f}")


def main():
    """Roll out, shape, estimate, update twice, compare."""
    Parser(description=__doc__.splitlines()[0]).parse_args()
    policy, ref, critic = models()
    roll = t.collect_rollouts(policy, ref, critic, [PROMPT, PROMPT], CFG.max_new_tokens, EOS,
                              rng=np.random.default_rng(SEED))
    scores = judge(roll.tokens, np.pad(roll.mask, ((0, 0), (1, 0))))
    show_tokens(roll, scores)
    advantages, returns = show_rewards(roll, scores)
    opt = t.Adam(policy.parameters() + critic.parameters(), CFG.lr)
    for number in (1, 2):
        seen, parts, clip_frac = epoch(policy, critic, opt, roll, advantages, returns)
        show_epoch(number, seen, parts, clip_frac, roll, advantages, returns)
        if number == 1:
            show_logits(seen, roll, advantages)
    show_effect(policy, critic, roll, advantages)
    check(roll, scores, policy, critic)
    chapter_table()


if __name__ == "__main__":
    main()
