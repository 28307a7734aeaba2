"""Experts that live on the model's own device, in bf16, and are run there by torch."""

import logging
import math
from typing import Any

import torch
from torch.nn import functional


def run(weights, hidden, ids, scales):
    """The weighted sum of these experts' outputs, f32 [tokens, hidden].

    weights: (slots int64 [experts + 1]: slot of an expert or -1, w13 [slots, 2 * inter, hidden],
    w2 [slots, hidden, inter]); ids int64 or int32 [tokens, top_k], anything outside [0, experts) is ignored.
    """
    slots, w13, w2 = weights
    if hidden.is_cuda and hidden.dtype == torch.bfloat16 and ids.numel() <= _FEW:
        fused = _fused(weights, ids.shape[1])
        if fused is not None:
            return fused.run(weights, hidden, ids, scales)
    ids, experts = ids.long(), slots.shape[0] - 1
    outside = (ids < 0) | (ids >= experts)
    slot = slots[torch.where(outside, experts, ids)]  # [tokens, top_k]
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        if slot.numel() <= _FEW and slot.numel() * (w13[0].nbytes + w2[0].nbytes) <= _FEW_BYTES:
            return _gathered(w13, w2, hidden, slot, scales)
        if hasattr(torch, "_grouped_mm") and torch.cuda.get_device_capability(hidden.device)[0] >= 9:
            return _grouped(w13, w2, hidden, slot, scales)
    return _one_by_one(w13, w2, hidden, slot, scales)


_kernels: dict[tuple[Any, ...], Any] = {}  # by device and shape: the module `fused`, or None where it does not work


def prepare(weights, top_k):
    """Compiles, for weights on a GPU, what run() needs for a few tokens: not while a graph is captured."""
    if weights[1].is_cuda:
        _fused(weights, top_k)


def _fused(weights, top_k):
    _, w13, w2 = weights
    key = w13.device, w13.shape[1:], top_k
    if key not in _kernels and not torch.cuda.is_current_stream_capturing():
        _kernels[key] = _load_fused(weights, top_k)
    return _kernels.get(key)


def _load_fused(weights, top_k):
    """Triton may be absent, or lack a compiler for its launchers: one run tells."""
    try:
        from . import fused

        device, width = weights[1].device, weights[1].shape[2]
        hidden = torch.zeros((1, width), dtype=torch.bfloat16, device=device)
        for kind in (torch.int64, torch.int32):
            ids = torch.zeros((1, top_k), dtype=kind, device=device)
            fused.run(weights, hidden, ids, torch.zeros((1, top_k), device=device))
        return fused
    except Exception as error:  # whatever goes wrong inside of a compiler
        if None not in _kernels.values():
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            logging.getLogger("kt_kernel").warning("experts on the GPU run through torch's own operations: Triton: %s",
                                                   reason)
        return None


_FEW = 64  # pairs of token and expert, up to which a copy of each pair's weights costs less than sorting
_FEW_BYTES = 256 << 20  # of those copies


def _swiglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _gathered(w13, w2, hidden, slot, scales):
    """Every pair with its own copy of the weights; nothing waits for the device."""
    tokens, top_k = slot.shape
    present = slot >= 0
    slot = slot.clamp(min=0).reshape(-1)
    rows = hidden.repeat_interleave(top_k, dim=0).unsqueeze(-1)
    middle = _swiglu(torch.bmm(w13[slot], rows).squeeze(-1))
    out = torch.bmm(w2[slot], middle.unsqueeze(-1)).squeeze(-1)
    out = out.float().reshape(tokens, top_k, -1) * scales.unsqueeze(-1)
    return torch.where(present.unsqueeze(-1), out, 0).sum(dim=1)


