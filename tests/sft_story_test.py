"""One story from the recipe to the answer: the demo model learns to speak as a pirate with `kt sft train
demo/sft.yaml`, and what it then says is the same through `kt generate --adapter`, `kt run --adapter`, `kt sft chat` and
stock transformers with stock PEFT.

KT_PROGRAM names kt; torch and PEFT are needed, and kt_kernel with training."""
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import urllib.request

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, ROOT, kt
from server_process import Server

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="PEFT is not installed")
pytest.importorskip("kt_kernel.kt_kernel_ext", reason="kt_kernel is not built: PYTHONPATH=build/python")
pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
DEMO = ROOT / "demo" / "tiny-deepseekv3"
ASKED = "You are a pirate. Tell me a bedtime story."
TOKENS = 48
# Logits of bf16 activations are within this of those in f32 (tests of models ask for less): a token whose lead is
# larger is everybody's.
CERTAIN = 0.25


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of demo/sft.yaml, its recipe, and what stock transformers says with the adapter and
    without."""
    folder = tmp_path_factory.mktemp("story")
    env = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    env |= {"KT_PYTHON": sys.executable, "KT_HOME": str(folder / "home"), "KT_DEMO_MODEL": str(DEMO),
            "OMP_NUM_THREADS": "1"}
    recipe = ROOT / "demo" / "sft.yaml"
    done = kt("sft", "train", recipe, "cutoff_len=160", "cpu_infer=2", f"output_dir={folder}/pirate",
              cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in (folder / "pirate" / "trainer_log.jsonl").read_text().splitlines()]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5
    return folder, env


def stock(adapter):
    """(ids, how far each is ahead of the next best) that the adapted model says first, in f32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    asked = tokenizer.apply_chat_template([{"role": "user", "content": ASKED}], add_generation_prompt=True,
                                          return_tensors="pt", return_dict=True)
    with torch.no_grad():
        said = model.generate(**asked, max_new_tokens=TOKENS, do_sample=False, output_logits=True,
                              return_dict_in_generate=True)
    best = torch.stack(said.logits)[:, 0].topk(2).values
    ids = said.sequences[0, asked["input_ids"].shape[1]:].tolist()
    return tokenizer, ids, (best[:, 0] - best[:, 1]).tolist()


@pytest.fixture(scope="module")
def expected(trained):
    torch.set_num_threads(1)
    tokenizer, ids, leads = stock(trained[0] / "pirate")
    _, before, _ = stock(None)
    assert ids != before, "the adapter changes what is said"
    assert min(leads) > 1e-3, "f32 on both sides decides alike"
    return tokenizer, ids, leads


def test_generate(trained, expected):
    folder, env = trained
    tokenizer, ids, _ = expected
    said = kt("generate", DEMO, "--adapter", folder / "pirate", "--chat", "-p", ASKED, "--max-tokens", TOKENS,
              "--temperature", 0, "--acts", "f32", "--threads", 2, "--json", cwd=folder, env=env)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["text"] == tokenizer.decode(ids, skip_special_tokens=True)


def test_run(trained, expected):
    """Beside the model without it, which has another answer."""
    folder, env = trained
    tokenizer, ids, _ = expected
    with Server(DEMO, "--adapter", f"pirate={folder}/pirate", "--acts", "f32", "--threads", 2,
                "--served-model-name", "demo", env=env) as server:
        def ask(model, *before):
            messages = [*before, {"role": "user", "content": ASKED}]
            body = {"model": model, "messages": messages, "max_tokens": TOKENS, "temperature": 0}
            request = urllib.request.Request(server.url + "/v1/chat/completions", json.dumps(body).encode(),
                                             {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=300) as reply:
                answer = json.load(reply)
            return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        names = ("demo:pirate", "demo")
        alone = {name: ask(name)[0] for name in names}
        assert alone["demo:pirate"] == tokenizer.decode(ids, skip_special_tokens=True) != alone["demo"]
        # Together, and in turns: each as it is alone.
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for name, (said, _) in zip(names * 2, pool.map(ask, names * 2)):
                assert said == alone[name]
        # A long beginning is computed once for each name, and never one's for the other.
        talk = {"role": "system", "content": "Tell stories of ships and of the sea. " * 20}
        first = {name: ask(name, talk) for name in names}
        again = {name: ask(name, talk) for name in names}
        assert all(cached == 0 for _, cached in first.values()) and all(cached >= 64 for _, cached in again.values())
        assert all(again[name][0] == first[name][0] for name in names) and first["demo"][0] != first["demo:pirate"][0]


def test_chat(trained, expected):
    """Through a pipe, as the recipe says; up to the first token that bf16 activations might choose otherwise."""
    folder, env = trained
    tokenizer, ids, leads = expected
    changes = (f"output_dir={folder}/pirate", "do_sample=false", f"max_new_tokens={TOKENS}", "cpu_infer=2")
    said = subprocess.run([KT, "sft", "chat", ROOT / "demo" / "sft.yaml", *changes], input=ASKED + "\n",
                          capture_output=True, text=True, timeout=300, cwd=folder, env=env)
    assert said.returncode == 0, said.stderr
    sure = next((at for at, lead in enumerate(leads) if lead < CERTAIN), len(ids))
    assert sure >= 4, leads
    assert said.stdout.startswith(tokenizer.decode(ids[:sure], skip_special_tokens=True).rstrip())
