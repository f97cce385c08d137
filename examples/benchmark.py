"""Where does the time of a PPO step go on this machine?

    python examples/benchmark.py                 three sizes, some 30 s
    python examples/benchmark.py toy             one of toy, small, laptop

For each size the best of a few steps (rollout, then two epochs of update): milliseconds of each
phase, tokens a second in sampling, and the share of this machine's matrix-product peak that the
step's products reach. Then GAE, compiled, against the same recursion as a loop over NumPy columns,
and against the time to copy as many numbers. Times are of this machine at this moment: compare
the shares and ratios, not the milliseconds. No comparison with other frameworks is made here.
"""
import time

import numpy as np

from common import Parser, t, title

# name: vocabulary, width, layers, heads, rows, prompt tokens, new tokens, steps
SIZES = {"toy": (32, 32, 2, 2, 64, 4, 8, 20), "small": (256, 128, 4, 4, 64, 16, 48, 3),
         "laptop": (1024, 256, 6, 8, 32, 32, 96, 1)}


def best_of(times, call):
    """Least seconds of some calls."""
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def matrix_peak():
    """FLOP/s of a product of two 1024 x 1024 float32 matrices."""
    a = np.ones((1024, 1024), np.float32)
    return 2 * 1024 ** 3 / best_of(5, lambda: a @ a)


def step_flops(vocab, d, layers, rows, length):
    """FLOPs of the products of one step: 12 d^2 weights a layer, the causal half of attention.

    Rollout: one forward of policy, reference and critic; update: two epochs of forward and
    backward, three forwards' worth, of policy and critic.
    """
    tokens = rows * length
    trunk = tokens * layers * (2 * 12 * d * d + 2 * d * length)
    head = tokens * 2 * d * vocab
    return 3 * trunk + 2 * head + 2 * 3 * (2 * trunk + head)


def measure(name):
    """Seconds of each phase of the fastest step at a size, one step before it to compile."""
    vocab, d, layers, heads, rows, prompt, new, steps = SIZES[name]
    rng = np.random.default_rng(0)
    cfg = t.ToyLMConfig(vocab, prompt + new, d_model=d, n_layers=layers, n_heads=heads)
    policy, critic = t.TinyCausalLM(cfg, rng), t.TinyCritic(cfg, rng)
    prompts = rng.integers(1, vocab, (rows, prompt))
    count_five = lambda tokens, mask: ((tokens == 5) * mask).sum(axis=1)
    history = t.train_ppo(policy, policy.frozen_copy(), critic, prompts, count_five, 0,
                          t.PPOConfig(steps=steps + 1, max_new_tokens=new), rng=rng)
    fastest = min(history[1:], key=lambda stats: sum(stats.seconds.values()))
    return fastest.seconds, rows * fastest.response_length


def loop_gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """The recursion column by column, as a reader would first write it."""
    advantages, ahead, value = np.zeros_like(values), 0.0, 0.0
    for i in reversed(range(values.shape[1])):
        ahead = (rewards[:, i] + gamma * value - values[:, i] + gamma * lam * ahead) * mask[:, i]
        advantages[:, i], value = ahead, values[:, i] * mask[:, i]
    return advantages, advantages + values


def main():
    """Print both tables."""
    parser = Parser(description="milliseconds of each phase of a PPO step")
    parser.add_argument("size", nargs="?", choices=SIZES, help="default: all three")
    chosen, peak = parser.parse_args().size, matrix_peak()
    title("One PPO step")
    print(f"{'size':8}{'rollout ms':>12}{'scoring ms':>12}{'update ms':>12}{'sampled tokens/s':>18}"
          f"{'of matrix peak':>16}")
    for name in [chosen] if chosen else SIZES:
        seconds, tokens = measure(name)
        vocab, d, layers, _, rows, prompt, new, _ = SIZES[name]
        flops = step_flops(vocab, d, layers, rows, prompt + new)
        phases = "".join(f"{seconds[p] * 1e3:12.1f}" for p in ("rollout", "scoring", "update"))
        share = flops / sum(seconds.values()) / peak
        print(f"{name:8}{phases}{tokens / seconds['rollout']:18,.0f}{share:16.0%}")
    print(f"matrix peak: {peak / 1e9:.0f} GFLOP/s in float32")
    rng, shape = np.random.default_rng(0), (512, 1024)
    r, v = (rng.normal(size=shape).astype(np.float32) for _ in "rv")
    mask = np.ones(shape, np.float32)
    assert np.allclose(t.gae(r, v, mask)[0], loop_gae(r, v, mask)[0], atol=1e-3)
    ours, loop = best_of(20, lambda: t.gae(r, v, mask)), best_of(3, lambda: loop_gae(r, v, mask))
    copy = best_of(20, lambda: np.copyto(v, r)) * 5 / 2  # five arrays pass, a copy moves two
    title("GAE, 512 rows of 1,024 tokens")
    print(f"{ours * 1e3:.2f} ms: {loop / ours:.0f} times the loop over columns, "
          f"{copy / ours:.0%} of copy speed")


if __name__ == "__main__":
    main()
