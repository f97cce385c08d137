"""Tests of tinyrlhf.py, in the order of its sections.

    python -m pytest -q                     the suite
    python test_tinyrlhf.py fuzz 20000      random calls of every public function, by hand
    python test_tinyrlhf.py kill 100        a training run killed at random moments, by hand
    python test_tinyrlhf.py soak 200        resident size over PPO steps, by hand

A right value is a literal worked by hand, a central difference, a slow implementation written
another way (`slow_...`: loops over Python floats), a peer (torch, transformers), or an invariance.
Bnn numbers a fault that people reported against other systems; each section names those it holds.
"""
import collections
import copy
import dataclasses
import doctest
import functools
import gc
import io
import itertools
import json
import math
import os
import pathlib
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref

import numpy as np
import pytest

import tinyrlhf as t

HERE = pathlib.Path(__file__).resolve().parent
SMALL = dict(vocab_size=11, max_len=16, d_model=8, n_layers=2, n_heads=2, dtype="float64")
EOS, GOOD, NAN, INF = 0, 5, float("nan"), float("inf")

# ---------------------------------------------------------------------------- helpers

def gen(*seed):
    return np.random.default_rng(seed or 0)

def leaf(data, dtype=np.float64):
    return t.Tensor(np.array(data, dtype), requires_grad=True)

def near(got, want, tol=1e-12):
    """Equal in shape and, to tol relative or absolute, in value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol)

def same(got, want):
    """Equal bit for bit, dtype and shape included; lists are compared entry by entry."""
    if isinstance(got, list):
        assert len(got) == len(want)
        for pair in zip(got, want):
            same(*pair)
        return
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()

def refuses(call, *fragments, error=(ValueError, TypeError)):
    """The call raises, and its sentence holds every fragment."""
    with pytest.raises(error) as caught:
        call()
    for fragment in fragments:
        assert str(fragment) in str(caught.value)

def grad_check(f, *leaves):
    assert t.grad_check(lambda *_: f(), list(leaves)) < 1e-6

def build(kind=t.TinyCausalLM, seed=0, spread=0.3, **changes):
    """A small model with every weight moved away from its start, so that mistakes show."""
    model = kind(t.ToyLMConfig(**{**SMALL, **changes}), gen(seed))
    noise = gen(seed, 1)
    for p in model.parameters():
        p.data[...] += spread * noise.standard_normal(p.shape)
    return model

def weights(*models):
    return [p.data.copy() for model in models for p in model.parameters()]

def scripted(script):
    """A model whose next token after position p is script[p], whatever was read."""
    lm = t.TinyCausalLM(t.ToyLMConfig(11, len(script), 12, 1, 2, "float64"), gen())
    for p in lm.parameters():
        p.data[...] = 0
    lm.params["wte.weight"].data[...] = np.eye(11, 12)
    lm.params["wpe.weight"].data[...] = 9 * np.eye(12)[list(script)]
    lm.params["ln_f.weight"].data[...] = 30
    return lm

def ragged(rows, width, seed=0):
    """A mask of responses that start at different places and have different lengths."""
    r, mask = gen(seed, rows, width), np.zeros((rows, width))
    for row in mask:
        start = r.integers(0, max(width - 1, 1))
        row[start:r.integers(start + 1, width + 1)] = 1
    return mask

def python(code, *args, cwd=HERE, **env):
    """Starts code in a fresh interpreter."""
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], cwd=cwd, text=True,
                            env={**os.environ, **env}, stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

def slow_mean(x, mask):
    picked = [float(v) for v, m in zip(np.ravel(x), np.ravel(mask)) if m]
    return math.fsum(picked) / max(len(picked), 1)

def slow_whiten(x, mask, shift_mean=True):
    """NaN marks a slot whose value nobody promised."""
    mean = slow_mean(x, mask)
    std = math.sqrt(slow_mean((x - mean) ** 2, mask))
    out = (x - mean) / (std + 1e-8) + (0 if shift_mean else mean)
    return np.where(np.asarray(mask, bool), out, NAN)

def slow_softmax(row, temperature=1.0):
    p = [math.exp((x - max(row)) / temperature) for x in row]
    return np.array(p) / math.fsum(p)

def slow_logp(logits, tokens, temperature=1.0):
    out = np.zeros(tokens[:, 1:].shape)
    for b, s in np.ndindex(out.shape):
        x = (logits[b, s] - logits[b, s, tokens[b, s + 1]]) / temperature
        out[b, s] = -max(x) - math.log(math.fsum(math.exp(y - max(x)) for y in x))
    return out

def slow_entropy(logits, mask, temperature=1.0):
    rows = [slow_softmax(row, temperature) for row in logits[np.asarray(mask, bool)]]
    return -sum(p * math.log(p) for row in rows for p in row if p > 0) / max(len(rows), 1)

def slow_filter(logits, temperature=1.0, top_k=None, top_p=None):
    """One row. Python's sort is stable, so the lower index wins a tie."""
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])
    if temperature == 0:
        return np.eye(len(logits))[ranked[0]]
    ranked = ranked[:top_k]
    p, mass, kept = slow_softmax([logits[i] for i in ranked], temperature), 0.0, {}
    for i, share in zip(ranked, p):
        if kept and top_p is not None and mass >= top_p:
            break
        kept[i] = share
        mass += share
    return np.array([kept.get(i, 0.0) for i in range(len(logits))]) / math.fsum(kept.values())

def slow_pick(probs, u):
    """The first id at which the running sum passes u."""
    return next(i for i in range(len(probs)) if math.fsum(probs[: i + 1]) > u)

def slow_sample(lm, prompt, uniforms, eos_id, **filters):
    """One row, no batch, no cache: a whole forward pass for every token."""
    ids, logp = list(prompt), []
    for u in uniforms:
        probs = slow_filter(np.asarray(lm(np.array([ids])))[0, -1], **filters)
        ids.append(slow_pick(probs, u))
        logp.append(math.log(probs[ids[-1]]))
        if ids[-1] == eos_id:
            break
    return ids[len(prompt):], logp

def slow_last(mask):
    return np.array([max(np.flatnonzero(row)) for row in mask])

def slow_shaped(scores, logp, ref, mask, beta):
    out = np.zeros(mask.shape)
    for b, s in np.argwhere(mask):
        out[b, s] = -beta * (logp[b, s] - ref[b, s]) + scores[b] * (s == slow_last(mask)[b])
    return out

def slow_gae(rewards, values, mask, gamma=1.0, lam=0.95):
    """The double sum A_t = sum_l (gamma lam)^l delta_(t+l), up to the end of the run t is in."""
    adv, width = np.zeros(mask.shape), mask.shape[1]
    for b, s in np.argwhere(mask):
        for i in itertools.takewhile(lambda i: mask[b, i], range(s, width)):
            after = values[b, i + 1] if i + 1 < width and mask[b, i + 1] else 0.0
            delta = rewards[b, i] + gamma * after - values[b, i]
            adv[b, s] += (gamma * lam) ** (i - s) * delta
    return adv, np.where(np.asarray(mask, bool), adv + values, 0.0)

def slow_clip(new, old, adv, mask, clip_eps):
    """Loss and clip fraction; the log-ratio is bounded to 20."""
    rho = [math.exp(max(-20.0, min(20.0, d))) if m else 1 for d, m in
           zip(np.ravel(new - old), np.ravel(mask))]
    terms = [-min(x * a, max(1 - clip_eps, min(1 + clip_eps, x)) * a)
             for x, a in zip(rho, np.ravel(adv))]
    return slow_mean(terms, mask), slow_mean([abs(x - 1) > clip_eps for x in rho], mask)

def slow_value(values, old, returns, mask, clip_eps=0.2):
    pairs = [(v - g, o + max(-clip_eps, min(clip_eps, v - o)) - g)
             for v, o, g in zip(*map(np.ravel, (values, old, returns)))]
    return slow_mean([max(a * a, b * b) / 2 for a, b in pairs], mask)

# ---------------------------------------------------------------------------- 0 the file
# holds B36 (same bits in every process), B67 (unwritable cache directory)

def test_worked_examples_of_the_docstrings():
    done = doctest.testmod(t)
    assert done.failed == 0 and done.attempted >= 6

def test_an_edited_kernel_is_compiled_anew(tmp_path):
    """The cache on disk belongs to the file as it stands: a changed line changes the result."""
    source = (HERE / "tinyrlhf.py").read_text()
    line = "delta = R[t] + gamma * next_value - V[t]"
    code = "import tinyrlhf as t; print(t.gae([[1.0]], [[0.25]], [[1]])[0].item())"
    found = []
    for text in (source, source.replace(line, line.replace("- V[t]", "+ V[t]"))):
        (tmp_path / "tinyrlhf.py").write_text(text)
        found.append(float(python(code, cwd=tmp_path).communicate()[0]))
    assert found == [0.75, 1.25]

def test_import_is_silent_and_needs_only_numpy_and_numba():
    job = python("import sys, tinyrlhf; print(*{'torch', 'matplotlib', 'pytest'} & {*sys.modules})")
    assert job.communicate()[0].strip() == "" and job.returncode == 0

def test_estimate_runs_the_estimator_or_says_where_it_is(tmp_path):
    run = lambda folder, *args: subprocess.run(
        [sys.executable, folder / "tinyrlhf.py", "estimate", *args], text=True, capture_output=True)
    est = json.loads(run(HERE, "--params", "7e9", "--json").stdout)
    assert sum(whole for whole, _ in est["bytes"].values()) == 252e9
    wrong = run(HERE, "--gpu", "abacus")
    assert wrong.returncode == 2 and "abacus" in wrong.stderr and "a100-80" in wrong.stderr
    shutil.copy(HERE / "tinyrlhf.py", tmp_path)
    alone = run(tmp_path)
    assert alone.returncode == 1 and "examples/estimator.py" in alone.stderr
    assert len(alone.stderr.splitlines()) == len(wrong.stderr.splitlines()) == 1

def test_compiled_anew_or_from_the_cache_the_bits_are_the_same(tmp_path):
    """Beside a file of the name __pycache__ nothing can be cached: it still runs, and compiles."""
    shutil.copy(HERE / "tinyrlhf.py", tmp_path)
    (tmp_path / "__pycache__").touch()
    code = ("import os; os.environ.pop('NUMBA_CACHE_DIR', None)\n"
            "import numpy as np, tinyrlhf as t\n"
            "lm = t.TinyCausalLM(t.ToyLMConfig(50, 30, d_model=40), np.random.default_rng(0))\n"
            "print(t.gae([[0, .5, 1.]], [[9, .2, .3]], [[0, 1, 1]])[0].tolist())\n"
            "ids = np.arange(60).reshape(2, 30) % 50\n"
            "t.token_log_probs(lm(ids), ids).sum().backward()\n"
            "print([p.grad.tolist() for p in lm.parameters()])\n")
    anew = python(code, cwd=tmp_path, HOME="/dev/null", XDG_CACHE_HOME="/dev/null/x",
                  PYTHONDONTWRITEBYTECODE="1")
    python(code).communicate()  # fills the cache where it was empty
    cached, anew = python(code).communicate()[0], anew.communicate()[0]
    near(json.loads(anew.splitlines()[0]), [[0, 1.265, 0.7]])
    assert cached == anew

def blas_threads():
    """How many threads OpenBLAS has, or None with another BLAS."""
    get = getattr(t.BLAS, "scipy_openblas_get_num_threads64_", None)
    return get and get()

def test_two_threads_give_both_results_and_leave_the_blas_as_it_was(monkeypatch):
    monkeypatch.setattr(t, "TWO_THREADS_FROM", 0)
    before, thread = blas_threads(), lambda: (threading.get_ident(), blas_threads())
    (first, inside), (second, _) = t.at_once(1, thread, thread)
    if before is not None:
        assert first != second and inside == 1
    def fail():
        raise ValueError("inside")
    for pair in ((fail, thread), (thread, fail)):
        with pytest.raises(ValueError, match="inside"):
            t.at_once(1, *pair)
    assert blas_threads() == before

def test_one_thread_where_arrays_are_narrow_or_the_blas_is_unknown(monkeypatch):
    monkeypatch.setattr(t, "TWO_THREADS_FROM", 10)
    assert len({*t.at_once(9, threading.get_ident, threading.get_ident)}) == 1
    monkeypatch.setattr(t, "BLAS", object())
    assert len({*t.at_once(11, threading.get_ident, threading.get_ident)}) == 1

# ---------------------------------------------------------------------------- 1 autograd
# holds B26 (ties), B52 (log-softmax), B53 B54 (broadcasting, reductions), B55 B56 B57 (graphs),
# B58 (repeated indices), B59 (mutation), B60 (integers), B61 (dtypes), B62 (arrays on the left),
# B63 (leaks), B65 (layer norm of a constant row), B71 (layouts), B72 (scatter race)

A, B, W, C = (gen(len(s), s[-1]).uniform(0.5, 2, s) for s in ((2, 3, 4), (4,), (4, 3), (2, 4, 2)))
OPS = {  # expression on Tensors: the same on arrays, where it reads differently
    "a + b": None, "a - b": None, "b - a": None, "a * b": None, "a / b": None, "b / a": None,
    "2 - a": None, "2 / a": None, "a ** 3": None, "a ** -0.5": None, "-a": None,
    "a @ w": None, "a @ c": None, "w @ a": None, "np.ones((5, 4)) @ c": None,
    "np.ones(4) + b": None, "np.ones(4) - b": None, "np.float64(2) * b": None,
    "np.full(4, 3.0) / b": None, "w[np.array([1, -1, 3, 1])]": None, "b @ b": None,
    "a.exp()": "np.exp(a)", "a.log()": "np.log(a)", "a.tanh()": "np.tanh(a)",
    "a.reshape((4, 6))": None, "a.reshape(-1)": None, "a.transpose(2, 0, 1)": None,
    "a[1]": None, "a[:, ::-1]": None, "a[..., 1:3]": None, "a[:, None]": None, "a[0, 1, 2]": None,
    "b[np.array([0, 3, 0, 0])]": None, "a[np.array([[0], [1]]), np.array([0, 2])]": None,
    "b[np.array([True, False, True, True])]": None, "a.sum()": None, "a.sum(1)": None,
    "a.sum(axis=(0, 2), keepdims=True)": None, "a.mean()": None, "a.mean((1, 2))": None,
    "a.mean(-1, keepdims=True)": None, "a.max()": None, "a.max(axis=-1)": None,
    "a.max((0, 1), keepdims=True)": None, "t.maximum(a, b)": "np.maximum(a, b)",
    "t.minimum(a, b)": "np.minimum(a, b)", "t.clip(a, 0.8, 1.4)": "np.clip(a, 0.8, 1.4)",
    "t.log_softmax(a)": "a - np.log(np.exp(a).sum(-1, keepdims=True))",
    "t.layer_norm(a, b, b * 2)":
        "(a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 1e-5) * b + b * 2",
}

@pytest.mark.parametrize("op", OPS)
def test_op_value_dtype_and_gradient(op):
    for dtype, tol in ((np.float32, 1e-5), (np.float64, 1e-12)):
        arrays = {k: x.astype(dtype) for k, x in zip("abwc", (A, B, W, C))}
        leaves = {k: leaf(x, dtype) for k, x in arrays.items() if re.search(rf"\b{k}\b", op)}
        run = lambda: eval(op, {"np": np, "t": t, **leaves})
        want = eval(OPS[op] or op, {"np": np, **arrays})
        assert type(run()) is t.Tensor and run().dtype == dtype
        near(run(), want, tol)
        run().sum().backward()
        assert all(x.grad.dtype == dtype and x.grad.shape == x.shape for x in leaves.values())
    upstream = gen(8).standard_normal(np.shape(want))
    grad_check(lambda: (run() * upstream).sum(), *leaves.values())

def test_log_softmax_of_large_numbers():
    """p = (1/4, 3/4) by logits that exp cannot take; the gradient of log p_0 is 1 - p_0, -p_1."""
    x = leaf([2000.0, 2000.0 + math.log(3)])
    y = t.log_softmax(x)
    near(y, np.log([1 / 4, 3 / 4]))
    y[0].backward()
    near(x.grad, [3 / 4, -3 / 4])

def test_grad_check_measures_a_wrong_gradient():
    """y = x * const(x): the analytic slope is x, the numeric one 2x."""
    x = leaf([1.0, 3.0])
    near(t.grad_check(lambda *_: (x * t.Tensor(x.data.copy())).sum(), [x]), 0.5, 1e-6)

