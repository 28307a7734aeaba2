"""Llama 4 beyond its logits (model_logits_test.py), and all of SmallThinker, whose reference is a plain torch forward
(smallthinker.py): as published, the same bits whatever is cut and shared, converted and calibrated experts, GGUF files,
and where they do not run. KT_MODEL_PROBE names model_probe, KT_PROGRAM kt."""

import functools
import hashlib
import json
import pathlib
import re
import shutil
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")
import numpy as np
import safetensors.torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import checkpoints
import gguf_files
import published
import smallthinker
import tiny_models
from checkpoints import kt, kt_ok
from logits import PROBE, check, differences, probe, probe_exactly, prompt

pytestmark = pytest.mark.skipif(not (PROBE and checkpoints.KT), reason="KT_MODEL_PROBE or KT_PROGRAM is not set")
BOUND, CHUNK_BOUND = 1e-4, 1e-5  # as in model_logits_test.py
VOCAB = tiny_models.VOCAB
LENGTHS = [1, 7, 130, 700]
PROMPTS = [prompt(tokens, VOCAB) for tokens in LENGTHS]
DEMO = pathlib.Path(__file__).parent.parent / "demo" / "tiny-deepseekv3"
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
# As published; and the other ways a config can turn: as the 4B model, softmax, tied.
SMALL = {
    "published": {},
    "all_turn-softmax-tied": dict(
        num_hidden_layers=3, rope_layout=[1, 1, 1], sliding_window_layout=[0, 0, 0], tie_word_embeddings=True,
        moe_primary_router_apply_softmax=True, rope_theta=10000.0),
}
GROWS = "llama4-every_second-two_experts-grows-no_norm"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("listed")


@functools.cache
def small(root, key, dtype):
    """(folder, tensors, config, logits of PROMPTS)."""
    tensors, config = smallthinker.draw(dtype=DTYPES[dtype], **SMALL[key])
    folder = smallthinker.save(root / f"{key}-{dtype}", tensors, config, DTYPES[dtype])
    return folder, tensors, config, [smallthinker.logits(tensors, config, [ids]) for ids in PROMPTS]


smalls = pytest.mark.parametrize("key,dtype",
                                 [("published", "f32"), ("published", "bf16"), ("all_turn-softmax-tied", "f32")])


# --- SmallThinker's logits --------------------------------------------------------------------------------------------


class TestSmallThinker:
    @smalls
    def test_prompts(self, root, key, dtype):
        folder, _, _, expected = small(root, key, dtype)
        for ids, theirs in zip(PROMPTS, expected):
            check(probe(folder, [ids], VOCAB), theirs, BOUND)
        order = [2, 0, 1, 0]
        ours = probe(folder, [PROMPTS[i] for i in order], VOCAB)
        check(ours, np.concatenate([expected[i] for i in order]), BOUND)

    @smalls
    def test_in_pieces(self, root, key, dtype):
        folder, _, _, expected = small(root, key, dtype)
        whole = probe(folder, PROMPTS[2:3], VOCAB)
        for how in (("--chunk", "7"), ("--chunk", "64"), ("--cuts", "1,23,24,25,129")):
            pieces = probe(folder, PROMPTS[2:3], VOCAB, *how)
            check(pieces, whole, CHUNK_BOUND)
            check(pieces, expected[2], BOUND)

    @pytest.mark.parametrize("key", SMALL)
    def test_every_weight_is_seen_in_the_logits(self, root, key):
        _, tensors, config, _ = small(root, key, "f32")
        ids = [prompt(60, VOCAB)]
        before = smallthinker.logits(tensors, config, ids)
        for name, tensor in tensors.items():
            step = 0.01 * torch.arange(tensor.numel()).reshape(tensor.shape).remainder(7)
            after = smallthinker.logits(tensors | {name: tensor * 1.05 + step}, config, ids)
            assert differences(after, before).max() > 2 * BOUND, name

    def test_a_missing_expert_is_named(self, root, tmp_path):
        _, tensors, config, _ = small(root, "published", "f32")
        name = "model.layers.2.block_sparse_moe.experts.4.gate"
        left = {each: tensor for each, tensor in tensors.items() if each != name + ".weight"}
        done = kt("estimate", smallthinker.save(tmp_path / "model", left, config), "--bandwidth", 10)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "expert 4 has no gate projection under model.layers.2.block_sparse_moe.experts" in done.stderr

    @pytest.mark.parametrize("values,line", [
        (dict(rope_layout=[1, 0]), "rope_layout is a list of 2, expected one number for each of 5 layers"),
        (dict(hidden_act="gelu"), 'hidden_act is "gelu"; supported: relu'),
        (dict(sliding_window_size=0), "sliding_window_size is 0, expected a whole number from 1")])
    def test_bad_configs(self, root, tmp_path, values, line):
        _, tensors, config, _ = small(root, "published", "f32")
        done = kt("estimate", smallthinker.save(tmp_path / "model", tensors, dict(config, **values)), "--bandwidth", 10)
        assert done.returncode in (2, 4) and done.stderr.count("\n") == 1 and line in done.stderr, done.stderr


