"""How close does PPO come to the best possible policy, and what holds the rest back?

    python examples/exact_optimum.py                 one run, its responses, a sweep of beta
    python examples/exact_optimum.py --plot FILE     the same, and PPO against the frontier drawn
    python examples/exact_optimum.py --seeds 10      plain settings, seed by seed
    python examples/exact_optimum.py --settings 4    what each setting changes (some minutes)

All 3,906 responses of the toy are listed, so J* = beta log Z is known, and "of optimum" is
(J - J_ref) / (J* - J_ref). PPO reaches 99.35 % of it, and the policy's likeliest responses are the
optimum's (good good good good good: 24.616 % against 25.000 %). What is missing is beta times
KL(pi || pi*), to 2e-15. Over ten seeds: median 99.40, least 99.19, most 99.59.

What matters most is how far the optimiser gets, learning rate times steps: of 99.30 % (median of
4 seeds), a third of the rate leaves 97.70, one epoch in place of two 98.11, and twice the steps
give 99.73. What is left then is the noise of 64 sampled responses: 16 leave 97.84, 256 give 99.64.
lr 3e-3 learns faster and is stopped by that noise: 99.03 with 64 rows (least 97.80), 99.59 with
256. Whitening (99.29 without), lambda 1 (99.34) and a clip at .5 (99.37) hardly matter here.

At every beta of the sweep PPO ends on the exact reward-KL frontier, within .01 of its score; what
it misses is the right place on it. That costs most at beta 2 (95.89 %), where there is little to
gain and so the same noise weighs more.
"""
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402
from common import (EOS, PROMPT, Parser, at_least, count_good, parse_plot,  # noqa: E402
                    pyplot, save_plot, title)

VOCAB, LENGTH, BETA, ROWS, STEPS = 6, 5, 0.5, 64, 120
WORDS = ("<end>", "a", "good", "b", "c", "d")  # id 2 is what the score counts


def exact(policy, ref, beta):
    """J of a policy, and of the best one, by enumeration."""
    return t.exact_objective(policy, ref, PROMPT, count_good, LENGTH, EOS, beta)


def train(seed, beta=BETA, rows=ROWS, live=False, **changes):
    """PPO with plain settings -> (policy, reference); prints the fraction of the optimum if live.

    float64, so that another machine's rounding does not change which tokens are sampled.
    """
    rng = np.random.default_rng(seed)
    cfg = t.ToyLMConfig(VOCAB, len(PROMPT) + LENGTH, dtype="float64")  # 32 wide, 2 layers
    policy, critic = t.TinyCausalLM(cfg, rng), t.TinyCritic(cfg, rng)
    ref = policy.frozen_copy()
    settings = dict(steps=STEPS, max_new_tokens=LENGTH, beta=beta) | changes

    if live:
        title(f"PPO on {VOCAB} tokens, up to {LENGTH} a response, beta {beta}: exact, and sampled")
        print(f"{'step':>6}{'E[score]':>10}{'KL':>10}{'J':>10}{'of optimum':>12}"
              f"{'sampled score':>14}{'KL':>10}")

    def on_step(step, stats):
        if live and (step + 1) % 20 == 0:
            e = exact(policy, ref, beta)
            print(f"{step + 1:6}{e.reward:10.3f}{e.kl:10.3f}{e.J:10.4f}{e.fraction:12.2%}"
                  f"{stats.reward:14.3f}{stats.kl:10.3f}", flush=True)
    t.train_ppo(policy, ref, critic, [PROMPT] * rows, count_good, EOS, t.PPOConfig(**settings),
                rng=rng, on_step=on_step)
    return policy, ref


def likeliest(e):
    """The ten likeliest responses under the optimum, and what the others hold together."""
    title(f"The ten likeliest of {len(e.logp):,} responses, in percent")
    top = np.argsort(-e.logp_star)[:10]
    rest = np.setdiff1d(np.arange(len(e.logp)), top)
    columns = [100 * np.exp(logp) for logp in (e.logp_ref, e.logp, e.logp_star)]
    line = lambda name, rows: print(f"{name:32}" + "".join(f"{c[rows].sum():10.3f}"
                                                           for c in columns))
    print(f"{'':32}{'reference':>10}{'policy':>10}{'optimum':>10}")
    for row in top:
        inside = e.mask[row] > 0
        line(" ".join(WORDS[i] for i in e.tokens[row][inside]), [row])
    line("all others", rest)


def identity(e):
    """J = beta log Z - beta KL(pi || pi*): the distance to the optimum is a KL."""
    title("J = beta log Z - beta KL(pi || pi*)")
    gap = np.exp(e.logp) @ (e.logp - e.logp_star)
    print(f"beta log Z = J*        {e.J_star:20.15f}")
    print(f"beta KL(pi || pi*)     {BETA * gap:20.15f}")
    print(f"their difference       {e.J_star - BETA * gap:20.15f}")
    print(f"J = E[score] - beta KL {e.J:20.15f}   off by {abs(e.J_star - BETA * gap - e.J):.0e}")
    print(f"entropy of a response: policy {e.entropy:.3f}, optimum "
          f"{-(np.exp(e.logp_star) @ e.logp_star):.3f}, reference "
          f"{-(np.exp(e.logp_ref) @ e.logp_ref):.3f} nats")


