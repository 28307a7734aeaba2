"""kt_kernel_ext under the names that programs written for kt-kernel use: how it is imported, CPUInfer as a pool,
MOEConfig and the classes of kt_kernel_ext.moe with tasks on addresses. PYTHONPATH names a folder with the built
package."""
import ast
import importlib
import logging
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
kt_kernel = pytest.importorskip("kt_kernel", reason="PYTHONPATH does not name the built package kt_kernel")
from kt_kernel import kt_kernel_ext
from kt_kernel.ext_moe import CLASSES, MoE_Interface, MOEConfig, QuantConfig

PACKAGE = pathlib.Path(kt_kernel.__file__).parent
EXPERTS, TOP_K, HIDDEN, INTER, MOST = 6, 2, 256, 384, 32
MISSING = ("mla", "linear", "mlp", "gate", "kvcache", "utils")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def refused(kind, message, call):
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


# --- imports


def test_import_under_its_own_name():
    """In a process of its own: nothing else has imported it there."""
    code = """
import kt_kernel
import kt_kernel_ext
from kt_kernel_ext.moe import MOEConfig, AMXInt8_MOE
import kt_kernel_ext.moe as moe, kt_kernel.kt_kernel_ext.moe as same
assert kt_kernel_ext is kt_kernel.kt_kernel_ext and moe is kt_kernel_ext.moe is same and moe.MOEConfig is MOEConfig
assert kt_kernel_ext.__spec__.name == "kt_kernel.kt_kernel_ext" and moe.__spec__.name == "kt_kernel.ext_moe"
assert kt_kernel_ext.QuantConfig is moe.QuantConfig
print("torch" in __import__("sys").modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("part", MISSING)
def test_parts_that_are_not_here_say_what_to_use(part):
    message = f"^kt_kernel_ext.{part} is not in KT: .* .* "
    for parent in ("kt_kernel_ext", "kt_kernel.kt_kernel_ext"):
        refused(ImportError, message, lambda parent=parent: importlib.import_module(f"{parent}.{part}"))
    refused(ImportError, message, lambda: exec(f"from kt_kernel_ext.{part} import anything"))
    refused(ImportError, message, lambda: exec(f"from kt_kernel_ext import {part}"))
    refused(AttributeError, message, lambda: getattr(kt_kernel_ext, part))
    assert not hasattr(kt_kernel_ext, part)


def test_names_that_nobody_has():
    refused(AttributeError, "^module 'kt_kernel_ext' has no attribute 'nonsense'$", lambda: kt_kernel_ext.nonsense)
    refused(ModuleNotFoundError, "No module named 'kt_kernel_ext.nonsense'",
            lambda: importlib.import_module("kt_kernel_ext.nonsense"))
    refused(AttributeError, "^module 'kt_kernel_ext.moe' has no attribute 'nonsense'$",
            lambda: kt_kernel_ext.moe.nonsense)
    refused(AttributeError, "fine-tuning", lambda: kt_kernel_ext.moe.AMXBF16_SFT_MOE)
    refused(AttributeError, "fine-tuning", lambda: kt_kernel_ext.moe.MOESFTConfig)
    refused(AttributeError, "tiles", lambda: kt_kernel_ext.moe.tiling)


def stub(name):
    return {node.name: node for node in ast.parse((PACKAGE / name).read_text()).body if isinstance(node, ast.ClassDef)}


def test_stubs_name_what_is_there():
    classes = stub("ext_moe.pyi")
    assert sorted(classes) == sorted(["QuantConfig", "MOEConfig", "MoE_Interface", *CLASSES])
    for kind in (QuantConfig, MOEConfig):
        said = [node.target.id for node in classes[kind.__name__].body if isinstance(node, ast.AnnAssign)]
        assert said == list(kind.__slots__)
    extension = stub("kt_kernel_ext.pyi")
    for kind, node in ((MoE_Interface, classes["MoE_Interface"]), (kt_kernel_ext.CPUInfer, extension["CPUInfer"]),
                       (kt_kernel_ext.ExpertLayer, extension["ExpertLayer"])):
        said = {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
        ours = {name for name in vars(kind) if not name.startswith("_")}
        assert said - {"__init__", "submit_with_cuda_stream", "sync_with_cuda_stream"} == ours


# --- CPUInfer


def test_threads_are_cut_to_the_cpus_with_a_warning(caplog):
    usable = len(os.sched_getaffinity(0))
    config = kt_kernel_ext.WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 2, [0, 0], [4000, 4000]
    with caplog.at_level(logging.WARNING, "kt_kernel"):
        assert kt_kernel_ext.CPUInfer(6000).threads == usable
        assert kt_kernel_ext.CPUInfer(config).threads == max(usable, 2)
        assert kt_kernel_ext.CPUInfer(config).pools == 2
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"6000 threads were asked for, but {usable} cpus are usable: using {usable} threads",
                     f"8000 threads were asked for, but {usable} cpus are usable: using {max(usable, 2)} threads"]


def test_backend_is_the_queue_itself(infer):
    assert infer.backend_ is infer and isinstance(infer.backend_, kt_kernel_ext.CPUInfer)
    with pytest.raises(AttributeError):
        infer.backend_ = None


# --- weights as each class takes them, and the numbers they stand for


def draw(shape, seed, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def matrices():
    """gate, up and down in f32."""
    shapes = ((INTER, HIDDEN), (INTER, HIDDEN), (HIDDEN, INTER))
    return [draw((EXPERTS, n, k), seed, k ** -0.5) for seed, (n, k) in enumerate(shapes)]


def groups(w, group):
    return w.reshape(EXPERTS, w.shape[1], -1, group)


def widened(codes, scales, shape):
    return (codes.double() * scales.double().unsqueeze(-1)).reshape(shape)


def nibbles(codes):
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).contiguous()


def stored_values(w):
    w = w.bfloat16()
    return w, None, w.double()


def int4_codes(w, group, dtype):
    scales = (groups(w, group).abs().amax(-1) / 7).to(dtype)
    codes = (groups(w, group) / scales.float().unsqueeze(-1)).round().clamp(-8, 7)
    return codes.to(torch.int64).reshape(w.shape) + 8, scales, widened(codes, scales, w.shape)


def stored_rawint4(w, group=128):
    codes, scales, values = int4_codes(w, group, torch.bfloat16)
    return nibbles(codes), scales.contiguous(), values


def stored_gptq(w, group=128):
    """Words [k / 8, n] and scales [k / group, n] of each expert."""
    codes, scales, values = int4_codes(w, group, torch.float32)
    words = (codes.reshape(EXPERTS, w.shape[1], -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words.transpose(1, 2).contiguous(), scales.transpose(1, 2).contiguous(), values


def stored_fp8(w):
    e, n, k = w.shape
    blocks = w.reshape(e, n // 128, 128, k // 128, 128)
    scales = blocks.abs().amax((2, 4)) / 448
    codes = (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(w.shape), scales, (codes.double() * scales.double()[:, :, None, :, None]).reshape(w.shape)


def stored_fp8_rows(w):
    scales = w.abs().amax(-1) / 448
    codes = (w / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return codes, scales, codes.double() * scales.double().unsqueeze(-1)


def power_of_two(largest, most):
    return torch.exp2(torch.ceil(torch.log2(largest / most)))


def stored_mxfp8(w):
    scales = power_of_two(groups(w, 32).abs().amax(-1), 448)
    codes = (groups(w, 32) / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    exponents = (torch.log2(scales) + 127).to(torch.uint8)
    return codes.reshape(w.shape), exponents.contiguous(), widened(codes, scales, w.shape)


def stored_mxfp4(w, any_scales=False):
    largest = groups(w, 32).abs().amax(-1)
    scales = (largest / 6 if any_scales else power_of_two(largest, 6)).bfloat16()
    codes = (groups(w, 32).unsqueeze(-1) / scales.float()[..., None, None] - E2M1).abs().argmin(-1)
    return nibbles(codes.reshape(w.shape)), scales.contiguous(), widened(E2M1[codes], scales, w.shape)


def stored_mxfp4_any_scales(w):
    return stored_mxfp4(w, any_scales=True)


# How weights of a class are made, what quant_config says of them, and the bound on its output's error, root mean square
# relative to the output, against the weights as they are stored. Activations become int8 where weights are integers
# (about 1 % a projection) and bf16 (2^-9) elsewhere; classes that round bf16 values themselves are off by their
# format's error as well: python_api_test.py has these figures.
FLOATS, INTEGERS, INT8, INT4 = 0.008, 0.03, 0.04, 0.32
HOW = {
    "AMXInt8_MOE": (stored_values, {}, INT8),
    "AMXInt4_MOE": (stored_values, {}, INT4),
    "AMXInt4_1_MOE": (stored_values, {}, INT4),
    "AMXInt4_1KGroup_MOE": (stored_values, {"group_size": 64, "zero_point": True}, INT4),
    "AMXInt4_KGroup_MOE": (stored_rawint4, {"group_size": 128}, INTEGERS),
    "AMXInt4_KGroupBlocked_MOE": (lambda w: stored_rawint4(w, 32), {"group_size": 32}, INTEGERS),
    "AMXBF16_MOE": (stored_values, {}, FLOATS),
    "AMXFP8_MOE": (stored_fp8, {"group_size": 128}, FLOATS),
    "AMXFP8PerChannel_MOE": (stored_fp8_rows, {"per_channel": True}, FLOATS),
    "AMXFP4_KGroup_MOE": (stored_mxfp4, {"group_size": 32}, FLOATS),
    "AMXMXFP8_KGroup_MOE": (stored_mxfp8, {"group_size": 32}, FLOATS),
    "AVX2BF16_MOE": (stored_values, {}, FLOATS),
    "AVX2FP8_MOE": (stored_fp8, {}, FLOATS),
    "AVX2GPTQInt4_MOE": (stored_gptq, {"group_size": 128}, INTEGERS),
    "AVX2RawInt4_MOE": (lambda w: stored_rawint4(w, 64), {"group_size": 64}, INTEGERS),
    "AVX2MXFP4_MOE": (stored_mxfp4_any_scales, {"group_size": 32}, INTEGERS),
    "AVX2MXFP8_MOE": (stored_mxfp8, {}, FLOATS),
    "AVXVNNI256GPTQInt4_MOE": (lambda w: stored_gptq(w, 32), {"group_size": 32}, INTEGERS),
    "AVXVNNI256RawInt4_MOE": (stored_rawint4, {"group_size": 128}, INTEGERS),
    "Int8_KERNEL_MOE": (stored_values, {}, INT8),
    "Int4_KERNEL_MOE": (stored_values, {}, INT4),
    "KMLInt8_MOE": (stored_values, {}, INT8),
    "KMLInt4_MOE": (stored_values, {}, INT4),
}


@pytest.fixture(scope="module")
def infer():
    return kt_kernel_ext.CPUInfer(2)


class Layer:
    """A class's object with what it points to."""

    def __init__(self, infer, name, how=None, one_by_one=False, order=None, **fields):
        made, quant, self.bound = how or HOW[name]
        self.infer, self.kept = infer, [order]
        self.config = MOEConfig(EXPERTS, TOP_K, HIDDEN, INTER)
        self.config.pool, self.config.max_len = infer.backend_, MOST
        for field, value in quant.items():
            setattr(self.config.quant_config, field, value)
        self.values = []
        for projection, w in zip(("gate", "up", "down"), matrices()):
            codes, scales, values = made(w)
            self.values.append(values)
            for field, tensor in (("proj", codes), ("scale", scales)):
                if tensor is not None:
                    self.point(f"{projection}_{field}", tensor, one_by_one)
        for field, value in fields.items():
            setattr(self.config, field, value)
        self.moe = getattr(kt_kernel_ext.moe, name)(self.config)
        infer.submit(self.moe.load_weights_task(*(() if order is None else (order.data_ptr(),))))
        infer.sync()

    def point(self, field, tensor, one_by_one):
        each = [one.clone() for one in tensor] if one_by_one else [tensor]
        self.kept += each
        if one_by_one:
            setattr(self.config, f"{field}s", [[one.data_ptr() for one in each]])
        else:
            setattr(self.config, field, tensor.data_ptr())

    def run(self, x, ids, scores, out=None, adds=False):
        out = torch.full_like(x, float("nan")) if out is None else out
        tokens = torch.tensor([x.shape[0]], dtype=torch.int32)
        self.infer.submit(self.moe.forward_task(tokens.data_ptr(), ids.shape[1], ids.data_ptr(), scores.data_ptr(),
                                                x.data_ptr(), out.data_ptr(), adds))
        self.infer.sync()
        return out

    def check(self, tokens=(1, 7, MOST), dtype=torch.bfloat16):
        for count in tokens:
            x, ids, scores = inputs(count, dtype)
            assert error(self.run(x, ids, scores), reference(self.values, x, ids, scores)) < self.bound


