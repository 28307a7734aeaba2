"""`kt sft export --layout gguf` and `--layout merged`: what PyPI's gguf reads in the file, against PEFT's own factors;
the same logits from the file as from the folder; weights merged bit for bit as torch adds and rounds them, from plain,
fused and quantised checkpoints, killed in between; adapters of other models.

KT_PROGRAM names kt, KT_MODEL_PROBE model_probe."""
import json
import pathlib
import shutil
import sys

import pytest

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
import safetensors.torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import adapter_test
import checkpoints
import gguf_files
import tiny_models
from checkpoints import KT, error_line, kt
from logits import PROBE, check, probe, prompt

pytestmark = pytest.mark.skipif(not (KT and PROBE), reason="KT_PROGRAM or KT_MODEL_PROBE is not set")
SCALE = adapter_test.ALPHA / adapter_test.RANK
RANK = adapter_test.RANK
PROMPTS = [prompt(tokens, tiny_models.VOCAB) for tokens in (1, 40)]


def export(adapter, out, layout, *more, code=0):
    done = kt("sft", "export", adapter, "-o", out, "--layout", layout, *more)
    assert done.returncode == code, done.stderr
    return done


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A model's folder, an adapter of every matrix of it, and the model with what that adds; once for each."""
    root, made = tmp_path_factory.mktemp("adapted"), {}

    def call(key, layout):
        if (key, layout) not in made:
            at = root / f"{key}-{layout}"
            folder = tiny_models.save(tiny_models.build(key, torch.float32), at / "model")
            model = tiny_models.build(key, torch.float32)
            words = {"base_model_name_or_path": str(folder)}
            if layout == "fused":
                words["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            made[key, layout] = folder, adapter_test.write(at / "adapter", adapter_test.adapt(model, layout),
                                                           **words), model
        return made[key, layout]

    return call


# --- GGUF ------------------------------------------------------------------------------------------------------------

