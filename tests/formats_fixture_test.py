"""int8 and int4 per row against what the established converter wrote, bit for bit.

Reads tests/fixtures and the demo model; needs formats_probe, named by KT_FORMATS_PROBE.
"""
import json
import os
import pathlib
import struct
import subprocess

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")

PROBE = os.environ.get("KT_FORMATS_PROBE")
TESTS = pathlib.Path(__file__).resolve().parent
FIXTURES = TESTS / "fixtures" / "kt-weights"
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_FORMATS_PROBE does not name the formats_probe program")
SOURCE = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def safetensors(path):
    """name -> (dtype, shape, bytes)"""
    raw = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + length])
    return {name: (entry["dtype"], entry["shape"], raw[8 + length:][slice(*entry["data_offsets"])])
            for name, entry in header.items() if name != "__metadata__"}


def source_weight(projection, expert):
    folder = TESTS.parent / "demo" / "tiny-deepseekv3"
    name = f"model.layers.1.mlp.experts.{expert}.{SOURCE[projection]}.weight"
    shard = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    dtype, shape, data = safetensors(folder / shard)[name]
    assert dtype == "BF16"
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


def packed_bytes(n, k, bits):
    """Per element its byte, and whether it is the high nibble: the B-tile order of the converted files."""
    row, col = np.arange(n)[:, None], np.arange(k)[None, :]
    n_block, g = (128, 128) if bits == 4 else (64, 64)
    nb, kb = row // n_block * n_block, col // 3584 * 3584
    nbs, kbs = np.minimum(n_block, n - nb), np.minimum(3584, k - kb)
    i, n0 = (row - nb) % 32, (row - nb) // 32 * 32
    j, k0 = (col - kb) % g, (col - kb) // g * g
    start = nb * k + kb * nbs + n0 * kbs + k0 * 32
    inner = i // 16 * 1024 + j % 64 // 4 * 64 + i % 16 * 4 + j % 4
    return (start // 2 + inner, j >= 64) if bits == 4 else (start + inner, j < 0)


def fixture_codes(data, n, k, bits):
    at, high = packed_bytes(n, k, bits)
    codes = np.frombuffer(data, np.uint8)[at]
    if bits == 8:
        return codes
    nibbles = np.where(high, codes >> 4, codes & 15)
    return ((nibbles + 8) & 15).astype(np.uint8)  # two's complement -> offset 8


def ours(name, weight):
    n, k = weight.shape
    out = subprocess.run([PROBE, "quantise", name, str(n), str(k)], input=weight.tobytes(), stdout=subprocess.PIPE,
                         check=True).stdout
    return np.frombuffer(out[:n * k], np.uint8).reshape(n, k), np.frombuffer(out[n * k:], np.float32)


def check(projection, expert, bits, packed, file_scales):
    weight = source_weight(projection, expert)
    codes, scales = ours(f"int{bits}", weight)
    assert np.array_equal(codes, fixture_codes(packed, *weight.shape, bits))
    # The file's int4 scale belongs to the eight-bit step, a Format's to the nibble: a factor of 16, exact.
    step = np.float32(16 if bits == 4 else 1)
    assert np.array_equal(scales.view(np.uint32), (np.frombuffer(file_scales, np.float32) * step).view(np.uint32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("expert", [0, 1])
@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_matches_the_merged_file(bits, expert, projection):
    tensors = safetensors(FIXTURES / f"int{bits}-layer1-experts01.safetensors")
    name = f"blk.1.ffn_{projection}_exps.{expert}.numa.0"
    check(projection, expert, bits, tensors[f"{name}.weight"][2], tensors[f"{name}.scale"][2])


@pytest.mark.parametrize("expert", [0, 1])
@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_matches_the_folder(expert, projection):
    folder = FIXTURES / "folder" / "_layer_1" / "_numa_0"
    (packed,) = folder.glob(f"INT4_{projection}_{expert}_*Byte_quant_.kt")
    (scales,) = folder.glob(f"INT4_{projection}_{expert}_*Byte_scale_.kt")
    check(projection, expert, 4, packed.read_bytes(), scales.read_bytes())
