#!/usr/bin/env python3
"""What Python costs: the overhead of a call of kt_kernel, one MoE layer from Python against `kt microbench moe` in
turns, and growth over many calls. Prints a small table and, last, one line of JSON.

    PYTHONPATH=build/python python_speed.py --program build/bin/kt --shape qwen3-30b --method AMXINT8 --tokens 1,16

Times are medians of calls; a ratio is the median over rounds, in each of which both sides ran one after the other. The
machine should be idle.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch

from kt_kernel import KTMoEWrapper

SHAPES = {"qwen3-30b": (128, 2048, 768, 8), "deepseek-v3": (32, 7168, 2048, 8)}
FORMATS = {"AMXINT4": "int4", "AMXINT8": "int8", "BF16": "bf16"}
TINY = (8, 64, 32, 2)


def make_layer(index, shape, method, threads, tokens, on_gpu=0):
    experts, hidden, inter, top_k = shape
    wrapper = KTMoEWrapper(index, experts, top_k, hidden, inter, on_gpu, threads, 1, None, tokens, method=method)
    generator = torch.Generator().manual_seed(index)

    def draw(n, k):  # the same numbers for all experts, which takes no time; each has memory of its own
        return (torch.randn(1, n, k, generator=generator) * k**-0.5).bfloat16().repeat(experts, 1, 1)

    wrapper.load_weights_from_tensors(draw(inter, hidden), draw(inter, hidden), draw(hidden, inter))
    return wrapper


def routes(shape, tokens, count=16):
    experts, hidden, _, top_k = shape
    x = torch.randn(tokens, hidden).bfloat16()
    shares = torch.full((tokens, top_k), 1 / top_k)
    ids = [torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]) for _ in range(count)]
    return [(x, i, shares) for i in ids]


def forward_us(layers, calls, seconds):
    """(median, 10th percentile) of one forward; layers take turns. The second is what other processes disturb less:
    `kt microbench` leaves out windows in which they took a core."""
    times, call = [], 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 20:
        layer, inputs = layers[call % len(layers)], calls[call % len(calls)]
        start = time.perf_counter()
        layer.forward(*inputs)
        times.append(time.perf_counter() - start)
        call += 1
    return 1e6 * statistics.median(times), 1e6 * statistics.quantiles(times, n=10)[0]


def overhead(threads, seconds):
    """A call whose experts are all elsewhere has nothing to compute: what is left is the way there and back."""
    calls = routes(TINY, 1)
    nothing = [make_layer(0, TINY, "BF16", threads, 1, on_gpu=TINY[0])]
    tiny = [make_layer(0, TINY, "BF16", threads, 1)]
    return {"nothing_to_compute_us": forward_us(nothing, calls, seconds)[0],
            "tiny_layer_us": forward_us(tiny, calls, seconds)[0]}


def microbench(args, shape, tokens):
    experts, hidden, inter, top_k = shape
    command = [args.program, "microbench", "moe", "--json", "--format", FORMATS[args.method]]
    for name, value in (("experts", experts), ("hidden", hidden), ("inter", inter), ("top-k", top_k),
                        ("tokens", tokens),
                        ("layers", args.layers), ("threads", args.threads), ("shards", 1), ("seconds", args.seconds)):
        command += [f"--{name}", str(value)]
    row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return row["us_per_layer"], row["us_per_layer_best"]


def against_microbench(args, shape):
    layers = [make_layer(i, shape, args.method, args.threads, max(args.tokens)) for i in range(args.layers)]
    rows = []
    for tokens in args.tokens:
        calls, rounds = routes(shape, tokens), []
        for _ in range(args.rounds):
            program = microbench(args, shape, tokens)
            rounds.append((*forward_us(layers, calls, args.seconds), *program))
        row = dict(zip(("python_us", "python_best_us", "kt_us", "kt_best_us"), map(statistics.median, zip(*rounds))))
        ratios = {"ratio": statistics.median(r[0] / r[2] for r in rounds),
                  "ratio_best": statistics.median(r[1] / r[3] for r in rounds)}
        rows.append({"tokens": tokens, **row, **ratios})
    return rows


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(threads, count):
    layer, calls = make_layer(0, TINY, "BF16", threads, 1), routes(TINY, 1)
    for i in range(1000):
        layer.forward(*calls[i % len(calls)])
    memory, blocks = resident_bytes(), sys.getallocatedblocks()
    for i in range(count):
        layer.forward(*calls[i % len(calls)])
    return {"calls": count, "bytes": resident_bytes() - memory, "python_blocks": sys.getallocatedblocks() - blocks}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="build/bin/kt", help="the kt program of the same build")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b")
    parser.add_argument("--experts", type=int, help="fewer than the shape has, where memory is small")
    parser.add_argument("--method", choices=FORMATS, default="AMXINT8")
    parser.add_argument("--tokens", type=lambda text: [int(t) for t in text.split(",")], default=[1, 16])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=10000, help="for growth")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    shape = (args.experts or SHAPES[args.shape][0], *SHAPES[args.shape][1:])

    result = {"method": args.method, "shape": shape, "threads": args.threads, "load": os.getloadavg()[0]}
    result["overhead"] = overhead(args.threads, args.seconds)
    result["layer"] = against_microbench(args, shape)
    result["growth"] = growth(args.threads, args.calls)
    print(f"a call with nothing to compute  {result['overhead']['nothing_to_compute_us']:10.1f} us")
    print(f"a tiny layer, one token         {result['overhead']['tiny_layer_us']:10.1f} us")
    print("tokens   from Python us   kt microbench us   ratio   of the best")
    for row in result["layer"]:
        print(f"{row['tokens']:6d} {row['python_us']:16.1f} {row['kt_us']:18.1f} {row['ratio']:7.3f} "
              f"{row['ratio_best']:13.3f}")
    grown = result["growth"]
    print(f"growth over {grown['calls']} calls: {grown['bytes'] / 1024:.0f} KiB, {grown['python_blocks']} "
          "Python blocks")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
