"""The exercises of both texts, worked by running them: the chapter's five, the lesson's three.

    python examples/exercises.py            all of them
    python examples/exercises.py c4         one: c1 to c5 of the chapter, l1 to l3 of the lesson,
                                            and critic: where the critic should start

Found, with the defaults:

c1  beta .2 gives -0.04, 0.00, 0.20, 1.50, in all 1.66 against 1.58: this sample's KL is -0.8 nats.
c2  A + V is the reward-to-go on a contiguous row; with a gap it is 3 where 7 is still to come.
c3  Whitening changes the step: with plain gradient steps the share of tokens outside the clip range
    goes 0.096, 0.278, 0.852 as the scores grow tenfold twice, and stays at 0.502 whitened; Adam
    hides the scale by itself. That is the text's answer. The fixed point moves too, in two cases:
    beside an entropy bonus the policy ends at (0, 0, 1) where raw advantages end at (0.052, 0.381,
    0.568); and a rare large reward shrinks its own batch, so that in batches of 4 the expected
    gradient changes its sign, 0.1875 raw, -0.2881 whitened.
c4  With ptx .5 the SFT loss stays within 2 % on three seeds, without it it grows four to seven
    times; the reward rises in both, later with ptx (on seed 2 to 3.18 against 7.21 in 30 steps).
    PPO's prompts differ from the demonstrations here; in a trial whose prompts were the
    demonstrations' own openings (60 steps, five seeds) no seed stayed within 10 %.
c5  Recorded log-probs show the age in the first pass: 0 %, 2.7 % and 34.2 % clipped at age 0, 1, 4.
    Recomputed ones show 0 % at any age, and a gradient that is off by half its length on responses
    of one token, where recorded ones are exact. On this easy toy the reward rises all the same, and
    faster than with recorded ones four steps old, many of whose tokens are clipped: the reward
    alone does not tell. No recorded log-prob mends V, which is 0.183 off after four steps.
l1  3.60 (clip active), -4.50 and 1.50 (not active).    l2  -0.20 and 0.    l3  The asserts hold.
critic  On the reward model's trunk the critic explains 0.152 of the variance of fresh returns after
    30 steps, on the policy's 0.078, on a random one 0.052 (two seeds, one fixed rollout to learn
    from); in a trial of 15 PPO steps all three stayed near 0.
"""
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402
from common import EOS, Parser, cell, count_good, title  # noqa: E402

LOGP, REF = np.array([[-1.0, -0.5, -2.0, -0.1]]), np.array([[-1.2, -0.5, -1.0, -0.1]])
ONES = np.ones((1, 4))


def line(name, values, width=9, digits=3):
    """A labelled row of numbers."""
    print(f"{name:44}" + "".join(cell(v, width, digits) for v in values))


def toy(seed, vocab=16, rows=32, prompt_len=4, dtype="float64", **changes):
    """Policy, critic and prompts; the policy is near uniform, as the chapter's toy."""
    rng = np.random.default_rng(seed)
    shape = t.ToyLMConfig(vocab, max_len=12, dtype=dtype, **changes)
    policy, critic = t.TinyCausalLM(shape, rng), t.TinyCritic(shape, rng)
    return policy, critic, rng.integers(1, vocab, (rows, prompt_len)), rng


# ------------------------------------------------------------------ the chapter


def c1():
    """Shaped rewards of the four tokens when beta doubles."""
    title("Chapter, exercise 1: the four tokens at beta = .2 (score 1.5)")
    for beta in (0.1, 0.2):
        rewards = t.shaped_rewards([1.5], LOGP, REF, ONES, beta)[0]
        cells = [*rewards.tolist(), float(rewards.sum())]
        line(f"beta {beta}: R_t, and their sum", cells, digits=2)
    kl = float(t.kl_estimates(LOGP, REF, "k1").sum())
    print(f"This sample's log-ratios sum to {kl:.1f} nats: beta pays back beta * {-kl:.1f}.")


def c2():
    """With gamma = lambda = 1, A + V is the reward still to come; a gap in the mask breaks that."""
    title("Chapter, exercise 2: advantages + values = reward-to-go at gamma = lambda = 1")
    rewards, values = np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([[0.5, -1.0, 0.25, 2.0]])
    for name, mask in (("contiguous", [[0, 1, 1, 1]]), ("a gap at t = 2", [[1, 1, 0, 1]])):
        mask = np.array(mask)
        advantages, _ = t.gae(rewards, values, mask, 1.0, 1.0)
        to_go = np.cumsum((rewards * mask)[:, ::-1], axis=1)[:, ::-1] * mask
        line(f"{name}: mask", mask[0].tolist())
        line("  advantages + values, in the response", ((advantages + values) * mask)[0].tolist())
        line("  reward-to-go", to_go[0].tolist())
    print("Behind a gap the recursion starts anew: what comes after it is lost to what is before.")


