"""What does each failure of PPO for language models look like, and which of its known fixes works?

    python examples/failure_modes.py                      the chapter's seven rows, one seed
    python examples/failure_modes.py NAME --seeds 5       one row; a wrong NAME lists them
    python examples/knobs.py                              the eight knobs, one at a time

Each row is provoked on a toy whose 1,365 responses are listed, so fractions of the optimum, KL and
the judge's gold score are exact; then each fix of the table is applied. Medians of 5 seeds:

- Over-optimised (a reward model from 100 choices): score 2.97, gold -1.11 where the reference has
  .34. Lower KL target .93, refreshed reward model 1.09, both in all seeds. Length penalty: 1.66, in
  4 of 5, and one response is left. It helps where length is what is exploited. (With another number
  of BLAS threads, whose last digits a long run amplifies: -.79, .98, 1.11, and 3 of 5.)
- KL explodes (lr 5e-3, beta .1, 8 epochs): 5.88 nats after 10 updates, 7.41 at the end. One epoch
  (.82) and the early stop (1.42) cure the start, not the end (7.4); the controller cures the end
  (3.25), not the start (6.96). Beta .5 with the early stop cures both, at 98.7 % of the optimum.
- Reward flat. With whitened advantages they cannot be tiny (std 1), so whitening hides this cause;
  it is shown unwhitened, scores of 1e-5 and Adam's eps at 1e-5: 12 % of the optimum. Whitened
  rewards give 86 %. Ten times the lr helps in no seed (median -111 %): the critic's steps do not
  shrink with the score, and its errors drown it; with the critic held at 0 a higher lr gives 94 %.
  If lr itself is the cause (3e-5), raising it does cure: 9 % to 98 %. "Critic too good" is none.
- Value loss dominates: a random head gives a gradient norm of 4,871, and after 15 updates 26 % of
  the optimum (57 % from a zero head). After 200 steps of value pretraining it is 87 %. In the end
  all are at 97 to 99 %: Adam undoes the clipped norm, so with two networks the harm is passing.
- Collapse: at beta 0 one response is in use where the optimum has 130. Beta .1 keeps 89, beta .02
  123. c_e .01 does nothing (1 of 5 seeds); c_e .1 gives 204, but towards uniform, at 1.53 nats.
- Mask: prompt and padding in the loss leave 67 % of the optimum (98.5 % masked), and a KL told of
  .53 where 1.54 is true. Masking the prompt alone is worse (33 %): padding does the harm.
- Stale by 16 updates, log-probs recomputed: nothing is clipped at first, and later J falls by 76 %
  of what there is to gain. Recorded: 37 % clipped and no such fall (12 %), but a slow start (57 %
  after 20 updates, fresh 96) and no better end (94 to 96 %). One update old, it is 99.3 % without
  recording: at that age the cap is the cure.
"""
import dataclasses
import functools
import sys
import textwrap
from collections import namedtuple
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402
from common import EOS, PROMPT, Parser, at_least, title  # noqa: E402

VOCAB, LENGTH, ROWS, BETA, LR = 5, 5, 64, 0.5, 3e-3
GOOD = 2  # the id that scores

World = namedtuple("World", "policy ref critic rng prompt")
Run = namedtuple("Run", "history policy ref exact path")
Figure = namedtuple("Figure", "name digits better margin", defaults=(0, 0.0))


def good(tokens, token_mask):
    """How often a response says the good token -> (B,); what is padded or asked counts nothing."""
    return ((tokens[:, -LENGTH:] == GOOD) * token_mask[:, -LENGTH:]).sum(axis=1).astype(float)


def make_world(seed, spread=0.0, prompt=PROMPT):
    """A small policy in float64, its reference, a critic; spread > 0 makes the reference lumpy."""
    rng = np.random.default_rng(seed)
    cfg = t.ToyLMConfig(VOCAB, len(prompt) + LENGTH, d_model=16, n_layers=1, dtype="float64")
    policy = t.TinyCausalLM(cfg, rng)
    for p in policy.parameters():
        p.data += rng.normal(0, spread, p.shape)
    return World(policy, policy.frozen_copy(), t.TinyCritic(cfg, rng), rng, list(prompt))


