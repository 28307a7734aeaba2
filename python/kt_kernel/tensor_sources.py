"""Where operators of placement rules read weights by name: what they know as `gguf_loader`.

`CheckpointTensors` reads every checkpoint that KT reads, `ModelTensors` the model that was loaded before rules came.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kt_kernel import kt_kernel_ext


class _Described(Mapping[str, Any]):
    """A mapping of tensors' names whose values are made when asked for."""

    def __init__(self, source: Any, describe: Any) -> None:
        self._source, self._describe = source, describe

    def __getitem__(self, name: str) -> Any:
        if not self._source.has_tensor(name):
            raise KeyError(name)
        return self._describe(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.names())

    def __len__(self) -> int:
        return len(self._source.names())


class CheckpointTensors:
    """A folder, a GGUF file or safetensors, under the names of the model; numbers come as `dtype`, whatever is
    stored."""

    def __init__(self, path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        self.path, self.dtype = os.fspath(path), dtype
        self._checkpoint = kt_kernel_ext.Checkpoint(self.path)
        self.tensor_info = _Described(self, self._info)
        self.tensor_file_map = _Described(self, lambda name: self._checkpoint.describe(name)[2])

    def names(self) -> list[str]:
        return self._checkpoint.names()

    def has_tensor(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def load_tensor(self, name: str, device: Any = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = self._checkpoint.describe(name)[0]
        with torch.inference_mode(False), torch.no_grad():
            out = torch.empty(shape, dtype=torch.float32, device="cpu")
            self._checkpoint.read(name, out.data_ptr())
            return out.to(device=device or "cpu", dtype=dtype or self.dtype or torch.get_default_dtype())

    def load_gguf_tensor(self, name: str, device: Any = "cpu", target_dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.load_tensor(name, device, target_dtype)

    def _info(self, name):
        shape, stored, _ = self._checkpoint.describe(name)
        return {"shape": list(shape), "dtype": stored}


class ModelTensors:
    """The tensors that the model itself had when rules were applied."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.tensor_info = _Described(self, self._info)
        self.tensor_file_map = _Described(self, lambda name: "")

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def load_tensor(self, name: str, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        if name not in self._tensors:
            raise ValueError(f"{name}: the model has no such tensor; weights= names a checkpoint to read from")
        tensor = self._tensors[name].detach()
        if tensor.device.type == "meta":
            raise ValueError(f"{name}: on the meta device; weights= names a checkpoint to read from")
        return tensor.to(device=device or tensor.device, dtype=dtype or tensor.dtype)

    def load_gguf_tensor(self, name: str, device: Any = None, target_dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.load_tensor(name, device, target_dtype)

    def _info(self, name):
        tensor = self._tensors[name]
        return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
