"""What happens to the true quality when a policy climbs a reward model of few preferences?

    python examples/over_optimisation.py
    python examples/over_optimisation.py --plot FILE     gold and proxy over sqrt(KL), the signs
    python examples/over_optimisation.py --seeds 5       a line a seed, half a minute each

A hidden judge gives the gold score: praise counts once, a word said again bores him, and so do two
words nobody puts side by side. The proxy is a reward model of 50 of his noisy choices between
samples of the reference, which hardly ever shows it those faults. d is sqrt(KL to the reference).

- Best-of-n: the gold rises to 1.30 over the reference's at n = 64 and is back at 1.09 at n = 1024,
  while the proxy stands still. The form d (alpha - beta d) of Gao et al. 2022 explains 97 % of it.
  The KL at n = 1024 is 4.88 nats, not log n - (n-1)/n = 5.93: equal responses tie.
- PPO without a price of KL: proxy 1.04 -> 1.56, gold .88 -> -1.32, and -7.80 forty steps later.
  With beta .03 to .3 the gold ends at 1.31 to 2.48. d (alpha - beta log d) explains 81 %, for here
  the gold is no function of d alone: at d near 2, beta .03 has 2.46 and beta 0 has .88.
- Early signs: as the gold is at its best, responses are longer by two thirds (5.2 to 8.6 words),
  and three reward models order 49 % of the pairs differently, 40 % at the reference, 70 % at the
  end (75 % is chance). Both need no judge; when they speak, ask him.
- The cure: 100 new choices between the policy's own samples, before each of two more rounds, bring
  the gold back to 1.20. As many between the reference's samples do not: -17.28. A last digit moves
  these ends: three other roundings of the same sums gave 1.29, 1.36, 2.81 and -16.79 to -17.31.

Over five seeds: beta .03 to .3 ends above beta 0 in all; 72 steps without a cure cost over 1.6
points of the best gold in four (seed 3: .2); at the best gold responses are longer in all, and the
split is up in four, at the end in all; best-of-1024 is below the best n in four. New choices on the
policy's samples end above none in three, above those on the reference's in four, but above where
they set in only in two, those that had fallen most. In seeds 1 and 3, where little was lost, they
do harm: the next reward model has errors of its own. A refreshment is no licence to leave out the
price of KL.
"""
import math
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402
from common import Parser, at_least, parse_plot, pyplot, save_plot, title  # noqa: E402

EOS, LENGTH, VOCAB, PROMPTS = 0, 12, len(t.WORDS), t.PROMPTS
PAIRS, FRESH = 50, 100             # preferences at first, and those of each refreshment
BETAS, STEPS, EVERY = (0.3, 0.1, 0.03, 0.0), 32, 4
ROUNDS, ROUND = 2, 20              # refreshments, and the steps of PPO after each
SIZES = 2 ** np.arange(11)         # n of best-of-n
WORTH = np.array([t.VALUE.get(word, 0.0) + 0.5 for word in t.WORDS])

Preferences = namedtuple("Preferences", "chosen chosen_mask rejected rejected_mask")  # (B, T) each
RewardModel = namedtuple("RewardModel", "model mean std")  # mean, std: its scores of the reference
World = namedtuple("World", "ref prefs models gold_ref rng")
Point = namedtuple("Point", "step d proxy gold length split right")


def spoken():
    """Which word may follow which -> (V, V) bool, from reviews of the grammar."""
    pairs, rng = np.zeros((VOCAB, VOCAB), bool), np.random.default_rng(0)
    for _ in range(3000):
        words = t.review(rng)
        pairs[words[:-1], words[1:]] = True
    return pairs


SPOKEN = spoken()


def gold(tokens, token_mask):
    """What the judge feels -> (B,): a word's worth when it is new, -1 each time it comes again,
    and -1 for each two words that no speaker puts side by side.
    """
    said = ((tokens[..., None] == np.arange(VOCAB)) * token_mask[..., None]).sum(axis=1)  # (B, V)
    said[:, EOS] = 0
    new = said > 0
    broken = (~SPOKEN[tokens[:, :-1], tokens[:, 1:]] * token_mask[:, 1:]).sum(axis=1)
    return new @ WORTH - (said - new).sum(axis=1) - broken


