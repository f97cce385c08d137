"""What do the four models of PPO at 7B hold in memory, do they fit, and how long is one step?

    python examples/estimator.py                                   the chapter's case, 8 A100-80
    python examples/estimator.py --model llama3-8b --gpus 16       any other: see --help
    python examples/estimator.py --json                            raw bytes and seconds

7e9 parameters take 16 bytes each in policy and critic, 2 in the frozen reference and reward model:
112 + 112 + 14 + 14 = 252 GB (234.69 GiB), and on each of 8 A100-80 under ZeRO-3 31.50 GB. With the
generator's copy of the weights (14.00 GB) and the keys and values of 64 sequences (25.77 GB) the
rollout is the larger peak: 73.77 of 84.99 GB, it fits. One step of 512 x (256 + 1,024) tokens:
prefill 1.39 s, decoding 27.12 s, scoring 23.41 s, training 70.47 s, weight sync .45 s. Generation
is 23.2 % of it, at 2,299 tokens/s a GPU; over 60 % only below 463. Every assumption is printed with
its origin, each can be given. A layer's matrices, norms and biases are counted one by one: the
counts are those of the published checkpoints.

examples/seven_b.py prints the tables made of these figures, beside published measurements.
Bytes, FLOPs and seconds inside; GB (1e9) and GiB (2**30) only where something is printed.
"""
import argparse
import json
import math
from collections import namedtuple

from common import Parser, t


class Arch(namedtuple("Arch", "vocab width layers heads kv_heads ffn family head_dim positions "
                      "tied norms embed", defaults=("llama", 128, 0, False, 2, 0))):
    """A transformer's published shape. "llama": gated MLP of inner width ffn, no biases; "qwen":
    biases on q, k, v; "opt": plain MLP, biases everywhere; "gpt": also q, k, v in one matrix.
    norms: a layer's; embed: the table's width if another (OPT-350M's, which has no last norm)."""


class Gpu(namedtuple("Gpu", "flops bandwidth memory link")):
    """Data sheet: dense bf16 FLOP/s, memory bytes/s, usable bytes, link bytes/s one way."""


class Engine(namedtuple("Engine", "mbu mfu overhead batch paged weight_bytes kv_bytes",
                        defaults=(256, True, 2, 2))):
    """A generator: shares of peak bandwidth and FLOP/s it reaches, seconds it adds to each step,
    sequences at once, cache paged as needed or reserved for the longest, bytes a number."""


ARCHS = {name: Arch(*shape) for name, *shape in [
    ("llama2-7b", 32000, 4096, 32, 32, 32, 11008), ("llama2-13b", 32000, 5120, 40, 40, 40, 13824),
    ("llama2-70b", 32000, 8192, 80, 64, 8, 28672), ("llama3-8b", 128256, 4096, 32, 32, 8, 14336),
    ("mistral-7b", 32000, 4096, 32, 32, 8, 14336), ("deepseek-7b", 102400, 4096, 30, 32, 32, 11008),
    ("llama3.2-1b", 128256, 2048, 16, 32, 8, 8192, "llama", 64, 0, True),
    ("gemma2-2b", 256000, 2304, 26, 8, 4, 9216, "llama", 256, 0, True, 4),
    ("qwen2.5-0.5b", 151936, 896, 24, 14, 2, 4864, "qwen", 64, 0, True),
    ("qwen2-7b", 152064, 3584, 28, 28, 4, 18944, "qwen"),
    ("pythia-6.9b", 50432, 4096, 32, 32, 32, 16384, "gpt"),
    ("opt-350m", 50272, 1024, 24, 16, 16, 4096, "opt", 64, 2050, True, 2, 512)]}
