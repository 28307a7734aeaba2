#!/usr/bin/env python3
"""The table of tools/x86_server.sh rival: llama.cpp's figures beside ours on one model, each at its best thread count.

    rival_model_table.py FOLDER      with llama-*.json, llama-batch-*.jsonl, kt-*.json of the script
"""
import json
import pathlib
import sys


def documents(folder, pattern):
    """(threads, parsed) of every file that matches; files of failed runs are named and left out."""
    for path in sorted(folder.glob(pattern)):
        threads = int(path.stem.rsplit("-", 1)[1])
        try:
            text = path.read_text()
            yield threads, [json.loads(line) for line in text.splitlines() if line.startswith("{")] \
                if path.suffix == ".jsonl" else json.loads(text)
        except ValueError:
            print(f"{path.name}: no figures", file=sys.stderr)


def best(figures):
    return max(figures, default=(0.0, 0))


def llama(folder, pattern, wanted):
    return best((row["avg_ts"], threads) for threads, rows in documents(folder, pattern) for row in rows if wanted(row))


def ours(folder, pattern, phase):
    """Speed, threads, the share of the machine's limit, experts of a layer that were used, share of the eight
    busiest."""
    rows = [(point[f"{phase}_tokens_per_s"], threads, point[f"{phase}_fraction_of_limit"],
             point[f"{phase}_distinct_experts"], point[f"{phase}_busiest_share"])
            for threads, document in documents(folder, pattern) for point in document["points"]]
    return max(rows, default=None)


def main():
    folder = pathlib.Path(sys.argv[1])
    batch = best((row["speed_tg"], threads) for threads, rows in documents(folder, "llama-batch-*.jsonl")
                 for row in rows)
    rows = [
        ("prefill, 1024 tokens", llama(folder, "llama-[0-9]*.json", lambda r: r["n_prompt"] > 0),
         ours(folder, "kt-[0-9]*.json", "prefill")),
        ("decode", llama(folder, "llama-[0-9]*.json", lambda r: r["n_gen"] > 0),
         ours(folder, "kt-[0-9]*.json", "decode")),
        ("decode, 8 sequences", batch, ours(folder, "kt-batch-*.json", "decode")),
        ("decode after 8192 tokens", llama(folder, "llama-deep-*.json", lambda r: r["n_gen"] > 0),
         ours(folder, "kt-deep-*.json", "decode")),
    ]
    print("| tokens/s | llama.cpp (threads) | kt (threads) | ratio | kt, of limit | experts used | busiest 8 |")
    print("|---|---|---|---|---|---|---|")
    for name, (theirs, their_threads), mine in rows:
        if not mine or not theirs:
            continue
        speed, threads, fraction, used, busiest = mine
        print(f"| {name} | {theirs:.1f} ({their_threads}) | {speed:.1f} ({threads}) | {speed / theirs:.2f} | "
              f"{fraction:.0%} | {used:.1f} | {busiest:.1%} |")


if __name__ == "__main__":
    main()
