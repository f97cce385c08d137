"""PPO-RLHF at seven billion parameters: what it holds, what fits, how long it takes.

    python examples/seven_b.py                   every table
    python examples/seven_b.py --explain kv      one formula with its numbers put in
    python examples/seven_b.py --plot FILE       memory by component, generation's share

Everything is computed by examples/estimator.py; this file chooses the cases and prints them.
Sizes are GB (1e9 bytes) with GiB (2**30) beside the totals.

Memory: 112 + 112 + 14 + 14 = 252 GB, 280 with fp32 gradients. Alone, LoRA on policy and critic
saves 208.7 GB, Adam on the host 168.0, no critic 112.0, the frozen pair in nf4 20.1; without a
critic and with LoRA 28.6 GB are left. On 80 GB cards all of it fits from 4 GPUs up under ZeRO-3,
with LoRA on one. Keys and values of 512 x 1,024 tokens are 274.9 GB, more than the four models.

Time: generation's share is a property of the engine and the batch, not of PPO: 82 % with a plain
generate loop, 41 and 23 % with a batching engine, eager or compiled, on the same A100s; 84 % even
then at one prompt a GPU, 9 % at 64 prompts and 4 epochs. Of 19 published measurements 16 are met
within 15 %, and the times of 7B to 13B on A100 and A800 at .94 on average (geometric mean).
The last table measures this machine and predicts the toy from it; its figures are this machine's.
"""
import math
import random
import textwrap
import time

import numpy as np

import estimator as e
from common import Parser, parse_plot, pyplot, save_plot, t, title

GB, GIB = 1e9, 2**30
P = 7e9  # the chapter's parameter count
LLAMA = e.ARCHS["llama2-7b"]
ADAPTER = e.lora_params(LLAMA, 16)  # rank 16 on all seven linears: 40 million
JOB = dict(model="llama2-7b", prompts=512, prompt_len=256, response_len=1024, gpus=8)


def held(**changes):
    """Bytes of the chapter's four models, in all, after these changes to four_models' arguments."""
    return e.four_models(**{"policy": P, "critic": P, "reward": P, **changes})


# ------------------------------------------------------------------ memory

RECIPES = {  # bytes a trained parameter: weights, gradients, fp32 master, Adam's m and v
    "the chapter: bf16, bf16 gradients": (2, 2, 4, 8),
    "fp32 gradients": (2, 4, 4, 8),
    "bf16 and fp32 gradients": (2, 6, 4, 8),
    "all fp32, no master copy": (4, 4, 0, 8),
    "8-bit Adam": (2, 2, 4, 2),
    "no fp32 master copy": (2, 2, 0, 8),
}


def memory_table():
    """The chapter's table, and what becomes of it under other ways to keep a parameter."""
    title("Four models of 7e9 parameters, at rest, in all (GB)")
    heads = ("B/param", "policy", "critic", "ref", "reward", "total", "GiB")
    print(f"{'':36}" + "".join(f"{head:>9}" for head in heads))
    for name, recipe in RECIPES.items():
        parts = list(held(recipe=recipe).values())
        sizes = "".join(f"{n / GB:9.2f}" for n in (*parts, sum(parts)))
        print(f"{name:36}{sum(recipe):9}{sizes}{sum(parts) / GIB:9.2f}")
    ratio = sum(held().values()) / held()["policy"]
    print(f"The whole is {ratio:.2f} times one model in pretraining (16 B a parameter).")
    cache = 512 * 1024 * e.kv_bytes_per_token(LLAMA)
    grouped = 512 * 1024 * e.kv_bytes_per_token(e.ARCHS["llama3-8b"])
    print(f"Keys and values of 512 x 1,024 tokens of Llama-2-7B: {cache / GB:.1f} GB "
          f"({cache / GIB:.1f} GiB), more than\nthe four models; of Llama-3-8B, which has 8 kv "
          f"heads, {grouped / GB:.1f} GB ({grouped / GIB:.1f} GiB).")


