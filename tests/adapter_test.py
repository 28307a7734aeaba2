"""Low-rank adapters in the native engine: logits beside transformers with the same additions in its weights, and files
that stock PEFT wrote.

KT_MODEL_PROBE names the program model_probe. What PEFT writes is tested where it is installed.
"""

import functools
import json
import os
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
import safetensors.torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny_models
from logits import PROBE, check, probe, prompt

pytestmark = pytest.mark.skipif(not PROBE, reason="KT_MODEL_PROBE does not name model_probe")
FULL = os.environ.get("KT_TEST_FULL") == "1"
BOUND = 1e-4
# One of each kind of attention, feed-forward part and naming.
FAMILIES = ([key for key in tiny_models.MODELS if not key.startswith("gpt_oss")]
            if FULL else ["deepseek_v3", "qwen3_moe", "qwen2_moe", "mixtral", "qwen3_next"])
ALPHA, RANK = 6.0, 3


def linears(model):
    """Matrices that an adapter can have, routed experts left out; embeddings have none."""
    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def routed(model):
    return {
        name: module
        for name, module in model.named_modules()
        if name.endswith(".experts") and isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter)
    }


def draw(*shape, size):
    return torch.randn(*shape) * size


def peft_name(module, end):
    return f"base_model.model.{module}.lora_{end}.weight"


def write(folder, tensors, **config):
    folder.mkdir()
    safetensors.torch.save_file({name: t.contiguous() for name, t in tensors.items()},
                                folder / "adapter_model.safetensors")
    usual = dict(peft_type="LORA", r=RANK, lora_alpha=ALPHA, use_rslora=False, bias="none")
    (folder / "adapter_config.json").write_text(json.dumps(dict(usual, **config)))
    return folder


def adapt(model, layout, seed=3, only=None, every=2):
    """PEFT's tensors of an adapter of every matrix, or of those whose names end so, in one of its layouts of experts
    (singly of every so many); the model gets what they add."""
    torch.manual_seed(seed)
    scale, tensors = ALPHA / RANK, {}
    with torch.no_grad():
        for name, module in linears(model).items():
            if only and not name.endswith(only):
                continue
            n, k = module.weight.shape
            a, b = draw(RANK, k, size=k**-0.5), draw(n, RANK, size=0.2)
            module.weight += scale * (b @ a)
            tensors[peft_name(name, "A")], tensors[peft_name(name, "B")] = a, b
        for name, module in routed(model).items():
            if layout == "fused":
                add_fused(tensors, name, module, scale)
            else:
                add_singly(tensors, name, module, scale, every)
    return tensors


def add_fused(tensors, name, module, scale):
    for parameter, where in ((module.gate_up_proj, name + ".base_layer"), (module.down_proj, name)):
        experts, n, k = parameter.shape
        a, b = draw(experts, RANK, k, size=k**-0.5), draw(experts, n, RANK, size=0.2)
        parameter += scale * torch.einsum("eor,eri->eoi", b, a)
        tensors[peft_name(where, "A")] = a.reshape(experts * RANK, k)
        tensors[peft_name(where, "B")] = b.permute(1, 2, 0).reshape(n, RANK * experts)


def add_singly(tensors, name, module, scale, every):
    for parameter, halves in ((module.gate_up_proj, ("gate_proj", "up_proj")), (module.down_proj, ("down_proj",))):
        experts, n, k = parameter.shape
        rows = n // len(halves)
        for e in range(0, experts, every):
            for i, half in enumerate(halves):
                a, b = draw(RANK, k, size=k**-0.5), draw(rows, RANK, size=0.2)
                parameter[e, i * rows : (i + 1) * rows] += scale * (b @ a)
                tensors[peft_name(f"{name}.{e}.{half}", "A")] = a
                tensors[peft_name(f"{name}.{e}.{half}", "B")] = b


PROMPTS = [prompt(tokens, tiny_models.VOCAB) for tokens in (1, 7, 130)]


@functools.cache
def adapted(root, key, layout):
    """The folders of a model and of its adapter, and transformers' logits with both."""
    model = tiny_models.build(key, torch.float32)
    folder = tiny_models.save(model, root / f"{key}-{layout}-model", torch.float32)
    adapter = write(root / f"{key}-{layout}", adapt(model, layout))
    return folder, adapter, [tiny_models.logits(model, [ids]) for ids in PROMPTS]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.mark.parametrize("layout", ["fused", "single"])
