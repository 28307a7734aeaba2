"""Tensors that cross between torch and kt_kernel: whatever device, mode or compiler torch is in, and whatever callers
do to the tensors they were handed. PYTHONPATH names a folder with the built package."""
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
kt_kernel = pytest.importorskip("kt_kernel", reason="PYTHONPATH does not name the built package kt_kernel")
from kt_kernel import KTMoEWrapper, generate_gpu_experts_masks, placement

EXPERTS, TOP_K, HIDDEN, INTER = 8, 2, 64, 32
DRAW = torch.Generator().manual_seed(3)
VALUES = [torch.randn(EXPERTS, *shape, generator=DRAW).bfloat16() / 8
          for shape in ((INTER, HIDDEN),) * 2 + ((HIDDEN, INTER),)]
ORDER = [3, 0, 7, 1, 6, 2, 5, 4]
X, SHARES = torch.randn(4, HIDDEN, generator=DRAW).bfloat16(), torch.rand(4, TOP_K, generator=DRAW)
IDS = torch.tensor([[0, 1], [2, 3], [7, 6], [4, 0]])


def made(order=None, **options):
    wrapper = KTMoEWrapper(0, EXPERTS, TOP_K, HIDDEN, INTER, options.pop("gpu_experts_mask", None), 2, 1,
                           options.pop("weight_path", None), 16, **{"method": "BF16", **options})
    wrapper.load_weights_from_tensors(*VALUES, order)
    return wrapper


@pytest.fixture(scope="module")
def results():
    """What plain torch gets: all experts here, experts 0 and 1 elsewhere, experts in another order."""
    return [made(**options).forward(X, IDS, SHARES).clone()
            for options in ({}, {"num_gpu_experts": 2}, {"order": ORDER})]


@pytest.fixture
def layer():
    return made()


# --- the default device, which is the GPU while engines construct their models


def test_the_mask_is_in_host_memory_whatever_the_default_device(results):
    first_two = torch.tensor([True] * 2 + [False] * 6)
    with torch.device("meta"):
        for options in (dict(num_gpu_experts=2), dict(gpu_experts_mask=2), dict(gpu_experts_mask=first_two)):
            layer = made(**options)
            assert layer.gpu_experts_mask.device.type == "cpu" and layer.gpu_experts_mask.data_ptr() != 0
            assert layer.num_gpu_experts == 2 and torch.equal(layer.gpu_experts_mask, first_two)
            assert torch.equal(layer.forward(X, IDS, SHARES), results[1])
            layer.gpu_experts_mask = ~first_two & False
            assert torch.equal(layer.forward(X, IDS, SHARES), results[0])


def test_weights_and_results_are_in_host_memory_whatever_the_default_device(results, tmp_path):
    with torch.device("meta"):
        for order in (ORDER, torch.tensor(ORDER, device="cpu")):
            layer = made(order)
            layer.submit_forward(X, IDS.int(), SHARES.bfloat16().float() * 0 + SHARES)
            assert torch.equal(layer.sync_forward(X), results[2])
            assert torch.equal(layer.forward(X[None], IDS, SHARES)[0], results[2])
        saved = made(ORDER, cpu_save=True, weight_path=tmp_path, method="AMXINT8")
        read = KTMoEWrapper(0, EXPERTS, TOP_K, HIDDEN, INTER, None, 2, 1, tmp_path, 16, method="AMXINT8")
        read.load_weights(ORDER)
        assert torch.equal(read.forward(X, IDS, SHARES), saved.forward(X, IDS, SHARES))


