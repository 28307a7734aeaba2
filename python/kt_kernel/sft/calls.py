"""Training calls of one layer: tensors become addresses, longer inputs are cut. No arithmetic."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .lora import Packed

_REALS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclasses.dataclass
class Inputs:
    """Of a forward pass, on the CPU, contiguous."""

    hidden: torch.Tensor  # [tokens, hidden], f32, bf16 or f16
    ids: torch.Tensor  # [tokens, top_k], int32 or int64
    weights: torch.Tensor  # [tokens, top_k], f32

    def rows(self, part: slice) -> Inputs:
        return Inputs(self.hidden[part], self.ids[part], self.weights[part])

    def arguments(self) -> tuple[int, ...]:
        """tokens, input, type, stride, ids, wide_ids, weights"""
        tokens, width = self.hidden.shape
        return (
            tokens,
            self.hidden.data_ptr(),
            _REALS[self.hidden.dtype],
            width,
            self.ids.data_ptr(),
            self.ids.dtype is torch.int64,
            self.weights.data_ptr(),
        )


def inputs(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Inputs:
    """From tensors on any device. A GPU's are waited for."""
    if hidden.dtype not in _REALS:
        raise TypeError(f"hidden_states: expected float32, bfloat16 or float16, got {hidden.dtype}")
    if ids.dtype not in (torch.int32, torch.int64):
        ids = ids.long()
    hidden, ids, weights = (t.detach().cpu().contiguous() for t in (hidden, ids, weights.float()))
    if hidden.dim() != 2 or ids.shape != weights.shape or ids.dim() != 2 or len(ids) != len(hidden):
        raise ValueError(
            f"expected hidden states [tokens, hidden], ids and weights [tokens, top_k], got {list(hidden.shape)}, "
            f"{list(ids.shape)} and {list(weights.shape)}"
        )
    return Inputs(hidden.resolve_neg(), ids, weights.resolve_neg())


@dataclasses.dataclass
class Wanted:
    """Which gradients a backward pass is for."""

    hidden: bool = True
    weights: bool = True
    a1: bool = True
    b1: bool = True
    a2: bool = True
    b2: bool = True


@dataclasses.dataclass
class Gradients:
    hidden: torch.Tensor | None  # [tokens, hidden], f32
    weights: torch.Tensor | None  # [tokens, top_k], f32
    lora: tuple[torch.Tensor | None, ...]  # as the factors; f32


class LayerCalls:
    """Of a KTMoEWrapper whose weights are loaded."""

    def __init__(self, wrapper: Any) -> None:
        self._layer, self.step = wrapper._layer, wrapper.chunked_prefill_size
        self.wrapper = wrapper
        if not hasattr(self._layer, "train_forward"):
            raise NotImplementedError("this build of kt_kernel_ext has no training")

    def _parts(self, tokens):
        return [slice(at, min(at + self.step, tokens)) for at in range(0, tokens, self.step)]

    def saved_bytes(self, given: Inputs, activations: str) -> int:
        """What a forward that keeps takes: gate and up of each pair of token and expert."""
        size = 2 if activations == "bf16" else 4
        return 2 * self.wrapper.moe_intermediate_size * size * given.ids.numel()

    def forward(self, given: Inputs, lora: Packed | None, keep: bool) -> tuple[torch.Tensor, list[Any] | None]:
        """The output, of the input's type, and what backward() may be given."""
        output = torch.empty_like(given.hidden)
        addresses = None if lora is None else lora.addresses()
        saved = []
        for part in self._parts(len(output)):
            saved.append(
                self._layer.train_forward(*given.rows(part).arguments(), output[part].data_ptr(), addresses, keep)
            )
        return output, saved if keep else None

    def backward(
        self,
        saved: list[Any] | None,
        given: Inputs,
        lora: Packed | None,
        output_grad: torch.Tensor,
        wanted: Wanted,
    ) -> Gradients:
        """saved, given, lora: of the forward; None for what is not wanted."""
        addresses = None if lora is None else lora.addresses()
        if output_grad.dtype not in _REALS:
            output_grad = output_grad.float()
        output_grad = output_grad.detach().cpu().contiguous().resolve_neg()
        hidden = torch.empty(given.hidden.shape, dtype=torch.float32, device="cpu") if wanted.hidden else None
        weights = torch.empty(given.weights.shape, dtype=torch.float32, device="cpu") if wanted.weights else None
        factors = _zeros(lora, wanted)
        lora_grads = None if addresses is None else tuple(0 if t is None else t.data_ptr() for t in factors)
        for number, part in enumerate(self._parts(len(output_grad))):
            self._layer.train_backward(
                None if saved is None else saved[number],
                *given.rows(part).arguments(),
                output_grad[part].data_ptr(),
                _REALS[output_grad.dtype],
                addresses,
                0 if hidden is None else hidden[part].data_ptr(),
                0 if weights is None else weights[part].data_ptr(),
                lora_grads,
            )
        return Gradients(hidden, weights, factors)


def _zeros(lora, wanted):
    if lora is None:
        return (None,) * 4
    factors = (lora.a1, wanted.a1), (lora.b1, wanted.b1), (lora.a2, wanted.a2), (lora.b2, wanted.b2)
    return tuple(torch.zeros_like(t) if t is not None and asked else None for t, asked in factors)
