"""A museum of bugs: which diagnostic gives each one away, by how much, and which bugs does none?

    python examples/break_it.py                all 24, one at a time
    python examples/break_it.py NAME           one: what is wrong, where it stood, figures, the cure
    python examples/break_it.py --seeds 5      how often each is seen (some minutes)

The bugs stood in real systems (#N is an issue or a pull request there) or in the listings of the
chapter and the lesson. Each replaces one function of tinyrlhf inside a `with`; the file itself has
no switch for them. The thirteen diagnostics are taken on a toy whose 121 responses are listed, so
that the KL and grad J are known, and at the end of a short run. What came out:

- The end of a run is the worst witness: 15 of 24 bugs end within .05 of the healthy 98.7 % of the
  optimum, a mask that is one off among them (98.1 %).
- Identities that hold to rounding are the best. Every ratio is 1 before the first step; padding
  and splitting change no gradient; the same batch twice gives the same gradient; where nothing is
  to be gained it is 0. They name eight of the bugs, on one small batch and with no statistics.
- A mask that depends on the action (no end token, a gap) needs the expected score function: the
  mean of grad log pi is 1.96 and 2.49 long in place of .07. A wrong advantage needs the exact
  gradient: 1.55 to 2.65 of its length away in place of .02, .37 with an absolute KL.
- The gradient through the shaped reward has mean 0, so it passes that test (.04). But no clip holds
  it: after 20 epochs KL(old || new) is 1.94 nats a token in place of .09.
- Recomputed log-probs change no digit while the sampler is the policy itself; of a stale rollout
  they report a KL of 0. k3 in the wrong direction shows there too (1.67 times the KL), and nowhere
  else. An early stop with the wrong sign shows once no clip does its work (2.07 against .05).
- A negative KL, the known sign of truncated sampling, did not come up: from a policy sharper than
  its reference the top 2 tokens report 1.31 times the KL (over seeds .78 to 2.12).
- No diagnostic sees the value clip with min, the missing 1/2 of the value loss (Adam forgets the
  scale of a gradient), the sample deviation in whitening. Only a hand-computed value does:
  value_loss(5, V_old 1, G 10) is 38.72; with min it is 12.5, without the 1/2 77.44.

Over five seeds each of the 21 bugs with a named diagnostic is seen by it in 5 of 5. Only seven lose
more than .05 of the optimum in at least four. Seed 3 has not arrived when the run ends (82.8 %
healthy); there chance moves a run as much, and two of the bugs that nothing sees look seen once.
"""
import contextlib
import functools
import sys
import textwrap
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402
from common import (EOS, PROMPT, Parser, at_least, cell, count_good, exact_J,  # noqa: E402
                    flat_grad, list_responses, title)

VOCAB, LENGTH, BETA, SPARE, MANY = 4, 4, 0.5, 4, 2048  # SPARE: columns for more padding
PLAIN = t.PPOConfig(steps=24, max_new_tokens=LENGTH, beta=BETA, lr=4e-3, ppo_epochs=4)
BARE = replace(PLAIN, ppo_epochs=1, whiten_advantages=False, lam=1.0,
               max_grad_norm=1e9)  # one step whose mean gradient is known: grad J / E[length]

# ------------------------------------------------------------------ the bugs
# A function below takes the healthy object and returns the faulty one that stands in for it.

Bug = namedtuple("Bug", "attribute seen_by source wrong cure fault")
BUGS = {}


def bug(attribute, seen_by, source, cure):
    """Register a fault of tinyrlhf.attribute; its docstring says what is wrong."""
    def register(fault):
        wrong = " ".join(fault.__doc__.split())
        BUGS[fault.__name__] = Bug(attribute, seen_by, source, wrong, cure, fault)
        return fault
    return register


@contextlib.contextmanager
def broken(name):
    """Inside, one attribute of tinyrlhf is faulty (none if name is None); then healthy again."""
    if name is None:
        yield
        return
    *path, last = BUGS[name].attribute.split(".")
    owner = functools.reduce(getattr, path, t)
    with mock.patch.object(owner, last, BUGS[name].fault(getattr(owner, last))):
        yield


