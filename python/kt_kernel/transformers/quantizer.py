"""The hook of from_pretrained: a quantizer named "kt" that swaps the experts modules before weights are read.

A checkpoint that is quantised already (fp8, compressed-tensors) keeps its own quantizer for everything but experts:
ours holds it and passes all else on to it.
"""

import copy
from collections.abc import Callable
from typing import Any

from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .modules import find, ignore_keys, make, replace


@register_quantization_config("kt")
class KTQuantizationConfig(QuantizationConfigMixin):
    """options: experts.Options; inner: the checkpoint's own quantization_config, a dict, or None; found: called with
    the model, still without weights, and the shapes of its experts; swap: called with the model in place of all else,
    by rules."""

    def __init__(self, options: Any = None, inner: Any = None, found: Callable[..., None] | None = None,
                 swap: Callable[..., None] | None = None, **_: Any) -> None:
        self.quant_method = "kt"
        self.options, self.inner, self.found, self.swap = options, inner, found, swap

    def to_dict(self):
        """What a printed config shows."""
        out = {"quant_method": "kt"}
        if self.options is not None:
            out.update(format=self.options.method, weights=self.options.weights)
        if self.inner is not None:
            out["inner"] = copy.deepcopy(self.inner)
        return out

    def to_diff_dict(self):
        return self.to_dict()


@register_quantizer("kt")
class KTQuantizer(HfQuantizer):
    requires_calibration = False

    def __init__(self, quantization_config, **kwargs):
        super().__init__(quantization_config, **kwargs)
        if quantization_config.options is None:
            raise ValueError("models with experts on KT are made by kt_kernel.transformers.enable")
        self.inner = None
        if quantization_config.inner is not None:
            inner = AutoQuantizationConfig.from_dict(copy.deepcopy(quantization_config.inner))
            self.inner = AutoHfQuantizer.from_config(inner, pre_quantized=True)
            self.pre_quantized = True

    def preprocess_model(self, model, *args, **kwargs):
        swap, self.quantization_config.swap = self.quantization_config.swap, None
        if swap is not None:
            super().preprocess_model(model, *args, **kwargs)
            return swap(model)
        shapes = find(model)
        found, self.quantization_config.found = self.quantization_config.found, None
        if found is not None:
            found(model, shapes)
        if self.inner is not None:
            self.inner.preprocess_model(model, *args, **kwargs)
        else:
            super().preprocess_model(model, *args, **kwargs)
        for name, shape in shapes.items():
            replace(model, name, make(shape, self.quantization_config.options))
        # Experts of the checkpoint have no parameter to go to; KT reads them itself.
        ignore_keys(model, [r"\.experts\."])

    def postprocess_model(self, model, *args, **kwargs):
        if self.inner is not None:
            self.inner.postprocess_model(model, *args, **kwargs)
        model = super().postprocess_model(model, *args, **kwargs) or model
        return model

    def is_serializable(self, *args, **kwargs):
        return False

    @property
    def is_trainable(self):
        """Adapters beside the experts."""
        return self.quantization_config.options.cpu_activation is not None

    @property
    def is_compileable(self):
        """generate() with a static cache asks; the experts of each layer would break the graph."""
        return False


def _passed_on(name):
    base = getattr(HfQuantizer, name)

    def call(self, *args, **kwargs):
        return base(self, *args, **kwargs) if self.inner is None else getattr(self.inner, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _read_from_inner(name):
    base = getattr(HfQuantizer, name)

    def read(self):
        inner = self.__dict__.get("inner")
        if inner is not None:
            return getattr(inner, name)
        return base.__get__(self) if isinstance(base, property) else base

    return property(read)


def _pass_on_the_rest():
    """Every public name of HfQuantizer that KTQuantizer does not define, whichever this version of transformers has."""
    for name, value in vars(HfQuantizer).items():
        if name.startswith("_") or name in vars(KTQuantizer) or isinstance(value, (staticmethod, classmethod)):
            continue
        setattr(KTQuantizer, name, _passed_on(name) if callable(value) else _read_from_inner(name))


_pass_on_the_rest()
