"""Families whose layers choose the keys that they attend to, as kt serves and estimates them; what is left alone,
missing or wrong; and where they do not run. KT_PROGRAM names kt."""

import concurrent.futures
import functools
import json
import pathlib
import random
import shutil
import subprocess
import sys
import urllib.request

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import gguf_files
import tiny_models
from server_process import KT, Server

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
DEMO = pathlib.Path(__file__).parent.parent / "demo" / "tiny-deepseekv3"
families = pytest.mark.parametrize("key", ["glm_moe_dsa", "deepseek_v32"])


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("dsa")


def kt(*words):
    return subprocess.run([KT, *map(str, words)], capture_output=True, text=True, timeout=600)


@functools.cache
def saved(root, key):
    """(tensors as transformers saves them, config, logits) of a model whose numbers are bf16."""
    return tiny_models.saved(root, key, [[1]])


def readable(folder, key):
    """A tiny random model that reads text as the demo model does."""
    sizes = dict(vocab_size=4096, max_position_embeddings=2048)
    tiny_models.save(tiny_models.build(key, torch.bfloat16, **sizes), folder, torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def complete(url, ids, tokens):
    body = json.dumps(dict(prompt=ids, max_tokens=tokens, temperature=0, ignore_eos=True, stop_token_ids=[])).encode()
    asked = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=300) as reply:
        answer = json.loads(reply.read())
    used = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], used.get("cached_tokens", 0)


