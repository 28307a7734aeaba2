"""`kt quant gpu` against the people it writes for: compressed_tensors must give the same codes, scales and values,
transformers must load the folder and compute the same logits as with weights rounded by hand.

Environment: KT_PROGRAM (the kt program). Needs torch, safetensors, compressed-tensors and transformers; each test says
which of them it misses."""

import functools
import itertools
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams

import checkpoints

# The demo's, and one of random numbers with tied embeddings and another routing.
MODELS = ("tiny-deepseekv3", "made-qwen3moe")
# type, group size, targets. 64 divides every matrix of both.
CASES = (("W4A16", 128, "experts"), ("W8A16", -1, "experts"), ("W4A16", 64, "all"), ("W8A16", -1, "all"))


def needed(name):
    value = os.environ.get(name)
    if not value:
        pytest.skip(f"{name} is not set")
    return Path(value)


def kt(*words, ok=True):
    run = subprocess.run([needed("KT_PROGRAM"), *map(str, words)], capture_output=True, text=True)
    if ok:
        assert run.returncode == 0, run.stderr
    return run


def read_all(folder):
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors.update(safetensors_torch.load_file(path))
    return tensors


def modules_of(tensors):
    return [name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")]


def arguments(bits, group):
    return QuantizationArgs(num_bits=bits, type="int", symmetric=True, strategy="group" if group > 0 else "channel",
                            group_size=group if group > 0 else None)


def library_codes(weight, bits, group):
    """Packed words and scales as the library's own round to nearest gives them, in the weight's type."""
    args = arguments(bits, group)
    blocks = weight.unflatten(-1, (-1, group)) if group > 0 else weight.unsqueeze(1)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    codes = quantize(weight, scale, None, args, dtype=torch.int8)
    return pack_to_int32(codes, bits), scale


def by_hand(packed, scale, shape, bits):
    """The stored values with numpy alone: element i at bits [i*bits, (i+1)*bits) of the row, minus 2^(bits-1)."""
    rows, columns = (int(x) for x in shape)
    stream = np.unpackbits(packed.numpy().view(np.uint8), axis=1, bitorder="little")[:, : columns * bits]
    codes = stream.reshape(rows, columns, bits) @ (1 << np.arange(bits)) - (1 << (bits - 1))
    scales = np.repeat(scale.float().numpy(), columns // scale.shape[1], axis=1)
    return torch.from_numpy(codes.astype(np.float32) * scales).to(scale.dtype)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """folder of a model by its name; the second is made when asked for."""

    @functools.cache
    def folder(name):
        if name == MODELS[0]:
            return checkpoints.trained_model(name)
        pytest.importorskip("transformers")
        import tiny_models
        made = tiny_models.build("qwen3_moe", torch.bfloat16, vocab_size=4096, hidden_size=256,
                                 moe_intermediate_size=128, head_dim=64, tie_word_embeddings=True)
        return tiny_models.save(made, tmp_path_factory.mktemp("made") / name, torch.bfloat16)
    return folder


@pytest.fixture(scope="module", params=list(itertools.product(MODELS, CASES)),
                ids=lambda p: f"{p[0]}-{p[1][0]}-g{p[1][1]}-{p[1][2]}")
def converted(request, sources, tmp_path_factory):
    model, (kind, group, targets) = request.param
    source = sources(model)
    out = tmp_path_factory.mktemp("converted") / "out"
    kt("quant", "gpu", source, "-o", out, "--method", "RTN", "--type", kind, "--group-size", group, "--targets",
       targets)
    return {"source": source, "out": out, "bits": 4 if kind == "W4A16" else 8, "group": group, "targets": targets,
            "before": read_all(source), "after": read_all(out)}


def test_codes_and_scales_are_the_librarys(converted):
    before, after = converted["before"], converted["after"]
    modules = modules_of(after)
    assert modules
    for module in modules:
        weight = before[module + ".weight"]
        packed, scale = library_codes(weight, converted["bits"], converted["group"])
        assert torch.equal(after[module + ".weight_scale"].view(torch.int16), scale.view(torch.int16)), module
        assert torch.equal(after[module + ".weight_packed"], packed), module
        assert after[module + ".weight_shape"].tolist() == list(weight.shape)


def test_the_library_decompresses_to_the_exact_values(converted):
    after, bits = converted["after"], converted["bits"]
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments(bits, converted["group"]))
    for module in modules_of(after):
        state = {part: after[f"{module}.{part}"] for part in ("weight_packed", "weight_scale", "weight_shape")}
        got = PackedQuantizationCompressor.decompress(dict(state), scheme)["weight"]
        assert torch.equal(got, by_hand(state["weight_packed"], state["weight_scale"], state["weight_shape"], bits))


def test_everything_else_is_copied(converted):
    before, after = converted["before"], converted["after"]
    quantised = set(modules_of(after))
    experts = {name.removesuffix(".weight") for name in before if re.search(r"\.experts\.\d+\.", name)}
    if converted["targets"] == "experts":
        assert quantised == experts
    else:
        assert experts < quantised
        assert not any(re.search(r"embed|norm|lm_head|mlp\.gate$", name) for name in quantised)
    rest = {name for name in before if name.removesuffix(".weight") not in quantised}
    parts = {f"{module}.{part}" for module in quantised for part in ("weight_packed", "weight_scale", "weight_shape")}
    assert set(after) == rest | parts
    for name in rest:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)), name


