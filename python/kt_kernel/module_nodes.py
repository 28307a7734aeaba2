"""The modules of a torch model as placement rules see them: names without what PEFT puts around, words of classes,
shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_STORED = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Node:
    """One module under one of its names. `decision` and `becomes` are filled in by who asks."""

    def __init__(self, name: str, path: str, module: Any, parent: Any, key: str) -> None:
        self.name, self.path, self.module, self.parent, self.key = name, path, module, parent, key
        weight = module._parameters.get("weight")
        self.weight = weight if isinstance(weight, torch.Tensor) else None
        self.is_linear = isinstance(module, torch.nn.Linear) and self.weight is not None and self.weight.ndim == 2
        gate_up, down = module._parameters.get("gate_up_proj"), module._parameters.get("down_proj")
        self.is_experts = getattr(gate_up, "ndim", 0) == 3 and getattr(down, "ndim", 0) == 3
        self.decision: dict[str, Any] = {}
        self.becomes = ""

    def own_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for kept in (self.module._parameters, self.module._buffers):
            for key, tensor in kept.items():
                if tensor is not None:
                    yield key, tensor

    def tensors(self) -> list[torch.Tensor]:
        """Whose numbers what takes its place needs."""
        return [tensor for key, tensor in self.own_tensors() if key in ("weight", "bias", "gate_up_proj", "down_proj")]

    @property
    def request(self) -> dict[str, Any]:
        classes = [cls.__name__ for cls in type(self.module).__mro__ if issubclass(cls, torch.nn.Module)]
        out: dict[str, Any] = dict(name=self.name, classes=classes)
        if self.is_experts:
            experts, two_inter, hidden = self.module.gate_up_proj.shape
            out.update(experts=experts, shape=[two_inter // 2, hidden],
                       stored=_STORED.get(self.module.gate_up_proj.dtype, ""))
        elif self.weight is not None:
            out.update(shape=list(self.weight.shape), bias=self.module._parameters.get("bias") is not None,
                       stored=_STORED.get(self.weight.dtype, ""))
        return out


def nodes_of(model: Any) -> tuple[Any, list[Node]]:
    """The model inside what PEFT puts around it, and its modules, depth first, children as they were defined. A module
    that is there under several names is there several times."""
    from .linear import KTLinear

    root, path = model, ""
    while type(root).__module__.startswith("peft.") and hasattr(root, "base_model"):
        inner = root.base_model
        root, path = ((inner.model, path + "base_model.model.") if hasattr(inner, "model")
                      else (inner, path + "base_model."))
    nodes: list[Node] = []

    def walk(module: Any, name: str, at: str, parent: Any, key: str) -> None:
        while type(module).__module__.startswith("peft.") and "base_layer" in module._modules:
            parent, key, module, at = module, "base_layer", module._modules["base_layer"], at + ".base_layer"
        if isinstance(module, KTLinear) or type(module).__name__ in ("KTExperts", "TrainableExperts"):
            raise ValueError(getattr(module, "unusable", None) or f"{name} is on KT already")
        nodes.append(Node(name, at, module, parent, key))
        for child, below in module._modules.items():
            if below is not None:
                walk(below, f"{name}.{child}" if name else child, f"{at}.{child}" if at else child, module, child)

    walk(root, "", path.rstrip("."), None, "")
    return root, nodes
