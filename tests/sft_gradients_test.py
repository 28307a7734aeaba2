"""Gradients through experts on KT against stock transformers and stock PEFT, f32.

Losses agree to 1e-6 and gradients to 1e-4 of their size: only the order of sums differs, of a few hundred numbers,
in three layers. Frozen parts, one at a time, leave the others' gradients as they are.
"""

import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
ext = pytest.importorskip("kt_kernel.kt_kernel_ext", reason="kt_kernel is not built: PYTHONPATH=build/python")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import sft_models as models
from sft_models import IDS, draw_b, logits, make_trainable, ours, step, stock, trained, with_lora, worst

LOSS, GRADIENT = 1e-6, 1e-4


def pair(key, router=False, **how):
    """The stock model and ours, with the same adapter on them; all of it random."""
    both = with_lora(stock(key), **how), with_lora(ours(key), **how)
    draw_b(*both)
    for model in both:
        make_trainable(model, "embed_tokens.weight", *(["mlp.gate.weight"] if router else []))
        model.train()
    return both


class TestFamilies:
    @pytest.mark.parametrize("key", models.FAMILIES)
    def test_starts_as_stock(self, key):
        """The same seeds give the same parameters, and count the same."""
        theirs, our = with_lora(stock(key)), with_lora(ours(key))
        assert list(trained(theirs)) == list(trained(our))
        assert any(".experts." in name for name in trained(our))
        assert all(torch.equal(p, trained(our)[name]) for name, p in trained(theirs).items())
        assert theirs.get_nb_trainable_parameters() == our.get_nb_trainable_parameters()

    @pytest.mark.parametrize("key", models.FAMILIES)
    @pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
    def test_gradients(self, key, split):
        theirs, our = pair(key, router=split, split=split)
        (their_loss, expected), (loss, got) = step(theirs), step(our)
        assert loss == pytest.approx(their_loss, rel=LOSS)
        assert any("gate.weight" in name for name in got) == split
        assert any("embed_tokens" in name for name in got)
        ranks = {
            p.shape[0] // 8
            for name, p in trained(our).items()
            if name.endswith("experts.base_layer.lora_A.default.weight")
        }
        assert ranks == {8 if split else 4}
        far, name = worst(got, expected)
        assert far < GRADIENT, name


class TestRouter:
    def test_gradient_flows_through_a_frozen_router(self):
        """Without it, gradients below the last layer are others: stock with detached routing weights shows by how
        much."""
        theirs, our = pair("qwen3_moe")
        _, expected = step(theirs)
        far, name = worst(step(our)[1], expected)
        assert far < GRADIENT, name
        for module in theirs.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(lambda m, i, out: (out[0].detach(), out[1].detach(), out[2]))
        assert worst(step(theirs)[1], expected)[0] > 100 * GRADIENT