def drift(scores_by, whiten, optimiser, epochs=4):
    """Clip fraction of the last epoch when the same rollout's scores are so many times larger."""
    policy, critic, prompts, rng = toy(0)
    roll = t.collect_rollouts(policy, policy.frozen_copy(), critic, prompts, 8, EOS, rng=rng)
    scores = scores_by * count_good(roll.tokens, np.pad(roll.mask, ((0, 0), (1, 0))))
    rewards = t.shaped_rewards(scores, roll.logp_old, roll.logp_ref, roll.mask, 0.05)
    advantages, _ = t.gae(rewards, roll.values_old, roll.mask)
    if whiten:
        advantages = t.whiten(advantages, roll.mask)
    opt = t.Adam(policy.parameters(), 1e-2)
    for _ in range(epochs):
        opt.zero_grad()
        logp = t.token_log_probs(policy(roll.tokens), roll.tokens)
        loss, clip_frac = t.ppo_clip_loss(logp, roll.logp_old, advantages, roll.mask, 0.2)
        loss.backward()
        if optimiser == "Adam":
            opt.step()
        else:
            for p in policy.parameters():
                p.data -= 0.3 * p.grad
    return clip_frac


def stops_at(rewards, scale_of, ent_coef=0.5, steps=1000, lr=1.0):
    """Where exact ascent on E[scale r] + ent_coef H ends; scale_of(pi) is 1, or 1 / std of r."""
    z = t.Tensor(np.zeros((1, 1, len(rewards))), requires_grad=True)
    for _ in range(steps):
        z.grad = None
        logp = t.log_softmax(z, axis=-1)
        p = np.exp(logp.data)
        scores = rewards - (p * rewards).sum()
        objective = (logp * (p * scores * scale_of(p))).sum() + (
            ent_coef * t.masked_entropy(z, np.ones((1, 1))))
        objective.backward()
        z.data = z.data + lr * z.grad
    return np.exp(t.log_softmax(z.data).data)[0, 0]


def batch_direction(pi, payoffs, whiten, rows=4):
    """Expected gradient by the logit of action 0, over all batches of so many rows.

    payoffs: for each (action, reward) outcome its probability given the action.
    """
    outcomes = [(a, r, pi[a] * q) for a, r, q in payoffs]
    total = 0.0
    for index in np.ndindex(*[len(outcomes)] * rows):
        actions, rewards, chances = map(np.array, zip(*(outcomes[i] for i in index)))
        ones = np.ones((1, rows))
        scores = rewards[None] - float(t.masked_mean(rewards[None], ones))
        if whiten:
            scores = t.whiten(rewards[None], ones)
        score_function = (actions == 0) - pi[0]
        total += float(np.prod(chances)) * float((scores[0] * score_function).mean())
    return total


def c3():
    """Whitening: a constant baseline is free, the scale is not, and the fixed point can move."""
    title("Chapter, exercise 3: what whitening changes")
    print("(a) The step. One rollout, its scores times .1, 1, 10; share of tokens outside the clip"
          "\n    range in the fourth epoch:")
    for optimiser in ("plain gradient steps, lr .3", "Adam, lr .01"):
        for whiten in (False, True):
            shares = [drift(by, whiten, optimiser.split(",")[0]) for by in (0.1, 1.0, 10.0)]
            line(f"    {optimiser}, {'whitened' if whiten else 'raw'}", shares)
    print("(b) The fixed point, with an entropy bonus of .5 beside rewards 0, 1, 1.2 (exact):")
    rewards = np.array([0.0, 1.0, 1.2])
    spread = lambda p: 1 / (math.sqrt((p * (rewards - (p * rewards).sum()) ** 2).sum()) + 1e-8)
    line("    raw: softmax(r / .5)", stops_at(rewards, lambda p: 1.0).tolist())
    line("    whitened: the scale grows as the spread falls", stops_at(rewards, spread).tolist())
    print("(c) The direction, in batches of 4: action 0 pays 20 one time in 10 (mean 2), action 1\n"
          "    always pays 1; expected gradient by the logit of action 0 at pi = (.5, .5):")
    lottery = [(0, 20.0, 0.1), (0, 0.0, 0.9), (1, 1.0, 1.0)]
    line("    batch mean taken off", [batch_direction([0.5, 0.5], lottery, False)], digits=4)
    line("    whitened", [batch_direction([0.5, 0.5], lottery, True)], digits=4)


