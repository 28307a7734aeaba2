#!/usr/bin/env python3
"""Writes a random Mixture-of-Experts model as one GGUF file in Q4_0, for figures of speed beside other programs: every
matrix in the same 4-bit format, a byte-level BPE vocabulary of pairs. Its text is noise, its shape real, and its
routers choose like those of a model: all experts about equally often, token by token, or by a Zipf law. Needs numpy.

    make_gguf.py OUT.gguf                          # 4 layers of Qwen3-30B-A3B, vocabulary 32,000: 1.4 GB
    make_gguf.py OUT.gguf --layers 48              # all of its layers: 16 GB
    make_gguf.py OUT.gguf --expert-type iq2_xxs    # experts of a grid (any entries, any signs), the rest in Q4_0
    make_gguf.py OUT.gguf --arch deepseek2         # 1 dense and 2 expert layers of DeepSeek-V3: 14 GB
    make_gguf.py OUT.gguf --arch qwen35moe         # 4 layers of Qwen3.5-35B-A3B, 3 of them recurrent: 1.9 GB
    make_gguf.py OUT.gguf --arch glm-dsa           # 1 dense and 3 expert layers of GLM-5, all with indexers: 17 GB
    make_gguf.py OUT.gguf --zipf 1                 # the expert of rank r is chosen about 1/r as often as the first
    make_gguf.py OUT.gguf --layers 2 --experts 8 --hidden 256 --inter 128 --heads 4 --kv-heads 2

Two things make routing honest. Codes are symmetric around zero: a mean would give all tokens one common direction, and
their routers one answer. Embeddings are 200 times as large as weights, so that tokens stay apart through all layers.
"""
import argparse
import struct

import numpy as np

ALIGN = 32
TYPE_U32, TYPE_F32, TYPE_BOOL, TYPE_STRING, TYPE_ARRAY, TYPE_I32 = 4, 6, 7, 8, 9, 5
GGML_F32, GGML_Q4_0 = 0, 2
BLOCK, BLOCK_BYTES = 32, 18  # of Q4_0: an f16 scale and 32 codes
# Types whose blocks are an f16 factor and bytes that may be any: number, columns, bytes, and the factor that makes
# weights deviate by 1.
ANY_BYTES = {"iq2_xxs": (16, 256, 66, 0.0187), "iq3_xxs": (18, 256, 98, 0.0070)}
SIZES = {GGML_F32: (1, 4), GGML_Q4_0: (BLOCK, BLOCK_BYTES)} | {n: (c, b) for n, c, b, _ in ANY_BYTES.values()}
POOL = 1 << 20  # random blocks to cut tensors from
EMBEDDING = 200  # times a weight
DEVIATION = 0.0177  # of weights: codes -7..7, scales 0.002..0.006
# Of router logits: that of a Gumbel variable, whose largest ones are a draw by softmax without replacement.
LOGITS = 1.28
COMMON = 8  # the first element of every embedding, in deviations, where a router needs a constant
SIGMOID = 2  # expert_gating_func

# What each architecture is by default.
SHAPES = {
    "qwen3moe": dict(layers=4, experts=128, top_k=8, hidden=2048, inter=768, heads=32, kv_heads=4, head_dim=128),
    "deepseek2": dict(layers=3, dense_layers=1, experts=256, top_k=8, hidden=7168, inter=2048, dense_inter=18432,
                      heads=128, q_rank=1536, kv_rank=512, head_dim=128, value_dim=128, rope_dim=64, groups=8,
                      used_groups=4),
    "qwen35moe": dict(layers=4, experts=256, top_k=8, hidden=2048, inter=512, heads=16, kv_heads=2, head_dim=256,
                      rope_dim=64, interval=4, key_heads=16, value_heads=32, state_dim=128, taps=4),
    "glm-dsa": dict(layers=4, dense_layers=1, experts=256, top_k=8, hidden=6144, inter=2048, dense_inter=12288,
                    heads=64, q_rank=2048, kv_rank=512, head_dim=192, value_dim=256, rope_dim=64, index_heads=32,
                    index_dim=128, index_top_k=2048),
}
LATENT = ("deepseek2", "glm-dsa")  # keys and values of all heads from one vector
PLAIN = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "indexer.proj")  # never rounded


def string(characters):
    raw = characters.encode()
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


