"""Low-rank factors as the extension takes them: contiguous f32 on the CPU, by address."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from typing import NamedTuple

import torch

from .placeholders import Factors


class Lora(NamedTuple):
    """What the active adapter adds to the experts of a layer."""

    gate_up: Factors | None  # in: hidden; out: 2 * inter, gate's rows first
    down: Factors | None  # in: inter; out: hidden

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """a and b of gate|up, a and b of down."""
        return tuple(t for f in self for t in ((None, None) if f is None else (f.a, f.b)))

    def scales(self) -> tuple[float, float]:
        return tuple(0.0 if f is None else f.scale for f in self)  # type: ignore[return-value]


@dataclasses.dataclass
class Packed:
    """a1 [E, r1, H], b1 [E, 2I, r1], a2 [E, r2, I], b2 [E, H, r2], or None in pairs; contiguous f32 on the CPU."""

    a1: torch.Tensor | None
    b1: torch.Tensor | None
    a2: torch.Tensor | None
    b2: torch.Tensor | None
    scales: tuple[float, float]

    def addresses(self) -> tuple[int, float, int, int, int, float, int, int] | None:
        """As ExpertLayer.train_forward takes them."""
        if self.a1 is None and self.a2 is None:
            return None
        return (*_side(self.scales[0], self.a1, self.b1), *_side(self.scales[1], self.a2, self.b2))


def _side(scale, a, b):
    return (0, 0.0, 0, 0) if a is None else (a.shape[1], scale, a.data_ptr(), b.data_ptr())


def pack(tensors: tuple[torch.Tensor | None, ...], scales: tuple[float, float], cache: Cache | None = None) -> Packed:
    """Of Lora.tensors(). Those that are contiguous f32 on the CPU already are not copied. With a cache, copies of
    earlier calls are used again."""
    a1, b1, a2, b2 = (None if t is None else cache.get(t) if cache is not None else _plain(t) for t in tensors)
    return Packed(a1, b1, a2, b2, scales)


def _plain(tensor):
    tensor = tensor.detach().to(device="cpu", dtype=torch.float32)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def checked(name: str, factors: Factors, experts: int, rows: int, columns: int) -> Factors:
    """`factors`, if they fit a weight [experts, rows, columns]."""
    rank = factors.a.shape[-2] if factors.a.dim() == 3 else 0
    wanted = (experts, rank, columns), (experts, rows, rank)
    if (tuple(factors.a.shape), tuple(factors.b.shape)) != wanted or rank < 1:
        raise ValueError(
            f"LoRA of {name} [{experts}, {rows}, {columns}]: A is {list(factors.a.shape)} and B "
            f"{list(factors.b.shape)}, expected [{experts}, rank, {columns}] and [{experts}, {rows}, rank]"
        )
    return factors


class _Entry(NamedTuple):
    owner: weakref.ref[torch.Tensor]
    version: int
    layout: tuple[object, ...]
    sample: torch.Tensor
    packed: torch.Tensor


class Cache:
    """Copies of factors that passes without gradients use: generating makes them once for each version of an adapter.

    A copy belongs to the tensor that its factor is a view of, and holds while nobody writes to that: its version,
    and a sample of its numbers for those who write past it (`p.data.copy_`, optimizers of others). Passes with
    gradients neither use nor keep copies, and drop() those there are."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.Lock()

    def get(self, factor: torch.Tensor) -> torch.Tensor:
        owner = factor._base
        if owner is None or (factor.is_cpu and factor.dtype == torch.float32 and factor.is_contiguous()):
            return _plain(factor)
        version = owner._version  # before the copy: who writes meanwhile makes it an old one
        layout = factor.data_ptr(), factor.shape, factor.stride(), factor.dtype
        sample = _sample(factor)
        with self._lock:
            found = self._entries.get(id(owner))
        if (
            found is not None
            and found.owner() is owner
            and (found.version, found.layout) == (version, layout)
            and torch.equal(found.sample, sample)
        ):
            return found.packed
        with torch.inference_mode(False):
            packed = _plain(factor).clone() if factor.is_inference() else _plain(factor)
        entry = _Entry(weakref.ref(owner), version, layout, sample, packed)
        with self._lock:
            self._entries = {key: e for key, e in self._entries.items() if e.owner() is not None}
            self._entries[id(owner)] = entry
        return packed

    def drop(self, factors: tuple[torch.Tensor | None, ...]) -> None:
        with self._lock:
            for factor in factors:
                if factor is not None and factor._base is not None:
                    self._entries.pop(id(factor._base), None)


def _sample(factor):
    """Numbers from all over it."""
    part = factor.detach()[:: max(1, factor.shape[0] // 8), :: max(1, factor.shape[1] // 8), 0]
    return part.to(device="cpu", dtype=torch.float32, copy=True)
