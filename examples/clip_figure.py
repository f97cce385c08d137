"""The clipped surrogate over the ratio: where it is flat, and what its gradient is.

    python examples/clip_figure.py                 tables, gradients by backward
    python examples/clip_figure.py --plot FILE     four panels (needs matplotlib)

Question: what does the clip switch off, and what does it leave alone?

Found: for A > 0 the surrogate is flat from r = 1.2 up, for A < 0 from r = .8 down; everywhere else
the slope is A, so the wrong way is never switched off. At the edge itself there is no derivative: 1
on the left of r = 1.2, 0 on its right. For A < 0 the bound has no floor: at r = 100 it is -100; the
dual clip stops it at -3. The value clip is flat from V_old + .2 to 1.8, its mirror image beyond the
return: what V gains past .2 in one rollout does not count, whatever the size of the reward.
"""
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402
from common import Parser, cell, pyplot, title  # noqa: E402

EPS, DUAL = 0.2, 3.0
RATIOS = (0.01, 0.5, 0.79, 0.81, 0.9, 1.0, 1.1, 1.19, 1.21, 1.5, 4.0, 100.0)
MOVES = (-1.0, -0.3, -0.21, -0.19, 0.0, 0.1, 0.19, 0.21, 0.5, 0.9, 1.0, 1.5, 1.9)


def surrogate(ratio, advantage, eps=EPS):
    """min(r A, clip(r) A) of one token and its derivative by r, through ppo_clip_loss."""
    logp = t.Tensor(np.array([[math.log(ratio)]]), requires_grad=True)
    loss, _ = t.ppo_clip_loss(logp, np.zeros((1, 1)), np.array([[advantage]]), [[1]], eps)
    (-loss).backward()
    return -float(loss), float(logp.grad[0, 0]) / ratio  # d/dr = (d/d log r) / r


def dual_clip(ratio, advantage, eps=EPS, c=DUAL):
    """max(min(r A, clip(r) A), c A) where A < 0 (Ye et al. 2020), and its derivative by r."""
    r = t.Tensor(np.array(ratio), requires_grad=True)
    lower = t.minimum(r * advantage, t.clip(r, low=1 - eps, high=1 + eps) * advantage)
    value = t.maximum(lower, c * advantage) if advantage < 0 else lower
    value.backward()
    return float(value), float(r.grad)


def clipped_value(move, old=0.0, target=1.0, eps=EPS):
    """The value loss of one token whose V moved by `move` from V_old, and its derivative by V."""
    v = t.Tensor(np.array([[old + move]]), requires_grad=True)
    loss = t.value_loss(v, [[old]], [[target]], [[1]], eps)
    loss.backward()
    return float(loss), float(v.grad[0, 0])


def surrogate_table():
    """Value and slope for either sign of the advantage, and the dual clip beside them."""
    title(f"L = min(r A, clip(r, {1 - EPS}, {1 + EPS}) A) and dL/dr by backward")
    print(f"{'':8}{'A = +1':^22}{'A = -1':^22}{f'A = -1, dual clip c = {DUAL:.0f}':^28}".rstrip())
    print(f"{'ratio':>8}" + f"{'L':>11}{'dL/dr':>9}  " * 3 + "    L - r A")
    for r in RATIOS:
        up, down, dual = surrogate(r, 1.0), surrogate(r, -1.0), dual_clip(r, -1.0)
        gap = max(up[0] - r, down[0] + r)
        pairs = "".join(cell(value, 11, 2) + cell(slope, 9, 2) + "  " for value, slope in
                        (up, down, dual))
        print(f"{r:8.2f}" + pairs + cell(gap, 11, 2))
    print("L - r A is never above 0 (the larger of the two is shown): L is a lower bound of r A.")


