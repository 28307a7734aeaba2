"""Experts of a device for a few tokens, as two kernels in Triton: weights are read where they are, once for each pair
of token and expert. Loaded when first needed; triton comes with torch's builds for GPUs."""

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 8, 256  # of weights that a program has in hand


@triton.jit
def _slot_of(ids, table, pair, experts):
    expert = tl.load(ids + pair).to(tl.int64)
    known = (expert >= 0) & (expert < experts)
    return tl.load(table + tl.where(known, expert, experts))


@triton.jit
def _as_bf16(value):
    """The value that bf16 would hold: linear layers of a bf16 model give such numbers."""
    return value.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _middle_kernel(hidden, ids, table, w13, middle, experts, top_k: tl.constexpr, width: tl.constexpr,
                   inter: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One pair's silu(gate) * up, ROWS of them."""
    pair = tl.program_id(0)
    slot = _slot_of(ids, table, pair, experts)
    if slot >= 0:
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        gate_at = w13 + slot * 2 * inter * width
        gate = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for first in range(0, width, COLUMNS):
            columns = first + tl.arange(0, COLUMNS)
            values = tl.load(hidden + (pair // top_k).to(tl.int64) * width + columns, mask=columns < width,
                             other=0.0).to(tl.float32)
            at = rows[:, None] * width + columns[None, :]
            inside = (rows[:, None] < inter) & (columns[None, :] < width)
            gate += tl.load(gate_at + at, mask=inside, other=0.0).to(tl.float32) * values[None, :]
            up += tl.load(gate_at + inter * width + at, mask=inside, other=0.0).to(tl.float32) * values[None, :]
        gates, ups = _as_bf16(tl.sum(gate, axis=1)), _as_bf16(tl.sum(up, axis=1))
        result = _as_bf16(gates / (1.0 + tl.exp(-gates))) * ups
        tl.store(middle + pair * inter + rows, result.to(tl.bfloat16), mask=rows < inter)


@triton.jit
def _out_kernel(middle, ids, table, scales, w2, out, experts, top_k: tl.constexpr, width: tl.constexpr,
                inter: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One token's weighted sum over its experts of the device, ROWS of its values."""
    token = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for place in range(top_k):
        pair = token * top_k + place
        slot = _slot_of(ids, table, pair, experts)
        if slot >= 0:
            down = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
            for first in range(0, inter, COLUMNS):
                columns = first + tl.arange(0, COLUMNS)
                values = tl.load(middle + pair * inter + columns, mask=columns < inter, other=0.0).to(tl.float32)
                inside = (rows[:, None] < width) & (columns[None, :] < inter)
                at = rows[:, None] * inter + columns[None, :]
                down += tl.load(w2 + slot * width * inter + at, mask=inside, other=0.0).to(tl.float32) * values[None, :]
            total += _as_bf16(tl.sum(down, axis=1)) * tl.load(scales + pair)
    tl.store(out + token.to(tl.int64) * width + rows, total, mask=rows < width)


def run(weights, hidden, ids, scales):
    """As resident.run, for bf16 hidden states."""
    table, w13, w2 = weights
    (tokens, top_k), width, inter = ids.shape, hidden.shape[1], w2.shape[2]
    experts = table.shape[0] - 1
    hidden = hidden.contiguous()
    middle = torch.empty((tokens * top_k, inter), dtype=torch.bfloat16, device=hidden.device)
    out = torch.empty((tokens, width), dtype=torch.float32, device=hidden.device)
    with torch.cuda.device_of(hidden):
        _middle_kernel[(tokens * top_k, triton.cdiv(inter, ROWS))](
            hidden, ids, table, w13, middle, experts, top_k, width, inter, ROWS=ROWS, COLUMNS=COLUMNS)
        _out_kernel[(tokens, triton.cdiv(width, ROWS))](
            middle, ids, table, scales, w2, out, experts, top_k, width, inter, ROWS=ROWS, COLUMNS=COLUMNS)
    return out
