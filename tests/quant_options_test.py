"""Options of `kt quant` and `kt quant gpu`: what is refused, what is warned about. KT_PROGRAM names kt."""
import json
import os

import numpy as np
import pytest

import checkpoints
from checkpoints import bf16, digests, from_bf16, kt, kt_ok, refused

pytestmark = pytest.mark.skipif(not checkpoints.KT, reason="KT_PROGRAM does not name the kt program")
DEMO = checkpoints.ROOT / "demo" / "tiny-deepseekv3"
RTN = ["--method", "RTN", "--type", "W4A16", "--group-size", "64"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(f"The fox counted to {n}, and the owl to {n + 1}." for n in range(40)))
    return path


def gpu(out, *more):
    return ["quant", "gpu", DEMO, "-o", out, *more]


@pytest.mark.parametrize("option, value, message", [
    ("--dampening-frac", "nan", "0 to 10"), ("--dampening-frac", "-1", "0 to 10"),
    ("--dampening-frac", "inf", "0 to 10"),
    ("--seed", "-1", "whole number"), ("--seed", "18446744073709551616", "whole number"),
    ("--seed", "x", "whole number"),
    ("--actorder", "group", "actorder"), ("--max-cpu-memory", "", "size"), ("--group-size", "48", "multiple of 32"),
])
def test_values_without_meaning(tmp_path, text, option, value, message):
    given = [f"{option}={value}"] if value else [option, value]
    refused(kt(*gpu(tmp_path / "out", "--dataset", text, *given)), 2, option, message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ["0x10GiB", "ten", "-1GiB", "inf", "nanGiB", "1XB"])
def test_sizes_are_named_by_the_flag_that_was_given(tmp_path, value):
    refused(kt(*gpu(tmp_path / "out", *RTN, f"--max-cpu-memory={value}")), 2, "--max-cpu-memory", value)


def test_one_bound_on_memory(tmp_path):
    refused(kt(*gpu(tmp_path / "out", *RTN, "--max-memory", "10GiB", "--max-cpu-memory", "1MiB")), 2,
            "--max-cpu-memory")


def test_group_sizes_that_are_offered_are_taken(tmp_path):
    refused(kt(*gpu(tmp_path / "out", "--method", "RTN", "--type", "W4A16", "--group-size", "96")), 2, "group size 96",
            "columns; 32, 64, 128, 256 or -1")


def test_groups_of_256(tmp_path):
    """The sizes that are offered come from the formats; codes and scales against the rule in numpy, to the bit."""
    assert "--group-size 32|64|128|256 " in kt_ok("quant", "--help").stdout
    refused(kt("quant", DEMO, "-o", tmp_path / "out", "--group-size", "512"), 2, "--group-size", "512", "256")
    model = checkpoints.Model(tmp_path / "model", hidden=512, inter=256).save()
    kt_ok("quant", model.folder, "-o", tmp_path / "out", "--group-size", "256")
    tensors, _ = checkpoints.read_folder(tmp_path / "out")
    for place, values in model.values.items():
        groups = values.reshape(len(values), -1, 256)
        scales = bf16(np.abs(groups).max(2) / np.float32(7.5))
        quotients = from_bf16(bf16(groups / from_bf16(scales)[..., None]))
        codes = (np.rint(quotients.clip(-8, 7)) + 8).astype("u1").reshape(len(values), -1)
        stored = {tail: tensors[f"{model.name(*place)}.{tail}"][2] for tail in ("weight_scale", "weight_packed")}
        assert stored == {"weight_scale": scales.tobytes(),
                          "weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).tobytes()}


def test_a_model_behind_the_patterns(tmp_path):
    refused(kt("quant", "gpu", "-o", tmp_path / "out", *RTN, "--ignore", "lm_head", DEMO), 2, "MODEL", "--ignore")


def test_patterns_that_match_nothing(tmp_path):
    result = kt_ok(*gpu(tmp_path / "out", *RTN, "--ignore", "nosuchmodule", r"re:.*lm_head"))
    assert "ignored by nosuchmodule" in result.stderr and "lm_head:" not in result.stderr


def test_patterns_are_bounded(tmp_path):
    for pattern, message in (("re:(.*)*(.*)*z$", "repetition of what may be empty at byte"),
                             ("re:(.+)+(.+)+z$", "takes more than 200000 steps"),
                             ("re:" + "(" * 20000, "a pattern of 20000 bytes")):
        refused(kt(*gpu(tmp_path / "out", *RTN, "--ignore", pattern)), 2, message)


def test_an_instruction_set_that_is_none(tmp_path):
    refused(kt("quant", DEMO, "-o", tmp_path / "out", env=os.environ | {"KT_ISA": "garbage"}), 2,
            "unknown ISA 'garbage'")
    assert not (tmp_path / "out").exists()


def test_experts_left_out_are_warned_about(tmp_path):
    result = kt_ok(*gpu(tmp_path / "out", *RTN, "--ignore", r"re:.*layers\.1\.mlp\.experts\.3\..*"))
    assert "3 of " in result.stderr and "transformers" in result.stderr


def test_a_rounded_source(tmp_path):
    kt_ok(*gpu(tmp_path / "once", *RTN))
    assert "already" not in kt_ok(*gpu(tmp_path / "again", *RTN)).stderr
    result = kt_ok("quant", "gpu", tmp_path / "once", "-o", tmp_path / "twice", *RTN)
    assert "already" in result.stderr and "W4A16" in result.stderr


def test_weights_for_the_cpu_are_no_source(tmp_path):
    kt_ok("quant", DEMO, "-o", tmp_path / "cpu")
    for verb in (["quant"], ["quant", "gpu"]):
        refused(kt(*verb, tmp_path / "cpu", "-o", tmp_path / "out"), 2, str(tmp_path / "cpu"),
                "converted for the CPU already")


def test_options_of_weights_without_groups(tmp_path):
    refused(kt("quant", DEMO, "-o", tmp_path / "out", "--group-size", "64", "--report"), 2, "--report")
    result = kt_ok("quant", DEMO, "-o", tmp_path / "out", "--group-size", "64", "--numa-nodes", "3")
    assert "--numa-nodes 3" in result.stderr


def test_activation_order_can_be_left_out(tmp_path, text):
    outputs = {}
    for order in ("static", "none"):
        out = tmp_path / order
        kt_ok(*gpu(out, "--type", "W4A16", "--group-size", "64", "--dataset", text, "--actorder", order))
        outputs[order] = digests(out)
        assert json.loads((out / "kt_calibration.json").read_text())["settings"]["actorder"] == order
        config = json.loads((out / "config.json").read_text())
        assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] is None
    weights = [name for name in outputs["none"] if name.endswith(".safetensors")]
    assert any(outputs["none"][name] != outputs["static"][name] for name in weights)
    # what was begun in one order is not finished in the other
    refused(kt(*gpu(tmp_path / "static", "--type", "W4A16", "--group-size", "64", "--dataset", text,
                    "--actorder", "none", "--resume")), 2, "actorder")
