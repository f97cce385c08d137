"""Tests of over_optimisation.py: the judge, best-of-n, the two forms, the reward models."""
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import over_optimisation as o  # noqa: E402
import tinyrlhf as t  # noqa: E402


def gold_of(prompt, response):
    """The judge's feeling about one response, in words."""
    ids = [[t.WORDS.index(word) for word in text.split()] for text in (prompt, response)]
    tokens, mask = np.zeros((1, 10), int), np.zeros((1, 10))
    tokens[0, :len(ids[0] + ids[1])] = ids[0] + ids[1]
    mask[0, len(ids[0]):len(ids[0] + ids[1])] = 1
    return o.gold(tokens, mask)[0]


@pytest.mark.parametrize("response, expected", [
    ("was great <end>", 0.5 + 2.5),
    ("was great and i loved the film <end>", 0.5 + 2.5 + 0.5 + 0.5 + 2.0 + 0.5 + 0.5),
    ("was very very great <end>", 0.5 + 0.5 + 2.5 - 1 - 1),  # very again, and very very is unsaid
    ("was <end>", 0.5 - 1)])                                   # nobody ends there
def test_gold_by_hand(response, expected):
    assert gold_of("the film", response) == pytest.approx(expected)


def test_best_of_n_on_two_scores_and_on_many():
    proxy, true = np.repeat([0.0, 1.0], 50), np.repeat([5.0, 3.0], 50)
    kl, mean, gold = o.best_of_n((proxy, true), 2)  # the better of two is the 1 in 3 of 4 cases
    assert mean == pytest.approx(0.75) and gold == pytest.approx(0.25 * 5 + 0.75 * 3)
    assert kl == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    scores = np.random.default_rng(0).normal(size=20_000)
    assert o.best_of_n((scores, scores), 1)[0] == pytest.approx(0, abs=1e-12)
    for n in (4, 16):
        assert o.best_of_n((scores, scores), n)[0] == pytest.approx(math.log(n) - (n - 1) / n,
                                                                    abs=1e-3)


@pytest.mark.parametrize("form, formula", [
    ("best-of-n", lambda d: d * (1.7 - 0.4 * d)), ("PPO", lambda d: d * (1.7 - 0.4 * np.log(d)))])
def test_a_form_is_recovered_and_peaks_where_it_says(form, formula):
    d = np.linspace(0, 6, 25)
    alpha, beta, r2 = o.fit_form(d[1:], formula(d[1:]), form)
    assert (alpha, beta, r2) == pytest.approx((1.7, 0.4, 1.0))
    top = o.peak(alpha, beta, form)
    assert formula(top) > max(formula(top * 0.99), formula(top * 1.01))
    assert o.peak(1.0, -0.1, form) == math.inf


def test_choices_follow_bradley_terry_and_scores_are_standardised():
    rng = np.random.default_rng(0)
    ref = t.TinyCausalLM(t.ToyLMConfig(o.VOCAB, 16, d_model=8, n_layers=1, dtype="float64"), rng)
    prefs = o.collect(ref, 2000, rng)
    margin = o.gold(*prefs[:2]) - o.gold(*prefs[2:])
    p = 1 / (1 + np.exp(-np.abs(margin)))
    agree = np.where(margin == 0, 0.5, margin > 0)  # four standard errors of 2000 choices
    assert abs(agree.mean() - p.mean()) < 4 * math.sqrt((p * (1 - p)).mean() / 2000)
    rm = o.train_reward_model(ref, o.Preferences(*(x[:50] for x in prefs)), rng)
    s = o.draw_samples(ref, 1024, np.random.default_rng(7))
    scores = o.score(rm, s.tokens, s.token_mask)
    assert (scores.mean(), scores.std()) == pytest.approx((0, 1))
    assert (o.score(rm, *prefs[:2])[:50] > o.score(rm, *prefs[2:])[:50]).mean() > 0.7  # learnt


def test_a_wrong_argument_is_one_sentence():
    run = subprocess.run([sys.executable, o.__file__, "--seeds", "0"], capture_output=True,
                         text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and not run.stdout
