"""SGLang's own kt_ep_wrapper.py, of stock SGLang and of the fork, runs on our kt_kernel.

KT_SGLANG and KT_SGLANG_KT name the files, taken from the wheels `sglang` and `sglang-kt` (scripts/test.sh downloads
them). What surrounds them is stubbed (sglang_stubs.py): there is no GPU, experts "on the GPU" are torch, a stream's
work is done when a call returns. What is checked is the sum of both halves against torch in f32."""
import ctypes
import os
import sys
import types
import uuid
from multiprocessing import shared_memory

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")
kt_kernel = pytest.importorskip("kt_kernel", reason="kt_kernel is not built (KT_PYTHON)", exc_type=ImportError)
import sglang_stubs as stubs
from sglang_stubs import KINDS, Dispatch, RepackedExperts, RunnerConfig, TopK, TorchExperts, Weights, expert_output

torch.set_num_threads(1)  # small matrices
LAYERS, EXPERTS, TOP_K, HIDDEN, INTER = 3, 8, 4, 256, 256
CHUNK = 64
# Bounds on |sum - reference| / |reference|. Numbers in bf16 are off by 2^-9 at most, 0.2 %: the CPU's intermediate, its
# output, the GPU's output and their sum. int8 activations and int8 weights are off by half of amax/127, about
# 0.7 % of a standard deviation for 256 normal numbers, 0.5 % for 32, each entering twice. int4 of a row of 256 is off
# by amax/7/sqrt(12), 12 %, in three matrices. Any wrong expert, weight or half is off by tens of percent.
BOUND = {"AMXINT8": 0.04, "AMXINT4": 0.3, "RAWINT4": 0.03, "LLAMAFILE": 0.03}
NATIVE = ["BF16", "FP8", "FP8_PERCHANNEL", "MXFP8", "MXFP4", "RAWINT4"]


def bound(method):
    return BOUND.get(method, 0.01)


@pytest.fixture(scope="module")
def stubbed():
    state = stubs.Sglang()
    with pytest.MonkeyPatch.context() as patch:
        state.install(patch)
        yield state


@pytest.fixture
def sglang(stubbed, monkeypatch):
    state = stubbed
    state.reset()
    stubs.install_cuda(monkeypatch)
    affinity = os.sched_getaffinity(0)
    with torch.no_grad():
        yield state
    os.sched_setaffinity(0, affinity)  # layer-wise prefill pins its thread


def loaded(variable, name):
    """The module, once for all tests: torch compiles some of its functions."""
    path = os.environ.get(variable)
    if not path or not os.path.exists(path):
        pytest.skip(f"{variable} names no kt_ep_wrapper.py: {path or 'it is not set'}")
    return sys.modules.get(name) or stubs.load_wrapper(path, name)


@pytest.fixture
def stock(sglang):
    return loaded("KT_SGLANG", "stock_kt_ep_wrapper")


@pytest.fixture
def fork(sglang, monkeypatch):
    module = loaded("KT_SGLANG_KT", "fork_kt_ep_wrapper")
    numa = types.SimpleNamespace(numa_available=lambda: 0, numa_set_localalloc=lambda: None)
    monkeypatch.setattr(
        module,
        "ctypes",
        types.SimpleNamespace(CDLL=lambda name: numa, addressof=ctypes.addressof, c_char=ctypes.c_char),
    )
    module.gptq_marlin_repack = lambda packed, perm, k, n, bits: packed
    yield module
    if module._SHARED_FULL_CONTEXT is not None:
        module._SHARED_FULL_CONTEXT.close()
    module._SHARED_FULL_CONTEXT = module._SHARED_STAGING_BUFFER = module._KT_GPU_EXPERTS_MASKS = None
    module._MXFP4_PREFILL_LAYER_REGISTRY.clear()


_made = {}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """method -> (Weights, path of what the CPU loads); the GPU's half of converted weights is bf16."""

    def make(method):
        if method not in _made:
            folder = tmp_path_factory.mktemp(method)
            held = Weights(KINDS.get(method, KINDS["BF16"]), LAYERS, EXPERTS, HIDDEN, INTER)
            if method == "LLAMAFILE":
                path = save_gguf(held, folder)
            elif method in KINDS:
                path = held.save(folder)
            else:
                path = convert(held, method, folder)
            _made[method] = (held, path)
        return _made[method]

    yield make
    _made.clear()