def after_collecting(collect, change):
    """collect_rollouts, and then change(roll, policy, critic) edits what it returned."""
    def fault(policy, ref, critic, *rest, **settings):
        roll = collect(policy, ref, critic, *rest, **settings)
        with t.no_grad():
            change(roll, policy, critic)
        return roll
    return fault


def otherwise_sampled(sample, **settings):
    """sample under other settings; recorded is what the plain softmax says of the tokens."""
    def fault(policy, *rest, **kw):
        s = sample(policy, *rest, **kw | settings)
        with t.no_grad():
            logp = t.token_log_probs(policy(s.tokens), s.tokens).data
        return s._replace(logp=logp * s.token_mask[:, 1:])
    return fault


def without_id(roll, pad_id):
    """A mask that takes every pad_id for padding; a row of nothing else keeps its first token."""
    mask = roll.mask * (roll.tokens[:, 1:] != pad_id)
    first = roll.mask * (np.cumsum(roll.mask, axis=1) == 1)
    return np.where(mask.any(axis=1, keepdims=True), mask, first)


@bug("shaped_rewards", "padding", "the lesson (r_dense[:, -1] += rewards); TRL #1893, #3750",
     "Add it at last_response_index(mask), a column of each row's own.")
def score_on_padding(healthy):
    """The score is added in the last column. In a row that ended earlier that is padding, so GAE
    never reads it and only responses of full length are paid."""
    def fault(scores, *rest):
        rewards = healthy(0 * scores, *rest)
        rewards[:, -1] += scores
        return rewards
    return fault


@bug("collect_rollouts", "ratio", "trlx #509, #582; TRL #1781",
     "Shift the mask together with the log-probs: token_mask[:, 1:].")
def mask_one_off(healthy):
    """The mask over tokens is used for actions without the shift, token_mask[:, :-1]: the first
    action is left out, and one padding slot, with no recorded log-prob, comes in."""
    def change(roll, policy, critic):
        roll.mask = np.pad(roll.mask[:, :-1], ((0, 0), (1, 0)))
    return after_collecting(healthy, change)


@bug("collect_rollouts", "score fn", "RAGEN #59; TRL #5303, where pad_token = eos_token",
     "Take the mask from the sampler's own bookkeeping, never from ids.")
def mask_without_end(healthy):
    """The mask is made by comparing ids with the padding id, which is also the end token: the
    action of ending is never learnt from."""
    def change(roll, policy, critic):
        roll.mask = without_id(roll, EOS)
    return after_collecting(healthy, change)


@bug("collect_rollouts", "score fn", "masked tool outputs: verl #2337, miles #1827",
     "Keep the mask of a response in one piece, or let GAE step over the gap.")
def gap_in_mask(healthy):
    """An id inside the response (here 3) is masked out as if it were padding. GAE starts anew at
    the gap, so no token before it hears of the score."""
    def change(roll, policy, critic):
        roll.mask = without_id(roll, 3)
    return after_collecting(healthy, change)


@bug("ppo_update", "stale", "the chapter's collect_rollouts, against its own section 4",
     "Record the log-probs while sampling, and keep them.")
def recomputed_logp(healthy):
    """logp_old is computed by the policy that is about to be updated, not by the one that sampled.
    If both are the same nothing changes; if the rollout is stale every ratio says 1."""
    def fault(policy, critic, opt, roll, *rest, **kw):
        with t.no_grad():
            now = t.token_log_probs(policy(roll.tokens), roll.tokens).data * roll.mask
        return healthy(policy, critic, opt, replace(roll, logp_old=now), *rest, **kw)
    return fault


@bug("sample", "score fn", "OpenRLHF #853",
     "Score with the softmax that was sampled from: logits / temperature everywhere.")
def temperature_in_sampling(healthy):
    """Responses are sampled at temperature 1.5; old, new and reference log-probs are all of
    temperature 1, so that every ratio is 1 and the samples are of another policy."""
    return otherwise_sampled(healthy, temperature=1.5)


