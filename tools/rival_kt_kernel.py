#!/usr/bin/env python3
"""One MoE layer of the kt-kernel package, timed as `kt microbench moe` times ours: uniform routing, layers in turn so that
no cache holds the next one, median of the calls, best of several thread counts. Prints JSON.

    rival_kt_kernel.py --package FOLDER --shape qwen3-30b --method INT8 --tokens 1,16,1024 --threads 12,14

FOLDER holds the unpacked wheel (kt_kernel/). Needs torch. Each thread count runs in a process of its own.
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
        return (torch.randn(experts, n, k, dtype=torch.bfloat16) * k ** -0.5).contiguous()

    gate, up, down = weights(inter, hidden), weights(inter, hidden), weights(hidden, inter)
    mask = torch.zeros(experts, dtype=torch.bool)
    order = torch.arange(experts, dtype=torch.int64)
    layers = []
    for layer in range(args.layers):
        moe = kt_kernel_ext.moe.MOEConfig(experts, top_k, hidden, inter, mask.data_ptr())
        moe.layer_idx, moe.pool, moe.max_len = layer, infer.backend_, max(args.tokens)
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
                count.data_ptr(), top_k, routes[call % 16].data_ptr(), shares.data_ptr(), x.data_ptr(), y.data_ptr(), False))
            infer.sync()
            times.append((time.perf_counter() - start) * 1e6)
            call += 1
        out[tokens] = statistics.median(times[2:])
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda words: [int(word) for word in words.split(",")]  # noqa: E731
    parser.add_argument("--package", required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--method", choices=["INT4", "INT8"], required=True)
    parser.add_argument("--tokens", type=numbers, default=[1, 16, 1024])
    parser.add_argument("--threads", type=numbers, default=[12, 14])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--one", action="store_true", help="this process measures the single thread count given")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args, args.threads[0])))
        return
    best = {}
    for threads in args.threads:
        command = [sys.executable, *sys.argv, "--one", "--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            print(f"{args.shape} {args.method}, {threads} threads: failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            continue
        for tokens, us in json.loads(done.stdout.strip().splitlines()[-1]).items():
            if tokens not in best or us < best[tokens][0]:
                best[tokens] = (us, threads)
    print(json.dumps({"shape": args.shape, "method": args.method,
                      "us_per_layer": {tokens: us for tokens, (us, _) in best.items()},
                      "threads": {tokens: threads for tokens, (_, threads) in best.items()}}))


if __name__ == "__main__":
    main()