class TestParts:
    """Only what asks for a gradient gets one."""

    @pytest.mark.parametrize("parameters", [["mlp.experts.gate_up_proj"], ["mlp.experts.down_proj"]])
    def test_one_projection(self, parameters):
        theirs, our = pair("qwen3_moe", target_parameters=parameters)
        far, name = worst(step(our)[1], step(theirs)[1])
        assert far < GRADIENT, name

    def test_attention_alone(self):
        theirs, our = pair("deepseek_v3", experts=False)
        far, name = worst(step(our)[1], step(theirs)[1])
        assert far < GRADIENT, name

    @pytest.mark.parametrize("frozen", ["lora_A", "lora_B"])
    def test_one_factor(self, frozen):
        theirs, our = pair("qwen3_moe")
        for model in (theirs, our):
            for name, p in model.named_parameters():
                if frozen in name and ".experts." in name:
                    p.requires_grad_(False)
        far, name = worst(step(our)[1], step(theirs)[1])
        assert far < GRADIENT, name

    def test_first_layer_alone(self):
        """Nothing below it asks for a gradient: neither its input nor its routing weights."""
        theirs, our = pair("qwen3_moe")
        for model in (theirs, our):
            for name, p in model.named_parameters():
                p.requires_grad_("layers.0.mlp.experts" in name and "lora" in name)
        far, name = worst(step(our)[1], step(theirs)[1])
        assert far < GRADIENT, name

    def test_gradients_add_up(self):
        _, our = pair("qwen3_moe")
        once = step(our)[1]
        our(input_ids=IDS, labels=IDS).loss.backward()  # step() left the gradients of the first
        assert worst({n: p.grad for n, p in trained(our).items()}, {n: 2 * g for n, g in once.items()})[0] < 1e-6

    def test_retained_graph(self):
        _, our = pair("qwen3_moe")
        once = step(our)[1]
        our.zero_grad()
        loss = our(input_ids=IDS, labels=IDS).loss
        loss.backward(retain_graph=True)
        our.zero_grad()
        loss.backward()
        assert worst({n: p.grad for n, p in trained(our).items()}, once)[0] < 1e-6

    def test_long_inputs_are_cut(self):
        _, whole = pair("qwen3_moe")
        cut = with_lora(ours("qwen3_moe", max_tokens=5))
        make_trainable(cut, "embed_tokens.weight")
        draw_b(cut)
        (loss, got), (expected_loss, expected) = step(cut.train()), step(whole)
        assert loss == pytest.approx(expected_loss, rel=LOSS)
        far, name = worst(got, expected)
        assert far < GRADIENT, name

    def test_recompute_is_the_same(self):
        kept, again = (
            with_lora(ours("qwen3_moe", cpu_activation=policy)).train() for policy in ("retain", "recompute")
        )
        draw_b(kept, again)
        (loss, got), (expected_loss, expected) = step(again), step(kept)
        assert loss == expected_loss
        far, name = worst(got, expected)
        assert far < 1e-6, name

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_hidden_states(self, dtype):
        """The rest of a model in 16 bits: the experts' part is as exact as such numbers are."""
        from kt_kernel.sft.experts import TrainableExperts

        our = with_lora(ours("qwen3_moe"))
        draw_b(our)
        experts = next(m for m in our.modules() if isinstance(m, TrainableExperts))
        outer = next(m for m in our.modules() if getattr(m, "experts", None) is not None).experts
        assert outer.get_base_layer() is experts
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(9, 64, generator=generator)
        ids = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(9)])
        weights = torch.rand(9, 3, generator=generator)
        grads = []
        for kind in (torch.float32, dtype):
            hidden, shares = (t.to(dtype).to(kind).requires_grad_() for t in (x, weights))
            outer(hidden, ids, shares).pow(2).sum().backward()
            grads.append((hidden.grad.float(), shares.grad.float()))
            assert hidden.grad.dtype == shares.grad.dtype == kind
        for expected, got in zip(*grads):
            assert ((got - expected).norm() / expected.norm()).item() < 4 * torch.finfo(dtype).eps


class TestFormats:
    @pytest.mark.parametrize("format", ["int8", "int4", "fp8", "fp8_perchannel", "mxfp4", "mxfp8"])
    def test_slope(self, format):
        """The loss moves along a gradient as the gradient says. LoRA of the last layer's experts alone: no router comes
        after it, so there is a slope. Steps to both sides leave out the curvature; the loss is known to 1e-6 of itself,
        and moves by a hundredth."""
        our = with_lora(ours(format=format))
        draw_b(our)
        _, gradients = step(our.train())
        last = {name: p for name, p in trained(our).items() if "layers.2.mlp.experts" in name}
        norm = sum((gradients[name] ** 2).sum() for name in last).sqrt()
        losses = []
        for move in (0.05, -0.1):  # to one side, and from there to the other
            with torch.no_grad():
                for name, p in last.items():
                    p += move * gradients[name] / norm
            losses.append(our(input_ids=IDS, labels=IDS).loss.item())
        assert len(last) == 4 and norm > 1e-3
        assert (losses[0] - losses[1]) / 0.1 == pytest.approx(norm.item(), rel=2e-3)