def frontier(e, beta):
    """(KL, E[score]) of the best policy at a price beta: no policy has more score for its KL."""
    scores = (e.tokens == 2) @ np.ones(LENGTH)
    logp = e.logp_ref + scores / beta
    logp -= logp.max() + math.log(np.exp(logp - logp.max()).sum())
    p = np.exp(logp)
    return float(p @ (logp - e.logp_ref)), float(p @ scores)


def best_score_at(e, kl):
    """The frontier's score at a KL, by bisection on log beta."""
    low, high = math.log(0.02), math.log(100)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if frontier(e, math.exp(middle))[0] > kl else (low, middle)
    return frontier(e, math.exp(low))[1]


def sweep(seed, known, betas=(0.2, BETA, 1.0, 2.0)):
    """PPO at several prices of KL against the best that any policy could do -> [(beta, exact)].

    known: the exact figures of the run at BETA.
    """
    title("PPO at several beta against the exact reward-KL frontier")
    print(f"{'beta':>6}{'KL':>8}{'E[score]':>10}{'frontier there':>16}{'optimum: KL':>13}"
          f"{'E[score]':>10}{'of optimum':>12}")
    points = []
    for beta in betas:
        e = known if beta == BETA else exact(*train(seed, beta), beta)
        best_kl, best = frontier(e, beta)
        print(f"{beta:6.2f}{e.kl:8.3f}{e.reward:10.3f}{best_score_at(e, e.kl):16.3f}{best_kl:13.3f}"
              f"{best:10.3f}{e.fraction:12.2%}", flush=True)
        points.append((beta, e))
    return points


SETTINGS = {
    "plain: lr 1e-3, 64 rows, 2 epochs": {}, "lr 3e-4": {"lr": 3e-4}, "lr 3e-3": {"lr": 3e-3},
    "1 epoch": {"ppo_epochs": 1}, "240 steps": {"steps": 240}, "16 rows": {"rows": 16},
    "256 rows": {"rows": 256}, "lr 3e-3, 256 rows": {"lr": 3e-3, "rows": 256},
    "advantages not whitened": {"whiten_advantages": False}, "lambda 1": {"lam": 1.0},
    "clip at .5": {"clip_eps": 0.5}}


def settings_table(seeds, names):
    """Percent of the optimum over seeds: what brings PPO nearer, and what does not."""
    title(f"Percent of the optimum over {seeds} seeds")
    print(f"{'':36}{'median':>8}{'least':>8}{'most':>8}")
    for name in names:
        runs = [train(seed, **SETTINGS[name]) for seed in range(seeds)]
        got = [100 * exact(policy, ref, BETA).fraction for policy, ref in runs]
        print(f"{name:36}{np.median(got):8.2f}{min(got):8.2f}{max(got):8.2f}", flush=True)
    return got


def draw(points, file):
    """The frontier, PPO's end points, and the reference."""
    plt, e = pyplot(), points[0][1]
    figure, axis = plt.subplots(figsize=(7, 4.5))
    curve = [frontier(e, beta) for beta in np.geomspace(0.12, 50, 200)]
    axis.plot(*zip(*curve), "k-", label="best possible (exact)")
    axis.plot([e.kl for _, e in points], [e.reward for _, e in points], "o", label="PPO")
    for beta, e in points:
        axis.annotate(f"beta {beta:g}", (e.kl, e.reward), (8, -12), textcoords="offset points")
    axis.margins(x=0.12)
    axis.set(xlabel="KL(policy || reference), nats a response", ylabel="mean score")
    axis.legend(loc="lower right")
    save_plot(figure, file)


def main():
    """One run, what it holds, the sweep; or one of the two tables over seeds."""
    parser = Parser(description="How close does PPO come to the best possible policy?")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the run and the sweep")
    parser.add_argument("--seeds", type=at_least(1), help="instead: plain, over so many seeds")
    parser.add_argument("--settings", type=at_least(1), metavar="SEEDS",
                        help="instead: what each setting changes, minutes for a few seeds")
    args = parse_plot(parser, "PPO against the frontier")
    if args.seeds:
        got = settings_table(args.seeds, list(SETTINGS)[:1])
        return print("seed by seed: " + " ".join(f"{x:.2f}" for x in got))
    if args.settings:
        return settings_table(args.settings, SETTINGS)
    e = exact(*train(args.seed, live=True), BETA)
    likeliest(e)
    identity(e)
    points = sweep(args.seed, e)
    if args.plot:
        draw(points, args.plot)


if __name__ == "__main__":
    main()
