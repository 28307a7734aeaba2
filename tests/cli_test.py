"""The kt program from outside: lines and keys people parse, exit codes, one-line errors. KT_PROGRAM names it."""
import json
import os
import re
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


@pytest.mark.skipif(not os.environ.get("KT_TEST_CUDA"),
                    reason="KT_TEST_CUDA does not name the folder of the test driver")
def test_version_of_cuda():
    folder = os.environ["KT_TEST_CUDA"]
    assert re.fullmatch(r"CUDA: \d+\.\d+", kt("version", LD_LIBRARY_PATH=folder).stdout.splitlines()[2])
    assert kt("version", LD_LIBRARY_PATH=folder,
              KT_TEST_CUDA_FAIL="cuDriverGetVersion=1").stdout.splitlines()[2] == "CUDA: none"


@pytest.mark.parametrize("verb", [[], ["version"], ["doctor"], ["microbench"], ["microbench", "moe"],
                                  ["microbench", "roofline"], ["microbench", "linear"], ["microbench", "attention"],
                                  ["microbench", "gptq"]])
def test_help_has_examples(verb):
    result = kt(*verb, "--help")
    assert result.returncode == 0 and "Examples:" in result.stdout


@pytest.mark.parametrize("verb", [["config", "get"], ["config", "path"], ["model", "list"], ["model", "path-add"]])
def test_help_of_a_verb_does_not_show_the_programs(verb):
    result = kt(*verb, "--help")
    assert result.returncode == 0 and "Usage:" in result.stdout
    assert "kt doctor" not in result.stdout and "Exit codes:" not in result.stdout


@pytest.mark.parametrize("code, args, env, message", [
    (2, ["nonsense"], {}, "nonsense"),
    (2, ["microbench", "moe", "--tokens", "0"], {}, "kt microbench moe --help"),
    (2, ["microbench", "moe", "--format", "int3"], {}, "int3"),
    (2, ["microbench", "moe", "--experts", "4", "--top-k", "5"], {}, "top-k"),
    (2, ["microbench", "moe", "--train", "--rank", "0"], {}, "--rank: expected a number from 1 to 4096, got '0'"),
    (2, ["microbench", "moe", "--train", "--rank", "8,x"], {}, "--rank: expected a number from 1 to 4096, got 'x'"),
    (2, ["microbench", "moe", "--rank", "8"], {}, "--rank requires --train"),
    (2, ["microbench", "moe", "--recompute"], {}, "--recompute requires --train"),
    (2, ["microbench", "linear", "--format", "int3"], {}, "int3"),
    (2, ["microbench", "linear", "--inputs", "0"], {}, "kt microbench linear --help"),
    (2, ["microbench", "gptq", "--rows", "0"], {}, "kt microbench gptq --help"),
    (2, ["microbench", "gptq", "--experts", "4", "--top-k", "5"], {}, "top-k"),
    (2, ["microbench", "linear", "--inputs", "100", "--format", "q4_k"], {}, "100"),
    (2, ["microbench", "attention", "--heads", "30"], {}, "--kv-heads 4"),
    (2, ["microbench", "attention", "--mla", "--heads", "512"], {}, "512"),
    (2, ["microbench", "attention", "--mla", "--kv-heads", "4"], {}, "--mla"),
    (2, ["microbench", "attention", "--context", "64,1024", "--tokens", "512"], {}, "--context 64"),
    (2, ["microbench", "attention", "--kv", "int3"], {}, "int3"),
    (2, ["microbench", "mla", "--index-top-k", "64", "--window", "64"], {}, "--window"),
    (2, ["microbench", "attention", "--index-heads", "8"], {}, "--index-heads requires --index-top-k"),
    (2, ["microbench", "attention", "--index-top-k", "8", "--index-heads", "512"], {}, "512"),
    (2, ["version"], {"KT_ISA": "mmx"}, "mmx"),
    (3, ["microbench", "moe", "--layers", "100000"], {}, "--layers"),
    (3, ["microbench", "moe", "--train", "--experts", "65536", "--hidden", str(2**20), "--rank", "4096"], {}, "--rank"),
    (3, ["microbench", "linear", "--copies", "10000000"], {}, "--copies"),
    (3, ["microbench", "attention", "--layers", "10000000"], {}, "--layers"),
    (2, ["microbench", "gptq", "--rows", str(2**62)], {},
     f"--rows: expected a number from 1 to {2**24}, got '{2**62}'"),
    (2, ["microbench", "gptq", "--hidden", str(2**31 - 1)], {}, "--hidden: expected a number from 1 to 1048576"),
    (3, ["microbench", "gptq", "--rows", str(2**24), "--hidden", str(2**20)], {}, "--rows"),
    (2, ["microbench", "attention", "--batch", str(10**9)], {}, "--batch: expected a number from 1 to 65536"),
    (3, ["microbench", "attention", "--batch", "65536", "--context", str(2**24)], {}, "--batch"),
    (3, ["microbench", "attention", "--batch", "65536", "--context", "64", "--heads", "8192", "--tokens", "64",
         "--head-dim", "32", "--kv-heads", "32", "--layers", "1"], {}, "are available: try"),
    (2, ["microbench", "moe", "--experts", str(2**31 - 1)], {}, "--experts: expected a number from 1 to 65536"),
    (2, ["microbench", "moe", "--hidden", str(2**31 - 1)], {}, "--hidden: expected a number from 1 to 1048576"),
    (3, ["microbench", "moe", "--experts", "65536", "--hidden", str(2**20), "--inter", str(2**20)], {}, "--experts"),
    (2, ["microbench", "linear", "--outputs", str(2**31 - 1)], {}, "--outputs: expected a number from 1 to 1048576"),
    (3, ["microbench", "linear", "--outputs", str(2**20), "--inputs", str(2**20)], {}, "--outputs"),
    (2, ["estimate", "demo", "--max-running-requests", str(10**9)], {}, "--max-running-requests: expected"),
    (2, ["estimate", "no\x1b[31m such\x9b\u0085"], {}, "\\x1b[31m such"),
    (2, ["microbench", "gptq", "--rows", "7" * 100000], {}, "77 ... 77"),
    (2, ["\x1b]0;title\x07"], {}, "\\x1b]0;title\\x07"),
])
def test_errors_are_one_line(code, args, env, message):
    result = kt(*args, **env)
    assert result.returncode == code
    line, = result.stderr.splitlines()
    assert line.startswith("kt: ") and message in line
    assert len(line) < 3500 and not re.search(r"[\x00-\x1f\x7f-\x9f]", line)


