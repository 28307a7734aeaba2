"""The kt program from outside: lines and keys people parse, exit codes, one-line errors. KT_PROGRAM names it."""
import json
import os
import subprocess

import pytest

KT = os.environ.get("KT_PROGRAM")
pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")


def kt(*args, **env):
    return subprocess.run([KT, *args], capture_output=True, text=True, env={**os.environ, **env})


def test_version_lines():
    out = kt("version", KT_ISA="portable").stdout.splitlines()
    assert [line.split(":")[0] for line in out[:5]] == ["Python", "Platform", "CUDA", "kt-kernel", "sglang"]
    assert out[3].endswith("(portable)")
    assert any(line.split() == ["portable", "runs", "in", "use"] for line in out)


@pytest.mark.parametrize("verb", [[], ["version"], ["doctor"], ["microbench"], ["microbench", "moe"],
                                  ["microbench", "roofline"]])
def test_help_has_examples(verb):
    result = kt(*verb, "--help")
    assert result.returncode == 0 and "Examples:" in result.stdout


@pytest.mark.parametrize("code, args, env, words", [
    (2, [], {}, "kt --help"),
    (2, ["nonsense"], {}, "nonsense"),
    (2, ["microbench", "moe", "--tokens", "0"], {}, "kt microbench moe --help"),
    (2, ["microbench", "moe", "--format", "int3"], {}, "int3"),
    (2, ["microbench", "moe", "--experts", "4", "--top-k", "5"], {}, "top-k"),
    (2, ["version"], {"KT_ISA": "mmx"}, "mmx"),
    (3, ["microbench", "moe", "--layers", "100000"], {}, "--layers"),
])
def test_errors_are_one_line(code, args, env, words):
    result = kt(*args, **env)
    assert result.returncode == code
    line, = result.stderr.splitlines()
    assert line.startswith("kt: ") and words in line
    assert "\033" not in result.stderr


def test_moe_json():
    result = kt("microbench", "moe", "--experts", "4", "--hidden", "256", "--inter", "128", "--top-k", "2", "--tokens",
                "1,3", "--layers", "2", "--format", "int8,bf16", "--threads", "1", "--seconds", "0.05", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["format"], row["tokens"]) for row in rows] == [("int8", 1), ("int8", 3), ("bf16", 1), ("bf16", 3)]
    for row in rows:
        assert row["us_per_layer"] > 0 and row["gb_per_s"] > 0 and row["tops"] > 0 and row["fraction_of_limit"] > 0
        assert row["limit"]["which"] in ("memory", "multiply") and row["limit"]["us"] > 0 and row["isa"]


def test_doctor_json():
    result = kt("doctor", "--cpu", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["healthy"] and report["read_gb_per_s"] > 0
    assert all(check["ok"] for check in report["kernels"])


def test_roofline_json():
    report = json.loads(kt("microbench", "roofline", "--threads", "1", "--isa", "portable", "--json").stdout)
    assert report["read_gb_per_s"] > 0 and report["s8_tops"] > 0 and report["isa"] == "portable"
    assert "bf16_tflops" in report
