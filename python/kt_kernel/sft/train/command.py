"""The command line of `python -m kt_kernel.sft`: packages, signals, exit codes."""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import signal
import sys
import traceback
import warnings

from .events import Events, TrainingError
from .files import full_disk
from .plan import Plan, read_plan

INTERRUPTED = 130
_NEEDED = ("torch", "transformers", "peft", "accelerate")
_PREFERENCES = ("trl", "datasets")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m kt_kernel.sft",
                                     description="Trains what `kt sft train` has planned.")
    parser.add_argument("--plan", required=True,
                        help="the plan as JSON, from `kt sft train FILE --dry-run --json`; -: standard input")
    parser.add_argument("--events", action="store_true", help="tell progress as an object a line")
    flags = parser.parse_args(words)
    events = Events(flags.events)
    output = None
    try:
        plan = read_plan(flags.plan)
        output = pathlib.Path(plan.output)
        return _run(plan, events)
    except TrainingError as error:
        events.fail(error)
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except MemoryError as error:
        events.fail(TrainingError(f"out of memory: {error}", "memory"))
    except Exception as error:
        if output and (full := full_disk(error, output)):
            events.fail(full)
            return full.code
        traceback.print_exc()
        wrapped = TrainingError(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}", _kind_of(error))
        events.fail(wrapped)
        return wrapped.code
    return TrainingError.CODES["memory"]


def _kind_of(error):
    if (type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error)
        or "can't allocate memory" in str(error)):
        return "memory"
    return "input" if isinstance(error, ValueError | FileNotFoundError) else "internal"


def _run(plan: Plan, events: Events) -> int:
    _check_packages(plan)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise TrainingError("WORLD_SIZE: training is one process, which uses all cores and may use several GPUs",
                            "unsupported")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore", FutureWarning)  # of transformers about its own names
    stop = _catch_signals()
    from .driver import train

    return INTERRUPTED if train(plan, events, stop) else 0


def _check_packages(plan):
    needed = _NEEDED if plan.stage == "sft" else _NEEDED + _PREFERENCES
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise TrainingError(
            f"training needs {', '.join(missing)}: {sys.executable} -m pip install {' '.join(missing)}", "unsupported"
        )


class _Signals:
    """The first one asks for an end, the second is one."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, *_: object) -> None:
        if self.asked:
            os._exit(INTERRUPTED)
        self.asked = True


def _catch_signals():
    stop = _Signals()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stop
