#!/usr/bin/env python3
"""Writes a synthetic Mixture-of-Experts checkpoint of any size, for figures of speed and memory: bf16 safetensors
shards with an index and a qwen3_moe config. Weights are slices of one block of random numbers, so that writing runs at
the disk's pace; no two experts are equal. Routers choose all experts about equally often, token by token, or by a Zipf
law: embeddings are large beside weights, so that tokens stay apart through all layers. Needs numpy.

    make_checkpoint.py OUT --gb 20
    make_checkpoint.py OUT --layers 6 --experts 8 --hidden 1024 --inter 512
    make_checkpoint.py OUT --zipf 1                        # the expert of rank r about 1/r as often as the first
"""
import argparse
import json
import pathlib
import struct

import numpy as np

BLOCK = 1 << 25  # random bf16 values to cut tensors from
HEAD_DIM = 128
PREFIX = "model.layers"
DEVIATION = 0.02  # of weights
EMBEDDING = 200  # times a weight
# Of router logits: that of a Gumbel variable, whose largest ones are a draw by softmax without replacement.
LOGITS = 1.28
COMMON = 8  # the first element of every embedding, in deviations, where a router needs a constant


def bf16(values):
    """Round to nearest, ties to even; finite values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def config(args):
    heads = max(1, args.hidden // HEAD_DIM)
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": args.vocab,
        "hidden_size": args.hidden, "intermediate_size": 4 * args.inter, "moe_intermediate_size": args.inter,
        "num_hidden_layers": args.layers, "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 8),
        "head_dim": HEAD_DIM, "num_experts": args.experts, "num_experts_per_tok": min(8, args.experts),
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "attention_bias": False,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1}


def layer_tensors(args, layer):
    """(name, shape) of one layer."""
    said = config(args)
    q, kv = said["num_attention_heads"] * HEAD_DIM, said["num_key_value_heads"] * HEAD_DIM
    at = f"{PREFIX}.{layer}"
    yield f"{at}.input_layernorm.weight", (args.hidden,)
    yield f"{at}.post_attention_layernorm.weight", (args.hidden,)
    for name, rows, cols in (("q", q, args.hidden), ("k", kv, args.hidden), ("v", kv, args.hidden),
                             ("o", args.hidden, q)):
        yield f"{at}.self_attn.{name}_proj.weight", (rows, cols)
    yield f"{at}.self_attn.q_norm.weight", (HEAD_DIM,)
    yield f"{at}.self_attn.k_norm.weight", (HEAD_DIM,)
    yield f"{at}.mlp.gate.weight", (args.experts, args.hidden)
    for expert in range(args.experts):
        for name, shape in (("gate", (args.inter, args.hidden)), ("up", (args.inter, args.hidden)),
                            ("down", (args.hidden, args.inter))):
            yield f"{at}.mlp.experts.{expert}.{name}_proj.weight", shape


def all_tensors(args):
    yield "model.embed_tokens.weight", (args.vocab, args.hidden)
    for layer in range(args.layers):
        yield from layer_tensors(args, layer)
    yield "model.norm.weight", (args.hidden,)
    yield "lm_head.weight", (args.vocab, args.hidden)


def byte_count(shape):
    return 2 * int(np.prod(shape, dtype=np.int64))


def shards(args):
    """Lists of (name, shape), each list one file."""
    shard, size = [], 0
    for name, shape in all_tensors(args):
        if shard and size + byte_count(shape) > args.shard_mb << 20:
            yield shard
            shard, size = [], 0
        shard.append((name, shape))
        size += byte_count(shape)
    yield shard


def router(shape, zipf, random):
    """Logits of unit tokens; by a Zipf law those of the expert of rank r are zipf * log r less, ranks being the layer's
    own."""
    weights = random.normal(0, LOGITS / np.sqrt(shape[1]), shape)
    if zipf:
        weights[:, 0] = -zipf * np.log(random.permutation(shape[0]) + 1) / COMMON
    return bf16(weights)


def embeddings(shape, zipf, random):
    weights = random.standard_normal(shape, np.float32) * np.float32(EMBEDDING * DEVIATION)
    if zipf:
        weights[:, 0] = COMMON * EMBEDDING * DEVIATION
    return bf16(weights)


def contents(name, shape, block, zipf, random):
    """The values of a tensor, in pieces."""
    if name.endswith("mlp.gate.weight"):
        yield router(shape, zipf, random)
    elif name == "model.embed_tokens.weight":
        yield embeddings(shape, zipf, random)
    elif len(shape) == 1:
        yield bf16(np.ones(shape))
    else:
        left = byte_count(shape) // 2
        while left:
            start = int(random.integers(len(block) // 2))
            piece = block[start:start + left]
            yield piece
            left -= len(piece)


def write_shard(path, tensors, block, zipf, random):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + byte_count(shape)]}
        at += byte_count(shape)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors:
            file.writelines(contents(name, shape, block, zipf, random))
    return at


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--gb", type=float, help="size in 10^9 bytes; sets --layers")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inter", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--shard-mb", type=int, default=4096, help="largest file, in MiB (default: 4096)")
    parser.add_argument("--zipf", type=float, default=0, help="exponent of the routers' law (default 0: all alike)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if min(args.layers, args.experts, args.hidden, args.inter, args.vocab, args.shard_mb) < 1 or (args.gb or 1) <= 0:
        parser.error("sizes have to be positive")
    if args.gb:
        layer = sum(byte_count(shape) for _, shape in layer_tensors(args, 0))
        args.layers = max(1, -(-int(args.gb * 1e9) // layer))
    return args


def main():
    args = arguments()
    random = np.random.default_rng(args.seed)
    largest = max(byte_count(shape) // 2 for _, shape in all_tensors(args))
    block = bf16(random.standard_normal(min(BLOCK, 4 * largest + 1), np.float32) * np.float32(DEVIATION))
    args.out.mkdir(parents=True, exist_ok=True)
    parts = list(shards(args))
    weight_map, total = {}, 0
    for i, tensors in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        total += write_shard(args.out / file, tensors, block, args.zipf, random)
        weight_map.update((name, file) for name, _ in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (args.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (args.out / "config.json").write_text(json.dumps(config(args), indent=1))
    print(f"{args.out}: {len(weight_map)} tensors of {args.layers} layers in {len(parts)} files, {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