def inputs(tokens, dtype=torch.bfloat16, top_k=TOP_K):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)])
    return draw((tokens, HIDDEN), tokens).to(dtype), ids, torch.rand(tokens, top_k, generator=generator)


def reference(weights, x, ids, scores, skip=()):
    gate, up, down = weights
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, token in enumerate(x.double()):
        for expert, score in zip(ids[t].tolist(), scores[t].double()):
            if expert not in skip:
                out[t] += (score
                           * (down[expert] @ (torch.nn.functional.silu(gate[expert] @ token) * (up[expert] @ token))))
    return out


def error(got, want):
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


@pytest.mark.parametrize("name", HOW)
def test_every_class_gives_the_layer(infer, name):
    Layer(infer, name).check()


def test_classes_are_all_tested():
    assert sorted([*HOW, "MOE"]) == sorted(CLASSES)
    assert {method for method, _ in CLASSES.values()} == set(kt_kernel_ext.methods())


@pytest.mark.parametrize("kinds", [("Q4_0", "Q8_0", "Q5_1"), ("BF16", "F16", "F32")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_gguf_blocks(infer, kinds, dtype):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    types = [gguf.GGMLQuantizationType[kind] for kind in kinds]
    pending = list(types)

    def blocks(w):
        kind = pending.pop(0)
        coded = gguf.quants.quantize(w.numpy(), kind)
        return (torch.from_numpy(coded), None,
                torch.from_numpy(gguf.quants.dequantize(coded, kind)).double().reshape(w.shape))

    hidden_type = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    layer = Layer(infer, "MOE", (blocks, {}, INTEGERS), gate_type=types[0], up_type=types[1], down_type=types[2],
                  hidden_type=gguf.GGMLQuantizationType[hidden_type], max_len=0, group_max_len=MOST)
    layer.check(dtype=dtype)


@pytest.mark.parametrize("name", ["AMXBF16_MOE", "AVX2FP8_MOE", "AVX2GPTQInt4_MOE", "AVX2RawInt4_MOE", "AVX2MXFP4_MOE"])
def test_an_address_for_each_expert(infer, name):
    x, ids, scores = inputs(7)
    assert torch.equal(Layer(infer, name, one_by_one=True).run(x, ids, scores), Layer(infer, name).run(x, ids, scores))


@pytest.mark.parametrize("name", ["AMXInt8_MOE", "AVX2RawInt4_MOE"])
def test_expert_maps(infer, name):
    x, ids, scores = inputs(7)
    order = torch.tensor([3, 1, 0, 5, 2, 4])
    want = Layer(infer, name).run(x, ids, scores)
    moved = torch.argsort(order)[ids].contiguous()
    assert torch.equal(Layer(infer, name, order=order).run(x, moved, scores), want)
    assert torch.equal(Layer(infer, name, physical_to_logical_map=order.data_ptr()).run(x, moved, scores), want)


def test_masks(infer):
    mask = torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.uint8)
    config = MOEConfig(EXPERTS, TOP_K, HIDDEN, INTER, mask.data_ptr())
    assert (config.gpu_experts_mask, config.num_gpu_experts) == (mask.data_ptr(), 2)
    assert MOEConfig(EXPERTS, TOP_K, HIDDEN, INTER, 3).num_gpu_experts == 3
    layer = Layer(infer, "AMXBF16_MOE", gpu_experts_mask=mask.data_ptr())
    x, ids, scores = inputs(7)
    assert error(layer.run(x, ids, scores), reference(layer.values, x, ids, scores, skip=(1, 4))) < FLOATS
    mask.zero_()  # live
    assert error(layer.run(x, ids, scores), reference(layer.values, x, ids, scores)) < FLOATS


def test_incremental_adds_to_the_output(infer):
    layer = Layer(infer, "AMXBF16_MOE")
    x, ids, scores = inputs(7)
    before = draw(x.shape, 77).bfloat16()
    out = layer.run(x, ids, scores, before.clone(), adds=True)
    assert error(out, before.double() + reference(layer.values, x, ids, scores)) < FLOATS


def test_what_a_wrapper_puts_off_is_not_taken_here(infer):
    """Same hidden size, no path, a later layer, in the same thread: but no layer of the wrapper's model."""
    wrapper = kt_kernel.KTMoEWrapper(0, EXPERTS, TOP_K, HIDDEN, INTER, cpuinfer_threads=2, chunked_prefill_size=MOST,
                                     max_deferred_experts_per_token=1, method="BF16")
    wrapper.load_weights_from_tensors(*matrices())
    x, ids, scores = inputs(1)
    layer = Layer(infer, "AMXBF16_MOE", layer_idx=1)
    out, tokens = torch.empty_like(x), torch.tensor([1], dtype=torch.int32)
    wrapper.forward(x, ids, scores)
    layer.moe.forward(tokens.data_ptr(), TOP_K, ids.data_ptr(), scores.data_ptr(), x.data_ptr(), out.data_ptr())
    assert error(out, reference(layer.values, x, ids, scores)) < FLOATS


def test_fewer_experts_of_a_token_and_swiglu(infer):
    layer = Layer(infer, "AMXBF16_MOE")
    x, ids, scores = inputs(5, top_k=1)
    assert error(layer.run(x, ids, scores), reference(layer.values, x, ids, scores)) < FLOATS
    clamped = Layer(infer, "AMXBF16_MOE", swiglu_limit=0.1)
    assert error(clamped.run(x, ids, scores), reference(layer.values, x, ids, scores)) > 0.1


def test_tasks_read_what_they_point_to_when_they_run(infer):
    layer = Layer(infer, "AMXBF16_MOE")
    x, ids, scores = inputs(7)
    tokens, out = torch.tensor([7]), torch.zeros_like(x)  # int64: its low half is read
    task = layer.moe.forward_task(tokens.data_ptr(), TOP_K, ids.data_ptr(), scores.data_ptr(), x.data_ptr(),
                                  out.data_ptr())
    want = reference(layer.values, x, ids, scores)
    tokens[0] = 3
    infer.submit(task)
    infer.sync()
    assert error(out[:3], want[:3]) < FLOATS and not out[3:].any()
    tokens[0] = 7
    infer.submit(task)
    infer.sync()
    assert error(out, want) < FLOATS
    layer.moe.warm_up()
    out.zero_()
    layer.moe.forward(tokens.data_ptr(), TOP_K, ids.data_ptr(), scores.data_ptr(), x.data_ptr(), out.data_ptr())
    assert error(out, want) < FLOATS


def test_weights_are_saved_and_loaded(infer, tmp_path):
    x, ids, scores = inputs(7)
    made = Layer(infer, "AMXInt8_MOE", path=str(tmp_path), save=True, layer_idx=3)
    config = made.config
    config.load, config.save, config.gate_proj = True, False, 0
    moe = kt_kernel_ext.moe.AMXInt8_MOE(config)
    moe.load_weights()
    want, made.moe = made.run(x, ids, scores), moe
    assert torch.equal(made.run(x, ids, scores), want)


@pytest.mark.parametrize("ranks", [1, 2])
def test_write_back(infer, ranks):
    layer = Layer(infer, "AMXBF16_MOE")
    gate, up, down = (w.bfloat16() for w in matrices())
    w13 = [torch.zeros(2 * INTER // ranks, HIDDEN, dtype=torch.bfloat16) for _ in range(ranks)]
    w2 = [torch.zeros(HIDDEN, INTER // ranks, dtype=torch.bfloat16) for _ in range(ranks)]
    infer.submit(layer.moe.write_weight_scale_to_buffer_task(ranks, 4, [t.data_ptr() for t in w13], [],
                                                             [t.data_ptr() for t in w2], []))
    infer.sync()
    for i in range(ranks):
        mine = slice(i * INTER // ranks, (i + 1) * INTER // ranks)
        assert torch.equal(w13[i], torch.cat([gate[4][mine], up[4][mine]])) and torch.equal(w2[i], down[4][:, mine])
    infer.submit(layer.moe.write_weight_scale_to_buffer_task(1, 4, [0], [0], [w2[0].data_ptr()], [0]))
    refused(ValueError, "null address for w13", infer.sync)
    refused(ValueError, "1 addresses for 2 ranks",
            lambda: layer.moe.write_weight_scale_to_buffer_task(2, 4, [8], [8], [8], [8]))


# --- bad input


def failing(infer, **fields):
    layer = Layer(infer, "AVX2RawInt4_MOE")
    for field, value in fields.items():
        target = layer.config.quant_config if hasattr(layer.config.quant_config, field) else layer.config
        setattr(target, field, value)
    moe = kt_kernel_ext.moe.AVX2RawInt4_MOE(layer.config)
    infer.submit(moe.load_weights_task())
    infer.sync()


def test_bad_configs(infer):
    config = MOEConfig(EXPERTS, TOP_K, HIDDEN, INTER)
    for wrong in ("stride", "expert_nums"):
        refused(AttributeError, wrong, lambda wrong=wrong: setattr(config, wrong, 1))
    refused(AttributeError, "groups", lambda: setattr(config.quant_config, "groups", 1))
    moe = kt_kernel_ext.moe
    refused(TypeError, "make one of AMXInt8_MOE", lambda: MoE_Interface(config))
    refused(TypeError, "AMXInt8_MOE: expected a MOEConfig, got dict", lambda: moe.AMXInt8_MOE({}))
    refused(TypeError, "pool: expected CPUInfer.backend_, got NoneType", lambda: moe.AMXInt8_MOE(config))
    config.pool = infer.backend_
    refused(ValueError, "AMXInt8_MOE: MOEConfig.gate_proj is null", lambda: moe.AMXInt8_MOE(config))
    config.gate_proj = torch.zeros(1)
    refused(TypeError, "gate_proj: expected an address, an int, got Tensor", lambda: moe.AMXInt8_MOE(config))
    config.gate_proj = -8
    refused(TypeError, "gate_proj: expected an address, an int, got -8", lambda: moe.AMXInt8_MOE(config))
    config.gate_projs = [[1, 2]]
    config.gate_proj = 0
    refused(NotImplementedError, "gate_projs.*files", lambda: moe.AMXInt8_MOE(config))
    config.gate_projs = [[1, 2], [3, 4]]
    refused(NotImplementedError, "gate_projs has 2 lists", lambda: moe.AVX2BF16_MOE(config))
    config.gate_projs, config.gate_proj, config.gate_scale = (), 8, 8
    refused(NotImplementedError, "gate_scale: expected bf16 values", lambda: moe.AMXInt4_1KGroup_MOE(config))
    config.save = True
    config.gate_scale, config.up_proj, config.down_proj = 0, 8, 8
    refused(ValueError, "without a path", lambda: moe.AMXInt8_MOE(config))
    config.save, config.hidden_type = False, 12
    refused(ValueError, "hidden_type is 12", lambda: moe.MOE(config))
    config.hidden_size = 0
    refused(ValueError, "hidden 0", lambda: moe.AMXInt8_MOE(config))
    config.hidden_size = "256"
    refused(TypeError, "hidden has a value of a wrong type", lambda: moe.AMXInt8_MOE(config))


def test_bad_weights(infer):
    refused(ValueError, "group_size is 0, expected a multiple of 16", lambda: failing(infer, group_size=0))
    refused(ValueError, "layer 0 gate: 256 columns are no whole number of groups of 96",
            lambda: failing(infer, group_size=96))
    refused(ValueError, "layer 0 up scales: 0 addresses for 6 experts", lambda: failing(infer, up_scale=0))
    refused(ValueError, "layer 0 gate: 2 addresses for 6 experts", lambda: failing(infer, gate_projs=[[8, 8]]))
    refused(ValueError, "layer 0 down: a null address for expert 1",
            lambda: failing(infer, down_projs=[[8, 0, 8, 8, 8, 8]]))
    refused(ValueError, "layer 0 gate: 255 columns, expected a multiple of 2",
            lambda: failing(infer, hidden_size=255, group_size=32))
    config = Layer(infer, "AVX2FP8_MOE").config
    config.quant_config.group_size = 64
    refused(ValueError, "AVX2FP8_MOE: quant_config.group_size is 64; expected 128",
            lambda: kt_kernel_ext.moe.AVX2FP8_MOE(config))
    config.quant_config.bits = 4
    refused(ValueError, "AVX2FP8_MOE: quant_config.bits is 4; expected 8",
            lambda: kt_kernel_ext.moe.AVX2FP8_MOE(config))
    config = Layer(infer, "AVX2GPTQInt4_MOE").config
    config.up_zero = 8
    refused(NotImplementedError, "MOEConfig.up_zero: zero points", lambda: kt_kernel_ext.moe.AVX2GPTQInt4_MOE(config))
    config.up_zero, config.quant_config.zero_point = 0, True
    infer.submit(kt_kernel_ext.moe.AVX2GPTQInt4_MOE(config).load_weights_task())
    refused(NotImplementedError, "zero points", infer.sync)
    config = Layer(infer, "AMXBF16_MOE").config
    config.gate_type = 9999
    infer.submit(kt_kernel_ext.moe.MOE(config).load_weights_task())
    refused(NotImplementedError, "layer 0 gate: weights of GGUF type 9999", infer.sync)

    def with_nan(w):
        codes, scales, values = stored_fp8(w)
        codes.view(torch.uint8)[4, 3, 2] = 0x7F
        return codes, scales, values
    refused(ValueError, "layer 0 expert 4 .*: the weight of row 3, column 2 is not a finite number",
            lambda: Layer(infer, "AVX2FP8_MOE", (with_nan, {}, 0)))


def test_bad_forwards(infer):
    layer = Layer(infer, "AMXBF16_MOE")
    x, ids, scores = inputs(4)
    tokens, out = torch.tensor([4], dtype=torch.int32), torch.zeros_like(x)
    good = dict(qlen=tokens.data_ptr(), k=TOP_K, expert_ids=ids.data_ptr(), weights=scores.data_ptr(),
                input=x.data_ptr(), output=out.data_ptr())
    for field, what in (("qlen", "the number of tokens"), ("expert_ids", "the ids"), ("weights", "the weights"),
                        ("input", "the input"), ("output", "the output")):
        infer.submit(layer.moe.forward_task(**{**good, field: 0}))
        refused(ValueError, f"layer 0: a null address for {what}", infer.sync)
        refused(TypeError, f"AMXBF16_MOE: {field}: expected an address, an int, got Tensor",
                lambda field=field: layer.moe.forward_task(**{**good, field: x}))
    for k in (0, TOP_K + 1):
        refused(ValueError, f"k is {k}; expected 1 to {TOP_K}", lambda k=k: layer.moe.forward_task(**{**good, "k": k}))
    for bad in (-1, MOST + 1):
        tokens[0] = bad
        infer.submit(layer.moe.forward_task(**good))
        refused(ValueError, f"layer 0: {bad} tokens, expected at most {MOST}", infer.sync)
    unloaded = kt_kernel_ext.moe.AMXBF16_MOE(layer.config)
    infer.submit(unloaded.warm_up_task())
    refused(ValueError, "no weights are loaded", infer.sync)
    infer.submit(unloaded.forward_task(**good))
    refused(ValueError, "no weights are loaded", infer.sync)
