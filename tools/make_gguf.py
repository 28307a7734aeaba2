#!/usr/bin/env python3
"""Writes a random Mixture-of-Experts model as one GGUF file in Q4_0, for figures of speed beside other programs: the
qwen3moe architecture, every matrix in the same 4-bit format, a byte-level BPE vocabulary of pairs. Its text is noise, its
shape real. Needs numpy.

    make_gguf.py OUT.gguf                                  # 4 layers of Qwen3-30B-A3B, vocabulary 32,000: 1.4 GB
    make_gguf.py OUT.gguf --layers 2 --experts 8 --hidden 256 --inter 128 --heads 4 --kv-heads 2
"""
import argparse
import struct

import numpy as np

ALIGN = 32
TYPE_U32, TYPE_F32, TYPE_BOOL, TYPE_STRING, TYPE_ARRAY, TYPE_I32 = 4, 6, 7, 8, 9, 5
GGML_F32, GGML_Q4_0 = 0, 2
BLOCK, BLOCK_BYTES = 32, 18  # of Q4_0: an f16 scale and 32 codes
POOL = 1 << 21  # random blocks to cut tensors from


def string(words):
    raw = words.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(kind, v):
    if kind == TYPE_STRING:
        return string(v)
    return struct.pack({TYPE_U32: "<I", TYPE_F32: "<f", TYPE_BOOL: "<?", TYPE_I32: "<i"}[kind], v)


def field(key, kind, v):
    if isinstance(v, list):
        return (string(key) + struct.pack("<IIQ", TYPE_ARRAY, kind, len(v)) + b"".join(value(kind, x) for x in v))
    return string(key) + struct.pack("<I", kind) + value(kind, v)


