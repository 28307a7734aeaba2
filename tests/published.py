"""Tiny models as they are published in other formats: a folder under the names and types people download, and beside
it the same numbers, dequantised, in plain float32 for transformers. What each format means is written here from its
description, in torch; where its makers have a library (compressed-tensors), the library writes the codes."""

import json
import pathlib
import re

import safetensors.torch
import torch

import tiny_models

# What nobody quantises: norms and biases are no matrices; the rest decides too much.
KEPT = re.compile(r"embed_tokens|lm_head|\.mlp\.gate\.|\.block_sparse_moe\.gate\.|\.router\.|shared_expert_gate")
EXPERT = re.compile(r"\.experts\.\d+\.")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def is_linear(name, tensor):
    return name.endswith(".weight") and tensor.ndim == 2 and not KEPT.search(name)


class Plain:
    """Every tensor in one float type, as most models are published."""

    quantization = None

    def __init__(self, dtype):
        self.dtype = dtype

    def store(self, name, tensor, _):
        return {name: tensor.to(self.dtype)}, {name: tensor.to(self.dtype).float()}


class Quantised:
    """Base: `linear` stores the matrices the format is for, all else stays bf16, correction biases float32."""

    experts_only = False

    def takes(self, name, tensor):
        return is_linear(name, tensor) and (not self.experts_only or EXPERT.search(name) is not None)

    def store(self, name, tensor, draw):
        if self.takes(name, tensor):
            parts, value = self.linear(tensor, draw)
            module = name.removesuffix("weight")
            return {module + part: stored for part, stored in parts.items()}, {name: value}
        dtype = torch.float32 if "correction_bias" in name else torch.bfloat16
        return {name: tensor.to(dtype)}, {name: tensor.to(dtype).float()}


class Fp8Blocks(Quantised):
    """E4M3 codes, one float32 scale for each 128 x 128 block; the last blocks of a matrix may be smaller. Scales are
    up to twice what the codes need, so that no two blocks share one."""

    block = 128
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }

    def linear(self, tensor, draw):
        n, k = tensor.shape
        rows, columns = -(-n // self.block), -(-k // self.block)
        padded = torch.zeros(rows * self.block, columns * self.block)
        padded[:n, :k] = tensor
        tiles = padded.reshape(rows, self.block, columns, self.block)
        scale = tiles.abs().amax((1, 3)) / 448 * (1 + torch.rand(rows, columns, generator=draw))
        spread = scale.repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)[:n, :k]
        codes = (tensor / spread).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread


class Fp8Channels(Quantised):
    """E4M3 codes with one scale a row, stored [n, 1]."""

    def __init__(self, scale_type):
        self.scale_type = scale_type
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
        acts = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
        self.quantization = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": acts}},
            "ignore": ["lm_head", "re:.*mlp.gate$"],
        }

    def linear(self, tensor, draw):
        scale = (tensor.abs().amax(1, keepdim=True) / 448 * (1 + torch.rand(len(tensor), 1, generator=draw))).to(
            self.scale_type
        )
        codes = (tensor / scale.float()).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


class Fp8Static(Quantised):
    """E4M3 codes with one scale a matrix, a scalar, and one for what it reads: transformers' own static scheme. The
    second is for multiplications in fp8, which nobody here does."""
    quantization = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}

    def linear(self, tensor, draw):
        scale = tensor.abs().max() / 448 * (1 + torch.rand((), generator=draw))
        codes = (tensor / scale).to(torch.float8_e4m3fn)
        return ({"weight": codes, "weight_scale_inv": scale, "activation_scale": torch.tensor(0.02)},
                codes.float() * scale)


