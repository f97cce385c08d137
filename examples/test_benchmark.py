"""Tests of benchmark.py, and of torch_step.py against tinyrlhf where torch is installed."""
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tinyrlhf as t

EXAMPLES = Path(t.__file__).resolve().parent / "examples"
sys.path.insert(0, str(EXAMPLES))
import benchmark as b  # noqa: E402

SMALL = b.Size(vocab=11, d=16, layers=2, heads=2, rows=6, prompt=3, new=5, steps=1)


def gae_case():
    """Rewards, values and a mask whose rows start late and end early."""
    rng = np.random.default_rng(0)
    mask = (np.arange(9) >= 2) & (np.arange(9) < rng.integers(3, 10, 7)[:, None])
    rewards, values = rng.normal(size=(2, 7, 9))
    return rewards * mask, values, mask.astype(float)


def command(*args):
    """The command in this process's interpreter -> (exit status, stdout, stderr)."""
    done = subprocess.run([sys.executable, *args], cwd=EXAMPLES, text=True, capture_output=True)
    return done.returncode, done.stdout, done.stderr


# ---- without torch

def test_loop_over_columns_is_gae():
    rewards, values, mask = gae_case()
    ours, loop = t.gae(rewards, values, mask, .9, .8), b.loop_gae(rewards, values, mask, .9, .8)
    np.testing.assert_allclose(loop[0], ours[0], rtol=1e-12)
    np.testing.assert_allclose(loop[1] * mask, ours[1], rtol=1e-12)


def test_measured_step_has_the_phases_and_counts_tokens():
    measured = b.measure_step(SMALL)
    assert set(measured) == {*b.STEP, "tokens"}
    assert all(measured[phase] > 0 for phase in b.STEP)
    assert SMALL.rows <= measured["tokens"] <= SMALL.rows * SMALL.new


def test_flops_of_a_step_by_hand():
    size = b.Size(vocab=3, d=2, layers=1, heads=1, rows=1, prompt=1, new=1, steps=1)
    # 2 tokens: 48 weights at 2 FLOPs, scores and weighted values 2 x 2 x 2 x 2 / 2; head 2 x 6
    trunk, head = 2 * (2 * 48 + 8), 2 * 12
    assert b.step_flops(size) == 3 * trunk + 2 * head + 2 * 3 * (2 * trunk + head)


def test_ratio_is_the_median_of_pairs_and_above_1_where_ours_is_faster():
    theirs, ours = [{"a": 2., "b": 1.}, {"a": 9., "b": 9.}, {"a": 4., "b": 4.}], [
        {"a": 1., "b": 1.}, {"a": 1., "b": 1.}, {"a": 1., "b": 3.}]
    assert b.paired_ratio(theirs, ours, ["a"]) == 4  # of 2, 9, 4; not 4 / 1 by luck of the order
    assert b.paired_ratio(theirs, ours, ["a", "b"]) == 2  # of 3/2, 18/2, 8/4


def test_sides_alternate_and_without_a_peer_ours_runs_once(monkeypatch):
    calls = []
    monkeypatch.setattr(b, "run", lambda *args: calls.append(args) or {"who": args[0]})
    theirs, ours = b.run_in_turn("toy", True)
    assert calls == b.ROUNDS * [("torch_step.py", "toy"), ("benchmark.py", "toy", "--json")]
    assert theirs + ours == b.ROUNDS * [{"who": "torch_step.py"}] + b.ROUNDS * [
        {"who": "benchmark.py"}]
    calls.clear()
    assert b.run_in_turn("toy", False)[0] == [] and len(calls) == 1


