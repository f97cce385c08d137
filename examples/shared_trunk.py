"""One trunk with two heads: what does it save, and what does it cost?

    python examples/shared_trunk.py
    python examples/shared_trunk.py --seeds 5     the table over more seeds

The critic's trunk is the policy's, the very same Tensors, so both losses add their gradients in
them and Adam steps each once. Trained numbers halve (51,745 to 25,889), and the models hold 1,011
KiB in place of 1,819. Time stays: here each of the two losses makes a pass through the trunk of
its own; a trainer that reads both heads off one pass would save the other.

The price is that the value loss pulls at what the policy reads. In the scores' own unit that is
slight: 93.0 % of the optimum in place of 95.7 (5 seeds, medians), less in three seeds and more in
two, so not a rule. With scores and beta ten times as large the optimum is the same, and the clipped
loss too (advantages are whitened), but the value's gradient in the trunk grows tenfold, from .15 to
1.3 of the policy's: 71.8 %, below two trunks in all five seeds, in one of them below the reference
(-196 %). c_v = .005, a hundredth, mends it in all five: 89.1. Two trunks, whose losses Adam scales
apart, keep 94.6, though two seeds of five lose 20 points or more: ten times is far for a critic's
step size. So with one trunk c_v is in units of the score: whiten the rewards, or tune it.
"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402
from common import (EOS, PROMPT, Parser, at_least, count_good, figures_table,  # noqa: E402
                    flat_grad, lumpy_model, ppo_figures, title)

VOCAB, LENGTH, BETA, STEPS = 6, 4, 0.5, 80
HEAD = ("value_head.weight", "value_head.bias")


def value_head_on(policy):
    """A critic whose trunk is the policy's: the same Tensors, and a zero head of its own."""
    critic = t.TinyCritic(policy.cfg, np.random.default_rng(0))
    critic.params = policy.params | {name: critic.params[name] for name in HEAD}
    return critic


def models(seed, shared):
    """Policy, frozen reference, and a critic on a trunk of its own or on the policy's."""
    rng = np.random.default_rng(seed)
    cfg = t.ToyLMConfig(VOCAB, len(PROMPT) + LENGTH, dtype="float64")
    policy = lumpy_model(cfg, rng)
    critic = value_head_on(policy) if shared else t.TinyCritic.from_backbone(policy)
    return policy, policy.frozen_copy(), critic


def settings(scale, vf_coef, steps=STEPS):
    """PPO with scores in units `scale` times smaller, and beta with them: the optimum stays."""
    return t.PPOConfig(steps=steps, max_new_tokens=LENGTH, beta=BETA * scale, vf_coef=vf_coef,
                       value_clip_eps=0.2 * scale)


def scorer(scale):
    """The toy's score in units `scale` times smaller."""
    return lambda tokens, token_mask: scale * count_good(tokens, token_mask)


def run(seed, shared, scale=1, vf_coef=0.5):
    """PPO -> figures."""
    policy, ref, critic = models(seed, shared)
    return ppo_figures(policy, ref, critic, settings(scale, vf_coef), np.random.default_rng(seed),
                       scorer(scale))


def trunk_gradients(policy, critic, roll, scores, cfg):
    """What the clipped loss and c_v times the value loss send into the trunk -> (D,) twice."""
    advantages, returns = t.advantages_and_returns(roll, scores, cfg.beta, cfg)
    logp = t.token_log_probs(policy(roll.tokens), roll.tokens)
    clipped, _ = t.ppo_clip_loss(logp, roll.logp_old, advantages, roll.mask, cfg.clip_eps)
    of_policy = flat_grad(clipped, policy)
    values = critic(roll.tokens)[:, :-1]
    of_value = cfg.vf_coef * t.value_loss(values, roll.values_old, returns, roll.mask,
                                          cfg.value_clip_eps)
    return of_policy, flat_grad(of_value, policy)


def gradient_norms(seed, scale, vf_coef):
    """After ten steps of PPO on a shared trunk: the norms of both gradients in it."""
    policy, ref, critic = models(seed, shared=True)
    cfg, rng = settings(scale, vf_coef, steps=10), np.random.default_rng(seed)
    t.train_ppo(policy, ref, critic, [PROMPT] * 64, scorer(scale), EOS, cfg, rng=rng)
    roll = t.collect_rollouts(policy, ref, critic, [PROMPT] * 64, LENGTH, EOS, rng=rng)
    scores = scorer(scale)(roll.tokens[:, 1:], roll.mask)
    return [np.linalg.norm(g) for g in trunk_gradients(policy, critic, roll, scores, cfg)]


CASES = {"two trunks": (False, 1, 0.5), "one trunk": (True, 1, 0.5),
         "one trunk, c_v .05": (True, 1, 0.05), "two trunks, scores x 10": (False, 10, 0.5),
         "one trunk, scores x 10": (True, 10, 0.5),
         "one trunk, scores x 10, c_v .005": (True, 10, 0.005)}


def main():
    """Two trunks and one, with scores in two units; then the gradients in the trunk."""
    parser = Parser(description="Policy and critic on one trunk with two heads.")
    parser.add_argument("--seeds", type=at_least(1), default=2, help="of the table (default 2)")
    seeds = parser.parse_args().seeds
    figures_table(run, CASES, seeds, STEPS)
    title("The gradients that meet in the one trunk, after 10 steps (norms, medians of the seeds)")
    print(f"{'':34}{'of the policy':>15}{'c_v x value loss':>18}{'ratio':>8}")
    for name, (shared, *how) in CASES.items():
        if shared:
            a, b = np.median([gradient_norms(seed, *how) for seed in range(seeds)], axis=0)
            print(f"{name:34}{a:15.3f}{b:18.3f}{b / a:8.2f}", flush=True)


if __name__ == "__main__":
    main()
