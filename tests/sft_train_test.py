"""The Python side of `kt sft train`: rows, targets, steps beside stock transformers and PEFT, files that are whole
whatever happens, resuming to the bit, TRL's losses. KT_PROGRAM names kt; torch and PEFT are needed, TRL for what is
TRL's."""
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, ROOT, kt

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="PEFT is not installed")
kt_kernel = pytest.importorskip("kt_kernel", reason="kt_kernel is not built for this Python")
from kt_kernel.sft.train import driver, encode, files, rows, targets
from kt_kernel.sft.train.events import Silence, TrainingError
from kt_kernel.sft.train.plan import Plan

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
FULL = bool(os.environ.get("KT_TEST_FULL"))
DEMO, PIRATE = ROOT / "demo" / "tiny-deepseekv3", ROOT / "demo" / "style_pirate.jsonl"
CHAT = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
        "observation_tag": "tool",
        "function_tag": "tool_calls", "system_tag": "system"}
HUMAN = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
         "observation_tag": "observation",
         "function_tag": "function_call", "system_tag": "system"}
BASE = f"""
model_name_or_path: {DEMO}
dataset: {PIRATE}
output_dir: out
cutoff_len: 96
max_samples: 24
mask_history: true
lora_target: all_attention, experts
per_device_train_batch_size: 2
learning_rate: 1.0e-3
max_steps: 4
logging_steps: 1
save_steps: 2
cpu_infer: 2
plot_loss: true
"""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(DEMO)


class Stop:
    asked = False


def stock_model(plan):
    """In place of driver.load_model where the extension has no training: the same model in torch alone."""
    return transformers.AutoModelForCausalLM.from_pretrained(plan.model["path"], dtype=torch.float32)


TRAINS = hasattr(kt_kernel.kt_kernel_ext.ExpertLayer, "train_forward")
needs_training = pytest.mark.skipif(not TRAINS, reason="this build of kt_kernel_ext has no training")
LOAD = driver.load_model if TRAINS else stock_model


class Runs:
    """Recipes in a folder, planned by kt and run here."""

    def __init__(self, folder):
        self.folder = folder

    def plan(self, *changes, more=""):
        (self.folder / "recipe.yaml").write_text(BASE + more)
        env = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"} | {"KT_HOME": str(self.folder / "home")}
        done = kt("sft", "train", "recipe.yaml", *changes, "--dry-run", "--json", cwd=self.folder, env=env)
        assert done.returncode == 0, done.stderr
        plan = json.loads(done.stdout)
        plan["output"] = str(self.folder / plan["output"])
        if plan["resume"]:
            plan["resume"] = str(self.folder / plan["resume"])
        return Plan(plan)

    def train(self, *changes, stop=None, more=""):
        told = Silence()
        plan = self.plan(*changes, more=more)
        told.interrupted = driver.train(plan, told, stop or Stop(), LOAD)
        told.plan, told.output = plan, pathlib.Path(plan.output)
        return told


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Runs(tmp_path)


def of(told, event):
    return [one for one in told.told if one["event"] == event]


def losses(told):
    return [one["loss"] for one in of(told, "step")]


# --- rows ------------------------------------------------------------------------------------------------------------

def read(tmp_path, raw, layout="messages", columns=None, tags=None, ranking=False, most=None, system=None,
         name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in raw) if name.endswith("l") else json.dumps(raw))
    dropped = rows.Dropped()
    source = dict(name="x", files=[str(path)], layout=layout, columns=columns or {"messages": "messages"},
                  tags=tags or CHAT, ranking=ranking, most=0)
    return rows.read_rows(source, most, system, dropped), list(dropped.lines())


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system"}


def test_alpaca(tmp_path):
    found, dropped = read(tmp_path, [
        {"instruction": "a", "input": "b", "output": "c"},
        {"instruction": "a", "output": "c", "history": [["x", "y"]], "system": "s"},
        {"instruction": "a", "output": ""}, {"instruction": "a", "output": "c", "history": [["x"]]},
        {"instruction": "", "output": "c"},
    ], "alpaca", ALPACA, {}, name="rows.json")
    assert found[0].messages == [user("a\nb"), assistant("c")]
    assert found[1].messages == [{"role": "system", "content": "s"}, user("x"), assistant("y"), user("a"),
                                 assistant("c")]
    assert len(found) == 3  # an empty prompt is one
    assert dropped == ["rows.json: a row dropped, without an assistant turn: 3",
                       "rows.json: a row dropped, its history is no list of pairs: 4"]


