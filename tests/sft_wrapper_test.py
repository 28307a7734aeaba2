"""AMXSFTMoEWrapper and KTConfig, as programs written for kt-kernel's fine-tuning call them."""

import itertools
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("kt_kernel.kt_kernel_ext", reason="kt_kernel is not built: PYTHONPATH=build/python")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import kt_kernel
from kt_kernel.sft import AMXSFTMoEWrapper, KTConfig

E, K, H, I, R, ALPHA, T = 6, 2, 64, 48, 3, 6.0, 9  # noqa: E741
SIZES = dict(layer_idx=0, num_experts=E, num_experts_per_tok=K, hidden_size=H, moe_intermediate_size=I)
SHAPES = [(E, R, H), (E, I, R)] * 2 + [(E, R, I), (E, H, R)]


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


WEIGHTS = [draw(i, *shape).bfloat16() for i, shape in enumerate([(E, I, H), (E, I, H), (E, H, I)])]
LORA = [draw(10 + i, *shape) for i, shape in enumerate(SHAPES)]
X, GRAD = draw(20, T, H) * 8, draw(21, T, H)
IDS = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:K] for t in range(T)])
SHARES = torch.rand(T, K, generator=torch.Generator().manual_seed(22)) + 0.1


def made(method="AMXBF16_SFT", lora=True, **more):
    options = dict(cpuinfer_threads=2, threadpool_count=1, activations="f32", lora_rank=R, lora_alpha=ALPHA)
    wrapper = AMXSFTMoEWrapper(**SIZES, method=method, **{**options, **more})
    wrapper.load_weights_from_tensors(*WEIGHTS, torch.arange(E))
    gradients = [torch.zeros(shape) for shape in SHAPES]
    if lora:
        wrapper.init_lora_weights(*(t.clone() for t in LORA), *gradients)
    return wrapper, gradients


def reference(weights=WEIGHTS, lora=LORA, ids=IDS):
    """(output, gradients of input, shares and factors) by autograd, an expert at a time."""
    x, shares, *factors = (t.clone().requires_grad_() for t in (X, SHARES, *(lora or ())))
    gate, up, down = (w.float() for w in weights)
    out = torch.zeros(T, H)
    for token, k in itertools.product(range(T), range(K)):
        e = int(ids[token, k])
        if e < 0:
            continue
        row = x[token]
        g, u = gate[e] @ row, up[e] @ row
        if lora:
            scale = ALPHA / R
            g = g + scale * (factors[1][e] @ (factors[0][e] @ row))
            u = u + scale * (factors[3][e] @ (factors[2][e] @ row))
        h = torch.nn.functional.silu(g) * u
        y = down[e] @ h
        if lora:
            y = y + scale * (factors[5][e] @ (factors[4][e] @ h))
        out = out + torch.nn.functional.one_hot(torch.tensor(token), T)[:, None] * (shares[token, k] * y)
    gradients = torch.autograd.grad(out, [x, shares, *factors], GRAD)
    return out.detach(), gradients[0], gradients[1], list(gradients[2:])


def close(got, expected, bound=1e-5):
    assert got.shape == expected.shape
    assert ((got.float() - expected).norm() / expected.norm()).item() < bound