def settings(**changes):
    """PPO's settings in this study, but for the changes."""
    return t.PPOConfig(**(dict(steps=60, max_new_tokens=LENGTH, beta=BETA, lr=LR) | changes))


def train(world, cfg, score=good, rows=ROWS, beta=None, watch=None):
    """PPO -> Run; exact: at the price `beta` (default cfg.beta); path: its fraction every `watch`
    steps."""
    policy, ref, critic, rng, prompt = world
    exact = lambda: t.exact_objective(policy, ref, prompt, score, LENGTH, EOS, beta or cfg.beta)
    path = []

    def on_step(step, stats):
        if watch and (step + 1) % watch == 0:
            path.append(exact().fraction)
    history = t.train_ppo(policy, ref, critic, [prompt] * rows, score, EOS, cfg, rng=rng,
                          on_step=on_step)
    return Run(history, policy, ref, exact(), path)


def mean_length(e):
    """E[tokens a response] under the policy of an ExactObjective."""
    return float(np.exp(e.logp) @ e.mask.sum(axis=1))


# ------------------------------------------------------------------ 1 over-optimisation

PAIRS = 100
Judged = namedtuple("Judged", "better better_mask worse worse_mask")  # (pairs, T) each


def gold(tokens, token_mask):
    """What the judge feels: three good words please, each one more grates; long is tiresome."""
    n = good(tokens, token_mask)
    return np.minimum(n, 3) - 3 * np.maximum(n - 3, 0) - 0.1 * token_mask.sum(axis=1)


def judge(policy, rng):
    """The judge's noisy choices between two samples of a policy (Bradley-Terry) -> Judged."""
    a, b = (t.sample(policy, [PROMPT] * PAIRS, LENGTH, EOS, rng=rng) for _ in "ab")
    margin = gold(a.tokens, a.token_mask) - gold(b.tokens, b.token_mask)
    first = (rng.random(PAIRS) < 1 / (1 + np.exp(-2 * margin)))[:, None]
    pick = lambda flag: (np.where(flag, a.tokens, b.tokens),
                         np.where(flag, a.token_mask, b.token_mask))
    return Judged(*pick(first), *pick(~first))


def fit_reward_model(ref, judged):
    """A reward model on the reference's trunk, from choices -> reward_fn."""
    model = t.TinyCritic.from_backbone(ref)

    def loss_of():
        return t.reward_model_loss(t.score_sequences(model, judged.better, judged.better_mask),
                                   t.score_sequences(model, judged.worse, judged.worse_mask))
    t.fit(model, 3e-3, 100, loss_of)

    def score(tokens, token_mask):
        with t.no_grad():
            return t.score_sequences(model, tokens, token_mask).data
    return score


@functools.cache
def judged_world(seed):
    """The reference's samples judged, and the reward model learnt from that."""
    world = make_world(seed)
    judged = judge(world.ref, world.rng)
    return judged, fit_reward_model(world.ref, judged)


def over_optimise(seed, target=6.0, price=0.0, refresh=False, steps=40):
    """PPO against a reward model, twice `steps`; between them the model may be refreshed."""
    judged, proxy = judged_world(seed)
    world, score = make_world(seed), proxy
    charged = lambda tokens, mask: score(tokens, mask) - price * mask.sum(axis=1)
    cfg = settings(steps=max(steps, 1), lr=5e-3, beta=0.1, kl_target=target, kl_horizon=2)
    if steps:
        train(world, cfg, charged)
        if refresh:
            both = map(np.concatenate, zip(judged, judge(world.policy, world.rng)))
            score = fit_reward_model(world.ref, Judged(*both))
        train(world, cfg, charged)
    e, by_judge = (t.exact_objective(world.policy, world.ref, PROMPT, f, LENGTH, EOS, BETA)
                   for f in (proxy, gold))
    return e.reward, by_judge.reward, e.kl, mean_length(e), float(np.exp(e.entropy))


