#!/usr/bin/env python3
"""One MoE layer of the kt-kernel package, timed as `kt microbench moe` times ours: uniform routing, layers in turn so
that no cache holds the next one, median of the calls, for several thread counts. Prints JSON.

    rival_kt_kernel.py --package FOLDER --shape qwen3-30b --method INT8 --tokens 1,16,1024 --threads 12,14,16

FOLDER holds the unpacked wheel (kt_kernel/, and kt_kernel.libs/ where it has one). Needs torch. Each thread count runs
in a process of its own.
"""
import argparse
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import time

SHAPES = {"qwen3-30b": (128, 2048, 768, 8), "deepseek-v3": (32, 7168, 2048, 8)}


def measure(args, threads):
    import torch
    # The extension alone: the package around it wants libraries that a bare machine lacks.
    [library] = pathlib.Path(args.package, "kt_kernel").glob("_kt_kernel_ext_amx*.so")
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", library)
    kt_kernel_ext = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kt_kernel_ext)
    experts, hidden, inter, top_k = SHAPES[args.shape]
    config = kt_kernel_ext.WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
    infer = kt_kernel_ext.CPUInfer(config)
    kind = {"INT8": kt_kernel_ext.moe.AMXInt8_MOE, "INT4": kt_kernel_ext.moe.AMXInt4_MOE}[args.method]
    torch.manual_seed(1)

    def weights(n, k):
        """The same random numbers for all experts: each has memory of its own, and drawing them takes no time."""
        return (torch.randn(1, n, k) * k ** -0.5).bfloat16().repeat(experts, 1, 1)

    gate, up, down = weights(inter, hidden), weights(inter, hidden), weights(hidden, inter)
    mask = torch.zeros(experts, dtype=torch.bool)
    order = torch.arange(experts, dtype=torch.int64)
    layers = []
    for layer in range(args.layers):
        moe = kt_kernel_ext.moe.MOEConfig(experts, top_k, hidden, inter, mask.data_ptr())
        moe.layer_idx, moe.pool, moe.max_len = layer, infer.backend_, -(-max(args.tokens) // 512) * 512
        moe.gate_proj, moe.up_proj, moe.down_proj = gate.data_ptr(), up.data_ptr(), down.data_ptr()
        layers.append(kind(moe))
        infer.submit(layers[-1].load_weights_task(order.data_ptr()))
        infer.sync()
    out = {}
    for tokens in args.tokens:
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16)
        y = torch.empty_like(x)
        count = torch.tensor([tokens], dtype=torch.int32)
        shares = torch.full((tokens, top_k), 1 / top_k, dtype=torch.float32)
        routes = [torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(torch.int64).contiguous()
                  for _ in range(16)]
        times, begin, call = [], time.perf_counter(), 0
        while time.perf_counter() - begin < args.seconds or len(times) < 8:
            start = time.perf_counter()
            infer.submit(layers[call % len(layers)].forward_task(
                count.data_ptr(), top_k, routes[call % 16].data_ptr(), shares.data_ptr(), x.data_ptr(), y.data_ptr(),
                False))
            infer.sync()
            times.append((time.perf_counter() - start) * 1e6)
            call += 1
        if not torch.isfinite(y).all() or not y.any(dim=-1).all():
            sys.exit(f"{tokens} tokens: the output is not finite, or rows of it are zeros")
        out[tokens] = statistics.median(times[2:])
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda value: [int(word) for word in value.split(",")]  # noqa: E731
    parser.add_argument("--package", required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--method", choices=["INT4", "INT8"], required=True)
    parser.add_argument("--tokens", type=numbers, default=[1, 16, 1024])
    parser.add_argument("--threads", type=numbers, default=[12, 14, 16])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--limit", type=float, default=60, help="seconds for one thread count")
    parser.add_argument("--one", action="store_true", help="this process measures the single thread count given")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args, args.threads[0])))
        return
    found = {}
    for threads in args.threads:
        command = [sys.executable, *sys.argv, "--one", "--threads", str(threads)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
        except subprocess.TimeoutExpired:
            print(f"{args.shape} {args.method}, {threads} threads: over {args.limit} s", file=sys.stderr)
            continue
        if done.returncode != 0:
            print(f"{args.shape} {args.method}, {threads} threads: failed: {done.stderr.strip().splitlines()[-3:]}",
                  file=sys.stderr)
            continue
        for tokens, us in json.loads(done.stdout.strip().splitlines()[-1]).items():
            found.setdefault(tokens, {})[threads] = us
    print(json.dumps({"shape": args.shape, "method": args.method, "us_per_layer": found}))
    sys.exit(0 if found else 1)


if __name__ == "__main__":
    main()
