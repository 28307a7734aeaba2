"""kt_kernel.llamafactory: what its command line says where LLaMA-Factory is missing or of another kind, and, where
there is one, that what comes out of it is what it gives without KT. KT_LLAMAFACTORY_PYTHON names an interpreter that
has it (docs/llamafactory.md says how one is made), if this one has not; KT_TEST_DATA, where it is set, a folder with
another model."""
import functools
import importlib.util
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
import types
import urllib.error
import urllib.request

import pytest
import tomllib

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import FULL, ROOT, trained_model

pytest.importorskip("kt_kernel", reason="kt_kernel is not built for this Python")
from kt_kernel.llamafactory import command, packages, recipe, swaps
from kt_kernel.sft.train.events import TrainingError

ENGLISH = {"KT_LANG": "en", "OMP_NUM_THREADS": "1"}


# --- without LLaMA-Factory -------------------------------------------------------------------------------------------


def says(capsys, *words):
    """(exit code, the line) of the command line, in this process."""
    code = command.main(list(words))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("kt_kernel.llamafactory: "), lines
    return code, lines[0]


@pytest.fixture
def installed(monkeypatch):
    """Sets what is installed, by name and version; the checks read nothing else."""
    def have(**versions):
        found = {"llamafactory": "0.9.5", "transformers": "5.6.0", "trl": "0.24.0", "peft": "0.21.2", **versions}
        monkeypatch.setattr(packages, "version_of", found.get)
        monkeypatch.setattr(importlib.util, "find_spec",
                            lambda name: types.ModuleType(name) if found.get(name) else None)
        monkeypatch.setattr(packages.importlib.metadata, "requires", lambda name: [
            "transformers!=4.52.0,<=5.6.0,>=4.55.0", "trl<=0.24.0,>=0.18.0", "peft<=0.18.1,>=0.18.0",
            'x>=1; extra == "metrics"'])
        monkeypatch.delenv("DISABLE_VERSION_CHECK", raising=False)
    return have


def test_a_missing_llamafactory_is_one_line_with_the_commands(installed, capsys, tmp_path):
    installed(llamafactory=None)
    code, line = says(capsys, "train", str(tmp_path / "a.yaml"))
    assert code == 4 and "LLaMA-Factory is not installed" in line
    assert ("pip install --no-deps llamafactory==0.9.5" in line and "transformers==5.6.0" in line
            and "peft>=0.21" in line)
    document = (ROOT / "docs" / "llamafactory.md").read_text()
    assert packages.INSTALL.replace(" && ", "\n") in re.sub(r" \\\n\s+", " ", document)  # one and the same
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["optional-dependencies"]["llamafactory"]
            == packages.INSTALL.split(" && ")[0].replace('"', "").split()[2:])


def test_a_process_of_its_own_ends_with_code_4():
    done = subprocess.run([sys.executable, "-m", "kt_kernel.llamafactory", "export", "a.yaml"], capture_output=True,
                          text=True, env={**os.environ, **ENGLISH})
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert "kt sft export ADAPTER -o OUT --layout merged" in done.stderr


@pytest.mark.parametrize("versions, words", [
    ({"llamafactory": "0.9.4"}, ["LLaMA-Factory 0.9.4", "0.9.5 or newer"]),
    ({"peft": "0.18.1"}, ["peft 0.18.1", "peft>=0.21"]),
    ({"peft": None}, ["peft is not installed", "peft>=0.21"]),
    ({"trl": "1.16.0"}, ["trl 1.16.0", "<=0.24.0"]),
    ({"transformers": "4.57.1"}, ["transformers 4.57.1", ">=5"]),
    ({"transformers": "5.22.2"}, ["transformers 5.22.2", "<=5.6.0"]),
])
def test_versions_that_do_not_go_together_are_named(installed, capsys, versions, words):
    installed(**versions)
    code, line = says(capsys, "train", "a.yaml")
    assert code == 4 and all(word in line for word in words), line
    installed()
    packages.check()
    assert os.environ.pop("DISABLE_VERSION_CHECK") == "1"  # its own check would refuse PEFT


def test_a_name_that_is_not_there_is_one_line(installed, monkeypatch):
    installed(llamafactory="0.9.9")
    known = types.ModuleType("llamafactory.model.loader")
    known.load_config = known.AutoModelForCausalLM = known.AutoModelForSeq2SeqLM = object()
    for name, module in (("llamafactory", None), ("llamafactory.model", None), ("llamafactory.model.loader", known)):
        monkeypatch.setitem(sys.modules, name, module or types.ModuleType(name))
    with pytest.raises(TrainingError, match=r"LLaMA-Factory 0\.9\.9: "
                                            r"llamafactory\.model\.loader has no AutoModelForImageTextToText, "
                                            r"AutoModelForTextToWaveform, .* it knows 0\.9\.5") as caught:
        swaps.install(recipe.door_of({}, True))
    assert caught.value.code == 4
    assert "load_config" in vars(known) and known.load_config is known.AutoModelForCausalLM  # nothing was replaced