class TestCalls:
    def test_forward_and_backward(self):
        wrapper, gradients = made()
        out, gx, gw, factors = reference()
        close(wrapper.forward(X, IDS, SHARES, save_for_backward=True), out)
        grad_input, grad_weights = wrapper.backward(GRAD)
        close(grad_input, gx)
        close(grad_weights, gw)
        for got, expected in zip(gradients, factors):
            close(got, expected)
        wrapper.forward(X, IDS, SHARES)
        wrapper.backward(GRAD)
        for got, expected in zip(gradients, factors):  # added to what is there
            close(got, 2 * expected)

    def test_weights_are_taken_over_when_asked(self):
        wrapper, _ = made()
        before = wrapper.forward(X, IDS, SHARES, False)
        for t in wrapper._lora:
            t.mul_(2)
        assert torch.equal(wrapper.forward(X, IDS, SHARES, False), before)
        wrapper.update_lora_weights()
        close(wrapper.forward(X, IDS, SHARES, False), reference(lora=[2 * t for t in LORA])[0])

    def test_submitted(self):
        wrapper, gradients = made()
        out, gx, _, factors = reference()
        wrapper.submit_forward(X, IDS, SHARES, save_for_backward=True)
        close(wrapper.sync_forward(), out)
        wrapper.submit_backward_async(GRAD)
        close(wrapper.sync_backward()[0], gx)
        close(gradients[4], factors[4])
        for sync in (wrapper.sync_forward, wrapper.sync_backward):
            with pytest.raises(RuntimeError, match="nothing was submitted"):
                sync()

    def test_the_input_may_be_used_again(self):
        wrapper, _ = made()
        x = X.clone()
        wrapper.forward(x, IDS, SHARES)
        x.zero_()
        close(wrapper.backward(GRAD)[0], reference()[1])

    @pytest.mark.parametrize("method", ["AMXBF16_SFT_SkipLoRA", "AMXINT8_SFT_SkipLoRA"])
    def test_without_lora(self, method):
        wrapper, gradients = made(method, lora=False)
        bound = 1e-5 if "BF16" in method else 0.03  # int8 of such rows
        out, gx, gw, _ = reference(lora=None)
        close(wrapper.forward(X, IDS, SHARES), out, bound)
        grad_input, grad_weights = wrapper.backward(GRAD)
        close(grad_input, gx, bound)
        close(grad_weights, gw, bound)
        assert not any(g.any() for g in gradients)

    @pytest.mark.parametrize(
        "method,bound", [("AMXINT8_SFT", 0.03), ("INT8_SFT", 0.03), ("AMXINT4_SFT", 0.4), ("AMXFP8_SFT", 0.1)]
    )
    def test_methods(self, method, bound):
        """Weights as coarse as the method; what is trained is not rounded."""
        wrapper, gradients = made(method)
        out, gx, gw, factors = reference()
        close(wrapper.forward(X, IDS, SHARES), out, bound)
        grad_input, grad_weights = wrapper.backward(GRAD)
        for got, expected in zip([grad_input, grad_weights, *gradients], [gx, gw, *factors]):
            close(got, expected, bound)

    def test_ids_of_nobody(self):
        ids = IDS.clone()
        ids[0, 0] = ids[4, 1] = -1
        wrapper, _ = made()
        out, gx, gw, _ = reference(ids=ids)
        close(wrapper.forward(X, ids, SHARES), out)
        grad_input, grad_weights = wrapper.backward(GRAD)
        close(grad_input, gx)
        assert grad_weights[0, 0] == grad_weights[4, 1] == 0
        close(grad_weights, gw)

    def test_halves(self):
        wrapper = made()[0]
        wrapper.init_lora_weights(
            *(t.bfloat16() for t in LORA), *(gradients := [torch.zeros(s).bfloat16() for s in SHAPES])
        )
        expected = reference(lora=[t.bfloat16().float() for t in LORA])
        out = wrapper.forward(X.bfloat16(), IDS, SHARES.bfloat16())
        grad_input, grad_weights = wrapper.backward(GRAD.bfloat16())
        assert out.dtype == grad_input.dtype == torch.bfloat16 and grad_weights.dtype == torch.float32
        for got, want in zip([out, grad_input, grad_weights, *gradients], [*expected[:3], *expected[3]]):
            close(got, want, 0.02)

    def test_depth(self):
        """The last forwards that are saved, newest first."""
        wrapper, _ = made(max_cache_depth=2)
        for scale in (1.0, 2.0, 3.0):
            wrapper.forward(scale * X, IDS, SHARES)
        alone = made()[0]
        for scale in (3.0, 2.0):
            alone.forward(scale * X, IDS, SHARES)
            assert torch.equal(wrapper.backward(GRAD)[0], alone.backward(GRAD)[0])
        with pytest.raises(RuntimeError, match="no forward is saved"):
            wrapper.backward(GRAD)


