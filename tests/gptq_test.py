"""Calibrated rounding against a plain reference: the textbook formulation, with the Cholesky factor of H^-1, in f64.

Needs gptq_probe, named by KT_GPTQ_PROBE.
"""
import os
import subprocess

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")

PROBE = os.environ.get("KT_GPTQ_PROBE")
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_GPTQ_PROBE does not name the gptq_probe program")

# name -> columns of a scale; 0: the row's
FORMATS = {"int4_g32": 32, "int4_g128": 128, "int4_g128_zero": 128, "int8": 0, "int4": 0, "w4a16_g128": 128,
           "w8a16_g128": 128}


def bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


# --- the reference ---
def grid(name, w):
    """scale, zero point, lowest and highest code of rows w, as round-to-nearest chooses them"""
    amax = np.abs(w).max(1)
    if name == "int8":
        return (amax * np.float32(1 / 127)).astype(np.float32), 0, -127, 127
    if name == "int4":
        return (amax / np.float32(112) * np.float32(16)).astype(np.float32), 0, -7, 7
    if name.endswith("_zero"):
        low, high = np.minimum(w.min(1), 0), np.maximum(w.max(1), 0)
        scale = ((high - low).astype(np.float32) / np.float32(15)).astype(np.float16).astype(np.float32)
        zero = np.clip(np.rint(-low / scale), 0, 15)
        return scale, zero, -zero, 15 - zero
    if name == "w8a16_g128":
        return bf16(bf16(amax) / np.float32(127.5)), 0, -128, 127
    return bf16((bf16(amax) if name == "w4a16_g128" else amax.astype(np.float32)) / np.float32(7.5)), 0, -8, 7


def searched(name, w, weight, steps, least):
    """of the grid's scale and smaller ones, the one with the least weighed squared error"""
    scale, zero, low, high = grid(name, w)
    if not steps:
        return scale, zero, low, high
    best, chosen = np.full(len(w), np.inf), scale.copy()
    for step in range(steps + 1):
        now = bf16(((1 - (1 - least) * step / steps) * scale.astype(np.float64)).astype(np.float32)).astype(np.float64)
        off = w - np.clip(np.rint(w / now[:, None]), low, high) * now[:, None]
        error = (off**2 * weight).sum(1)
        chosen[error < best] = now[error < best]
        best = np.minimum(best, error)
    return chosen, zero, low, high


def gptq(name, w, h, damping, act_order, steps=0, least=1.0):
    w, h = w.astype(np.float64), h.copy()
    n, k = w.shape
    group = FORMATS[name] or k
    h[np.diag_indices(k)] += damping * np.mean(np.diag(h))
    order = np.argsort(-np.diag(h), kind="stable") if act_order else np.arange(k)
    upper = np.linalg.cholesky(np.linalg.inv(h[order][:, order])).T
    weight = np.empty(k)
    weight[order] = np.diag(upper)**-2.0
    grids = {g: searched(name, w[:, g:g + group], weight[g:g + group], steps, least) for g in range(0, k, group)}
    now, codes = w[:, order], np.zeros((n, k))
    for i, column in enumerate(order):
        g = column // group * group
        if not act_order and column == g:
            grids[g] = searched(name, now[:, g:g + group], weight[g:g + group], steps, least)
        scale, zero, low, high = grids[g]
        q = np.clip(np.rint(now[:, i] / scale), low, high)
        error = (now[:, i] - q * scale) / upper[i, i]
        now[:, i + 1:] -= np.outer(error, upper[i, i + 1:])
        codes[:, column] = q + zero
    scales = np.stack([grids[g][0] for g in range(0, k, group)], 1)
    zeros = np.stack([grids[g][1] + np.zeros(n) for g in range(0, k, group)], 1)
    return codes, scales, zeros
# --- the end of it ---


