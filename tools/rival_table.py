#!/usr/bin/env python3
"""Ours beside the rival's: reads JSON lines of rival_kt_kernel.py and the rows of `kt microbench moe --json`.

    rival_table.py RIVAL.jsonl OURS.json...

Of several runs of the same thing the fastest counts, for both. "best" is each side's best thread count, "all" the
largest that both ran.
"""
import json
import pathlib
import sys

NAMES = {2048: "qwen3-30b", 7168: "deepseek-v3"}


def bar(shape, format, tokens):
    """How many times as fast ours has to be at the best thread counts; None: not asked for."""
    if tokens == 1:
        return 1.15 if (shape, format) == ("deepseek-v3", "int8") else 1.3
    return {"int8": 2.0, "int4": 3.0}.get(format) if tokens >= 1024 else None


def keep(table, key, threads, us):
    row = table.setdefault(key, {})
    row[threads] = min(us, row.get(threads, us))


def read(paths):
    rival, ours = {}, {}
    for line in pathlib.Path(paths[0]).read_text().splitlines():
        row = json.loads(line)
        for tokens, by_threads in row["us_per_layer"].items():
            for threads, us in by_threads.items():
                keep(rival, (row["shape"], row["method"].lower(), int(tokens)), int(threads), us)
    for path in paths[1:]:
        text = pathlib.Path(path).read_text()
        rows = json.loads(text) if text.strip() else []
        for row in rows if isinstance(rows, list) else [rows]:
            keep(ours, (NAMES.get(row["hidden"], "?"), row["format"], row["tokens"]), row["threads"],
                 row["us_per_layer"])
    return rival, ours


def main():
    rival, ours = read(sys.argv[1:])
    print(f"{'shape':12} {'format':6} {'tokens':>6} | {'kt us':>8} {'at':>3} {'rival us':>9} {'at':>3} {'ratio':>6} "
          f"{'bar':>5} {'':6} | {'all':>3} {'kt us':>8} {'rival us':>9} {'ratio':>6}")
    for key in sorted(ours):
        if key not in rival:
            continue
        mine, theirs = ours[key], rival[key]
        at, their_at = min(mine, key=mine.get), min(theirs, key=theirs.get)
        ratio, asked = theirs[their_at] / mine[at], bar(*key)
        word = "" if asked is None else "met" if ratio >= asked else "below"
        line = (f"{key[0]:12} {key[1]:6} {key[2]:6} | {mine[at]:8.0f} {at:3} {theirs[their_at]:9.0f} {their_at:3} "
                f"{ratio:6.2f} {asked or '':>5} {word:6} |")
        if common := set(mine) & set(theirs):
            most = max(common)
            line += f" {most:3} {mine[most]:8.0f} {theirs[most]:9.0f} {theirs[most] / mine[most]:6.2f}"
        print(line)


if __name__ == "__main__":
    main()
