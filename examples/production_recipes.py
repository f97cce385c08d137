"""What is peculiar to three published recipes, and what does the peculiarity change?

    python examples/production_recipes.py               all three on one toy, two seeds, and memory
    python examples/production_recipes.py --seeds 5     means over five seeds
    python examples/production_recipes.py llama2        one of: instructgpt, llama2, constitutional

A small policy has learnt texts that count upward; it answers one prompt and 2 is the good word. All
its answers are listed, so each figure but the text loss is exact. Under each table stands in how
many seeds a sentence holds: over five seeds one holds in four, all others in every one. The figures
here are means of two seeds.

- InstructGPT (Ouyang et al. 2022). At beta .02 the price of KL is nothing to this score: the policy
  says one response (entropy .007 nats), and forgets its texts, whose loss goes from .948 to 6.209
  nats a token: the alignment tax. With the pretraining loss mixed in it is .984, at the same score
  (4.994 for 4.999). A dearer KL does not buy this: beta .5 loses the score (1.466), text 1.129.
- Llama 2 (Touvron et al. 2023). Where the safety model sees danger it decides, elsewhere
  helpfulness does. On helpfulness alone every response ends up harmful, under the gate none.
  With 1,024 responses PPO goes in round 5 to 4.987, rejection sampling to 3.410, but that keeps 3.7
  nats of entropy, PPO .1. PPO alone gets as far with as many responses: on a toy this small the
  rounds before it do not pay. Whitening makes beta independent of the scores' scale: divided by
  100 and not whitened they count 100 times less beside the KL, and PPO stops at 3.005.
- Constitutional AI (Bai et al. 2022). Preference models learn helpfulness from the same labels and
  harmlessness from different ones: people who think an evasive answer safe, or a rule that wants
  no harm and then an answer. Against the rule's model PPO gets less harm (2.2 for 11.7 %), less
  evasion (.3 for .9 %) and as many good words. Less harm is the sentence of four seeds: a
  preference model of 2,000 pairs varies more than the judges do.

Left out: Llama 2's gate also looks at the prompt, its reward models are learnt; the supervised
phase of Constitutional AI. PPO's reference is the policy it starts from; KL in the tables is from
the policy before everything. Memory at 7B: 234, 266 and 252 GB; a rejection round needs 140.
"""
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import estimator as e  # noqa: E402
import tinyrlhf as t  # noqa: E402
from common import (EOS, PROMPT, Parser, at_least, count_good, imitate, title,  # noqa: E402
                    winners)

VOCAB, LENGTH, HARM = 6, 5, 4  # 0 ends; 2 is the good word, 4 the harmful one; 1, 3, 5 are neither
TOY = dict(max_new_tokens=LENGTH, lr=3e-3)
INSTRUCTGPT = t.PPOConfig(steps=80, beta=0.02, ptx_coef=0.5, **TOY)  # beta: Ouyang et al. 2022
LLAMA2 = t.PPOConfig(steps=16, beta=0.01, **TOY)                     # beta: Touvron et al. 2023
CONSTITUTIONAL = t.PPOConfig(steps=50, beta=0.5, **TOY)              # beta: the toy's


# ------------------------------------------------------------------ the toy and its figures

def pretraining_text(rng, rows):
    """Texts that count upward, 3 4 5 1 2 3 4, with slips -> tokens (rows, 7), labels.

    A slip is any word, the end too; a text starts with 3, 4 or 5, so never with the prompt, 1 2.
    """
    tokens = np.zeros((rows, len(PROMPT) + LENGTH), int)
    tokens[:, 0] = rng.integers(3, VOCAB, rows)
    for c in range(1, tokens.shape[1]):
        slip = rng.random(rows) < 0.3
        tokens[:, c] = np.where(slip, rng.integers(0, VOCAB, rows), tokens[:, c - 1] % 5 + 1)
    ends = tokens == EOS
    behind = np.cumsum(ends, axis=1) - ends > 0
    return np.where(behind, EOS, tokens), np.where(behind, -100, tokens)


def text_loss(policy):
    """Loss on 512 texts that no training saw, in nats a token."""
    tokens, labels = pretraining_text(np.random.default_rng(99), 512)
    with t.no_grad():
        return float(t.sft_loss(policy(tokens), labels))


