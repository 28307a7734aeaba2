"""Families of 2026 as they are published, and the other ways their experts can lie: names and keys of the checkpoints
people download, layers for further tokens and parts for images beside them, experts in one tensor, one by one, and
converted.

KT_MODEL_PROBE names model_probe, KT_PROGRAM kt. transformers' own save of Kimi-K2.5 renames "layers" to "blocks" in
places where the published files do not; its names are written here.
"""

import functools
import json
import pathlib
import re
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
import numpy as np
import safetensors.torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import checkpoints
import published
import tiny_models
from logits import PROBE, check, differences, probe, prompt

pytestmark = pytest.mark.skipif(not (PROBE and checkpoints.KT), reason="KT_MODEL_PROBE or KT_PROGRAM is not set")

BOUND = 1e-4  # as in model_logits_test.py
VOCAB = tiny_models.VOCAB
PROMPTS = [prompt(tokens, VOCAB) for tokens in (1, 7, 130)]
FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
newer = pytest.mark.parametrize("key", tiny_models.NEWER)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("published")


@functools.cache
def saved(root, key):
    """(tensors under the names that transformers saves, config, logits) of a model whose numbers are bf16."""
    return tiny_models.saved(root, key, PROMPTS)


def one_by_one(tensors):
    """Fused experts as matrices of their own."""
    out = {}
    for name, tensor in tensors.items():
        fused = FUSED.fullmatch(name)
        if not fused:
            out[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2))) if "up" in fused[2] else {"down_proj": matrix}
            out.update({f"{fused[1]}.{expert}.{part}.weight": each for part, each in parts.items()})
    return out


def in_one(tensors):
    """The way back: [experts, 2 inter, hidden] and [experts, hidden, inter], as transformers 5 holds them."""
    out, stacks = {}, {}
    for name, tensor in tensors.items():
        single = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)\.weight", name)
        if single:
            stacks.setdefault((single[1], single[3]), {})[int(single[2])] = tensor
        else:
            out[name] = tensor
    for stem in {stem for stem, _ in stacks}:
        gate, up, down = (torch.stack([stacks[stem, part][i] for i in range(len(stacks[stem, part]))])
                          for part in ("gate_proj", "up_proj", "down_proj"))
        out[f"{stem}.gate_up_proj"], out[f"{stem}.down_proj"] = torch.cat((gate, up), 1), down
    return out


def said(folder):
    """What kt says of tensors that it leaves alone."""
    done = checkpoints.kt("estimate", folder, "--bandwidth", "10")
    assert done.returncode == 0, done.stderr
    return done.stderr


class TestExperts:
    @newer
    def test_in_one_tensor_or_one_by_one(self, root, key, tmp_path):
        tensors, config, expected = saved(root, key)
        apart = tiny_models.write(tmp_path / "apart", one_by_one(tensors), config)
        fused = tiny_models.write(tmp_path / "fused", in_one(one_by_one(tensors)), config)
        ours = probe(apart, PROMPTS, VOCAB)
        check(ours, expected, BOUND)
        assert (probe(fused, PROMPTS, VOCAB) == ours).all()
        assert said(fused) == said(apart) == ""

    @newer
    def test_converted(self, root, key, tmp_path):
        """Int8 of a row each: the converted folder by itself, and its experts with the original's other tensors."""
        tensors, config, _ = saved(root, key)
        original = tiny_models.write(tmp_path / "original", tensors, config)
        out = tmp_path / "int8"
        checkpoints.kt_ok("quant", original, "-o", out, "--method", "int8", "--numa-nodes", "1", "--yes")
        rounded = {name: self.rounded(name, tensor.float()) for name, tensor in one_by_one(tensors).items()}
        plain = tmp_path / "plain"
        model = published.load_plain(tiny_models.write(plain, in_one(rounded) if key == "mistral4"
                                                       else rounded, config))
        ours = probe(out, PROMPTS, VOCAB)
        check(ours, tiny_models.logits(model, PROMPTS), BOUND)
        assert (probe(original, PROMPTS, VOCAB, "--weights", str(out)) == ours).all()
        assert differences(probe(original, PROMPTS, VOCAB), ours).max() > 10 * BOUND

    @staticmethod
    def rounded(name, tensor):
        if not published.EXPERT.search(name):
            return tensor
        codes, scales = checkpoints.quantise(tensor.numpy(), 8)
        return torch.from_numpy(codes.astype(np.float32) * scales[:, None])