@bug("sample", "KL", "TRL #235, #736 and its FAQ on negative KL",
     "Sample from the whole softmax while collecting for PPO.")
def top_k_sampling(healthy):
    """Only the two likeliest tokens are sampled, and scored under the whole softmax."""
    return otherwise_sampled(healthy, top_k=2)


@bug("ppo_clip_loss", "tie", "the lesson (policy_logps inside r_dense)",
     "Make the reward of logp_old, a constant array.")
def gradient_through_reward(healthy):
    """The log-prob inside the KL reward is the live one, so the loss also has the gradient
    +beta grad log pi on every token. Its mean is 0 under the policy that sampled, and only there:
    it pushes every sampled token down, and no clip holds it."""
    def fault(logp_new, logp_old, advantages, mask, eps):
        loss, clip_frac = healthy(logp_new, logp_old, advantages, mask, eps)
        return loss + t.mean_over(logp_new, mask=mask > 0) * BETA, clip_frac  # dA_t / dlogp = -beta
    return fault


@bug("ppo_clip_loss", "clip", "takuseno/ppo #3; proposed in TensorLayer #1072",
     "Multiply by A first, then take the minimum.")
def clip_reversed(healthy):
    """min(r, clip(r)) times A in place of min(r A, clip(r) A). For A < 0 that is the other end: a
    token already too unlikely is pushed on, and one that became likelier is let go."""
    def fault(logp_new, logp_old, advantages, mask, eps):
        ratio = (logp_new - logp_old).exp()
        lesser = t.minimum(ratio, t.clip(ratio, low=1 - eps, high=1 + eps))
        loss = -t.mean_over(lesser * advantages, mask=mask > 0)
        return loss, healthy(logp_new, logp_old, advantages, mask, eps)[1]
    return fault


@bug("kl_estimates", "stale", "hands-on-modern-rl #27; tensorforce #107",
     "The samples are of the old policy, so r = new / old: r - 1 - log r.")
def k3_backwards(healthy):
    """k3 is taken of the inverse ratio. To second order that is the same number."""
    return lambda logp, ref, kind: healthy(*((ref, logp) if kind == "k3" else (logp, ref)), kind)


@bug("kl_estimates", "stop", "spinningup #137: its k1, of the right sign, may be negative too",
     "Compare k3, which cannot be negative, with the target.")
def early_stop_sign(healthy):
    """The epochs are to stop when mean(logp_new - logp_old) exceeds the target. That mean is
    about -KL(old || new), so they never do."""
    return lambda logp, ref, kind: healthy(ref, logp, "k1")


@bug("whiten", "padding", "SkyRL #1305",
     "Take mean and deviation over the mask, and write zeros outside it.")
def whitening_over_padding(healthy):
    """Mean and deviation of the advantages are taken over all columns, the zeros of prompt and
    padding among them."""
    return lambda x, mask, *rest, **kw: healthy(x, np.ones_like(mask), *rest, **kw) * mask


@bug("sequence_kl", "KL", "trlx #438, #441",
     "Sum over the tokens of a row, then average over rows.")
def kl_per_token(healthy):
    """The controller, whose target is in nats per sequence, is told the mean over tokens. It finds
    the KL far below its target and takes the price down."""
    return lambda roll: float(t.masked_mean(roll.logp_old - roll.logp_ref, roll.mask))


@bug("collect_rollouts", "KL", "TRL #2046 (here refused with a sentence, so injected behind it)",
     "Give the reference memory of its own: policy.frozen_copy() before training.")
def reference_is_policy(healthy):
    """The reference is the policy itself, so it moves along and the KL is 0 for ever."""
    def change(roll, policy, critic):
        roll.logp_ref = t.token_log_probs(policy(roll.tokens), roll.tokens).data
    return after_collecting(healthy, change)


@bug("value_loss", None, "RLlib, ray #2233; proposed in rsl_rl #152",
     "max, as in the loss of the policy, where minus min is max.")
