"""Unquantised experts of a safetensors checkpoint, one layer at a time, for formats that are made while loading.

KT itself reads what is stored as the method says, and rounds floats to int8 and int4 rows on the way. This is for what
is left: a bf16 checkpoint that is wanted in, say, FP8. One layer's values stand in memory at a time, in a buffer that
the layers share.
"""

import json
import pathlib
import re
from typing import Any

import torch

_ROLES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
_SINGLE = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_FUSED = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts\.(gate_up_proj|down_proj)$")


class FloatExperts:
    """The experts of a folder of safetensors that hold bf16, fp16 or f32 numbers."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self._files: dict[str, Any] = {}  # name -> open file
        self._singles: dict[int, dict[tuple[int, int], tuple[str, str]]] = {}  # layer -> {(expert, role): (name, file)}
        self._fused: dict[int, dict[str, tuple[str, str]]] = {}  # layer -> {"gate_up_proj" | "down_proj": (name, file)}
        self._buffers: list[torch.Tensor] = []
        for name, file in self._names():
            if match := _SINGLE.search(name):
                self._singles.setdefault(int(match[1]), {})[int(match[2]), _ROLES[match[3]]] = (name, file)
            elif match := _FUSED.search(name):
                self._fused.setdefault(int(match[1]), {})[match[2]] = (name, file)
        if not self._singles and not self._fused:
            raise ValueError(f"{self.folder}: no experts in its safetensors")

    def layer(self, layer, experts, inter, hidden):
        """gate and up [experts, inter, hidden], down [experts, hidden, inter], bf16. The next call overwrites them."""
        shapes = ((experts, inter, hidden), (experts, inter, hidden), (experts, hidden, inter))
        if not self._buffers or any(b.shape != s for b, s in zip(self._buffers, shapes)):
            self._buffers = [torch.empty(shape, dtype=torch.bfloat16, device="cpu") for shape in shapes]
        if layer in self._fused:
            self._read_fused(layer, inter)
        else:
            self._read_singles(layer, experts)
        return self._buffers

    def _names(self):
        """(tensor, file) of all tensors."""
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            yield from json.loads(index.read_text())["weight_map"].items()
            return
        for file in sorted(self.folder.glob("*.safetensors")):
            for name in self._open(file.name).keys():
                yield name, file.name

    def _open(self, file):
        if file not in self._files:
            from safetensors import safe_open

            self._files[file] = safe_open(self.folder / file, framework="pt")
        return self._files[file]

    def _read_singles(self, layer, experts):
        names = self._singles.get(layer, {})
        for expert in range(experts):
            for role, buffer in enumerate(self._buffers):
                if (expert, role) not in names:
                    part = ("gate", "up", "down")[role]
                    raise ValueError(f"{self.folder}: layer {layer} has no {part} projection of expert {expert}")
                name, file = names[expert, role]
                self._copy(buffer[expert], name, self._open(file).get_tensor(name))

    def _read_fused(self, layer, inter):
        for key, parts in (("gate_up_proj", self._buffers[:2]), ("down_proj", self._buffers[2:])):
            if key not in self._fused[layer]:
                raise ValueError(f"{self.folder}: layer {layer} has no experts.{key}")
            name, file = self._fused[layer][key]
            stored = self._open(file).get_slice(name)
            for expert in range(parts[0].shape[0]):
                for at, part in enumerate(parts):
                    rows = part.shape[1]
                    self._copy(part[expert], name, stored[expert, at * rows : (at + 1) * rows])

    def _copy(self, target, name, values):
        values = values.reshape(values.shape[-2:]) if values.dim() == 3 else values
        if values.shape != target.shape:
            raise ValueError(
                f"{self.folder}: {name}: expected {list(target.shape)}, the file has {list(values.shape)}"
            )
        if not values.is_floating_point():
            raise ValueError(f"{self.folder}: {name}: expected bf16, fp16 or f32 numbers, the file has {values.dtype}")
        target.copy_(values)