def draw_samples(policy, count, rng):
    """count responses, the prompts in turn."""
    return t.sample(policy, [PROMPTS[i % len(PROMPTS)] for i in range(count)], LENGTH, EOS, rng=rng)


def collect(policy, pairs, rng):
    """The judge's noisy choices between two samples of a policy (Bradley-Terry)."""
    a, b = (draw_samples(policy, pairs, rng) for _ in "ab")
    margin = gold(a.tokens, a.token_mask) - gold(b.tokens, b.token_mask)
    first = rng.random((pairs, 1)) < 1 / (1 + np.exp(-margin[:, None]))
    better, worse = (np.where(first == flag, (a.tokens, a.token_mask), (b.tokens, b.token_mask))
                     for flag in (True, False))
    return Preferences(better[0].astype(int), better[1], worse[0].astype(int), worse[1])


def train_reward_model(ref, prefs, rng, resample=False):
    """A reward model on the reference's trunk; resample: on preferences drawn with replacement."""
    model, known = t.TinyCritic.from_backbone(ref), np.arange(len(prefs.chosen))
    if resample:
        known = rng.choice(known, len(known))

    def loss_of():
        rows = rng.choice(known, 32)
        chosen, rejected = (t.score_sequences(model, tokens[rows], mask[rows])
                            for tokens, mask in (prefs[:2], prefs[2:]))
        return t.reward_model_loss(chosen, rejected)
    t.fit(model, 2e-3, 150, loss_of)
    s = draw_samples(ref, 1024, np.random.default_rng(7))
    raw = score(RewardModel(model, 0.0, 1.0), s.tokens, s.token_mask)
    return RewardModel(model, raw.mean(), raw.std())


def score(rm, tokens, token_mask):
    """Scores (B,), in standard deviations of the reference's from their mean."""
    with t.no_grad():
        return (t.score_sequences(rm.model, tokens, token_mask).data - rm.mean) / rm.std


def make_world(seed):
    """Reference by SFT, a few preferences on its samples, three reward models -> World."""
    rng = np.random.default_rng(seed)
    cfg = t.ToyLMConfig(VOCAB, LENGTH + max(map(len, PROMPTS)), n_layers=1, dtype="float64")
    policy = t.TinyCausalLM(cfg, rng)
    t.train_sft(policy, rng)
    ref = policy.frozen_copy()
    prefs, s = collect(ref, PAIRS, rng), draw_samples(ref, 2048, rng)
    models = [train_reward_model(ref, prefs, rng, resample=i > 0) for i in range(3)]
    return World(ref, prefs, models, gold(s.tokens, s.token_mask).mean(), rng)


def measure(step, policy, world):
    """A policy in numbers, on 256 samples -> Point.

    split: share of pairs of its samples which the three reward models do not order alike;
    right: share of pairs which the first orders as the judge feels.
    """
    s = draw_samples(policy, 256, np.random.default_rng(1))
    with t.no_grad():
        logp_ref = t.token_log_probs(world.ref(s.tokens), s.tokens).data
    kl = ((s.logp - logp_ref) * s.token_mask[:, 1:]).sum(axis=1).mean()
    true = gold(s.tokens, s.token_mask)
    scores = np.array([score(rm, s.tokens, s.token_mask) for rm in world.models])  # (3, B)
    # each sample against the next one of the same prompt
    order, true_order = (np.sign(x - np.roll(x, len(PROMPTS), axis=-1)) for x in (scores, true))
    order, true_order = order[:, true_order != 0], true_order[true_order != 0]
    share = lambda hits: hits.mean() if len(hits) else math.nan  # a policy may say one thing only
    return Point(step, math.sqrt(max(kl, 0)), scores[0].mean(), true.mean() - world.gold_ref,
                 s.token_mask.sum(axis=1).mean(), share((order != order[0]).any(axis=0)),
                 share(order[0] == true_order))