def deltas_in_gguf(path):
    """{tensor of the model: what the file adds to it}, experts stacked."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "adapter" and fields["adapter.type"] == "lora"
    factors = {tensor.name: np.asarray(tensor.data) for tensor in reader.tensors}
    assert all(tensor.tensor_type == gguf.GGMLQuantizationType.F32 for tensor in reader.tensors)
    out = {}
    for name, a in factors.items():
        if name.endswith(".lora_a"):
            b = factors[name[:-1] + "b"]
            out[name.removesuffix(".lora_a")] = fields["adapter.lora.alpha"] / a.shape[-2] * (b @ a)
    assert len(factors) == 2 * len(out)
    return fields["general.architecture"], out


def deltas_of_model(key, with_it):
    """The same from the published weights, as the public converter turns and names them."""
    before, after = tiny_models.build(key, torch.float32).state_dict(), with_it.state_dict()
    config, out = with_it.config, {}
    for name in before:
        delta = (after[name] - before[name]).float().numpy()
        if not np.any(delta):
            continue
        if name.endswith("experts.gate_up_proj"):
            half = delta.shape[1] // 2
            block = name.split("layers.")[1].split(".")[0]
            out[f"blk.{block}.ffn_gate_exps.weight"], out[f"blk.{block}.ffn_up_exps.weight"] = (delta[:, :half],
                                                                                                delta[:, half:])
        elif name.endswith("experts.down_proj"):
            out[f"blk.{name.split('layers.')[1].split('.')[0]}.ffn_down_exps.weight"] = delta
        elif ".layers." in name:
            block, module = name.split("layers.")[1].removesuffix(".weight").split(".", 1)
            if module == "self_attn.kv_b_proj":
                heads = delta.reshape(config.num_attention_heads, -1, delta.shape[1])
                out[f"blk.{block}.attn_k_b.weight"] = heads[:, :config.qk_nope_head_dim].swapaxes(1, 2)
                out[f"blk.{block}.attn_v_b.weight"] = heads[:, config.qk_nope_head_dim:]
                continue
            if gguf_files.ARCHITECTURES[config.model_type] == "llama" and module.endswith((".q_proj", ".k_proj")):
                q = module.endswith("q_proj")
                delta = gguf_files.permuted(delta, config.num_attention_heads if q else config.num_key_value_heads)
            out[f"blk.{block}.{gguf_files.MODULES[module]}.weight"] = delta
        else:
            out[gguf_files.MODULES[name.removesuffix(".weight")] + ".weight"] = delta
    return out


@pytest.mark.parametrize("key,layout", [("qwen3_moe", "fused"), ("qwen2_moe", "single"), ("mixtral", "fused"),
                                        ("deepseek_v3", "fused")])
def test_gguf_adapter(tmp_path, adapted, key, layout):
    folder, adapter, with_it = adapted(key, layout)
    out = tmp_path / "adapter.gguf"
    done = export(adapter, out, "gguf", "--json")
    facts, (architecture, found) = json.loads(done.stdout), deltas_in_gguf(out)
    wanted = deltas_of_model(key, with_it)
    assert architecture == facts["architecture"] == gguf_files.ARCHITECTURES[key]
    assert found.keys() == wanted.keys() and facts["matrices"] == len(found)
    for name, delta in wanted.items():
        assert found[name].shape == delta.shape, name
        assert np.abs(found[name] - delta).max() <= 1e-6 * np.abs(delta).max() + 1e-6, name
    latent = {name for name in found if ".attn_" in name and "attn_output" not in name} if "deepseek" in key else set()
    assert set(facts["unused"]) == latent and ("llama.cpp" in done.stderr) == bool(latent)
    # The same model from the file as from the folder.
    from_folder = probe(folder, PROMPTS, tiny_models.VOCAB, "--adapter", str(adapter), "--use", "0")
    check(from_folder, np.concatenate([tiny_models.logits(with_it, [ids]) for ids in PROMPTS]), 1e-4)
    check(probe(folder, PROMPTS, tiny_models.VOCAB, "--adapter", str(out), "--use", "0"), from_folder, 1e-5)


def test_gguf_of_gate_and_up_with_factors_of_their_own(tmp_path, adapted):
    """Joined for the fused layout and apart again: the rank is what it was."""
    folder, adapter, _ = adapted("qwen3_moe", "single")
    tensors = {name: t for name, t in safetensors.torch.load_file(adapter / "adapter_model.safetensors").items()}
    for e in range(1, 8, 2):  # the fused layout has factors for every expert
        for name in [n for n in tensors if ".experts.0." in n]:
            tensors[name.replace(".experts.0.", f".experts.{e}.")] = tensors[name] * (e + 1)
    whole = adapter_test.write(tmp_path / "whole", tensors, base_model_name_or_path=str(folder),
                               target_modules=["q_proj"])
    export(whole, tmp_path / "joined", "fused")
    export(whole, tmp_path / "a.gguf", "gguf")
    export(tmp_path / "joined", tmp_path / "b.gguf", "gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    ranks = {t.name: t.shape[1] for t in gguf.GGUFReader(tmp_path / "b.gguf").tensors
             if t.name.endswith("exps.weight.lora_a")}
    assert set(ranks.values()) == {RANK}


def test_what_no_gguf_says(tmp_path, adapted):
    folder, adapter, _ = adapted("qwen3_moe", "fused")

    def refused(source, *words, out="x.gguf", code=2, more=()):
        line = error_line(export(source, tmp_path / out, "gguf", *more, code=code).stderr)
        assert all(word in line for word in words), line
        assert not (tmp_path / out).exists()

    refused(adapter, "one file", out="folder")
    refused(adapter, "--layout merged", more=("--resume",))
    other = tiny_models.save(tiny_models.build("qwen2_moe", torch.float32), tmp_path / "qwen2_moe")
    refused(adapter, "expected", more=("--model", str(other)))
    nowhere = shutil.copytree(adapter, tmp_path / "nowhere")
    config = json.loads((nowhere / "adapter_config.json").read_text())
    (nowhere / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/no/such/model"}))
    refused(nowhere, "/no/such/model", "--model")
    del config["base_model_name_or_path"]
    (nowhere / "adapter_config.json").write_text(json.dumps(config))
    refused(nowhere, "base_model_name_or_path", "--model")
    recurrent, recurrent_adapter, _ = adapted("qwen3_next", "fused")
    refused(recurrent_adapter, "linear_attn", "qwen3next", code=4)
    export(adapter, tmp_path / "there.gguf", "gguf")
    line = error_line(export(adapter, tmp_path / "there.gguf", "gguf", code=2).stderr)
    assert "--overwrite" in line
    export(adapter, tmp_path / "there.gguf", "gguf", "--overwrite")


# --- merged ----------------------------------------------------------------------------------------------------------

def exact(shape, seed):
    """Quarters between -1/2 and 1/2: sums of their products are exact in any order."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float() / 4