# --- Llama 4 as published ---------------------------------------------------------------------------------------------


def llama4_outside(tensors, config):
    """Inside the model that sees: names behind language_model., positions beside, layers by an interval, a number for
    true."""
    gone = ("architectures", "rope_parameters", "layer_types", "moe_layers", "no_rope_layers",
            "attn_temperature_tuning")
    text = {name: value for name, value in config.items() if name not in gone}
    rope = dict(config["rope_parameters"])
    text |= dict(rope_theta=rope.pop("rope_theta"), rope_scaling=rope, no_rope_layers=[], attn_temperature_tuning=4,
                 for_llm_compressor=False)
    outer = dict(architectures=["Llama4ForConditionalGeneration"], model_type="llama4", text_config=text,
                 vision_config=dict(model_type="llama4_vision_model", hidden_size=8), image_token_index=VOCAB - 1,
                 tie_word_embeddings=False)
    stored = {"language_model." + name: tensor for name, tensor in tensors.items()}
    stored["vision_model.patch_embedding.linear.weight"] = torch.ones(4, 4)
    stored["multi_modal_projector.linear_1.weight"] = torch.ones(4, 4)
    return stored, outer


def test_llama4_as_published(root, tmp_path):
    tensors, config, expected = tiny_models.saved(root, "llama4", PROMPTS)
    stored, outer = llama4_outside(tensors, config)
    assert any(name.endswith("feed_forward.experts.gate_up_proj") for name in stored)
    folder = tiny_models.write(tmp_path / "model", stored, outer)
    check(probe(folder, PROMPTS, VOCAB), expected, BOUND)
    said = kt("estimate", folder, "--bandwidth", 10)
    assert (said.returncode == 0
            and ": 2 tensors not used: parts for images, sound or video (multi_modal_projector." in said.stderr)


@pytest.mark.parametrize("more,first", [
    (dict(attention_chunk_size=1024, layer_types=["full_attention"] * 4), 32),
    (dict(use_qk_norm=False), 1),
    (dict(no_rope_layers=[1, 1, 1, 1], layer_types=["chunked_attention"] * 3 + ["full_attention"]), 1)])
def test_parts_of_llama4_are_seen_in_the_logits(more, first):
    """The comparisons would notice a model without chunks, norms or layers that do not turn."""
    ids = [prompt(130, VOCAB)]
    ours, other = (tiny_models.logits(tiny_models.build("llama4", **changes), ids) for changes in ({}, more))
    apart = differences(other, ours)
    assert apart[:first].max() < BOUND and apart[first:].max() > 10 * BOUND


def test_growth_is_seen_in_the_logits():
    ids = [prompt(130, VOCAB)]
    grown, still = (tiny_models.logits(tiny_models.build(GROWS, attn_temperature_tuning=on), ids)
                    for on in (True, False))
    apart = differences(still, grown)
    assert apart[:15].max() == 0 and apart[15:].max() > 10 * BOUND


@pytest.mark.parametrize("values,line", [
    (dict(attention_chunk_size=0), "attention_chunk_size is 0, expected a whole number from 1"),
    (dict(no_rope_layers=[1, 0]), "no_rope_layers is a list of 2, expected one number for each of 4 layers"),
    (dict(hidden_act="tanh"), 'hidden_act is "tanh"; supported: silu')])
def test_bad_configs_of_llama4(root, tmp_path, values, line):
    folder = tiny_models.save(tiny_models.build("llama4"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    done = kt("estimate", folder, "--bandwidth", 10)
    assert done.returncode in (2, 4) and done.stderr.count("\n") == 1 and line in done.stderr, done.stderr


# --- the same bits ----------------------------------------------------------------------------------------------------


def one_by_one(tensors):
    """Llama 4's fused experts, [experts, in, out], as matrices of their own."""
    out = {}
    for name, tensor in tensors.items():
        fused = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
        if not fused:
            out[name] = tensor
            continue
        for expert, matrix in enumerate(tensor.transpose(1, 2)):
            parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2))) if "up" in fused[2] else {"down_proj": matrix}
            out |= {f"{fused[1]}.{expert}.{part}.weight": each.contiguous() for part, each in parts.items()}
    return out