@pytest.mark.parametrize("make, a, b, want_a, want_b", [
    (lambda a, b: ((a + b) ** 2).sum(), [[1, 2], [3, 4], [5, 6]], [10, 20],
     [[22, 44], [26, 48], [30, 52]], [78, 144]),
    (lambda a, b: (a * b).sum(), [1], np.arange(20).reshape(5, 4), [190], np.ones((5, 4))),
    (lambda a, b: (a * b).sum(), np.arange(4).reshape(4, 1), np.arange(4).reshape(1, 4),
     np.full((4, 1), 6), np.full((1, 4), 6)),
    (lambda a, b: (a * b).sum(), 2, [[1, 2], [3, 4], [5, 6]], 21, np.full((3, 2), 2)),
    (lambda a, b: (a.sum((0, 2)) * b).sum(), np.arange(24).reshape(2, 3, 4), [1, 2, 3],
     np.broadcast_to(np.array([[1], [2], [3]]), (2, 3, 4)), [60, 92, 124]),
    (t.maximum, 1, 1, 1, 0), (t.minimum, 1, 1, 1, 0),  # at equality the first argument takes all
    (lambda a, b: (a + b) * (a + b) * a, 3, 0, 27, 18),
    (lambda a, b: (a + a) + (a + a) + b, 1, 1, 4, 1),
    (lambda a, b: (a[np.array([0, 0, 2, 0])] * b).sum(), [0, 0, 0], [1, 2, 3, 4], [7, 0, 3],
     [0, 0, 0, 0]),
    (lambda a, b: (t.log_softmax(a) * b).sum(), [-431, 279, 427], [-1, 0, 0], [-1, 0, 1],
     [-858, -148, 0]),
    (lambda a, b: (t.layer_norm(a, np.ones(3), np.zeros(3)) * b).sum(), [[3, 3, 3]], [[1, 2, 4]],
     [[-421.6370213558, -105.4092553389, 527.0462766947]], [[0, 0, 0]]),
    (lambda a, b: (a.transpose(1, 0) * b).sum(), np.eye(2, 3), np.arange(6).reshape(3, 2),
     [[0, 2, 4], [1, 3, 5]], np.eye(3, 2)),
])
def test_gradient_by_hand(make, a, b, want_a, want_b):
    a, b = leaf(a), leaf(b)
    make(a, b).backward()
    near(a.grad, want_a, 1e-10)
    near(b.grad, want_b, 1e-10)

def test_tied_maximum_hands_out_one():
    x = leaf([[2, 2, 1], [3, 4, 4]])
    x.max(axis=1).sum().backward()
    near(x.grad.sum(1), [1, 1])
    assert x.grad[0, 2] == x.grad[1, 0] == 0

def test_gradients_add_up_and_are_nobodys_alias():
    a, b = leaf([1, 2]), leaf([3, 4])
    for _ in range(2):
        (a + b).sum().backward()
    near([a.grad, b.grad], [[2, 2], [2, 2]])
    assert not np.shares_memory(a.grad, b.grad)

def test_a_graph_is_used_once():
    a, b, d = leaf(3), leaf(2), leaf(1)
    half = a + b
    loss = half * d
    loss.backward()
    refuses(loss.backward, "backward", error=RuntimeError)
    refuses((half * 2).backward, "backward", error=RuntimeError)
    near([a.grad, d.grad], [1, 5])

def test_deep_chain_needs_no_recursion():
    x = leaf(1)
    y = x
    for _ in range(5000):
        y = y * 1.0 + 0.001
    y.backward()
    del y
    near([x.grad, copy.deepcopy(x).data, pickle.loads(pickle.dumps(x)).data], [1, 1, 1])

@pytest.mark.parametrize("mine", [True, False])
def test_data_changed_after_the_forward_pass_does_not_change_the_gradient(mine):
    data = np.array([2.0])
    x = t.Tensor(data, requires_grad=True)
    y = (x * x).sum()
    (data if mine else x.data)[0] = 100
    y.backward()
    near(x.grad, [4])

def test_conversions_from_integers_and_to_numbers():
    x = t.Tensor([1, 2], requires_grad=True)
    assert x.dtype == np.float32
    (x * 0.5).sum().backward()
    same(x.grad, np.float32([0.5, 0.5]))
    same(np.asarray(leaf([1.5]), np.float32), np.float32([1.5]))
    assert float(leaf([1.5]).sum()) == 1.5

def test_no_grad_records_nothing_nests_and_survives_exceptions():
    x = leaf([1, 2])
    with t.no_grad():
        with t.no_grad():
            pass
        assert not (x * 2).requires_grad
    with pytest.raises(KeyError), t.no_grad():
        raise KeyError
    assert (x * 2).requires_grad and not (t.Tensor([1.0]) * 2).requires_grad

def test_scatter_add_of_five_million_ids_loses_none():
    ids = gen(3).integers(0, 3, 5_000_000)
    for _ in range(2):
        table = leaf(np.zeros((3, 1)))
        table[ids].sum().backward()
        same(table.grad[:, 0], np.bincount(ids).astype(float))

def test_graphs_die_by_reference_counts_alone():
    gc.collect()
    gc.disable()
    try:
        x = leaf(np.ones((3, 3)))
        hidden = (x @ x).tanh()
        loss = t.log_softmax(hidden).sum()
        dropped = [weakref.ref(loss.data), weakref.ref(hidden.data)]
        del loss, hidden
        hidden = (x @ x).tanh()
        used, loss = weakref.ref(hidden.data), (hidden * 2).sum()
        del hidden
        loss.backward()  # a used graph lets go of its activations, though the loss is still here
        assert [w() for w in (*dropped, used)] == [None] * 3
    finally:
        gc.enable()

# ---------------------------------------------------------------------------- 2 transformer
# holds B38 (batch mates, padding), B40 (cache), B41 (context), B42 (padded rows), B47 (score at
# the last token), B61 (float32), B73 (ids). B39 (dropout): left out by design; section 12 shows
# that the model's config refuses it

TOKENS = gen(4).integers(0, 11, (3, 9))

@pytest.mark.parametrize("dtype, tol", [("float32", 1e-5), ("float64", 1e-10)])
def test_logits_equal_transformers_gpt2(dtype, tol):
    torch, hf = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=61, n_positions=24, n_embd=32, n_layer=3, n_head=4)
    theirs = hf.GPT2LMHeadModel(config).to(getattr(torch, dtype)).eval()
    for p in theirs.parameters():
        p.data += 0.1 * torch.randn_like(p)
    ours = t.TinyCausalLM(t.ToyLMConfig(61, 24, 32, 3, 4, dtype), gen())
    state = {k: v.numpy() for k, v in theirs.transformer.state_dict().items()}
    assert {k: p.shape for k, p in ours.params.items()} == {k: v.shape for k, v in state.items()}
    for name, p in ours.params.items():
        p.data[...] = state[name]
    ids = gen(1).integers(0, 61, (3, 24))
    assert ours(ids).dtype == dtype
    near(ours(ids), theirs(torch.tensor(ids)).logits.detach().numpy(), tol)

def test_grad_check_through_policy_and_critic():
    shape = dict(vocab_size=5, max_len=4, d_model=4, n_layers=1)
    lm, critic = build(**shape), build(t.TinyCritic, 1, **shape)
    ids, mask = gen(1).integers(0, 5, (2, 4)), np.array([[0, 1, 1], [1, 1, 0]])
    old, adv = gen(2).normal(-1.5, 0.3, (2, 3)), gen(3).normal(0, 1, (2, 3))

    def policy_loss():
        logits = lm(ids)
        loss, _ = t.ppo_clip_loss(t.token_log_probs(logits, ids, 0.7), old, adv, mask, 0.2)
        return loss - t.masked_entropy(logits[:, :-1], mask, 0.7) + t.sft_loss(logits, ids)

    def critic_loss():
        scores = t.score_sequences(critic, ids, np.pad(mask, ((0, 0), (1, 0))))
        return (t.value_loss(critic(ids)[:, :-1], adv, old, mask, 0.2)
                + t.reward_model_loss(scores[:1], scores[1:]))

    grad_check(policy_loss, *lm.parameters())
    grad_check(critic_loss, *critic.parameters())

@pytest.mark.parametrize("dtype, tol", [("float64", 1e-10), ("float32", 1e-4)])
@pytest.mark.parametrize("first", [1, 2, 5, 8])
def test_cache_equals_full_forward(first, dtype, tol):
    lm, steps = build(dtype=dtype), []
    cache = t.KVCache(lm.cfg, 3)
    with t.no_grad():
        for start, end in itertools.pairwise([0, *range(first, 10)]):
            steps.append(np.asarray(lm(TOKENS[:, start:end], cache)))
    near(np.concatenate(steps, 1), lm(TOKENS), tol)

def test_nothing_depends_on_batch_mates_padding_or_later_tokens():
    lm, padded = build(), np.pad(TOKENS, ((0, 0), (0, 4)))
    want = np.asarray(lm(TOKENS))
    near(np.concatenate([lm(TOKENS[b:b + 1]) for b in range(3)]), want)
    near(np.asarray(lm(padded))[:, :9], want)
    assert np.isfinite(np.asarray(lm(padded))).all()
    twin = build()
    (lm(TOKENS)[:, :2] ** 2).sum().backward()
    (twin(padded)[:, :2] ** 2).sum().backward()
    for p, q in zip(lm.parameters(), twin.parameters()):
        near(q.grad, p.grad, 1e-10)

def test_probabilities_of_all_responses_sum_to_one():
    """Chain rule by enumeration: 3 words, up to 3 new tokens, EOS ends a response."""
    lm, total = build(vocab_size=3), 0.0
    for n in (1, 2, 3):
        for words in itertools.product(range(3), repeat=n):
            if EOS not in words[:-1] and (words[-1] == EOS or n == 3):
                ids = np.array([[2, *words]])
                total += math.exp(np.asarray(t.token_log_probs(lm(ids), ids)).sum())
    near(total, 1)

def test_initialisation_is_gpt2s():
    critic, again = (t.TinyCritic(t.ToyLMConfig(300, 64, 64, 2, 4), gen()) for _ in range(2))
    same(weights(critic), weights(again))
    p = {k: v.data for k, v in critic.params.items()}
    near([p[k].std() for k in ("wte.weight", "h.1.mlp.c_fc.weight")], [0.02] * 2, 1e-3)
    near(p["h.1.mlp.c_proj.weight"].std(), 0.01, 5e-4)  # smaller by sqrt(2 layers)
    assert not any(p[k].any() for k in ("value_head.weight", "value_head.bias", "ln_f.bias"))
    assert (p["h.0.ln_1.weight"] == 1).all() and not p["h.0.attn.c_attn.bias"].any()
    assert {v.dtype for v in p.values()} == {np.dtype("float32")}

def test_copies_own_their_memory():
    for model in (build(), build(t.TinyCritic)):
        frozen, twin, critic = model.frozen_copy(), model.copy(), t.TinyCritic.from_backbone(model)
        same(weights(frozen) + weights(twin), weights(model, model))
        near(critic.hidden_states(TOKENS), model.hidden_states(TOKENS), 0)
        near(critic(TOKENS), np.zeros((3, 9)), 0)  # the value head starts from zero
        assert twin(TOKENS).requires_grad and not frozen(TOKENS).requires_grad
        assert all(p.requires_grad for p in critic.parameters())
        assert not any(np.shares_memory(p.data, q.data) for other in (frozen, twin, critic)
                       for p in other.parameters() for q in model.parameters())

def test_score_is_read_at_the_last_response_token():
    critic, last = build(t.TinyCritic), np.array([3, 8, 5])
    want = np.asarray(critic(TOKENS))[range(3), last]
    mask = (np.arange(9) <= last[:, None]) & (np.arange(9) > 1)
    near(t.score_sequences(critic, TOKENS, mask), want)
    near(t.score_sequences(critic, TOKENS[:1, :4], mask[:1, :4]), want[:1])  # alone, no padding
    other = np.pad(np.where(np.arange(9) > last[:, None], 10, TOKENS), ((0, 0), (0, 5)))
    near(t.score_sequences(critic, other, np.pad(mask, ((0, 0), (0, 5))).astype(int)), want)

def test_arrays_of_other_lengths_never_reach_a_kernel():
    """Compiled code checks no bounds: a short array would be read, or written, beyond its end."""
    x, weight = np.ones((3, 4)), np.ones((4, 5))
    refuses(lambda: t.linear(np.ones((2, 6)), weight, np.ones(5)), "linear", "(2, 6)", "(4, 5)")
    refuses(lambda: t.layer_norm(x, np.ones(1), np.ones(4)), "layer_norm", "(3, 4)", "(1,)")
    for other in ((1,), (7,), (2, 5), (3, 5)):
        refuses(lambda: t.linear(x, weight, np.ones(other)), "linear", "(4, 5)", other)
        refuses(lambda: t.layer_norm(x, np.ones(4), np.ones(other)), "layer_norm", "(3, 4)", other)
    for name in ("h.0.attn.c_attn.bias", "h.0.ln_2.weight", "ln_f.bias"):
        lm = build()
        lm.params[name] = t.Tensor(np.ones(3))
        refuses(lambda: lm(TOKENS), "(3,)")
    assert t.linear(np.ones((0, 4)), weight, np.ones(5)).shape == (0, 5)

def test_misuse_of_the_models():
    for model in (build(), build(t.TinyCritic)):
        for bad in (11, -1):
            refuses(lambda: model(np.array([[1, bad]])), "tokens", bad, 10)  # ids are 0 to 10
        refuses(lambda: model(np.zeros((1, 17), int)), 17, 16)
        refuses(lambda: model(np.zeros((1, 3))), "tokens", "float64")
        refuses(lambda: model(np.zeros(3, int)), "tokens", "(3,)")
    refuses(lambda: t.score_sequences(model, TOKENS, np.eye(3, 9)[:2]), "token_mask", "(2, 9)")
    refuses(lambda: t.score_sequences(model, TOKENS, np.eye(3, 9, -1)), "row 0")

def test_attention_neither_overflows_nor_lets_a_hidden_key_drown_the_seen_ones():
    """One head of width 1, q = 1: key 1 beats key 0 by 2,000 nats, and key 2 by log 3."""
    keys, values = [0.0, 2000.0, 2000 - math.log(3)], [1.0, 2.0, 6.0]
    qkv = np.stack([np.ones(3), keys, values], axis=1)[None]  # (1, 3, 3)
    near(t.attention(qkv, n_heads=1)[0, :, 0], [1, 2, 3 / 4 * 2 + 1 / 4 * 6])

# ---------------------------------------------------------------------------- 3 Adam
# holds B61 (dtype of gradients), B66 (clipping)

def with_grad(*arrays):
    out = [leaf(np.zeros(np.shape(a)), np.asarray(a).dtype) for a in arrays]
    for p, g in zip(out, arrays):
        p.grad = np.array(g)
    return out

def slow_adam(x, grads, lr, b1=0.9, b2=0.999, eps=1e-8):
    """One number at a time; a step without gradient (None) is no step."""
    m = v = n = 0
    for g in grads:
        if g is not None:
            n, m, v = n + 1, b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            x -= lr * m / (1 - b1**n) / (math.sqrt(v / (1 - b2**n)) + eps)
    return x

def test_adam_is_torchs_form():
    """A tied parameter stands twice; the last has no gradient at the second step."""
    p, grads = [leaf([1, -2]), leaf([3])], [(0.5, -1, 2), (0.1, 0, None), (-3, 2, 1)]
    opt = t.Adam([p[0], p[1], p[0]], lr=0.1, betas=(0.8, 0.9), eps=1e-3)
    for a, b, c in grads:
        opt.zero_grad()
        p[0].grad = np.array([a, b], float)
        p[1].grad = None if c is None else np.array([c], float)
        opt.step()
    near([*p[0].data, *p[1].data],
         [slow_adam(x, g, 0.1, 0.8, 0.9, 1e-3) for x, g in zip((1, -2, 3), zip(*grads))])

@pytest.mark.parametrize("order", ["ababab", "aaabbb"])
def test_two_optimisers_over_the_same_parameters(order):
    """Each keeps its own moments; both move the one set of numbers."""
    p = leaf([1])
    opts, grads = dict(a=t.Adam([p], 0.1), b=t.Adam([p], 0.01)), {k: [] for k in "ab"}
    for k, who in enumerate(order):
        p.grad = np.array([k - 2.5])
        grads[who].append(k - 2.5)
        opts[who].step()
    near(p.data, [1 + slow_adam(0, grads["a"], 0.1) + slow_adam(0, grads["b"], 0.01)])

@pytest.mark.parametrize("grads, norm, want", [
    ([[3.0, 4.0]], 5, [[3 / 5.000001, 4 / 5.000001]]),
    ([[3.0], [4.0]], 5, [[3 / 5.000001], [4 / 5.000001]]),
    ([[0.3, 0.4]], 0.5, [[0.3, 0.4]]), ([[0.0, 0.0]], 0, [[0, 0]]),
    ([np.full(100, 1e20, np.float32)], 1e21, [np.full(100, 0.1)])])
def test_clip_grad_norm(grads, norm, want):
    params = with_grad(*grads)
    np.testing.assert_allclose(t.clip_grad_norm(params, 1.0), norm, rtol=1e-6)
    for p, w in zip(params, want):
        np.testing.assert_allclose(p.grad, w, rtol=1e-6)
        assert p.grad.dtype == p.data.dtype

def test_misuse_of_the_optimiser_changes_nothing():
    for bad in (-1e-3, NAN, INF):
        refuses(lambda: t.Adam([leaf([1])], lr=bad), "lr", bad)
    for bad in (NAN, INF, -INF):
        params = with_grad([3.0, 4.0], [bad])
        refuses(lambda: t.clip_grad_norm(params, 1.0), "norm", error=ValueError)
        same(params[0].grad, np.array([3.0, 4.0]))
    t.Adam(params, lr=0).step()
    same(params[0].data, np.zeros(2))

# ---------------------------------------------------------------------------- 4 sampling
# holds B01 (shift), B04 B06 B08 (mask), B17 B18 (the distribution sampled from), B22 (-inf), B41
# (context), B48 B49 B50 B51 (temperature, top-p, top-k, inverse CDF), B68 (NaN), B73 (ids)

