"""The ledger: every claim of the two texts that has a number, beside the number computed here.

    python examples/hand_verify.py             the ledger, then the map's check
    python examples/hand_verify.py --map       where each of the 84 claims of the texts is seen

C is the chapter, L the lesson. "text says" is the text's value or bound, or what its own line gives
when run ("-": it gives none); "computed" comes from a call of the shipped functions. A row that
"differs", or is "shown" because the text has no number, says why in one line. A row is BROKEN, and
the exit status 1, if the computed value leaves the text's where they agree, or the right one where
they do not; or if a line of the map points to nothing.

Found: of 122 rows 77 agree, 37 differ and 8 are shown. The chapter's arithmetic is right
throughout. What differs: some statements about its own code (the early stop it lacks, recomputed
log-probs, last-epoch figures), conditions left unsaid (a token mean makes a constant baseline
biased, 0.131694 long; a rollout's keys and values take 274.878 GB), and eight faults of the
lesson's training loop.
"""
import functools
import math
import re
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HOME = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HOME))
import tinyrlhf as t  # noqa: E402
import clip_figure  # noqa: E402
import common  # noqa: E402
import exercises as ex  # noqa: E402
from common import Parser  # noqa: E402
from estimator import (ARCHS, count_params, estimate, four_models,  # noqa: E402
                       kv_bytes_per_token, lora_params)

BETA = 0.5  # of the listed toy
P7 = 7e9


@dataclass
class Row:
    """A claim: the text's value (number, "<= 0", "refused", None), the call, the right value."""
    name: str
    where: str
    claim: str
    text: object
    compute: object
    right: object = None
    why: str = ""


def holds(expected, value, exact=False):
    """Does a value meet a number (to its printed decimals, or exactly), a relation, or a word?"""
    if isinstance(expected, str):
        sign, _, bound = expected.partition(" ")
        if sign == "<=":
            return value <= float(bound)
        return value > float(bound) if sign == ">" else value == expected
    if isinstance(value, str):
        return False
    _, _, decimals = f"{expected:.10g}".partition(".")
    rounded = 0.5000001 * 10.0 ** -len(decimals)
    return abs(value - expected) <= (1e-5 if exact or not decimals else rounded)


def verdict(row, text, value):
    """agrees, differs (as it should), shown (the text has no number), or BROKEN."""
    if row.right is None:
        return "agrees" if holds(text, value) else "BROKEN"
    if text is not None and holds(text, value, exact=True):
        return "BROKEN"
    word = "shown" if text is None else "differs"
    return word if holds(row.right, value) else "BROKEN"


# ------------------------------------------------------------------ what several rows need


@functools.cache
def listed_toy():
    """40 responses (vocabulary 4, 3 tokens): reference, a policy that climbed J, the list."""
    ref, path = common.climb(4, 3, BETA, 30)
    return ref, path[-1], common.list_responses(path[-1], ref, 3)


@functools.cache
def exact(beta=BETA):
    """exact_objective of the listed toy."""
    ref, policy, _ = listed_toy()
    return t.exact_objective(policy, ref, common.PROMPT, common.count_good, 3, common.EOS, beta)


def four_tokens(beta, score=1.5):
    """R_t of the chapter's four tokens."""
    return t.shaped_rewards([score], ex.LOGP, ex.REF, ex.ONES, beta)[0]


def slope(ratio, advantage):
    """d min(r A, clip(r) A) / dr by backward."""
    return clip_figure.surrogate(ratio, advantage)[1]


def surrogate(ratio, advantage):
    """min(r A, clip(r) A)."""
    return clip_figure.surrogate(ratio, advantage)[0]


def k3(ratio):
    """r - 1 - log r."""
    return float(t.kl_estimates([0.0], [math.log(ratio)], "k3")[0])


@functools.cache
def one_update(lr=1e-3, epochs=2, target_kl=None):
    """PPOStats of one update of the near-uniform toy on one rollout of 32 rows."""
    policy, critic, prompts, rng = ex.toy(0)
    roll = t.collect_rollouts(policy, policy.frozen_copy(), critic, prompts, 8, 0, rng=rng)
    scores = common.count_good(roll.tokens, np.pad(roll.mask, ((0, 0), (1, 0))))
    cfg = t.PPOConfig(lr=lr, ppo_epochs=epochs, target_kl=target_kl)
    opt = t.Adam(policy.parameters() + critic.parameters(), lr)
    return t.ppo_update(policy, critic, opt, roll, scores, cfg.beta, cfg)


def weighted_scores(weights):
    """E[sum_t w_t grad log pi_t] over the 40 responses, w constant; weights (R, N) -> norm."""
    _, policy, listed = listed_toy()
    logp = common.token_table(policy, listed.tokens, listed.mask)
    loss = (logp * (weights * listed.mask * listed.p[:, None])).sum()
    return float(np.linalg.norm(common.flat_grad(loss, policy)))


def controller(kl, beta=0.1, target=6.0, horizon=10.0, steps=1):
    """beta after so many updates with one measured KL."""
    control = t.AdaptiveKLController(beta, target, horizon)
    for _ in range(steps):
        control.update(kl)
    return control.beta


# ------------------------------------------------------------------ the chapter, card to 2.4


def token_kl():
    """E[sum_t KL of the next-token distributions] along the responses, from whole softmaxes."""
    ref, policy, listed = listed_toy()
    prompt = np.tile(common.PROMPT, (len(listed.tokens), 1))
    rows, behind = np.concatenate([prompt, listed.tokens], axis=1), len(common.PROMPT) - 1
    with t.no_grad():
        lp, lr = (t.log_softmax(m(rows)).data[:, behind:-1] for m in (policy, ref))
    kl = (np.exp(lp) * (lp - lr)).sum(axis=2) * listed.mask  # (R, N)
    return float(listed.p @ kl.sum(axis=1))


def kl_reward_gap():
    """Largest difference: gradient of J, and of the constant KL-shaped reward times log pi."""
    ref, policy, listed = listed_toy()
    true = common.flat_grad(common.exact_J(policy, ref, listed, BETA), policy)
    logp = common.token_table(policy, listed.tokens, listed.mask)
    rewards = t.shaped_rewards(listed.scores, listed.logp, listed.logp_ref, listed.mask, BETA)
    weight = rewards.sum(axis=1) * listed.p  # (R,) a constant
    shaped = common.flat_grad((logp.sum(axis=1) * weight).sum(), policy)
    return float(np.abs(true - shaped).max())


