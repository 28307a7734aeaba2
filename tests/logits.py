"""Logits from the program model_probe, which KT_MODEL_PROBE names, and how they are compared: what the tests of whole
models share."""

import os
import pathlib
import random
import subprocess

import numpy as np

PROBE = os.environ.get("KT_MODEL_PROBE")


def prompt(tokens, vocabulary, seed=0):
    numbers = random.Random(1000 * seed + tokens)
    return [numbers.randrange(vocabulary) for _ in range(tokens)]


def probe(folder, sequences, vocabulary, *options, **environment):
    """Logits [tokens of all sequences, vocabulary]."""
    lines = "".join(" ".join(map(str, ids)) + "\n" for ids in sequences)
    done = subprocess.run(
        [PROBE, str(folder), "--acts", "f32", *options], input=lines.encode(), capture_output=True, timeout=600,
        env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr.decode(errors='replace')}"
    rows = sum(map(len, sequences))
    assert len(done.stdout) == 4 * rows * vocabulary, f"{len(done.stdout)} bytes for {rows} rows of {vocabulary}"
    return np.frombuffer(done.stdout, "<f4").reshape(rows, vocabulary)


def has_tile_unit():
    cpu = pathlib.Path("/proc/cpuinfo")
    return cpu.exists() and "amx_int8" in cpu.read_text()


def probe_exactly(folder, sequences, vocabulary, *options):
    """With integer weights of one scale a row, logits to the bit whatever runs together. Where there is a tile unit it
    is left alone: it rounds many rows otherwise than few (docs/server.md)."""
    environment = {"KT_ISA": "avx512_bf16"} if has_tile_unit() else {}
    return probe(folder, sequences, vocabulary, "--acts", "int8", *options, **environment)


def differences(ours, theirs):
    """max|a - b| / max|b| of each position; anything that is not finite is infinite."""
    assert ours.shape == theirs.shape
    error = np.abs(ours - theirs).max(axis=1) / np.abs(theirs).max(axis=1)
    return np.where(np.isfinite(error), error, np.inf)


def check_but_for_ties(ours, theirs, bound, share=0.1):
    """Where weights are rounded on one side, a token whose experts are chosen by a hair takes others there, and some
    tokens behind it see that: at most this share of the positions."""
    error = differences(ours, theirs)
    beyond = int((error > bound).sum())
    assert beyond <= share * len(error), (f"{beyond} of {len(error)} positions are beyond {bound:g}: "
                                          f"{error.max():.3g} at most")
    assert np.isfinite(error).all()


def check(ours, theirs, bound):
    error = differences(ours, theirs)
    worst = int(error.argmax())
    assert error[worst] <= bound, (
        f"position {worst} of {len(error)}: {error[worst]:.3g}, allowed {bound:g}; "
        f"{int((error > bound).sum())} positions are beyond, the first is {int((error > bound).argmax())}"
    )
