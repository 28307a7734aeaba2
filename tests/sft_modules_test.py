"""Models with trainable experts in the hands of stock code: moved, saved, counted, refused. No gradients here."""

import copy
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("kt_kernel.kt_kernel_ext", reason="kt_kernel is not built: PYTHONPATH=build/python")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import kt_kernel.transformers as kt
import tiny_models
from kt_kernel.sft.experts import TrainableExperts
from kt_kernel.sft.placeholders import Placeholder
from sft_models import EXPERTS, IDS, draw_b, logits, lora_config, ours, step, stock, with_lora

PATH = dict(activations="f32", dtype=torch.float32, attn_implementation="eager", threads=2)


def experts_of(model):
    return [m for m in model.modules() if isinstance(m, TrainableExperts)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_models.save(stock(), tmp_path_factory.mktemp("model"), torch.bfloat16)


class TestPlaceholders:
    def test_no_memory(self):
        """DeepSeek-V3's layer: 45 GB in float32."""
        one = Placeholder((256, 4096, 7168))
        assert one.shape == (256, 4096, 7168) and one.numel() == 256 * 4096 * 7168
        assert one.untyped_storage().nbytes() == 4
        assert isinstance(one, torch.nn.Parameter) and one.dtype == torch.float32 and one.device.type == "cpu"
        assert not one.requires_grad and "256" in repr(one)

    def test_lora_of_a_large_layer_takes_only_its_own_memory(self):
        import resource

        from kt_kernel.transformers.experts import Options, Shape

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.experts = TrainableExperts(
                    Shape(0, 256, 8, 7168, 2048), Options("BF16", cpu_activation="retain")
                )
                self.experts.add_placeholders()

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        config = peft.LoraConfig(
            r=1, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
        )
        net = peft.get_peft_model(Net(), config)
        outer = net.base_model.model.experts
        with outer._activate_lora(["default"]), outer.base_layer._activate_lora(["default"]):
            inner = outer.get_base_layer()
            assert [len(getattr(inner, name).factors) for name in ("gate_up_proj", "down_proj")] == [1, 1]
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB

    def test_stay_where_they_are(self):
        model = with_lora(ours())
        before = {name: p for name, p in model.named_parameters() if ".experts." in name}
        for move in (
            lambda: model.half(),
            lambda: model.to(torch.bfloat16),
            lambda: model.to("meta"),
            lambda: model.double(),
        ):
            try:
                move()
            except NotImplementedError:  # meta has no values to bring back
                pass
            after = {name: p for name, p in model.named_parameters() if ".experts." in name}
            assert before.keys() == after.keys() and all(after[name] is before[name] for name in before)
            assert {(p.dtype, p.device.type) for p in after.values()} == {(torch.float32, "cpu")}
        assert model.base_model.model.lm_head.weight.dtype == torch.float64

    def test_one_at_a_time(self):
        one = Placeholder((2, 4, 6))
        assert one.to("cpu", torch.float16) is one and one.cpu() is one and one.detach() is one
        one.data = one.data.half()
        one.grad = None
        assert copy.deepcopy(one) is one
        added = torch.baddbmm(one, torch.ones(2, 4, 1), torch.ones(2, 1, 6), alpha=2.0)
        assert added.shape == one.shape and added.factors[0].scale == 2.0 and not one.factors

    @pytest.mark.parametrize(
        "use",
        [
            lambda w: w + 1,
            lambda w: w.data.add_(torch.zeros(2, 4, 6)),
            lambda w: w.sum(),
            lambda w: w[0],
            lambda w: torch.zeros_like(w),
            lambda w: torch.nn.init.zeros_(w),
            lambda w: w.copy_(torch.zeros(2, 4, 6)),
        ],
    )
    def test_numbers_are_refused(self, use):
        with pytest.raises((NotImplementedError, RuntimeError), match="on KT and not in torch"):
            use(Placeholder((2, 4, 6)))

    def test_full_fine_tuning_is_refused(self):
        model = ours()
        with pytest.raises(ValueError, match="full fine-tuning .* not supported, LoRA is"):
            model.requires_grad_(True)
        with pytest.raises(ValueError, match="full fine-tuning"):
            model.model.layers[0].mlp.experts.down_proj.requires_grad = True
        model.requires_grad_(False)


class TestModel:
    def test_state_dict_has_no_experts(self):
        model = with_lora(ours())
        names = list(model.state_dict())
        assert not [name for name in names if name.endswith(("gate_up_proj", "down_proj"))]
        assert [name for name in names if "experts" in name and "lora_A" in name]
        other = with_lora(ours(), seed=9)
        draw_b(model)
        assert not torch.equal(logits(model), logits(other))
        other.load_state_dict(model.state_dict(), strict=True)
        assert torch.equal(logits(model), logits(other))

    def test_state_dict_with_experts_is_not_taken(self):
        model = ours()
        state = stock().state_dict()
        with pytest.raises(RuntimeError, match="Unexpected key.*mlp.experts.gate_up_proj"):
            model.load_state_dict(state, strict=True)

    def test_counts_are_those_of_stock(self):
        assert with_lora(ours()).get_nb_trainable_parameters() == with_lora(stock()).get_nb_trainable_parameters()
        assert ours().num_parameters() == stock().num_parameters()

    def test_path(self, folder):
        """From a checkpoint: transformers reads no experts and looks for none."""
        model = kt.enable(folder, trainable=True, **PATH)
        assert model.hf_quantizer.is_trainable
        assert torch.equal(logits(with_lora(model)), logits(with_lora(ours())))

    def test_without_trainable_nothing_is_new(self, folder):
        for model in (kt.enable(stock(), activations="f32", threads=2), kt.enable(folder, **PATH)):
            assert not experts_of(model) and not any(p.ndim == 3 for p in model.parameters())
            assert torch.equal(logits(model), logits(ours()))
            with pytest.raises(RuntimeError, match="for inference"):
                model.train()(IDS)
        assert not model.hf_quantizer.is_trainable

    def test_default_activations(self):
        from kt_kernel import kt_kernel_ext

        chosen = experts_of(ours(activations="default"))[0].options.activations
        assert chosen == ("bf16" if kt_kernel_ext.isa() in ("avx512_bf16", "amx", "neon_i8mm") else "f32")

    def test_ddp_is_told(self):
        for model in (ours(), with_lora(ours()), with_lora(ours(), target_parameters=EXPERTS[1:])):
            names = [name for name, p in model.named_parameters() if isinstance(p, Placeholder)]
            assert len(names) == 6 and set(names) <= set(model._ddp_params_and_buffers_to_ignore)

    def test_device_map(self, folder):
        """accelerate's hooks move every parameter they find."""
        model = kt.enable(folder, trainable=True, **PATH)
        before = [m.gate_up_proj for m in experts_of(model)]
        accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
        parts = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
        parts |= {f"model.layers.{i}": "cpu" for i in range(3)}
        accelerate.dispatch_model(model, parts, main_device="cpu", force_hooks=True)
        assert all(m.gate_up_proj is p for m, p in zip(experts_of(model), before))
        model = with_lora(model)
        draw_b(model)
        loss, gradients = step(model)
        same = with_lora(ours())
        draw_b(same)
        expected_loss, expected = step(same)
        assert loss == expected_loss and all(torch.equal(gradients[n], expected[n]) for n in expected)

    def test_copies_are_refused(self):
        with pytest.raises(TypeError, match="cannot be copied"):
            copy.deepcopy(ours())
        with pytest.raises(ValueError, match="not in torch"):
            ours().save_pretrained("nowhere")

    def test_recorder(self):
        """Experts are counted once for each pass forward, checkpointed or not."""
        model = with_lora(ours())
        model.gradient_checkpointing_enable()
        recorder = kt.recorder(model.base_model.model)
        step(model.train())
        assert recorder.counts().sum(dim=1).tolist() == [IDS.numel() * 3] * 3

    def test_unload_gives_the_model_back(self):
        model = with_lora(ours())
        draw_b(model)
        assert torch.equal(logits(model.unload()), logits(ours()))


class TestRefusals:
    def refused(self, match, kind=ValueError, **how):
        with pytest.raises(kind, match=match):
            with_lora(ours(), **how)

    def test_lora_dropout(self):
        self.refused("lora.ParamWrapper does not work with lora_dropout != 0", lora_dropout=0.1)

    def test_dora(self):
        self.refused("lora.ParamWrapper does not work with use_dora=True", use_dora=True)

    def test_several_active_adapters(self, monkeypatch):
        model = with_lora(ours())
        model.add_adapter("second", lora_config())
        model.base_model.set_adapter(["default", "second"])
        with pytest.raises(ValueError, match="layer 0: .*one active adapter at a time .active: 'default', 'second'"):
            model(IDS)
        model.set_adapter("second")
        model(IDS)

    @pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
    def test_merging(self, merge):
        """Refused before a single matrix is changed."""
        model = with_lora(ours())
        draw_b(model)
        before = {name: t.clone() for name, t in model.state_dict().items()}
        with pytest.raises(ValueError, match="kt sft export ADAPTER -o OUT --layout merged"):
            getattr(model, merge)()
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        stock_model = with_lora(stock())
        getattr(stock_model, merge)()  # of others this is no business of ours

    def test_old_peft(self, monkeypatch):
        import importlib.metadata

        found = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.20.0" if name == "peft" else found(name))
        model = stock()
        with pytest.raises(RuntimeError, match="PEFT 0.20.0: .* needs 0.21.0 or newer"):
            kt.enable(model, trainable=True)
        assert not experts_of(model)
        kt.enable(model, threads=2)  # inference asks for no PEFT

    @pytest.mark.parametrize(
        "options,match",
        [
            ({"gpu_experts": 2}, "gpu_experts: experts on the device do not train"),
            ({"gpu_experts": 2, "update_every": 4}, "gpu_experts: experts on the device do not train"),
            ({"cpu_activation": "keep"}, "cpu_activation: expected one of retain, recompute, got 'keep'"),
            ({"activations": "int8"}, "activations: experts train with bf16 or f32, not int8"),
        ],
    )
    def test_options(self, options, match):
        model = stock()
        with pytest.raises(ValueError, match=match):
            kt.enable(model, trainable=True, **options)
        assert not experts_of(model)

    def test_cpu_activation_of_inference(self):
        with pytest.raises(TypeError, match="cpu_activation: only with trainable=True"):
            kt.enable(stock(), cpu_activation="recompute")

    def test_placement(self):
        with pytest.raises(ValueError, match="do not train"):
            experts_of(ours())[0].place(torch.ones(8, dtype=torch.bool), "cpu")

    def test_factors_of_other_sizes(self):
        from kt_kernel.sft.lora import checked
        from kt_kernel.sft.placeholders import Factors

        with pytest.raises(
            ValueError, match=r"LoRA of w \[8, 64, 32\]: A is \[8, 4, 16\] and B \[8, 64, 4\], expected"
        ):
            checked("w", Factors(torch.zeros(8, 64, 4), torch.zeros(8, 4, 16), 1.0), 8, 64, 32)


def test_a_graph_at_the_end_of_a_program():
    """Torch leaves it as it is; the extension would complain of what is in it."""
    code = (
        f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r}); from sft_models import *; "
        "out = with_lora(ours())(input_ids=IDS, labels=IDS)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=600, capture_output=True, text=True)
    assert "nanobind" not in done.stderr


def test_importing_needs_no_torch():
    """`kt_kernel.sft` is looked at by programs that have none."""
    code = "import sys; sys.modules['torch'] = None; import kt_kernel.sft as s; s.KTConfig(); print(dir(s))"
    out = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True).stdout
    assert "TrainableExperts" in out
