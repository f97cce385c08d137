# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "numba>=0.60"]
# ///
"""RLHF, learning from human feedback, with PPO, proximal policy optimisation, in one file.

Thesis: a language model is a policy whose actions are tokens. Score whole responses with a learnt
reward, charge every token for its distance from a frozen reference, and climb the sum with clipped
policy gradients. All of it is here, on NumPy arrays, to be read from top to bottom.

    python tinyrlhf.py             the demo: fine-tuning (SFT), reward model, PPO, what it changed
    python tinyrlhf.py estimate    the four models at 7B: memory, time (examples/estimator.py)

    0  guards, compiling, threads  5  masked mean, whitening, KL    10  PPO's settings, rollout
    1  autograd                    6  rewards and advantages        11  the PPO update
    2  transformer                 7  the two clipped losses        12  the training loop
    3  Adam, gradient clipping     8  the KL controller             13  the exact answer
    4  log-probs, sampling         9  SFT, reward-model losses      14  demo, command line

Names. B rows, P prompt tokens, N new tokens, T = P + N; D width, H heads, V vocabulary.

    policy    pi         the model being trained; its actions are tokens
    ref       pi_ref     the policy as it was before PPO, frozen; anchor of the KL
    critic    V(s)       predicts the reward still to come after a prefix s
    scores    (B,)       one number a response: from the reward model (frozen) or any function
    logp_old  (B, T-1)   log pi(a|s) as recorded while sampling
    kl        (B, T-1)   logp_old - logp_ref: a signed sample; its sum is in nats per sequence
    rewards   (B, T-1)   R_t = -beta kl_t (beta: price of a nat), plus score on the last token
    advantages (B, T-1)  A_t: how much better the action was than V expected, by GAE (section 6)
    returns    (B, T-1)  G_t = A_t + V_t (A not yet whitened), what V should have been

The shift. Everything per token is (B, T-1): index t is the action tokens[:, t+1], taken in the
state tokens[:, :t+1]. Here P = 3, N = 4, and the response ends early:

    column            0      1      2      3      4      5      6
    tokens           the   film    was   great  <end>  <end>  <end>     the last two are padding
    token_mask        0      0      0      1      1      0      0       (B, T), over tokens
    t                     0      1      2      3      4      5
    response_mask         0      0      1      1      0      0          (B, T-1) = token_mask[:, 1:]
    rewards               0      0   -b kl_2  -b kl_3 + score  0      (b is beta)
    values[:, 2] is V("the film was"), the state before the action "great" is taken

Rows are left-aligned (prompt, response, padding), so no real token attends to padding and no
forward pass needs to know of it. The sampler's masks are its own bookkeeping, never read off ids.
What this is not: a trainer for real models (no GPU, no half precision, no sharding). "The chapter"
is a text that README.md introduces.
"""
import argparse
import contextlib
import ctypes
import functools
import hashlib
import inspect
import itertools
import json
import math
import runpy
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numba
import numpy as np

# ======================================================== 0. guards, compiling, threads
# A user's mistake ends in one sentence, before anything is changed. Behind the guards: speed only.

def as_float(x, name):
    """Any real numbers -> a float32 or float64 array; ints, bools and float16 become float32."""
    array = np.asarray(x)
    if array.dtype.kind not in "buif":
        raise TypeError(f"{name} has dtype {array.dtype}; real numbers are needed")
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)

def as_ids(x, vocab_size, name):
    """Token ids of any shape -> int64. NumPy wraps negative ids, numba checks none; this does."""
    ids = np.asarray(x)
    if ids.size and ids.dtype.kind not in "ui":
        raise TypeError(f"{name} has dtype {ids.dtype}; token ids are integers")
    for bad in ids[(ids < 0) | (ids >= vocab_size)][:1]:
        raise ValueError(f"{name} holds the id {bad}; the vocabulary is 0 to {vocab_size - 1}")
    return ids.astype(np.int64, copy=False)

def as_number(x, name, low=-math.inf, high=math.inf, above=False, whole=False):
    """x itself if it is finite and low <= x <= high (low < x if above; an integer if whole)."""
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if (not isinstance(x, kinds) or isinstance(x, bool) or not math.isfinite(x)
            or not low <= x <= high or (above and x == low)):
        kind, bound = "an integer" if whole else "a finite number", "above" if above else "from"
        raise ValueError(f"{name} must be {kind} {bound} {low} to {high}, got {x!r}")
    return x

def need_shape(fits, where, needed, **arrays):
    """Unless their shapes fit together, one sentence names all arrays."""
    if not fits:
        shapes = ", ".join(f"{name} has shape {np.shape(x)}" for name, x in arrays.items())
        raise ValueError(f"{where}: {shapes}; needed: {needed}")

def as_mask(x, name):
    """A mask of zeros and ones, of any real dtype -> bool."""
    numbers = as_float(x, name)
    mask = np.ascontiguousarray(numbers == 1)
    if not (mask | (numbers == 0)).all():
        raise ValueError(f"{name} holds something other than 0 and 1")
    return mask

def per_token(where, response_mask, like, **arrays):
    """One shape (B, T-1), finite under a 0/1 mask -> bool mask, arrays in the dtype of `like`."""
    mask = as_mask(response_mask, f"{where}: response_mask")
    arrays = {name: as_float(x, f"{where}: {name}") for name, x in arrays.items()}
    fits = mask.ndim == 2 and all(x.shape == mask.shape for x in arrays.values())
    need_shape(fits, where, "one shape (B, T-1)", **arrays, response_mask=mask)
    for name, x in arrays.items():
        if not np.isfinite(x).all() and not np.isfinite(x[mask]).all():
            place = tuple(np.argwhere(mask & ~np.isfinite(x))[0].tolist())
            raise ValueError(f"{where}: {name} is {x[place]} at {place}, inside the response")
    return mask, *(np.ascontiguousarray(x, arrays[like].dtype) for x in arrays.values())

def check_scores(scores, rows, name="scores"):
    """Rewards of whole responses: (rows,) finite numbers, or a sentence."""
    scores = as_float(scores, name)
    need_shape(scores.shape == (rows,), name, f"one number a row, ({rows},)", scores=scores)
    for row in np.flatnonzero(~np.isfinite(scores))[:1]:
        raise ValueError(f"{name} is {scores[row]} in row {row}; finite numbers are needed")
    return scores

def kernel(function, reorder=True):
    """numba.njit: compiled at its first call, cached on disk where a cache can be written.
    Sums may be reordered for SIMD, NaN and infinity keep their meaning; no threads inside."""
    fastmath = {"contract", "nsz"} | ({"reassoc"} if reorder else set())
    options = {"fastmath": fastmath, "nogil": True, "error_model": "numpy"}  # x / 0 is inf
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no directory for a cache: compile anew in each process
        return numba.njit(**options)(function)

CHUNK_TOKENS = 1024  # of a pass of the update or the scoring, or one row: what fits the cache
TWO_THREADS_FROM = 200_000  # numbers in an array; narrower work would wait for Python's lock
BLAS = ctypes.CDLL(np._core._multiarray_umath.__file__)  # finds what NumPy is linked to
malloc_option = getattr(BLAS, "mallopt", lambda option, size: None)  # glibc's, for the process
malloc_option(-3, 2**25)  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD: freed memory is kept for the next
malloc_option(-1, 2**30)  # arrays, and a toy update is 1.09 times as fast, gae 1.8 times

def at_once(width, first, second):
    """first() and second(), which change nothing in common -> both results; in two threads if their
    arrays, of `width` numbers, are large. Matrix products then get one thread each, as all else."""
    set_threads = getattr(BLAS, "scipy_openblas_set_num_threads64_", None)  # None: another BLAS
    if set_threads is None or width < TWO_THREADS_FROM:
        return first(), second()
    before = BLAS.scipy_openblas_get_num_threads64_()
    set_threads(1)
    try:
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(second)
            return first(), later.result()
    finally:
        set_threads(before)

# ======================================================== 1. autograd
# An operation is a rule: its value, and its vector-Jacobian product (vjp), which turns the gradient
# of the loss by the result, g, into gradients by the operands. Backward is then the same for all.

_serial = itertools.count()
_recording = True

@contextlib.contextmanager
def no_grad():
    """Inside, operations record nothing; the state before is restored, also after an exception."""
    global _recording
    before, _recording = _recording, False
    try:
        yield
    finally:
        _recording = before

def unbroadcast(g, shape):
    """Undo NumPy's broadcasting: sum g over the axes along which an operand was repeated."""
    lead = g.ndim - len(shape)
    return g if g.shape == shape else g.sum(axis=tuple(
        i for i in range(g.ndim) if i < lead or shape[i - lead] == 1)).reshape(shape)

class Tensor:
    """A float32 or float64 array that remembers how it was made; its operations are attached below.
    Tensor(data) copies data; ints become float32. loss.backward() adds dloss/dx to x.grad for every
    x made with requires_grad=True, and for no other; set x.grad = None to start anew."""
    __array_ufunc__ = None  # subtle: without it, ndarray * Tensor is an array, its gradient lost
    def __init__(self, data, requires_grad=False):
        self.data = np.array(as_float(data, "Tensor: data"), order="C")
        self.grad = None
        self.requires_grad = bool(requires_grad)
        self._parents, self._vjp, self._serial = (), None, next(_serial)

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: self.data.dtype)
    __len__ = lambda self: len(self.data)
    __float__ = lambda self: float(self.data)
    __repr__ = lambda self: f"Tensor({self.data}, requires_grad={self.requires_grad})"
    __array__ = lambda self, dtype=None, copy=None: np.array(self.data, dtype, copy=copy)

    def backward(self):
        """Add dself/dx to the .grad of every leaf (made by no operation); uses the graph up."""
        if self.data.size != 1:
            raise ValueError(f"backward starts from one number, this Tensor has shape {self.shape}")
        if not self.requires_grad:
            raise RuntimeError("backward: nothing here requires a gradient, or no_grad() was on")
        grads = {}  # of results whose turn is still to come
        def receive(t, g):
            if t._parents is None:
                raise RuntimeError("backward: this graph was used already; compute the loss again")
            if t._parents:
                grads[t] = grads[t] + g if t in grads else g
            else:  # a leaf; subtle: np.array copies, for others may hold the same g
                t.grad = np.array(g, order="C") if t.grad is None else np.asarray(t.grad + g)
        receive(self, np.ones_like(self.data))
        while grads:  # the Tensor made last has its whole gradient: no other was made from it
            t = max(grads, key=lambda t: t._serial)
            for p, g in zip(t._parents, t._vjp(grads.pop(t))):
                if p.requires_grad:
                    receive(p, unbroadcast(g, p.shape).astype(p.dtype, copy=False))
            t._parents = t._vjp = None  # what it saved is free as soon as its gradient has passed

