"""LLaMA-Factory and the packages it needs: found, of versions that go together, and importable."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator
from typing import NoReturn

from kt_kernel.sft.train.events import TrainingError

LEAST = "0.9.5"  # the first that takes transformers 5, where the experts of a layer are one module
LEAST_PEFT = "0.21.0"
# The two lines that make an environment; its own list of needs has CUDA builds of torchaudio and torchvision in it.
INSTALL = (
    'pip install torch transformers==5.6.0 trl==0.24.0 "peft>=0.21" accelerate==1.11.0 datasets==4.0.0 omegaconf fire '
    'sse-starlette fastapi uvicorn "av<=16" "tyro<0.9" pandas matplotlib sentencepiece '
    "&& pip install --no-deps llamafactory==0.9.5"
)


def check() -> None:
    """Versions, by what is installed: nothing is imported."""
    found = version_of("llamafactory")
    if found is None or importlib.util.find_spec("llamafactory") is None:
        raise TrainingError(f"LLaMA-Factory is not installed for {sys.executable}: {INSTALL}", "unsupported")
    if _numbers(found) < _numbers(LEAST):
        raise TrainingError(
            f"LLaMA-Factory {found}: {LEAST} or newer is needed, the first that takes transformers 5: {INSTALL}",
            "unsupported",
        )
    peft = version_of("peft")
    if peft is None or _numbers(peft) < _numbers(LEAST_PEFT):
        why = "LoRA on experts that are on KT; LLaMA-Factory's own limit on it is passed over"
        _refuse("peft", peft, f">={LEAST_PEFT}", why)
    transformers = version_of("transformers")
    if transformers is None or _numbers(transformers) < (5,):
        _refuse("transformers", transformers, ">=5,<=5.6.0", "experts on KT")
    # It checks its limits when it is imported; PEFT's is wrong for us, so all but that are checked here instead.
    if not _is_on("DISABLE_VERSION_CHECK"):
        for name in ("transformers", "trl"):
            _check_limits(name, found)
        os.environ["DISABLE_VERSION_CHECK"] = "1"


def _is_on(name):
    return os.environ.get(name, "").lower() in ("1", "true", "y")


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _refuse(name: str, found: str | None, wanted: str, why: str) -> NoReturn:
    raise TrainingError(
        f"{name} {found or 'is not installed'}: {why}, needs {name}{wanted}: pip install '{name}{wanted}'",
        "unsupported",
    )


def _check_limits(name: str, factory: str) -> None:
    """What LLaMA-Factory itself asks of a package."""
    from packaging.requirements import Requirement

    found = version_of(name)
    for text in importlib.metadata.requires("llamafactory") or ():
        wanted = Requirement(text)
        if wanted.name == name and wanted.marker is None and (found is None or found not in wanted.specifier):
            _refuse(name, found, str(wanted.specifier), f"LLaMA-Factory {factory}")


def load() -> None:
    """Imports LLaMA-Factory. One line for what it cannot do without."""
    for name in ("torchvision", "torchaudio"):
        _check_builds(name)
    try:
        with _without_torchaudio():
            importlib.import_module("llamafactory.train.tuner")
    except ImportError as error:
        name = (error.name or "").split(".")[0]
        more = f": pip install {name}" if name and isinstance(error, ModuleNotFoundError) else ""
        raise TrainingError(f"LLaMA-Factory does not load: {error}{more}", "unsupported") from error


def _check_builds(name: str) -> None:
    """Builds for CUDA fail on other machines, and then take transformers with them."""
    if importlib.util.find_spec(name) is None:
        return
    try:
        importlib.import_module(name)
    except Exception as error:  # OSError, RuntimeError, ImportError: whatever their libraries meet
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrainingError(
            f"{name} does not load here ({first}); it is not needed: pip uninstall {name}", "unsupported"
        ) from error


@contextlib.contextmanager
def _without_torchaudio() -> Iterator[None]:
    """LLaMA-Factory imports torchaudio for rows with sound. Where there is none, a module that says so stands in while
    it is imported."""
    if importlib.util.find_spec("torchaudio") is not None:
        yield
        return
    from transformers.utils import is_torchaudio_available

    is_torchaudio_available()  # remembered: transformers is not to find the stand-in
    sys.modules["torchaudio"] = _NoSound("torchaudio")
    try:
        yield
    finally:
        del sys.modules["torchaudio"]


class _NoSound(types.ModuleType):
    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError("torchaudio is not installed: rows with sound need it")
