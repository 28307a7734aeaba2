"""Adapters from files, whole or not at all: those of PEFT, and the experts' part that kt-kernel's fine-tuning keeps
in a file of its own.

That file, fused_expert_lora.safetensors, has layers.N.experts.{gate,up,down}_lora_{a,b}: a [E, rank, in], b [E,
out, rank]. PEFT has one A for gate and up together, so gate and up become blocks of twice the rank; nothing is
approximated.
"""

from __future__ import annotations

import os
import pathlib
import re
import warnings
from typing import Any

import torch

from .attach import experts_of

FUSED = "fused_expert_lora.safetensors"
_NAME = re.compile(r"^layers\.(\d+)\.experts\.((?:gate|up|down)_lora_[ab])$")
_PARTS = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
_MISMATCH = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\((\[.*?\])\).*?torch\.Size\((\[.*?\])\)"
)


def load_adapter(
    model: Any, folder: str | os.PathLike[str], adapter_name: str = "default", is_trainable: bool = False
) -> Any:
    """PeftModel.from_pretrained, or load_adapter of a model that is one already, which takes no part of an adapter:
    names or sizes that are not those of the model are an error, and the model is as before."""
    from peft import PeftConfig, PeftModel, get_peft_model

    folder = os.fspath(folder)
    fresh = not isinstance(model, PeftModel)
    if not fresh and adapter_name in model.peft_config:
        raise ValueError(f"{folder}: the model has an adapter {adapter_name!r} already")
    config = PeftConfig.from_pretrained(folder)
    config.inference_mode = not is_trainable
    whole = model
    try:
        if fresh:
            whole = get_peft_model(model, config, adapter_name=adapter_name)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # an error below
            result = whole.load_adapter(folder, adapter_name, is_trainable=is_trainable, torch_device="cpu")
        _refuse_parts(folder, result)
    except BaseException as error:
        if isinstance(whole, PeftModel):
            if fresh:
                whole.unload()
            elif adapter_name in whole.peft_config:
                whole.delete_adapter(adapter_name)
        if isinstance(error, RuntimeError) and (found := _MISMATCH.findall(str(error))):
            name, stored, here = found[0]
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise ValueError(f"{folder}: {name}: the model has {here}, the file has {stored}{more}") from error
        raise
    return whole


def _refuse_parts(folder, result):
    for what, keys in (("has no", result.missing_keys), ("the model has no", result.unexpected_keys)):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise ValueError(f"{folder}: {what} {', '.join(keys[:3])}{more}: is the adapter of another model?")


def load_kt_adapter_artifacts(model: Any, adapter_path: str | os.PathLike[str]) -> Any:
    """Puts an adapter of kt-kernel's fine-tuning on a model, the PeftModel comes back.

    adapter_path: a folder with adapter_model.safetensors (attention and the rest, PEFT's) and
    fused_expert_lora.safetensors (experts), or that file. A model without adapters gets LoRA of the fitting ranks
    and both files; one that has LoRA on its experts gets the experts' file into its active adapter. Names and
    shapes are checked before anything changes.
    """
    from peft import PeftModel

    path = pathlib.Path(adapter_path)
    folder, file = (path.parent, path) if path.is_file() else (path, path / FUSED)
    layers = _read(file)
    modules = experts_of(model)
    if not modules:
        raise ValueError(
            f"{file}: the model has no trainable experts: kt_kernel.transformers.enable(..., trainable=True)"
        )
    rank = _check(file, layers, {layer: m.shape for layer, m in modules.items()})
    if not isinstance(model, PeftModel):
        model = _with_fitting_lora(model, folder, rank)
    _copy(file, model, layers, rank)
    return model


