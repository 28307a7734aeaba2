"""What a calibrated conversion says of itself, and what others compute with it: perplexities on request, the figures in
JSON, experts that fell back, and the weights in kt_kernel and in transformers. KT_PROGRAM names kt;
PYTHONPATH, for one test, a folder with the built package kt_kernel."""
import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
import checkpoints
import logits
from checkpoints import digests, kt, kt_ok, refused
from packed import dequantised, plain_model

pytestmark = pytest.mark.skipif(not checkpoints.KT, reason="KT_PROGRAM does not name the kt program")
SCRIPT = checkpoints.ROOT / "scripts" / "convert_gpu_weights.py"
TOKENS = 768  # of a test text


@pytest.fixture(scope="module")
def model():
    return checkpoints.trained_model()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """(a text to calibrate with, a text to test with), both of our own."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "stories.txt").write_text("\n<|endoftext|>\n".join(
        f"Once upon a time there was a fox who counted to {n}. The fox met an owl, and they shared {n} plums."
        for n in range(60)))
    (folder / "test.txt").write_text("\n<|endoftext|>\n".join(
        f"A ship of {n} sails left the harbour in the morning. Its captain had a map of {n} islands, and a dog."
        for n in range(40)))
    return folder / "stories.txt", folder / "test.txt"


def gptq(model, out, dataset, *more, kind="W4A16"):
    return ["quant", "gpu", str(model), "-o", str(out), "--type", kind, "--dataset", str(dataset), *map(str, more)]


def measuring(text):
    return ["--perplexity", str(text), "--perplexity-tokens", str(TOKENS)]


@pytest.fixture(scope="module")
def converted(model, texts, tmp_path_factory):
    """(the output, what --json printed) of a conversion that measured."""
    out = tmp_path_factory.mktemp("converted") / "gptq"
    result = kt_ok(*gptq(model, out, texts[0], *measuring(texts[1]), "--json"))
    return out, json.loads(result.stdout)


@pytest.fixture(scope="module")
def nearest(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("nearest") / "rtn"
    kt_ok("quant", "gpu", str(model), "-o", str(out), "--method", "RTN", "--type", "W4A16")
    return out


# --- perplexity


def test_perplexities_are_those_of_kt_perplexity(model, texts, converted, nearest):
    """The same sums over the same tokens; nothing was written for RTN, and yet it is what RTN writes."""
    out, said = converted
    found = said["calibration"]["perplexity"]
    # The text is longer than a window and the model has as much context: one window of TOKENS targets.
    assert (found["tokens"], found["context"], found["acts"]) == (TOKENS, 1024, "bf16")
    for key, weights in (("rtn", nearest), ("gptq", out)):
        args = ["perplexity", str(model), "--file", str(texts[1]), "--max-tokens", str(TOKENS), "--acts", "bf16",
                "--weights", str(weights), "--kl-against", "stored", "--json"]
        want = json.loads(kt_ok(*args).stdout)
        assert found[key] == {name: want[name] for name in ("perplexity", "nll", "kl", "same_top")}
        assert found["original"]["perplexity"] == want["reference_perplexity"]
    assert 0 < found["gptq"]["kl"] != found["rtn"]["kl"] > 0


def test_report_file_and_manifest(converted):
    out, said = converted
    content = (out / "kt_calibration.json").read_bytes()
    assert json.loads(content) == said["calibration"]
    files = {file["name"]: file for file in json.loads((out / "kt_manifest.json").read_text())["files"]}
    assert files["kt_calibration.json"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert files["kt_calibration.json"]["bytes"] == len(content)


def test_measuring_later_gives_the_same_bytes(model, texts, converted, tmp_path):
    out, plain = tmp_path / "out", gptq(model, tmp_path / "out", texts[0])
    table = kt_ok(*plain).stdout
    assert "of 80 experts calibrated" in table and "perplexity" not in table
    assert "perplexity" not in json.loads((out / "kt_calibration.json").read_text())
    table = kt_ok(*plain, "--resume", *measuring(texts[1]), "--cpu-threads", "1").stdout
    assert digests(out) == digests(converted[0])
    figures = converted[1]["calibration"]["perplexity"]
    rows = {words[0]: words[1:] for words in map(str.split, table.splitlines()) if len(words) == 4}
    assert rows["original"] == [f"{figures['original']['perplexity']:.4f}", "-", "-"]
    for key in ("rtn", "gptq"):
        assert rows[key.upper()][:2] == [f"{figures[key]['perplexity']:.4f}", f"{figures[key]['kl']:.5f}"]
    # A resume that asks for nothing keeps what was measured.
    said = json.loads(kt_ok(*plain, "--resume", "--json").stdout)
    assert said["calibration"] == converted[1]["calibration"] and said["shards_written"] == 0
    assert digests(out) == digests(converted[0])


def test_killed_while_measuring(model, texts, converted, tmp_path):
    out = tmp_path / "out"
    arguments = gptq(model, out, texts[0], *measuring(texts[1]))
    checkpoints.kt_killed("rename 1 kt_manifest.json", *arguments)
    refused(kt(*arguments), 2, "--resume")
    kt_ok(*arguments, "--resume")
    assert digests(out) == digests(converted[0])


def test_other_formats_and_the_cpu(model, texts, tmp_path):
    """8-bit codes in groups of 32, which no kernel has with their own scales, and int4 for the CPU."""
    said = kt_ok(*gptq(model, tmp_path / "w8", texts[0], "--group-size", "32", *measuring(texts[1]),
                       "--json", kind="W8A16"))
    found = json.loads(said.stdout)["calibration"]["perplexity"]
    for key in ("rtn", "gptq"):
        assert (abs(found[key]["perplexity"] / found["original"]["perplexity"] - 1) < 0.01
                and 0 < found[key]["kl"] < 0.002)
    said = kt_ok("quant", str(model), "-o", str(tmp_path / "cpu"), "--group-size", "32", "--calibrate", str(texts[0]),
                 *measuring(texts[1]), "--json")
    four = json.loads(said.stdout)["calibration"]
    assert four["perplexity"]["rtn"]["kl"] > found["rtn"]["kl"] and four["total"]["experts"] == 80


def test_all_linears_and_ignored_layers(model, texts, tmp_path):
    """Rounding to nearest while loading covers attention too; experts that a whole layer keeps are kept."""
    args = ["--group-size", "64", "--targets", "all", "--ignore", r"re:.*layers\.3\.mlp\.experts.*"]
    said = json.loads(kt_ok(*gptq(model, tmp_path / "gptq", texts[0], *args, *measuring(texts[1]), "--json")).stdout)
    kt_ok("quant", "gpu", str(model), "-o", str(tmp_path / "rtn"), "--method", "RTN", "--type", "W4A16", *args)
    figures = said["calibration"]
    for key in ("rtn", "gptq"):
        want = json.loads(kt_ok("perplexity", str(tmp_path / key), "--file", str(texts[1]), "--max-tokens", str(TOKENS),
                                "--acts", "bf16", "--kl-against", str(model), "--json").stdout)
        assert figures["perplexity"][key] == {name: want[name] for name in ("perplexity", "nll", "kl", "same_top")}
    assert figures["total"]["methods"]["kept"] == 16
    listed = [linear for layer in figures["layers"] for linear in layer.get("linears", [])]
    assert figures["total"]["linears"]["linears"] == len(listed) > 0
    assert sum(figures["total"]["linears"]["methods"].values()) == len(listed)
    refused(kt(*gptq(model, tmp_path / "out", texts[0], "--ignore", "re:.*experts.3.*", *measuring(texts[1]))), 4,
            "--perplexity", "--ignore", "layer 1")
    assert not (tmp_path / "out").exists()


def test_bad_texts_are_found_before_the_conversion(model, texts, tmp_path):
    out, short = tmp_path / "out", tmp_path / "short.txt"
    short.write_text("A fox.")
    (tmp_path / "empty.txt").write_text("")
    run = lambda *more: kt(*gptq(model, out, texts[0], *more))  # noqa: E731
    refused(run("--perplexity", tmp_path / "absent.txt"), 2, "--perplexity", "absent.txt", "no such file")
    refused(run("--perplexity", tmp_path), 2, "--perplexity", "no such file")
    refused(run("--perplexity", ""), 2, "--perplexity", "expected a file")
    refused(run("--perplexity", tmp_path / "empty.txt"), 2, "empty.txt", "too short: 0 tokens")
    refused(run("--perplexity", short), 2, "short.txt", "too short", "256")
    refused(run("--perplexity", texts[1], "--perplexity-tokens", "0"), 2, "--perplexity-tokens")
    refused(run("--perplexity-tokens", "256"), 2, "--perplexity-tokens", "requires --perplexity")
    refused(run("--perplexity", texts[1], "--method", "RTN"), 2, "--perplexity", "kt perplexity")
    refused(kt("quant", str(model), "-o", str(out), "--group-size", "32", "--perplexity", str(texts[1])), 2,
            "--perplexity", "--calibrate")
    refused(kt("quant", str(model), "-o", str(out), "--group-size", "32", "--calibrate", str(texts[0]), "--perplexity",
               str(texts[1]), "--resume-layer", "2"), 2, "--perplexity", "--resume-layer 2")
    assert not out.exists()


@pytest.mark.parametrize("json_too", [False, True])
def test_a_conversion_is_reported_where_measuring_fails(model, texts, tmp_path, json_too):
    folder, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(model, folder)
    args = gptq(folder, out, texts[0], "--perplexity", texts[1], "--perplexity-tokens", "2000")
    with checkpoints.kt_held("rename 1 layer-", *args, *(["--json"] if json_too else [])) as process:
        (folder / "config.json").rename(folder / "gone.json")  # the last of the models to measure is still to be opened
    said, errors = process.stdout, process.stderr
    assert process.returncode != 0 and "config.json" in errors and (out / "config.json").exists()
    if json_too:
        found = json.loads(said)
        assert found["calibration"]["total"]["experts"] == 80 and "perplexity" not in found["calibration"]
    else:
        assert str(out) in said and "experts calibrated" in said


def test_memory_for_two_models_is_found_before_the_conversion(model, texts, tmp_path):
    refused(kt(*gptq(model, tmp_path / "out", texts[0], *measuring(texts[1]), "--max-cpu-memory", "48MiB")), 3,
            "--perplexity", "at once", "allowed")
    assert not (tmp_path / "out").exists()


def test_tokens_outside_the_vocabulary(model, texts, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "tokenizer.json").chmod(0o644)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": 5000, "content": "<|odd|>", "single_word": False, "lstrip": False,
                                      "rstrip": False, "normalized": False, "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "odd.txt").write_text(texts[1].read_text().replace("captain", "<|odd|>", 1))
    refused(kt(*gptq(folder, tmp_path / "out", texts[0], "--perplexity", tmp_path / "odd.txt")), 2, "odd.txt", "5000",
            "vocabulary", "4096")
    assert not (tmp_path / "out").exists()


# --- the figures


def test_json_holds_every_expert(model, converted):
    figures = converted[1]["calibration"]
    config = json.loads((model / "config.json").read_text())
    layers = range(config["first_k_dense_replace"], config["num_hidden_layers"])
    assert [layer["layer"] for layer in figures["layers"]] == list(layers)
    total = figures["total"]
    sums = dict.fromkeys(("tokens", "held_out", "signal", "rtn_error", "error"), 0)
    methods = {}
    for layer in figures["layers"]:
        assert len(layer["experts"]) == config["n_routed_experts"]
        # Every token that takes part is sent to top_k experts.
        assert sum(expert["tokens"] for expert in layer["experts"]) == \
            (figures["tokens"] - figures["held_out_tokens"]) * config["num_experts_per_tok"]
        for expert in layer["experts"]:
            methods[expert["method"]] = methods.get(expert["method"], 0) + 1
            for key in sums:
                sums[key] += expert[key]
            assert expert["error"] <= expert["rtn_error"]
    assert total["methods"] == methods and total["experts"] == sum(methods.values()) == 80
    for key, value in sums.items():
        assert total[key] == pytest.approx(value)
    assert total["ratio"] == pytest.approx(sums["error"] / sums["rtn_error"]) and 0 < total["ratio"] < 1
    assert figures["settings"]["dampening"] == 0.5 and total["damping_raised"] == []


def test_raised_damping_is_reported(model, tmp_path):
    """One sentence over and over has moments of few dimensions, which cannot be factored as they are."""
    (tmp_path / "one.txt").write_text("The fox ran over the hill. " * 100)
    args = gptq(model, tmp_path / "out", tmp_path / "one.txt", "--dampening-frac", "0")
    table = kt_ok(*args).stdout
    figures = json.loads(kt_ok(*args, "--resume", "--json").stdout)["calibration"]
    raised = figures["total"]["damping_raised"]
    assert raised and f"damping raised for {len(raised)}" in table
    for entry in raised:
        layer, = (layer for layer in figures["layers"] if layer["layer"] == entry["layer"])
        expert = layer["experts"][entry["expert"]]
        assert (expert["damping"], expert["down_damping"]) == (entry["damping"], entry["down_damping"])
        assert max(entry["damping"], entry["down_damping"]) > 0


def test_experts_that_fell_back_are_those_of_rounding_to_nearest(model, nearest, tmp_path):
    """Without tokens or with few: the bytes of RTN, not zeros; calibrated ones are others."""
    (tmp_path / "one.txt").write_text("The fox ran over the hill. " * 100)
    table = kt_ok(*gptq(model, tmp_path / "out", tmp_path / "one.txt")).stdout
    figures = json.loads((tmp_path / "out" / "kt_calibration.json").read_text())
    ours, theirs = (checkpoints.read_folder(folder)[0] for folder in (tmp_path / "out", nearest))
    seen = set()
    for layer in figures["layers"]:
        for number, expert in enumerate(layer["experts"]):
            at = f"model.layers.{layer['layer']}.mlp.experts.{number}."
            names = [name for name in ours if name.startswith(at)]
            assert len(names) == 9
            assert all(ours[name] == theirs[name] for name in names) == (expert["method"] != "gptq")
            assert all(any(ours[name][2]) for name in names)
            assert (expert["tokens"] == 0) == (expert["method"] == "rtn: no tokens")
            seen.add(expert["method"])
    assert {"gptq", "rtn: no tokens", "rtn: few tokens"} <= seen
    count = figures["total"]["methods"]["rtn: no tokens"]
    assert f"{count} no tokens" in table


def test_samples_that_are_not_finite_are_named(model, tmp_path):
    """One expert overflows for those it is sent: their samples are left out of later layers, the others stay."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)
        tensors = {}
        for name, (dtype, shape, data) in checkpoints.read_safetensors(path)[0].items():
            values = np.frombuffer(data, checkpoints.DTYPES[dtype]).reshape(shape)
            if name == "model.layers.1.mlp.experts.1.up_proj.weight":
                values = np.full_like(values, 0x7F61)  # 3e38
            tensors[name] = (dtype, values)
        checkpoints.write_safetensors(path, tensors)
    words = "fox owl plum tree king ship road hill moon star dog cat boy girl house horse river stone".split()
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps({"text": f"The {a} and {b}"}) + "\n"
                                                  for a in words for b in words))
    result = kt_ok(*gptq(folder, tmp_path / "out", tmp_path / "pairs.jsonl"))
    figures = json.loads((tmp_path / "out" / "kt_calibration.json").read_text())
    dropped = figures["dropped_samples"]
    assert 0 < len(dropped) < figures["samples"] == len(words) ** 2
    assert all("layer 2" in line and "pairs.jsonl line " in line and line in result.stderr for line in dropped)
    rows = [sum(expert["tokens"] + expert["held_out"] for expert in layer["experts"]) for layer in figures["layers"]]
    assert rows[0] > rows[1] == rows[-1] > 0
    assert figures["layers"][0]["experts"][1]["method"] == "rtn: singular"
    assert "gptq" in {expert["method"] for layer in figures["layers"] for expert in layer["experts"]}