def numbers(args):
    """(key, value) of the architecture; integers and floats."""
    yield from (("block_count", args.layers), ("context_length", args.context), ("embedding_length", args.hidden),
                ("attention.head_count", args.heads), ("expert_count", args.experts), ("expert_used_count", args.top_k),
                ("expert_feed_forward_length", args.inter), ("attention.layer_norm_rms_epsilon", 1e-6))
    if args.arch in LATENT:
        yield from latent_numbers(args)
        return
    yield from (("feed_forward_length", 4 * args.inter), ("attention.head_count_kv", args.kv_heads),
                ("attention.key_length", args.head_dim), ("attention.value_length", args.head_dim))
    if args.arch == "qwen3moe":
        yield "rope.freq_base", 1e6
        return
    yield from (("rope.freq_base", 1e7), ("rope.dimension_count", args.rope_dim),
                ("expert_shared_feed_forward_length", args.inter), ("full_attention_interval", args.interval),
                ("ssm.conv_kernel", args.taps), ("ssm.state_size", args.state_dim),
                ("ssm.group_count", args.key_heads), ("ssm.time_step_rank", args.value_heads),
                ("ssm.inner_size", args.value_heads * args.state_dim))


def latent_numbers(args):
    yield from (("feed_forward_length", args.dense_inter), ("attention.head_count_kv", 1),
                ("leading_dense_block_count", args.dense_layers), ("attention.q_lora_rank", args.q_rank),
                ("attention.kv_lora_rank", args.kv_rank), ("attention.key_length", args.kv_rank + args.rope_dim),
                ("attention.value_length", args.kv_rank), ("attention.key_length_mla", args.head_dim + args.rope_dim),
                ("attention.value_length_mla", args.value_dim), ("rope.dimension_count", args.rope_dim),
                ("expert_shared_count", 1), ("expert_gating_func", SIGMOID), ("expert_weights_scale", 2.5),
                ("vocab_size", args.vocab))
    if args.arch == "deepseek2":
        yield from (("rope.freq_base", 1e4), ("expert_group_count", args.groups),
                    ("expert_group_used_count", args.used_groups))
    else:
        yield from (("rope.freq_base", 1e6), ("attention.indexer.head_count", args.index_heads),
                    ("attention.indexer.key_length", args.index_dim), ("attention.indexer.top_k", args.index_top_k))


