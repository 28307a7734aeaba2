"""KT's keys of a recipe: what they ask for, and the recipe that is left for LLaMA-Factory."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
from collections.abc import Mapping
from typing import Any

from kt_kernel.sft.config import KTConfig, field_names
from kt_kernel.sft.train.events import TrainingError

_NOT_NEEDED = "not needed here"
# Keys that LLaMA-Factory does not know, or asks for packages because of: why they change nothing, or "".
_KEYS = {
    "use_kt": "",
    "kt_config": "",
    "cpu_infer": "",
    "chunk_size": "",
    "kt_cpu_activation": "",
    "kt_optimize_rule": "rules are read by kt sft train; here kt_config.kt_backend says the format of experts",
    "mode": _NOT_NEEDED,
    "kt_mode": _NOT_NEEDED,
    "kt_maxlen": _NOT_NEEDED,
    "kt_use_cuda_graph": _NOT_NEEDED,
    "kt_force_think": _NOT_NEEDED,
}
_OWN_ENGINE = "answers are its huggingface engine's here; leave it out, or use kt sft chat and kt sft api"
# Keys of LLaMA-Factory's that take a model past the place where experts go to KT, or want their weights.
_REFUSED = {
    "use_unsloth": "it loads models in its own way",
    "mixture_of_depths": "it loads models in its own way",
    "train_from_scratch": "the weights of experts are frozen",
    "quantization_bit": "kt_config.kt_backend rounds experts (AMXINT8, AMXINT4)",
    "deepspeed": "training with experts on KT is one process",
    "fsdp": "training with experts on KT is one process",
    "use_hyper_parallel": "training with experts on KT is one process",
    "use_ray": "training with experts on KT is one process",
    "create_new_adapter": "the old adapter cannot be merged into experts on KT; leave it out to train on",
}


@dataclasses.dataclass(frozen=True)
class Door:
    """What a recipe asks of KT."""

    config: KTConfig
    trains: bool
    threads: int | None
    max_tokens: int | None
    cpu_activation: str | None
    activations: str  # how experts that train hold them
    lora_target: tuple[str, ...]
    lora_dropout: float
    has_adapter: bool
    rest: dict[str, Any]  # for LLaMA-Factory
    notes: list[str]


def read_recipe(path: pathlib.Path, overrides: list[str]) -> dict[str, Any]:
    """A recipe as LLaMA-Factory reads it."""
    from omegaconf import OmegaConf

    if not path.is_file():
        raise TrainingError(f"{path}: no such file")
    for word in overrides:
        if "=" not in word:
            raise TrainingError(f"{word}: expected key=value")
    try:
        merged = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_cli(overrides))
        values = OmegaConf.to_container(merged, resolve=True)
    except Exception as error:  # of its YAML reader, and its own
        raise TrainingError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise TrainingError(f"{path}: expected keys and values")
    return {str(key): value for key, value in values.items()}


def door_of(given: Mapping[str, Any], trains: bool) -> Door:
    rest = {key: value for key, value in given.items() if not _is_ours(key)}
    ours = {key: value for key, value in given.items() if _is_ours(key) and value is not None}
    inner = ours.get("kt_config") or {}
    if not isinstance(inner, Mapping):
        raise TrainingError(f"kt_config: expected keys below it, got {inner!r}")
    _check_names(ours, inner)
    _check_values(given, trains)
    fields = {**inner, **{key: value for key, value in ours.items() if key in field_names()}}
    try:
        config = KTConfig(**fields)
    except (TypeError, ValueError) as error:
        raise TrainingError(str(error)) from error
    notes = [f"{key}: {why}" for key, why in _KEYS.items() if why and key in ours] + config.notes()
    if ours.get("use_kt") is False:
        raise TrainingError("use_kt: false: experts are on KT here; llamafactory-cli is the door without")
    if config.kt_lora_dropout:
        raise TrainingError("kt_lora_dropout: experts have no dropout; lora_dropout is attention's")
    _settle_rest(rest, config, trains)
    low = any(rest.get(key) for key in ("bf16", "pure_bf16", "fp16"))
    return Door(
        config=config,
        trains=trains,
        threads=_count(ours, "cpu_infer"),
        max_tokens=_count(ours, "chunk_size"),
        cpu_activation=_cpu_activation(ours),
        activations="bf16" if low else "f32",
        lora_target=_words(rest.get("lora_target") or "all"),
        lora_dropout=float(rest.get("lora_dropout") or 0.0),
        has_adapter=bool(rest.get("adapter_name_or_path")),
        rest=rest,
        notes=notes,
    )


def _is_ours(key: str) -> bool:
    return key in _KEYS or key.startswith("kt_")


def _check_names(ours: Mapping[str, Any], inner: Mapping[str, Any]) -> None:
    for given, known, where in ((ours, (*_KEYS, *field_names()), ""), (inner, field_names(), "kt_config.")):
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
                raise TrainingError(f"{where}{key}: no such key; the nearest is {where}{near[0]}")


def _check_values(given: Mapping[str, Any], trains: bool) -> None:
    for key, why in _REFUSED.items():
        if given.get(key):
            raise TrainingError(f"{key}: {why}")
    if given.get("infer_backend") not in (None, "ktransformers", "huggingface"):
        raise TrainingError(f"infer_backend: {given['infer_backend']}: {_OWN_ENGINE}")
    if given.get("finetuning_type", "lora") != "lora":
        raise TrainingError(
            f"finetuning_type: {given['finetuning_type']}: weights of experts are packed and frozen; lora is there"
        )
    if trains and given.get("stage") in ("rm", "ppo"):
        raise TrainingError(
            f"stage: {given['stage']}: models with a value head are not supported; pt, sft, dpo and kto are"
        )
    adapters = _words(given.get("adapter_name_or_path") or "")
    if len(adapters) > 1:
        raise TrainingError(
            f"adapter_name_or_path: {len(adapters)} adapters; experts on KT take one, since none can be merged"
        )


def _settle_rest(rest: dict[str, Any], config: KTConfig, trains: bool) -> None:
    """What KT's keys say of LLaMA-Factory's own."""
    if rest.get("infer_backend") == "ktransformers":
        rest["infer_backend"] = "huggingface"
    for key, value in (("lora_rank", config.kt_lora_rank), ("lora_alpha", config.kt_lora_alpha)):
        if value is None:
            continue
        if rest.setdefault(key, int(value)) != value:
            raise TrainingError(f"kt_{key}: {value:g}, and {key} is {rest[key]}: experts and attention have the same")
    if not trains:
        return
    if config.kt_activation_policy is not None:
        rest.setdefault("disable_gradient_checkpointing", config.kt_activation_policy.gpu == "retain")
    # The other kind cannot hand experts' results from a block's first run to its second.
    rest.setdefault("use_reentrant_gc", False)


def _words(value: Any) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else value
    return tuple(word for word in (str(one).strip() for one in words) if word)


def _count(ours: Mapping[str, Any], key: str) -> int | None:
    value = ours.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TrainingError(f"{key}: expected a number of at least 1, got {value!r}")
    return value


def _cpu_activation(ours: Mapping[str, Any]) -> str | None:
    value = ours.get("kt_cpu_activation")
    if value not in (None, "retain", "recompute"):
        raise TrainingError(f"kt_cpu_activation: expected retain or recompute, got {value!r}")
    return value
