"""Which estimate of the KL is right, and may a term that is sometimes negative be clipped?

    python examples/kl_estimators.py
    python examples/kl_estimators.py --plot FILE     mean and deviation as the policy climbs

On the toy of gradient_audit.py all 40 responses are listed, so the mean, the deviation and the sign
of every estimate are sums, not samples; d = log pi - log pi_ref. Eight steps up the KL is .8401
nats a response. k1 = d says .8401 too, though 33.5 % of its tokens are negative: signed, it is
right, with a deviation of 1.27. k3 is right and scatters less (.38); k2 is 4 % off. The full sum
over the vocabulary at each state met is right and scatters least (.25). Of the summed ratio k2 is
39 % off. |d| says 2.03, d^2 1.75, d cut at 0 says 1.44: the chapter's warning in numbers. Further
out k3 loses its advantage: its deviation grows past k2's (see --plot).

As a *reward* only the signed d has pi* as its resting place (100.0 % of the best J). A charge that
stays the same, or rises, when a response becomes rare takes away the refund that would hold it:
32 of 40 responses are given up (log pi/pi_ref under -20) when d is cut at 0, made absolute, squared
or replaced by k3, and J ends at 80 to 94 % of the best. Clipping d to +-.5 switches the KL off
beyond: one response is left, at 71 %. k3 is a fine number to watch and a poor reward.
"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402
from common import (Parser, climb, list_responses, mean_given, parse_plot,  # noqa: E402
                    pyplot, save_plot, title)

BETA, KINDS = 0.5, ("k1", "k2", "k3", "abs")


def estimates(L):
    """name -> what each token of each response pays (R, N); the mean under the policy is to be KL.

    "full" is the KL of the whole distribution at each state met, a sum over the vocabulary:
    E[log pi - log pi_ref | state].
    """
    rows = {kind: t.kl_estimates(L.logp, L.logp_ref, kind) for kind in KINDS}
    changed = {"k1 cut at 0": np.maximum(rows["k1"], 0), "k1 squared": rows["k1"] ** 2}
    return rows | {"full": mean_given(L.state, rows["k1"], L)} | changed


def summary(x, weight, exact):
    """Mean, bias, standard deviation and share below zero of x under normalised weights."""
    weight = weight / weight.sum()
    mean = (weight * x).sum()
    std = np.sqrt((weight * (x - mean) ** 2).sum())
    below = (weight * (x < -1e-12)).sum()
    return f"{mean:9.4f}{mean / exact - 1:+9.1%}{std:9.4f}{below:10.1%}"


def estimator_table(L, name):
    """Each estimate against the exact KL, per token and per response."""
    d = (L.logp - L.logp_ref).sum(axis=1)
    kl, weight = L.p @ d, L.p[:, None] * L.mask
    per_token = kl / weight.sum()  # over all tokens met
    print(f"\n{name}: exact KL {kl:.4f} nats a response, {per_token:.4f} a token met")
    head = f"{'mean':>9}{'off by':>9}{'std':>9}{'negative':>10}"
    print(f"{'':24}{'per token:':37}  per response:\n{'':24}{head}  {head}")
    tokens = estimates(L)
    whole = {kind: t.kl_estimates(d, 0 * d, kind) for kind in KINDS}
    for kind, x in tokens.items():
        summed = summary(x.sum(axis=1), L.p, kl)
        print(f"  {kind:22}{summary(x, weight, per_token)}  {summed}")
    for kind in KINDS[1:]:
        print(f"  {kind + ' of the whole':22}{'':39}{summary(whole[kind], L.p, kl)}")


CHANGED = {
    "log-ratio as it is (k1)": lambda d: d,
    "negative set to 0": lambda d: np.maximum(d, 0),
    "clipped to +-.5": lambda d: np.clip(d, -0.5, 0.5),
    "clipped to +-2": lambda d: np.clip(d, -2, 2),
    "absolute value": np.abs,
    "squared (2 k2)": np.square,
    "k3": lambda d: t.kl_estimates(d, 0 * d, "k3"),
}


def resting_policy(L, charge):
    """Exact policy-gradient ascent, one logit a response, reward r - beta charge(log-ratio).

    The charge is a constant while the gradient is taken, as in PPO: log pi moves by its advantage.
    """
    logp_ref, r = L.logp_ref.sum(axis=1), L.scores
    logp = logp_ref.copy()
    for _ in range(4000):
        reward = r - BETA * charge(logp - logp_ref)
        logp = np.maximum(logp + 0.02 * (reward - np.exp(logp) @ reward), -700)
        logp -= np.log(np.exp(logp).sum())
    return logp


def as_reward_table(L):
    """What each charge for a response's log-ratio makes of the policy in the end."""
    title("As the reward: r - beta charge, climbed exactly, one logit a response, until it rests")
    logp_ref, r = L.logp_ref.sum(axis=1), L.scores
    J_ref = np.exp(logp_ref) @ r
    best = BETA * np.log(np.exp(logp_ref + r / BETA).sum()) - J_ref
    print(f"{'charge, of the response':28}{'E[charge]':>10}{'score':>8}{'KL':>8}{'J':>8}"
          f"{'of best':>9}{'given up':>12}")
    for name, charge in CHANGED.items():
        logp = resting_policy(L, charge)
        p, d = np.exp(logp), logp - logp_ref
        J = p @ (r - BETA * d)
        print(f"{name:28}{p @ charge(d):10.3f}{p @ r:8.3f}{p @ d:8.3f}{J:8.3f}"
              f"{(J - J_ref) / best:9.1%}{(d < -20).sum():6} of {len(d)}")


def draw(path, file):
    """The mean of each estimate of a response's KL beside the exact one, as the policy climbs."""
    plt, ref = pyplot(), path[0]
    lists = [list_responses(policy, ref, 3) for policy in path]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    for kind in (*KINDS, "full"):
        sums = [estimates(L)[kind].sum(axis=1) for L in lists]
        mean = [L.p @ x for L, x in zip(lists, sums)]
        std = [np.sqrt(L.p @ (x - m) ** 2) for L, x, m in zip(lists, sums, mean)]
        axes[0].plot(mean, label=kind)
        axes[1].plot(std, label=kind)
    axes[0].plot([L.p @ (L.logp - L.logp_ref).sum(axis=1) for L in lists], "k:", label="exact KL")
    for axis, name in zip(axes, ("mean", "standard deviation")):
        axis.set(xlabel="steps up from the reference", ylabel=f"{name}, nats a response")
        axis.legend()
    save_plot(figure, file)


def main():
    """Two policies, one near the reference and one far; then each charge as a reward."""
    parser = Parser(description="Estimates of the KL against the exact one.")
    args = parse_plot(parser, "mean and deviation along a climb")
    ref, path = climb(4, 3, BETA, 20)
    title("Sampled from the policy: what an estimate says on average, and how it scatters")
    for steps in (1, 8):
        estimator_table(list_responses(path[steps], ref, 3), f"{steps} steps up from the reference")
    as_reward_table(list_responses(ref, ref, 3))
    if args.plot:
        draw(path, args.plot)


if __name__ == "__main__":
    main()
