"""The names of LLaMA-Factory that are replaced in this process, all of them:

model.loader.AutoModelForCausalLM   its from_pretrained loads a model with its experts on KT
model.loader.load_config            refuses models that it would load by another class, experts in torch
model.adapter.get_peft_model        takes the words of lora_target to experts
model.model_utils.checkpointing._gradient_checkpointing_enable   experts are not run twice
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from kt_kernel.sft.train.events import TrainingError

from . import packages
from .recipe import Door

_NAMES = {
    "model.loader": (
        "AutoModelForCausalLM",
        "AutoModelForImageTextToText",
        "AutoModelForSeq2SeqLM",
        "AutoModelForTextToWaveform",
        "load_config",
    ),
    "model.adapter": ("get_peft_model",),
    "model.model_utils.checkpointing": ("_gradient_checkpointing_enable",),
}


def install(door: Door) -> None:
    """Looks for every name first: where one is missing nothing has been replaced."""
    loader, adapter, checkpointing = [_module(name, names) for name, names in _NAMES.items()]
    loader.AutoModelForCausalLM = _loading_class(loader.AutoModelForCausalLM, door)  # type: ignore[attr-defined]
    loader.load_config = _checked_config(loader)  # type: ignore[attr-defined]
    adapter.get_peft_model = _targeting(adapter.get_peft_model, door)  # type: ignore[attr-defined]
    stock = checkpointing._gradient_checkpointing_enable
    checkpointing._gradient_checkpointing_enable = _sharing(stock)  # type: ignore[attr-defined]


def _module(name: str, names: tuple[str, ...]) -> ModuleType:
    """A module of LLaMA-Factory's that has these names."""
    whole = f"llamafactory.{name}"
    try:
        module = importlib.import_module(whole)
        missing = [one for one in names if not hasattr(module, one)]
    except ModuleNotFoundError:
        missing = list(names)
    if missing:
        raise TrainingError(
            f"LLaMA-Factory {packages.version_of('llamafactory')}: {whole} has no {', '.join(missing)}, which this "
            f"door needs; it knows {packages.LEAST}: pip install --no-deps llamafactory=={packages.LEAST}",
            "unsupported",
        )
    return module


# --- loading ---


def _loading_class(stock: Any, door: Door) -> type:
    """`stock`, whose from_pretrained is KT's."""

    class AutoModelForCausalLM(stock):
        @classmethod
        def from_pretrained(cls, pretrained_model_name_or_path: str, **arguments: Any) -> Any:
            return load(pretrained_model_name_or_path, arguments, door)

    return AutoModelForCausalLM


def load(path: str, arguments: dict[str, Any], door: Door) -> Any:
    """enable() with what LLaMA-Factory would give from_pretrained, and what the recipe says of KT."""
    import kt_kernel.transformers

    config, dequantized = arguments.get("config"), arguments.pop("quantization_config", None)
    stored = getattr(config, "quantization_config", None)
    if dequantized is not None and isinstance(stored, dict):
        # It would widen fp8 and mxfp4 while loading; enable() does that with all but the experts.
        arguments["config"].quantization_config = {**stored, "dequantize": True}
    try:
        return kt_kernel.transformers.enable(path, **_enable_arguments(path, door), **arguments)
    except (ValueError, OSError, RuntimeError) as error:
        raise TrainingError(f"{path}: {error}") from error


def _enable_arguments(path: str, door: Door) -> dict[str, Any]:
    out = door.config.enable_arguments()
    format = _format(out.pop("format", None), out.get("weights", path))
    if format is not None:
        out["format"] = format
    if door.threads is not None:
        out["threads"] = door.threads
    if door.max_tokens is not None:
        out["max_tokens"] = door.max_tokens
    # An adapter may have LoRA on experts, and PEFT wants to see their parameters then.
    out["trainable"] = door.trains or door.has_adapter
    out.pop("cpu_activation", None)
    if out["trainable"]:
        policy = door.config.kt_activation_policy
        out["cpu_activation"] = door.cpu_activation or (policy.cpu if policy is not None else "retain")
        out["activations"] = door.activations if door.trains else "default"
    return out


