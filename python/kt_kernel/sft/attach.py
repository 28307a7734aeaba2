"""What a model with trainable experts needs around them: where its parts are moved, saved, checkpointed and
merged."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .checkpointing import checkpointing_enable
from .experts import TrainableExperts

LEAST_PEFT = "0.21.0"  # the first that hands low-rank factors over instead of their product


def check_peft() -> None:
    """Refuses a PEFT that would build the product of factors for all experts in each forward pass. None at all is
    fine: experts are frozen then."""
    try:
        found = importlib.metadata.version("peft")
    except importlib.metadata.PackageNotFoundError:
        return
    if _numbers(found) < _numbers(LEAST_PEFT):
        raise RuntimeError(
            f"PEFT {found}: LoRA on experts that are on KT needs {LEAST_PEFT} or newer "
            f'(pip install -U "peft>={LEAST_PEFT}")'
        )


def _numbers(version):
    parts = []
    for part in version.split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        parts.append(int(digits or 0))
    return tuple(parts)


def experts_of(model: torch.nn.Module) -> dict[int, TrainableExperts]:
    """{layer: its experts}, also of a model that PEFT has wrapped."""
    found = {m.shape.layer: m for m in model.modules() if isinstance(m, TrainableExperts)}
    return dict(sorted(found.items()))


def attach(model: torch.nn.Module) -> None:
    """After all experts are loaded."""
    names = [name for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, TrainableExperts)]
    for name in names:
        parent, _, child = name.rpartition(".")
        _keep_in_place(model.get_submodule(parent), child)
    for module in experts_of(model).values():
        module.add_placeholders()
    if hasattr(model, "gradient_checkpointing_enable"):
        model.__dict__["gradient_checkpointing_enable"] = checkpointing_enable(model)
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = list(_placeholder_names(names))
    guard_peft()


def _keep_in_place(parent: torch.nn.Module, child: str) -> None:
    """`parent.to(...)`, .cuda(), .half() and their like pass over `child` and all that is put around it later:
    placeholders, and LoRA, which stays f32 on the CPU where its experts are."""
    stock: Callable[..., Any] = type(parent)._apply

    def apply(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.nn.Module:
        held = parent._modules[child]
        parent._modules[child] = None
        try:
            stock(parent, fn, *args, **kwargs)
        finally:
            parent._modules[child] = held
        return parent

    parent.__dict__["_apply"] = apply


def _placeholder_names(names: list[str]) -> Iterator[str]:
    """Parameters' names as DistributedDataParallel may meet them: in the model, or in PEFT's wrappers."""
    for name in names:
        for prefix in ("", "base_model.model."):
            for wrapped in ("", ".base_layer", ".base_layer.base_layer"):
                for parameter in ("gate_up_proj", "down_proj"):
                    yield f"{prefix}{name}{wrapped}.{parameter}"


# --- PEFT adds to weights in two places; where those are on KT it is told before it makes anything ---


def guard_peft() -> None:
    """Puts a question before PEFT's merging of adapters, and before it multiplies factors of experts out.
    Placeholders refuse both as well, but only after a model is half merged, or a product as large as all experts
    has been made."""
    if importlib.util.find_spec("peft") is None:
        return
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTuner

    _ask_first(BaseTuner, "_check_merge_allowed", _refuse_merging)
    _ask_first(ParamWrapper, "get_delta_weight", _refuse_product)


def _ask_first(owner, name, question):
    stock = getattr(owner, name, None)
    if stock is None or getattr(stock, "_kt_asks", False):
        return

    def asking(self: Any, *args: Any, **kwargs: Any) -> Any:
        question(self)
        return stock(self, *args, **kwargs)

    asking._kt_asks = True  # type: ignore[attr-defined]
    asking.__name__, asking.__doc__ = name, stock.__doc__
    setattr(owner, name, asking)


def _refuse_merging(tuner):
    if any(isinstance(module, TrainableExperts) for module in tuner.model.modules()):
        raise ValueError(
            "adapters cannot be merged into experts that are on KT: save the adapter, then "
            "kt sft export ADAPTER -o OUT --layout merged"
        )


def _refuse_product(wrapper):
    base = wrapper.get_base_layer()
    if not isinstance(base, TrainableExperts):
        return
    names = ", ".join(repr(name) for name in wrapper.active_adapters if name in wrapper.lora_A)
    raise ValueError(
        f"layer {base.shape.layer}: experts on KT take one active adapter at a time (active: {names}), in models of "
        "more than one expert; model.set_adapter(NAME) switches"
    )
