"""Families of the gated delta rule beyond their logits (model_logits_test.py): as they are published, the same bits
whatever is cut, shared, preempted or resumed, what they take, and where they do not run. KT_MODEL_PROBE names
model_probe, KT_PROGRAM kt."""

import concurrent.futures
import functools
import json
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import safetensors.torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import published
import tiny_models
from logits import PROBE, check, differences, probe, probe_exactly, prompt
from server_process import KT, Server

pytestmark = pytest.mark.skipif(not PROBE or not KT, reason="KT_MODEL_PROBE and KT_PROGRAM do not name both programs")
BOUND = 1e-4  # as in model_logits_test.py
VOCAB = tiny_models.VOCAB
PROMPTS = [prompt(tokens, VOCAB) for tokens in (1, 7, 130)]
DEMO = pathlib.Path(__file__).parent.parent / "demo" / "tiny-deepseekv3"
families = pytest.mark.parametrize("key", ["qwen3_next", "qwen3_5_moe", "qwen3_5"])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("delta")


def kt(*words):
    return subprocess.run([KT, *map(str, words)], capture_output=True, text=True, timeout=600)


@functools.cache
def saved(root, key):
    """(tensors as transformers saves them, config, logits) of a model whose numbers are bf16."""
    return tiny_models.saved(root, key, PROMPTS)


# --- as published -----------------------------------------------------------------------------------------------------