def run_ppo(policy, world, beta, steps, first=0):
    """PPO against the first reward model -> a Point every few steps, counted from `first`."""
    critic = t.TinyCritic.from_backbone(world.models[0].model)
    cfg = t.PPOConfig(steps=steps, max_new_tokens=LENGTH, beta=beta, lr=2e-3)
    points = []

    def on_step(step, stats):
        if (step + 1) % EVERY == 0:
            points.append(measure(first + step + 1, policy, world))
    t.train_ppo(policy, world.ref, critic, PROMPTS * 8, lambda *s: score(world.models[0], *s), EOS,
                cfg, rng=world.rng, on_step=on_step)
    return points


def best_of_n(pool, n):
    """Exact best of n draws from a pool (proxy (M,), gold (M,)) -> KL, mean proxy, mean gold.

    P(best has score x) = F(x)^n - F(just below x)^n: equal scores are one response said twice.
    """
    proxy, true = pool
    levels, level, count = np.unique(proxy.round(9), return_inverse=True, return_counts=True)
    p = count / len(proxy)
    F = np.append(0, np.cumsum(p)).clip(max=1)
    q = np.diff(F ** n)
    inside = q > 0
    kl = (q[inside] * np.log(q[inside] / p[inside])).sum()
    return np.array([kl, q @ levels, q @ (np.bincount(level, true) / count)])


def best_of_n_table(world):
    """Means over the prompts, a row for each n -> (10, 3): KL, proxy, gold over the reference's."""
    s = draw_samples(world.ref, 16384, world.rng)
    proxy, true = score(world.models[0], s.tokens, s.token_mask), gold(s.tokens, s.token_mask)
    pools = [(proxy[i::len(PROMPTS)], true[i::len(PROMPTS)]) for i in range(len(PROMPTS))]
    table = np.array([np.mean([best_of_n(pool, n) for pool in pools], axis=0) for n in SIZES])
    return table - [0, 0, world.gold_ref]


FORMS = {"best-of-n": ("d (alpha - beta d)", lambda d: -d * d),
         "PPO": ("d (alpha - beta log d)", lambda d: -d * np.log(d))}


def fit_form(d, true, form):
    """Least squares of gold over d = sqrt(KL) -> alpha, beta, and R^2, the share explained."""
    d, true = (np.asarray(x)[np.asarray(d) > 0] for x in (d, true))
    columns = np.column_stack([d, FORMS[form][1](d)])
    (alpha, beta), *_ = np.linalg.lstsq(columns, true)
    return alpha, beta, 1 - ((true - columns @ (alpha, beta))**2).mean() / true.var()


def peak(alpha, beta, form):
    """The d at which the form is largest; infinite if it never turns down."""
    if beta <= 0:
        return math.inf
    return alpha / 2 / beta if form == "best-of-n" else math.exp(alpha / beta - 1)


def refresh(world, source):
    """The reward model trained again, with FRESH more preferences on samples of `source`."""
    new = collect(source, FRESH, world.rng)
    prefs = Preferences(*map(np.concatenate, zip(world.prefs, new)))
    first = train_reward_model(world.ref, prefs, world.rng)
    return world._replace(prefs=prefs, models=[first, *world.models[1:]])


def go_on(policy, world, source):
    """ROUNDS of PPO at beta 0; before each, new preferences on samples of the reference or the
    policy itself (source "policy"), or none -> [Point]."""
    policy, points = policy.copy(), []
    for i in range(ROUNDS):
        if source:
            world = refresh(world, policy if source == "policy" else world.ref)
        points += run_ppo(policy, world, 0.0, ROUND, STEPS + i * ROUND)
    return points


SOURCES = {"none": None, f"{FRESH} a round, of the reference": "reference",
           f"{FRESH} a round, of the policy": "policy"}
Study = namedtuple("Study", "best_of_n start runs fits cures")