CUTS = [  # name, changes to four_models' arguments, price
    ("LoRA on policy and critic, rank 16", dict(lora=(ADAPTER, ADAPTER)),
     "fewer directions to learn in"),
    ("master and Adam to host memory", dict(recipe=(2, 2, 0, 0)),
     "traffic to the host, every step"),
    ("no critic (GRPO)", dict(critic=0), "no credit by token"),
    ("critic on the policy's trunk", dict(critic=0), "value gradients pull at the policy"),
    ("8-bit Adam", dict(recipe=(2, 2, 4, 2)), "rounded m and v"),
    ("no fp32 master copy", dict(recipe=(2, 2, 0, 8)), "small updates round to nothing"),
    ("reference and reward to host memory", dict(frozen=0), "both return for every scoring"),
    ("reference and reward in nf4", dict(frozen=.5625), "quantised score and KL"),
    ("reference and reward in int8", dict(frozen=1), "the same, less of it"),
]


def cuts_table():
    """What to cut first: by bytes saved, then in the chapter's order with the running total."""
    title("Cuts from 252 GB, each alone, ranked by what they save")
    whole = sum(held().values())
    saved = {name: whole - sum(held(**change).values()) for name, change, _ in CUTS}
    for name, _, price in sorted(CUTS, key=lambda cut: -saved[cut[0]]):
        print(f"{name:38}{saved[name] / GB:8.1f} GB {saved[name] / GIB:8.1f} GiB   {price}")
    print("\nIn the chapter's order:")
    change = {}
    for name, more in [("four models", {}), ("1. no critic", dict(critic=0)),
                       ("2. LoRA on the policy", dict(lora=(ADAPTER, 0))),
                       ("3. the frozen model in nf4", dict(frozen=.5625))]:
        change |= more
        left = sum(held(**change).values())
        rest = " + ".join(f"{part} {n / GB:.1f}" for part, n in held(**change).items() if n)
        print(f"{name:28}{left / GB:8.1f} GB {left / GIB:8.1f} GiB\n    {rest}")


SETUPS = {
    "ZeRO-3": {},
    "ZeRO-2": dict(zero=2),
    "ZeRO-1": dict(zero=1),
    "ZeRO-3, no critic": dict(critic="none"),
    "ZeRO-3, LoRA": dict(lora=16),
    "ZeRO-3, LoRA, nf4 reward model": dict(lora=16, frozen="nf4"),
    "ZeRO-3, master, Adam on the host": dict(recipe=(2, 2, 0, 0)),
    "the same, frozen pair on the host": dict(recipe=(2, 2, 0, 0), frozen=0),
}


def fits_table(gpu="a100-80"):
    """The larger peak a GPU, with up to 16 sequences of 256 + 1,024 tokens a GPU in the cache."""
    memory = e.GPUS[gpu].memory
    title(f"What fits: peak GiB a GPU, {gpu} ({memory / GIB:.1f} GiB usable); * does not fit")
    print(f"{'GPUs':36}" + "".join(f"{n:10}" for n in (1, 2, 4, 8, 16)))
    for name, options in SETUPS.items():
        cells = []
        for n in (1, 2, 4, 8, 16):
            est = e.estimate(**{**JOB, **options, "gpus": n, "prompts": 16 * n, "gpu": gpu})
            spare = est["bytes per GPU"]["spare"]
            cells.append(f"{(memory - spare) / GIB:9.1f}{'*' if spare < 0 else ' '}")
        print(f"{name:36}" + "".join(cells))


# ------------------------------------------------------------------ time

def share_of(**options):
    """Generation's share of the chapter's step under these options, in per cent."""
    return 100 * e.estimate(**{**JOB, **options})["share"]


def overlap_lines():
    """What one step of staleness buys: two pools of GPUs, each idle while the other is longer."""
    print("\nGenerating step k+1 while training step k, seconds (a100-80):")
    for engine in ("vllm-eager", "hf-generate"):
        seconds = e.estimate(**JOB, engine=engine)["seconds"]
        generation = seconds["prefill"] + seconds["decoding"]
        rest = seconds["scoring"] + seconds["training"]
        print(f"{engine:16}in turn on 8 GPUs {generation + rest:7.1f}; two pools of 4 "
              f"{2 * max(generation, rest):7.1f}; two pools of 8 {max(generation, rest):7.1f}")


