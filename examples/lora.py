"""LoRA: what do adapters save in PPO, and what do they cost?

    python examples/lora.py
    python examples/lora.py --seeds 5     the table over more seeds

Each matrix of the layers is W + A B, with W frozen and r (in + out) numbers trained (Hu et al.
2021). B starts at zero, so the policy starts as its base, and the base *is* the reference: no
second copy of it. The critic's adapters stand on the same base, with a value head of their own.

On a toy whose optimum is known, from a reference with preferences of its own (5 seeds, medians):
rank 1 trains 2,081 numbers in place of 51,745, holds 267 KiB in place of 1,819, and reaches 97.8 %
of the optimum, where full PPO reaches 95.7; rank 4 98.5, rank 16 97.7. Ranks 1 and 4 are above full
PPO in all five seeds, rank 16 in four: few directions catch less of the noise of 64 responses.
Adam has less to do, but forward and backward run over the same matrices, and sampling takes a
fifth longer, as each pass merges W + A B anew; a server merges once a rollout.

What adapters cannot do: from a reference near uniform (GPT-2's initialisation) rank 16 ends at
22.6 % (at most 28.0) where full PPO has 98.8. The output head is frozen, and its rows are too short
to say anything else. LoRA moves what a pretrained model can say; it does not replace pretraining.

At 7B, rank 16 on every matrix: 240.2 GB of models become 41.2, and 28.0 if the critic shares the
base as it does here. Most of it is Adam's: 16 bytes a parameter become 2.
"""
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402
from common import (Parser, at_least, figures_table, lumpy_model, ppo_figures,  # noqa: E402
                    title)
from estimator import ARCHS, count_params, four_models, lora_params  # noqa: E402

VOCAB, LENGTH, BETA, STEPS = 6, 4, 0.5, 80
FULL_LR, LORA_LR = 1e-3, 3e-3  # the better of 1e-3, 3e-3 (and 1e-2 for LoRA) on seed 0
HEAD = ("value_head.weight", "value_head.bias")


class LoRA:
    """A model whose matrices are W + A B: W stays as it is, A (I, r) and B (r, O) are trained.

    base: a frozen model, held and not copied. B starts at zero, so the model starts as its base.
    whole: parameters of the base that are trained in full, in a copy: the new head of a critic.
    """
    def __init__(self, base, rank, rng, whole=()):
        self.cfg, self.base = base.cfg, base
        self.params = {name: t.Tensor(base.params[name].data, True) for name in whole}
        for name, W in base.params.items():
            if name.startswith("h.") and len(W.shape) == 2:  # the four matrices of each layer
                (I, O), dtype = W.shape, W.dtype
                A = rng.normal(0, 1 / math.sqrt(I), (I, rank)).astype(dtype)
                self.params |= {f"{name}.A": t.Tensor(A, True),
                                f"{name}.B": t.Tensor(np.zeros((rank, O), dtype), True)}

    def merged(self):
        """The model with W + A B in place of W: a gradient passes through to A and B."""
        model, p = object.__new__(type(self.base)), self.params
        model.cfg, model.params = self.cfg, {
            name: W + p[f"{name}.A"] @ p[f"{name}.B"] if f"{name}.A" in p else p.get(name, W)
            for name, W in self.base.params.items()}
        return model

    def __call__(self, tokens, cache=None):
        return self.merged()(tokens, cache)

    def hidden_states(self, tokens, cache=None):
        """As of the merged model, (B, T, D)."""
        return self.merged().hidden_states(tokens, cache)

    def parameters(self):
        """What is trained."""
        return list(self.params.values())

    def copy(self, trainable=True):
        """Adapters in memory of their own, on the same base."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), params={
            name: t.Tensor(p.data, trainable) for name, p in self.params.items()})
        return twin

    def frozen_copy(self):
        """A copy that needs no gradient; as a reference the base itself will do."""
        return self.copy(trainable=False)


def critic_base(ref):
    """A critic's zero head on the very arrays of the reference: no copy of the trunk."""
    critic = t.TinyCritic(ref.cfg, np.random.default_rng(0))
    critic.params = ref.params | {name: critic.params[name] for name in HEAD}
    return critic


def reference(seed, std=0.3):
    """The frozen model that PPO starts from; std 0 leaves it as initialised, near uniform."""
    rng = np.random.default_rng(seed)
    cfg = t.ToyLMConfig(VOCAB, 2 + LENGTH, dtype="float64")
    return lumpy_model(cfg, rng, std).frozen_copy()


def run(seed, rank, lr, std=0.3):
    """PPO with adapters of a rank on policy and critic; rank 0: full PPO -> figures."""
    ref, rng = reference(seed, std), np.random.default_rng(seed)
    cfg = t.PPOConfig(steps=STEPS, max_new_tokens=LENGTH, beta=BETA, lr=lr)
    if rank:
        policy, critic = LoRA(ref, rank, rng), LoRA(critic_base(ref), rank, rng, whole=HEAD)
    else:
        policy, critic = ref.copy(), t.TinyCritic.from_backbone(ref)
    return ppo_figures(policy, ref, critic, cfg, rng)


CASES = {"full": (0, FULL_LR), "rank 1": (1, LORA_LR), "rank 4": (4, LORA_LR),
         "rank 16": (16, LORA_LR), "full, near uniform reference": (0, FULL_LR, 0),
         "rank 16, near uniform reference": (16, LORA_LR, 0)}  # rank, learning rate, std


def real_table():
    """The same models at 7B, by the formulas of estimator.py: full, and rank 16 on every matrix."""
    title("The same at 7B: bytes of the models in GB, bf16 with fp32 Adam, rank 16 on every matrix")
    arch = ARCHS["llama2-7b"]
    params, critic = count_params(arch), count_params(arch, "value")
    adapter = lora_params(arch, 16)
    for name, lora in (("full", (0, 0)), ("LoRA", (adapter, adapter))):
        held = four_models(params, critic, critic, lora)
        each = "".join(f"{model:>14} {size / 1e9:6.1f}" for model, size in held.items())
        print(f"{name:6}{each}{'sum':>8} {sum(held.values()) / 1e9:6.1f}")
    print(f"{adapter:,} parameters an adapter, {adapter / params:.2%} of the model. The critic of "
          "this row keeps\na base of its own; on the policy's base, as above, "
          f"{2 * critic / 1e9:.1f} GB less.")


def main():
    """The toy's table, then 7B."""
    parser = Parser(description="LoRA on policy and critic, the reference being their base.")
    parser.add_argument("--seeds", type=at_least(1), default=2, help="of the table (default 2)")
    figures_table(run, CASES, parser.parse_args().seeds, STEPS)
    real_table()


if __name__ == "__main__":
    main()
