"""KTConfig: the settings that training files of kt-kernel's fine-tuning name, and what they are here.

Its fields are keys of `kt_config` in such files, its environment variables those of accelerate's launcher. Some say
how to do what is not done here (a second copy of weights, caches of a depth): they are taken, and notes() says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

_BACKENDS = {
    "AUTO": None,
    "AMXBF16": "bf16",
    "BF16": "bf16",
    "AMXINT8": "int8",
    "INT8": "int8",
    "AMXINT4": "int4",
    "AMXINT4_KGROUP": "RAWINT4",
    "AMXFP8": "fp8",
    "FP8": "fp8",
}
_FORMATS = ("bf16", "int8", "int4", "fp8")
_SKIP = "_SKIPLORA"


class KTActivationPolicy(NamedTuple):
    """What happens to activations between a forward and its backward pass: "retain" or "recompute"."""

    cpu: str = "retain"  # of experts: enable(cpu_activation=)
    gpu: str = "recompute"  # of the rest: gradient checkpointing

    @classmethod
    def of(cls, value: Any) -> KTActivationPolicy:
        if isinstance(value, Mapping):
            if unknown := sorted(set(value) - set(cls._fields)):
                raise ValueError(
                    f"kt_activation_policy: unknown {', '.join(map(str, unknown))}; cpu and gpu are known"
                )
            value = cls(**value)
        if not isinstance(value, tuple) or len(value) != 2:
            raise TypeError(f"kt_activation_policy: expected a mapping with cpu and gpu, got {value!r}")
        for name, chosen in zip(cls._fields, value):
            if chosen not in ("retain", "recompute"):
                raise ValueError(f"kt_activation_policy.{name}: expected retain or recompute, got {chosen!r}")
        return cls(*value)


def _text(name, value):
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name}: expected a str, got {value!r}")
    return os.fspath(value)


def _whole(name, value):
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            raise ValueError(f"{name}: expected an int, got {value!r}") from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} is {value}; expected 0 or more")
    return value


def _number(name, value):
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {value!r}") from None


_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
    "": False,
}


def _flag(name, value):
    if isinstance(value, str):
        if value.lower() not in _WORDS:
            raise ValueError(f"{name}: expected true or false, got {value!r}")
        return _WORDS[value.lower()]
    if not isinstance(value, (bool, int)):
        raise TypeError(f"{name}: expected true or false, got {value!r}")
    return bool(value)


def _policy(name, value):
    return KTActivationPolicy.of(value)


def _any(name, value):
    return value


# field: (how a value is read, why it changes nothing here or "")
_FIELDS = {
    "kt_backend": (_text, ""),
    "kt_num_threads": (_whole, ""),
    "kt_tp_enabled": (_flag, ""),
    "kt_threadpool_count": (_whole, ""),
    "kt_weight_path": (_text, ""),
    "kt_non_expert_weight_path": (_text, "the rest of a model is read from its own folder"),
    "kt_expert_weight_format": (_text, ""),
    "kt_weight_lifecycle": (_text, "weights are packed while they are read, and stay"),
    "kt_expert_checkpoint_path": (_text, ""),
    "kt_num_gpu_experts": (_whole, ""),
    "kt_skip_expert_loading": (_flag, "experts are never loaded by torch"),
    "kt_share_backward_bb": (_flag, "backward passes read the one copy of weights there is"),
    "kt_share_cache_pool": (_flag, "activations live as long as their graph"),
    "kt_force_fused_expert_lora": (_flag, "LoRA of experts belongs to PEFT"),
    "kt_max_cache_depth": (_whole, "activations live as long as their graph"),
    "kt_model_max_length": (_whole, "longer inputs are cut"),
    "kt_activation_policy": (_policy, ""),
    "kt_lora_rank": (_whole, ""),
    "kt_lora_alpha": (_number, ""),
    "kt_lora_dropout": (_number, ""),
    "kt_train_mode": (_text, ""),
    "kt_full_weight_grad": (_flag, ""),
    "kt_use_lora_experts": (_flag, ""),
    "kt_lora_expert_num": (_whole, ""),
    "kt_lora_expert_intermediate_size": (_whole, ""),
    "kt_checkpoint_files": (_any, "found in the model's folder"),
    "kt_sharded_metadata": (_any, "found in the model's folder"),
    "kt_wrap_fn": (_any, "experts are replaced by enable()"),
    "kt_wrap_kwargs": (_any, "experts are replaced by enable()"),
}


def field_names() -> tuple[str, ...]:
    return tuple(_FIELDS)


class KTConfig:
    """All fields are optional, None where nobody set them; ACCELERATE_KT_NUM_THREADS and its like are read for
    those."""

    kt_backend: str | None
    kt_num_threads: int | None
    kt_tp_enabled: bool | None
    kt_threadpool_count: int | None
    kt_weight_path: str | None
    kt_non_expert_weight_path: str | None
    kt_expert_weight_format: str | None
    kt_weight_lifecycle: str | None
    kt_expert_checkpoint_path: str | None
    kt_num_gpu_experts: int | None
    kt_skip_expert_loading: bool | None
    kt_share_backward_bb: bool | None
    kt_share_cache_pool: bool | None
    kt_force_fused_expert_lora: bool | None
    kt_max_cache_depth: int | None
    kt_model_max_length: int | None
    kt_activation_policy: KTActivationPolicy | None
    kt_lora_rank: int | None
    kt_lora_alpha: float | None
    kt_lora_dropout: float | None
    kt_train_mode: str | None
    kt_full_weight_grad: bool | None
    kt_use_lora_experts: bool | None
    kt_lora_expert_num: int | None
    kt_lora_expert_intermediate_size: int | None
    kt_checkpoint_files: Any
    kt_sharded_metadata: Any
    kt_wrap_fn: Any
    kt_wrap_kwargs: Any

    def __init__(self, **fields: Any) -> None:
        if unknown := sorted(set(fields) - set(_FIELDS)):
            raise TypeError(f"KTConfig: unknown {', '.join(unknown)}; known are {', '.join(_FIELDS)}")
        for name, (read, _) in _FIELDS.items():
            value, called = fields.get(name), name
            if value is None and read not in (_policy, _any):
                called = f"ACCELERATE_{name.upper()}"
                value = os.environ.get(called) or None
            setattr(self, name, None if value is None else read(called, value))
        if self.kt_lora_alpha is None and self.kt_lora_rank is not None:
            self.kt_lora_alpha = 2.0 * self.kt_lora_rank
        self._refuse()

    @classmethod
    def from_object(cls, given: Any) -> KTConfig:
        """From the attributes, or the keys, of these names."""
        read = given.get if isinstance(given, Mapping) else lambda name: getattr(given, name, None)
        return cls(**{name: read(name) for name in _FIELDS if read(name) is not None})

    def _refuse(self):
        if self.kt_backend is not None and self._backend() not in _BACKENDS:
            raise ValueError(
                f"kt_backend: unknown {self.kt_backend!r}; known are {', '.join(_BACKENDS)} (and _SkipLoRA of each)"
            )
        if self.kt_expert_weight_format is not None and self.kt_expert_weight_format.lower() not in _FORMATS:
            raise ValueError(
                f"kt_expert_weight_format: expected one of {', '.join(_FORMATS)}, got {self.kt_expert_weight_format!r}"
            )
        if self.kt_weight_lifecycle not in (None, "persistent", "ephemeral"):
            raise ValueError(
                f"kt_weight_lifecycle: expected persistent or ephemeral, got {self.kt_weight_lifecycle!r}"
            )
        if self.kt_train_mode not in (None, "lora") or self.kt_full_weight_grad:
            named = (
                f"kt_train_mode: {self.kt_train_mode}"
                if self.kt_train_mode not in (None, "lora")
                else "kt_full_weight_grad"
            )
            raise ValueError(f"{named}: full fine-tuning of experts is not supported, LoRA is (kt_train_mode: lora)")
        if self.kt_use_lora_experts or self.kt_lora_expert_num or self.kt_lora_expert_intermediate_size:
            raise ValueError(
                "kt_use_lora_experts: extra experts on the GPU are not supported; LoRA of the experts there are is"
            )
        if self.kt_num_gpu_experts:
            raise ValueError(
                f"kt_num_gpu_experts is {self.kt_num_gpu_experts}: experts on the GPU do not train; leave it out"
            )

    def _backend(self) -> str:
        assert self.kt_backend is not None
        return self.kt_backend.upper().removesuffix(_SKIP)

    @property
    def skips_lora(self) -> bool:
        """Whether the backend asks for experts without LoRA."""
        return self.kt_backend is not None and self.kt_backend.upper().endswith(_SKIP)

    def enable_arguments(self) -> dict[str, Any]:
        """For kt_kernel.transformers.enable(path, **arguments)."""
        out: dict[str, Any] = {"trainable": True}
        weights = self.kt_weight_path or self.kt_expert_checkpoint_path
        if weights is not None:
            out["weights"] = weights
        format = None if self.kt_backend is None else _BACKENDS[self._backend()]
        if format is None and self.kt_expert_weight_format is not None:
            format = self.kt_expert_weight_format.lower()
        if format is not None:
            out["format"] = format
        if self.kt_num_threads:
            out["threads"] = self.kt_num_threads
        if self.kt_threadpool_count and self.kt_tp_enabled is not False:
            out["numa_nodes"] = self.kt_threadpool_count
        if self.kt_activation_policy is not None:
            out["cpu_activation"] = self.kt_activation_policy.cpu
        return out

    def lora_arguments(self) -> dict[str, Any]:
        """For peft.LoraConfig(**arguments): rank, alpha and dropout, as far as they are set."""
        named = {"r": self.kt_lora_rank, "lora_alpha": self.kt_lora_alpha, "lora_dropout": self.kt_lora_dropout}
        return {name: value for name, value in named.items() if value is not None}

    def notes(self) -> list[str]:
        """A line for each field that is set and changes nothing."""
        return [
            f"{name}: not needed, {why}"
            for name, (_, why) in _FIELDS.items()
            if why and getattr(self, name) is not None
        ]

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items() if value is not None)
        return f"KTConfig({shown})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KTConfig) and self.to_dict() == other.to_dict()
