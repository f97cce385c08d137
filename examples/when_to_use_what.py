"""PPO, GRPO, DPO, best of K or REINFORCE: which gets how far with the same tokens and what memory?

    python examples/when_to_use_what.py                 five seeds of each method
    python examples/when_to_use_what.py --plot FILE     the same, drawn against the frontier
    python examples/when_to_use_what.py --seeds 10      more seeds

Each method starts from the same reference, may sample 30,000 tokens and is to maximise
E[score] - .5 KL. All 3,906 responses are listed, so each end is placed exactly: beside the best
score possible at its KL (the frontier, pi* = pi_ref exp(r / beta) / Z over all beta), and as a
share of the way from the reference's J to the best one. Each has the learning rate that did best
for it on seeds 10 and 11 (best of 16 has that of 64).

- PPO comes nearest, in five seeds of five: 99.3 % of the optimum (median), .005 below the frontier.
  It needs all four models, 252 GB at 7B, and twice the seconds of REINFORCE.
- REINFORCE with the batch's mean as baseline has 98.1 % with one model to train, at 140 GB: with
  responses of five tokens a critic has little credit to assign. That is the toy, not a law.
- Iterated DPO has 96.0 % from one noisy bit a pair, without a score, a critic or a reward model.
- GRPO has 90.5 %: it does not miss the frontier by more than DPO, it stops elsewhere on it.
  Dividing by the group's deviation, 1.31 in the end, turns beta .5 into .66; the best KL at that
  price is 1.69 nats, GRPO ends at 1.74 (1.54 to 1.98). Without the division it has 96.6 %.
- Best of 64, then SFT, needs no RL at all and has 84.0 %: 30,000 tokens leave some 130 winners.

Best of K itself, by enumeration: log K - (K-1)/K is an upper bound on its KL (Beirami et al. 2024).
At K = 4 it is .636 nats; so is the KL if no two scores are equal; ties, the rule with a score that
counts words, leave .546. Its score is .06 to .18 below the best possible at the same KL.
"""
import sys
import time
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import estimator as e  # noqa: E402
import tinyrlhf as t  # noqa: E402
from common import (EOS, PROMPT, Parser, at_least, count_good, imitate, parse_plot,  # noqa: E402
                    pyplot, save_plot, title, winners)
from exact_optimum import LENGTH, VOCAB, best_score_at, exact, frontier  # noqa: E402

BETA, TOKENS = 0.5, 30_000


# ------------------------------------------------------------------ the five methods

@dataclass
class Run:
    """What every method gets: a policy, its frozen start, a generator, tokens it may sample."""
    policy: t.TinyCausalLM
    ref: t.TinyCausalLM
    rng: np.random.Generator
    tokens: int = TOKENS
    beta: float = BETA

    def batches(self, rows=64, critic=lambda tokens: np.zeros(tokens.shape)):
        """Fresh rollouts of the policy as it then is, with scores (B,), until the tokens are spent.

        Its log-probs are 0 outside the response, so that sums over a row are sums over it.
        """
        while self.tokens > 0:
            roll = t.collect_rollouts(self.policy, self.ref, critic, [PROMPT] * rows, LENGTH, EOS,
                                      rng=self.rng)
            roll.logp_ref = roll.logp_ref * roll.mask
            self.tokens -= int(roll.mask.sum())
            yield roll, count_good(roll.tokens[:, 1:], roll.mask)

    def logp(self, roll):
        """log pi of the rollout's tokens under the policy as it is -> Tensor (B, T-1)."""
        return t.token_log_probs(self.policy(roll.tokens), roll.tokens) * roll.mask


def descend(opt, loss):
    """One step of Adam down a loss."""
    opt.zero_grad()
    loss.backward()
    opt.step()


def ppo(run):
    """Advantages from a critic, the KL in the reward, two epochs of the clipped loss."""
    critic = t.TinyCritic(run.policy.cfg, run.rng)
    opt = t.Adam(run.policy.parameters() + critic.parameters(), 3e-3)
    for roll, scores in run.batches(critic=critic):
        t.ppo_update(run.policy, critic, opt, roll, scores, run.beta, rng=run.rng)