def _format(wanted: str | None, weights: str) -> str | None:
    """kt_backend rounds experts that are stored as floats; others stay what they are."""
    from kt_kernel.transformers import formats

    if wanted in (None, "bf16") or not os.path.exists(weights):
        return None if wanted == "bf16" else wanted
    stored = formats.stored_method(weights)
    if stored == "BF16" or stored == formats.method_of(str(wanted)):
        return wanted
    logging.getLogger("kt_kernel").warning(
        "kt_backend: experts are stored as %s, and are used as they are, not as %s", stored, wanted
    )
    return None


def _checked_config(loader: Any) -> Callable[..., Any]:
    stock = loader.load_config

    def load_config(model_args: Any) -> Any:
        config = stock(model_args)
        for other in (
            loader.AutoModelForImageTextToText,
            loader.AutoModelForSeq2SeqLM,
            loader.AutoModelForTextToWaveform,
        ):
            if type(config) in other._model_mapping:
                raise TrainingError(
                    f"{model_args.model_name_or_path}: {config.model_type} is loaded by {other.__name__}, whose "
                    "experts do not go to KT",
                    "unsupported",
                )
        return config

    return load_config


# --- LoRA ---


class _Words(NamedTuple):
    """What sft.train.targets asks a plan."""

    lora: dict[str, Any]
    settings: dict[str, Any]


def _targeting(stock: Callable[..., Any], door: Door) -> Callable[..., Any]:
    def get_peft_model(model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> Any:
        from kt_kernel.sft.train import targets

        chosen = lora_targets(model, peft_config, door)
        peft_config.target_modules, peft_config.target_parameters = chosen.target_modules, chosen.target_parameters
        if chosen.target_parameters:
            if peft_config.use_dora:
                raise TrainingError(
                    "use_dora: of attention alone (lora_target: all_attention); others have LoRA on parameters"
                )
            peft_config.lora_dropout = 0.0
        model = stock(model, peft_config, *args, **kwargs)
        if chosen.target_parameters and door.lora_dropout:
            note = "lora_dropout: of attention's LoRA alone; experts and MLPs have none"
            print(f"kt_kernel.llamafactory: note: {note}", file=sys.stderr)
            targets.add_dropout(model, door.lora_dropout)
        return model

    return get_peft_model


def lora_targets(model: Any, peft_config: Any, door: Door) -> Any:
    """A LoraConfig whose targets are what lora_target means on this model."""
    from kt_kernel.sft.train import targets

    words: tuple[str, ...] | list[str] = door.lora_target
    if door.config.skips_lora:
        found = [m for m in targets.matrices(model) if any(m.is_named(word) for word in words)]
        words = [m.name for m in found if m.part != "routed experts"]
        if not words:
            raise TrainingError("kt_backend: leaves the experts out, and lora_target names nothing else")
    return targets.lora_config(
        model,
        _Words(
            {"targets": words, "rank": peft_config.r, "alpha": peft_config.lora_alpha},
            {"use_rslora": peft_config.use_rslora, "additional_target": peft_config.modules_to_save},
        ),
    )


# --- gradient checkpointing ---


def _sharing(stock: Callable[..., Any]) -> Callable[..., Any]:
    def enable(
        self: Any, gradient_checkpointing_kwargs: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        from kt_kernel.sft import get_activation_checkpoint_context_fn
        from kt_kernel.sft.attach import experts_of

        asked = dict(gradient_checkpointing_kwargs or {})
        if asked.get("use_reentrant") is False and experts_of(self):
            asked.setdefault("context_fn", get_activation_checkpoint_context_fn())
        return stock(self, asked or None, *args, **kwargs)

    return enable