class TestFactory:
    def test_mode(self):
        options = dict(
            cpuinfer_threads=2,
            threadpool_count=1,
            activations="f32",
            method="AMXBF16_SFT",
            lora_rank=R,
            lora_alpha=ALPHA,
        )
        wrapper = kt_kernel.KTMoEWrapper(**SIZES, mode="sft", **options)
        assert isinstance(wrapper, AMXSFTMoEWrapper) and kt_kernel.AMXSFTMoEWrapper is AMXSFTMoEWrapper
        assert (wrapper.lora_rank, wrapper.num_experts, wrapper.hidden_size) == (R, E, H)
        wrapper.load_weights_from_tensors(*WEIGHTS)
        wrapper.init_lora_weights(*LORA, *(torch.zeros(s) for s in SHAPES))
        close(wrapper.forward(X, IDS, SHARES), reference()[0])
        inference = kt_kernel.KTMoEWrapper(**SIZES, mode="inference", method="BF16")
        assert type(inference) is kt_kernel.KTMoEWrapper

    def test_positional(self):
        wrapper = AMXSFTMoEWrapper(
            0, E, K, H, I, 0, 2, 1, None, 128, R, ALPHA, 0.0, 1, "AMXBF16_SFT", 128, True, False
        )
        assert wrapper.chunked_prefill_size == 128 and wrapper.lora_alpha == ALPHA

    def refused(self, kind, match, call):
        with pytest.raises(kind, match=match):
            call()

    def test_refusals(self):
        self.refused(ValueError, "AMXBF17", lambda: made("AMXBF17_SFT"))
        self.refused(ValueError, "lora_rank is 0; expected 1 or more", lambda: made(lora_rank=0))
        self.refused(
            ValueError, "lora_dropout is 0.1: LoRA of experts has no dropout", lambda: made(lora_dropout=0.1)
        )
        self.refused(ValueError, "full_weight_grad: full fine-tuning", lambda: made(full_weight_grad=True))
        self.refused(ValueError, "activations: experts train with bf16 or f32", lambda: made(activations="int8"))
        self.refused(ValueError, "max_cache_depth is 0", lambda: made(max_cache_depth=0))
        self.refused(
            ValueError,
            "max_deferred_experts_per_token",
            lambda: kt_kernel.KTMoEWrapper(**SIZES, mode="sft", max_deferred_experts_per_token=1),
        )

    def test_order_of_calls(self):
        wrapper = AMXSFTMoEWrapper(**SIZES, lora_rank=R)
        self.refused(RuntimeError, "weights are not loaded", lambda: wrapper.forward(X, IDS, SHARES))
        wrapper.load_weights_from_tensors(*WEIGHTS)
        self.refused(RuntimeError, "LoRA has no weights: init_lora_weights", lambda: wrapper.forward(X, IDS, SHARES))
        self.refused(RuntimeError, "init_lora_weights was not called", wrapper.update_lora_weights)
        self.refused(RuntimeError, "no forward is saved", lambda: wrapper.backward(GRAD))

    def test_shapes(self):
        wrapper, gradients = made()
        bad = [t[:, :, :-1] if i == 5 else t for i, t in enumerate(LORA)]
        self.refused(
            ValueError,
            r"down_lora_b: expected \[6, 64, 3\], got \[6, 64, 2\]",
            lambda: wrapper.init_lora_weights(*bad, *gradients),
        )
        bad = [*gradients[:2], gradients[2].long(), *gradients[3:]]
        self.refused(
            TypeError, "grad_up_lora_a: expected a tensor of floats", lambda: wrapper.init_lora_weights(*LORA, *bad)
        )
        self.refused(ValueError, r"topk_weights: expected \[9, 2\]", lambda: wrapper.forward(X, IDS, SHARES[:, :1]))
        wrapper.forward(X, IDS, SHARES)
        self.refused(ValueError, r"grad_output: expected \[9, 64\]", lambda: wrapper.backward(GRAD[:3]))