def as_tensor(x, name, dtype=None):
    """x itself if it is a Tensor, else a constant, in the given dtype if there is one."""
    return x if isinstance(x, Tensor) else Tensor(np.asarray(as_float(x, name), dtype))

def node(parents, value, vjp):
    """The result of an operation; it remembers its parents only if one of them needs a gradient."""
    out = Tensor.__new__(Tensor)
    out.data, out.grad, out._serial = np.asarray(value), None, next(_serial)
    out.requires_grad = _recording and any([p.requires_grad for p in parents])
    out._parents, out._vjp = (parents, vjp) if out.requires_grad else ((), None)
    return out

def op(rule):
    """rule(*arrays, **settings) -> (value, vjp) becomes an operation on Tensors or arrays.
    What is not a Tensor takes the first Tensor's dtype. A trainable leaf's array is copied while
    recording: its owner may change it before backward reads it."""
    names = tuple(inspect.signature(rule).parameters)
    @functools.wraps(rule)
    def apply(*operands, **settings):
        dtypes = [x.data.dtype for x in operands if isinstance(x, Tensor)]
        parents = operands if len(dtypes) == len(operands) else tuple(
            [as_tensor(x, name, *dtypes[:1]) for x, name in zip(operands, names)])
        arrays = [p.data.copy() if _recording and p.requires_grad and not p._parents else p.data
                  for p in parents]
        return node(parents, *rule(*arrays, **settings))
    return apply

# The table of derivatives: the value, then what each operand receives.
Tensor.__add__ = Tensor.__radd__ = op(lambda x, y: (x + y, lambda g: (g, g)))
Tensor.__mul__ = Tensor.__rmul__ = op(lambda x, y: (x * y, lambda g: (g * y, g * x)))
Tensor.__sub__ = op(lambda x, y: (x - y, lambda g: (g, -g)))
Tensor.__truediv__ = op(lambda x, y: (x / y, lambda g: (g / y, -g * x / (y * y))))
Tensor.exp = op(lambda x: (y := np.exp(x), lambda g: (g * y,)))
Tensor.log = op(lambda x: (np.log(x), lambda g: (g / x,)))
Tensor.tanh = op(lambda x: (y := np.tanh(x), lambda g: (g * (1 - y * y),)))
power = op(lambda x, n: (x ** n, lambda g: (g * n * x ** (n - 1) if n else 0 * g,)))
product = op(lambda x, y: (x @ y, lambda g: (g @ y.swapaxes(-1, -2), x.swapaxes(-1, -2) @ g)))
reshape = op(lambda x, shape: (x.reshape(shape), lambda g: (g.reshape(x.shape),)))
clip = op(lambda x, low, high: (np.clip(x, low, high), lambda g: (g * ((low <= x) & (x <= high)),)))
# At equality the first argument takes the whole gradient.
maximum = op(lambda x, y: (np.maximum(x, y), lambda g: (g * (x >= y), g * (x < y))))
minimum = op(lambda x, y: (np.minimum(x, y), lambda g: (g * (x <= y), g * (x > y))))
transpose = op(lambda x, axes: (x.transpose(axes), lambda g: (
    g.transpose(None if axes is None else np.argsort(np.mod(axes, x.ndim))),)))

@op
def reduce(x, f, axis, keepdims):
    """The sum or the largest entry over an axis, several or all; equal largest entries share g."""
    out = f(x, axis=axis, keepdims=True)
    share = 1 if f is np.sum else (x == out) / (x == out).sum(axis=axis, keepdims=True)
    value = out if keepdims else out.squeeze(axis) if axis is not None else out.reshape(())
    return value, lambda g: (np.broadcast_to(g.reshape(out.shape), x.shape) * share,)

@kernel
def _add_rows(ids, g, out):
    for n in range(len(ids)):  # in order, in one thread: equal ids never race
        out[ids[n]] += g[n]

@op
def take(x, index):
    """x[index]; the gradient is put back there, and added where an index repeats, as ids do."""
    index = index.copy() if isinstance(index, np.ndarray) else index  # its owner may change it
    def vjp(g):
        full = np.zeros(x.shape, g.dtype)
        if x.ndim == 2 and isinstance(index, np.ndarray) and index.dtype == np.int64:
            _add_rows(index.ravel(), np.ascontiguousarray(g).reshape(-1, x.shape[1]), full)
        else:
            np.add.at(full, index, g)  # subtle: full[index] += g would keep one of equal indices
        return (full,)
    return x[index], vjp

def log_softmax(x, axis=-1):
    """x - log sum exp x along an axis, the maximum taken out first so that exp cannot overflow."""
    x = as_tensor(x, "x")
    y = x - x.data.max(axis=axis, keepdims=True)
    return y - y.exp().sum(axis, keepdims=True).log()

def matmul(x, y):
    """x (..., n, k) @ y (..., k, m) -> (..., n, m); a vector is a row or a column, as in NumPy."""
    if np.ndim(y) == 1:
        return matmul(x, reshape(y, shape=(-1, 1)))[..., 0]
    return product(x, y) if np.ndim(x) != 1 else product(reshape(x, shape=(1, -1)), y)[..., 0, :]

Tensor.__matmul__, Tensor.__rmatmul__ = matmul, lambda a, b: matmul(b, a)
Tensor.__rsub__ = lambda a, b: -a + b
Tensor.__rtruediv__ = lambda a, b: a ** -1 * b
Tensor.__neg__ = lambda a: a * -1
Tensor.__pow__ = lambda a, n: power(a, n=as_number(n, "the exponent of **"))
Tensor.__getitem__ = lambda a, index: take(a, index=index)
Tensor.sum = lambda a, axis=None, keepdims=False: reduce(a, f=np.sum, axis=axis, keepdims=keepdims)
Tensor.max = lambda a, axis=None, keepdims=False: reduce(a, f=np.max, axis=axis, keepdims=keepdims)
Tensor.mean = lambda a, axis=None, keepdims=False: (
    (s := a.sum(axis, keepdims)) * (s.data.size / max(a.data.size, 1)))
Tensor.reshape = lambda a, *shape: reshape(a, shape=shape[0] if np.ndim(shape) > 1 else shape)
Tensor.transpose = lambda a, *to: transpose(a, axes=to[0] if np.ndim(to) > 1 else to or None)

def grad_check(f, tensors):
    """Compare backward with central differences; returns the largest relative error of a tensor.
    f(*tensors), or f() if it takes nothing, gives a scalar Tensor; tensors are float64 leaves.
    Error: max |analytic - numeric| / max(max |analytic|, max |numeric|, 1e-3)."""
    call = functools.partial(f, *tensors) if inspect.signature(f).parameters else f
    kept, worst = [t.grad for t in tensors], 0.0
    for i, t in enumerate(tensors):
        if t.dtype != np.float64 or not t.requires_grad:
            raise ValueError(f"grad_check: tensor {i} must be float64 and require a gradient: {t}")
        t.grad = np.zeros_like(t.data)
    call().backward()
    for t, before in zip(tensors, kept):
        analytic, numeric, t.grad = t.grad, np.zeros_like(t.data), before
        for i in np.ndindex(t.shape):
            x, h = t.data[i], 1e-5 * max(1.0, abs(t.data[i]))
            t.data[i] = x + h
            above = float(call())
            t.data[i] = x - h
            numeric[i] = (above - float(call())) / (2 * h)
            t.data[i] = x
        scale = max(np.abs([analytic, numeric]).max(initial=0.0), 1e-3)
        worst = max(worst, float(np.abs(analytic - numeric).max(initial=0.0) / scale))
    return worst

# ======================================================== 2. transformer
# GPT-2's architecture under the parameter names and layouts of Hugging Face's GPT-2, so that a real
# checkpoint's arrays drop in. Each layer is one operation of the kind above.

@dataclass(frozen=True)
class ToyLMConfig:
    """The shape of a toy language model; its critic and its reward model share it."""
    vocab_size: int
    max_len: int            # context: the most tokens of prompt and response together
    d_model: int = 32       # D
    n_layers: int = 2
    n_heads: int = 2        # H, a divisor of D
    dtype: str = "float32"  # or "float64"

    def __post_init__(self):
        for name in ("vocab_size", "max_len", "d_model", "n_layers", "n_heads"):
            as_number(getattr(self, name), f"ToyLMConfig: {name}", 1, whole=True)
        if self.d_model % self.n_heads or str(self.dtype) not in ("float32", "float64"):
            raise ValueError(f"{self}: n_heads must divide d_model, dtype is float32 or float64")

@kernel
def _add_bias(y, bias):
    y += bias  # by numba: NumPy pays for each row anew, 3 times as much

@op
def linear(x, weight, bias=0.0):
    """x (..., I) @ weight (I, O) + bias (O,) -> (..., O), as one flat matrix product."""
    need_shape(x.shape[-1:] == weight.shape[:1] and np.shape(bias) in ((), weight.shape[1:]),
               "linear", "(..., I), (I, O), (O,)", x=x, weight=weight, bias=bias)
    rows = x.reshape(-1, len(weight))
    y = rows @ weight
    _add_bias(y, bias)
    def vjp(g):  # ones @ g is faster than g.sum(axis=0)
        g = g.reshape(y.shape)
        return (g @ weight.T).reshape(x.shape), rows.T @ g, np.ones(len(g), g.dtype) @ g
    return y.reshape(*x.shape[:-1], weight.shape[1]), vjp

@kernel
def _layer_norm(x, weight, bias, eps, xhat, inverse_std, y):
    share = x.dtype.type(1 / x.shape[1])
    for n in range(len(x)):
        mean, var = x[n].sum() * share, x.dtype.type(0)
        for d in range(x.shape[1]):
            var += (x[n, d] - mean) ** 2 * share
        inverse_std[n] = 1 / math.sqrt(var + eps)
        for d in range(x.shape[1]):
            xhat[n, d] = (x[n, d] - mean) * inverse_std[n]
            y[n, d] = xhat[n, d] * weight[d] + bias[d]

@kernel
def _layer_norm_vjp(g, weight, xhat, inverse_std, dx, dweight, dbias):
    # dx = (w g - mean(w g) - xhat mean(w g xhat)) / std
    share = g.dtype.type(1 / g.shape[1])
    for n in range(len(g)):
        a = b = g.dtype.type(0)
        for d in range(g.shape[1]):
            a += weight[d] * g[n, d] * share
            b += weight[d] * g[n, d] * share * xhat[n, d]
        for d in range(g.shape[1]):
            dx[n, d] = (weight[d] * g[n, d] - a - xhat[n, d] * b) * inverse_std[n]
            dweight[d] += g[n, d] * xhat[n, d]
            dbias[d] += g[n, d]