def _read(file):
    """{layer: {part: tensor}}"""
    if not file.exists():
        raise FileNotFoundError(f"{file}: no such file")
    from safetensors import safe_open

    layers: dict[int, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():
                match = _NAME.match(name)
                if match is None:
                    raise ValueError(
                        f"{file}: unknown tensor {name}; expected layers.N.experts.{{gate,up,down}}_lora_{{a,b}}"
                    )
                layers.setdefault(int(match[1]), {})[match[2]] = stored.get_tensor(name)
    except ValueError:
        raise
    except Exception as error:  # what safetensors raises is of a type of its own
        raise ValueError(f"{file}: {error}") from error
    return layers


def _check(file, layers, shapes):
    """The rank, which all layers share."""
    for layer in sorted(shapes.keys() | layers.keys()):
        if layer not in layers:
            raise ValueError(f"{file}: has no layer {layer}; the model has layers {_ranges(shapes)}")
        if layer not in shapes:
            raise ValueError(f"{file}: layer {layer} is none of the model's, which has experts in {_ranges(shapes)}")
    rank = 0
    for layer, tensors in sorted(layers.items()):
        shape = shapes[layer]
        for part in _PARTS:
            name = f"layers.{layer}.experts.{part}"
            if part not in tensors:
                raise ValueError(f"{file}: has no {name}")
            found = tuple(tensors[part].shape)
            if not rank and len(found) == 3:
                rank = found[1]
            inside, outside = (shape.inter, shape.hidden) if part.startswith("down") else (shape.hidden, shape.inter)
            wanted = (shape.experts, rank, inside) if part.endswith("a") else (shape.experts, outside, rank)
            if found != wanted or rank < 1:
                raise ValueError(f"{file}: {name}: expected {list(wanted)}, the file has {list(found)}")
            if not tensors[part].is_floating_point():
                raise ValueError(f"{file}: {name}: expected numbers, the file has {tensors[part].dtype}")
    return rank


def _ranges(layers):
    known = sorted(layers)
    whole = known == list(range(known[0], known[-1] + 1))
    return f"{known[0]} to {known[-1]}" if whole else ", ".join(map(str, known))


def _with_fitting_lora(model, folder, rank):
    """PEFT's part of the adapter, with empty LoRA of the experts beside it."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    from peft.utils.save_and_load import load_peft_weights

    described = folder / "adapter_config.json"
    if not described.exists():
        raise FileNotFoundError(f"{described}: no such file; it says which alpha belongs to the rank")
    config = LoraConfig.from_pretrained(os.fspath(folder))
    if config.use_rslora:
        raise ValueError(f"{described}: use_rslora: not known for experts in {FUSED}")
    if config.r != rank:
        raise ValueError(f"{described}: r is {config.r}, experts in {FUSED} have rank {rank}")
    config.target_parameters = sorted(
        {*(config.target_parameters or ()), "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    )
    config.rank_pattern = {**config.rank_pattern, r".*\.experts\.gate_up_proj": 2 * rank}
    config.alpha_pattern = {**config.alpha_pattern, r".*\.experts\.gate_up_proj": 2 * config.lora_alpha}
    config.inference_mode = True
    weights = (
        load_peft_weights(os.fspath(folder), device="cpu") if (folder / "adapter_model.safetensors").exists() else {}
    )
    whole = get_peft_model(model, config)
    try:
        result = set_peft_model_state_dict(whole, weights)
        missing = [key for key in result.missing_keys if "lora_" in key and ".experts." not in key]
        _refuse_parts(folder, type(result)(missing, result.unexpected_keys))
    except BaseException:
        whole.unload()
        raise
    return whole


def _copy(file, model, layers, rank):
    wrappers = {layer: _wrappers_of(model, layer) for layer in layers}
    name = model.active_adapter
    plan = []
    for layer, tensors in layers.items():
        parts = {key: tensor.float() for key, tensor in tensors.items()}
        experts, inter = parts["gate_lora_b"].shape[:2]
        a = torch.cat([parts["gate_lora_a"], parts["up_lora_a"]], dim=1)
        b = torch.zeros((experts, 2 * inter, 2 * rank), device="cpu")
        b[:, :inter, :rank], b[:, inter:, rank:] = parts["gate_lora_b"], parts["up_lora_b"]
        for parameter, pair in (
            ("gate_up_proj", (a, b)),
            ("down_proj", (parts["down_lora_a"], parts["down_lora_b"])),
        ):
            plan += _stored_as_peft(file, layer, parameter, wrappers[layer].get(parameter), name, *pair)
    with torch.no_grad():
        for target, values in plan:
            target.copy_(values)


def _stored_as_peft(file, layer, parameter, wrapper, adapter, a, b):
    """(PEFT's parameter, its values): A [E * rank, in], rows expert by expert; B [out, rank * E], columns rank by
    rank."""
    wanted = a.shape[1]
    here = 0 if wrapper is None or adapter not in wrapper.r else wrapper.r[adapter]
    if here != wanted:
        raise ValueError(
            f"{file}: {parameter} of layer {layer} needs LoRA of rank {wanted} in adapter {adapter!r}, the model has "
            f"{here or 'none'}: gate and up have an A each there (rank_pattern of LoraConfig: "
            f"{{'.*\\\\.experts\\\\.gate_up_proj': {wanted if parameter == 'gate_up_proj' else 2 * wanted}}})"
        )
    return [
        (wrapper.lora_A[adapter].weight, a.reshape(-1, a.shape[2])),
        (wrapper.lora_B[adapter].weight, b.permute(1, 2, 0).reshape(b.shape[1], -1)),
    ]


def _wrappers_of(model, layer):
    """{parameter: PEFT's wrapper} of the experts of a layer."""
    experts = experts_of(model)[layer]
    found = {}
    for module in model.modules():
        if hasattr(module, "parameter_name") and hasattr(module, "lora_A") and module.get_base_layer() is experts:
            found[module.parameter_name] = module
    return found