def test_sharegpt(tmp_path):
    def turns(*pairs):
        return {"conversations": [{"from": a, "value": b} for a, b in pairs], "tools": '[{"name": "f"}]'}

    found, dropped = read(tmp_path, [
        turns(("human", "a"), ("gpt", "b")),
        turns(("human", "a"), ("function_call", '{"name": "f", "arguments": {"x": 1}}'), ("observation", "7"),
              ("gpt", "b")),
        turns(("human", "a")), turns(("human", "a"), ("gpt", "b"), ("human", "c")), turns(("alien", "a"), ("gpt", "b")),
        {"conversations": []}, {"conversations": "a"}, 7,
    ], "sharegpt", {"messages": "conversations", "tools": "tools"}, HUMAN, system="be brief")
    assert [m["role"] for m in found[1].messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert (found[1].messages[2]["tool_calls"]
            == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}])
    assert found[0].tools == [{"name": "f"}] and len(found) == 2
    text = "\n".join(dropped)
    for phrase in ("without an assistant turn: 3", "the last turn is not the assistant's: 4",
                   "'alien', which no tag names: 5",
                   "2 rows dropped, without messages: 6, 7", "no object: 8"):
        assert phrase in text, (phrase, text)


def test_pairs_and_judged_answers(tmp_path):
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    found, dropped = read(tmp_path, [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]},
        {"prompt": "q", "chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        {"prompt": "q", "chosen": "a", "rejected": "a"}, {"prompt": "q", "chosen": "a", "rejected": " "},
        {"prompt": "q", "chosen": "a"},
    ], "pairs", columns, {}, ranking=True)
    assert (all((r.messages, r.chosen, r.rejected) == ([user("q")], [assistant("a")], [assistant("b")]) for r in found)
            and len(found) == 3)
    assert ("both answers the same: 4" in dropped[0] and "an answer is empty: 5" in dropped[1]
            and "without rejected: 6" in dropped[2])
    columns = {"prompt": "prompt", "completion": "completion", "kto_tag": "label"}
    found, dropped = read(tmp_path, [{"prompt": "q", "completion": "a", "label": True},
                                     {"prompt": "q", "completion": "a", "label": 1}],
                          "judged", columns, {})
    assert found[0].wanted is True and found[0].answer == [assistant("a")] and "neither true nor false: 2" in dropped[0]