def test_log_probs_score_the_next_token():
    logits = np.array([[[0.0, 1, 2], [3, 0, 0], [0, 0, 5]]])
    near(t.token_log_probs(logits, [[0, 2, 0]]), [[-0.4076059644443804, -0.0949229564209607]])
    near(t.token_log_probs(logits[:, [0, 0]], [[0, 1]], 2.0), [[-1.18026967]], 1e-8)

def test_log_probs_of_wide_logits():
    for token, want, grad in ((0, 0, [0, 0, 0]), (1, -1000, [-1, 1, 0]), (2, -2000, [-1, 0, 1])):
        x = leaf([[[1000, 0, -1000], [0, 0, 0]]])
        got = t.token_log_probs(x, [[0, token]])
        near(got, [[want]])
        got.sum().backward()
        near(x.grad, [[grad, [0, 0, 0]]])

@pytest.mark.parametrize("logits, mask, want, grad", [
    ([[0, -INF, 0]], [1], math.log(2), [[0, 0, 0]]),
    ([[1, 2, 3]], [1], 0.8323955818, [[0.1418170936, 0.1407703575, -0.2825874511]]),
    ([[0, 0], [0, math.log(3)], [50, 0]], [1, 1, 0], 0.6277411625893767, None),
    ([[7]], [1], 0, [[0]]), ([[1, 2]], [0], 0, [[0, 0]]), ([[4] * 8], [1], math.log(8), [[0] * 8]),
    ([[NAN, INF], [0, 0]], [0, 1], math.log(2), [[0, 0], [0, 0]])])
def test_entropy_by_hand(logits, mask, want, grad):
    x = leaf([logits])
    entropy = t.masked_entropy(x, [mask])
    near(float(entropy), want, 1e-9)
    entropy.backward()
    assert grad is None or near(x.grad, [grad], 1e-9) is None

def kept(probs, **filters):
    return np.flatnonzero(t.filter_probs(np.log([probs]), **filters)[0]).tolist()

def test_filters_by_hand():
    assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.8) == [0, 1, 2]
    assert kept([0.5, 0.41, 0.09], top_p=0.9) == [0, 1]
    assert kept([0.1, 0.2, 0.3, 0.4], top_p=0.0) == [3]
    assert kept([0.4, 0.3, 0.2, 0.1], top_p=1.0) == [0, 1, 2, 3]
    assert kept([0.3, 0.1, 0.4, 0.2], top_k=2) == [0, 2]
    assert kept([0.3, 0.1, 0.4, 0.2], top_k=99) == [0, 1, 2, 3]
    assert kept([0.1, 0.2, 0.2, 0.2, 0.3], top_k=3) == [1, 2, 4]
    assert kept([0.4, 0.3, 0.2, 0.1], top_k=2, top_p=0.5) == [0]  # 4/7 of what top_k left
    assert kept([0.2, 0.4, 0.4], temperature=0) == [1]
    assert kept([0.1, 0.2, 0.7], temperature=1e-8) == [2]
    near(t.filter_probs([[2, 1, 0.0]], temperature=2.0),
         [np.exp([-0.68026967, -1.18026967, -1.68026967])], 1e-8)
    near(t.filter_probs([[1.0, 2.0, 2.0]], top_k=2), [[0, 0.5, 0.5]])
    near(t.filter_probs([[7.0]], top_k=1), [[1]])

def test_pick_is_the_inverse_distribution_function():
    """A grid of uniforms hits each id as often as its probability says."""
    probs, u = np.array([0.125, 0, 0.5, 0.25, 0.125, 0]), (np.arange(64) + 0.5) / 64
    same(np.bincount(t.pick(np.tile(probs, (64, 1)), u), minlength=6), (64 * probs).astype(int))
    assert t.pick(np.tile(probs, (3, 1)), np.array([0.0, 0.125, 0.625])).tolist() == [0, 2, 3]

@pytest.mark.parametrize("probs, u, want", [
    ([0.5, 0.5, 0, 0], 1 - 2**-53, 1), ([0, 0.5, 0.5], 0.0, 1), ([1], 1 - 2**-53, 0)]
    + [(np.full(v, 1 / np.float32(v), np.float32), 1 - 2**-24, v - 1) for v in (41, 93, 1000)])
def test_pick_at_the_edges(probs, u, want):
    assert t.pick(np.array([probs]), np.array([u])).tolist() == [want]

@pytest.mark.parametrize("prompt, script, tokens, mask", [
    # the token after position p is script[p]; a prompt may hold EOS itself; 10 is the padding
    ([3, 1], [0, 5, 7, EOS, 9, 9], [3, 1, 5, 7, EOS, 10, 10], [0, 0, 1, 1, 1, 0, 0]),
    ([5, EOS, 7], [1, 1, 8, EOS, 9, 9], [5, EOS, 7, 8, EOS, 10, 10], [0, 0, 0, 1, 1, 0, 0]),
    ([3, 1], [0, EOS, 7, 7, 7, 7], [3, 1, EOS, 10, 10, 10, 10], [0, 0, 1, 0, 0, 0, 0]),
    ([3, 1], [0, 5, 6, 7, 8, 9], [3, 1, 5, 6, 7, 8, 9], [0, 0, 1, 1, 1, 1, 1])])
def test_mask_ends_with_eos_and_comes_from_bookkeeping(prompt, script, tokens, mask):
    for pad in (10, EOS):
        got = t.sample(scripted([*script, 0]), [prompt], len(tokens) - len(prompt), EOS, rng=gen(),
                       temperature=0 if pad else 1.0, pad_id=pad or None)
        assert got.tokens.tolist() == [[pad if i == 10 else i for i in tokens]]
        assert got.token_mask.astype(int).tolist() == [mask]
        assert got.ended.tolist() == [EOS in tokens[len(prompt):]]
        assert got.tokens.dtype == np.int64 and got.logp.shape == (1, len(tokens) - 1)

PROMPTS = [[3], [1, 2, 3, 4, 5], [7, 7, 7], [2, EOS, 9, 4]]

@pytest.mark.parametrize("filters", [{}, dict(temperature=0.7), dict(top_k=3), dict(top_p=0.8),
                                     dict(temperature=0), dict(temperature=2, top_k=6, top_p=0.7)])
def test_sampling_equals_a_slow_loop_row_by_row(filters):
    """Cache, ragged prompts and batch mates change neither tokens nor log-probs."""
    lm, uniforms = build(seed=2), gen(5).random((4, 9))
    got = t.sample(lm, PROMPTS, 9, EOS, rng=gen(5), **filters)
    assert got.tokens.shape == (4, 14) and got.ended.sum() < 4
    for b, prompt in enumerate(PROMPTS):
        ids, logp = slow_sample(lm, prompt, uniforms[b], EOS, **filters)
        start, end = len(prompt), len(prompt) + len(ids)
        assert got.tokens[b].tolist() == prompt + ids + [EOS] * (14 - end)
        assert np.flatnonzero(got.token_mask[b]).tolist() == list(range(start, end))
        near(got.logp[b], np.pad(logp, (start - 1, 14 - end)), 1e-10)
        assert got.ended[b] == (ids[-1] == EOS)

@pytest.mark.parametrize("going", ["110", "0110", "1000", "01010011", "1111", "00000001"])
def test_the_cache_keeps_the_rows_that_go_on(going):
    """Whatever order they then stand in: keep() returns it, and keys and lengths follow it."""
    rows = np.array([c == "1" for c in going])
    cache = t.KVCache(t.ToyLMConfig(5, 3, 4, 2, 2), len(rows))
    cache.data[...], cache.lengths[:] = gen().random(cache.data.shape), np.arange(len(rows))
    before = cache.data.copy()
    order = cache.keep(rows)
    assert sorted(order) == np.flatnonzero(rows).tolist() == sorted(cache.lengths)
    assert (cache.lengths == order).all() and (cache.data == before[:, order]).all()

@pytest.mark.parametrize("dtype", [np.uint64, np.uint8, np.int32])
def test_prompts_of_any_integer_dtype(dtype):
    got = t.sample(build(), [np.array([1, 2], dtype), np.array([3], dtype)], 2, EOS, rng=gen())
    assert got.tokens.dtype == np.int64
    assert (got.tokens == t.sample(build(), [[1, 2], [3]], 2, EOS, rng=gen()).tokens).all()

@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_log_probs_equal_the_scoring_pass(temperature):
    lm = build(dtype="float32")
    got = t.sample(lm, PROMPTS, 9, EOS, rng=gen(6), temperature=temperature)
    scored = np.asarray(t.token_log_probs(lm(got.tokens), got.tokens, temperature))
    assert got.logp.dtype == np.float32
    near(got.logp, scored * got.token_mask[:, 1:], 1e-5)

def test_vocabulary_of_one_and_nothing_to_sample():
    got = t.sample(build(vocab_size=1), [[0, 0]], 3, 0, rng=gen())
    assert got.tokens.tolist() == [[0] * 5] and got.token_mask.sum() == 1 and not got.logp.any()
    stats = timeless(train(prompts=[[0]], shape=dict(vocab_size=1))[0])
    assert all(np.isfinite([*step.values()]).all() for step in stats)
    got = t.sample(build(max_len=8), [[1] * 8], 0, EOS, rng=gen())
    assert got.tokens.tolist() == [[1] * 8] and not got.token_mask.any() and not got.logp.any()

def test_misuse_of_sampling():
    def draw(prompts=((1, 2),), new=2, eos=EOS, **kw):
        return lambda: t.sample(build(), prompts, new, eos, **{"rng": gen(), **kw})
    refuses(draw([[1, 11]]), "prompts", 11)
    refuses(draw([[1, -1]]), "prompts", -1)
    refuses(draw(np.ones((1, 2))), "prompts", "float64")
    refuses(draw([[1], []]), "prompts", "row 1")
    refuses(draw(new=-1), "max_new_tokens", -1)
    refuses(draw(eos=11), "eos_id", 11)
    refuses(draw(pad_id=-1), "pad_id", -1)
    refuses(draw(rng=None), "rng")
    rng = gen()  # the prompt of 6 and 10 new tokens fit into 16, 11 do not; nothing is drawn
    refuses(draw([[1] * 6], 11, rng=rng), 6, 11, 16, error=ValueError)
    assert rng.bit_generator.state == gen().bit_generator.state
    for name, bad in (("temperature", -1.0), ("temperature", NAN), ("top_k", 0), ("top_k", 1.5),
                      ("top_p", -0.1), ("top_p", 1.1), ("top_p", NAN)):
        refuses(draw(**{name: bad}), name, bad)
        refuses(lambda: t.filter_probs([[1.0, 2]], **{name: bad}), name, bad)
    refuses(lambda: t.token_log_probs(np.zeros((1, 2, 3)), [[0, 3]]), "tokens", 3)
    refuses(lambda: t.token_log_probs(np.zeros((1, 2, 3)), [[0, -1]]), "tokens", -1)
    refuses(lambda: t.token_log_probs(np.zeros((1, 2, 3)), [[0.0, 1.0]]), "tokens", "float64")
    refuses(lambda: t.token_log_probs(np.zeros((1, 2, 3)), [[0, 1, 2]]), "(1, 2, 3)", "(1, 3)")
    refuses(lambda: t.token_log_probs([[[0, NAN], [0, 0]]], [[0, 1]]), "logits", "nan")

# ---------------------------------------------------------------------------- 5 masks and KL
# holds B12 B13 B14 B15 (whitening), B16 (signed KL), B19 B20 (k3)

@pytest.mark.parametrize("x, mask, shift, want", [
    ([[1, 2, 3, 4, 99, NAN]], [[1, 1, 1, 1, 0, 0]], True,
     [-1.3416407865, -0.4472135955, 0.4472135955, 1.3416407865]),
    ([[5, 7]], [[1, 0]], True, [0]), ([[0.1] * 3], [[1] * 3], True, [0] * 3),
    ([[3, 3], [3, 3]], [[1, 1], [1, 1]], True, [0, 0, 0, 0]),
    ([[1, 2, 3]], [[1, 1, 1]], False, [2 - 1.5**0.5, 2, 2 + 1.5**0.5]),
    ([[5, INF]], [[1, 0]], False, [5])])
def test_whiten_by_hand(x, mask, shift, want):
    for dtype, tol in ((np.float64, 1e-7), (np.float32, 1e-6)):
        got = t.whiten(np.array(x, dtype), mask, shift_mean=shift)
        assert type(got) is np.ndarray and got.dtype == dtype and np.isfinite(got).all()
        near(got[np.array(mask) > 0], want, tol if any(want) else 0)

def test_statistics_are_those_of_the_mask_in_float64():
    near(float(t.masked_mean([[1, 2, NAN], [6, INF, 0]], [[1, 1, 0], [1, 0, 0]])), 3)
    near(float(t.masked_mean([[1.0, 2]], [[0, 0]])), 0)
    x = np.full((1, 100_000), 1000.1, np.float32)
    x[0, ::2] += 1
    near(float(t.masked_mean(x, np.ones_like(x))), x.astype(float).mean(), 1e-7)
    near(t.whiten(x, np.ones_like(x))[0, :2], [1, -1], 1e-4)

def test_kl_estimates_by_hand():
    new, ref = np.array([-1, -0.5, -2, -0.1]), np.array([-1.2, -0.5, -1, -0.1])
    near(t.kl_estimates(new, ref, "k1"), [0.2, 0, -1, 0])
    near(t.kl_estimates(new, ref, "abs"), [0.2, 0, 1, 0])
    near(t.kl_estimates(new, ref, "k2"), [0.02, 0, 0.5, 0])
    near(t.kl_estimates([-1.0, -0.5], [-0.5, -1.0], "k3"), [0.1487212707, 0.1065306597], 1e-9)
    near(t.kl_estimates(np.zeros(3), np.array([0.2, -0.3, 0]), "k3").mean(), 0.0207403263, 1e-9)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.3, 0.1])  # exact expectations: the KL
    for kind, want in (("k1", 0.047468657715), ("k3", 0.047468657715), ("abs", 0.2297902)):
        near((p * t.kl_estimates(np.log(p), np.log(q), kind)).sum(), want, 1e-6)
    refuses(lambda: t.kl_estimates(new, ref, "k4"), "k4", "k3")
    refuses(lambda: t.kl_estimates(new, ref[:3], "k1"), "(4,)", "(3,)")

@pytest.mark.parametrize("dtype, tol", [(np.float32, 1e-3), (np.float64, 1e-8)])
def test_k3_is_finite_and_never_negative(dtype, tol):
    gap = np.array([1e-4, -1e30, -1000, -1, -1e-9, 0, 1e-9, 1, 89, 710, 1e30], dtype)
    got = t.kl_estimates(-gap, np.zeros_like(gap), "k3")
    assert got.dtype == dtype and np.isfinite(got).all() and (got >= 0).all()
    near(got[0] / 5.00016667e-9, 1, tol)  # about d*d/2, not lost to cancellation

@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_kl_estimates_as_a_loss_leave_the_reference_constant(kind):
    x, ref = leaf([-1, -0.5, -2]), leaf([-1.2, -0.7, -1])
    near(t.kl_estimates(x, ref, kind), t.kl_estimates(x.data, ref.data, kind))
    grad_check(lambda: (t.kl_estimates(x, ref, kind) * np.array([1.0, 2, 3])).sum(), x)
    assert ref.grad is None or not ref.grad.any()

# ---------------------------------------------------------------------------- 6 rewards and GAE
# holds B03 (last token), B05 (no EOS), B06 (EOS first), B07 (empty rows), B09 B10 B11 (GAE),
# B16 (refund), B60 (integers). B59 B64 B69 B70 B71 (inputs of every kind): the random calls below

def test_shaped_rewards_places_score_and_kl():
    logp, ref, ones = [[-1, -0.5, -2, -0.1]], [[-1.2, -0.5, -1, -0.1]], np.ones((1, 4))
    near(t.shaped_rewards([1.5], logp, ref, ones, 0.1), [[-0.02, 0, 0.10, 1.5]])
    near(t.shaped_rewards([1.5], logp, ref, ones, 0.2), [[-0.04, 0, 0.20, 1.5]])
    near(t.shaped_rewards([0], logp, ref, ones, 0.1).sum(), 0.08)  # signed: a net refund
    mask = np.array([[0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]])
    assert t.last_response_index(mask).tolist() == [3, 2]
    wild = np.where(mask, 0.3, NAN)
    near(t.shaped_rewards([1.5, -2], wild, wild, mask, 0.1),
         [[0, 0, 0, 1.5, 0, 0], [0, 0, -2, 0, 0, 0]])
    near(t.shaped_rewards([1.5, -2], wild, wild - 1, mask, 0.5),
         [[0, -0.5, -0.5, 1, 0, 0], [0, 0, -2.5, 0, 0, 0]])
    near(t.shaped_rewards([2], [[-1, -2, -3]], [[-1, -1, -1]], [[False, True, True]], 0.5),
         [[0, 0.5, 3]])  # integers and a boolean mask

