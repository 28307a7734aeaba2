"""kt_kernel.KTMoEWrapper on the CPU: every method, both constructor dialects, all forms of input, and what is refused.
PYTHONPATH names a folder with the built package."""
import os
import pathlib
import subprocess
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
kt_kernel = pytest.importorskip("kt_kernel", reason="PYTHONPATH does not name the built package kt_kernel")
from kt_kernel import KTMoEWrapper, kt_kernel_ext

KT = os.environ.get("KT_PROGRAM")
ROOT = pathlib.Path(__file__).resolve().parent.parent
EXPERTS, TOP_K, HIDDEN, INTER, CHUNK = 8, 3, 256, 256, 32

# Root mean square error of a layer's output, relative to the output, that rounding weights (and activations to int8
# where weights are integers) may cost on normally distributed numbers: three matrices, each off by its format's own
# error (uniform over a step: 2^-9 for bf16, 2.6 % for three bits of mantissa, about 1 % for int8 and 10 % for int4 with
# weights and activations), so sqrt(3) times that and half as much again.
METHODS = {"BF16": 0.006, "AMXINT8": 0.04, "MOE_INT8": 0.04, "FP8": 0.07, "FP8_PERCHANNEL": 0.07, "MXFP8": 0.07,
           "AMXINT4": 0.32, "MOE_INT4": 0.32, "RAWINT4": 0.28, "GPTQ_INT4": 0.28, "LLAMAFILE": 0.25, "MXFP4": 0.28}


def values(seed=0, experts=EXPERTS, hidden=HIDDEN, inter=INTER):
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(experts, *shape, generator=draw) * shape[1] ** -0.5).bfloat16()
            for shape in ((inter, hidden), (inter, hidden), (hidden, inter))]


def wrapper(method="BF16", load=True, hidden=HIDDEN, inter=INTER, seed=0, **options):
    made = KTMoEWrapper(**{**dict(layer_idx=0, num_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=hidden,
                                  moe_intermediate_size=inter, cpuinfer_threads=2, threadpool_count=1, weight_path=None,
                                  chunked_prefill_size=CHUNK, method=method), **options})
    if load:
        made.load_weights_from_tensors(*values(seed, hidden=hidden, inter=inter), torch.arange(EXPERTS))
    return made


def inputs(tokens, seed=1, hidden=HIDDEN, dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=draw).to(dtype)
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:TOP_K] for _ in range(tokens)]) if tokens else \
        torch.zeros(0, TOP_K, dtype=torch.int64)
    return x, ids, torch.rand(tokens, TOP_K, generator=draw)


def reference(weights, x, ids, scores, skip=(), limit=0.0, alpha=0.0):
    """The layer by its definition, in f64, one pair after the other."""
    gate, up, down = (w.double() for w in weights)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for expert, score in zip(ids[t].tolist(), scores[t].double()):
            if not 0 <= expert < EXPERTS or expert in skip:
                continue
            g, u = gate[expert] @ x[t].double(), up[expert] @ x[t].double()
            if limit:
                g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            mid = g * torch.sigmoid(alpha * g) * (u + 1) if alpha else torch.nn.functional.silu(g) * u
            out[t] += score * (down[expert] @ mid)
    return out


def error(got, want):
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


@pytest.fixture(scope="module")
def bf16():
    return wrapper()


# --- numbers


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_layer(method):
    layer = wrapper(method)
    for tokens in (1, 7, CHUNK):
        x, ids, scores = inputs(tokens)
        assert error(layer.forward(x, ids, scores, 0), reference(values(), x, ids, scores)) < METHODS[method]


