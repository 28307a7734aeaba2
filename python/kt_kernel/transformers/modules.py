"""Finds the experts modules of transformers models, and says clearly which ones KT cannot stand in for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from .experts import KTExperts, Options, Shape


def find(model: torch.nn.Module) -> dict[str, Shape]:
    """{module's name: Shape} of all experts modules, in order of layers; of one that several layers share, the first
    name. Works on the meta device."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, KTExperts):
            raise ValueError(module.unusable or f"{name} is on KT already")
        gate_up, down = (getattr(module, key, None) for key in ("gate_up_proj", "down_proj"))
        if getattr(gate_up, "ndim", 0) == 3 and getattr(down, "ndim", 0) == 3:
            found[name] = shape_of(model, name, module)
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts modules (gate_up_proj and down_proj in 3 dimensions)")
    return dict(sorted(found.items(), key=lambda item: item[1].layer))


def make(shape: Shape, options: Options) -> KTExperts:
    """The module of one layer, still without weights."""
    if options.cpu_activation is None:
        return KTExperts(shape, options)
    from kt_kernel.sft.experts import TrainableExperts

    return TrainableExperts(shape, options)


def replace(model: torch.nn.Module, name: str, new: torch.nn.Module) -> None:
    """Puts `new` where the module of that name is, under all of its names."""
    old = model.get_submodule(name)
    names = [other for other, module in model.named_modules(remove_duplicate=False) if module is old]
    for other in names:
        model.set_submodule(other, new)


def ignore_keys(model: Any, patterns: Iterable[str]) -> None:
    """Tensors of a checkpoint with such names have no parameter to go to, and nothing is said of them."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    kind = set if isinstance(ignored, set) else list  # older versions join it to a list, newer ones to a set
    model._keys_to_ignore_on_load_unexpected = kind([*(ignored or ()), *patterns])


def shape_of(model: Any, name: str, module: Any) -> Shape:
    """Of an experts module; ValueError says what KT cannot stand in for."""
    _refuse_others(name, module)
    experts, two_inter, hidden = module.gate_up_proj.shape
    if tuple(module.down_proj.shape) != (experts, hidden, two_inter // 2) or two_inter % 2:
        raise ValueError(
            f"{name}: gate_up_proj {list(module.gate_up_proj.shape)} and down_proj {list(module.down_proj.shape)} "
            "do not fit [E, 2I, H] and [E, H, I]"
        )
    numbers = re.findall(r"\.(\d+)(?=\.)", f".{name}.")
    if len(numbers) != 1:
        raise ValueError(f"{name}: expected one number in it, the layer's")
    return Shape(int(numbers[0]), experts, _top_k(model), hidden, two_inter // 2)


def _refuse_others(name, module):
    kind = type(module).__name__
    for flag, expected, what in (
        ("is_transposed", False, "weights stored as [E, in, out]"),
        ("has_bias", False, "biases"),
        ("has_gate", True, "no gate"),
        ("is_concatenated", True, "gate and up rows interleaved"),
        ("has_post_expert_norm", False, "a norm after each expert"),
    ):
        if getattr(module, flag, expected) != expected:
            raise ValueError(f"{name} ({kind}): experts with {what} are not supported")
    activation = getattr(module, "act_fn", None)
    if activation is not None and type(activation).__name__ not in ("SiLU", "SiLUActivation", "function"):
        raise ValueError(f"{name} ({kind}): expected silu as activation, it has {type(activation).__name__}")
    try:
        from transformers.integrations.moe import _default_apply_gate
    except ImportError:
        return
    own = getattr(type(module), "_apply_gate", _default_apply_gate)
    if own is not _default_apply_gate:
        raise ValueError(f"{name} ({kind}): its gate is not silu(gate) * up")


def _top_k(model):
    config = model.config.get_text_config()
    for key in ("num_experts_per_tok", "top_k_experts", "moe_topk", "num_experts_per_token"):
        if isinstance(getattr(config, key, None), int):
            return getattr(config, key)
    raise ValueError(f"{type(config).__name__} does not say how many experts a token gets (num_experts_per_tok)")


def device_of(model: torch.nn.Module, name: str) -> torch.device:
    """Where the layer of an experts module runs: that of its nearest parameters."""
    while name:
        name = name.rpartition(".")[0]
        parent = model.get_submodule(name)
        for parameter in parent.parameters():
            if parameter.device.type != "meta":
                return parameter.device
    return model.device