def test_gae_matches_brute_force_and_mc_return():
    r = gen(1)
    for width in (1, 2, 5, 12):
        mask, (rewards, values) = ragged(6, width), r.normal(size=(2, 6, width))
        for gamma, lam in ((1, 0.95), (0.9, 0.8), (1, 1), (1, 0), (0, 0.95)):
            near(t.gae(rewards, values, mask, gamma, lam),
                 slow_gae(rewards, values, mask, gamma, lam))
        adv, returns = t.gae(rewards, values, mask, 1.0, 1.0)
        to_go = np.cumsum((rewards * mask)[:, ::-1], 1)[:, ::-1] * mask
        near(returns, to_go)
        near(adv, (to_go - values) * mask)

R1, V1, M1 = [[0, 0, -0.1, 0.2, 1]], [[9, 0.5, 0.4, 0.3, 0.2]], [[0, 1, 1, 1, 1]]

@pytest.mark.parametrize("rewards, values, mask, gamma, lam, want", [
    (R1, V1, M1, 1, 0.95, [[0, 0.48615, 0.617, 0.86, 0.8]]),
    (R1, V1, M1, 0.9, 0.8, [[0, 0.0344704, 0.24232, 0.656, 0.8]]),
    (R1, V1, M1, 1, 1, [[0, 0.6, 0.7, 0.9, 0.8]]), (R1, V1, M1, 1, 0, [[0, -0.1, -0.2, 0.1, 0.8]]),
    (R1, V1, M1, 0, 0.95, [[0, -0.5, -0.5, -0.1, 0.8]]),
    ([[0, 0, 0, 2]], [[9, 0.5, 0.4, 0.3]], [[0, 1, 1, 1]], 1, 0.95, [[0, 1.33925, 1.515, 1.7]]),
    ([[0, 0, 1, 0, 0]], [[9, 9, 0.2, 9, 9]], [[0, 0, 1, 0, 0]], 1, 0.95, [[0, 0, 0.8, 0, 0]]),
    ([[1, 9, 2]], [[0.5, 7, 0.25]], [[1, 0, 1]], 1, 1, [[0.5, 0, 1.75]]),  # a gap starts anew
    ([[0, 0]], [[1, 2]], [[0, 0]], 1, 0.95, [[0, 0]]),
] + [([[5, 0.5, 1, 7, 7]], [[9, 0.2, 0.3, pad, pad]], [[0, 1, 1, 0, 0]], 1, 0.95,
      [[0, 1.265, 0.7, 0, 0]]) for pad in (0, 100, -1e6, NAN, INF)])
def test_gae_by_hand(rewards, values, mask, gamma, lam, want):
    adv, returns = t.gae(rewards, np.array(values, float), mask, gamma, lam)
    near(adv, want)
    near(returns, np.where(np.array(mask) > 0, np.array(want) + np.nan_to_num(values), 0))

# ---------------------------------------------------------------------------- 7 losses
# holds B07 (empty batch), B21 (overflow), B23 B24 (value clipping, the half), B25 (constants),
# B26 (ratio 1), B29 B30 (token mean), B64 (shapes)

def clip_loss(new, old, adv, mask, eps=0.2):
    """(loss, clip fraction), gradient"""
    x = leaf(new)
    loss, fraction = t.ppo_clip_loss(x, np.array(old, float), np.array(adv, float), mask, eps)
    loss.backward()
    return [float(loss), float(fraction)], x.grad

E20, LO = math.exp(20), [[-0.1, -0.2, -0.3]]

@pytest.mark.parametrize("new, old, adv, mask, want, grad", [
    (LO, LO, [[1, -2, 3]], [[1, 1, 0]], [0.5, 0], [[-0.5, 1, 0]]),  # ratio 1: -A/n exactly
    ([[math.log(1.5)]], [[0]], [[3]], [[1]], [-3.6, 1], [[0]]),
    ([[math.log(1.5)]], [[0]], [[-3]], [[1]], [4.5, 1], [[4.5]]),
    ([[math.log(0.5)]], [[0]], [[3]], [[1]], [-1.5, 1], [[-1.5]]),
    ([[math.log(0.5)]], [[0]], [[-3]], [[1]], [2.4, 1], [[0]]),
    ([[math.log(1.1)]], [[0]], [[3]], [[1]], [-3.3, 0], [[-3.3]]),
    ([[0, 0]], [[-1000, 0]], [[5, 2]], [[0, 1]], [-2, 0], [[0, -2]]),
    ([[0, 0]], [[-1000, 0]], [[-5, 2]], [[0, 1]], [-2, 0], [[0, -2]]),
    ([[0, 0]], [[-1000, 0]], [[0, 2]], [[1, 1]], [-1, 0.5], [[0, -1]]),
    ([[0, 0]], [[-1000, 0]], [[3, 2]], [[1, 1]], [-2.8, 0.5], [[0, -1]]),
    ([[0]], [[-1000]], [[-3]], [[1]], [3 * E20, 1], [[3 * E20]]),  # bounded, not switched off
    ([[-1000]], [[0]], [[3]], [[1]], [-3 / E20, 1], [[-3 / E20]]),
    ([[NAN, 0]], [[INF, 0]], [[NAN, 2]], [[0, 1]], [-2, 0], [[0, -2]]),
    ([[1, 2]], [[1, 2]], [[1, 1]], [[0, 0]], [0, 0], [[0, 0]]),
    (np.zeros((2, 4)), np.zeros((2, 4)), [[-1, -1, -1, -1], [-3, 9, 9, 9]],
     [[1, 1, 1, 1], [1, 0, 0, 0]], [1.4, 0], [[0.2, 0.2, 0.2, 0.2], [0.6, 0, 0, 0]])])  # 7/5, not 2
def test_clip_loss_by_hand(new, old, adv, mask, want, grad):
    got = clip_loss(new, old, adv, mask)
    np.testing.assert_allclose(got[0], want, rtol=1e-12)
    np.testing.assert_allclose(got[1], grad, rtol=1e-12)

def test_ppo_clip_loss_gradient_and_clipping():
    r, mask = gen(2), ragged(5, 9)
    old, adv, move = r.normal(-1, 1, (5, 9)), r.normal(0, 2, (5, 9)), r.normal(0, 0.4, (5, 9))
    near(clip_loss(old + move, old, adv, mask)[0], slow_clip(old + move, old, adv, mask, 0.2))
    x = leaf(old + move)
    grad_check(lambda: t.ppo_clip_loss(x, old, adv, mask, 0.2)[0], x)
    at_one, grad = clip_loss(old, old, adv, mask)
    near(at_one, [-(adv * mask).sum() / mask.sum(), 0])
    near(grad, -adv * mask / mask.sum())
    for rho in np.linspace(0.31, 2, 35):  # a lower bound of the unclipped objective, flat past eps
        for a in (1.5, -1.5):
            (loss, _), grad = clip_loss([[math.log(rho)]], [[0]], [[a]], [[1]])
            assert -loss <= rho * a + 1e-12
            assert (grad == 0) == (rho > 1.2 if a > 0 else rho < 0.8)

@pytest.mark.parametrize("v, old, want, grad", [
    (1, 5, 40.5, -9), (5, 1, 38.72, 0), (10, 10, 0, 0), (9.9, 9.8, 0.005, -0.1), (12, 9, 2, 2)])
def test_value_loss_clipping(v, old, want, grad):
    """The return is 10, eps .2; a masked slot beside it holds NaN and infinity."""
    x = leaf([[v, NAN]])
    loss = t.value_loss(x, [[old, 0.0]], [[10.0, INF]], [[1, 0]], 0.2)
    loss.backward()
    near([float(loss), *x.grad[0]], [want, grad, 0])

def test_constants_carry_no_gradient():
    """Old log-probs, advantages, returns and old values handed over as live Tensors."""
    logp, old, adv = leaf([[-1, -0.5]]), leaf([[-1, -0.5]]), leaf([[-0.12, 1.3]])
    t.ppo_clip_loss(logp, old, adv, np.ones((1, 2)), 0.2)[0].backward()
    values, before, returns = leaf([[1]]), leaf([[5]]), leaf([[10]])
    t.value_loss(values, before, returns, np.ones((1, 1))).backward()
    near([*logp.grad[0], *values.grad[0]], [0.06, -0.65, -9])
    assert not any(x.grad is not None and x.grad.any() for x in (old, adv, before, returns))

X, Y, Z, LOGITS = *gen(4).normal(size=(3, 5, 7)), gen(5).normal(0, 2, (5, 7, 4))
IDS, ON = gen(6).integers(0, 4, (5, 7)), ragged(5, 7, 3)
LABELS = np.where(ON > 0, IDS, -100)
LOSSES = {  # differentiable argument, loss
    "policy": (X, lambda x, s, m: t.ppo_clip_loss(x, Y[s], Z[s], m, 0.2)[0]),
    "value": (X, lambda x, s, m: t.value_loss(x, Y[s], Z[s], m)),
    "entropy": (LOGITS, lambda x, s, m: t.masked_entropy(x, m, 0.7)),
    "log-prob": (LOGITS, lambda x, s, m: t.Tensor(0.0) - (
        t.token_log_probs(x, IDS[s], 0.7) * (m[:, 1:] / m[:, 1:].sum())).sum()),
    "sft": (LOGITS, lambda x, s, m: t.sft_loss(x, LABELS[s])),
}

@pytest.mark.parametrize("name", LOSSES)
def test_losses_pass_grad_check_and_are_token_means(name):
    """Parts of the batch, weighted by their tokens, give the whole: any split, any row order."""
    data, loss = LOSSES[name]
    x = leaf(data)
    grad_check(lambda: loss(x, slice(None), ON), x)
    whole = float(loss(data, slice(None), ON))
    count = (lambda m: m[:, 1:].sum()) if name in ("log-prob", "sft") else np.sum
    for cut in range(1, 5):
        parts = [(float(loss(data[s], s, ON[s])), count(ON[s]))
                 for s in (slice(0, cut), slice(cut, 5))]
        near(sum(a * n for a, n in parts) / count(ON), whole)

Z23, Z24, ONE = np.zeros((2, 3)), np.zeros((2, 4)), np.ones((2, 3))

@pytest.mark.parametrize("call, fragments", [
    (lambda: t.value_loss(np.ones((2, 1)), np.ones((2, 1)), np.ones((1, 2)), np.ones((2, 1))),
     ["value_loss", "returns", "(2, 1)", "(1, 2)"]),
    (lambda: t.ppo_clip_loss(Z23, Z24, Z23, Z23, 0.2), ["ppo_clip_loss", "logp_old", "(2, 4)"]),
    (lambda: t.shaped_rewards(np.ones((2, 1)), Z23, Z23, ONE, 0.1), ["scores", "(2, 1)"]),
    (lambda: t.shaped_rewards([1, 5], Z23, Z23, [[1, 1, 0], [0, 0, 0]], 0.1), ["row 1"]),
    (lambda: t.last_response_index([[1, 1, 0], [0, 0, 0]]), ["row 1"]),
    (lambda: t.gae(Z23, Z24, ONE), ["gae", "values", "(2, 4)", "(2, 3)"]),
    (lambda: t.masked_entropy(np.zeros((2, 3, 5)), Z24), ["response_mask", "(2, 4)"]),
    (lambda: t.masked_mean(Z23, Z24), ["mask", "(2, 4)"]),
    (lambda: t.whiten(Z23, Z24), ["mask", "(2, 4)"]),
    (lambda: t.reward_model_loss(np.ones((2, 1)), np.ones(2)), ["chosen", "(2, 1)", "(2,)"]),
    (lambda: t.ppo_clip_loss(Z23, Z23, Z23, Z23, -0.2), ["clip_eps", "-0.2"]),
    (lambda: t.value_loss(Z23, Z23, Z23, Z23, NAN), ["clip_eps", "nan"])])
def test_shapes_and_settings_that_do_not_fit_are_named(call, fragments):
    refuses(call, *fragments, error=ValueError)

# ---------------------------------------------------------------------------- 8 controller
# holds B16 (negative KL), B32 (settings), B33 (horizon in updates)

def test_kl_controller_moves_beta_toward_target():
    for kl, want in ((9, 0.102), (6, 0.1), (6.6, 0.101), (3, 0.098), (-5, 0.098), (0, 0.098)):
        controller = t.AdaptiveKLController(0.1, 6.0, 10)
        near([controller.update(kl), controller.beta], [want, want])
    controller = t.AdaptiveKLController(0.1, 6.0)
    for _ in range(100):
        controller.update(60.0)
    near(controller.beta, 0.724464611825, 1e-10)

@pytest.mark.parametrize("field", ["beta", "target", "horizon"])
@pytest.mark.parametrize("value", [0, -6.0, NAN, INF])
def test_controller_out_of_range(field, value):
    settings = {**dict(beta=0.1, target=6.0, horizon=10), field: value}
    refuses(lambda: t.AdaptiveKLController(**settings), field, value, error=ValueError)
    controller = t.AdaptiveKLController(0.1, 6.0)
    if not math.isfinite(value):
        refuses(lambda: controller.update(value), "kl", value, error=ValueError)
        assert controller.beta == 0.1

# ---------------------------------------------------------------------------- 9 SFT and reward
# holds B43 B44 (labels), B45 B46 (preference loss), B73 (labels out of range)

def test_sft_loss_by_hand():
    ids, logits = np.array([[1, 2, 3, 4]]), np.zeros((1, 4, 5))
    logits[0, [0, 1, 2], ids[0, 1:]] = 10
    for rows in (1, 2):  # shifted once, and not across rows
        loss = t.sft_loss(np.repeat(logits, rows, 0), np.repeat(ids, rows, 0))
        near(float(loss), 1.815832318e-4, 1e-9)
    x = leaf(logits)
    loss = t.sft_loss(x, np.full((1, 4), -100))
    loss.backward()
    assert float(loss) == 0 and (x.grad is None or not x.grad.any())
    for bad in (5, -1, -99):
        refuses(lambda: t.sft_loss(x, [[0, bad, 1, 1]]), "labels", bad, error=ValueError)

@pytest.mark.parametrize("margin, want, grad", [
    (-1000, 1000, -1), (1000, 0, 0), (0, math.log(2), -0.5), (2, 0.1269280110, -0.1192029220)])
def test_reward_model_loss_by_hand(margin, want, grad):
    chosen, rejected = leaf([margin + 0.5]), leaf([0.5])
    loss = t.reward_model_loss(chosen, rejected)
    loss.backward()
    near([float(loss), chosen.grad[0], rejected.grad[0]], [want, grad, -grad], 1e-9)

def test_identical_pair_cancels():
    rm = build(t.TinyCritic)
    score = lambda: t.score_sequences(rm, TOKENS, np.ones((3, 9)))
    loss = t.reward_model_loss(score(), score())
    loss.backward()
    near(float(loss), math.log(2))
    for p in rm.parameters():
        near(p.grad, np.zeros(p.shape))

# ---------------------------------------------------------------------------- 10 rollout
# holds B02 (values before the action), B17 B18 (one distribution), B37 (shared reference)

def four(seed=0, temperature=1.0, dtype="float64"):
    """Policy, critic, reference, rollout and scores; the policy has left its reference."""
    policy, critic = build(seed=seed, dtype=dtype), build(t.TinyCritic, seed + 1, dtype=dtype)
    ref = build(seed=seed, spread=0.2, dtype=dtype).frozen_copy()
    roll = t.collect_rollouts(policy, ref, critic, [*PROMPTS, [8, 8]], 6, EOS, rng=gen(seed),
                              temperature=temperature)
    return policy, critic, ref, roll, gen(9).normal(0, 2, 5)

@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rollout_is_aligned_token_by_token(temperature):
    """logp[:, s] and values[:, s] need the prefix tokens[:, :s + 1] and nothing after it."""
    policy, critic, ref, roll, _ = four(temperature=temperature)
    assert roll.tokens.shape == (5, 11) and roll.temperature == temperature
    fields = [getattr(roll, k) for k in ("mask", "logp_old", "logp_ref", "values_old")]
    assert {type(x) for x in (*fields, roll.tokens, roll.ended)} == {np.ndarray}
    assert {x.shape for x in fields} == {(5, 10)}
    for s in range(10):
        prefix, on = roll.tokens[:, :s + 1], roll.mask[:, s] > 0
        near(roll.values_old[on, s], np.asarray(critic(prefix))[on, -1], 1e-10)
        for model, logp in ((policy, roll.logp_old), (ref, roll.logp_ref)):
            logits = np.asarray(model(prefix))[:, [-1, -1]]
            want = slow_logp(logits, roll.tokens[:, [s, s + 1]], temperature)
            near(logp[on, s], want[on, 0], 1e-10)
    for row, mask, prompt, ended in zip(roll.tokens, roll.mask, [*PROMPTS, [8, 8]], roll.ended):
        response = row[len(prompt):len(prompt) + 6].tolist()
        n = response.index(EOS) + 1 if EOS in response else 6
        assert np.flatnonzero(mask).tolist() == list(range(len(prompt) - 1, len(prompt) - 1 + n))
        assert ended == (EOS in response)

def test_misuse_of_rollouts():
    policy, critic, ref, *_ = four()
    def roll(ref=ref, **kw):
        return lambda: t.collect_rollouts(policy, ref, critic, PROMPTS, 4, EOS, rng=gen(), **kw)
    refuses(roll(policy), "ref", error=ValueError)
    refuses(roll(copy.copy(policy)), "ref", error=ValueError)
    for temperature in (0, -1.0, NAN):
        refuses(roll(temperature=temperature), "temperature", error=ValueError)
    refuses(roll(top_k=3), "top_k", error=TypeError)  # PPO samples from the whole softmax

