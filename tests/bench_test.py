"""kt bench of a model: figures, experts that were used, the parts of a step. KT_PROGRAM names kt."""
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

KT = os.environ.get("KT_PROGRAM", "build/bin/kt")
ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "demo" / "tiny-deepseekv3"
SMALL = "--layers 2 --experts 32 --top-k 4 --hidden 256 --inter 128 --vocab 2000".split()
GQA = "--heads 4 --kv-heads 2".split()
MLA = ("--arch deepseek2 --layers 3 --dense-inter 256 --heads 4 --q-rank 64 --kv-rank 64"
       " --groups 4 --used-groups 2").split()

DELTA = ("--arch qwen35moe --layers 4 --heads 4 --kv-heads 2 --head-dim 64 --rope-dim 16 --key-heads 2"
         " --value-heads 4 --state-dim 32").split()
DSA = ("--arch glm-dsa --layers 3 --dense-inter 256 --heads 4 --q-rank 64 --kv-rank 64 --head-dim 32 --value-dim 32"
       " --rope-dim 16 --index-heads 24 --index-dim 128 --index-top-k 16").split()
SHAPES = {"qwen3moe": GQA, "deepseek2": MLA, "qwen35moe": DELTA, "glm-dsa": DSA}


def bench(model, *words):
    command = [KT, "bench", model, "--prompt", "64", "--batch", "2", "--tokens", "24", "--repeat", "2",
               "--json", *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["points"][0], done.stderr


def model_file(path, *words):
    subprocess.run([sys.executable, ROOT / "tools" / "make_gguf.py", path, *SMALL, *words], check=True)
    return path


def even(experts, top_k, tokens):
    return experts * (1 - (1 - top_k / experts) ** tokens)


@pytest.mark.parametrize("kind", ["iq2_xxs", "iq3_xxs"])
def test_random_experts_of_a_grid(kind, tmp_path):
    point, said = bench(model_file(tmp_path / "m.gguf", *GQA, "--inter", "256", "--expert-type", kind))
    assert said == ""
    assert point["prefill_distinct_experts"] > 0.9 * even(32, 4, 2 * 2 * 64)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_random_models_route_like_models(shape, tmp_path):
    point, said = bench(model_file(tmp_path / "m.gguf", *shape))
    assert said == ""
    assert point["prefill_distinct_experts"] > 0.9 * even(32, 4, 2 * 2 * 64)
    assert point["decode_distinct_experts"] > 0.8 * even(32, 4, 2 * 2 * 24)
    assert point["decode_even_distinct_experts"] == pytest.approx(even(32, 4, 2 * 2 * 24))
    assert 8 / 32 < point["prefill_busiest_share"] < 0.5


# What llama.cpp asks files of an architecture for beyond what all have, and which of their tensors tell them apart.
NEEDS = {
    "qwen35moe": (["rope.dimension_sections", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size",
                   "ssm.time_step_rank", "ssm.group_count"],
                  ["blk.2.ssm_a", "blk.2.ssm_dt.bias", "blk.0.ssm_conv1d.weight", "blk.3.attn_q_norm.weight"]),
    "glm-dsa": (["expert_shared_count", "attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla",
                 "attention.value_length_mla", "attention.indexer.head_count", "attention.indexer.key_length",
                 "attention.indexer.top_k"],
                ["blk.0.ffn_gate.weight", "blk.2.indexer.k_norm.bias", "blk.1.indexer.proj.weight",
                 "blk.1.exp_probs_b.bias"]),
}


@pytest.mark.parametrize("arch", NEEDS)
def test_random_files_have_what_llama_cpp_asks_for(arch, tmp_path):
    gguf = pytest.importorskip("gguf")
    file = gguf.GGUFReader(model_file(tmp_path / "m.gguf", *SHAPES[arch]))
    keys, names = NEEDS[arch]
    assert [key for key in keys if f"{arch}.{key}" not in file.fields] == []
    stored = {tensor.name for tensor in file.tensors}
    assert set(names) <= stored
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[number]}
    plain = {re.sub(r"^blk\.\d+\.", "blk.{bid}.", re.sub(r"\.(weight|bias)$", "", name)) for name in stored}
    assert plain <= known, plain - known
    done = subprocess.run([KT, "estimate", str(tmp_path / "m.gguf"), "--bandwidth", "10"], capture_output=True,
                          text=True)
    assert done.returncode == 0 and "not used" not in done.stderr, done.stderr