def convert(held, method, folder):
    """kt weights, written by the package itself."""
    for layer in range(held.layers):
        wrapper = kt_kernel.KTMoEWrapper(
            layer_idx=layer,
            num_experts=held.experts,
            num_experts_per_tok=TOP_K,
            hidden_size=held.hidden,
            moe_intermediate_size=held.inter,
            num_gpu_experts=0,
            cpuinfer_threads=2,
            threadpool_count=1,
            weight_path=str(folder),
            chunked_prefill_size=CHUNK,
            cpu_save=True,
            method=method,
        )
        wrapper.load_weights_from_tensors(*held.stack(layer), torch.arange(held.experts))
    return str(folder)


def save_gguf(held, folder):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    writer = gguf.GGUFWriter(folder / "model.gguf", "qwen3moe")
    writer.add_block_count(held.layers)
    writer.add_expert_count(held.experts)
    writer.add_embedding_length(held.hidden)
    for layer in range(held.layers):
        for name, matrix in zip(("gate", "up", "down"), held.stack(layer)):
            coded = gguf.quants.quantize(matrix.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight", coded, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(folder)


# --- layers ----------------------------------------------------------------------------------------------------------


def make_layer(index, ranks=1, quant_config=None, runner=None):
    layer = torch.nn.Module()
    layer.layer_id, layer.top_k, layer.num_experts = index, TOP_K, EXPERTS
    layer.intermediate_size_per_partition, layer.moe_tp_size = INTER // ranks, ranks
    layer.quant_config, layer.use_triton_kernels = quant_config, False
    layer.moe_runner_config = runner or RunnerConfig(num_experts=EXPERTS)
    return layer


def start(method, layer, ranks=1):
    """What SGLang does with a layer's method before the first forward, less loading of the GPU's weights."""
    method.create_weights(layer, EXPERTS, HIDDEN, INTER // ranks, torch.bfloat16)
    method.create_moe_runner(layer, layer.moe_runner_config)
    method.process_weights_after_loading(layer)


def stock_layer(stock, weights, method, gpu, index=0, deferred=None, layers=LAYERS):
    held, path = weights(method)
    on_gpu = TorchExperts(held.kind)
    config = stock.KTConfig(
        layer_idx=index,
        num_gpu_experts=gpu,
        cpuinfer_threads=2,
        threadpool_count=1,
        weight_path=path,
        chunked_prefill_size=CHUNK,
        max_deferred_experts_per_token=deferred,
        method=method,
        num_layers=layers,
    )
    layer = make_layer(index)
    wrapped = stock.KTEPWrapperMethod(on_gpu, config)
    start(wrapped, layer)
    for expert in range(gpu):
        on_gpu.fill(layer, expert, held.kind.rank(*held.stored[index][expert], 1, 0))
    return wrapped, layer


def fork_layer(fork, weights, method, on, index=0, deferred=None, ranks=1, runner=None, experts=None, **more):
    held, path = weights(method)
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    mask[list(on)] = True
    on_gpu = experts or TorchExperts(held.kind)
    config = fork.KTConfig(
        layer_idx=index,
        gpu_experts_mask=mask,
        cpuinfer_threads=2,
        threadpool_count=1,
        weight_path=path,
        chunked_prefill_size=CHUNK,
        max_deferred_experts_per_token=deferred,
        method=method,
        num_layers=LAYERS,
        **more,
    )
    full = type(on_gpu)(held.kind, on_gpu.limit, on_gpu.alpha)
    layer = make_layer(index, ranks, None if method == "BF16" else stubs.QuantConfig(full), runner)
    wrapped = fork.KTEPWrapperMethod(on_gpu, config)
    start(wrapped, layer, ranks)
    for slot, expert in enumerate(wrapped.gpu_index_to_logical.tolist()):
        on_gpu.fill(layer, slot, held.kind.rank(*held.stored[index][expert], ranks, 0))
    return wrapped, layer


def routed(tokens, seed=0, ids_type=torch.int32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    ids = scores.argsort(dim=1)[:, :TOP_K].to(ids_type)
    shares = torch.rand(tokens, TOP_K, generator=generator) + 0.1
    return x, ids, shares / shares.sum(dim=1, keepdim=True)


def forward(wrapped, layer, x, ids, shares):
    """One forward as the server does it; SGLang may overwrite the ids."""
    return wrapped.apply(layer, Dispatch(x.clone(), TopK(shares.clone(), ids.clone()))).hidden_states.float()


def pairs(x, ids, shares, values, chosen, limit=0.0, alpha=0.0):
    """The f32 sum over the (token, slot) pairs in `chosen` (bool [tokens, top_k])."""
    out = torch.zeros(x.shape[0], HIDDEN)
    for expert in range(EXPERTS):
        share = torch.where((ids == expert) & chosen, shares, 0).sum(dim=1, keepdim=True)
        if bool((share != 0).any()):
            out += share * expert_output(x.float(), *values[expert], limit, alpha)
    return out


def everything(x, ids, shares, values, **activation):
    return pairs(x, ids, shares, values, torch.ones_like(ids, dtype=torch.bool), **activation)


def assert_close(got, expected, limit):
    error = float((got - expected).norm() / expected.norm())
    assert error <= limit, f"relative error {error:.4f}, bound {limit}"


def computed_now(ids, shares, deferred):
    """Pairs of experts that are among the heaviest of any token."""
    heaviest = shares.argsort(dim=1, descending=True, stable=True)[:, : TOP_K - deferred]
    return torch.isin(ids, ids.gather(1, heaviest).unique())


# --- stock SGLang ----------------------------------------------------------------------------------------------------


def test_stock_finds_the_package(stock):
    assert stock.KTRANSFORMERS_AVAILABLE
    assert stock.KTMoEWrapper is kt_kernel.KTMoEWrapper


def test_stock_config_comes_from_the_server(stock, sglang):
    sglang.moe.kt_weight_path = None
    server = types.SimpleNamespace(hf_config=types.SimpleNamespace(num_hidden_layers=7))
    assert stock.create_kt_config_from_server_args(server, 0) is None
    vars(sglang.moe).update(
        kt_weight_path="weights",
        kt_num_gpu_experts=3,
        kt_cpuinfer=2,
        kt_threadpool_count=1,
        kt_method="BF16",
        kt_max_deferred_experts_per_token=2,
    )
    config = stock.create_kt_config_from_server_args(server, 5)
    assert (config.layer_idx, config.num_gpu_experts, config.num_layers, config.method) == (5, 3, 7, "BF16")


@pytest.mark.parametrize("gpu", [0, 3, EXPERTS])
@pytest.mark.parametrize("method", ["BF16", "FP8", "RAWINT4", "AMXINT8", "AMXINT4", "LLAMAFILE"])
def test_stock_layer_is_the_sum_of_both_halves(stock, sglang, weights, method, gpu):
    sglang.maps = torch.arange(EXPERTS).repeat(LAYERS, 1)
    wrapped, layer = stock_layer(stock, weights, method, gpu, index=1)
    values = weights(method)[0].values[1]
    for tokens in (1, 5, CHUNK):
        call = routed(tokens, seed=tokens)
        assert_close(forward(wrapped, layer, *call), everything(*call, values), bound(method))


def check_made_on_another_device(module, weights, on, **placement):
    """SGLang's loaders construct a model inside `with torch.device("cuda")`; there is none here, so it is another one
    that is not the host: the mask is in host memory all the same, and experts of it are not computed there. What the
    GPU has is not looked at."""
    held, path = weights("BF16")
    config = module.KTConfig(layer_idx=0, cpuinfer_threads=2, threadpool_count=1, weight_path=path,
                             chunked_prefill_size=CHUNK, max_deferred_experts_per_token=None, method="BF16",
                             num_layers=LAYERS, **placement)
    layer, wrapped = make_layer(0), module.KTEPWrapperMethod(TorchExperts(held.kind), config)
    with torch.device("meta"):
        wrapped.create_weights(layer, EXPERTS, HIDDEN, INTER, torch.bfloat16)
    wrapped.create_moe_runner(layer, layer.moe_runner_config)
    wrapped.process_weights_after_loading(layer)
    mask = wrapped.wrapper.gpu_experts_mask
    assert mask.device.type == "cpu" and mask.nonzero().flatten().tolist() == on
    x, ids, shares = routed(6)
    expected = pairs(x, ids, shares, held.values[0], ~torch.isin(ids, torch.tensor(on)))
    assert_close(wrapped.wrapper.forward(x, ids, shares).float(), expected, bound("BF16"))


def test_stock_layers_are_made_on_the_default_device(stock, sglang, weights):
    sglang.maps = torch.arange(EXPERTS).repeat(LAYERS, 1)
    check_made_on_another_device(stock, weights, [0, 1, 2], num_gpu_experts=3)


def test_stock_loads_experts_where_the_map_says(stock, sglang, weights):
    order = torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])
    sglang.maps = order.repeat(LAYERS, 1)
    wrapped, layer = stock_layer(stock, weights, "BF16", 0)
    values = [weights("BF16")[0].values[0][logical] for logical in order.tolist()]
    call = routed(6)
    assert_close(forward(wrapped, layer, *call), everything(*call, values), bound("BF16"))


def test_stock_other_ranks_have_no_wrapper(stock, sglang, weights):
    sglang.rank = 1
    wrapped, layer = stock_layer(stock, weights, "BF16", 3)
    assert wrapped.wrapper is None
    x, ids, shares = routed(6)
    expected = pairs(x, ids, shares, weights("BF16")[0].values[0], ids < 3)
    assert_close(forward(wrapped, layer, x, ids, shares), expected, bound("BF16"))


@pytest.mark.parametrize("deferred", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_stock_deferred_experts_arrive_one_layer_later(stock, sglang, weights, deferred, tokens):
    sglang.maps = torch.arange(EXPERTS).repeat(LAYERS, 1)
    made = [stock_layer(stock, weights, "BF16", 2, index, deferred) for index in range(LAYERS)]
    check_deferral(made, weights("BF16")[0].values, lambda ids: ids < 2, deferred, tokens)


def check_deferral(made, values, on_gpu, deferred, tokens):
    """Two rounds over all layers: nothing is left over from the first."""
    for seed in (1, 2):
        owed = torch.zeros(tokens, HIDDEN)
        for index, (wrapped, layer) in enumerate(made):
            x, ids, shares = routed(tokens, seed=10 * seed + index)
            last = index == len(made) - 1
            now = on_gpu(ids) | computed_now(ids, shares, 0 if last else deferred)
            expected = pairs(x, ids, shares, values[index], now) + owed
            assert_close(forward(wrapped, layer, x, ids, shares), expected, bound("BF16"))
            owed = pairs(x, ids, shares, values[index], ~now)


# --- the fork --------------------------------------------------------------------------------------------------------


def server_args(**more):
    config = types.SimpleNamespace(num_hidden_layers=LAYERS, num_experts=EXPERTS)
    args = dict(
        kt_weight_path="weights",
        kt_method="BF16",
        kt_cpuinfer=2,
        kt_threadpool_count=1,
        kt_numa_nodes=None,
        kt_num_gpu_experts=None,
        kt_gpu_experts_ratio=None,
        kt_expert_placement_strategy="uniform",
        kt_max_deferred_experts_per_token=None,
        kt_gpu_prefill_token_threshold=None,
        kt_enable_dynamic_expert_update=False,
        init_expert_location="trivial",
        chunked_prefill_size=CHUNK,
        get_hf_config=lambda: config,
    )
    return types.SimpleNamespace(**{**args, **more}), config


def test_fork_finds_the_package(fork):
    assert fork.KTRANSFORMERS_AVAILABLE
    assert fork.generate_gpu_experts_masks is kt_kernel.generate_gpu_experts_masks
    # An optional transport that the fork looks for and does without.
    found, why = fork._load_glm5_next_fp8_native_transport_api()
    assert found is None and "is missing" in why


@pytest.mark.parametrize("strategy", ["uniform", "frequency", "front-loading", "random"])
@pytest.mark.parametrize("dense", [0, 1])
def test_fork_places_experts_as_place_does(fork, tmp_path, strategy, dense):
    from kt_kernel.placement import place, write_statistics

    counts = torch.randint(0, 1000, (LAYERS, EXPERTS), generator=torch.Generator().manual_seed(5))
    path = str(tmp_path / "counts.pt")
    write_statistics(path, counts)
    moe_layers = range(dense, LAYERS)
    for size, total in (({"kt_num_gpu_experts": 3}, 3 * len(moe_layers)),
                        ({"kt_gpu_experts_ratio": 0.7}, int(0.7 * EXPERTS * len(moe_layers)))):
        args, config = server_args(kt_expert_placement_strategy=strategy, init_expert_location=path, **size)
        config.first_k_dense_replace = dense
        fork._KT_GPU_EXPERTS_MASKS = None
        if strategy == "frequency":
            counts[:dense] = 0  # a recorder sees nothing there; the fork lets such rows compete
            write_statistics(path, counts)
        mask = fork._init_kt_gpu_experts_masks(args)
        assert torch.equal(mask, place(strategy, LAYERS, EXPERTS, total, path, moe_layers=moe_layers))
        row = fork.create_kt_config_from_server_args(args, LAYERS - 1).gpu_experts_mask
        assert torch.equal(row, mask[-1])


@pytest.mark.parametrize("on", [(), (1, 4, 6), range(EXPERTS)])
@pytest.mark.parametrize("method", [*NATIVE, "AMXINT8"])
def test_fork_layer_is_the_sum_of_both_halves(fork, sglang, weights, method, on):
    wrapped, layer = fork_layer(fork, weights, method, on, index=2)
    values = weights(method)[0].values[2]
    for tokens in (1, 7, CHUNK):
        call = routed(tokens, seed=tokens)
        assert_close(forward(wrapped, layer, *call), everything(*call, values), bound(method))
    assert [(index, mask.tolist()) for index, mask in sglang.recorded] == 3 * [(2, [e in on for e in range(EXPERTS)])]


def test_fork_layers_are_made_on_the_default_device(fork, weights):
    mask = torch.isin(torch.arange(EXPERTS), torch.tensor([1, 5]))
    check_made_on_another_device(fork, weights, [1, 5], gpu_experts_mask=mask)


def test_fork_takes_ids_of_64_bits_and_numa_nodes(fork, weights):
    wrapped, layer = fork_layer(fork, weights, "BF16", (0, 5), numa_nodes=[0])
    call = routed(5, ids_type=torch.int64)
    assert_close(forward(wrapped, layer, *call), everything(*call, weights("BF16")[0].values[0]), bound("BF16"))


@pytest.mark.parametrize("deferred", [1, 2])
def test_fork_deferred_experts_arrive_one_layer_later(fork, weights, deferred):
    made = [fork_layer(fork, weights, "BF16", (1, 6), index, deferred) for index in range(LAYERS)]
    check_deferral(made, weights("BF16")[0].values, lambda ids: (ids == 1) | (ids == 6), deferred, tokens=4)


@pytest.mark.parametrize("alpha", [0.0, 1.702])
@pytest.mark.parametrize("method", ["MXFP4", "MXFP8"])
def test_fork_passes_the_clamp(fork, weights, method, alpha):
    limit = 0.5
    runner = RunnerConfig(num_experts=EXPERTS, gemm1_alpha=alpha or None, gemm1_clamp_limit=limit)
    wrapped, layer = fork_layer(
        fork, weights, method, (2, 3), runner=runner, experts=TorchExperts(KINDS[method], limit, alpha)
    )
    call = routed(8)
    expected = everything(*call, weights(method)[0].values[0], limit=limit, alpha=alpha)
    assert_close(forward(wrapped, layer, *call), expected, bound(method))


@pytest.mark.parametrize("method", NATIVE)
def test_fork_fetches_whole_layers_for_long_prompts(fork, weights, method):
    experts = {"MXFP4": stubs.DeepSeekMxfp4MoEMethod, "RAWINT4": TorchExperts}.get(method, RepackedExperts)
    made = [
        fork_layer(fork, weights, method, (1, 4), index, experts=experts(KINDS[method]), gpu_prefill_token_threshold=10)
        for index in range(1 if method == "RAWINT4" else LAYERS)
    ]
    for index, (wrapped, layer) in enumerate(made):
        values = weights(method)[0].values[index]
        for tokens in (10, 9):  # one goes to the whole layer on the GPU, the other is shared as ever
            call = routed(tokens, seed=index)
            assert_close(forward(wrapped, layer, *call), everything(*call, values),
                         0.005 if tokens == 10 else bound(method))


@pytest.mark.parametrize("method", NATIVE)
def test_fork_fetches_the_very_bytes_for_two_ranks(fork, sglang, weights, monkeypatch, method):
    held, _ = weights(method)
    sglang.ranks = 2
    unique = uuid.uuid4().hex[:8]
    monkeypatch.setattr(fork, "uuid", types.SimpleNamespace(uuid4=lambda: types.SimpleNamespace(hex=unique)))
    experts = {"MXFP4": stubs.DeepSeekMxfp4MoEMethod}.get(method, TorchExperts)(KINDS[method])
    wrapped, layer = fork_layer(fork, weights, method, (), ranks=2, experts=experts, gpu_prefill_token_threshold=1)
    # The other rank's buffers: two experts each, as that rank would have made them.
    other = {}
    for name, parameter in layer.named_parameters():
        wide = 2 if method == "MXFP4" and "scale" in name else parameter.element_size()
        size = 2 * parameter[:0].numel() or 2 * wide * parameter.shape[1:].numel()
        other[name] = shared_memory.SharedMemory(name=f"kt_buf_{name}_r1_{unique}", create=True, size=size)
    try:
        call = routed(6)
        got = forward(wrapped, layer, *call)
        halves = [[held.kind.decode(*m) for m in rank_matrices(held.kind, held.stored[0][e], 0)]
                  for e in range(EXPERTS)]
        assert_close(got, everything(*call, halves), 0.005)
        for expert in (EXPERTS - 2, EXPERTS - 1):  # what the two slots hold in the end
            expected = held.kind.rank(*held.stored[0][expert], 2, 1)
            for name, tensor in zip(buffer_names(held.kind), expected):
                if tensor is None:
                    continue
                if tensor.dtype == torch.uint8 and method == "MXFP4" and "scale" in name:
                    tensor = torch.exp2(tensor.float() - 127).bfloat16()
                data = tensor.contiguous().view(torch.uint8).flatten()
                slot = torch.frombuffer(bytearray(other[name].buf), dtype=torch.uint8)
                at = expert % 2 * data.numel()
                assert torch.equal(slot[at:at + data.numel()], data), (name, expert)
    finally:
        for memory in other.values():
            memory.unlink()


def rank_matrices(kind, expert, rank):
    gate, up, down = expert
    cut = (INTER // 2 * rank, INTER // 2 * (rank + 1))
    return kind.part(gate, rows=cut), kind.part(up, rows=cut), kind.part(down, columns=cut)


def buffer_names(kind):
    return [f"{matrix}_{name}" if name else "" for matrix in ("w13", "w2")
            for name in (kind.weight_name, kind.scale_name)]


@pytest.mark.parametrize("method", ["BF16", "FP8", "FP8_PERCHANNEL"])
def test_fork_moves_the_experts_of_a_prompt_to_the_gpu(fork, weights, method):
    wrapped, layer = fork_layer(
        fork,
        weights,
        method,
        (0, 1, 2),
        experts=RepackedExperts(KINDS[method]),
        gpu_prefill_token_threshold=10,
        kt_enable_dynamic_expert_update=True,
    )
    values = weights(method)[0].values[0]
    mask, address = wrapped.wrapper.gpu_experts_mask, wrapped.wrapper.gpu_experts_mask.data_ptr()
    x, ids, shares = routed(12)
    ids[:] = torch.tensor([3, 5, 7, 1])  # the prompt uses these only
    ids[0, 3] = 3
    assert_close(forward(wrapped, layer, x, ids, shares), everything(x, ids, shares, values), 0.005)
    assert wrapped.wrapper.gpu_experts_mask.data_ptr() == mask.data_ptr() == address
    assert mask.nonzero().flatten().tolist() == [3, 5, 7]
    for tokens in (1, 8):
        call = routed(tokens, seed=tokens)
        assert_close(forward(wrapped, layer, *call), everything(*call, values), bound(method))
        # The CPU's half alone is what the new mask leaves.
        x, ids, shares = call
        cpu = wrapped.wrapper.forward(x, ids, shares, 0).float()
        rest = pairs(x, ids, shares, values, ~torch.isin(ids, torch.tensor([3, 5, 7])))
        assert_close(cpu, rest, bound(method))


def test_a_prompt_longer_than_the_chunk_is_an_error(stock, sglang, weights):
    sglang.maps = torch.arange(EXPERTS).repeat(LAYERS, 1)
    wrapped, layer = stock_layer(stock, weights, "BF16", 0)
    with pytest.raises(ValueError, match=rf"{CHUNK + 1}\D.*{CHUNK}|{CHUNK}\D.*{CHUNK + 1}"):
        forward(wrapped, layer, *routed(CHUNK + 1))
    call = routed(CHUNK)
    assert_close(forward(wrapped, layer, *call), everything(*call, weights("BF16")[0].values[0]), bound("BF16"))


def test_graph_runners_announce_their_batch_sizes():
    before = kt_kernel.KTMoEWrapper.get_capture_batch_sizes()
    try:
        kt_kernel.KTMoEWrapper.set_capture_batch_sizes([1, 2, 4])
        assert list(kt_kernel.KTMoEWrapper.get_capture_batch_sizes()) == [1, 2, 4]
    finally:
        kt_kernel.KTMoEWrapper.set_capture_batch_sizes(before)
