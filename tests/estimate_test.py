"""What kt estimate says before loading against what kt generate takes; refusals; the lines of --stats.

KT_PROGRAM names kt. KT_TEST_FULL=1 adds a generated model of more than 1 GB, in three formats.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

KT = os.environ.get("KT_PROGRAM")
FULL = bool(os.environ.get("KT_TEST_FULL"))
ROOT = pathlib.Path(__file__).parent.parent
DEMO = ROOT / "demo" / "tiny-deepseekv3"
pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")

PROMPT = "Once upon a time there was a little girl who liked to play in the garden with her dog. " * 40
TOLERANCE = 0.05
HUGE_PAGE = 2 << 20  # whether the kernel has one to give for the end of a buffer is luck, and 5 % of a process of 44 MB


def kt(*args):
    return subprocess.run([KT, *map(str, args)], capture_output=True, text=True)


def estimate(model, *flags):
    result = kt("estimate", model, "--bandwidth", 10, "--json", *flags)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def refused(code, *args):
    result = kt(*args)
    assert result.returncode == code, result.stderr
    line, = result.stderr.splitlines()
    assert line.startswith("kt: ")
    return line


def own_memory(pid):
    """Bytes in RAM that are no file's, or None once the process has ended."""
    try:
        for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return None


def generate(model, *flags):
    """(peak bytes of its own, report) of one completion that fills a step of 512 tokens and then some."""
    command = [KT, "generate", str(model), "-p", PROMPT, "--max-tokens", "100", "--ignore-eos",
               "--json", *map(str, flags)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, own_memory(process.pid) or 0)
            time.sleep(0.003)
        out, err = process.communicate()
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["prompt_tokens"] > 512
    return peak, report


def untouched(said):
    """Most bytes of the workspace that a run may leave untouched: the reserve that buffers grow into and the rows of
    experts that were not chosen. Huge pages round that to the ends of the three largest buffers: rows of experts, rows
    of linears, scratch of the workers."""
    try:
        whole_pages = "[never]" not in pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        whole_pages = False
    return 3 * HUGE_PAGE if whole_pages else 0.3 * said["bytes"]["workspace"]


def check_estimate(model, *flags):
    peak, report = generate(model, *flags)
    said = estimate(model, "--context", report["prompt_tokens"] + len(report["tokens"]), *flags)
    over = said["bytes"]["peak"] - peak
    assert -max(TOLERANCE * peak, HUGE_PAGE) <= over <= max(TOLERANCE * peak, untouched(said)), (over, said, peak)
    return said