@pytest.mark.parametrize("kinds", [("Q4_0", "Q8_0", "Q5_1"), ("BF16", "Q4_1", "F16"), ("Q8_0", "Q8_0", "Q4_0")])
def test_a_gguf_file_whose_matrices_have_types_of_their_own(kinds, tmp_path):
    """With f32 activations nothing is rounded but sums: a type brought to another would be seen."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    writer, stored = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3moe"), []
    writer.add_block_count(1)
    writer.add_expert_count(EXPERTS)
    writer.add_embedding_length(HIDDEN)
    for name, kind, matrix in zip(("gate", "up", "down"), kinds, values()):
        kind = gguf.GGMLQuantizationType[kind]
        coded = gguf.quants.quantize(matrix.float().numpy(), kind)
        stored.append(torch.from_numpy(gguf.quants.dequantize(coded, kind)).reshape(matrix.shape))
        writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", coded, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    exact, usual = (wrapper("LLAMAFILE", load=False, weight_path=str(tmp_path), activations=acts)
                    for acts in ("f32", "default"))
    for layer, bound in ((exact, 3e-6), (usual, 0.03)):  # int8 activations cost about 1 % a projection
        layer.load_weights(torch.arange(EXPERTS))
        for tokens in (1, 7, CHUNK):
            x, ids, scores = inputs(tokens, dtype=torch.float32)
            assert error(layer.forward(x, ids, scores, 0), reference(stored, x, ids, scores)) < bound


def test_methods_are_all_tested():
    assert sorted(METHODS) == sorted(kt_kernel_ext.methods())


@pytest.mark.parametrize("limit,alpha", [(0.5, 0.0), (0.5, 1.702), (0.0, 1.702)])
@pytest.mark.parametrize("method", ["BF16", "AMXINT8"])
def test_swiglu_variants(method, limit, alpha):
    layer = wrapper(method, swiglu_limit=limit, swiglu_alpha=alpha)
    x, ids, scores = inputs(5)
    want = reference(values(), x, ids, scores, limit=limit, alpha=alpha)
    assert error(layer.forward(x, ids, scores), want) < METHODS[method]
    assert error(reference(values(), x, ids, scores), want) > 2 * METHODS[method]  # or the test says nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types_of_hidden_states(bf16, dtype):
    x, ids, scores = inputs(4, dtype=dtype)
    got = bf16.forward(x, ids, scores)
    assert got.dtype == dtype and got.shape == x.shape and got.device == x.device
    assert error(got, reference(values(), x, ids, scores)) < METHODS["BF16"]


def test_forms_of_input_give_the_same_bits(bf16):
    x, ids, scores = inputs(6)
    want = bf16.forward(x, ids, scores, 0).clone()
    wide = torch.zeros(6, 2 * HIDDEN, dtype=x.dtype)
    wide[:, ::2] = x
    rows = torch.zeros(6, HIDDEN + 64, dtype=x.dtype)
    rows[:, :HIDDEN] = x
    forms = {"int32": (x, ids.int(), scores), "every other column": (wide[:, ::2], ids, scores),
             "rows apart": (rows[:, :HIDDEN], ids, scores), "transposed": (x.t().contiguous().t(), ids, scores),
             "ids and weights strided": (x, ids.repeat(1, 2)[:, :TOP_K], scores.repeat(1, 2)[:, :TOP_K]),
             "requires grad": (x.clone().requires_grad_(), ids, scores)}
    for name, form in forms.items():
        assert torch.equal(bf16.forward(*form), want), name
    assert torch.equal(bf16.forward(x.view(2, 3, HIDDEN), ids, scores), want.view(2, 3, HIDDEN))
    half = scores.bfloat16()
    assert torch.equal(bf16.forward(x, ids, half).clone(), bf16.forward(x, ids, half.float()))


def test_inputs_are_left_alone(bf16):
    given = inputs(5)
    before = [tensor.clone() for tensor in given]
    bf16.forward(*given)
    assert all(torch.equal(a, b) for a, b in zip(given, before))


def test_ids_out_of_range_are_skipped(bf16):
    x, ids, scores = inputs(5)
    ids[0, 0], ids[1, 1], ids[2, 2] = -1, EXPERTS, 2**31 - 1
    ids[3] = -1
    got = bf16.forward(x, ids, scores)
    assert error(got, reference(values(), x, ids, scores)) < METHODS["BF16"]
    assert not got[3].any()
    ids[0, 0] = 2**40 + 1  # would be expert 1 if its upper half were lost
    assert torch.equal(bf16.forward(x, ids, scores), got)


def test_no_tokens(bf16):
    assert bf16.forward(*inputs(0), 0).shape == (0, HIDDEN)


def test_submit_and_sync(bf16):
    first, second = inputs(3, seed=5), inputs(4, seed=6)
    want = [bf16.forward(*call).clone() for call in (first, second)]
    other = wrapper(seed=9)
    bf16.submit_forward(*first, 0)
    other.submit_forward(*second, 0)
    assert torch.equal(bf16.sync_forward(first[0], 0), want[0])
    assert not torch.equal(other.sync_forward(second[0], None), want[1])
    with pytest.raises(RuntimeError, match="nothing was submitted"):
        bf16.sync_forward(first[0], 0)
    bf16.submit_forward(*first)
    with pytest.raises(ValueError, match=r"\[4, 256\].*submitted were \[3, 256\]"):
        bf16.sync_forward(second[0])


def test_results_are_one_buffer(bf16):
    x, ids, scores = inputs(2)
    first = bf16.forward(x, ids, scores)
    kept = first.clone()
    second = bf16.forward(-x, ids, scores)
    assert first.data_ptr() == second.data_ptr() and not torch.equal(kept, second)


def test_two_hidden_sizes_at_once():
    small, large = wrapper(hidden=128, inter=64), wrapper(hidden=512, inter=192)
    for seed in range(3):
        for layer, weights, hidden in ((small, values(0, hidden=128, inter=64), 128),
                                       (large, values(0, hidden=512, inter=192), 512)):
            x, ids, scores = inputs(3, seed, hidden)
            assert error(layer.forward(x, ids, scores), reference(weights, x, ids, scores)) < METHODS["BF16"]


# --- which experts the CPU has


def test_dialects_of_masks():
    x, ids, scores = inputs(6)
    want = reference(values(), x, ids, scores, skip=(0, 1, 2))
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    mask[:3] = True
    for options in (dict(num_gpu_experts=3), dict(gpu_experts_mask=mask), dict(gpu_experts_mask=3),
                    dict(gpu_experts_mask=3, num_gpu_experts=3)):
        layer = wrapper(**options)
        assert layer.num_gpu_experts == 3 and torch.equal(layer.gpu_experts_mask, mask)
        assert error(layer.forward(x, ids, scores), want) < METHODS["BF16"]


def test_positional_order():
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    layer = KTMoEWrapper(5, EXPERTS, TOP_K, HIDDEN, INTER, mask, 2, 1, "somewhere", 17, False, 1, "AMXINT8", None,
                         "inference", 0, 16, 32.0, 0.0, 1, 64, False, False, 7.0, 1.5)
    assert (layer.layer_idx, layer.weight_path, layer.chunked_prefill_size) == (5, "somewhere", 17)
    assert (layer.max_deferred_experts_per_token, layer.method, layer.num_gpu_experts) == (1, "AMXINT8", 0)


def test_words_for_the_default():
    """What SGLang gives where its user said nothing."""
    x, ids, scores = inputs(CHUNK + 9)
    for words in (dict(cpuinfer_threads=None, chunked_prefill_size=None),
                  dict(cpuinfer_threads=0, chunked_prefill_size=-1)):
        layer = wrapper(**words)
        assert layer.cpu_infer.threads >= 1 and layer.chunked_prefill_size == 2**31 - 1
        assert error(layer.forward(x, ids, scores), reference(values(), x, ids, scores)) < METHODS["BF16"]
    for bad in (0, -2):
        refused(ValueError, f"chunked_prefill_size is {bad}",
                lambda bad=bad: wrapper(chunked_prefill_size=bad, load=False))
    refused(TypeError, "chunked_prefill_size: expected an int, got float",
            lambda: wrapper(chunked_prefill_size=2.5, load=False))


def test_the_mask_is_live(bf16):
    layer = wrapper()
    x, ids, scores = inputs(6)
    for skip in ((), (1, 4), (0, 2, 3, 5, 6, 7), tuple(range(EXPERTS)), (6,)):
        mask = torch.zeros(EXPERTS, dtype=torch.bool)
        mask[list(skip)] = True
        layer.gpu_experts_mask.copy_(mask)
        got = layer.forward(x, ids, scores)
        want = reference(values(), x, ids, scores, skip)
        assert torch.equal(got.double(), want) if len(skip) == EXPERTS else error(got, want) < METHODS["BF16"]
    layer.gpu_experts_mask = torch.zeros(EXPERTS, dtype=torch.bool)
    assert torch.equal(layer.forward(x, ids, scores), bf16.forward(x, ids, scores))


def test_expert_maps(bf16):
    x, ids, scores = inputs(5)
    order = torch.tensor([3, 1, 0, 7, 6, 2, 5, 4])
    moved = wrapper(load=False)
    want = bf16.forward(x, ids, scores).clone()
    for given in (dict(physical_to_logical_map=order), dict(physical_to_logical_map_cpu=order)):  # two names of one
        moved.load_weights_from_tensors(*values(), **given)
        assert torch.equal(moved.forward(x, torch.argsort(order)[ids], scores), want)
        moved.load_weights_from_tensors(*values())
    refused(TypeError, "two names of one argument; got both",
            lambda: moved.load_weights_from_tensors(*values(), order, physical_to_logical_map_cpu=order))
    refused(TypeError, "two names of one argument; got both",
            lambda: moved.load_weights(order, physical_to_logical_map_cpu=order))


# --- deferral


def test_deferral_moves_pairs_to_the_next_layer():
    x, _, _ = inputs(2)
    ids = torch.tensor([[0, 1, 2], [1, 3, 4]])
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.3]])
    # One deferred: {0, 1} and {3, 4} are protected, so only expert 2 of the first token waits.
    now, later = ids.clone(), torch.full_like(ids, -1)
    now[0, 2], later[0, 2] = -1, 2
    first = wrapper(layer_idx=0, max_deferred_experts_per_token=1, seed=0, weight_path="deferral")
    last = wrapper(layer_idx=1, max_deferred_experts_per_token=0, seed=4, weight_path="deferral")
    y = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(8)).bfloat16()
    for _ in range(2):
        assert error(first.forward(x, ids, scores), reference(values(0), x, now, scores)) < METHODS["BF16"]
        want = reference(values(4), y, ids, scores) + reference(values(0), x, later, scores)
        assert error(last.forward(y, ids, scores), want) < METHODS["BF16"]
    alone = wrapper(layer_idx=1, seed=4, weight_path="elsewhere")
    assert error(alone.forward(y, ids, scores), want) > 5 * METHODS["BF16"]  # or the test says nothing


def test_select_deferred_experts(bf16):
    """As test_deferral_moves_pairs_to_the_next_layer has it, for engines that split the pairs themselves."""
    ids = torch.tensor([[0, 1, 2], [1, 3, 4]])
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.3]])
    none = torch.full_like(ids, -1)
    for protected, later in ((2, [[-1, -1, 2], [-1, -1, -1]]), (1, [[-1, 1, 2], [1, -1, 4]]), (0, ids.tolist()),
                             (3, none.tolist()), (9, none.tolist())):
        now, put_off = bf16.select_deferred_experts(ids, scores, protected)
        assert put_off.tolist() == later and now.dtype == put_off.dtype == ids.dtype
        assert torch.equal(torch.where(now >= 0, now, put_off), ids) and not ((now >= 0) & (put_off >= 0)).any()
    padded = torch.tensor([[-1, 5, 6]])  # slots without an expert stay so, however heavy they are
    now, put_off = bf16.select_deferred_experts(padded, torch.tensor([[0.9, 0.5, 0.4]]), 2)
    assert now.tolist() == [[-1, 5, -1]] and put_off.tolist() == [[-1, -1, 6]]
    refused(ValueError, "protected_k is -1", lambda: bf16.select_deferred_experts(ids, scores, -1))
    refused(TypeError, "protected_k: expected an int", lambda: bf16.select_deferred_experts(ids, scores, 1.5))


# --- weights


@pytest.mark.parametrize("method,quant", [("AMXINT4", "int4"), ("AMXINT8", "int8")])
@pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
def test_converted_weights_give_the_same_bits(method, quant, tmp_path):
    import json

    from safetensors import safe_open
    folder = ROOT / "demo" / "tiny-deepseekv3"
    config = json.loads((folder / "config.json").read_text())
    experts, hidden, inter = config["n_routed_experts"], config["hidden_size"], config["moe_intermediate_size"]
    layer, top_k = config["first_k_dense_replace"], config["num_experts_per_tok"]
    subprocess.run([KT, "quant", str(folder), "-o", str(tmp_path / "w"), "--method", quant, "--numa-nodes", "1"],
                   check=True, capture_output=True)
    where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def tensor(name):
        with safe_open(folder / where[name], "pt") as file:
            return file.get_tensor(name)
    stacked = [torch.stack([tensor(f"model.layers.{layer}.mlp.experts.{e}.{p}_proj.weight") for e in range(experts)])
               for p in ("gate", "up", "down")]
    options = dict(layer_idx=layer, num_experts=experts, num_experts_per_tok=top_k, hidden_size=hidden,
                   moe_intermediate_size=inter, cpuinfer_threads=2, threadpool_count=1, method=method)
    loaded = KTMoEWrapper(weight_path=tmp_path / "w", **options)
    loaded.load_weights(torch.arange(experts))
    made = KTMoEWrapper(**options)
    made.load_weights_from_tensors(*stacked, None)
    saved = KTMoEWrapper(weight_path=str(tmp_path / "saved"), cpu_save=True, **options)
    saved.load_weights_from_tensors(*stacked, None)
    assert list((tmp_path / "saved").glob(f"_layer_{layer}/_numa_0/*.kt"))
    again = KTMoEWrapper(weight_path=str(tmp_path / "saved"), **options)
    again.load_weights()
    for tokens in (1, 33):
        x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        ids = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(t))[:top_k]
                           for t in range(tokens)])
        scores = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(1))
        want = loaded.forward(x, ids, scores)
        assert want.any()
        for other in (made, saved, again):
            assert torch.equal(other.forward(x, ids, scores), want)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_write_back_of_bf16(bf16, ranks):
    gate, up, down = values()
    share = INTER // ranks
    w13 = [torch.zeros(2 * share, HIDDEN, dtype=torch.bfloat16) for _ in range(ranks)]
    w2 = [torch.zeros(HIDDEN, share, dtype=torch.bfloat16) for _ in range(ranks)]
    for expert in (0, EXPERTS - 1):
        bf16.submit_write_weight_scale_to_buffer(ranks, expert, [t.data_ptr() for t in w13], [0] * ranks,
                                                 [t.data_ptr() for t in w2], [])
        bf16.sync_write_weight_scale_to_buffer()
        for r in range(ranks):
            part = slice(r * share, (r + 1) * share)
            assert torch.equal(w13[r], torch.cat([gate[expert, part], up[expert, part]]))
            assert torch.equal(w2[r], down[expert, :, part])


def test_write_back_refuses(bf16):
    for args, message in (((3, 0, [1] * 3, [], [1] * 3, []), "3 ranks"),
                          ((1, EXPERTS, [1], [], [1], []), "expert_id is 8"),
                          ((2, 0, [1], [], [1, 1], []), "w13_weight_ptrs: expected 2"),
                          ((1, 0, [0], [], [1], []), "w13")):
        with pytest.raises(ValueError, match=message):
            bf16.submit_write_weight_scale_to_buffer(*args)
            bf16.sync_write_weight_scale_to_buffer()


# --- what is refused


def refused(kind, message, call):
    with pytest.raises(kind, match=message):
        call()


def test_bad_constructor_arguments():
    refused(ValueError, "'AMXINT5'.*AMXINT4.*LLAMAFILE", lambda: wrapper("AMXINT5", load=False))
    refused(ValueError, "mode is 'train'", lambda: wrapper(mode="train", load=False))
    refused(ValueError, f"hidden_size is {2**31}", lambda: wrapper(hidden=2**31, load=False))
    refused(ValueError, f"layer_idx is {2**40}", lambda: wrapper(layer_idx=2**40, load=False))
    refused(ValueError, "num_experts is 0", lambda: wrapper(num_experts=0, load=False))
    refused(ValueError, "9 of 8 experts", lambda: wrapper(num_experts_per_tok=9, load=False))
    refused(ValueError, "num_gpu_experts is 9 of 8", lambda: wrapper(num_gpu_experts=9, load=False))
    refused(TypeError, "hidden_size: expected an int, got float", lambda: wrapper(hidden=2.5, load=False))
    refused(ValueError, r"gpu_experts_mask: expected \[8\], got \[7\]",
            lambda: wrapper(gpu_experts_mask=torch.zeros(7, dtype=torch.bool), load=False))
    refused(TypeError, "gpu_experts_mask.*bool.*float32", lambda: wrapper(gpu_experts_mask=torch.zeros(8), load=False))
    refused(ValueError, "max_deferred_experts_per_token is 4",
            lambda: wrapper(max_deferred_experts_per_token=4, load=False))
    refused(ValueError, "node 77", lambda: wrapper(numa_nodes=[77], load=False))
    refused(TypeError, "numa_nodes: expected a list of ints, got int", lambda: wrapper(numa_nodes=1, load=False))
    refused(TypeError, "numa_nodes: expected an int, got str", lambda: wrapper(numa_nodes="0", load=False))
    for name in ("swiglu_limit", "swiglu_alpha"):
        for bad in (float("nan"), float("inf"), -0.5):
            refused(ValueError, f"{name} is {bad}", lambda name=name, bad=bad: wrapper(**{name: bad}, load=False))
        refused(TypeError, f"{name}: expected a float, got str",
                lambda name=name: wrapper(**{name: "seven"}, load=False))
    refused(TypeError, "activations: expected a str, got int", lambda: wrapper(activations=3, load=False))
    refused(ValueError, "'int3'", lambda: wrapper(activations="int3", load=False))
    refused(ValueError, r"weight_path is '\\udcff'; expected text that is UTF-8",
            lambda: wrapper(weight_path=b"\xff", load=False))
    refused(TypeError, "model: expected a str, got int", lambda: wrapper(model=3, load=False))
    refused(TypeError, "ExpertLayer: experts has a value of a wrong type",
            lambda: kt_kernel_ext.ExpertLayer(kt_kernel_ext.CPUInfer(1), experts="8"))


def test_bad_weights(tmp_path):
    layer = wrapper(load=False)
    gate, up, down = values()
    refused(ValueError, "no weights are loaded", lambda: layer.forward(*inputs(1)))
    refused(ValueError, "weight_path was not given", layer.load_weights)
    refused(FileNotFoundError, "nowhere", lambda: wrapper(load=False, weight_path="/nowhere").load_weights())
    refused((ValueError, OSError), str(tmp_path), lambda: wrapper(load=False, weight_path=tmp_path).load_weights())
    refused(ValueError, r"up_proj: expected \[8, 256, 256\], got \[7",
            lambda: layer.load_weights_from_tensors(gate, up[:7], down))
    refused(TypeError, "down_proj.*float32", lambda: layer.load_weights_from_tensors(gate, up, down.float()))
    refused(TypeError, "gate_proj.*NoneType", lambda: layer.load_weights_from_tensors(None, up, down))
    for bad in ([0, 1, 2], list(range(1, EXPERTS + 1)), [-1] + list(range(1, EXPERTS))):
        refused(ValueError, "map|expert", lambda bad=bad: layer.load_weights_from_tensors(gate, up, down, bad))
    refused(TypeError, "float", lambda: layer.load_weights_from_tensors(gate, up, down, torch.zeros(EXPERTS)))
    for number in (float("nan"), float("inf")):
        broken = up.clone()
        broken[5, 3, 2] = number
        refused(ValueError, "5", lambda broken=broken:
                wrapper("AMXINT8", load=False).load_weights_from_tensors(gate, broken, down))


def test_bad_inputs_of_a_forward(bf16):
    x, ids, scores = inputs(4)
    refused(ValueError, "33 tokens, chunked_prefill_size is 32", lambda: bf16.forward(*inputs(CHUNK + 1)))
    refused(ValueError, r"hidden_states: expected \[tokens, 256\], got \[4, 255\]",
            lambda: bf16.forward(x[:, :255], ids, scores))
    refused(TypeError, "hidden_states: expected float32 or bfloat16 or float16.*float64",
            lambda: bf16.forward(x.double(), ids, scores))
    refused(TypeError, "hidden_states: expected a tensor, got list", lambda: bf16.forward([1], ids, scores))
    refused(ValueError, r"topk_ids: expected \[4, 3\], got \[3, 3\]", lambda: bf16.forward(x, ids[:3], scores))
    refused(ValueError, r"topk_ids: expected \[4, 3\], got \[4, 2\]",
            lambda: bf16.forward(x, ids[:, :2], scores[:, :2]))
    refused(TypeError, "topk_ids: expected int32 or int64.*int16", lambda: bf16.forward(x, ids.short(), scores))
    refused(TypeError, "topk_weights.*int64", lambda: bf16.forward(x, ids, ids))
    refused(TypeError, "topk_weights.*NoneType", lambda: bf16.forward(x, ids, None))
    refused(ValueError, "cuda_stream is 7.*cpu", lambda: bf16.forward(x, ids, scores, 7))
    refused(ValueError, "on meta", lambda: bf16.forward(x.to("meta"), ids, scores))
    refused(ValueError, "topk_ids.*meta", lambda: bf16.forward(x, ids.to("meta"), scores))
    broken = scores.clone()
    broken[2, 1] = float("nan")
    refused(ValueError, "token 2, slot 1.*NaN", lambda: bf16.forward(x, ids, broken))
    ids[2, 1] = -1  # a pair that does not count may hold anything
    assert bf16.forward(x, ids, broken).isfinite().all()


# --- process-wide


def test_capture_batch_sizes():
    KTMoEWrapper.set_capture_batch_sizes([8, 1, 2, 2])
    assert KTMoEWrapper.get_capture_batch_sizes() == [1, 2, 8]
    refused(ValueError, "capture_bs is 0", lambda: KTMoEWrapper.set_capture_batch_sizes([0]))
    KTMoEWrapper.clear_buffer_cache()
    KTMoEWrapper.set_capture_batch_sizes([])


def test_check_has_nothing_to_raise():
    """Errors of replayed graphs are for src/hybrid's tests; here, that asking works before and after a forward."""
    layer = wrapper()
    assert layer.check() is None
    layer.forward(*inputs(2))
    assert layer.check() is None


