"""`kt quant gpu --method GPTQ` and `kt quant --calibrate` on the small trained models: better than rounding to nearest
on text that calibration did not see, the same bytes after a kill, and one clear line for every bad input. KT_PROGRAM
names kt; KT_TEST_DATA, where it is set, a folder with book text and the other model; KT_TEST_FULL measures both models,
which calibration_targets_test.py does for one with all its matrices; calibration_quality_test.py has the bars."""
import json
import re
import shutil

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
import checkpoints
import logits
from checkpoints import digests, kt, kt_ok, refused

pytestmark = pytest.mark.skipif(not checkpoints.KT, reason="KT_PROGRAM does not name the kt program")
MODELS = ["tiny-qwen3moe", "tiny-deepseekv3"]
TEST_TOKENS = 24576


def model_or_skip(name):
    folder = checkpoints.trained_model(name)
    if folder is None:
        pytest.skip(f"{name} (42 MiB) is not in the tree, and KT_TEST_DATA names no folder with it")
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """(a text to calibrate with, a text to test with)"""
    calibrate, test = checkpoints.long_texts(tmp_path_factory.mktemp("text"))
    if not checkpoints.FULL:
        calibrate.write_text(calibrate.read_text()[:100000])
    return calibrate, test


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """A small text of our own, for what needs no quality."""
    lines = [f"Once upon a time there was a fox who counted to {n}. The fox met an owl, and they shared {n} plums."
             for n in range(60)]
    path = tmp_path_factory.mktemp("stories") / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(lines))
    return path


def gptq(model, out, dataset, *more):
    return ["quant", "gpu", str(model), "-o", str(out), "--method", "GPTQ", "--type", "W4A16", "--group-size", "128",
            "--max-sequence-length", "1024", "--dataset", str(dataset), *more]


@pytest.fixture(scope="module")
def plain(stories, tmp_path_factory):
    """The demo model, calibrated with the stories, for tests that only look at it."""
    out = tmp_path_factory.mktemp("plain") / "gptq"
    kt_ok(*gptq(model_or_skip("tiny-deepseekv3"), out, stories, "--cpu-threads", "2"))
    return out


def measured(model, weights, text):
    args = ["perplexity", str(model), "--file", str(text), "--max-tokens", str(TEST_TOKENS), "--acts", "bf16",
            "--kl-against", "stored", "--json"]
    return json.loads(kt_ok(*args, *(["--weights", str(weights)] if weights else [])).stdout)


@pytest.mark.skipif(not checkpoints.FULL, reason="KT_TEST_FULL is not set")
@pytest.mark.parametrize("name", MODELS)
def test_better_than_rounding_to_nearest(texts, tmp_path, name):
    model = model_or_skip(name)
    calibrate, text = texts
    kt_ok(*gptq(model, tmp_path / "gptq", calibrate))
    kt_ok("quant", "gpu", str(model), "-o", str(tmp_path / "rtn"), "--method", "RTN", "--type", "W4A16")
    ours, nearest = (measured(model, tmp_path / way, text) for way in ("gptq", "rtn"))
    assert ours["perplexity"] < nearest["perplexity"]
    assert ours["kl"] <= 0.75 * nearest["kl"], (ours["kl"], nearest["kl"])
    report = json.loads((tmp_path / "gptq" / "kt_calibration.json").read_text())
    assert report["tokens"] > report["held_out_tokens"] > 0
    for layer in report["layers"]:
        assert layer["error"] <= 0.75 * layer["rtn_error"], (layer["layer"], layer["ratio"])
        for expert in layer["experts"]:
            assert expert["error"] <= expert["rtn_error"]
            assert (expert["method"] == "gptq") == (expert["damping"] > 0 and expert["error"] < expert["rtn_error"])


def test_output_is_what_others_load(plain, tmp_path):
    """The same files as RTN's, names, types and shapes, with other codes; scales in the model's own type."""
    model = model_or_skip("tiny-deepseekv3")
    kt_ok("quant", "gpu", str(model), "-o", str(tmp_path / "rtn"), "--method", "RTN", "--type", "W4A16")
    ours, nearest = (checkpoints.read_folder(way)[0] for way in (plain, tmp_path / "rtn"))
    assert {name: entry[:2] for name, entry in ours.items()} == {name: entry[:2] for name, entry in nearest.items()}
    other = {name for name in ours if ours[name][2] != nearest[name][2]}
    assert other and all(".experts." in name and name.endswith(("weight_packed", "weight_scale")) for name in other)
    said = [json.loads((way / "config.json").read_text()) for way in (plain, tmp_path / "rtn")]
    assert said[0] == said[1]
    assert (plain / "kt_calibration.svg").read_text().startswith("<svg")