# ---------------------------------------------------------------------------- 11 update
# holds B24 (the two halves), B27 (early stop), B28 (minibatches), B29 (splits), B31 (KL in nats a
# sequence), B38 (ratio 1), B56 (stale gradients), B61 (float32)

def chapter_update(policy, critic, roll, scores, beta, cfg, batches, ptx=None):
    """The chapter's update written in torch: parameters after it, and each step's statistics."""
    torch = pytest.importorskip("torch")
    F = torch.nn.functional
    p, c = ({k: torch.tensor(v.data, requires_grad=True) for k, v in m.params.items()}
            for m in (policy, critic))

    def trunk(p, ids):
        norm = lambda x, n: F.layer_norm(x, x.shape[-1:], p[n + ".weight"], p[n + ".bias"], 1e-5)
        linear = lambda x, n: x @ p[n + ".weight"] + p[n + ".bias"]
        heads = lambda x: x.unflatten(-1, (2, -1)).transpose(1, 2)
        x = p["wte.weight"][ids] + p["wpe.weight"][: ids.shape[1]]
        for i in ("h.0.", "h.1."):
            q, k, v = map(heads, linear(norm(x, i + "ln_1"), i + "attn.c_attn").chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + linear(y, i + "attn.c_proj")
            y = F.gelu(linear(norm(x, i + "ln_2"), i + "mlp.c_fc"), approximate="tanh")
            x = x + linear(y, i + "mlp.c_proj")
        return norm(x, "ln_f")

    ids, m, old, ref, values = (torch.tensor(np.asarray(x)) for x in (
        roll.tokens, roll.mask, roll.logp_old, roll.logp_ref, roll.values_old))
    m, eps, steps = m.double(), cfg.clip_eps, []
    average = lambda x, m: (x * m).sum() / m.sum()
    std = lambda x: average((x - average(x, m)) ** 2, m).sqrt() + 1e-8
    rewards = -beta * (old - ref) * m
    last = (torch.arange(m.shape[1]) * m).argmax(1)
    rewards[range(len(m)), last] += torch.tensor(scores - cfg.missing_eos_penalty * ~roll.ended)
    if cfg.whiten_rewards:
        rewards = ((rewards - average(rewards, m)) / std(rewards) + average(rewards, m)) * m
    adv, after, after_value = torch.zeros_like(rewards), 0, 0
    for s in reversed(range(m.shape[1])):
        delta = rewards[:, s] + cfg.gamma * after_value - values[:, s]
        after = (delta + cfg.gamma * cfg.lam * after) * m[:, s]
        adv[:, s], after_value = after, values[:, s] * m[:, s]
    returns = adv + values
    if cfg.whiten_advantages:
        adv = (adv - average(adv, m)) / std(adv)
    opt = torch.optim.Adam([*p.values(), *c.values()], lr=cfg.lr)
    for rows in batches:
        n, a, o, v, g = m[rows], adv[rows], old[rows], values[rows], returns[rows]
        logits = trunk(p, ids[rows])[:, :-1] @ p["wte.weight"].T / roll.temperature
        every = torch.log_softmax(logits, -1)
        gap = every.gather(-1, ids[rows][:, 1:, None]).squeeze(-1) - o
        ratio = gap.exp()
        pg = -average(torch.min(ratio * a, ratio.clamp(1 - eps, 1 + eps) * a), n)
        new = (trunk(c, ids[rows]) @ c["value_head.weight"] + c["value_head.bias"])[:, :-1, 0]
        held = v + (new - v).clamp(-cfg.value_clip_eps, cfg.value_clip_eps)
        vf = average(0.5 * torch.max((new - g) ** 2, (held - g) ** 2), n)
        entropy = average(-(every.exp() * every).sum(-1), n)
        loss = pg + cfg.vf_coef * vf - cfg.ent_coef * entropy
        if ptx:
            logits = (trunk(p, torch.tensor(ptx[0])) @ p["wte.weight"].T)[:, :-1].flatten(0, 1)
            labels = torch.tensor(ptx[1])[:, 1:].flatten()
            loss = loss + cfg.ptx_coef * F.cross_entropy(logits, labels)
        opt.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*p.values(), *c.values()], cfg.max_grad_norm)
        opt.step()
        found = dict(clip_frac=average(((ratio - 1).abs() > eps).double(), n), value_loss=vf,
                     entropy=entropy, approx_kl=average(ratio - 1 - gap, n), grad_norm=norm,
                     ratio_max=(ratio * n).max())
        steps.append({k: x.item() for k, x in found.items()})
    return [x.detach().numpy() for x in (*p.values(), *c.values())], steps

def watch_batches(monkeypatch, opt, roll):
    """Row numbers that go through the policy before each optimiser step, as they happen."""
    steps, current, hidden, step = [], {}, t.TinyCausalLM.hidden_states, opt.step

    def spy(self, tokens, *rest, **kw):
        for row in tokens:
            found = np.flatnonzero((roll.tokens[:, :len(row)] == row).all(1))
            current.update(dict.fromkeys(found.tolist()))
        return hidden(self, tokens, *rest, **kw)

    def closing():
        steps.append(list(current))
        current.clear()
        step()

    monkeypatch.setattr(t.TinyCausalLM, "hidden_states", spy)
    monkeypatch.setattr(opt, "step", closing)
    return steps

MEANS = ("clip_frac", "value_loss", "entropy", "approx_kl", "grad_norm")

@pytest.mark.parametrize("changes", [
    dict(ent_coef=0.01),
    dict(whiten_advantages=False, max_grad_norm=100.0, lr=1e-2),
    dict(minibatch_rows=2, lr=1e-2, ent_coef=0.01),
    dict(temperature=0.7, ppo_epochs=3, lr=1e-2, clip_eps=0.1, value_clip_eps=0.05, vf_coef=0.3,
         ent_coef=0.02, gamma=0.9, lam=0.8, max_grad_norm=0.3, whiten_rewards=True,
         missing_eos_penalty=1.5, ptx_coef=0.5),
], ids=["chapter", "unwhitened", "minibatches", "every-term"])
def test_update_equals_the_chapters_in_torch(changes, monkeypatch):
    cfg = t.PPOConfig(**changes)
    policy, critic, _, roll, scores = four(temperature=cfg.temperature)
    twins = copy.deepcopy(policy), copy.deepcopy(critic)
    ids = gen(1).integers(0, 11, (3, 8))
    ptx = (ids, np.where(gen(2).random(ids.shape) < 0.3, -100, ids)) if cfg.ptx_coef else None
    opt = t.Adam(policy.parameters() + critic.parameters(), lr=cfg.lr)
    batches = watch_batches(monkeypatch, opt, roll)
    stats = t.ppo_update(policy, critic, opt, roll, scores, 0.1, cfg, rng=gen(3), ptx_batch=ptx)
    sizes = [2, 2, 1] if cfg.minibatch_rows else [5]
    assert [len(b) for b in batches] == sizes * cfg.ppo_epochs
    for epoch in range(cfg.ppo_epochs):  # every row once an epoch
        rows = itertools.chain(*batches[len(sizes) * epoch:len(sizes) * (epoch + 1)])
        assert sorted(rows) == list(range(5))
    want, steps = chapter_update(*twins, roll, scores, 0.1, cfg, batches, ptx)
    for got, expected in zip(weights(policy, critic), want):
        near(got, expected, 1e-8)
    near([getattr(stats, k) for k in MEANS], [np.mean([s[k] for s in steps]) for k in MEANS], 1e-8)
    near(stats.ratio_max, max(step["ratio_max"] for step in steps), 1e-8)
    near(stats.clip_frac_first, steps[0]["clip_frac"], 1e-8)

def update(dtype="float64", change=lambda roll: roll, stale=None, **settings):
    """One update of fresh models: statistics, rollout, scores, policy, critic."""
    cfg = t.PPOConfig(**settings)
    policy, critic, _, roll, scores = four(temperature=cfg.temperature, dtype=dtype)
    opt = t.Adam(policy.parameters() + critic.parameters(), lr=cfg.lr)
    for p in policy.parameters() + critic.parameters():
        p.grad = None if stale is None else np.full_like(p.data, stale)
    stats = t.ppo_update(policy, critic, opt, change(roll), scores, 0.1, cfg, rng=gen(3))
    return stats, roll, scores, policy, critic

def test_statistics_by_their_definitions():
    stats, roll, scores, *_ = update()
    kl = ((roll.logp_old - roll.logp_ref) * roll.mask).sum(1).mean()
    near([stats.reward, stats.kl, stats.response_length, stats.eos_frac, stats.beta],
         [scores.mean(), kl, roll.mask.sum(1).mean(), roll.ended.mean(), 0.1])
    rewards = slow_shaped(scores, roll.logp_old, roll.logp_ref, roll.mask, 0.1)
    adv, returns = slow_gae(rewards, roll.values_old, roll.mask)
    on = roll.mask > 0
    near(stats.explained_variance, 1 - adv[on].var() / returns[on].var(), 1e-9)

@pytest.mark.parametrize("dtype, tol", [("float64", 1e-12), ("float32", 1e-5)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ratio_is_one_before_the_first_step(temperature, dtype, tol):
    stats, *_, policy, critic = update(dtype, lr=0.0, temperature=temperature, ppo_epochs=3,
                                       minibatch_rows=2)
    same(weights(policy, critic), weights(*four(temperature=temperature, dtype=dtype)[:2]))
    got = [stats.ratio_max, stats.clip_frac, stats.clip_frac_first, stats.approx_kl]
    near(got, [1, 0, 0, 0], tol)

def test_padding_and_masked_slots_do_not_reach_the_update():
    def wild(roll):
        wide = lambda x, fill: np.pad(np.where(roll.mask > 0, x, NAN), ((0, 0), (0, 2)),
                                      constant_values=fill)
        return t.Rollout(tokens=np.pad(roll.tokens, ((0, 0), (0, 2))), ended=roll.ended,
                         mask=np.pad(roll.mask, ((0, 0), (0, 2))),
                         logp_old=wide(roll.logp_old, NAN), logp_ref=wide(roll.logp_ref, INF),
                         values_old=wide(roll.values_old, -INF), temperature=roll.temperature)
    for a, b in zip(weights(*update()[3:]), weights(*update(change=wild)[3:])):
        near(b, a, 1e-9)

def test_early_stop_takes_the_first_step_and_no_other():
    many = dict(lr=1e-2, ppo_epochs=4)
    once, stopped = update(lr=1e-2, ppo_epochs=1), update(target_kl=1e-12, **many)
    same(weights(*once[3:]), weights(*stopped[3:]))
    same(weights(*update(**many)[3:]), weights(*update(target_kl=1e9, **many)[3:]))
    for key in (*MEANS, "ratio_max"):  # means over the one step that was taken
        assert getattr(stopped[0], key) == getattr(once[0], key)
    stale = lambda roll: dataclasses.replace(roll, logp_old=roll.logp_old - 0.5)
    far = update(target_kl=1e-12, change=stale, **many)  # k3 is over the limit from the start
    assert any((a != b).any() for a, b in zip(weights(*far[3:]), weights(*four()[:2])))

def test_stale_gradients_do_not_count():
    same(weights(*update()[3:]), weights(*update(stale=7.0)[3:]))

def test_everything_stays_float32():
    _, roll, _, *models = update(dtype="float32")
    arrays = [roll.logp_old, roll.logp_ref, roll.values_old, *weights(*models)]
    arrays += [p.grad for model in models for p in model.parameters() if p.grad is not None]
    assert {x.dtype for x in arrays} == {np.dtype("float32")}

def test_misuse_of_the_update_changes_nothing():
    policy, critic, _, roll, scores = four()
    opt = t.Adam(policy.parameters() + critic.parameters(), lr=1e-3)
    before = weights(policy, critic)
    def go(scores=scores, beta=0.1, **cfg):
        return lambda: t.ppo_update(policy, critic, opt, roll, scores, beta, t.PPOConfig(**cfg))
    refuses(go(scores[:, None]), "scores", "(5, 1)")
    refuses(go(scores[:4]), "scores", "(4,)")
    refuses(go(scores * NAN), "scores", "nan")
    refuses(go(beta=NAN), "beta", "nan")
    refuses(go(ptx_coef=0.5), "ptx_batch")
    same(before, weights(policy, critic))

# ---------------------------------------------------------------------------- 12 training
# holds B34 (beta of the step), B35 (resume), B36 (seeds), B37 (reference), B59 (models unchanged
# by misuse), B63 (memory), B68 (compiled = interpreted)

def count_good(tokens, mask):
    return ((tokens == GOOD) * mask).sum(1).astype(float)

def train(seed=0, steps=2, dtype="float32", prompts=PROMPTS, reward=count_good, shape=(), **kw):
    """A short run from fresh models: history, policy, critic, reference."""
    fields = {k: kw.pop(k) for k in list(kw) if k in t.PPOConfig.__dataclass_fields__}
    shape = dict(shape, dtype=dtype)
    policy, critic = build(seed=seed, **shape), build(t.TinyCritic, seed, **shape)
    ref = policy.frozen_copy()
    cfg = t.PPOConfig(**{"steps": steps, "max_new_tokens": 4, **fields})
    history = t.train_ppo(policy, ref, critic, prompts, reward, EOS, cfg,
                          **{"rng": gen(seed), **kw})
    return history, policy, critic, ref

def timeless(history):
    return [{k: v for k, v in vars(stats).items() if k != "seconds"} for stats in history]

def toy(seed):
    """Vocabulary 16, 32 rows, 8 new tokens, 30 steps, all defaults, a near-uniform reference."""
    shape = t.ToyLMConfig(vocab_size=16, max_len=12)
    policy, critic = t.TinyCausalLM(shape, gen(seed)), t.TinyCritic(shape, gen(seed, 1))
    prompts = gen(seed, 2).integers(1, 16, (32, 4))
    return t.train_ppo(policy, policy.frozen_copy(), critic, prompts, count_good, EOS,
                       rng=gen(seed, 3))

def test_train_ppo_increases_reward_with_bounded_kl():
    history = toy(0)
    assert len(history) == 30 and abs(history[0].kl) < 1e-4
    assert np.mean([s.reward for s in history[-3:]]) >= 5 * history[0].reward > 0
    assert max(s.kl for s in history) < 8

def test_beta_of_the_step_is_reported_and_moves_only_with_a_target():
    assert {s.beta for s in train(steps=3, lr=1e-2)[0]} == {0.05}
    controller = t.AdaptiveKLController(0.05, 0.1, 5)
    for stats in train(steps=4, lr=1e-2, kl_target=0.1, kl_horizon=5)[0]:
        assert stats.beta == controller.beta
        controller.update(stats.kl)

def test_reference_stays_and_the_policy_leaves_it():
    history, policy, _, ref = train(steps=3, lr=1e-2)
    same(weights(ref), weights(build(dtype="float32")))
    assert abs(history[0].kl) < 1e-5 < 1e-2 < abs(history[2].kl)
    assert not any(np.shares_memory(p.data, q.data)
                   for p, q in zip(policy.parameters(), ref.parameters()))

def test_same_seed_same_bits_and_no_global_randomness():
    state = np.random.get_state()[1].copy()
    first = train(seed=1)
    assert np.array_equal(state, np.random.get_state()[1])
    np.random.rand(7)
    again, other = train(seed=1), train(seed=1, rng=gen(2))
    assert timeless(first[0]) == timeless(again[0]) != timeless(other[0])
    same(weights(*first[1:]), weights(*again[1:]))

def digest(path):
    """What a fresh interpreter computes: random calls, and a short float64 run into path."""
    lost = fuzz(80)[1]
    assert not lost, lost[:2]
    history, *models = train(dtype="float64", kl_target=0.1)
    samples = t.sample(models[0], PROMPTS, 6, EOS, rng=gen(1))
    np.savez(path, samples.tokens, samples.logp, [[*s.values()] for s in timeless(history)],
             *weights(*models))

def test_threads_and_the_interpreter_change_nothing(tmp_path):
    runs = [dict(NUMBA_NUM_THREADS="1"), dict(NUMBA_NUM_THREADS="2"), dict(NUMBA_DISABLE_JIT="1")]
    jobs = [python("import test_tinyrlhf as s, sys; s.digest(sys.argv[1])", tmp_path / f"{i}.npz",
                   **env) for i, env in enumerate(runs)]
    assert [(job.wait(), job.stdout.read()) for job in jobs] == [(0, "")] * 3
    one, two, plain = (dict(np.load(tmp_path / f"{i}.npz")) for i in range(3))
    for key in one:
        same(one[key], two[key])
        near(plain[key], one[key], 1e-9)

def test_training_is_silent_and_reports_each_step(capsys):
    seen, line = [], t.progress(2)
    history = train(on_step=lambda step, stats: seen.append((step, stats)))[0]
    assert capsys.readouterr() == ("", "")
    assert [stats for _, stats in seen] == history and seen[1][0] == seen[0][0] + 1
    for step, stats in seen:
        line(step, stats)
    lines = [x for x in re.split(r"[\r\n]+", "".join(capsys.readouterr())) if x.strip()]
    assert len(lines) == 2 and len(lines[0]) == len(lines[1]) <= 120
    assert "nats" in lines[0] and re.search(r"ETA|left", lines[0])

@pytest.mark.parametrize("reward, fragments", [
    (lambda tokens, mask: np.zeros((4, 1)), ["reward", "(4, 1)", "(4,)"]),
    (lambda tokens, mask: np.zeros(3), ["reward", "(3,)", "(4,)"]),
    (lambda tokens, mask: 1.0, ["reward", "()"]),
    (lambda tokens, mask: np.array([0, 1, NAN, 2]), ["reward", "nan"]),
    (lambda tokens, mask: np.array([0, INF, 1, 2]), ["reward", "inf"]),
    (lambda tokens, mask: ["good"] * 4, ["reward"])])
def test_rewards_that_are_no_rewards(reward, fragments):
    refuses(lambda: train(reward=reward), *fragments)

def test_misuse_of_training():
    policy, critic = build(dtype="float32"), build(t.TinyCritic, dtype="float32")
    refuses(lambda: t.train_ppo(policy, policy, critic, PROMPTS, count_good, EOS, rng=gen()),
            "ref", error=ValueError)
    refuses(lambda: train(max_new_tokens=12), 5, 12, 16, error=ValueError)
    refuses(lambda: train(prompts=[[1, 11]]), "prompts", 11, error=ValueError)
    refuses(lambda: train(ptx_coef=0.1), "ptx_batch")
    refuses(lambda: train(rng=None), "rng")

BAD_MODEL = dict(vocab_size=[0], max_len=[0], d_model=[7, 8.5], n_layers=[-1], n_heads=[0, 3],
                 dtype=["float16", "int64"], dropout=[0.5])
BAD_PPO = dict(
    steps=[-1, 1.5], max_new_tokens=[0, -1], beta=[-0.1, NAN], kl_target=[0.0, -6.0, NAN],
    kl_horizon=[0, -1], lr=[-1e-3, NAN], clip_eps=[-0.2, NAN], value_clip_eps=[-0.2, NAN],
    ppo_epochs=[0, 1.5], minibatch_rows=[0, -1], vf_coef=[-1.0, NAN], ent_coef=[NAN],
    gamma=[-0.1, 1.1, NAN], lam=[-0.1, 1.1, NAN], max_grad_norm=[0.0, -1.0, NAN],
    target_kl=[0.0, -1.0, NAN], missing_eos_penalty=[NAN], temperature=[0.0, -1.0, NAN],
    ptx_coef=[-0.1, NAN])

@pytest.mark.parametrize("field", [*BAD_MODEL, *BAD_PPO])
def test_settings_out_of_range_are_named(field):
    for bad in BAD_MODEL.get(field, []):
        refuses(lambda: t.ToyLMConfig(**{**SMALL, field: bad}), field)
    for bad in BAD_PPO.get(field, []):
        refuses(lambda: t.PPOConfig(**{field: bad}), field, bad)

# checkpoints

@pytest.mark.parametrize("changes", [
    dict(kl_target=0.1, minibatch_rows=2), dict(dtype="float64", ent_coef=0.01)])
def test_resume_is_bit_for_bit(changes, tmp_path, monkeypatch):
    """2 + 2 steps equal 4: parameters, Adam, controller, generator, history, the file itself."""
    for clock in ("perf_counter", "time", "monotonic"):
        monkeypatch.setattr(time, clock, lambda: 0.0)
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    whole, plain = train(steps=4, checkpoint=one, **changes), train(steps=4, **changes)
    train(steps=2, checkpoint=two, **changes)
    parts = train(steps=4, checkpoint=str(two), **changes)
    assert timeless(whole[0]) == timeless(parts[0]) == timeless(plain[0])
    same(weights(*whole[1:]), weights(*parts[1:]))
    same(weights(*whole[1:]), weights(*plain[1:]))
    one, two = (dict(np.load(path, allow_pickle=False)) for path in (one, two))
    assert list(one) == list(two)
    same(list(one.values()), list(two.values()))
    assert sorted(os.listdir(tmp_path)) == ["one.npz", "two.npz"]

def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.npz"
    train(steps=1, checkpoint=path)
    old = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: [][0])
    with pytest.raises(IndexError):
        train(steps=2, checkpoint=path)
    assert path.read_bytes() == old

@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "run.npz"
    train(steps=1, checkpoint=path)
    return path.read_bytes()

def refused_checkpoint(path, content, *fragments, shape=(), prompts=PROMPTS, spread=0.3, **changes):
    """train_ppo names the file and touches neither the file, the models nor the generator."""
    path.write_bytes(content)
    rng, shape = gen(0), dict(shape, dtype="float32")
    policy, critic = build(**shape), build(t.TinyCritic, **shape)
    before, ref = weights(policy, critic), build(spread=spread, **shape).frozen_copy()
    cfg = t.PPOConfig(**{"steps": 3, "max_new_tokens": 4, **changes})
    refuses(lambda: t.train_ppo(policy, ref, critic, prompts, count_good, EOS, cfg, rng=rng,
                                checkpoint=path), path.name, *fragments, error=ValueError)
    same(before, weights(policy, critic))
    assert path.read_bytes() == content and rng.bit_generator.state == gen(0).bit_generator.state

def npz(**arrays):
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()

@pytest.mark.parametrize("spoil", [
    lambda b: b[:0], lambda b: b[:1], lambda b: b[:len(b) // 2], lambda b: b[:-1],
    lambda b: b"not a checkpoint", lambda b: pickle.dumps({"step": 1}), lambda b: npz(x=1),
], ids=["empty", "1-byte", "half", "tail-cut", "text", "pickle", "foreign"])
def test_spoilt_files_are_refused(spoil, saved, tmp_path):
    refused_checkpoint(tmp_path / "spoilt.npz", spoil(saved))

def older(value):
    """JSON texts that lack one entry each, at the top or in the first record of a list."""
    record = json.loads(str(value))
    for key, entry in record.items():
        yield {k: v for k, v in record.items() if k != key}
        if isinstance(entry, list) and entry and isinstance(entry[0], dict):
            yield {**record, key: [dict(list(entry[0].items())[1:])]}

class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)

def test_parts_missing_changed_or_pickled_are_refused(saved, tmp_path):
    path, arrays = tmp_path / "run.npz", dict(np.load(io.BytesIO(saved)))
    texts = [k for k, v in arrays.items() if v.dtype.kind == "U" and v.ndim == 0]
    for key in {*list(arrays)[::9], *texts}:
        refused_checkpoint(path, npz(**{k: v for k, v in arrays.items() if k != key}))
        bomb = np.array([Bomb(tmp_path / "fired")], object)
        refused_checkpoint(path, npz(**{**arrays, key: bomb}))
        at = saved.index(arrays[key].tobytes())
        refused_checkpoint(path, saved[:at] + bytes([saved[at] ^ 1]) + saved[at + 1:])
    for key in texts:
        for record in older(arrays[key]):
            refused_checkpoint(path, npz(**{**arrays, key: np.array(json.dumps(record))}))
    assert not (tmp_path / "fired").exists()

def test_files_of_other_models_or_settings_are_refused(saved, tmp_path):
    path = tmp_path / "run.npz"
    refused_checkpoint(path, saved, shape=dict(d_model=12))
    refused_checkpoint(path, saved, "lr", lr=0.5)
    refused_checkpoint(path, saved, "beta", beta=0.5)
    refused_checkpoint(path, saved, "reference", spread=0.2)
    refused_checkpoint(path, saved, "prompts", prompts=PROMPTS[::-1])

# a run killed at random moments, by an alarm whose default action ends the process on the spot

LONG = dict(max_len=60_000)  # a position table so large that much of the time goes into saving

def doomed(path, seconds):
    """Trains into path; the alarm is set when the first step is done."""
    def arm(step, stats):
        if not signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, float(seconds))
    train(steps=10**6, shape=LONG, checkpoint=path, on_step=arm)