def metrics(url):
    with urllib.request.urlopen(url + "/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("kt_") and "{" not in line}


def test_served_together_preempted_and_reused(tmp_path):
    """Answers of requests that share beginnings, push each other out of a small cache and come again are those that
    each gets alone."""
    folder = readable(tmp_path / "model", "glm_moe_dsa-shared-biases")
    draw = random.Random(3)
    common = [draw.randrange(300, 4000) for _ in range(150)]
    prompts = [common[:length] + [draw.randrange(300, 4000) for _ in range(more)]
               for length, more in ((150, 20), (150, 90), (64, 1), (0, 200), (128, 2))]
    flags = ["--acts", "f32", "--kv", "f32", "--cpu-threads", "2"]
    with Server(folder, *flags, "--max-running-requests", "1", "--max-total-tokens", "512") as server:
        alone = [complete(server.url, ids, 40)[0] for ids in prompts]
        again, cached = complete(server.url, prompts[-1], 40)
        assert again == alone[-1] and cached >= 128
    with Server(folder, *flags, "--max-running-requests", "4", "--max-total-tokens", "448") as server:
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(lambda ids: complete(server.url, ids, 40)[0], prompts))
            list(pool.map(lambda ids: complete(server.url, ids[-40:], 140)[0], prompts[:4]))
        after = metrics(server.url)
    assert together == alone and after["kt_preemptions_total"] > 0


# --- bad input -------------------------------------------------------------------------------------------------------


def test_what_is_left_alone_is_said(root, tmp_path):
    """Layers for further tokens, and indexers that converters copied into layers that share a choice."""
    tensors, config, _ = saved(root, "glm_moe_dsa-shared-biases")
    copied = {name.replace("layers.0.", f"layers.{layer}."): tensor for name, tensor in tensors.items()
              for layer in (1, 4)
              if "layers.0.self_attn.indexer." in name}
    done = kt("estimate", tiny_models.write(tmp_path / "model", tensors | copied, config), "--bandwidth", 10)
    assert "10 tensors not used: indexers that nobody asks (model.layers.1." in done.stderr
    assert "layers for further tokens (model.layers.4." in done.stderr


def test_a_missing_part_is_named(root, tmp_path):
    tensors, config, _ = saved(root, "deepseek_v32")
    for number, part in enumerate(("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")):
        name = "model.layers.1.self_attn.indexer." + part
        folder = tiny_models.write(tmp_path / str(number), {each: tensors[each] for each in tensors if each != name},
                                   config)
        done = kt("estimate", folder, "--bandwidth", 10)
        assert done.returncode == 2 and name in done.stderr and done.stderr.count("\n") == 1
    tensors = dict(tensors, **{"model.layers.1.self_attn.indexer.k_norm.bias": torch.ones(39)})
    done = kt("estimate", tiny_models.write(tmp_path / "short", tensors, config), "--bandwidth", 10)
    assert "k_norm.bias: expected 40 floats, found" in done.stderr


@pytest.mark.parametrize("kind,message",
                         [([True, False, True], "indexer.types is a list of 3, expected one for each of 4 layers"),
                          ([0, 1, 1, 1], "indexer.types: layer 0 shares the keys"),
                          ([1, 2, 1, 1], "indexer.types[1] is something else, expected a list of true and false"),
                          ("full", 'indexer.types is "full", expected a list of true and false')])
def test_bad_lists_of_a_file_are_named(root, tmp_path, kind, message):
    def more(writer):
        key = "glm-dsa.attention.indexer.types"
        writer.add_string(key, kind) if isinstance(kind, str) else writer.add_array(key, kind)

    model = gguf_files.Model(tiny_models.write(tmp_path / "plain", *saved(root, "glm_moe_dsa-shared-biases")[:2]))
    model.says_indexers = False
    done = kt("estimate", model.write(tmp_path / "m.gguf", more), "--bandwidth", 10)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr, done.stderr


# --- sizes and places -------------------------------------------------------------------------------------------------


def test_estimate_counts_the_keys_of_indexers(root):
    """Of a page one vector a key, and in layers that choose the indexer's key; both padded to 32 numbers of bf16."""
    for key, layers, choosing in (("glm_moe_dsa", 3, 3), ("glm_moe_dsa-shared-biases", 4, 2)):
        saved(root, key)
        page = 64 * 2 * (layers * 64 + choosing * 64)
        for sequences, context in ((1, 64), (3, 200)):
            done = kt("estimate", root / key, "--bandwidth", 10, "--json", "--context", context,
                      "--max-running-requests", sequences)
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["bytes"]["kv_cache"] == sequences * -(-context // 64) * page


def test_dense_attention_is_asked_for(tmp_path):
    """What a budget for all keys gives, and another model past 16 tokens."""
    folder = readable(tmp_path / "model", "glm_moe_dsa")
    every = tmp_path / "every"
    shutil.copytree(folder, every)
    config = json.loads((folder / "config.json").read_text())
    (every / "config.json").write_text(json.dumps(dict(config, index_topk=2000)))
    (tmp_path / "text.txt").write_text("Once upon a time there was a fox who lived at the edge of a dark wood. " * 8)

    def measured(folder, *flags):
        done = kt("perplexity", folder, "--file", tmp_path / "text.txt", "--context", 100, "--acts", "f32",
                  "--json", *flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["perplexity"], done.stderr

    (dense, said), (of_all, _), (chosen, _) = measured(folder, "--dense-attention"), measured(every), measured(folder)
    assert dense == of_all and abs(chosen / dense - 1) > 1e-3
    told = "--dense-attention: indexers choose no keys; texts of more than 16 tokens are not what the model makes"
    assert told in said
    assert "indexers that nobody asks (model.layers.0.self_attn.indexer." in said
    done = kt("estimate", folder, "--bandwidth", 10, "--json", "--context", 64, "--max-running-requests", 1,
              "--dense-attention")
    assert done.returncode == 0 and json.loads(done.stdout)["bytes"]["kv_cache"] == 64 * 2 * 3 * 64
    assert "attends to all keys as it is" in kt("estimate", DEMO, "--bandwidth", 10, "--dense-attention").stderr


@families
def test_a_gpu_refuses_the_family_by_name(root, key):
    saved(root, key)
    done = kt("estimate", root / key, "--bandwidth", 10, "--gpu")
    assert done.returncode == 4 and done.stderr.count("\n") == 1
    assert f": {key} has layers that choose the keys they attend to" in done.stderr
    assert "do not run on a GPU yet; without --gpu all of it runs on the CPU" in done.stderr
    done = kt("estimate", root / key, "--bandwidth", 10, "--gpu", "auto")
    assert done.returncode == 0 and "everything runs on the CPU: " in done.stderr + done.stdout
