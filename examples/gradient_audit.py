"""Which policy gradient is right? Every estimator against the exact gradient of J.

    python examples/gradient_audit.py

A toy has 40 responses (4 tokens, up to 3 a response), so J = E[score] - beta KL is a finite sum
and autograd through it gives grad J to rounding. An estimator is a weight on each sampled token's
grad log pi; its mean and variance are summed over every response, or every batch of B of them.
bias is |E[g] - grad J| / |grad J|, length |E[g]| / |grad J|, variance B times that of a batch's g,
in units of |grad J|^2; responses is how many make the noise of their mean as long as the signal.

the score function                                    B    bias  cosine  length variance  responses
  whole return on every token                         1   0.000  1.0000   1.000    31.18       31.2
  reward-to-go                                        1   0.000  1.0000   1.000    41.88       41.9
  reward-to-go, gradient through the KL reward too    1   0.000  1.0000   1.000    22.21       22.2
  reward-to-go minus a constant, the mean return      1   0.000  1.0000   1.000     9.82        9.8
  exact critic, lambda 1                              1   0.000  1.0000   1.000     2.01        2.0
  exact critic, lambda .95                            1   0.000  1.0000   1.000     1.97        2.0
  exact critic, A_t = R_t - V_t, as the lesson lists  1   1.979 -0.9096   1.025    14.19       13.5
the score by REINFORCE, the KL as a loss              B    bias  cosine  length variance  responses
  k1 of each token                                    1   1.622  0.9297   2.509    25.79        4.1
  k2 of each token                                    1   0.162  0.9870   1.006    51.96       51.4
  k3 of each token                                    1   0.252  0.9726   0.875    68.46       89.3
  abs of each token                                   1   0.649  0.7767   0.620    54.67      142.0
  k1 of the whole response                            1   1.622  0.9297   2.509    25.79        4.1
  k2 of the whole response                            1   0.000  1.0000   1.000    31.18       31.2
  k3 of the whole response                            1   0.283  0.9850   1.209    64.62       44.2
  abs of the whole response                           1   0.752  0.9740   1.691    36.87       12.9
means over tokens, not sums                           B    bias  cosine  length variance  responses
  exact critic, mean over each response               1   0.574  0.9475   0.471     0.86        3.9
  exact critic, mean over the tokens of the batch     2   0.613  0.9926   0.391     0.46        3.0
  the same by ppo_clip_loss at ratio 1                2   0.613  0.9926   0.391     0.46        3.0
  reward-to-go, mean over tokens                      2   0.686  0.9877   0.320     5.51       53.9
  reward-to-go minus a constant, over tokens          2   0.617  0.9938   0.387     1.46        9.8
baseline and scale from the batch                     B    bias  cosine  length variance  responses
  whole return minus the batch mean                   2   0.500  1.0000   0.500     2.28        9.1
  whole return minus the batch mean                   3   0.333  1.0000   0.667     2.90        6.5
  whole return minus the mean of the others           2   0.000  1.0000   1.000     9.14        9.1
  exact critic, whitened in the batch                 1   1.095  0.9633   2.025    17.48        4.3
  exact critic, whitened in the batch                 2   1.377  0.9965   2.371    16.56        2.9
  exact critic, whitened in the batch                 3   1.503  0.9989   2.502    15.51        2.5
  exact critic, whitened by moments of everything     1   1.739  1.0000   2.739    15.11        2.0
  PPO as shipped: whitened, mean over tokens          2   0.134  0.9985   0.877     2.42        3.1
one step stale                                        B    bias  cosine  length variance  responses
  recorded: ratio of each token, no clip              1   0.073  0.9994   1.064     1.93        1.7
  recorded: ratio of each token, clipped at .2        1   0.073  0.9994   1.064     1.93        1.7
  recorded for the ratio, KL reward of today          1   0.020  1.0000   0.981     1.79        1.9
  recomputed: every ratio 1                           1   0.025  0.9998   1.015     2.07        2.0
  recorded: ratio of the response, KL of today        1   0.000  1.0000   1.000     1.74        1.7
four steps stale                                      B    bias  cosine  length variance  responses
  recorded: ratio of each token, no clip              1   0.368  0.9870   1.318     1.95        1.1
  recorded: ratio of each token, clipped at .2        1   0.566  0.8992   0.541     0.56        1.9
  recorded for the ratio, KL reward of today          1   0.112  0.9996   0.891     1.27        1.6
  recomputed: every ratio 1                           1   0.131  0.9921   1.030     2.22        2.1
  recorded: ratio of the response, KL of today        1   0.000  1.0000   1.000     1.32        1.3

What surprises:

- The KL as a constant reward has exactly grad J: no gradient need flow through log pi in R_t.
- Where it does flow, as in the lesson's listing, each token gains -beta grad log pi, whose mean is
  0: no bias. Here it even acts as a baseline and lowers the variance.
- Reward-to-go has more variance than the whole return: near the optimum r - beta log(pi/pi_ref) is
  almost one number for all responses, but what is left of it after a token is not.
- A_t = R_t - V_t credits a token with its own reward only: the score reaches the last token
  alone, and the mean gradient points downhill.
- k1 as a loss has no gradient on average: the row is grad E[score], as if beta were 0. k2 of the
  whole response, biased as a number, has exactly grad KL; of each token it forgets that a token
  changes which states come later. k3, unbiased as a number, pushes along KL(pi_ref || pi).
- A mean over each response or over a batch's tokens divides by a length that the tokens chose:
  the direction turns, and a constant baseline is no longer free (.9877 against .9938). PPO's first
  epoch is the mean over tokens, to the last digit.
- The batch mean shrinks the gradient by 1 - 1/B and turns nothing; leave-one-out does not shrink.
- Whitening in small batches does turn it (.963, .9965, .9989 for 1, 2, 3 rows); in large ones it
  only rescales. Exercise 3 below: beside a KL loss it also moves the fixed point, at beta .5 so far
  that no price is left and the policy collapses on the best response.
- Stale responses with recorded log-probs are charged the old policy's KL, which was smaller: that,
  not the ratio, is most of the bias (.368 against .112 with today's KL). The rest is the prefix,
  whose ratio a token's ratio leaves out; the whole response's ratio leaves nothing. Recomputed
  log-probs have the right KL and no ratio: their length is right, their direction is not (.9921
  against .9996). The clip pays most bias (.566), for the least variance.
"""
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402
from common import (PROMPT, Parser, climb, exact_J, flat_grad, list_responses,  # noqa: E402
                    mean_given, moments, score_table, title)

