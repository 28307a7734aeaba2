#!/usr/bin/env python3
"""What rounding costs a model, as the tables of docs/benchmarks/quality.md print it: KL and perplexity by `kt
perplexity`.

    quality_table.py weights --file TEXT MODEL...       experts rounded to nearest, arithmetic in f32, against those
                                                        stored
    quality_table.py activations --file TEXT MODEL...   all matrices rounded; against the same weights in f32
                                                        arithmetic: prompts, token by token, plain bytes
                                                        (--acts int8), an int8 cache

A format `stored` leaves the weights as they are. `activations` exits with 1 where prompts cost more than --most-kl,
more than --most-loss of perplexity, or more than --most-ratio times the KL of single tokens, both above --least-kl.
"""
import argparse
import json
import subprocess
import sys

FORMATS = {"weights": "int8,int4,int4_g128,int4_g64,int4_g32",
           "activations": "int8,int4,int4_g32,int4_g128,int4_g256,int4_g32_zero,int4_g128_zero,q4_0,q4_1,q5_0,q5_1,"
                          "q8_0,iq4_nl,fp8,fp8_row,mxfp4,mxfp8,bf16"}
WAYS = {"prompts": [], "token by token": ["--chunked-prefill-size", "1"], "plain bytes": ["--acts", "int8"],
        "int8 cache": ["--kv", "int8"]}


def parsed_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=list(FORMATS))
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--file", required=True, help="the text")
    parser.add_argument("--program", default="build/bin/kt")
    parser.add_argument("--format", help="with commas; blocks of 256 columns fit no matrix of the small models, "
                                         "and are left out by default")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ways", help=f"with commas, of {', '.join(WAYS)}; default: all")
    parser.add_argument("--most-kl", type=float, help="bar; default: none")
    parser.add_argument("--most-loss", type=float, help="bar, in percent; default: none")
    parser.add_argument("--most-ratio", type=float, help="bar; default: none")
    parser.add_argument("--least-kl", type=float, default=0.0005, help="below it a ratio is noise")
    return parser.parse_args()


def measured(args, model, *more):
    command = [args.program, "perplexity", model, "--file", args.file, "--json", "--max-tokens", str(args.max_tokens),
               "--context", str(args.context), *more]
    if args.threads:
        command += ["--threads", str(args.threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return json.loads(done.stdout)


def weights_table(args):
    print(f"| experts | {' | '.join(args.models)} |\n|{'---|' * (len(args.models) + 1)}")
    stored = [measured(args, model, "--acts", "f32") for model in args.models]
    print("| stored |", " | ".join(f"{s['perplexity']:.3f}" for s in stored), "|", flush=True)
    for name in args.format.split(","):
        cells = []
        for model, base in zip(args.models, stored):
            got = measured(args, model, "--acts", "f32", "--format", name, "--kl-against", "stored")
            cells.append(f"{got['perplexity']:.3f} ({100 * (got['perplexity'] / base['perplexity'] - 1):+.2f} %), "
                         f"{got['kl']:.4f}")
        print(f"| {name} |", " | ".join(cells), "|", flush=True)
    return []


def activations_table(args):
    ways = args.ways.split(",") if args.ways else list(WAYS)
    faults = []
    print(f"| model | weights | f32 | {' | '.join(ways)} |\n|{'---|' * (len(ways) + 3)}")
    for model in args.models:
        for name in args.format.split(","):
            rounded = [] if name == "stored" else ["--format", name, "--linear-format", name]
            exact = measured(args, model, *rounded, "--acts", "f32")["perplexity"]
            got = {way: measured(args, model, *rounded, *WAYS[way], "--kl-against", "f32") for way in ways}
            cells = [f"{g['kl']:.5f}, {100 * (g['perplexity'] / exact - 1):+.2f} %, {100 * g['same_top']:.1f} %"
                     for g in got.values()]
            print(f"| {model} | {name} | {exact:.4f} |", " | ".join(cells), "|", flush=True)
            faults += [f"{model}, {name}: {fault}" for fault in missed(args, exact, got)]
    return faults


def missed(args, exact, got):
    prompts, single = got.get("prompts"), got.get("token by token")
    if not prompts:
        return
    loss = 100 * (prompts["perplexity"] / exact - 1)
    if args.most_kl and prompts["kl"] > args.most_kl:
        yield f"KL {prompts['kl']:.5f}, at most {args.most_kl}"
    if args.most_loss and loss > args.most_loss:
        yield f"perplexity {loss:+.2f} %, at most {args.most_loss} %"
    if args.most_ratio and single and prompts["kl"] > max(args.least_kl, args.most_ratio * single["kl"]):
        yield f"prompts {prompts['kl'] / single['kl']:.2f} times single tokens, at most {args.most_ratio}"


def main():
    args = parsed_arguments()
    args.format = args.format or FORMATS[args.table]
    faults = (weights_table if args.table == "weights" else activations_table)(args)
    for fault in faults:
        print("missed:", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
