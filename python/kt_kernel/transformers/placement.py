"""Which experts of a transformers model are on its device: at the start, and by live routing later."""

from __future__ import annotations

import dataclasses
import numbers
import operator
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kt_kernel import placement as tables

from .experts import KTExperts, Shape, plain_tensors
from .modules import device_of

PathLike = str | os.PathLike[str]


# --- counting ---


class _Tally:
    """The one table that all who count a model's routing share; modules add to it while there is any."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = modules_of(model)
        self._table = tables.ExpertRecorder(*table_shape(model, [module.shape for module in self._modules.values()]))
        self._lock = threading.Lock()
        self._users = 0

    def join(self) -> None:
        self._change(1)

    def leave(self) -> None:
        self._change(-1)

    def counts(self) -> torch.Tensor:
        counts: torch.Tensor = self._table.counts()
        return counts

    def _change(self, by: int) -> None:
        with self._lock:
            self._users += by
            for module in self._modules.values():
                module.recorder = self._table if self._users else None


class Recorder:
    """Counts of expert activations of one model, from its live routing. Rows are the model's layers, dense ones too.
    Any thread may call any method."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tally = _of_model(model, "_kt_tally", _Tally)
        self._lock = threading.Lock()
        self._running = False
        self._before = self._start = torch.zeros_like(self._tally.counts())

    def start(self) -> Recorder:
        """Counts on from here; nothing if it counts already. Returns the recorder."""
        with self._lock:
            if not self._running:
                self._tally.join()
                self._start = self._tally.counts()
                self._running = True
        return self

    def stop(self) -> Recorder:
        """Counts no more; what was counted stays until reset(). Others, such as update_every, count on. Returns the
        recorder."""
        with self._lock:
            if self._running:
                self._before = self._now()
                self._running = False
                self._tally.leave()
        return self

    def reset(self) -> None:
        """Forgets all counts, and counts on if it did."""
        with self._lock:
            self._start = self._tally.counts()
            self._before = torch.zeros_like(self._start)

    def counts(self) -> torch.Tensor:
        """int64 CPU [layers, experts]"""
        with self._lock:
            return self._now()

    def save(self, path: PathLike) -> None:
        """.pt (the form of SGLang's statistics) or .json; `enable(..., statistics=path)` reads both."""
        tables.write_statistics(path, self.counts())

    def _now(self) -> torch.Tensor:
        with plain_tensors():
            return self._before + (self._tally.counts() - self._start) if self._running else self._before.clone()


def recorder(model: torch.nn.Module) -> Recorder:
    """The model's recorder, counting from the first call on, and again after stop()."""
    return _recorder_of(model).start()


def _recorder_of(model: torch.nn.Module) -> Recorder:
    found: Recorder = _of_model(model, "_kt_recorder", lambda model: Recorder(model).start())
    return found


# --- models ---


def modules_of(model: torch.nn.Module) -> dict[str, KTExperts]:
    """{name: KTExperts} of an enabled model, in order of layers."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, KTExperts)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts on KT: call kt_kernel.transformers.enable first")
    for module in found.values():
        if module.unusable:
            raise RuntimeError(module.unusable)
    return dict(sorted(found.items(), key=lambda item: item[1].shape.layer))


def table_shape(model: Any, shapes: Sequence[Shape]) -> tuple[int, int]:
    """Layers of the model and experts of each, for tables of all layers."""
    stated = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    return max(stated, max(shape.layer for shape in shapes) + 1), shapes[0].experts


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself of one that torch.compile made."""
    return model._orig_mod if isinstance(getattr(model, "_orig_mod", None), torch.nn.Module) else model


_attaching = threading.RLock()


def _of_model(model: torch.nn.Module, name: str, make: Any) -> Any:
    """What the model keeps under `name`, made when first asked for."""
    model = _bare(model)
    with _attaching:
        if name not in model.__dict__:
            model.__dict__[name] = make(model)
        return model.__dict__[name]


# --- what enable() is told ---