@op
def layer_norm(x, weight, bias, eps=1e-5):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis; Ba et al. 2016."""
    need_shape(x.shape[-1:] == weight.shape == bias.shape, "layer_norm", "(..., D), (D,), (D,)",
               x=x, weight=weight, bias=bias)
    rows = np.ascontiguousarray(x.reshape(-1, x.shape[-1]))
    xhat, inverse_std, y = np.empty_like(rows), np.empty_like(rows[:, 0]), np.empty_like(rows)
    _layer_norm(rows, weight, bias, eps, xhat, inverse_std, y)
    def vjp(g):
        dx, dweight, dbias = np.empty_like(rows), np.zeros_like(weight), np.zeros_like(weight)
        g = np.ascontiguousarray(g).reshape(rows.shape)
        _layer_norm_vjp(g, weight, xhat, inverse_std, dx, dweight, dbias)
        return dx.reshape(x.shape), dweight, dbias
    return y.reshape(x.shape), vjp

GELU_C = math.sqrt(2 / math.pi)
CACHED = 2**15  # numbers that stay in the cache from pass to pass: updates 1.04 times as fast
@kernel
def _gelu_inner(x, t):  # subtle: uncast, constants make a float32 a float64, half as fast
    c, cubic = x.dtype.type(GELU_C), x.dtype.type(GELU_C * 0.044715)
    for i in range(x.size):
        t[i] = x[i] * (c + cubic * x[i] * x[i])

@kernel
def _gelu_outer(x, t, y):
    half = x.dtype.type(0.5)
    for i in range(x.size):
        y[i] = half * x[i] + half * x[i] * t[i]

@kernel
def _gelu_vjp(g, x, t, dx):
    half, c, cubic = g.dtype.type(0.5), g.dtype.type(GELU_C), g.dtype.type(GELU_C * 3 * 0.044715)
    for i in range(g.size):
        slope = (half - half * t[i] * t[i]) * x[i] * (c + cubic * x[i] * x[i])  # x/2 dt/dx
        dx[i] = g[i] * (half + half * t[i] + slope)

@op
def gelu(x):
    """x/2 (1 + tanh(C (x + .044715 x^3))), C = sqrt(2/pi): Hendrycks and Gimpel 2016."""
    flat = np.ravel(x)
    t, y = np.empty_like(flat), np.empty_like(flat)
    for part in [slice(i, i + CACHED) for i in range(0, x.size, CACHED)]:
        _gelu_inner(flat[part], t[part])
        np.tanh(t[part], out=t[part])  # NumPy's is SIMD, numba's is not: 8 times faster
        _gelu_outer(flat[part], t[part], y[part])
    def vjp(g):
        dx = np.empty_like(flat)
        _gelu_vjp(np.ravel(g), flat, t, dx)
        return (dx.reshape(x.shape),)
    return y.reshape(x.shape), vjp

@kernel
def _mask_and_shift(scores, start, scale):
    for b, h, i in np.ndindex(scores.shape[:3]):
        row, seen, top = scores[b, h, i], start[b] + i + 1, scores[b, h, i, 0]
        for j in range(seen):  # keys that query i sees; row[:seen].max() was up to 3 times slower
            top = max(top, row[j])
        for j in range(seen):
            row[j] = (row[j] - top) * scale
        row[seen:] = -np.inf

@kernel
def _softmax_vjp(p, dp, scale):
    # ds = p (dp - sum p dp) / sqrt(d), in place of dp
    for b, h, i in np.ndindex(p.shape[:3]):
        row, drow, mean = p[b, h, i], dp[b, h, i], p.dtype.type(0)
        for j in range(len(row)):
            mean += row[j] * drow[j]
        for j in range(len(row)):
            drow[j] = row[j] * (drow[j] - mean) * scale

@op
def attention(qkv, n_heads, cache=None):
    """Causal self-attention: query, key, value side by side in qkv (B, n, 3D) -> (B, n, D).
    p = softmax(q k^T / sqrt(d)), out = p v. cache = (keys and values (B, S, 2D), start (B,)): the
    first query of row b stands at position start[b]. Without a cache a batch holds its own keys."""
    B, n, width = qkv.shape
    heads = lambda a: a.reshape(*a.shape[:2], -1, n_heads, width // 3 // n_heads).transpose(
        2, 0, 3, 1, 4)  # (B, n, -1) -> (-1, B, H, n, d), a view
    kv, start = (qkv, np.zeros(B, np.int64)) if cache is None else cache
    m = start.max() + n
    p, out = np.empty((B, n_heads, n, m), qkv.dtype), np.empty((B, n, width // 3), qkv.dtype)
    (q, *_), (*_, k, v), (o,) = heads(qkv), heads(kv[:, :m]), heads(out)
    scale = qkv.dtype.type(1 / math.sqrt(q.shape[-1]))
    size = max(1, 4 * CACHED // p[0].size)
    parts = [slice(b, b + size) for b in range(0, B, size)]  # of the batch: as in gelu
    for part in parts:
        np.matmul(q[part], k[part].swapaxes(-1, -2), out=p[part])
        _mask_and_shift(p[part], start[part], scale)
        np.exp(p[part], out=p[part])
        p[part] /= p[part] @ np.ones((m, 1), p.dtype)  # twice as fast as .sum(axis=-1)
        np.matmul(p[part], v[part], out=o[part])
    def vjp(g):
        # dv = p^T g,  dp = g v^T,  dq = ds k,  dk = ds^T q
        dqkv = np.empty_like(qkv)
        (dq, dk, dv), (g,) = heads(dqkv), heads(g)
        for part in parts:
            ds = g[part] @ v[part].swapaxes(-1, -2)
            _softmax_vjp(p[part], ds, scale)
            np.matmul(ds, k[part], out=dq[part])
            np.matmul(ds.swapaxes(-1, -2), q[part], out=dk[part])
            np.matmul(p[part].swapaxes(-1, -2), g[part], out=dv[part])
        return (dqkv,)
    return out, vjp

class KVCache:
    """Keys and values of the tokens read so far, in data (L, B, S, 2D), with lengths (B,)."""
    def __init__(self, cfg, batch):
        # subtle: zeros, for a key not yet written has weight 0, and 0 times garbage may be nan
        self.data = np.zeros((cfg.n_layers, batch, cfg.max_len, 2 * cfg.d_model), cfg.dtype)
        self.lengths = np.zeros(batch, np.int64)

    def write(self, layer, qkv):
        """Append the keys and values in qkv (B, n, 3D); returns what attention() reads."""
        B, n, D = *qkv.shape[:2], qkv.shape[2] // 3
        self.data[layer, np.arange(B)[:, None], self.lengths[:, None] + np.arange(n)] = qkv[..., D:]
        return self.data[layer], self.lengths

    def keep(self, rows):
        """Keep the rows (B,) bool that go on; the last ones fill the gaps -> their new order."""
        n = int(rows.sum())
        gaps, order = ~rows[:n], np.arange(n)
        order[gaps] = n + np.flatnonzero(rows[n:])
        self.data[:, :n][:, gaps] = self.data[:, order[gaps]]
        self.data, self.lengths = self.data[:, :n], self.lengths[order]
        return order

class TinyCausalLM:
    """GPT-2 in small: learned positions, LayerNorm before each part, output head tied to the input.
    lm(tokens (B, T), cache=None) -> logits (B, T, V). With a cache tokens go on from what it holds:
    decode under no_grad(), for no gradient flows through it."""
    def __init__(self, cfg, rng):
        """Normal(0, .02); projections onto the residual stream smaller by sqrt(2 layers)."""
        D, small = cfg.d_model, 0.02 / math.sqrt(2 * cfg.n_layers)
        arrays = {"wte.weight": rng.normal(0, 0.02, (cfg.vocab_size, D)),
                  "wpe.weight": rng.normal(0, 0.02, (cfg.max_len, D))}
        block = [("ln_1", 0, D, 0), ("attn.c_attn", D, 3 * D, 0.02), ("attn.c_proj", D, D, small),
                 ("ln_2", 0, D, 0), ("mlp.c_fc", D, 4 * D, 0.02), ("mlp.c_proj", 4 * D, D, small)]
        layers = [(f"h.{i}.{name}", *shape) for i in range(cfg.n_layers) for name, *shape in block]
        for name, rows, columns, std in layers + [("ln_f", 0, D, 0)]:
            arrays[f"{name}.weight"] = rng.normal(0, std, (rows, columns)) if rows else np.ones(D)
            arrays[f"{name}.bias"] = np.zeros(columns)
        self.cfg = cfg
        self.params = {name: Tensor(a.astype(cfg.dtype), True) for name, a in arrays.items()}

    def hidden_states(self, tokens, cache=None):
        """tokens (B, T) -> the normalised residual stream that the head reads, (B, T, D)."""
        p, tokens = self.params, as_ids(tokens, self.cfg.vocab_size, "tokens")
        start = np.zeros(1, np.int64) if cache is None else cache.lengths
        if tokens.ndim != 2 or not tokens.size or start.max() + tokens.shape[1] > self.cfg.max_len:
            raise ValueError(f"tokens has shape {tokens.shape} after {start.max()} in the cache; "
                             f"needed: (B, T) within the context of {self.cfg.max_len}")
        with contextlib.nullcontext() if cache is None else no_grad():
            positions = start[:, None] + np.arange(tokens.shape[1])
            x = p["wte.weight"][tokens] + p["wpe.weight"][positions]  # (B, T, D)
            for i in range(self.cfg.n_layers):
                layer = lambda name: (p[f"h.{i}.{name}.weight"], p[f"h.{i}.{name}.bias"])
                qkv = linear(layer_norm(x, *layer("ln_1")), *layer("attn.c_attn"))  # (B, T, 3D)
                cached = None if cache is None else cache.write(i, qkv.data)
                heads = attention(qkv, n_heads=self.cfg.n_heads, cache=cached)
                x = x + linear(heads, *layer("attn.c_proj"))
                wide = linear(layer_norm(x, *layer("ln_2")), *layer("mlp.c_fc"))  # (B, T, 4D)
                x = x + linear(gelu(wide), *layer("mlp.c_proj"))
            if cache is not None:
                cache.lengths += tokens.shape[1]
            return layer_norm(x, p["ln_f.weight"], p["ln_f.bias"])

    def __call__(self, tokens, cache=None):
        return linear(self.hidden_states(tokens, cache), self.params["wte.weight"].transpose())

    def parameters(self):
        """All parameters as a list of Tensors."""
        return list(self.params.values())

    def copy(self, trainable=True):
        """The same model in memory of its own."""
        twin = type(self).__new__(type(self))
        twin.cfg = self.cfg
        twin.params = {name: Tensor(p.data, trainable) for name, p in self.params.items()}
        return twin

    def frozen_copy(self):
        """A copy whose parameters need no gradient: the reference."""
        return self.copy(trainable=False)

class TinyCritic(TinyCausalLM):
    """The same trunk with one number a position: critic(tokens (B, T)) -> (B, T).
    Entry t is the value of the state tokens[:, :t+1]. The head starts at zero, so all values do."""
    def __init__(self, cfg, rng):
        super().__init__(cfg, rng)
        for name, shape in (("value_head.weight", (cfg.d_model, 1)), ("value_head.bias", (1,))):
            self.params[name] = Tensor(np.zeros(shape, cfg.dtype), requires_grad=True)

    @classmethod
    def from_backbone(cls, model):
        """A zero head on a copied trunk: reward model from policy, critic from reward model."""
        critic = cls(model.cfg, np.random.default_rng(0))
        critic.params |= {name: p for name, p in model.copy().params.items() if "head" not in name}
        return critic

    def __call__(self, tokens, cache=None):
        head = self.params["value_head.weight"], self.params["value_head.bias"]
        return linear(self.hidden_states(tokens, cache), *head)[..., 0]

def last_response_index(mask):
    """Column of the last 1 in each row of a mask (B, T) -> (B,); a row without one is refused."""
    inside = as_mask(mask, "last_response_index: mask")
    need_shape(inside.ndim == 2, "last_response_index", "(B, T)", mask=inside)
    for row in np.flatnonzero(~inside.any(axis=1))[:1]:
        raise ValueError(f"row {row} has no response token: its mask is all zeros")
    return inside.shape[1] - 1 - inside[:, ::-1].argmax(axis=1) if inside.size else np.zeros(0, int)

def score_sequences(model, tokens, token_mask):
    """A reward model's score of each response -> Tensor (B,); tokens and token_mask (B, T).
    It is the output *at* the last response token: not shifted, V of the whole sequence."""
    need_shape(np.shape(tokens) == np.shape(token_mask), "score_sequences", "(B, T) twice",
               tokens=tokens, token_mask=token_mask)
    last = last_response_index(token_mask)
    return model(tokens)[np.arange(len(last)), last]

# ======================================================== 3. Adam, gradient clipping
@kernel
def _adam(p, g, m, v, lr, beta1, beta2, eps, correction1, correction2):
    for i in range(p.size):
        m[i] += (1 - beta1) * (g[i] - m[i])
        v[i] += (1 - beta2) * (g[i] * g[i] - v[i])
        p[i] -= lr * (m[i] / correction1) / (math.sqrt(v[i] / correction2) + eps)

class Adam:
    """Kingma and Ba 2015, with bias correction, eps added to the root as in torch.
    params: Tensors. One that stands twice is stepped once, one without a gradient is skipped."""
    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8):
        self.params = list(dict.fromkeys(params))
        self.t = [0] * len(self.params)  # steps of each, for the bias correction
        self.lr, self.eps = as_number(lr, "Adam: lr", 0.0), as_number(eps, "Adam: eps", 1e-30)
        self.betas = [as_number(b, "Adam: betas", 0.0, math.nextafter(1, 0)) for b in betas]
        self.m, self.v = ([np.zeros(p.shape, p.dtype) for p in self.params] for _ in range(2))

    def zero_grad(self):
        """Forget all gradients."""
        for p in self.params:
            p.grad = None

    def step(self):
        """m, v: running means of g, g^2;  p <- p - lr m^ / (sqrt(v^) + eps), ^ bias-corrected."""
        for i, (p, m, v) in enumerate(zip(self.params, self.m, self.v)):
            if p.grad is not None:
                self.t[i] += 1
                corrections, flat = (1 - b ** self.t[i] for b in self.betas), p.data.ravel()
                _adam(flat, p.grad.ravel(), m.ravel(), v.ravel(),
                      *map(p.dtype.type, (self.lr, *self.betas, self.eps, *corrections)))
                p.data[...] = flat.reshape(p.shape)  # a view of it already, but for odd layouts

def clip_grad_norm(params, max_norm):
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)); returns their joint norm before.
    The norm is summed in float64. One that is not finite raises ValueError and changes nothing."""
    as_number(max_norm, "clip_grad_norm: max_norm", 0.0, above=True)
    grads = [p.grad for p in dict.fromkeys(params) if p.grad is not None]
    norm = math.sqrt(sum(flat @ flat for flat in (g.ravel().astype(np.float64) for g in grads)))
    if not math.isfinite(norm):
        raise ValueError(f"clip_grad_norm: the gradient norm is {norm}; nothing was changed")
    for g in grads:
        g *= min(1.0, max_norm / (norm + 1e-6))
    return norm

