"""Operators of your own for placement rules: what registers them, and the classes that they are derived from.

    @kt_kernel.operator("LinearTorchInject")
    class LinearTorchInject(kt_kernel.BaseInjectedModule, kt_kernel.KLinearBase): ...

A rule names an operator by its registered name, by the name of a class in ``inject(operators=[...])``, or by the dotted
path of a class whose module is imported already. A file never causes an import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound=type)

_registered: dict[str, type] = {}


def operator(name: str | None = None) -> Callable[[Class], Class]:
    """Registers a class under `name`, or its own; a later class of the same name takes its place."""
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"operator: expected a name, got {name!r}")

    def register(cls: Class) -> Class:
        check_class(cls)
        _registered[name or cls.__name__] = cls
        return cls

    return register


def check_class(cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, torch.nn.Module):
        shown = cls.__name__ if isinstance(cls, type) else repr(cls)
        raise TypeError(f"operator {shown}: expected a class derived from torch.nn.Module")


def named(classes: Iterable[Any]) -> dict[str, type]:
    """Those of inject(operators=...), by their names, checked."""
    if isinstance(classes, type):
        raise TypeError(f"operators: expected a list of classes, got the class {classes.__name__}")
    out = {}
    for cls in classes:
        check_class(cls)
        out[cls.__name__] = cls
    return out


def find(dotted: str, given: dict[str, type], known: bool) -> type | None:
    """The caller's class that a rule names, or None: it is KT's (`known`), or nobody's."""
    word = dotted.rpartition(".")[2]
    for names in (given, _registered):
        for name in (dotted, word):
            if name in names:
                return names[name]
    if known or dotted == "default" or "." not in dotted:
        return None
    path, found = dotted.rpartition(".")[0], None
    if path in sys.modules:
        found = getattr(sys.modules[path], word, None)
    if found is not None:
        check_class(found)
    return found


class BaseInjectedModule(torch.nn.Module):
    """A module in the place of another one, `orig_module`, which it stands for in everything that it does not do
    itself.

    Attributes that it has not are those of `orig_module`. Assigning a name that either of them has sets a plain
    attribute here, which hides the other; a new name is set on `orig_module`. Parameters, buffers and children are
    those of `orig_module`, under the names that they always had.
    """

    def __init__(self, key: str, gguf_loader: Any, config: Any, orig_module: torch.nn.Module | None = None,
                 prefill_device: str = "cuda", generate_device: str = "cuda", **kwargs: Any) -> None:
        super().__init__()
        own = self.__dict__
        if orig_module is not None:
            # The very dictionaries: children that rules replace inside it are seen here, and the other way round.
            for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                own[name] = orig_module.__dict__[name]
            own["training"] = orig_module.training
        own.update(key=key, gguf_loader=gguf_loader, config=config, prefill_device=prefill_device,
                   generate_device=generate_device, device=generate_device, orig_module=orig_module)

    def __getattr__(self, name: str) -> Any:
        orig = self.__dict__.get("orig_module")
        if orig is None:
            return super().__getattr__(name)
        try:
            return getattr(orig, name)
        except AttributeError:
            raise AttributeError(f"neither {type(self).__name__} nor its {type(orig).__name__} has {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        orig = self.__dict__.get("orig_module")
        if orig is None:
            super().__setattr__(name, value)
        elif name == "training":  # train() and eval() walk over this module alone
            self.__dict__[name] = orig.training = value
        elif hasattr(self, name):
            object.__setattr__(self, name, value)
        else:
            setattr(orig, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.orig_module.forward(*args, **kwargs)

    def load(self) -> None:
        """Called once, before the module is put in. Here: tensors of `orig_module` itself that have no numbers yet are
        read by name; children are loaded for themselves."""
        if self.orig_module is not None:
            load_own(self.orig_module, self.key, self.gguf_loader, self.generate_device)

    def unload(self) -> None:
        """Called when the module is taken out."""


def load_own(module: torch.nn.Module, key: str, loader: Any, device: Any) -> None:
    """Reads a module's own parameters and persistent buffers that are on the meta device."""
    for kept, wrap in ((module._parameters, True), (module._buffers, False)):
        for name, tensor in list(kept.items()):
            if tensor is None or tensor.device.type != "meta" or name in module._non_persistent_buffers_set:
                continue
            path = f"{key}.{name}" if key else name
            values = loader.load_tensor(path, device).to(tensor.dtype)
            if values.shape != tensor.shape:
                raise ValueError(f"{path}: expected {list(tensor.shape)}, the weights have {list(values.shape)}")
            kept[name] = torch.nn.Parameter(values, tensor.requires_grad) if wrap else values


class KLinearBase:
    """What linears of rules share: sizes, and weights by name."""

    key: str
    gguf_loader: Any

    def __init__(self, key: str | None = None, gguf_loader: Any = None, config: Any = None, orig_module: Any = None,
                 device: str = "cuda", **kwargs: Any) -> None:
        if key is None:  # beside BaseInjectedModule, which has set all
            return
        super().__init__()
        self.key, self.gguf_loader, self.config, self.device = key, gguf_loader, config, device
        self.has_bias, self.dtype = False, torch.get_default_dtype()
        if orig_module is not None:
            self.in_features, self.out_features = orig_module.in_features, orig_module.out_features
        else:
            self.out_features, self.in_features = gguf_loader.tensor_info[f"{key}.weight"]["shape"]

    def load_weight(self, override_key: str | None = None, device: str | None = None) -> Any:
        """The weight as a Parameter, or (weight, bias) where there is one: key + ".weight" and ".bias" of the
        weights."""
        key, loader = self.key if override_key is None else override_key, self.gguf_loader
        weight = loader.load_tensor(f"{key}.weight", device)
        if loader.has_tensor(f"{key}.bias"):
            return weight, loader.load_tensor(f"{key}.bias", device)
        return torch.nn.Parameter(weight, requires_grad=False)

    def load(self, w: Any = None, device: str | None = None) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no load()")

    def unload(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no unload()")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no forward()")
