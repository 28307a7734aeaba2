"""Gemma 4 beyond its logits (model_logits_test.py) and its GGUF files (gguf_models_test.py): as published, what the
comparisons would notice, the same bits whatever is cut and shared, converted experts, other ways to write a GGUF file,
bad configs, and where it does not run. KT_MODEL_PROBE names model_probe, KT_PROGRAM kt."""

import functools
import json
import pathlib
import re
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
gguf = pytest.importorskip("gguf", reason="gguf is not installed")
import numpy as np
import safetensors.torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import checkpoints
import gguf_files
import published
import tiny_models
from checkpoints import kt, kt_ok
from logits import PROBE, check, differences, probe, probe_exactly, prompt

pytestmark = pytest.mark.skipif(not (PROBE and checkpoints.KT), reason="KT_MODEL_PROBE or KT_PROGRAM is not set")
BOUND, CHUNK_BOUND = 1e-4, 1e-5  # as in model_logits_test.py
VOCAB = tiny_models.VOCAB
PROMPTS = [prompt(tokens, VOCAB) for tokens in (1, 7, 130, 700)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("gemma4")


@functools.cache
def tiny(root):
    """(tensors, config, logits of PROMPTS)."""
    return tiny_models.saved(root, "gemma4", PROMPTS)


# --- as published -----------------------------------------------------------------------------------------------------


def test_as_published(root, tmp_path):
    """Inside the model that sees; heads of layers that see all beside the others', whatever transformers wrote."""
    tensors, config, expected = tiny(root)
    text = {name: value for name, value in config.items() if name not in ("architectures", "per_layer_config")}
    text |= dict(global_head_dim=40, num_global_key_value_heads=1)
    outer = dict(architectures=["Gemma4ForConditionalGeneration"], model_type="gemma4", text_config=text,
                 vision_config=dict(model_type="gemma4_vision", hidden_size=8), image_token_id=VOCAB - 1)
    stored = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    assert "model.language_model.layers.0.experts.gate_up_proj" in stored
    stored["model.vision_tower.patch_embedder.input_proj.weight"] = torch.ones(4, 4)
    stored["model.embed_vision.embedding_projection.weight"] = torch.ones(4, 4)
    folder = tiny_models.write(tmp_path / "model", stored, outer)
    check(probe(folder, PROMPTS, VOCAB), expected, BOUND)
    said = kt("estimate", folder, "--bandwidth", 10)
    assert said.returncode == 0 and ": 2 tensors not used: parts for images, sound or video" in said.stderr


def test_sizes_of_each_layer(root, tmp_path):
    """As newer versions of transformers write them."""
    tensors, config, expected = tiny(root)
    gone = ("global_head_dim", "num_global_key_value_heads", "per_layer_config")
    config = {name: value for name, value in config.items() if name not in gone}
    last = str(config["num_hidden_layers"] - 1)
    config["per_layer_config"] = {last: dict(head_dim=40, num_key_value_heads=1)}
    check(probe(tiny_models.write(tmp_path / "model", tensors, config), PROMPTS, VOCAB), expected, BOUND)


ROTATIONS = dict(sliding_attention=dict(rope_type="default", rope_theta=10000.0))
WHOLE = dict(ROTATIONS, full_attention=dict(rope_type="proportional", rope_theta=1e6, partial_rotary_factor=1.0))


@pytest.mark.parametrize("more,first", [
    (dict(sliding_window=1024), 24), (dict(final_logit_softcapping=None), 0), (dict(rope_parameters=WHOLE), 1)])
def test_parts_are_seen_in_the_logits(more, first):
    """The comparisons would notice a model without windows, without a cap, or with heads that rotate as a whole."""
    ids = [prompt(130, VOCAB)]
    ours, other = (tiny_models.logits(tiny_models.build("gemma4", **changes), ids) for changes in ({}, more))
    apart = differences(other, ours)
    assert apart[:first].max(initial=0) < BOUND and apart[first:].max() > 10 * BOUND


# --- the same bits ----------------------------------------------------------------------------------------------------


def one_by_one(tensors):
    """Fused experts, [experts, out, in], as matrices of their own."""
    out = {}
    for name, tensor in tensors.items():
        fused = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
        if not fused:
            out[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2))) if "up" in fused[2] else {"down_proj": matrix}
            out |= {f"{fused[1]}.{expert}.{part}.weight": each.contiguous() for part, each in parts.items()}
    return out


