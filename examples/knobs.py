"""What does each of PPO's eight knobs do, turned alone, in exact fractions of the optimum?

    python examples/knobs.py                     all eight, one seed
    python examples/knobs.py KNOB --seeds 5      one of them; a wrong KNOB lists them

60 updates of 64 responses from one lumpy reference; plain is beta .5, eps .2, 2 epochs, lr 3e-3.
Every figure but entropy and clipping is exact, by listing all 1,365 responses. One seed:

- Plain reaches 99.4 %. What matters most is the response mask: without it after the end, 47.9 %
  (the prompt: 97.8 %). Next is beta, which is another objective, not another way to this one: .1
  takes 88.2 % of what is to be had at .5, and 100.0 % of its own optimum; 2 has 47.1 and 78.8.
- A controller must be given the right target: 3 nats 98.8 %, 1 nat 82.3 %.
- Epochs 1, 4, 16: 97.2, 99.6, 97.8 %. Responses 8, 16, 256: 97.7, 97.3, 99.6 %.
- Within .5 points of plain, thus noise: eps .02 and .05, whitening of advantages, value
  pretraining. eps 1 (98.4 %) and whitened rewards (96.6 %) cost a little.
"""
import functools
import sys
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402
from common import EOS, Parser, at_least  # noqa: E402
from failure_modes import (BETA, LENGTH, LONG_PROMPT, ROWS, good, make_world,  # noqa: E402
                           pretrain, settings, train, unmasked)

MASKED = dict(prompt=False, after=False)

# knob -> {its setting: what changes}; every table starts from the same plain run.
KNOBS = {
    "beta": {"beta .1": dict(beta=0.1), "beta 2": dict(beta=2.0),
             "controller, 3 nats": dict(kl_target=3.0, kl_horizon=3),
             "controller, 1 nat": dict(kl_target=1.0, kl_horizon=3)},
    "eps": {"eps .02": dict(clip_eps=0.02), "eps .05": dict(clip_eps=0.05),
            "eps 1": dict(clip_eps=1.0)},
    "epochs": {"1 epoch": dict(ppo_epochs=1), "4 epochs": dict(ppo_epochs=4),
               "16 epochs": dict(ppo_epochs=16)},
    "batch": {"8 responses": dict(rows=8), "16 responses": dict(rows=16),
              "256 responses": dict(rows=256)},
    "whitening": {"advantages not whitened": dict(whiten_advantages=False)},
    "reward-whitening": {"rewards whitened": dict(whiten_rewards=True)},
    "pretraining": {"critic pretrained, 50": dict(pretrained=50),
                    "critic pretrained, 200": dict(pretrained=200)},
    "mask": {"prompt not masked": dict(mask=MASKED | dict(prompt=True)),
             "after the end not masked": dict(mask=MASKED | dict(after=True))},
}


HEAD = ("score", "KL", "nats/token", "clipped %", "of optimum", "at own beta")


def turn(seed, rows=ROWS, pretrained=0, mask=MASKED, **changes):
    """One run -> score and KL, exact; nats a token, percent clipped; the fraction of the optimum,
    for J at BETA and for J at the run's own last beta."""
    world = make_world(seed, spread=0.3, prompt=LONG_PROMPT)
    pretrain(world, pretrained)
    with mock.patch.object(t, "collect_rollouts", functools.partial(unmasked, **mask)):
        run = train(world, settings(**changes), rows=rows, beta=BETA)
    last, e = run.history[-1], run.exact
    own = t.exact_objective(run.policy, run.ref, LONG_PROMPT, good, LENGTH, EOS, last.beta)
    clipped = 100 * np.mean([s.clip_frac for s in run.history])
    return e.reward, e.kl, last.entropy, clipped, e.fraction, own.fraction


def line(label, runs):
    """Print medians over the seeds, and the least fraction at BETA."""
    figures = zip(np.median(runs, axis=0), (2, 2, 3, 1, 3, 3))
    print(f"{label:26}" + "".join(f"{x:12.{digits}f}" for x, digits in figures)
          + f"{np.min(runs, axis=0)[4]:10.3f}", flush=True)


def main():
    """The plain run, then one knob at a time."""
    parser = Parser(description="The eight knobs of PPO for language models, one at a time.")
    parser.add_argument("knob", nargs="?", choices=KNOBS, metavar="KNOB",
                        help=f"one of {', '.join(KNOBS)}; without it all of them")
    parser.add_argument("--seeds", type=at_least(1), default=1, help="medians over so many seeds")
    args = parser.parse_args()
    seeds = range(args.seeds)
    print(f"60 updates from one lumpy reference, medians over {args.seeds} seed(s).\n")
    print(f"{'':26}" + "".join(f"{name:>12}" for name in HEAD) + f"{'least':>10}")
    line("plain", [turn(seed) for seed in seeds])
    for knob in [args.knob] if args.knob else KNOBS:
        print(knob)
        for label, changes in KNOBS[knob].items():
            line(f"  {label}", [turn(seed, **changes) for seed in seeds])


if __name__ == "__main__":
    main()