RECIPE = {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "lora", "lora_target": "all"}


def test_kts_keys_are_taken_out_and_the_rest_is_left():
    door = recipe.door_of({**RECIPE, "use_kt": True, "kt_weight_path": "w", "cpu_infer": 7, "chunk_size": 512,
                           "kt_cpu_activation": "recompute",
                           "kt_optimize_rule": "x.yaml", "kt_maxlen": 5, "infer_backend": "ktransformers",
                           "lora_dropout": 0.1,
                           "kt_config": {"kt_backend": "AMXINT8", "kt_lora_rank": 4, "kt_max_cache_depth": 3,
                                         "kt_activation_policy": {"cpu": "retain", "gpu": "retain"}}}, True)
    assert door.rest == {**RECIPE, "infer_backend": "huggingface", "lora_dropout": 0.1, "lora_rank": 4, "lora_alpha": 8,
                         "disable_gradient_checkpointing": True, "use_reentrant_gc": False}
    assert (door.threads, door.max_tokens, door.cpu_activation, door.activations) == (7, 512, "recompute", "f32")
    assert door.config.enable_arguments() == {"trainable": True, "weights": "w", "format": "int8",
                                              "cpu_activation": "retain"}
    assert [note.split(":")[0] for note in door.notes] == ["kt_optimize_rule", "kt_maxlen", "kt_max_cache_depth"]
    own = recipe.door_of({**RECIPE, "bf16": True, "use_reentrant_gc": True}, True)
    assert own.rest["use_reentrant_gc"] is True and own.activations == "bf16"
    chat = recipe.door_of(RECIPE, False)
    assert chat.rest == RECIPE and not chat.trains


@pytest.mark.parametrize("more, message", [
    ({"kt_confg": {}}, "kt_confg: no such key; the nearest is kt_config"),
    ({"kt_wieght_path": "x"}, "nearest is kt_weight_path"),
    ({"kt_config": {"kt_num_thread": 4}},
     "kt_config.kt_num_thread: no such key; the nearest is kt_config.kt_num_threads"),
    ({"kt_config": 3}, "kt_config: expected keys below it, got 3"),
    ({"kt_config": {"kt_backend": "AMXINT3"}}, "kt_backend: unknown 'AMXINT3'"),
    ({"kt_config": {"kt_num_threads": "many"}}, "kt_num_threads: expected an int, got 'many'"),
    ({"kt_config": {"kt_lora_rank": 4}, "lora_rank": 8}, "kt_lora_rank: 4, and lora_rank is 8"),
    ({"kt_config": {"kt_num_gpu_experts": 2}}, "kt_num_gpu_experts is 2"),
    ({"kt_config": {"kt_train_mode": "full"}}, "kt_train_mode: full"),
    ({"kt_config": {"kt_lora_dropout": 0.1}}, "kt_lora_dropout: experts have no dropout"),
    ({"cpu_infer": 0}, "cpu_infer: expected a number of at least 1, got 0"),
    ({"chunk_size": "8k"}, "chunk_size: expected a number of at least 1, got '8k'"),
    ({"kt_cpu_activation": "forget"}, "kt_cpu_activation: expected retain or recompute"),
    ({"use_kt": False}, "use_kt: false"),
    ({"finetuning_type": "full"}, "finetuning_type: full"),
    ({"stage": "ppo"}, "stage: ppo"),
    ({"quantization_bit": 4}, "quantization_bit: kt_config.kt_backend rounds experts"),
    ({"deepspeed": "x.json"}, "deepspeed: training with experts on KT is one process"),
    ({"infer_backend": "vllm"}, "infer_backend: vllm"),
    ({"adapter_name_or_path": "a,b"}, "adapter_name_or_path: 2 adapters"),
])
def test_bad_recipes_are_one_line(more, message):
    with pytest.raises(TrainingError) as caught:
        recipe.door_of({**RECIPE, **more}, True)
    assert message in str(caught.value) and caught.value.code == 2


