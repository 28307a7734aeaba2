"""Fine-tuning with experts on KT: LoRA of stock PEFT, trainers of stock transformers and TRL.

    import kt_kernel.transformers
    model = kt_kernel.transformers.enable("Qwen/Qwen3-30B-A3B", format="int4", trainable=True)
    model = peft.get_peft_model(model, peft.LoraConfig(
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]))

Everything here is looked up on first use: importing the package needs no torch.
"""

from __future__ import annotations

import importlib as _importlib
from typing import Any

# name: module of this package
_LAZY = {
    "AMXSFTMoEWrapper": "wrapper",
    "KTActivationPolicy": "config",
    "KTConfig": "config",
    "TrainableExperts": "experts",
    "get_activation_checkpoint_context_fn": "checkpointing",
    "load_adapter": "adapters",
    "load_kt_adapter_artifacts": "adapters",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
