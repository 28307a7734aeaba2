#!/usr/bin/env python3
"""Checks and measures experts on KT beside a GPU: run it on a machine with CUDA, torch, transformers and kt_kernel.

    PYTHONPATH=build/python python3 tools/hybrid_gpu.py [--parts graph,logits,overlap,decode] [--out FOLDER]

graph    replays of captured graphs against eager calls: batch sizes, inputs and masks that change between replays, two
         streams with two layers each in flight, deferral, a NaN; host time of a replay and of submit and sync
logits   Qwen3-MoE and DeepSeek-V3, small trained ones and larger random ones, attention on the GPU and BF16 experts on
         KT, against pure transformers: logits and greedy tokens (tools/hybrid/logits.py says how bounds are found)
overlap  a layer with experts on both sides and a shared one: each side alone, both together, and a timeline
decode   a model of the shape of Qwen3-30B-A3B under Zipf routing, whole steps as graphs: tokens/s, share of the CPU's
         bandwidth limit, gain of 10, 25 and 50 % hot experts on the GPU

Each part stands alone: one that fails is reported, the others still run. --dry goes through all of it on a machine
without a GPU, with small sizes: nothing is proved by that but that the code runs. The last line of output is one JSON
object; the exit code is 1 if a check failed or a part broke.
"""

import argparse
import importlib
import json
import os
import pathlib
import sys
import time
import traceback

import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]
from hybrid.device import Cuda, Dry  # noqa: E402

PARTS = {"graph": "graphs", "logits": "logits", "overlap": "overlap", "decode": "decode"}


def shown(value):
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def show(name, result):
    print(f"\n== {name}: {'ok' if result.get('ok') else 'FAILED'} ({result['seconds']} s)")
    if "error" in result:
        print(result["error"])
    rows = result.get("rows", [])
    heads = list(dict.fromkeys(key for row in rows for key in row))
    if not heads:
        return
    cells = [heads] + [[shown(row.get(head)) for head in heads] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip())
    for note in result.get("notes", []):
        print(note)


def run_part(name, gpu, arguments):
    """The part's result; whatever goes wrong is part of it."""
    start = time.perf_counter()
    try:
        result = importlib.import_module(f"hybrid.{PARTS[name]}").part(gpu, arguments)
    except Exception:
        result = dict(ok=False, error=traceback.format_exc())
    result["seconds"] = round(time.perf_counter() - start, 1)
    try:
        gpu.give_back()
    except Exception as error:  # a device that is gone: the other parts will say so too
        result["ok"] = False
        result.setdefault("error", str(error))
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--dry", action="store_true", help="without a GPU, small")
    parser.add_argument("--models", default=None, help="folder with tiny-qwen3moe and tiny-deepseekv3 (demo/ has one)")
    parser.add_argument("--layers", type=int, default=48, help="of the decode part")
    parser.add_argument("--formats", default="int4",
                        help="of the decode part: int4, int8, bf16, or several with commas")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the decode part's routing")
    parser.add_argument("--steps", type=int, default=96, help="of one timing of the decode part")
    parser.add_argument("--threads", type=int, default=0, help="of KT; 0: all cores")
    parser.add_argument("--program", default="build/bin/kt", help="the kt program, for the memory's read bandwidth")
    parser.add_argument("--out", default=None, help="folder for hybrid-PARTS.json and timeline.svg")
    arguments = parser.parse_args()
    chosen = arguments.parts.split(",")
    unknown = set(chosen) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; there are {', '.join(PARTS)}")
    if not arguments.dry and not torch.cuda.is_available():
        sys.exit("hybrid_gpu: torch sees no CUDA device (--dry goes without)")
    if arguments.models is None and os.environ.get("KT_TEST_DATA"):
        arguments.models = os.path.join(os.environ["KT_TEST_DATA"], "models")
    import transformers

    import kt_kernel

    transformers.utils.logging.disable_progress_bar()
    gpu = Dry() if arguments.dry else Cuda()
    report = dict(device=gpu.name(), torch=torch.__version__, transformers=transformers.__version__,
                  kt_kernel=kt_kernel.__version__, isa=kt_kernel.__cpu_variant__, cores=len(os.sched_getaffinity(0)),
                  dry=gpu.dry, parts={})
    for name in chosen:
        report["parts"][name] = run_part(name, gpu, arguments)
        show(name, report["parts"][name])
    line = json.dumps(report)
    if arguments.out:
        pathlib.Path(arguments.out, f"hybrid-{'-'.join(chosen)}.json").write_text(line + "\n")
    print("\n" + line)
    sys.exit(0 if all(part["ok"] for part in report["parts"].values()) else 1)


if __name__ == "__main__":
    main()