def value_clip_min(healthy):
    """The smaller of the two squared errors is taken. A value that moved on towards its target is
    not held, and one that moved away by more than eps has no gradient that brings it back."""
    def fault(values, old, returns, mask, eps):
        near = t.clip(values - old, low=-eps, high=eps) + old
        lesser = t.minimum((values - returns) ** 2, (near - returns) ** 2)
        return t.mean_over(lesser, mask=mask > 0) * 0.5
    return fault


@bug("value_loss", None, "the lesson's value loss against the chapter's",
     "Write down once where the 1/2 stands; compare the gradient with V - G by hand.")
def value_half_missing(healthy):
    """The squared error without its 1/2: the critic's gradient is twice as large."""
    return lambda *args: healthy(*args) * 2


@bug("whiten", None, "TRL's masked_var has both, #1540",
     "Any of the two, but one; population deviation needs no second token.")
def sample_deviation(healthy):
    """Whitening divides by the sample deviation (n - 1), not by that of the population (n)."""
    return lambda x, mask, *r, **k: healthy(x, mask, *r, **k) * np.sqrt(1 - 1 / mask.sum())


@bug("value_loss", "tie", "encode-attend-navigate-pytorch #2",
     "Compute advantages from recorded values, before the loss and outside the graph.")
def advantages_live(healthy):
    """The values inside the advantages are live, A = G - V, so that the loss of the policy pushes
    every value down: V comes to rest below G, by a constant that explained variance cannot see."""
    def fault(values, old, returns, mask, eps):
        leak = t.mean_over(values, mask=mask > 0) * (1 / PLAIN.vf_coef)  # d(-r A) / dV = r, about 1
        return healthy(values, old, returns, mask, eps) + leak
    return fault


@bug("Adam.zero_grad", "twice", "transformers #340; pytorch #47175 asks for a warning",
     "Clear the gradients before each backward.")
def zero_grad_missing(healthy):
    """Gradients are never cleared: each step also takes all steps before it, clipped."""
    return lambda self: None


@bug("accumulate", "split", "verl #6957; SkyRL #925",
     "Divide every micro-batch's sum by the tokens of the whole minibatch.")
