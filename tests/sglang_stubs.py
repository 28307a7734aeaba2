"""Just enough of SGLang, and of CUDA, for its kt_ep_wrapper.py to run alone on a CPU: the names it imports, experts "on
the GPU" computed by torch, and weights as checkpoints and GPU layers store them. The file itself is SGLang's own,
loaded from where an environment variable says."""
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import sys
import types
from typing import Any, NamedTuple

import torch

# --- weights as they are stored ------------------------------------------------------------------------------------

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _blocks(values, rows, columns):
    """[N, K] as [N / rows, rows, K / columns, columns]"""
    n, k = values.shape
    return values.reshape(n // rows, rows, k // columns, columns)


def _power_of_two(largest, top):
    """Biased exponents: the smallest power of two that brings `largest` to at most `top`."""
    return (torch.ceil(torch.log2(largest / top)) + 127).clamp(1, 254).to(torch.uint8)


def _e8m0(codes):
    return torch.exp2(codes.float() - 127)


@dataclasses.dataclass
class Kind:
    """How one method stores a matrix [N, K]: codes and scales, and what a GPU layer calls them."""

    method: str
    rows: int = 1  # of one scale
    columns: int = 0  # of one scale; 0: no scales, -1: the whole row
    packed: int = 1  # columns of one byte or element of the codes
    scale_name: str = ""  # of a GPU layer, after w13_ and w2_
    weight_name: str = "weight"

    def encode(self, values):
        """(codes, scales or None)"""
        if self.method == "BF16":
            return values.bfloat16(), None
        n, k = values.shape
        blocks = _blocks(values, self.rows, k if self.columns < 0 else self.columns)
        largest = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-6)
        if self.method == "MXFP4":
            scales = _power_of_two(largest, 6)
            codes = (blocks / _e8m0(scales)[:, None, :, None]).reshape(n, k)
            codes = (codes[..., None] - E2M1).abs().argmin(dim=-1).to(torch.uint8)
            return codes[:, 0::2] | (codes[:, 1::2] << 4), scales
        if self.method == "RAWINT4":
            scales = (largest / 7).bfloat16()
            codes = (blocks / scales.float()[:, None, :, None]).round().clamp(-8, 7).reshape(n, k).to(torch.int16) + 8
            codes = codes.to(torch.uint8)
            return codes[:, 0::2] | (codes[:, 1::2] << 4), scales
        scales = _power_of_two(largest, 448) if self.method == "MXFP8" else largest / 448
        factor = _e8m0(scales) if self.method == "MXFP8" else scales
        return (blocks / factor[:, None, :, None]).reshape(n, k).to(torch.float8_e4m3fn), scales

    def decode(self, codes, scales):
        """The f32 values that the codes stand for."""
        if scales is None:
            return codes.float()
        if self.packed == 2:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).reshape(codes.shape[0], -1)
            codes = E2M1[codes.long()] if self.method == "MXFP4" else codes.float() - 8
        factor = _e8m0(scales) if scales.dtype == torch.uint8 else scales.float()
        n, k = codes.shape
        blocks = _blocks(codes.float(), self.rows, k if self.columns < 0 else self.columns)
        return (blocks * factor.reshape(n // self.rows, 1, -1, 1)).reshape(n, k)

    def part(self, stored, rows=None, columns=None):
        """A block of whole scales of a stored matrix."""
        codes, scales = stored
        if rows:
            codes = codes[rows[0]:rows[1]]
            scales = None if scales is None else scales[rows[0] // self.rows:rows[1] // self.rows]
        if columns:
            codes = codes[:, columns[0] // self.packed:columns[1] // self.packed]
            if scales is not None and self.columns > 0:
                scales = scales[:, columns[0] // self.columns:columns[1] // self.columns]
        return codes, scales

    def checkpoint(self, stored):
        """suffix -> tensor, as published checkpoints have it"""
        codes, scales = stored
        if self.method == "BF16":
            return {"weight": codes}
        if self.method == "RAWINT4":
            shape = torch.tensor([codes.shape[0], codes.shape[1] * 2], dtype=torch.int64)
            return {"weight_packed": codes.contiguous().view(torch.int32), "weight_scale": scales,
                    "weight_shape": shape}
        if self.method == "MXFP4":
            return {"weight": codes, "scale": scales.view(torch.float8_e8m0fnu)}
        name = "weight_scale" if self.method == "FP8_PERCHANNEL" else "weight_scale_inv"
        return {"weight": codes, name: scales}

    def rank(self, gate, up, down, ranks, rank):
        """(w13 codes, w13 scales, w2 codes, w2 scales) of one tensor-parallel rank"""
        inter = gate[0].shape[0]
        cut = (inter // ranks * rank, inter // ranks * (rank + 1))
        halves = [self.part(stored, rows=cut) for stored in (gate, up)]
        w13 = torch.cat([half[0] for half in halves])
        w13_scale = None if halves[0][1] is None else torch.cat([half[1] for half in halves])
        return (w13, w13_scale, *self.part(down, columns=cut))

    def to_gpu(self, codes, scales):
        """What a GPU layer holds of it: (weight, scale)"""
        if self.method == "RAWINT4":
            return codes.contiguous().view(torch.int32).T, scales.T
        if self.method == "MXFP4":
            return codes.view(torch.int8), _e8m0(scales)
        return codes, scales

    def values_on_gpu(self, weight, scale, columns):
        """The f32 values of one expert's matrix of a GPU layer with so many columns."""
        if self.method == "RAWINT4":
            weight = weight.reshape(columns // 8, -1).T.contiguous().view(torch.uint8)
            return self.decode(weight, scale.T)
        if self.method == "MXFP4":
            return self.decode(weight.view(torch.uint8), scale)
        return self.decode(weight, scale)


KINDS = {
    kind.method: kind
    for kind in (
        Kind("BF16"),
        Kind("FP8", rows=128, columns=128, scale_name="weight_scale_inv"),
        Kind("FP8_PERCHANNEL", columns=-1, scale_name="weight_scale"),
        Kind("MXFP8", columns=32, scale_name="weight_scale_inv"),
        Kind("MXFP4", columns=32, packed=2, scale_name="weight_scale_inv"),
        Kind("RAWINT4", columns=32, packed=2, scale_name="weight_scale", weight_name="weight_packed"),
    )
}


# --- experts ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class RunnerConfig:
    """The fields of SGLang's MoeRunnerConfig that its KT wrapper reads."""

    num_experts: int = 0
    num_local_experts: int = 0
    activation: str = "silu"
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None


class TopK(NamedTuple):
    topk_weights: Any
    topk_ids: Any
    router_logits: Any = None


class Dispatch(NamedTuple):
    hidden_states: Any
    topk_output: TopK


class CombineInput(NamedTuple):
    hidden_states: Any


def activate(gate, up, limit=0.0, alpha=0.0):
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1) if alpha > 0 else torch.nn.functional.silu(gate) * up


def expert_output(x, gate, up, down, limit=0.0, alpha=0.0):
    return activate(x @ gate.T, x @ up.T, limit, alpha) @ down.T


class FusedMoEMethodBase:
    pass


class TorchExperts(FusedMoEMethodBase):
    """Experts of one kind "on the GPU": parameters named as SGLang's methods name them, arithmetic in f32."""

    def __init__(self, kind, limit=0.0, alpha=0.0):
        self.kind, self.limit, self.alpha = kind, limit, alpha
        self.num_bits, self.packed_factor, self.group_size = 4, 8, 32  # asked for where weights are packed

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **more):
        self.hidden, self.inter = hidden_size, intermediate_size_per_partition
        for name, n, k in (("w13", 2 * self.inter, self.hidden), ("w2", self.hidden, self.inter)):
            pattern = self.kind.to_gpu(*self.kind.encode(torch.ones(n, k)))
            for suffix, one in zip((self.kind.weight_name, self.kind.scale_name), pattern):
                if one is None:
                    continue
                held = torch.zeros(num_experts, *one.shape, dtype=one.dtype)
                held = torch.nn.Parameter(held, requires_grad=False)
                if self.kind.method == "MXFP8" and suffix == self.kind.scale_name:
                    held.format_ue8m0 = True
                layer.register_parameter(f"{name}_{suffix}", held)

    def create_moe_runner(self, layer, config):
        self.runner_config = config

    def fill(self, layer, slot, stored):
        """stored: (w13 codes, w13 scales, w2 codes, w2 scales)"""
        for name, codes, scales in (("w13", *stored[:2]), ("w2", *stored[2:])):
            for suffix, value in zip((self.kind.weight_name, self.kind.scale_name), self.kind.to_gpu(codes, scales)):
                if value is not None:
                    getattr(layer, f"{name}_{suffix}")[slot].copy_(value)

    def matrix(self, layer, name, slot):
        weight = getattr(layer, f"{name}_{self.kind.weight_name}")[slot]
        scale = getattr(layer, f"{name}_{self.kind.scale_name}")[slot] if self.kind.scale_name else None
        return self.kind.values_on_gpu(weight, scale, self.hidden if name == "w13" else self.inter)

    def apply(self, layer, dispatch):
        x, ids = dispatch.hidden_states.float(), dispatch.topk_output.topk_ids
        out = torch.zeros_like(x)
        for slot in sorted(set(ids.flatten().tolist()) - {-1}):
            w13, w2 = self.matrix(layer, "w13", slot), self.matrix(layer, "w2", slot)
            share = torch.where(ids == slot, dispatch.topk_output.topk_weights, 0).sum(dim=1, keepdim=True)
            out += share * expert_output(x, w13[: self.inter], w13[self.inter:], w2, self.limit, self.alpha)
        return CombineInput(out.to(dispatch.hidden_states.dtype))


class RepackedExperts(TorchExperts):
    """One that has work to do after loading; the others have no such method."""

    def process_weights_after_loading(self, layer):
        self.processed = True


class DeepSeekMxfp4MoEMethod(RepackedExperts):
    """SGLang's wrapper tells MXFP4 by the name of the class."""


class QuantConfig:
    def __init__(self, method):
        self.method = method

    def get_quant_method(self, layer, prefix):
        return self.method


# --- the names that kt_ep_wrapper.py imports -------------------------------------------------------------------------


class Sglang:
    """What a test sets: the rank, the server's arguments, the map of experts."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.rank, self.ranks = 0, 1
        self.maps = None  # [layers, experts] physical to logical, or None
        self.moe = types.SimpleNamespace()
        self.schedule = types.SimpleNamespace(chunked_prefill_size=64)
        self.recorded = []  # (layer, mask) of each forward

    def on_gpu_expert_mask(self, layer, mask):
        self.recorded.append((layer, mask.clone()))

    def location_metadata(self):
        return None if self.maps is None else types.SimpleNamespace(physical_to_logical_map_cpu=self.maps)

    def modules(self):
        none = types.SimpleNamespace(get=lambda: None)
        return {
            "arg_groups.overrides": {"model_config_of": lambda args: args},
            "configs.glm5_next": {"GLM5_NEXT_SUPPORTED_TP_SIZES": (1, 2, 4, 8)},
            "distributed": {
                "get_tensor_model_parallel_rank": lambda: self.rank,
                "get_tensor_model_parallel_world_size": lambda: self.ranks,
                "get_tp_group": lambda: None,
            },
            "environ": {"envs": types.SimpleNamespace(SGLANG_DSV4_2604_SUBMODE=none)},
            "eplb.expert_distribution": {"get_global_expert_distribution_recorder": lambda: self},
            "eplb.expert_location_dispatch": {"get_global_expert_location_metadata": self.location_metadata},
            "layers.moe.fused_moe_triton.layer": {
                "UnquantizedFusedMoEMethod": lambda use_triton_kernels: RepackedExperts(KINDS["BF16"])
            },
            "layers.moe.quant_method_registry": {"register_moe_quant_wrapper": lambda *args, **options: None},
            "layers.moe.token_dispatcher": {"StandardCombineInput": CombineInput},
            "layers.moe.topk": {"TopKOutputChecker": types.SimpleNamespace(format_is_bypassed=lambda output: False)},
            "layers.moe.utils": {"is_kt_ep_wrapper_disabled": lambda: False},
            "layers.quantization.base_config": {"FusedMoEMethodBase": FusedMoEMethodBase},
            "layers.quantization.marlin_utils": {"marlin_permute_scales": lambda scales, k, n, group: scales},
            "runtime_context": {
                "get_exec": lambda: types.SimpleNamespace(moe=self.moe),
                "get_parallel": lambda: types.SimpleNamespace(tp_rank=self.rank),
                "get_schedule": lambda: self.schedule,
            },
            "utils": {"get_compiler_backend": lambda: "eager", "is_cuda": lambda: False},
        }

    def install(self, patch):
        for name, content in self.modules().items():
            full = "sglang.srt." + name
            parts = full.split(".")
            for depth in range(1, len(parts) + 1):
                parent = ".".join(parts[:depth])
                if getattr(sys.modules.get(parent), "stubbed_by", None) is not self:
                    module = types.ModuleType(parent)
                    module.__path__, module.stubbed_by = [], self
                    patch.setitem(sys.modules, parent, module)
            for key, value in content.items():
                setattr(sys.modules[full], key, value)


class Stream:
    cuda_stream = 0

    def __init__(self, device=None):
        pass

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass


class Event:
    def record(self, stream=None):
        pass

    def synchronize(self):
        pass


def install_cuda(patch):
    """torch.cuda's streams, as a machine without one can have them: all work is done when a call returns."""
    patch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)


def load_wrapper(path, name):
    """SGLang's own file as a module of its own."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# --- checkpoints -----------------------------------------------------------------------------------------------------


class Weights:
    """Experts of all layers of a model, stored as one kind says. `values[layer][expert]` are (gate, up, down) in f32,
    what the codes stand for."""

    def __init__(self, kind, layers, experts, hidden, inter, seed=1):
        generator = torch.Generator().manual_seed(seed)

        def draw(n, k):
            return torch.randn(n, k, generator=generator) / math.sqrt(k)

        self.kind, self.layers, self.experts, self.hidden, self.inter = kind, layers, experts, hidden, inter
        self.stored = [
            [tuple(kind.encode(draw(*shape)) for shape in ((inter, hidden), (inter, hidden), (hidden, inter)))
             for _ in range(experts)]
            for _ in range(layers)
        ]
        self.values = [[tuple(kind.decode(*matrix) for matrix in expert) for expert in layer] for layer in self.stored]

    def stack(self, layer):
        """gate [E, I, H], up [E, I, H], down [E, H, I] in bf16"""
        return tuple(torch.stack([expert[i] for expert in self.values[layer]]).bfloat16().contiguous()
                     for i in range(3))

    def save(self, folder):
        from safetensors.torch import save_file

        tensors = {}
        for layer, experts in enumerate(self.stored):
            for number, expert in enumerate(experts):
                for name, matrix in zip(("gate_proj", "up_proj", "down_proj"), expert):
                    for suffix, tensor in self.kind.checkpoint(matrix).items():
                        tensors[f"model.layers.{layer}.mlp.experts.{number}.{name}.{suffix}"] = tensor.contiguous()
        os.makedirs(folder, exist_ok=True)
        save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        config = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_hidden_layers": self.layers,
            "num_experts": self.experts,
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.inter,
        }
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        return str(folder)
