"""Checkpoints that `kt quant gpu` writes, unpacked: what tests that run them elsewhere share."""
import json
import shutil

import numpy as np

import checkpoints


def dequantised(folder):
    """{module: f32 [n, k]} of all packed modules, by the format's description alone."""
    tensors = checkpoints.read_folder(folder)[0]
    out = {}
    for name in tensors:
        if not name.endswith(".weight_packed"):
            continue
        module = name.removesuffix(".weight_packed")
        n, k = np.frombuffer(tensors[f"{module}.weight_shape"][2], "<i8")
        words = np.frombuffer(tensors[name][2], "<u4").reshape(n, k // 8)
        codes = (words[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).reshape(n, k).astype(np.float32) - 8
        scales = checkpoints.from_bf16(np.frombuffer(tensors[f"{module}.weight_scale"][2], "<u2")).reshape(n, -1)
        out[module] = codes * np.repeat(scales, k // scales.shape[1], axis=1)
    return out


def plain_model(source, folder, weights):
    """The converted model with these f32 matrices in place of packed ones."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith("index.json") and path.is_file():
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: (dtype, np.frombuffer(data, checkpoints.DTYPES[dtype]).reshape(shape))
               for name, (dtype, shape, data) in checkpoints.read_folder(source)[0].items()
               if not name.endswith(("weight_packed", "weight_scale", "weight_shape"))}
    tensors |= {f"{module}.weight": ("F32", values.astype("<f4")) for module, values in weights.items()}
    checkpoints.write_safetensors(folder / "model.safetensors", tensors)
    return folder