def pretrained(seed):
    """A policy that has learnt the texts, float64."""
    rng = np.random.default_rng(seed)
    cfg = t.ToyLMConfig(VOCAB, len(PROMPT) + LENGTH, d_model=16, n_layers=1, dtype="float64")
    policy = t.TinyCausalLM(cfg, rng)

    def loss_of():
        tokens, labels = pretraining_text(rng, 64)
        return t.sft_loss(policy(tokens), labels)
    t.fit(policy, 1e-2, 200, loss_of)
    return policy


def count_harm(tokens, token_mask):
    """How often a response says the harmful word."""
    return ((tokens == HARM) * token_mask).sum(axis=1).astype(float)


def figures(policy, ref):
    """What the policy answers to PROMPT, exactly, from all 3,906 responses; and its text loss."""
    x = t.exact_objective(policy, ref, PROMPT, count_good, LENGTH, EOS, 1.0)
    p, harm = np.exp(x.logp), count_harm(x.tokens, x.mask)
    return {"good": x.reward, "helpful": x.reward + 2 * p @ harm, "harmful": p @ (harm > 0),
            "evasive": p @ (x.mask.sum(axis=1) == 1), "KL": x.kl, "entropy": x.entropy,
            "text loss": text_loss(policy)}


def ppo(start, ref, reward_fn, cfg, seed, ptx_batch=None):
    """PPO from a policy, which stays as it is -> the trained one; 64 responses a step."""
    policy, critic = start.copy(), t.TinyCritic.from_backbone(start)
    t.train_ppo(policy, ref, critic, [PROMPT] * 64, reward_fn, EOS, cfg,
                rng=np.random.default_rng(seed), ptx_batch=ptx_batch)
    return policy


# ------------------------------------------------------------------ InstructGPT

def instructgpt(base, seed):
    """PPO with a fixed small beta, with and without the loss on pretraining text mixed in."""
    ref = base.frozen_copy()
    texts = pretraining_text(np.random.default_rng(seed + 1000), 256)
    plain = replace(INSTRUCTGPT, ptx_coef=0.0)
    cases = {"beta .02 alone": plain, "beta .02 and ptx .5": INSTRUCTGPT,
             "beta .2 alone": replace(plain, beta=0.2), "beta .5 alone": replace(plain, beta=0.5)}
    out = {"reference": figures(base, ref)}
    for name, cfg in cases.items():
        out[name] = figures(ppo(base, ref, count_good, cfg, seed, texts), ref)
    return out


# ------------------------------------------------------------------ Llama 2

def helpfulness(tokens, token_mask):
    """The first reward model, in logits: it likes the good word and, twice as much, the harmful."""
    return count_good(tokens, token_mask) + 2 * count_harm(tokens, token_mask) - 2


def gated(tokens, token_mask):
    """Safety where the second reward model sees danger, R_s < .15; else helpfulness; in logits."""
    safety = 2 - 4 * count_harm(tokens, token_mask)
    return np.where(safety < math.log(0.15 / 0.85), safety, helpfulness(tokens, token_mask))


def whitened(reward_fn):
    """A reward function brought to mean 0 and deviation 1 over each batch."""
    def reward(tokens, token_mask):
        scores = reward_fn(tokens, token_mask)
        return t.whiten(scores[None], np.ones((1, len(scores))))[0]
    return reward


def rejection_round(policy, reward_fn, rng, k=4, rows=1024):
    """Sample, keep the best of each k, imitate them; the policy given stays -> a new one."""
    s = t.sample(policy, [PROMPT] * rows, LENGTH, EOS, rng=rng)
    best, policy = winners(reward_fn(s.tokens, s.token_mask), k), policy.copy()
    imitate(policy, s.tokens[best], s.token_mask[best], 3e-3, 40, rng)
    return policy


def llama2(base, seed):
    """Four rounds of rejection sampling, then PPO on the whitened reward; what each part adds."""
    ref, rng, now = base.frozen_copy(), np.random.default_rng(seed), base
    small = lambda tokens, token_mask: gated(tokens, token_mask) / 100
    out = {"reference": figures(base, ref)}
    for n in range(1, 5):
        now = rejection_round(now, gated, rng)
        out[f"rejection sampling, round {n}"] = figures(now, ref)
    alone = base
    for _ in range(4):
        alone = rejection_round(alone, helpfulness, rng)
    cases = {"round 5: PPO, whitened": (now, whitened(gated), LLAMA2),
             "  not whitened": (now, gated, LLAMA2),
             "  not whitened, scores / 100": (now, small, LLAMA2),
             "PPO alone, as many responses": (base, whitened(gated), replace(LLAMA2, steps=80)),
             "helpfulness alone, 4 + PPO": (alone, whitened(helpfulness), LLAMA2)}
    out["round 5: rejection sampling"] = figures(rejection_round(now, gated, rng), ref)
    for name, (start, reward_fn, cfg) in cases.items():
        out[name] = figures(ppo(start, start.frozen_copy(), reward_fn, cfg, seed), ref)
    return out


