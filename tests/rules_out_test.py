"""What is decided, written back as rules and read again; one plan behind every door; experts on a GPU by rules.

KT_PROGRAM names the program, KT_TEST_CUDA the folder with the test driver's libcuda.so.1: without it what needs a GPU
is left out."""
import json
import pathlib
import sys
import urllib.request

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from gpu_model_test import CUDA, DEMO, KT, kt, with_gpu
from server_process import Server

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the program")
gpu = pytest.mark.skipif(not (pathlib.Path(CUDA) / "libcuda.so.1").exists(),
                         reason="KT_TEST_CUDA does not name the test driver")


def ok(*words, **environment):
    done = kt(*map(str, words), **environment)
    assert done.returncode == 0, (words, done.stderr)
    return done


def plan(*words):
    return json.loads(ok("estimate", DEMO, "--bandwidth", "9", "--json", *words,
                         KT_TEST_CUDA_DEVICES="2").stdout)["placement"]


def parts(found):
    """What lies where, whoever decided."""
    out = {}
    for part in found["parts"]:
        for layer in part["layers"] or [None]:
            out[part["part"], layer] = (part["device"], part["formats"])
    return out, [(copies["layers"], copies["experts"], copies["bytes"]) for copies in found["copies"]]


PLACEMENTS = [
    pytest.param(["--gpu", "off"], id="as stored"),
    pytest.param(["--gpu", "off", "--format", "int8", "--linear-format", "int4_g64"], id="flags"),
    pytest.param(["--gpu", "off", "--place", r"layers\.(1|3)\.mlp\.experts$=cpu:int4", "--place", "o_proj=cpu:q8_0",
                  "--format", "int8"], id="rules and flags"),
    pytest.param(["--gpu", "0"], id="a GPU", marks=gpu),
    pytest.param(["--gpu", "0", "--gpu-experts", "5", "--expert-placement", "random", "--linear-format", "int8"],
                 id="copies", marks=gpu),
    pytest.param(["--gpu", "0,1", "--gpu-experts", "3"], id="two GPUs", marks=gpu),
    pytest.param(["--gpu", "0,1", "--place", r"layers\.2$=cpu", "--place", "lm_head=cpu", "--gpu-experts", "2"],
                 id="layers in three places", marks=gpu),
    pytest.param(["--gpu", "0", "--place", r"layers\.2\.mlp\.experts$=cuda",
                  "--place", r"layers\.3\.mlp\.experts\.(1|7)$=cuda", "--gpu-experts", "2"],
                 id="experts by rules", marks=gpu),
]


@pytest.mark.parametrize("words", PLACEMENTS)
def test_what_is_written_places_the_same(tmp_path, words):
    first, again = tmp_path / "first.yaml", tmp_path / "again.yaml"
    made = plan(*words, "--rules-out", first)
    read = plan("--rules", first, "--rules-out", again)
    assert parts(made) == parts(read)
    assert made["bytes"] == read["bytes"] and made["cache"] == read["cache"]
    assert first.read_text() == again.read_text()
    assert read["rules"] == str(first) and read["idle"] == []


def test_every_door_writes_it(tmp_path):
    first = tmp_path / "estimate.yaml"
    plan("--gpu", "off", "--format", "int8", "--rules-out", first)
    for verb in (["run", DEMO, "--dry-run"], ["generate", DEMO, "-p", "x", "--max-tokens", "1"]):
        path = tmp_path / verb[0]
        ok(*verb, "--gpu", "off", "--format", "int8", "--rules-out", path)
        assert path.read_text() == first.read_text()


def test_it_is_written_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "none"
    done = kt("estimate", str(DEMO), "--gpu", "off", "--rules-out", str(folder / "r.yaml"))
    assert done.returncode == 2 and "r.yaml" in done.stderr and not folder.exists()
    path = tmp_path / "r.yaml"
    path.write_text("- match: {name: nothing}\n  replace: {}\n")
    before = path.read_text()
    done = kt("estimate", str(DEMO), "--gpu", "off", "--rules", str(path), "--rules-out", str(path))
    assert done.returncode == 2 and path.read_text() == before


@gpu
def test_what_does_not_fit_is_not_written_and_names_rules(tmp_path):
    path = tmp_path / "r.yaml"
    done = kt("estimate", str(DEMO), "--gpu", "0", "--gpu-memory", "1MiB", "--place", r"layers\.\d+\.self_attn=cuda",
              "--place", "lm_head=cuda", "--rules-out", str(path))
    assert done.returncode == 3 and not path.exists(), done.stderr
    line, = [line for line in done.stderr.splitlines() if line.startswith("kt: GPU 0")]
    assert "; of --place " in line and " takes " in line, line
    assert sorted(tmp_path.iterdir()) == []


@gpu
def test_one_plan_behind_every_door(tmp_path):
    words = ["--gpu", "0", "--place", r"layers\.2\.mlp\.experts$=cuda", "--gpu-experts", "3",
             "--max-running-requests", "2"]
    estimated = plan(*words, "--context", "128")
    dry = json.loads(ok("run", DEMO, "--dry-run", "--json", *words, "--max-total-tokens", "256").stdout)["placement"]
    assert dry == estimated
    assert [(copies["layers"], copies["experts"])
            for copies in estimated["copies"]] == [([1], [0, 1, 2]), ([2], list(range(16))), ([3, 4, 5], [0, 1, 2])]
    with (Server(DEMO, *words, "--max-total-tokens", "256", env=with_gpu()) as server,
          urllib.request.urlopen(server.url + "/kt/status", timeout=60) as reply):
        said = json.load(reply)
    assert said["placement"] == estimated
    # What is there is what was planned.
    device, = estimated["devices"]
    assert said["gpu"]["memory"] - said["gpu"]["free"] == pytest.approx(device["bytes"], rel=0.05)


@gpu
@pytest.mark.parametrize("by_rules, by_flags", [
    (["--place", r"mlp\.experts$=cuda"], ["--gpu-experts", "100%"]),
    (["--place", r"mlp\.experts\.(0|1|2)$=cuda"], ["--gpu-experts", "3"]),
])
def test_experts_on_the_gpu_by_rules_and_by_flags(by_rules, by_flags):
    said = [json.loads(ok("generate", DEMO, "-p", "Once upon a time", "--max-tokens", "12", "--json", "--gpu", "0",
                          *words).stdout)["text"]
            for words in (by_rules, by_flags)]
    assert said[0] == said[1] != ""


@gpu
def test_copies_of_rules_do_not_fit(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("- match: {name: 'mlp.experts$'}\n  replace: {class: default, kwargs: {device: cpu, "
                    "gpu_experts: 16}}\n")
    bare = json.loads(ok("estimate", DEMO, "--bandwidth", "9", "--json", "--gpu", "0",
                         "--gpu-experts", "0").stdout)["gpu"]["needed"]
    done = kt("estimate", str(DEMO), "--gpu", "0", "--gpu-memory", str(bare + 1000), "--rules", str(path),
              "--rules-out", str(tmp_path / "out"))
    assert (done.returncode == 3 and f"kt: {path}:1: rule 1: GPU 0" in done.stderr
            and "80 experts are " in done.stderr), done.stderr