class TestAdapters:
    def test_off_is_the_model_without(self):
        plain, our = ours("qwen3_moe"), with_lora(ours("qwen3_moe"))
        draw_b(our)
        expected = logits(plain)
        assert not torch.equal(logits(our), expected)
        with our.disable_adapter():
            assert torch.equal(logits(our), expected)
            our.train()
            assert torch.equal(our(IDS).logits, plain.train()(IDS).logits)

    def test_same_logits_with_and_without_gradients(self):
        our = with_lora(ours("qwen3_moe"))
        draw_b(our)
        assert torch.equal(our(IDS).logits, logits(our))

    def test_inference_mode(self):
        our = with_lora(ours())
        draw_b(our)
        expected = logits(our)
        with torch.inference_mode():
            assert torch.equal(our(IDS).logits, expected)
        assert torch.equal(logits(our), expected)

    def test_several_by_turns(self):
        theirs, our = with_lora(stock()), with_lora(ours())
        for model in (theirs, our):
            torch.manual_seed(8)
            model.add_adapter("ref", models.lora_config(init_lora_weights=False))
        draw_b(theirs, our)
        seen = []
        for name in ("default", "ref", "default"):
            theirs.set_adapter(name)
            our.set_adapter(name)
            far, where = worst(step(our)[1], step(theirs)[1])
            assert far < GRADIENT, where
            seen.append(logits(our))
        assert torch.equal(seen[0], seen[2]) and not torch.allclose(seen[0], seen[1], atol=1e-3)

    def test_factors_are_packed_once_for_each_version(self, monkeypatch):
        import kt_kernel.sft.lora as lora

        our = with_lora(ours())
        draw_b(our)
        made = []
        stock_plain = lora._plain
        monkeypatch.setattr(lora, "_plain", lambda t: made.append(t.shape) or stock_plain(t))

        def copies(model=our):
            made.clear()
            out = logits(model)
            return sum(shape[1] > shape[2] for shape in made), out  # B is tall; A lies as it is

        layers = 3
        (first, one), (second, other) = copies(), copies()
        assert (first, second) == (2 * layers, 0) and torch.equal(one, other)
        with torch.no_grad():
            for p in trained(our).values():
                p.mul_(1.5)
        third, changed = copies()
        assert third == 2 * layers and not torch.equal(changed, one)
        for p in trained(our).values():
            p.data.mul_(2 / 3)  # what no version counts
        assert torch.allclose(copies()[1], one, atol=1e-5)
        step(our)  # an optimizer of somebody else's may write between this and the next pass
        assert copies()[0] == 2 * layers

    def test_generate(self):
        theirs, our = with_lora(stock()).eval(), with_lora(ours()).eval()
        draw_b(theirs, our)
        how = {
            "max_new_tokens": 6,
            "do_sample": False,
            "pad_token_id": 0,
            "output_logits": True,
            "return_dict_in_generate": True,
        }
        a, b = (m.generate(input_ids=IDS, **how) for m in (theirs, our))
        assert torch.equal(a.sequences, b.sequences)
        assert torch.allclose(torch.stack(a.logits), torch.stack(b.logits), atol=1e-4)


def count_calls(monkeypatch):
    """A list that grows by True for each forward of a layer's experts that keeps, False for one that does not."""
    from kt_kernel.sft.calls import LayerCalls

    calls = []
    stock_forward = LayerCalls.forward

    def forward(self, given, lora, keep):
        calls.append(keep)
        return stock_forward(self, given, lora, keep)

    monkeypatch.setattr(LayerCalls, "forward", forward)
    return calls