# ======================================================== 4. log-probs, entropy, sampling
# Policy, reference and update all score what was sampled from: softmax(logits / temperature).

@op
@np.errstate(invalid="ignore")  # whatever stands in a masked-out slot
def categorical(logits, ids, temperature=1.0, name="tokens"):
    """logits (..., V), ids (...) -> (2, ...): log p of each id, and the entropy."""
    V, tau = logits.shape[-1], as_number(temperature, "temperature", 0.0, above=True)
    need_shape(np.shape(ids) == logits.shape[:-1], "log-probs", "(..., V) and (...)",
               logits=logits, **{name: ids})
    x, ids = np.ascontiguousarray(logits).reshape(-1, V), as_ids(ids, V, name).ravel()
    z, chosen = (x - x.max(axis=1, keepdims=True)) / x.dtype.type(tau), (np.arange(len(x)), ids)
    p = np.exp(z)
    norm = p @ np.ones((V, 1), p.dtype)  # the sum of each row
    p /= norm
    z -= np.log(norm)  # from here on log p
    logp = z[chosen]
    np.maximum(z, np.finfo(z.dtype).min, out=z)  # 0 log 0 = 0, also where a logit is -inf
    entropy = -np.einsum("nv,nv->n", p, z)
    def vjp(g):
        # d log p_a / dz_v = 1[v = a] - p_v        dH / dz_v = -p_v (log p_v + H)        z = x / tau
        g_logp, g_entropy = g.reshape(2, -1, 1)
        dz = -g_logp * p
        if g_entropy.any():
            dz -= g_entropy * p * (z + entropy[:, None])
        dz[chosen] += g_logp[:, 0]
        dz[(g_logp == 0)[:, 0] & (g_entropy == 0)[:, 0]] = 0  # whatever a masked-out slot held
        return ((dz / tau).reshape(logits.shape),)
    return np.stack([logp, entropy]).reshape(2, *logits.shape[:-1]), vjp

def log_probs_and_entropy(logits, tokens, temperature=1.0, name="tokens"):
    """logits (B, T, V), tokens (B, T) -> Tensors (B, T-1): log pi(tokens[:, t+1]), entropy."""
    both = categorical(logits, ids=np.roll(tokens, -1, axis=-1), temperature=temperature, name=name)
    return both[0, ..., :-1], both[1, ..., :-1]  # behind the last token there is no action

def token_log_probs(logits, tokens, temperature=1.0):
    """log pi(tokens[:, t+1] | tokens[:, :t+1]) -> Tensor (B, T-1); logits (B, T, V), ids (B, T)."""
    logp, _ = log_probs_and_entropy(logits, tokens, temperature)
    if np.isnan(logp.data).any():
        raise ValueError("logits hold nan, +inf, or a row of nothing but -inf")
    return logp

@op
def mean_over(x, mask):
    """Mean of x over a bool mask of its shape -> scalar; 0 where the mask is empty."""
    n = max(int(mask.sum()), 1)
    value = x.sum(where=mask, dtype=np.float64) / n
    if not np.isfinite(value):
        raise ValueError("logits give a mean that is not finite over the mask")
    return value.astype(x.dtype), lambda g: (g * mask / x.dtype.type(n),)

def masked_entropy(logits, response_mask, temperature=1.0):
    """Mean entropy over the response, in nats -> scalar Tensor; (B, T-1, V) and (B, T-1)."""
    mask = as_mask(response_mask, "response_mask")
    both = categorical(logits, ids=mask * 0, temperature=temperature, name="response_mask")
    return mean_over(both[1], mask=mask)  # the entropy asks for no id: 0 will do

def filter_probs(logits, *, temperature=1.0, top_k=None, top_p=None):
    """logits (..., V) -> float64 probabilities (..., V), after temperature, then top_k, then top_p.
    temperature 0 is argmax. top_k keeps k ids, the lower ids among equals. top_p keeps the smallest
    set of likeliest ids whose mass reaches p, and at least one (Holtzman et al. 2020)."""
    z = as_float(logits, "logits").astype(np.float64)
    as_number(temperature, "temperature", 0.0)
    top_k = z.shape[-1] if top_k is None else as_number(top_k, "top_k", 1, whole=True)
    top_p = 1.0 if top_p is None else as_number(top_p, "top_p", 0.0, 1.0)
    z -= z.max(axis=-1, keepdims=True)
    if np.isnan(z).any():
        raise ValueError("logits hold NaN or +inf, or nothing but -inf in a row")
    if temperature == 0:
        return (z.argmax(axis=-1)[..., None] == np.arange(z.shape[-1])).astype(np.float64)
    with np.errstate(over="ignore"):
        p = np.exp(z / temperature)
    if top_k < z.shape[-1] or top_p < 1:
        order = np.argsort(-p, axis=-1, kind="stable")  # stable: the lower id first among equals
        ranked = np.take_along_axis(p, order, axis=-1)
        ranked[..., top_k:] = 0
        before = np.cumsum(ranked, axis=-1) - ranked  # the mass ahead of each id
        beyond = before >= top_p * ranked.sum(axis=-1, keepdims=True)
        ranked[..., 1:][beyond[..., 1:] & (top_p < 1)] = 0  # subtle: the id that crosses p stays
        np.put_along_axis(p, order, ranked, axis=-1)
    return p / p.sum(axis=-1, keepdims=True)