def test_processes_do_not_inherit_what_slows_numpy(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    monkeypatch.setenv("OPENBLAS_L2_SIZE", "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    seen = {}
    monkeypatch.setattr(subprocess, "run", lambda *args, env, **_: seen.update(env)
                        or SimpleNamespace(returncode=0, stdout="{}"))
    assert b.run("benchmark.py", "toy") == {}
    assert {name for name in seen if name.startswith("OPENBLAS")} == {"OPENBLAS_NUM_THREADS"}


@pytest.mark.parametrize("peer", [True, False])
def test_tables_name_the_ratios_only_with_a_peer(peer, monkeypatch, capsys):
    ours = dict(rollout=1., scoring=1., update=2., tokens=50., gae=.001, loop=.03, copy=.0005,
                peak=1e9)
    theirs = dict(rollout=2., scoring=4., update=1., gae=.05)
    monkeypatch.setattr(b, "run", lambda script, *_: theirs if script == "torch_step.py" else ours)
    b.compare(["toy"], peer)
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("toy")).split()
    assert row[1:5] == ["1000.0", "1000.0", "2000.0", "50"]
    assert row[6:] == (["3.00", "0.50", "1.75"] if peer else [])
    assert ("torch" in lines[-1]) == peer and "30 times" in lines[-1]
    assert ("50 times in torch" in lines[-1]) == peer
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("args, message", [(["huge"], "invalid choice"),
                                           (["--json"], "--json needs a size")])
def test_a_wrong_argument_is_one_sentence_and_status_2(args, message):
    status, out, err = command("benchmark.py", *args)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err


# ---- torch and tinyrlhf do the same arithmetic

@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def load(model, ours, torch):
    """Copy tinyrlhf's weights by their names, (in, out) -> (out, in) for the projections."""
    turned = lambda name, a: a.T if a.ndim == 2 and name[:3] not in ("wte", "wpe") else a
    model.to(getattr(torch, ours.cfg.dtype)).load_state_dict(
        {name: torch.from_numpy(turned(name, p.data).copy()) for name, p in ours.params.items()})
    return model


def twins(torch, dtype):
    """Policy and critic of both sides with the same weights, large enough that they matter."""
    import torch_step as s
    rng = np.random.default_rng(1)
    cfg = t.ToyLMConfig(SMALL.vocab, SMALL.prompt + SMALL.new, d_model=SMALL.d, n_heads=SMALL.heads,
                        n_layers=SMALL.layers, dtype=dtype)
    ours = t.TinyCausalLM(cfg, rng), t.TinyCritic(cfg, rng)
    for p in ours[0].parameters() + ours[1].parameters():
        p.data += rng.normal(0, 0.2, p.shape).astype(dtype)
    theirs = [load(kind(SMALL), model, torch) for kind, model in zip((s.GPT, s.Critic), ours)]
    return s, ours, theirs, rng.integers(0, SMALL.vocab, (SMALL.rows, SMALL.prompt + SMALL.new))


def test_logits_and_values_agree(torch):
    _, ours, theirs, tokens = twins(torch, "float32")
    for model, twin in zip(ours, theirs):
        expected = model(tokens).data
        assert np.abs(expected).max() > 0.5
        np.testing.assert_allclose(twin(torch.from_numpy(tokens)).detach(), expected, rtol=0,
                                   atol=1e-5)


def test_torch_samples_from_the_policy_and_records_what_it_sampled(torch):
    s, ours, theirs, tokens = twins(torch, "float32")
    torch.manual_seed(0)
    prompts = torch.from_numpy(np.tile(tokens[:, :SMALL.prompt], (20, 1)))
    drawn, mask, logp = (x.numpy() for x in s.sample(theirs[0], prompts, SMALL.new))
    np.testing.assert_array_equal(drawn[:, :SMALL.prompt], prompts)
    expected = t.token_log_probs(ours[0](drawn), drawn).data  # one pass, no cache
    np.testing.assert_allclose(logp, expected * mask, atol=1e-5)
    ends = drawn[:, SMALL.prompt:] == b.EOS
    before = np.cumsum(ends, axis=1) - ends
    np.testing.assert_array_equal(mask[:, SMALL.prompt - 1:], before == 0)
    assert not mask[:, :SMALL.prompt - 1].any() and (before > 0).any()


def test_update_takes_the_same_two_steps(torch):
    s, ours, theirs, _ = twins(torch, "float64")
    cfg, rng, ref = t.PPOConfig(lr=1e-2), np.random.default_rng(2), ours[0].frozen_copy()
    for p in ref.parameters():
        p.data += rng.normal(0, 0.05, p.shape)
    roll = t.collect_rollouts(ours[0], ref, ours[1], rng.integers(1, SMALL.vocab, (6, 3)), 5, b.EOS,
                              rng=rng)
    scores = rng.normal(size=6)
    stats = t.ppo_update(*ours, t.Adam(ours[0].parameters() + ours[1].parameters(), cfg.lr), roll,
                         scores, cfg.beta, cfg)
    arrays = dict(tokens=roll.tokens, mask=roll.mask, old=roll.logp_old, ref=roll.logp_ref,
                  values=roll.values_old, scores=scores)
    params = [*theirs[0].parameters(), *theirs[1].parameters()]
    seen = s.update(*theirs, torch.optim.Adam(params, cfg.lr, fused=True), SimpleNamespace(
        **{name: torch.from_numpy(a) for name, a in arrays.items()}), cfg)
    assert stats.clip_frac > 0
    expected = [stats.clip_frac, stats.entropy, stats.value_loss, stats.grad_norm]
    np.testing.assert_allclose(np.mean(seen, axis=0), expected, rtol=1e-6)


def test_the_loop_in_torch_is_gae(torch):
    rewards, values, mask = gae_case()
    advantages, returns = b.loop_gae(*map(torch.from_numpy, (rewards, values, mask)))
    ours = t.gae(rewards, values, mask)
    np.testing.assert_allclose(advantages, ours[0], rtol=1e-12)
    np.testing.assert_allclose(returns * torch.from_numpy(mask), ours[1], rtol=1e-12)


def test_both_sides_share_sizes_and_print_the_same_phases(torch):
    import torch_step as s
    assert s.SIZES is b.SIZES and s.GAE_SHAPE is b.GAE_SHAPE and s.loop_gae is b.loop_gae
    size = s.GPT(b.SIZES["small"])
    assert (size.wte.weight.shape, size.wpe.weight.shape, len(size.h)) == ((256, 128), (64, 128), 4)
    status, out, err = command("torch_step.py", "toy")
    assert (status, err) == (0, "")
    seconds = json.loads(out)
    assert set(seconds) == {*b.STEP, "gae"} and min(seconds.values()) > 0