def best_of(k):
    """KL(best of k || policy) over the 40 responses, their order a fixed shuffle without ties."""
    p = listed_toy()[2].p[np.random.default_rng(0).permutation(40)]
    upto = np.minimum(np.cumsum(p), 1)
    best = upto ** k - np.concatenate([[0], upto[:-1]]) ** k
    return float((best * np.log(best / p)).sum())


def grid_excess():
    """Largest L_clip - r A over ratios and both signs."""
    return max(surrogate(r, a) - r * a for r in np.linspace(0.05, 3, 60) for a in (1.0, -1.0))


def step_at_one():
    """Largest difference between the gradient at ratio 1 and -A / n."""
    advantages = np.array([[-0.5, 2.0, 1.0, -3.0]])
    logp = t.Tensor(ex.LOGP, requires_grad=True)
    t.ppo_clip_loss(logp, ex.LOGP, advantages, ex.ONES, 0.2)[0].backward()
    return float(np.abs(logp.grad + advantages / 4).max())


def garbage_push(vocab=100_000, good=10, share=0.99):
    """Sum of dH/dz over the logits of the tokens outside the good ten, which hold 1 %."""
    z = np.full(vocab, math.log((1 - share) / (vocab - good)))
    z[:good] = math.log(share / good)
    logits = t.Tensor(z[None, None], requires_grad=True)
    t.masked_entropy(logits, np.ones((1, 1))).backward()
    return float(logits.grad[0, 0, good:].sum())


def rollouts_to_five(step, eps=0.2):
    """Rollouts until V, from 0, is within .1 of 5; each ends where the clipped loss is flat."""
    value, rollouts = 0.0, 0
    while value < 4.9 and rollouts < 100:
        old, rollouts = value, rollouts + 1
        for _ in range(1000):
            v = t.Tensor(np.array([[value]]), requires_grad=True)
            t.value_loss(v, [[old]], [[5.0]], [[1]], eps).backward()
            value -= step * float(v.grad[0, 0])
            if v.grad[0, 0] == 0:
                break
    return rollouts


def last_step_advantage():
    """A of a response of one token: V behind it is 0."""
    return float(t.gae([[1.0]], np.array([[0.4]]), [[1]])[0][0, 0])


def baseline_by_length():
    """E[(1 / n) sum_t grad log pi]: a constant baseline under a token mean, one row a batch."""
    listed = listed_toy()[2]
    return weighted_scores(1 / listed.mask.sum(axis=1, keepdims=True))


LOTTERY = [(0, 20.0, 0.1), (0, 0.0, 0.9), (1, 1.0, 1.0)]  # E gradient by z_0 at (.5, .5) is .25

CARD = [
    Row("1a", "C card", "beta: code's default (card: .01 to .1)", 0.05,
        lambda: t.PPOConfig().beta,
        why="trap: InstructGPT used .02, Llama 2 .01; the right beta goes with the reward's scale"),
    Row("3a", "C card", "L_clip - r A at most, over a grid", "<= 1e-12", grid_excess),
    Row("3b", "C card", "slope at r = 1.21, A = 1", 0, lambda: slope(1.21, 1.0)),
    Row("3c", "C card", "eps", 0.2, lambda: t.PPOConfig().clip_eps),
    Row("4a", "C card", "gamma", 1, lambda: t.PPOConfig().gamma),
    Row("4b", "C card", "lambda", 0.95, lambda: t.PPOConfig().lam),
    Row("5a", "C card", "bytes a parameter, 2 x 16 + 2 x 2", 36,
        lambda: sum(four_models(1, 1, 1).values())),
    Row("6a", "C card", "epochs: code's default", 2, lambda: t.PPOConfig().ppo_epochs,
        why="trap: the card says 1 to 4 in one line and 1 to 2 for LMs in the next; 2 fits both"),
    Row("8a", "C card", "nats from the sampler, if PPO took the best of 4", None,
        lambda: best_of(4), "> 0.3",
        "Llama 2 combined the two in turn; PPO on selected samples would be off-policy"),
    Row("9a", "C 1", "R_1, beta .1", -0.02, lambda: float(four_tokens(0.1)[0])),
    Row("9b", "C 1", "R_2", 0, lambda: float(four_tokens(0.1)[1])),
    Row("9c", "C 1", "R_3", 0.10, lambda: float(four_tokens(0.1)[2])),
    Row("9d", "C 1", "R_4", 1.50, lambda: float(four_tokens(0.1)[3])),
    Row("9e", "C 1", "total (C ex 1)", 1.58, lambda: float(four_tokens(0.1).sum())),
    Row("10a", "C 1", "least log-ratio of a response (a refund)", "<= 0",
        lambda: float((listed_toy()[2].logp - listed_toy()[2].logp_ref).sum(axis=1).min())),
    Row("10b", "C 1", "its expectation, the KL (40 responses, exact)", "> 0", lambda: exact().kl),
]

