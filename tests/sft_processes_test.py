"""Two processes, each with the experts on KT, whose LoRA gradients DistributedDataParallel brings together (gloo,
CPUs)."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("kt_kernel.kt_kernel_ext", reason="kt_kernel is not built: PYTHONPATH=build/python")
HERE = pathlib.Path(__file__).parent

WORKER = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
from sft_models import IDS, draw_b, ours, step, trained, with_lora, worst
rank = int(os.environ["RANK"])
torch.distributed.init_process_group("gloo")
alone = with_lora(ours()).train()
draw_b(alone)
parts = [step(alone, IDS[row : row + 1])[1] for row in (0, 1)]
expected = {name: (g + parts[1][name]) / 2 for name, g in parts[0].items()}
model = with_lora(ours(), seed=3 + rank).train()  # others than rank 0's, which all of them get
draw_b(model, seed=5 + rank)
shared = torch.nn.parallel.DistributedDataParallel(model)
_, got = step(shared, IDS[rank : rank + 1])
far, name = worst({name.removeprefix("module."): g for name, g in got.items()}, expected)
assert far < 1e-5, (name, far)
assert all(torch.equal(p, trained(alone)[name]) for name, p in trained(model).items())
torch.distributed.barrier()
print("same gradients")
"""


def test_gradients_are_averaged():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    processes = []
    for rank in (0, 1):
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(HERE)],
                env={**os.environ, **there},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        for process in processes:
            out, _ = process.communicate(timeout=600)
            assert process.returncode == 0 and "same gradients" in out, out
    finally:
        for process in processes:
            process.kill()