# ------------------------------------------------------------------ Constitutional AI

def less_harm(tokens, token_mask):
    """The first principle: fewer harmful words are better."""
    return -count_harm(tokens, token_mask)


def engages(tokens, token_mask):
    """The second: a response that says something is better than one that ends at once."""
    return (token_mask.sum(axis=1) > 1).astype(float)


CONSTITUTION = (less_harm, engages)
PEOPLE = (less_harm, lambda tokens, token_mask: -engages(tokens, token_mask))  # evasion is safe


def judge(principles, a, b):
    """1 where a is better, -1 where b is, by the first principle on which they differ; else 0."""
    verdict = np.zeros(len(a.tokens))
    for principle in principles:
        gap = principle(a.tokens, a.token_mask) - principle(b.tokens, b.token_mask)
        verdict = np.where(verdict == 0, np.sign(gap), verdict)
    return verdict


def comparisons(policy, principles, count, rng):
    """Pairs that the principles decide -> (tokens, mask) of the better, the same of the worse."""
    a, b = (t.sample(policy, [PROMPT] * count, LENGTH, EOS, rng=rng) for _ in "ab")
    verdict = judge(principles, a, b)
    first, second = verdict > 0, verdict < 0
    take = lambda x, y: np.concatenate([x[first], y[second]])
    return [(take(x.tokens, y.tokens), take(x.token_mask, y.token_mask))
            for x, y in ((a, b), (b, a))]


def preference_model(policy, labels, rng):
    """A reward model that learns from comparisons of several sources -> reward function."""
    model = t.TinyCritic.from_backbone(policy)
    (good, good_mask), (bad, bad_mask) = (map(np.concatenate, zip(*side)) for side in zip(*labels))

    def loss_of():
        rows = rng.choice(len(good), 128)
        return t.reward_model_loss(t.score_sequences(model, good[rows], good_mask[rows]),
                                   t.score_sequences(model, bad[rows], bad_mask[rows]))
    t.fit(model, 5e-3, 200, loss_of)

    def reward(tokens, token_mask):
        with t.no_grad():
            return t.score_sequences(model, tokens, token_mask).data
    return reward


def constitutional(base, seed):
    """One PPO against preference models that differ only in who compared for harmlessness."""
    ref, out = base.frozen_copy(), {"reference": figures(base, base)}
    for name, principles in {"helpfulness labels only": None, "and people's labels": PEOPLE,
                             "and the constitution's labels": CONSTITUTION}.items():
        rng = np.random.default_rng(seed)
        labels = [comparisons(base, (count_good,), 2000, rng)]
        if principles:
            labels.append(comparisons(base, principles, 2000, rng))
        reward = preference_model(base, labels, rng)
        out[name] = figures(ppo(base, ref, reward, CONSTITUTIONAL, seed), ref)
    return out


# ------------------------------------------------------------------ printed