def tensors_of(root, family):
    """Sizes that bytes with one scale a row divide."""
    if family == "smallthinker":
        return smallthinker.draw(hidden_size=128, moe_ffn_hidden_size=64, num_attention_heads=4, head_dim=32)
    model = tiny_models.build(GROWS, hidden_size=128, head_dim=32, intermediate_size=64, intermediate_size_mlp=96)
    folder = tiny_models.save(model, root / "llama4-plain")
    config = json.loads((folder / "config.json").read_text())
    return one_by_one(safetensors.torch.load_file(folder / "model.safetensors")), config


@functools.cache
def integers(root, family):
    """Every matrix in int8 with one scale a row, as compressed-tensors stores them, the head too: products are exact.
    And the numbers that are stored."""
    tensors, config = tensors_of(root, family)
    packed, stored, values = published.Packed(8, None, False), {}, {}
    packed.takes = lambda name, tensor: (name.endswith(".weight") and tensor.ndim == 2
                                         and not re.search("embed|router", name))
    for name, tensor in tensors.items():
        parts, value = packed.store(name, tensor, None)
        stored |= parts
        values |= value
    return (tiny_models.write(root / f"{family}-int8", stored, config | dict(quantization_config=packed.quantization)),
            values)


families = pytest.mark.parametrize("family", ["llama4", "smallthinker"])


@families
def test_cuts_company_and_threads_change_no_bit(root, family):
    folder, ids = integers(root, family)[0], PROMPTS[2]
    whole = probe_exactly(folder, [ids], VOCAB)
    for cuts in ("1", "31", "32,33", "63", "64", "65", "128,129", "1,2,3,64,65,127"):
        assert (probe_exactly(folder, [ids], VOCAB, "--cuts", cuts) == whole).all(), cuts
    for threads in ("1", "3"):
        others = [prompt(tokens, VOCAB, 5) for tokens in (40, 3, 97)]
        ours = probe_exactly(folder, [others[0], ids, *others[1:]], VOCAB, "--threads", threads, "--chunk", "50")
        assert (ours[40:170] == whole).all(), threads


def test_experts_of_smallthinker_in_integers(root):
    folder, values = integers(root, "smallthinker")
    expected = smallthinker.logits(values, json.loads((folder / "config.json").read_text()), PROMPTS[:3])
    check(probe(folder, PROMPTS[:3], VOCAB), expected, BOUND)


# --- converted, calibrated --------------------------------------------------------------------------------------------


def plain(root, family):
    if family == "smallthinker":
        return small(root, "published", "bf16")[0]
    return tiny_models.save(tiny_models.build(GROWS, torch.bfloat16), root / "llama4-bf16", torch.bfloat16)


@families
def test_converted_experts(root, tmp_path, family):
    """Bytes for weights cost some thousandths of the logits; a merged folder and a model beside its experts are one."""
    folder = plain(root, family)
    kt_ok("quant", folder, "-o", tmp_path / "int8", "--method", "int8", "--numa-nodes", "1", "--yes")
    ours = probe(tmp_path / "int8", PROMPTS[:3], VOCAB)
    assert (ours == probe(folder, PROMPTS[:3], VOCAB, "--weights", str(tmp_path / "int8"))).all()
    apart = differences(ours, probe(folder, PROMPTS[:3], VOCAB))
    assert 0 < np.quantile(apart, 0.8) < 0.03  # a token here and there is sent elsewhere


