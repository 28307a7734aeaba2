"""Modules of a model on several devices: where tensors are brought, and hooks that bring what a module is called
with."""

from __future__ import annotations

from typing import Any

import torch

from .linear import KTLinear
from .operators import BaseInjectedModule


def moved(value: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists and mappings too; what else there is stays, caches among it: their layers are each in
    one place."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(moved(each, device) for each in value)
    if type(value) is dict:
        return {key: moved(each, device) for key, each in value.items()}
    return value


class Moves:
    """`devices`: {a module's path: its device}; a module without one is where that above it is."""

    def __init__(self, model: torch.nn.Module, devices: dict[str, str]) -> None:
        self._model = model
        self._devices = {path: torch.device("cpu" if device == "host" else device) for path, device in devices.items()}
        self._before: list[tuple[Any, str, torch.device]] = []
        self._hooks: list[Any] = []

    def device_of(self, path: str) -> torch.device | None:
        while True:
            if path in self._devices:
                return self._devices[path]
            if not path:
                return None
            path = path.rpartition(".")[0]

    def apply(self) -> int:
        """How many modules were moved."""
        count = 0
        for path, module in self._model.named_modules():
            device = self.device_of(path)
            if device is None:
                continue
            here = {t.device for t in (*module._parameters.values(), *module._buffers.values()) if t is not None}
            if any(each.type != "meta" and each != device for each in here):
                self._before.append((module, path, next(iter(here))))
                module._apply(lambda t, to=device: t if t.device.type == "meta" else t.to(to), recurse=False)
                count += 1
        if len(set(self._devices.values())) > 1:
            self._hook()
        return count

    def _hook(self) -> None:
        """On every module that is elsewhere than what calls it, but for those that see to it themselves. What a layer
        gives stays where it is: the next one takes it from there."""
        from .transformers.experts import KTExperts

        by_themselves = (torch.nn.ModuleList, BaseInjectedModule, KTLinear, KTExperts)
        for path, module in self._model.named_modules():
            device = self.device_of(path)
            parent = self.device_of(path.rpartition(".")[0]) if path else None
            if device is None or device == parent or isinstance(module, by_themselves):
                continue

            def bring(module: Any, args: Any, kwargs: Any, to: torch.device = device) -> Any:
                return moved(args, to), moved(kwargs, to)

            self._hooks.append(module.register_forward_pre_hook(bring, with_kwargs=True))
            if parent is not None and not path.rpartition(".")[2].isdigit():
                self._hooks.append(module.register_forward_hook(lambda module, args, out, to=parent: moved(out, to)))

    def undo(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, _, device in self._before:
            module._apply(lambda t, to=device: t if t.device.type == "meta" else t.to(to), recurse=False)
        self._hooks, self._before = [], []