MATH = [
    Row("12a", "C 2.1", "sequence KL - expected sum of token KLs", "<= 1e-12",
        lambda: abs(exact().kl - token_kl())),
    Row("13a", "C 2.1", "gradient: constant KL reward - exact J", "<= 1e-10", kl_reward_gap),
    Row("14a", "C 2.1", "likeliest response of pi*, beta .001", 1,
        lambda: float(np.exp(exact(0.001).logp_star.max()))),
    Row("14b", "C 2.1", "the same at beta .5: a tilt, not a delta", "<= 0.9",
        lambda: float(np.exp(exact(0.5).logp_star.max()))),
    Row("15a", "C 2.1", "J - (beta log Z - beta KL(pi || pi*))", "<= 1e-10",
        lambda: abs(exact().J - exact().J_star + BETA * float(
            np.exp(exact().logp) @ (exact().logp - exact().logp_star)))),
    Row("16a", "C 2.2", "gradient at theta_old + A / n", "<= 1e-12", step_at_one),
    Row("16b", "C 2.2", "surrogate at r = 100, A = 1, eps so large", 100,
        lambda: -float(t.ppo_clip_loss(np.log([[100.0]]), [[0.0]], [[1.0]], [[1]], 1e6)[0])),
    Row("16c", "C 2.2", "the same, eps = .2", 1.2, lambda: surrogate(100.0, 1.0)),
    Row("17a", "C 2.2", "slope at r = 1.3, A = 1", 0, lambda: slope(1.3, 1.0)),
    Row("17b", "C 2.2", "slope at r = .7, A = -1", 0, lambda: slope(0.7, -1.0)),
    Row("17c", "C 2.2", "slope at r = .7, A = 1: the wrong way", 1, lambda: slope(0.7, 1.0)),
    Row("17d", "C 2.2", "slopes left and right of r = 1.2: their gap", 0,
        lambda: slope(1.2 - 1e-6, 1.0) - slope(1.2 + 1e-6, 1.0), 1,
        "L_clip has a kink there: 1 on the left, 0 on the right; autograd takes one of them"),
    Row("17e", "C 2.2", "L_clip at r = 100, A = -1: bounded?", "> -3",
        lambda: surrogate(100.0, -1.0), -100,
        "for A < 0 there is no floor; the dual clip (c = 3) stops at -3"),
    Row("18a", "C 2.2", "KL of a token at r = 1.2: eps^2 / 2", 0.02, lambda: k3(1.2)),
    Row("18b", "C 2.2", "KL of a token at r = .8: eps^2 / 2", 0.02, lambda: k3(0.8)),
    Row("19a", "C 2.2", "k3(old, new), 8 epochs, lr .01, no early stop", "<= 0.02",
        lambda: one_update(1e-2, 8).approx_kl, "> 0.02",
        "the text describes the early stop; its code has none (here: target_kl)"),
    Row("19b", "C 2.2", "the same with target_kl = .02", "<= 0.02",
        lambda: one_update(1e-2, 8, 0.02).approx_kl),
    Row("20a", "C 2.3", "A of a last token, R = 1, V = .4", 0.6, last_step_advantage),
    Row("21a", "C 2.3", "weight of (V - G)^2 in the loss: c_v", 0.5,
        lambda: t.PPOConfig().vf_coef * float(t.value_loss([[1.0]], [[1.0]], [[0.0]], [[1]])), 0.25,
        "the 1/2 inside L_V and c_v = .5 multiply"),
    Row("21b", "C 2.3", "rollouts for V from 0 to a return of 5, fine steps", None,
        lambda: rollouts_to_five(0.002), 25, "eps_v = .2 is in units of the reward: .2 a rollout"),
    Row("21c", "C 2.3", "the same with steps that overshoot", None,
        lambda: rollouts_to_five(0.02), 22, "only the overshoot of the last step adds to .2"),
    Row("22a", "C 2.3", "entropy's push on 99,990 tokens that hold 1 %", "> 0", garbage_push),
    Row("23a", "C 2.3", "|E[b grad log pi]|, summed over tokens, b = 1", "<= 1e-10",
        lambda: weighted_scores(np.ones((1, 1)))),
    Row("23b", "C 2.3", "the same, mean over a response's tokens", 0, baseline_by_length, "> 0.01",
        "a token mean divides by a length that depends on the actions: the baseline is biased"),
    Row("23c", "C 2.3", "gradient's length, batch mean of 4 rows off", 1,
        lambda: ex.batch_direction([0.5, 0.5], LOTTERY, False) / 0.25, 0.75,
        "the mean holds the row itself: the gradient shrinks by 1 - 1/N"),
    Row("24a", "C 2.4", "beta .1 after a KL far above the target", 0.102, lambda: controller(99.0),
        why="trap: Ziegler et al. (2019) made this controller; InstructGPT kept beta fixed at .02"),
    Row("24b", "C 2.4", "up 2 %, down 2 %: log-space would give back", 0.1,
        lambda: controller(0.0, controller(99.0)), 0.09996,
        "1.02 x .98 = .9996: log-space holds to first order only"),
    Row("24c", "C 2.4", "beta .1 after 35 steps at most 2 % each", 0.2,
        lambda: controller(99.0, steps=35), why="trap: h = 10 needs 35 steps to double beta"),
    Row("24d", "C 2.4", "beta .1 after one update, h = 10^4", 0.102,
        lambda: controller(99.0, horizon=1e4 / 512), 0.101024,
        "10^4 counts samples: 512 a step make h = 19.5 updates"),
]


# ------------------------------------------------------------------ the chapter, section 3


def refused(call):
    """"refused" if a call raises ValueError, else its result."""
    try:
        return call()
    except ValueError:
        return "refused"


def gae_row(part, place, rewards, values, mask):
    """One entry of gae at gamma = lambda = 1: part 0 advantages, 1 returns."""
    return float(t.gae([rewards], np.array([values]), [mask], 1.0, 1.0)[part][0, place])


@functools.cache
def rescored(steps):
    """Largest |recorded - recomputed| log-prob when the policy has taken so many updates since."""
    policy, critic, prompts, rng = ex.toy(0)
    roll = t.collect_rollouts(policy, policy.frozen_copy(), critic, prompts, 8, 0, rng=rng)
    scores = common.count_good(roll.tokens, np.pad(roll.mask, ((0, 0), (1, 0))))
    opt = t.Adam(policy.parameters() + critic.parameters(), 1e-2)
    for _ in range(steps):
        t.ppo_update(policy, critic, opt, roll, scores, 0.05)
    with t.no_grad():
        now = t.token_log_probs(policy(roll.tokens), roll.tokens).data
    return float(np.abs((now - roll.logp_old) * roll.mask).max())


def joint_clip(together):
    """Norm of the policy's gradient .3 after a clip at 1, with the critic's gradient 10 or not."""
    policy, critic = (t.Tensor(np.zeros(1), requires_grad=True) for _ in "ab")
    policy.grad, critic.grad = np.array([0.3]), np.array([10.0])
    t.clip_grad_norm([policy, critic] if together else [policy], 1.0)
    return float(policy.grad[0]), float(critic.grad[0])


def distinct_prompts(steps=3):
    """How many different prompts train_ppo has used after so many steps with 32."""
    policy, critic, prompts, rng = ex.toy(0)
    seen = set()

    def reward(tokens, token_mask):
        seen.update(map(tuple, tokens[:, :4].tolist()))
        return common.count_good(tokens, token_mask)
    cfg = t.PPOConfig(steps=steps)
    t.train_ppo(policy, policy.frozen_copy(), critic, prompts, reward, 0, cfg, rng=rng)
    return len(seen)