@pytest.mark.parametrize("flags", [
    [], ["--format", "int8"], ["--format", "int4", "--linear-format", "int8"], ["--acts", "f32"],
    ["--linear-format", "int4_g32", "--threads", "1"],
], ids=" ".join)
def test_demo_within_five_percent(flags):
    check_estimate(DEMO, *flags)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    pytest.importorskip("numpy")
    subprocess.run([sys.executable, ROOT / "tools" / "make_checkpoint.py", folder, "--gb", "1.2", "--experts", "32",
                    "--vocab", "4096"], check=True, capture_output=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(not FULL, reason="KT_TEST_FULL is not set")
@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_large_model_within_five_percent(large, format):
    said = check_estimate(large, "--format", format)
    assert said["bytes"]["experts"] > {"bf16": 1e9, "int8": 5e8, "int4": 2.5e8}[format]


def test_report():
    said = estimate(DEMO)
    parts = said["bytes"]
    running = parts["experts"] + parts["dense"] + parts["kv_cache"] + parts["workspace"] + parts["process"]
    loading = parts["experts"] + parts["dense"] + parts["loading"] + parts["process"]
    assert parts["peak"] == max(running, loading)
    assert said["context"] == 1024 and said["max_running_requests"] == 1 and said["fits"]
    assert parts["embedding_mapped"] == 4096 * 256 * 2
    assert sum(said["weights_of_node"]) <= parts["experts"] + parts["dense"]
    decode = said["decode"]
    assert decode["limit"] == "memory" and decode["read_gb_per_s"] == pytest.approx(10)
    assert decode["tokens_per_s"] == pytest.approx(10e9 / decode["bytes_per_token"])
    four = estimate(DEMO, "--max-running-requests", 4)
    assert four["bytes"]["kv_cache"] == 4 * parts["kv_cache"]
    assert decode["tokens_per_s"] < four["decode"]["all_requests_tokens_per_s"] < 4 * decode["tokens_per_s"]


def test_report_for_people():
    result = kt("estimate", DEMO, "--context", 100)
    assert result.returncode == 0, result.stderr
    for part in ("experts", "dense weights", "KV cache, 1 request of 100 tokens", "in all", "fits", "decode: at most"):
        assert part in result.stdout


def test_formats_make_it_smaller():
    stored, rounded = estimate(DEMO), estimate(DEMO, "--format", "int4", "--linear-format", "int8")
    assert rounded["bytes"]["experts"] < 0.3 * stored["bytes"]["experts"]
    assert rounded["bytes"]["dense"] < 0.75 * stored["bytes"]["dense"]
    assert rounded["decode"]["tokens_per_s"] > stored["decode"]["tokens_per_s"]


def test_no_weights_are_read(tmp_path):
    """Files whose data is a hole of the right length: any read would find zeros in norms, none is missed."""
    for source in DEMO.iterdir():
        if source.suffix != ".safetensors":
            shutil.copy(source, tmp_path / source.name)
            continue
        data = source.read_bytes()
        header = 8 + int.from_bytes(data[:8], "little")
        with open(tmp_path / source.name, "wb") as file:
            file.write(data[:header])
            file.truncate(len(data))
    holes, whole = estimate(tmp_path), estimate(DEMO)
    for part in ("experts", "dense", "kv_cache", "workspace", "loading"):
        assert holes["bytes"][part] == whole["bytes"][part]


def test_needs_no_tokenizer(tmp_path):
    for source in DEMO.iterdir():
        if not source.name.startswith("tokenizer"):
            (tmp_path / source.name).symlink_to(source)
    without, whole = estimate(tmp_path), estimate(DEMO)
    for part in ("experts", "dense", "kv_cache", "workspace", "loading"):
        assert without["bytes"][part] == whole["bytes"][part]
    assert "tokenizer.json" in refused(2, "generate", tmp_path, "-p", "x")
    (tmp_path / "tokenizer.json").write_text("{")
    result = kt("estimate", tmp_path, "--bandwidth", 10)
    assert result.returncode == 0 and "tokenizer.json" in result.stderr  # which is not counted, and said so


@pytest.mark.parametrize("verb", ["estimate", "generate", "perplexity"])
def test_unknown_linear_format_lists_the_known(verb):
    more = {"perplexity": ["--file", DEMO / "config.json"], "generate": ["-p", "x"]}.get(verb, [])
    line = refused(2, verb, DEMO, *more, "--linear-format", "int3")
    for name in ("int3", "int8", "int4_g32", "bf16"):
        assert name in line


def test_linear_format_that_does_not_fit():
    line = refused(2, "generate", DEMO, "-p", "x", "--linear-format", "q4_k")
    assert "multiple of 256" in line and "model.layers." in line


def test_too_little_memory_is_refused_before_loading():
    line = refused(3, "generate", DEMO, "-p", "x", "--max-memory", "20MiB")
    for part in ("MiB of memory needed", "experts", "20.0 MiB allowed by --max-memory", "--format int4"):
        assert part in line
    line = refused(3, "generate", DEMO, "-p", "x", "--max-memory", "20MiB", "--format", "int4")
    assert "--format int4" not in line and "--linear-format int8" in line
    said = estimate(DEMO, "--max-memory", "20MiB")
    assert not said["fits"] and said["bytes"]["available"] == 20 << 20
    assert refused(2, "generate", DEMO, "-p", "x", "--max-memory", "much").endswith("'much'")


def test_context_beyond_the_models():
    assert "1024" in refused(2, "estimate", DEMO, "--context", "1025")


def test_stats():
    result = kt("generate", DEMO, "-p", "Once upon a time", "--max-tokens", "20", "--ignore-eos", "--stats")
    assert result.returncode == 0, result.stderr
    lines = dict(line.split(": ", 1) for line in result.stderr.splitlines() if ": " in line)
    assert lines["load"].endswith("GB/s")
    for phase in ("prefill", "decode"):
        assert float(lines[phase].split("%")[0]) > 0, lines  # a model this small may be read from a cache
    assert "GB/s" in lines["limits"]


def test_stats_json():
    result = kt("generate", DEMO, "-p", "Once upon a time", "--max-tokens", "20", "--ignore-eos", "--stats", "--json")
    stats = json.loads(result.stdout)["stats"]
    assert stats["load"]["seconds"] > 0 and stats["read_gb_per_s"] > 0
    assert stats["decode"]["limit"] in ("memory", "multiply") and stats["decode"]["fraction_of_limit"] > 0


RULES = """- match: {name: "^model.embed_tokens"}
  replace: {kwargs: {generate_device: cpu}}
- match: {name: "mlp\\\\.experts$"}
  replace: {class: a.KTransformersExperts, kwargs: {backend: AMXInt8}}
  recursive: False
- match: {class: torch.nn.Linear, name: "^model\\\\.layers\\\\."}
  replace: {class: a.KTransformersLinear, kwargs: {generate_device: "cuda:1"}}
- match: {name: "experts\\\\.3$"}
  replace: {class: default}
"""


def test_what_rules_name(tmp_path):
    """The plan itself: rule_models_test.py."""
    (tmp_path / "r.yaml").write_text(RULES)
    for flag in ("--rules", "--optimize_config_path", "--optimize_rule_path", "--kt_optimize_rule"):
        said = estimate(DEMO, flag, tmp_path / "r.yaml", "--rule-devices", "cuda=cpu")
        assert [part["rules"] for part in said["rules"]["parts"] if part["part"] == "routed experts"] == [[2]]
        assert (said["rules"]["idle"]
                == [{"rule": 4, "line": 8, "why": "names only what is below rule 2, not recursive"}])
        assert said["bytes"]["experts"] < estimate(DEMO)["bytes"]["experts"]


def test_rules_that_cannot_be(tmp_path):
    path = tmp_path / "r.yaml"
    for text, expected in [("", ": empty, expected a list of rules"),
                           (RULES.replace("AMXInt8", "AMXInt9"), ":4: rule 2: kwargs: backend: no backend"),
                           (RULES.replace("False", "'False'"), ":5: rule 2: recursive: expected true or false"),
                           ("- match: {class: a.Qwen3MoeMLP}\n  replace: {}\n",
                            ": none of 1 rules matches a module of this model, deepseek_v3")]:
        path.write_text(text)
        assert refused(2, "estimate", DEMO, "--rules", path).startswith(f"kt: {path}{expected}")
    assert "none.yaml" in refused(2, "estimate", DEMO, "--rules", tmp_path / "none.yaml")