def test_index_lists_every_tensor_and_its_bytes(converted):
    index = json.loads((converted["out"] / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(converted["after"])
    size = sum(t.numel() * t.element_size() for t in converted["after"].values())
    assert index["metadata"]["total_size"] == size


def test_ignore_list_leaves_exactly_the_quantised_linears(converted):
    """By the library's own rules: a Linear is quantised unless an entry is its name or, after re:, matches it."""
    config = json.loads((converted["out"] / "config.json").read_text())["quantization_config"]
    from compressed_tensors.utils.match import match_name
    quantised = set(modules_of(converted["after"]))
    for name, tensor in converted["before"].items():
        if tensor.ndim != 2 or not name.endswith(".weight"):
            continue
        module = name.removesuffix(".weight")
        ignored = any(match_name(module, entry) for entry in config["ignore"])
        assert ignored != (module in quantised), module
    assert "lm_head" in config["ignore"]


def rounded_copy(converted, folder):
    """The source with its quantised weights replaced by what their codes stand for."""
    folder.mkdir()
    after = converted["after"]
    tensors = dict(converted["before"])
    for module in modules_of(after):
        tensors[module + ".weight"] = by_hand(after[module + ".weight_packed"], after[module + ".weight_scale"],
                                              after[module + ".weight_shape"], converted["bits"]).contiguous()
    safetensors_torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((converted["source"] / "config.json").read_text())
    return folder


TOKENS = [[1, 17, 300, 42, 999, 7, 7, 2048]]


@functools.cache
def logits_of_source(folder):
    with torch.no_grad():
        return load(folder)[0](torch.tensor(TOKENS)).logits.float()


def load(folder):
    from transformers import AutoModelForCausalLM
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    return model.eval(), info


def test_transformers_loads_it_and_computes_the_same(converted, tmp_path):
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip(f"transformers {transformers.__version__}: packed experts are read by 5 and later")
    model, info = load(converted["out"])
    # Tied embeddings: lm_head has no tensor of its own in the source either.
    assert not set(info["missing_keys"]) - {"lm_head.weight"}, info
    assert not info["unexpected_keys"] and not info["mismatched_keys"], info
    reference, _ = load(rounded_copy(converted, tmp_path / "rounded"))
    before = logits_of_source(converted["source"])
    with torch.no_grad():
        got, expected = (m(torch.tensor(TOKENS)).logits.float() for m in (model, reference))
    # The same bf16 weights on the same code: equal but for the order of sums.
    distance = (got - expected).norm() / expected.norm()
    assert distance < 1e-3, distance
    # And the test can fail: rounding moved the logits by far more than that.
    assert (got - before).norm() / before.norm() > 10 * distance + 1e-3


def test_ignored_modules_stay(sources, tmp_path):
    source = sources(MODELS[0])
    out = tmp_path / "out"
    kt("quant", "gpu", source, "-o", out, "--method", "RTN", "--type", "W4A16", "--group-size", -1, "--targets", "all",
       "--ignore", r"re:.*layers\.2\.self_attn\..*", "--ignore", "shared_experts")
    quantised = modules_of(read_all(out))
    assert any(".layers.1.self_attn." in name for name in quantised)
    assert not any(".layers.2.self_attn." in name or "shared_experts" in name for name in quantised)
    ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.2.self_attn.o_proj" in ignore


def test_a_group_that_does_not_divide_is_one_line(sources, tmp_path):
    source = sources(MODELS[0])
    run = kt("quant", "gpu", source, "-o", tmp_path / "out", "--method", "RTN", "--type", "W4A16", "--group-size", 128,
             "--targets", "all", ok=False)
    assert run.returncode == 2
    assert "kv_b_proj" in run.stderr and "128 does not divide its 64 columns" in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