def test_calibrated_smallthinker(tmp_path):
    """Routers before attention, experts with ReLU and names of their own: rounded better than to the nearest. Llama 4
    is among the families of calibration_targets_test.py."""
    tensors, config = smallthinker.draw(dtype=torch.bfloat16, vocab_size=4096, num_hidden_layers=3,
                                        rope_layout=[0, 1, 1],
                                        sliding_window_layout=[0, 1, 1], hidden_size=128, moe_ffn_hidden_size=64)
    model = smallthinker.save(tmp_path / "model", tensors, config, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, model)
    lines = [f"Once upon a time there was a fox who counted to {n}, and an owl who ate {n} plums." for n in range(60)]
    (tmp_path / "text.txt").write_text("\n<|endoftext|>\n".join(lines))
    command = ["quant", "gpu", model, "--type", "W4A16", "--group-size", "-1", "--targets", "all", "-o"]
    kt_ok(*command, tmp_path / "out", "--method", "GPTQ", "--dataset", tmp_path / "text.txt")
    report = json.loads((tmp_path / "out" / "kt_calibration.json").read_text())
    done = [each for layer in report["layers"] for each in layer["experts"] + layer["linears"]
            if each["method"] == "gptq"]
    assert len(done) > 15 and all(each["error"] < each["rtn_error"] for each in done)


# --- GGUF files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", SMALL)
def test_a_gguf_file_of_smallthinker(root, tmp_path, key):
    folder, _, _, expected = small(root, key, "f32")
    path = gguf_files.Model(folder).write(tmp_path / "m.gguf")
    check(probe(path, PROMPTS[:3], VOCAB), np.concatenate(expected[:3]), BOUND)


# What llama.cpp b21e4de745 chose after 30 tokens of a file of these numbers, cached ones in f32; its best token was
# always ahead by 1.1e-3 of the largest logit or more.
CHOSEN = [47, 26, 266, 187, 137, 200, 258, 190, 229, 151, 26, 266, 130, 293, 17, 164] + [144] * 8
DRAWN = "29a143e09f6739c56108efa883b15fae0d2f65032a54360c49217c08d76abea2"


def test_llama_cpp_s_tokens_of_a_gguf_file_of_smallthinker(tmp_path):
    """That program knows one window, of 4096, which nothing here reaches."""
    tensors, config = smallthinker.draw(sliding_window_size=4096, hidden_size=96, num_attention_heads=4)
    digest = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors)))
    assert digest.hexdigest() == DRAWN, "other numbers than llama.cpp had"
    path = gguf_files.Model(smallthinker.save(tmp_path / "model", tensors, config)).write(tmp_path / "m.gguf")
    given = prompt(30, VOCAB)
    ours = probe(path, [given + CHOSEN[:-1]], VOCAB)[len(given) - 1 :]
    assert ours.argmax(1).tolist() == CHOSEN


def test_a_rounded_gguf_file_of_smallthinker(tmp_path):
    tensors, config = smallthinker.draw(hidden_size=96, moe_ffn_hidden_size=64, num_attention_heads=4)
    kinds = gguf_files.gguf.GGMLQuantizationType
    model = gguf_files.Model(smallthinker.save(tmp_path / "model", tensors, config), lambda name, columns: kinds.Q8_0)
    rounded = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in model.rounded.items()}
    assert not torch.equal(rounded["model.layers.0.block_sparse_moe.experts.3.up.weight"],
                           tensors["model.layers.0.block_sparse_moe.experts.3.up.weight"])
    check(probe(model.write(tmp_path / "m.gguf"), PROMPTS[:3], VOCAB),
          smallthinker.logits(rounded, config, PROMPTS[:3]), BOUND)


def test_a_gguf_file_of_llama4_without_chunks(tmp_path):
    """A window of 0: all layers see all and turn."""
    model = tiny_models.build("llama4", no_rope_layers=[1] * 4, layer_types=["full_attention"] * 4)
    expected = tiny_models.logits(model, PROMPTS[:3])
    file = gguf_files.Model(tiny_models.save(model, tmp_path / "model"))
    file.config["attention_chunk_size"] = 0
    check(probe(file.write(tmp_path / "m.gguf"), PROMPTS[:3], VOCAB), expected, BOUND)


# --- places -----------------------------------------------------------------------------------------------------------


@families
def test_a_gpu_refuses_the_family_by_name(root, family):
    folder = integers(root, family)[0]
    called, what = {"llama4": ("llama4_text", "layers that see a chunk of the text"),
                    "smallthinker": ("smallthinker", "routers before attention")}[family]
    done = kt("estimate", folder, "--bandwidth", 10, "--gpu")
    assert done.returncode == 4 and done.stderr.count("\n") == 1
    line = f": {called} has {what}, and they do not run on a GPU yet; without --gpu all of it runs on the CPU"
    assert line in done.stderr
    done = kt("estimate", folder, "--bandwidth", 10, "--gpu", "auto")
    assert done.returncode == 0 and "everything runs on the CPU: " in done.stderr + done.stdout
