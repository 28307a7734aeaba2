"""enable(): the one call that puts the routed experts of a transformers model on KT."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from kt_kernel import kt_kernel_ext

from . import modules, placement
from .checkpoint import FloatExperts
from .experts import KTExperts, Options, Shape, plain_tensors
from .formats import method_of, stored_method

_ACTIVATIONS = ("default", "int8", "bf16", "f32")


def enable(
    model_or_path: Any,
    weights: str | os.PathLike[str] | None = None,
    format: str | None = None,
    gpu_experts: int | float | torch.Tensor | None = None,
    *,
    strategy: str | None = None,
    statistics: Any = None,
    update_every: int | None = None,
    threads: int | None = None,
    numa_nodes: int | Sequence[int] | None = None,
    max_tokens: int = 4096,
    activations: str = "default",
    device: torch.device | str | int | None = None,
    trainable: bool = False,
    cpu_activation: str = "retain",
    rules: Any = None,
    operators: Iterable[type] = (),
    rule_devices: Mapping[str, str] | str | None = None,
    **from_pretrained: Any,
) -> Any:
    """A transformers model whose routed experts run on KT; attention, shared experts and all else stay with torch.

    model_or_path: a folder or a name on the hub: loaded by AutoModelForCausalLM with its experts never in torch. Or
        a loaded model: changed in place, its experts are handed over layer by layer and freed.
    weights: where experts are read from, if not from the model's own folder: kt weights, a GGUF file, another folder.
    format: "int4", "int8", "bf16", "fp8", ... or a method of KTMoEWrapper; None: as they are stored (bf16 for a loaded
        model). From bf16, fp16 or f32 the others are made while loading.
    gpu_experts: experts that live on the model's device: a number for each layer, a share (float) of all, or a mask
        bool [layers, experts]. strategy ("uniform", "frequency", "front-loading", "random") and statistics (a table, or
        a .pt or .json file) say which. update_every: forward passes after which they follow live routing.
    threads, numa_nodes: of KT; all cores (with a GPU, all cpus but one at most) and nodes if None. numa_nodes: how
        many, or a list of nodes.
    max_tokens: the most that KT takes in one piece; longer inputs are cut. Buffers are of this size.
    activations: how KT's kernels hold them: "int8", "bf16", "f32", or what suits the format ("default").
    trainable: gradients go through the experts, and LoRA of PEFT attaches to them (docs/finetune.md); activations are
        then bf16 where the CPU multiplies that, else f32. cpu_activation: "retain" keeps gate and up of a forward pass
        for its backward pass while memory is left, "recompute" computes them again.
    rules: a file of placement rules, which say what goes where and in which format, in place of format, gpu_experts and
        device; operators and rule_devices as in kt_kernel.inject. The result's `kt_placement` is the Placement. Of a
        path nothing that rules replace is ever in torch.
    device: where the rest of the model goes. Everything else (dtype, device_map, attn_implementation, ...) is for
        from_pretrained.
    """
    plan = placement.Plan(gpu_experts, strategy, statistics, update_every)
    if activations not in _ACTIVATIONS:
        raise ValueError(f"activations: expected one of {', '.join(_ACTIVATIONS)}, got {activations!r}")
    if rules is not None:
        others = dict(format=format, gpu_experts=gpu_experts, numa_nodes=numa_nodes, device=device,
                      trainable=trainable or None)
        _refuse_beside_rules([name for name, value in others.items() if value is not None])
        given = dict(threads=threads, max_tokens=_positive("max_tokens", max_tokens), activations=activations)
        return _by_rules(model_or_path, rules, operators, weights, rule_devices, given, from_pretrained)
    options = dict(
        _threads(threads, numa_nodes), max_tokens=_positive("max_tokens", max_tokens), activations=activations
    )
    if trainable:
        options.update(_training(activations, cpu_activation, gpu_experts, update_every))
    elif cpu_activation != "retain":
        raise TypeError("cpu_activation: only with trainable=True")
    method = None if format is None else method_of(format)
    if isinstance(model_or_path, torch.nn.Module):
        if from_pretrained:
            raise TypeError(f"{', '.join(from_pretrained)}: only for a model that is loaded from a path")
        model, masks = model_or_path, _enable_loaded(model_or_path, weights, method, options, plan)
    else:
        model, masks = _enable_path(model_or_path, weights, method, options, plan, from_pretrained)
    if trainable:
        from kt_kernel.sft.attach import attach

        attach(model)
    if device is not None:
        model.to(device)
    if masks is not None:
        placement.apply_masks(model, masks)
    if plan.update_every is not None:
        placement.recorder(model)
        model.__dict__["_kt_auto_update"] = placement.AutoUpdate(model, plan.update_every)
    return model.eval()


def _refuse_beside_rules(names):
    if names:
        raise TypeError(f"{', '.join(names)}: rules say what goes where and in which format; "
                        f"leave {'it' if len(names) == 1 else 'them'} out")


def _by_rules(model_or_path, rules, operators, weights, devices, options, from_pretrained):
    if isinstance(model_or_path, torch.nn.Module):
        if from_pretrained:
            raise TypeError(f"{', '.join(from_pretrained)}: only for a model that is loaded from a path")
        from kt_kernel.injection import inject

        inject(model_or_path, rules, operators, weights, devices, **options)
        return model_or_path.eval()
    from . import by_rules

    folder = _local(model_or_path, from_pretrained)
    return by_rules.load(folder, rules, operators, weights, devices, options, from_pretrained)


def _training(activations, cpu_activation, gpu_experts, update_every):
    """Of Options, for experts that train."""
    from kt_kernel.sft.activations import POLICIES, training_activations
    from kt_kernel.sft.attach import check_peft

    if cpu_activation not in POLICIES:
        raise ValueError(f"cpu_activation: expected one of {', '.join(POLICIES)}, got {cpu_activation!r}")
    if gpu_experts is not None or update_every is not None:
        raise ValueError("gpu_experts: experts on the device do not train; leave it out with trainable=True")
    activations = training_activations(activations)
    check_peft()
    return dict(activations=activations, cpu_activation=cpu_activation)


def _refuse_to_save(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError("save_pretrained: the experts of this model are on KT and not in torch; save the original instead")


def _forbid_saving(model, refuse=_refuse_to_save):
    """push_to_hub would make the repository before it saves."""
    model.__dict__["save_pretrained"] = model.__dict__["push_to_hub"] = refuse


def _positive(name, value):
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 1:
        raise ValueError(f"{name}: expected a number of at least 1, got {value!r}")
    return value.__index__()


def _threads(threads, numa_nodes):
    """Of Options; 0 is all there are."""
    out = dict(threads=0 if threads is None else _positive("threads", threads))
    if numa_nodes is None:
        return out
    if hasattr(numa_nodes, "__index__"):
        return dict(out, pools=_positive("numa_nodes", numa_nodes))
    nodes = tuple(int(node) for node in numa_nodes)
    return dict(out, pools=_positive("numa_nodes", len(nodes)), numa_nodes=nodes)


# --- a loaded model ---


def _enable_loaded(model, weights, method, options, plan):
    """Replaces the model's experts, and gives the masks of the device. All that can be checked is, before the first
    goes."""
    shapes = modules.find(model)
    masks = plan.masks(model, shapes.values())
    source = None if weights is None else _Source(os.fspath(weights), method)
    if source is None:
        shared = Options(method=method or "BF16", **options)
        for name, shape in shapes.items():
            _check_values(model.get_submodule(name), shape)
    else:
        shared = source.options(options)
    done: list[KTExperts] = []
    for name, shape in shapes.items():
        new = modules.make(shape, shared)
        try:
            if source is None:
                new.load(_values_of(model.get_submodule(name), shape))
            else:
                source.load(new)
        except BaseException as error:
            _give_up(model, name, done, len(shapes), error)
            raise
        _forbid_saving(model)
        modules.replace(model, name, new)
        done.append(new)
    return masks


def _give_up(model, name, done, count, error):
    """The experts in `done` are in torch no more: nobody may take the rest for a model. With none done, it is whole."""
    if not done:
        return
    reason = (
        f"{type(model).__name__} is unusable: enable() failed at {name} after {len(done)} of {count} experts "
        f"modules had gone to KT ({type(error).__name__}: {error}); load the model again"
    )
    for module in done:
        module.spoil(reason)

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(reason)

    _forbid_saving(model, refuse)


def _check_values(module, shape):
    gate_up, down = module.gate_up_proj, module.down_proj
    for values in (gate_up, down):
        if not values.is_floating_point() or values.element_size() < 2:
            raise ValueError(f"layer {shape.layer}: its experts are {values.dtype}; give a path, so that KT reads them")
        if values.device.type == "meta":
            raise ValueError(f"layer {shape.layer}: its experts are on the meta device; give a path, "
                             "so that KT reads them")
    # What KT would refuse after earlier layers had gone. One expert at a time: the answer is as large as a quarter of
    # it.
    parts = ("gate", gate_up[:, : shape.inter]), ("up", gate_up[:, shape.inter :]), ("down", down)
    for expert in range(shape.experts):
        for name, values in parts:
            if not torch.isfinite(values[expert]).all():
                raise ValueError(f"layer {shape.layer} expert {expert} {name}: a value is not a finite number")


def _values_of(module, shape):
    """gate, up, down of a stock experts module, on the CPU and contiguous."""
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    parts = gate_up[:, : shape.inter], gate_up[:, shape.inter :], down
    with plain_tensors():
        return [part.cpu().contiguous() for part in parts]


# --- a path ---


class _Source:
    """Where experts come from: read by KT, or, for the other formats made from floats, through FloatExperts."""

    def __init__(self, path, method):
        stored = stored_method(path)
        self.path, self.method, self._floats = path, method or stored, None
        if stored == "BF16" and not kt_kernel_ext.loads(self.method, path):
            self._floats = FloatExperts(path)

    def options(self, options):
        return Options(method=self.method, weights="" if self._floats else self.path, **options)

    def load(self, module):
        s = module.shape
        with plain_tensors():
            values = self._floats.layer(s.layer, s.experts, s.inter, s.hidden) if self._floats else None
        module.load(values)


def _enable_path(path, weights, method, options, plan, from_pretrained):
    """The model of a path with its experts on KT, and the masks of the device."""
    import transformers

    from .quantizer import KTQuantizationConfig

    if from_pretrained.get("quantization_config") is not None:
        raise TypeError("quantization_config: the experts' is format=, the rest keeps what the checkpoint says")
    if from_pretrained.pop("output_loading_info", False):
        raise TypeError("output_loading_info: enable() returns the model alone, and refuses what is not whole")
    folder = _local(path, from_pretrained)
    source = _Source(os.fspath(weights) if weights is not None else folder, method)
    config = from_pretrained.pop("config", None)
    if config is None:
        trust = {key: from_pretrained[key] for key in ("trust_remote_code",) if key in from_pretrained}
        config = transformers.AutoConfig.from_pretrained(folder, **trust)
    config = copy.deepcopy(config)
    inner = _take_quantization(config)
    shared = source.options(options)
    if inner is not None:
        shared = dataclasses.replace(shared, group_size=_group_size(inner))
    masks = None

    def found(model: torch.nn.Module, shapes: dict[str, Shape]) -> None:  # before a weight is read
        nonlocal masks
        masks = plan.masks(model, shapes.values())

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, quantization_config=KTQuantizationConfig(shared, inner, found), output_loading_info=True,
        **from_pretrained,
    )
    _refuse_missing(folder, info)
    for module in placement.modules_of(model).values():
        source.load(module)
    _forbid_saving(model)
    return model, masks


def _refuse_missing(folder, info):
    """transformers would go on with random numbers for them."""
    missing = sorted(key for key in info["missing_keys"] if ".experts." not in key)
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        raise ValueError(
            f"{folder}: has no {', '.join(missing[:4])}{more}; is it a folder of experts only (kt quant)? Give the "
            "original checkpoint as path, and this folder as weights="
        )


def _local(path, from_pretrained):
    """The folder of a model: here, in the hub's cache, or else from the hub."""
    path = os.fspath(path)
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise ValueError(f"{path}: expected a model's folder; a GGUF file goes to weights=")
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise FileNotFoundError(f"{path}: no such folder, and not a name on the hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    names = ("revision", "token", "cache_dir", "local_files_only", "force_download")
    chosen = {key: from_pretrained.pop(key) for key in names if key in from_pretrained}
    only_here = chosen.pop("local_files_only", False)
    if only_here or not chosen.get("force_download"):
        try:
            folder = snapshot_download(path, **{**chosen, "force_download": False}, local_files_only=True)
            if only_here or _whole(folder):
                return folder
        except LocalEntryNotFoundError:
            if only_here:
                raise
    return snapshot_download(path, **chosen)


def _whole(folder):
    """Whether a folder of the hub's cache has a config and all its safetensors: others may have asked for a part."""
    folder = pathlib.Path(folder)
    if not (folder / "config.json").exists():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return (folder / "model.safetensors").exists()
    return all((folder / file).exists() for file in set(json.loads(index.read_text())["weight_map"].values()))


def _take_quantization(config):
    """The checkpoint's quantization_config, as a dict, out of the config; None where it has none."""
    taken = None
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        found = getattr(part, "quantization_config", None)
        if found is not None:
            taken = found if isinstance(found, dict) else found.to_dict()
            delattr(part, "quantization_config")
    return taken


def _group_size(quantization):
    for group in quantization.get("config_groups", {}).values():
        size = (group.get("weights") or {}).get("group_size")
        if size:
            return int(size)
    return int(quantization.get("group_size") or 128)