def first_values():
    """Largest value at the start of a critic from a backbone."""
    policy, _, prompts, rng = ex.toy(0)
    critic = t.TinyCritic.from_backbone(policy)
    with t.no_grad():
        return float(np.abs(critic(prompts).data).max())


DEFAULTS = {"steps": 30, "max_new_tokens": 8, "beta": 0.05, "lr": 1e-3, "clip_eps": 0.2,
            "ppo_epochs": 2, "vf_coef": 0.5, "ent_coef": 0.0, "kl_horizon": 10,
            "value_clip_eps": 0.2, "max_grad_norm": 1.0, "kl_target": None}

CODE = [
    Row("27a", "C 3.1", "last_response_index of an all-zero row", 0,
        lambda: refused(lambda: int(t.last_response_index(np.zeros((1, 4)))[0])), "refused",
        "the text's argmax gives column 0, so the score would land on the prompt"),
    Row("28a", "C 3.2", "return in a masked slot where V = 9", 9,
        lambda: gae_row(1, 0, [0.0, 1.0], [9.0, 0.5], [0, 1]), 0,
        "the text adds V outside the mask too; no loss reads it, a mean over it would"),
    Row("28b", "C 3.2", "A + V before a gap, 7 still to come", 7,
        lambda: gae_row(1, 0, [1.0, 2.0, 3.0, 4.0], [0.5, -1.0, 0.25, 2.0], [1, 1, 0, 1]), 3,
        "a gap in the mask cuts the credit, in the text's code and here alike"),
    Row("31a", "C 3.4", "entropy of a uniform policy, V = 7: log 7", 1.94591,
        lambda: float(t.masked_entropy(np.zeros((1, 1, 7)), np.ones((1, 1))))),
    Row("32a", "C 3.4", "beta .1 after a negative KL", 0.098, lambda: controller(-5.0)),
    Row("33a", "C 3.4", "largest first value, critic from a backbone", None, first_values, 0,
        "C starts the critic at random, L from the reward model; here the head starts at 0"),
    Row("34a", "C 3.4", "|recorded - recomputed| log pi, fresh rollout", "<= 1e-5",
        lambda: rescored(0)),
    Row("34b", "C 3.4", "the same, four updates (lr .01) later", None, lambda: rescored(4),
        "> 0.1", "its code recomputes what its section 4 wants recorded; with age that hides it"),
    Row("35a", "C 3.4", "clip fraction of the first pass: ratio 1", 0,
        lambda: one_update(1e-2, 2).clip_frac_first),
    Row("35b", "C 3.4", "policy gradient .3 after the clip at 1", 0.3,
        lambda: joint_clip(True)[0], 0.03, "one joint clip: a critic gradient of 10 scales it too"),
    Row("35c", "C 3.4", "last epoch's clip fraction / mean of both", 1,
        lambda: (lambda s: (2 * s.clip_frac - s.clip_frac_first) / s.clip_frac)(one_update(1e-2)),
        2, "the text returns the last epoch's figures only; that of epoch 1 shows staleness"),
    Row("36a", "C 3.4", f"defaults that are the text's, of {len(DEFAULTS)}", len(DEFAULTS),
        lambda: sum(getattr(t.PPOConfig(), k) == v for k, v in DEFAULTS.items())),
    Row("36b", "C 3.4", "different prompts after 3 steps of 32", 96, distinct_prompts, 32,
        "train_ppo takes the same prompts each step; pass more rows, or call it in rounds"),
    Row("38a", "C 3.3", "clip fraction, lr 1e-5: step too small", 0,
        lambda: one_update(1e-5, 2).clip_frac),
    Row("38b", "C 3.3", "clip fraction, lr .01, 8 epochs: over-used", "> 0.3",
        lambda: one_update(1e-2, 8).clip_frac),
]


# ------------------------------------------------------------------ the chapter, sections 4 to 7


def memory(**changes):
    """GB of the four models of 7e9 parameters after changes."""
    sizes = four_models(**{"policy": P7, "critic": P7, "reward": P7, **changes})
    return sum(sizes.values()) / 1e9


def adapters():
    """LoRA parameters of rank 16 on all linears of Llama-2-7B."""
    return lora_params(ARCHS["llama2-7b"], 16)


def share(engine):
    """Generation's share of the chapter's step on 8 A100-80."""
    return estimate(model="llama2-7b", prompts=512, prompt_len=256, response_len=1024, gpus=8,
                      engine=engine)["share"]


def cache_gb():
    """GB of keys and values of 512 x 1,024 tokens of Llama-2-7B."""
    return 512 * 1024 * kv_bytes_per_token(ARCHS["llama2-7b"]) / 1e9


def whiten_gap():
    """Largest difference of whitened advantages when the raw ones are 1,000 times smaller."""
    advantages = np.random.default_rng(0).normal(0.3, 2.0, (4, 8))
    ones = np.ones((4, 8))
    return float(np.abs(t.whiten(advantages, ones) - t.whiten(advantages / 1000, ones)).max())


def token_sum(kind, times=1.0):
    """E[sum_t estimator] over the 40 responses."""
    listed = listed_toy()[2]
    return times * float(listed.p @ t.kl_estimates(listed.logp, listed.logp_ref, kind).sum(axis=1))


stale = functools.cache(ex.stale_run)
ptx = functools.cache(ex.ptx_runs)


def sft_change(with_ptx):
    """Relative change of the SFT loss, seed 0."""
    _, _, before, after = ptx(0)[with_ptx]
    return after / before - 1


def whitened_end():
    """Probability of the best of three actions where whitened ascent with entropy ends."""
    rewards = np.array([0.0, 1.0, 1.2])
    spread = lambda p: 1 / (math.sqrt((p * (rewards - (p * rewards).sum()) ** 2).sum()) + 1e-8)
    return float(ex.stops_at(rewards, spread)[2])