def fused(tensors):
    """Experts of a layer in two tensors, [experts, 2 inter, hidden] and [experts, hidden, inter]."""
    parts, out = {}, {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if found:
            parts.setdefault(found[1], {})[int(found[2]), found[3]] = tensor
        else:
            out[name] = tensor
    for name, of in parts.items():
        experts = range(len(of) // 3)
        out[name + ".gate_up_proj"] = torch.stack([torch.cat([of[e, "gate"], of[e, "up"]]) for e in experts])
        out[name + ".down_proj"] = torch.stack([of[e, "down"] for e in experts])
    return out


def further(tensors):
    """A layer that predicts further tokens, as these families have it: the attending one under another name."""
    layer = max(int(found[1]) for found in (re.search(r"layers\.(\d+)\.self_attn", name) for name in tensors) if found)
    out = {name.replace(f"model.layers.{layer}.", "mtp.layers.0."): tensor for name, tensor in tensors.items()
           if f".layers.{layer}." in name}
    beside = {"mtp.fc.weight": torch.ones(64, 128), "mtp.norm.weight": torch.ones(64),
              "mtp.pre_fc_norm_embedding.weight": torch.ones(64), "mtp.pre_fc_norm_hidden.weight": torch.ones(64)}
    return out | beside


def test_qwen3_next_as_published(root, tmp_path):
    """Positions beside, an interval in place of the list, and layers for further tokens of which the config says
    nothing."""
    tensors, config, expected = saved(root, "qwen3_next")
    gone = ("rope_parameters", "layer_types", "bos_token_id", "eos_token_id", "pad_token_id")
    config = {name: value for name, value in config.items() if name not in gone}
    config |= dict(rope_theta=10000000, partial_rotary_factor=0.25, rope_scaling=None, full_attention_interval=4)
    more = further(tensors)
    folder = tiny_models.write(tmp_path / "model", tensors | more, config)
    check(probe(folder, PROMPTS, VOCAB), expected, BOUND)
    assert "layers for further tokens (mtp." in kt("estimate", folder, "--bandwidth", 10).stderr


@pytest.mark.parametrize("key", ["qwen3_5_moe", "qwen3_5"])
def test_qwen3_5_as_published(root, tmp_path, key):
    """Inside a model that sees: names behind model.language_model, experts fused, m-rope, a tower and a layer
    beside."""
    tensors, config, expected = saved(root, key)
    text = {name: value for name, value in config.items() if name != "architectures"}
    text |= dict(model_type=key + "_text", attn_output_gate=True, mtp_num_hidden_layers=1, mamba_ssm_dtype="float32")
    text["rope_parameters"] = dict(config["rope_parameters"], mrope_interleaved=True, mrope_section=[2, 1, 1])
    family = "Qwen3_5Moe" if "moe" in key else "Qwen3_5"
    outer = dict(architectures=[family + "ForConditionalGeneration"], model_type=key, text_config=text,
                 tie_word_embeddings=False, vision_config=dict(model_type=key, hidden_size=8), image_token_id=VOCAB - 1)
    stored = {name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
              for name, tensor in fused(tensors).items()}
    assert "moe" not in key or any(name.endswith("experts.gate_up_proj") for name in stored)
    stored |= fused(further(tensors))
    stored["model.visual.patch_embed.proj.weight"] = torch.ones(4, 3, 2, 16, 16)
    folder = tiny_models.write(tmp_path / "model", stored, outer)
    check(probe(folder, PROMPTS, VOCAB), expected, BOUND)
    said = kt("estimate", folder, "--bandwidth", 10).stderr
    assert "layers for further tokens (mtp." in said and "parts for images, sound or video (model.visual." in said


@pytest.mark.parametrize("key", ["qwen3_next", "qwen3_5_moe"])
def test_fp8(tmp_path, key):
    model = tiny_models.build(key, hidden_size=160, moe_intermediate_size=48)
    stored, plain = published.publish(model, published.Fp8Blocks(), tmp_path)
    check(probe(stored, PROMPTS, VOCAB), tiny_models.logits(published.load_plain(plain), PROMPTS), BOUND)


@pytest.mark.parametrize("key", ["qwen3_next", "qwen3_5_moe"])
def test_converted_experts(root, tmp_path, key):
    """Bytes for weights cost some thousandths of the logits; a merged folder and a model beside its experts are one."""
    saved(root, key)
    done = kt("quant", root / key, "-o", tmp_path / "int8", "--method", "int8", "--numa-nodes", "1", "--yes")
    assert done.returncode == 0, done.stderr
    exact, ours = probe(root / key, PROMPTS, VOCAB), probe(tmp_path / "int8", PROMPTS, VOCAB)
    assert (ours == probe(root / key, PROMPTS, VOCAB, "--weights", str(tmp_path / "int8"))).all()
    apart = differences(ours, exact)
    assert 0 < np.quantile(apart, 0.8) < 0.03  # a token here and there is sent elsewhere


def test_a_missing_part_is_named(root, tmp_path):
    tensors, config, _ = saved(root, "qwen3_5")
    for number, part in enumerate(("conv1d.weight", "A_log", "dt_bias", "norm.weight", "in_proj_a.weight",
                                   "out_proj.weight")):
        name = "model.layers.0.linear_attn." + part
        folder = tiny_models.write(tmp_path / str(number), {each: tensors[each] for each in tensors if each != name},
                                   config)
        done = kt("estimate", folder, "--bandwidth", 10)
        assert done.returncode == 2 and name in done.stderr and done.stderr.count("\n") == 1
    tensors = dict(tensors, **{"model.layers.0.linear_attn.conv1d.weight": torch.ones(384, 1, 3)})
    done = kt("estimate", tiny_models.write(tmp_path / "short", tensors, config), "--bandwidth", 10)
    assert "conv1d.weight: expected 1536 floats, found" in done.stderr


# --- the same bits ----------------------------------------------------------------------------------------------------


@functools.cache
def integers(root, key):
    """Every matrix in int8 with one scale a row, the head too: products are exact, so that bits can be compared."""
    packed = published.Packed(8, None, False)
    packed.takes = lambda name, tensor: published.is_linear(name, tensor) and not re.search(r"in_proj_(ba|a|b)\.", name)
    model = tiny_models.build(key, hidden_size=128, moe_intermediate_size=64, linear_num_value_heads=3,
                              linear_key_head_dim=24, linear_value_head_dim=64, intermediate_size=128)
    stored, _ = published.publish(model, packed, root / f"{key}-int8")
    tensors = safetensors.torch.load_file(stored / "model.safetensors")
    parts, _ = packed.linear(tensors.pop("lm_head.weight").float(), None)
    tensors.update({f"lm_head.{part}": tensor for part, tensor in parts.items()})
    safetensors.torch.save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    return stored


@families
def test_cuts_company_and_threads_change_no_bit(root, key):
    folder, ids = integers(root, key), prompt(130, VOCAB)
    whole = probe_exactly(folder, [ids], VOCAB)
    for cuts in ("1", "63", "64", "65", "128,129", "1,2,3,64,65,127"):
        assert (probe_exactly(folder, [ids], VOCAB, "--cuts", cuts) == whole).all(), cuts
    for threads in ("1", "3"):
        others = [prompt(tokens, VOCAB, 5) for tokens in (40, 3, 97)]
        ours = probe_exactly(folder, [others[0], ids, *others[1:]], VOCAB, "--threads", threads, "--chunk", "50")
        assert (ours[40:170] == whole).all(), threads


def readable(folder, key):
    """A tiny random model that reads text as the demo model does."""
    sizes = dict(vocab_size=4096, max_position_embeddings=2048)
    tiny_models.save(tiny_models.build(key, torch.bfloat16, **sizes), folder, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def asked(url, path, **body):
    body = json.dumps(dict(temperature=0, ignore_eos=True, **body)).encode()
    return urllib.request.Request(url + path, body, {"Content-Type": "application/json"})


def answered(url, path, **body):
    """The choices, and how many of the prompt's tokens were found in the cache."""
    with urllib.request.urlopen(asked(url, path, **body), timeout=300) as reply:
        answer = json.loads(reply.read())
    used = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"], used.get("cached_tokens", 0)


def complete(url, ids, tokens):
    choices, cached = answered(url, "/v1/completions", prompt=ids, max_tokens=tokens, stop_token_ids=[])
    return choices[0]["text"], cached


def metrics(url):
    with urllib.request.urlopen(url + "/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("kt_") and "{" not in line}


def settled(url):
    """The metrics once no sequence runs: an answer ends a moment before what it held is counted as free."""
    for _ in range(200):
        found = metrics(url)
        if found["kt_requests_running"] == 0 and found["kt_state_slots_held"] == 0:
            break
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("snapshots", [None, "0"])
def test_served_together_preempted_and_resumed(root, tmp_path, snapshots):
    """Answers of requests that share beginnings, push each other out of a small cache and come again are those that
    each gets alone."""
    folder = readable(tmp_path / "model", "qwen3_next")
    draw = random.Random(3)
    common = [draw.randrange(300, 4000) for _ in range(150)]
    prompts = [common[:length] + [draw.randrange(300, 4000) for _ in range(more)]
               for length, more in ((150, 20), (150, 90), (64, 1), (0, 200), (128, 2), (150, 20))]
    flags = ["--acts", "f32", "--kv", "f32", "--cpu-threads", "2",
             *(["--state-snapshots", snapshots] if snapshots else [])]
    with Server(folder, *flags, "--max-running-requests", "1", "--max-total-tokens", "512") as server:
        alone = [complete(server.url, ids, 80)[0] for ids in prompts]
        again, cached = complete(server.url, prompts[-1], 80)
        assert again == alone[-1]
        # With room for one snapshot the last prompt's, or that of its answer, is there; without it nothing may be used.
        assert cached in ((128, 192) if snapshots is None else (0,))
    # Seven pages: four short prompts fit, their answers do not.
    with Server(folder, *flags, "--max-running-requests", "4", "--max-total-tokens", "448") as server:
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(lambda ids: complete(server.url, ids, 80)[0], prompts))
            long = list(pool.map(lambda ids: complete(server.url, ids[-40:], 140)[0], prompts[:4]))
        after = settled(server.url)
        assert long == [complete(server.url, ids[-40:], 140)[0] for ids in prompts[:4]]
    assert together == alone
    assert after["kt_state_slots_held"] == 0 and after["kt_state_slots"] >= 4
    assert after["kt_preemptions_total"] > 0


def test_snapshots_of_a_conversation(root, tmp_path):
    """There is one before the last message, answers to one prompt share its own, and who leaves gives its slot back."""
    folder = readable(tmp_path / "model", "qwen3_next")
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
                        "{% if add_generation_prompt %}[assistant] {% endif %}")
    story = "Once upon a time there was a little fox who lived in a big wood. " * 12
    flags = ["--acts", "f32", "--kv", "f32", "--cpu-threads", "2", "--chat-template", template]

    def chat(url, last, **more):
        messages = [{"role": "system", "content": story}, {"role": "user", "content": "Hello."},
                    {"role": "assistant", "content": "Hello, fox."}, {"role": "user", "content": last}]
        return answered(url, "/v1/chat/completions", messages=messages, max_tokens=20, **more)

    last = "Tell me more of the wood and of all that was in it, " * 8
    with Server(folder, *flags, "--state-snapshots", "0") as server:
        alone = [chat(server.url, question)[0][0]["message"] for question in (last, "And then? " + last)]
    with Server(folder, *flags) as server:
        first, cached = chat(server.url, last)
        assert cached == 0 and first[0]["message"] == alone[0]
        second, cached = chat(server.url, "And then? " + last)
        assert cached >= 64 and cached % 64 == 0 and second[0]["message"] == alone[1]
        before = settled(server.url)
        several, _ = chat(server.url, last, n=3)
        after = settled(server.url)
        assert [choice["message"] for choice in several] == [alone[0]] * 3
        fed = after["kt_tokens_fed_total"] - before["kt_tokens_fed_total"]
        assert fed <= 3 * (64 + 20), fed  # from the last border on, and the answers
        with urllib.request.urlopen(asked(server.url, "/v1/completions", prompt="Once upon a time",
                                          max_tokens=1500, stream=True),
                                    timeout=60) as stream:
            stream.readline()
            assert metrics(server.url)["kt_state_slots_held"] == 1
        left = settled(server.url)
        assert left["kt_state_slots_held"] == left["kt_kv_pages_held"] == 0
        assert left["kt_tokens_fed_total"] < after["kt_tokens_fed_total"] + 1500


# --- sizes and places -------------------------------------------------------------------------------------------------


def test_estimate_counts_states(root):
    """Pages of the layers that attend, and f32 states of the others: for each value head a matrix of keys by values,
    whose rows are multiples of 16 numbers, and of the convolution the last three inputs."""
    saved(root, "qwen3_next")
    state = 3 * (6 * 24 * 48 + 3 * (2 * 3 * 24 + 6 * 40)) * 4
    page = 64 * 2 * 2 * 32 * 2
    for sequences, context in ((1, 64), (3, 200)):
        done = kt("estimate", root / "qwen3_next", "--bandwidth", 10, "--json", "--context", context,
                  "--max-running-requests", sequences)
        assert done.returncode == 0, done.stderr
        pages = sequences * -(-context // 64)
        assert json.loads(done.stdout)["bytes"]["kv_cache"] == pages * page + sequences * state


@families
def test_a_gpu_refuses_the_family_by_name(root, key):
    saved(root, key)
    done = kt("estimate", root / key, "--bandwidth", 10, "--gpu")
    assert done.returncode == 4 and done.stderr.count("\n") == 1
    assert (f": {key}" in done.stderr
            and "do not run on a GPU yet; without --gpu all of it runs on the CPU" in done.stderr)
    done = kt("estimate", root / key, "--bandwidth", 10, "--gpu", "auto")
    assert done.returncode == 0 and "everything runs on the CPU: " in done.stderr + done.stdout
