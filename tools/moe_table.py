#!/usr/bin/env python3
"""Prints the JSON of `kt microbench moe` as a Markdown table, for docs/benchmarks/layers.md: moe_table.py FILE..."""
import json
import sys

HEADS = ["shape", "isa", "format", "tokens", "us/layer", "GB/s", "TOPS", "limit", "limit us", "of limit", "best", "p90",
         "dropped"]


def cells(row):
    limit = row["limit"]
    return [f"E{row['experts']} H{row['hidden']} I{row['inter']} k{row['top_k']}", row["isa"], row["format"],
            str(row["tokens"]), f"{row['us_per_layer']:.0f}", f"{row['gb_per_s']:.1f}", f"{row['tops']:.3g}",
            limit["which"], f"{limit['us']:.0f}", f"{row['fraction_of_limit']:.1%}",
            f"{row['fraction_of_limit_best']:.1%}", f"{row['fraction_of_limit_p90']:.1%}",
            f"{row['windows_discarded']}/{row['windows']}" + (" noisy" if row["noisy"] else "")]


def main():
    rows = []
    for path in sys.argv[1:]:
        with open(path) as file:
            text = file.read()
        if text.strip():
            data = json.loads(text)
            rows += [cells(row) for row in (data if isinstance(data, list) else [data])]
    widths = [max(len(line[i]) for line in [HEADS, *rows]) for i in range(len(HEADS))]
    for i, line in enumerate([HEADS, ["-" * width for width in widths], *rows]):
        print("| " + " | ".join(cell.ljust(width) if i < 2 or column < 3 else cell.rjust(width)
                                for column, (cell, width) in enumerate(zip(line, widths))) + " |")


if __name__ == "__main__":
    main()
