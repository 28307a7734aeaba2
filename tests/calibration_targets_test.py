"""`kt quant gpu --method GPTQ` with `--targets all` and with `--ignore`: attention, shared experts and dense layers are
calibrated too, what is named stays as it is, and transformers finds in every module what the report says of it.
KT_PROGRAM names kt; KT_TEST_DATA, where it is set, a folder with book text and the other model; KT_TEST_FULL runs
longer texts, and the other model's perplexity."""
import json
import re
import shutil

import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
import checkpoints
import logits
from checkpoints import digests, kt, kt_ok, refused
from packed import dequantised, plain_model

pytestmark = pytest.mark.skipif(not checkpoints.KT, reason="KT_PROGRAM does not name the kt program")
MODELS = ["tiny-qwen3moe", "tiny-deepseekv3"]
TEST_TOKENS = 24576 if checkpoints.FULL else 1024
# What is a matrix of a layer and not a routed expert's, by the end of its name.
EVERY_TOKENS = {
    "tiny-qwen3moe": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "tiny-deepseekv3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "mlp", "shared_experts"},
}


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
        calibrate.write_text(calibrate.read_text()[:28000])
    return calibrate, test


@pytest.fixture(scope="module")
def calibrate(texts):
    return texts[0]


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """A small text of our own, for what needs no quality."""
    lines = [f"Once upon a time there was a fox who counted to {n}. The fox met an owl, and they shared {n} plums."
             for n in range(60)]
    path = tmp_path_factory.mktemp("stories") / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(lines))
    return path


def gptq(model, out, dataset, *more):
    return ["quant", "gpu", str(model), "-o", str(out), "--method", "GPTQ", "--type", "W4A16", "--group-size", "64",
            "--max-sequence-length", "1024", "--dataset", str(dataset), *map(str, more)]


def rtn(model, out, *more):
    return ["quant", "gpu", str(model), "-o", str(out), "--method", "RTN", "--type", "W4A16",
            "--group-size", "64", *more]


def report_of(folder):
    return json.loads((folder / "kt_calibration.json").read_text())


def linears_of(report):
    return {linear["module"]: linear for layer in report["layers"] for linear in layer.get("linears", [])}


def methods_of(report):
    return {layer["layer"]: {expert["method"] for expert in layer["experts"]} for layer in report["layers"]}


def unpack(model):
    """compressed-tensors unpacks at the first call, experts into bf16: then activations would be rounded too, and CPUs
    without such products take a minute for a thousand tokens."""
    import torch
    with torch.no_grad():
        model.eval()(torch.tensor([[1]]))
    for parameter in model.parameters():
        parameter.data = parameter.data.float()