def test_placement_is_in_host_memory_whatever_the_default_device(tmp_path):
    counts = [[5, 1, 3], [2, 6, 4]]
    plain = [placement.place(strategy, 2, 3, 3, counts) for strategy in placement.STRATEGIES]
    with torch.device("meta"):
        assert generate_gpu_experts_masks(counts, 2).tolist() == [[True, False, False], [False, True, False]]
        for strategy, want in zip(placement.STRATEGIES, plain):
            assert torch.equal(placement.place(strategy, 2, 3, 3, counts), want)
            assert placement.place(strategy, 3, 3, 3, [[0] * 3] + counts, moe_layers=[1, 2]).device.type == "cpu"
        recorder = placement.ExpertRecorder(2, 3)
        recorder.add(0, [[0, 2], [2, 9]])
        recorder.add(1, torch.tensor([1, -1], device="cpu"))
        assert recorder.counts().tolist() == [[1, 0, 2], [0, 1, 0]]
        for name in ("counts.pt", "counts.json"):
            recorder.save(tmp_path / name)
            assert placement.read_statistics(tmp_path / name).tolist() == [[1, 0, 2], [0, 1, 0]]


def test_tensors_without_values_are_refused(layer):
    with pytest.raises(ValueError, match="gpu_experts_mask: expected a dense tensor with values, got .* on meta"):
        made(gpu_experts_mask=torch.zeros(EXPERTS, dtype=torch.bool, device="meta"))
    with pytest.raises(ValueError, match="up_proj: expected a dense tensor with values, got .* on meta"):
        layer.load_weights_from_tensors(VALUES[0], VALUES[1].to("meta"), VALUES[2])
    with pytest.raises(ValueError, match="physical_to_logical_map: expected a dense tensor with values"):
        layer.load_weights_from_tensors(*VALUES, torch.arange(EXPERTS, device="meta"))
    with pytest.raises(ValueError, match="down_proj: expected a dense tensor with values, got .*sparse"):
        layer.load_weights_from_tensors(*VALUES[:2], VALUES[2].to_sparse())
    with pytest.raises(ValueError, match="hidden_states: expected a tensor on cpu or cuda"):
        layer.forward(X.to("meta"), IDS, SHARES)


# --- modes


def test_what_is_made_in_inference_mode_serves_outside(results):
    with torch.inference_mode():
        layer = made(num_gpu_experts=2)
        assert torch.equal(layer.forward(X, IDS, SHARES), results[1])
    layer.gpu_experts_mask.copy_(torch.zeros(EXPERTS, dtype=torch.bool))
    assert torch.equal(layer.forward(X, IDS, SHARES), results[0])
    layer.gpu_experts_mask = torch.tensor([True] * 2 + [False] * 6)
    got = layer.forward(X, IDS, SHARES)
    got.mul_(2)
    assert torch.equal(got, results[1] * 2)
    with torch.inference_mode():
        got = layer.forward(X[:1], IDS[:1], SHARES[:1])
    got.add_(1)
    assert torch.equal(layer.forward(X, IDS, SHARES), results[1])


def test_a_recorder_of_inference_mode_serves_outside():
    recorder = placement.ExpertRecorder(1, 3)
    with torch.inference_mode():
        recorder.add(0, torch.tensor([0, 1]))
    recorder.add(0, torch.tensor([1]))
    recorder.reset()
    recorder.add(0, torch.tensor([2]))
    assert recorder.counts().tolist() == [[0, 0, 1]]


# --- what callers do to tensors they were handed


@pytest.mark.parametrize("done", [
    lambda y: setattr(y, "data", torch.zeros(1)), lambda y: y.t_(), lambda y: y.unsqueeze_(0),
    lambda y: y.requires_grad_(),
    lambda y: y.add_(torch.nn.Parameter(torch.ones(HIDDEN))), lambda y: y.set_(torch.zeros(1).bfloat16()),
    lambda y: y.resize_(1), lambda y: y.detach_(), lambda y: y.share_memory_()])
def test_a_result_is_its_caller_s(layer, results, done):
    address = layer.forward(X, IDS, SHARES).data_ptr()
    done(layer.forward(X, IDS, SHARES))
    again = layer.forward(X, IDS, SHARES)
    assert again.shape == X.shape and not again.requires_grad and again.grad_fn is None
    assert torch.equal(again, results[0])
    if done.__code__.co_names != ("share_memory_",):
        assert again.data_ptr() == address