def test_cpu_infer():
    config = kt_kernel_ext.WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [2]
    for infer in (kt_kernel_ext.CPUInfer(2), kt_kernel_ext.CPUInfer(config)):
        done = []
        for number in range(5):
            infer.submit(lambda number=number, done=done: done.append(number))
        infer.sync()
        assert done == list(range(5)) and infer.threads == 2
        infer.submit(lambda: 1 // 0)
        infer.submit(lambda done=done: done.append("after"))
        refused(ZeroDivisionError, "division", infer.sync)
        infer.sync(0)
        assert done[-1] == "after"
        assert hasattr(infer, "submit_with_cuda_stream") == kt_kernel_ext.has_cuda() == \
            hasattr(infer, "sync_with_cuda_stream")
        refused(AttributeError, "nonsense", lambda infer=infer: infer.nonsense)
        refused(TypeError, "submit", lambda infer=infer: infer.submit(3))
    config.subpool_thread_count = [1, 1]
    refused(ValueError, "subpool_count 1.*2 in subpool_thread_count", lambda: kt_kernel_ext.CPUInfer(config))


def test_two_threads(bf16):
    calls = [inputs(3, seed) for seed in (11, 12)]
    want = [bf16.forward(*call).clone() for call in calls]
    wrong = []

    def many(mine):
        for _ in range(200):
            if not torch.equal(bf16.forward(*calls[mine]), want[mine]):
                wrong.append(mine)
    threads = [threading.Thread(target=many, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads) and not wrong


def test_readme_examples():
    """What users of the established package copy, with small shapes."""
    gate_proj, up_proj, down_proj = values(experts=8, hidden=512, inter=256)
    wrapper = KTMoEWrapper(layer_idx=0, num_experts=8, num_experts_per_tok=2, hidden_size=512,
                           moe_intermediate_size=256,
                           num_gpu_experts=2, cpuinfer_threads=32, threadpool_count=2, weight_path="/path/to/weights",
                           chunked_prefill_size=512, method="AMXINT4", cpu_save=False, max_deferred_experts_per_token=0)
    wrapper.load_weights_from_tensors(gate_proj, up_proj, down_proj, torch.arange(8))
    hidden_states = torch.randn(4, 512, dtype=torch.bfloat16)
    topk_ids, topk_weights = torch.randint(0, 8, (4, 2)), torch.rand(4, 2)
    output = wrapper.forward(hidden_states, topk_ids, topk_weights, 0).clone()
    wrapper.submit_forward(hidden_states, topk_ids, topk_weights, 0)
    assert torch.equal(wrapper.sync_forward(hidden_states, 0), output)
    KTMoEWrapper.set_capture_batch_sizes([1, 2, 4, 8, 16])
    assert KTMoEWrapper.get_capture_batch_sizes() == [1, 2, 4, 8, 16]
    KTMoEWrapper.clear_buffer_cache()
    print(f"CPU variant: {kt_kernel.__cpu_variant__}\nVersion: {kt_kernel.__version__}")
    assert kt_kernel_ext.CPUInfer(2) and isinstance(hasattr(kt_kernel_ext.CPUInfer(2), "submit_with_cuda_stream"), bool)