def test_files_that_are_broken(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n{"messages": [}\n')
    source = dict(name="x", files=[str(tmp_path / "a.jsonl")], layout="messages", columns={"messages": "messages"},
                  tags=CHAT, ranking=False, most=0)
    with pytest.raises(TrainingError, match=r"a\.jsonl: line 2: "):
        rows.read_rows(source, None, None, rows.Dropped())
    (tmp_path / "a.jsonl").write_bytes(b'{"messages": "\xff"}\n')
    with pytest.raises(TrainingError, match=r"a\.jsonl: not UTF-8"):
        rows.read_rows(source, None, None, rows.Dropped())


# --- tokens ----------------------------------------------------------------------------------------------------------

def encoder(tokenizer, cutoff=512, history=False, prompt=False):
    return encode.Encoder(tokenizer, cutoff, history, prompt, None)


def row(*messages):
    return rows.Row("f", 1, list(messages))


def test_targets_are_answers_and_their_ends(tokenizer):
    talk = row(user("Hello there"), assistant("First words"), user("More"), assistant("Second words"))
    one = encoder(tokenizer).row(talk)
    learnt = tokenizer.decode([label for label in one.labels if label != -100])
    assert learnt == "First words<|im_end|>Second words<|im_end|>"
    assert all(label in (-100, token) for token, label in zip(one.ids, one.labels))
    last = encoder(tokenizer, history=True).row(talk)
    assert (tokenizer.decode([label for label in last.labels if label != -100]) == "Second words<|im_end|>"
            and last.ids == one.ids)
    whole = encoder(tokenizer, prompt=True).row(talk)
    assert whole.labels == whole.ids == one.ids
    assert tokenizer.decode(one.ids) + "\n" == tokenizer.apply_chat_template(talk.messages, tokenize=False)


def test_long_rows(tokenizer):
    talk = row(user("Tell me"), assistant("a long story " * 20))
    short = encoder(tokenizer, cutoff=40)
    one = short.row(talk)
    assert len(one.ids) == 40 and short.counts.cut == 1
    dropped = rows.Dropped()
    assert (encoder(tokenizer, cutoff=8).rows([talk], dropped) == []
            and "longer than cutoff_len 8 before its answer begins: 1" in next(dropped.lines()))


def test_templates(tokenizer):
    import copy

    without = copy.deepcopy(tokenizer)
    without.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises(TrainingError, match="has no generation prompt"):
        encoder(without).row(row(user("a"), assistant("b c d")))
    none = copy.deepcopy(tokenizer)
    none.chat_template = None
    with pytest.raises(TrainingError, match="no chat template"):
        encoder(none)
    # Earlier turns lose their thoughts when later ones follow, and a generation prompt may open a thought.
    thinks = copy.deepcopy(tokenizer)
    thinks.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}hmm {% endif "
        "%}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    one = encoder(thinks)
    found = one.row(row(user("a"), assistant("first"), user("b"), assistant("second")))
    assert (thinks.decode([label for label in found.labels if label != -100]) == "hmm second<|im_end|>"
            and one.counts.rewritten == 1)
    refuses = copy.deepcopy(tokenizer)
    refuses.chat_template = "{{ raise_exception('no system here') }}"
    assert "the chat template refuses it (no system here" in encoder(refuses).row(row(user("a"), assistant("b")))
    # Without an end of the turn the answer would never end.
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}: {% endif %}{% endfor %}"
    assert encoder(bare).row(row(user("a"), assistant("b"))).labels[-1] == tokenizer.eos_token_id


def test_packing():
    lengths = [30, 50, 20, 90, 10]
    packed = encode.pack([encode.Encoded([n] * n, [n] * n) for n in lengths], 100, True)
    assert sorted(len(p.ids) for p in packed) == [100, 100] and [p.starts for p in packed] == [[0, 90], [0, 50, 80]]
    assert sum(label == -100 for p in packed for label in p.labels) == len(lengths)
    items = [p.item() for p in packed] + [encode.Encoded([1], [1], [0]).item()]
    batch = encode.Batches(0)(items)
    assert "attention_mask" not in batch and batch["position_ids"].shape == (3, 100)
    assert (batch["position_ids"][0, 88:92].tolist() == [88, 89, 0, 1]
            and batch["position_ids"][2, :3].tolist() == [0, 0, 1])
    plain = encode.Batches(0)([encode.Encoded([1, 2], [1, 2]).item(), encode.Encoded([1], [1]).item()])
    assert plain["attention_mask"].tolist() == [[1, 1], [1, 0]] and plain["labels"].tolist() == [[1, 2], [1, -100]]


def test_packed_conversations_do_not_see_each_other(tokenizer):
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    model.config.use_cache = False
    each = [encoder(tokenizer).row(row(user(a), assistant(b)))
            for a, b in (("Hello", "A dog ran home."), ("Who?", "The cat."))]
    batch = encode.Batches(0)([one.item() for one in encode.pack(each, 128, True)])
    with torch.no_grad():
        together = model(**batch).logits[0]
        for one, start in zip(each, (0, len(each[0].ids))):
            alone = model(input_ids=torch.tensor([one.ids])).logits[0]
            assert torch.allclose(together[start : start + len(one.ids)], alone, atol=2e-4)


# --- what is trained -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("target, modules, parameters", [
    ("all_attention", ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"], None),
    ("experts", [], ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]),
    ("o_proj, down_proj", ["o_proj"],
     ["mlp.down_proj.weight", "mlp.experts.down_proj", "shared_experts.down_proj.weight"]),
    ("layers.0.self_attn.o_proj", ["model.layers.0.self_attn.o_proj"], None),
])
def test_targets(runs, target, modules, parameters):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(DEMO))
    plan = Plan({**runs.plan(f"lora_target='{target}'").parts})
    config = targets.lora_config(model, plan)
    assert sorted(config.target_modules) == modules
    assert (sorted(config.target_parameters) if config.target_parameters else None) == parameters


def test_counts_are_the_plans(runs):
    """What kt counts from headers is what PEFT makes, for every part."""
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    plan = runs.plan("lora_target=all")
    wrapped = peft.get_peft_model(model, targets.lora_config(model, plan))
    assert targets.trainable_by_part(wrapped) == {name: part["trainable"] for name, part in plan.lora["parts"].items()}