@dataclasses.dataclass
class Plan:
    """Which experts are to be on the device. What can be checked without a model is, when it is made."""

    gpu_experts: Any = None
    strategy: str | None = None
    statistics: Any = None
    update_every: int | None = None

    def __post_init__(self) -> None:
        if self.gpu_experts is None:
            if self.statistics is not None or self.strategy is not None:
                raise ValueError("strategy and statistics say which experts; gpu_experts says how many, and it is None")
            if self.update_every is not None:
                raise ValueError("update_every moves experts of the device; gpu_experts says how many, and it is None")
            return
        if self.update_every is not None:
            self.update_every = _interval(self.update_every)
        self.gpu_experts = _mask_or_number(self.gpu_experts)
        if isinstance(self.gpu_experts, torch.Tensor):
            if self.statistics is not None or self.strategy is not None:
                raise ValueError("gpu_experts is a mask and says which experts: strategy and statistics have no use")
            return
        if self.strategy is None:
            self.strategy = "uniform" if self.statistics is None else "frequency"
        if self.strategy not in tables.STRATEGIES:
            raise ValueError(f"strategy {self.strategy!r} is not known; one of: {', '.join(tables.STRATEGIES)}")
        if self.strategy == "frequency" and self.statistics is None:
            raise ValueError('strategy "frequency" needs statistics: a table [layers, experts], or a .pt or .json file')
        if self.strategy != "frequency" and self.statistics is not None:
            raise ValueError(f'statistics are for strategy "frequency", it is {self.strategy!r}')
        if isinstance(self.statistics, (str, os.PathLike)):
            self.statistics = tables.read_statistics(self.statistics)

    def masks(self, model: torch.nn.Module, shapes: Iterable[Shape]) -> torch.Tensor | None:
        """bool [layers, experts], or None where all experts stay with KT. Needs no weights."""
        if self.gpu_experts is None:
            return None
        shapes = list(shapes)
        layers, experts = table_shape(model, shapes)
        rows = sorted({shape.layer for shape in shapes})
        if isinstance(self.gpu_experts, torch.Tensor):
            return _whole_table(self.gpu_experts, layers, experts, rows)
        total = how_many(self.gpu_experts, len(rows), experts)
        assert self.strategy is not None  # chosen when the plan was made
        with plain_tensors():
            return tables.place(self.strategy, layers, experts, total, self.statistics, moe_layers=rows)


def _interval(value: Any) -> int:
    try:
        passes = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        passes = 0
    if passes < 1:
        raise ValueError(f"update_every: expected a number of forward passes, got {value!r}")
    return passes


def _mask_or_number(given: Any) -> torch.Tensor | int | float:
    """gpu_experts as a bool tensor on the CPU, an int or a float."""
    if isinstance(given, torch.Tensor) and given.dim() == 0:
        given = given.item()
    if isinstance(given, (torch.Tensor, list, tuple)) or getattr(given, "ndim", 0) != 0:
        try:
            with plain_tensors():
                mask = torch.as_tensor(given).cpu()
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"gpu_experts: expected a bool mask [layers, experts], got {given!r}") from None
        if mask.dtype != torch.bool:
            shown = f"{list(mask.shape)} {mask.dtype}"
            raise TypeError(f"gpu_experts: expected a bool mask [layers, experts], got numbers, {shown}")
        return mask
    if not isinstance(given, bool):
        try:
            return operator.index(given)
        except TypeError:
            if isinstance(given, numbers.Real):
                return float(given)
    raise TypeError(f"gpu_experts: expected a number for each layer, a share or a mask, got {given!r}")


def how_many(gpu_experts: int | float, layers: int, experts: int, name: str = "gpu_experts") -> int:
    """Experts of all layers together: an int is a number for each layer, a float a share of all."""
    limit = experts if isinstance(gpu_experts, int) else 1
    if not 0 <= gpu_experts <= limit:
        raise ValueError(f"{name}: expected 0 to {limit}, got {gpu_experts}")
    return round(gpu_experts * layers * (1 if isinstance(gpu_experts, int) else experts))


def _whole_table(mask: torch.Tensor, layers: int, experts: int, rows: Sequence[int]) -> torch.Tensor:
    if tuple(mask.shape) == (layers, experts):
        return mask
    if tuple(mask.shape) == (len(rows), experts):
        table = torch.zeros(layers, experts, dtype=torch.bool, device="cpu")
        table[rows] = mask
        return table
    raise ValueError(
        f"gpu_experts: expected a mask [{layers}, {experts}] or [{len(rows)}, {experts}] (layers with experts only), "
        f"got {list(mask.shape)}"
    )


