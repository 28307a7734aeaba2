"""GGUF files of tiny models, written from the checkpoints that transformers saves, as the public converter documents
it: names, metadata, stacked experts, rows of q and k permuted for llama, kv_b in two halves with that of the keys
transposed. The numbers as stored are given back, so that a reference can run on exactly them.
"""

import json
import pathlib
import re

import gguf
import numpy as np
from safetensors import safe_open

ARCHITECTURES = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "deepseek_v32": "deepseek32",
    "glm_moe_dsa": "glm-dsa",
    "dots1": "dots1",
    "gemma4_text": "gemma4",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe_lite": "deepseek2",
    "hy_v3": "hy_v3",
    "mistral4": "mistral4",
    "solar_open": "glm4moe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "llama": "llama",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "smallthinker": "smallthinker",
}
MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "pre_feedforward_layernorm": "ffn_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.primary_router": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "feed_forward.shared_expert.gate_proj": "ffn_gate_shexp",
    "feed_forward.shared_expert.up_proj": "ffn_up_shexp",
    "feed_forward.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.router.gate": "ffn_gate_inp",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
}
TENSORS = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.expert_bias": "exp_probs_b",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
# Where f16 numbers lie in a block, and which make values of about a sixteenth of whatever else is in it.
HALVES = {
    "Q2_K": {80: 4.5e-3, 82: 6.8e-3},
    "Q3_K": {108: 1.5e-3},
    "Q4_K": {0: 4.4e-4, 2: 3.3e-3},
    "Q5_K": {0: 2.2e-4, 2: 3.4e-3},
    "Q6_K": {208: 4.6e-5},
    "IQ4_NL": {0: 9e-4},
    "IQ4_XS": {0: 4.8e-5},
    "IQ2_XXS": {0: 1.5e-3},
    "IQ2_XS": {0: 1.5e-3},
    "IQ2_S": {0: 1.5e-3},
    "IQ3_XXS": {0: 5e-4},
    "IQ3_S": {0: 5e-4},
    "IQ1_S": {0: 1e-2},
    "IQ1_M": {},  # its f16 lies in four pieces
    "NVFP4": {},
}
PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down",
               "gate": "gate", "up": "up", "down": "down"}
F32 = gguf.GGMLQuantizationType.F32