BETA, STEPS = 0.5, 8  # the policy stands 8 steps of Adam up from the reference


def uphill(loss_of, logp):
    """-d loss / d logp: the weights with which a shipped loss pushes each token up."""
    leaf = t.Tensor(logp, requires_grad=True)
    loss_of(leaf).backward()
    return -leaf.grad


def first_epoch(L, rows, advantages, old, clip_eps=0.2):
    """The weights of PPO's first epoch on some rows: the shipped loss, a mean over their tokens."""
    return uphill(lambda logp: t.ppo_clip_loss(
        logp, old[rows], advantages, L.mask[rows], clip_eps)[0], L.logp[rows])


# ------------------------------------------------------------------ the estimators
# Each function yields (name, weights (R, N) or a function of a batch's rows, batch size, p).


def by_score_function(L, R, togo, V):
    """REINFORCE and its baselines; R (R, N) are the shaped rewards, V the values of the policy."""
    gae = lambda lam: t.gae(R, V, L.mask, 1.0, lam)[0]
    yield "whole return on every token", togo[:, :1] * L.mask
    yield "reward-to-go", togo
    yield "reward-to-go, gradient through the KL reward too", togo - BETA * L.mask
    yield "reward-to-go minus a constant, the mean return", togo - V[0, 0] * L.mask
    yield "exact critic, lambda 1", gae(1.0)
    yield "exact critic, lambda .95", gae(0.95)
    yield "exact critic, A_t = R_t - V_t, as the lesson lists", R - V