SYSTEMS = [
    Row("42a", "C 4", "policy, GB", 112, lambda: four_models(P7, 0, 0)["policy"] / 1e9),
    Row("42b", "C 4", "all four, GB", 252, memory),
    Row("42c", "C 4", "the same with fp32 gradients", 252, lambda: memory(recipe=(2, 4, 4, 8)), 280,
        "many trainers keep gradients in fp32: 18 bytes a trained parameter"),
    Row("42d", "C 4", "252 GB in GiB", 252, lambda: memory() * 1e9 / 2**30, 234.69,
        "the text's GB is decimal"),
    Row("42e", "C 4", "with InstructGPT's 6B reward model", 252, lambda: memory(reward=6e9), 250,
        "the reward model need not be of the policy's size"),
    Row("43a", "C 4", "times the 16 bytes of pretraining", "> 2.2", lambda: memory() / 112),
    Row("43b", "C 4", "GB of keys and values, 512 x 1,024, 7B MHA", "<= 252", cache_gb, 274.88,
        "more than the four models: the cache of a whole rollout does not fit beside them"),
    Row("45a", "C 4", "generation's share, vllm-graph, 8 A100", "> 0.6",
        lambda: share("vllm-graph"), "<= 0.3",
        "60 to 80 % is not a property of PPO: it goes with engine, GPUs, epochs"),
    Row("45b", "C 4", "the same, hf-generate", "> 0.6", lambda: share("hf-generate")),
    Row("46a", "C 4", "|V now - V recorded|, 4 steps old", None, lambda: stale(4, False, 0)[3],
        "> 0.05", "recorded log-probs correct the ratio; V and GAE stay stale"),
    Row("49a", "C 4", "whitened A - whitened A / 1000", "<= 1e-4", whiten_gap,
        why="trap: row 3's \"tiny advantages\" cannot be the cause once they are whitened"),
    Row("58a", "C 5", "GB saved without a critic", 112, lambda: memory() - memory(critic=0)),
    Row("59a", "C Q1", "E[signed sum] - KL (40 responses)", "<= 1e-12",
        lambda: abs(token_sum("k1") - exact().kl)),
    Row("59b", "C Q1", "E[sum of |log-ratio|] / KL", "> 1.1",
        lambda: token_sum("abs") / exact().kl),
    Row("59c", "C Q1", "E[sum of squared log-ratios] / KL", "> 1.1",
        lambda: token_sum("k2", 2.0) / exact().kl),
    Row("60a", "C Q2", "largest ratio after a step at lr .03", "> 1.2",
        lambda: one_update(3e-2, 2).ratio_max),
    Row("61a", "C Q3", "GB saved by the first cut: the critic, or LoRA?", 112,
        lambda: memory() - memory(lora=(adapters(), adapters())), 208.72,
        "LoRA on policy and critic saves more than the critic; the critic is the simpler cut"),
    Row("61b", "C Q3", "GB of a 70B reward model in bf16", None,
        lambda: 2 * count_params(ARCHS["llama2-70b"], "value") / 1e9, 137.43,
        "larger than the policy's training state of 112 GB"),
    Row("63a", "C Q5", "KL of best of 4: log 4", "<= 1.3863", lambda: best_of(4)),
    Row("63b", "C Q5", "a tighter bound: log 4 - 3/4", "<= 0.6363", lambda: best_of(4)),
]

EXERCISES = [
    Row("65a", "C ex 1", "R_1, beta .2", -0.04, lambda: float(four_tokens(0.2)[0])),
    Row("65b", "C ex 1", "R_3", 0.2, lambda: float(four_tokens(0.2)[2])),
    Row("65c", "C ex 1", "R_4", 1.5, lambda: float(four_tokens(0.2)[3])),
    Row("65d", "C ex 1", "total", 1.66, lambda: float(four_tokens(0.2).sum())),
    Row("66a", "C ex 2", "A + V on a contiguous row, 9 to come", 9,
        lambda: gae_row(1, 1, [1.0, 2.0, 3.0, 4.0], [0.5, -1.0, 0.25, 2.0], [0, 1, 1, 1])),
    Row("67a", "C ex 3", "best action at the end, entropy .5, raw A", 0.568,
        lambda: float(ex.stops_at(np.array([0.0, 1.0, 1.2]), lambda p: 1.0)[2])),
    Row("67b", "C ex 3", "the same, whitened A", 0.568, whitened_end, 1,
        "the text's answer gives the effective step; this is a moved fixed point"),
    Row("68a", "C ex 4", "reward gained with ptx .5, seed 0", "> 0",
        lambda: ptx(0)[1][1] - ptx(0)[1][0]),
    Row("68b", "C ex 4", "SFT loss, change with ptx", "<= 0.1", lambda: abs(sft_change(1))),
    Row("68c", "C ex 4", "SFT loss, change without", "> 1", lambda: sft_change(0)),
    Row("69a", "C ex 5", "clip fraction, epoch 1, fresh", 0, lambda: stale(0, False, 0)[0]),
    Row("69b", "C ex 5", "the same, one step old, recorded", "> 0", lambda: stale(1, False, 0)[0]),
    Row("69c", "C ex 5", "the same, one step old, recomputed", "> 0", lambda: stale(1, True, 0)[0],
        0, "recomputing sets each ratio to 1; the text's last-epoch figure would not show it"),
]


# ------------------------------------------------------------------ the lesson

VALUES = np.array([[0.5, 0.6, 0.7, 0.8]])
MISSING = {  # the lesson's formulas that are not displayed -> the function that computes each
    "objective": "exact_objective", "policy gradient": "ppo_clip_loss",
    "ratio": "ppo_clip_loss", "clipped surrogate": "ppo_clip_loss", "KL reward": "shaped_rewards"}


def lesson_step():
    """The lesson's two losses on the four tokens, line by line, each with its gradient by log pi.

    Returns advantages, policy loss, its gradient, value loss, its gradient.
    """
    out = []
    for part in ("policy", "value"):
        logp = t.Tensor(ex.LOGP, requires_grad=True)
        dense = (logp - ex.REF) * -0.1 + np.array([[0, 0, 0, 1.5]])
        advantages = dense - VALUES
        ratio = (logp - ex.LOGP).exp()
        clipped = t.clip(ratio, low=0.8, high=1.2) * advantages
        loss = -t.minimum(ratio * advantages, clipped).mean()
        if part == "value":
            returns = advantages + VALUES  # its values detached; the rest is not
            loss = ((returns - VALUES) ** 2).mean()
        loss.backward()
        out += [float(loss), logp.grad]
    return advantages.data, *out


