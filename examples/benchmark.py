"""Where does the time of a PPO step go on this machine, and how does PyTorch do beside it?

    python examples/benchmark.py                 three sizes: some 110 s with torch, 20 s without
    python examples/benchmark.py toy             one of toy, small, laptop
    python examples/benchmark.py toy --json      tinyrlhf's seconds in one process, as one JSON line

For each size the fastest of a few steps (rollout, scoring, two epochs of update), after one of two
rows that compiles the kernels: milliseconds of each phase, tokens a second in sampling, and the
share of this machine's matrix-product peak that the step's products reach. Then GAE, compiled,
against the same recursion as a loop over NumPy columns, and against copying as many numbers.

Where torch is installed, torch_step.py takes the same step, eager and on the CPU, in processes of
its own, for the threads of two libraries fight in one. The sides run in turn, three rounds; printed
is the median of PyTorch's seconds over tinyrlhf's, so above 1 tinyrlhf is the faster: for sampling
and scoring, for the update, for the whole step, and for GAE as a loop over columns. Compared are
float32 and the shapes below, with the thread settings of this environment. Not compared: a GPU,
torch.compile, half precision, models of real size, the time to import and compile. tinyrlhf samples
on only the rows that have not ended, the peer all of them, as most code does. Milliseconds are of
this machine at this moment: trust the ratios and shares, and only from an idle machine.
"""
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np

from common import Parser, t, title

Size = namedtuple("Size", "vocab d layers heads rows prompt new steps")  # the fastest step counts
SIZES = {"toy": Size(32, 32, 2, 2, 64, 4, 8, 10), "small": Size(256, 128, 4, 4, 64, 16, 48, 2),
         "laptop": Size(1024, 256, 6, 8, 32, 32, 96, 1)}
GAE_SHAPE, ROUNDS = (512, 1024), 3
STEP = ("rollout", "scoring", "update")  # the phases, as PPOStats names their seconds
EOS, GOOD = 0, 5  # the token that ends a response, and the one that the reward counts


def best_of(times, call):
    """Least seconds of some calls."""
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def spent(seconds, phases=STEP):
    """Seconds of some phases in all."""
    return sum(seconds[phase] for phase in phases)


def step_flops(size):
    """FLOPs of the products of one step: 12 d^2 weights a layer, the causal half of attention.

    Rollout: one forward of policy, reference and critic; update: two epochs of forward and
    backward, three forwards' worth, of policy and critic.
    """
    length = size.prompt + size.new
    tokens = size.rows * length
    trunk = tokens * size.layers * (2 * 12 * size.d ** 2 + 2 * size.d * length)
    head = tokens * 2 * size.d * size.vocab
    return 3 * trunk + 2 * head + 2 * 3 * (2 * trunk + head)


def measure_step(size):
    """The fastest step by train_ppo -> seconds by phase, and tokens sampled."""
    rng = np.random.default_rng(0)
    cfg = t.ToyLMConfig(size.vocab, size.prompt + size.new, d_model=size.d, n_layers=size.layers,
                        n_heads=size.heads)
    policy, critic = t.TinyCausalLM(cfg, rng), t.TinyCritic(cfg, rng)
    prompts = rng.integers(1, size.vocab, (size.rows, size.prompt))
    reward = lambda tokens, mask: ((tokens == GOOD) * mask).sum(axis=1)
    train = lambda rows, steps: t.train_ppo(
        policy, policy.frozen_copy(), critic, prompts[:rows], reward, EOS,
        t.PPOConfig(steps=steps, max_new_tokens=size.new), rng=rng)
    train(2, 1)  # compiles, and fills the caches
    best = min(train(size.rows, size.steps), key=lambda stats: spent(stats.seconds))
    return best.seconds | {"tokens": size.rows * best.response_length}


def loop_gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """The recursion column by column, as a reader would first write it; NumPy or torch."""
    advantages, ahead, value = 0 * values, 0.0, 0.0
    for i in reversed(range(values.shape[1])):
        ahead = (rewards[:, i] + gamma * value - values[:, i] + gamma * lam * ahead) * mask[:, i]
        advantages[:, i], value = ahead, values[:, i] * mask[:, i]
    return advantages, advantages + values