def test_the_mask_that_the_layer_reads_stays(layer, results):
    for done in (lambda m: setattr(m, "data", torch.ones(EXPERTS, dtype=torch.bool)),
                 lambda m: m.set_(torch.ones(1, dtype=torch.bool)), lambda m: m.unsqueeze_(0)):
        done(layer.gpu_experts_mask)
        assert layer.gpu_experts_mask.shape == (EXPERTS,) and layer.num_gpu_experts == 0
        assert torch.equal(layer.forward(X, IDS, SHARES), results[0])
    held = layer.gpu_experts_mask
    held[:2] = True
    assert layer.num_gpu_experts == 2 and torch.equal(layer.forward(X, IDS, SHARES), results[1])
    del layer
    held.zero_()


def test_a_sync_of_another_shape_leaves_the_submit(layer, results):
    layer.submit_forward(X, IDS, SHARES)
    with pytest.raises(ValueError, match=r"\[1, 64\].*submitted were \[4, 64\]"):
        layer.sync_forward(X[:1])
    with pytest.raises(ValueError, match="float32.*submitted were .*bfloat16"):
        layer.sync_forward(X.float())
    assert torch.equal(layer.sync_forward(X), results[0])
    with pytest.raises(RuntimeError, match="nothing was submitted"):
        layer.sync_forward(X)


def test_views_of_the_opposite_sign(layer, results):
    assert torch.equal(layer.forward(torch._neg_view(-X), IDS, SHARES), results[0])
    assert torch.equal(layer.forward(X, torch._neg_view(-IDS), torch._neg_view(-SHARES)), results[0])
    layer.load_weights_from_tensors(*(torch._neg_view(-value) for value in VALUES))
    assert torch.equal(layer.forward(X, IDS, SHARES), results[0])


# --- torch.compile


def run(layers, x, ids, shares):
    x = x + layers[0].forward(x, ids, shares) * 2
    layers[1].submit_forward(x, ids, shares)
    return layers[1].sync_forward(x) + 1


def check_compiled(layers):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    for tokens in (3, 3, 4):
        call = layers, X[:tokens], IDS[:tokens], SHARES[:tokens]
        want = run(*call)
        assert torch.equal(torch.compile(run, backend="eager")(*call), want)
    frames = dict(counters["frames"])
    assert frames["ok"] == frames["total"] > 0, frames
    torch._dynamo.reset()


def test_compiled_callers():
    check_compiled([made(), made(num_gpu_experts=2)])


def test_compiled_callers_where_torch_marks_no_code(monkeypatch):
    """Older ones: by the public decorator."""
    import torch._dynamo

    from kt_kernel import moe_wrapper

    class Wrapper(KTMoEWrapper):
        pass

    for name, function in vars(KTMoEWrapper).items():
        if isinstance(function, types.FunctionType):
            plain = types.FunctionType(function.__code__.replace(co_name=name), function.__globals__, name,
                                       function.__defaults__, function.__closure__)
            plain.__kwdefaults__ = function.__kwdefaults__
            setattr(Wrapper, name, plain)
    monkeypatch.setattr(moe_wrapper, "KTMoEWrapper", Wrapper)
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    moe_wrapper._keep_compilers_out(torch)
    monkeypatch.undo()
    assert Wrapper.forward is not KTMoEWrapper.forward and hasattr(Wrapper.forward, "_torchdynamo_orig_callable")
    layers = [Wrapper(0, EXPERTS, TOP_K, HIDDEN, INTER, count, 2, 1, None, 16, method="BF16") for count in (0, 2)]
    for layer in layers:
        layer.load_weights_from_tensors(*VALUES)
    check_compiled(layers)
