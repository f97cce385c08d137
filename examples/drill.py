"""Type the five functions at PPO's core from memory, against the clock and their own test.

    python examples/drill.py                      the five, target and best time
    python examples/drill.py gae                  one: type it in an editor, be timed, be tested
    python examples/drill.py gae --check FILE     test what stands in FILE, without waiting

Question: could you write it on a whiteboard? The body is hidden; the signature and the shapes
stand in a scratch file. $EDITOR opens it; without one the path is printed and Enter
says that you are done. Then that function's named test runs on what was typed, with the attribute
of the module replaced in memory: tinyrlhf.py itself is never changed. The best passing time of each
is kept in the state directory ($XDG_STATE_HOME, else ~/.local/state, else the temporary one).

The targets are 8, 10, 8, 4 and 3 minutes, 33 in all. TinyCritic, collect_rollouts, ppo_update,
train_ppo and masked_entropy are for reading only; the sixth named test,
test_train_ppo_increases_reward_with_bounded_kl, runs them together.
"""
import inspect
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import numpy as np

HOME = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HOME))
import tinyrlhf as t  # noqa: E402
from common import Parser  # noqa: E402

DRILLS = {  # name: (minutes, names to type, the test)
    "shaped_rewards": (8, ["last_response_index", "shaped_rewards"],
                       "test_shaped_rewards_places_score_and_kl"),
    "gae": (10, ["gae"], "test_gae_matches_brute_force_and_mc_return"),
    "ppo_clip_loss": (8, ["ppo_clip_loss"], "test_ppo_clip_loss_gradient_and_clipping"),
    "value_loss": (4, ["value_loss"], "test_value_loss_clipping"),
    "AdaptiveKLController.update": (3, ["AdaptiveKLController.update"],
                                    "test_kl_controller_moves_beta_toward_target"),
}
SHAPES = {  # what goes in and what comes out; the formula is yours
    "last_response_index": "mask (B, T) -> (B,) integers",
    "shaped_rewards": "scores (B,), the others (B, T-1), beta a number -> array (B, T-1)",
    "gae": "(B, T-1) each, two numbers -> (advantages, returns), arrays (B, T-1)",
    "ppo_clip_loss": "(B, T-1) each, logp_new a Tensor -> (scalar Tensor, clip fraction)",
    "value_loss": "(B, T-1) each, values a Tensor -> scalar Tensor",
    "AdaptiveKLController.update": "kl in nats per sequence -> the new beta; self.target, "
                                   "self.horizon",
}
HINT = ("x[inside] with a boolean mask leaves out what is masked, on arrays and Tensors.",
        "On Tensors: x.exp() x.mean() t.minimum(x, y) t.maximum(x, y) t.clip(x, low=..., high=...)")
READ_ONLY = "TinyCritic, collect_rollouts, ppo_update, train_ppo, masked_entropy"


def state_file():
    """Where the best times are kept: the first directory that can be written."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    for folder in (Path(state) / "tinyrlhf", Path(tempfile.gettempdir()) / "tinyrlhf"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder / "drill.json"
        except OSError:
            continue
    return Path(tempfile.mkdtemp()) / "drill.json"


def best_times():
    """Best seconds by function; an unreadable file counts as none."""
    try:
        return dict(json.loads(state_file().read_text()))
    except (OSError, ValueError):
        return {}


def clock(seconds):
    """Seconds as minutes:seconds, "-" for none."""
    return "-" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def find(name):
    """A function of the module, or a method of one of its classes."""
    found = t
    for part in name.split("."):
        found = getattr(found, part)
    return found


def skeleton(name):
    """What is to be typed, its body hidden: signature and shapes stay."""
    lines = ["import math", "", "import numpy as np", "", "import tinyrlhf as t", ""]
    if name.endswith("_loss"):
        lines += [f"# {text}" for text in HINT]
    for part in DRILLS[name][1]:
        function = find(part)
        lines += ["", f"def {function.__name__}{inspect.signature(function)}:",
                  f'    """{SHAPES[part]}"""', "    ...", ""]
    return "\n".join(lines)


def typed_functions(path, name):
    """Run the scratch file and take the wanted names from it; a sentence if one is missing."""
    scope = {"__name__": "typed", "__file__": str(path)}
    exec(compile(Path(path).read_text(), str(path), "exec"), scope)
    wanted = [part.split(".")[-1] for part in DRILLS[name][1]]
    for missing in [w for w in wanted if not callable(scope.get(w))]:
        raise NameError(f"{path} defines no function {missing}")
    return [scope[w] for w in wanted]


def replace(name, function):
    """Put a function in the module's place of this name; returns what stood there."""
    owner, _, attribute = name.rpartition(".")
    owner = find(owner) if owner else t
    before = getattr(owner, attribute)
    setattr(owner, attribute, function)
    return before


