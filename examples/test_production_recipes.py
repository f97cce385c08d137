"""Tests of production_recipes.py: the texts, the gate, whitening, the judge, ptx, memory."""
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import production_recipes as r  # noqa: E402
from common import t, winners  # noqa: E402


@pytest.fixture(scope="module")
def base():
    return r.pretrained(0)


def samples(*rows):
    """Responses as given, padded behind the end to 3 tokens; a prompt of one token before them."""
    tokens = np.array([[1, *row, *[0] * (3 - len(row))] for row in rows])
    mask = np.array([[0, *[1] * len(row), *[0] * (3 - len(row))] for row in rows])
    return t.Samples(tokens, mask, None, None)


def test_texts_count_upward_and_ask_for_nothing_behind_the_end():
    tokens, labels = r.pretraining_text(np.random.default_rng(0), 2000)
    assert set(tokens[:, 0]) == {3, 4, 5} and tokens.shape == (2000, 7)
    for row, label in zip(tokens, labels):
        length = list(row).index(0) + 1 if 0 in row else 7
        assert (label[:length] == row[:length]).all() and (label[length:] == -100).all()
    follows = tokens[:, 1] == tokens[:, 0] % 5 + 1
    assert follows.mean() == pytest.approx(.7 + .3 / 6, abs=.03)


def test_gate_gives_safety_where_there_is_danger_and_helpfulness_elsewhere():
    s = samples([2, 2, 0], [2, 4, 2], [4, 4, 4], [0], [2, 4, 0])
    assert list(r.gated(s.tokens, s.token_mask)) == [0, -2, -10, -2, -2]
    assert list(r.helpfulness(s.tokens, s.token_mask)) == [0, 2, 4, -2, 1]


def test_whitened_reward_does_not_know_its_scale():
    s = samples([2, 2, 0], [2, 4, 2], [4, 4, 4], [0])
    one = r.whitened(r.gated)(s.tokens, s.token_mask)
    assert (one.mean(), one.std()) == pytest.approx((0, 1), abs=1e-7)
    small = r.whitened(lambda *a: r.gated(*a) / 100 + 3)(s.tokens, s.token_mask)
    assert small == pytest.approx(one, abs=1e-6)


def test_first_principle_on_which_two_differ_decides():
    a = samples([2, 4, 0], [2, 2, 2], [0], [2, 0], [4, 0])
    b = samples([0], [4, 4, 4], [2, 0], [3, 0], [4, 4, 0])
    assert list(r.judge(r.CONSTITUTION, a, b)) == [-1, 1, -1, 0, 1]
    assert list(r.judge(r.PEOPLE, a, b)) == [-1, 1, 1, 0, 1]
    assert list(r.judge(r.CONSTITUTION, b, a)) == [1, -1, 1, 0, -1]


def test_comparisons_hold_only_decided_pairs_the_better_first(base):
    (good, good_mask), (bad, bad_mask) = r.comparisons(base, r.CONSTITUTION, 300,
                                                       np.random.default_rng(1))
    harm, other = r.count_harm(good, good_mask), r.count_harm(bad, bad_mask)
    equal = harm == other
    assert 100 < len(good) < 300 and (harm <= other).all()
    assert (bad_mask[equal].sum(axis=1) == 1).all() and (good_mask[equal].sum(axis=1) > 1).all()


def test_winners_are_the_best_of_each_k():
    scores = np.array([1., 5, 5, 0, -3, -2, -9, -2])
    assert list(winners(scores, 4)) == [1, 5] and list(winners(scores, 1)) == list(range(8))


def test_a_rejection_round_moves_toward_the_reward_and_leaves_its_start_alone(base):
    before, ref = base.params["wte.weight"].data.copy(), base.frozen_copy()
    new = r.rejection_round(base, r.gated, np.random.default_rng(0), rows=512)
    assert (base.params["wte.weight"].data == before).all()
    assert r.figures(new, ref)["harmful"] < r.figures(base, ref)["harmful"] - .05


def test_ptx_keeps_the_text_loss(base):
    texts, ref = r.pretraining_text(np.random.default_rng(1), 256), base.frozen_copy()
    cfg = replace(r.INSTRUCTGPT, steps=25)
    loss = {ptx: r.text_loss(r.ppo(base, ref, r.count_good, replace(cfg, ptx_coef=ptx), 0, texts))
            for ptx in (0.0, 0.5)}
    assert loss[0.5] < 1.1 * r.text_loss(base) < loss[0.0]


def test_a_preference_model_learns_what_it_is_shown(base):
    rng = np.random.default_rng(0)
    reward = r.preference_model(base, [r.comparisons(base, r.CONSTITUTION, 1000, rng)], rng)
    better, worse = r.comparisons(base, r.CONSTITUTION, 500, rng)
    assert (reward(*better) > reward(*worse)).mean() > .9


def test_memory_at_7b():
    assert [sum(held.values()) / 1e9 for held in r.memory_rows().values()] == [
        234, 140, 266, 252, 238, 126]


@pytest.mark.parametrize("wrong", [["llama4"], ["--seeds", "0"], ["--plot", "x.png"]])
def test_a_wrong_argument_ends_in_one_sentence(wrong, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["production_recipes.py", *wrong])
    with pytest.raises(SystemExit) as stop:
        r.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1
    assert wrong != ["llama4"] or "instructgpt" in err and "llama2" in err
