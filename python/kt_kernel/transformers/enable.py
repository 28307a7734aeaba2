"""enable(): the one call that puts the routed experts of a transformers model on KT."""

import copy
import dataclasses
import os

import torch

from . import modules, placement
from .checkpoint import FloatExperts
from .experts import KTExperts, Options
from .formats import method_of, stored_method


def enable(
    model_or_path,
    weights=None,
    format=None,
    gpu_experts=None,
    *,
    strategy=None,
    statistics=None,
    update_every=None,
    threads=None,
    numa_nodes=None,
    max_tokens=4096,
    activations="default",
    device=None,
    **from_pretrained,
):
    """A transformers model whose routed experts run on KT; attention, shared experts and all else stay with torch.

    model_or_path: a folder or a name on the hub: loaded by AutoModelForCausalLM with its experts never in torch. Or
        a loaded model: changed in place, its experts are handed over layer by layer and freed.
    weights: where experts are read from, if not from the model's own folder: kt weights, a GGUF file, another folder.
    format: "int4", "int8", "bf16", "fp8", ... or a method of KTMoEWrapper; None: as they are stored (bf16 for a loaded
        model). From bf16, fp16 or f32 the others are made while loading.
    gpu_experts: experts that live on the model's device: a number for each layer, a share (float) of all, or a mask
        bool [layers, experts]. strategy ("uniform", "frequency", "front-loading", "random") and statistics (a table, or a
        .pt or .json file) say which. update_every: forward passes after which they follow live routing.
    threads, numa_nodes: of KT; all cores (with a GPU, all cpus but one at most) and nodes if None. numa_nodes: how many, or a list of nodes.
    max_tokens: the most that KT takes in one piece; longer inputs are cut. Buffers are of this size.
    activations: how KT's kernels hold them: "int8", "bf16", "f32", or what suits the format ("default").
    device: where the rest of the model goes. Everything else (dtype, device_map, attn_implementation, ...) is for
        from_pretrained.
    """
    options = dict(
        _threads(threads, numa_nodes), max_tokens=_positive("max_tokens", max_tokens), activations=activations
    )
    if isinstance(model_or_path, torch.nn.Module):
        if from_pretrained:
            raise TypeError(f"{', '.join(from_pretrained)}: only for a model that is loaded from a path")
        model = _enable_loaded(model_or_path, weights, format, options)
    else:
        model = _enable_path(model_or_path, weights, format, options, from_pretrained)
    if device is not None:
        model.to(device)
    masks = placement.start_masks(model, gpu_experts, strategy, statistics)
    if masks is not None:
        placement.apply_masks(model, masks)
    if update_every is not None:
        if masks is None:
            raise ValueError("update_every moves experts of the device; gpu_experts says how many, and it is None")
        model.__dict__["_kt_auto_update"] = placement.AutoUpdate(model, update_every)
    model.__dict__["save_pretrained"] = _refuse_to_save
    return model.eval()


def _refuse_to_save(*args, **kwargs):
    raise ValueError("save_pretrained: the experts of this model are on KT and not in torch; save the original instead")


def _positive(name, value):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a number of at least 1, got {value!r}")
    return value


def _threads(threads, numa_nodes):
    """Of Options; 0 is all there are."""
    out = dict(threads=0 if threads is None else _positive("threads", threads))
    if numa_nodes is None:
        return out
    if isinstance(numa_nodes, int):
        return dict(out, pools=_positive("numa_nodes", numa_nodes))
    nodes = tuple(int(node) for node in numa_nodes)
    return dict(out, pools=_positive("numa_nodes", len(nodes)), numa_nodes=nodes)


# --- a loaded model ---


def _enable_loaded(model, weights, format, options):
    shapes = modules.find(model)
    source = None if weights is None else _Source(os.fspath(weights), format)
    for name, shape in shapes.items():
        old = model.get_submodule(name)
        if source is None:
            new = KTExperts(shape, Options(method=method_of(format or "bf16"), **options))
            new.load(_values_of(old, shape))
        else:
            new = KTExperts(shape, source.options(options))
            source.load(new)
        model.set_submodule(name, new)
        del old
    return model


def _values_of(module, shape):
    """gate, up, down of a stock experts module, on the CPU and contiguous."""
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if not gate_up.is_floating_point() or gate_up.element_size() < 2:
        raise ValueError(f"layer {shape.layer}: its experts are {gate_up.dtype}; give a path, so that KT reads them")
    if gate_up.device.type == "meta":
        raise ValueError(f"layer {shape.layer}: its experts are on the meta device; give a path, so that KT reads them")
    parts = gate_up[:, : shape.inter], gate_up[:, shape.inter :], down
    return [part.cpu().contiguous() for part in parts]


# --- a path ---


# Methods for which KT rounds floats itself while it reads them: the values never stand in memory.
_ROUNDED_BY_KT = ("BF16", "AMXINT4", "AMXINT8", "MOE_INT4", "MOE_INT8")


class _Source:
    """Where experts come from: read by KT, or, for the other formats made from floats, through FloatExperts."""

    def __init__(self, path, format):
        self.path, self._floats = path, None
        if not os.path.exists(path):
            raise FileNotFoundError(f"weights {path}: no such file or folder")
        self.method = stored_method(path) if format is None else method_of(format)
        has_config = os.path.exists(os.path.join(path, "config.json"))
        if self.method not in _ROUNDED_BY_KT and has_config and stored_method(path) == "BF16":
            self._floats = FloatExperts(path)

    def options(self, options):
        return Options(method=self.method, weights="" if self._floats else self.path, **options)

    def load(self, module):
        s = module.shape
        module.load(self._floats.layer(s.layer, s.experts, s.inter, s.hidden) if self._floats else None)


def _enable_path(path, weights, format, options, from_pretrained):
    import transformers

    from .quantizer import KTQuantizationConfig

    if from_pretrained.get("quantization_config") is not None:
        raise TypeError("quantization_config: the experts' is format=, the rest keeps what the checkpoint says")
    folder = _local(path, from_pretrained)
    source = _Source(os.fspath(weights) if weights is not None else folder, format)
    config = from_pretrained.pop("config", None)
    if config is None:
        trust = {key: from_pretrained[key] for key in ("trust_remote_code",) if key in from_pretrained}
        config = transformers.AutoConfig.from_pretrained(folder, **trust)
    config = copy.deepcopy(config)
    inner = _take_quantization(config)
    shared = source.options(options)
    if inner is not None:
        shared = dataclasses.replace(shared, group_size=_group_size(inner))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, quantization_config=KTQuantizationConfig(shared, inner), **from_pretrained
    )
    for module in placement.modules_of(model).values():
        source.load(module)
    return model


def _local(path, from_pretrained):
    """The folder of a model, from the hub where it is none here."""
    path = os.fspath(path)
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise ValueError(f"{path}: expected a model's folder; a GGUF file goes to weights=")
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise FileNotFoundError(f"{path}: no such folder, and not a name on the hub")
    from huggingface_hub import snapshot_download

    chosen = {key: from_pretrained.pop(key) for key in ("revision", "token", "cache_dir") if key in from_pretrained}
    return snapshot_download(path, **chosen)


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
