#!/usr/bin/env python3
"""What rounding activations would cost a model, emulated in torch before there is a kernel for it: KL from f32, perplexity
and the same best token, as "Rounded activations" of docs/benchmarks.md has it. The input of every Linear is rounded, its
weights stay as they are. Needs torch, transformers and, for a GGUF file, gguf.

    emulate_activations.py MODEL.gguf --file TEXT span:16 span:32 far:9 far:7 bf16

span:N is a scale for N columns; far:T one scale a row, that of T times its mean size, with codes beyond a byte kept whole
(kernels/table.h), and prints the share of such codes by number of columns; bf16 is what it says.
"""
import argparse
import math
import pathlib
from collections import defaultdict

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FAR = defaultdict(list)  # by columns: the share of codes beyond a byte in each call


def by_spans(n):
    def rounded(x):
        k = x.shape[-1]
        spans = torch.nn.functional.pad(x, (0, -k % n)).unflatten(-1, (-1, n))
        scale = spans.abs().amax(-1, keepdim=True) / 127
        return (torch.round(spans / scale.clamp_min(1e-30)) * scale).flatten(-2)[..., :k]
    return rounded


def by_far_codes(times):
    def rounded(x):
        size = x.abs()
        scale = torch.minimum(size.amax(-1, keepdim=True), times * size.mean(-1, keepdim=True)).clamp_min(1e-30) / 127
        codes = torch.round(x / scale)
        FAR[x.shape[-1]].append((codes.abs() > 127).float().mean().item())
        return codes * scale
    return rounded


def way_of(word):
    kind, _, value = word.partition(":")
    if word == "bf16":
        return lambda x: x.bfloat16().float()
    if kind in ("span", "far") and value:
        return by_spans(int(value)) if kind == "span" else by_far_codes(float(value))
    raise SystemExit(f"expected span:N, far:T or bf16, '{word}' came")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="a folder or a GGUF file")
    parser.add_argument("ways", nargs="+")
    parser.add_argument("--file", required=True, type=pathlib.Path)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=3)
    args = parser.parse_args()
    ways = {word: way_of(word) for word in args.ways}
    torch.set_grad_enabled(False)
    at = dict(pretrained_model_name_or_path=args.model)
    if args.model.is_file():
        at = dict(pretrained_model_name_or_path=args.model.parent, gguf_file=args.model.name)
    tokenizer = AutoTokenizer.from_pretrained(**at)
    model = AutoModelForCausalLM.from_pretrained(**at, dtype=torch.float32).eval()
    ids = tokenizer(args.file.read_text(), return_tensors="pt").input_ids[0][: args.windows * args.context]
    ids = ids.view(args.windows, args.context)
    way = None
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (way(inputs[0]),) if way else None)

    def logits():
        return [model(window[None]).logits[0].log_softmax(-1) for window in ids]

    exact = logits()
    for word, way in ways.items():
        FAR.clear()
        got = logits()
        kl = sum((e.exp() * (e - g)).sum() for e, g in zip(exact, got)) / ids.numel()
        loss = -sum(g[:-1].gather(-1, window[1:, None]).sum() for g, window in zip(got, ids))
        same = sum((e.argmax(-1) == g.argmax(-1)).float().sum() for e, g in zip(exact, got)) / ids.numel()
        far = ", ".join(f"{100 * sum(shares) / len(shares):.2f} % far of {k}" for k, shares in FAR.items())
        print(f"{word}: KL {kl:.5f}, perplexity {math.exp(loss / (ids.numel() - args.windows)):.3f}, "
              f"the same best token {100 * same:.1f} % {far}", flush=True)


if __name__ == "__main__":
    main()
