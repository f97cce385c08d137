"""What several examples share: headings, tables, errors, matplotlib if there, listed toys."""
import argparse
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402


class Parser(argparse.ArgumentParser):
    """argparse, but a wrong argument gets one sentence and exit status 2."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def title(text):
    """A heading over a ruled line."""
    print(f"\n{text}\n{'-' * len(text)}")


def cell(x, width, digits=3):
    """Right-aligned: a float with so many digits and no minus before zero, anything else as is."""
    if isinstance(x, float):
        x = f"{x:.{digits}f}"
        x = x[1:] if x[0] == "-" and not float(x) else x
    return f"{x!s:>{width}}"


def pyplot():
    """matplotlib.pyplot drawing to files, or one sentence that says what to install."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def at_least(low):
    """An argparse type: an integer from `low` up."""
    def integer(text):
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"an integer from {low} up is needed, got {text!r}")
        return value
    return integer


def parse_plot(parser, what):
    """The arguments, --plot FILE among them; without matplotlib --plot ends before any work."""
    parser.add_argument("--plot", metavar="FILE", help=f"draw {what} (needs matplotlib)")
    args = parser.parse_args()
    if args.plot:
        pyplot()
    return args


def save_plot(figure, file):
    """Write a drawing and say so."""
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    print(f"\nwritten: {file}")


# ------------------------------------------------------------------ toys whose responses are listed

EOS, PROMPT = 0, [1, 2]


def count_good(tokens, token_mask):
    """The chapter's toy reward: how often the response says the good token, 2."""
    return ((tokens == 2) * token_mask).sum(axis=1).astype(float)


@dataclass
class Listed:
    """Every response to PROMPT under a policy: R responses of N columns, padded behind the end."""
    tokens: np.ndarray    # (R, N)
    mask: np.ndarray      # (R, N) 1 on the response
    scores: np.ndarray    # (R,)
    p: np.ndarray         # (R,) probability under the policy
    logp: np.ndarray      # (R, N) of the policy, 0 behind the end
    logp_ref: np.ndarray  # (R, N)
    state: np.ndarray     # (R, N) one id for each different prefix, the state before the token,
    action: np.ndarray    # (R, N) and one for each prefix with its next token


def token_table(model, tokens, mask):
    """log pi of every token of listed responses -> Tensor (R, N), 0 behind the end."""
    rows = np.concatenate([np.tile(PROMPT, (len(tokens), 1)), tokens], axis=1)  # (R, P + N)
    return t.token_log_probs(model(rows), rows)[:, len(PROMPT) - 1:] * mask


def list_responses(policy, ref, length):
    """Listed of all responses up to `length` tokens."""
    V = policy.cfg.vocab_size
    tokens, mask = t.enumerate_responses(V, length, EOS)
    with t.no_grad():
        logp, logp_ref = (token_table(model, tokens, mask).data for model in (policy, ref))
    digits = (tokens + 1) * (V + 1) ** np.arange(length)  # a prefix is a number in base V + 1
    action = np.cumsum(digits, axis=1)
    return Listed(tokens, mask, count_good(tokens, mask), np.exp(logp.sum(axis=1)), logp, logp_ref,
                  action - digits, action)


def mean_given(ids, x, listed):
    """E[x | id] under the policy, at each place -> (R, N); ids is listed.state or .action."""
    index = np.unique(ids, return_inverse=True)[1].ravel()
    weight = (listed.p[:, None] * listed.mask).ravel()
    below = np.bincount(index, weight)
    mean = np.bincount(index, weight * x.ravel()) / np.where(below > 0, below, 1)
    return mean[index].reshape(x.shape) * listed.mask


def flat_grad(loss, model):
    """Gradient of a scalar Tensor by all parameters of a model -> (D,)."""
    for p in model.parameters():
        p.grad = np.zeros_like(p.data)
    loss.backward()
    return np.concatenate([p.grad.ravel() for p in model.parameters()])


def score_table(policy, listed):
    """grad log pi of each token of each response, by all parameters -> (R, N, D)."""
    rows, columns = np.nonzero(listed.mask)
    known, out = {}, None
    for r, n in zip(rows, columns):
        if listed.action[r, n] not in known:  # one backward for each state and token
            one = token_table(policy, listed.tokens[r:r + 1], listed.mask[r:r + 1])
            known[listed.action[r, n]] = flat_grad(one[0, n], policy)
        g = known[listed.action[r, n]]
        out = np.zeros((*listed.mask.shape, len(g))) if out is None else out
        out[r, n] = g
    return out


def moments(estimator, size, p, scores):
    """Mean (D,) of an estimator, and its variance times the batch size, over every batch.

    estimator(rows (B,)) -> weights (B, N) of grad log pi of each token; scores (R, N, D).
    """
    bags = np.array(list(itertools.combinations_with_replacement(range(len(p)), size)))
    orders = [len(set(itertools.permutations(bag))) for bag in bags]
    weight = orders * p[bags].prod(axis=1)  # (M,) probability of each batch, order aside
    table = np.zeros((len(bags), *scores.shape[:2]))  # (M, R, N)
    for m, bag in enumerate(bags):
        np.add.at(table[m], bag, estimator(bag))
    flat, table = scores.reshape(-1, scores.shape[2]), table.reshape(len(bags), -1)
    mean = weight @ table @ flat
    square = weight @ ((table @ (flat @ flat.T)) * table).sum(axis=1)  # E |g|^2
    return mean, size * (square - mean @ mean)