def first_failure(error, path, test):
    """Lines that show the first wrong figure, the typed line or the test's line, what went in."""
    lines, inputs = [f"{type(error).__name__}: {str(error).strip()}"], []
    step = error.__traceback__
    while step:
        frame, text = step.tb_frame, traceback.extract_tb(step, limit=1)[0]
        if frame.f_code.co_name == "near":  # the tests' comparison: got against want
            lines = [wrong_figure(frame.f_locals["got"], frame.f_locals["want"])]
        if frame.f_code.co_filename == str(path):
            lines.append(f"  your line {text.lineno}: {text.line}")
        if frame.f_code.co_name == test:
            inputs = [f"  the test, line {text.lineno}: {text.line}", *figures(frame.f_locals)]
        step = step.tb_next
    return lines + inputs


def wrong_figure(got, want):
    """The first entry of got that is not want's."""
    got, want = np.asarray(got, float), np.asarray(want, float)
    if got.shape != want.shape:
        return f"the result has shape {got.shape}, {want.shape} is right"
    for place in np.argwhere(~np.isclose(got, want, 1e-12, 1e-12, equal_nan=True))[:1].tolist():
        where = f" at {place}" if place else ""
        return f"first wrong figure{where}: {got[tuple(place)]:.10g}, right is " \
               f"{want[tuple(place)]:.10g}"
    return "the figures agree only roughly"


def figures(variables):
    """The small numbers at hand in the test's frame when it failed."""
    kinds = (int, float, list, tuple, np.ndarray, t.Tensor)
    numbers = {k: v for k, v in variables.items() if isinstance(v, kinds) and np.size(v) < 13}
    return [f"    {k} = {np.array2string(np.asarray(v), precision=4, separator=', ')}"
            .replace("\n", "\n" + " " * (len(k) + 7)) for k, v in numbers.items()]


def parameter_sets(function):
    """The argument sets of a parametrised test, one empty set if it has none."""
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names = [n.strip() for n in mark.args[0].split(",")]
            return [dict(zip(names, values)) for values in mark.args[1]]
    return [{}]


def check(path, name):
    """Run the named test on the typed functions; returns no lines if it passes."""
    try:
        import test_tinyrlhf as tests
    except ImportError as error:
        return [f"the tests need pytest and test_tinyrlhf.py beside tinyrlhf.py: {error}"]
    test, before = DRILLS[name][2], []
    try:
        typed = typed_functions(path, name)
        before = [replace(part, f) for part, f in zip(DRILLS[name][1], typed)]
        for arguments in parameter_sets(getattr(tests, test)):
            getattr(tests, test)(**arguments)
    except Exception as error:  # whatever the reader's code raises is the answer
        return first_failure(error, path, test)
    finally:
        for part, function in zip(DRILLS[name][1], before):
            replace(part, function)
    return []


def show(name):
    """Name, signature, shapes and target, without the body."""
    minutes, parts, test = DRILLS[name]
    for part in parts:
        print(f"{part}{inspect.signature(find(part))}\n    {SHAPES[part]}\n")
    print(f"target {minutes} minutes; test: {test}")


def type_in(name):
    """Let the reader type into a scratch file; returns its path and the seconds it took."""
    path = Path(tempfile.mkdtemp(prefix="tinyrlhf-drill-")) / f"{name.replace('.', '_')}.py"
    path.write_text(skeleton(name))
    began, editor = time.monotonic(), os.environ.get("EDITOR")
    if editor:
        try:
            subprocess.run([*shlex.split(editor), str(path)], check=False)
        except OSError as error:
            sys.exit(f"$EDITOR, {editor}, did not start: {error}")
    else:
        input(f"type the body in {path}\nand press Enter when it is saved ... ")
    return path, time.monotonic() - began


def drill(name):
    """Show, time, test; keep the best time of a pass."""
    show(name)
    path, seconds = type_in(name)
    failure = check(path, name)
    if failure:
        print(f"not yet, after {clock(seconds)}:", *failure, f"your text is kept in {path}",
              sep="\n")
        return 1
    best, target = best_times(), DRILLS[name][0] * 60
    verdict = "within" if seconds <= target else "over"
    print(f"passes {DRILLS[name][2]} in {clock(seconds)}, {verdict} the target of {clock(target)}; "
          f"best before: {clock(best.get(name))}")
    best[name] = min(seconds, best.get(name, seconds))
    state_file().write_text(json.dumps(best))
    return 0


def overview():
    """The five functions with target and best time."""
    best = best_times()
    print(f"{'function':30}{'target':>8}{'best':>8}   test")
    for name, (minutes, parts, test) in DRILLS.items():
        print(f"{name:30}{clock(minutes * 60):>8}{clock(best.get(name)):>8}   {test}")
    print(f"read only: {READ_ONLY}")


def main():
    """The list, a drill, or a check."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=list(DRILLS), help="the function to type")
    parser.add_argument("--check", metavar="FILE", help="test what stands in FILE, without waiting")
    args = parser.parse_args()
    if args.check and not args.name:
        parser.error("--check needs the name of a function")
    if args.check and not Path(args.check).is_file():
        parser.error(f"there is no file {args.check}")
    if args.check:
        failure = check(args.check, args.name)
        print(*(failure or [f"passes {DRILLS[args.name][2]}"]), sep="\n")
        sys.exit(bool(failure))
    if args.name:
        try:
            sys.exit(drill(args.name))
        except (EOFError, KeyboardInterrupt):
            sys.exit("\nstopped; nothing was recorded")
    overview()


if __name__ == "__main__":
    main()