def share_table():
    """The 60-80 % of the chapter depend on the engine, the GPUs, prompts a GPU and epochs."""
    title("Generation's share of a step, %: Llama-2-7B, 512 x (256 + 1,024), 8 GPUs, 1 epoch")
    gpus = ("a100-80", "h100-80", "h200")
    print(f"{'':16}" + "".join(f"{gpu:>10}" for gpu in gpus)
          + "   a100-80, tokens/s a GPU: it gives, 60 % below")
    for engine in e.ENGINES:
        est = e.estimate(**JOB, engine=engine)
        print(f"{engine:16}" + "".join(f"{share_of(engine=engine, gpu=gpu):10.0f}" for gpu in gpus)
              + f"{est['tokens/s/GPU']:36,.0f}{est['60 % below']:12,.0f}")
    print("\nThe same by prompts a GPU, 1 epoch, and by epochs, 64 prompts a GPU (a100-80):")
    print(f"{'':16}" + "".join(f"{n:>6}" for n in (1, 8, 16, 64, 256)) + "  |  "
          + "".join(f"{epochs:>6}" for epochs in (1, 2, 4)))
    for engine in e.ENGINES:
        by_prompts = [share_of(engine=engine, prompts=8 * n) for n in (1, 8, 16, 64, 256)]
        by_epochs = [share_of(engine=engine, epochs=n) for n in (1, 2, 4)]
        print(f"{engine:16}" + "".join(f"{share:6.0f}" for share in by_prompts) + "  |  "
              + "".join(f"{share:6.0f}" for share in by_epochs))
    overlap_lines()


def reward_table():
    """A reward model larger than the policy: its bytes, and its part of the step."""
    title("A reward model larger than the policy (Llama-2-7B, 8 x h100-80)")
    for name in ("same", "llama2-13b", "llama2-70b"):
        est = e.estimate(**{**JOB, "gpu": "h100-80"}, reward=name)
        whole, seconds = est["bytes"]["reward model"][0], est["seconds"]
        share = seconds["scoring"] / sum(seconds.values())
        print(f"{name:12}{whole / GB:8.1f} GB {whole / GIB:8.1f} GiB   scoring "
              f"{seconds['scoring']:5.1f} s, {share:4.0%} of the step; {est['slots']} cached a GPU")
    print("Score it in batches on the engine, keep it in int8 or nf4, or distil it.")


# ------------------------------------------------------------------ published measurements

MI300X = e.Gpu(1307e12, 5.3e12, 191 * GIB, 448e9)
H100_FP8 = e.GPUS["h100-80"]._replace(flops=2 * 989e12)
TRTLLM = e.ENGINES["trtllm"]._replace(batch=10**6)


def weights(arch, trained, frozen=0, gpus=1):
    """GiB a GPU of `trained` fp32 copies, sharded, and of a bf16 reference (frozen = 2)."""
    lm, value = e.count_params(arch), e.count_params(arch, "value" if gpus == 1 else "lm")
    parts = e.four_models(lm * ("policy" in trained), value, 0, recipe=(4, 0, 0, 0), frozen=frozen,
                          zero=3, gpus=gpus)
    return sum(parts.values()) / GIB


def parameters_of_a_rank(arch, tp):
    """Tensor parallelism splits every matrix and repeats the norms."""
    norms = (2 * arch.layers + 1) * arch.width
    return (e.count_params(arch) - norms) / tp + norms


def throughput(rows, prompt, answer, gpu="a100-80", engine=TRTLLM):
    """Tokens a second of one GPU that generates a whole batch at once."""
    job = e.make_job(dict(model="llama2-7b", gpus=1, gpu=gpu, engine=engine, prompts=rows,
                          prompt_len=prompt, response_len=answer))
    seconds = e.step_time(job, rows)
    return rows * answer / (seconds["prefill"] + seconds["decoding"])


def instruct_gpt():
    """PF/s-days of PPO-ptx and of SFT at 175B, every context padded to 2,048 tokens."""
    day, episode = 1e15 * 86400, 256e3 * 2048
    # forward passes, 2 FLOPs a parameter each: 8 x 3 of pretraining data; sample, reference, train
    ptx = episode * 2 * ((8 * 3 + 5) * 175e9 + 5 * 6e9)
    sft = 3 * 2 * 175e9 * 12725 * 16 * 2048
    return ptx / day, sft / day


