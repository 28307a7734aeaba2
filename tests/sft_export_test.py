"""`kt sft export`: adapters of experts from one of PEFT's layouts to the other and back, values moved and never
rounded; what stock PEFT makes of both; another program's file of experts; files that are none. KT_PROGRAM names kt."""
import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, ROOT, error_line, kt

np = pytest.importorskip("numpy")
safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
DEMO = ROOT / "demo" / "tiny-deepseekv3"
LAYERS, EXPERTS, HIDDEN, INTER, RANK = (1, 3), 3, 6, 4, 2
AT = "base_model.model.model.layers.{}.mlp.experts"


def save(folder, tensors, **config):
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": 4,
                                                            "target_modules": ["q_proj"], **config}))
    return folder


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def experts(shared):
    """{(layer, expert, part): (a, b)}; shared: gate and up have the same a."""
    out = {}
    for layer in LAYERS:
        for e in range(EXPERTS):
            for at, (part, rows,
                     columns) in enumerate((("gate", INTER, HIDDEN), ("up", INTER, HIDDEN), ("down", HIDDEN, INTER))):
                seed = 1000 * layer + 10 * e + at
                out[layer, e, part] = (draw(seed if not (shared and part == "up") else seed - 1, RANK, columns),
                                       draw(seed + 5, rows, RANK))
    return out


def per_expert(factors):
    out = {"base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": draw(1, RANK, HIDDEN)}
    for (layer, e, part), (a, b) in factors.items():
        module = f"{AT.format(layer)}.{e}.{part}_proj"
        out[f"{module}.lora_A.weight"], out[f"{module}.lora_B.weight"] = a, b
    return out


def fused(factors, shared):
    """By the book: rows of A expert * r + rank, columns of B rank * E + expert; gate's rows of B first."""
    out = {"base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": draw(1, RANK, HIDDEN)}
    for layer in LAYERS:
        r = RANK if shared else 2 * RANK
        a, b = np.zeros((EXPERTS * r, HIDDEN), np.float32), np.zeros((2 * INTER, r * EXPERTS), np.float32)
        down_a, down_b = np.zeros((EXPERTS * RANK, INTER), np.float32), np.zeros((HIDDEN, RANK * EXPERTS), np.float32)
        for e in range(EXPERTS):
            gate, up, down = (factors[layer, e, part] for part in ("gate", "up", "down"))
            for k in range(RANK):
                a[e * r + k] = gate[0][k]
                b[:INTER, k * EXPERTS + e] = gate[1][:, k]
                second = k if shared else RANK + k
                a[e * r + second] = up[0][k]
                b[INTER:, second * EXPERTS + e] = up[1][:, k]
                down_a[e * RANK + k] = down[0][k]
                down_b[:, k * EXPERTS + e] = down[1][:, k]
        at = AT.format(layer)
        out |= {f"{at}.base_layer.lora_A.weight": a, f"{at}.base_layer.lora_B.weight": b, f"{at}.lora_A.weight": down_a,
                f"{at}.lora_B.weight": down_b}
    return out


FUSED_CONFIG = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
TWICE = {"rank_pattern": {r".*\.gate_up_proj": 2 * RANK}, "alpha_pattern": {r".*\.gate_up_proj": 8}}


def export(source, out, layout, *more):
    done = kt("sft", "export", source, "-o", out, "--layout", layout, "--json", *more)
    assert done.returncode == 0, done.stderr
    return (json.loads(done.stdout), safetensors.load_file(out / "adapter_model.safetensors"),
            json.loads((out / "adapter_config.json").read_text()))


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype and np.array_equal(found[name], values), name


@pytest.mark.parametrize("shared", [True, False], ids=["one-a", "two-as"])
def test_there_and_back(tmp_path, shared):
    factors = experts(shared)
    wide, narrow = fused(factors, shared), per_expert(factors)
    source = save(tmp_path / "fused", wide, **FUSED_CONFIG, **({} if shared else TWICE))
    facts, tensors, config = export(source, tmp_path / "each", "per-expert")
    same(tensors, narrow)
    assert (facts["found"] == "fused" and facts["layers"] == 2 and facts["experts"] == EXPERTS
            and facts["gate_up_rank"] == RANK)
    assert (sorted(config["target_modules"]) == ["down_proj", "gate_proj", "q_proj", "up_proj"]
            and config["target_parameters"] is None)
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    facts, tensors, config = export(tmp_path / "each", tmp_path / "back", "fused")
    same(tensors, wide)
    assert facts["found"] == "per-expert" and facts["gate_up_rank"] == (RANK if shared else 2 * RANK)
    assert (config["target_modules"] == ["q_proj"]
            and sorted(config["target_parameters"]) == sorted(FUSED_CONFIG["target_parameters"]))
    assert (config["rank_pattern"], config["alpha_pattern"]) == (({}, {}) if shared
                                                                 else (TWICE["rank_pattern"], TWICE["alpha_pattern"]))
    # A layout that is there already is copied as it is.
    _, tensors, _ = export(source, tmp_path / "same", "fused")
    same(tensors, wide)