@pytest.fixture(scope="module")
def everything(calibrate, tmp_path_factory):
    """{model: folder with all of it calibrated}, made when asked for."""
    made = {}

    def folder(name):
        if name not in made:
            out = tmp_path_factory.mktemp("all") / name
            # Of quality only in the one that is measured.
            few = [] if checkpoints.FULL or name == "tiny-deepseekv3" else ["--num-calibration-samples", 2]
            kt_ok(*gptq(model_or_skip(name), out, calibrate, "--targets", "all", *few))
            made[name] = out
        return made[name]
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_better_than_rounding_to_nearest(everything, texts, tmp_path, name):
    if name != "tiny-deepseekv3" and not checkpoints.FULL:
        pytest.skip("KT_TEST_FULL is not set")
    model, out = model_or_skip(name), everything(name)
    kt_ok(*rtn(model, tmp_path / "rtn", "--targets", "all"))
    figures = [json.loads(kt_ok("perplexity", str(folder), "--file", str(texts[1]), "--max-tokens",
                                str(TEST_TOKENS), "--acts", "bf16", "--kl-against", str(model), "--json").stdout)
               for folder in (out, tmp_path / "rtn")]
    assert figures[0]["perplexity"] < figures[1]["perplexity"]
    assert figures[0]["kl"] <= 0.75 * figures[1]["kl"], (figures[0]["kl"], figures[1]["kl"])
    report = report_of(out)
    assert report["tokens"] > report["held_out_tokens"] > 0
    for layer in report["layers"]:
        if layer["experts"]:
            assert layer["error"] <= 0.75 * layer["rtn_error"], (layer["layer"], layer["ratio"])
        for expert in layer["experts"]:
            assert expert["error"] <= expert["rtn_error"]
            assert (expert["method"] == "gptq") == (expert["damping"] > 0 and expert["error"] < expert["rtn_error"])
    linears = linears_of(report)
    assert {module.rsplit(".", 1)[1] for module in linears} == EVERY_TOKENS[name]
    for module, figure in linears.items():
        assert figure["error"] <= figure["rtn_error"] < figure["signal"], module
        assert (figure["method"] == "gptq") == (figure["error"] < figure["rtn_error"]), module
    assert sum(f["error"] for f in linears.values()) <= 0.8 * sum(f["rtn_error"] for f in linears.values())
    # The same files as RTN's, with other codes in every matrix of attention.
    ours, nearest = (checkpoints.read_folder(folder)[0] for folder in (out, tmp_path / "rtn"))
    assert {n: entry[:2] for n, entry in ours.items()} == {n: entry[:2] for n, entry in nearest.items()}
    said = [json.loads((folder / "config.json").read_text()) for folder in (out, tmp_path / "rtn")]
    assert said[0] == said[1]
    same = {n for n in ours if "self_attn" in n and n.endswith("weight_packed") and ours[n][2] == nearest[n][2]}
    assert not same
    # And what never takes part is as it was.
    before = checkpoints.read_folder(model)[0]
    stays = {n for n in before if n in ours}
    assert stays == {n for n in before if "norm" in n or "embed" in n or "lm_head" in n or ".mlp.gate." in n}
    assert all(ours[n] == before[n] for n in stays)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_and_our_kernels_compute_the_same(everything, name, tmp_path):
    """transformers rounds experts, codes times scales, to bf16: 2^-9 of each weight, enough for two of them to change
    places at some positions. Ours multiplies the codes. So each is held against our engine on the same matrices as
    floats."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    if not logits.PROBE:
        pytest.skip("KT_MODEL_PROBE does not name the program")
    model, out = model_or_skip(name), everything(name)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert (not info["unexpected_keys"] and not info["mismatched_keys"]
            and not set(info["missing_keys"]) - {"lm_head.weight"})
    vocabulary = theirs.config.vocab_size
    ids = logits.prompt(48, vocabulary)
    with torch.no_grad():
        unpack(theirs)
        expected = theirs(torch.tensor([ids])).logits[0].float().numpy()
    weights = dequantised(out)
    have = {}
    for module, values in weights.items():
        routed = ".mlp.experts." in module
        have[module] = (checkpoints.from_bf16(checkpoints.bf16(values))
                        if routed else theirs.get_submodule(module).weight.numpy())
        assert np.array_equal(have[module], values) or routed, module
    ours = logits.probe(out, [ids], vocabulary)
    logits.check(ours, logits.probe(plain_model(out, tmp_path / "exact", weights), [ids], vocabulary), 1e-5)
    logits.check(expected, logits.probe(plain_model(out, tmp_path / "theirs", have), [ids], vocabulary), 1e-4)
    assert np.median(logits.differences(ours, expected)) <= 5e-3
    moved = logits.differences(logits.probe(model, [ids], vocabulary), expected)
    assert sorted(moved)[len(moved) // 2] > 3e-2


@pytest.mark.parametrize("name", MODELS)
def test_figures_are_those_of_transformers_modules(calibrate, name, tmp_path):
    """What the report says of a module, from the inputs that it gets in the rounded model: rows held out, what stands
    before it rounded, and the squared error of its own outputs."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    model, out = model_or_skip(name), tmp_path / "out"
    text = calibrate.read_text()[10000:16000]
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}))
    kt_ok(*gptq(model, out, tmp_path / "text.jsonl", "--targets", "all"))
    report = report_of(out)
    original, rounded = (transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                                           attn_implementation="eager").eval()
                         for folder in (model, out))
    unpack(rounded)
    ids = transformers.AutoTokenizer.from_pretrained(model)(text)["input_ids"][:1024]
    assert len(ids) == report["tokens"] == 1024
    held_out = [row for row in range(1024) if row // 32 % 8 == 7]
    assert len(held_out) == report["held_out_tokens"]
    inputs = {}
    linears = linears_of(report)
    for module in linears:
        rounded.get_submodule(module).register_forward_pre_hook(
            lambda _, args, kwargs, module=module: inputs.__setitem__(
                module, (args[0] if args else kwargs["hidden_states"]).reshape(1024, -1)[held_out]), with_kwargs=True)
    with torch.no_grad():
        rounded(torch.tensor([ids]))
        for module, figure in linears.items():
            before, after = (which.get_submodule(module)(inputs[module]).double() for which in (original, rounded))
            # bf16 activations here, f32 there: a percent of a sum of squares, and more where layers add up.
            bound = 0.03 + 0.02 * int(module.split(".")[2])
            assert float((before ** 2).sum()) == pytest.approx(figure["signal"], rel=bound), module
            assert float(((before - after) ** 2).sum()) == pytest.approx(figure["error"], rel=2 * bound), module


def test_ignored_experts_stay(texts, tmp_path):
    """One layer's experts are bit for bit the model's, config.json names them, and the others are calibrated."""
    model, calibrate = model_or_skip("tiny-deepseekv3"), texts[0]
    pattern = r"re:.*layers\.2\.mlp\.experts\."
    kt_ok(*gptq(model, tmp_path / "out", calibrate, "--ignore", pattern, "--num-calibration-samples", "2"))
    kt_ok(*rtn(model, tmp_path / "rtn", "--ignore", pattern))
    ours, nearest, before = (checkpoints.read_folder(folder)[0]
                             for folder in (tmp_path / "out", tmp_path / "rtn", model))
    kept = {n for n in ours if ".layers.2.mlp.experts." in n}
    assert kept == {n for n in nearest if ".layers.2.mlp.experts." in n} and len(kept) == 16 * 3
    assert all(n.endswith("_proj.weight") and ours[n] == before[n] for n in kept)
    assert {n: e[:2] for n, e in ours.items()} == {n: e[:2] for n, e in nearest.items()}
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {n[:-len(".weight")] for n in kept} <= set(ignore)
    methods = methods_of(report_of(tmp_path / "out"))
    assert methods.pop(2) == {"kept"} and all("gptq" in each and "kept" not in each for each in methods.values())
    measured = [json.loads(kt_ok("perplexity", str(tmp_path / way), "--file", str(texts[1]),
                                 "--max-tokens", str(TEST_TOKENS),
                                 "--acts", "bf16", "--kl-against", str(model), "--json").stdout)
                for way in ("out", "rtn")]
    assert measured[0]["kl"] < measured[1]["kl"]


def test_parts_of_experts_stay(stories, tmp_path):
    """Single experts and single projections, with attention and shared experts calibrated beside them."""
    model = model_or_skip("tiny-deepseekv3")
    patterns = [r"re:.*layers\.3\.mlp\.experts\.(1|7)\.", r"re:.*layers\.4\.mlp\.experts\.2\.up_proj",
                r"re:.*layers\.4\.mlp\.experts\.3\.down_proj", r"re:.*layers\.5\.mlp\.shared_experts\.gate_proj",
                "layers.2.self_attn.o_proj"]
    kt_ok(*gptq(model, tmp_path / "out", stories, "--targets", "all", "--ignore", *patterns))
    kt_ok(*rtn(model, tmp_path / "rtn", "--targets", "all", "--ignore", *patterns))
    ours, nearest, before = (checkpoints.read_folder(folder)[0]
                             for folder in (tmp_path / "out", tmp_path / "rtn", model))
    assert {n: e[:2] for n, e in ours.items()} == {n: e[:2] for n, e in nearest.items()}
    kept = {n for n in ours if n in before and "_proj.weight" in n}
    assert len(kept) == 2 * 3 + 4 and all(ours[n] == before[n] for n in kept)
    report = report_of(tmp_path / "out")
    layers = {layer["layer"]: layer["experts"] for layer in report["layers"]}
    assert [e for e, expert in enumerate(layers[3]) if expert["method"] == "kept"] == [1, 7]
    assert all(expert["method"] != "kept" for layer in (1, 2, 4, 5) for expert in layers[layer])
    linears = linears_of(report)
    assert "model.layers.2.self_attn.o_proj" not in linears and "model.layers.3.self_attn.o_proj" in linears
    assert "model.layers.5.mlp.shared_experts" in linears
    assert (json.loads((tmp_path / "out" / "config.json").read_text())
            == json.loads((tmp_path / "rtn" / "config.json").read_text()))
    refused(kt(*gptq(model, tmp_path / "none", stories, "--ignore", "experts")), 2, "every matrix is ignored")
    refused(kt(*gptq(model, tmp_path / "none", stories, "--ignore", "re:(")), 2, "re:(", "regular expression")
    assert not (tmp_path / "none").exists()


def test_killed_and_resumed(stories, tmp_path):
    model = model_or_skip("tiny-deepseekv3")
    whole, out = tmp_path / "whole", tmp_path / "out"
    more = ["--targets", "all", "--ignore", r"re:.*layers\.2\.mlp\.experts\.(1|7)\."]
    kt_ok(*gptq(model, whole, stories, *more))
    for layers in (1, 4) if checkpoints.FULL else (4,):
        shutil.rmtree(out, ignore_errors=True)
        checkpoints.kt_killed(f"rename {layers} layer-", *gptq(model, out, stories, *more))
        assert len(list((out / ".kt_progress" / "work").glob("layer-*.safetensors"))) == layers
        kt_ok(*gptq(model, out, stories, *more, "--resume"))
        assert digests(out) == digests(whole)
    refused(kt(*gptq(model, out, stories, "--resume")), 2, "targets")


def test_threads_memory_and_disk_change_nothing(calibrate, tmp_path):
    model = model_or_skip("tiny-deepseekv3")
    more = ["--targets", "all", "--num-calibration-samples", "2" if checkpoints.FULL else "1"]
    kt_ok(*gptq(model, tmp_path / "two", calibrate, *more, "--cpu-threads", "2"))
    kt_ok(*gptq(model, tmp_path / "one", calibrate, *more, "--cpu-threads", "1"))
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    line = refused(kt(*gptq(model, tmp_path / "small", calibrate, *more, "--max-cpu-memory", "20MiB")), 3, "memory")
    least = int(float(re.search(r"needs ([0-9.]+) MiB", line)[1]))
    assert "the moments of model.layers." in line  # a matrix outside of the routed experts, by its name
    # The least that is enough has no room for activations.
    for mib in range(least, least + 9):
        result = kt(*gptq(model, tmp_path / "out", calibrate, *more, "--max-cpu-memory", f"{mib}MiB"))
        if result.returncode == 0:
            break
        refused(result, 3, "memory")
    assert result.returncode == 0 and "activations on disk" in result.stdout
    assert digests(tmp_path / "out") == digests(tmp_path / "two")


@pytest.mark.parametrize("key", ["qwen3", "qwen2_moe", "deepseek_v2-greedy-no_q_rank", "glm4_moe", "gpt_oss",
                                 "glm4_moe_lite", "dots1", "hy_v3", "solar_open", "ernie4_5_moe", "mistral4",
                                 "glm_moe_dsa", "llama4-every_second-two_experts-grows-no_norm",
                                 "qwen3_next", "qwen3_5_moe", "gemma4"])
def test_other_families(stories, tmp_path, key):
    """Dense models, gated shared experts, latent attention without a query rank, biases, sinks, queries that grow,
    names of their own, weights of what experts read, indexers, recurrent layers, norms on both sides: tiny random
    ones."""
    pytest.importorskip("torch"), pytest.importorskip("transformers")
    import torch

    import tiny_models
    trained = model_or_skip("tiny-deepseekv3")
    model = tiny_models.save(tiny_models.build(key, torch.bfloat16, vocab_size=4096), tmp_path / "model",
                             torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(trained / name, model)
    command = ["quant", "gpu", str(model), "--type", "W4A16", "--group-size", "-1", "--targets", "all", "-o"]
    kt_ok(*command, str(tmp_path / "out"), "--method", "GPTQ", "--dataset", str(stories))
    kt_ok(*command, str(tmp_path / "rtn"), "--method", "RTN")
    ours, nearest = (checkpoints.read_folder(tmp_path / way)[0] for way in ("out", "rtn"))
    assert {n: e[:2] for n, e in ours.items()} == {n: e[:2] for n, e in nearest.items()}
    report = report_of(tmp_path / "out")
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    assert len(report["layers"]) == layers
    linears = linears_of(report)
    for layer in range(layers):
        mine = {module for module in linears if f".layers.{layer}." in module}
        assert any(module.endswith(("o_proj", "linear_attn.out_proj")) for module in mine)
        assert any(".mlp" in module or ".feed_forward" in module for module in mine) == (key != "gpt_oss"), mine
    assert all(f["method"] == "gptq" and f["error"] < f["rtn_error"] for f in linears.values()), linears
    measured = [json.loads(kt_ok("perplexity", str(tmp_path / way), "--file", str(stories), "--max-tokens", "512",
                                 "--context", "256", "--acts", "bf16", "--kl-against", str(model),
                                 "--json").stdout)["kl"]
                for way in ("out", "rtn")]
    assert measured[0] < measured[1]