def deepspeed_chat(policy, gpus):
    """Hours of step 3: 264,292 prompts, 256 + 256 tokens, 1,024 a step, old log-probs anew."""
    est = e.estimate(model=policy, critic="opt-350m", reward="opt-350m", recipe="fp32-grads",
                     gpus=gpus, engine=e.ENGINES["vllm-graph"]._replace(paged=False),
                     prompts=1024, prompt_len=256, response_len=256, reserve=4e9)
    again = e.forward_flops(e.ARCHS[policy], 1024 * 512, 256) / (gpus * 312e12 * .45)
    return (sum(est["seconds"].values()) + again) * 264292 / 1024 / 3600


def openrlhf():
    """Seconds of generation and of training: 1,024 prompts, 1,024 + 1,024 tokens, 8 GPUs."""
    seconds = e.estimate(model="llama2-7b", engine="hf-generate", prompts=1024, prompt_len=1024,
                         response_len=1024)["seconds"]
    return seconds["prefill"] + seconds["decoding"], seconds["training"]


def verl_generation():
    """Seconds for 512 answers of 139 tokens on average, at most 512, on one group of 4 GPUs.

    The log has the mean and the cap only; lengths are assumed lognormal with a spread of .55.
    """
    draw, sigma = random.Random(0), math.sqrt(math.log(1 + .55**2))
    lengths = sorted(
        max(1, min(512, int(draw.lognormvariate(math.log(139) - sigma**2 / 2, sigma))))
        for _ in range(512))
    total, done = 0.0, 0
    for i, length in enumerate(lengths):  # between one answer's end and the next, 512 - i run
        if length > done:
            job = e.make_job(dict(
                model="deepseek-7b", gpus=4, tp=4, gpu=MI300X, engine="vllm-eager",
                prompts=512 - i, prompt_len=83 + done, response_len=length - done))
            seconds = e.step_time(job, 512 - i)
            total += seconds["decoding"] + (seconds["prefill"] if done == 0 else 0)
            done = length
    return total


def memory_rows():
    """Sizes as logged, static parts only."""
    gemma, qwen, deepseek = (e.ARCHS[n] for n in ("gemma2-2b", "qwen2.5-0.5b", "deepseek-7b"))
    return [
        ("Gemma-2-2B critic, fp32, FSDP on 2 GPUs", "GiB", weights(gemma, "critic", gpus=2),
         4.8715, "verl training log", ""),
        ("the same with its policy", "GiB", weights(gemma, "policy", gpus=2), 9.7421,
         "verl training log", ""),
        ("Qwen2.5-0.5B critic, policy fp32, ref bf16", "GiB", weights(qwen, "policy", 2), 4.6028,
         "verl training log", ""),
        ("DeepSeek-7B on one of 4 tensor ranks", "params", parameters_of_a_rank(deepseek, 4),
         1_727_778_816, "verl Megatron log", ""),
        ("T0_3B full fine-tune (static part only)", "GB",
         e.four_models(2.85e9, 0, 0)["policy"] / GB, 47.14, "PEFT, README", "")]


def decoding_rows():
    """Generation alone, batches of the published sizes."""
    source = "TensorRT-LLM 0.6.1, performance page"
    fp8 = TRTLLM._replace(weight_bytes=1, kv_bytes=1)
    cases = [(384, 128, 128, 5586), (60, 128, 2048, 1928), (52, 2048, 128, 591)]
    rows = [(f"LLaMA-7B fp16, A100, {batch} x ({prompt} + {answer})", "tokens/s",
             throughput(batch, prompt, answer), measured, source, "A")
            for batch, prompt, answer, measured in cases]
    cases = [(112, 128, 2048, 6818), (48, 2048, 2048, 2740)]
    return rows + [(f"LLaMA-7B fp8, H100, {batch} x ({prompt} + {answer})", "tokens/s",
                    throughput(batch, prompt, answer, H100_FP8, fp8), measured, source, "")
                   for batch, prompt, answer, measured in cases]


