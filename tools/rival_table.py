#!/usr/bin/env python3
"""Ours beside the rival's: reads JSON lines of rival_kt_kernel.py and the rows of `kt microbench moe --json`.

    rival_table.py RIVAL.jsonl OURS.json...
"""
import json
import pathlib
import sys

NAMES = {2048: "qwen3-30b", 7168: "deepseek-v3"}


def main():
    rival = {}
    for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
        row = json.loads(line)
        for tokens, us in row["us_per_layer"].items():
            rival[row["shape"], row["method"].lower(), int(tokens)] = (us, row["threads"][tokens])
    print(f"{'shape':12} {'format':6} {'tokens':>6} {'kt us':>9} {'rival us':>9} {'threads':>7} {'ratio':>6}")
    for name in sys.argv[2:]:
        rows = json.loads(pathlib.Path(name).read_text())
        for row in rows if isinstance(rows, list) else [rows]:
            key = (NAMES.get(row["hidden"], "?"), row["format"], row["tokens"])
            if key in rival:
                us, threads = rival[key]
                ours = row["us_per_layer"]
                print(f"{key[0]:12} {key[1]:6} {key[2]:6} {ours:9.0f} {us:9.0f} {threads:7} {us / ours:6.2f}")


if __name__ == "__main__":
    main()