ARCHS |= {name: Arch(vocab, h, layers, a, a, 4 * h, family, h // a, positions, True)
          for name, family, vocab, positions, h, layers, a in [
    ("gpt2", "gpt", 50257, 1024, 768, 12, 12), ("gpt2-xl", "gpt", 50257, 1024, 1600, 48, 25),
    ("opt-125m", "opt", 50272, 2050, 768, 12, 12), ("opt-1.3b", "opt", 50272, 2050, 2048, 24, 32),
    ("opt-6.7b", "opt", 50272, 2050, 4096, 32, 32), ("opt-13b", "opt", 50272, 2050, 5120, 40, 40)]}
GPUS = {"a100-40": Gpu(312e12, 1.555e12, 39.4 * 2**30, 300e9),
        "a100-80": Gpu(312e12, 2.039e12, 79.15 * 2**30, 300e9),
        "h100-80": Gpu(989e12, 3.35e12, 79.1 * 2**30, 450e9),
        "h200": Gpu(989e12, 4.8e12, 139 * 2**30, 450e9)}
ENGINES = {"hf-generate": Engine(.70, .4, .040, 8, False), "vllm-eager": Engine(.70, .5, .035),
           "vllm-graph": Engine(.75, .5, .001), "trtllm": Engine(.78, .6, .001),
           "ideal": Engine(1, 1, 0, 10**9)}
OPTIONS = {  # name: (default, known names or (least, most)); the command line's options too
    "model": ("llama2-7b", ARCHS), "params": (7e9, (1e6, 1e13)), "lora": (0, (0, 1024)),
    "critic": ("same", {**ARCHS, "same": "same", "shared": None, "none": None}),
    "reward": ("same", {**ARCHS, "same": "same"}), "zero": (3, (0, 3)), "tp": (1, (1, 64)),
    # bytes a trained parameter: weights, gradients, fp32 master, Adam's m and v; a frozen one
    "recipe": ("bf16", {"bf16": (2, 2, 4, 8), "fp32-grads": (2, 4, 4, 8), "fp32": (4, 4, 0, 8)}),
    "frozen": ("bf16", {"bf16": 2, "int8": 1, "nf4": .5 + 4 / 64, "fp32": 4}),
    "gpus": (8, (1, 10**5)), "gpu": ("a100-80", GPUS), "engine": ("vllm-graph", ENGINES),
    "prompts": (512, (1, 10**6)), "prompt_len": (256, (1, 10**6)), "epochs": (1, (1, 100)),
    "response_len": (1024, (1, 10**6)), "recompute": ("full", {"full": True, "none": False}),
    "mfu_train": (.40, (.01, 1)), "mfu_forward": (.45, (.01, 1)), "sync": (.1, (.001, 1)),
    "reserve": (2.5e9, (0, 1e12))}
Job = namedtuple("Job", OPTIONS, defaults=[default for default, _ in OPTIONS.values()])


def toy_arch(cfg):
    """The shape of a ToyLMConfig's TinyCausalLM (and, with a value head, of its TinyCritic)."""
    h, a = cfg.d_model, cfg.n_heads
    return Arch(cfg.vocab_size, h, cfg.n_layers, a, a, 4 * h, "gpt", h // a, cfg.max_len, True)


def linears(arch):
    """Matrices of one layer: name -> (inputs, outputs)."""
    h, q, kv, f = arch.width, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, arch.ffn
    apart = {"q": (h, q), "k": (h, kv), "v": (h, kv)}
    attention = {"c_attn": (h, q + 2 * kv)} if arch.family == "gpt" else apart
    gate = {"gate": (h, f)} if arch.family in ("llama", "qwen") else {}
    return {**attention, "o": (q, h), **gate, "up": (h, f), "down": (f, h)}


def count_params(arch, head="lm"):
    """Exact number of parameters; head "lm", or "value" (one number a token)."""
    h, e, shapes = arch.width, arch.embed or arch.width, linears(arch)
    gpt = "gate" not in shapes
    norm = 2 * h if gpt else h  # LayerNorm has a bias, RMSNorm has none
    biased = {"llama": "", "qwen": "qkv"}.get(arch.family, shapes)
    layer = sum(i * o for i, o in shapes.values()) + sum(shapes[name][1] for name in biased)
    # V e + positions h + L (matrices + biases + norms) + last norm (or 2 e h) + head
    trunk = arch.vocab * e + arch.positions * h + arch.layers * (layer + arch.norms * norm)
    output = h + gpt if head == "value" else 0 if arch.tied else arch.vocab * h
    return trunk + (norm if e == h else 2 * e * h) + output


def lora_params(arch, rank, targets=None):
    """Adapter parameters on these linears of every layer (None: all): L r sum(in + out)."""
    return arch.layers * rank * sum(sum(linears(arch)[name]) for name in targets or linears(arch))


def kv_bytes_per_token(arch, each=2):
    """Bytes of keys and values that a token keeps over all layers: 2 L kv d bytes."""
    return 2 * arch.layers * arch.kv_heads * arch.head_dim * each


def activation_bytes(arch, rows, length, recompute=False, eager=False, copies=3):
    """Bytes kept for the backward pass in bf16, logits with so many fp32 copies (0: none)."""
    s, b, h, a, kv, f = length, rows, arch.width, arch.heads, arch.kv_heads, arch.ffn
    if arch.family in ("gpt", "opt"):  # s b h (34 + 5 a s / h) a layer (Korthikanti 2022)
        layer = s * b * (34 * h + 5 * a * s * eager)
    else:  # s b h (20 + 4 kv / a + 8 f / h) + 4 s b (a + 2): Hugging Face's Llama, SDPA, measured
        layer = s * b * (20 * h + 4 * h * kv / a + 8 * f + 4 * (a + 2) + 6 * a * s * eager)
    # full recomputation keeps each layer's input, and one layer whole while it is done again
    kept = arch.layers * 2 * s * b * h + layer if recompute else arch.layers * layer
    return kept + s * b * arch.vocab * (2 + 4 * copies) * (copies > 0)


def four_models(policy, critic, reward, lora=(0, 0), recipe=(2, 2, 4, 8), frozen=2, zero=0, gpus=1):
    """Bytes a GPU holds of models of so many parameters; lora: adapters of policy and critic."""
    # ZeRO: weights / n at stage 3, gradients / n from 2, master and Adam / n from 1
    parts = [size / (gpus if zero >= stage else 1) for size, stage in zip(recipe, (3, 2, 1, 1))]
    held = frozen / (gpus if zero == 3 else 1)
    trained = [parts[0] * params + sum(parts) * adapter if adapter else sum(parts) * params
               for params, adapter in zip((policy, critic), lora)]
    reference = 0 if lora[0] else held * policy  # LoRA's base, adapters off, is the reference
    return {"policy": trained[0], "critic": trained[1], "reference": reference,
            "reward model": held * reward}


def forward_flops(arch, tokens, context, head="lm"):
    """FLOPs of tokens once through a model, each attending to context positions on average."""
    matmul = arch.layers * sum(i * o for i, o in linears(arch).values())
    matmul += arch.width * (arch.vocab if head == "lm" else 1)
    # n (2 N_matmul + 4 L a d context)
    return tokens * (2 * matmul + 4 * arch.layers * arch.heads * arch.head_dim * context)


def step_time(job, slots):
    """Seconds of a PPO step of make_job's Job; slots: answers at once on each group of tp GPUs."""
    arch, gpu, engine, tp = job.model, job.gpu, job.engine, job.tp
    rows, length = math.ceil(job.prompts * tp / job.gpus), job.prompt_len + job.response_len
    weights, kv = forward_flops(arch, 1, 0) / 2, kv_bytes_per_token(arch, engine.kv_bytes)
    peak, context, decode = tp * gpu.flops * engine.mfu, length - (job.response_len + 1) / 2, 0
    for n in [slots] * (rows // slots) + [rows % slots] * (rows % slots > 0):
        # a step: max((weights + kv context) / (bandwidth MBU), FLOPs / (peak MFU)) + overhead
        read = (weights * engine.weight_bytes + n * kv * context) / (tp * gpu.bandwidth)
        step = max(read / engine.mbu, forward_flops(arch, n, context) / peak) + engine.overhead
        # + two all-reduces a layer: 2 L (15 us + 2 (tp - 1) / tp n h 2 / link)
        link = 2 * arch.layers * (15e-6 + 4 * (tp - 1) / tp * n * arch.width / gpu.link)
        decode += job.response_len * (step + link * (tp > 1))
    actor, value, score = [  # one forward pass over every token, in seconds at peak
        forward_flops(model, job.prompts * length, length / 2, head) / (job.gpus * gpu.flops)
        if model else 0
        for model, head in ((arch, "lm"), (job.critic, "value"), (job.reward, "value"))]
    return {"prefill": forward_flops(arch, rows * job.prompt_len, job.prompt_len / 2) / peak,
            "decoding": decode, "scoring": (actor + value + score) / job.mfu_forward,
            # epochs k forward: backward is two more, full recomputation a fourth
            "training": job.epochs * (3 + job.recompute) * (actor + value) / job.mfu_train,
            "weight sync": engine.weight_bytes * count_params(arch) / (gpu.link * job.sync)}


def make_job(given):
    """The Job of these options, records for names; ValueError says what is wrong with them."""
    job = Job(**given)
    for name, (default, known) in OPTIONS.items():
        value = getattr(job, name)
        if isinstance(known, tuple):
            t.as_number(value, name, *known, whole=isinstance(default, int))
        elif isinstance(value, str) and value not in known:
            raise ValueError(f"{name} {value!r} is unknown; known are {', '.join(known)}")
        elif isinstance(value, str):
            job = job._replace(**{name: known[value]})
    if job.lora and given.get("critic") == "shared":
        raise ValueError("lora freezes the trunk that a shared critic has to train: choose one")
    if job.gpus % job.tp:
        raise ValueError(f"tp: groups of {job.tp} do not make up {job.gpus} GPUs")
    if "params" in given or "model" not in given:  # as many of the model's layers as come near
        layers = round(job.model.layers * round(job.params / count_params(job.model), 1))
        job = job._replace(model=job.model._replace(layers=max(1, layers)))
    return job._replace(**{name: job.model for name in ("critic", "reward")
                           if getattr(job, name) == "same"})


def estimate(**given):
    """One PPO step in bytes and seconds. given: as OPTIONS; a record may stand for its name."""
    job, stated = make_job(given), "params" in given or "model" not in given
    policy, gpu, engine, length = job.model, job.gpu, job.engine, job.prompt_len + job.response_len
    params = [0 if arch is None else job.params if stated and arch is policy else
              count_params(arch, head) for arch, head in
              ((policy, "lm"), (job.critic, "value"), (job.reward, "value"))]
    adapters = [lora_params(arch, job.lora) if arch else 0 for arch in (policy, job.critic)]
    held = (*params, adapters, job.recipe, job.frozen)
    whole, share = four_models(*held), four_models(*held, job.zero, job.gpus)
    static, copy = sum(share.values()) + job.reserve, engine.weight_bytes * params[0] / job.tp
    active = activation_bytes(policy, 1, length, job.recompute)
    # slots = (memory - the rest) / (kv (p + r / 2)) if paged, / (kv (p + r)) if reserved
    kept = job.prompt_len + job.response_len / (1 + engine.paged)
    cache = kv_bytes_per_token(policy, engine.kv_bytes) * kept / job.tp
    most = min(math.ceil(job.prompts * job.tp / job.gpus), engine.batch)
    slots = int(min(most, max(0, gpu.memory - static - copy) // cache)) or most
    peaks = {"training peak": static + active, "rollout peak": static + copy + slots * cache}
    seconds = step_time(job, slots)
    generation = seconds["prefill"] + seconds["decoding"]
    rest, tokens = sum(seconds.values()) - generation, job.prompts * job.response_len / job.gpus
    lone = "; one GPU, nothing to shard" if job.gpus == 1 else ""
    origins = [(name, str(given.get(name, default)), ("given" if name in given else "default")
                + lone * (name == "zero")) for name, (default, _) in OPTIONS.items()]
    for kind, record, origin in (("gpu", gpu, "data sheet"), ("engine", engine, "default")):
        origins += [(f"{kind} {name}", value, "given" if record is given.get(kind) else origin)
                    for name, value in record._asdict().items()]
    origins += [("sequences a pass", 1, "default"), ("fp32 logits copies", 3, "default")]
    return {"params": dict(zip(whole, (*params[:2], params[0], params[2]))),
            "bytes": {name: (whole[name], share[name]) for name in whole},
            "bytes per GPU": {"reserve": job.reserve, "activations of one sequence": active,
                              "engine's weights": copy, "KV cache": slots * cache, **peaks,
                              "memory": gpu.memory, "spare": gpu.memory - max(peaks.values())},
            "binds": max(peaks, key=peaks.get), "slots": slots, "seconds": seconds,
            "share": generation / (generation + rest), "tokens/s/GPU": tokens / generation,
            # generation / (generation + rest) > 60 % where generation > 1.5 rest
            "60 % below": tokens / rest / 1.5, "assumptions": origins}


def print_estimate(est):
    """Bytes in GB and GiB, in all and per GPU; seconds; every assumption with its origin."""
    def row(name, *sizes):
        print(f"{name:36}" + "".join(f"{n / 1e9:12.2f} GB {n / 2**30:12.2f} GiB" for n in sizes))
    print(f"{'':20}{'B/param':>16}{'in all':>31}{'per GPU':>32}")
    for name, sizes in est["bytes"].items():
        row(f"{name:20}{sizes[0] / max(est['params'][name], 1):16.4f}", *sizes)
    row("four models", *map(sum, zip(*est["bytes"].values())))
    for name, size in est["bytes per GPU"].items():
        row(f"{name:68}", size)
    print(f"the {est['binds']} binds, with {est['slots']} sequences in the KV cache: "
          + ("it fits" if est["bytes per GPU"]["spare"] >= 0 else "it DOES NOT FIT"))
    for name, seconds in est["seconds"].items():
        print(f"{name:20}{seconds:16.2f} s {seconds / sum(est['seconds'].values()):8.1%}")
    engine = dict(line[:2] for line in est["assumptions"])["engine"]
    print(f"generation's share with {engine}: {est['share']:.1%}, at {est['tokens/s/GPU']:,.0f} "
          f"tokens/s a GPU; over 60 % below {est['60 % below']:,.0f}")
    for name, value, origin in est["assumptions"]:
        print(f"{name:20}{value!s:>16} {origin}")


def main():
    """One option for each of OPTIONS, and --json; a wrong one is refused in one sentence."""
    parser = Parser(description=__doc__.splitlines()[0])
    for name, (default, known) in OPTIONS.items():
        text = "{:g} to {:g}".format(*known) if isinstance(known, tuple) else ", ".join(known)
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), metavar="X",
                            default=argparse.SUPPRESS, help=f"{text} (default {default})")
    parser.add_argument("--json", action="store_true", help="raw bytes and seconds")
    given = vars(parser.parse_args())
    as_json = given.pop("json")
    try:
        est = estimate(**given)
    except ValueError as wrong:
        parser.error(str(wrong))
    print(json.dumps(est, indent=1)) if as_json else print_estimate(est)


if __name__ == "__main__":
    main()