def published():
    """Rows (what, unit, predicted, measured, source, class); class A: 7B to 13B on A100."""
    generation, training = openrlhf()
    ptx, sft = instruct_gpt()
    rows = memory_rows() + decoding_rows()
    rows += [("InstructGPT 175B, PPO-ptx", "PF/s-days", ptx, 60, "InstructGPT, section 5", ""),
             ("InstructGPT 175B, SFT", "PF/s-days", sft, 4.9, "InstructGPT, section 5", "")]
    runs = [("opt-6.7b", 8, 4.1), ("opt-13b", 8, 9), ("opt-6.7b", 64, .85), ("opt-13b", 64, 1.25)]
    rows += [(f"{policy} PPO, 350M critic, {gpus} A100-80", "hours", deepspeed_chat(policy, gpus),
              hours, "DeepSpeed-Chat, table of step 3", "A") for policy, gpus, hours in runs]
    return rows + [
        ("Llama-2-7B, 8 A800-80: generation", "s", generation, 920.81, "OpenRLHF benchmark", "A"),
        ("Llama-2-7B, 8 A800-80: training", "s", training, 256.97, "OpenRLHF benchmark", "A"),
        ("DeepSeek-7B, 8 MI300X: generation", "s", verl_generation(), 23.66,
         "verl training log", "")]


def geometric_mean(rows):
    """Of predicted over measured time (for tokens/s: of measured over predicted) in class A."""
    ratios = [measured / predicted if unit == "tokens/s" else predicted / measured
              for _, unit, predicted, measured, _, kind in rows if kind == "A"]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)), len(ratios)


def published_table():
    """Predicted beside measured; a row off by more than 15 % is said to miss."""
    title("Published measurements: predicted beside measured")
    rows = published()
    print(f"{'':44}{'predicted':>15}{'measured':>15}{'':10}{'ratio':>7}")
    source = None
    for what, unit, predicted, measured, where, _ in rows:
        if where != source:
            print(f"{where}:")
        source, ratio = where, predicted / measured
        verdict = "  misses" if abs(ratio - 1) > .15 else ""
        digits = 0 if unit == "params" else 2
        print(f"  {what:42}{predicted:15,.{digits}f}{measured:15,.{digits}f} {unit:9}"
              f"{ratio:7.3f}{verdict}")
    mean, n = geometric_mean(rows)
    missed = sum(abs(predicted / measured - 1) > .15 for _, _, predicted, measured, _, _ in rows)
    print(f"7B to 13B on A100 and A800: geometric mean of predicted / measured time {mean:.2f} "
          f"({n} rows).\nOf {len(rows)} rows {missed} are off by more than 15 %; nothing is fitted "
          "to hide that. The MI300X row\nassumes the spread of the lengths.")


# ------------------------------------------------------------------ this machine

def best_of(work, times=5):
    """Shortest of several runs, in seconds."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return min(spent)


def measure_machine():
    """(FLOP/s of a float32 matrix product, bytes/s of a copy, read and write counted)."""
    a, b = np.ones((1024, 1024), np.float32), np.ones((1024, 1024), np.float32)
    source = np.ones(16 * 2**20, np.float32)
    target = np.empty_like(source)
    return (2 * 1024**3 / best_of(lambda: a @ b),
            2 * source.nbytes / best_of(lambda: np.copyto(target, source)))


def step_overhead(layers, rows):
    """Seconds of a decoding step with next to no arithmetic: width 8, all else the same."""
    cfg = t.ToyLMConfig(vocab_size=8, max_len=64, d_model=8, n_layers=layers, n_heads=1)
    lm, cache = t.TinyCausalLM(cfg, np.random.default_rng(0)), t.KVCache(cfg, rows)
    column = np.ones((rows, 1), np.int64)
    return best_of(lambda: lm(column, cache), 20)


def toy_step(cfg, rows, prompt_len, response_len):
    """Seconds of rollout, scoring and update by the engine's own timer (best of 3), mean length."""
    rng = np.random.default_rng(0)
    policy, critic = t.TinyCausalLM(cfg, rng), t.TinyCritic(cfg, rng)
    history = t.train_ppo(
        policy, policy.frozen_copy(), critic, rng.integers(1, cfg.vocab_size, (rows, prompt_len)),
        lambda tokens, mask: np.zeros(len(tokens)), 0,
        t.PPOConfig(steps=4, max_new_tokens=response_len, ppo_epochs=1), rng=rng)[1:]
    best = {phase: min(stats.seconds[phase] for stats in history) for phase in history[0].seconds}
    return best, np.mean([stats.response_length for stats in history])


