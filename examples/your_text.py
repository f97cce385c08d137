"""Can a language model that learnt your own text be taught to write it without the letter e?

    python examples/your_text.py          the manual that ships inside Python (pydoc_data.topics)
    python examples/your_text.py FILE     any text in UTF-8, 2,000 characters or more

A model of characters, one layer and 64 wide, learns the text (SFT); the last tenth is held out.
Then PPO: a response loses a point for each time it says the text's commonest letter and earns .1
for any other letter, so rulers and brackets are no way out. The KL (target 4 nats per sequence) and
the SFT loss mixed in (PPO-ptx) hold it to the text. In the samples that letter stands in capitals.

Running text has no end, so a response is always 32 characters; the end token has an id of its own,
which the model learns to say hardly ever. Of a long text five million characters are read; the
300 commonest have an id, all others share one.

Found, with Python 3.11's manual (417,746 characters, 102 different):
- SFT: held-out loss 4.725 -> 1.786 nats a character; characters counted one by one give 3.229.
- PPO: 3.22 e a response become .66 and the score goes from -1.12 to 1.67, for 5.17 nats of KL. It
  turns to words without e and misspells others, in English as rough as a model this small writes.
- The price is on the text: held-out loss 1.786 -> 1.897. With ptx_coef=0 in CFG it is 2.033, for
  .34 e a response, a score of 2.03 and 5.01 nats: more score, and twice the damage.
One seed, and float32: another version of Python has another manual and another machine another
rounding, so other figures (under an earlier rounding PPO had .96 e, 1.35 and a loss of 1.868).
"""
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tinyrlhf as t  # noqa: E402
from common import Parser, cell, title  # noqa: E402

END, OTHER = 0, 1  # ids: an end that no text contains, and one for all characters that are rare
KEEP, MOST, LEAST = 300, 5_000_000, 2000  # characters: with an id of their own, read, needed
PROMPT, NEW = 16, 32  # characters of a prompt and of a response, which is always this long
ROWS = 128  # responses a step
CFG = t.PPOConfig(steps=40, max_new_tokens=NEW, beta=0.2, kl_target=4.0, kl_horizon=10, lr=7e-4,
                  value_clip_eps=2.0, ppo_epochs=1, minibatch_rows=32, lam=0.9, ptx_coef=0.5)


def tidy(text):
    """White space becomes one space; rulers, four or more of one sign in a row, go too."""
    return " ".join(re.sub(r"([^\w\s])\1{3,}", " ", text).split())


def read_text(parser, file):
    """The reader's text, or Python's own manual; a file that cannot serve gets one sentence."""
    if file is None:
        from pydoc_data.topics import topics
        return tidy("\n".join(topics.values()))
    try:
        with open(file, encoding="utf-8-sig") as f:
            text = f.read(MOST)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        parser.error(f"{file} cannot be read: {reason}")
    if "\0" in text:
        parser.error(f"{file} cannot be read: it is binary")
    text = tidy(text)
    if len(text) < LEAST:
        parser.error(f"{file} holds {len(text)} characters of text; {LEAST} or more are needed")
    if not any(map(str.isalpha, text)):
        parser.error(f"{file} holds no letters")
    return text


def encode(text):
    """text -> (ids (L,), the character of each id); all but the KEEP commonest share OTHER."""
    chars, counts = ["<end>", "\N{REPLACEMENT CHARACTER}"], Counter(filter(str.isprintable, text))
    chars += [c for c, _ in counts.most_common(KEEP) if c != chars[OTHER]]
    known = {c: i for i, c in enumerate(chars)}
    return np.array([known.get(c, OTHER) for c in text]), chars


def letter_worth(text, chars):
    """The text's commonest letter, and what each id earns: it -1, other letters .1, the rest 0."""
    letter = Counter(filter(str.isalpha, text.lower())).most_common(1)[0][0]
    worth = [-1 if c.lower() == letter else 0.1 * (len(c) == 1 and c.isalpha()) for c in chars]
    return letter, np.array(worth)


def windows(ids, rows, rng):
    """Random pieces of the text, each a prompt and a response long -> (rows, PROMPT + NEW)."""
    starts = rng.integers(0, len(ids) - PROMPT - NEW + 1, rows)
    return ids[starts[:, None] + np.arange(PROMPT + NEW)]


def text_loss(model, rows):
    """The SFT loss on some windows, nats a character."""
    with t.no_grad():
        return float(t.sft_loss(model(rows), rows))


