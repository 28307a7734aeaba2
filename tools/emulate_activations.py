#!/usr/bin/env python3
"""What rounding activations would cost a model, emulated in torch before there is a kernel for it: KL from f32,
perplexity and the same best token, as docs/benchmarks/activations.md has it. The input of every Linear is rounded.
Needs torch, transformers and, for a GGUF file, gguf.

    emulate_activations.py MODEL.gguf --file TEXT span:16 span:32 far:9 far:7 bf16
    emulate_activations.py MODEL.gguf --file TEXT --weights q4_0 span:16 bytes:6:2048:2 bytes:6:512:1

span:N is a scale for N columns; far:T one scale a row, that of T times its mean size, with codes beyond a byte kept
whole (kernels/table.h), and prints the share of such codes by number of columns; bf16 is what it says. These leave
weights as they are. bytes:T:N:H is far:T, and weights in groups of 32 are rounded again to bytes with a scale for N
columns, except where they meet high bytes of H and more (kernels/panel.inl.h); the head, of which a prompt wants the
last row alone, is left alone. --weights q4_0 rounds weights first.
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


GROUP = 32
REACH = {}  # by Linear: the largest size that each group of its weights may have


def group_weights(linear, form):
    """Rounds the weights as asked for and notes how far their groups reach."""
    groups = linear.weight.data.unflatten(-1, (-1, GROUP))
    if form == "q4_0":
        scale = (groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8).half().float()
        codes = torch.round(groups / torch.where(scale == 0, 1, scale)).clamp(-8, 7)
        linear.weight.data = (codes * scale).flatten(-2)
        REACH[linear] = 8 * scale.abs().squeeze(-1)
    else:
        REACH[linear] = groups.abs().amax(-1)


class Bytes:
    """A Linear whose weights are bytes and whose activations are far codes."""

    def __init__(self, times, columns, huge):
        self.times, self.columns, self.huge = times, columns, huge
        self.weights = {}

    def weights_of(self, linear):
        if linear not in self.weights:
            reach, each = REACH[linear], self.columns // GROUP
            scale = torch.nn.functional.pad(reach, (0, -reach.shape[1] % each)).unflatten(-1, (-1, each)).amax(-1) / 127
            scale = scale.repeat_interleave(self.columns, -1)[:, : linear.in_features].clamp_min(1e-30)
            self.weights[linear] = torch.round(linear.weight.data / scale) * scale
        return self.weights[linear]

    def __call__(self, linear, x):
        size = x.abs()
        scale = torch.minimum(size.amax(-1, keepdim=True),
                              self.times * size.mean(-1, keepdim=True)).clamp_min(1e-30) / 127
        codes = torch.round(x / scale)
        high = torch.floor((codes + 128) / 256)
        FAR[x.shape[-1]].append((high != 0).float().mean().item())
        huge = torch.where(high.abs() >= self.huge, 256 * high, torch.zeros(()))
        out = torch.nn.functional.linear((codes - huge) * scale, self.weights_of(linear), linear.bias)
        return out + torch.nn.functional.linear(huge * scale, linear.weight)


def way_of(word):
    kind, _, value = word.partition(":")
    if kind == "bytes" and value.count(":") == 2:
        times, columns, huge = value.split(":")
        return Bytes(float(times), int(columns), int(huge))
    if word == "bf16":
        return lambda x: x.bfloat16().float()
    if kind in ("span", "far") and value:
        return by_spans(int(value)) if kind == "span" else by_far_codes(float(value))
    raise SystemExit(f"expected span:N, far:T, bytes:T:N:H or bf16, '{word}' came")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path, help="a folder or a GGUF file")
    parser.add_argument("ways", nargs="+")
    parser.add_argument("--file", required=True, type=pathlib.Path)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--weights", choices=["stored", "q4_0"], default="stored")
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

    def changed(linear, exact):
        def forward(x):
            if isinstance(way, Bytes):
                return way(linear, x) if linear in REACH else exact(x)
            return exact(way(x) if way else x)
        return forward

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            if not name.endswith("lm_head") and module.in_features % GROUP == 0:
                group_weights(module, args.weights)
            module.forward = changed(module, module.forward)

    def logits():
        return [model(window[None]).logits[0].log_softmax(-1) for window in ids]

    exact = logits()
    for word in ways:
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
