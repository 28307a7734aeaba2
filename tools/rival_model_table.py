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


def ours(folder, pattern, key):
    return best((document["points"][0][key], threads) for threads, document in documents(folder, pattern))


def main():
    folder = pathlib.Path(sys.argv[1])
    batch = best((row["speed_tg"], threads) for threads, rows in documents(folder, "llama-batch-*.jsonl") for row in rows)
    rows = [
        ("prefill, 1024 tokens", llama(folder, "llama-[0-9]*.json", lambda r: r["n_prompt"] > 0),
         ours(folder, "kt-[0-9]*.json", "prefill_tokens_per_s")),
        ("decode", llama(folder, "llama-[0-9]*.json", lambda r: r["n_gen"] > 0),
         ours(folder, "kt-[0-9]*.json", "decode_tokens_per_s")),
        ("decode, 8 sequences", batch, ours(folder, "kt-batch-*.json", "decode_tokens_per_s")),
        ("decode after 8192 tokens", llama(folder, "llama-deep-*.json", lambda r: r["n_gen"] > 0),
         ours(folder, "kt-deep-*.json", "decode_tokens_per_s")),
    ]
    print("| tokens/s | llama.cpp (threads) | kt (threads) | ratio |")
    print("|---|---|---|---|")
    for name, (theirs, their_threads), (mine, my_threads) in rows:
        ratio = f"{mine / theirs:.2f}" if theirs else "-"
        print(f"| {name} | {theirs:.0f} ({their_threads}) | {mine:.0f} ({my_threads}) | {ratio} |")


if __name__ == "__main__":
    main()