def made_exact(source, folder):
    """The adapter with such factors."""
    shutil.copytree(source, folder)
    tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
    tensors = {name: exact(t.shape, seed) for seed, (name, t) in enumerate(sorted(tensors.items()))}
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return tensors


def factors_for(tensors, name):
    """What the adapter adds to a tensor of transformers' state dict, or none."""
    at = "base_model.model." + name.removesuffix(".weight")
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        at = at.rsplit(".", 1)[0] + (".base_layer" if "gate_up" in name else "")
    if at + ".lora_A.weight" not in tensors:
        return None
    a, b = tensors[at + ".lora_A.weight"], tensors[at + ".lora_B.weight"]
    if ".experts" not in name:
        return SCALE * (b @ a)
    experts = a.shape[0] // RANK
    return SCALE * torch.einsum("ore,eri->eoi", b.reshape(b.shape[0], RANK, experts), a.reshape(experts, RANK, -1))


@pytest.mark.parametrize("key", ["deepseek_v3", "qwen3_moe", "mixtral", "qwen3_5_moe"])
def test_merged_as_torch_adds_and_rounds(tmp_path, adapted, key):
    folder, adapter, _ = adapted(key, "fused")
    tensors = made_exact(adapter, tmp_path / "exact")
    export(tmp_path / "exact", tmp_path / "merged", "merged")
    base = tiny_models.load(folder)
    merged = type(base).from_pretrained(tmp_path / "merged", dtype=torch.bfloat16, attn_implementation="eager")
    config, changed = json.loads((tmp_path / "merged" / "config.json").read_text()), 0
    assert config["dtype" if "dtype" in config else "torch_dtype"] == "bfloat16"
    stored = merged.state_dict()
    for name, values in base.state_dict().items():
        delta = factors_for(tensors, name)
        changed += delta is not None
        wanted = values if delta is None else values + delta
        assert torch.equal(stored[name], wanted.to(stored[name].dtype)), name  # a few stay f32
    assert 2 * changed == len(tensors)
    manifest = json.loads((tmp_path / "merged" / "kt_manifest.json").read_text())
    assert manifest