def grpo(run, group=8, scale=True):
    """Advantages from the group: (r - mean) / std, one for all tokens of a response; k3 as a loss.

    scale=False leaves the division out. Shao et al. 2024; tokens are averaged over the batch.
    """
    opt = t.Adam(run.policy.parameters(), 3e-3)
    for roll, scores in run.batches():
        r = scores.reshape(-1, group)
        A = r - r.mean(axis=1, keepdims=True)
        A = A / (r.std(axis=1, keepdims=True) + 1e-8) if scale else A
        A = A.reshape(-1, 1) * roll.mask  # (B, T-1)
        for _ in range(2):
            logp = run.logp(roll)
            k3 = t.kl_estimates(logp, roll.logp_ref, "k3").sum() / roll.mask.sum()
            surrogate, _ = t.ppo_clip_loss(logp, roll.logp_old, A, roll.mask, 0.2)
            descend(opt, surrogate + run.beta * k3)


def reinforce(run):
    """(R - mean R) grad log pi of a response, R = r - beta log(pi / pi_ref); one step a batch."""
    opt = t.Adam(run.policy.parameters(), 1e-2)
    for roll, scores in run.batches():
        R = scores - run.beta * (roll.logp_old - roll.logp_ref).sum(axis=1)  # (B,)
        weight = (R - R.mean()) / len(R)
        descend(opt, -(run.logp(roll) * weight[:, None]).sum())