# --- Kimi-K2.5 --------------------------------------------------------------------------------------------------------

VISION = dict(patch_size=4, pos_emb_height=4, pos_emb_width=4, num_attention_heads=2, num_hidden_layers=2,
              hidden_size=32, intermediate_size=48)


def kimi_name(name):
    """transformers' own names of a model in memory, as published."""
    for ours, theirs in (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
                         ("model.mm_projector.in_proj.", "mm_projector.proj.0."),
                         ("model.mm_projector.out_proj.", "mm_projector.proj.2."),
                         ("model.mm_projector.", "mm_projector."),
                         ("model.vision_tower.layers.", "vision_tower.encoder.blocks."),
                         ("model.vision_tower.", "vision_tower.")):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    raise AssertionError(name)


@pytest.mark.parametrize("packed", [None, published.Packed(4, 32, True)], ids=["bf16", "int4"])
def test_kimi_k25(tmp_path, packed):
    _, text = tiny_models.MODELS["deepseek_v3"]
    rope = dict(tiny_models.YARN, rope_theta=50000.0, mscale=1.0, mscale_all_dim=1.0)
    sizes = dict(tiny_models.SIZES,
                 **dict(text, n_group=1, topk_group=1, routed_scaling_factor=2.827, rope_parameters=rope))
    sizes.pop("attn_implementation")
    config = transformers.Kimi_K25Config(
        text_config=dict(sizes, model_type="deepseek_v3"), vision_config=VISION, projection_hidden_size=128,
        image_token_id=VOCAB - 1, video_token_id=VOCAB - 2, vision_start_token_id=VOCAB - 3,
        vision_end_token_id=VOCAB - 4, tie_word_embeddings=False, attn_implementation="eager")
    model = transformers.Kimi_K25ForConditionalGeneration(config).eval().float()
    draw = torch.Generator().manual_seed(1)
    state, stored = model.state_dict(), {}
    with torch.no_grad():
        for name, tensor in state.items():
            if not tensor.is_floating_point():
                continue
            tensor.copy_(tiny_models._draw(name, tensor, draw).bfloat16().float())
            parts, values = {}, {}
            for each, matrix in one_by_one({kimi_name(name): tensor}).items():
                if packed:
                    kept, value = packed.store(each, matrix, draw)
                else:
                    kept, value = {each: matrix.bfloat16()}, {each: matrix}
                parts.update(kept)
                values.update(value)
            stored.update(parts)
            tensor.copy_(next(iter(in_one(values).values())) if len(values) == 1 else _fused(values, tensor))
    prompts = [[token % (VOCAB - 4) for token in ids] for ids in PROMPTS]  # no images
    expected = tiny_models.logits(model, prompts)

    inner = json.loads(model.config.text_config.to_json_string(use_diff=False))
    old = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    inner = {key: value for key, value in inner.items()
             if key not in ("rope_parameters", "rope_interleave", "head_dim")}
    inner |= dict(model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"], rope_theta=50000.0,
                  rope_scaling=dict(old, type="yarn"), scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    if packed:
        inner["quantization_config"] = packed.quantization
    outer = dict(architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", text_config=inner,
                 tie_word_embeddings=False, vision_config=dict(vt_hidden_size=32, vt_num_hidden_layers=2))
    folder = tiny_models.write(tmp_path / "model", stored, outer)
    check(probe(folder, prompts, VOCAB), expected, BOUND)
    check(probe(folder, prompts[-1:], VOCAB, "--chunk", "33"), expected[-len(prompts[-1]) :], BOUND)
    idle = sum(name.startswith(("vision_tower.", "mm_projector.")) for name in stored)
    assert idle > 10 and f": {idle} tensors not used: parts for images, sound or video (mm_projector." in said(folder)
    out = tmp_path / "int8"
    checkpoints.kt_ok("quant", folder, "-o", out, "--method", "int8", "--numa-nodes", "1", "--yes")
    assert (probe(out, prompts, VOCAB) == probe(folder, prompts, VOCAB, "--weights", str(out))).all()


def _fused(values, like):
    """Experts' matrices as the tensor of all of them."""
    matrices = {}
    for name, value in values.items():
        expert, part = re.search(r"\.experts\.(\d+)\.(\w+)\.weight$", name).groups()
        matrices[int(expert), part] = value
    rows = [[matrices[e, part] for part in ("gate_proj", "up_proj", "down_proj") if (e, part) in matrices]
            for e in range(like.shape[0])]
    return torch.stack([torch.cat(parts) for parts in rows])


# --- Mistral Small 4 --------------------------------------------------------------------------------------------------


class Fp8Fused(published.Fp8Static):
    """As Fp8Static, and of all experts in one tensor a scale each, [experts, 1, 1], with those of what they read."""

    def store(self, name, tensor, draw):
        if not FUSED.fullmatch(name):
            return super().store(name, tensor, draw)
        scale = tensor.abs().amax((1, 2), keepdim=True) / 448 * (1 + torch.rand(len(tensor), 1, 1, generator=draw))
        codes = (tensor / scale).to(torch.float8_e4m3fn)
        beside = {name + "_scale_inv": scale, name + "_activation_scale": torch.full((len(tensor),), 0.02)}
        return {name: codes, **beside}, {name: codes.float() * scale}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("format", ["bf16", "fp8", "int4"])
def test_mistral_small_4(tmp_path, prefix, format):
    how = {"bf16": published.Plain(torch.bfloat16), "fp8": Fp8Fused(), "int4": published.Packed(4, 32, True)}[format]
    model = tiny_models.build("mistral4", hidden_size=96, moe_intermediate_size=160)
    plain = tiny_models.save(model, tmp_path / "plain")
    tensors = safetensors.torch.load_file(plain / "model.safetensors")
    if format == "int4":  # that library packs matrices of their own
        tensors = one_by_one(tensors)
    stored, values, draw = {}, {}, torch.Generator().manual_seed(7)
    for name, tensor in tensors.items():
        kept, value = how.store(name, tensor, draw)
        head = "lm_head" if prefix.startswith("model.") else "language_model.lm_head"
        stored |= {re.sub(r"^lm_head", head, re.sub(r"^model\.", prefix, each)): part for each, part in kept.items()}
        values |= value
    stored["vision_tower.patch_conv.weight"] = torch.ones(4)
    stored["multi_modal_projector.linear_1.weight"] = torch.ones(4)
    config = json.loads((plain / "config.json").read_text())
    safetensors.torch.save_file(in_one(values) if format == "int4" else values, plain / "model.safetensors",
                                metadata={"format": "pt"})
    outer = dict(architectures=["Mistral3ForConditionalGeneration"], model_type="mistral3", text_config=config,
                 vision_config=dict(hidden_size=8), tie_word_embeddings=False)
    if how.quantization:
        outer["quantization_config"] = how.quantization
    folder = tiny_models.write(tmp_path / "stored", stored, outer)
    check(probe(folder, PROMPTS, VOCAB), tiny_models.logits(published.load_plain(plain), PROMPTS), BOUND)
    assert ": 2 tensors not used: parts for images, sound or video (multi_modal_projector." in said(folder)


def test_growth_is_seen_in_the_logits():
    """The comparisons would notice queries that do not grow, but only behind the first 64 positions."""
    _, config = tiny_models.MODELS["mistral4"]
    rope = dict(config["rope_parameters"], llama_4_scaling_beta=0.0)
    ids = [prompt(130, VOCAB)]
    grown, still = (tiny_models.logits(tiny_models.build("mistral4", **more), ids)
                    for more in ({}, {"rope_parameters": rope}))
    apart = differences(still, grown)
    assert apart[:64].max() == 0 and apart[64:].max() > 10 * BOUND


# --- keys and layers beside -------------------------------------------------------------------------------------------


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def glm_4_7_flash(tensors, config):
    """A count of dense layers, one layer for further tokens, positions beside."""
    extra = {name.replace("layers.2.", "layers.3."): tensor for name, tensor in tensors.items() if "layers.2." in name}
    extra["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    config = dict(without(config, "mlp_layer_types", "rope_parameters", "rope_interleave"), first_k_dense_replace=1,
                  num_nextn_predict_layers=1, rope_theta=1000000, rope_scaling=None, topk_method="noaux_tc",
                  partial_rotary_factor=1.0)
    return tensors | extra, config, "layers for further tokens (model.layers.3."


def hy3(tensors, config):
    """An expert's size twice, words of its router, one layer for further tokens."""
    extra = {name.replace("layers.2.", "layers.3."): tensor for name, tensor in tensors.items() if "layers.2." in name}
    extra |= {"model.layers.3.eh_proj.weight": torch.ones(64, 128),
              "model.layers.3.final_layernorm.weight": torch.ones(64)}
    config = dict(without(config, "mlp_layer_types"), first_k_dense_replace=1, num_nextn_predict_layers=1, qk_norm=True,
                  expert_hidden_dim=config["moe_intermediate_size"], moe_router_use_sigmoid=True, route_norm=True,
                  moe_router_enable_expert_bias=True)
    assert any("mlp.router.gate" in name for name in tensors) and any("mlp.expert_bias" in name for name in tensors)
    return tensors | extra, config, "layers for further tokens (model.layers.3."


def ernie(tensors, config):
    extra = {"model.mtp_block.0.self_attn.q_proj.weight": torch.ones(64, 64),
             "model.mtp_emb_norm.0.weight": torch.ones(64),
             "model.mtp_linear_proj.0.weight": torch.ones(64, 128)}
    config = dict(without(config, "rope_parameters"), rope_theta=500000, moe_use_aux_free=True, moe_gate="topk",
                  moe_capacity=[8, 8, 8], num_nextn_predict_layers=1, use_bias=False)
    shapes = [tensor.shape for name, tensor in tensors.items() if "moe_statics.e_score_correction_bias" in name]
    assert shapes == [(1, 8)] * 2
    return tensors | extra, config, "layers for further tokens (model.mtp_block.0."


def dots(tensors, config):
    return tensors, dict(without(config, "rope_parameters", "layer_types"), rope_theta=10000000,
                         scoring_func="noaux_tc", topk_method="noaux_tc", moe_layer_freq=1), ""


def solar(tensors, config):
    return tensors, dict(without(config, "rope_parameters"), rope_theta=1000000, rope_scaling=None, use_qk_norm=False,
                         partial_rotary_factor=1.0, first_k_dense_replace=0, intermediate_size=10240), ""


@pytest.mark.parametrize("key,change", [("glm4_moe_lite", glm_4_7_flash), ("hy_v3", hy3), ("ernie4_5_moe", ernie),
                                        ("dots1", dots), ("solar_open", solar)])
def test_as_published(root, tmp_path, key, change):
    tensors, config, expected = saved(root, key)
    tensors, config, idle = change(tensors, config)
    folder = tiny_models.write(tmp_path / "model", tensors, config)
    check(probe(folder, PROMPTS, VOCAB), expected, BOUND)
    assert idle in said(folder) if idle else said(folder) == ""