def test_moe_json():
    result = kt("microbench", "moe", "--experts", "4", "--hidden", "256", "--inter", "128", "--top-k", "2", "--tokens",
                "1,3", "--layers", "2", "--format", "int8,bf16", "--threads", "1", "--seconds", "0.05", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["format"], row["tokens"]) for row in rows] == [("int8", 1), ("int8", 3), ("bf16", 1), ("bf16", 3)]
    for row in rows:
        assert row["us_per_layer"] > 0 and row["gb_per_s"] > 0 and row["tops"] > 0 and row["fraction_of_limit"] > 0
        assert row["limit"]["which"] in ("memory", "multiply") and row["limit"]["us"] > 0 and row["isa"]


def test_moe_training_json():
    result = kt("microbench", "moe", "--train", "--experts", "4", "--hidden", "256", "--inter", "128", "--top-k", "2",
                "--tokens", "3,40", "--layers", "7", "--format", "int8,bf16", "--rank", "4,16", "--recompute",
                "--threads", "1", "-n", "9", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["format"], row["tokens"], row["rank"]) for row in rows] == [
        (format, tokens, rank) for format in ("int8", "bf16") for tokens in (3, 40) for rank in (4, 16)]
    plain = {row["tokens"]: row["forward"]["fraction_of_limit"] for row in reversed(rows) if row["format"] == "bf16"}
    for row in rows:
        calls = [row[name] for name in ("forward", "forward_keeping", "forward_lora", "forward_training", "backward",
                                        "backward_recomputing")]
        for call in calls:
            limits_hang_together({**call, "gb_per_s": 1, "isa": row["isa"]})
            assert call["windows"] == 9 and call["limit"]["product"] == row["arithmetic"] in ("bf16", "f32")
        forward, keeping, lora, training, backward, again = calls
        assert row["keeping_on_top"] == pytest.approx(keeping["us"] / forward["us"] - 1)
        assert row["lora_on_top"] == pytest.approx(lora["us"] / forward["us"] - 1)
        assert row["training_on_top"] == pytest.approx(training["us"] / forward["us"] - 1)
        assert row["backward_over_forward"] == pytest.approx(backward["us"] / forward["us"])
        for both, first, second in ((row["forward_backward"], training, backward),
                                    (row["forward_backward_recomputing"], lora, again)):
            assert both["us"] == pytest.approx(first["us"] + second["us"])
            assert both["limit_us"] == pytest.approx(first["limit"]["us"] + second["limit"]["us"])
            assert both["fraction_of_limit"] == pytest.approx(both["limit_us"] / both["us"])
            assert both["of_plain_forward"] == pytest.approx(both["fraction_of_limit"] / forward["fraction_of_limit"])
        assert row["forward_backward"]["of_bf16_forward"] == pytest.approx(
            row["forward_backward"]["fraction_of_limit"] / plain[row["tokens"]])
        assert row["rows_per_expert"] == pytest.approx(row["tokens"] * 2 / row["experts_hit"])
        memory = row["memory"]
        assert memory["lora_bytes"] == 4 * row["rank"] * (256 + 256 + 128 + 256) * 2 * 4
        assert memory["kept_bytes"] >= row["tokens"] * 2 * 256 * 2 and memory["packed_bytes"] > 7 * 4 * 3 * 256 * 128
        assert 0 < memory["workspace_bytes"] and 0 < memory["workspace_planned_bytes"]