def machine_table(rows=64, prompt_len=16, response_len=48):
    """The estimator about our own toy, from this machine's matrix and copy speed."""
    title("This machine, measured, and the toy predicted from it")
    flops, copy = measure_machine()
    cfg = t.ToyLMConfig(vocab_size=256, max_len=64, d_model=128, n_layers=4, n_heads=4)
    overhead = step_overhead(cfg.n_layers, rows)
    print(f"measured here: matrix product {flops / 1e9:.0f} GFLOP/s, copy {copy / 1e9:.1f} GB/s, "
          f"an empty decoding step {overhead * 1e3:.2f} ms")
    measured, length = toy_step(cfg, rows, prompt_len, response_len)
    engine = e.Engine(.7, .5, overhead, batch=rows, paged=False, weight_bytes=4, kv_bytes=4)
    job = e.make_job(dict(
        model=e.toy_arch(cfg), gpu=e.Gpu(flops, copy, 8 * GIB, math.inf), engine=engine, gpus=1,
        zero=0, prompts=rows, prompt_len=prompt_len, response_len=max(1, round(length)),
        recompute="none", recipe="fp32", frozen="fp32"))
    # the toy's reward is a function, not a model: scoring is the reference and the critic alone
    seconds = e.step_time(job._replace(reward=None), rows)
    predicted = {"rollout": seconds["prefill"] + seconds["decoding"],
                 "scoring": seconds["scoring"], "update": seconds["training"]}
    print(f"{cfg.d_model} wide, {cfg.n_layers} layers, {rows} x ({prompt_len} + {length:.0f}) "
          f"tokens, 1 epoch; default MFU: forward {job.mfu_forward}, training {job.mfu_train}")
    reached = {"scoring": job.mfu_forward, "update": job.mfu_train}
    for phase, guess in predicted.items():
        ratio = guess / measured[phase]
        mfu = f", an MFU of {reached[phase] * ratio:.2f}" if phase in reached else ""
        print(f"{phase:10} predicted {guess * 1e3:8.1f} ms   measured "
              f"{measured[phase] * 1e3:8.1f} ms   ratio {ratio:5.2f}{mfu}")
    share = [part["rollout"] / sum(part.values()) for part in (predicted, measured)]
    print(f"generation's share: predicted {share[0]:.0%}, measured {share[1]:.0%}")


# ------------------------------------------------------------------ formulas and pictures