def kill(count, folder, seed=0):
    """Kills count runs, one after the other on one file; the steps that each left, saves hit."""
    path, r, steps, hit = pathlib.Path(folder) / "run.npz", gen(seed), [], 0
    for _ in range(count):
        job = python("import test_tinyrlhf as s, sys; s.doomed(*sys.argv[1:])", path,
                     r.uniform(1e-4, 0.08))
        output = job.communicate()[0]
        assert job.returncode == -signal.SIGALRM, output
        hit += len(os.listdir(folder)) > 1
        with np.load(path, allow_pickle=False) as file:  # whole: every part passes its checksum
            parts = {key: file[key] for key in file.files}
        steps.append(len(json.loads(str(parts["meta"]))["history"]))
        assert steps == sorted(steps)
    last = dict(steps=steps[-1] + 1, shape=LONG)
    resumed, straight = train(checkpoint=path, **last), train(**last)
    same(weights(*resumed[1:]), weights(*straight[1:]))
    assert timeless(resumed[0]) == timeless(straight[0]) and os.listdir(folder) == [path.name]
    return steps, hit

@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX alarms")
def test_a_killed_run_leaves_a_whole_file_and_goes_on(tmp_path):
    assert len(kill(2, tmp_path)[0]) == 2

# memory

def soak(steps):
    """Resident bytes after each PPO step, the garbage collector off."""
    sizes, page = [], os.sysconf("SC_PAGE_SIZE")
    statm = pathlib.Path("/proc/self/statm")
    gc.disable()
    train(steps=steps, prompts=gen(1).integers(1, 11, (16, 8)), max_new_tokens=8,
          shape=dict(d_model=32),
          on_step=lambda *_: sizes.append(int(statm.read_text().split()[1]) * page))
    return sizes

@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_resident_size_is_flat():
    """One step's graph takes over 1.5 MB; ten steps may not keep as much as one of them."""
    job = python("import test_tinyrlhf as s; print(s.soak(20))")
    sizes = json.loads(job.communicate()[0])
    assert len(sizes) == 20 and sizes[-1] - sizes[9] < 1_500_000

def test_gradients_find_their_way_back_through_any_layout():
    x, y = leaf(gen().normal(size=(2, 3, 4))), leaf(gen(1).normal(size=(4, 3)))
    up = gen(2).normal(size=(2, 4, 3))
    grad_check(lambda: (x.transpose(0, -1, -2) * up).sum(), x)
    grad_check(lambda: (t.gelu(y.transpose()) * up[0].T).sum(), y)  # Fortran order inside
    grad_check(lambda: t.gelu(x[0, 0, 0]), x)

def test_a_scalar_parameter_is_clipped_like_any_other():
    p = leaf(1.0)
    for _ in range(2):
        (p * 10.0).backward()
    assert t.clip_grad_norm([p], 1.0) == 20.0
    near(p.grad, 1.0, 1e-6)

def test_rows_longer_than_a_chunk_are_taken_one_by_one(monkeypatch):
    whole = update(minibatch_rows=2)
    monkeypatch.setattr(t, "CHUNK_TOKENS", 3)
    split = update(minibatch_rows=2)
    for a, b in zip(weights(*whole[3:]), weights(*split[3:])):
        near(a, b, 1e-10)

def test_adam_steps_parameters_of_any_layout_and_refuses_eps_0():
    W, up = gen().normal(size=(3, 2)), gen(1).normal(size=(4, 2, 3))
    plain, odd, scalar = leaf(W.T), leaf(W.T), leaf(1.0)
    odd.data = W.copy().T  # Fortran order, as a checkpoint's transposed matrix has
    opt = t.Adam([plain, odd, scalar], 0.1)
    for g in up:
        plain.grad, odd.grad, scalar.grad = g.copy(), np.asfortranarray(g), np.array(1.0)
        opt.step()
    assert not odd.data.flags["C_CONTIGUOUS"] and scalar.shape == ()
    same(np.ascontiguousarray(odd.data), plain.data)
    refuses(lambda: t.Adam([plain], 0.1, eps=0.0), "eps", "0.0")

def test_an_index_may_change_before_backward():
    w, ids = leaf([[1.0, 2.0], [3.0, 4.0]]), np.array([1, 1])
    loss = w[ids].sum()
    ids[:] = 0
    loss.backward()
    near(w.grad, [[0, 0], [2, 2]])

def test_an_impossible_token_leaves_listed_log_probs_finite():
    class Never:
        """The token 1 never comes."""
        def __call__(self, rows):
            return t.Tensor(np.tile([0.0, -INF, 0.0], (*np.shape(rows), 1)))
    tokens, mask = np.array([[2, 1], [1, 0]]), np.array([[1, 0], [1, 1]])
    logp = t.response_log_probs(Never(), [0], tokens, mask).data
    near(logp[0], -math.log(2))
    assert np.exp(logp[1]) == 0 and np.isfinite(logp).all()

def test_a_checkpoint_of_other_shapes_changes_nothing(tmp_path):
    """A last axis of 1 would broadcast into any other without a word."""
    path, rng = tmp_path / "run.npz", gen(3)
    meta = {"settings": {}, "history": [], "beta": 1.0, "t": [], "rng": gen(4).bit_generator.state}
    t.save_checkpoint(path, {"policy/A": np.ones((4, 1)), "policy/b": np.ones(2)}, meta)
    arrays = {"policy/b": np.zeros(2), "policy/A": np.zeros((4, 8))}
    before = rng.bit_generator.state
    refuses(lambda: t.load_checkpoint(path, arrays, {}, rng), path, "shapes")
    assert not any(a.any() for a in arrays.values()) and rng.bit_generator.state == before

def test_scoring_in_parts_and_two_threads_changes_nothing(monkeypatch):
    cfg = t.ToyLMConfig(**SMALL)
    policy, ref, critic = (t.TinyCausalLM(cfg, gen()), t.TinyCausalLM(cfg, gen(1)),
                           t.TinyCritic(cfg, gen(2)))
    critic.params["value_head.weight"].data[:] = gen(3).normal(size=(8, 1))
    go = lambda: t.collect_rollouts(policy, ref, critic, PROMPTS, 4, EOS, rng=gen(4))
    whole = go()
    monkeypatch.setattr(t, "TWO_THREADS_FROM", 0)
    monkeypatch.setattr(t, "CHUNK_TOKENS", 3)
    parts = go()
    for name in ("tokens", "mask", "logp_old", "logp_ref", "values_old"):
        near(getattr(parts, name), getattr(whole, name))
    assert np.ptp(whole.values_old) > 0

def test_policy_and_critic_in_two_threads_learn_the_same(monkeypatch):
    one = update(minibatch_rows=2, ent_coef=0.1)
    monkeypatch.setattr(t, "TWO_THREADS_FROM", 0)
    monkeypatch.setattr(t, "CHUNK_TOKENS", 3)
    for _ in range(3):
        two = update(minibatch_rows=2, ent_coef=0.1)
        for a, b in zip(weights(*one[3:]), weights(*two[3:])):
            near(a, b, 1e-10)

def test_a_shared_trunk_learns_in_one_thread(monkeypatch):
    seen, at_once = [], t.at_once
    monkeypatch.setattr(t, "at_once", lambda width, *work: seen.append(width) or at_once(0, *work))
    policy, critic = t.TinyCausalLM(t.ToyLMConfig(**SMALL), gen()), t.TinyCritic(
        t.ToyLMConfig(**SMALL), gen(1))
    for trunk in (critic.params, policy.params):
        critic.params = {**critic.params, **trunk}
        roll = t.collect_rollouts(policy, policy.frozen_copy(), critic, [[1, 2]], 4, EOS, rng=gen())
        opt = t.Adam(policy.parameters() + critic.parameters(), 1e-3)
        t.ppo_update(policy, critic, opt, roll, [1.0], 0.1, t.PPOConfig(ppo_epochs=1))
    assert [width > 0 for width in seen] == [True, True, True, False]

def test_a_checkpoint_keeps_any_bit_generator_and_refuses_another(tmp_path):
    path, draw = tmp_path / "run.npz", lambda kind: np.random.Generator(kind(3))
    def go(rng, steps):
        cfg = t.ToyLMConfig(**SMALL)
        policy, critic = t.TinyCausalLM(cfg, gen()), t.TinyCritic(cfg, gen(1))
        t.train_ppo(policy, policy.frozen_copy(), critic, [[1, 2], [3]],
                    lambda tokens, mask: ((tokens == GOOD) * mask).sum(1), EOS,
                    t.PPOConfig(steps=np.int64(steps), max_new_tokens=4), rng=rng,
                    checkpoint=path)
        return weights(policy, critic)
    for kind in (np.random.MT19937, np.random.Philox):
        path.unlink(missing_ok=True)
        straight = go(draw(kind), 3)
        path.unlink()
        go(draw(kind), 2)
        assert all(np.array_equal(a, b) for a, b in zip(go(draw(kind), 3), straight))
    with pytest.raises(ValueError):
        go(gen(), 4)

@pytest.mark.parametrize("horizon", [0.1, 0, -3])
def test_a_horizon_that_would_turn_beta_negative_is_refused(horizon):
    refuses(lambda: t.AdaptiveKLController(0.1, 6.0, horizon), "horizon", error=ValueError)
    refuses(lambda: t.PPOConfig(kl_horizon=horizon), "kl_horizon", error=ValueError)

# ---------------------------------------------------------------------------- 13 the exact answer
# against brute force, and against a slow computation over Python floats

