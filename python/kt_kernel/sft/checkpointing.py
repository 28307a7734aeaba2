"""Gradient checkpointing without running experts twice.

torch.utils.checkpoint forgets what a block computed and runs the block again in the backward pass. Experts on KT
keep what their backward needs on the CPU, so their part of the second run can be what the first one gave: two
contexts share it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch


class _Current(threading.local):
    run: Run | None = None


_current = _Current()


class Record:
    """Outputs of the experts of one checkpointed block, by module and how often it had run in the block before."""

    def __init__(self) -> None:
        self._outputs: dict[tuple[int, int], tuple[torch.Tensor, int]] = {}

    def put(self, key: tuple[int, int], output: torch.Tensor) -> None:
        """output: on the CPU. No copy: whoever writes to it later is found out by its version."""
        output = output.detach()
        self._outputs[key] = output, output._version

    def get(self, key: tuple[int, int]) -> torch.Tensor | None:
        output, version = self._outputs.get(key, (None, 0))
        if output is None or output._version != version:
            return None
        return output


class Run:
    """One run of a checkpointed block: the first, or, `again`, one in the backward pass. A context, entered any
    number of times."""

    def __init__(self, record: Record, again: bool) -> None:
        self.record, self.again = record, again
        self._seen: Counter[int] = Counter()
        self._before: Run | None = None

    def __enter__(self) -> None:
        self._seen.clear()
        self._before, _current.run = _current.run, self

    def __exit__(self, *error: object) -> None:
        self._before, _current.run = None, self._before

    def next_key(self, module: object) -> tuple[int, int]:
        self._seen[id(module)] += 1
        return id(module), self._seen[id(module)]


def current_run() -> Run | None:
    """The run of a checkpointed block that this thread is in."""
    return _current.run


def get_activation_checkpoint_context_fn() -> Callable[[], tuple[Run, Run]]:
    """For `context_fn` of torch.utils.checkpoint.checkpoint(use_reentrant=False): called once for each block, it
    gives the contexts of the block's first run and of those in the backward pass, which then do not compute experts
    again. kt_kernel.transformers.enable(..., trainable=True) puts it where transformers' gradient checkpointing
    finds it."""

    def contexts() -> tuple[Run, Run]:
        record = Record()
        return Run(record, again=False), Run(record, again=True)

    return contexts


def in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread: a forward pass then is somebody's second."""
    number: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)
    return number is not None and number() != -1


class _Told:
    once = False


def tell_of_second_run() -> None:
    if not _Told.once:
        _Told.once = True
        logging.getLogger("kt_kernel").warning(
            "gradient checkpointing computes experts twice here: give it use_reentrant=False and "
            "context_fn=kt_kernel.sft.get_activation_checkpoint_context_fn()"
        )


def checkpointing_enable(model: torch.nn.Module) -> Callable[..., Any]:
    """`model.gradient_checkpointing_enable` with our contexts where the caller leaves that open."""
    stock: Callable[..., Any] = getattr(type(model), "gradient_checkpointing_enable")  # noqa: B009

    def enable(gradient_checkpointing_kwargs: dict[str, Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        asked = dict(gradient_checkpointing_kwargs or {"use_reentrant": False})
        if asked.get("use_reentrant") is False:
            asked.setdefault("context_fn", get_activation_checkpoint_context_fn())
        return stock(model, asked, *args, **kwargs)

    return enable