class TestCheckpointing:
    def test_experts_run_once(self, monkeypatch):
        _, our = pair("qwen3_moe")
        loss, expected = step(our)
        our.gradient_checkpointing_enable()
        calls = count_calls(monkeypatch)
        again, got = step(our)
        assert calls == [True] * 3
        assert again == loss
        assert all(torch.equal(got[name], expected[name]) for name in expected)

    def test_kwargs_of_the_caller_stay(self):
        _, our = pair("qwen3_moe")
        asked = {"use_reentrant": False, "preserve_rng_state": False}
        our.gradient_checkpointing_enable(gradient_checkpointing_kwargs=asked)
        assert asked == {"use_reentrant": False, "preserve_rng_state": False}  # Trainer writes it to a file
        layer = our.base_model.model.model.layers[0]
        used = layer._gradient_checkpointing_func.keywords
        assert used["preserve_rng_state"] is False and callable(used["context_fn"])

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_without_contexts(self, monkeypatch, caplog, reentrant):
        """Experts run twice, gradients are the same, and one line says so."""
        import kt_kernel.sft.checkpointing as checkpointing

        _, our = pair("qwen3_moe")
        _, expected = step(our)
        kwargs = {"use_reentrant": reentrant}
        type(our.base_model.model).gradient_checkpointing_enable(our.base_model.model, kwargs)
        calls = count_calls(monkeypatch)
        monkeypatch.setattr(checkpointing._Told, "once", False)
        with caplog.at_level("WARNING", logger="kt_kernel"):
            _, got = step(our)
        assert len(calls) == 6 if not reentrant else len(calls) >= 3
        far, name = worst(got, expected)
        assert far < 1e-6, name
        assert [r.getMessage() for r in caplog.records].count(caplog.records[0].getMessage()) == 1
        assert "get_activation_checkpoint_context_fn" in caplog.text

    def test_output_that_was_overwritten_is_computed_again(self, monkeypatch):
        """A model that writes to what experts gave it: the record does not give that back."""
        from torch.utils.checkpoint import checkpoint

        from kt_kernel.sft import get_activation_checkpoint_context_fn

        our = with_lora(ours())
        draw_b(our)
        outer = our.base_model.model.model.layers[0].mlp.experts
        ids = torch.tensor([[0, 1, 2], [3, 4, 5]])
        calls = count_calls(monkeypatch)

        def block(x):
            out = outer(x, ids, torch.full((2, 3), 0.3))
            return (out.mul_(2) * x).sin()

        grads = []
        for contexts in (None, get_activation_checkpoint_context_fn()):
            x = torch.linspace(-1, 1, 128).reshape(2, 64).requires_grad_()
            out = block(x) if contexts is None else checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            out.sum().backward()
            grads.append(x.grad)
        assert len(calls) == 3
        assert torch.allclose(*grads, rtol=1e-6)

    def test_two_passes_before_their_backwards(self):
        """Losses of two passes in one backward, as DPO has them: each block's record is its own."""
        _, our = pair("qwen3_moe")
        other = IDS.flip(0, 1)

        def both():
            our.zero_grad(set_to_none=True)
            (our(input_ids=IDS, labels=IDS).loss - 0.5 * our(input_ids=other, labels=other).loss).backward()
            return {n: p.grad.clone() for n, p in trained(our).items()}

        expected = both()
        our.gradient_checkpointing_enable()
        got = both()
        assert all(torch.equal(got[name], expected[name]) for name in expected)


class TestMemory:
    def test_what_does_not_fit_is_computed_again(self, monkeypatch, caplog):
        import kt_kernel.sft.activations as activations

        _, our = pair("qwen3_moe")
        _, expected = step(our)
        monkeypatch.setattr(activations, "available_bytes", lambda: 1 << 20)
        monkeypatch.setattr(activations._Told, "once", False)
        calls = count_calls(monkeypatch)
        with caplog.at_level("WARNING", logger="kt_kernel"):
            _, got = step(our)
        assert calls == [False] * 3
        assert worst(got, expected)[0] < 1e-6
        assert caplog.text.count("computed again") == 1

    def test_available(self):
        import kt_kernel.sft.activations as activations

        assert activations.available_bytes() > 1 << 20

    def test_kept_memory_goes_with_the_backward(self):
        import gc

        from kt_kernel.sft.experts import _Call

        _, our = pair("qwen3_moe")
        gc.collect()
        loss = our(input_ids=IDS, labels=IDS).loss
        calls = [o for o in gc.get_objects() if isinstance(o, _Call)]
        assert len(calls) == 3 and all(c.saved is not None for c in calls)
        loss.backward()
        assert all(c.saved is None for c in calls)
        del loss, calls
        assert not [o for o in gc.get_objects() if isinstance(o, _Call)]