def study(seed):
    """Everything, on one seed -> Study."""
    world = make_world(seed)
    table, start = best_of_n_table(world), measure(0, world.ref, world)
    runs, policies = {}, {}
    for beta in BETAS:
        policies[beta] = world.ref.copy()
        runs[beta] = [start, *run_ppo(policies[beta], world, beta, STEPS)]
    points = [p for run in runs.values() for p in run]
    fits = {"best-of-n": fit_form(np.sqrt(table[:, 0]), table[:, 2], "best-of-n"),
            "PPO": fit_form([p.d for p in points], [p.gold for p in points], "PPO")}
    cures = {name: go_on(policies[0.0], world, source) for name, source in SOURCES.items()}
    return Study(table, start, runs, fits, cures)


best_point = lambda run: max(run, key=lambda p: p.gold)


def show_best_of_n(result):
    """Proxy and gold over n, and what the KL really is."""
    title(f"Best of n under a reward model of {PAIRS} preferences (gold: over the reference's)")
    print(f"{'n':>6}{'log n - (n-1)/n':>17}{'KL, nats':>10}{'d':>7}{'proxy, std':>12}{'gold':>8}")
    for n, (kl, proxy, true) in zip(SIZES, result.best_of_n):
        print(f"{n:6}{math.log(n) - (n - 1) / n:17.2f}{kl:10.2f}{math.sqrt(max(kl, 0)):7.2f}"
              f"{proxy:12.2f}{true:8.2f}")


def show_runs(result):
    """PPO at each beta: where gold was best, and where the run ended."""
    title(f"PPO against the same reward model, {STEPS} steps (d = sqrt(KL to the reference))")
    print(f"{'':6}{'gold at its best':>30}{'at the end':>25}")
    print(f"{'beta':>6}{'step':>9}{'d':>7}{'proxy':>7}{'gold':>7}{'d':>11}{'proxy':>7}{'gold':>7}")
    for beta, run in result.runs.items():
        best, last = best_point(run), run[-1]
        print(f"{beta:6.2f}{best.step:9}{best.d:7.2f}{best.proxy:7.2f}{best.gold:7.2f}"
              f"{last.d:11.2f}{last.proxy:7.2f}{last.gold:7.2f}")


def show_fits(result):
    """The two forms of Gao et al. 2022, with where they turn down."""
    title("Gold over d, the two forms of Gao et al. 2022 by least squares")
    for name, (alpha, beta, r2) in result.fits.items():
        print(f"{name:10} {FORMS[name][0]:24} alpha {alpha:6.2f}  beta {beta:6.2f}  R^2 {r2:5.2f}"
              f"  largest at d = {peak(alpha, beta, name):.2f}")


def show_signs(result):
    """Step by step at beta 0: what can be seen without the judge, beside what he feels."""
    title("Early signs at beta 0: the last three columns; the gold is not seen")
    print(f"{'step':>6}{'d':>7}{'proxy':>8}{'gold':>8}{'words':>8}{'split':>8}{'right':>8}")
    for p in result.runs[0.0]:
        print(f"{p.step:6}{p.d:7.2f}{p.proxy:8.2f}{p.gold:8.2f}{p.length:8.1f}{p.split:8.0%}"
              f"{p.right:8.0%}")
    print("split: pairs of its samples that the three reward models do not order alike (by chance"
          "\n75 %); right: pairs that the first orders as the judge does: takes new preferences")


def show_cures(result):
    """PPO going on from the end of beta 0, with and without new preferences."""
    title(f"PPO goes on at beta 0, {ROUNDS} rounds of {ROUND} steps, each after new preferences")
    before = result.runs[0.0][-1]
    print(f"{'new preferences':34}{'d':>7}{'proxy':>8}{'gold':>8}{'words':>8}\n{'before':34}"
          f"{before.d:7.2f}{before.proxy:8.2f}{before.gold:8.2f}{before.length:8.1f}")
    for name, points in result.cures.items():
        p = points[-1]
        print(f"{name:34}{p.d:7.2f}{p.proxy:8.2f}{p.gold:8.2f}{p.length:8.1f}")


