"""Tests of shared_trunk.py: what is shared, how gradients add, that PPO moves it once."""
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import shared_trunk as s  # noqa: E402
import tinyrlhf as t  # noqa: E402
from common import EOS, PROMPT  # noqa: E402


def rollout(policy, ref, critic):
    """A small rollout and its parts of the loss."""
    roll = t.collect_rollouts(policy, ref, critic, [PROMPT] * 8, s.LENGTH, EOS,
                              rng=np.random.default_rng(0))
    return roll, s.count_good(roll.tokens, np.pad(roll.mask, ((0, 0), (1, 0))))


def test_the_trunk_is_one_and_the_heads_are_two():
    policy, ref, critic = s.models(0, shared=True)
    assert set(critic.parameters()) - set(policy.parameters()) == {
        critic.params[name] for name in s.HEAD}
    assert set(policy.parameters()) < set(critic.parameters())
    assert not set(ref.parameters()) & set(critic.parameters())
    policy, _, critic = s.models(0, shared=False)
    assert not set(policy.parameters()) & set(critic.parameters())


class Recorder(t.Adam):
    """Keeps the gradients that reach an optimiser step, and moves nothing."""
    def step(self):
        self.seen = {p: p.grad.copy() for p in self.params}


def test_the_trunk_receives_the_sum_of_both_gradients():
    policy, ref, critic = s.models(0, shared=True)
    critic.params["value_head.weight"].data += 0.1  # at zero it passes nothing down
    cfg = t.PPOConfig(max_new_tokens=s.LENGTH, ppo_epochs=1, max_grad_norm=1e9)
    roll, scores = rollout(policy, ref, critic)
    parts = s.trunk_gradients(policy, critic, roll, scores, cfg)
    opt = Recorder(policy.parameters() + critic.parameters(), 1e-3)
    t.ppo_update(policy, critic, opt, roll, scores, cfg.beta, cfg)
    both = np.concatenate([opt.seen[p].ravel() for p in policy.parameters()])
    np.testing.assert_allclose(both, sum(parts), rtol=1e-9, atol=1e-12)
    assert min(np.linalg.norm(part) for part in parts) > 1e-3


def test_an_update_steps_the_shared_trunk_once():
    policy, ref, critic = s.models(0, shared=True)
    before = policy.params["wte.weight"].data.copy()
    opt = t.Adam(policy.parameters() + critic.parameters(), 1e-3)
    assert len(opt.params) == len(critic.parameters())
    roll, scores = rollout(policy, ref, critic)
    t.ppo_update(policy, critic, opt, roll, scores, 0.1, t.PPOConfig(ppo_epochs=1))
    moved = np.abs(policy.params["wte.weight"].data - before).max()
    assert 0 < moved <= 1e-3 * (1 + 1e-6)  # Adam's first step; two would be more
    assert critic.params["wte.weight"] is policy.params["wte.weight"]


def test_figures_count_a_shared_array_once():
    sizes = {}
    for shared in (False, True):
        policy, ref, critic = s.models(0, shared)
        cfg = t.PPOConfig(steps=1, max_new_tokens=s.LENGTH)
        sizes[shared] = s.ppo_figures(policy, ref, critic, cfg, np.random.default_rng(0))
    trunk = sum(p.data.size for p in ref.parameters())
    assert sizes[False]["trained"] == 2 * trunk + 33 and sizes[True]["trained"] == trunk + 33
    assert sizes[False]["KiB"] == pytest.approx((4 * sizes[False]["trained"] + trunk) * 8 / 1024)
    assert sizes[True]["KiB"] == pytest.approx((4 * sizes[True]["trained"] + trunk) * 8 / 1024)


def test_a_wrong_argument_is_one_sentence():
    run = subprocess.run([sys.executable, s.__file__, "--seeds", "none"], capture_output=True,
                         text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and not run.stdout