def probe(name, w, x, damping=0.01, act_order=False, steps=0, least=1.0):
    n, k = w.shape
    got = subprocess.run([PROBE, name, str(n), str(k), str(len(x)), str(damping), str(int(act_order)), str(steps),
                          str(least)], input=w.tobytes() + x.tobytes(), capture_output=True)
    assert got.returncode == 0, got.stderr.decode()
    raw, at = got.stdout, 0

    def take(dtype, *shape):
        nonlocal at
        count = int(np.prod(shape))
        part = np.frombuffer(raw, dtype, count, at).reshape(shape)
        at += part.nbytes
        return part

    h = take("<f4", k, k).astype(np.float64)
    h = np.tril(h) + np.tril(h, -1).T
    codes = take("i1" if name in ("int8", "w8a16_g128") else "u1", n, k).astype(np.float64)
    groups = -(-k // FORMATS[name]) if FORMATS[name] else 1
    if name in ("int8", "int4"):
        scales = take("<f4", n, groups)
    elif name.endswith("_zero"):
        scales = take("<f2", n, groups).astype(np.float32)
    else:
        scales = (take("<u2", n, groups).astype(np.uint32) << 16).view(np.float32)
    zeros = take("u1", n, groups).astype(np.float64) if name.endswith("_zero") else np.zeros((n, groups))
    used, error = take("<f8", 2)
    assert at == len(raw)
    if not name.endswith("_zero") and name not in ("int8", "w8a16_g128"):
        codes = codes - 8
    return dict(h=h, codes=codes, scales=scales, zeros=zeros, damping=used, error=error)


def data(n, k, rows, seed):
    """Weights, and inputs with strong correlations, exact in bf16."""
    random = np.random.default_rng(seed)
    mix = random.normal(size=(k, k)) * (random.random((k, 1)) < 0.1) + 0.3 * np.eye(k)
    x = random.normal(size=(rows, k)) @ mix * np.exp(random.normal(size=k))
    return random.normal(size=(n, k)).astype(np.float32), bf16(x)


def values(name, result, k):
    group = FORMATS[name] or k

    def spread(x):
        return np.repeat(x, group, 1)[:, :k]

    return (result["codes"] - spread(result["zeros"])) * spread(result["scales"].astype(np.float64))


def output_error(w, q, h):
    return np.einsum("ij,jk,ik->", w - q, h, w - q)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_reference(name, act_order):
    w, x = data(45, 320, 700, 1)
    got = probe(name, w, x, 0.01, act_order)
    h = x.astype(np.float64).T @ x.astype(np.float64)
    # f32 sums of 700 products
    np.testing.assert_allclose(got["h"], h, rtol=0, atol=700 * 2.0**-24 * np.diag(h).max())
    codes, scales, zeros = gptq(name, w, h, 0.01, act_order)
    # A value near the middle of two codes may fall to either side in f32, and such a row goes its own way from there
    # on: almost all rows are the same to the last code, and the error is the same.
    same = (got["codes"] == codes).all(1) & (got["zeros"] == zeros).all(1)
    assert same.mean() > 0.8
    np.testing.assert_allclose(got["scales"][same], scales[same], rtol=2.0**-7 if name == "int4_g32" else 2.0**-10)
    reference = dict(codes=codes, scales=scales, zeros=zeros)
    expected = output_error(w.astype(np.float64), values(name, reference, 320), h)
    error = output_error(w.astype(np.float64), values(name, got, 320), h)
    assert abs(error / expected - 1) < 0.01
    assert abs(got["error"] / error - 1) < 1e-3


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("name", ["w4a16_g128", "w8a16_g128"])
def test_what_conversions_use_equals_the_reference(name, act_order):
    """Damping of 0.5 and a search among 13 scales."""
    w, x = data(45, 384, 700, 5)
    got = probe(name, w, x, 0.5, act_order, steps=12, least=0.7)
    h = x.astype(np.float64).T @ x.astype(np.float64)
    codes, scales, zeros = gptq(name, w, h, 0.5, act_order, steps=12, least=0.7)
    same = (got["codes"] == codes).all(1)
    assert same.mean() > 0.8
    np.testing.assert_array_equal(got["scales"][same], scales[same])
    reference = dict(codes=codes, scales=scales, zeros=zeros)
    expected = output_error(w.astype(np.float64), values(name, reference, 384), h)
    error = output_error(w.astype(np.float64), values(name, got, 384), h)
    assert abs(error / expected - 1) < 0.01


def test_better_than_rounding_to_nearest():
    w, x = data(64, 256, 2000, 2)
    h = x.astype(np.float64).T @ x.astype(np.float64)
    scale, _, low, high = grid("int4_g128", w.reshape(-1, 128))
    nearest = (np.clip(np.rint(w.reshape(-1, 128) / scale[:, None]), low, high) * scale[:, None]).reshape(w.shape)
    error = output_error(w, nearest, h)
    assert probe("int4_g128", w, x)["error"] < 0.6 * error
    assert probe("int4_g128", w, x, steps=10, least=0.7)["error"] < 0.6 * error


def test_damping_is_raised_where_the_hessian_is_singular():
    w, x = data(8, 128, 20, 3)  # of rank 20
    got = probe("int4_g32", w, x, 0.0)
    assert got["damping"] > 0
    assert np.isfinite(got["error"])


def test_faults_are_named():
    w, x = data(8, 128, 20, 4)
    for name, bad, message in (("bf16", x, "bf16 has no scales"), ("fp8", x, "fp8 shares scales among rows"),
                               ("int4", x * 0, "no inputs were seen"),
                               ("int4", np.where(np.arange(128) == 7, np.nan, x).astype(np.float32), "column 7")):
        got = subprocess.run([PROBE, name, "8", "128", str(len(bad)), "0.01", "0", "0", "1"],
                             input=w.tobytes() + bad.tobytes(), capture_output=True)
        assert got.returncode == 1 and message in got.stderr.decode(), got.stderr