# --- the text


def rows(first, count):
    return "".join(json.dumps({"text": f"The fox number {n} met an owl by the river, and they shared {n} plums."})
                   + "\n"
                   for n in range(first, first + count))


def test_report_names_the_dataset(model, tmp_path, monkeypatch):
    """Of a snapshot with a licence and several files; a split that a file cannot have is one line."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "datasets--tales" / "snapshots" / "abc"
    (folder / "train").mkdir(parents=True)
    (folder / "LICENSE.txt").write_text("Permission is hereby granted. " * 500)
    for part in range(3):
        (folder / "train" / f"{part}.jsonl").write_text('{"text": ""}\n' * 30 + rows(40 * part, 40))
    result = kt_ok(*gptq(model, tmp_path / "out", "tales", "--dataset-split", "train", "--num-calibration-samples", 20))
    figures = json.loads((tmp_path / "out" / "kt_calibration.json").read_text())
    assert figures["dataset"] == {"name": "tales", "split": "train", "revision": "abc",
                                  "files": ["train/0.jsonl", "train/1.jsonl", "train/2.jsonl"]}
    assert (figures["samples"], figures["samples_found"]) == (20, 210) and figures["samples_too_short"] > 0
    line, = (line for line in result.stdout.splitlines() if line.startswith("tales, train/0.jsonl and 2 more: "))
    assert f"20 samples of 210 (0 cut at 1024 tokens, {figures['samples_too_short']} passed over: too short)" in line
    (tmp_path / "own.jsonl").write_text(rows(0, 40))
    result = kt_ok(*gptq(model, tmp_path / "own", tmp_path / "own.jsonl", "--dataset-split", "train"))
    line, = (line for line in result.stderr.splitlines() if "split train" in line)
    assert "own.jsonl is one file" in line
    figures = json.loads((tmp_path / "own" / "kt_calibration.json").read_text())
    assert figures["dataset"] == {"name": str(tmp_path / "own.jsonl"), "files": [str(tmp_path / "own.jsonl")]}


def test_rows_are_measured_not_their_json(model, texts, tmp_path):
    """The same documents as .txt and as .jsonl are the same text, here and in kt perplexity."""
    documents = [document.strip("\n") for document in texts[1].read_text().split("<|endoftext|>")]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    args = ["perplexity", str(model), "--max-tokens", "512", "--json", "--file"]
    assert kt_ok(*args, str(tmp_path / "test.jsonl")).stdout == kt_ok(*args, str(texts[1])).stdout
    said = [json.loads(kt_ok(*gptq(model, tmp_path / f"out{i}", texts[0], "--perplexity", text,
                                   "--perplexity-tokens", 512, "--json")).stdout)["calibration"]["perplexity"]
            for i, text in enumerate((tmp_path / "test.jsonl", texts[1]))]
    assert said[0] == said[1] and said[0]["tokens"] == 512
    (tmp_path / "bad.jsonl").write_text('{"text": "a fox"}\n{"words": 1}\n')
    refused(kt(*gptq(model, tmp_path / "out", texts[0], "--perplexity", tmp_path / "bad.jsonl")), 2,
            "bad.jsonl line 2", "words")


def test_large_texts_take_little_memory(model, tmp_path):
    """16 MB of text in one document take no more than as many samples of a short text, but for pieces of it."""
    line = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 2 + "\n"  # many tokens
    script = ("import os, sys; pid = os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:]); "
              "_, code, use = os.wait4(pid, 0); print(code, use.ru_maxrss >> 10)")
    peaks = []
    for lines in (100, 160000):
        (tmp_path / "text.txt").write_text(line * lines)
        command = gptq(model, tmp_path / f"out{lines}", tmp_path / "text.txt", "--num-calibration-samples", "4",
                       "--max-sequence-length", "256")
        said = subprocess.run([sys.executable, "-c", script, checkpoints.KT, *command], stdout=subprocess.PIPE,
                              text=True, timeout=300).stdout
        code, peak = map(int, said.split()[-2:])
        assert code == 0
        peaks.append(peak)
    assert peaks[1] < peaks[0] + 24, peaks


# --- who else computes with it


# Root mean square error relative to the output's. f32: sums of a few hundred products. bf16: activations lose 2^-9
# before each of three matrices. int8 in groups: about a 127th of the largest of 32 to 128 numbers, which is three to
# four times their size, spread evenly over a step: 1 % before each of three matrices, sqrt(3) times that and half as
# much again.
PRECISIONS = {"f32": 1e-5, "bf16": 0.006, "default": 0.026}


@pytest.mark.parametrize("group", [32, 128])
def test_kt_kernel_runs_it_as_rawint4(model, texts, tmp_path, group):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    kernel = pytest.importorskip("kt_kernel", reason="PYTHONPATH does not name the built package kt_kernel")
    kt_ok(*gptq(model, tmp_path / "out", texts[0], "--group-size", group))
    config = json.loads((model / "config.json").read_text())
    experts, top_k, hidden = config["n_routed_experts"], config["num_experts_per_tok"], config["hidden_size"]
    rounded, original = dequantised(tmp_path / "out"), checkpoints.read_folder(model)[0]
    draw = np.random.default_rng(group)
    x = draw.standard_normal((33, hidden)).astype(np.float32)
    ids = np.stack([draw.permutation(experts)[:top_k] for _ in x])
    scores = draw.random(ids.shape).astype(np.float32)

    def reference(weight):
        out = np.zeros(x.shape)
        for t, row in enumerate(x.astype(np.float64)):
            for expert, score in zip(ids[t], scores[t]):
                gate, up = weight(expert, "gate") @ row, weight(expert, "up") @ row
                out[t] += score * (weight(expert, "down") @ (gate / (1 + np.exp(-gate)) * up))
        return out

    def stored(layer, expert, projection):
        _, shape, data = original[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"]
        return checkpoints.from_bf16(np.frombuffer(data, "<u2")).reshape(shape).astype(np.float64)

    def error(got, want):
        return np.sqrt(np.square(got - want).mean() / np.square(want).mean())

    for layer in (1, 4):
        names = f"model.layers.{layer}.mlp.experts."
        want = reference(lambda e, p, names=names: rounded[f"{names}{e}.{p}_proj"].astype(np.float64))
        for precision, bound in PRECISIONS.items():
            runs = kernel.KTMoEWrapper(layer_idx=layer, num_experts=experts, num_experts_per_tok=top_k,
                                       hidden_size=hidden,
                                       moe_intermediate_size=config["moe_intermediate_size"], cpuinfer_threads=2,
                                       threadpool_count=1, weight_path=str(tmp_path / "out"), method="RAWINT4",
                                       activations=precision)
            runs.load_weights(torch.arange(experts))
            for tokens in (1, len(x)):
                got = runs.forward(*(torch.tensor(a[:tokens]) for a in (x, ids, scores))).double().numpy()
                assert error(got, want[:tokens]) < bound, (layer, precision, tokens)
        # And the test can fail: four bits move the layer by more than any precision.
        assert error(reference(lambda e, p, layer=layer: stored(layer, e, p)), want) > 1.5 * max(PRECISIONS.values())


def test_transformers_computes_the_same_but_for_its_rounding(model, texts, converted, tmp_path):
    """Our kernels multiply codes and scales. transformers keeps experts as the products of the two rounded to bf16,
    2^-9 of a weight, and multiplies activations in bf16, whatever type the model has. Both are held against the same
    matrices written out as floats, where nothing is left to differ but the order of sums: so what lies between the two
    is that rounding and nothing else, and its bound is the one that bf16 has."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("compressed_tensors", reason="compressed_tensors is not installed")
    if not logits.PROBE:
        pytest.skip("KT_MODEL_PROBE does not name the program")
    out = converted[0]
    weights = dequantised(out)
    rounded = {name: checkpoints.from_bf16(checkpoints.bf16(values)) for name, values in weights.items()}
    ids = logits.prompt(48, 4096)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    for layer in (1, 5):
        fused = theirs.model.layers[layer].mlp.experts.gate_up_proj[7]
        at = f"model.layers.{layer}.mlp.experts.7"
        want = np.concatenate([rounded[f"{at}.gate_proj"], rounded[f"{at}.up_proj"]])
        assert np.array_equal(fused.detach().float().numpy(), want)

    def run():
        with torch.no_grad():
            return theirs(torch.tensor([ids])).logits[0].float().numpy()
    as_loaded = run()
    for parameter in theirs.parameters():
        parameter.data = parameter.data.float()  # so activations of experts too: only the rounding of weights is left
    ours = logits.probe(out, [ids], 4096)
    logits.check(ours, logits.probe(plain_model(out, tmp_path / "exact", weights), [ids], 4096), 1e-5)
    logits.check(run(), logits.probe(plain_model(out, tmp_path / "bf16", rounded), [ids], 4096), 1e-5)
    assert np.median(logits.differences(ours, run())) > 1e-4  # or there are not two things to tell apart
    logits.check_but_for_ties(ours, as_loaded, 1e-2, share=0.2)  # ties: of torch's bf16 products on this CPU
    # And so the perplexity that was reported: of the same tokens in one window, bf16 in places of its own.
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"))
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokens = [token for document in texts[1].read_text().split("<|endoftext|>")
              for token in [*tokenizer.encode(document.strip("\n"), add_special_tokens=False), end]][:TOKENS + 1]
    assert len(tokens) == TOKENS + 1
    with torch.no_grad():
        rows = theirs(torch.tensor([tokens[:-1]])).logits[0].double()
    nll = torch.nn.functional.cross_entropy(rows, torch.tensor(tokens[1:])).item()
    assert np.exp(nll) == pytest.approx(converted[1]["calibration"]["perplexity"]["gptq"]["perplexity"], rel=5e-3)