# ------------------------------------------------------------------ 2 KL explodes early

def explode(seed, **changes):
    """KL after 10 updates and at the end, the largest step, and J at the price really meant."""
    cfg = settings(**(dict(lr=5e-3, beta=0.1, ppo_epochs=8) | changes))
    run = train(make_world(seed), cfg, beta=BETA)
    step = max(s.approx_kl for s in run.history[:15])
    return run.history[10].kl, step, run.exact.kl, run.exact.fraction


# ------------------------------------------------------------------ 3 reward flat

def flat(seed, scale=1.0, adam_eps=1e-5, pretrained=0, **changes):
    """PPO under a scaled reward (and beta, so that the optimum stays) and Adam with this eps."""
    world = make_world(seed)
    if pretrained:
        pretrain(world, pretrained)
    score = lambda tokens, mask: scale * good(tokens, mask)
    cfg = settings(**(dict(beta=BETA * scale, whiten_advantages=False) | changes))
    spread = first_advantages(world, cfg, score).std()
    with mock.patch.object(t, "Adam", functools.partial(t.Adam, eps=adam_eps)):
        run = train(world, cfg, score)
    clipped = np.mean([s.clip_frac for s in run.history])
    return spread, 100 * clipped, run.exact.reward / scale, run.exact.fraction


def first_advantages(world, cfg, score):
    """The advantages of a rollout as the loss would see them -> (tokens,)."""
    roll = rollout(world, np.random.default_rng(0))
    scores = score(roll.tokens, np.pad(roll.mask, ((0, 0), (1, 0))))
    return t.advantages_and_returns(roll, scores, cfg.beta, cfg)[0][roll.mask > 0]


def rollout(world, rng):
    """One batch from the policy as it is."""
    policy, ref, critic, _, prompt = world
    return t.collect_rollouts(policy, ref, critic, [prompt] * ROWS, LENGTH, EOS, rng=rng)


# ------------------------------------------------------------------ 4 value loss dominates

def pretrain(world, steps, score=good):
    """Value pretraining: the critic alone learns the returns (lambda 1), the policy is frozen."""
    opt = t.Adam(world.critic.parameters(), 1e-2)
    for _ in range(steps):
        roll = rollout(world, world.rng)
        scores = score(roll.tokens, np.pad(roll.mask, ((0, 0), (1, 0))))
        rewards = t.shaped_rewards(scores, roll.logp_old, roll.logp_ref, roll.mask, BETA)
        _, returns = t.gae(rewards, roll.values_old, roll.mask, lam=1.0)
        opt.zero_grad()
        values = world.critic(roll.tokens)[:, :-1]
        t.value_loss(values, roll.values_old, returns, roll.mask, clip_eps=1e3).backward()
        opt.step()


def bad_critic(seed, head=0.0, pretrained=0, **changes):
    """PPO from a critic whose head is Normal(0, head), after value pretraining or without."""
    world = make_world(seed)
    weight = world.critic.params["value_head.weight"]
    weight.data = np.random.default_rng(seed).normal(0, head, weight.shape)
    pretrain(world, pretrained)
    run = train(world, settings(**(dict(lam=0.5) | changes)), watch=5)
    first = run.history[0]
    return (first.explained_variance, first.grad_norm, min(run.path[:3]), run.path[2],
            run.exact.fraction)


# ------------------------------------------------------------------ 5 collapse

def says_good(tokens, token_mask):
    """1 if the response says the good token at all: very many responses are equally right."""
    return (good(tokens, token_mask) > 0).astype(float)