def iterated_dpo(run, rows=256):
    """Rounds of fresh pairs; a noisy judge names the better, the scores stay with the judge.

    loss = -log sigmoid(beta (d_better - d_worse)), d = log pi / pi_ref; four epochs a round.
    """
    opt = t.Adam(run.policy.parameters(), 1e-3)
    for roll, scores in run.batches(rows):
        p_first = 1 / (1 + np.exp(scores[1::2] - scores[::2]))  # Bradley and Terry
        first = run.rng.random(rows // 2) < p_first
        better = np.arange(0, rows, 2) + ~first
        worse = np.arange(0, rows, 2) + first
        for _ in range(4):
            reward = run.beta * (run.logp(roll) - roll.logp_ref).sum(axis=1)  # the implied one
            descend(opt, t.reward_model_loss(reward[better], reward[worse]))


def best_of_k(run, k=64):
    """One shot: every token is the reference's; the best of each k responses is imitated."""
    rolls = [(roll.tokens, np.pad(roll.mask, ((0, 0), (1, 0))), scores)
             for roll, scores in run.batches()]
    tokens, token_mask, scores = map(np.concatenate, zip(*rolls))
    best = winners(scores[:len(scores) // k * k], k)
    imitate(run.policy, tokens[best], token_mask[best], 3e-3, 100, run.rng)


HELD = e.four_models(7e9, 7e9, 7e9)  # bytes at 7B: trained models 16 a parameter, frozen ones 2
Method = namedtuple("Method", "run holds learns_from")
METHODS = {  # holds: the models in memory while it learns
    "PPO": Method(ppo, list(HELD), "scores"),
    "GRPO, groups of 8": Method(grpo, ["policy", "reference", "reward model"], "scores"),
    "GRPO, not over std": Method(lambda run: grpo(run, scale=False),
                                 ["policy", "reference", "reward model"], "scores"),
    "REINFORCE": Method(reinforce, ["policy", "reference", "reward model"], "scores"),
    "iterated DPO": Method(iterated_dpo, ["policy", "reference"], "one bit for 2 responses"),
    "best of 16, SFT": Method(lambda run: best_of_k(run, 16), ["policy", "reward model"],
                              "1 response of 16"),
    "best of 64, SFT": Method(best_of_k, ["policy", "reward model"], "1 response of 64")}


# ------------------------------------------------------------------ measured and exact

Result = namedtuple("Result", "exact best seconds")


def measure(method, seed, tokens=TOKENS):
    """One run from this seed's reference -> exact figures, the best score at its KL, seconds."""
    rng = np.random.default_rng(seed)
    cfg = t.ToyLMConfig(VOCAB, len(PROMPT) + LENGTH, d_model=16, n_layers=1, dtype="float64")
    policy = t.TinyCausalLM(cfg, rng)
    run = Run(policy, policy.frozen_copy(), rng, tokens)
    began = time.perf_counter()
    method.run(run)
    seconds = time.perf_counter() - began
    result = exact(run.policy, run.ref, BETA)
    return Result(result, best_score_at(result, result.kl), seconds)


def best_of_k_policy(p, r, k):
    """Probability (R,) of each response to be the best of k drawn from p; ties go to any of them.

    p_k(y) = p(y) (F^k - (F - m)^k) / m: m is the mass of its score r(y), F that of scores <= r(y).
    """
    level = np.unique(r, return_inverse=True)[1].ravel()
    mass = np.bincount(level, p)
    at_most = np.cumsum(mass)
    below = np.maximum(at_most - mass, 0)
    return p * ((at_most**k - below**k) / mass)[level]


def kl_bound(k):
    """log k - (k - 1) / k, for a score without ties and responses that are each unlikely."""
    return np.log(k) - (k - 1) / k


def kl_of(q, p):
    """KL(q || p) of two lists of probabilities."""
    return float(np.sum(q * np.log(np.where(q > 0, q, 1) / p)))


# ------------------------------------------------------------------ printed

def result_table(results):
    """Medians over the seeds; the two outer figures of the fraction of the optimum."""
    title(f"{TOKENS:,} sampled tokens each, beta {BETA}: medians of {len(results['PPO'])} seeds, "
          "exact figures")
    print(f"{'':20}{'score':>8}{'KL':>8}{'best score at':>15}{'short':>8}{'J of the optimum':>20}\n"
          f"{'':20}{'':8}{'nats':>8}{'that KL':>15}{'by':>8}{'median':>9}  (least, most)")
    for name, runs in results.items():
        score, kl, best, short = np.median(
            [(x.reward, x.kl, best, best - x.reward) for x, best, _ in runs], axis=0)
        J = [100 * run.exact.fraction for run in runs]
        print(f"{name:20}{score:8.2f}{kl:8.2f}{best:15.2f}{short:8.3f}{np.median(J):8.1f}%  "
              f"({min(J):.1f}, {max(J):.1f})")


def order_lines(results):
    """In how many seeds one method ends nearer to the optimum than another."""
    print("\nNearer to the optimum, in how many seeds:")
    for a, b in (("PPO", "REINFORCE"), ("REINFORCE", "iterated DPO"),
                 ("iterated DPO", "GRPO, groups of 8"),
                 ("GRPO, not over std", "GRPO, groups of 8"),
                 ("GRPO, groups of 8", "best of 64, SFT")):
        wins = sum(x.exact.fraction > y.exact.fraction for x, y in zip(results[a], results[b]))
        print(f"  {wins} of {len(results[a])}: {a} before {b}")


def price_line(runs):
    """What dividing by the group's deviation does to the price of KL."""
    found = []
    for x, _, _ in runs:
        p, scores = np.exp(x.logp), (x.tokens == 2).sum(axis=1)
        std = np.sqrt(p @ scores**2 - (p @ scores)**2)
        found.append((std, BETA * std, frontier(x, BETA * std)[0], x.kl))
    std, price, kl, got = np.median(found, axis=0)
    print(f"\nGRPO divides the score by its deviation, {std:.2f} in the end: beta {BETA} acts like "
          f"{price:.2f}. The best policy\nat that price has a KL of {kl:.2f} nats; GRPO has "
          f"{got:.2f} (medians).")


def cost_table(results):
    """Seconds of the runs, models in memory, what they hold at 7B, what is learnt from."""
    title("What it costs: seconds here, models in memory, GB at 7B (trained 16 B, frozen 2)")
    print(f"{'':20}{'seconds':>9}{'policy':>8}{'ref':>5}{'critic':>8}{'reward':>8}{'GB':>7}"
          "   learns from")
    for name, (_, holds, source) in METHODS.items():
        seconds = np.median([run.seconds for run in results[name]])
        count = [int(model in holds) for model in ("policy", "reference", "critic", "reward model")]
        size = sum(HELD[model] for model in holds) / 1e9
        print(f"{name:20}{seconds:9.1f}" + "{:8}{:5}{:8}{:8}".format(*count)
              + f"{size:7.0f}   {source}")
    print("Rollouts, caches and activations come on top. The judge that labels DPO's pairs is not "
          "counted.")


def best_of_k_table(x):
    """Best of K as a policy, by enumeration over the reference's responses, no training."""
    title("Best of K itself, exactly: its KL from the reference, in nats, and its score")
    print(f"{'':6}{'':8}{'log K -':>10}{'KL, no':>10}{'KL, ties':>10}{'':9}{'best score':>12}\n"
          f"{'K':>6}{'log K':>8}{'(K-1)/K':>10}{'two equal':>10}{'as here':>10}{'score':>9}"
          f"{'at that KL':>12}{'short by':>10}")
    p, r = np.exp(x.logp_ref), (x.tokens == 2).sum(axis=1)
    untied = r + np.arange(len(r)) / len(r)  # the same order, equals put in one
    for k in (2, 4, 16, 64, 256):
        tied, strict = best_of_k_policy(p, r, k), best_of_k_policy(p, untied, k)
        kl, score = kl_of(tied, p), tied @ r
        best = best_score_at(x, kl)
        print(f"{k:6}{np.log(k):8.3f}{kl_bound(k):10.3f}{kl_of(strict, p):10.3f}{kl:10.3f}"
              f"{score:9.3f}{best:12.3f}{best - score:10.3f}")
    print("The bound is met where no two scores are equal and no response is likely; ties stay "
          "below it.")


def draw(results, file):
    """Seed 0 against its frontier; then every seed's distance from its own."""
    plt, x = pyplot(), results["PPO"][0].exact
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5))
    left.plot(*zip(*(frontier(x, beta) for beta in np.geomspace(0.2, 50, 200))), "k-",
              label="best possible (exact)")
    p, r = np.exp(x.logp_ref), (x.tokens == 2).sum(axis=1)
    best_of = [best_of_k_policy(p, r, k) for k in np.unique(np.geomspace(1, 512, 60).astype(int))]
    left.plot([kl_of(q, p) for q in best_of], [q @ r for q in best_of], "k:",
              label="best of K itself (exact), K to 512")
    for (name, runs), marker in zip(results.items(), "os^vDXP"):
        left.plot(runs[0].exact.kl, runs[0].exact.reward, marker, label=name)
        right.plot([run.exact.kl for run in runs],
                   [run.best - run.exact.reward for run in runs], marker, label=name)
    nats = "KL(policy || reference), nats a response"
    left.set(xlabel=nats, ylabel="mean score", title="seed 0")
    right.set(xlabel=nats, ylabel="score below the best possible at that KL", yscale="log",
              title=f"all {len(runs)} seeds, each against its own frontier")
    left.legend(loc="lower right")
    right.legend(fontsize="small")
    save_plot(figure, file)


def main():
    """Every method on every seed; the tables; best of K by enumeration."""
    parser = Parser(description="PPO, GRPO, DPO, best of K, REINFORCE with equal tokens.")
    parser.add_argument("--seeds", type=at_least(1), default=5, help="so many (default 5)")
    args = parse_plot(parser, "every method against the frontier")
    print(f"{len(METHODS) * args.seeds} runs of a second or so each", flush=True)
    results = {name: [measure(method, seed) for seed in range(args.seeds)]
               for name, method in METHODS.items()}
    result_table(results)
    order_lines(results)
    price_line(results["GRPO, groups of 8"])
    cost_table(results)
    best_of_k_table(results["PPO"][0].exact)
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    main()
