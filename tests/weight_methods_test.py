"""`--kt-method` of `kt run`: what the weights are said to be is checked against what they are. KT_PROGRAM names kt."""
import json

import numpy as np
import pytest

import checkpoints
from checkpoints import kt, kt_ok, refused

pytestmark = pytest.mark.skipif(not checkpoints.KT, reason="KT_PROGRAM does not name the kt program")
DEMO = checkpoints.ROOT / "demo" / "tiny-deepseekv3"
METHODS = ["AMXINT4", "AMXINT8", "RAWINT4", "FP8", "FP8_PERCHANNEL", "BF16", "GPTQ_INT4", "MXFP4", "MXFP8", "LLAMAFILE",
           "MOE_INT8", "MOE_INT4"]


def random_codes(random, *shape):
    return random.integers(0, 120, shape).astype("u1")  # as E4M3 too, none of them NaN


def mxfp8(random, n, k):
    return {"weight": ("F8_E4M3", random_codes(random, n, k)),
            "weight_scale_inv": ("U8", np.full((n, k // 32), 115, "u1"))}


def mxfp4(random, n, k):
    return {"weight": ("U8", random_codes(random, n, k // 2)), "scale": ("U8", np.full((n, k // 32), 120, "u1"))}


def gptq(random, n, k):
    words = lambda *shape: ("I32", random.integers(-2**31, 2**31, shape).astype("<i4"))  # noqa: E731
    return {"qweight": words(k // 8, n), "qzeros": words(k // 64, n // 8),
            "scales": ("F16", np.full((k // 64, n), 0.01, "<f2")),
            "g_idx": ("I32", np.arange(k, dtype="<i4") // 64)}


def awq(random, n, k):
    words = lambda *shape: ("I32", random.integers(-2**31, 2**31, shape).astype("<i4"))  # noqa: E731
    return {"qweight": words(k, n // 8), "qzeros": words(k // 64, n // 8),
            "scales": ("F16", np.full((k // 64, n), 0.01, "<f2"))}


def stored_as(folder, store, quantization):
    """The demo's experts, as far as shapes go, in another dialect."""
    folder.mkdir()
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(dict(config, quantization_config=quantization)))
    random, tensors = np.random.default_rng(1), {}
    for name, (_, shape, _) in checkpoints.read_folder(DEMO)[0].items():
        if ".experts." in name:
            tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in store(random, *shape).items()}
    checkpoints.write_safetensors(folder / "model.safetensors", tensors)
    return folder


def dry(weights, method):
    return kt("run", DEMO, *(["--weights-path", weights] if weights else []), "--kt-method", method, "--dry-run")


@pytest.mark.parametrize("method, store, quantization, stored", [
    ("MXFP8", mxfp8, {}, "mxfp8"), ("MXFP4", mxfp4, {}, "mxfp4"),
    ("GPTQ_INT4", gptq, {"quant_method": "gptq", "bits": 4, "group_size": 64}, "gptq"),
    ("GPTQ_INT4", awq, {"quant_method": "awq", "bits": 4, "group_size": 64}, "awq"),
])
def test_weights_of_their_own(tmp_path, method, store, quantization, stored):
    weights = stored_as(tmp_path / "weights", store, quantization)
    done = dry(weights, method.lower())
    assert done.returncode == 0 and f"{stored} experts" in done.stdout, done.stderr
    for other in METHODS:
        if other != method:
            line = refused(dry(weights, other), 2, f"method {other} ", weights, stored, f"use method {method}")
            assert "\n" not in line


def test_the_models_own(tmp_path):
    """Converted weights' methods round what is not converted; all others have to be what is there."""
    for method in METHODS:
        done = dry(None, method)
        if method in ("BF16", "AMXINT4", "AMXINT8", "MOE_INT4", "MOE_INT8"):
            form = "bf16" if method == "BF16" else method[-4:].lower()
            assert done.returncode == 0 and f"{form} experts" in done.stdout, done.stderr
        else:
            refused(done, 2, f"method {method} ", "stored as bf16", DEMO, "use method BF16")
    kt_ok("quant", DEMO, "-o", tmp_path / "int8", "--method", "int8")
    assert dry(tmp_path / "int8", "MOE_INT8").returncode == 0
    refused(dry(tmp_path / "int8", "int4"), 2, "method AMXINT4 ", tmp_path / "int8", "int8", "use method AMXINT8")


def test_names(tmp_path, monkeypatch):
    monkeypatch.setenv("KT_HOME", str(tmp_path))
    refused(dry(None, "INT3"), 2, "--kt-method", "INT3", *METHODS)
    assert f"one of {', '.join(METHODS)}" in " ".join(kt_ok("run", "--help").stdout.split())
    refused(kt("config", "set", "run.kt-method", "INT3"), 2, "run.kt-method", "INT3", *METHODS)
    kt_ok("config", "set", "run.kt-method", "int8")
    assert "int8 experts" in kt_ok("run", DEMO, "--dry-run").stdout
    completions = kt_ok("completion", "bash").stdout
    assert all(method in completions for method in METHODS)