@pytest.mark.parametrize("name, value, message", [
    ("USE_V1", "1", "USE_V1: not with experts on KT"),
    ("FORCE_TORCHRUN", "true", "FORCE_TORCHRUN: not with experts on KT"),
    ("WORLD_SIZE", "2", "WORLD_SIZE: training is one process"),
])
def test_several_processes_are_refused(installed, monkeypatch, capsys, name, value, message):
    installed()
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    monkeypatch.setenv(name, value)
    code, line = says(capsys, "train", "a.yaml")
    assert code == 4 and message in line


# --- with LLaMA-Factory ----------------------------------------------------------------------------------------------


@functools.cache
def interpreter():
    """(a Python that has LLaMA-Factory, or None; why not)."""
    named = os.environ.get("KT_LLAMAFACTORY_PYTHON")
    if not named and importlib.util.find_spec("llamafactory") is None:
        return None, "not run here: no LLaMA-Factory; KT_LLAMAFACTORY_PYTHON names no interpreter that has it"
    found = subprocess.run([named or sys.executable,
                            "-c", "import importlib.metadata as m; print(m.version('llamafactory'))"],
                           capture_output=True, text=True)
    if found.returncode:
        pytest.fail(f"KT_LLAMAFACTORY_PYTHON: {named} has no LLaMA-Factory: {found.stderr[-300:]}")
    return named or sys.executable, ""