def _grouped(w13, w2, hidden, slot, scales):
    """Pairs sorted by slot, one grouped product for each projection; pairs of other experts come last."""
    tokens, top_k = slot.shape
    count = w13.shape[0]
    key = torch.where(slot < 0, count, slot).reshape(-1)
    key, order = torch.sort(key, stable=True)
    ends = torch.searchsorted(key, torch.arange(count, device=key.device), right=True).to(torch.int32)
    rows = hidden[order // top_k]
    # Rows past the last group are left as they were by the product: zeros keep them finite.
    present = (key < count).unsqueeze(-1)
    middle = torch._grouped_mm(rows, w13.transpose(-2, -1), offs=ends)
    middle = _swiglu(torch.where(present, middle, 0))
    out = torch._grouped_mm(middle, w2.transpose(-2, -1), offs=ends)
    out = torch.where(present, out, 0).float()
    back = torch.empty_like(out)
    back[order] = out
    return (back.reshape(tokens, top_k, -1) * scales.unsqueeze(-1)).sum(dim=1)


def _one_by_one(w13, w2, hidden, slot, scales):
    """An expert at a time. Numbers other than bf16 are multiplied in f32."""
    kind = torch.bfloat16 if hidden.dtype == torch.bfloat16 else torch.float32
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert in torch.unique(slot).tolist():
        if expert < 0:
            continue
        token, place = torch.where(slot == expert)
        middle = _swiglu(functional.linear(hidden[token].to(kind), w13[expert].to(kind)))
        result = functional.linear(middle, w2[expert].to(kind)).float()
        out.index_add_(0, token, result * scales[token, place, None])
    return out


class WriteBack:
    """bf16 weights of single experts, out of what a KTMoEWrapper holds in whatever format."""

    def __init__(self, wrapper, method, inter, hidden, group_size, pin):
        self._wrapper, self._method = wrapper, method
        self._inter, self._hidden, self._group = inter, hidden, group_size
        shapes = self._fitting_shapes()
        self._buffers = [
            None if shape is None else torch.empty(shape[0], dtype=shape[1], pin_memory=pin, device="cpu")
            for shape in shapes
        ]

    def read(self, expert):
        """w13 [2 * inter, hidden] (gate rows, then up rows) and w2 [hidden, inter]; a later call overwrites them."""
        addresses = [[0 if buffer is None else buffer.data_ptr()] for buffer in self._buffers]
        self._wrapper.submit_write_weight_scale_to_buffer(1, expert, *addresses)
        self._wrapper.sync_write_weight_scale_to_buffer()
        w13, w13_scale, w2, w2_scale = self._buffers
        return self._values(w13, w13_scale), self._values(w2, w2_scale)

    def _fitting_shapes(self):
        """_shapes(), with the group size that the weights really have; what is written must fit exactly."""
        bytes_of = self._wrapper._layer.write_bytes(1)
        if self._method == "RAWINT4" and bytes_of[1]:
            groups = bytes_of[1] // (2 * 2 * self._inter)
            self._group = self._hidden // groups if groups and self._hidden % groups == 0 else self._group
        shapes = self._shapes()
        for name, shape, size in zip(("w13", "w13 scales", "w2", "w2 scales"), shapes, bytes_of):
            expected = 0 if shape is None else math.prod(shape[0]) * shape[1].itemsize
            if expected != size:
                raise ValueError(
                    f"gpu_experts: {name} of an expert are {size} bytes in {self._method}, this code reads {expected}; "
                    "keep all experts on the CPU (gpu_experts=None)"
                )
        return shapes

    def _shapes(self):
        """(shape, dtype) or None of w13, its scales, w2, its scales."""
        two, hidden, inter = 2 * self._inter, self._hidden, self._inter
        method = self._method
        eighth = torch.float8_e4m3fn
        scales: tuple[tuple[int, ...], tuple[int, ...]]
        if method == "FP8":
            blocks = -(-inter // 128), -(-hidden // 128)
            scales = ((2 * blocks[0], blocks[1]), (blocks[1], blocks[0]))
            kinds = eighth, torch.float32
        elif method == "FP8_PERCHANNEL":
            scales, kinds = ((two,), (hidden,)), (eighth, torch.float32)
        elif method == "MXFP8":
            scales, kinds = ((two, hidden // 32), (hidden, inter // 32)), (eighth, torch.uint8)
        elif method in ("RAWINT4", "MXFP4"):
            group = 32 if method == "MXFP4" else self._group
            scales = ((two, hidden // group), (hidden, inter // group))
            kinds = torch.uint8, torch.bfloat16
            return [((two, hidden // 2), kinds[0]), (scales[0], kinds[1]), ((hidden, inter // 2), kinds[0]),
                    (scales[1], kinds[1])]
        else:
            return [((two, hidden), torch.bfloat16), None, ((hidden, inter), torch.bfloat16), None]
        return [((two, hidden), kinds[0]), (scales[0], kinds[1]), ((hidden, inter), kinds[0]), (scales[1], kinds[1])]

    def _values(self, codes, scales):
        if scales is None:
            return codes
        if self._method in ("RAWINT4", "MXFP4"):
            codes = _nibbles(codes, self._method)
        if self._method == "MXFP8":
            scales = torch.exp2(scales.float() - 127)
        n, k = codes.shape
        scales = scales.float()
        if scales.dim() == 1:
            scales = scales[:, None]
        if self._method == "FP8":  # blocks of rows as well; w13 is two matrices of whole blocks each
            halves = scales.chunk(2) if n == 2 * self._inter and codes is self._buffers[0] else [scales]
            each = n // len(halves)
            scales = torch.cat([half.repeat_interleave(128, dim=0)[:each] for half in halves])
            scales = scales.repeat_interleave(128, dim=1)[:, :k]
        elif scales.shape[1] > 1:
            scales = scales.repeat_interleave(k // scales.shape[1], dim=1)
        return (codes.float() * scales).to(torch.bfloat16)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _nibbles(codes, method):
    """Two values of each byte, the low half first: int4 stored with 8 added, or e2m1."""
    pairs = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    if method == "MXFP4":
        return torch.tensor(_E2M1, device="cpu")[pairs.long()]
    return pairs.to(torch.int8) - 8