def explanations():
    """Name -> (formula, the same with numbers, what estimator.py computes, unit); JOB's case."""
    est, engine, gpu = e.estimate(**JOB), e.ENGINES["vllm-graph"], e.GPUS["a100-80"]
    seconds, params, kv = est["seconds"], e.count_params(LLAMA), e.kv_bytes_per_token(LLAMA)
    matmul = e.forward_flops(LLAMA, 1, 0) / 2
    actor, value = (e.forward_flops(LLAMA, 1, 640, head) for head in ("lm", "value"))
    models = sum(share for _, share in est["bytes"].values())
    generation = seconds["prefill"] + seconds["decoding"]
    rest = seconds["scoring"] + seconds["training"] + seconds["weight sync"]
    wide = {**JOB, "prompts": 8000, "engine": engine._replace(batch=10**6)}
    return {
        "params": ("V h + L (4 h h + 3 h f + 2 h) + h + V h",
                   "32000 * 4096 + 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 4096"
                   " + 32000 * 4096", params, "parameters"),
        "static": ("(2 (w + g + master + Adam) + 2 frozen) P",
                   "(2 * (2 + 2 + 4 + 8) + 2 * 2) * 7e9", sum(held().values()), "bytes"),
        "zero": ("P (w / n + g / n + (master + Adam) / n), stage 3",
                 "7e9 * (2 / 8 + 2 / 8 + (4 + 8) / 8)",
                 e.four_models(P, 0, 0, zero=3, gpus=8)["policy"], "bytes a GPU"),
        "lora": ("L r sum(inputs + outputs)",
                 "32 * 16 * (4 * (4096 + 4096) + 3 * (4096 + 11008))", ADAPTER, "parameters"),
        "kv": ("2 L kv d bytes", "2 * 32 * 32 * 128 * 2", kv, "bytes a token"),
        "slots": ("(memory - models - reserve - engine's weights) / (kv (p + r / 2))",
                  f"({gpu.memory} - {models} - 2.5e9 - 2 * {params}) // ({kv} * (256 + 1024 / 2))",
                  e.estimate(**wide)["slots"], "sequences a GPU"),
        "activations": ("2 L s b h + s b h (20 + 4 kv / a + 8 f / h) + 4 s b (a + 2) + 14 s b V",
                        "2 * 32 * 1280 * 4096 + 1280 * 4096 * (20 + 4 + 8 * 11008 / 4096)"
                        " + 4 * 1280 * 34 + 14 * 1280 * 32000",
                        e.activation_bytes(LLAMA, 1, 1280, recompute=True), "bytes"),
        "forward": ("2 N_matmul + 4 L a d s / 2", f"2 * {matmul} + 4 * 32 * 32 * 128 * 640", actor,
                    "FLOPs a token"),
        "decoding": ("r ((2 N_matmul + kv n (p + (r - 1) / 2)) / (bandwidth MBU) + overhead)",
                     f"1024 * ((2 * {matmul} + {kv} * 64 * (256 + 1023 / 2)) / (2.039e12 * .75)"
                     " + .001)", seconds["decoding"], "s"),
        "scoring": ("tokens (reference + critic + reward forward) / (GPUs peak MFU)",
                    f"512 * 1280 * ({actor} + 2 * {value}) / (8 * 312e12 * .45)",
                    seconds["scoring"], "s"),
        "training": ("epochs 4 tokens (policy + critic forward) / (GPUs peak MFU)",
                     f"1 * 4 * 512 * 1280 * ({actor} + {value}) / (8 * 312e12 * .40)",
                     seconds["training"], "s"),
        "share": ("generation / (generation + scoring + training + sync)",
                  f"{generation} / ({generation} + {rest})", est["share"], "of the step"),
    }


def explain(name):
    """Print a formula, the formula with numbers, and what estimator.py makes of it."""
    formula, numbers, computed, unit = explanations()[name]
    value, again = (f"{x:,.0f}" if x > 1e6 else f"{x:,.10g}" for x in (eval(numbers), computed))
    lines = textwrap.wrap(numbers, 98, subsequent_indent="  ", break_long_words=False)
    print(f"{name}: {formula}", "= " + "\n".join(lines), f"= {value} {unit} (estimator: {again})",
          sep="\n")


def plot(path):
    """Memory by component for six ways to run it, and generation's share by prompts a GPU."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(12, 4.5))
    cases = {"four models": {}, "no critic": dict(critic=0), "LoRA": dict(lora=(ADAPTER, ADAPTER)),
             "Adam on host": dict(recipe=(2, 2, 0, 0)), "8-bit Adam": dict(recipe=(2, 2, 4, 2)),
             "frozen nf4": dict(frozen=.5625)}
    bottom = np.zeros(len(cases))
    for part in held():
        heights = np.array([held(**change)[part] / GB for change in cases.values()])
        left.bar(list(cases), heights, bottom=bottom, label=part)
        bottom += heights
    left.set(ylabel="GB (1e9 bytes), in all, at rest", title="four models of 7e9 parameters")
    left.tick_params(axis="x", rotation=25)
    left.legend()
    prompts = [2**i for i in range(9)]
    for engine in e.ENGINES:
        shares = [share_of(engine=engine, prompts=8 * n) for n in prompts]
        right.plot(prompts, shares, label=engine)
    right.axhspan(60, 80, alpha=.15, color="grey", label="the chapter's 60-80 %")
    right.set(xscale="log", xlabel="prompts a GPU", ylabel="generation, % of the step",
              title="Llama-2-7B, 8 x a100-80, 256 + 1,024 tokens, 1 epoch")
    right.legend()
    save_plot(figure, path)


def main():
    """Every table, or one formula, or the picture."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--explain", choices=list(explanations()), help="a formula with numbers")
    args = parse_plot(parser, "memory and share")
    if args.explain:
        explain(args.explain)
    elif args.plot:
        plot(args.plot)
    else:
        for table in (memory_table, cuts_table, fits_table, share_table, reward_table,
                      published_table, machine_table):
            table()


if __name__ == "__main__":
    main()