def measure_machine():
    """Seconds of GAE compiled, as a loop and at copy speed; FLOP/s of a float32 product."""
    rng = np.random.default_rng(0)
    r, v = (rng.normal(size=GAE_SHAPE).astype(np.float32) for _ in "rv")
    mask, a = np.ones(GAE_SHAPE, np.float32), np.ones((1024, 1024), np.float32)
    t.gae(r, v, mask)
    return {"gae": best_of(20, lambda: t.gae(r, v, mask)),
            "loop": best_of(3, lambda: loop_gae(r, v, mask)),
            "copy": best_of(20, lambda: np.copyto(v, r)) * 5 / 2,  # five arrays, a copy moves two
            "peak": 2 * 1024 ** 3 / best_of(5, lambda: a @ a)}


def run(script, *args):
    """A script in a process of its own, without what slows NumPy's OpenBLAS -> its JSON line."""
    slow = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
    env = {name: value for name, value in os.environ.items() if name not in slow}
    done = subprocess.run([sys.executable, Path(__file__).with_name(script), *args], env=env,
                          text=True, capture_output=True)
    if done.returncode:
        why = done.stderr.strip() or f"exit status {done.returncode}"
        sys.exit(f"{script} {args[0]} failed: {why.splitlines()[-1]}")
    return json.loads(done.stdout)


def run_in_turn(name, peer):
    """Some processes of PyTorch and of tinyrlhf, alternately -> their seconds, in two lists."""
    theirs, ours = [], []
    for _ in range(ROUNDS if peer else 1):
        theirs += [run("torch_step.py", name)] if peer else []
        ours.append(run("benchmark.py", name, "--json"))
    return theirs, ours


def paired_ratio(theirs, ours, phases):
    """Median over the rounds of their seconds in these phases over ours."""
    return statistics.median(spent(a, phases) / spent(b, phases) for a, b in zip(theirs, ours))


def size_line(name, theirs, ours):
    """Milliseconds of our fastest step, its share of the matrix peak, the ratios if any."""
    best = min(ours, key=spent)
    share = step_flops(SIZES[name]) / spent(best) / max(seconds["peak"] for seconds in ours)
    line = f"{name:7}" + "".join(f"{best[phase] * 1e3:12.1f}" for phase in STEP)
    line += f"{best['tokens'] / best['rollout']:11,.0f}{share:9.0%}"
    for phases in (STEP[:2], STEP[2:], STEP) if theirs else ():
        line += f"{paired_ratio(theirs, ours, phases):10.2f}"
    return line


def gae_line(theirs, ours):
    """GAE over the processes of all sizes."""
    against = lambda what: statistics.median(seconds[what] / seconds["gae"] for seconds in ours)
    best = min(seconds["gae"] for seconds in ours)
    in_torch = f", {paired_ratio(theirs, ours, ['gae']):.0f} times in torch" if theirs else ""
    return (f"{best * 1e3:.2f} ms, {against('copy'):.0%} of copy speed; a loop over columns takes "
            f"{against('loop'):.0f} times as long in NumPy{in_torch}")


def compare(names, peer):
    """Both tables, each line as soon as it is known."""
    title("One PPO step of tinyrlhf")
    if peer:
        print(f"{'torch / tinyrlhf':>87}")
    print(f"{'size':7}{'rollout ms':>12}{'scoring ms':>12}{'update ms':>12}{'tokens/s':>11}"
          f"{'of peak':>9}" + peer * f"{'rollout*':>10}{'update':>10}{'step':>10}")
    theirs, ours = [], []
    for name in names:
        their_rounds, our_rounds = run_in_turn(name, peer)
        print(size_line(name, their_rounds, our_rounds), flush=True)
        theirs, ours = theirs + their_rounds, ours + our_rounds
    peak = max(seconds["peak"] for seconds in ours)
    print(f"matrix peak: {peak / 1e9:.0f} GFLOP/s in float32"
          + peer * "; above 1 tinyrlhf is faster; * with scoring")
    title(f"GAE, {GAE_SHAPE[0]} rows of {GAE_SHAPE[1]:,} tokens")
    print(gae_line(theirs, ours))


def main():
    """All sizes or one; with --json what one process measures."""
    parser = Parser(description="milliseconds of each phase of a PPO step")
    parser.add_argument("size", nargs="?", choices=SIZES, help="default: all three")
    parser.add_argument("--json", action="store_true", help="one process, its seconds as JSON")
    args = parser.parse_args()
    if args.json and not args.size:
        parser.error("--json needs a size")
    if args.json:
        print(json.dumps(measure_step(SIZES[args.size]) | measure_machine()))
        return
    peer = importlib.util.find_spec("torch") is not None
    compare([args.size] if args.size else SIZES, peer)
    if not peer:
        print("\nratios against PyTorch need torch: pip install torch")


if __name__ == "__main__":
    main()