class TestConfig:
    def test_fields(self):
        config = KTConfig(
            kt_backend="AMXINT8",
            kt_num_threads=8,
            kt_threadpool_count=2,
            kt_weight_path="/w",
            kt_lora_rank=8,
            kt_activation_policy={"cpu": "recompute", "gpu": "recompute"},
            kt_max_cache_depth=2,
        )
        assert config.enable_arguments() == dict(
            trainable=True, weights="/w", format="int8", threads=8, numa_nodes=2, cpu_activation="recompute"
        )
        assert config.lora_arguments() == dict(r=8, lora_alpha=16.0)
        assert config.notes() == ["kt_max_cache_depth: not needed, activations live as long as their graph"]
        assert KTConfig.from_object(config) == config == KTConfig.from_object(config.to_dict())

    def test_unknown(self):
        with pytest.raises(
            TypeError, match=r"KTConfig: unknown kt_numthreads; known are kt_backend, .*kt_wrap_kwargs"
        ):
            KTConfig(kt_numthreads=3)

    def test_environment(self, monkeypatch):
        monkeypatch.setenv("ACCELERATE_KT_NUM_THREADS", "12")
        monkeypatch.setenv("ACCELERATE_KT_BACKEND", "AMXINT4")
        monkeypatch.setenv("ACCELERATE_KT_TP_ENABLED", "true")
        monkeypatch.setenv("ACCELERATE_KT_LORA_ALPHA", "")
        config = KTConfig(kt_backend="AMXBF16")
        assert (config.kt_num_threads, config.kt_backend, config.kt_tp_enabled, config.kt_lora_alpha) == (
            12,
            "AMXBF16",
            True,
            None,
        )
        monkeypatch.setenv("ACCELERATE_KT_NUM_THREADS", "many")
        with pytest.raises(ValueError, match="ACCELERATE_KT_NUM_THREADS: expected an int, got 'many'"):
            KTConfig()

    def test_nothing_set(self):
        assert KTConfig().enable_arguments() == {"trainable": True} and KTConfig().notes() == []
        assert repr(KTConfig(kt_num_threads=3)) == "KTConfig(kt_num_threads=3)"

    @pytest.mark.parametrize(
        "backend,format",
        [
            ("AMXBF16", "bf16"),
            ("AMXINT8_SkipLoRA", "int8"),
            ("AMXINT4", "int4"),
            ("INT8", "int8"),
            ("FP8", "fp8"),
            ("auto", None),
        ],
    )
    def test_backends(self, backend, format):
        assert KTConfig(kt_backend=backend).enable_arguments().get("format") == format
        assert KTConfig(kt_backend=backend).skips_lora == ("Skip" in backend)

    @pytest.mark.parametrize(
        "fields,match",
        [
            (dict(kt_backend="AMXINT3"), "kt_backend: unknown 'AMXINT3'; known are AUTO, AMXBF16"),
            (
                dict(kt_train_mode="full"),
                "kt_train_mode: full: full fine-tuning of experts is not supported, LoRA is",
            ),
            (dict(kt_full_weight_grad=True), "kt_full_weight_grad: full fine-tuning"),
            (dict(kt_use_lora_experts=True), "kt_use_lora_experts: extra experts on the GPU are not supported"),
            (dict(kt_num_gpu_experts=4), "kt_num_gpu_experts is 4: experts on the GPU do not train"),
            (dict(kt_expert_weight_format="int3"), "kt_expert_weight_format: expected one of bf16"),
            (dict(kt_weight_lifecycle="short"), "kt_weight_lifecycle: expected persistent or ephemeral"),
            (dict(kt_num_threads=-1), "kt_num_threads is -1"),
            (dict(kt_activation_policy={"cpu": "keep"}), "kt_activation_policy.cpu: expected retain or recompute"),
            (dict(kt_activation_policy={"tpu": "retain"}), "kt_activation_policy: unknown tpu"),
            (dict(kt_share_cache_pool="perhaps"), "kt_share_cache_pool: expected true or false"),
        ],
    )
    def test_values(self, fields, match):
        with pytest.raises(ValueError, match=match):
            KTConfig(**fields)

    def test_types(self):
        for fields in (
            dict(kt_num_threads=1.5),
            dict(kt_backend=3),
            dict(kt_lora_alpha="much"),
            dict(kt_activation_policy="retain"),
        ):
            with pytest.raises(TypeError, match=next(iter(fields))):
                KTConfig(**fields)