def collapse(seed, **changes):
    """Entropy at the end, and the responses really in use, exp(entropy), beside the optimum's."""
    cfg = settings(**(dict(steps=120) | changes))
    run = train(make_world(seed, spread=0.3), cfg, says_good, beta=0.1)
    e = run.exact
    best = -(np.exp(e.logp_star) @ e.logp_star)
    return (run.history[-1].entropy, float(np.exp(e.entropy)), float(np.exp(best)), e.kl,
            e.fraction)


# ------------------------------------------------------------------ 6 missing mask

LONG_PROMPT = [1, 3, 1, 3, 1, 3]
COLLECT = t.collect_rollouts


def unmasked(policy, *args, prompt, after, **kwargs):
    """A rollout whose mask also covers the prompt, or what stands after the end, or both."""
    roll = COLLECT(policy, *args, **kwargs)
    inside, first = roll.mask > 0, len(LONG_PROMPT) - 1  # first action of the response
    with t.no_grad():
        logp = t.token_log_probs(policy(roll.tokens), roll.tokens).data
    mask = inside.copy()
    mask[:, :first] |= prompt
    mask[:, first:] |= after
    return dataclasses.replace(roll, mask=mask.astype(float),
                               logp_old=np.where(inside, roll.logp_old, logp))


def no_mask(seed, **where):
    """PPO on the wrong mask: tokens it counts, KL it reports, and what became of the policy."""
    world = make_world(seed, spread=0.3, prompt=LONG_PROMPT)
    with mock.patch.object(t, "collect_rollouts", functools.partial(unmasked, **where)):
        run = train(world, settings())
    last = run.history[-10:]
    return (np.mean([s.response_length for s in last]), mean_length(run.exact),
            np.mean([s.kl for s in last]), run.exact.kl, run.exact.fraction)


# ------------------------------------------------------------------ 7 stale rollouts

def stale_collector(lag, recorded):
    """collect_rollouts whose rollouts wait for `lag` updates; log-probs recorded, or anew."""
    waiting = []

    def collect(policy, *args, **kwargs):
        while len(waiting) <= lag:
            waiting.append(COLLECT(policy, *args, **kwargs))
        roll = waiting.pop(0)
        if not recorded:
            with t.no_grad():
                roll.logp_old = t.token_log_probs(policy(roll.tokens), roll.tokens).data * roll.mask
        return roll
    return collect


def stale(seed, lag=0, recorded=True):
    """PPO on rollouts `lag` updates old: what the first pass shows, and the way to the end."""
    with mock.patch.object(t, "collect_rollouts", stale_collector(lag, recorded)):
        run = train(make_world(seed), settings(steps=120, lr=5e-3), watch=10)
    fall = max(np.maximum.accumulate(run.path) - run.path)
    first = np.mean([s.clip_frac_first for s in run.history])
    return 100 * first, run.path[1], fall, np.mean(run.path[-3:])


# ------------------------------------------------------------------ the table

Mode = namedtuple("Mode", "symptom cause run figures variants lesson")
OPTIMUM = Figure("of optimum", 3, 1, 0.02)
TINY = dict(scale=1e-5)
NOWHERE, BEFORE, BEHIND, BOTH = (dict(prompt=p, after=a) for a in (False, True)
                                 for p in (False, True))