def kl_as_loss(L):
    """The score by REINFORCE, and beta times a shipped estimate of the KL as a loss beside it."""
    score, ref = L.scores[:, None] * L.mask, L.logp_ref
    for kind in ("k1", "k2", "k3", "abs"):
        loss = lambda logp: t.kl_estimates(logp, ref, kind).sum() * BETA
        yield f"{kind} of each token", score + uphill(loss, L.logp) * L.mask
    for kind in ("k1", "k2", "k3", "abs"):
        loss = lambda logp: t.kl_estimates(logp.sum(axis=1), ref.sum(axis=1), kind).sum() * BETA
        yield f"{kind} of the whole response", score + uphill(loss, L.logp) * L.mask


def by_aggregation(L, togo, A):
    """Mean over each response or over the tokens of a batch, in place of the sum over tokens."""
    n = L.mask.sum(axis=1, keepdims=True)
    centred = togo - (L.p @ togo[:, 0]) * L.mask
    yield "exact critic, mean over each response", A / n
    yield "exact critic, mean over the tokens of the batch", lambda r: A[r] / n[r].sum(), 2
    yield "the same by ppo_clip_loss at ratio 1", lambda r: first_epoch(L, r, A[r], L.logp), 2
    yield "reward-to-go, mean over tokens", lambda r: togo[r] / n[r].sum(), 2
    yield "reward-to-go minus a constant, over tokens", lambda r: centred[r] / n[r].sum(), 2


def whiten_by_all(L, A):
    """What whitening tends to in a large batch: mean and standard deviation under the policy."""
    share = L.p[:, None] * L.mask / (L.p @ L.mask).sum()  # how often a token is met
    mean = (share * A).sum()
    return (A - mean) / math.sqrt((share * (A - mean) ** 2).sum()) * L.mask


def by_batch(L, togo, A):
    """Baseline and scale from the batch itself; sums over tokens, but for the last."""
    total, whiten = togo[:, :1], lambda r: t.whiten(A[r], L.mask[r])
    batch_mean = lambda r: (total[r] - total[r].mean()) * L.mask[r] / len(r)
    yield "whole return minus the batch mean", batch_mean, 2
    yield "whole return minus the batch mean", batch_mean, 3
    yield ("whole return minus the mean of the others",
           lambda r: (total[r] - total[r[::-1]]) * L.mask[r] / 2, 2)
    for size in (1, 2, 3):
        yield "exact critic, whitened in the batch", lambda r: whiten(r) / len(r), size
    yield "exact critic, whitened by moments of everything", whiten_by_all(L, A)
    yield ("PPO as shipped: whitened, mean over tokens",
           lambda r: first_epoch(L, r, whiten(r), L.logp), 2)


def by_stale(L, old):
    """The responses and values of a policy `old` some steps back; sums over tokens."""
    def advantages(logp):
        rewards = t.shaped_rewards(L.scores, logp, L.logp_ref, L.mask, BETA)
        returns = t.gae(rewards, 0 * rewards, L.mask, 1.0, 1.0)[0]
        return returns - mean_given(old.state, returns, old)
    then, now, n = advantages(old.logp), advantages(L.logp), L.mask.sum(axis=1, keepdims=True)
    ppo = lambda A, logp, eps: lambda r: first_epoch(L, r, A[r], logp, eps) * n[r]
    yield "recorded: ratio of each token, no clip", ppo(then, old.logp, 1e9), 1, old.p
    yield "recorded: ratio of each token, clipped at .2", ppo(then, old.logp, 0.2), 1, old.p
    yield "recorded for the ratio, KL reward of today", ppo(now, old.logp, 1e9), 1, old.p
    yield "recomputed: every ratio 1", ppo(now, L.logp, 0.2), 1, old.p
    yield "recorded: ratio of the response, KL of today", (L.p / old.p)[:, None] * now, 1, old.p


def table(heading, rows, exact, scores, p):
    """One line an estimator: bias, cosine, length and variance against the exact gradient."""
    print(f"{heading:52}  B    bias  cosine  length variance  responses")
    norm = np.linalg.norm(exact)
    for name, estimator, *rest in rows:
        size, prob = [*rest, *[1, p][len(rest):]]
        call = estimator if callable(estimator) else lambda r: estimator[r]
        mean, variance = moments(call, size, prob, scores)
        length, bias = np.linalg.norm(mean), np.linalg.norm(mean - exact) / norm
        print(f"  {name:50}{size:3}{bias:8.3f}{mean @ exact / length / norm:8.4f}"
              f"{length / norm:8.3f}{variance / norm**2:9.2f}{variance / length**2:11.1f}")


