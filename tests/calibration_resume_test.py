"""`--resume` of calibrated conversions goes on with the same model, the same kernels and whole files, or refuses in one
line: weights and configurations changed in place, other instruction sets, damaged records. KT_PROGRAM names kt."""
import json
import os
import shutil
import xml.etree.ElementTree as xml

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
import checkpoints
from checkpoints import digests, kt, kt_ok, refused

pytestmark = pytest.mark.skipif(not checkpoints.KT, reason="KT_PROGRAM does not name the kt program")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A copy of a trained model, to change and to change back."""
    return writable(checkpoints.trained_model(), tmp_path_factory.mktemp("model") / "model")


def writable(model, folder):
    shutil.copytree(model, folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(
        f"Once upon a time there was a fox who counted to {n}. The fox met an owl, and they shared {n} plums."
        for n in range(40)))
    return path


def gptq(model, out, text, *more):
    return ["quant", "gpu", str(model), "-o", str(out), "--type", "W4A16", "--max-sequence-length", "64",
            "--num-calibration-samples", "8", "--dataset", str(text), *more]


def work(out):
    return out / ".kt_progress" / "work"


def killed(arguments, out):
    """kt killed once two layers are kept."""
    checkpoints.kt_killed("rename 2 layer-", *arguments)
    assert len(list(work(out).glob("layer-*.safetensors"))) == 2


@pytest.fixture(scope="module")
def whole(model, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    kt_ok(*gptq(model, out, text))
    return out


@pytest.fixture(scope="module")
def cut(model, text, tmp_path_factory):
    """The output folder of a run that was killed; tests work on copies."""
    out = tmp_path_factory.mktemp("cut") / "out"
    killed(gptq(model, out, text), out)
    return out


@pytest.fixture
def copy(cut, tmp_path):
    return shutil.copytree(cut, tmp_path / "out")


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def test_a_copy_of_the_model_goes_on_with_the_same_bytes(model, text, whole, copy, tmp_path):
    kt_ok(*gptq(writable(model, tmp_path / "elsewhere" / model.name), copy, text, "--resume"))
    assert digests(copy) == digests(whole)


@pytest.mark.parametrize("state", ["killed", "finished"])
def test_other_weights_of_the_same_size_are_refused(model, text, whole, copy, tmp_path, state):
    out = copy if state == "killed" else shutil.copytree(whole, tmp_path / "finished")
    before = digests(out)
    other = writable(model, tmp_path / "tuned")
    shard = sorted(other.glob("*.safetensors"))[-1]
    flip(shard, -5000)
    line = refused(kt(*gptq(other, out, text, "--resume")), 2, "cannot resume", f"contents.{shard.name}",
                   "before", "now")
    assert "config.json" not in line
    assert digests(out) == before


@pytest.mark.parametrize("name, change", [
    ("config.json", lambda content: json.dumps(json.loads(content) | {"rope_theta": 77777})),
    ("config.json", lambda content: json.dumps(json.loads(content) | {"num_experts_per_tok": 1})),
    ("tokenizer_config.json", lambda content: content + "\n"),
])
def test_other_settings_of_the_model_are_refused(model, text, copy, tmp_path, name, change):
    other = writable(model, tmp_path / "model")
    (other / name).write_text(change((other / name).read_text()))
    refused(kt(*gptq(other, copy, text, "--resume")), 2, "cannot resume", f"contents.{name}")


def test_plain_conversions_refuse_too(model, tmp_path):
    other = writable(model, tmp_path / "model")
    flip(sorted(other.glob("*.safetensors"))[0], -1)
    for number, verb in enumerate((["quant"], ["quant", "gpu", "--method", "RTN"])):
        out = tmp_path / str(number)
        kt_ok(*verb, str(model), "-o", str(out))
        kt_ok(*verb, str(model), "-o", str(out), "--resume")
        refused(kt(*verb, str(other), "-o", str(out), "--resume"), 2, "cannot resume", "contents.model-00001")


def test_other_kernels_are_refused_by_name(model, text, whole, copy):
    used = json.loads((copy / ".kt_progress" / "settings.json").read_text())["method"]["kernels"]
    assert json.loads((whole / "kt_calibration.json").read_text())["settings"]["kernels"] == used
    if used == "portable":
        pytest.skip("this machine has portable kernels only")
    refused(kt(*gptq(model, copy, text, "--resume"), env=os.environ | {"KT_ISA": "portable"}), 2,
            f'method.kernels "{used}" before, "portable" now', f"KT_ISA={used}")


def test_a_damaged_layer_is_rounded_again(model, text, whole, copy):
    flip(sorted(work(copy).glob("layer-*.safetensors"))[0], -100)
    result = kt_ok(*gptq(model, copy, text, "--resume"))
    line, = [line for line in result.stderr.splitlines() if "layer-" in line]
    assert "damaged" in line and "rounded again" in line
    assert digests(copy) == digests(whole)


def test_a_cut_record_says_what_it_is(model, text, whole, copy):
    settings = copy / ".kt_progress" / "settings.json"
    settings.write_text(settings.read_text()[:100])
    refused(kt(*gptq(model, copy, text, "--resume")), 2, "settings.json: damaged", "record of the conversion",
            "--overwrite")
    kt_ok(*gptq(model, copy, text, "--overwrite"))
    assert digests(copy) == digests(whole)


def test_a_record_of_an_older_version_is_refused(model, text, copy):
    settings = copy / ".kt_progress" / "settings.json"
    old = json.loads(settings.read_text())
    del old["contents"]
    settings.write_text(json.dumps(old))
    refused(kt(*gptq(model, copy, text, "--resume")), 2, "older kt", "--overwrite")


def test_the_plot_has_a_cell_for_every_expert(whole):
    report = json.loads((whole / "kt_calibration.json").read_text())
    svg = (whole / "kt_calibration.svg").read_text()
    root = xml.fromstring(svg)
    assert "<script" not in svg and "href" not in svg
    paths = [(node.get("class"), node.get("d")) for node in root.iter("{http://www.w3.org/2000/svg}path")]
    experts = [expert for layer in report["layers"] for expert in layer["experts"]]
    assert sum(d.count("M") for kind, d in paths if kind == "cells") == len(experts)
    assert sum(d.count("M") for kind, d in paths if kind == "marks") == \
        sum(expert["method"].startswith("rtn") for expert in experts)


def test_errors_of_both_ways(whole):
    report = json.loads((whole / "kt_calibration.json").read_text())
    methods = {}
    for layer in report["layers"]:
        for expert in layer["experts"]:
            methods.setdefault(expert["method"], []).append(expert)
    assert {"gptq", "rtn: few tokens"} <= set(methods)
    assert all(e["gptq_error"] == e["error"] < e["rtn_error"] for e in methods["gptq"])
    assert all(e["gptq_error"] >= e["rtn_error"] == e["error"] for e in methods.get("rtn: gptq was not better", []))
    assert all(e["gptq_error"] is None for method in ("rtn: few tokens", "rtn: no tokens")
               for e in methods.get(method, []))