class Packed(Quantised):
    """compressed-tensors pack-quantized, written by that library: 4 or 8 bits, groups along a row or whole rows."""

    def __init__(self, bits, group, experts_only):
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        self.experts_only = experts_only
        self.group = group
        size = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
        self.arguments = QuantizationArgs(num_bits=bits, type="int", symmetric=True, **size)
        self.scheme = QuantizationScheme(targets=["Linear"], weights=self.arguments)
        ignored = ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"]
        if experts_only:
            ignored += ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp.(gate|up|down)_proj$"]
        self.quantization = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": json.loads(self.scheme.model_dump_json())},
            "ignore": ignored,
        }

    def linear(self, tensor, _):
        from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
        from compressed_tensors.quantization.utils import calculate_qparams

        tensor = tensor.to(torch.bfloat16)
        groups = tensor.unflatten(-1, (-1, self.group)) if self.group else tensor.unsqueeze(1)
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), self.arguments)
        parts = PackedQuantizationCompressor.compress({"weight": tensor, "weight_scale": scale}, self.scheme)
        # In bf16 the library would round code times scale once more.
        exact = dict(parts, weight_scale=parts["weight_scale"].float())
        value = PackedQuantizationCompressor.decompress(exact, self.scheme)["weight"]
        return {part: stored.contiguous() for part, stored in parts.items()}, value.float()


class Awq(Quantised):
    """AWQ's own layout: eight output rows of one input to a word, even ones first; a zero point for each group."""

    experts_only = True
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def __init__(self, group):
        self.group = group
        self.quantization = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm",
                             "zero_point": True}

    def words(self, codes):
        """int32 [a, n / 8] of [a, n]."""
        eights = codes.reshape(len(codes), -1, 8)[:, :, self.order].long() << (4 * torch.arange(8))
        return eights.sum(-1).to(torch.uint32).view(torch.int32)

    def linear(self, tensor, _):
        groups = tensor.t().unflatten(0, (-1, self.group))  # [k / group, group, n]
        low, high = groups.amin(1), groups.amax(1)
        scale = ((high - low) / 15).half()
        zero = (-low / scale.float()).round().clamp(0, 15)
        codes = (groups / scale.float()[:, None] + zero[:, None]).round().clamp(0, 15)
        value = ((codes - zero[:, None]) * scale.float()[:, None]).flatten(0, 1).t().contiguous()
        return {"qweight": self.words(codes.flatten(0, 1)), "qzeros": self.words(zero), "scales": scale}, value


class GptOssMxfp4(Quantised):
    """Experts as gpt-oss publishes them: nibbles of E2M1 in blocks of 32 along the input, an E8M0 scale for each."""

    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                   "lm_head"],
    }

    def takes(self, name, tensor):
        return False

    def store(self, name, tensor, draw):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return super().store(name, tensor, draw)
        blocks = tensor.transpose(1, 2).unflatten(-1, (-1, 32))  # [experts, out, in / 32, 32]
        exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2  # 6 is the largest code
        distance = (blocks / exponent.exp2()[..., None])[..., None] - E2M1
        codes = distance.abs().argmin(-1).to(torch.uint8)
        packed = codes[..., 0::2] | codes[..., 1::2] << 4
        value = (E2M1[codes.long()] * exponent.exp2()[..., None]).flatten(-2).transpose(1, 2).contiguous()
        stored = {name + "_blocks": packed.contiguous(), name + "_scales": (exponent + 127).to(torch.uint8)}
        return stored, {name: value}


def publish(model, published, folder):
    """Writes folder/stored in the format and folder/plain, the same in float32. Returns both."""
    folder = pathlib.Path(folder)
    plain, stored = folder / "plain", folder / "stored"
    tiny_models.save(model, plain)
    tensors = safetensors.torch.load_file(plain / "model.safetensors")
    kept, values, draw = {}, {}, torch.Generator().manual_seed(7)
    for name, tensor in tensors.items():
        parts, value = published.store(name, tensor, draw)
        kept.update(parts)
        values.update(value)
    stored.mkdir()
    safetensors.torch.save_file(kept, stored / "model.safetensors", metadata={"format": "pt"})
    safetensors.torch.save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["dtype"] = "float16" if isinstance(published, Plain) else "bfloat16"
    if published.quantization:
        config["quantization_config"] = published.quantization
    (stored / "config.json").write_text(json.dumps(config, indent=2))
    return stored, plain


def load_plain(folder):
    """transformers' model of a plain folder, in float32; every tensor of the folder has a place in it."""
    model, info = tiny_models.load(folder, experts_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()
