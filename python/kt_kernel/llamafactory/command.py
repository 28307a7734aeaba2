"""The command line of `python -m kt_kernel.llamafactory`."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile

from kt_kernel.sft.train.events import TrainingError

from . import packages
from .recipe import Door, door_of, read_recipe

INTERRUPTED = 130
COMMANDS = ("train", "chat", "api", "export")
_EXPORT = (
    "export: LLaMA-Factory merges LoRA into weights that torch holds, and experts on KT are not among them; "
    "kt sft export ADAPTER -o OUT --layout merged writes the merged checkpoint"
)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kt_kernel.llamafactory",
        description="Runs LLaMA-Factory, as it is installed, with the experts of its models on KT.",
        epilog="docs/llamafactory.md says which versions go together, and which keys are KT's.",
    )
    parser.add_argument("command", choices=COMMANDS, help="LLaMA-Factory's own; export names kt sft export")
    parser.add_argument("file", metavar="FILE.yaml", help="its recipe, with KT's keys in it or without")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="instead of the recipe's")
    flags = parser.parse_args(words)
    try:
        _run(flags.command, flags.file, flags.overrides)
    except TrainingError as error:
        print(f"kt_kernel.llamafactory: {' '.join(str(error).split())}", file=sys.stderr)
        return error.code
    except MemoryError as error:
        print(f"kt_kernel.llamafactory: out of memory: {error}", file=sys.stderr)
        return TrainingError.CODES["memory"]
    except KeyboardInterrupt:
        return INTERRUPTED
    except EOFError:
        if flags.command != "chat":
            raise
    return 0


def _run(command: str, file: str, overrides: list[str]) -> None:
    if command == "export":
        raise TrainingError(_EXPORT, "unsupported")
    packages.check()
    _environment(command)
    path = pathlib.Path(file)
    given = read_recipe(path, overrides)
    door = door_of(given, trains=command == "train")
    for line in door.notes:
        print(f"kt_kernel.llamafactory: note: {line}", file=sys.stderr)
    packages.load()
    if command == "train":
        _one_process()
    _call(command, path.stem, door)


def _environment(command: str) -> None:
    """What LLaMA-Factory and torch read from it. USE_KT keeps LLaMA-Factory's launcher from starting a process for
    each GPU."""
    for name in ("USE_V1", "USE_MCA", "USE_RAY", "FORCE_TORCHRUN"):
        if os.environ.get(name, "").lower() in ("1", "true", "y"):
            raise TrainingError(f"{name}: not with experts on KT; unset it", "unsupported")
    if command == "train" and int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise TrainingError(
            "WORLD_SIZE: training is one process, which uses all cores; start it without torchrun or accelerate launch",
            "unsupported",
        )
    os.environ["USE_KT"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads would spin while KT's work
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _one_process() -> None:
    import torch

    if torch.cuda.device_count() > 1:
        raise TrainingError(
            f"{torch.cuda.device_count()} GPUs are visible, and LLaMA-Factory wants a process for each; training with "
            "experts on KT is one: CUDA_VISIBLE_DEVICES=0 (kt sft train divides layers among several)",
            "unsupported",
        )


def _call(command: str, name: str, door: Door) -> None:
    """LLaMA-Factory's main(), with the recipe that is left for it."""
    from omegaconf import OmegaConf

    from . import swaps

    swaps.install(door)
    from llamafactory.cli import main as its_main

    before = sys.argv
    with tempfile.TemporaryDirectory() as folder:
        rest = pathlib.Path(folder) / f"{name}.yaml"
        OmegaConf.save(OmegaConf.create(door.rest), rest)
        sys.argv = ["llamafactory-cli", command, str(rest)]
        try:
            its_main()
        finally:
            sys.argv = before
