"""Tests of failure_modes.py and knobs.py: what each injects, what it counts, what it refuses."""
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import failure_modes as f  # noqa: E402
import knobs  # noqa: E402
import tinyrlhf as t  # noqa: E402

SHORT = dict(steps=3)


def collect(world, collector, seed=0):
    """One rollout of 16 responses through a collector."""
    return collector(world.policy, world.ref, world.critic, [world.prompt] * 16, f.LENGTH, f.EOS,
                     rng=np.random.default_rng(seed))


def test_gold_and_score_by_hand():
    tokens = np.array([[1, 2, 2, 2, 2, 2, 2], [1, 2, 2, 2, 1, 2, 0], [1, 2, 0, 0, 0, 0, 0]])
    mask = np.array([[0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0, 0]])
    assert f.good(tokens, mask).tolist() == [5, 3, 0]
    assert np.allclose(f.gold(tokens, mask), [3 - 6 - .5, 3 - .5, -.1], rtol=0, atol=1e-15)


def test_unmasked_covers_what_it_says_and_records_log_probs_there():
    world = f.make_world(0, spread=.3, prompt=f.LONG_PROMPT)
    right = collect(world, f.COLLECT)
    with t.no_grad():
        logp = t.token_log_probs(world.policy(right.tokens), right.tokens).data
    first = len(f.LONG_PROMPT) - 1
    assert right.mask[:, :first].sum() == 0 and right.mask[:, first:].min() == 0
    for prompt in (False, True):
        for after in (False, True):
            roll = collect(world, lambda *a, **k: f.unmasked(*a, prompt=prompt, after=after, **k))
            expected = right.mask.copy()
            expected[:, :first] = prompt
            expected[:, first:] = 1 if after else right.mask[:, first:]
            assert np.array_equal(roll.mask, expected)
            assert np.allclose(roll.logp_old, np.where(right.mask > 0, right.logp_old, logp))


@pytest.mark.parametrize("recorded", [True, False])
def test_stale_rollouts_are_lag_updates_old(recorded):
    world, lag, past = f.make_world(0), 2, []
    collector, rng = f.stale_collector(lag, recorded), np.random.default_rng(1)
    for step in range(5):
        past.append(world.policy.copy())
        roll = collect(world, collector, seed=step)
        with t.no_grad():
            logp = [t.token_log_probs(m(roll.tokens), roll.tokens).data * roll.mask for m in past]
        off = [np.abs(roll.logp_old - x).max() for x in logp]
        assert int(np.argmin(off)) == (max(step - lag, 0) if recorded else step)
        assert min(off) < 1e-12 and all(x > 1e-3 for x in sorted(off)[1:])
        for p in world.policy.parameters():
            p.data += rng.normal(0, .3, p.shape)


def test_pretraining_fits_the_critic_and_leaves_the_policy():
    world = f.make_world(1)
    before = [p.data.copy() for p in world.policy.parameters()]
    cfg = f.settings(whiten_advantages=False, lam=1.0)
    untrained = f.first_advantages(world, cfg, f.good)
    f.pretrain(world, 60)
    trained = f.first_advantages(world, cfg, f.good)
    assert all(np.array_equal(a, p.data) for a, p in zip(before, world.policy.parameters()))
    assert (trained**2).mean() < .7 * (untrained**2).mean()  # lambda 1: A is the critic's error


def test_whitening_hides_the_scale_of_the_score():
    def spread(scale, **changes):
        cfg = f.settings(beta=f.BETA * scale, **changes)
        return f.first_advantages(f.make_world(0), cfg, lambda *a: scale * f.good(*a)).std()
    assert spread(1e-3, whiten_advantages=False) == pytest.approx(
        1e-3 * spread(1, whiten_advantages=False), rel=1e-9)
    assert spread(1e-3) == pytest.approx(spread(1), rel=1e-4)


def test_train_is_watched_and_judged_at_the_price_meant():
    run = f.train(f.make_world(0), f.settings(**SHORT, beta=.1), beta=f.BETA, watch=1)
    same = f.train(f.make_world(0), f.settings(**SHORT, beta=.1), watch=1)
    assert len(run.path) == 3 and run.path[-1] == run.exact.fraction
    assert run.exact.kl == same.exact.kl and run.exact.J < same.exact.J
    assert run.exact.J == pytest.approx(run.exact.reward - f.BETA * run.exact.kl, rel=1e-12)


def test_count_compares_in_the_right_direction():
    up, down = f.Figure("up", 1, 1, .1), f.Figure("down", 1, -1, .1)
    x, rival = np.array([1, 2, 3.]), np.array([0, 1.95, 4])
    assert [f.count(up, x, rival, 1), f.count(up, x, rival, -1)] == [1, 1]
    assert [f.count(down, x, rival, 1), f.count(down, x, rival, -1)] == [1, 1]
    assert f.count(up, rival, x - 1, 1) == 2 and f.count(up, rival, x - 1, -1) == 0


def test_every_row_has_as_many_figures_as_heads():
    quick = {"over-optimised": 1, "value-loss": 15}
    for name in ("over-optimised", "kl-explodes", "flat-scale", "value-loss", "collapse"):
        mode = f.MODES[name]
        changes = list(mode.variants.values())[1] | dict(steps=quick.get(name, 12))
        assert len(mode.run(0, **changes)) == len(mode.figures), name


@pytest.mark.parametrize("module, names", [(f, f.MODES), (knobs, knobs.KNOBS)])
def test_a_wrong_name_is_one_sentence_and_status_2(module, names, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["study.py", "nonsense"])
    with pytest.raises(SystemExit) as stop:
        module.main()
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "nonsense" in error
    assert all(name in error for name in names)