def demonstrations(rng, rows=64, length=6):
    """A small language to imitate: from word w the next is w + 1 or w + 2 of 1..7, then the end."""
    tokens = np.zeros((rows, length + 1), np.int64)
    tokens[:, 0] = rng.integers(1, 8, rows)
    for i in range(1, length):
        tokens[:, i] = (tokens[:, i - 1] + rng.integers(0, 2, rows)) % 7 + 1
    return tokens


def ptx_runs(seed, steps=30):
    """PPO with and without ptx -> (first reward, last reward, SFT loss before, after) of each.

    PPO's prompts open with a word, 8, that no demonstration holds: as in InstructGPT, the two draw
    on different texts, and only the shared weights make the one forget the other.
    """
    start, critic, _, rng = toy(seed, vocab=9)

    def loss_of():
        fresh = demonstrations(rng)
        return t.sft_loss(start(fresh), fresh)
    t.fit(start, 5e-3, 100, loss_of)
    batch, prompts = demonstrations(rng, rows=192), np.full((32, 2), 8)
    prompts[:, 1] = rng.integers(1, 8, 32)
    out = []
    for ptx_coef in (0.0, 0.5):
        policy, cfg = start.copy(), t.PPOConfig(steps=steps, ptx_coef=ptx_coef, lr=2e-3)
        history = t.train_ppo(policy, start.frozen_copy(), critic.copy(), prompts, count_good, EOS,
                              cfg, rng=np.random.default_rng(seed), ptx_batch=(batch, batch))
        with t.no_grad():
            before, after = (float(t.sft_loss(m(batch), batch)) for m in (start, policy))
        rewards = [s.reward for s in history]
        out.append((float(np.mean(rewards[:3])), float(np.mean(rewards[-3:])), before, after))
    return out


def c4(seeds=3):
    """PPO-ptx: the supervised loss mixed in keeps the demonstrations."""
    title("Chapter, exercise 4: PPO-ptx, coefficient .5, against none (30 steps)")
    print(f"{'seed':>4}{'reward, no ptx':>18}{'SFT loss, no ptx':>25}{'reward, ptx':>19}"
          f"{'SFT loss, ptx':>25}")
    for seed in range(seeds):
        cells = [f"{first:9.2f} -> {last:5.2f}{before:10.3f} -> {after:5.3f} "
                 f"({after / before - 1:+5.0%})" for first, last, before, after in ptx_runs(seed)]
        print(f"{seed:4} " + " ".join(cells))


def stale_run(age, recompute, seed, steps=20, lr=3e-3):
    """PPO whose rollouts, values included, come from the models of `age` steps ago."""
    policy, critic, prompts, rng = toy(seed, n_layers=1)
    ref, opt = policy.frozen_copy(), t.Adam(policy.parameters() + critic.parameters(), lr)
    past, history, gaps = [], [], []
    cfg = t.PPOConfig(lr=lr)
    for _ in range(steps):
        past.append((policy.frozen_copy(), critic.frozen_copy()))
        old_policy, old_critic = past[max(0, len(past) - 1 - age)]
        roll = t.collect_rollouts(old_policy, ref, old_critic, prompts, 8, EOS, rng=rng)
        with t.no_grad():
            now = t.token_log_probs(policy(roll.tokens), roll.tokens).data * roll.mask
            values = critic(roll.tokens).data[:, :-1]
        gaps.append(float(t.masked_mean(np.abs(values - roll.values_old), roll.mask)))
        if recompute:
            roll.logp_old = now
        scores = count_good(roll.tokens, np.pad(roll.mask, ((0, 0), (1, 0))))
        history.append(t.ppo_update(policy, critic, opt, roll, scores, cfg.beta, cfg))
    first, mean, ratio = (float(np.mean([getattr(s, name) for s in history]))
                          for name in ("clip_frac_first", "clip_frac", "ratio_max"))
    reward = float(np.mean([s.reward for s in history[-5:]]))
    return [first, 2 * mean - first, ratio, float(np.mean(gaps)), reward, history[-1].kl]


