"""Tiny random SmallThinker models, which transformers does not have: weights under the published names, and a plain
torch forward of what the family's layers are."""

import json
import pathlib

import safetensors.torch
import torch

VOCAB = 300
# As published, small: windows and turning in three layers of four, seven experts that no vector divides.
CONFIG = dict(
    architectures=["SmallThinkerForCausalLM"], model_type="smallthinker", vocab_size=VOCAB, hidden_size=72,
    num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=2, head_dim=24, max_position_embeddings=1024,
    rms_norm_eps=1e-6, rope_theta=1500000.0, rope_scaling=None, rope_layout=[0, 1, 1, 1, 0],
    sliding_window_layout=[0, 1, 1, 1, 0], sliding_window_size=24, moe_num_primary_experts=7,
    moe_num_active_primary_experts=3, moe_ffn_hidden_size=40, moe_primary_router_apply_softmax=False,
    tie_word_embeddings=False, bos_token_id=0, eos_token_id=1)


def draw(seed=1, dtype=torch.float32, **more):
    """(tensors in f32, their numbers rounded to `dtype` first, config)."""
    config = dict(CONFIG, **more)
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv, inter = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "moe_ffn_hidden_size"))
    generator = torch.Generator().manual_seed(seed)
    out = {}

    def matrix(name, n, k, size=1.0):
        out[name + ".weight"] = torch.randn(n, k, generator=generator) * size / k**0.5

    def norm(name):
        out[name + ".weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)

    matrix("model.embed_tokens", config["vocab_size"], hidden, hidden**0.5)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        norm(at + "input_layernorm")
        norm(at + "post_attention_layernorm")
        matrix(at + "self_attn.q_proj", heads * head, hidden)
        matrix(at + "self_attn.k_proj", kv * head, hidden)
        matrix(at + "self_attn.v_proj", kv * head, hidden)
        matrix(at + "self_attn.o_proj", hidden, heads * head)
        matrix(at + "block_sparse_moe.primary_router", config["moe_num_primary_experts"], hidden, 2)
        for expert in range(config["moe_num_primary_experts"]):
            for part, shape in (("up", (inter, hidden)), ("gate", (inter, hidden)), ("down", (hidden, inter))):
                matrix(f"{at}block_sparse_moe.experts.{expert}.{part}", *shape)
    norm("model.norm")
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], hidden)
    return {name: tensor.to(dtype).float() for name, tensor in out.items()}, config


def save(folder, tensors, config, dtype=torch.float32):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def turned(x, theta):
    """[tokens, heads, head], halves."""
    half = x.shape[-1] // 2
    frequencies = (theta ** (-torch.arange(half, dtype=torch.float64) / half)).float()
    angles = torch.arange(len(x))[:, None] * frequencies
    cos, sin = (each(angles)[:, None] for each in (torch.cos, torch.sin))
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(tensors, config, layer, h):
    at, head = f"model.layers.{layer}.self_attn.", config["head_dim"]
    q, k, v = ((h @ tensors[f"{at}{part}_proj.weight"].T).reshape(len(h), -1, head) for part in "qkv")
    if config["rope_layout"][layer]:
        q, k = turned(q, config["rope_theta"]), turned(k, config["rope_theta"])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    far = torch.arange(len(h))[:, None] - torch.arange(len(h))
    seen = far >= 0
    if config["sliding_window_layout"][layer]:
        seen &= far < config["sliding_window_size"]
    scores = torch.einsum("thd,shd->hts", q, k) / head**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).reshape(len(h), -1) @ tensors[at + "o_proj.weight"].T


def experts(tensors, config, layer, x, h):
    """Chosen by x, run on h."""
    at = f"model.layers.{layer}.block_sparse_moe."
    logits, ids = (x @ tensors[at + "primary_router.weight"].T).topk(config["moe_num_active_primary_experts"])
    weights = logits.softmax(-1) if config["moe_primary_router_apply_softmax"] else logits.sigmoid()
    weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(h)
    for expert in range(config["moe_num_primary_experts"]):
        gate, up, down = (tensors[f"{at}experts.{expert}.{part}.weight"] for part in ("gate", "up", "down"))
        weight = (weights * (ids == expert)).sum(-1, keepdim=True)
        out += weight * (((h @ gate.T).relu() * (h @ up.T)) @ down.T)
    return out


def logits(tensors, config, sequences):
    """[tokens of all sequences in order, vocabulary], float32, as numpy."""
    out = []
    for ids in sequences:
        x = tensors["model.embed_tokens.weight"][torch.tensor(ids)]
        for layer in range(config["num_hidden_layers"]):
            at, before = f"model.layers.{layer}.", x
            x = x + attention(tensors, config, layer,
                              rms(x, tensors[at + "input_layernorm.weight"], config["rms_norm_eps"]))
            h = rms(x, tensors[at + "post_attention_layernorm.weight"], config["rms_norm_eps"])
            x = x + experts(tensors, config, layer, before, h)
        head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        out.append(rms(x, tensors["model.norm.weight"], config["rms_norm_eps"]) @ head.T)
    return torch.cat(out).numpy()