@pytest.mark.parametrize("key", FAMILIES)
def test_every_matrix(root, key, layout):
    folder, adapter, expected = adapted(root, key, layout)
    with_it = ["--adapter", str(adapter), "--use", "0"]
    check(probe(folder, PROMPTS, tiny_models.VOCAB, *with_it), np.concatenate(expected), BOUND)
    pieces = probe(folder, [PROMPTS[2]], tiny_models.VOCAB, *with_it, "--chunk", "7")
    check(pieces, expected[2], BOUND)


def test_loaded_and_not_used(root):
    """The bits of a model that never had one."""
    folder, adapter, expected = adapted(root, "deepseek_v3", "fused")
    plain = probe(folder, PROMPTS, tiny_models.VOCAB)
    assert (probe(folder, PROMPTS, tiny_models.VOCAB, "--adapter", str(adapter)) == plain).all()
    assert np.abs(plain - np.concatenate(expected)).max() > 0.1  # and the adapter is no small thing


def test_the_second_of_two(root, tmp_path):
    folder, adapter, _ = adapted(root, "qwen3_moe", "fused")
    model = tiny_models.build("qwen3_moe", torch.float32)
    other = write(tmp_path / "other", adapt(model, "single", seed=8))
    expected = np.concatenate([tiny_models.logits(model, [ids]) for ids in PROMPTS])
    both = ["--adapter", str(adapter), "--adapter", str(other), "--use", "1"]
    check(probe(folder, PROMPTS, tiny_models.VOCAB, *both), expected, BOUND)


def test_slices_of_experts(root):
    folder, adapter, expected = adapted(root, "deepseek_v3", "fused")
    with_it = ["--adapter", str(adapter), "--use", "0", "--shards", "2", "--threads", "3"]
    check(probe(folder, PROMPTS, tiny_models.VOCAB, *with_it), np.concatenate(expected), BOUND)


ATTENTION = {
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
}


@pytest.mark.parametrize("layout", ["fused", "single"])
@pytest.mark.parametrize("key", ATTENTION)
def test_beside_stock_peft(tmp_path, key, layout):
    """The same files in stock PEFT and here, and what it saves of them."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = tiny_models.build(key, torch.float32)
    folder = tiny_models.save(model, tmp_path / "model", torch.float32)
    tensors = adapt(tiny_models.build(key, torch.float32), layout, only=ATTENTION[key], every=1)
    fused = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if layout == "fused" else None
    modules = list(ATTENTION[key]) + ([] if fused else ["gate_proj", "up_proj", "down_proj"])
    written = write(tmp_path / "adapter", tensors, target_modules=modules, target_parameters=fused,
                    task_type="CAUSAL_LM")
    loaded = peft.PeftModel.from_pretrained(model, written).eval()
    with torch.no_grad():
        expected = np.concatenate([loaded(torch.tensor([ids])).logits[0].float().numpy() for ids in PROMPTS])
    loaded.save_pretrained(tmp_path / "saved")
    for adapter in (written, tmp_path / "saved"):
        check(probe(folder, PROMPTS, tiny_models.VOCAB, "--adapter", str(adapter), "--use", "0"), expected, BOUND)


@pytest.mark.parametrize(
    "change,said",
    [
        (dict(shape="q"), "fit no matrix of this model"),
        (dict(rank="layers.1"), "expected [rank, 64], found F32 [3, 63]"),
        (dict(config=dict(use_dora=True)), "adapters with DoRA are not read"),
    ],
)
def test_another_models(root, tmp_path, change, said):
    folder, _, _ = adapted(root, "qwen3_moe", "fused")
    tensors = adapt(tiny_models.build("qwen3_moe", torch.float32), "fused")
    if "shape" in change:
        tensors[peft_name("model.layers.77.self_attn.q_proj", "A")] = torch.ones(3, 64)
        tensors[peft_name("model.layers.77.self_attn.q_proj", "B")] = torch.ones(64, 3)
    if "rank" in change:
        tensors[peft_name("model.layers.1.self_attn.q_proj", "A")] = torch.ones(3, 63)
    adapter = write(tmp_path / "adapter", tensors, **change.get("config", {}))
    with pytest.raises(AssertionError) as failed:
        probe(folder, [[1]], tiny_models.VOCAB, "--adapter", str(adapter))
    assert said in str(failed.value) and "exit 2" in str(failed.value)