def pick(probs, u):
    """Inverse CDF in float64: probs (..., V), uniforms u (...) in [0, 1) -> ids (...)."""
    cdf = np.cumsum(as_float(probs, "pick: probs"), axis=-1, dtype=np.float64)
    u = as_float(u, "pick: u").astype(np.float64)
    need_shape(u.shape == cdf.shape[:-1], "pick", "(..., V) and (...)", probs=probs, u=u)
    if not (cdf[..., -1] > 0).all() or not ((u >= 0) & (u < 1)).all():
        raise ValueError("pick: probs must have a positive sum, u must lie in [0, 1)")
    # subtle: u times the sum, which rounding leaves beside 1, stays below the end of the CDF; and
    # `<=` steps over ids of probability 0, also at u = 0
    return (cdf <= (u * cdf[..., -1])[..., None]).sum(axis=-1)

Samples = namedtuple("Samples", "tokens token_mask logp ended")  # (B, T) (B, T) (B, T-1) (B,)

def sample(policy, prompts, max_new_tokens, eos_id, *, rng, temperature=1.0, top_k=None, top_p=None,
           pad_id=None):
    """Sample responses token by token through a KV cache -> Samples; T is P + N in any case.
    N passes one after the other, each reading every weight for one token a row: PPO's slow part.
    prompts: (B, P) ids, or lists of different lengths. A row ends with eos_id, which token_mask
    includes, or after max_new_tokens, and is filled up with pad_id (default eos_id). logp is of the
    distribution really sampled from, 0 outside the response. Row b uses the uniforms
    rng.random((B, N))[b], so that its sample does not depend on its batch mates."""
    cfg, N = policy.cfg, as_number(max_new_tokens, "max_new_tokens", 0, whole=True)
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"rng must be a numpy.random.Generator, got {rng!r}")
    rows = [np.asarray(row) for row in prompts]
    for b, row in enumerate(rows or [np.zeros(0)]):
        if row.ndim != 1 or not len(row) or len(row) + N > cfg.max_len:
            raise ValueError(f"prompts: row {b} has shape {row.shape}; 1 token or more, and with "
                             f"max_new_tokens={N} at most the context of {cfg.max_len}, are needed")
    as_ids(np.concatenate(rows), cfg.vocab_size, "prompts")
    eos_id = int(as_ids(eos_id, cfg.vocab_size, "eos_id"))
    pad_id = eos_id if pad_id is None else int(as_ids(pad_id, cfg.vocab_size, "pad_id"))
    B, length = len(rows), np.array([len(row) for row in rows])
    T = length.max() + N
    tokens = np.array([[*row] + [pad_id] * (T - len(row)) for row in rows], np.int64)
    mask, logp = np.zeros((B, T), cfg.dtype), np.zeros((B, T - 1), cfg.dtype)
    ended, u, cache, live = np.zeros(B, bool), rng.random((B, N)), KVCache(cfg, B), np.arange(B)
    with no_grad():
        # Prefill in one pass. Behind a short prompt it reads padding, which is overwritten later.
        logits = policy(tokens[:, :length.max()], cache).data[np.arange(B), length - 1]  # (B, V)
        cache.lengths[:] = length
        for step in range(N):
            probs = filter_probs(logits, temperature=temperature, top_k=top_k, top_p=top_p)
            chosen = pick(probs, u[live, step])
            column = length[live] + step  # each row has its own next position
            tokens[live, column], mask[live, column] = chosen, 1
            logp[live, column - 1] = np.log(probs[np.arange(len(live)), chosen])
            ended[live] = chosen == eos_id
            if step == N - 1 or ended.all():
                break
            if ended[live].any():
                order = cache.keep(chosen != eos_id)
                live, chosen = live[order], chosen[order]
            logits = policy(chosen[:, None], cache).data[:, -1]  # of the rows that go on
    return Samples(tokens, mask, logp, ended)

# ======================================================== 5. masked mean, whitening, KL
def masked_mean(x, mask):
    """Mean of x (B, T-1) over the 1s of mask, summed in float64 -> array of shape (); 0 if none."""
    inside, x = per_token("masked_mean", mask, "x", x=x)
    return np.asarray(x.sum(where=inside, dtype=np.float64) / max(inside.sum(), 1), x.dtype)

def whiten(x, mask, shift_mean=True):
    """(x - mean) / (std + 1e-8) over the 1s of mask, 0 elsewhere; x (B, T-1) -> (B, T-1).
    Population std (ddof 0), in float64. shift_mean=False adds the mean back."""
    inside, x = per_token("whiten", mask, "x", x=x)
    inner, out = x[inside].astype(np.float64), np.zeros_like(x)
    if inner.size:
        offset = inner - inner[0]  # subtle: a constant input gives exact zeros
        white = (offset - offset.mean()) / (offset.std() + 1e-8)
        out[inside] = white if shift_mean else white + offset.mean() + inner[0]
    return out

def kl_estimates(logp, logp_ref, kind):
    """Estimates of KL(pi || pi_ref), in nats, from samples of pi; equal shapes -> the same shape.
    With d = logp - logp_ref: k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d, abs = |d| (Schulman 2020).
    abs is no estimate; k3 bounds -d by 20. As a loss (a Tensor) E grad k1 = 0, E grad k2 is KL's.
    >>> kl_estimates([-1.0, -0.5], [-0.5, -1.0], "k3").round(4)
    array([0.1487, 0.1065])"""
    need_shape(np.shape(logp) == np.shape(logp_ref), "kl_estimates", "one shape",
               logp=logp, logp_ref=logp_ref)
    t = as_tensor(logp, "kl_estimates: logp")
    d = t.data - as_float(logp_ref, "kl_estimates: logp_ref").astype(t.dtype)
    if not np.isfinite(d).all():
        raise ValueError("kl_estimates: logp or logp_ref holds nan or inf")
    x = np.minimum(-d, 20)
    kinds = {"k1": lambda: (d, np.ones_like(d)), "k2": lambda: (d * d / 2, d),  # value, slope
             "k3": lambda: (np.maximum(np.expm1(x) - x, 0), -np.expm1(x)),
             "abs": lambda: (np.abs(d), np.sign(d))}
    if kind not in kinds:
        raise ValueError(f"kl_estimates: kind must be one of {', '.join(kinds)}, got {kind!r}")
    value, slope = kinds[kind]()
    return node((t,), value, lambda g: (g * slope,)) if isinstance(logp, Tensor) else value

# ======================================================== 6. rewards and advantages
def shaped_rewards(scores, logp_policy, logp_ref, response_mask, beta):
    """R_t = -beta (log pi - log pi_ref) + 1[t is the last response token] score -> (B, T-1).
    scores (B,), the others (B, T-1); 0 outside the response. The KL of a sequence is the expected
    sum of its tokens' log-ratios; as a reward (a constant, not a loss) GAE can credit each token
    with the KL that follows. A row without response raises. Ziegler et al. 2019; the chapter, 2.1.
    >>> logp, logp_ref, mask = [[-1, -.5, -2, -.1]], [[-1.2, -.5, -1, -.1]], [[1, 1, 1, 1]]
    >>> shaped_rewards([1.5], logp, logp_ref, mask, 0.1).round(2) + 0
    array([[-0.02,  0.  ,  0.1 ,  1.5 ]])"""
    inside, logp, ref = per_token("shaped_rewards", response_mask, "logp_policy",
                                  logp_policy=logp_policy, logp_ref=logp_ref)
    as_number(beta, "shaped_rewards: beta", 0.0)
    scores, last = check_scores(scores, len(logp)), last_response_index(inside)
    rewards = np.zeros_like(logp)
    rewards[inside] = -logp.dtype.type(beta) * (logp[inside] - ref[inside])
    rewards[np.arange(len(last)), last] += scores.astype(logp.dtype)
    return rewards

@functools.partial(kernel, reorder=False)  # subtle: reordered, each step waits twice as long
def _gae(rewards, values, inside, gamma, lam, advantages, returns):
    for R, V, m, A, G in zip(rewards, values, inside, advantages, returns):  # the rows
        next_adv = next_value = rewards.dtype.type(0)
        for t in range(len(R) - 1, -1, -1):
            if m[t]:
                delta = R[t] + gamma * next_value - V[t]
                next_adv, next_value = delta + gamma * lam * next_adv, V[t]
                A[t], G[t] = next_adv, next_adv + next_value
            else:  # V and A behind the end are 0; a gap in the mask starts anew
                next_adv = next_value = A[t] = G[t] = rewards.dtype.type(0)

def gae(rewards, values, response_mask, gamma=1.0, lam=0.95):
    """Generalised advantage estimation over the response -> (advantages, returns), (B, T-1) each.
    delta_t = R_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  G_t = A_t + V_t.
    V behind the last response token is 0, whether the row ended or was cut off: no reward follows.
    Schulman et al. 2015, equation 16.
    >>> gae([[0.0, 0.0, 1.0]], [[0.2, 0.4, 0.5]], [[1, 1, 1]], lam=1.0)[0].round(2)  # 1 - V_t
    array([[0.8, 0.6, 0.5]])"""
    inside, values, rewards = per_token("gae", response_mask, "values",
                                        values=values, rewards=rewards)
    gamma, lam = as_number(gamma, "gae: gamma", 0.0, 1.0), as_number(lam, "gae: lam", 0.0, 1.0)
    advantages, returns = np.empty_like(values), np.empty_like(values)
    _gae(rewards, values, inside, *map(values.dtype.type, (gamma, lam)), advantages, returns)
    return advantages, returns

# ======================================================== 7. the two clipped losses
# Each kernel gives the loss and its gradient in one pass over the tokens.
MAX_LOG_RATIO = 20.0
@kernel
def _ppo_clip(logp_new, logp_old, advantages, inside, eps, grad):
    n, loss, clipped = max(inside.sum(), 1), 0.0, 0
    for i in range(inside.size):
        if inside[i]:
            r = math.exp(min(max(logp_new[i] - logp_old[i], -MAX_LOG_RATIO), MAX_LOG_RATIO))
            surrogate = r * advantages[i]
            bound = min(max(r, 1 - eps), 1 + eps) * advantages[i]
            loss -= min(surrogate, bound) / n
            clipped += abs(r - 1) > eps
            if abs(r - 1) <= eps or surrogate <= bound:  # else clipped, and flat in logp_new
                grad[i] = -surrogate / n  # d(r A) / d logp_new = r A
    return loss, clipped / n