def learn(policy, ids, rng, rows=20, lr=5e-3):
    """SFT on random windows; the learning rate rises over 50 steps, then falls to a tenth."""
    opt = t.Adam(policy.parameters(), lr, betas=(0.9, 0.99))
    steps = min(800, 150 + len(ids) // 20)  # a short text would be learnt by heart
    for step in range(steps):
        opt.lr = lr * min(1, (step + 1) / 50, 1.1 - step / steps)
        opt.zero_grad()
        batch = windows(ids, rows, rng)
        t.sft_loss(policy(batch), batch).backward()
        t.clip_grad_norm(opt.params, 1.0)
        opt.step()


def ppo(policy, ref, ids, worth, rng):
    """train_ppo spelt out, for each step takes new prompts and new text for the SFT loss.

    One batch of text kept for all steps would be learnt by heart: that costs KL and earns nothing.
    """
    critic, on_step = t.TinyCritic.from_backbone(policy), t.progress(CFG.steps)
    opt = t.Adam(policy.parameters() + critic.parameters(), CFG.lr)
    controller = t.AdaptiveKLController(CFG.beta, CFG.kl_target, CFG.kl_horizon)
    for step in range(CFG.steps):
        prompts, text = windows(ids, ROWS, rng)[:, :PROMPT], windows(ids, 32, rng)
        roll = t.collect_rollouts(policy, ref, critic, prompts, NEW, END, rng=rng)
        scores = (worth[roll.tokens[:, 1:]] * roll.mask).sum(axis=1)
        stats = t.ppo_update(policy, critic, opt, roll, scores, controller.beta, CFG, rng=rng,
                             ptx_batch=(text, text))
        controller.update(stats.kl)
        on_step(step, stats)


def measure(name, policy, ref, held_out, worth):
    """A line of means over responses to held-out prompts -> the tokens of those responses."""
    s = t.sample(policy, held_out[:, :PROMPT], NEW, END, rng=np.random.default_rng(1))
    with t.no_grad():
        logp_ref = t.token_log_probs(ref(s.tokens), s.tokens).data
    kl = ((s.logp - logp_ref) * s.token_mask[:, 1:]).sum(axis=1).mean()
    earned = worth[s.tokens] * s.token_mask
    print(f"{name:12}{earned.sum(axis=1).mean():17.2f}{(earned < 0).sum(axis=1).mean():14.2f}"
          + cell(float(kl), 14, 2) + cell(text_loss(policy, held_out), 19))
    return s.tokens


def show(before, after, chars, worth, rows=12):
    """A prompt, its response before and after PPO; the letter to avoid stands in capitals."""
    shown = np.array([c.upper() if w < 0 else c for c, w in zip(chars, worth)])
    print(f"\n{'prompt':{PROMPT}} | {'before PPO':{NEW}} | after PPO")
    for old, new in zip(before[:rows], after[:rows]):
        parts = old[:PROMPT], old[PROMPT:], new[PROMPT:]
        print(" | ".join("".join(shown[ids]) for ids in parts))


def main():
    """Text, SFT, PPO, figures and samples before and after."""
    parser = Parser(description="SFT, then PPO, on the characters of your own text.")
    parser.add_argument("file", nargs="?", metavar="FILE", help="UTF-8; default: Python's manual")
    file, rng = parser.parse_args().file, np.random.default_rng(0)
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character of the text
    text = read_text(parser, file)
    ids, chars = encode(text)
    letter, worth = letter_worth(text, chars)
    cut = len(ids) - max(len(ids) // 10, 200)  # what lies behind is never trained on
    train, held_out = ids[:cut], windows(ids[cut:], 256, rng)
    share = np.unique(ids, return_counts=True)[1] / len(ids)
    title(f"{file or 'the manual inside Python'}: {len(ids):,} characters, {len(share)} different")
    print(f"too rare for an id: {(ids == OTHER).mean():.2%}; the commonest letter: {letter}")

    policy = t.TinyCausalLM(t.ToyLMConfig(len(chars), PROMPT + NEW, 64, 1, 4), rng)
    for p in policy.parameters():
        p.data *= 3 if p.data.ndim == 2 else 1  # GPT-2's .02 is for wide models: learns sooner
    first = text_loss(policy, held_out)
    print("SFT, some 10 s", flush=True)
    learn(policy, train, rng)
    print(f"held-out loss {first:.3f} -> {text_loss(policy, held_out):.3f} nats a character; "
          f"characters counted one by one {-share @ np.log(share):.3f}")

    title(f"PPO: -1 for each {letter}, +.1 for each other letter; KL target {CFG.kl_target} nats")
    ref = policy.frozen_copy()
    ppo(policy, ref, train, worth, rng)
    print(f"\n{f'{len(held_out)} held-out prompts':22}{'score':>7}{letter + ' a response':>14}"
          f"{'KL, nats/seq':>14}{'SFT loss held out':>19}")
    before = measure("before PPO", ref, ref, held_out, worth)
    after = measure("after PPO", policy, ref, held_out, worth)
    show(before, after, chars, worth)


if __name__ == "__main__":
    main()