@functools.cache
def integers(root):
    """Every matrix but router and embedding in int8 with one scale a row, as compressed-tensors stores them, experts
    one by one, the head too: products are exact."""
    model = tiny_models.build("gemma4", hidden_size=128, head_dim=32, global_head_dim=64, moe_intermediate_size=64,
                              intermediate_size=96, tie_word_embeddings=False)
    folder = tiny_models.save(model, root / "plain")
    config = json.loads((folder / "config.json").read_text())
    packed, stored = published.Packed(8, None, False), {}
    packed.takes = lambda name, tensor: (name.endswith(".weight") and tensor.ndim == 2
                                         and not re.search("embed|router", name))
    for name, tensor in one_by_one(safetensors.torch.load_file(folder / "model.safetensors")).items():
        stored |= packed.store(name, tensor, None)[0]
    config["quantization_config"] = packed.quantization
    return tiny_models.write(root / "int8", stored, config)


def test_cuts_company_and_threads_change_no_bit(root):
    folder, ids = integers(root), PROMPTS[2]
    whole = probe_exactly(folder, [ids], VOCAB)
    for cuts in ("1", "23", "24,25", "63", "64", "65", "128,129", "1,2,3,64,65,127"):
        assert (probe_exactly(folder, [ids], VOCAB, "--cuts", cuts) == whole).all(), cuts
    for threads in ("1", "3"):
        others = [prompt(tokens, VOCAB, 5) for tokens in (40, 3, 97)]
        ours = probe_exactly(folder, [others[0], ids, *others[1:]], VOCAB, "--threads", threads, "--chunk", "50")
        assert (ours[40:170] == whole).all(), threads


# --- converted --------------------------------------------------------------------------------------------------------


def test_converted_experts(root, tmp_path):
    """Bytes for weights cost some thousandths of the logits; a merged folder and a model beside its experts are one."""
    folder = tiny_models.save(tiny_models.build("gemma4", torch.bfloat16), tmp_path / "bf16", torch.bfloat16)
    kt_ok("quant", folder, "-o", tmp_path / "int8", "--method", "int8", "--numa-nodes", "1", "--yes")
    ours = probe(tmp_path / "int8", PROMPTS[:3], VOCAB)
    assert (ours == probe(folder, PROMPTS[:3], VOCAB, "--weights", str(tmp_path / "int8"))).all()
    apart = differences(ours, probe(folder, PROMPTS[:3], VOCAB))
    assert 0 < np.quantile(apart, 0.8) < 0.03  # a token here and there is sent elsewhere


# --- GGUF files -------------------------------------------------------------------------------------------------------


def file_of(tmp_path, change=lambda tensors: None, more=lambda writer: None):
    folder = tmp_path / "model"
    tiny_models.save(tiny_models.build("gemma4", torch.bfloat16), folder)
    model = gguf_files.Model(folder)
    return model.write(tmp_path / "m.gguf", more, change)


def test_gate_and_up_apart(root, tmp_path):
    def apart(tensors):
        for name in [name for name in tensors if "ffn_gate_up_exps" in name]:
            values, kind = tensors.pop(name)
            gate, up = np.split(values, 2, axis=1)
            tensors[name.replace("gate_up", "gate")] = (np.ascontiguousarray(gate), kind)
            tensors[name.replace("gate_up", "up")] = (np.ascontiguousarray(up), kind)

    check(probe(file_of(tmp_path, apart), PROMPTS, VOCAB), tiny(root)[2], BOUND)


@pytest.mark.parametrize("gone", ["blk.1.ffn_down_exps.scale", "blk.0.ffn_gate_inp.scale",
                                  "blk.2.layer_output_scale.weight", "blk.0.post_ffw_norm_1.weight"])
