"""Adapter files between models with experts on KT and stock ones, both ways, fused and per expert; and files that
do not fit."""

import json
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("kt_kernel.kt_kernel_ext", reason="kt_kernel is not built: PYTHONPATH=build/python")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from safetensors.torch import load_file, save_file

from kt_kernel.sft import load_adapter, load_kt_adapter_artifacts
from sft_models import draw_b, logits, ours, stock, trained, with_lora

RANK, ALPHA, E, H, I = 4, 8, 8, 64, 32  # noqa: E741
BOUND = 1e-4


def same(one, other):
    return ((one - other).abs().amax() / other.abs().amax()).item() < BOUND


def saved(model, folder):
    draw_b(model, size=0.2)
    model.save_pretrained(folder)
    return logits(model)


def without(key="qwen3_moe"):
    return logits(stock(key))


class TestFused:
    @pytest.mark.parametrize("key", ["qwen3_moe", "deepseek_v3", "mixtral"])
    @pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
    def test_both_ways(self, tmp_path, key, split):
        of_ours = saved(with_lora(ours(key), split=split), tmp_path / "ours")
        assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == [
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        assert same(logits(peft.PeftModel.from_pretrained(stock(key), tmp_path / "ours")), of_ours)
        assert torch.equal(logits(peft.PeftModel.from_pretrained(ours(key), tmp_path / "ours")), of_ours)
        of_stock = saved(with_lora(stock(key), split=split), tmp_path / "stock")
        assert same(logits(peft.PeftModel.from_pretrained(ours(key), tmp_path / "stock")), of_stock)
        assert not same(of_stock, without(key))
        files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "stock")]
        assert {n: t.shape for n, t in files[0].items()} == {n: t.shape for n, t in files[1].items()}
        assert all(torch.equal(t, files[1][n]) for n, t in files[0].items())

    def test_low_memory_and_second_adapters(self, tmp_path):
        expected = saved(with_lora(ours()), tmp_path)
        model = peft.PeftModel.from_pretrained(ours(), tmp_path, low_cpu_mem_usage=True)
        assert torch.equal(logits(model), expected)
        model.load_adapter(tmp_path, "again")
        model.set_adapter("again")
        assert torch.equal(logits(model), expected)
        model.delete_adapter("again")
        model.set_adapter("default")
        assert torch.equal(logits(model), expected)

    def test_load_adapter(self, tmp_path):
        expected = saved(with_lora(ours()), tmp_path)
        model = load_adapter(ours(), tmp_path, is_trainable=True)
        assert torch.equal(logits(model), expected) and any(".experts." in name for name in trained(model))
        load_adapter(model, tmp_path, "second")
        model.set_adapter("second")
        assert torch.equal(logits(model), expected)
        with pytest.raises(ValueError, match="has an adapter 'second' already"):
            load_adapter(model, tmp_path, "second")


def write_per_expert(folder, split):
    """The file of a split fused adapter as transformers 4, vLLM and SGLang name its tensors; its zero blocks are
    none there. The fused file gets zeros where the blocks are."""
    fused = load_file(split / "adapter_model.safetensors")
    out = {}
    for name, t in fused.items():
        layer, _, part = name.partition(".experts.")
        if not part:
            out[name] = t
        elif part == "base_layer.lora_A.weight":
            for e, a in enumerate(t.view(E, 2 * RANK, H)):
                (
                    out[f"{layer}.experts.{e}.gate_proj.lora_A.weight"],
                    out[f"{layer}.experts.{e}.up_proj.lora_A.weight"],
                ) = a.chunk(2)
        elif part == "base_layer.lora_B.weight":
            b = t.view(2 * I, 2 * RANK, E)
            b[:I, RANK:] = 0
            b[I:, :RANK] = 0
            for e in range(E):
                out[f"{layer}.experts.{e}.gate_proj.lora_B.weight"] = b[:I, :RANK, e]
                out[f"{layer}.experts.{e}.up_proj.lora_B.weight"] = b[I:, RANK:, e]
        elif part == "lora_A.weight":
            for e, a in enumerate(t.view(E, RANK, I)):
                out[f"{layer}.experts.{e}.down_proj.lora_A.weight"] = a
        else:
            for e, b in enumerate(t.view(H, RANK, E).unbind(-1)):
                out[f"{layer}.experts.{e}.down_proj.lora_B.weight"] = b
    save_file(fused, split / "adapter_model.safetensors")
    folder.mkdir()
    save_file({n: t.contiguous() for n, t in out.items()}, folder / "adapter_model.safetensors")
    config = json.loads((split / "adapter_config.json").read_text())
    config.update(
        target_parameters=None,
        rank_pattern={},
        alpha_pattern={},
        target_modules=[*config["target_modules"], "gate_proj", "up_proj", "down_proj"],
    )
    (folder / "adapter_config.json").write_text(json.dumps(config))


