"""`kt_kernel_ext` under its own name, and its parts, for programs that were written for kt-kernel's extension."""
import importlib
import importlib.abc
from importlib.util import spec_from_loader

_EXTENSION = "kt_kernel.kt_kernel_ext"
# name there: the module here
_PARTS = {"moe": "kt_kernel.ext_moe"}
# What of that extension is not here, and what does its work.
_INSTEAD = {
    "mla": "attention is the engine's (SGLang, transformers); `kt run` runs whole models on the CPU",
    "linear": "dense layers are the engine's (torch.nn.Linear); `kt run` runs whole models on the CPU",
    "mlp": "dense layers are the engine's (torch.nn.Linear); `kt run` runs whole models on the CPU",
    "gate": "route with torch (softmax or sigmoid, topk) and give ids and weights to KTMoEWrapper.forward",
    "kvcache": "the cache is the engine's; numbers of GGUF types are in gguf.GGMLQuantizationType",
    "utils": "gguf.quants.quantize and dequantize turn values into GGUF blocks and back",
}


def _missing(name):
    return f"kt_kernel_ext.{name} is not in KT: {_INSTEAD[name]}"


def part(name):
    """The extension's attribute that is written in Python, or an AttributeError that says what to use."""
    if name in _PARTS:
        return importlib.import_module(_PARTS[name])
    if name == "QuantConfig":
        return part("moe").QuantConfig
    raise AttributeError(_missing(name) if name in _INSTEAD else f"module 'kt_kernel_ext' has no attribute {name!r}",
                         name=name)


class _Alias(importlib.abc.Loader):
    """A module under a second name."""

    def __init__(self, name):
        self._name = name

    def create_module(self, spec):
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self._spec


class Finder(importlib.abc.MetaPathFinder):
    """`import kt_kernel_ext`, as where the extension lies beside the package, and `from kt_kernel_ext.moe import
    ...`."""

    def find_spec(self, name, path=None, target=None):
        if name == "kt_kernel_ext":
            return spec_from_loader(name, _Alias(_EXTENSION))
        parent, _, last = name.rpartition(".")
        if parent not in ("kt_kernel_ext", _EXTENSION):
            return None
        if last in _INSTEAD:
            raise ImportError(_missing(last), name=name)
        return spec_from_loader(name, _Alias(_PARTS[last])) if last in _PARTS else None