def metadata(args):
    tokens, merges = vocabulary(args.vocab)
    yield field("general.architecture", TYPE_STRING, args.arch)
    yield field("general.name", TYPE_STRING, "random")
    yield field("general.file_type", TYPE_U32, 2)
    for key, number in numbers(args):
        yield field(f"{args.arch}.{key}", TYPE_F32 if isinstance(number, float) else TYPE_U32, number)
    if args.arch in LATENT:
        yield field(f"{args.arch}.expert_weights_norm", TYPE_BOOL, True)
    if args.arch == "qwen35moe":  # of a rotation by time, height and width: a text's three are one
        eighth = args.rope_dim // 8
        sections = [args.rope_dim // 2 - 2 * eighth, eighth, eighth, 0]
        yield field("qwen35moe.rope.dimension_sections", TYPE_I32, sections)
    yield field("tokenizer.ggml.model", TYPE_STRING, "gpt2")
    yield field("tokenizer.ggml.pre", TYPE_STRING, "qwen2")
    yield field("tokenizer.ggml.tokens", TYPE_STRING, tokens)
    yield field("tokenizer.ggml.token_type", TYPE_I32, [1] * (len(tokens) - 1) + [3])
    yield field("tokenizer.ggml.merges", TYPE_STRING, merges)
    yield field("tokenizer.ggml.eos_token_id", TYPE_U32, len(tokens) - 1)
    yield field("tokenizer.ggml.add_bos_token", TYPE_BOOL, False)


def attention(args, layer):
    """(name, shape), the fastest dimension first."""
    if args.arch in LATENT:
        yield from latent_attention(args)
    elif args.arch == "qwen35moe" and (layer + 1) % args.interval:
        yield from recurrence(args)
    else:
        q, kv = args.heads * args.head_dim, args.kv_heads * args.head_dim
        gated = 2 if args.arch == "qwen35moe" else 1  # a gate beside each head
        yield from (("attn_q", (args.hidden, gated * q)), ("attn_k", (args.hidden, kv)),
                    ("attn_v", (args.hidden, kv)), ("attn_output", (q, args.hidden)),
                    ("attn_q_norm", (args.head_dim,)), ("attn_k_norm", (args.head_dim,)))


def recurrence(args):
    keys, values = args.key_heads * args.state_dim, args.value_heads * args.state_dim
    yield from (("attn_qkv", (args.hidden, 2 * keys + values)), ("attn_gate", (args.hidden, values)),
                ("ssm_conv1d", (args.taps, 2 * keys + values)), ("ssm_dt", (args.value_heads,)),
                ("ssm_a", (args.value_heads,)), ("ssm_beta", (args.hidden, args.value_heads)),
                ("ssm_alpha", (args.hidden, args.value_heads)), ("ssm_norm", (args.state_dim,)),
                ("ssm_out", (values, args.hidden)))


def latent_attention(args):
    key = args.head_dim + args.rope_dim
    yield from (("attn_q_a", (args.hidden, args.q_rank)), ("attn_q_a_norm", (args.q_rank,)),
                ("attn_q_b", (args.q_rank, args.heads * key)),
                ("attn_kv_a_mqa", (args.hidden, args.kv_rank + args.rope_dim)), ("attn_kv_a_norm", (args.kv_rank,)),
                ("attn_k_b", (args.head_dim, args.kv_rank, args.heads)),
                ("attn_v_b", (args.kv_rank, args.value_dim, args.heads)),
                ("attn_output", (args.heads * args.value_dim, args.hidden)))
    if args.arch == "glm-dsa":
        yield from (("indexer.attn_q_b", (args.q_rank, args.index_heads * args.index_dim)),
                    ("indexer.attn_k", (args.hidden, args.index_dim)), ("indexer.k_norm", (args.index_dim,)),
                    ("indexer.k_norm.bias", (args.index_dim,)), ("indexer.proj", (args.hidden, args.index_heads)))


def feed_forward(args, layer):
    def matrices(suffix, inter, *experts):
        yield from ((f"ffn_gate{suffix}", (args.hidden, inter, *experts)),
                    (f"ffn_up{suffix}", (args.hidden, inter, *experts)),
                    (f"ffn_down{suffix}", (inter, args.hidden, *experts)))

    if args.arch in LATENT and layer < args.dense_layers:
        yield from matrices("", args.dense_inter)
        return
    yield "ffn_gate_inp", (args.hidden, args.experts)
    yield from matrices("_exps", args.inter, args.experts)
    if args.arch in LATENT:
        yield "exp_probs_b", (args.experts,)
    if args.arch != "qwen3moe":
        yield from matrices("_shexp", args.inter)
    if args.arch == "qwen35moe":
        yield "ffn_gate_inp_shexp", (args.hidden,)


# Of tensors that are no weights of a module.
NAMES = {"exp_probs_b": "exp_probs_b.bias", "ssm_dt": "ssm_dt.bias", "ssm_a": "ssm_a",
         "indexer.k_norm.bias": "indexer.k_norm.bias"}


def tensors(args):
    """(name, shape, type)."""
    def row(prefix, name, shape):
        plain = len(shape) == 1 or name in PLAIN
        chosen = args.expert_type != "q4_0" and name.endswith("_exps")
        packed = ANY_BYTES[args.expert_type][0] if chosen else GGML_Q4_0
        return prefix + NAMES.get(name, f"{name}.weight"), shape, GGML_F32 if plain else packed

    yield row("", "token_embd", (args.hidden, args.vocab))
    yield row("", "output_norm", (args.hidden,))
    yield row("", "output", (args.hidden, args.vocab))
    between = "post_attention_norm" if args.arch == "qwen35moe" else "ffn_norm"
    for layer in range(args.layers):
        parts = (("attn_norm", (args.hidden,)), *attention(args, layer), (between, (args.hidden,)),
                 *feed_forward(args, layer))
        yield from (row(f"blk.{layer}.", name, shape) for name, shape in parts)


def size_of(shape, kind):
    columns, size = SIZES[kind]
    return int(np.prod(shape)) // columns * size


def random_blocks(random, times=1):
    """Q4_0 blocks of codes -7..7 and scales of `times` 0.002 to 0.006."""
    blocks = np.empty((POOL, BLOCK_BYTES), np.uint8)
    blocks[:, :2] = (times * random.uniform(0.002, 0.006, POOL)).astype("<f2").view(np.uint8).reshape(POOL, 2)
    codes = random.integers(1, 16, (2, POOL, BLOCK // 2), np.uint8)
    blocks[:, 2:] = codes[0] | codes[1] << 4
    return blocks


def any_blocks(kind, random):
    _, columns, size, unit = ANY_BYTES[kind]
    blocks = random.integers(0, 256, (POOL * BLOCK // columns, size), np.uint8)
    blocks[:, :2] = np.array([unit * DEVIATION], "<f2").view(np.uint8)
    return blocks


def cut(blocks, count, random):
    """That many of the blocks, in pieces from random places."""
    while count:
        start = int(random.integers(0, len(blocks) // 2))
        piece = blocks[start:start + count]
        yield piece
        count -= len(piece)


def embeddings(args, random):
    """Rows of large numbers; where routers follow a law, the first element of all is the same and its block otherwise
    zero."""
    blocks = random_blocks(random, EMBEDDING)
    for _ in range(args.vocab):
        row = np.concatenate(list(cut(blocks, args.hidden // BLOCK, random)))
        if args.zipf:
            scale = np.array([COMMON * EMBEDDING * DEVIATION / 7], "<f2").view(np.uint8)
            row[0] = [*scale, 0x8F, *[0x88] * (BLOCK // 2 - 1)]
        yield row.tobytes()


def router(args, random):
    """Logits of unit tokens; by --zipf S those of the expert of rank r are S log r less, ranks being the layer's
    own."""
    weights = random.normal(0, LOGITS / np.sqrt(args.hidden), (args.experts, args.hidden))
    if args.zipf:
        ranks = random.permutation(args.experts) + 1
        weights[:, 0] = -args.zipf * np.log(ranks) / COMMON
    return weights.astype("<f4").tobytes()


def plain_numbers(name, shape, random):
    """What is never rounded: convolutions and an indexer's weights of one size with their input, rates of decay from
    one token in fifty to nearly all, biases and the gate of a shared expert zero, norms one."""
    if name.endswith(("ssm_conv1d.weight", "indexer.proj.weight")):
        return random.normal(0, 1 / np.sqrt(shape[0]), shape[::-1])
    if name.endswith("ssm_a"):
        return -np.exp(random.uniform(-4, 2, shape))
    return (np.zeros if name.endswith(("bias", "ffn_gate_inp_shexp.weight")) else np.ones)(shape)


def contents(name, shape, kind, args, pools, random):
    """The bytes of a tensor, in pieces of the pool of blocks of its type."""
    if name == "token_embd.weight":
        yield from embeddings(args, random)
    elif name.endswith("ffn_gate_inp.weight"):
        yield router(args, random)
    elif kind == GGML_F32:
        yield plain_numbers(name, shape, random).astype("<f4").tobytes()
    elif kind != GGML_Q4_0:
        yield from (piece.tobytes() for piece in cut(pools[kind], int(np.prod(shape)) // SIZES[kind][0], random))
    else:
        # Tokens of single bytes are never the most probable.
        silent = 256 * args.hidden // BLOCK if name == "output.weight" else 0
        yield bytes(silent * BLOCK_BYTES)
        yield from (piece.tobytes() for piece in cut(pools[kind], int(np.prod(shape)) // BLOCK - silent, random))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--arch", choices=SHAPES, default="qwen3moe")
    parser.add_argument("--expert-type", choices=("q4_0", *ANY_BYTES), default="q4_0")
    parser.add_argument("--zipf", type=float, default=0, help="exponent of the routers' law (default 0: all alike)")
    for name in sorted({name for shape in SHAPES.values() for name in shape}):
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    for name, number in (("vocab", 32000), ("context", 40960), ("seed", 1)):
        parser.add_argument("--" + name, type=int, default=number)
    args = parser.parse_args()
    for name in {name for shape in SHAPES.values() for name in shape}:
        known = name in SHAPES[args.arch]
        if not known and getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')} is not of {args.arch}")
        if known and getattr(args, name) is None:
            setattr(args, name, SHAPES[args.arch][name])
    return args


def main():
    args = arguments()
    random = np.random.default_rng(args.seed)
    pools = {GGML_Q4_0: random_blocks(random)}
    if args.expert_type != "q4_0":
        pools[ANY_BYTES[args.expert_type][0]] = any_blocks(args.expert_type, random)
    fields, infos = list(metadata(args)), list(tensors(args))
    for name, shape, kind in infos:
        columns = SIZES[kind][0]
        if shape[0] % columns:
            raise SystemExit(f"make_gguf.py: {name}: rows of {shape[0]} columns, expected a multiple of {columns}")
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(fields)) + b"".join(fields)
    offset = 0
    for name, shape, kind in infos:
        head += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", kind, offset)
        offset += -(-size_of(shape, kind) // ALIGN) * ALIGN
    with open(args.out, "wb") as out:
        out.write(head + bytes(-len(head) % ALIGN))
        for name, shape, kind in infos:
            start = out.tell()
            out.writelines(contents(name, shape, kind, args, pools, random))
            assert out.tell() - start == size_of(shape, kind), name
            out.write(bytes(-size_of(shape, kind) % ALIGN))


if __name__ == "__main__":
    main()