# --- steps -----------------------------------------------------------------------------------------------------------

def stock_losses(folder, steps=4, **more):
    """transformers' Trainer and PEFT, with rows encoded here."""
    from peft import LoraConfig, get_peft_model

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    examples = []
    for line in PIRATE.read_text().splitlines()[:24]:
        messages = json.loads(line)["messages"]
        head = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        a = tokenizer(head, add_special_tokens=False)["input_ids"]
        b = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("\n"),
                      add_special_tokens=False)["input_ids"]
        examples.append({"input_ids": b[:96], "labels": ([-100] * len(a) + b[len(a):])[:96]})

    def collate(batch):
        width = max(len(one["input_ids"]) for one in batch)
        pad = {"input_ids": 0, "labels": -100}
        out = {k: torch.tensor([one[k] + [pad[k]] * (width - len(one[k])) for one in batch]) for k in pad}
        return {**out, "attention_mask": torch.tensor([[1] * len(one["input_ids"])
                                                       + [0] * (width - len(one["input_ids"])) for one in batch])}

    transformers.set_seed(42)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], task_type="CAUSAL_LM"))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "stock"), per_device_train_batch_size=2, max_steps=steps, learning_rate=1e-3,
        logging_steps=1,
        report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, seed=42,
        remove_unused_columns=False, **more)
    trainer = transformers.Trainer(model, args=arguments, train_dataset=examples, data_collator=collate)
    trainer.train()
    return [float(log["loss"]) for log in trainer.state.log_history if "loss" in log]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Four steps with checkpoints at two and four."""
    return Runs(tmp_path_factory.mktemp("run")).train()


def test_losses_are_stock_trainers(run, tmp_path):
    stock = stock_losses(tmp_path)
    assert len(losses(run)) == 4
    assert losses(run) == pytest.approx(stock, rel=1e-4)
    # Targets are not all rows: the comparison would not see it if nothing were trained.
    assert abs(stock[0] - stock[3]) > 0.01


@pytest.mark.skipif(not FULL, reason="KT_TEST_FULL is not set: accumulation beside stock")
def test_accumulated_losses_are_stock_trainers(runs):
    ours = runs.train("gradient_accumulation_steps=4", "disable_gradient_checkpointing=true", "save_strategy=no")
    assert losses(ours) == pytest.approx(stock_losses(runs.folder, gradient_accumulation_steps=4), rel=1e-4)


def test_files(run):
    names = {path.name for path in run.output.iterdir()}
    assert names >= {"adapter_model.safetensors", "adapter_config.json", "trainer_log.jsonl", "trainer_state.json",
                     "train_results.json", "all_results.json", "checkpoint-2", "checkpoint-4", "training_loss.svg",
                     "README.md", "tokenizer.json", "chat_template.jinja"}
    assert not [name for name in names if name.startswith(".")]
    log = [json.loads(line) for line in (run.output / "trainer_log.jsonl").read_text().splitlines()]
    assert [line["current_steps"] for line in log] == [1, 2, 3, 4] and log[0]["total_steps"] == 4
    assert ({"loss", "lr", "epoch", "percentage", "elapsed_time", "remaining_time"} <= set(log[0])
            and log[3]["percentage"] == 100)
    results = json.loads((run.output / "train_results.json").read_text())
    assert results["train_loss"] == pytest.approx(sum(losses(run)) / 4, rel=1e-5)
    assert json.loads((run.output / "all_results.json").read_text()) == results
    state = json.loads((run.output / "trainer_state.json").read_text())
    assert state["global_step"] == 4 and len(state["log_history"]) == 5
    svg = (run.output / "training_loss.svg").read_text()
    assert svg.startswith("<svg") and svg.count("<polyline") == 2
    ready, = of(run, "ready")
    assert ready["trainable"] == 740864 and ready["rows"] == 24 and ready["steps"] == 4
    assert all("longer than cutoff_len" in note["text"] for note in of(run, "note"))
    done, = of(run, "done")
    assert done["step"] == 4 and done["tokens_per_s"] > 0


def test_the_adapter_is_stock_pefts(run):
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    stock = peft.PeftModel.from_pretrained(model, run.output).eval()
    first = json.loads(PIRATE.read_text().splitlines()[0])["messages"]
    ids = transformers.AutoTokenizer.from_pretrained(DEMO).apply_chat_template(first, return_tensors="pt",
                                                                               return_dict=True)["input_ids"][:, :96]
    with torch.no_grad():
        tuned = float(stock(input_ids=ids, labels=ids).loss)
        with stock.disable_adapter():
            assert tuned < float(stock(input_ids=ids, labels=ids).loss) - 0.01


def test_resuming_is_exact(run, runs):
    """The second half of a run, from its checkpoint, to the bit."""
    import shutil

    shutil.copytree(run.output, runs.folder / "out")
    shutil.rmtree(runs.folder / "out" / "checkpoint-4")
    again = runs.train("lora_dropout=0")
    assert again.plan.resume and again.plan.resume.endswith("checkpoint-2")
    assert [one["step"] for one in of(again, "step")] == [3, 4]
    assert losses(again) == losses(run)[2:]
    for name in ("adapter_model.safetensors", "checkpoint-4/adapter_model.safetensors"):
        assert (again.output / name).read_bytes() == (run.output / name).read_bytes(), name
    log = [json.loads(line)["current_steps"] for line in (again.output / "trainer_log.jsonl").read_text().splitlines()]
    assert log == [1, 2, 3, 4]


@pytest.mark.skipif(not FULL, reason="KT_TEST_FULL is not set: every step of a run")
def test_resuming_at_any_step_is_exact(runs):
    import shutil

    whole = runs.train("output_dir=whole", "save_steps=1", "max_steps=6")
    for step in range(1, 6):
        rest = runs.train("save_steps=1", "max_steps=6", f"resume_from_checkpoint=whole/checkpoint-{step}")
        assert losses(rest) == losses(whole)[step:]
        assert ((rest.output / "adapter_model.safetensors").read_bytes()
                == (whole.output / "adapter_model.safetensors").read_bytes())
        shutil.rmtree(rest.output)


def test_resuming_with_dropout_is_exact(runs):
    whole = runs.train("lora_dropout=0.1", "output_dir=whole", "lora_target=all_attention")
    import shutil

    shutil.copytree(whole.output, runs.folder / "half")
    shutil.rmtree(runs.folder / "half" / "checkpoint-4")
    half = runs.train("lora_dropout=0.1", "output_dir=half", "lora_target=all_attention")
    assert losses(half) == losses(whole)[2:]
    assert ((half.output / "adapter_model.safetensors").read_bytes()
            == (whole.output / "adapter_model.safetensors").read_bytes())


def test_going_on_with_an_adapter(run, runs):
    more = runs.train(f"adapter_name_or_path={run.output}", "max_steps=1")
    assert of(more, "ready")[0]["trainable"] == 740864
    # It has learnt these rows already.
    assert losses(more)[0] < losses(run)[0] - 0.02


def test_interrupts(runs):
    class AfterOne(Stop):
        pass

    stop = AfterOne()
    told = Silence()
    send = told.send
    told.send = lambda event, **facts: (send(event, **facts), setattr(stop, "asked", stop.asked or event == "step"))
    plan = runs.plan("save_steps=100")
    assert driver.train(plan, told, stop, LOAD)
    assert (of(told, "interrupted")[0]["path"].endswith("checkpoint-2")
            or of(told, "interrupted")[0]["path"].endswith("checkpoint-1"))
    rest = runs.train("save_steps=100")
    assert rest.plan.resume and of(rest, "done")[0]["step"] == 4


def test_evaluations(runs):
    told = runs.train("val_size=4", "eval_strategy=steps", "eval_steps=1", "max_steps=2", "compute_accuracy=true",
                      "save_strategy=no")
    ready, = of(told, "ready")
    assert (ready["rows"], ready["eval_rows"]) == (20, 4)
    found = of(told, "evaluation")
    assert [one["step"] for one in found][:2] == [1, 2] and all(0 < one["eval_accuracy"] < 1 for one in found)
    assert (json.loads((told.output / "eval_results.json").read_text())["eval_loss"]
            == pytest.approx(found[-1]["eval_loss"]))


def test_packed_rows(runs):
    told = runs.train("neat_packing=true", "cutoff_len=192", "max_steps=2", "save_strategy=no")
    assert len(losses(told)) == 2


def test_beginning_anew(runs):
    """What an earlier run left is nothing to go on from."""
    for number in (2, 900):
        (runs.folder / "out" / f"checkpoint-{number}").mkdir(parents=True)
    told = runs.train("overwrite_output_dir=true", "max_steps=1", "save_steps=1", "save_total_limit=1")
    assert [path.name for path in told.output.glob("checkpoint-*")] == ["checkpoint-1"]
    assert any("checkpoint-2, checkpoint-900" in one["text"] for one in of(told, "note"))


def test_limits_of_checkpoints(runs):
    told = runs.train("save_steps=1", "save_total_limit=2", "save_only_model=true")
    assert sorted(path.name for path in told.output.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    assert not (told.output / "checkpoint-4" / "optimizer.pt").exists()


# --- faults ----------------------------------------------------------------------------------------------------------

def poisoned(monkeypatch, at_call, index):
    """The gradient of layer 2's gate_up B gets a value that is no number, once."""
    make = driver._trainer

    def trainer(*args):
        made = make(*args)
        name = next(n for n, _ in made.model.named_parameters() if "layers.2.mlp.experts.base_layer.lora_B" in n)
        calls = [0]

        def poison(grad):
            calls[0] += 1
            if calls[0] == at_call:
                grad = grad.clone()
                grad[index] = float("nan")
            return grad

        dict(made.model.named_parameters())[name].register_hook(poison)
        return made

    monkeypatch.setattr(driver, "_trainer", trainer)