def test_or_by_a_law(tmp_path):
    plain, _ = bench(model_file(tmp_path / "even.gguf", *GQA))
    skewed, _ = bench(model_file(tmp_path / "zipf.gguf", *GQA, "--zipf", "1.5"))
    assert skewed["prefill_busiest_share"] > plain["prefill_busiest_share"] + 0.15


def test_routing_in_place_of_the_routers(tmp_path):
    model = model_file(tmp_path / "m.gguf", *GQA, "--zipf", "40")  # whose router hardly chooses
    uniform, said = bench(model, "--routing", "uniform")
    assert said == "" and uniform["prefill_distinct_experts"] > 0.9 * even(32, 4, 2 * 2 * 64)
    zipf, _ = bench(model, "--routing", "zipf:1.5")
    assert zipf["prefill_busiest_share"] > uniform["prefill_busiest_share"] + 0.15
    assert bench(model, "--routing", "zipf:1.5")[0]["prefill_busiest_share"] == zipf["prefill_busiest_share"]
    for word in ("zipf", "zipf:-1", "even"):
        done = subprocess.run([KT, "bench", str(model), "--routing", word], capture_output=True, text=True)
        assert done.returncode == 2 and f"'{word}': uniform, or zipf:S with S from 0 to 10" in done.stderr


def test_routers_that_hardly_choose_are_told(tmp_path):
    point, said = bench(model_file(tmp_path / "m.gguf", *GQA, "--zipf", "40"))
    assert point["prefill_distinct_experts"] < 10
    assert "experts where even routing uses" in said and said.count("\n") == 1


def test_a_trained_model_is_not_told():
    point, said = bench(DEMO)
    assert 0 < point["decode_busiest_share"] <= 1 and said == ""


def test_the_parts_of_a_step(tmp_path):
    picture = tmp_path / "step.svg"
    phases = ("prefill", "decode")
    # Steps of the demo take a millisecond: another process on this core between two parts is in none of them.
    for _ in range(4):
        point, _ = bench(DEMO, "--parts", "--plot", picture)
        if all(point[f"{phase}_step"]["explained"] > 0.95 for phase in phases):
            break
    for phase in phases:
        step = point[f"{phase}_step"]
        assert 0.95 < step["explained"] < 1.02
        parts = {part["name"]: part for part in step["parts"]}
        assert {"experts", "attention", "router", "norms and sums", "rotation and cache", "head",
                "between steps"} <= set(parts)
        assert parts["experts"]["calls"] == 5  # layers
        assert 0 < parts["experts"]["limit_us"] < parts["experts"]["us"] * 1.5
        assert sum(part["us"] for part in step["parts"]) == pytest.approx(step["step_us"] * step["explained"], rel=1e-6)
    assert picture.read_text().count("<svg ") == 1 and "experts" in picture.read_text()


def test_checkpoints_route_evenly_too(tmp_path):
    words = "--layers 2 --experts 32 --hidden 256 --inter 128 --vocab 4096".split()
    subprocess.run([sys.executable, ROOT / "tools" / "make_checkpoint.py", tmp_path / "m", *words], check=True)
    (tmp_path / "m" / "tokenizer.json").write_text((DEMO / "tokenizer.json").read_text())
    point, said = bench(tmp_path / "m")
    assert said == "" and point["prefill_distinct_experts"] > 0.9 * even(32, 8, 2 * 2 * 64)
