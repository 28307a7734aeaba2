"""Names of weight formats: what users call them, what KTMoEWrapper calls them, and what a path holds."""

from __future__ import annotations

import json
import os
import pathlib
import re
from typing import Any

METHODS = (
    "AMXINT4",
    "AMXINT8",
    "RAWINT4",
    "FP8",
    "FP8_PERCHANNEL",
    "BF16",
    "GPTQ_INT4",
    "MXFP4",
    "MXFP8",
    "LLAMAFILE",
    "MOE_INT8",
    "MOE_INT4",
)
_FRIENDLY = {"int4": "AMXINT4", "int8": "AMXINT8", "gptq": "GPTQ_INT4", "gguf": "LLAMAFILE"}


def method_of(format: str) -> str:
    """The method's name of a format: "int4" is AMXINT4, "fp8" is FP8. ValueError lists what is known."""
    name = str(format)
    method = _FRIENDLY.get(name.lower(), name.upper())
    if method not in METHODS:
        known = ", ".join([*_FRIENDLY, *METHODS])
        raise ValueError(f"format {format!r} is not known; one of: {known} (any case)")
    return method


def stored_method(path: str | os.PathLike[str]) -> str:
    """The method that reads the experts under `path` as they are stored."""
    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"weights {path}: no such file or folder")
    if path.is_file():
        if path.suffix == ".gguf":
            return "LLAMAFILE"
        raise ValueError(f"weights {path}: expected a folder or a .gguf file")
    kt_layers = sorted(path.glob("_layer_*"))
    if kt_layers:
        return _of_kt_files(path, kt_layers[0])
    if not any(path.glob("*.safetensors")) and any(path.glob("*.gguf")):
        return "LLAMAFILE"
    if not any(path.glob("*.safetensors")):
        raise FileNotFoundError(f"weights {path}: no .safetensors, .gguf or _layer_* in it")
    converted = _of_kt_tensors(path)
    if converted is not None:
        return converted
    config = path / "config.json"
    if not config.exists():
        raise ValueError(f"weights {path}: no config.json says how they are stored; say format=\"int4\" or \"int8\"")
    config = _read_object(config)
    quantization = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    return _of_quantization(path, quantization) if quantization else "BF16"


def _read_object(file: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object")
    return value


_KT_GATE = re.compile(r"blk\.\d+\.ffn_gate_exps\.\d+\.numa\.\d+\.weight")


def _of_kt_tensors(path: pathlib.Path) -> str | None:
    """Of a folder that `kt quant` wrote as safetensors, whatever config.json it has from the source; None for others."""
    from safetensors import safe_open

    index = path / "model.safetensors.index.json"
    if index.exists():
        named = _read_object(index).get("weight_map")
        if not isinstance(named, dict):
            raise ValueError(f"{index}: has no weight_map")
        files = [path / named[name] for name in named if _KT_GATE.fullmatch(name)][:1]
    else:
        files = sorted(path.glob("*.safetensors"))
    for file in files:
        try:
            tensors = safe_open(file, framework="pt")
        except Exception as error:  # safetensors has errors of its own
            raise ValueError(f"{file}: not a readable safetensors file: {error}") from error
        gate = next((name for name in tensors.keys() if _KT_GATE.fullmatch(name)), None)
        if gate is not None:
            return f"AMXINT{_bits_of_kt_tensor(path, tensors, gate)}"
    return None


def _bits_of_kt_tensor(path: pathlib.Path, tensors: Any, gate: str) -> int:
    """As the file says, or else by its sizes: a gate projection has a scale for each row, down one for each input of gate."""
    layout = (tensors.metadata() or {}).get("kt.layout")
    if layout in ("amx-int4", "amx-int8"):
        return int(layout[-1])
    scales = gate.removesuffix("weight") + "scale"
    try:
        rows, columns = (
            tensors.get_slice(name).get_shape()[0] for name in (scales, scales.replace("ffn_gate", "ffn_down"))
        )
        eighths = 8 * tensors.get_slice(gate).get_shape()[0] // (rows * columns)
    except Exception:  # no such tensor, or one of another shape
        eighths = 0
    if eighths not in (4, 8):
        raise ValueError(f'weights {path}: {gate} is neither int4 nor int8 by its size; say format="int4" or "int8"')
    return eighths


def _of_kt_files(path, layer):
    names = [file.name for file in layer.rglob("*.kt")]
    for bits in (4, 8):
        if any(name.startswith(f"INT{bits}_") for name in names):
            return f"AMXINT{bits}"
    raise ValueError(f"weights {path}: the .kt files in {layer.name} are neither INT4 nor INT8")


def _of_quantization(path, quantization):
    """Of the config's `quantization_config`, a dict."""
    kind = quantization.get("quant_method")
    if kind == "fp8":
        return "FP8" if quantization.get("weight_block_size") else "FP8_PERCHANNEL"
    if kind == "compressed-tensors":
        groups = quantization.get("config_groups", {}).values()
        found = {_of_group(group.get("weights") or {}) for group in groups} - {None}
        if len(found) == 1:
            return found.pop()
        raise ValueError(
            f"weights {path}: compressed-tensors groups hold {sorted(found) or 'nothing that KT knows'}; say format="
        )
    simple = {"gptq": "GPTQ_INT4", "mxfp4": "MXFP4", "mxfp8": "MXFP8"}
    if kind in simple:
        return simple[kind]
    raise ValueError(f"weights {path}: quant_method {kind!r} is not one that KT reads; known: fp8, compressed-tensors, "
                     + ", ".join(simple))


def _of_group(weights):
    """Of the weights of a compressed-tensors group; None where it is something else."""
    if weights.get("type") == "int" and weights.get("num_bits") == 4:
        return "RAWINT4"
    if weights.get("type") == "float" and weights.get("num_bits") == 8:
        return "FP8" if weights.get("strategy") == "block" else "FP8_PERCHANNEL"
    return None
