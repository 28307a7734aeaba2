"""Mixture-of-Experts layers on CPUs, for engines that are not ours.

    from kt_kernel import KTMoEWrapper

``KTMoEWrapper`` is one layer's routed experts on the CPU, next to attention and hot experts on a GPU or without one.
``kt_kernel.transformers`` puts it under stock transformers, ``kt_kernel.sft`` trains LoRA beside it, ``inject`` applies
a file of placement rules to a model. Importing this package needs neither torch nor a GPU:
everything is looked up on first use.
"""
import importlib as _importlib
import os as _os
import sys as _sys

from kt_kernel.ext_parts import Finder as _Finder

__all__ = ["KTMoEWrapper", "AMXSFTMoEWrapper", "generate_gpu_experts_masks", "inject", "operator", "BaseInjectedModule",
           "KLinearBase", "KTLinear", "Placement", "kt_kernel_ext", "__version__", "__cpu_variant__"]

# name: (module of this package, name there or None for the module itself)
_LAZY = {
    "KTMoEWrapper": ("moe_wrapper", "KTMoEWrapper"),
    "AMXSFTMoEWrapper": ("sft.wrapper", "AMXSFTMoEWrapper"),
    "generate_gpu_experts_masks": ("placement", "generate_gpu_experts_masks"),
    "Placement": ("placement", "Placement"),
    "inject": ("injection", "inject"),
    "KTLinear": ("linear", "KTLinear"),
    "BaseInjectedModule": ("operators", "BaseInjectedModule"),
    "KLinearBase": ("operators", "KLinearBase"),
    "operator": ("operators", "operator"),
    "kt_kernel_ext": ("kt_kernel_ext", None),
    "placement": ("placement", None),
    "sft": ("sft", None),
    "transformers": ("transformers", None),
    "__version__": ("kt_kernel_ext", "__version__"),
}


def __getattr__(name):
    if name == "__cpu_variant__":
        # Asked each time until it succeeds: a bad KT_KERNEL_CPU_VARIANT is an error here, not at import.
        from kt_kernel import _variant
        value = _variant.cpu_variant()
    elif name in _LAZY:
        module, attribute = _LAZY[name]
        value = _importlib.import_module(f"{__name__}.{module}")
        if attribute is not None:
            value = getattr(value, attribute)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


_sys.meta_path.append(_Finder())


def __dir__():
    return sorted(set(globals()) | set(__all__))


if _os.environ.get("KT_KERNEL_DEBUG", "0") not in ("", "0"):
    from kt_kernel import _variant
    _variant.explain()