def test_transformers_and_our_kernels_compute_the_same(plain):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    if not logits.PROBE:
        pytest.skip("KT_MODEL_PROBE does not name the program")
    model = model_or_skip("tiny-deepseekv3")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32,
                                                                     output_loading_info=True)
    assert (not info["unexpected_keys"] and not info["mismatched_keys"]
            and not set(info["missing_keys"]) - {"lm_head.weight"})
    vocabulary = theirs.config.vocab_size
    ids = logits.prompt(48, vocabulary)
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor([ids])).logits[0].float().numpy()
    # transformers rounds codes times scales to bf16, 2^-9 of each weight; ours multiplies the codes.
    # Which tokens are chosen by a hair depends on how torch rounds bf16 products on this CPU.
    logits.check_but_for_ties(logits.probe(plain, [ids], vocabulary), expected, 1e-2, share=0.2)
    # And the test can fail: four bits moved the logits by far more than that.
    moved = logits.differences(logits.probe(model, [ids], vocabulary), expected)
    assert sorted(moved)[len(moved) // 2] > 3e-2


def test_cpu_weights_are_the_same(stories, plain, tmp_path):
    model = model_or_skip("tiny-deepseekv3")
    kt_ok("quant", str(model), "-o", str(tmp_path / "cpu"), "--method", "int4", "--group-size", "128",
          "--calibrate", str(stories), "--max-sequence-length", "1024")
    assert checkpoints.read_folder(plain)[0] == checkpoints.read_folder(tmp_path / "cpu")[0]


def test_killed_and_resumed(stories, plain, tmp_path):
    model, out = model_or_skip("tiny-deepseekv3"), tmp_path / "out"
    for layers in (1, 3) if checkpoints.FULL else (1,):
        shutil.rmtree(out, ignore_errors=True)
        checkpoints.kt_killed(f"rename {layers} layer-", *gptq(model, out, stories))
        assert len(list((out / ".kt_progress" / "work").glob("layer-*.safetensors"))) == layers
        assert not (out / "kt_manifest.json").exists()
        refused(kt(*gptq(model, out, stories)), 2, "--resume")
        kt_ok(*gptq(model, out, stories, "--resume"))
        assert digests(out) == digests(plain)
    refused(kt(*gptq(model, out, stories, "--resume", "--dampening-frac", "0.2")), 2, "dampening")


def test_threads_memory_and_disk_change_nothing(stories, plain, tmp_path):
    model = model_or_skip("tiny-deepseekv3")
    kt_ok(*gptq(model, tmp_path / "one", stories, "--cpu-threads", "1"))
    assert digests(tmp_path / "one") == digests(plain)
    least = []
    # Where --ignore leaves one of gate and up, both run in f32.
    for more in ((), ("--ignore", "re:.*experts.*gate_proj")):
        line = refused(kt(*gptq(model, tmp_path / "small", stories, "--max-cpu-memory", "20MiB", *more)), 3, "memory",
                       "the moments of one expert")
        least.append(float(re.search(r"needs ([0-9.]+) MiB", line)[1]))
    assert least[1] > least[0] + 1


def test_activations_on_disk(texts, tmp_path):
    """The least memory that is enough has no room for activations; the bytes are those of a run with all of it."""
    model = model_or_skip("tiny-deepseekv3")
    more = ["--num-calibration-samples", "3"]
    kt_ok(*gptq(model, tmp_path / "whole", texts[0], *more))
    line = refused(kt(*gptq(model, tmp_path / "out", texts[0], *more, "--max-cpu-memory", "20MiB")), 3, "memory")
    least = int(float(re.search(r"needs ([0-9.]+) MiB", line)[1]))
    for mib in range(least, least + 9):
        result = kt(*gptq(model, tmp_path / "out", texts[0], *more, "--max-cpu-memory", f"{mib}MiB"))
        if result.returncode == 0:
            break
        refused(result, 3, "memory")
    assert result.returncode == 0 and "activations on disk" in result.stdout
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.parametrize("name, content, expected", [
    ("empty.txt", "", ["empty"]),
    ("short.txt", "A fox.", ["too short", "256"]),
    ("columns.jsonl", '{"prompt": "a", "answer": "b"}\n' * 9, ["line 1", "answer, prompt", "messages"]),
    ("broken.jsonl", '{"text": "a"}\nnot json\n', ["line 2", "not JSON"]),
    ("roles.jsonl", '{"messages": [{"role": "user"}]}\n', ["line 1", "content"]),
    ("text.csv", "a,b\n", [".jsonl or .txt"]),
    ("table.parquet", "PAR1", [".parquet", "pyarrow"]),
])
def test_bad_texts(tmp_path, name, content, expected):
    model = model_or_skip("tiny-deepseekv3")
    (tmp_path / name).write_text(content)
    result = kt(*gptq(model, tmp_path / "out", tmp_path / name))
    refused(result, 4 if "parquet" in name else 2, *expected)
    assert not (tmp_path / "out").exists()


def test_names_of_the_hub(tmp_path, monkeypatch, stories):
    model = model_or_skip("tiny-deepseekv3")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    refused(kt(*gptq(model, tmp_path / "out", "nobody/nothing")), 2, "nobody/nothing", "hub cache", ".jsonl")
    snapshot = tmp_path / "hub" / "datasets--some--tales" / "snapshots" / "abc" / "data"
    snapshot.mkdir(parents=True)
    rows = [{"messages": [{"role": "user", "content": f"Tell a tale of {n} foxes."},
                          {"role": "assistant", "content": f"There were {n} foxes in a wood. They ate {n} plums."}]}
            for n in range(40)]
    (snapshot / "train-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (snapshot / "test-0.jsonl").write_text('{"nothing": 1}\n')
    kt_ok(*gptq(model, tmp_path / "out", "some/tales", "--dataset-split", "train", "--num-calibration-samples", "30"))
    report = json.loads((tmp_path / "out" / "kt_calibration.json").read_text())
    assert (report["samples"], report["samples_found"]) == (30, 40)
    refused(kt(*gptq(model, tmp_path / "other", "some/tales", "--dataset-split", "dev")), 2, "dev")


def test_long_samples_are_cut_and_counted(tmp_path):
    model = model_or_skip("tiny-deepseekv3")
    text = "The fox ran over the hill and under the hedge. " * 400
    (tmp_path / "long.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(3)))
    kt_ok("quant", "gpu", str(model), "-o", str(tmp_path / "out"), "--type", "W8A16", "--dataset",
          str(tmp_path / "long.jsonl"), "--max-sequence-length", "512")
    report = json.loads((tmp_path / "out" / "kt_calibration.json").read_text())
    assert report["samples_cut"] == 3 and report["tokens"] == 3 * 512
    # Three samples of one sentence leave experts without a token: rounded to nearest, said so, and not zero.
    methods = [expert["method"] for layer in report["layers"] for expert in layer["experts"]]
    assert any(method.startswith("rtn") for method in methods)


@pytest.fixture(scope="module")
def half_model(tmp_path_factory):
    """The trained model in float16."""
    model = model_or_skip("tiny-deepseekv3")
    folder = changed(model, tmp_path_factory.mktemp("half") / "model",
                     lambda name, dtype, values: ("F16", checkpoints.from_bf16(values).astype("<f2"))
                     if dtype == "BF16" else (dtype, values))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16", "torch_dtype": "float16"}))
    return folder


@pytest.mark.parametrize("half, type_and_group", [
    (False, ["w8a16", "32"]), (True, ["W8A16", "128"]), (True, ["w4a16", "128"]), (True, ["W8A16", "-1"])])
def test_scales_follow_the_packed_rule(stories, half_model, tmp_path, half, type_and_group):
    """Every kind of scale and group runs, names in any case, and a scale is round-to-nearest's or down to 0.7 of it."""
    model = half_model if half else model_or_skip("tiny-deepseekv3")
    more = ["--type", type_and_group[0], "--group-size", type_and_group[1]]
    kt_ok("quant", "gpu", str(model), "-o", str(tmp_path / "gptq"), "--method", "gptq",
          "--dataset", str(stories), *more)
    kt_ok("quant", "gpu", str(model), "-o", str(tmp_path / "rtn"), "--method", "rtn", *more)
    said = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"][
        "config_groups"]["group_0"]
    assert said["weights"]["num_bits"] == int(type_and_group[0][1])
    methods = {expert["method"]
               for layer in json.loads((tmp_path / "gptq" / "kt_calibration.json").read_text())["layers"]
               for expert in layer["experts"]}
    assert "gptq" in methods
    ours, nearest = (checkpoints.read_folder(tmp_path / way)[0] for way in ("gptq", "rtn"))
    for name in ours:
        if name.endswith("weight_scale"):
            assert ours[name][0] == ("F16" if half else "BF16")
            a, b = (np.frombuffer(each[name][2], "<f2").astype(np.float32) if half else
                    checkpoints.from_bf16(np.frombuffer(each[name][2], "<u2")) for each in (ours, nearest))
            assert (a > 0).all() and (a <= b).all() and (a >= 0.69 * b).all(), name


def test_options_that_do_not_go_together(tmp_path, stories):
    model = model_or_skip("tiny-deepseekv3")
    refused(kt("quant", str(model), "-o", str(tmp_path / "out"), "--calibrate", str(stories)), 2, "--group-size")
    cpu = ["quant", str(model), "-o", str(tmp_path / "out"), "--group-size", "32"]
    refused(kt(*cpu, "--calibrate", ""), 2, "--calibrate")
    refused(kt(*cpu, "--calibrate", str(tmp_path / "absent.txt")), 2, "--calibrate", "absent.txt")
    for flag, value in (("--num-calibration-samples", "8"), ("--dampening-frac", "0.1"), ("--seed", "1"),
                        ("--max-sequence-length", "64")):
        refused(kt(*cpu, flag, value), 2, flag, "--calibrate")
    assert not (tmp_path / "out").exists()


def changed(model, folder, change):
    """A copy of a model with other tensors: change(name, dtype, values) -> (dtype, values)."""
    shutil.copytree(model, folder)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)
        tensors = {}
        for name, (dtype, shape, data) in checkpoints.read_safetensors(path)[0].items():
            values = np.frombuffer(data, checkpoints.DTYPES[dtype]).reshape(shape)
            tensors[name] = change(name, dtype, values)
        checkpoints.write_safetensors(path, tensors)
    return folder


def test_activations_that_overflow_inside_experts(stories, tmp_path):
    """Such experts are rounded to nearest and said to be; figures stay numbers."""
    model = changed(model_or_skip("tiny-deepseekv3"), tmp_path / "model", lambda name, dtype, values: (
        dtype, np.full_like(values, 0x7F61) if ".layers.5.mlp.experts." in name and "up_proj" in name else values))
    kt_ok(*gptq(model, tmp_path / "out", stories))
    report = json.loads((tmp_path / "out" / "kt_calibration.json").read_text())
    for layer in report["layers"]:
        methods = {expert["method"] for expert in layer["experts"]}
        assert ("rtn: singular" in methods and "gptq" not in methods) if layer["layer"] == 5 else "gptq" in methods
        for expert in layer["experts"]:
            assert all(isinstance(expert[key], (int, float)) for key in ("signal", "rtn_error", "error"))


def test_what_a_calibration_leaves_is_not_copied_or_left_over(stories, tmp_path):
    model = model_or_skip("tiny-deepseekv3")
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    for name in ("kt_calibration.json", "kt_calibration.svg"):
        (folder / name).write_text("an earlier one's")
    kt_ok(*gptq(folder, tmp_path / "out", stories))
    assert "an earlier" not in (tmp_path / "out" / "kt_calibration.json").read_text()
    kt_ok("quant", "gpu", str(folder), "-o", str(tmp_path / "out"), "--method", "RTN", "--overwrite")
    assert not list((tmp_path / "out").glob("kt_calibration*"))


def test_layers_of_other_settings_are_not_reused(stories, tmp_path):
    model = model_or_skip("tiny-deepseekv3")
    for way, damping in (("one", "0.5"), ("two", "0.05")):
        kt_ok(*gptq(model, tmp_path / way, stories, "--dampening-frac", damping))
    checkpoints.kt_killed("rename 1 layer-", *gptq(model, tmp_path / "cut", stories))
    layers = list((tmp_path / "cut" / ".kt_progress" / "work").glob("layer-*.safetensors"))
    assert layers
    into = tmp_path / "out" / ".kt_progress" / "work"
    into.mkdir(parents=True)
    for path in layers:
        shutil.copy(path, into)
    (into / "layer-1.safetensors.1-0.tmp").write_text("half")
    result = kt_ok(*gptq(model, tmp_path / "out", stories, "--dampening-frac", "0.05", "--resume"))
    assert "other settings" in result.stderr
    assert digests(tmp_path / "out") == digests(tmp_path / "two") != digests(tmp_path / "one")


def test_template_errors_name_the_line(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(model_or_skip("tiny-deepseekv3"), model)
    for path in (model / "chat_template.jinja", model / "tokenizer_config.json"):
        if path.exists():
            path.chmod(0o644)
    template = "{{ raise_exception('roles have to alternate') }}"
    (model / "chat_template.jinja").write_text(template)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    (tmp_path / "chat.jsonl").write_text('\n{"messages": [{"role": "user", "content": "a"}]}\n')
    refused(kt(*gptq(model, tmp_path / "out", tmp_path / "chat.jsonl")), 2, "chat.jsonl line 2", "alternate")
