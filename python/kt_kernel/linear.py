"""KTLinear: a torch.nn.Linear whose weight is packed by KT, in any of its formats, and multiplied by its kernels."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import torch

from kt_kernel import kt_kernel_ext

from .sft.placeholders import Placeholder

_REALS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_steps: dict[Any, Any] = {}  # of each choice of threads: what linears share


class LinearPlaceholder(Placeholder):
    """The weight of a linear that is on KT."""

    WHAT = "the weight of a linear, which is"


def _steps_of(threads, pools):
    # A fork leaves threads behind: the child makes its own.
    key = (os.getpid(), threads, pools)
    if key not in _steps:
        _steps[key] = kt_kernel_ext.LinearSteps(kt_kernel_ext.CPUInfer(threads, pools))
    return _steps[key]


class KTLinear(torch.nn.Linear):
    """y = x W^T + b on the CPU. Inference only; any thread may call it.

    format: a name of kt_kernel_ext.formats(); "stored" keeps that of what is loaded. activations: "default", "int8",
    "bf16" or "f32". `weight` has the shape and the type that torch's had and no memory, so that adapters attach and
    names stay; load_state_dict() packs what it is given.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, *, format: str = "stored",
                 name: str = "linear",
                 dtype: torch.dtype | None = None, activations: str = "default", threads: int = 0,
                 numa_nodes: int = 0) -> None:
        torch.nn.Module.__init__(self)
        if format != "stored" and format not in kt_kernel_ext.formats():
            raise ValueError(f"{name}: no format {format!r}; there are {', '.join(kt_kernel_ext.formats())}")
        self.in_features, self.out_features = in_features, out_features
        self.format, self.name, self.activations = format, name, activations
        self._threads, self._pools = threads, numa_nodes
        self._layer: kt_kernel_ext.LinearLayer | None = None
        dtype = dtype or torch.get_default_dtype()
        self.register_parameter("weight", LinearPlaceholder._made((out_features, in_features), (), dtype))
        with torch.inference_mode(False):
            zeros = torch.zeros(out_features, dtype=dtype, device="cpu") if bias else None
        self.register_parameter("bias", None if zeros is None else torch.nn.Parameter(zeros, requires_grad=False))

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, format: str = "stored", **options: Any) -> KTLinear:
        """Of a stock linear, which stays as it is."""
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, format=format,
                  dtype=linear.weight.dtype, **options)
        new.load(linear.weight, linear.bias)
        return new

    def load(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Packs a weight [out, in] of float32, bfloat16 or float16, rounded to the format."""
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ValueError(f"{self.name}: expected a weight {[self.out_features, self.in_features]}, "
                             f"got {list(weight.shape)}")
        if weight.dtype not in _REALS or weight.device.type == "meta":
            shown = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}"
            raise ValueError(f"{self.name}: expected float32, bfloat16 or float16 with values, got {shown}")
        with torch.inference_mode(False), torch.no_grad():
            values = weight.detach().cpu().contiguous().resolve_neg()
            stored = ("f32", "bf16", "fp16")[_REALS[values.dtype]]
            self._layer = kt_kernel_ext.LinearLayer(
                _steps_of(self._threads, self._pools), self.name, stored if self.format == "stored" else self.format,
                self.out_features, self.in_features, values.data_ptr(), _REALS[values.dtype], 0, self.activations)
            self._set_bias(bias)

    def load_from(self, source: Any, key: str | None = None) -> None:
        """Packs the module `key` (its name) of a CheckpointTensors, in the format of the files or rounded from it."""
        key = key or self.name
        layer = kt_kernel_ext.LinearLayer(_steps_of(self._threads, self._pools), key,
                                          "" if self.format == "stored" else self.format, source._checkpoint, 0,
                                          self.activations)
        if (layer.n, layer.k) != (self.out_features, self.in_features):
            raise ValueError(f"{key}: expected a weight {[self.out_features, self.in_features]}, the weights have "
                             f"{[layer.n, layer.k]}")
        self._layer = layer
        if self.bias is not None:
            self._set_bias(source.load_tensor(f"{key}.bias", "cpu", torch.float32))

    def _set_bias(self, bias):
        if (bias is None) != (self.bias is None):
            raise ValueError(f"{self.name}: {'expected a bias' if bias is None else 'a bias, and the module has none'}")
        if bias is not None:
            with torch.inference_mode(False), torch.no_grad():
                self.bias.copy_(bias)

    @property
    def loaded(self) -> bool:
        return self._layer is not None

    @property
    def packed_bytes(self) -> int:
        return 0 if self._layer is None else self._layer.packed_bytes

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] of float32, bfloat16 or float16; the result has its type and device. Products are on the CPU."""
        if torch.is_grad_enabled() and x.requires_grad:
            out: torch.Tensor = _NoBackward.apply(self, x)
            return out
        return self._forward(x)

    def _forward(self, x):
        if self._layer is None:
            raise RuntimeError(f"{self.name}: has no weights yet")
        if x.dtype not in _REALS or x.shape[-1] != self.in_features:
            raise ValueError(f"{self.name}: expected [..., {self.in_features}] of float32, bfloat16 or float16, got "
                             f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}")
        rows = x.detach().reshape(-1, self.in_features).to(device="cpu", dtype=torch.float32).resolve_neg()
        if rows.stride(1) != 1 or rows.stride(0) < self.in_features:
            rows = rows.contiguous()
        out = torch.empty((rows.shape[0], self.out_features), dtype=torch.float32, device="cpu")
        self._layer.forward(rows.shape[0], rows.data_ptr(), rows.stride(0), out.data_ptr(), self.out_features)
        if self.bias is not None:
            out += self.bias.detach().to(device="cpu", dtype=torch.float32)
        return out.to(device=x.device, dtype=x.dtype).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self._layer.format if self._layer else self.format}"

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys,
                              unexpected_keys, error_msgs):
        weight, bias = state_dict.get(f"{prefix}weight"), state_dict.get(f"{prefix}bias")
        if isinstance(weight, Placeholder):
            weight = None  # this model's own
        elif weight is None and strict:
            missing_keys.append(f"{prefix}weight")
        if bias is None and self.bias is not None and strict:
            missing_keys.append(f"{prefix}bias")
        try:
            if weight is not None:
                self.load(weight, self.bias if bias is None else bias)
            elif bias is not None:
                self._set_bias(bias)
        except ValueError as error:
            error_msgs.append(str(error))

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("linears on KT cannot be copied: they hold weights outside of torch")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("linears on KT cannot be pickled: they hold weights outside of torch")


class _NoBackward(torch.autograd.Function):
    """Forward works with gradients on, as under generate(); a backward pass says what is wrong."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.name = module.name
        return module._forward(x)

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError(f"{ctx.name}: linears on KT have no backward pass: they are for inference")