def lesson_total():
    """The one number that the lesson's step returns."""
    _, policy_loss, _, value_loss, _ = lesson_step()
    return policy_loss + 0.5 * value_loss


def through_the_reward():
    """What the lesson's gradient by log pi_1 adds to -A / n, times n."""
    advantages, _, grad, _, _ = lesson_step()
    return float((grad + advantages / 4)[0, 0] * 4)


def into_the_policy():
    """The gradient of the lesson's value loss by log pi_1."""
    return float(lesson_step()[4][0, 0])


def constant_target():
    """The same in value_loss, its returns handed over as a live Tensor."""
    logp = t.Tensor(ex.LOGP, requires_grad=True)
    values = t.Tensor(VALUES, requires_grad=True)
    returns = (logp - ex.REF) * -0.1 + np.array([[0, 0, 0, 1.5]])
    t.value_loss(values, VALUES, returns, ex.ONES).backward()
    return 0.0 if logp.grad is None else float(logp.grad[0, 0])


def padding_gradient():
    """Gradient into a padding slot with A = 5, two of four columns being response."""
    logp = t.Tensor(ex.LOGP, requires_grad=True)
    advantages, mask = np.array([[1.0, 1.0, 5.0, 5.0]]), [[1, 1, 0, 0]]
    t.ppo_clip_loss(logp, ex.LOGP, advantages, mask, 0.2)[0].backward()
    return float(logp.grad[0, 2])


def raw_advantages():
    """Unwhitened advantages over the tokens of the listed toy's responses."""
    listed = listed_toy()[2]
    rewards = t.shaped_rewards(listed.scores, listed.logp, listed.logp_ref, listed.mask, BETA)
    advantages, _ = t.gae(rewards, np.zeros_like(rewards), listed.mask)
    return advantages[listed.mask > 0]


def whitened_spread():
    """Standard deviation of the same, whitened."""
    raw = raw_advantages()[None]
    return float(t.whiten(raw, np.ones_like(raw)).std())


def score_function_error():
    """grad E[r] by p r grad log p against central differences, relative."""
    _, policy, listed = listed_toy()
    weight = policy.params["ln_f.bias"]
    f = lambda _: (t.response_log_probs(policy, common.PROMPT, listed.tokens, listed.mask).exp()
                   * listed.scores).sum()
    return t.grad_check(f, [weight])


def capped(ratio, advantage):
    """The lesson's per-token objective."""
    return surrogate(ratio, advantage)


def implied_reward_spread():
    """Spread of beta log(pi* / pi_ref) - r over the 40 responses: DPO's reward is r + constant."""
    e = exact()
    implied = BETA * (e.logp_star - e.logp_ref)
    return float((implied - listed_toy()[2].scores).std())


def two_action_gain():
    """E[r] gained by (.5, .5) -> (.99, .01) at rewards 2 and 0; its clipped objective gains .2."""
    return float((np.array([0.99, 0.01]) - 0.5) @ np.array([2.0, 0.0]))


LESSON = [
    Row("71a", "L", "score-function gradient, error against differences", "<= 1e-6",
        score_function_error),
    Row("72a", "L", "formulas displayed, of 5 announced", 5,
        lambda: sum(not hasattr(t, name) for name in MISSING.values()), 0,
        "all five are missing from the text; each is computed by a shipped function (MISSING)"),
    Row("75a", "L", "|E[b sum grad log pi]|, b constant", "<= 1e-10",
        lambda: weighted_scores(np.ones((1, 1)))),
    Row("75b", "L", "its \"R_1\", V = .5: return or advantage?", 1.58,
        lambda: gae_row(0, 0, four_tokens(0.1), VALUES[0], [1, 1, 1, 1]), 1.08,
        "r_T - V(s_t) is an advantage; the letter R means a return or reward everywhere else"),
    Row("76a", "L", "largest ratio after one update at lr .03", "<= 1.2",
        lambda: one_update(3e-2, 2).ratio_max, "> 1.2",
        "the clip removes the incentive, not the possibility (C Q2 says so)"),
    Row("77a", "L", "dense: nonzero rewards of 4 where pi = pi_ref", 4,
        lambda: int(np.count_nonzero(t.shaped_rewards([1.5], ex.REF, ex.REF, ex.ONES, 0.1))), 1,
        "only the KL is dense; the score still comes once, at the end"),
    Row("78a", "L loop", "1 reward in the graph: added to -A / n, times n", through_the_reward,
        step_at_one, "<= 1e-12",
        "beta more on every token: noise without a mean, since E[grad log pi] = 0"),
    Row("78b", "L loop", "  and the value loss's gradient into log pi_1", into_the_policy,
        constant_target, 0, "its target r_dense carries one: the critic's error moves the policy"),
    Row("78c", "L loop", "2 no bootstrapping: A_1 (V .5 to .8)", -0.52,
        lambda: gae_row(0, 0, four_tokens(0.1), VALUES[0], [1, 1, 1, 1]), 1.08,
        "R_1 - V_1 leaves out everything that token 1 leads to"),
    Row("78d", "L loop", "3 the score's column, response in 1 to 3 of 0 to 5", 5,
        lambda: int(t.last_response_index([[0, 1, 1, 1, 0, 0]])[0]), 3,
        "column -1 is padding where a response ended early"),
    Row("78e", "L loop", "4 no mask: gradient into padding, A = 5", -1.25, padding_gradient, 0,
        "its mean runs over all columns: -5 / 4 instead of 0"),
    Row("78f", "L loop", "5 one step: clip fraction of its only pass", 0,
        lambda: one_update(1e-2, 1).clip_frac,
        why="trap: new and old log-probs are of the same weights: ratio 1, the clip never acts"),
    Row("78g", "L loop", "6 no whitening: spread of A on the listed toy",
        lambda: raw_advantages().std(), whitened_spread, 1,
        "unwhitened, its step moves with the reward's scale"),
    Row("78h", "L loop", "7 critic's gradient 10, after the clip at 1",
        lambda: joint_clip(False)[1], lambda: joint_clip(True)[1], "<= 1",
        "it clips the policy's parameters only"),
    Row("78i", "L loop", "8 its reported loss; the policy's part of it", lesson_total,
        lambda: float(t.ppo_clip_loss(ex.LOGP, ex.LOGP, lesson_step()[0], ex.ONES, 0.2)[0]), 0.255,
        "one number mixes the losses of policy and critic"),
    Row("79a", "L loop", "beta", 0.1, lambda: t.PPOConfig().beta, 0.05,
        "the chapter's code takes .05"),
    Row("79b", "L loop", "eps", 0.2, lambda: t.PPOConfig().clip_eps),
    Row("79c", "L loop", "max gradient norm", 1, lambda: t.PPOConfig().max_grad_norm),
    Row("79d", "L loop", "weight of (V - G)^2: .5 x MSE", 0.5,
        lambda: t.PPOConfig().vf_coef * float(t.value_loss([[1.0]], [[1.0]], [[0.0]], [[1]])), 0.25,
        "the chapter's 1/2 is missing: its critic's loss weighs twice as much"),
    Row("80a", "L", "four models: times one model in training", None, lambda: memory() / 112, 2.25,
        "the memory limitation in one number"),
    Row("81a", "L ex 1", "rho 1.5, A +3", 3.6, lambda: capped(1.5, 3.0)),
    Row("81b", "L ex 1", "rho 1.5, A -3", -4.5, lambda: capped(1.5, -3.0)),
    Row("81c", "L ex 1", "rho .5, A +3", 1.5, lambda: capped(0.5, 3.0)),
    Row("81d", "L ex 1", "cases of the three where the clip is active", 1,
        lambda: sum(slope(*case) == 0 for case in ((1.5, 3.0), (1.5, -3.0), (0.5, 3.0)))),
    Row("82a", "L ex 2", "KL reward, e^2 times as likely", -0.2,
        lambda: float(t.shaped_rewards([0.0], [[-1.0, 0.0]], [[-3.0, 0.0]], np.ones((1, 2)),
                                       0.1)[0, 0])),
    Row("82b", "L ex 2", "KL reward, equally likely", 0,
        lambda: float(t.shaped_rewards([0.0], [[-1.0, 0.0]], [[-1.0, 0.0]], np.ones((1, 2)),
                                       0.1)[0, 0])),
    Row("83a", "L ex 3", "most of 1,000 ratios up to 5, A = 2", "<= 2.4",
        lambda: max(capped(r, 2.0) for r in np.random.default_rng(0).uniform(0.1, 5.0, 1000))),
    Row("83b", "L ex 3", "improvement bounded: E[r] gained, cap .2", "<= 0.2",
        two_action_gain, 0.98, "the cap bounds the objective: two actions at .5 that pay 2 and 0, "
        "moved to .99, .01"),
    Row("84a", "L", "spread of beta log(pi* / pi_ref) - r", "<= 1e-10", implied_reward_spread),
]