class TestPerExpert:
    def test_as_stock(self, tmp_path):
        saved(with_lora(ours(), split=True), tmp_path / "split")
        write_per_expert(tmp_path / "per_expert", tmp_path / "split")
        expected = logits(peft.PeftModel.from_pretrained(stock(), tmp_path / "per_expert"))
        assert not same(expected, without())
        assert same(logits(peft.PeftModel.from_pretrained(ours(), tmp_path / "per_expert")), expected)
        assert same(logits(load_adapter(ours(), tmp_path / "split")), expected)


class TestWholeOrNot:
    @pytest.fixture
    def adapter(self, tmp_path):
        saved(with_lora(ours()), tmp_path)
        return tmp_path

    def change(self, folder, change):
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    def refused(self, model, folder, match):
        before = logits(model)
        with pytest.raises(ValueError, match=match) as error:
            load_adapter(model, folder)
        assert str(folder) in str(error.value) and "\n" not in str(error.value)
        assert not any("lora" in name for name, _ in model.named_parameters())
        assert torch.equal(logits(model), before)

    def test_missing_layer(self, adapter):
        self.change(adapter, lambda t: [t.pop(n) for n in list(t) if ".layers.1.mlp.experts." in n])
        self.refused(
            ours(),
            adapter,
            r"has no base_model.*layers\.1\.mlp\.experts.* and 1 more: is the adapter of another model",
        )
        with pytest.warns(UserWarning, match="missing adapter keys.*layers.1.mlp.experts"):  # what stock PEFT does
            peft.PeftModel.from_pretrained(ours(), adapter)

    def test_layer_too_many(self, adapter):
        self.refused(ours(config={"num_hidden_layers": 2}), adapter, r"the model has no .*layers\.2\.")

    def test_other_sizes(self, adapter):
        where = r"mlp\.experts.*lora_[AB].*: the model has \[\d+, \d+\], the file has \[\d+, \d+\] \(and \d+ more\)"
        self.refused(ours(config={"moe_intermediate_size": 48}), adapter, where)
        with pytest.raises(RuntimeError, match="size mismatch for .*mlp.experts"):  # what stock PEFT does
            peft.PeftModel.from_pretrained(ours(config={"moe_intermediate_size": 48}), adapter)

    def test_second_adapter_that_does_not_fit(self, adapter):
        model = load_adapter(ours(), adapter)
        expected = logits(model)
        self.change(adapter, lambda t: t.pop(next(n for n in t if "experts" in n)))
        with pytest.raises(ValueError, match="is the adapter of another model"):
            load_adapter(model, adapter, "second")
        assert list(model.peft_config) == ["default"] and torch.equal(logits(model), expected)


def write_kt(folder, layers=(0, 1, 2), rank=RANK, experts=True):
    """What kt-kernel's fine-tuning leaves: PEFT's file of attention, and one of experts in bf16."""
    attention = with_lora(stock(), experts=False, rank=rank, alpha=2 * rank)
    draw_b(attention)
    attention.save_pretrained(folder)
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for layer in layers:
        for part, inside, outside in (("gate", H, I), ("up", H, I), ("down", I, H)):
            for side, shape in (("a", (E, rank, inside)), ("b", (E, outside, rank))):
                tensors[f"layers.{layer}.experts.{part}_lora_{side}"] = (
                    torch.randn(shape, generator=generator) * 0.2
                ).bfloat16()
    if experts:
        save_file(tensors, folder / "fused_expert_lora.safetensors")
    return tensors


def merged(folder, tensors, rank=RANK):
    """Logits of a stock model whose experts have the products of the factors added to them."""
    model = peft.PeftModel.from_pretrained(stock(), folder)
    for layer, block in enumerate(model.base_model.model.model.layers):
        part = {key.rpartition(".")[2]: t.float() for key, t in tensors.items() if key.startswith(f"layers.{layer}.")}
        with torch.no_grad():
            block.mlp.experts.gate_up_proj += 2 * torch.cat(
                [part[f"{p}_lora_b"] @ part[f"{p}_lora_a"] for p in ("gate", "up")], dim=1
            )
            block.mlp.experts.down_proj += 2 * part["down_lora_b"] @ part["down_lora_a"]
    return logits(model)