class Factory:
    """Recipes in a folder, run by LLaMA-Factory itself and through the door."""

    def __init__(self, folder, python):
        self.folder, self.python = folder, python
        (folder / "stock" / "torchaudio").mkdir(parents=True)
        (folder / "stock" / "torchaudio" / "__init__.py").write_text("")  # what it imports and does not need
        lines = (ROOT / "demo" / "style_pirate.jsonl").read_text().splitlines(True)[:40]
        (folder / "pirate.jsonl").write_text("".join(lines))
        tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
                "system_tag": "system"}
        (folder / "dataset_info.json").write_text(json.dumps({"pirate": {
            "file_name": "pirate.jsonl", "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}}))

    def model(self, name):
        """The model with its other weights in f32: it loads what config.json says."""
        source, folder = trained_model(name), self.folder / name
        if source is None:
            pytest.skip(f"{name} (42 MiB) is not in the tree, and KT_TEST_DATA names no folder with it")
        if not folder.exists():
            folder.mkdir()
            for file in source.iterdir():
                (folder / file.name).symlink_to(file.resolve())
            config = json.loads((source / "config.json").read_text())
            (folder / "config.json").unlink()
            (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32", "torch_dtype": "float32"}))
        return folder

    def recipe(self, name, **keys):
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(keys))  # which is YAML
        return path

    def training(self, model, output, **more):
        return self.recipe(output, **{
            "model_name_or_path": str(self.model(model)), "stage": "sft", "do_train": True, "finetuning_type": "lora",
            "lora_rank": 8,
            "dataset": "pirate", "dataset_dir": str(self.folder), "template": "qwen", "cutoff_len": 96,
            "output_dir": str(self.folder / output), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
            "learning_rate": 1e-3,
            "max_steps": 5, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
            "preprocessing_num_workers": 1, **more})

    def environment(self, door):
        env = {name: value for name, value in os.environ.items() if name != "DISABLE_VERSION_CHECK"}
        path = [os.environ.get("PYTHONPATH", "")] + ([] if door else [str(self.folder / "stock")])
        return {**env, **ENGLISH, "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": os.pathsep.join(path)} | ({} if door else {"DISABLE_VERSION_CHECK": "1"})

    def command(self, door, words):
        return [self.python, "-m", "kt_kernel.llamafactory" if door else "llamafactory.cli", *map(str, words)]

    def run(self, door, *words, said="", code=0):
        done = subprocess.run(self.command(door, words), env=self.environment(door), input=said, capture_output=True,
                              text=True, cwd=self.folder, timeout=600)
        assert done.returncode == code, (done.stdout[-2000:], done.stderr[-3000:])
        return done

    def script(self, text, *words):
        done = subprocess.run([self.python, "-c", text, *map(str, words)], env=self.environment(True),
                              capture_output=True, text=True, cwd=self.folder, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def losses(self, output):
        lines = [json.loads(line) for line in (self.folder / output / "trainer_log.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="session")
def factory(tmp_path_factory):
    python, why = interpreter()
    if python is None:
        pytest.skip(why)
    return Factory(tmp_path_factory.mktemp("factory"), python)


ATTENTION = {"tiny-deepseekv3": "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj",
             "tiny-qwen3moe": "q_proj,k_proj,v_proj,o_proj"}


@pytest.mark.parametrize("name", ATTENTION)
def test_first_losses_are_those_without_kt(factory, name):
    """Attention alone has LoRA: LLaMA-Factory by itself can do that too, with the experts in torch."""
    more = {"lora_target": ATTENTION[name]}
    factory.run(False, "train", factory.training(name, f"stock-{name}", **more))
    done = factory.run(True, "train", factory.training(name, f"door-{name}", **more, use_kt=True, cpu_infer=2,
                                                       chunk_size=64, kt_config={
                                                           "kt_backend": "AMXBF16", "kt_tp_enabled": True,
                                                           "kt_share_backward_bb": True}))
    assert "note: kt_share_backward_bb: not needed" in done.stderr
    assert "computes experts twice" not in done.stderr  # its gradient checkpointing is on
    stock, door = factory.losses(f"stock-{name}"), factory.losses(f"door-{name}")
    assert len(stock) == 5 and stock[0] != stock[4]
    assert door == pytest.approx(stock, rel=1e-4)


# Logits of the adapter on stock transformers and PEFT, and on experts on KT.
STOCK_PEFT = """
import sys, torch, transformers, peft, kt_kernel.transformers
model, adapter = sys.argv[1:]
ids = torch.arange(48).view(2, 24) * 71 % 4000 + 3
def logits(base):
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(base, adapter).eval()(input_ids=ids).logits
stock = logits(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
ours = logits(kt_kernel.transformers.enable(model, trainable=True, activations="f32", dtype=torch.float32))
bare = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(input_ids=ids).logits
print(((ours - stock).norm() / stock.norm()).item(), ((stock - bare).norm() / bare.norm()).item())
"""


@pytest.fixture(scope="session")
def trained(factory):
    """An adapter with LoRA on attention, experts and MLPs."""
    done = factory.run(True, "train",
                       factory.training("tiny-deepseekv3", "all", lora_target="all", lora_dropout=0.05, cpu_infer=2))
    assert "lora_dropout: of attention's LoRA alone" in done.stderr
    return factory.folder / "all"


def test_an_adapter_with_experts_is_stock_pefts(factory, trained):
    config = json.loads((trained / "adapter_config.json").read_text())
    assert {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} <= set(config["target_parameters"])
    between, moved = map(float, factory.script(STOCK_PEFT, factory.model("tiny-deepseekv3"), trained).split()[-2:])
    assert between < 1e-4 < 1e-2 < moved
    assert json.loads((trained / "all_results.json").read_text())["train_loss"] > 0


def inference(factory, name, trained, **more):
    return factory.recipe(name, model_name_or_path=str(factory.model("tiny-deepseekv3")),
                          adapter_name_or_path=str(trained), template="qwen",
                          do_sample=False, max_new_tokens=24, infer_dtype="float32", **more)


def test_chat_answers_as_stock_does(factory, trained):
    """Stock merges the adapter into its experts; the tokens are the same."""
    said = "Tell me a bedtime story.\nexit\n"
    stock = factory.run(False, "chat", inference(factory, "stock-chat", trained), said=said)
    door = factory.run(True, "chat",
                       inference(factory, "door-chat", trained, infer_backend="ktransformers", cpu_infer=2), said=said)
    answers = [re.search(r"Assistant: (.+?)\n\nUser", done.stdout, re.S)[1] for done in (stock, door)]
    assert len(answers[0].split()) > 8 and answers[1] == answers[0]


def test_api_answers(factory, trained):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Tell me a bedtime story."}]}).encode()
    server = subprocess.Popen(factory.command(True, ["api", inference(factory, "api", trained)]), cwd=factory.folder,
                              env={**factory.environment(True), "API_HOST": "127.0.0.1", "API_PORT": str(port)},
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            assert server.poll() is None
            try:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body,
                                                 {"Content-Type": "application/json"})
                answer = json.load(urllib.request.urlopen(request, timeout=120))
                break
            except urllib.error.URLError:
                time.sleep(0.5)
        assert len(answer["choices"][0]["message"]["content"].split()) > 8
    finally:
        server.terminate()
        server.wait(60)


def test_bad_input_is_one_line_there_too(factory):
    path = factory.training("tiny-deepseekv3", "bad")
    for words, code, line in (([path, "kt_confg={}"], 2, "kt_confg: no such key; the nearest is kt_config"),
                              ([path, "lora_target=q_prj"], 2,
                               "lora_target: no module of DeepseekV3ForCausalLM is called q_prj"),
                              ([path, "kt_weight_path=nowhere"], 2, "nowhere: no such file or folder"),
                              ([factory.folder / "none.yaml"], 2, "none.yaml: no such file")):
        done = factory.run(True, "train", *words, code=code)
        assert line in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    if FULL:
        assert "4 adapters" in factory.run(True, "train", path, "adapter_name_or_path=[a,b,c,d]", code=2).stderr
