"""Gradients of one layer of experts through kt_kernel_ext against torch's autograd over the same weights. PYTHONPATH
names a folder with the built package."""
import itertools

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("kt_kernel", reason="PYTHONPATH does not name the built package kt_kernel")
from kt_kernel import kt_kernel_ext as ext

EXPERTS, TOP_K, HIDDEN, INTER, TOKENS, RANK = 5, 2, 96, 40, 23, 4
TYPES = {torch.float32: 0, torch.bfloat16: 1}
SCALES = 0.5, 2.0


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


GATE_UP, DOWN = (drawn(seed, *shape).bfloat16() for seed, shape in
                 ((1, (EXPERTS, 2 * INTER, HIDDEN)), (2, (EXPERTS, HIDDEN, INTER))))
SHAPES = ((EXPERTS, RANK, HIDDEN), (EXPERTS, 2 * INTER, RANK), (EXPERTS, RANK, INTER), (EXPERTS, HIDDEN, RANK))
IDS = torch.stack([torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(t))[:TOP_K] for t in range(TOKENS)])
IDS[3, 1], IDS[7] = -1, EXPERTS


def layer(activations, mask=None, max_tokens=64):
    made = ext.ExpertLayer(ext.CPUInfer(2, 1), experts=EXPERTS, hidden=HIDDEN, inter=INTER, top_k=TOP_K, method="BF16",
                           max_tokens=max_tokens, activations=activations)
    gate, up = (half.contiguous() for half in GATE_UP.chunk(2, 1))
    made.load_values(gate.data_ptr(), up.data_ptr(), DOWN.data_ptr(), 1, list(range(EXPERTS)))
    if mask is not None:
        made.set_mask(mask.data_ptr(), mask)
    return made


def torch_layer(x, weights, lora, mask=None):
    """The definition, in the type of x."""
    gate_up, down = (w.to(x.dtype) for w in (GATE_UP, DOWN))
    if lora:
        gate_up = gate_up + SCALES[0] * lora[1] @ lora[0]
        down = down + SCALES[1] * lora[3] @ lora[2]
    out = torch.zeros_like(x)
    for token, slot in itertools.product(range(TOKENS), range(TOP_K)):
        expert = IDS[token, slot].item()
        if 0 <= expert < EXPERTS and (mask is None or not mask[expert]):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] = out[token] + weights[token, slot] * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


def ours(made, x, weights, dout, lora, ids, keep):
    """(output, its gradients in the order of the arguments): input, weights, factors."""
    output, dx, dw = torch.empty_like(x), torch.empty(TOKENS, HIDDEN), torch.empty(TOKENS, TOP_K)
    factors = None
    grads = [torch.zeros_like(f) for f in lora]
    if lora:
        a1, b1, a2, b2 = (f.data_ptr() for f in lora)
        factors = (RANK, SCALES[0], a1, b1, RANK, SCALES[1], a2, b2)
    call = (TOKENS, x.data_ptr(), TYPES[x.dtype], x.stride(0), ids.data_ptr(), ids.dtype == torch.int64,
            weights.data_ptr())
    saved = made.train_forward(*call, output.data_ptr(), factors, keep)
    assert (saved is not None) == keep and (not keep or saved.bytes > TOKENS * INTER)
    made.train_backward(saved, *call, dout.data_ptr(), TYPES[dout.dtype], factors, dx.data_ptr(), dw.data_ptr(),
                        tuple(g.data_ptr() for g in grads) if lora else None)
    return [output, dx, dw, *grads]


def wanted(x, weights, dout, lora, mask=None):
    leaves = [t.double().requires_grad_() for t in (x, weights, *lora)]
    output = torch_layer(leaves[0], leaves[1], leaves[2:], mask)
    return [output, *torch.autograd.grad((output * dout.double()).sum(), leaves)]


def worst(got, want):
    return max(((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("activations,bar", [("f32", 1e-5), ("bf16", 1e-2)])
def test_gradients_are_those_of_autograd(with_lora, keep, activations, bar):
    made = layer(activations)
    x, weights, dout = drawn(3, TOKENS, HIDDEN), drawn(4, TOKENS, TOP_K).abs(), drawn(5, TOKENS, HIDDEN)
    lora = [drawn(6 + i, *shape) for i, shape in enumerate(SHAPES)] if with_lora else []
    for ids in (IDS, IDS.int()):
        assert worst(ours(made, x, weights, dout, lora, ids, keep), wanted(x, weights, dout, lora)) < bar
    # bf16 tensors with gaps between rows; only the output is rounded to their type
    wide = drawn(9, TOKENS, HIDDEN + 5).bfloat16()[:, :HIDDEN]
    got, want = (ours(made, wide, weights, dout.bfloat16(), lora, IDS, keep),
                 wanted(wide, weights, dout.bfloat16(), lora))
    assert worst(got[:1], want[:1]) < 1e-2 and worst(got[1:], want[1:]) < bar


def test_experts_computed_elsewhere_have_no_part_in_it():
    mask = torch.tensor([0, 1, 0, 0, 1], dtype=torch.uint8)
    made = layer("f32", mask)
    x, weights, dout = drawn(3, TOKENS, HIDDEN), drawn(4, TOKENS, TOP_K).abs(), drawn(5, TOKENS, HIDDEN)
    lora = [drawn(6 + i, *shape) for i, shape in enumerate(SHAPES)]
    want = wanted(x, weights, dout, lora, mask)
    assert worst(ours(made, x, weights, dout, lora, IDS, True), want) < 1e-5
    # what is kept goes by the mask of its forward
    elsewhere = mask.clone()
    other = layer("f32", elsewhere)
    call = (TOKENS, x.data_ptr(), 0, HIDDEN, IDS.data_ptr(), True, weights.data_ptr())
    output, dx = torch.empty_like(x), torch.empty_like(x)
    saved = other.train_forward(*call, output.data_ptr(), None, True)
    elsewhere.zero_()
    other.train_backward(saved, *call, dout.data_ptr(), 0, None, dx.data_ptr(), 0, None)
    assert worst([output, dx], wanted(x, weights, dout, [], mask)[:2]) < 1e-5


def test_bad_calls_are_one_clear_line():
    made = layer("f32", max_tokens=8)
    x, weights = drawn(3, TOKENS, HIDDEN), drawn(4, TOKENS, TOP_K)
    call = (x.data_ptr(), 0, HIDDEN, IDS.data_ptr(), True, weights.data_ptr(), x.data_ptr())
    with pytest.raises(ValueError, match="layer 0: 23 tokens, expected at most 8"):
        made.train_forward(TOKENS, *call, None, False)
    with pytest.raises(ValueError, match="LoRA of down: B is null and the other is not"):
        made.train_forward(4, *call, (0, 1.0, 0, 0, 2, 1.0, x.data_ptr(), 0), False)
    saved = made.train_forward(4, *call, None, True)
    with pytest.raises(ValueError, match="3 tokens of 2 experts each, but the forward that was saved had 4 of 2"):
        made.train_backward(saved, 3, *call, 0, None, 0, 0, None)
    weights[1, 0] = float("nan")
    with pytest.raises(ValueError, match="layer 0: the weight of token 1, slot 0 .* is NaN"):
        made.train_forward(4, *call, None, False)
