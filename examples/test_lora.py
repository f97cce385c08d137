"""Tests of lora.py: the start, the gradient, what is trained, and what is shared."""
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import lora  # noqa: E402
import tinyrlhf as t  # noqa: E402
from common import EOS, PROMPT, count_good  # noqa: E402


@pytest.fixture
def models():
    """Reference, and rank 2 adapters of policy and critic on it."""
    rng, ref = np.random.default_rng(0), lora.reference(0)
    return (ref, lora.LoRA(ref, 2, rng), lora.LoRA(lora.critic_base(ref), 2, rng, lora.HEAD))


def test_it_starts_as_the_reference_without_copying_it(models):
    ref, policy, critic = models
    tokens = np.array([[1, 2, 3, 0], [2, 2, 5, 1]])
    np.testing.assert_array_equal(policy(tokens).data, ref(tokens).data)
    np.testing.assert_array_equal(critic(tokens).data, 0)
    assert policy.base is ref and critic.base.params["wte.weight"] is ref.params["wte.weight"]
    assert set(policy.parameters()).isdisjoint(critic.parameters() + ref.parameters())


def test_count_of_parameters_is_r_times_in_plus_out(models):
    _, policy, critic = models
    D, shapes = 32, ((1, 3), (1, 1), (1, 4), (4, 1))  # the four matrices of each of two layers
    expected = 2 * 2 * sum(D * (i + o) for i, o in shapes)
    assert sum(p.data.size for p in policy.parameters()) == expected
    assert sum(p.data.size for p in critic.parameters()) == expected + D + 1


def test_gradients_of_the_adapters_against_differences():
    rng = np.random.default_rng(1)
    cfg = t.ToyLMConfig(5, 4, d_model=4, n_layers=1, dtype="float64")
    policy = lora.LoRA(lora.lumpy_model(cfg, rng).frozen_copy(), 2, rng)
    for p in policy.parameters():
        p.data += rng.normal(0, 0.3, p.shape)
    tokens = rng.integers(0, 5, (2, 4))
    loss = lambda: t.token_log_probs(policy(tokens), tokens).sum()
    assert t.grad_check(loss, policy.parameters()) < 1e-6


def test_ppo_moves_adapters_only(models):
    ref, policy, critic = models
    before = {name: p.data.copy() for name, p in ref.params.items()}
    start = {name: p.data.copy() for name, p in policy.params.items()}
    cfg = t.PPOConfig(steps=2, max_new_tokens=lora.LENGTH, lr=1e-2)
    history = t.train_ppo(policy, ref, critic, [PROMPT] * 8, count_good, EOS, cfg,
                          rng=np.random.default_rng(0))
    assert history[0].kl == pytest.approx(0, abs=1e-12) and history[1].kl > 1e-6
    assert all((p.data == before[name]).all() for name, p in ref.params.items())
    assert all((p.data != start[name]).any() for name, p in policy.params.items())


def test_a_copy_keeps_what_it_had(models):
    _, policy, _ = models
    twin = policy.frozen_copy()
    policy.params["h.0.mlp.c_fc.weight.B"].data += 1
    tokens = np.array([[1, 2, 3]])
    assert not twin(tokens).requires_grad and policy(tokens).requires_grad
    assert np.abs(twin(tokens).data - policy.base(tokens).data).max() == 0
    assert np.abs(policy(tokens).data - policy.base(tokens).data).max() > 1e-3


def test_a_wrong_argument_is_one_sentence():
    run = subprocess.run([sys.executable, lora.__file__, "--seeds", "none"], capture_output=True,
                         text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and not run.stdout
