#!/usr/bin/env python3
"""Figures of training beside what is asked of them, as Markdown for docs/benchmarks/training.md:

    train_table.py FILE...

Files are the JSON of `kt microbench moe --train` and lines of train_rival.py and train_speed.py, in any order. Of
several runs of the same thing the fastest counts, for everybody.
"""
import json
import pathlib
import sys

NAMES = {2048: "qwen3-30b", 7168: "deepseek-v3"}
LEAST = ((600, 0.50), (150, 0.45), (0, 0.35))  # rows an expert, share of the limit
OF_BF16, KEEPING, BACKWARD = 0.85, 0.05, 1.25
LORA = {8: 0.12, 64: 0.35}
TIMES = {"kt-kernel": 2.0}  # others: five times as fast
MEMORY = 0.5  # of theirs
MODEL = {("qwen3-30b", "tokens_per_s"): 650}
DUTY, OPTIMIZER, HAND_OVER, OVER_ALONE = 0.85, 0.05, 0.03, 1.15


def values(path):
    """Objects of a file: one, an array, several of these after each other, or a line each."""
    text, decoder, at = pathlib.Path(path).read_text(), json.JSONDecoder(), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        value, at = decoder.raw_decode(text, at)
        yield from value if isinstance(value, list) else [value]


def table(heads, rows):
    if not rows:
        return
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    print()
    for number, row in enumerate((heads, ["-" * width for width in widths], *rows)):
        print("| " + " | ".join(cell.ljust(w) if i < 2 or number == 1 else cell.rjust(w)
                                for i, (cell, w) in enumerate(zip(row, widths))) + " |")


def share(value, least=None, most=None):
    """12.3 %, and a mark where it is not what is asked."""
    below = least is not None and value < least or most is not None and value > most
    return f"{100 * value:.1f} %" + (" (!)" if below else "")


def layers(rows):
    """Ours, of all threads that were tried the best."""
    best = {}
    for row in rows:
        key = (NAMES.get(row["hidden"], "?"), row["experts"], row["format"], row["tokens"], row["rank"])
        if key not in best or row["forward_backward"]["us"] < best[key]["forward_backward"]["us"]:
            best[key] = row
    lines = []
    for key, row in sorted(best.items(), key=lambda item: (item[0][0], item[0][3], item[0][4], item[0][2])):
        least = next(asked for rows_from, asked in LEAST if row["rows_per_expert"] >= rows_from)
        both = row["forward_backward"]
        beside = both.get("of_bf16_forward")
        lines.append([f"{key[0]}, {key[1]} experts", row["format"], str(row["tokens"]), f"{row['rows_per_expert']:.0f}",
                      str(row["rank"]), str(row["threads"]), f"{row['forward']['us'] / 1e3:.1f}",
                      share(row["forward"]["fraction_of_limit"]),
                      share(row["keeping_on_top"], most=KEEPING), share(row["lora_on_top"], most=LORA.get(row["rank"])),
                      f"{row['backward']['us'] / 1e3:.1f}",
                      f"{row['backward_over_forward']:.2f}x" + (" (!)" if row["backward_over_forward"] > BACKWARD
                                                                else ""),
                      f"{both['us'] / 1e3:.1f}",
                      share(both["fraction_of_limit"], least=least if row["rank"] == 8 else None),
                      "-" if beside is None
                      else f"{beside:.2f}x" + (" (!)" if beside < OF_BF16 and row["rank"] == 8 else "")])
    table(["layer", "format", "tokens", "rows", "rank", "threads", "forward ms", "of limit", "keeping", "LoRA",
           "backward ms",
           "x forward", "both ms", "of limit", "of bf16's forward"], lines)
    return best


def rivals(rows, ours):
    best = {}
    for row in rows:
        key = (row["shape"], row["tokens"], row["kind"], row["dtype"])
        if "error" in row:
            best.setdefault(key, row)
        elif key not in best or "error" in best[key] or row["both_ms"] < best[key]["both_ms"]:
            best[key] = row
    lines = []
    for (shape, tokens, kind, dtype), row in sorted(best.items()):
        mine = next((r for k, r in ours.items() if k[0] == shape
                     and k[2:] == ("bf16" if dtype == "f32" else dtype, tokens, row["rank"])),
                    None)
        name = [shape, f"{kind}, {dtype}", str(tokens)]
        if "error" in row:
            lines.append([*name, "-", row["error"][:60], "-", "-", "-", "-", "-"])
            continue
        of_layer = (row["weights_bytes"] / row["layers"] + row["above_weights_bytes"]) / 2**30
        known = row["weights_bytes"] > 0  # kt-kernel's own memory does not say what of it is weights
        ratio = takes = "-"
        if mine:
            times = row["both_ms"] * 1e3 / mine["forward_backward"]["us"]
            ratio = f"{times:.2f}x" + (" (!)" if times < TIMES.get(kind, 5.0) else "")
            memory = mine["memory"]
            takes = memory["packed_bytes"] / mine["layers"] + memory["kept_bytes"] + memory["workspace_bytes"]
            takes = (takes + memory["lora_bytes"]) / 2**30
            takes = f"{takes:.2f}" + (" (!)" if known and takes > MEMORY * of_layer else "")
        lines.append([*name, str(row["threads"]), f"{row['forward_ms']:.1f}", f"{row['backward_ms']:.1f}",
                      f"{row['both_ms']:.1f}",
                      ratio, f"{of_layer:.2f}" if known else "-", takes])
    table(["layer", "rival", "tokens", "threads", "forward ms", "backward ms", "both ms", "kt is", "its GiB",
           "kt's GiB"], lines)


def models(rows):
    lines = []
    for row in rows:
        least = MODEL.get((row["shape"], "tokens_per_s"))
        speed = f"{row['tokens_per_s']:.0f}" + (" (!)" if least and row["tokens_per_s"] < least else "")
        over = row["over_both_alone"]
        lines.append([f"{row['shape']}, {row['layers']} layers", f"{row['format']}, {row['device']}",
                      str(row["tokens"]), speed,
                      f"{row['step_s']:.2f}", share(row["duty"], least=DUTY), f"{row['experts_tflops']:.2f}",
                      share(row["optimizer_share"], most=OPTIMIZER), share(row["hand_over_share"], most=HAND_OVER),
                      f"{over:.2f}x" + (" (!)" if over > OVER_ALONE else ""), f"{row['resident_bytes'] / 2**30:.1f}"])
    table(["model", "experts, device", "tokens", "tokens/s", "step s", "duty", "experts' TFLOPS", "optimizer",
           "hand-over",
           "step / both alone", "GiB"], lines)


def main():
    found = [row for path in sys.argv[1:] for row in values(path)]
    ours = layers([row for row in found if "forward_backward" in row])
    rivals([row for row in found if "kind" in row], ours)
    models([row for row in found if "over_both_alone" in row])


if __name__ == "__main__":
    main()