def test_another_programs_file(tmp_path):
    factors = experts(False)
    rest = {"base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": draw(1, RANK, HIDDEN)}
    source = save(tmp_path / "other", rest)
    safetensors.save_file({
        f"layers.{layer}.experts.{part}_lora_{side}": np.stack([factors[layer, e, part][at] for e in range(EXPERTS)])
        for layer in LAYERS for part in ("gate", "up", "down") for at, side in enumerate("ab")},
                          source / "fused_expert_lora.safetensors")
    _, tensors, _ = export(source, tmp_path / "each", "per-expert")
    same(tensors, per_expert(factors))
    _, tensors, _ = export(source, tmp_path / "fused", "fused")
    same(tensors, fused(factors, False))


def test_down_alone(tmp_path):
    wide = {name: values for name, values in fused(experts(True), True).items() if "base_layer" not in name}
    source = save(tmp_path / "fused", wide, target_parameters=["mlp.experts.down_proj"])
    _, tensors, config = export(source, tmp_path / "each", "per-expert")
    same(tensors, {name: values for name, values in per_expert(experts(True)).items() if "gate_proj" not in name
                   and "up_proj" not in name})
    assert sorted(config["target_modules"]) == ["down_proj", "q_proj"]
    _, tensors, config = export(tmp_path / "each", tmp_path / "back", "fused")
    same(tensors, wide)


def test_what_is_refused(tmp_path):
    def refused(source, *words, out="out", layout="per-expert", code=2):
        done = kt("sft", "export", source, "-o", tmp_path / out, "--layout", layout)
        assert done.returncode == code, done.stderr
        line = error_line(done.stderr)
        assert all(word in line for word in words), line
        assert not (tmp_path / out / "adapter_model.safetensors").exists() or out == "full"

    wide = fused(experts(True), True)
    good = save(tmp_path / "good", wide, **FUSED_CONFIG)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    refused(good, "not empty", "--overwrite", out="full")
    assert export(good, tmp_path / "full", "per-expert", "--overwrite")
    refused(save(tmp_path / "plain", {"base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": draw(1, 2, 3)}),
            "no LoRA on routed experts")
    refused(save(tmp_path / "rank", wide, r=5), "lora_A", "multiple of rank 5")
    refused(save(tmp_path / "none", wide, r=0), "rank r of at least 1")
    refused(save(tmp_path / "kind", wide, peft_type="IA3"), "LORA")
    name = AT.format(1) + ".base_layer.lora_B.weight"
    refused(save(tmp_path / "columns", {**wide, name: wide[name][:, :5].copy()}), name, "6 columns")
    refused(save(tmp_path / "half", {k: v for k, v in wide.items() if k != name}), "missing")
    narrow = per_expert(experts(False))
    one = AT.format(3) + ".2.up_proj.lora_A.weight"
    refused(save(tmp_path / "hole", {k: v for k, v in narrow.items() if k != one}),
            "layer 3 expert 2 up_proj", "missing")
    refused(save(tmp_path / "odd", {**narrow, one: draw(1, RANK, 7)}), "layer 3 expert 2 up_proj")
    refused(save(tmp_path / "both", {**wide, **narrow}), "both layouts")
    refused(save(tmp_path / "rs", narrow, use_rslora=True), "use_rslora", layout="fused")
    broken = save(tmp_path / "broken", wide)
    (broken / "adapter_model.safetensors").write_bytes((broken / "adapter_model.safetensors").read_bytes()[:-8])
    refused(broken, "adapter_model.safetensors")
    (broken / "adapter_config.json").write_text("{")
    refused(broken, "adapter_config.json")


def test_stock_peft_loads_both(tmp_path):
    """The same logits to the bit, of an adapter of all parts of the demo model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    torch.set_num_threads(1)

    def base():
        return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)

    model = peft.get_peft_model(base(), peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["o_proj", "q_b_proj"], task_type="CAUSAL_LM",
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "shared_experts.gate_proj.weight",
                           "mlp.down_proj.weight"]))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    ids = torch.randint(0, 4096, (1, 24), generator=generator)
    model.eval().save_pretrained(tmp_path / "fused")
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        with model.disable_adapter():
            assert (model(input_ids=ids).logits - wanted).abs().max() > 0.1
    export(tmp_path / "fused", tmp_path / "each", "per-expert")
    _, tensors, _ = export(tmp_path / "each", tmp_path / "back", "fused")
    same(tensors, safetensors.load_file(tmp_path / "fused" / "adapter_model.safetensors"))
    for name in ("each", "back"):
        loaded = peft.PeftModel.from_pretrained(base(), tmp_path / name).eval()
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=ids).logits, wanted), name