class TestKtArtifacts:
    def test_fresh(self, tmp_path):
        expected = merged(tmp_path, write_kt(tmp_path))
        model = load_kt_adapter_artifacts(ours(), tmp_path)
        assert same(logits(model), expected) and not same(expected, without())
        model.save_pretrained(tmp_path / "as_peft")  # from now on it is everybody's
        assert same(logits(peft.PeftModel.from_pretrained(stock(), tmp_path / "as_peft")), expected)

    def test_into_an_adapter(self, tmp_path):
        expected = merged(tmp_path, write_kt(tmp_path))
        model = with_lora(ours(), split=True, init_lora_weights=False)
        peft.set_peft_model_state_dict(model, load_file(tmp_path / "adapter_model.safetensors"))
        assert load_kt_adapter_artifacts(model, tmp_path / "fused_expert_lora.safetensors") is model
        assert same(logits(model), expected)

    def change(self, folder, change):
        file = folder / "fused_expert_lora.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    @pytest.mark.parametrize(
        "change,match",
        [
            (
                lambda t: [t.pop(n) for n in list(t) if "layers.1." in n],
                "has no layer 1; the model has layers 0 to 2",
            ),
            (
                lambda t: t.update(
                    {n.replace("layers.0", "layers.7"): v.clone() for n, v in list(t.items()) if "layers.0" in n}
                ),
                "layer 7 is none of the model's, which has experts in 0 to 2",
            ),
            (lambda t: t.pop("layers.2.experts.up_lora_b"), "has no layers.2.experts.up_lora_b"),
            (
                lambda t: t.update({"layers.0.experts.down_lora_a": torch.zeros(E, RANK, H)}),
                r"layers.0.experts.down_lora_a: expected \[8, 4, 32\], the file has \[8, 4, 64\]",
            ),
            (
                lambda t: t.update({"layers.1.experts.gate_lora_a": torch.zeros(E, 2, H)}),
                r"layers.1.experts.gate_lora_a: expected \[8, 4, 64\], the file has \[8, 2, 64\]",
            ),
            (
                lambda t: t.update({"layers.0.mlp.gate_lora_a": torch.zeros(1)}),
                "unknown tensor layers.0.mlp.gate_lora_a",
            ),
            (lambda t: t.update({n: v.int() for n, v in t.items()}), "expected numbers, the file has torch.int32"),
        ],
    )
    def test_does_not_fit(self, tmp_path, change, match):
        write_kt(tmp_path)
        self.change(tmp_path, change)
        model = ours()
        with pytest.raises(ValueError, match=match) as error:
            load_kt_adapter_artifacts(model, tmp_path)
        assert "fused_expert_lora.safetensors" in str(error.value)
        assert not any("lora" in name for name, _ in model.named_parameters())

    def test_files_that_are_missing_or_broken(self, tmp_path):
        write_kt(tmp_path, experts=False)
        with pytest.raises(FileNotFoundError, match="fused_expert_lora.safetensors: no such file"):
            load_kt_adapter_artifacts(ours(), tmp_path)
        (tmp_path / "fused_expert_lora.safetensors").write_bytes(b"\x07\0\0\0\0\0\0\0{nothing")
        with pytest.raises(ValueError, match="fused_expert_lora.safetensors: "):
            load_kt_adapter_artifacts(ours(), tmp_path)

    def test_adapters_that_do_not_fit(self, tmp_path):
        write_kt(tmp_path)
        with pytest.raises(ValueError, match="no trainable experts"):
            load_kt_adapter_artifacts(stock(), tmp_path)
        with pytest.raises(
            ValueError, match="gate_up_proj of layer 0 needs LoRA of rank 8 in adapter 'default', the model has 4"
        ):
            load_kt_adapter_artifacts(with_lora(ours()), tmp_path)
        with pytest.raises(ValueError, match="needs LoRA of rank 8 in adapter 'default', the model has none"):
            load_kt_adapter_artifacts(with_lora(ours(), experts=False), tmp_path)
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
        with pytest.raises(ValueError, match="r is 5, experts in fused_expert_lora.safetensors have rank 4"):
            load_kt_adapter_artifacts(ours(), tmp_path)
