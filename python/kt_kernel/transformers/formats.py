"""Names of weight formats: what users call them, what KTMoEWrapper calls them, and what a path holds."""

import json
import pathlib

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


def method_of(format):
    """The method's name of a format: "int4" is AMXINT4, "fp8" is FP8. ValueError lists what is known."""
    name = str(format)
    method = _FRIENDLY.get(name.lower(), name.upper())
    if method not in METHODS:
        known = ", ".join([*_FRIENDLY, *METHODS])
        raise ValueError(f"format {format!r} is not known; one of: {known} (any case)")
    return method


def stored_method(path):
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
    config = path / "config.json"
    if not config.exists():
        raise ValueError(f"weights {path}: no config.json says how they are stored; say format=\"int4\" or \"int8\"")
    config = json.loads(config.read_text())
    quantization = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    return _of_quantization(path, quantization) if quantization else "BF16"


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
