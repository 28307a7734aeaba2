"""What the tests of fine-tuning share: models with LoRA on attention and experts, in torch alone and with experts
on KT.

Weights are numbers that bf16 holds, so that both sides see the same; arithmetic is f32 on both.
"""

import json
import os
import pathlib

import pytest
import torch

import tiny_models

FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
IDS = torch.randint(0, tiny_models.VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
DATA = pathlib.Path(os.environ["KT_TEST_DATA"]) if os.environ.get("KT_TEST_DATA") else None
needs_data = pytest.mark.skipif(DATA is None, reason="KT_TEST_DATA is not set: no trained models, no texts")


def stock(key="qwen3_moe", **more):
    return tiny_models.build(key, torch.bfloat16, **more)


def ours(key="qwen3_moe", config=None, **options):
    import kt_kernel.transformers

    options = {"activations": "f32", "threads": 2, **options}
    return kt_kernel.transformers.enable(stock(key, **(config or {})), trainable=True, **options)


def lora_config(rank=4, alpha=8, split=False, experts=True, **more):
    """split: gate_up has twice the rank, as adapters with an A of its own for gate and for up need."""
    from peft import LoraConfig

    if experts:
        more.setdefault("target_parameters", EXPERTS)
    if split:
        more["rank_pattern"] = {r".*\.experts\.gate_up_proj": 2 * rank}
        more["alpha_pattern"] = {r".*\.experts\.gate_up_proj": 2 * alpha}
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=ATTENTION, task_type="CAUSAL_LM", **more)


def with_lora(model, seed=3, **how):
    from peft import get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(model, lora_config(**how))


def trained(model):
    """{name: parameter} of what trains."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def draw_b(*models, seed=5, size=0.05):
    """B is zero when LoRA begins: these have the same random numbers in it."""
    generator = torch.Generator().manual_seed(seed)
    for parameters in zip(*(trained(m).items() for m in models)):
        if "lora_B" in parameters[0][0]:
            value = torch.randn(parameters[0][1].shape, generator=generator) * size
            for _, p in parameters:
                with torch.no_grad():
                    p.copy_(value)


def make_trainable(model, *parts):
    for name, p in model.named_parameters():
        if any(name.endswith(part) for part in parts):
            p.requires_grad_(True)


def step(model, ids=IDS):
    """Loss and {name: gradient} of one batch."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in trained(model).items()}


def worst(one, other):
    """(largest relative distance of gradients, its name)"""
    assert one.keys() == other.keys() and one
    far = {name: ((one[name] - other[name]).norm() / other[name].norm().clamp_min(1e-12)).item() for name in one}
    name = max(far, key=far.get)
    return far[name], name


def logits(model, ids=IDS):
    model.eval()
    with torch.no_grad():
        return model(ids).logits


def read(name):
    return [json.loads(line) for line in (DATA / "data" / f"{name}.jsonl").read_text().splitlines()]