REJECT, PPO_5 = "round 5: rejection sampling", "round 5: PPO, whitened"
PTX, NO_PTX = "beta .02 and ptx .5", "beta .02 alone"
THEIRS, WRITTEN = "and people's labels", "and the constitution's labels"
RECIPES = {  # the run, its heading, the columns that show what it does, what should hold of a seed
    "instructgpt": (
        instructgpt, "InstructGPT: fixed beta, pretraining text mixed in (PPO-ptx)",
        ("good", "KL", "entropy", "text loss"), {
            "without ptx the text loss more than doubles":
                lambda x: x[NO_PTX]["text loss"] > 2 * x["reference"]["text loss"],
            "with it the text loss stays within 10 % of the reference's":
                lambda x: x[PTX]["text loss"] < 1.1 * x["reference"]["text loss"],
            "and the score within .1 of that without":
                lambda x: x[PTX]["good"] > x[NO_PTX]["good"] - 0.1,
            "no dearer KL of the two keeps both":
                lambda x: all(x[f"beta {b} alone"]["good"] < x[PTX]["good"] - 0.1
                              and x[f"beta {b} alone"]["text loss"] > x[PTX]["text loss"]
                              for b in (".2", ".5"))}),
    "llama2": (
        llama2, "Llama 2: rejection sampling, then PPO, on two reward models",
        ("helpful", "harmful", "KL", "entropy"), {
            "under the gate less than 1 % is harmful in the end, on helpfulness alone over 99 %":
                lambda x: x[PPO_5]["harmful"] < 0.01
                and x["helpfulness alone, 4 + PPO"]["harmful"] > 0.99,
            "in round 5 PPO gains more than rejection sampling, of as many responses":
                lambda x: x[PPO_5]["helpful"] > x[REJECT]["helpful"] + 0.5,
            "rejection sampling keeps ten times PPO's entropy":
                lambda x: x[REJECT]["entropy"] > 10 * x[PPO_5]["entropy"],
            "PPO alone gets as far with as many responses as all five rounds":
                lambda x: x["PPO alone, as many responses"]["helpful"] > x[PPO_5]["helpful"] - 0.02,
            "scores / 100 lose more than a point if they are not whitened":
                lambda x: x["  not whitened, scores / 100"]["helpful"] < x[PPO_5]["helpful"] - 1}),
    "constitutional": (
        constitutional, "Constitutional AI: a written rule compares, PPO climbs",
        ("good", "harmful", "evasive", "KL"), {
            "less harm than with people's labels":
                lambda x: x[WRITTEN]["harmful"] < x[THEIRS]["harmful"],
            "less evasion": lambda x: x[WRITTEN]["evasive"] < x[THEIRS]["evasive"],
            "no fewer good words, by .1": lambda x: x[WRITTEN]["good"] > x[THEIRS]["good"] - 0.1})}


def run_recipe(name, bases):
    """Means over the seeds, a line a case; then in how many seeds each claim holds."""
    recipe, heading, columns, claims = RECIPES[name]
    title(f"{heading}; means of {len(bases)} seeds")
    runs = [recipe(base, seed) for seed, base in enumerate(bases)]
    print(f"{'':32}" + "".join(f"{column:>11}" for column in columns))
    for case in runs[0]:
        means = [np.mean([run[case][column] for run in runs]) for column in columns]
        print(f"{case:32}" + "".join(f"{mean:11.3f}" for mean in means))
    for claim, holds in claims.items():
        print(f"{sum(map(holds, runs))} of {len(runs)} seeds: {claim}")


def memory_rows():
    """name -> bytes at rest of each part, for a 7B policy; trained models 16 a parameter."""
    b = 7e9
    return {"InstructGPT: 6B reward model, and critic": e.four_models(b, 6e9, 6e9),
            "Llama 2, rounds: two reward models": e.four_models(b, 0, 2 * b) | {"reference": 0},
            "Llama 2, PPO: two reward models": e.four_models(b, b, 2 * b),
            "Constitutional AI: preference model": e.four_models(b, b, b),
            "  the rule itself as the reward": e.four_models(b, b, 0),
            "Llama 3's choice, DPO": e.four_models(b, 0, 0)}


def memory_table():
    """What each recipe holds at 7B, before activations and caches."""
    title("Memory at rest with a policy of 7e9 parameters (GB; bf16, Adam; trained 16, frozen 2 B)")
    parts = ("policy", "critic", "reference", "reward model")
    print(f"{'':42}{'policy':>8}{'critic':>8}{'ref':>6}{'reward':>8}{'total':>8}{'A100-80':>9}")
    for name, held in memory_rows().items():
        sizes = [held[part] / 1e9 for part in parts]
        cards = math.ceil(sum(held.values()) / e.GPUS["a100-80"].memory)
        print(f"{name:42}" + "{:8.0f}{:8.0f}{:6.0f}{:8.0f}".format(*sizes)
              + f"{sum(sizes):8.0f}{cards:9}")
    print("A100-80: cards that hold so much, with nothing left for activations and caches.")


def main():
    """The recipes asked for, each with its table; then the memory rows."""
    parser = Parser(description="Three published recipes as presets on a toy.")
    parser.add_argument("recipe", nargs="?", choices=RECIPES, metavar="RECIPE",
                        help=f"only one of {', '.join(RECIPES)}")
    parser.add_argument("--seeds", type=at_least(1), default=2, help="so many (default 2)")
    args = parser.parse_args()
    bases = [pretrained(seed) for seed in range(args.seeds)]
    for name in [args.recipe] if args.recipe else RECIPES:
        run_recipe(name, bases)
    memory_table()


if __name__ == "__main__":
    main()