def exact_bias(age=4, lr=1e-2, seed=0):
    """One-token responses, all listed: error of a stale gradient, of the true one's length.

    Returns the error with recorded and with recomputed log-probs.
    """
    policy, critic, prompts, rng = toy(seed, dtype="float64")
    ref, opt = policy.frozen_copy(), t.Adam(policy.parameters() + critic.parameters(), lr)
    cfg, stale = t.PPOConfig(lr=lr, max_new_tokens=1), policy.frozen_copy()
    for _ in range(age):
        roll = t.collect_rollouts(policy, ref, critic, prompts, 1, EOS, rng=rng)
        scores = count_good(roll.tokens, np.pad(roll.mask, ((0, 0), (1, 0))))
        t.ppo_update(policy, critic, opt, roll, scores, cfg.beta, cfg)
    tokens, mask = t.enumerate_responses(16, 1, EOS)
    with t.no_grad():
        old, now = (t.response_log_probs(m, prompts[0], tokens, mask).data for m in (stale, policy))
    reward = (tokens[:, 0] == 2) + 0.1 * tokens[:, 0] - 1.0
    gradients = []
    for sampled, recorded in ((now, now), (old, old), (old, now)):
        for p in policy.parameters():
            p.grad = None
        logp = t.response_log_probs(policy, prompts[0], tokens, mask).reshape(1, -1)
        weight = np.exp(sampled) * reward * len(tokens)  # the token mean becomes the expectation
        t.ppo_clip_loss(logp, recorded[None], weight[None], np.ones((1, 16)), 1e6)[0].backward()
        gradients.append(np.concatenate([p.grad.ravel() for p in policy.parameters()
                                         if p.grad is not None]))
    true = gradients[0]
    return [float(np.linalg.norm(g - true) / np.linalg.norm(true)) for g in gradients[1:]]


def c5(seeds=2):
    """Stale rollouts: the clip fraction of the first pass shows the age, recomputing hides it."""
    title(f"Chapter, exercise 5: rollouts one and four steps old (lr .003, 20 steps)")
    heads = [("clipped,", "epoch 1"), ("clipped,", "epoch 2"), ("largest", "ratio"),
             ("V now -", "V then"), ("reward", "at end"), ("KL", "at end")]
    for part in zip(*heads):
        print(f"{'':26}" + "".join(f"{head:>10}" for head in part))
    for name, age, recompute in (("fresh", 0, False), ("1 step old, recorded", 1, False),
                                 ("4 steps old, recorded", 4, False),
                                 ("1 step old, recomputed", 1, True),
                                 ("4 steps old, recomputed", 4, True)):
        runs = np.mean([stale_run(age, recompute, seed) for seed in range(seeds)], axis=0)
        print(f"{name:26}" + "".join(cell(x, 10) for x in runs.tolist()))
    recorded, recomputed = exact_bias()
    print(f"One-token responses, all listed, sampled 4 steps ago: the gradient is off by "
          f"{recorded:.0e} of its\nlength with recorded log-probs, by {recomputed:.2f} with "
          "recomputed ones.")


# ------------------------------------------------------------------ the lesson


def l1():
    """The three cases of the clip."""
    title("Lesson, exercise 1: min(rho A, clip(rho, .8, 1.2) A)")
    for name, rho, advantage in (("a", 1.5, 3.0), ("b", 1.5, -3.0), ("c", 0.5, 3.0)):
        logp = t.Tensor(np.array([[math.log(rho)]]), requires_grad=True)
        loss, _ = t.ppo_clip_loss(logp, np.zeros((1, 1)), [[advantage]], [[1]], 0.2)
        loss.backward()
        active = logp.grad[0, 0] == 0
        print(f"({name}) rho {rho}, A {advantage:+.0f}: objective {-float(loss):5.2f}; the clip is "
              + ("active: no gradient, it moved enough" if active else
                 f"not active: gradient {-logp.grad[0, 0]:+.1f} by log pi, a way back"))


def l2():
    """The KL reward of one token."""
    title("Lesson, exercise 2: the KL reward of a token before the last, beta = .1")
    for name, log_ratio in (("e^2 times as likely", 2.0), ("equally likely", 0.0)):
        rewards = t.shaped_rewards([0.0], [[log_ratio - 3, 0.0]], [[-3.0, 0.0]], np.ones((1, 2)),
                                   0.1)
        line(f"  {name} as under the reference", [float(rewards[0, 0])], digits=2)
    print("The first is a fee for leaving the reference; at equal probability there is none.")