# The first variant is healthy, the second shows the symptom, the others are the fixes.
MODES = {
    "over-optimised": Mode(
        "Reward up, quality down, outputs long or formulaic",
        "a reward model from 100 noisy choices, KL target 6 nats",
        over_optimise,
        [Figure("score", 2), Figure("gold", 2, 1, 0.1), Figure("KL", 2), Figure("tokens", 2),
         Figure("in use", 0)],
        {"the reference, before PPO": dict(steps=0), "KL target 6 nats": {},
         "lower KL target, .5": dict(target=0.5), "reward model refreshed": dict(refresh=True),
         "length penalty, .5 a token": dict(price=0.5)},
        "The reward model has hardly met four good words and asks for five; the judge does "
        "not. Less KL or fresh judgements cure it. A price on length helps where length is "
        "what is exploited, and leaves one response in use: it moves the exploit, it does not "
        "end it."),
    "kl-explodes": Mode(
        "KL explodes early", "lr 5e-3, beta .1, 8 epochs; J is told at beta .5",
        explode,
        [Figure("KL at 10", 2, -1, 0.5), Figure("step KL", 4, -1, 0.001),
         Figure("KL at end", 2, -1, 0.5), OPTIMUM],
        {"lr 3e-3, beta .5, 2 epochs": dict(lr=3e-3, beta=0.5, ppo_epochs=2), "all three": {},
         "KL controller, 3 nats": dict(kl_target=3.0, kl_horizon=3),
         "1 epoch": dict(ppo_epochs=1),
         "early stop at .002 nats": dict(target_kl=0.002),
         "beta .5, early stop": dict(beta=0.5, target_kl=0.002)},
        "Two faults in one row. A single epoch and the early stop slow the walk and end at the "
        "same KL: beta names the place, they name the pace. A controller finds the place, but "
        "too late for the start."),
    "flat-scale": Mode(
        "Reward flat, clip fraction 0: advantages tiny", "scores of 1e-5, not whitened, Adam's "
        "eps 1e-5", flat,
        [Figure("std of A", 5), Figure("clipped %", 2), Figure("score/scale", 2, 1, 0.3), OPTIMUM],
        {"scores of 1": {}, "scores of 1e-5": TINY,
         "whitened rewards": TINY | dict(whiten_rewards=True),
         "lr 10 times": TINY | dict(lr=3e-2),
         "lr 10 times, critic held at 0": TINY | dict(lr=3e-2, vf_coef=0.0),
         "whitened advantages": TINY | dict(whiten_advantages=True),
         "scores of 1, critic pretrained": dict(pretrained=200)},
        "Whitened rewards cure it; whitened advantages hide it (std 1 whatever the scale). A "
        "higher lr makes it worse unless the critic is held at 0: the critic's steps do not "
        "shrink with the score, and its errors drown the signal. A good critic is no cause: "
        "after pretraining A's spread and the result are much as they were."),
    "flat-lr": Mode(
        "Reward flat, clip fraction 0: steps tiny", "lr 3e-5, advantages whitened", flat,
        [Figure("std of A", 5), Figure("clipped %", 2), Figure("score/scale", 2, 1, 0.3), OPTIMUM],
        {"lr 3e-3 (the fix)": dict(whiten_advantages=True),
         "lr 3e-5": dict(whiten_advantages=True, lr=3e-5),
         "whitened rewards": dict(whiten_advantages=True, whiten_rewards=True, lr=3e-5)},
        "With whitened advantages (std 1) a flat reward at clip fraction 0 means steps too "
        "small: raise lr. Whitened rewards change nothing there."),
    "value-loss": Mode(
        "Value loss dominates and destabilises", "value head drawn from Normal(0, 5); lambda .5",
        bad_critic,
        [Figure("expl. var.", 2, 1, 0.1), Figure("grad norm", 1, -1, 1.0),
         Figure("lowest", 3, 1, 0.05), Figure("at step 15", 3, 1, 0.05), OPTIMUM],
        {"value head zero": {}, "value head Normal(0, 5)": dict(head=5.0),
         "pretrained, 200 steps": dict(head=5.0, pretrained=200)},
        "Wrong values point the policy the wrong way at first and fill the joint gradient "
        "norm. Adam forgives the norm, and in the end all arrive; pretraining saves the "
        "start."),
    "collapse": Mode(
        "Collapse to a few responses (entropy to 0)", "beta 0, no entropy term; J is told at "
        "beta .1", collapse,
        [Figure("nats/token", 3, 1, 0.1), Figure("in use", 1, 1, 5.0), Figure("optimum's", 1),
         Figure("KL", 2, -1, 0.2), OPTIMUM],
        {"beta .1 (the fix)": dict(beta=0.1), "beta 0": dict(beta=0.0),
         "beta .02": dict(beta=0.02),
         "c_e .01": dict(beta=0.0, ent_coef=0.01), "c_e .1": dict(beta=0.0, ent_coef=0.1)},
        "Hundreds of responses are equally right; without a price PPO drifts to one of them. "
        "A little beta keeps nearly all. c_e .01 is too weak; c_e .1 holds the entropy but "
        "pulls to uniform, not to the reference: the KL stays high."),
    "mask": Mode(
        "Loss on prompt tokens or after the end", "a mask that covers too much", no_mask,
        [Figure("counted", 2), Figure("tokens", 2), Figure("KL told", 2), Figure("KL true", 2),
         OPTIMUM],
        {"masked (the fix)": NOWHERE, "prompt and after the end": BOTH, "prompt masked": BEHIND,
         "after the end masked": BEFORE},
        "What stands after the end does the harm: ends are rewarded for what never was said, "
        "and the KL told is wrong. Half a mask may be worse than none; the prompt alone costs "
        "little here, where all prompts are the same."),
    "stale": Mode(
        "Off-policy drift with asynchronous rollouts", "16 updates old, log-probs recomputed",
        stale,
        [Figure("clipped %", 1), Figure("at step 20", 3), Figure("fall", 3, -1, 0.05),
         Figure("at the end", 3, 1, 0.02)],
        {"fresh": {}, "16 old, recomputed": dict(lag=16, recorded=False),
         "16 old, recorded": dict(lag=16), "1 old, recomputed": dict(lag=1, recorded=False)},
        "Recomputed, the ratio starts at 1 and the first pass clips nothing: nothing warns before "
        "J falls. Recorded log-probs show the staleness and soften the fall, at the price of a "
        "slow start. What cures is the cap on staleness."),
}