def test_a_missing_tensor_is_named(tmp_path, gone):
    done = kt("estimate", file_of(tmp_path, lambda tensors: tensors.pop(gone)), "--bandwidth", 10)
    assert done.returncode == 2 and f": no tensor {gone}" in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize("key,values,line", [
    ("attention.head_count_kv", [2, 1], "gemma4.attention.head_count_kv has 2 numbers, expected 3"),
    ("attention.sliding_window_pattern", [True, False],
     "gemma4.attention.sliding_window_pattern is a list of 2, expected one string for each of 3 layers"),
    ("embedding_length_per_layer_input", 256, "gemma4.embedding_length_per_layer_input is 256; supported: 0"),
    ("attention.shared_kv_layers", 1, "gemma4.attention.shared_kv_layers is 1; supported: 0")])
def test_bad_metadata(tmp_path, key, values, line):
    def spoil(writer):
        for data in writer.kv_data:
            data.pop("gemma4." + key, None)
        (writer.add_array if isinstance(values, list) else writer.add_uint32)("gemma4." + key, values)

    done = kt("estimate", file_of(tmp_path, more=spoil), "--bandwidth", 10)
    assert done.returncode in (2, 4) and done.stderr.count("\n") == 1 and line in done.stderr, done.stderr


def test_texts_from_a_file(tmp_path):
    """Tokenizer and model of one file: what transformers chooses after the same tokens."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)),
              "\u2581", "a", "b", "c", "ab", "\u2581ab"]
    pieces += [f"<unused{i}>" for i in range(VOCAB - len(pieces))]

    def add(writer):
        writer.add_string("tokenizer.ggml.model", "gemma4")
        writer.add_token_list(pieces)
        writer.add_token_types([3, 3, 3, 2] + [6] * 256 + [1] * (VOCAB - 260))
        writer.add_token_merges(["a b", "\u2581 ab"])
        writer.add_uint32("tokenizer.ggml.bos_token_id", 2)
        writer.add_uint32("tokenizer.ggml.eos_token_id", 1)

    path = file_of(tmp_path, more=add)
    done = kt_ok("generate", path, "-p", "ab c ab", "--acts", "f32", "--kv", "f32", "--temperature", 0,
                 "--max-tokens", 30, "--json")
    ids = [2, *(pieces.index(piece) for piece in ("ab", "\u2581", "c", "\u2581ab"))]
    model, chosen = tiny_models.build("gemma4", torch.bfloat16), []
    while len(chosen) < 30 and 1 not in chosen:
        chosen.append(int(tiny_models.logits(model, [ids + chosen])[-1].argmax()))
    assert len(chosen) > 5 and json.loads(done.stdout)["tokens"] == [token for token in chosen if token != 1]


# --- bad configs, places ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values,line", [
    (dict(layer_types=["full_attention"]), "layer_types is a list of 1, expected one string for each of 3 layers"),
    (dict(hidden_activation="tanh"), 'hidden_activation is "tanh"; supported: silu'),
    (dict(hidden_size_per_layer_input=256), "hidden_size_per_layer_input is 256; supported: 0"),
    (dict(top_k_experts=9), "top_k_experts: 9 of 8 experts cannot be chosen")])
def test_bad_configs(root, tmp_path, values, line):
    tensors, config, _ = tiny(root)
    done = kt("estimate", tiny_models.write(tmp_path / "model", tensors, config | values), "--bandwidth", 10)
    assert done.returncode in (2, 4) and done.stderr.count("\n") == 1 and line in done.stderr, done.stderr


def test_a_gpu_refuses_the_family_by_name(root):
    folder = integers(root)
    done = kt("estimate", folder, "--bandwidth", 10, "--gpu")
    assert done.returncode == 4 and done.stderr.count("\n") == 1
    assert (": gemma4_text has norms of values, and they do not run on a GPU yet; without --gpu all of it runs on the "
            "CPU") in done.stderr
    done = kt("estimate", folder, "--bandwidth", 10, "--gpu", "auto")
    assert done.returncode == 0 and "everything runs on the CPU: " in done.stderr + done.stdout