def _more_bits(layer, layers):
    """Where llama.cpp's medium files have wider types: the first and last eighth, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


# What files of these names hold, counted from published ones: the first row whose words stand in a tensor's name. A row
# may ask for the layer. "narrow" is what takes the place of a type whose blocks do not divide a row.
RECIPES = {
    "Q4_K_M": {
        "rows": [
            ("output.weight", "Q6_K"),
            ("attn_v", lambda layer, layers: "Q6_K" if _more_bits(layer, layers) else "Q4_K"),
            ("ffn_down", lambda layer, layers: "Q6_K" if _more_bits(layer, layers) else "Q4_K"),
            ("", "Q4_K"),
        ],
        "narrow": {"Q4_K": "Q5_0", "Q6_K": "Q8_0"},
        "has": {"Q4_K", "Q6_K", "Q5_0", "Q8_0", "F32"},
    },
    "IQ4_XS": {
        "rows": [
            ("output.weight", "Q6_K"),
            ("attn_v", "Q5_K"),
            ("ffn_down", lambda layer, layers: "Q5_K" if layer < max(1, layers // 8) else "IQ4_XS"),
            ("", "IQ4_XS"),
        ],
        "narrow": {"IQ4_XS": "IQ4_NL", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
        "has": {"IQ4_XS", "IQ4_NL", "Q6_K", "F32"},
    },
    "UD-Q2_K_XL": {
        "rows": [
            ("output.weight", "Q6_K"),
            ("token_embd", "Q4_K"),
            ("ffn_down_exps", lambda layer, layers: "Q4_K" if layer < 2 else "Q3_K"),
            ("ffn_gate_exps", "Q2_K"),
            ("ffn_up_exps", lambda layer, layers: "Q2_K" if layer % 2 else "Q3_K"),
            ("shexp", "Q5_K"),
            ("attn_v", "Q6_K"),
            ("attn_output", "Q5_K"),
            ("", "Q4_K"),
        ],
        "narrow": {"Q2_K": "Q4_0", "Q3_K": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
        "has": {"Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_NL", "Q5_0", "F32"},
    },
    "UD-IQ2_M": {
        "rows": [
            ("output.weight", "Q6_K"),
            ("token_embd", "Q4_K"),
            ("ffn_down_exps", "IQ4_XS"),
            ("ffn_gate_exps", lambda layer, layers: ("IQ3_XXS", "IQ2_XXS", "IQ1_M", "IQ2_S")[layer]),
            ("ffn_up_exps", lambda layer, layers: ("IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ3_S")[layer]),
            ("attn_output", "IQ3_XXS"),
            ("attn_q", "NVFP4"),
            ("", "Q4_K"),
        ],
        "narrow": {"IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q6_K": "Q8_0", "NVFP4": "Q5_1", "IQ3_XXS": "IQ4_NL"},
        "has": {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_S", "IQ4_NL", "NVFP4", "Q4_K", "Q6_K", "F32"},
    },
}


def recipe(name, layers):
    """The type of a matrix by its name and columns, for Model."""
    kinds = gguf.GGMLQuantizationType

    def kind(tensor, columns):
        found = re.match(r"blk\.(\d+)\.", tensor)
        layer = int(found[1]) if found else 0
        asked = next(kind for part, kind in RECIPES[name]["rows"] if part in tensor)
        asked = asked(layer, layers) if callable(asked) else asked
        if columns % 256 == 0:
            return kinds[asked]
        return kinds[RECIPES[name]["narrow"][asked]] if columns % 32 == 0 else kinds.F16

    return kind


def read_checkpoint(folder):
    """(config, {name: array, floats as float32}) of a folder of safetensors."""
    folder = pathlib.Path(folder)
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                tensors[name] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return json.loads((folder / "config.json").read_text()), tensors


def encode(values, kind, random):
    """(bytes as the file has them, the numbers they stand for). What the library cannot quantise becomes random blocks
    of about the size of the values, with every f16 a small number."""
    if kind == F32:
        return values, values
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if kind.name in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        raw = gguf.quants.quantize(values, kind)
    else:
        raw = random.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), dtype=np.uint8)
        for start, value in HALVES[kind.name].items():
            raw[..., start : start + 2] = np.array([value], "<f2").view(np.uint8)
        if kind.name == "IQ1_M":  # the top nibbles of four words, the lowest first
            bits = int(np.array([1e-2], "<f2").view(np.uint16)[0])
            for i in range(4):
                raw[..., 49 + 2 * i] = raw[..., 49 + 2 * i] & 15 | (bits >> 4 * i & 15) << 4
        if kind.name == "NVFP4":  # scales of 1/64 to 1/32
            raw[..., :4] = 8 + raw[..., :4] % 8
        raw = raw.reshape(*values.shape[:-1], -1)
    return raw, gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(values.shape)


def permuted(values, heads):
    """Rows of each head from halves to neighbours."""
    shape = values.shape
    return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


class Model:
    """One model on its way into a file. `kind` gives the type of a matrix by its GGUF name and its columns."""

    def __init__(self, folder, kind=lambda name, columns: F32, *, split_kv_b=True, split_qkvz=True, seed=5):
        self.config, self.published = read_checkpoint(folder)
        self.type = self.config["model_type"]
        self.kind = kind
        self.split_kv_b = split_kv_b
        self.split_qkvz = split_qkvz  # older files have it as published
        self.delta = "linear_num_key_heads" in self.config
        self.says_indexers = True  # older files leave it out which layers have one
        self.says_gating = True  # converters leave it out for some newer configs
        self.says_growth = False  # of queries; converters leave it out
        self.random = np.random.default_rng(seed)
        self.tensors = {}  # GGUF name: (bytes, type)
        self.rounded = {}  # published name: the numbers that are stored
        self._convert()

    def put(self, name, values, matrix=True):
        kind = self.kind(name, values.shape[-1]) if matrix else F32
        raw, rounded = encode(np.ascontiguousarray(values), kind, self.random)
        self.tensors[name] = (raw, kind)
        return rounded

    def _convert(self):
        stacks = {}
        for name, values in self.published.items():
            expert = re.fullmatch(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", name)
            if expert:
                layer, number, projection = expert.groups()
                stacks.setdefault((layer, projection), {})[int(number)] = (name, values)
            elif ".experts." in name:
                self._fused(name, values)
            else:
                self._other(name, values)
        for (layer, projection), experts in stacks.items():
            rounded = self.put(
                f"blk.{layer}.ffn_{PROJECTIONS[projection]}_exps.weight",
                np.stack([experts[i][1] for i in range(len(experts))]),
            )
            self.rounded.update({name: rounded[i] for i, (name, _) in experts.items()})

    def _fused(self, name, values):
        """gpt-oss: [experts, in, out], gate and up in turns; llama4: one after the other. mistral4, gemma4: as the file
        has them, gate and up in one."""
        layer, tail = re.fullmatch(r"model\.layers\.(\d+)\.(?:\w+\.)?experts\.(\w+)", name).groups()
        if self.type in ("mistral4", "gemma4_text"):
            part = {"gate_up_proj": "gate_up", "down_proj": "down"}[tail]
            self.rounded[name] = self.put(f"blk.{layer}.ffn_{part}_exps.weight", values)
            return
        bias = tail.endswith("_bias")
        suffix = "bias" if bias else "weight"
        stored = values if bias else values.swapaxes(1, 2)
        if tail.startswith("down"):
            rounded = self.put(f"blk.{layer}.ffn_down_exps.{suffix}", stored, not bias)
        else:
            rounded = np.empty_like(stored)
            half = stored.shape[1] // 2
            in_turns = (slice(0, None, 2), slice(1, None, 2))
            for part, rows in zip(("gate", "up"), in_turns if self.type == "gpt_oss"
                                  else (slice(half), slice(half, None))):
                rounded[:, rows] = self.put(f"blk.{layer}.ffn_{part}_exps.{suffix}", stored[:, rows], not bias)
        self.rounded[name] = rounded if bias else np.ascontiguousarray(rounded.swapaxes(1, 2))

    def _other(self, name, values):
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        prefix, rest = (f"blk.{found[1]}.", found[2]) if found else ("", name)
        module, _, suffix = rest.rpartition(".")
        if rest == "self_attn.kv_b_proj.weight" and self.split_kv_b:
            self.rounded[name] = self._split(prefix, values)
            return
        tail = TENSORS.get(rest) or f"{MODULES[module]}.{suffix}"
        if self.delta and ("linear_attn" in rest or values.ndim == 1):
            self.rounded[name] = self._delta(prefix, rest, tail, values)
            return
        if self.type in ("glm4_moe", "gpt_oss", "solar_open", "gemma4_text") and module == "post_attention_layernorm":
            tail = "post_attention_norm.weight"
        if self.type in ("llama", "mixtral") and module in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = self.config["num_attention_heads" if "q_proj" in module else "num_key_value_heads"]
            # Blocks lie along a row, so that rounding and permuting may change places.
            kind = self.kind(prefix + tail, values.shape[1]) if values.ndim == 2 else F32
            raw, self.rounded[name] = encode(values, kind, self.random)
            self.tensors[prefix + tail] = (permuted(raw, heads), kind)
            return
        always_f32 = tail in ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "exp_probs_b.bias")
        if tail == "ffn_gate_inp_shexp.weight":
            self.rounded[name] = self.put(prefix + tail, values[0], False)[None]
            return
        self.rounded[name] = self.put(prefix + tail, values, values.ndim == 2 and not always_f32)

    def _delta(self, prefix, rest, tail, values):
        """Norms with their one, decays as rates; of Qwen3.5 heads of values in turns: the first of every key head, then
        the second ones. Of Qwen3-Next gates apart."""
        config = self.config
        keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]
        together = heads // keys
        if rest.endswith("norm.weight") and "linear_attn" not in rest:
            tail = "post_attention_norm.weight" if "post_attention" in rest else tail
            self.put(prefix + tail, values + 1, False)
            return values
        if rest.endswith("in_proj_qkvz.weight") and self.split_qkvz:
            rows = np.arange(len(values)).reshape(keys, -1)
            cuts = np.split(rows, np.cumsum([key, key, together * value]), axis=1)
            joined = np.concatenate([each.reshape(-1) for each in cuts[:3]])
            out = np.empty_like(values)
            out[joined] = self.put(prefix + "attn_qkv.weight", values[joined])
            out[cuts[3].reshape(-1)] = self.put(prefix + "attn_gate.weight", values[cuts[3].reshape(-1)])
            return out
        order = np.arange(heads).reshape(keys, together)
        if self.type != "qwen3_next":
            order = order.T
        order, size = order.reshape(-1), 1 if values.shape[0] == heads else value
        of_values = (order[:, None] * size + np.arange(size)).reshape(-1)
        if rest == "linear_attn.A_log":
            self.put(prefix + tail, -np.exp(values)[of_values], False)
            return values
        if rest == "linear_attn.conv1d.weight":
            values = values[:, 0]
            channels = np.concatenate([np.arange(2 * keys * key), 2 * keys * key + of_values])
            self.put(prefix + tail, values[channels], False)
            return values[:, None]
        out = np.empty_like(values)
        if rest == "linear_attn.out_proj.weight":
            columns = (order[:, None] * value + np.arange(value)).reshape(-1)
            out[:, columns] = self.put(prefix + tail, values[:, columns])
            return out
        if ("in_proj_ba" in rest or "in_proj_qkvz" in rest or rest == "linear_attn.norm.weight"
            or "linear_attn" not in rest):
            return self.put(prefix + tail, values, values.ndim == 2)
        rows = (np.concatenate([np.arange(2 * keys * key), 2 * keys * key + of_values]) if "in_proj_qkv." in rest
                else of_values)
        out[rows] = self.put(prefix + tail, values[rows], values.ndim == 2)
        return out

    def _split(self, prefix, values):
        nope, v = self.config["qk_nope_head_dim"], self.config["v_head_dim"]
        both = values.reshape(-1, nope + v, values.shape[1])
        keys = self.put(prefix + "attn_k_b.weight", both[:, :nope].swapaxes(1, 2))
        out = np.empty_like(both)
        out[:, :nope] = keys.swapaxes(1, 2)
        out[:, nope:] = self.put(prefix + "attn_v_b.weight", both[:, nope:])
        return out.reshape(values.shape)

    # --- metadata -----------------------------------------------------------------------------------------------------

    def metadata(self, writer):
        config, number = self.config, writer.add_uint32
        arch = ARCHITECTURES[self.type]

        def copy(key, name, add=number):
            if config.get(name) is not None:
                add(f"{arch}.{key}", config[name])

        number(f"{arch}.block_count", config["num_hidden_layers"] + (config.get("num_nextn_predict_layers") or 0))
        copy("context_length", "max_position_embeddings")
        copy("embedding_length", "hidden_size")
        if self.type != "llama4_text":
            copy("feed_forward_length", "intermediate_size")
        copy("attention.head_count", "num_attention_heads")
        copy("attention.layer_norm_rms_epsilon", "rms_norm_eps", writer.add_float32)
        for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
            copy("expert_count", name)
        for name in ("num_experts_per_tok", "moe_k"):
            copy("expert_used_count", name)
        copy("expert_group_count", "n_group")
        copy("expert_group_used_count", "topk_group")
        copy("expert_feed_forward_length", "moe_intermediate_size")
        copy("expert_shared_feed_forward_length", "shared_expert_intermediate_size")
        if self.type in ("minimax_m2", "gpt_oss"):
            copy("expert_feed_forward_length", "intermediate_size")
        if self.type == "gpt_oss":
            copy("attention.sliding_window", "sliding_window")
        if self.type == "llama4_text":
            copy("feed_forward_length", "intermediate_size_mlp")
            copy("expert_feed_forward_length", "intermediate_size")
            copy("interleave_moe_layer_step", "interleave_moe_layer_step")
            copy("attention.sliding_window", "attention_chunk_size")
        if self.type == "gemma4_text":
            copy("expert_used_count", "top_k_experts")
            copy("attention.sliding_window", "sliding_window")
            copy("final_logit_softcapping", "final_logit_softcapping", writer.add_float32)
            number(f"{arch}.embedding_length_per_layer_input", 0)
            number(f"{arch}.attention.shared_kv_layers", 0)
            self._two_kinds(writer, arch)
            return
        if self.type == "smallthinker":
            copy("expert_count", "moe_num_primary_experts")
            copy("expert_used_count", "moe_num_active_primary_experts")
            copy("feed_forward_length", "moe_ffn_hidden_size")
            copy("expert_feed_forward_length", "moe_ffn_hidden_size")
            number(f"{arch}.expert_gating_func", 1 if config["moe_primary_router_apply_softmax"] else 2)
            if any(config["sliding_window_layout"]):
                copy("attention.sliding_window", "sliding_window_size")
        if "n_shared_experts" in config:
            copy("expert_shared_count", "n_shared_experts")
            copy("leading_dense_block_count", "first_k_dense_replace")
            copy("expert_weights_scale", "routed_scaling_factor", writer.add_float32)
            if config.get("norm_topk_prob"):
                copy("expert_weights_norm", "norm_topk_prob", writer.add_bool)
        if self.type == "glm4_moe_lite":
            number(f"{arch}.leading_dense_block_count", config["mlp_layer_types"].count("dense"))
        if self.type == "hy_v3":
            shared = config["moe_intermediate_size"] * config["num_shared_experts"]
            number(f"{arch}.expert_shared_feed_forward_length", shared)
            copy("expert_weights_scale", "router_scaling_factor", writer.add_float32)
            writer.add_bool(f"{arch}.expert_weights_norm", True)
        if self.type == "ernie4_5_moe":
            copy("interleave_moe_layer_step", "moe_layer_interval")
            copy("leading_dense_block_count", "moe_layer_start_index")
            copy("expert_shared_count", "moe_num_shared_experts")
            if config["moe_num_shared_experts"]:  # what the public converter writes, whatever it means
                wide = config["intermediate_size"] // config["num_key_value_heads"]
                number(f"{arch}.expert_shared_feed_forward_length", wide)
        if self.delta:
            copy("ssm.conv_kernel", "linear_conv_kernel_dim")
            copy("ssm.state_size", "linear_key_head_dim")
            copy("ssm.group_count", "linear_num_key_heads")
            copy("ssm.time_step_rank", "linear_num_value_heads")
            number(f"{arch}.ssm.inner_size", config["linear_num_value_heads"] * config["linear_value_head_dim"])
            number(f"{arch}.full_attention_interval", 4)
            if config.get("norm_topk_prob") is False:
                copy("expert_weights_norm", "norm_topk_prob", writer.add_bool)
        if "index_topk" in config:
            copy("attention.indexer.head_count", "index_n_heads")
            copy("attention.indexer.key_length", "index_head_dim")
            copy("attention.indexer.top_k", "index_topk")
            if self.says_indexers and config.get("indexer_types"):
                writer.add_array(f"{arch}.attention.indexer.types",
                                 [kind == "full" for kind in config["indexer_types"]])
        if self.says_growth:
            writer.add_float32(f"{arch}.attention.temperature_scale", config["rope_parameters"]["llama_4_scaling_beta"])
        # What readers of such files take for granted is written only where the model differs.
        if self.type in ("qwen2_moe", "qwen3_moe") and config["norm_topk_prob"] != (self.type == "qwen3_moe"):
            copy("expert_weights_norm", "norm_topk_prob", writer.add_bool)
        sigmoid = ("deepseek_v3", "glm4_moe", "minimax_m2", "dots1", "hy_v3", "solar_open", "glm_moe_dsa",
                   "deepseek_v32")
        if self.type in sigmoid and self.says_gating:
            number(f"{arch}.expert_gating_func", 2)
        if "kv_lora_rank" in config:
            self._latent(number, arch, copy)
        else:
            self._heads(number, arch, copy)
        self._rope(writer, arch)

    def _two_kinds(self, writer, arch):
        """Layers that see a window and layers that see all, of which the file has a list."""
        kinds = self.config["layer_types"]
        writer.add_array(f"{arch}.attention.sliding_window_pattern", [kind == "sliding_attention" for kind in kinds])

        def of(layer, name):
            return len(self.published[f"model.layers.{layer}.self_attn.{name}.weight"])

        writer.add_array(f"{arch}.attention.head_count_kv",
                         [of(i, "k_proj") // of(i, "k_norm") for i in range(len(kinds))])
        for kind, tail in (("full_attention", ""), ("sliding_attention", "_swa")):
            head, rope = of(kinds.index(kind), "k_norm"), self.config["rope_parameters"][kind]
            for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
                writer.add_uint32(f"{arch}.{key}{tail}", head)
            writer.add_float32(f"{arch}.rope.freq_base{tail}", rope["rope_theta"])
            if rope["rope_type"] == "proportional":
                turning = int(rope["partial_rotary_factor"] * head / 2)
                factors = np.full(head // 2, 1e30, np.float32)
                factors[:turning] = rope.get("factor", 1.0)
                self.tensors["rope_freqs.weight"] = (factors, F32)

    def _heads(self, number, arch, copy):
        config = self.config
        copy("attention.head_count_kv", "num_key_value_heads")
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if config.get("head_dim"):
            number(f"{arch}.attention.key_length", head)
            number(f"{arch}.attention.value_length", head)
        if self.type in ("glm4_moe", "minimax_m2", "solar_open") or self.delta:
            part = config["rope_parameters"].get("partial_rotary_factor", 1.0)
            number(f"{arch}.rope.dimension_count", int(head * part))
        if arch == "llama":
            number(f"{arch}.rope.dimension_count", head)

    def _latent(self, number, arch, copy):
        config = self.config
        rope, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        copy("attention.q_lora_rank", "q_lora_rank")
        copy("attention.kv_lora_rank", "kv_lora_rank")
        number(f"{arch}.rope.dimension_count", rope)
        if self.split_kv_b:
            number(f"{arch}.attention.head_count_kv", 1)
            number(f"{arch}.attention.key_length", config["kv_lora_rank"] + rope)
            number(f"{arch}.attention.value_length", config["kv_lora_rank"])
            number(f"{arch}.attention.key_length_mla", nope + rope)
            number(f"{arch}.attention.value_length_mla", config["v_head_dim"])
        else:
            copy("attention.head_count_kv", "num_attention_heads")
            number(f"{arch}.attention.key_length", nope + rope)
            number(f"{arch}.attention.value_length", config["v_head_dim"])

    def _rope(self, writer, arch):
        beside = dict(rope_type="default", rope_theta=self.config.get("rope_theta"))
        rope = self.config.get("rope_parameters") or beside
        writer.add_float32(f"{arch}.rope.freq_base", rope["rope_theta"])
        kind = rope["rope_type"]
        if kind in ("linear", "yarn"):
            writer.add_string(f"{arch}.rope.scaling.type", kind)
            writer.add_float32(f"{arch}.rope.scaling.factor", rope["factor"])
        if kind == "yarn":
            writer.add_uint32(
                f"{arch}.rope.scaling.original_context_length", rope["original_max_position_embeddings"]
            )
            writer.add_float32(f"{arch}.rope.scaling.yarn_beta_fast", rope["beta_fast"])
            writer.add_float32(f"{arch}.rope.scaling.yarn_beta_slow", rope["beta_slow"])
            if rope.get("mscale_all_dim"):
                writer.add_float32(f"{arch}.rope.scaling.yarn_log_multiplier", 0.1 * rope["mscale_all_dim"])
        if kind == "longrope":
            writer.add_string(f"{arch}.rope.scaling.type", kind)
            writer.add_uint32(
                f"{arch}.rope.scaling.original_context_length", rope["original_max_position_embeddings"]
            )
            if rope.get("attention_factor"):
                writer.add_float32(f"{arch}.rope.scaling.attn_factor", rope["attention_factor"])
            for length in ("short", "long"):
                factors = np.array(rope[f"{length}_factor"], np.float32)
                self.tensors[f"rope_factors_{length}.weight"] = (factors, F32)
        if kind == "llama3":
            self.tensors["rope_freqs.weight"] = (self._llama3(rope), F32)

    def _llama3(self, rope):
        head = self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]
        frequencies = rope["rope_theta"] ** (-np.arange(0, head, 2) / head)
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
        smooth = (turns - low) / max(high - low, 1e-9)
        between = 1 / ((1 - smooth) / factor + smooth)
        return np.where(turns > high, 1, np.where(turns < low, factor, between)).astype(np.float32)

    def write(self, path, more=lambda writer: None, change=lambda tensors: None, split=0):
        """`more` adds metadata (a tokenizer), `change` takes tensors away or spoils them; split: tensors in a part."""
        writer = gguf.GGUFWriter(path, ARCHITECTURES[self.type], split_max_tensors=split)
        self.metadata(writer)
        more(writer)
        tensors = dict(self.tensors)
        change(tensors)
        for name, (raw, kind) in tensors.items():
            writer.add_tensor(name, raw, raw_dtype=None if kind == F32 else kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def add_vocabulary(writer, tokenizer, pre, model="gpt2"):
    """What a file has of a byte-level BPE of PyPI's tokenizers."""
    said = json.loads(tokenizer.to_str())
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    types = [1] * len(tokens)
    for added in said["added_tokens"]:
        types[added["id"]] = 3 if added["special"] else 4
    writer.add_string("tokenizer.ggml.model", model)
    writer.add_string("tokenizer.ggml.pre", pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in said["model"]["merges"]])
