"""Tests of when_to_use_what.py: best of K as a policy, its bound, the tokens spent, the methods."""
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import when_to_use_what as w  # noqa: E402

P = np.array([.1, .2, .3, .25, .15])


def brute_force(p, r, k):
    """Best of k by every draw of k responses; among equals each is as likely as it was drawn."""
    out = np.zeros(len(p))
    for draw in itertools.product(range(len(p)), repeat=k):
        best = [y for y in draw if r[y] == max(r[y] for y in draw)]
        for y in best:
            out[y] += p[list(draw)].prod() / len(best)
    return out


@pytest.mark.parametrize("r", [[3, 1, 2, 5, 4], [1, 0, 1, 2, 0], [7, 7, 7, 7, 7]])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_best_of_k_is_what_every_draw_gives(r, k):
    assert np.allclose(w.best_of_k_policy(P, np.array(r), k), brute_force(P, np.array(r), k),
                       rtol=0, atol=1e-14)


def test_bound_holds_and_is_reached_by_many_unlikely_responses():
    p, r = np.full(20_000, 1 / 20_000), np.arange(20_000)
    for k in (2, 4, 64):
        assert w.kl_of(w.best_of_k_policy(p, r, k), p) == pytest.approx(w.kl_bound(k), rel=5e-3)
        ties = w.kl_of(w.best_of_k_policy(P, np.array([1, 0, 1, 2, 0]), k), P)
        assert ties < w.kl_bound(k) < np.log(k)
    assert w.kl_bound(4) == pytest.approx(.6363, abs=5e-5)


def fresh(tokens):
    """A run of the study's size but for the tokens."""
    rng = np.random.default_rng(3)
    cfg = w.t.ToyLMConfig(w.VOCAB, 7, d_model=16, n_layers=1, dtype="float64")
    policy = w.t.TinyCausalLM(cfg, rng)
    return w.Run(policy, policy.frozen_copy(), rng, tokens)


def test_batches_stop_once_the_tokens_are_spent_and_leave_nothing_in_the_padding():
    run, lengths = fresh(500), []
    for roll, scores in run.batches(16):
        lengths.append(roll.mask.sum())
        outside = roll.mask == 0
        assert not roll.logp_ref[outside].any() and not roll.logp_old[outside].any()
        assert not run.logp(roll).data[outside].any()
        assert (scores == [(row == 2)[2:].sum() for row in roll.tokens]).all()
    assert sum(lengths[:-1]) < 500 <= sum(lengths)


@pytest.mark.parametrize("name", w.METHODS)
def test_every_method_learns_and_leaves_the_reference_alone(name):
    run = fresh(2000)
    before = [p.data.copy() for p in run.ref.parameters()]
    w.METHODS[name].run(run)
    x = w.exact(run.policy, run.ref, w.BETA)
    assert x.J > x.J_ref + .1 and x.kl > 0
    assert x.reward <= w.best_score_at(x, x.kl) + 1e-9
    assert all((p.data == old).all() for p, old in zip(run.ref.parameters(), before))


def test_dpo_sees_which_is_better_and_not_by_how_much(monkeypatch):
    ends = []
    for gap in (100, 700, -700):  # so far apart that the judge never errs
        monkeypatch.setattr(w, "count_good", lambda tokens, mask: gap * (np.arange(len(mask)) % 2))
        run = fresh(1500)
        w.iterated_dpo(run)
        ends.append(run.policy.params["wte.weight"].data)
    assert (ends[0] == ends[1]).all() and (ends[0] != ends[2]).any()


def test_memory_at_7b():
    size = {name: sum(w.HELD[model] for model in method.holds) / 7e9
            for name, method in w.METHODS.items()}  # bytes a parameter
    assert (size["PPO"], size["REINFORCE"], size["iterated DPO"], size["best of 64, SFT"]) == (
        36, 20, 18, 18)


@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--beta", "1"], ["more"]])
def test_a_wrong_argument_ends_in_one_sentence(wrong, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["when_to_use_what.py", *wrong])
    with pytest.raises(SystemExit) as stop:
        w.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1