def ppo_clip_loss(logp_new, logp_old, advantages, response_mask, clip_eps):
    """L = -mean_t min(r A, clip(r, 1 - eps, 1 + eps) A), r = exp(logp_new - logp_old).
    All (B, T-1) -> (scalar Tensor, clip_frac: share of tokens with |r - 1| > eps). E_old[r A] is
    importance sampling: at r = 1 its gradient is E[A grad log pi], the policy gradient. The clip, a
    cheap stand-in for a KL trust region, bounds the incentive, not r: the gradient by logp_new is 0
    once r has moved by eps the way A wants, else -r A / n; log r is bounded to +-20 before exp.
    Schulman et al. 2017, equation 7.
    >>> for r, A in (1.5, 3), (1.5, -3), (0.5, 3):
    ...     print(round(float(ppo_clip_loss([[math.log(r)]], [[0.0]], [[A]], [[1]], 0.2)[0]), 6))
    -3.6
    4.5
    -1.5"""
    new = as_tensor(logp_new, "logp_new")
    inside, x, old, adv = per_token("ppo_clip_loss", response_mask, "logp_new", logp_new=new,
                                    logp_old=logp_old, advantages=advantages)
    eps, grad = x.dtype.type(as_number(clip_eps, "ppo_clip_loss: clip_eps", 0.0)), np.zeros_like(x)
    loss, clip_frac = _ppo_clip(*map(np.ravel, (x, old, adv, inside)), eps, grad.reshape(-1))
    return node((new,), x.dtype.type(loss), lambda g: (g * grad,)), clip_frac

@kernel
def _value(values, old_values, returns, inside, eps, grad):
    n, loss = max(inside.sum(), 1), 0.0
    for i in range(inside.size):
        if inside[i]:
            error, move = values[i] - returns[i], values[i] - old_values[i]
            near = old_values[i] + min(max(move, -eps), eps) - returns[i]
            loss += max(error * error, near * near) / 2 / n
            if abs(move) <= eps or error * error >= near * near:  # else clipped, and flat in V
                grad[i] = error / n
    return loss

def value_loss(values, old_values, returns, response_mask, clip_eps=0.2):
    """mean_t 1/2 max((V - G)^2, (clip(V, V_old - eps, V_old + eps) - G)^2) -> scalar Tensor.
    All (B, T-1); eps is in units of the score. Only values carries a gradient. max, the pessimistic
    choice, takes away what a move beyond eps from V_old would gain. The chapter, 2.3."""
    new = as_tensor(values, "values")
    inside, v, old, target = per_token("value_loss", response_mask, "values", values=new,
                                       old_values=old_values, returns=returns)
    eps, grad = v.dtype.type(as_number(clip_eps, "value_loss: clip_eps", 0.0)), np.zeros_like(v)
    loss = _value(*map(np.ravel, (v, old, target, inside)), eps, grad.reshape(-1))
    return node((new,), v.dtype.type(loss), lambda g: (g * grad,))

# ======================================================== 8. the KL controller
class AdaptiveKLController:
    """Turns beta so that the KL, in nats per sequence, follows a target; Ziegler et al. 2019, 2.2.
    horizon counts updates. InstructGPT, to which it is often credited, kept beta fixed at .02."""
    def __init__(self, beta, target, horizon=10):
        self.beta = as_number(beta, "AdaptiveKLController: beta", 0.0, above=True)
        self.target = as_number(target, "AdaptiveKLController: target", 0.0, above=True)
        self.horizon = as_number(horizon, "AdaptiveKLController: horizon", 1)

    def update(self, kl):
        """beta <- beta (1 + clip(kl / target - 1, -.2, .2) / horizon); returns the new beta.
        >>> round(AdaptiveKLController(0.1, target=6.0, horizon=10).update(9.0), 4)
        0.102"""
        error = as_number(kl, "AdaptiveKLController: kl", -math.inf) / self.target - 1
        self.beta *= 1 + min(max(error, -0.2), 0.2) / self.horizon
        return self.beta

# ======================================================== 9. supervised and reward-model losses
def sft_loss(logits, labels):
    """Mean of -log pi(labels[:, t+1]) -> scalar Tensor; logits (B, T, V), labels (B, T).
    The shift is done here: labels are the tokens themselves, with -100 where nothing is asked."""
    asked = as_float(labels, "labels") != -100
    logp, _ = log_probs_and_entropy(logits, np.where(asked, labels, 0), name="labels")
    return -mean_over(logp, mask=asked[:, 1:])

def reward_model_loss(chosen, rejected):
    """Mean of -log sigmoid(chosen - rejected), scores (B,) twice -> scalar Tensor.
    Bradley and Terry 1952: the choice is a softmax over the two scores. Stiennon et al. 2020."""
    for name, x in (("chosen", chosen), ("rejected", rejected)):
        check_scores(x, np.size(chosen), name)
    margin = (as_tensor(chosen, "chosen") - rejected)[:, None] * [1, 0]  # (B, 2), against 0
    return -categorical(margin, ids=np.zeros(len(margin), np.int64))[0].mean()

# ======================================================== 10. PPO's settings and the rollout
@dataclass(frozen=True)
class PPOConfig:
    """Every knob of PPO with its unit; the defaults suit the toy."""
    steps: int = 30                    # rollouts, each scored and learnt from
    max_new_tokens: int = 8            # N, length of a response
    beta: float = 0.05                 # price of one nat of KL, in units of the score; 0 or more
    kl_target: float | None = None     # nats per sequence, for the controller; None: beta stays
    kl_horizon: float = 10             # the controller moves beta by at most 20 % / horizon a step
    lr: float = 1e-3                   # Adam's step size, for policy and critic
    clip_eps: float = 0.2              # past 1 +- this a ratio earns nothing more
    value_clip_eps: float = 0.2        # past V_old +- this V earns nothing more, in score units
    ppo_epochs: int = 2                # passes over one rollout
    minibatch_rows: int | None = None  # rows of one optimiser step; None: all
    vf_coef: float = 0.5               # c_v, on top of the 1/2 inside the value loss
    ent_coef: float = 0.0              # c_e, weight of the entropy, 0 or more
    gamma: float = 1.0                 # discount a token, 0 to 1
    lam: float = 0.95                  # GAE's lambda, 0 (trust the critic) to 1 (trust the sample)
    max_grad_norm: float = 1.0         # of policy and critic together, above 0
    target_kl: float | None = None     # KL(old || new) a token, by k3, that ends the epochs
    whiten_advantages: bool = True     # to mean 0, std 1 over the rollout: one lr for any score
    whiten_rewards: bool = False       # to std 1, the mean kept
    missing_eos_penalty: float = 0.0   # taken off the score of a row that did not end, 0 or more
    temperature: float = 1.0           # of sampling and of every log-prob, above 0
    ptx_coef: float = 0.0              # weight of the SFT loss mixed in (PPO-ptx), 0 or more

    def __post_init__(self):
        above = ("kl_target", "max_grad_norm", "target_kl", "temperature")
        for f in fields(self):
            value, name, whole = getattr(self, f.name), f"PPOConfig: {f.name}", "int" in str(f.type)
            if isinstance(f.default, bool):
                if not isinstance(value, bool):
                    raise ValueError(f"{name} must be True or False, got {value!r}")
            elif value is not None or f.default is not None:  # None only where it is the default
                high = 1.0 if f.name in ("gamma", "lam") else math.inf
                low = 1 if whole or f.name == "kl_horizon" else 0
                as_number(value, name, low, high, above=f.name in above, whole=whole)
        if self.kl_target is not None and self.beta == 0:
            raise ValueError("PPOConfig: kl_target needs beta > 0: the controller multiplies it")

@dataclass
class Rollout:
    """What the update needs of the four models: policy and critic, which keep gradients and Adam's
    m and v beside their weights, reference and reward model, which are weights only."""
    tokens: np.ndarray      # (B, T)
    mask: np.ndarray        # (B, T-1), the response_mask
    logp_old: np.ndarray    # (B, T-1), recorded while sampling, before the policy moves
    logp_ref: np.ndarray    # (B, T-1)
    values_old: np.ndarray  # (B, T-1), V of the state before each action
    ended: np.ndarray = None  # (B,) bool
    temperature: float = 1.0
    seconds: dict = field(default_factory=dict)  # spent on "rollout" (sampling) and "scoring"