def show_seeds(seeds):
    """The decisive figures, a line a seed."""
    title("Seed by seed, PPO at beta 0: at the reference, at the best gold, at the end; the cure")
    print(f"{'':5}{'gold':>12}{'proxy':>14}{'words':>17}{'split':>16}{'gold after the rounds':>25}"
          f"{'best-of-n':>11}")
    print(f"{'seed':>5}{'best   end':>12}{'best   end':>14}{'ref best  end':>17}"
          f"{'ref best  end':>16}{'none':>9}{'ref.':>8}{'policy':>8}{'best':>6}{SIZES[-1]:>5}")
    for seed in range(seeds):
        r = study(seed)
        late = best_point(r.runs[0.0]), r.runs[0.0][-1]
        print(f"{seed:5}" + "".join(f"{p.gold:6.2f}" for p in late) + "  "
              + "".join(f"{p.proxy:6.2f}" for p in late) + "  "
              + "".join(f"{p.length:5.1f}" for p in (r.start, *late)) + " "
              + "".join(f"{p.split:5.0%}" for p in (r.start, *late)) + " "
              + "".join(f"{points[-1].gold:8.2f}" for points in r.cures.values())
              + f"{r.best_of_n[:, 2].max():6.2f}{r.best_of_n[-1, 2]:5.2f}", flush=True)


def draw_over_d(axes, result):
    """Gold with the fitted forms, and proxy, over d: a dot a policy."""
    d = np.sqrt(result.best_of_n[:, 0].clip(0))
    for axis, column, name in ((axes[0], 2, "gold"), (axes[1], 1, "proxy")):
        for beta, run in result.runs.items():
            axis.plot([p.d for p in run], [getattr(p, name) for p in run], "o", ms=5, alpha=0.8,
                      label=f"PPO, beta {beta:g}")
        axis.plot(d, result.best_of_n[:, column], "ks", ms=4, label="best-of-n")
        axis.set(xlabel="d = sqrt(KL to the reference in nats)")
    ends = {"best-of-n": d.max(), "PPO": max(p.d for p in result.runs[0.0])}
    for name, style in (("best-of-n", "k-"), ("PPO", "k--")):
        x = np.linspace(0.01, ends[name], 200)
        alpha, beta, _ = result.fits[name]
        axes[0].plot(x, alpha * x + beta * FORMS[name][1](x), style, lw=1,
                     label=f"{name}: {FORMS[name][0]}")
    axes[0].set(ylabel="gold over the reference's, the judge's points")
    axes[1].set(ylabel="proxy, standard deviations of the reference's")


def draw(result, file):
    """Gold and proxy over d; the signs over the steps of beta 0."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(16, 4.8))
    draw_over_d(axes, result)
    run = result.runs[0.0]
    steps = [p.step for p in run]
    for name, figures in (("gold (not seen), points", [p.gold for p in run]),
                          ("proxy, standard deviations", [p.proxy for p in run]),
                          ("words less the reference's", [p.length - run[0].length for p in run]),
                          ("split, of ten pairs", [10 * p.split for p in run])):
        axes[2].plot(steps, figures, "o-", ms=4, label=name)
    axes[2].set(xlabel="PPO steps at beta 0", ylabel="in the units of the legend")
    for axis in axes:
        axis.axhline(0, color="0.8", lw=1, zorder=0)
        axis.legend(fontsize=8)
    save_plot(figure, file)


def main():
    """One seed in full, or the decisive figures of several."""
    parser = Parser(description="Gold against proxy as a policy is optimised, and the cure.")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the run (default 0)")
    parser.add_argument("--seeds", type=at_least(1), help="instead: a line for each of so many")
    args = parse_plot(parser, "gold and proxy over sqrt(KL)")
    if args.seeds:
        return show_seeds(args.seeds)
    result = study(args.seed)
    for show in (show_best_of_n, show_runs, show_fits, show_signs, show_cures):
        show(result)
    if args.plot:
        draw(result, args.plot)


if __name__ == "__main__":
    main()