# --- the script


def run_script(*arguments, **environment):
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True,
                          timeout=300, stdin=subprocess.DEVNULL, env=os.environ | environment)


def test_parquet_through_the_script(model, texts, tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet
    rows = [{"prompt": "", "messages": [{"role": "user", "content": f"Tell me of {n} foxes."},
                                        {"role": "assistant",
                                         "content": f"There were {n} foxes, and they ate {n} plums."}]}
            for n in range(40)]
    folder = tmp_path / "hub" / "datasets--HuggingFaceH4--ultrachat_200k" / "snapshots" / "0" / "data"
    folder.mkdir(parents=True)
    blob = tmp_path / "blob"
    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), blob)
    (folder / "train_sft-00000-of-00001.parquet").symlink_to(blob)  # as the cache keeps them
    result = run_script("--model_id", model, "--output_dir", tmp_path / "out", "--quant_method", "GPTQ", "--quant_type",
                        "W4A16", "--perplexity", texts[1], "--perplexity_tokens", TOKENS,
                        HF_HUB_CACHE=str(tmp_path / "hub"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "out" / "kt_calibration.json").read_text())
    assert figures["samples"] == 40 and figures["perplexity"]["tokens"] == TOKENS


def test_architecture_that_cannot_run(tmp_path, texts):
    """RTN converts it; GPTQ says which layers are missing, also where the config lists them one by one."""
    made = checkpoints.Model(tmp_path / "next", model_type="olmo_hybrid")
    made.config |= {"architectures": ["OlmoHybridForCausalLM"], "layer_types": ["linear_attention", "full_attention"]}
    made.save()
    result = run_script("--model_id", made.folder, "--output_dir", tmp_path / "out", "--quant_method", "GPTQ",
                        "--quant_type", "W4A16", "--dataset", texts[0], "--trust_remote_code")
    refused(result, 4, "GPTQ", "linear_attention", "RTN")
    assert not (tmp_path / "out").exists()
    result = run_script("--model_id", made.folder, "--output_dir", tmp_path / "out", "--quant_method", "RTN",
                        "--quant_type", "W4A16", "--trust_remote_code")
    assert result.returncode == 0, result.stderr
    packed = [name for name in checkpoints.read_folder(tmp_path / "out")[0] if name.endswith("weight_packed")]
    assert len(packed) == made.layers * made.experts * 3
