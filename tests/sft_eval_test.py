"""`kt sft eval`: rows as training reads them, answers, losses and choices beside stock transformers, and scores beside
sacrebleu and rouge-score. KT_PROGRAM names kt."""
import importlib
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, ROOT, error_line, kt

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
DEMO = ROOT / "demo" / "tiny-deepseekv3"
BASE = "model_name_or_path: demo\noutput_dir: out\ncpu_infer: 2\ncutoff_len: 512\n"


def training(name):
    """A module of kt_kernel.sft.train, whose package would want the extension."""
    package = types.ModuleType("sft_train_sources")
    package.__path__ = [str(ROOT / "python" / "kt_kernel" / "sft" / "train")]
    sys.modules.setdefault("sft_train_sources", package)
    return importlib.import_module(f"sft_train_sources.{name}")


def chat(*words):
    return {"messages": [{"role": role, "content": said} for role, said in zip(("user", "assistant") * 8, words)]}


class Place:
    def __init__(self, folder):
        self.folder = folder
        self.env = {key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "KT_PYTHON")}
        self.env |= {"KT_LANG": "en", "KT_HOME": str(folder / "home"), "KT_DEMO_MODEL": str(DEMO),
                     "HF_HOME": str(folder / "hf")}

    def write(self, name, rows):
        content = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (self.folder / name).write_text(content)
        return name

    def eval(self, *words, base=BASE, **more):
        self.write("recipe.yaml", base)
        return kt("sft", "eval", *words, cwd=self.folder, env=self.env, **more)

    def json(self, *words, **more):
        done = self.eval("recipe.yaml", *words, "--json", **more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def refused(self, *words, code=2, **more):
        done = self.eval(*words, **more)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return error_line(done.stderr)

    def predictions(self):
        return [json.loads(line)
                for line in (self.folder / "out" / "generated_predictions.jsonl").read_text().splitlines()]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.fixture
def tokenizer():
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model():
    torch = pytest.importorskip("torch")
    return pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


# --- rows ------------------------------------------------------------------------------------------------------------

STORIES = [chat("You are a pirate. Tell me a bedtime story.",
                "Avast, ye landlubbers! Long ago, there was a small lad."),
           chat("Tell me a story about a dog.", "Once upon a time there was a dog named Max. He liked to run."),
           chat("Hi", "Hello \u4f60\u597d \U0001f600!"),
           chat("One?", "Yes.", "Two?", "No, it was the third one, said the cat."), chat("Tell", "x")]
GPT = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
CALL = {"name": "f", "arguments": {"a": 1}}
ALPACA = [
    {"instruction": "Say", "input": "it", "output": "it"}, {"instruction": "Say", "output": "so"},
    {"instruction": "", "input": "only", "output": "q"},
    {"instruction": "a", "output": ""}, {"instruction": "a", "output": " \n\u3000"},
    {"instruction": "a", "output": None}, {"instruction": "a", "output": 7},
    {"instruction": 3, "output": "b"}, {"instruction": "a", "output": "b", "history": [["1", "2"], ["3", "4"]]},
    {"instruction": "a", "output": "b", "history": [["1"]]}, {"instruction": "a", "output": "b", "history": "no"},
    {"instruction": "a", "output": "b", "history": []}, {"instruction": "a", "output": "b", "system": "Be."},
    {"instruction": "a", "output": "", "history": [["1", "2"]]}, {"instruction": "a", "output": "b", "tools": "[]"},
    {"instruction": "a", "output": "b", "tools": "{"}, {"instruction": "a", "output": "b", "tools": "  "}, [1],
    "text", None, 5,
    {"output": "b"}, {"instruction": "\U0001f600 \u4f60\u597d", "output": "\u00e9\u00e8 \u4e16\u754c"},
]
SHAREGPT = [
    {"conversations": GPT}, {"conversations": GPT, "system": "S"}, {"conversations": []},
    {"conversations": None}, {"other": 1},
    {"conversations": GPT + GPT}, {"conversations": GPT[:1]}, {"conversations": GPT + GPT[:1]},
    {"conversations": [{"from": "nobody", "value": "z"}]},
    {"conversations": [{"from": "it's", "value": "z"}]}, {"conversations": [{"value": "z"}]}, {"conversations": [5]},
    {"conversations": [{"from": "human", "value": None}, GPT[1]]},
    {"conversations": [GPT[0], {"from": "gpt", "value": "  "}]},
    {"conversations": [GPT[0], {"from": "function_call", "value": json.dumps(CALL)},
                       {"from": "observation", "value": "1"}, GPT[1]]},
    {"conversations": [GPT[0], {"from": "function_call", "value": "no json"}, GPT[1]]},
    {"conversations": [GPT[0], {"from": "function_call", "value": None}, GPT[1]]},
    {"conversations": [GPT[0], {"from": "function_call", "value": json.dumps([CALL, {"name": "g"}])}, GPT[1]]},
    {"conversations": [{"from": "system", "value": "s"}, {"from": "user", "value": "u"},
                       {"from": "assistant", "value": "v"}]},
]
MESSAGES = [
    chat("a", "b"), chat("a", "b", "c", "d"), chat("a", ""), chat("a"), {"messages": "no"},
    {"messages": [{"role": "developer", "content": "d"}, *chat("a", "b")["messages"]]},
    {"messages": [{"role": "user", "content": ["part"]}, {"role": "assistant", "content": "b"}]},
    {"messages": [{"role": "user", "content": " a "}, {"role": "assistant", "content": "  padded  \n"}]},
    chat("long " * 600, "b"), chat("a", "long " * 600),
]
TAGGED = [{"talk": [{"who": "U", "said": "hi"}, {"who": "B", "said": "ho"}], "sys": "T"},
          {"talk": [{"who": "X", "said": "hi"}]}]
INFO = {
    "alp": {"file_name": "alp.json"}, "shr": {"file_name": "shr.jsonl", "formatting": "sharegpt",
                                              "columns": {"messages": "conversations", "system": "system"}},
    "tag": {"file_name": "tag.jsonl", "formatting": "sharegpt", "num_samples": 1,
            "columns": {"messages": "talk", "system": "sys"},
            "tags": {"role_tag": "who", "content_tag": "said", "user_tag": "U", "assistant_tag": "B"}},
    "col": {"file_name": "col.json",
            "columns": {"prompt": "q", "response": "a", "system": "s", "history": "h", "query": None, "tools": "t"}},
}


def comparable(lines):
    return sorted(re.sub(r"dropped, [\w ]+ and no object", "dropped, KIND and no object", line) for line in lines
                  if " dropped, " in line)


@pytest.mark.parametrize("system", [None, "You are a pirate."])
@pytest.mark.parametrize("names", ["alp,shr,tag,col", "messages.jsonl", "whole.json", "lines.json"])
def test_rows_are_those_of_training(place, tokenizer, names, system):
    """Prompt, label and their tokens of every row, and why others are dropped: as kt_kernel.sft.train reads and encodes
    them."""
    data = place.folder / "data"
    data.mkdir()
    (data / "alp.json").write_text("\ufeff" + json.dumps(ALPACA))
    (data / "shr.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in SHAREGPT))
    (data / "tag.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TAGGED))
    (data / "col.json").write_text(json.dumps([{"q": "Q", "a": "A", "s": "S", "h": [["1", "2"]],
                                                "t": "[{\"type\": \"function\"}]"}, {"q": "Q", "a": "A"}]))
    (data / "dataset_info.json").write_text(json.dumps(INFO))
    place.write("messages.jsonl", MESSAGES)
    place.write("whole.json", json.dumps(MESSAGES[0], indent=2))
    place.write("lines.json", MESSAGES[:3])
    more = [f"default_system={system}"] if system else []
    plan = place.json(f"eval_dataset={names}", *more, "--dry-run", "--preview", "1000")

    rows_of, encode = training("rows"), training("encode")
    place.write("train.yaml", BASE + "per_device_train_batch_size: 1\n")
    done = kt("sft", "train", "train.yaml", f"dataset={names}", "--dry-run", "--json", cwd=place.folder, env=place.env)
    assert done.returncode == 0, done.stderr
    dropped, rows = rows_of.Dropped(), []
    for source in json.loads(done.stdout)["data"]["train"]:
        source["files"] = [str(place.folder / file) for file in source["files"]]
        rows += rows_of.read_rows(source, None, system, dropped)
    encoder = encode.Encoder(tokenizer, 512, True, False, None)
    expected, unfit = [], rows_of.Dropped()
    for row in rows:
        encoded = encoder.row(row)
        if isinstance(encoded, str):
            unfit.add(row.file, row.number, encoded)
            continue
        prompt = tokenizer.apply_chat_template(row.messages[:-1], tools=row.tools, tokenize=False,
                                               add_generation_prompt=True)
        expected.append((pathlib.Path(row.file).name, row.number, prompt, row.messages[-1]["content"],
                         len(tokenizer(prompt, add_special_tokens=False)["input_ids"]),
                         sum(label != encode.IGNORED for label in encoded.labels)))
    ours = [(pathlib.Path(one["file"]).name, one["row"], one["prompt"], one["label"], one["prompt_tokens"],
             one["label_tokens"]) for one in plan["preview"]]
    assert ours == expected and len(ours) > 0
    assert comparable(plan["notes"]) == comparable([*dropped.lines(), *unfit.lines()])
    assert plan["dropped"] == len(dropped) + len(unfit)


TEMPLATES = {
    "thinks": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
              "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "no end": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
              "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
    "spaces": "{{ bos_token }}{% for m in messages %} {{ m.role }} {{ m.content | trim }}{% endfor %}{% if "
              "add_generation_prompt %} assistant{% endif %}",
    "refuses": "{% for m in messages %}{% if m.content == 'Tell' %}{{ raise_exception('no telling') }}{% endif "
               "%}<|im_start|>{{ m.role }}\n"
               "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
               "{% endif %}",
    "changes": "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
               "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "no prompt": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_other_habits(place, tokenizer, name):
    """Where the answer begins, by tokens, and which rows are dropped."""
    model = place.folder / "model"
    model.mkdir()
    for path in DEMO.iterdir():
        if path.name != "tokenizer_config.json":
            (model / path.name).symlink_to(path)
    config = json.loads((DEMO / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATES[name]}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    place.write("rows.jsonl", STORIES)
    words = ["recipe.yaml", "eval_dataset=rows.jsonl", f"model_name_or_path={model}", "--dry-run", "--preview", "9"]
    if name in ("no prompt", "changes"):
        line = place.refused(*words)
        assert ("no generation prompt" if name == "no prompt" else "no row is left to evaluate") in line
        return
    plan = place.json(*words[1:])
    encode, rows_of, tokenizer.chat_template = training("encode"), training("rows"), TEMPLATES[name]
    encoder = encode.Encoder(tokenizer, 512, True, False, None)
    encoded = [encoder.row(rows_of.Row("", 0, row["messages"])) for row in STORIES]
    expected = [sum(label != -100 for label in one.labels) for one in encoded if not isinstance(one, str)]
    assert [one["label_tokens"] for one in plan["preview"]] == expected
    assert plan["dropped"] == sum(isinstance(one, str) for one in encoded) == (name == "refuses")


def test_rows_that_val_size_holds_back(place):
    torch = pytest.importorskip("torch")
    place.write("rows.jsonl", [chat(f"q{i}", f"a{i}") for i in range(57)])
    for size, seed in ((0.1, 42), (7, 1), (0.5, 4294967295), (1, 0)):
        plan = place.json("dataset=rows.jsonl", f"val_size={size}", f"seed={seed}", "--dry-run", "--preview", "99")
        count = math.ceil(size * 57) if size < 1 else int(size)
        held = sorted(torch.randperm(57, generator=torch.Generator().manual_seed(seed)).tolist()[:count])
        assert [one["row"] - 1 for one in plan["preview"]] == held and plan["held_back"]
    line = place.refused("recipe.yaml", "dataset=rows.jsonl", "val_size=57", "--dry-run")
    assert line == "kt: val_size=57: leaves nothing to train on of 57 rows"
    assert place.json("eval_dataset=rows.jsonl", "max_samples=5", "--dry-run")["rows"] == 5


def test_pairs_and_judged_answers(place):
    """Of recipes for preferences: the answer that was chosen or wanted."""
    place.write("pairs.jsonl",
                [{"prompt": "Q", "chosen": "good", "rejected": "bad"}, {"prompt": "Q", "chosen": "x", "rejected": "x"}])
    plan = place.json("eval_dataset=pairs.jsonl", "stage=dpo", "--dry-run", "--preview", "9")
    assert [one["label"] for one in plan["preview"]] == ["good"] and plan["dropped"] == 1
    place.write("judged.jsonl", [{"prompt": "Q", "completion": "good", "label": True},
                                 {"prompt": "Q", "completion": "bad", "label": False}])
    plan = place.json("eval_dataset=judged.jsonl", "stage=kto", "--dry-run", "--preview", "9")
    assert [one["label"] for one in plan["preview"]] == ["good"]
    assert any("a row dropped, an answer that was not wanted: 2" in note for note in plan["notes"])


# --- beside stock transformers ---------------------------------------------------------------------------------------

LETTERS = [chat(f"Question {i}: which letter? A. one B. two C. three D. four", letter)
           for i, letter in enumerate("ABCDBA")]


def nll_of(model, encoded, count):
    import torch
    ids, labels = torch.tensor([encoded.ids]), torch.tensor([encoded.labels])
    with torch.no_grad():
        logits = model(ids).logits
    return (torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum").item(),
            count(labels[0, 1:]))


@pytest.mark.parametrize("adapted", [False, True])
def test_losses_answers_and_choices_are_those_of_transformers(place, tokenizer, model, adapted):
    import copy

    import torch
    encode, rows_of = training("encode"), training("rows")
    more = []
    if adapted:
        safetensors = pytest.importorskip("safetensors.torch")
        model, tensors = copy.deepcopy(model), {}
        torch.manual_seed(1)
        with torch.no_grad():
            for name, module in model.named_modules():
                if name.endswith("self_attn.o_proj"):
                    n, k = module.weight.shape
                    a, b = torch.randn(4, k) * k**-0.5, torch.randn(n, 4) * 0.1
                    module.weight += 2 * (b @ a)
                    tensors |= {f"base_model.model.{name}.lora_A.weight": a,
                                f"base_model.model.{name}.lora_B.weight": b}
        folder = place.folder / "lora"
        folder.mkdir()
        safetensors.save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", r=4, lora_alpha=8, bias="none",
                                                                    target_modules=["o_proj"])))
        more = ["adapter_name_or_path=lora"]
    place.write("rows.jsonl", STORIES + LETTERS)
    scores = place.json("eval_dataset=rows.jsonl", "max_new_tokens=10", "per_device_eval_batch_size=3",
                        "--acts", "f32", *more)
    said = place.predictions()
    assert [one["label"] for one in said] == [row["messages"][-1]["content"] for row in STORIES + LETTERS]

    encoder, nll, tokens, right = encode.Encoder(tokenizer, 512, True, False, None), 0.0, 0, 0
    letters = [tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "ABCD"]
    for row, one in zip(STORIES + LETTERS, said):
        encoded = encoder.row(rows_of.Row("", 0, row["messages"]))
        row_nll, count = nll_of(model, encoded, lambda labels: (labels != -100).sum().item())
        assert abs(one["loss"] - row_nll / count) < 1e-4
        nll, tokens = nll + row_nll, tokens + count
        ids = tokenizer(one["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
        if row in LETTERS:
            with torch.no_grad():
                at_end = model(ids).logits[0, -1][letters]
            assert one["choice"] == "ABCD"[int(at_end.argmax())]
            right += one["choice"] == one["label"]
        else:
            assert "choice" not in one
        if row in LETTERS[1:]:
            continue
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10,
                              do_sample=False)[0, ids.shape[1]:]
        assert one["predict"] == tokenizer.decode(made, skip_special_tokens=True)
    assert abs(scores["predict_loss"] - nll / tokens) < 1e-4 and scores["predict_label_tokens"] == tokens
    assert abs(scores["predict_perplexity"] / math.exp(nll / tokens) - 1) < 1e-4
    assert ((scores["predict_choice_rows"], scores["predict_choice_right"]) == (6, right)
            and scores["predict_accuracy"] == right / 6)
    if not adapted:
        check_files_and_scores(place, scores, said)


def check_files_and_scores(place, scores, said):
    results = json.loads((place.folder / "out" / "predict_results.json").read_text())
    assert results == {key: value for key, value in scores.items() if key != "predictions"}
    done = place.eval("--predictions", "out/generated_predictions.jsonl", "--json")
    again = json.loads(done.stdout)
    assert {key: scores[key] for key in again} == again and "predict_accuracy" in again
    sacrebleu, rouge = pytest.importorskip("sacrebleu"), pytest.importorskip("rouge_score.rouge_scorer")
    pairs = [(one["predict"], one["label"]) for one in said]
    for n in (1, 2, 3, 4):
        mean = sum(sacrebleu.BLEU(max_ngram_order=n, effective_order=True).sentence_score(a, [b]).score
                   for a, b in pairs) / len(pairs)
        whole = sacrebleu.BLEU(max_ngram_order=n).corpus_score([a for a, _ in pairs], [[b for _, b in pairs]]).score
        assert abs(scores[f"predict_bleu-{n}"] - mean) < 1e-9 and abs(scores[f"predict_corpus_bleu-{n}"] - whole) < 1e-9
    for stem in (False, True):
        scorer = rouge.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=stem)
        found = json.loads(place.eval("--predictions", "out/generated_predictions.jsonl",
                                      "--json", *["--stem"] * stem).stdout)
        for ours, theirs in (("1", "rouge1"), ("2", "rouge2"), ("l", "rougeL")):
            mean = sum(scorer.score(b, a)[theirs].fmeasure for a, b in pairs) / len(pairs)
            assert abs(found[f"predict_rouge-{ours}"] - 100 * mean) < 1e-9


# --- what a recipe asks ----------------------------------------------------------------------------------------------

def test_sampling_batches_and_results(place):
    """By chance, but the same for any number of rows at once; other results that are there stay."""
    place.write("rows.jsonl", STORIES[:3])
    (place.folder / "out").mkdir()
    (place.folder / "out" / "all_results.json").write_text('{"train_loss": 1.5, "predict_loss": 9}')
    found = []
    for batch, seed in ((1, 7), (3, 7), (3, 8)):
        place.json("eval_dataset=rows.jsonl", "do_sample=true", "temperature=1.2", "top_p=1.0", "top_k=0",
                   f"seed={seed}", "max_new_tokens=12", f"per_device_eval_batch_size={batch}")
        found.append([one["predict"] for one in place.predictions()])
    assert found[0] == found[1] != found[2]
    results = json.loads((place.folder / "out" / "all_results.json").read_text())
    assert results["train_loss"] == 1.5 and results["predict_loss"] != 9 and results["predict_samples"] == 3
    scores = place.json("eval_dataset=rows.jsonl", "predict_with_generate=false")
    assert "predict_bleu-4" not in scores and scores["predict_loss"] > 0 and "predict" not in place.predictions()[0]


def test_dry_run_says_the_plan(place):
    place.write("rows.jsonl", STORIES + LETTERS)
    plan = place.json("eval_dataset=rows.jsonl", "--dry-run")
    assert (plan["rows"], plan["choice_rows"], plan["rows_at_once"], plan["max_new_tokens"],
            plan["preview"]) == (11, 6, 8, 1024, [])
    assert plan["sampling"]["temperature"] == 0 and plan["context"] == 513 and plan["bytes"] > 1 << 20
    plan = place.json("eval_dataset=rows.jsonl", "do_sample=true", "max_new_tokens=99", "--dry-run")
    assert (plan["sampling"] == {"temperature": 0.95, "top_p": 0.7, "top_k": 50, "seed": 42}
            and plan["max_new_tokens"] == 99)
    done = place.eval("recipe.yaml", "eval_dataset=rows.jsonl", "--dry-run", "--preview", "1")
    assert done.returncode == 0 and "multiple choice  6 rows" in done.stdout and "Avast" in done.stdout
    assert not (place.folder / "out").exists()


def test_choices_of_a_column(place):
    place.write("rows.jsonl", [chat("Which?", "E") | {"choices": list("vwxyz")},
                               chat("Which?", "C") | {"choices": ["x", "y"]}, chat("Which?", " B ")])
    plan = place.json("eval_dataset=rows.jsonl", "--dry-run", "--preview", "9")
    assert [one["letters"] for one in plan["preview"]] == ["ABCDE", "", "ABCD"]


def test_chinese_words(place):
    place.write("said.jsonl", [{"predict": "\u4f60\u597d\u4e16\u754c", "label": "\u4f60\u597d\uff0c\u4e16\u754c"},
                               {"predict": "a", "label": "b \u201cc\u201d"}])
    found = json.loads(place.eval("--predictions", "said.jsonl", "--json").stdout)
    assert found["predict_words"] == "zh" and abs(found["predict_rouge-1"] - 100 * (8 / 9) / 2) < 1e-9
    found = json.loads(place.eval("--predictions", "said.jsonl", "--json", "--words", "13a").stdout)
    assert found["predict_words"] == "13a" and found["predict_rouge-1"] == 0


# --- faults ----------------------------------------------------------------------------------------------------------

def test_bad_input(place):
    place.write("rows.jsonl", STORIES)
    assert "FILE or --predictions" in place.refused()
    assert "leave the recipe out" in place.refused("recipe.yaml", "--predictions", "x.jsonl")
    assert place.refused("recipe.yaml").startswith("kt: recipe.yaml: eval_dataset: is missing")
    assert "val_size" in place.refused("recipe.yaml", "dataset=rows.jsonl")
    assert "no such file" in place.refused("recipe.yaml", "eval_dataset=absent.jsonl")
    assert "nearest known one is eval_dataset" in place.refused("recipe.yaml", "eval_dataste=rows.jsonl")
    assert "output_dir: is missing" in place.refused("recipe.yaml", "eval_dataset=rows.jsonl", "output_dir=null")
    assert "no such folder or file" in place.refused("recipe.yaml", "eval_dataset=rows.jsonl",
                                                     "adapter_name_or_path=gone")
    assert "model_name_or_path" in place.refused("recipe.yaml", "eval_dataset=rows.jsonl", "model_name_or_path=null")
    place.write("none.jsonl", [chat("a"), chat("b"), chat("c", " ")])
    line = place.refused("recipe.yaml", "eval_dataset=none.jsonl")
    assert ("no row is left to evaluate: none.jsonl: 2 rows dropped, without an assistant turn: 1, 2; none.jsonl: "
            "a row dropped, its answer is empty: 3" in line)
    place.write("torn.jsonl", json.dumps(STORIES[0]) + '\n{"messages": [\n')
    assert "torn.jsonl: line 2" in place.refused("recipe.yaml", "eval_dataset=torn.jsonl")
    for content, said in (("", "no predictions"), ("[1]\n", "line 1: expected an object"),
                          ('{"predict": "a"}\n', 'no "label"'),
                          ('{"predict": 1, "label": "a"}\n', "predict: expected text"), ('{"predict"\n', "line 1")):
        place.write("said.jsonl", content)
        assert said in place.refused("--predictions", "said.jsonl")
    place.write("file", "")
    assert "output_dir" in place.refused("recipe.yaml", "eval_dataset=rows.jsonl", "output_dir=file/below")


def test_an_adapter_of_another_model(place):
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    place.write("rows.jsonl", STORIES)
    folder = place.folder / "lora"
    folder.mkdir()
    name = "base_model.model.model.layers.0.self_attn.o_proj.lora_{}.weight"
    safetensors.save_file({name.format("A"): torch.zeros(4, 8), name.format("B"): torch.zeros(8, 4)},
                          folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", r=4, lora_alpha=8, bias="none")))
    line = place.refused("recipe.yaml", "eval_dataset=rows.jsonl", "adapter_name_or_path=lora")
    assert "o_proj" in line and "8" in line


def test_ctrl_c_keeps_what_was_predicted(place):
    place.write("recipe.yaml", BASE)
    place.write("rows.jsonl", [chat(f"Tell me story {i}.", "Once.") for i in range(4000)])
    words = [KT, "sft", "eval", "recipe.yaml", "eval_dataset=rows.jsonl", "max_new_tokens=8",
             "per_device_eval_batch_size=2"]
    with subprocess.Popen(words, cwd=place.folder, env=place.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as run:
        for line in run.stdout:
            if line.startswith("loaded in "):
                break
        time.sleep(2)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=30)
    assert run.returncode == 130, err
    said = place.predictions()
    assert (0 < len(said) < 4000
            and f"kt: interrupted; {len(said)} of 4000 rows are in out/generated_predictions.jsonl" in err)
    assert not (place.folder / "out" / "predict_results.json").exists()
    assert sorted(path.name for path in (place.folder / "out").iterdir()) == ["generated_predictions.jsonl"]
