"""Experts of a device in Triton against torch's own operations: on a GPU, else in Triton's interpreter, else
skipped."""

import os
import subprocess
import sys

import pytest

CHECK = r"""
import sys, torch
from kt_kernel.transformers import fused, resident
device = sys.argv[1]
generator = torch.Generator().manual_seed(1)
for tokens, top_k, experts, slots, width, inter in ((1, 8, 16, 5, 96, 40), (3, 4, 9, 9, 64, 32), (2, 2, 4, 1, 290, 17)):
    def values(*shape):
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16).to(device)
    table = torch.full((experts + 1,), -1)
    table[torch.randperm(experts, generator=generator)[:slots]] = torch.arange(slots)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    ids[0, 0], ids[-1, -1] = -1, experts + 5
    scales = torch.rand(tokens, top_k, generator=generator).to(device)
    weights = table.to(device), values(slots, 2 * inter, width), values(slots, width, inter)
    hidden = values(tokens, width) * 3
    right = resident._one_by_one(*weights[1:], hidden, torch.where(ids.to(device).clamp(0) >= experts, -1,
        torch.where(ids.to(device) < 0, -1, weights[0][ids.to(device).clamp(0, experts)])), scales)
    for kind in (torch.int64, torch.int32):
        ours = fused.run(weights, hidden, ids.to(device, kind), scales)
        error = ((ours - right).abs().max() / right.abs().max().clamp(min=1e-6)).item()
        assert error < 2e-2, (tokens, slots, error)
        assert right.abs().max() > 0 or ours.abs().max() == 0
print("equal")
"""


def test_the_kernels_compute_what_torch_does():
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton", reason="Triton comes with torch's builds for GPUs")
    on_gpu = torch.cuda.is_available()
    environment = dict(os.environ) if on_gpu else dict(os.environ, TRITON_INTERPRET="1")
    done = subprocess.run([sys.executable, "-c", CHECK, "cuda" if on_gpu else "cpu"], env=environment,
                          capture_output=True, text=True, timeout=900)
    assert done.stdout.strip().endswith("equal"), done.stdout + done.stderr
