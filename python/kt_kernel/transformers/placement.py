"""Which experts of a transformers model are on its device: at the start, and by live routing later."""

import torch

from kt_kernel.placement import ExpertRecorder, place

from .experts import KTExperts
from .modules import device_of


class Recorder:
    """Counts of expert activations of one model, from its live routing. Rows are the model's layers, dense ones too."""

    def __init__(self, model):
        self._modules = modules_of(model)
        layers, experts = table_shape(model, self._modules)
        self._recorder = ExpertRecorder(layers, experts)

    def start(self):
        for module in self._modules.values():
            module.recorder = self._recorder
        return self

    def stop(self):
        for module in self._modules.values():
            module.recorder = None
        return self

    def reset(self):
        self._recorder.reset()

    def counts(self):
        """int64 CPU [layers, experts]"""
        return self._recorder.counts()

    def save(self, path):
        """.pt (the form of SGLang's statistics) or .json; `enable(..., statistics=path)` reads both."""
        self._recorder.save(path)


def modules_of(model):
    """{name: KTExperts} of an enabled model, in order of layers."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, KTExperts)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts on KT: call kt_kernel.transformers.enable first")
    return dict(sorted(found.items(), key=lambda item: item[1].shape.layer))


def table_shape(model, modules):
    """Layers of the model and experts of each, for tables of all layers."""
    shapes = [module.shape for module in modules.values()]
    stated = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    return max(stated, max(shape.layer for shape in shapes) + 1), shapes[0].experts


def recorder(model):
    """The model's recorder, counting from the first call on."""
    state = model.__dict__.get("_kt_recorder")
    if state is None:
        state = model.__dict__["_kt_recorder"] = Recorder(model).start()
    return state


def start_masks(model, gpu_experts, strategy=None, statistics=None):
    """bool [layers, experts] of what enable() was told, or None."""
    if gpu_experts is None:
        if statistics is not None or strategy is not None:
            raise ValueError("strategy and statistics say which experts; gpu_experts says how many, and it is None")
        return None
    modules = modules_of(model)
    layers, experts = table_shape(model, modules)
    rows = [module.shape.layer for module in modules.values()]
    if isinstance(gpu_experts, torch.Tensor):
        return _whole_table(gpu_experts, layers, experts, rows)
    if strategy is None:
        strategy = "frequency" if statistics is not None else "uniform"
    total = how_many(gpu_experts, len(rows), experts)
    return place(strategy, layers, experts, total, statistics, moe_layers=rows)


def how_many(gpu_experts, layers, experts):
    """Experts of all layers together: an int is a number for each layer, a float a share of all."""
    if isinstance(gpu_experts, bool) or not isinstance(gpu_experts, (int, float)):
        raise TypeError(f"gpu_experts: expected a number for each layer, a share or a mask, got {gpu_experts!r}")
    limit = experts if isinstance(gpu_experts, int) else 1
    if not 0 <= gpu_experts <= limit:
        raise ValueError(f"gpu_experts: expected 0 to {limit}, got {gpu_experts}")
    return round(gpu_experts * layers * (1 if isinstance(gpu_experts, int) else experts))


def _whole_table(mask, layers, experts, rows):
    mask = mask.to(device="cpu", dtype=torch.bool)
    if tuple(mask.shape) == (layers, experts):
        return mask
    if tuple(mask.shape) == (len(rows), experts):
        table = torch.zeros(layers, experts, dtype=torch.bool)
        table[rows] = mask
        return table
    raise ValueError(
        f"gpu_experts: expected a mask [{layers}, {experts}] or [{len(rows)}, {experts}] (layers with experts only), "
        f"got {list(mask.shape)}"
    )


def apply_masks(model, masks):
    """masks: bool [layers, experts]. How many experts came to their device anew."""
    moved = 0
    for name, module in modules_of(model).items():
        mask = masks[module.shape.layer].to(device="cpu", dtype=torch.bool)
        moved += int((mask & ~module.gpu_experts_mask).sum())
        module.place(mask, device_of(model, name))
    return moved


def update_placement(model, num_gpu_experts=None, *, per_layer=False, counts=None):
    """Moves the experts that live routing used most onto the model's device; their number for each layer on average
    (None: as many as there are now). per_layer: that many in each layer, instead of the busiest of the whole model.
    Counts are what recorder(model) has seen unless given. Masks change in place. Returns how many experts moved."""
    modules = modules_of(model)
    layers, experts = table_shape(model, modules)
    rows = [module.shape.layer for module in modules.values()]
    if num_gpu_experts is None:
        total = sum(int(module.gpu_experts_mask.sum()) for module in modules.values())
    else:
        total = how_many(num_gpu_experts, len(rows), experts)
    if counts is None:
        counts = recorder(model).counts()
    if int(counts.sum()) == 0:
        return 0  # nothing was seen: no reason to move anything
    if not per_layer:
        return apply_masks(model, place("frequency", layers, experts, total, counts, moe_layers=rows))
    masks = torch.zeros(layers, experts, dtype=torch.bool)
    for at, row in enumerate(rows):
        share = total // len(rows) + (at < total % len(rows))
        masks[row] = place("frequency", 1, experts, share, counts[row : row + 1])[0]
    return apply_masks(model, masks)


class AutoUpdate:
    """A hook of the model: after every `interval` forward passes the placement follows what was routed since."""

    def __init__(self, model, interval, per_layer=False):
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f"update_every: expected a number of forward passes, got {interval!r}")
        self._interval, self._per_layer, self._passes = interval, per_layer, 0
        self._seen = recorder(model).counts()
        self._hook = model.register_forward_hook(self._after)

    def _after(self, model, inputs, output):
        self._passes += 1
        if self._passes % self._interval == 0:
            counts = recorder(model).counts()
            # Since the last update; all of them if somebody reset the recorder in between.
            recent = counts - self._seen if bool((counts >= self._seen).all()) else counts
            update_placement(model, per_layer=self._per_layer, counts=recent)
            self._seen = counts

    def stop(self):
        self._hook.remove()