# ------------------------------------------------------------------ identities and the exercise


def identities(policy, L, scores, togo, exact):
    """What must hold to rounding: sampling gives no gradient, the score function does."""
    title("Identities: largest difference, relative to the largest entry")
    every = np.einsum("r,rn,rnd->d", L.p, L.mask, scores)
    gap = lambda a, b: np.abs(a - b).max() / np.abs(b).max()
    mean_score = lambda: (t.response_log_probs(policy, PROMPT, L.tokens, L.mask).exp()
                          * L.scores).sum()
    by_scores = lambda w: np.einsum("r,rn,rnd->d", L.p, w * L.mask, scores)
    kl = (flat_grad(mean_score(), policy) - exact) / BETA
    d = (L.logp - L.logp_ref).sum(axis=1)[:, None]
    print(f"E[sum of grad log pi] = 0                              {np.abs(every).max():8.0e}")
    print(f"E[score sum of grad log pi] = grad E[score]            "
          f"{gap(by_scores(L.scores[:, None]), flat_grad(mean_score(), policy)):8.0e}")
    print(f"grad E[score] = central differences                    "
          f"{t.grad_check(mean_score, policy.parameters()):8.0e}")
    print(f"KL as a reward, sampling policy constant: grad J       "
          f"{gap(by_scores(togo), exact):8.0e}")
    print(f"E[d sum of grad log pi] (k2 of the response) = grad KL {gap(by_scores(d), kl):8.0e}")


def exercise_3(L):
    """Where a whitened score with the KL as a loss beside it comes to rest."""
    title("Exercise 3: whitening keeps the direction (table), but not always the fixed point")
    logp_ref, r = L.logp_ref.sum(axis=1), L.scores
    print("A score over its deviation sigma, the KL a loss beside it: at rest pi is the optimum of")
    print("price = beta sigma(pi). Iterated from pi_ref, in the limit of large batches:")
    for beta in (BETA, 1.0, 2.0):
        price = beta
        for _ in range(300):
            q = np.exp(logp_ref + (r - r.max()) / price)
            q /= q.sum()
            price = max(beta * math.sqrt(q @ (r - q @ r) ** 2), 1e-3)
        print(f"  beta {beta:3.1f}   price {price:6.3f}   E[score] {q @ r:.3f} of {r.max():.3f}")


def main():
    """The table, the identities behind it, the exercise."""
    Parser(description="Every policy-gradient estimator against the exact gradient.").parse_args()
    ref, path = climb(4, 3, BETA, STEPS)
    policy = path[STEPS]
    L = list_responses(policy, ref, 3)
    exact, scores = flat_grad(exact_J(policy, ref, L, BETA), policy), score_table(policy, L)
    R = t.shaped_rewards(L.scores, L.logp, L.logp_ref, L.mask, BETA)
    togo = t.gae(R, 0 * R, L.mask, 1.0, 1.0)[0]  # with a critic of zeros and lambda 1
    V = mean_given(L.state, togo, L)
    A = togo - V
    title(f"{len(L.p)} responses, {scores.shape[2]} parameters: the gradient of J against ...")
    for heading, rows in (
            ("the score function", by_score_function(L, R, togo, V)),
            ("the score by REINFORCE, the KL as a loss", kl_as_loss(L)),
            ("means over tokens, not sums", by_aggregation(L, togo, A)),
            ("baseline and scale from the batch", by_batch(L, togo, A)),
            ("one step stale", by_stale(L, list_responses(path[STEPS - 1], ref, 3))),
            ("four steps stale", by_stale(L, list_responses(path[STEPS - 4], ref, 3)))):
        table(heading, rows, exact, scores, L.p)
    identities(policy, L, scores, togo, exact)
    exercise_3(L)


if __name__ == "__main__":
    main()
