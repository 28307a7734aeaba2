#!/usr/bin/env python3
"""Writes src/formats/grids.inc, the grids of the IQ types, from the tables of PyPI `gguf`:  tools/make_grids.py

An entry is a number of 16 bits: 2 bits for each of 8 numbers, or 3 for each of 4, the first in the low bits, which
count up through the numbers that the type has (grids.cc). Entries ascend, so steps between them are written."""
import pathlib
import textwrap

from gguf import quants

OUT = pathlib.Path(__file__).resolve().parent.parent / "src" / "formats" / "grids.inc"
GRIDS = {"kIq2XxsSteps": "IQ2_XXS", "kIq2XsSteps": "IQ2_XS", "kIq2SSteps": "IQ2_S", "kIq3XxsSteps": "IQ3_XXS",
         "kIq3SSteps": "IQ3_S", "kIq1Steps": "IQ1_S"}


def entries(kind):
    kind.init_grid()
    count, numbers = kind.grid_shape
    bits = 2 if numbers == 8 else 3
    level = {value: i for i, value in enumerate(kind.grid_map)}
    return [sum(level[int(value)] << bits * i for i, value in enumerate(row))
            for row in kind.grid.reshape(count, numbers)]


def main():
    lines = ["// Made by tools/make_grids.py, which says what these are; not to be edited."]
    for name, kind in GRIDS.items():
        all_of = entries(getattr(quants, kind))
        steps = [b - a for a, b in zip([0] + all_of, all_of)]
        assert min(steps) >= 0, kind
        lines.append(f"constexpr std::array<uint16_t, {len(all_of)}> {name} = {{")
        lines += [" " + line for line in textwrap.wrap(", ".join(map(str, steps)), 116)]
        lines.append("};")
    OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