def lumpy(V, seed, max_len=9, dtype="float64", width=8):
    """A small policy that is not near uniform."""
    rng = np.random.default_rng(seed)
    policy = t.TinyCausalLM(t.ToyLMConfig(V, max_len, d_model=width, n_layers=1, dtype=dtype), rng)
    for p in policy.parameters():
        p.data += rng.normal(0, 0.3, p.shape).astype(dtype)
    return policy

def tasty(tokens, token_mask):
    """A reward that depends on order and on length: positions count, the end token too."""
    place = np.arange(1, tokens.shape[1] + 1)
    taste = (np.sin(tokens * 1.7 + 0.3) * place * token_mask).sum(axis=1)
    return taste / 5 + token_mask.sum(axis=1) / 9

def slow_responses(V, N, eos):
    """All words over V of length N, cut behind the first end token, each once."""
    cut = lambda word: word[:word.index(eos) + 1] if eos in word else word
    return {cut(word) for word in itertools.product(range(V), repeat=N)}

def slow_response_logp(model, prompt, response):
    """log pi of a response by one forward pass a token, in Python floats."""
    prefix, out = list(prompt), 0.0
    for token in response:
        logits = np.asarray(model(np.array([prefix])))[0, -1].astype(float).tolist()
        out += logits[token] - max(logits) - math.log(
            math.fsum(math.exp(z - max(logits)) for z in logits))
        prefix.append(int(token))
    return out

def slow_exact(policy, ref, prompt, reward_fn, N, eos, beta):
    """reward, kl, J, J_ref, J_star, fraction, entropy by loops over slow_responses."""
    rows = []
    for response in sorted(slow_responses(policy.cfg.vocab_size, N, eos)):
        whole = np.array([[*prompt, *response]])
        mask = np.array([[0.0] * len(prompt) + [1.0] * len(response)])
        rows.append((slow_response_logp(policy, prompt, response),
                     slow_response_logp(ref, prompt, response),
                     float(reward_fn(whole, mask)[0])))
    mean = lambda f: math.fsum(math.exp(lp) * f(lp, lr, r) for lp, lr, r in rows)
    reward, kl = mean(lambda lp, lr, r: r), mean(lambda lp, lr, r: lp - lr)
    J_ref = math.fsum(math.exp(lr) * r for _, lr, r in rows)
    J_star = beta * math.log(math.fsum(math.exp(lr + r / beta) for _, lr, r in rows))
    J = reward - beta * kl
    return (reward, kl, J, J_ref, J_star, (J - J_ref) / (J_star - J_ref),
            -mean(lambda lp, lr, r: lp))

def numbers(e):
    return e.reward, e.kl, e.J, e.J_ref, e.J_star, e.fraction, e.entropy

@pytest.mark.parametrize("V, N, eos", [(1, 3, 0), (2, 1, 0), (2, 4, 1), (3, 3, 2), (4, 3, 0),
                                       (5, 2, 3), (3, 5, 1)])
def test_enumeration_lists_every_response_once(V, N, eos):
    tokens, mask = t.enumerate_responses(V, N, eos)
    got = [tuple(int(a) for a, m in zip(row, inside) if m) for row, inside in zip(tokens, mask)]
    assert set(got) == slow_responses(V, N, eos) and len(got) == len(set(got))
    assert tokens.shape == mask.shape == (len(got), N) and set(np.unique(mask)) <= {0, 1}
    assert (tokens[mask == 0] == eos).all() and (np.diff(mask, axis=1) <= 0).all()

