#!/usr/bin/env python3
"""A copy of a checkpoint that computes the same in exact arithmetic and has outlier channels like a large model's:
chosen channels of norms, and of up, are multiplied by a power of two, and the columns that read them divided by it.
Where activations are rounded such channels take the range of all others. bf16, fp16 or f32 safetensors with the names
of Hugging Face. Needs numpy.

    make_outliers.py MODEL OUT
    make_outliers.py MODEL OUT --channels 6 --factors 16 256 --seed 2
"""
import argparse
import json
import pathlib
import re
import shutil
import struct
import sys

import numpy as np

LAYER = r"(model\.layers\.\d+\.)"
EXPERT = r"(?:experts\.\d+\.|shared_experts?\.)?"
# What reads a norm: its columns are divided.
READERS = [
    (LAYER + r"input_layernorm\.weight", r"self_attn\.(q|k|v|q_a)_proj\.weight|self_attn\.kv_a_proj_with_mqa\.weight"),
    (LAYER + r"post_attention_layernorm\.weight",
     rf"mlp\.(gate|shared_expert_gate|{EXPERT}(gate|up)_proj)\.weight"),
    (LAYER + r"self_attn\.q_a_layernorm\.weight", r"self_attn\.q_b_proj\.weight"),
    (LAYER + r"self_attn\.kv_a_layernorm\.weight", r"self_attn\.kv_b_proj\.weight"),
    (r"(model\.)norm\.weight", None),  # lm_head, where it is no embedding too
]
UP = re.compile(rf"({LAYER}mlp\.{EXPERT})up_proj\.weight")
FLOATS = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}


class Checkpoint:
    """All safetensors files of a folder, in memory."""

    def __init__(self, folder):
        self.files, self.places = {}, {}
        for path in sorted(folder.glob("*.safetensors")):
            data = self.files[path.name] = bytearray(path.read_bytes())
            size, = struct.unpack("<Q", data[:8])
            for name, tensor in json.loads(data[8 : 8 + size]).items():
                if name != "__metadata__":
                    begin, end = (8 + size + at for at in tensor["data_offsets"])
                    self.places[name] = (path.name, begin, end, tensor["dtype"], tensor["shape"])
        if not self.places:
            sys.exit(f"{folder}: no safetensors in it")

    def scale(self, name, factors, axis):
        """Multiplies along an axis, exactly."""
        file, begin, end, dtype, shape = self.places[name]
        if dtype not in FLOATS:
            sys.exit(f"{name}: {dtype}; expected {', '.join(FLOATS)}")
        stored = np.frombuffer(self.files[file], FLOATS[dtype], offset=begin, count=int(np.prod(shape))).reshape(shape)
        values = (stored.astype("<u4") << 16).view("<f4") if dtype == "BF16" else stored.astype("<f4")
        scaled = values * factors.reshape([-1 if at == axis else 1 for at in range(len(shape))])
        back = (scaled.view("<u4") >> 16).astype("<u2") if dtype == "BF16" else scaled.astype(FLOATS[dtype])
        again = (back.astype("<u4") << 16).view("<f4") if dtype == "BF16" else back.astype("<f4")
        if not np.array_equal(again, scaled) or not np.isfinite(again).all():
            sys.exit(f"{name}: {dtype} cannot hold its values times {factors.min():g} to {factors.max():g}")
        self.files[file][begin:end] = back.tobytes()


def readers_of(checkpoint, norm):
    for pattern, readers in READERS:
        found = re.fullmatch(pattern, norm)
        if found and readers is None:
            return ["lm_head.weight"] if "lm_head.weight" in checkpoint.places else []
        if found:
            return [name for name in checkpoint.places if re.fullmatch(re.escape(found[1]) + f"(?:{readers})", name)]
    return None


def draw(random, args, size):
    factors = np.ones(size, "<f4")
    low, high = (int(np.log2(factor)) for factor in args.factors)
    for channel in random.choice(size, min(args.channels, size), replace=False):
        factors[channel] = 2.0 ** random.integers(low, high + 1)
    return factors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--channels", type=int, default=4, help="outliers of each norm and of each up (default: 4)")
    parser.add_argument("--factors", type=float, nargs=2, default=[16, 256], help="between which (default: 16 256)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.out.exists():
        sys.exit(f"{args.out}: is there already")
    if args.channels < 1 or not 1 <= args.factors[0] <= args.factors[1] <= 2**15:
        low, high = args.factors
        sys.exit(f"--channels {args.channels} --factors {low:g} {high:g}: expected a channel at least, 1 <= LOW <= "
                 "HIGH <= 32768")
    random, checkpoint = np.random.default_rng(args.seed), Checkpoint(args.model)
    norms = ups = 0
    for name in sorted(checkpoint.places):
        size = checkpoint.places[name][4][0]
        readers = readers_of(checkpoint, name)
        if readers:
            factors = draw(random, args, size)
            checkpoint.scale(name, factors, 0)
            for reader in readers:
                checkpoint.scale(reader, 1 / factors, 1)
            norms += 1
        if found := UP.fullmatch(name):
            factors = draw(random, args, size)
            checkpoint.scale(name, factors, 0)
            checkpoint.scale(f"{found[1]}down_proj.weight", 1 / factors, 1)
            ups += 1
    if not norms or not ups:
        sys.exit(f"{args.model}: {norms} norms and {ups} up projections by their names; expected some of both")
    shutil.copytree(args.model, args.out, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, data in checkpoint.files.items():
        (args.out / name).write_bytes(data)
    print(f"{args.out}: {args.channels} outliers in each of {norms} norms and {ups} up projections")


if __name__ == "__main__":
    main()
