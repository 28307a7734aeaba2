"""Decoded GGUF blocks against the `gguf` package, bit for bit, on random blocks of every type.

Needs numpy, gguf and the program formats_probe, named by KT_FORMATS_PROBE.
"""
import os
import subprocess

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

PROBE = os.environ.get("KT_FORMATS_PROBE")
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_FORMATS_PROBE does not name the formats_probe program")

# Offsets of the f16 numbers in a block.
HALVES = {
    "F32": [], "F16": [0], "BF16": [], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
    "MXFP4": [], "NVFP4": [],
}
PLAIN = ("F32", "F16", "BF16")
# Looked up in grids: read and written, never rounded to.
GRIDS = {"IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0], "IQ1_S": [0], "IQ1_M": []}


def probe(verb, name, n, k, data):
    return subprocess.run([PROBE, verb, name, str(n), str(k)], input=data, stdout=subprocess.PIPE, check=True).stdout


def random_blocks(name, n, k, rng):
    size, width = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    blocks = rng.integers(0, 256, (n * k // size, width), dtype=np.uint8)
    for offset in {**HALVES, **GRIDS}[name]:
        # Any finite f16: normal, denormal, both signs, both zeros; NaN and infinity never come from a quantiser.
        halves = rng.integers(0, 0x7C00, len(blocks), dtype=np.uint16)
        halves[::7] %= 0x400
        halves[::11] = 0
        halves |= rng.integers(0, 2, len(blocks), dtype=np.uint16) << 15
        blocks[:, offset:offset + 2] = halves.astype("<u2").view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] %= 255  # 255 is NaN
    if name == "NVFP4":
        blocks[:, :4] %= 127  # no sign, and 127 is NaN
    if name == "IQ1_M":  # the f16's exponent is in the top nibble and the bits below it
        blocks[:, 55] &= 0xBF
    if name in ("F32", "BF16"):
        values = rng.standard_normal(len(blocks)).astype(np.float32)
        blocks = (values.view(np.uint8) if name == "F32"
                  else (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
    return np.ascontiguousarray(blocks).reshape(n, -1)


@pytest.mark.parametrize("name", [*HALVES, *GRIDS])
@pytest.mark.parametrize("verb", ["values", "again"])
def test_values_are_bit_exact(name, verb):
    n, k = 300 if name in GRIDS else 37, 1024  # every entry of the grids occurs
    blocks = random_blocks(name, n, k, np.random.default_rng(20))
    with np.errstate(over="ignore"):
        expected = dequantize(blocks, GGMLQuantizationType[name]).astype(np.float32, copy=False)
    assert expected.shape == (n, k)
    got = np.frombuffer(probe(verb, name, n, k, blocks.tobytes()), np.float32).reshape(n, k)
    assert np.array_equal(got.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


@pytest.mark.parametrize("name", HALVES)
def test_written_blocks_are_read_alike(name):
    n, k = 5, 768
    rng = np.random.default_rng(21)
    values = (rng.standard_normal((n, k)) * 0.02).astype(np.float32)
    blocks = np.frombuffer(probe("blocks", name, n, k, values.tobytes()), np.uint8).reshape(n, -1)
    expected = dequantize(blocks, GGMLQuantizationType[name]).astype(np.float32, copy=False)
    got = np.frombuffer(probe("values", name, n, k, blocks.tobytes()), np.float32).reshape(n, k)
    assert np.array_equal(got, expected)
    # Gaussian weights: the relative error each bit width must beat, loosely.
    bound = {"Q2_K": 0.40, "Q3_K": 0.22, "Q4_0": 0.13, "IQ4_NL": 0.13, "IQ4_XS": 0.13, "Q4_1": 0.12, "Q4_K": 0.12,
             "MXFP4": 0.16, "NVFP4": 0.13, "Q5_0": 0.07, "Q5_1": 0.06, "Q5_K": 0.06, "Q6_K": 0.03,
             "Q8_0": 0.01}.get(name, 0.003)
    error = np.linalg.norm(got - values) / np.linalg.norm(values)
    assert error < bound


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_rounding_is_no_worse_than_the_reference(name):
    n, k = 16, 1024
    values = np.random.default_rng(22).standard_normal((n, k)).astype(np.float32)
    kind = GGMLQuantizationType[name]
    ours = dequantize(np.frombuffer(probe("blocks", name, n, k, values.tobytes()), np.uint8).reshape(n, -1), kind)
    theirs = dequantize(quantize(values, kind), kind)
    assert np.linalg.norm(ours - values) <= 1.02 * np.linalg.norm(theirs - values)


@pytest.mark.parametrize("name", GRIDS)
def test_grids_are_not_rounded_to(name):
    done = subprocess.run([PROBE, "blocks", name, "1", "256"], input=b"\0" * 1024, capture_output=True)
    assert done.returncode == 1 and name.lower() in done.stderr.decode() and b"not rounded to it" in done.stderr


def test_wrong_size_is_an_error():
    done = subprocess.run([PROBE, "values", "Q4_K", "2", "256"], input=b"\0" * 287, capture_output=True)
    assert done.returncode == 1 and b"expected 288 bytes" in done.stderr and b"found 287" in done.stderr