def micro_batch_means(healthy):
    """Each micro-batch is divided by its own number of tokens and the means are averaged, so that
    a token counts more in a micro-batch of short responses."""
    def fault(policy, critic, roll, rows, *rest):
        parts = np.array_split(rows, -(-roll.tokens[rows].size // t.CHUNK_TOKENS))
        seen = [healthy(policy, critic, roll, part, *rest) for part in parts]
        for p in policy.parameters() + critic.parameters():
            p.grad = p.grad / len(parts)
        return np.mean(seen, axis=0).tolist()
    return fault


@bug("gae", "exact", "the lesson (r_dense - values); rlhf-book #216",
     "A_t needs what comes after t: delta_t + gamma lambda A_{t+1}.")
def no_bootstrap(healthy):
    """A_t = R_t - V_t: each token is credited with its own reward only, so the score reaches the
    last token alone."""
    def fault(rewards, values, mask, *rest):
        advantages = (rewards - values) * mask
        return advantages, rewards * mask
    return fault


@bug("gae", "padding", "alpaca-rlhf #9; rlhf-book #216",
     "V behind the last response token is 0: mask the recursion, not its result.")
def values_of_padding(healthy):
    """The recursion runs over all columns and is masked afterwards, so that what the critic says
    of padding is taken for the value after the end."""
    def fault(rewards, values, mask, *rest):
        return tuple(x * mask for x in healthy(rewards, values, np.ones_like(mask), *rest))
    return fault


@bug("collect_rollouts", "exact", "TRL #44",
     "The value of the state before the action t is critic(tokens)[:, t].")
def values_one_late(healthy):
    """values_old is critic(tokens)[:, 1:], V of the state after the action. A baseline that knows
    the action takes away the very difference that it should leave."""
    def change(roll, policy, critic):
        roll.values_old = critic(roll.tokens).data[:, 1:]
    return after_collecting(healthy, change)


@bug("shaped_rewards", "exact", "TRL's kl_penalty='abs', #1161; the chapter's first question",
     "Leave the sign: the refund on rarer tokens is part of the KL.")
def kl_absolute(healthy):
    """Negative log-ratios look like an error and are made positive: no token gets a refund."""
    return lambda scores, logp, ref, *rest: healthy(scores, np.abs(logp - ref), 0 * ref, *rest)


# ------------------------------------------------------------------ the diagnostics

State = namedtuple("State", "policy ref critic seed memo")  # memo: what two diagnostics share


class Even(np.random.Generator):
    """Points that fill the cube (0, 1)^N evenly in place of random ones: means with less noise."""

    def __init__(self):
        super().__init__(np.random.PCG64())

    def random(self, shape):
        """Multiples of the powers of 1 / phi, phi^(N+1) = phi + 1, modulo 1 (Roberts 2018)."""
        rows, columns = shape
        phi = 2.0
        for _ in range(60):
            phi = (1 + phi) ** (1 / (columns + 1))
        return (0.5 + np.outer(np.arange(1, rows + 1), phi ** -np.arange(1.0, columns + 1))) % 1


class Recorder(t.Adam):
    """An optimiser that moves nothing and keeps the gradient of each step, (D,)."""

    def __init__(self, policy, critic):
        super().__init__(policy.parameters() + critic.parameters(), 0.0)
        self.seen = []

    def step(self):
        """Keep the gradient."""
        self.seen.append(np.concatenate([p.grad.ravel() for p in self.params]))


def start(seed):
    """A lumpy policy, its frozen copy as the reference, a critic with some opinion -> State."""
    rng = np.random.default_rng(seed)
    cfg = t.ToyLMConfig(VOCAB, len(PROMPT) + LENGTH + SPARE, d_model=8, n_layers=1, dtype="float64")
    policy, critic = t.TinyCausalLM(cfg, rng), t.TinyCritic(cfg, rng)
    for p in policy.parameters() + critic.parameters():
        p.data += rng.normal(0, 0.3, p.shape)
    return State(policy, policy.frozen_copy(), critic, seed, {})


def train(s, **changes):
    """PPO on a State's own models, in micro-batches -> its history."""
    with mock.patch.object(t, "CHUNK_TOKENS", 192):
        return t.train_ppo(s.policy, s.ref, s.critic, [PROMPT] * 64, count_good, EOS,
                           replace(PLAIN, **changes), rng=np.random.default_rng(s.seed))


def rollout(s, rows):
    """An even sample, collected and scored -> (Rollout, scores)."""
    roll = t.collect_rollouts(s.policy, s.ref, s.critic, [PROMPT] * rows, LENGTH, EOS, rng=Even())
    return roll, count_good(roll.tokens, np.pad(roll.mask, ((0, 0), (1, 0))))


def checkpoint(seed):
    """A State after two healthy steps, its critic then fitted alone: models that know something."""
    s = start(seed)
    train(s, steps=2)
    roll, scores = rollout(s, 256)
    _, returns = t.advantages_and_returns(roll, scores, BETA, BARE)
    t.fit(s.critic, 1e-2, 60, lambda: t.value_loss(
        s.critic(roll.tokens)[:, :-1], roll.values_old, returns, roll.mask, 1e9))
    return s


def update(s, roll, scores, cfg=BARE, beta=BETA):
    """A ppo_update that moves nothing -> (gradient of each step (steps, D), its PPOStats)."""
    policy, critic = s.policy.copy(), s.critic.copy()
    opt = Recorder(policy, critic)
    stats = t.ppo_update(policy, critic, opt, roll, scores, beta, cfg)
    return np.array(opt.seen), stats


def apart(a, b):
    """|a - b| / |b|."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def exact(policy, ref):
    """J, KL and the rest of a policy, by enumeration."""
    return t.exact_objective(policy, ref, PROMPT, count_good, LENGTH, EOS, BETA)


def mean_length(s):
    """E[tokens of a response]."""
    L = list_responses(s.policy, s.ref, LENGTH)
    return float(L.p @ L.mask.sum(axis=1))


def ratio(s):
    """Share of tokens whose ratio is not 1 on a fresh rollout, before any step."""
    return update(s, *rollout(s, 256), replace(BARE, clip_eps=1e-9))[1].clip_frac_first


def logged_kl(s):
    """KL to the reference as the log has it, over the exact one."""
    return t.sequence_kl(rollout(s, MANY)[0]) / exact(s.policy, s.ref).kl


def stale(s):
    """KL(old || new) as logged for a rollout of an older policy, over the exact one."""
    later, rng = s.policy.copy(), np.random.default_rng(s.seed)
    for p in later.parameters():
        p.data += rng.normal(0, 0.2, p.shape)
    stats = update(s._replace(policy=later), *rollout(s, MANY))[1]
    return stats.approx_kl * mean_length(s) / exact(s.policy, later).kl


def padding(s):
    """Change of the gradient when four columns of padding, full of nines, are appended."""
    roll, scores = rollout(s, 256)
    more = lambda x, value: np.pad(x, ((0, 0), (0, SPARE)), constant_values=value)
    longer = replace(roll, tokens=more(roll.tokens, EOS), mask=more(roll.mask, 0), **{
        name: more(getattr(roll, name), 9.0) for name in ("logp_old", "logp_ref", "values_old")})
    cfg = replace(BARE, whiten_advantages=True, lam=0.95)
    return apart(update(s, longer, scores, cfg)[0], update(s, roll, scores, cfg)[0])


def split(s):
    """Change of the gradient when the batch goes through in micro-batches."""
    roll, scores = rollout(s, 256)
    with mock.patch.object(t, "CHUNK_TOKENS", roll.tokens.size):
        whole = update(s, roll, scores)[0]
    with mock.patch.object(t, "CHUNK_TOKENS", 96):
        return apart(update(s, roll, scores)[0], whole)


def twice(s):
    """Length of a second gradient of the same batch at the same weights, over the first."""
    first, second = update(s, *rollout(s, 256), replace(BARE, ppo_epochs=2))[0]
    return float(np.linalg.norm(second) / np.linalg.norm(first))


def indifferent(s):
    """The State with its policy as the reference and a critic that says 0: no reason to move."""
    critic = t.TinyCritic(s.policy.cfg, np.random.default_rng(0))
    return s._replace(ref=s.policy.frozen_copy(), critic=critic)


def tie(s):
    """Length of the gradient where each score, KL, value, so each advantage and error, is 0."""
    s = indifferent(s)
    roll, scores = rollout(s, 256)
    return float(np.linalg.norm(update(s, roll, 0 * scores)[0]))


def policy_part(s, gradient):
    """The policy's share of a recorded gradient, per response."""
    return gradient[0, :sum(p.data.size for p in s.policy.parameters())] * mean_length(s)


def score_function(s):
    """Length of the mean of grad log pi (all advantages are 1), per response: 0 in expectation."""
    s = indifferent(s)
    roll, scores = rollout(s, MANY)
    return float(np.linalg.norm(policy_part(s, update(s, roll, 0 * scores + 1)[0])))


def against_exact(s):
    """Distance of the policy's gradient from the exact grad J, over the length of grad J."""
    twin, L = s.policy.copy(), list_responses(s.policy, s.ref, LENGTH)
    return apart(-policy_part(s, update(s, *rollout(s, MANY))[0]), flat_grad(
        exact_J(twin, s.ref, L, BETA), twin))


def moved(s, **only):
    """Exact KL(old || new) a token after 20 epochs on one rollout with a large step size."""
    policy, critic = s.policy.copy(), s.critic.copy()
    cfg = replace(PLAIN, ppo_epochs=20, **only)
    opt = t.Adam(policy.parameters() + critic.parameters(), 1e-2)
    t.ppo_update(policy, critic, opt, *rollout(s, 128), BETA, cfg)
    return exact(s.policy, policy).kl / mean_length(s)


def finished(s):
    """A run of PPO from the start -> (explained variance, fraction of the optimum)."""
    if "run" not in s.memo:
        new = start(s.seed)
        known = [stats.explained_variance for stats in train(new)[-8:]]
        s.memo["run"] = float(np.mean(known)), exact(new.policy, new.ref).fraction
    return s.memo["run"]


Diagnostic = namedtuple("Diagnostic", "measure tolerance what")
DIAGNOSTICS = {
    "ratio": Diagnostic(ratio, 1e-6, "share of tokens whose ratio is not 1 before a step"),
    "KL": Diagnostic(logged_kl, 0.1, "logged KL to the reference, over the exact KL"),
    "stale": Diagnostic(stale, 0.1, "logged KL(old || new), stale rollout, over exact"),
    "padding": Diagnostic(padding, 1e-6, "change of the gradient when padding is appended"),
    "split": Diagnostic(split, 1e-6, "change of the gradient when the batch is split"),
    "twice": Diagnostic(twice, 1e-6, "second gradient of the same batch, over the first"),
    "tie": Diagnostic(tie, 1e-6, "gradient where every score, KL and value is 0"),
    "score fn": Diagnostic(score_function, 0.1, "gradient where every advantage is 1, a response"),
    "exact": Diagnostic(against_exact, 0.1, "distance of the gradient from the exact grad J"),
    "clip": Diagnostic(lambda s: moved(s), 0.3, "KL(old || new) after 20 epochs, clip alone"),
    "stop": Diagnostic(lambda s: moved(s, clip_eps=1e3, target_kl=0.02), 0.1,
                       "KL(old || new) after 20 epochs, early stop at .02 alone"),
    "explained": Diagnostic(lambda s: finished(s)[0], 0.15, "explained variance, end of a run"),
    "optimum": Diagnostic(lambda s: finished(s)[1], 0.05, "fraction of the optimum, end of a run"),
}


def measure(s, name=None, wanted=None):
    """Figures of all or the wanted diagnostics, under a bug if there is a name -> {key: figure}."""
    s = s._replace(memo={})
    with broken(name):
        return {key: DIAGNOSTICS[key].measure(s) for key in wanted or DIAGNOSTICS}


def sees(key, healthy, broken_figure):
    """Whether a diagnostic tells a broken figure from the healthy one."""
    change = abs(broken_figure - healthy)
    if key in ("explained", "optimum") and broken_figure > healthy:
        change = 0.0  # a run that ends better gives nothing away
    return change > DIAGNOSTICS[key].tolerance


# ------------------------------------------------------------------ what is printed


def figure(x, width=10):
    """Three digits behind the point; a rounding error as a power of ten."""
    return f"{x:{width}.0e}" if 0 < abs(x) < 5e-4 else cell(x, width)


def seen(base, figures):
    """The diagnostics that tell figures from the healthy ones -> list."""
    return [key for key in figures if sees(key, base[key], figures[key])]


def letters(keys):
    """Diagnostics as the letters of the legend."""
    return " ".join("abcdefghijklmnopqrst"[list(DIAGNOSTICS).index(key)] for key in keys)


def legend(base):
    """The diagnostics with their letters and healthy figures."""
    title("The diagnostics, and what they show of the healthy file")
    for key, diagnostic in DIAGNOSTICS.items():
        print(f"  {letters([key])}  {key:10}{figure(base[key])}   {diagnostic.what}")


def wrapped(text):
    """A paragraph of at most 100 columns."""
    print("\n" + textwrap.fill(text, 100))


def value_by_hand():
    """value_loss(5, 1, 10), eps .2: (1.2 - 10)^2 / 2"""
    one = np.ones((1, 1))
    return float(t.value_loss(t.Tensor(5 * one), one, 10 * one, one, 0.2))


def whitened_by_hand():
    """the 4 of 1, 2, 3, 4 whitened: 1.5 / sqrt(5 / 4)"""
    return float(t.whiten([[1.0, 2.0, 3.0, 4.0]], np.ones((1, 4)))[0, 3])


BY_HAND = {"value_clip_min": value_by_hand, "value_half_missing": value_by_hand,
           "sample_deviation": whitened_by_hand}


def by_hand(names):
    """Bugs that no diagnostic sees, and one value each that does."""
    title("What no diagnostic sees, a value computed by hand does")
    for name in names:
        value = BY_HAND[name]
        with broken(name):
            wrong = value()
        print(f"{name:20}healthy {value():7.4f}  broken {wrong:7.4f}  {value.__doc__}")


def museum(seed):
    """Every bug on one seed: which diagnostic gives it away, by how much, and what it costs."""
    s = checkpoint(seed)
    base = measure(s)
    legend(base)
    title("One bug at a time")
    print(f"{'':25}{'given away by':14}{'healthy':>10}{'broken':>10}{'optimum':>10}   also seen by")
    print(f"{'healthy':59}{base['optimum']:10.1%}")
    found = {}
    for name in BUGS:
        figures, key = measure(s, name), BUGS[name].seen_by
        found[name] = seen(base, figures)
        both = figure(base[key]) + figure(figures[key]) if key else ""
        print(f"{name:25}{key or 'nothing':14}{both:20}{figures['optimum']:10.1%}   "
              + letters(other for other in found[name] if other != key), flush=True)
    wrapped("No diagnostic sees " + (", ".join(n for n in found if not found[n]) or "none") + ".")
    wrapped(f"{sum('optimum' not in keys for keys in found.values())} of {len(found)} end within "
            f"{DIAGNOSTICS['optimum'].tolerance} of the healthy fraction of the optimum.")
    by_hand(BY_HAND)


def explain(name, seed):
    """One bug: what is wrong, where it stood, every diagnostic, the cure."""
    s, found = checkpoint(seed), BUGS[name]
    title(f"{name}: tinyrlhf.{found.attribute} is replaced")
    print(textwrap.fill(found.wrong, 100))
    print(f"\nIt stood in: {found.source}.\n")
    print(f"{'':13}{'healthy':>10}{'broken':>10}")
    base, figures = measure(s), measure(s, name)
    for key, diagnostic in DIAGNOSTICS.items():
        mark = "seen" if sees(key, base[key], figures[key]) else ""
        print(f"  {key:11}{figure(base[key])}{figure(figures[key])}  {mark:6}{diagnostic.what}")
    if name in BY_HAND:
        by_hand([name])
    given = f"given away by {found.seen_by!r}" if found.seen_by else "seen by no diagnostic"
    wrapped(f"The bug is {given}. The cure: {found.cure}")


def seed_by_seed(seeds):
    """In how many seeds each bug is seen by its diagnostic, by how much, and by which others."""
    states = [checkpoint(seed) for seed in range(seeds)]
    bases = [measure(s) for s in states]
    legend({key: float(np.median([base[key] for base in bases])) for key in DIAGNOSTICS})
    title(f"Over {seeds} seeds (above: medians): in how many the diagnostic, or any, sees the bug")
    print(f"{'':25}{'given away by':14}{'seen':>5}{'least':>10}{'most':>10}{'optimum':>9}"
          "   also seen in most")
    for name, found in BUGS.items():
        runs, key = [measure(s, name) for s in states], found.seen_by
        hits = [seen(base, figures) for base, figures in zip(bases, runs)]
        count = {other: sum(other in hit for hit in hits) for other in DIAGNOSTICS}
        values = [figures[key] for figures in runs] if key else []
        spread = figure(min(values)) + figure(max(values)) if key else ""
        print(f"{name:25}{key or 'nothing':14}{count[key] if key else sum(map(bool, hits)):5}"
              f"{spread:20}{count['optimum']:9}   "
              + letters(k for k in count if k != key and count[k] >= 0.8 * seeds), flush=True)


def main():
    """The whole museum, one bug, or the verdicts over seeds."""
    parser = Parser(description="A museum of bugs, each with the diagnostic that gives it away.")
    parser.add_argument("name", nargs="?", metavar="NAME", choices=BUGS, help="explain one bug: "
                        + ", ".join(BUGS))
    parser.add_argument("--seed", type=at_least(0), default=0, help="of the toy")
    parser.add_argument("--seeds", type=at_least(1), help="instead: verdicts over so many seeds")
    args = parser.parse_args()
    if args.seeds:
        seed_by_seed(args.seeds)
    elif args.name:
        explain(args.name, args.seed)
    else:
        museum(args.seed)


if __name__ == "__main__":
    main()