# --- changes ---


def apply_masks(model: torch.nn.Module, masks: torch.Tensor) -> int:
    """masks: bool [layers, experts]. How many experts came to their device anew."""
    moved = 0
    for name, module in modules_of(model).items():
        mask = masks[module.shape.layer].to(device="cpu", dtype=torch.bool)
        moved += int((mask & ~module.gpu_experts_mask).sum())
        module.place(mask, device_of(model, name))
    return moved


def update_placement(
    model: torch.nn.Module,
    num_gpu_experts: int | float | None = None,
    *,
    per_layer: bool = False,
    counts: torch.Tensor | Sequence[Sequence[int]] | PathLike | None = None,
) -> int:
    """Moves the experts that live routing used most onto the model's device. Returns how many experts moved.

    num_gpu_experts: for each layer on average, or a share (float) of all; None: as many as there are now.
    per_layer: that many in each layer, instead of the busiest of the whole model.
    counts: [layers, experts], or a file of them; what recorder(model) has seen if None.
    Masks change in place. Any thread may call this while others run the model: each layer changes between two forwards.
    """
    model = _bare(model)
    modules = modules_of(model)
    layers, experts = table_shape(model, [module.shape for module in modules.values()])
    rows = [module.shape.layer for module in modules.values()]
    with _of_model(model, "_kt_changes", lambda model: threading.RLock()), plain_tensors():
        if num_gpu_experts is None:
            total = sum(int(module.gpu_experts_mask.sum()) for module in modules.values())
        else:
            number = _mask_or_number(num_gpu_experts)
            if isinstance(number, torch.Tensor):
                raise TypeError("num_gpu_experts: expected a number for each layer or a share, "
                                f"got {num_gpu_experts!r}")
            total = how_many(number, len(rows), experts, "num_gpu_experts")
        table = _recorder_of(model).counts() if counts is None else _counts_of(counts, layers, experts)
        if not table.any():
            return 0  # nothing was seen: no reason to move anything
        if not per_layer:
            return apply_masks(model, tables.place("frequency", layers, experts, total, table, moe_layers=rows))
        masks = torch.zeros(layers, experts, dtype=torch.bool, device="cpu")
        for at, row in enumerate(rows):
            share = total // len(rows) + (at < total % len(rows))
            masks[row] = tables.place("frequency", 1, experts, share, table[row : row + 1])[0]
        return apply_masks(model, masks)


def _counts_of(counts: Any, layers: int, experts: int) -> torch.Tensor:
    if isinstance(counts, (str, os.PathLike)):
        counts = tables.read_statistics(counts)
    try:
        table = torch.as_tensor(counts).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"counts: expected a table [{layers}, {experts}] of numbers, "
                        f"got {type(counts).__name__}") from None
    if table.dim() == 3:  # a file's buffer dimension
        table = table.sum(dim=0)
    if tuple(table.shape) != (layers, experts):
        raise ValueError(f"counts: expected [{layers}, {experts}], got {list(table.shape)}")
    return table


class AutoUpdate:
    """A hook of the model: after every `interval` forward passes the placement follows what was routed since."""

    def __init__(self, model: torch.nn.Module, interval: int, per_layer: bool = False) -> None:
        self._interval, self._per_layer, self._passes = _interval(interval), per_layer, 0
        self._lock, self._changes = threading.Lock(), threading.Lock()
        self._recorder = Recorder(model).start()  # its own: nobody else stops or resets it
        self._seen = self._recorder.counts()
        self._hook = model.register_forward_hook(self._after)

    @torch.compiler.disable
    def _after(self, model: torch.nn.Module, inputs: object, output: object) -> None:
        with self._lock:
            self._passes += 1
            if self._passes % self._interval:
                return
        with self._changes:
            counts = self._recorder.counts()
            recent, self._seen = counts - self._seen, counts
            update_placement(model, per_layer=self._per_layer, counts=recent)

    def stop(self) -> None:
        """The placement stays as it is from now on."""
        self._hook.remove()
        self._recorder.stop()