def l3():
    """The lesson's two asserts, and what the cap does not bound."""
    title("Lesson, exercise 3: the cap (1 + eps) A")
    objective = lambda rho, adv: -float(t.ppo_clip_loss(
        np.log([[rho]]), np.zeros((1, 1)), [[adv]], [[1]], 0.2)[0])
    cases = [objective(*case) for case in ((1.5, 3.0), (1.5, -3.0), (0.5, 3.0))]
    assert np.allclose(cases, [3.6, -4.5, 1.5])
    ratios = np.random.default_rng(0).uniform(0.1, 5.0, 1000)
    most = max(objective(rho, 2.0) for rho in ratios)
    assert most <= 1.2 * 2 + 1e-9
    print(f"both asserts hold; over {len(ratios)} ratios up to {ratios.max():.2f} with A = 2 the "
          f"objective is at most {most:.2f}")
    old, new, rewards = np.array([0.5, 0.5]), np.array([0.99, 0.01]), np.array([2.0, 0.0])
    advantages = rewards - old @ rewards
    gain = -float(t.ppo_clip_loss(np.log(new)[None], np.log(old)[None], advantages[None],
                                  np.ones((1, 2)), 0.2)[0])
    print(f"Two actions at .5 that pay 2 and 0, moved to .99 and .01: the clipped objective gains "
          f"{gain:.2f},\nthe expected reward {(new - old) @ rewards:.2f}. The cap bounds the "
          "objective, not the improvement.")


def reward_model(policy, rng, steps=60):
    """A reward model on the policy's trunk, from preferences for more good tokens."""
    with t.no_grad():
        samples = t.sample(policy, rng.integers(1, 16, (256, 4)), 8, EOS, rng=rng)
    score = count_good(samples.tokens, samples.token_mask)
    model = t.TinyCritic.from_backbone(policy)

    def loss_of():
        a, b = rng.integers(0, 256, (2, 64))
        sign = np.sign(score[a] - score[b])
        scores = [t.score_sequences(model, samples.tokens[i], samples.token_mask[i])
                  for i in (a, b)]
        return t.reward_model_loss((scores[0] - scores[1]) * sign, np.zeros(64))
    t.fit(model, 3e-3, steps, loss_of)
    return model


def critic_runs(seed, marks=(10, 20, 30)):
    """Explained variance of fresh returns after so many steps on a rollout, by starting trunk."""
    policy, critic, prompts, rng = toy(seed, rows=128, n_layers=1)
    model, ref = reward_model(policy, rng), policy.frozen_copy()
    rolls, targets = [], []
    for _ in range(2):  # one to learn from, one to test on
        roll = t.collect_rollouts(policy, ref, critic, prompts, 8, EOS, rng=rng)
        scores = count_good(roll.tokens, np.pad(roll.mask, ((0, 0), (1, 0))))
        rewards = t.shaped_rewards(scores, roll.logp_old, roll.logp_ref, roll.mask, 0.05)
        rolls.append(roll)
        targets.append(t.gae(rewards, roll.values_old, roll.mask, 1.0, 1.0)[1])
    out = []
    for trunk in (critic, t.TinyCritic.from_backbone(policy), t.TinyCritic.from_backbone(model)):
        loss_of = lambda: t.value_loss(trunk(rolls[0].tokens)[:, :-1], rolls[0].values_old,
                                       targets[0], rolls[0].mask, 1e6)
        done = 0
        for mark in marks:
            t.fit(trunk, 3e-3, mark - done, loss_of)
            done = mark
            with t.no_grad():
                error = targets[1] - trunk(rolls[1].tokens).data[:, :-1]
            inside = rolls[1].mask > 0
            out.append(1 - error[inside].var() / targets[1][inside].var())
    return np.reshape(out, (3, len(marks)))


def critic_start(seeds=2):
    """The lesson starts the critic from the reward model, the chapter's code at random."""
    title("Where the critic starts: explained variance of fresh returns after 10, 20, 30 steps")
    runs = np.mean([critic_runs(seed) for seed in range(seeds)], axis=0)
    for name, means in zip(("random", "policy", "reward model"), runs):
        line(f"trunk: {name}, mean of {seeds} seeds", means.tolist())


EXERCISES = {"c1": c1, "c2": c2, "c3": c3, "c4": c4, "c5": c5, "l1": l1, "l2": l2, "l3": l3,
             "critic": critic_start}


def main():
    """One exercise, or all."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=list(EXERCISES), help="default: all of them")
    name = parser.parse_args().name
    for exercise in [EXERCISES[name]] if name else EXERCISES.values():
        exercise()


if __name__ == "__main__":
    main()