def row_chunks(rows, length):
    """Rows of `length` tokens, or their indices, in parts of some CHUNK_TOKENS tokens."""
    return np.array_split(rows, min(len(rows), -(-len(rows) * length // CHUNK_TOKENS)))

def collect_rollouts(policy, ref, critic, prompts, max_new_tokens, eos_id, *, rng, temperature=1.0):
    """Sample from the policy, then read reference and critic once over the result -> Rollout.
    The whole softmax is sampled: after top_k, top_p or argmax, logp - logp_ref would no longer
    estimate the KL. The reference is scored at the same temperature."""
    as_number(temperature, "collect_rollouts: temperature", 0.0, above=True)
    if any(map(np.may_share_memory, policy.parameters(), ref.parameters())):
        raise ValueError("collect_rollouts: ref shares its memory with policy, so the KL stays 0; "
                         "pass a policy.frozen_copy() taken before training")
    began = time.perf_counter()
    s = sample(policy, prompts, max_new_tokens, eos_id, rng=rng, temperature=temperature)
    sampled = time.perf_counter()
    parts = row_chunks(s.tokens, s.tokens.shape[1])
    with no_grad():
        logp_ref, values = at_once(
            s.tokens.size * policy.cfg.d_model,
            lambda: np.concatenate([token_log_probs(ref(x), x, temperature).data for x in parts]),
            lambda: np.concatenate([np.asarray(critic(x))[:, :-1] for x in parts]))  # V before t
    return Rollout(s.tokens, s.token_mask[:, 1:], s.logp, logp_ref, values, s.ended, temperature,
                   {"rollout": sampled - began, "scoring": time.perf_counter() - sampled})

def sequence_kl(roll):
    """Mean over rows of sum_t (logp_old - logp_ref): what the controller reads, in nats."""
    kl = np.where(np.asarray(roll.mask, bool), roll.logp_old - roll.logp_ref, 0)
    return float(kl.sum(axis=1, dtype=np.float64).mean())

# ======================================================== 11. the PPO update
@dataclass
class PPOStats:
    """One PPO step in numbers: means over its tokens and over the optimiser steps really taken."""
    reward: float              # mean score of a response, as reward_fn gave it
    kl: float                  # to the reference, nats per sequence
    clip_frac: float           # share of tokens with |ratio - 1| > eps
    value_loss: float          # the clipped 1/2 squared error
    entropy: float             # nats per token
    beta: float                # of this step, before the controller turns it
    clip_frac_first: float     # of the first forward pass: 0 if the rollout is fresh
    ratio_max: float           # the largest ratio of any token
    approx_kl: float           # KL(old || new) by k3, nats per token
    explained_variance: float  # 1 - Var(G - V_old) / Var(G): what the critic knew
    response_length: float     # tokens
    eos_frac: float            # share of responses that ended by themselves
    grad_norm: float           # before clipping
    seconds: dict              # spent on "rollout" (sampling), "scoring", "update"

def advantages_and_returns(roll, scores, beta, cfg):
    """Scores, less a penalty for rows that did not end -> R_t -> GAE; (B, T-1) twice."""
    if roll.ended is not None:
        scores = scores - cfg.missing_eos_penalty * ~np.asarray(roll.ended, bool)
    rewards = shaped_rewards(scores, roll.logp_old, roll.logp_ref, roll.mask, beta)
    rewards = whiten(rewards, roll.mask, shift_mean=False) if cfg.whiten_rewards else rewards
    advantages, returns = gae(rewards, roll.values_old, roll.mask, cfg.gamma, cfg.lam)
    return whiten(advantages, roll.mask) if cfg.whiten_advantages else advantages, returns

def policy_loss(policy, roll, rows, advantages, cfg):
    """L_clip - c_e H on some rows -> (scalar Tensor, [clip_frac, entropy, k3, largest ratio])."""
    tokens, logp_old, mask = roll.tokens[rows], roll.logp_old[rows], roll.mask[rows].astype(bool)
    logp, entropies = log_probs_and_entropy(policy(tokens), tokens, roll.temperature)
    pg_loss, clip_frac = ppo_clip_loss(logp, logp_old, advantages[rows], mask, cfg.clip_eps)
    entropy = mean_over(entropies, mask=mask)
    top = math.exp(min((logp.data - logp_old)[mask].max(), MAX_LOG_RATIO))
    k3 = kl_estimates(logp_old[mask], logp.data[mask], "k3").mean()  # KL(old || new) a token
    return pg_loss - cfg.ent_coef * entropy, [clip_frac, float(entropy), k3, top]

def critic_loss(critic, roll, rows, returns, cfg):
    """c_v L_V on some rows -> (scalar Tensor, [L_V])."""
    v_loss = value_loss(critic(roll.tokens[rows])[:, :-1], roll.values_old[rows], returns[rows],
                        roll.mask[rows], cfg.value_clip_eps)
    return cfg.vf_coef * v_loss, [float(v_loss)]

def accumulate(policy, critic, roll, rows, advantages, returns, cfg, ptx_batch):
    """Add the gradients of L_clip + c_v L_V - c_e H (+ c_ptx L_SFT) on one minibatch -> its five
    diagnostics. A few rows at a time; a chunk's mean is weighted by its share of the tokens, so the
    split changes nothing. The loss is a sum: policy and critic learn from a term each."""
    length = np.asarray(roll.mask).sum(axis=1)
    T, apart = roll.tokens.shape[1], not {*policy.parameters()} & {*critic.parameters()}
    chunks = row_chunks(rows, T)
    shares = [float(length[chunk].sum() / length[rows].sum()) for chunk in chunks]
    def learn(loss_on, model, target):
        seen = []
        for chunk, share in zip(chunks, shares):
            loss, numbers = loss_on(model, roll, chunk, target, cfg)
            (loss * share).backward()
            seen.append(numbers)
        return np.array(seen)  # (chunks, diagnostics)
    of_policy, of_critic = at_once(
        apart * len(rows) * T * policy.cfg.d_model,  # one after the other if they share a trunk
        lambda: learn(policy_loss, policy, advantages), lambda: learn(critic_loss, critic, returns))
    if cfg.ptx_coef:
        (cfg.ptx_coef * sft_loss(policy(ptx_batch[0]), labels=ptx_batch[1])).backward()
    return [*shares @ of_policy[:, :3], *shares @ of_critic, of_policy[:, 3].max()]

def minibatches(rows, size, epochs, rng):
    """Row indices of each optimiser step: every row once an epoch, shuffled if there is an rng."""
    for _ in range(epochs):
        order = np.arange(rows) if rng is None else rng.permutation(rows)
        yield from np.split(order, range(size, rows, size))

def ppo_update(policy, critic, opt, roll, scores, beta, cfg=PPOConfig(), *, rng=None,
               ptx_batch=None):
    """Some epochs of PPO on one rollout and its scores (B,) -> PPOStats; policy and critic move.
    Once the minibatch at hand has KL(old || new) > target_kl no further step is taken; the first
    always is. ptx_batch = (tokens, labels) is needed if ptx_coef > 0."""
    began, B = time.perf_counter(), len(roll.tokens)
    scores = check_scores(scores, B)
    if cfg.ptx_coef and ptx_batch is None:
        raise ValueError(f"ppo_update: ptx_coef={cfg.ptx_coef} needs ptx_batch=(tokens, labels)")
    advantages, returns = advantages_and_returns(roll, scores, beta, cfg)
    steps = []
    for rows in minibatches(B, cfg.minibatch_rows or B, cfg.ppo_epochs, rng):
        opt.zero_grad()
        seen = accumulate(policy, critic, roll, rows, advantages, returns, cfg, ptx_batch)
        if cfg.target_kl is not None and steps and seen[2] > cfg.target_kl:
            break
        steps.append([*seen, clip_grad_norm(opt.params, cfg.max_grad_norm)])
        opt.step()
    opt.zero_grad()
    clip_frac, entropy, approx_kl, v_loss, _, grad_norm = np.mean(steps, axis=0).tolist()
    inside = np.asarray(roll.mask, bool)
    target, guess = returns[inside].astype(np.float64), roll.values_old[inside]
    return PPOStats(
        reward=float(scores.mean(dtype=np.float64)), kl=sequence_kl(roll), clip_frac=clip_frac,
        value_loss=v_loss, entropy=entropy, beta=float(beta), clip_frac_first=float(steps[0][0]),
        ratio_max=float(np.max(steps, axis=0)[4]), approx_kl=approx_kl,
        explained_variance=float(1 - np.var(target - guess) / (np.var(target) + 1e-12)),
        response_length=float(inside.sum() / B), grad_norm=grad_norm,
        eos_frac=math.nan if roll.ended is None else float(np.mean(roll.ended)),
        seconds=roll.seconds | {"update": time.perf_counter() - began})

# ======================================================== 12. the training loop and its checkpoint
def progress(steps):
    """A ready-made on_step: some ten lines of fixed width, with the seconds that are left."""
    began, seen = time.perf_counter(), itertools.count(1)
    def on_step(step, s):
        left = (time.perf_counter() - began) / next(seen) * (steps - step - 1)  # also once resumed
        if step + 1 == steps or (step + 1) % max(1, steps // 10) == 0:
            print(f"step {step + 1:4d}/{steps}  score {s.reward:7.3f}  KL {s.kl:6.2f} nats/seq  "
                  f"beta {s.beta:.4f}  clipped {s.clip_frac:5.1%}  {left:4.0f} s left", flush=True)
    return on_step

def save_checkpoint(path, arrays, meta):
    """Write aside, rename: at every moment the file at `path` is a whole one, old or new."""
    with open(f"{path}.part", "wb") as f:
        np.savez(f, meta=json.dumps(meta, default=lambda x: x.tolist()), **arrays)
    Path(f"{path}.part").replace(path)

def load_checkpoint(path, arrays, settings, rng):
    """Read a checkpoint into arrays and rng, all or nothing -> history, beta, Adam's t."""
    try:
        with np.load(path, allow_pickle=False) as f:
            read = {name: f[name] for name in ("meta", *arrays)}
        if any(read[name].shape != a.shape for name, a in arrays.items()):
            raise ValueError("its arrays have other shapes than those of these models")
        meta = json.loads(str(read["meta"]))
        history = [PPOStats(**stats) for stats in meta["history"]]
        theirs, beta, t, state = (meta[key] for key in ("settings", "beta", "t", "rng"))
    except Exception as error:  # whatever zip, NumPy or JSON make of a foreign or cut-off file
        raise ValueError(f"{path} is not a whole checkpoint of tinyrlhf: {error}") from None
    for name in settings:
        if settings[name] != theirs.get(name):
            raise ValueError(f"{path}: {name} was {theirs.get(name)}, now it is {settings[name]}")
    rng.bit_generator.state = state  # raises if it is of another kind
    for name, a in arrays.items():
        a[...] = read[name]
    return history, beta, t

def train_ppo(policy, ref, critic, prompts, reward_fn, eos_id, cfg=PPOConfig(), *, rng,
              ptx_batch=None, on_step=None, checkpoint=None):
    """cfg.steps times: rollout, score, update, turn beta -> list of PPOStats.
    reward_fn(tokens (B, T), token_mask (B, T)) -> (B,) finite numbers. on_step(step, stats) is
    called after each step. checkpoint=PATH saves after each step; if the file exists, training goes
    on from it bit for bit, under the same settings (but for `steps`) and reward_fn."""
    opt, history, beta = Adam(policy.parameters() + critic.parameters(), cfg.lr), [], cfg.beta
    if checkpoint is not None:
        arrays = {f"policy/{n}": p.data for n, p in policy.params.items()}
        arrays |= {f"critic/{n}": p.data for n, p in critic.params.items()}
        arrays |= {f"adam_{key}/{i}": a for key in "mv" for i, a in enumerate(getattr(opt, key))}
        digest = hashlib.sha256(b"".join(p.data.tobytes() for p in ref.parameters())).hexdigest()
        settings = asdict(cfg) | {
            "steps": None, "models": [asdict(policy.cfg), asdict(critic.cfg)], "reference": digest,
            "eos_id": int(eos_id), "prompts": [np.asarray(p).tolist() for p in prompts]}
        if Path(checkpoint).exists():
            history, beta, opt.t = load_checkpoint(checkpoint, arrays, settings, rng)
    for step in range(len(history), cfg.steps):
        roll = collect_rollouts(policy, ref, critic, prompts, cfg.max_new_tokens, eos_id, rng=rng,
                                temperature=cfg.temperature)
        began = time.perf_counter()
        token_mask = np.pad(roll.mask, ((0, 0), (1, 0)))  # the shift undone: (B, T-1) -> (B, T)
        scores = reward_fn(roll.tokens.copy(), token_mask)
        scores = check_scores(scores, len(roll.tokens), "the reward of reward_fn")
        roll.seconds["scoring"] += time.perf_counter() - began
        history.append(ppo_update(policy, critic, opt, roll, scores, beta, cfg, rng=rng,
                                  ptx_batch=ptx_batch))
        if cfg.kl_target is not None:
            beta = AdaptiveKLController(beta, cfg.kl_target, cfg.kl_horizon).update(history[-1].kl)
        if checkpoint is not None:
            save_checkpoint(checkpoint, arrays, {
                "settings": settings, "history": [asdict(s) for s in history], "beta": beta,
                "t": opt.t, "rng": rng.bit_generator.state})
        if on_step is not None:
            on_step(step, history[-1])
    return history

# ======================================================== 13. the exact answer, by enumeration
# On a tiny vocabulary every response can be listed, so J, the KL and the best policy are sums. On
# a large one rejection sampling, the best of K, moves at most log K - (K-1)/K nats towards it.

ExactObjective = namedtuple("ExactObjective", "reward kl J J_ref J_star fraction entropy "
                                              "tokens mask logp logp_ref logp_star")

def enumerate_responses(vocab_size, max_new_tokens, eos_id):
    """Every response once -> tokens (R, N), mask (R, N); behind the end token stands eos_id."""
    V = as_number(vocab_size, "enumerate_responses: vocab_size", 1, 10**6, whole=True)
    N = as_number(max_new_tokens, "enumerate_responses: max_new_tokens", 1, 200, whole=True)
    count = (V - 1) ** N + sum((V - 1) ** n for n in range(N))  # ends never, or after n others
    if count > 200_000:
        raise ValueError(f"enumerate_responses: vocab_size={V}, max_new_tokens={N} give {count:,} "
                         "responses; at most 200,000 can be listed")
    as_ids(eos_id, V, "enumerate_responses: eos_id")
    rows = [()]
    for _ in range(N):  # one token longer; behind the end token there is one way to go on
        rows = [(*row, a) for row in rows for a in ([eos_id] if eos_id in row else range(V))]
    tokens = np.array(sorted(rows, key=lambda row: -row.count(eos_id)))  # the shortest first
    ends = tokens == eos_id
    return tokens, (np.cumsum(ends, axis=1) - ends == 0).astype(float)  # nothing ended before it

def response_log_probs(model, prompt, tokens, mask):
    """log pi(response | prompt) of listed responses -> Tensor (R,); their gradient is exact."""
    rows = np.concatenate([np.tile(prompt, (len(tokens), 1)), tokens], axis=1)  # (R, P + N)
    logp = token_log_probs(model(rows), rows)[:, len(prompt) - 1:]
    return (maximum(logp, -1e30) * mask).sum(axis=1)  # subtle: 0 times -inf would be nan

def exact_objective(policy, ref, prompt, reward_fn, max_new_tokens, eos_id, beta):
    """What PPO at gamma 1 maximises, and the best there is -> ExactObjective, summed in float64.
    prompt (P,) ids; reward_fn(tokens (R, P + N), token_mask) -> (R,). reward, kl, entropy (nats) of
    whole responses under the policy; J = reward - beta kl = beta log Z - beta KL(pi || pi*); J_ref
    of the reference; J_star = beta log Z of pi* = pi_ref exp(r / beta) / Z; fraction (J - J_ref) /
    (J_star - J_ref); all responses (R, N), their three log-probs (R,). Korbak et al. 2022."""
    as_number(beta, "exact_objective: beta", 0.0, above=True)
    tokens, mask = enumerate_responses(policy.cfg.vocab_size, max_new_tokens, eos_id)
    with no_grad():
        logp, logp_ref = (np.asarray(response_log_probs(m, prompt, tokens, mask), np.float64)
                          for m in (policy, ref))
    whole = np.concatenate([np.tile(prompt, (len(tokens), 1)), tokens], axis=1)
    r = reward_fn(whole, np.pad(mask, ((0, 0), (len(prompt), 0))))
    r = check_scores(r, len(tokens), "the reward of reward_fn").astype(np.float64)
    tilted = logp_ref + r / beta
    log_z = tilted.max() + math.log(np.exp(tilted - tilted.max()).sum())
    p = np.exp(logp)
    reward, kl, J_ref, J_star = p @ r, p @ (logp - logp_ref), np.exp(logp_ref) @ r, beta * log_z
    J = reward - beta * kl
    fraction = (J - J_ref) / (J_star - J_ref) if J_star - J_ref > 1e-12 else 1.0
    return ExactObjective(*map(float, (reward, kl, J, J_ref, J_star, fraction, -(p @ logp))),
                          tokens, mask, logp, logp_ref, tilted - log_z)

# ======================================================== 14. the demo and the command line
# Film reviews from a small grammar, and a judge who prefers one review to another, with some noise.

WORDS = ("<end> the film plot cast music was felt very and but i loved liked hated great moving "
         "funny fine slow dull awful").split()
VALUE = {"great": 2.0, "moving": 1.5, "funny": 1.0, "fine": 0.3, "slow": -0.7, "dull": -1.0,
         "awful": -2.0, "loved": 1.5, "liked": 0.5, "hated": -1.5}  # the judge's taste, hidden
PROMPTS = [[WORDS.index(w) for w in p.split()] for p in
           ("the film", "the plot was", "i", "the cast felt very")]

def review(rng):
    """One sentence of the grammar as ids: a clause, half of the time two, and the end."""
    say = lambda words: str(rng.choice(words.split()))
    subject = lambda: "the " + say("film plot cast music")
    verdict = lambda: (f"{subject()} {say('was felt')} {'very ' * (rng.random() < 0.3)}"
                       + say("great moving funny fine slow dull awful"))
    opinion = lambda: f"i {say('loved liked hated')} {subject()}"
    clause = lambda: verdict() if rng.random() < 0.7 else opinion()
    text = clause() + (f" {say('and but')} {clause()}" if rng.random() < 0.5 else "") + " <end>"
    return [WORDS.index(word) for word in text.split()]

def gold_score(tokens, token_mask):
    """What the judge feels: the words' values, half as much again after `very`, less .1 a word."""
    worth = np.array([VALUE.get(word, 0.0) for word in WORDS])[tokens]
    strong = np.roll(tokens == WORDS.index("very"), 1, axis=1)
    return ((worth * (1 + 0.5 * strong) - 0.1) * token_mask).sum(axis=1)

def fit(model, lr, steps, loss_of):
    """Adam on loss_of(), steps times; returns the last loss."""
    opt = Adam(model.parameters(), lr)
    for _ in range(steps):
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        opt.step()
    return float(loss)

def train_sft(policy, rng):
    """Imitate reviews of the grammar, 64 a step -> the last loss, in nats a token."""
    def loss_of():
        rows = [review(rng) for _ in range(64)]
        labels = np.array([row + [-100] * (policy.cfg.max_len - len(row)) for row in rows])
        return sft_loss(policy(np.maximum(labels, 0)), labels)
    return fit(policy, 3e-3, 250, loss_of)

def train_reward_model(policy, rng):
    """Learn from a judge's noisy choices -> (model, held-out accuracy, the best possible one)."""
    a, b = (sample(policy, PROMPTS * 500, 10, 0, rng=rng) for _ in "ab")
    margin = gold_score(a.tokens, a.token_mask) - gold_score(b.tokens, b.token_mask)
    p_first = 1 / (1 + np.exp(-margin))  # Bradley-Terry: the closer the call, the more errors
    sign = np.where(rng.random(2000) < p_first, 1, -1)  # 1 if the judge chose a, else -1
    model = TinyCritic.from_backbone(policy)
    score = lambda s, rows: score_sequences(model, s.tokens[rows], s.token_mask[rows])
    chosen_less_rejected = lambda rows: (score(a, rows) - score(b, rows)) * sign[rows]
    fit(model, 2e-3, 250, lambda: reward_model_loss(
        chosen_less_rejected(rng.choice(1500, 64)), np.zeros(64)))
    agrees = chosen_less_rejected(slice(1500, None)).data > 0
    return model.frozen_copy(), agrees.mean(), np.maximum(p_first, 1 - p_first)[1500:].mean()

def show_samples(title, policy, ref, reward, beta):
    """Means over 256 samples, and one sample a prompt: score - beta kl = total, beside the gold.
    Were score to rise and gold not, the policy would be exploiting the reward model."""
    s = sample(policy, PROMPTS * 64, 10, 0, rng=np.random.default_rng(1))
    logp_ref = token_log_probs(ref(s.tokens), s.tokens).data  # frozen: nothing is recorded
    score, gold = reward(s.tokens, s.token_mask), gold_score(s.tokens, s.token_mask)
    cost = beta * ((s.logp - logp_ref) * s.token_mask[:, 1:]).sum(axis=1)
    print(f"\n{title}: mean score {score.mean():.2f}, gold {gold.mean():.2f}, "
          f"KL {cost.mean() / beta:.2f} nats\n  score  -beta*KL   total    gold   sample")
    for i, prompt in enumerate(PROMPTS):
        words = " ".join(WORDS[t] for t in s.tokens[i, :len(prompt) + int(s.token_mask[i].sum())])
        print(f"{score[i]:7.2f} {-cost[i]:10.2f} {score[i] - cost[i]:7.2f} {gold[i]:7.2f}  ", words)

def demo(seed=0, beta=0.3):
    """SFT, reward model, PPO, and what PPO changed."""
    rng = np.random.default_rng(seed)
    print("compiling the kernels: once, some 6 s, then cached", flush=True)
    policy = TinyCausalLM(ToyLMConfig(len(WORDS), max_len=16), rng)
    print(f"1 SFT: loss {train_sft(policy, rng):.2f} nats a token", flush=True)
    model, accuracy, best = train_reward_model(policy, rng)
    print(f"2 reward model: held-out accuracy {accuracy:.1%}; the judge's noise allows {best:.1%}")
    ref, critic = policy.frozen_copy(), TinyCritic.from_backbone(model)
    reward = lambda tokens, token_mask: score_sequences(model, tokens, token_mask).data
    cfg = PPOConfig(steps=150, max_new_tokens=10, beta=beta, kl_target=2.5, kl_horizon=8, lr=2e-3)
    print(f"3 PPO: {cfg.steps} steps of 64 responses, KL target {cfg.kl_target} nats per sequence")
    history = train_ppo(policy, ref, critic, PROMPTS * 16, reward, 0, cfg, rng=rng,
                        on_step=progress(cfg.steps))
    show_samples("before", ref, ref, reward, history[-1].beta)
    show_samples("after", policy, ref, reward, history[-1].beta)
    print(f"\nbeta {history[0].beta:.3f} -> {history[-1].beta:.3f}, KL "
          f"{np.mean([s.kl for s in history[-10:]]):.2f} nats per sequence over the last 10 steps")

def main():
    """The command line: the demo; or `estimate`, with options of its own, for the estimator."""
    if sys.argv[1:2] == ["estimate"]:
        estimator = Path(__file__).parent / "examples" / "estimator.py"
        if not estimator.exists():
            sys.exit(f"estimate runs {estimator}, which the repository has and this folder has not")
        sys.argv, sys.path[0] = sys.argv[1:], str(estimator.parent)
        runpy.run_path(estimator, run_name="__main__")
    else:
        argparse.ArgumentParser(description=main.__doc__).parse_args()
        demo()

if __name__ == "__main__":
    main()