def test_merged_is_the_model_with_its_adapter(tmp_path, adapted):
    """Random factors: no more apart than bf16 rounds."""
    _, adapter, with_it = adapted("qwen3_moe", "fused")
    export(adapter, tmp_path / "merged", "merged", "--threads", "2", "--max-memory", "1GiB")
    merged = tiny_models.load(tmp_path / "merged").state_dict()
    off = total = 0
    for name, values in with_it.state_dict().items():
        there, wanted = merged[name].bfloat16(), values.bfloat16()
        off, total = off + int((there != wanted).sum()), total + values.numel()
        assert ((there.float() - values).abs() <= values.abs() * 2**-8 + 1e-7).all(), name
    assert off <= 1e-3 * total, (off, total)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_merged_from_quantised_weights(tmp_path, kind):
    made = checkpoints.Model(tmp_path / "model", kind=kind).save()
    generator = np.random.default_rng(5)
    tensors, wanted = {}, {}
    for (layer, e, part), values in made.values.items():
        a = generator.integers(-2, 3, (2, values.shape[1])).astype(np.float32) / 64
        b = generator.integers(-2, 3, (values.shape[0], 2)).astype(np.float32) / 64
        at = f"base_model.model.{made.name(layer, e, part)}"
        tensors[f"{at}.lora_A.weight"], tensors[f"{at}.lora_B.weight"] = torch.tensor(a), torch.tensor(b)
        wanted[made.name(layer, e, part)] = checkpoints.bf16(values + np.float32(2) * (b @ a))
    adapter = adapter_test.write(tmp_path / "adapter", tensors, r=2, lora_alpha=4,
                                 base_model_name_or_path=str(made.folder))
    export(adapter, tmp_path / "merged", "merged")
    found, _ = checkpoints.read_folder(tmp_path / "merged")
    for name, bits in wanted.items():
        dtype, shape, data = found[name + ".weight"]
        assert dtype == "BF16" and data == bits.tobytes(), name
    assert not any("scale" in name for name in found)
    assert (found["model.layers.0.self_attn.q_proj.weight"][2]
            == made.tensors["model.layers.0.self_attn.q_proj.weight"][1].tobytes())
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config and (tmp_path / "merged" / "tokenizer.json").exists()
    # Killed behind its first file (its record has the first of these names), and gone on with: the same bytes.
    words = ("sft", "export", adapter, "-o", tmp_path / "again", "--layout", "merged", "--threads", "1")
    checkpoints.kt_killed("rename 2 model-", *words)
    assert not (tmp_path / "again" / "kt_manifest.json").exists()
    line = error_line(kt(*words).stderr)
    assert "--resume" in line
    resumed = json.loads(checkpoints.kt_ok(*words, "--resume", "--json").stdout)
    assert resumed["shards_kept"] == 1, resumed
    assert checkpoints.digests(tmp_path / "again") == checkpoints.digests(tmp_path / "merged")
    # Another adapter is another conversion.
    tensors = {name: 2 * t for name, t in tensors.items()}
    safetensors.torch.save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    line = error_line(export(adapter, tmp_path / "again", "merged", "--resume", code=2).stderr)
    assert "adapter" in line, line


def test_what_is_not_merged(tmp_path, adapted):
    folder, adapter, _ = adapted("qwen3_moe", "fused")

    def refused(source, *words, model=folder, code=2, more=()):
        line = error_line(export(source, tmp_path / "out", "merged", "--model", model, *more, code=code).stderr)
        assert all(word in line for word in words), line
        assert not (tmp_path / "out").exists()

    tensors = safetensors.torch.load_file(adapter / "adapter_model.safetensors")
    module = "base_model.model.model.layers.7.self_attn.q_proj.lora_"
    foreign = adapter_test.write(tmp_path / "foreign", {**tensors, module + "A.weight": torch.ones(3, 64),
                                                        module + "B.weight": torch.ones(128, 3)})
    refused(foreign, "layers.7.self_attn.q_proj", "fit no matrix of this model")
    other = tiny_models.save(tiny_models.build("qwen2_moe", torch.float32), tmp_path / "qwen2_moe")
    refused(adapter, "lora_", model=other)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    refused(adapter_test.write(tmp_path / "wide", {**tensors, name: torch.ones(3, 65)}), name, "expected [rank, 64]")
    bad = {**tensors, name: torch.full((3, 64), float("nan"))}
    done = export(adapter_test.write(tmp_path / "nan", bad), tmp_path / "nan-out", "merged", "--model", folder, code=2)
    assert name in error_line(done.stderr) and "finite" in done.stderr
    refused(adapter_test.write(tmp_path / "dora", tensors, use_dora=True), "DoRA", code=4)
    refused(adapter, "--max-memory", more=("--max-memory", "1KiB"), code=3)
    refused(adapter, "--base-model-name", more=("--base-model-name", "x"))