def exact_J(policy, ref, listed, beta):
    """E[score] - beta KL -> scalar Tensor: autograd through the list gives its exact gradient."""
    logp = t.response_log_probs(policy, PROMPT, listed.tokens, listed.mask)  # (R,)
    rewards = (logp - listed.logp_ref.sum(axis=1)) * -beta + listed.scores
    return (logp.exp() * rewards).sum()


def climb(vocab, length, beta, steps, seed=0):
    """A lumpy reference, and a policy that climbs the exact J from it by Adam, in float64.

    Returns the reference and the policy after each number of steps, 0 to `steps`.
    """
    rng = np.random.default_rng(seed)
    cfg = t.ToyLMConfig(vocab, len(PROMPT) + length, d_model=8, n_layers=1, dtype="float64")
    policy = t.TinyCausalLM(cfg, rng)
    for p in policy.parameters():
        p.data += rng.normal(0, 0.3, p.shape)  # at GPT-2's .02 it would be near uniform
    ref, path, opt = policy.frozen_copy(), [policy.copy()], t.Adam(policy.parameters(), 5e-3)
    listed = list_responses(policy, ref, length)
    for _ in range(steps):
        opt.zero_grad()
        (-exact_J(policy, ref, listed, beta)).backward()
        opt.step()
        path.append(policy.copy())
    return ref, path


# ------------------------------------------------------------------ rejection sampling

def winners(scores, k):
    """Rows of the best of each k neighbours, scores (B,) -> (B / k,)."""
    return scores.reshape(-1, k).argmax(axis=1) + np.arange(0, len(scores), k)


def imitate(policy, tokens, token_mask, lr, steps, rng, rows=64):
    """SFT on responses (B, T), so many of them a step, drawn anew -> the last loss."""
    labels = np.where(token_mask > 0, tokens, -100)  # prompt and padding ask for nothing

    def loss_of():
        batch = rng.choice(len(tokens), rows)
        return t.sft_loss(policy(tokens[batch]), labels[batch])
    return t.fit(policy, lr, steps, loss_of)


# ------------------------------------------------------------------ one PPO run in figures

def lumpy_model(cfg, rng, std=0.3):
    """A policy with preferences of its own: at GPT-2's .02 it would be near uniform."""
    policy = t.TinyCausalLM(cfg, rng)
    for p in policy.parameters():
        p.data += rng.normal(0, std, p.shape)
    return policy


def ppo_figures(policy, ref, critic, cfg, rng, reward_fn=count_good):
    """PPO on a listed toy -> its cost and its exact result, a dict.

    Bytes are of weights, each array once, and of gradient and Adam's m and v where one is trained.
    """
    history = t.train_ppo(policy, ref, critic, [PROMPT] * 64, reward_fn, EOS, cfg, rng=rng)
    trained = dict.fromkeys(policy.parameters() + critic.parameters())
    weights = dict.fromkeys([*trained, *ref.parameters()])
    size = lambda tensors: sum(p.data.nbytes for p in tensors)
    milliseconds = {kind: 1000 * float(np.median([s.seconds[kind] for s in history]))
                    for kind in ("rollout", "update")}
    e = t.exact_objective(policy, ref, PROMPT, reward_fn, cfg.max_new_tokens, EOS, cfg.beta)
    return milliseconds | {
        "trained": sum(p.data.size for p in trained),
        "KiB": (size(weights) + 3 * size(trained)) / 1024,
        "KL": e.kl, "fraction": e.fraction}


def figures_row(name, runs):
    """A table line from figures of several seeds: medians, and the least fraction beside; no name
    and no runs: the heading."""
    if not runs:
        return (f"{'':34}{'trained':>9}{'KiB':>7}{'sample ms':>11}{'update ms':>11}{'KL':>7}"
                f"{'of optimum':>12}{'least':>8}")
    middle = {key: np.median([run[key] for run in runs]) for key in runs[0]}
    least = min(run["fraction"] for run in runs)
    return ("{name:34}{trained:9,.0f}{KiB:7,.0f}{rollout:11.1f}{update:11.1f}{KL:7.2f}"
            "{fraction:12.1%}{least:8.1%}").format(name=name, least=least, **middle)


def figures_table(run, cases, seeds, steps):
    """A line for each name -> settings of cases: run(seed, *settings) over the seeds."""
    title(f"PPO, {steps} steps of 64 responses, from one reference: medians of {seeds} seeds")
    print(figures_row("", []))
    table = {}
    for name, how in cases.items():
        table[name] = [run(seed, *how) for seed in range(seeds)]
        print(figures_row(name, table[name]), flush=True)
    print("KiB: weights of policy, critic and reference, each array once; gradient and Adam's m, v"
          "\nof what is trained. of optimum: (J - J_ref) / (J* - J_ref), all responses listed.")
    show_fractions(table)


def show_fractions(table):
    """name -> figures of several seeds: what each seed reached."""
    print("\nof optimum, seed by seed")
    for name, runs in table.items():
        print(f"{name:34}" + "".join(f"{run['fraction']:8.1%}" for run in runs))