LEDGER = {"The chapter: card and section 1": CARD, "The chapter: section 2": MATH,
          "The chapter: section 3": CODE, "The chapter: sections 4 to 6": SYSTEMS,
          "The chapter: exercises": EXERCISES, "The lesson": LESSON}


# ------------------------------------------------------------------ the map

REFERENCES = {  # the chapter's list -> where what it says is seen
    "Schulman 2017, PPO, 1707.06347": "examples/clip_figure.py",
    "Schulman 2015, GAE, 1506.02438": "examples/gae_lambda.py",
    "Schulman 2015, TRPO, 1502.05477": "examples/clip_figure.py",
    "Ziegler 2019, KL reward and controller, 1909.08593": "examples/failure_modes.py",
    "Stiennon 2020, summaries, 2009.01325": "examples/over_optimisation.py",
    "Ouyang 2022, InstructGPT, 2203.02155": "examples/production_recipes.py",
    "Touvron 2023, Llama 2, 2307.09288": "examples/production_recipes.py",
    "Bai 2022, Constitutional AI, 2212.08073": "examples/production_recipes.py",
    "Grattafiori 2024, Llama 3, 2407.21783": "examples/when_to_use_what.py",
    "Huang 2024, N+ details, 2403.17031": "examples/break_it.py",
    "TRL, PPOTrainer": "README.md"}