def limits_hang_together(row):
    assert row["us"] > 0 and row["us_best"] <= row["us"] and row["gb_per_s"] > 0 and row["fraction_of_limit"] > 0
    assert row["limit"]["which"] in ("memory", "multiply") and row["limit"]["us"] > 0 and row["isa"]
    assert row["windows"] >= 3 and row["windows_discarded"] <= row["windows"] and row["noisy"] in (True, False)


def test_linear_json():
    result = kt("microbench", "linear", "--outputs", "96", "--inputs", "256", "--tokens", "1,5", "--copies", "3",
                "--format", "int8,bf16", "--threads", "1", "--seconds", "0.05", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["format"], row["tokens"]) for row in rows] == [("int8", 1), ("int8", 5), ("bf16", 1), ("bf16", 5)]
    for row in rows:
        limits_hang_together(row)
        assert row["operations"] == 2 * 96 * 256 * row["tokens"] and row["tops"] > 0 and row["copies"] == 3


def test_figures_go_where_a_path_leads(tmp_path):
    measure = ["microbench", "linear", "--outputs", "96", "--inputs", "256", "--copies", "2", "--format", "int8",
               "--tokens", "1", "--threads", "1", "-n", "1", "-w", "1", "-o"]
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        assert kt(*measure, str(pipe)).returncode == 0
        assert json.loads(reader.communicate()[0])["format"] == "int8" and pipe.is_fifo()
    file.write_text("old")
    link.symlink_to(file)
    assert kt(*measure, str(link)).returncode == 0
    assert link.is_symlink() and json.loads(file.read_text())["format"] == "int8"
    for nowhere, why in ((tmp_path, "is a folder"), (tmp_path / "no" / "x.json", "there is no folder"),
                         ("", "found none")):
        result = kt(*measure, str(nowhere))
        assert result.returncode == 2 and result.stdout == "" and "--output" in result.stderr and why in result.stderr


def test_attention_json():
    result = kt("microbench", "attention", "--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--context", "64,130",
                "--tokens", "1,60", "--batch", "2", "--layers", "3", "--threads", "1", "--seconds", "0.05", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["context"], row["tokens"]) for row in rows] == [(64, 1), (64, 60), (130, 1), (130, 60)]
    for row in rows:
        limits_hang_together(row)
        seen = sum(range(row["context"] - row["tokens"] + 1, row["context"] + 1))
        assert row["operations"] == 2 * 2 * 4 * seen * (32 + 32) and row["tflops"] > 0
        assert row["kv_bytes"] == 2 * row["context"] * 2 * (32 + 32) * 2 and row["layers"] == 3
        assert row["us_per_1k_context"] == pytest.approx(row["us"] * 1024 / row["context"])


def test_latent_attention_json():
    result = kt("microbench", "attention", "--mla", "--context", "70", "--kv", "f32", "--layers", "2", "--threads", "1",
                "--seconds", "0.05", "--json")
    assert result.returncode == 0, result.stderr
    row = json.loads(result.stdout)
    limits_hang_together(row)
    assert (row["heads"], row["kv_heads"], row["d"], row["dv"], row["mla"]) == (16, 1, 576, 512, True)
    assert row["kv_bytes"] == 70 * 576 * 4 and row["limit"]["product"] == "f32"


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


def test_gptq_layer_is_the_sum_of_its_parts():
    report = json.loads(kt("microbench", "gptq", "--hidden", "256", "--inter", "128", "--experts", "4", "--top-k", "2",
                           "--tokens", "4096", "--rows", "256", "--threads", "1", "--seconds", "0.02", "--json").stdout)
    assert report["threads"] == 1 and len(report["parts"]) == 6
    for floor in ["moments", "rounding"]:
        parts = [part for part in report["parts"] if part["floor"] == floor]
        seconds = sum(part["ms"] / 1e3 * part["times_per_expert"] for part in parts) * report["experts"]
        assert seconds > 0 and report["layer"][floor + "_seconds"] == pytest.approx(seconds)
        assert report["layer"][floor + "_floor_seconds"] > 0
    assert {part["times_per_expert"] for part in report["parts"] if part["floor"] == "moments"} == {8}  # 2,048 rows
    assert report["memory"]["measured_peak_bytes"] > 2 * 256 * 256 * 4
    assert report["memory"]["lanes_bytes"] == report["memory"]["expert_bytes"] > 0
