"""Tests of break_it.py: each bug is seen by the diagnostic that is named, and leaves no trace."""
import contextlib
import io
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import break_it as b  # noqa: E402
import tinyrlhf as t  # noqa: E402

VISIBLE = [name for name in b.BUGS if b.BUGS[name].seen_by]
QUICK = ["ratio", "padding", "split", "twice", "tie", "exact"]


@pytest.fixture(scope="module")
def state():
    """The checkpoint of seed 0, and the healthy figures."""
    s = b.checkpoint(0)
    return s, b.measure(s, None, {b.BUGS[name].seen_by for name in VISIBLE}.union(QUICK))


def command(*args):
    """The command: (exit status, stdout, stderr)."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with (contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
          mock.patch.object(sys, "argv", ["break_it.py", *args])):
        try:
            b.main()
        except SystemExit as stop:
            status = stop.code
    return status, out.getvalue(), err.getvalue()


def test_healthy_figures_are_what_theory_says(state):
    base = state[1]
    assert base["ratio"] == 0
    assert base["twice"] == pytest.approx(1, rel=1e-12)
    assert max(base[key] for key in ("padding", "split", "tie")) < 1e-12
    assert base["KL"] == pytest.approx(1, abs=.05) and base["stale"] == pytest.approx(1, abs=.05)
    assert base["score fn"] < .1 and base["exact"] < .1


@pytest.mark.parametrize("name", VISIBLE)
def test_the_named_diagnostic_sees_the_bug(state, name):
    s, base = state
    key = b.BUGS[name].seen_by
    assert b.sees(key, base[key], b.measure(s, name, [key])[key])


@pytest.mark.parametrize("name", [name for name in b.BUGS if name not in VISIBLE])
def test_the_quick_diagnostics_do_not_see_the_others(state, name):
    s, base = state
    figures = b.measure(s, name, QUICK)
    assert b.seen({key: base[key] for key in QUICK}, figures) == []


@pytest.mark.parametrize("name, key, value", [
    ("recomputed_logp", "stale", 0), ("reference_is_policy", "KL", 0),
    ("zero_grad_missing", "twice", 2)])
def test_figures_known_beforehand(state, name, key, value):
    assert b.measure(state[0], name, [key])[key] == pytest.approx(value, abs=1e-12)


def test_kl_per_token_is_smaller_by_the_length_of_a_response(state):
    s, base = state
    told, mask = b.measure(s, "kl_per_token", ["KL"])["KL"], b.rollout(s, b.MANY)[0].mask
    assert told == pytest.approx(base["KL"] * len(mask) / mask.sum(), rel=1e-12)


def test_the_early_stop_quantity_has_the_wrong_sign(state):
    assert b.measure(state[0], "early_stop_sign", ["stale"])["stale"] < -.5


@pytest.mark.parametrize("name", b.BUGS)
def test_afterwards_the_engine_is_healthy_bit_for_bit(state, name):
    s = state[0]
    gradient = lambda: b.update(s, *b.rollout(s, 16), b.PLAIN)[0]
    before, names = gradient(), vars(t).copy()
    zero_grad = t.Adam.zero_grad
    with pytest.raises(ZeroDivisionError), b.broken(name):
        assert vars(t) != names or t.Adam.zero_grad is not zero_grad
        raise ZeroDivisionError
    assert vars(t) == names and t.Adam.zero_grad is zero_grad
    assert np.array_equal(gradient(), before)


@pytest.mark.parametrize("name, healthy, wrong", [
    ("value_clip_min", 38.72, 12.5), ("value_half_missing", 38.72, 77.44),
    ("sample_deviation", 1.5 / 1.25 ** .5, 1.5 / (5 / 3) ** .5)])
def test_a_value_by_hand_sees_what_no_diagnostic_does(name, healthy, wrong):
    value = b.BY_HAND[name]
    with b.broken(name):
        assert value() == pytest.approx(wrong, rel=1e-6)
    assert value() == pytest.approx(healthy, rel=1e-6)


def test_even_points_are_even():
    u = b.Even().random((1000, 2))
    assert ((u > 0) & (u < 1)).all()
    counts = np.histogram2d(*u.T, bins=5, range=[[0, 1], [0, 1]])[0]  # 40 a cell; random: +-6
    assert np.abs(counts - 40).max() <= 4


def test_one_bug_is_explained_with_its_figures_and_cure(state):
    few = {key: b.DIAGNOSTICS[key] for key in ("KL", "twice")}
    with (mock.patch.dict(b.DIAGNOSTICS, few, clear=True),
          mock.patch.object(b, "checkpoint", lambda seed: state[0])):
        status, out, _ = command("zero_grad_missing")
    assert status == 0 and b.BUGS["zero_grad_missing"].cure in out
    row = next(line for line in out.splitlines() if line.startswith("  twice"))
    assert row.split()[1:4] == ["1.000", "2.000", "seen"]


def test_museum_is_large_and_unknown_names_end_in_one_sentence():
    assert len(b.BUGS) >= 16 and sum(not found.seen_by for found in b.BUGS.values()) >= 2
    status, _, err = command("no_such_bug")
    assert status == 2 and err.count("\n") == 1 and "recomputed_logp" in err
    status, _, err = command("--seeds", "none")
    assert status == 2 and err.count("\n") == 1