MAP = {  # claim -> tests (test_...), rows of this ledger, examples (NAME.py)
    1: "1a, exact_optimum.py", 2: "test_rollout_is_aligned_token_by_token, 9d, one_iteration.py",
    3: "3a, 3b, 3c, clip_figure.py, test_ppo_clip_loss_gradient_and_clipping",
    4: "4a, 4b, test_update_equals_the_chapters_in_torch", 5: "5a, estimator.py, seven_b.py",
    6: "6a, seven_b.py", 7: "knobs.py, failure_modes.py",
    8: "8a, production_recipes.py", 9: "9a, 9b, 9c, 9d, 9e, one_iteration.py",
    10: "10a, 10b, kl_estimators.py", 11: "clip_figure.py, one_iteration.py", 12: "12a",
    13: "13a, gradient_audit.py", 14: "14a, 14b, over_optimisation.py",
    15: "15a, exact_optimum.py", 16: "16a, 16b, 16c", 17: "17a, 17b, 17c, 17d, 17e, clip_figure.py",
    18: "18a, 18b, clip_figure.py",
    19: "19a, 19b, test_early_stop_takes_the_first_step_and_no_other",
    20: "20a, gae_lambda.py, test_gae_by_hand", 21: "21a, 21b, 21c, test_value_loss_clipping",
    22: "22a, failure_modes.py", 23: "23a, 23b, 23c, gradient_audit.py",
    24: "24a, 24b, 24c, 24d, test_kl_controller_moves_beta_toward_target",
    25: "test_rollout_is_aligned_token_by_token, test_log_probs_score_the_next_token",
    26: "test_shaped_rewards_places_score_and_kl", 27: "27a",
    28: "28a, 28b, test_gae_matches_brute_force_and_mc_return",
    29: "test_ppo_clip_loss_gradient_and_clipping", 30: "test_value_loss_clipping",
    31: "31a, test_entropy_by_hand", 32: "32a, test_kl_controller_moves_beta_toward_target",
    33: "33a, exercises.py", 34: "34a, 34b, test_recorded_log_probs_equal_the_scoring_pass",
    35: "35a, 35b, 35c, test_update_equals_the_chapters_in_torch", 36: "36a, 36b",
    37: "test_sampling_equals_a_slow_loop_row_by_row, test_logits_equal_transformers_gpt2",
    38: "38a, 38b, failure_modes.py",
    39: "test_shaped_rewards_places_score_and_kl, test_gae_matches_brute_force_and_mc_return, "
        "test_ppo_clip_loss_gradient_and_clipping, "
        "test_train_ppo_increases_reward_with_bounded_kl",
    40: "test_shaped_rewards_places_score_and_kl, test_gae_matches_brute_force_and_mc_return, "
        "test_ppo_clip_loss_gradient_and_clipping, test_value_loss_clipping, "
        "test_kl_controller_moves_beta_toward_target, "
        "test_train_ppo_increases_reward_with_bounded_kl",
    41: "drill.py", 42: "42a, 42b, 42c, 42d, 42e, estimator.py, seven_b.py",
    43: "43a, 43b, estimator.py, seven_b.py",
    44: "estimator.py, seven_b.py, lora.py, shared_trunk.py, "
        "when_to_use_what.py",
    45: "45a, 45b, estimator.py, seven_b.py", 46: "46a, seven_b.py, exercises.py",
    47: "failure_modes.py, over_optimisation.py",
    48: "failure_modes.py", 49: "49a, failure_modes.py",
    50: "failure_modes.py", 51: "failure_modes.py",
    52: "failure_modes.py, break_it.py",
    53: "failure_modes.py, exercises.py", 54: "when_to_use_what.py",
    55: "production_recipes.py", 56: "production_recipes.py",
    57: "production_recipes.py", 58: "58a, when_to_use_what.py",
    59: "59a, 59b, 59c, kl_estimators.py", 60: "60a", 61: "61a, 61b, seven_b.py", 62: "seven_b.py",
    63: "63a, 63b, when_to_use_what.py", 64: "over_optimisation.py",
    65: "65a, 65b, 65c, 65d, exercises.py", 66: "28b, 66a, exercises.py",
    67: "67a, 67b, exercises.py, gradient_audit.py", 68: "68a, 68b, 68c, exercises.py",
    69: "69a, 69b, 69c, exercises.py, gradient_audit.py", 70: "hand_verify.py",
    71: "71a, gradient_audit.py", 72: "72a", 73: "14a, over_optimisation.py",
    74: "33a, exercises.py", 75: "75a, 75b, gradient_audit.py", 76: "76a, 60a", 77: "77a",
    78: "78a, 78b, 78c, 78d, 78e, 78f, 78g, 78h, 78i, break_it.py",
    79: "79a, 79b, 79c, 79d", 80: "80a, seven_b.py, failure_modes.py",
    81: "81a, 81b, 81c, 81d, exercises.py", 82: "82a, 82b, exercises.py",
    83: "83a, 83b, exercises.py", 84: "84a, exact_optimum.py, when_to_use_what.py"}


def check_map():
    """What is wrong with the map and its references, in sentences."""
    tests = (HOME / "test_tinyrlhf.py").read_text() if (HOME / "test_tinyrlhf.py").exists() else ""
    names = set(re.findall(r"^def (test_\w+)\(", tests, re.M))
    rows = {row.name for rows in LEDGER.values() for row in rows}
    wrong = [f"claim {number} has no target" for number in range(1, 85) if number not in MAP]
    pointed = set()
    for number, targets in MAP.items():
        for target in targets.split(", "):
            pointed.add(target)
            if not (target in names if target.startswith("test_") else target in rows or
                    target.endswith(".py") and (HOME / "examples" / target).exists()):
                wrong.append(f"claim {number}: {target} is not there")
    wrong += [f"row {row} is in no line of the map" for row in sorted(rows - pointed)]
    for name, target in REFERENCES.items():
        if not (HOME / target).exists():
            wrong.append(f"claim 70, {name}: {target} is not there")
    return wrong


def print_items(head, items):
    """Items after a heading, separated by commas, none broken over two lines."""
    text = ", ".join(items).replace(" ", "\0").replace(",\0", ", ")
    print(textwrap.fill(text, 98, initial_indent=head, subsequent_indent=" " * 5)
          .replace("\0", " "))


def show_map():
    """The 84 claims with their targets, and the references."""
    for number in sorted(MAP):
        print_items(f"{number:3}  ", MAP[number].split(", "))
    print("\n 70, the chapter's references:")
    for name, target in REFERENCES.items():
        print(f"     {name:52}{target}")


def shown(x):
    """A number in six significant digits, an int or a word as it is."""
    if x is None:
        return "-"
    if isinstance(x, str) or float(x).is_integer():
        return str(x if isinstance(x, str) else int(x))
    return f"{x:.6g}" if abs(x) >= 1e-3 else f"{x:.0e}"


def show_ledger():
    """Every row; returns how many agree, differ, are broken."""
    count = {"agrees": 0, "differs": 0, "shown": 0, "BROKEN": 0}
    for title, rows in LEDGER.items():
        common.title(title)
        print(f"{'row':5}{'where':8}{'claim':52}{'text says':>12}{'computed':>12}  verdict")
        for row in rows:
            value = row.compute()
            text = row.text() if callable(row.text) else row.text
            word = verdict(row, text, value)
            count[word] += 1
            print(f"{row.name:5}{row.where:8}{row.claim:52}{shown(text):>12}"
                  f"{shown(value):>12}  {word}")
            if row.why:
                print(f"{'':13}{row.why}")
            if word == "BROKEN":
                print(f"{'':13}BROKEN: expected {text if row.right is None else row.right}")
    return count


def main():
    """The ledger and the map's check."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--map", action="store_true", help="print the map of the 84 claims")
    if parser.parse_args().map:
        show_map()
        count = {"BROKEN": 0}
    else:
        count = show_ledger()
        print(f"\n{sum(count.values())} rows: {count['agrees']} agree, {count['differs']} differ "
              f"as explained, {count['shown']} shown where the text has no number, "
              f"{count['BROKEN']} broken")
    wrong = check_map()
    state = "every target is there" if not wrong else f"{len(wrong)} things are wrong with the map:"
    print(f"{len(MAP)} claims mapped; {state}", *wrong, sep="\n  ")
    sys.exit(bool(count["BROKEN"] or wrong))


if __name__ == "__main__":
    main()