def test_a_response_that_ends_early_is_counted_once():
    tokens, mask = t.enumerate_responses(3, 2, 0)  # by hand: end; 1 end, 2 end; 11 12 21 22
    listed = sorted(tuple(row[:int(m.sum())]) for row, m in zip(tokens.tolist(), mask))
    assert listed == [(0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]

@pytest.mark.parametrize("V, N, eos, prompt", [
    (4, 3, 0, [1]), (3, 5, 2, [0, 1, 1]), (6, 3, 5, [2, 0])])
def test_probabilities_of_listed_responses_sum_to_one(V, N, eos, prompt):
    policy = lumpy(V, 1)
    tokens, mask = t.enumerate_responses(V, N, eos)
    logp = t.response_log_probs(policy, prompt, tokens, mask)
    assert logp.dtype == np.float64 and abs(np.exp(logp.data).sum() - 1) < 1e-12
    for row in range(0, len(tokens), max(1, len(tokens) // 17)):
        response = tokens[row][mask[row] > 0]
        assert abs(logp.data[row] - slow_response_logp(policy, prompt, response)) < 1e-12

@pytest.mark.parametrize("V, N, eos, prompt, beta", [
    (2, 4, 1, [0], 0.1), (3, 3, 2, [0, 1, 1], 0.5), (4, 3, 0, [1], 1.0), (5, 2, 3, [2, 4], 3.0)])
def test_exact_objective_against_a_slow_computation(V, N, eos, prompt, beta):
    policy, ref = lumpy(V, 2), lumpy(V, 3)
    e = t.exact_objective(policy, ref, prompt, tasty, N, eos, beta)
    np.testing.assert_allclose(numbers(e), slow_exact(policy, ref, prompt, tasty, N, eos, beta),
                               rtol=1e-10, atol=1e-10)
    for logp in (e.logp, e.logp_ref, e.logp_star):
        assert logp.dtype == np.float64 and abs(np.exp(logp).sum() - 1) < 1e-12
    # J = beta log Z - beta KL(pi || pi*), and pi* itself reaches J*
    p, q = np.exp(e.logp), np.exp(e.logp_star)
    assert abs(e.J - (e.J_star - beta * (p @ (e.logp - e.logp_star)))) < 1e-9
    whole = np.concatenate([np.tile(prompt, (len(q), 1)), e.tokens], axis=1)
    r = tasty(whole, np.pad(e.mask, ((0, 0), (len(prompt), 0))))
    assert abs(q @ r - beta * (q @ (e.logp_star - e.logp_ref)) - e.J_star) < 1e-9
    assert e.kl >= 0 and e.J <= e.J_star and e.J_ref <= e.J_star

def test_the_reference_itself_is_at_fraction_zero():
    ref = lumpy(4, 5)
    e = t.exact_objective(ref.copy(), ref, [1, 2], tasty, 3, 0, 0.5)
    assert e.kl == 0 and e.J == e.J_ref == e.reward and e.fraction == 0
    flat = t.exact_objective(ref.copy(), ref, [1, 2], lambda a, m: np.ones(len(a)), 3, 0, 0.5)
    assert flat.fraction == 1 and abs(flat.J_star - 1) < 1e-12  # nothing to gain: all are optimal

def test_exact_objective_in_float32_agrees_and_leaves_the_models_alone():
    policy, ref = lumpy(4, 2, dtype="float32"), lumpy(4, 3, dtype="float32")
    before = [p.data.copy() for p in policy.parameters()]
    e = t.exact_objective(policy, ref, [1], tasty, 3, 0, 0.5)
    slow = slow_exact(policy, ref, [1], tasty, 3, 0, 0.5)
    np.testing.assert_allclose(numbers(e), slow, rtol=2e-5)
    assert all((p.data == b).all() and p.grad is None for p, b in zip(policy.parameters(), before))

def test_too_many_responses_are_refused_with_the_count():
    # 10 words, 6 tokens: 9^6 that never end and 1 + 9 + ... + 9^5 that do = 597,871
    assert 9**6 + sum(9**n for n in range(6)) == 597_871
    with pytest.raises(ValueError, match="597,871.*200,000"):
        t.enumerate_responses(10, 6, 0)
    policy = lumpy(10, 0)
    with pytest.raises(ValueError, match="597,871"):
        t.exact_objective(policy, policy.copy(), [1], tasty, 6, 0, 0.5)
    with pytest.raises(ValueError, match="responses"):
        t.enumerate_responses(50_257, 100, 50_256)  # the refusal itself costs nothing

@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan, math.inf])
def test_exact_objective_needs_a_price_above_zero(beta):
    policy = lumpy(3, 0)
    with pytest.raises(ValueError, match="beta"):
        t.exact_objective(policy, policy.copy(), [1], tasty, 2, 0, beta)

def test_exact_objective_names_a_reward_of_the_wrong_shape_and_a_bad_end_token():
    policy = lumpy(3, 0)
    with pytest.raises(ValueError, match=r"\(7, 3\).*\(7,\)"):
        t.exact_objective(policy, policy.copy(), [1], lambda a, m: a * m, 2, 0, 0.5)
    with pytest.raises(ValueError, match="eos_id.*7"):
        t.exact_objective(policy, policy.copy(), [1], tasty, 2, 7, 0.5)

# ---------------------------------------------------------------------------- identities

class Listed:
    """All 40 responses of a toy, the exact gradient of J, and expected gradients."""
    V, N, EOS, PROMPT, BETA = 4, 3, 0, [1, 2], 0.5

    def __init__(self):
        self.policy, self.ref = lumpy(self.V, 7), lumpy(self.V, 8)
        self.tokens, self.mask = t.enumerate_responses(self.V, self.N, self.EOS)
        prompts = np.tile(self.PROMPT, (len(self.tokens), 1))
        self.rows = np.concatenate([prompts, self.tokens], axis=1)
        self.scores = tasty(self.rows, np.pad(self.mask, ((0, 0), (2, 0))))
        with t.no_grad():
            self.logp, self.logp_ref = (self.table(m).data for m in (self.policy, self.ref))
        self.p = np.exp(self.logp.sum(axis=1))
        self.rewards = t.shaped_rewards(self.scores, self.logp, self.logp_ref, self.mask, self.BETA)
        self.togo = t.gae(self.rewards, 0 * self.rewards, self.mask, 1.0, 1.0)[0]

    def table(self, model):
        logp = t.token_log_probs(model(self.rows), self.rows)[:, len(self.PROMPT) - 1:]
        return logp * self.mask

    def gradient(self, scalar):
        for p in self.policy.parameters():
            p.grad = np.zeros_like(p.data)
        scalar.backward()
        return np.concatenate([p.grad.ravel() for p in self.policy.parameters()])

    def of_J(self):
        logp = t.response_log_probs(self.policy, self.PROMPT, self.tokens, self.mask)
        d = logp - self.logp_ref.sum(axis=1)
        return self.gradient((logp.exp() * (d * -self.BETA + self.scores)).sum())

    def of_kl(self):
        logp = t.response_log_probs(self.policy, self.PROMPT, self.tokens, self.mask)
        return self.gradient((logp.exp() * (logp - self.logp_ref.sum(axis=1))).sum())

    def expected(self, weights):
        """E[sum_t weights_t grad log pi_t], the sampling policy a constant."""
        return self.gradient((self.table(self.policy) * (self.p[:, None] * weights)).sum())

    def mean_given(self, places, x):
        """E[x | the first `places` + column tokens] by a loop over all pairs."""
        out = np.zeros_like(x)
        for n in range(self.N):
            same = (self.tokens[:, None, :n + places] == self.tokens[None, :, :n + places]).all(2)
            weight = same * (self.p * self.mask[:, n])  # (R, R)
            out[:, n] = weight @ x[:, n] / np.maximum(weight.sum(axis=1), 1e-300)
        return out * self.mask

@pytest.fixture(scope="module")
def listed():
    return Listed()

def close(a, b, tol=1e-9):
    assert np.abs(a - b).max() <= tol * max(1.0, np.abs(b).max())

def test_chain_rule_and_sign_of_the_kl(listed):
    d = listed.logp - listed.logp_ref
    e = t.exact_objective(listed.policy, listed.ref, listed.PROMPT, tasty, 3, 0, 0.5)
    given = listed.mean_given(0, d)  # the KL of each state's distribution
    assert (d[listed.mask > 0] < 0).any() and (given > -1e-12).all()
    assert abs(listed.p @ d.sum(axis=1) - e.kl) < 1e-12
    assert abs(listed.p @ given.sum(axis=1) - e.kl) < 1e-12

def test_the_score_function_has_mean_zero(listed):
    close(listed.expected(listed.mask), 0 * listed.of_J())

def test_score_function_gradient_against_central_differences(listed):
    mean = lambda: (t.response_log_probs(listed.policy, listed.PROMPT, listed.tokens,
                                         listed.mask).exp() * listed.scores).sum()
    close(listed.expected(listed.scores[:, None] * listed.mask), listed.gradient(mean()))
    assert t.grad_check(mean, [listed.policy.params[name] for name in
                               ("wte.weight", "h.0.attn.c_attn.bias", "ln_f.weight")]) < 1e-7

def test_kl_as_reward_with_the_sampling_policy_constant_gives_the_gradient_of_J(listed):
    J = listed.of_J()
    close(listed.expected(listed.togo[:, :1] * listed.mask), J)  # the whole return on every token
    close(listed.expected(listed.togo), J)                       # the reward still to come
    # through the KL reward too: beta grad log pi more, which is 0 on average
    close(listed.expected(listed.togo - listed.BETA * listed.mask), J)

@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_gae_with_exact_values_is_unbiased_at_every_lambda(listed, lam):
    V = listed.mean_given(0, listed.togo)
    A = t.gae(listed.rewards, V, listed.mask, 1.0, lam)[0]
    close(listed.expected(A), listed.of_J())
    close(listed.mean_given(1, A), listed.mean_given(1, listed.togo) - V)
    wrong = V + np.sin(np.arange(3)) * listed.mask  # with wrong values only lambda 1 is
    A = t.gae(listed.rewards, wrong, listed.mask, 1.0, lam)[0]
    assert (np.abs(listed.expected(A) - listed.of_J()).max() < 1e-9) == (lam == 1.0)

def test_kl_estimates_as_losses(listed):
    d, kl = listed.logp - listed.logp_ref, listed.of_kl()
    def loss(kind, whole):
        logp, ref = listed.table(listed.policy), listed.logp_ref
        if whole:
            return (t.kl_estimates(logp.sum(axis=1), ref.sum(axis=1), kind) * listed.p).sum()
        return (t.kl_estimates(logp, ref, kind) * listed.p[:, None]).sum()
    gradient = lambda kind, whole: listed.gradient(loss(kind, whole))
    assert abs(float(loss("k1", False)) - listed.p @ d.sum(axis=1)) < 1e-12
    assert abs(float(loss("k3", True)) - listed.p @ d.sum(axis=1)) < 1e-12  # E[ratio] = 1
    close(gradient("k1", False), 0 * kl)  # its value is the KL, its gradient is nothing
    close(gradient("k2", True), kl)       # the other way round
    reverse = t.response_log_probs(listed.policy, listed.PROMPT, listed.tokens, listed.mask)
    reverse = (reverse * -np.exp(listed.logp_ref.sum(axis=1))).sum()
    close(gradient("k3", True), listed.gradient(reverse))  # that of KL(pi_ref || pi)
    for kind, whole in (("k2", False), ("k3", False), ("abs", False), ("abs", True)):
        assert np.abs(gradient(kind, whole) - kl).max() > 1e-3

def test_ppo_at_ratio_one_is_the_policy_gradient_over_all_responses(listed):
    n = listed.mask.sum(axis=1)
    got = 0
    for row in range(len(n)):  # one response a batch, its mean over tokens times their number
        leaf = t.Tensor(listed.logp[row:row + 1], requires_grad=True)
        loss, share = t.ppo_clip_loss(leaf, listed.logp[row:row + 1], listed.togo[row:row + 1],
                                      listed.mask[row:row + 1], 0.2)
        loss.backward()
        assert share == 0
        close(-leaf.grad * n[row], listed.togo[row:row + 1], 1e-12)
        got += listed.p[row] * -leaf.grad.sum() * n[row]
    assert abs(got - listed.p @ listed.togo.sum(axis=1)) < 1e-9

def test_batch_mean_baseline_shrinks_the_gradient_by_one_over_the_rows(listed):
    total = listed.togo[:, 0]
    # on grad log pi of one row, over all partners: return - (return + partner's return) / 2
    weights = sum(p * (total - (total + other) / 2) for p, other in zip(listed.p, total))
    close(listed.expected(weights[:, None] * listed.mask), listed.of_J() / 2)
    others = sum(p * (total - other) for p, other in zip(listed.p, total))  # leave one out
    close(listed.expected(others[:, None] * listed.mask), listed.of_J())

# ---------------------------------------------------------------------------- PPO and the optimum

def test_ppo_comes_close_to_the_optimum():
    def count(tokens, token_mask):
        return ((tokens == 2) * token_mask).sum(axis=1)
    rng = np.random.default_rng(0)
    cfg = t.ToyLMConfig(4, max_len=5, d_model=16, n_layers=1)
    policy, critic = t.TinyCausalLM(cfg, rng), t.TinyCritic(cfg, rng)
    ref, fractions = policy.frozen_copy(), []
    exact = lambda: t.exact_objective(policy, ref, [1, 2], count, 3, 0, 0.5).fraction
    t.train_ppo(policy, ref, critic, [[1, 2]] * 64, count, 0,
                t.PPOConfig(steps=60, max_new_tokens=3, beta=0.5, lr=3e-3), rng=rng,
                on_step=lambda step, stats: fractions.append(exact()))
    assert max(fractions) <= 1 + 1e-6 and fractions[-1] > 0.95
    assert fractions[4] < fractions[19] < fractions[-1]

def test_climbing_the_exact_objective_reaches_the_optimum():
    policy = lumpy(3, 11)
    ref = policy.frozen_copy()
    opt = t.Adam(policy.parameters(), 1e-2)
    tokens, mask = t.enumerate_responses(3, 2, 0)
    with t.no_grad():
        logp_ref = t.response_log_probs(ref, [1], tokens, mask).data
    scores = mask.sum(axis=1)
    for _ in range(300):
        logp = t.response_log_probs(policy, [1], tokens, mask)
        opt.zero_grad()
        (-(logp.exp() * ((logp - logp_ref) * -0.5 + scores)).sum()).backward()
        opt.step()
    e = t.exact_objective(policy, ref, [1], lambda a, m: m.sum(axis=1), 2, 0, 0.5)
    assert 1 - 1e-4 < e.fraction <= 1 + 1e-12
    np.testing.assert_allclose(np.exp(e.logp), np.exp(e.logp_star), atol=5e-3)

# ---------------------------------------------------------------------------- 15 command line

def test_an_unknown_command_is_refused_in_a_sentence():
    job = python("import runpy, sys; sys.argv = ['tinyrlhf.py', 'nonsense'];"
                 "runpy.run_path('tinyrlhf.py', run_name='__main__')")
    output = job.communicate()[0]
    assert job.returncode and "nonsense" in output and "Traceback" not in output

# ---------------------------------------------------------------------------- random calls
# holds B59 (inputs unchanged), B60 B69 B70 B71 (ints, read-only, float16, layouts), B64 (shapes)

CALLS = {  # arguments and their shapes; settings to draw from; settings to refuse; slow answer
    "masked_mean": ("x:BL mask:BLm", {}, [], slow_mean),
    "whiten": ("x:BL mask:BLm", dict(shift_mean=[True, False]), [], slow_whiten),
    "kl_estimates": ("logp:BL logp_ref:BL", dict(kind=["k1", "k2", "k3", "abs"]),
                     [dict(kind="k4")], lambda x, y, kind: {
                         "k1": x - y, "k2": (x - y) ** 2 / 2, "abs": abs(x - y),
                         "k3": [[math.expm1(d) - d if d < 20 else NAN  # bounded beyond that
                                 for d in row] for row in y - x]}[kind]),
    "last_response_index": ("mask:BLm", {}, [], slow_last),
    "shaped_rewards": ("scores:B logp_policy:BL logp_ref:BL response_mask:BLm",
                       dict(beta=[0.0, 0.1, 2]), [dict(beta=NAN)], slow_shaped),
    "gae": ("rewards:BL values:BL response_mask:BLm", dict(gamma=[0, 0.9, 1], lam=[0, 0.95, 1]),
            [dict(gamma=NAN), dict(lam=INF)], slow_gae),
    "ppo_clip_loss": ("logp_new:BL logp_old:BL advantages:BL response_mask:BLm",
                      dict(clip_eps=[0.1, 0.2]), [dict(clip_eps=-1.0), dict(clip_eps=NAN)],
                      slow_clip),
    "value_loss": ("values:BL old_values:BL returns:BL response_mask:BLm",
                   dict(clip_eps=[0.1, 0.2]), [dict(clip_eps=-1.0)], slow_value),
    "masked_entropy": ("logits:BLV response_mask:BLm", dict(temperature=[0.5, 1, 2]),
                       [dict(temperature=0.0), dict(temperature=NAN)], slow_entropy),
    "token_log_probs": ("logits:BLV tokens:BLi", dict(temperature=[0.5, 1, 2]),
                        [dict(temperature=-1.0)], slow_logp),
    "filter_probs": ("logits:BV", dict(temperature=[0, 0.5, 1], top_k=[None, 1, 3, 99],
                                       top_p=[None, 0.0, 0.6, 1.0]),
                     [dict(temperature=INF), dict(top_k=0), dict(top_p=1.5)],
                     lambda x, **kw: [slow_filter(row, **kw) for row in x]),
    "pick": ("probs:BVp u:Bu", {}, [], lambda p, u: [slow_pick(*pair) for pair in zip(p, u)]),
    "sft_loss": ("logits:BLV labels:BLl", {}, [], lambda x, y: -slow_mean(
        slow_logp(x, np.where(y == -100, 0, y)), y[:, 1:] != -100)),
    "reward_model_loss": ("chosen:B rejected:B", {}, [], lambda x, y: -slow_mean(
        [-max(d, 0) - math.log1p(math.exp(-abs(d))) for d in y - x], x == x)),
}
LIKE = dict(gae="values", shaped_rewards="logp_policy")  # the result's dtype, if not of the first
LIVE = {"kl_estimates", "ppo_clip_loss", "value_loss", "masked_entropy", "token_log_probs",
        "sft_loss", "reward_model_loss"}

def draw(r, spec):
    """Valid arguments by name, as float64, int64 and bool; one size in thirty is zero."""
    size = {k: int(r.integers(1, top)) * (r.random() > 1 / 30) for k, top in
            zip("BLV", (5, 9, 7))}
    size["V"] = max(size["V"], 1)
    out = {}
    for name, code in (item.split(":") for item in spec.split()):
        shape = tuple(size[c] for c in code if c in size)
        x = r.normal(0, r.choice([0.1, 1, 5]), shape)
        if code[-1] == "m":
            x = r.random(shape) < r.choice([0.4, 0.8, 1])
        elif code[-1] in "il":
            x = r.integers(0, size["V"], shape)
            x[(r.random(shape) < 0.3) & (code[-1] == "l")] = -100
        elif code[-1] == "p":
            x = np.exp(x) * (r.random(shape) < 0.7)
            x[:, r.integers(size["V"])] += 1  # at least one id has a chance
            x /= x.sum(-1, keepdims=True)
        out[name] = r.random(shape) if code[-1] == "u" else x
    return out

def poison(r, arrays):
    """NaN, infinities and huge numbers wherever the mask is off."""
    off = next((~x for x in arrays.values() if x.dtype == bool), None)
    for x in arrays.values():
        if off is not None and x.dtype == float and x.shape[:2] == off.shape:
            x[off] = r.choice([NAN, INF, -INF, 1e30, -1e30])

def restyle(r, x):
    """The same numbers as another kind of array: dtype, order, strides, read-only, a list."""
    kinds = {"b": ["?", "i1", "u8", "f4", "f8"], "i": ["i8", "i4", "i2"], "f": ["f8", "f4", "f2"]}
    x = x.astype(r.choice(kinds[x.dtype.kind]))
    if x.dtype.kind == "f" and np.isfinite(x).all() and (x > 1).any() and r.random() < 0.1:
        x = x.astype(int)
    style = r.integers(7) if x.ndim and x.size else 0
    x = [x, np.asfortranarray(x), x[..., ::-1].copy()[..., ::-1], np.repeat(x, 2, 0)[::2],
         x.T.copy().T, x.copy(), x][style]
    if style == 5:
        x.setflags(write=False)
    return x.tolist() if style == 6 else x

def spoil(r, name, given, settings):
    """Breaks one thing; returns the words of which the refusal has to hold one, or None."""
    key = str(r.choice(list(given)))
    x, how = np.array(given[key]), r.integers(6)
    if how == 0 and len(given) > 1:
        given[key] = np.concatenate([x, x[:1]]) if len(x) else np.ones((1, *x.shape[1:]))
        return list(given)
    if how == 1 and name != "filter_probs":
        given[key] = x[None]
        return list(given)
    if how == 2 and x.size:
        given[key] = x.astype(r.choice([complex, str]) if x.dtype.kind == "f" else str)
        return [key]
    if how == 3 and CALLS[name][2]:
        bad = r.choice(CALLS[name][2])
        settings.update(bad)
        return list(bad)
    if how == 4 and key in ("tokens", "labels") and x.ndim == 2 and x.shape[1] > 1 and x.size:
        given[key] = x.astype(int)
        given[key][-1, -1] = r.choice([-1, -7, 99, 2**40])
        return [key]
    inside = next((np.array(v, bool) for k, v in given.items() if "mask" in k), True)
    if how == 5 and x.dtype.kind == "f" and x.size and np.all(inside) and "ref" not in key:
        given[key] = x.copy()
        given[key][(0,) * x.ndim] = NAN
        loose = name in ("token_log_probs", "sft_loss") and np.shape(list(given.values())[1])[1] < 2
        ignored = name == "sft_loss" and np.all(np.array(given["labels"])[0, 1:2] == -100)
        return None if loose or ignored else [key]
    return None

def one_call(r):
    """One random call, checked; "answered" or "refused"."""
    name = str(r.choice(list(CALLS)))
    spec, choices, _, slow = CALLS[name]
    arrays, settings = draw(r, spec), {k: v[r.integers(len(v))] for k, v in choices.items()}
    poison(r, arrays)
    given = {k: restyle(r, x) for k, x in arrays.items()}
    fault = spoil(r, name, given, settings) if r.random() < 0.3 else None
    empty = min(np.size(x) for x in given.values()) == 0
    bare = name in ("last_response_index", "shaped_rewards") and not np.any(arrays[
        "mask" if "mask" in arrays else "response_mask"], 1).all()
    args, before, live = list(given.values()), copy.deepcopy(given), None
    if name in LIVE and not fault and r.random() < 0.4:
        args[0] = live = t.Tensor(args[0], requires_grad=True)
    where = f"{name}({', '.join(f'{k}={v!r}' for k, v in {**given, **settings}.items())})"
    try:
        got = getattr(t, name)(*args, **settings)
    except (ValueError, TypeError) as error:
        words = fault or (list(given) + ["row"] if empty or bare else [])
        assert any(w in str(error) for w in words) and len(str(error)) < 400, (where, error)
        return "refused"
    finally:
        for k, x in before.items():
            np.testing.assert_array_equal(given[k], x, where)
    assert not fault, f"{where} was not refused for {fault}"
    parts = got if type(got) is tuple else (got,)
    assert all(np.isfinite(np.asarray(x)).all() for x in parts), where
    like = np.asarray(given[LIKE.get(name, list(given)[0])]).dtype
    like = np.float64 if like == np.float64 else np.float32
    if name.startswith(("gae", "shaped", "whiten", "kl", "ppo", "value", "token", "masked_e")):
        assert np.asarray(parts[0]).dtype == like, where
    if not empty:
        numbers = [x if x.dtype.kind in "biu" else x.astype(float) for x in
                   map(np.asarray, given.values())]
        check(where, parts, slow, numbers, settings, 1e-8 if like == np.float64 else 2e-3)
    if live is not None:
        (parts[0] if parts[0].shape == () else parts[0].sum()).backward()
        assert live.grad is None or np.isfinite(live.grad).all(), where
    return "answered"

def check(where, got, slow, numbers, settings, tol):
    """Equal to the slow answer wherever that does not hang on the last digit."""
    if where.startswith("pick"):
        for p, u, i in zip(*numbers, got[0]):
            below = math.fsum(p[:i])
            assert p[i] > 0 and below - 1e-3 <= u <= below + p[i] + 1e-3, where
        return
    with np.errstate(all="ignore"):
        want = slow(*numbers, **settings)
        if settings.get("top_p"):
            sides = [slow(*numbers, **{**settings, "top_p": settings["top_p"] + d})
                     for d in (-1e-3, 1e-3)]
            if not np.array_equal(*sides):
                return
    for g, w in zip(got, want if type(want) is tuple else (want,)):
        g, w = np.asarray(g, float), np.asarray(w, float)
        if where.startswith("filter"):  # which of equals was kept is another test's business
            g, w = np.sort(g), np.sort(w)
        assert g.shape == w.shape, where
        np.testing.assert_allclose(np.where(np.isnan(w), w, g), w, tol, tol, err_msg=where)

@functools.cache
def pool(dtype):
    shape = dict(vocab_size=5, max_len=8, d_model=4, n_layers=1, dtype=dtype)
    return build(**shape), build(t.TinyCritic, 1, **shape), build(seed=2, **shape).frozen_copy()

def one_model_call(r):
    """Sampling against the slow loop, then a rollout with wild padding and one update on it."""
    dtype = str(r.choice(["float32", "float64"]))
    lm, critic, ref = pool(dtype)
    prompts = [r.integers(0, 5, r.integers(1, 6)).tolist() for _ in range(r.integers(1, 4))]
    new, eos, seed, fault = int(r.integers(4)), int(r.integers(5)), int(r.integers(99)), None
    filters = dict(temperature=float(r.choice([0, 0.7, 1])), top_k=[None, 1, 3][r.integers(3)],
                   top_p=[None, 0.0, 0.9][r.integers(3)])
    if r.random() < 0.4:
        fault = ("prompts", "max_new_tokens", "eos_id")[r.integers(3)]
        prompts[-1] = [[], [5], [-1], [1] * 9, [0.5], [None]][r.integers(6)] if (
            fault == "prompts") else prompts[-1]
        new, eos = -1 if fault == "max_new_tokens" else new, 5 if fault == "eos_id" else eos
    try:
        got = t.sample(lm, prompts, new, eos, rng=gen(seed), **filters)
    except (ValueError, TypeError) as error:
        assert fault and fault in str(error), (prompts, new, eos, filters, error)
        return "refused"
    assert not fault, (fault, prompts, new, eos)
    uniforms, width = gen(seed).random((len(prompts), new)), got.logp.shape[1]
    for b, prompt in enumerate(prompts if dtype == "float64" else []):
        ids, logp = slow_sample(lm, prompt, uniforms[b], eos, **filters)
        assert got.tokens[b, len(prompt):][:len(ids)].tolist() == ids
        near(got.logp[b], np.pad(logp, (len(prompt) - 1, width + 1 - len(prompt) - len(ids))), 1e-9)
    if new:
        policy, value = lm.copy(), copy.deepcopy(critic)
        roll = t.collect_rollouts(policy, ref, value, prompts, new, eos, rng=gen(seed))
        wild = {k: np.where(roll.mask > 0, getattr(roll, k), r.choice([NAN, INF, -INF, 1e30]))
                for k in ("logp_old", "logp_ref", "values_old")}
        opt = t.Adam(policy.parameters() + value.parameters(), 1e-3)
        want = np.asarray(critic(got.tokens))[range(len(prompts)), slow_last(got.token_mask)]
        near(t.score_sequences(critic, got.tokens, restyle(r, got.token_mask > 0)), want, 1e-5)
        stats = t.ppo_update(policy, value, opt, dataclasses.replace(roll, **wild),
                             restyle(r, r.normal(size=len(prompts))), 0.1)
        assert np.isfinite([v for v in timeless([stats])[0].values()]).all(), stats
        assert all(np.isfinite(w).all() for w in weights(policy, value))
    return "answered"

def one_setting(r):
    """A field of a record set to nonsense is refused by name."""
    make, fields = [(t.PPOConfig, [*BAD_PPO]), (lambda **kw: t.ToyLMConfig(**{**SMALL, **kw}),
                                                   list(SMALL))][r.integers(2)]
    field = str(r.choice(fields))
    bad = [NAN, "x", [], 1j, np.zeros(2), {}, b"", object()][r.integers(8)]
    refuses(lambda: make(**{field: bad}), field)
    return "refused"

def one_operation(r):
    """Arithmetic on Tensors takes the shapes that NumPy takes, and gradients have their leaf's."""
    shapes = [(), (1,), (3,), (2, 1), (2, 3), (0, 3), (4, 1, 3), (3, 3)]
    a, b = (r.normal(size=shapes[r.integers(8)]) for _ in range(2))
    op = str(r.choice(["a + b", "a - b", "a * b", "a @ b", "(a * a + b).sum(0, keepdims=True)"]))
    both = []
    for x, y in ((a, b), (leaf(a), leaf(b))):
        try:
            both.append(eval(op, {"a": x, "b": y}))
        except (ValueError, TypeError, IndexError):
            both.append(None)
    assert (both[0] is None) == (both[1] is None), (op, a.shape, b.shape)
    if both[0] is None:
        return "refused"
    near(both[1], both[0])
    both[1].sum().backward()
    assert all(z.grad.shape == z.shape for z in (x, y))
    return "answered"

def fuzz(count, seed=0):
    """Random calls, each from its own seed; how many ended how, and what was lost."""
    kinds = [one_call] * 12 + [one_model_call, one_setting, one_operation]
    tally, lost = collections.Counter(), []
    for i in range(count):
        r = gen(seed, i)
        kind = kinds[r.integers(len(kinds))]
        try:
            with warnings.catch_warnings(action="ignore"):
                tally[f"{kind.__name__} {kind(r)}"] += 1
        except (Exception, pytest.fail.Exception) as error:
            lost.append(f"call {i} of seed {seed}: {kind.__name__}: {error!r}")
    return tally, lost

def test_random_calls():
    tally, lost = fuzz(3000)
    assert not lost, "\n".join(lost[:3])
    assert len(tally) == 7 and min(tally.values()) > 50

if __name__ == "__main__":
    job, count = sys.argv[1], int(sys.argv[2])
    if job == "fuzz":
        tally, lost = fuzz(count, *map(int, sys.argv[3:]))
        print(*lost[:40], dict(tally), f"{sum(tally.values())} held, {len(lost)} lost", sep="\n")
    if job == "kill":
        with tempfile.TemporaryDirectory() as folder:
            steps, hit = kill(count, folder)
        print(f"{count} kills, {hit} of them while saving; steps that each left: {steps}")
    if job == "soak":
        print("resident MB:", [round(size / 1e6, 1) for size in soak(count)[::max(1, count // 10)]])