def flat_regions():
    """The ratios at which a fine grid finds no gradient, by sign of the advantage."""
    title("Flat where")
    grid = np.linspace(0.0005, 2.9995, 3000)
    for advantage in (1.0, -1.0):
        flat = [r for r in grid if surrogate(r, advantage)[1] == 0]
        print(f"A = {advantage:+.0f}: {flat[0]:.4f} <= r <= {flat[-1]:.4f} of a grid from "
              f"{grid[0]:.4f} to {grid[-1]:.4f}")
    h = 1e-6
    left, right = surrogate(1 + EPS - h, 1.0)[1], surrogate(1 + EPS + h, 1.0)[1]
    print(f"At the edge r = {1 + EPS} there is no derivative: {left:.2f} on its left, "
          f"{cell(right, 1, 2)} on its right.")
    k3 = [float(t.kl_estimates([0.0], [math.log(r)], "k3")[0]) for r in (1 - EPS, 1 + EPS)]
    print(f"r - 1 - log r, the KL of one token, is {k3[0]:.4f} at r = {1 - EPS} and {k3[1]:.4f} at "
          f"r = {1 + EPS}; eps^2/2 = {EPS ** 2 / 2:.2f}.")


def sketch(values, low, high, height=9):
    """Lines of a small character plot, one column a value."""
    levels = [round((v - low) / (high - low) * (height - 1)) for v in values]
    return ["".join("*" if level == row else " " for level in levels)
            for row in reversed(range(height))]


def panels():
    """The two panels as characters; the ratio runs from 0 to 2."""
    title("The two panels, r from 0 to 2, a mark at r = 1 and at both edges")
    grid = np.linspace(0.01, 2, 41)
    up = sketch([surrogate(r, 1.0)[0] for r in grid], 0, 1.2)
    down = sketch([surrogate(r, -1.0)[0] for r in grid], -2, 0)
    for left, right in zip(up, down):
        print(f"   {left}    {right}".rstrip())
    axis = "".join("^" if any(abs(r - x) < 0.025 for x in (0.8, 1, 1.2)) else "-" for r in grid)
    print(f"   {axis}    {axis}\n   {'A > 0':^41}    {'A < 0':^41}".rstrip())


def value_table():
    """The clipped value loss over the move of V, V_old = 0, the return 1."""
    title(f"Value loss over the move of V: V_old = 0, G = 1, eps_v = {EPS}")
    print(f"{'V - V_old':>10}{'loss':>9}{'dL/dV':>9}{'  plain (V-G)^2/2':>18}")
    for move in MOVES:
        loss, slope = clipped_value(move)
        print(f"{move:10.2f}{cell(loss, 9)}{cell(slope, 9, 2)}{(move - 1) ** 2 / 2:18.3f}")


def plot(path):
    """Four panels: surrogate for A > 0 and A < 0, the dual clip, the value loss."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.8))
    r = np.linspace(0.02, 2, 400)
    wide = np.linspace(0.02, 5, 400)
    move = np.linspace(-1, 2, 400)
    drawn = [(r, lambda x: surrogate(x, 1.0), r, "A = +1", "ratio r"),
             (r, lambda x: surrogate(x, -1.0), -r, "A = -1", "ratio r"),
             (wide, lambda x: dual_clip(x, -1.0), -wide, "A = -1, dual clip c = 3", "ratio r"),
             (move, clipped_value, (move - 1) ** 2 / 2, "value loss, V_old = 0, G = 1",
              "V - V_old")]
    for axis, (x, curve, plain, name, label) in zip(axes, drawn):
        values, slopes = np.array([curve(v) for v in x]).T
        axis.plot(x, plain, ":", color="grey", label="without the clip")
        axis.plot(x, values, color="tab:blue", label="with it")
        axis.plot(x, np.where(slopes == 0, values, np.nan), color="tab:red", lw=3,
                  label="flat: no gradient")
        edges = (-EPS, EPS) if curve is clipped_value else (1 - EPS, 1 + EPS)
        for edge in edges:
            axis.axvline(edge, color="grey", lw=0.5)
        axis.set(title=name, xlabel=label)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def main():
    """The tables, or the picture."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="draw the panels (needs matplotlib)")
    args = parser.parse_args()
    if args.plot:
        plot(args.plot)
        return
    for part in (surrogate_table, flat_regions, panels, value_table):
        part()


if __name__ == "__main__":
    main()