def test_a_gradient_that_is_no_number(runs, monkeypatch):
    poisoned(monkeypatch, 3, (7, 2 * 16 + 5))
    told = Silence()
    with pytest.raises(TrainingError, match=r"step 3: a gradient is nan \(layer 2, experts' gate_up_proj, B, "
                                            r"expert 5\); nothing of it"):
        driver.train(runs.plan(), told, Stop(), LOAD)
    assert [path.name for path in (runs.folder / "out").glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_step_that_is_left_out(run, runs, monkeypatch):
    poisoned(monkeypatch, 3, (7, 2 * 16 + 5))
    told = runs.train("on_nan=skip", "save_strategy=no")
    assert len(losses(told)) == 4 and losses(told)[:3] == losses(run)[:3]
    assert any("step 3 is left out" in one["text"] for one in of(told, "note"))


def test_a_full_disk(runs, monkeypatch):
    """Nothing is left of a checkpoint that could not be written; the one before is whole."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    saved = driver.Watcher.saved

    def then_full(watcher, path):
        saved(watcher, path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))

    monkeypatch.setattr(driver.Watcher, "saved", then_full)
    try:
        with pytest.raises(TrainingError, match="checkpoint|run: no room to write it") as caught:
            driver.train(runs.plan(), Silence(), Stop(), LOAD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.kind == "memory"
    assert sorted(path.name for path in (runs.folder / "out").iterdir() if "checkpoint" in path.name
                  or path.name.startswith(".")) == ["checkpoint-2"]
    check_whole(runs.folder / "out" / "checkpoint-2")


@needs_training
def test_a_disk_that_gets_full(runs):
    """A small one, whose room ends while the second checkpoint is written: one line, exit code 3, and the first one is
    whole."""
    disk = runs.folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", disk], capture_output=True).returncode != 0:
        pytest.skip("a file system of its own cannot be mounted here")
    try:
        (runs.folder / "recipe.yaml").write_text(BASE)
        env = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
        env |= {"KT_PYTHON": sys.executable, "KT_HOME": str(runs.folder / "home"), "OMP_NUM_THREADS": "1"}
        words = ("sft", "train", "recipe.yaml", "output_dir=disk/out", "save_steps=1", "max_steps=3")
        done = kt(*words, cwd=runs.folder, env=env)
        assert done.returncode == 3, done.stderr
        *_, line = done.stderr.splitlines()
        assert line.startswith("kt: disk/out/run: no room to write it") and "Traceback" not in done.stderr, done.stderr
        assert [path.name for path in (disk / "out").glob("checkpoint-*")] == ["checkpoint-1"]
        check_whole(disk / "out" / "checkpoint-1")
        assert not list((disk / "out").glob(".saving*"))
        # And with room again it goes on.
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        done = kt(*words, cwd=runs.folder, env=env)
        assert done.returncode == 0 and "goes on from disk/out/checkpoint-1" in done.stderr, done.stderr
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_whoever_writes(runs, monkeypatch, capfd):
    """The log of a run, say: the same line, and no traceback."""
    import errno

    from kt_kernel.sft.train import command

    (runs.folder / "out").mkdir()
    (runs.folder / "plan.json").write_text(json.dumps(runs.plan().parts))

    def write(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "out/trainer_log.jsonl")

    told = Silence()
    monkeypatch.setattr(command, "Events", lambda _: told)
    monkeypatch.setattr(command, "_catch_signals", Stop)
    monkeypatch.setattr(driver, "train", write)
    assert command.main(["--plan", str(runs.folder / "plan.json")]) == 3
    failed, = of(told, "error")
    assert (failed["kind"] == "memory" and "no room to write it" in failed["message"]
            and "trainer_log.jsonl" in failed["message"])
    assert "Traceback" not in capfd.readouterr().err


def check_whole(checkpoint):
    from safetensors.torch import load_file

    assert load_file(checkpoint / "adapter_model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.load(checkpoint / name, weights_only=False)
    json.loads((checkpoint / "trainer_state.json").read_text())


KILLED = """
import os, pathlib, signal, sys
sys.path.insert(0, sys.argv[4])
from kt_kernel.sft.train import files
output, wanted, limit = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
count = 0
def counted(call):
    def here(*args, **kwargs):
        global count
        count += 1
        if count == wanted:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return here
for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
    setattr(os, name, counted(getattr(os, name)))
def write(folder):
    (folder / "checkpoint-3").mkdir()
    for name in ("a", "b", "c"):
        (folder / "checkpoint-3" / name).write_text("new " + name)
folder = files.staged(output, "run", write)
files.put_folder(folder / "checkpoint-3", output / "checkpoint-3")
files.keep_last(output, limit)
print(count)
"""


@pytest.mark.parametrize("old", [False, True], ids=["new", "over-an-old-one"])
def test_kills_while_a_checkpoint_is_put(tmp_path, old):
    """At every call that changes the disk: each checkpoint is there as a whole or not at all."""
    import shutil

    def prepare():
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        for number in (1, 2, *([3] if old else [])):
            (tmp_path / "out" / f"checkpoint-{number}").mkdir(parents=True)
            for name in "abc":
                (tmp_path / "out" / f"checkpoint-{number}" / name).write_text(f"old {name}")

    def run(wanted):
        script = tmp_path / "killed.py"
        script.write_text(KILLED)
        return subprocess.run([sys.executable, "-S", script, tmp_path / "out", str(wanted), "2",
                               str(stand_in(tmp_path))], capture_output=True, text=True)

    prepare()
    calls = int(run(0).stdout)
    assert calls > 8
    seen = set()
    for wanted in range(1, calls + 1):
        prepare()
        assert run(wanted).returncode == -signal.SIGKILL
        files.clean(tmp_path / "out")
        found = {p.name: sorted(f.read_text() for f in p.iterdir()) for p in (tmp_path / "out").glob("checkpoint-*")}
        whole = [[f"{age} {name}" for name in "abc"] for age in ("old", "new")]
        assert all(contents in whole for contents in found.values()), (wanted, found)
        assert "checkpoint-2" in found and (not old or "checkpoint-3" in found)
        assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]
        seen.add(tuple(sorted(found)))
    assert len(seen) >= 2


def stand_in(tmp_path):
    """kt_kernel without what it imports: files.py needs the standard library alone, and a process starts in
    milliseconds."""
    place = tmp_path / "alone" / "kt_kernel"
    place.mkdir(parents=True, exist_ok=True)
    (place / "__init__.py").write_text(f"__path__.append({str(ROOT / 'python' / 'kt_kernel')!r})\n")
    return place.parent


@needs_training
@pytest.mark.skipif(not FULL, reason="KT_TEST_FULL is not set: runs that are killed at random moments")
def test_kills_at_random_moments(runs):
    """Each time the last checkpoint is whole and goes on; what comes out in the end is what an undisturbed run
    gives."""
    import random
    import time

    undisturbed = runs.train("output_dir=undisturbed", "save_strategy=no", "max_steps=40", "num_train_epochs=10")
    plan = runs.plan("save_steps=1", "max_steps=40", "num_train_epochs=10")
    (runs.folder / "plan.json").write_text(json.dumps(plan.parts))
    draw = random.Random(7)
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-m", "kt_kernel.sft",
                                    "--plan", runs.folder / "plan.json", "--events"],
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for line in process.stdout:
            if json.loads(line)["event"] == "saved":
                break
        time.sleep(draw.uniform(0, 3))
        process.kill()
        process.wait()
        made = files.checkpoints(runs.folder / "out")
        assert made
        for _, checkpoint in made:
            check_whole(checkpoint)
        plan.parts["resume"] = str(made[-1][1])
        (runs.folder / "plan.json").write_text(json.dumps(plan.parts))
    done = subprocess.run([sys.executable, "-m", "kt_kernel.sft", "--plan", runs.folder / "plan.json", "--events"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    name = "adapter_model.safetensors"
    assert (runs.folder / "out" / name).read_bytes() == (undisturbed.output / name).read_bytes()


@pytest.mark.parametrize("raw, message", [
    ([{"messages": [user("a")]}], "no row is left to train on"),
    ([{"messages": [user("a " * 200), assistant("b")]}], "no row is left"),
])
def test_nothing_to_train_on(runs, raw, message):
    (runs.folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in raw))
    with pytest.raises(TrainingError, match=message):
        driver.train(runs.plan("dataset=rows.jsonl"), Silence(), Stop(), LOAD)


@needs_training
def test_as_a_program(runs):
    """kt starts Python, passes its words on, and Ctrl-C on to it."""
    (runs.folder / "recipe.yaml").write_text(BASE)
    env = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
    env |= {"KT_PYTHON": sys.executable, "KT_HOME": str(runs.folder / "home"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([KT, "sft", "train", "recipe.yaml", "max_steps=200", "num_train_epochs=100"],
                               cwd=runs.folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for line in process.stdout:
        if line.startswith("step 1/200"):
            process.send_signal(signal.SIGINT)
            break
    rest, errors = process.communicate(timeout=300)
    assert process.returncode == 130, (rest, errors)
    made = files.checkpoints(runs.folder / "out")
    assert made and f"interrupted; saved out/checkpoint-{made[-1][0]}" in errors
    check_whole(made[-1][1])
    # And to the end from there.
    steps = made[-1][0] + 1
    done = kt("sft", "train", "recipe.yaml", f"max_steps={steps}", cwd=runs.folder, env=env)
    assert done.returncode == 0, done.stderr
    assert f"goes on from out/checkpoint-{made[-1][0]}" in done.stderr and f"step {steps}/{steps}  loss" in done.stdout
    assert (runs.folder / "out" / "adapter_model.safetensors").exists()


# --- preferences -----------------------------------------------------------------------------------------------------

@pytest.fixture
def preferences(runs):
    pytest.importorskip("trl", reason="TRL is not installed")
    pytest.importorskip("datasets", reason="datasets is not installed")
    stories = [json.loads(line)["messages"] for line in PIRATE.read_text().splitlines()[:12]]
    with open(runs.folder / "pairs.jsonl", "w") as pairs, open(runs.folder / "judged.jsonl", "w") as judged:
        for at, (talk, other) in enumerate(zip(stories, stories[1:])):
            pairs.write(json.dumps({"prompt": talk[:-1], "chosen": talk[-1:], "rejected": other[-1:]}) + "\n")
            judged.write(json.dumps({"prompt": talk[:-1], "completion": (talk if at % 2 else other)[-1:],
                                     "label": bool(at % 2)}) + "\n")
    return runs


@pytest.mark.parametrize("stage, loss, first", [
    ("dpo", "sigmoid", 0.693147), ("dpo", "orpo", None), ("dpo", "simpo", None), ("kto", None, 0.5)])
def test_preferences(preferences, stage, loss, first):
    told = preferences.train(f"stage={stage}", f"dataset={'pairs' if stage == 'dpo' else 'judged'}.jsonl",
                             "max_steps=2", "save_steps=1", *([f"pref_loss={loss}"] if loss else []), "lora_target=all")
    found = losses(told)
    assert len(found) == 2 and of(told, "ready")[0]["trainable"] == 805376
    if first:
        assert found[0] == pytest.approx(first, abs=2e-5)
    assert ((told.output / "adapter_model.safetensors").exists()
            and (told.output / "checkpoint-2" / "optimizer.pt").exists())


def test_an_adapter_is_its_own_reference(preferences, run):
    """As TRL does it: what is trained on begins as its own reference, so that the first loss is that of no
    difference."""
    told = preferences.train("stage=dpo", "dataset=pairs.jsonl", f"adapter_name_or_path={run.output}", "max_steps=1",
                             "save_strategy=no")
    assert losses(told)[0] == pytest.approx(0.693147, abs=2e-5)
    names = json.loads((told.output / "adapter_config.json").read_text())
    assert names["peft_type"] == "LORA"