def measure(mode, seeds):
    """label -> its figures, (seeds, figures)."""
    return {label: np.array([mode.run(seed, **changes) for seed in range(seeds)])
            for label, changes in mode.variants.items()}


def count(figure, x, rival, sign):
    """In how many seeds x is better (sign 1) or worse (-1) than its rival by the margin."""
    return int((sign * figure.better * (x - rival) > figure.margin).sum())


def report(mode, seeds):
    """Print a mode's table: medians, and in how many seeds the symptom and each fix show."""
    title(mode.symptom)
    print(f"Provoked by: {mode.cause}.")
    print(f"{'':32}" + "".join(f"{f.name:>13}" for f in mode.figures))
    table = measure(mode, seeds)
    healthy, ill, *_ = table
    for label, x in table.items():
        rival, sign = (healthy, -1) if label == ill else (ill, 1)
        line = f"{'  ' if label == healthy else '! ' if label == ill else '+ '}{label:30}"
        for f, column, other in zip(mode.figures, x.T, table[rival].T):
            shown = f"{np.median(column):.{f.digits}f}"
            if f.better and label != healthy:
                shown += f" {count(f, column, other, sign)}/{seeds}"
            else:
                shown += "    "
            line += f"{shown:>13}"
        print(line, flush=True)
    print(textwrap.fill(mode.lesson, 98))


def main():
    """One mode, or all."""
    parser = Parser(description="Seven ways in which PPO on a language model fails, and the fixes.")
    parser.add_argument("name", nargs="?", choices=MODES, metavar="NAME",
                        help=f"one of {', '.join(MODES)}; without it all of them")
    parser.add_argument("--seeds", type=at_least(1), default=1, help="medians over so many seeds")
    args = parser.parse_args()
    print(f"Medians over {args.seeds} seed(s). ! is the symptom, + a fix. k/n: in k of n seeds the "
          "figure\nis worse than the healthy one's (!), or better than the symptom's (+).")
    for name in [args.name] if args.name else MODES:
        report(MODES[name], args.seeds)


if __name__ == "__main__":
    main()