def byte_letters():
    """The letter that stands for each byte in byte-level BPE vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters, extra = {b: chr(b) for b in plain}, 256
    for b in range(256):
        if b not in letters:
            letters[b] = chr(extra)
            extra += 1
    return [letters[b] for b in range(256)]


def vocabulary(size):
    """All bytes, then pairs and triples of ASCII letters, so that text of all but the first tokens is always UTF-8; the
    last token ends."""
    letters = byte_letters()
    plain = [chr(b) for b in range(ord("!"), ord("~") + 1)]
    pairs = [(a, b) for a in plain for b in plain]
    merges = (pairs + [(a + b, c) for a, b in pairs for c in plain])[:size - 257]
    return [*letters, *(a + b for a, b in merges), "<|end|>"], [f"{a} {b}" for a, b in merges]


def metadata(args):
    arch = "qwen3moe"
    tokens, merges = vocabulary(args.vocab)
    yield field("general.architecture", TYPE_STRING, arch)
    yield field("general.name", TYPE_STRING, "random")
    yield field("general.file_type", TYPE_U32, 2)
    for key, number in (("block_count", args.layers), ("context_length", args.context), ("embedding_length", args.hidden),
                        ("feed_forward_length", 4 * args.inter), ("attention.head_count", args.heads),
                        ("attention.head_count_kv", args.kv_heads), ("attention.key_length", args.head_dim),
                        ("attention.value_length", args.head_dim), ("expert_count", args.experts),
                        ("expert_used_count", args.top_k), ("expert_feed_forward_length", args.inter)):
        yield field(f"{arch}.{key}", TYPE_U32, number)
    yield field(f"{arch}.rope.freq_base", TYPE_F32, 1e6)
    yield field(f"{arch}.attention.layer_norm_rms_epsilon", TYPE_F32, 1e-6)
    yield field("tokenizer.ggml.model", TYPE_STRING, "gpt2")
    yield field("tokenizer.ggml.pre", TYPE_STRING, "qwen2")
    yield field("tokenizer.ggml.tokens", TYPE_STRING, tokens)
    yield field("tokenizer.ggml.token_type", TYPE_I32, [1] * (len(tokens) - 1) + [3])
    yield field("tokenizer.ggml.merges", TYPE_STRING, merges)
    yield field("tokenizer.ggml.eos_token_id", TYPE_U32, len(tokens) - 1)
    yield field("tokenizer.ggml.add_bos_token", TYPE_BOOL, False)


def tensors(args):
    """(name, shape with the fastest dimension first, type)."""
    q, kv = args.heads * args.head_dim, args.kv_heads * args.head_dim
    yield "token_embd.weight", (args.hidden, args.vocab), GGML_Q4_0
    yield "output_norm.weight", (args.hidden,), GGML_F32
    yield "output.weight", (args.hidden, args.vocab), GGML_Q4_0
    for layer in range(args.layers):
        at = f"blk.{layer}"
        yield f"{at}.attn_norm.weight", (args.hidden,), GGML_F32
        yield f"{at}.attn_q.weight", (args.hidden, q), GGML_Q4_0
        yield f"{at}.attn_k.weight", (args.hidden, kv), GGML_Q4_0
        yield f"{at}.attn_v.weight", (args.hidden, kv), GGML_Q4_0
        yield f"{at}.attn_output.weight", (q, args.hidden), GGML_Q4_0
        yield f"{at}.attn_q_norm.weight", (args.head_dim,), GGML_F32
        yield f"{at}.attn_k_norm.weight", (args.head_dim,), GGML_F32
        yield f"{at}.ffn_norm.weight", (args.hidden,), GGML_F32
        yield f"{at}.ffn_gate_inp.weight", (args.hidden, args.experts), GGML_F32
        yield f"{at}.ffn_gate_exps.weight", (args.hidden, args.inter, args.experts), GGML_Q4_0
        yield f"{at}.ffn_up_exps.weight", (args.hidden, args.inter, args.experts), GGML_Q4_0
        yield f"{at}.ffn_down_exps.weight", (args.inter, args.hidden, args.experts), GGML_Q4_0


def size_of(shape, kind):
    count = int(np.prod(shape))
    return 4 * count if kind == GGML_F32 else count // BLOCK * BLOCK_BYTES


def random_blocks(random):
    """Q4_0 blocks whose weights have a deviation of about 0.02."""
    blocks = np.empty((POOL, BLOCK_BYTES), np.uint8)
    blocks[:, :2] = random.uniform(0.002, 0.006, POOL).astype("<f2").view(np.uint8).reshape(POOL, 2)
    blocks[:, 2:] = random.integers(0, 256, (POOL, 16), np.uint8)
    return blocks.reshape(-1)


def write_tensor(out, shape, kind, pool, random, silent):
    """The first `silent` bytes are zeros, as are the weights they stand for."""
    if kind == GGML_F32:
        data = np.ones(shape, "<f4") if len(shape) == 1 else random.normal(0, 0.05, shape).astype("<f4")
        out.write(data.tobytes())
        return
    left = size_of(shape, kind) - silent
    out.write(bytes(silent))
    while left:
        start = int(random.integers(0, POOL // 2)) * BLOCK_BYTES
        piece = pool[start:start + left]
        out.write(piece.tobytes())
        left -= len(piece)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    for name, number in (("layers", 4), ("experts", 128), ("top-k", 8), ("hidden", 2048), ("inter", 768), ("heads", 32),
                         ("kv-heads", 4), ("head-dim", 128), ("vocab", 32000), ("context", 40960), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=number)
    args = parser.parse_args()
    random = np.random.default_rng(args.seed)
    pool = random_blocks(random)
    fields, infos = list(metadata(args)), list(tensors(args))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(fields)) + b"".join(fields)
    offset = 0
    for name, shape, kind in infos:
        head += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", kind, offset)
        offset += -(-size_of(shape, kind) // ALIGN) * ALIGN
    with open(args.out, "wb") as out:
        out.write(head + bytes(-len(head) % ALIGN))
        for name, shape, kind in infos:
            # Tokens of single bytes are never the most probable.
            silent = 256 * args.hidden // BLOCK * BLOCK_BYTES if name == "output.weight" else 0
            write_tensor(out, shape, kind, pool, random, silent)
            out.write(bytes(-size_of(shape, kind) % ALIGN))


if __name__ == "__main__":
    main()
