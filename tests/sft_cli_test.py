"""`kt sft` up to the moment when Python starts, and what it makes of Python's words: recipes of LLaMA-Factory's keys,
errors with their lines, plans and memory. Neither torch nor PEFT is needed: Python is a script of the test's.
KT_PROGRAM names kt."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, ROOT, error_line, kt

DEMO = ROOT / "demo" / "tiny-deepseekv3"
pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")

MESSAGES = [{"messages": [{"role": "user", "content": f"Question {i}?"},
                          {"role": "assistant", "content": f"Answer {i}."}]}
            for i in range(4)]
PAIRS = [{"prompt": "Q", "chosen": "good", "rejected": "bad"}]
JUDGED = [{"prompt": "Q", "completion": "good", "label": True}]

# Every key of the table, as people write it: those that do something or are noted, with a value they accept.
ACCEPTED = """
trust_remote_code: true
infer_backend: ktransformers
template: deepseek3
stage: sft
do_train: true
do_eval: false
do_predict: false
finetuning_type: lora
lora_rank: 4
lora_alpha: 32
lora_dropout: 0.1
lora_target: all
use_rslora: true
use_dora: false
additional_target: lm_head
create_new_adapter: false
pref_beta: 0.2
pref_loss: sigmoid
pref_ftx: 0.0
simpo_gamma: 0.7
dpo_label_smoothing: 0.0
kto_chosen_weight: 1.0
kto_rejected_weight: 1.0
ref_model: null
ref_model_adapters: null
plot_loss: true
compute_accuracy: true
eval_dataset: messages.jsonl
dataset_dir: data
cutoff_len: 128
max_samples: 100000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 0
val_size: 0.0
packing: false
neat_packing: false
train_on_prompt: false
mask_history: true
default_system: You are a pirate.
enable_thinking: false
streaming: false
logging_steps: 10
save_steps: 500
save_strategy: steps
save_total_limit: 2
save_only_model: false
overwrite_output_dir: true
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
max_steps: -1
lr_scheduler_type: cosine
warmup_ratio: 0.1
warmup_steps: 0
max_grad_norm: 1.0
weight_decay: 0.0
optim: adamw_torch
seed: 42
bf16: true
fp16: false
ddp_timeout: 180000000
resume_from_checkpoint: null
disable_gradient_checkpointing: false
per_device_eval_batch_size: 1
eval_strategy: no
eval_steps: 100
predict_with_generate: false
max_new_tokens: 256
temperature: 0.7
top_p: 0.9
top_k: 50
do_sample: true
use_kt: true
kt_optimize_rule: examples/kt_optimize_rules/DeepSeek-V3-Chat-sft-amx-multi-gpu.yaml
cpu_infer: 2
chunk_size: 8192
mode: normal
kt_mode: normal
kt_maxlen: 4096
kt_use_cuda_graph: true
kt_force_think: false
kt_non_expert_weight_path: elsewhere
kt_cpu_activation: recompute
kt_use_lora_experts: false
kt_lora_expert_num: 0
kt_lora_expert_intermediate_size: 0
kt_config:
  kt_backend: AMXINT8
  kt_num_threads: 2
  kt_tp_enabled: true
  kt_threadpool_count: 1
  kt_non_expert_weight_path: elsewhere
  kt_expert_weight_format: bf16
  kt_weight_lifecycle: persistent
  kt_num_gpu_experts: 0
  kt_skip_expert_loading: true
  kt_share_backward_bb: true
  kt_share_cache_pool: true
  kt_force_fused_expert_lora: false
  kt_max_cache_depth: 2
  kt_model_max_length: 4096
  kt_activation_policy: {cpu: retain, gpu: recompute}
  kt_lora_rank: 4
  kt_lora_alpha: 32
  kt_lora_dropout: 0.0
  kt_train_mode: lora
  kt_full_weight_grad: false
  kt_use_lora_experts: false
  kt_lora_expert_num: 0
  kt_lora_expert_intermediate_size: 0
"""
# Paths, which need something that is there.
OTHERS = ["model_name_or_path", "adapter_name_or_path", "adapter_folder", "dataset", "output_dir", "kt_weight_path",
          "kt_expert_checkpoint_path", "kt_config.kt_weight_path", "kt_config.kt_expert_checkpoint_path"]
# Known to transformers rather than to the table, or ours.
MORE = ["logging_first_step", "run_name", "adam_beta1", "adam_beta2", "adam_epsilon", "use_cpu", "on_nan"]
NOTED = ["trust_remote_code", "infer_backend", "template", "overwrite_cache", "preprocessing_num_workers",
         "ddp_timeout", "mode", "kt_mode", "kt_maxlen", "kt_use_cuda_graph",
         "kt_non_expert_weight_path", "kt_config.kt_tp_enabled", "kt_config.kt_expert_weight_format",
         "kt_config.kt_weight_lifecycle", "kt_config.kt_skip_expert_loading", "kt_config.kt_share_backward_bb",
         "kt_config.kt_share_cache_pool", "kt_config.kt_max_cache_depth", "kt_config.kt_model_max_length"]
REFUSED = [
    ("stage", "pt", "sft, dpo and kto"), ("stage", "rm", "sft, dpo and kto"), ("stage", "ppo", "sft, dpo and kto"),
    ("stage", "dop", "sft, dpo, kto"), ("finetuning_type", "full", "frozen"), ("finetuning_type", "freeze", "frozen"),
    ("finetuning_type", "oft", "frozen"), ("use_dora", "true", "DoRA"), ("create_new_adapter", "true", "train on"),
    ("pref_loss", "hinge", "orpo"), ("pref_loss", "ipo", "simpo"), ("pref_loss", "kto_pair", "sigmoid"),
    ("ref_model", "some/model", "without its adapter"), ("ref_model_adapters", "some/adapter", "without its adapter"),
    ("fp16", "true", "bf16"), ("kt_use_lora_experts", "true", "lora_target"),
    ("kt_lora_expert_num", "2", "lora_target"),
    ("kt_lora_expert_intermediate_size", "1024", "lora_target"), ("kt_config.kt_num_gpu_experts", "8", "CPU"),
    ("kt_config.kt_lora_dropout", "0.1", "attention"), ("kt_config.kt_train_mode", "full", "frozen"),
    ("kt_config.kt_train_mode", "hybrid", "frozen"), ("kt_config.kt_full_weight_grad", "true", "frozen"),
    ("kt_config.kt_use_lora_experts", "true", "lora_target"), ("kt_config.kt_lora_expert_num", "1", "lora_target"),
    ("kt_config.kt_lora_expert_intermediate_size", "1", "lora_target"), ("use_kt", "false", "KT"),
    ("do_train", "false", "nothing"),
    ("lora_rank", "0", "from 1"), ("lora_rank", "eight", "an integer"), ("lora_rank", "8.5", "an integer"),
    ("learning_rate", "fast", "a number"), ("do_eval", "1", "true or false"), ("dataset", "7", "names"),
    ("seed", "-1", "from 0"),
    ("val_size", "-0.5", "from 0"), ("lora_dropout", "1", "0.999"), ("eval_strategy", "always", "no, steps, epoch"),
    ("kt_cpu_activation", "keep", "retain, recompute"), ("kt_config", "5", "a mapping"), ("output_dir", "[a]", "text"),
    ("kt_config.kt_backend", "AMXINT9", "AMXINT8"), ("resume_from_checkpoint", "3", "a text or true"),
]


class Recipes:
    """A folder with rows, and recipes in it."""

    def __init__(self, folder):
        self.folder = folder
        for name, rows in (("messages", MESSAGES), ("pairs", PAIRS), ("judged", JUDGED)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.env = {key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "KT_PYTHON")}
        self.env |= {"KT_HOME": str(folder / "home"), "KT_DEMO_MODEL": str(DEMO), "HF_HOME": str(folder / "hf")}

    def write(self, more="", base=None, name="recipe.yaml"):
        base = base if base is not None else ("model_name_or_path: demo\ndataset: messages.jsonl\noutput_dir: out\n"
                                              "cutoff_len: 128\n"
                                              "per_device_train_batch_size: 1\ncpu_infer: 2\nlora_rank: 8\n")
        (self.folder / name).write_text(base + more)
        return name

    def kt(self, *words, **env):
        return kt("sft", *words, cwd=self.folder, env={**self.env, **env})

    def plan(self, *changes, more="", **env):
        done = self.kt("train", self.write(more), *changes, "--dry-run", "--json", **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def refused(self, code, *changes, more="", base=None, **env):
        done = self.kt("train", self.write(more, base), *changes, "--dry-run", **env)
        assert done.returncode == code, (done.returncode, done.stderr)
        return error_line(done.stderr)


@pytest.fixture
def recipes(tmp_path):
    return Recipes(tmp_path)


# --- keys ------------------------------------------------------------------------------------------------------------

def keys_of(page):
    out, above = set(), ""
    for line in page.strip().splitlines():
        name = line.split(":")[0]
        above = above if name.startswith(" ") else ""
        out.add(above + name.strip())
        if line.startswith("kt_config:"):
            above = "kt_config."
    return out


def table_row(entry):
    key, row = entry
    meaning = row["meaning"] + (f": {row['choices']}" if row["choices"] else "")
    return f"| `{key.removeprefix('kt_config.')}` | {row['use']} | {row['default'] or ''} | {meaning} |"


def test_the_table_is_whole(recipes):
    known = json.loads(recipes.kt("keys", "--json").stdout)
    inside = {"kt_config.kt_activation_policy.cpu", "kt_config.kt_activation_policy.gpu"}
    assert set(known) == keys_of(ACCEPTED) | set(OTHERS) | set(MORE) | inside
    assert {row["use"] for row in known.values()} == {"used", "noted", "refused"}
    documented = set((ROOT / "docs" / "finetune-cli.md").read_text().splitlines())
    assert [row for row in map(table_row, known.items()) if row not in documented] == []


def test_every_key_is_accepted(recipes):
    base = "model_name_or_path: demo\ndataset: messages.jsonl\noutput_dir: out\n"
    done = recipes.kt("train", recipes.write(ACCEPTED, base), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    notes = "\n".join(plan["notes"])
    assert [key for key in NOTED if not re.search(rf"(^|, ){re.escape(key)}\b", notes, re.M)] == []
    assert "its name says all" in notes and "lora_dropout" in notes
    assert plan["model"]["format"] == "int8" and plan["cpu_activation"] == "recompute" and plan["threads"] == 2
    assert plan["lora"]["rank"] == 4 and plan["lora"]["alpha"] == 32
    assert plan["settings"]["default_system"] == "You are a pirate." and plan["settings"]["chunk_size"] == 8192
    assert plan["settings"]["report_to"] == ["none"] and plan["settings"]["learning_rate"] == 1e-4


@pytest.mark.parametrize("key, value, word", REFUSED, ids=lambda value: str(value)[:20])
def test_what_is_refused(recipes, key, value, word):
    """In the file, with its line, and as a change."""
    lines = key.split(".")
    more = "".join(f"{'  ' * at}{name}:{f' {value}' if at == len(lines) - 1 else ''}\n"
                   for at, name in enumerate(lines))
    base = ("model_name_or_path: demo\n"
            + "".join(f"{name}: {put}\n" for name, put in (("dataset", "messages.jsonl"), ("output_dir", "out"))
                      if name != key))
    line = recipes.refused(2, more=more, base=base)
    number = base.count("\n") + len(lines)
    assert line.startswith(f"kt: recipe.yaml:{number}: {key}: ") and word in line
    line = recipes.refused(2, f"{key}={value}")
    assert line.startswith(f"kt: {key}={value}: ") and word in line


@pytest.mark.parametrize("typed, nearest, at", [
    ("lora_rnk: 8", "lora_rank", 1), ("learning_rat: 1", "learning_rate", 1), ("datset: x", "dataset", 1),
    ("kt_config:\n  kt_bakend: AMXINT8", "kt_config.kt_backend", 2), ("Stage: sft", "stage", 1),
])
def test_unknown_keys(recipes, typed, nearest, at):
    line = recipes.refused(2, more=typed + "\n")
    assert f"recipe.yaml:{7 + at}: unknown key" in line and f"the nearest known one is {nearest};" in line
    if at == 1:
        key, value = typed.split(": ")
        assert f"the nearest known one is {nearest};" in recipes.refused(2, f"{key}={value}")


def test_keys_of_the_environment(recipes):
    """What accelerate's launcher hands on; the file and the command line win."""
    env = {"ACCELERATE_KT_BACKEND": "AMXINT8", "ACCELERATE_KT_NUM_THREADS": "1",
           "ACCELERATE_KT_ACTIVATION_POLICY_CPU": "recompute",
           "ACCELERATE_KT_TP_ENABLED": "1", "ACCELERATE_KT_MAX_CACHE_DEPTH": "", "ACCELERATE_KT_OMP_NUM_THREADS": "7",
           "USE_KT": "1", "ACCELERATE_USE_KT": "true", "KT_SFT_DEBUG": "1"}
    plan = recipes.plan("cpu_infer=null", **env)
    assert (plan["model"]["format"], plan["threads"], plan["cpu_activation"]) == ("int8", 1, "recompute")
    notes = "\n".join(plan["notes"])
    assert ("ACCELERATE_KT_NUM_THREADS of the environment counts as if it stood below kt_config" in notes
            and "CACHE_DEPTH" not in notes)
    assert recipes.plan("cpu_infer=null", more="kt_config: {kt_num_threads: 2}\n", **env)["threads"] == 2
    assert recipes.plan("cpu_infer=null", "kt_config.kt_num_threads=2", **env)["threads"] == 2
    line = recipes.refused(2, ACCELERATE_KT_BACKEND="AMXINT9")
    assert line.startswith("kt: ACCELERATE_KT_BACKEND=AMXINT9: expected one of AMXBF16")
    assert "frozen" in recipes.refused(2, ACCELERATE_KT_TRAIN_MODE="full")


def test_keys_of_other_stages(recipes):
    """Told: files of LLaMA-Factory's have them."""
    notes = recipes.plan("pref_beta=0.2", "kto_chosen_weight=2", "simpo_gamma=1", "mask_history=true")["notes"]
    assert ("pref_beta: of stage dpo kto; nothing here" in notes
            and "kto_chosen_weight: of stage kto; nothing here" in notes)
    assert "simpo_gamma: of stage dpo; nothing here" in notes and not any("mask_history" in note for note in notes)
    notes = recipes.plan("stage=dpo", "dataset=pairs.jsonl", "pref_beta=0.2", "simpo_gamma=1", "packing=true",
                         "neat_packing=false")["notes"]
    assert "simpo_gamma: of pref_loss simpo; nothing here" in notes and "packing: of stage sft; nothing here" in notes
    assert not any(word in note for note in notes for word in ("pref_beta", "neat_packing"))
    assert not any("nothing here" in note
                   for note in recipes.plan("stage=kto", "dataset=judged.jsonl", "kto_chosen_weight=2")["notes"])


def test_what_is_not_finite(recipes):
    assert (recipes.plan("--on-nan", "skip")["settings"]["on_nan"] == "skip"
            and recipes.plan()["settings"]["on_nan"] == "stop")
    assert "--on-nan" in recipes.refused(2, "--on-nan", "never")


def test_yaml_that_is_none(recipes):
    assert "recipe.yaml:2:1: found the end of the file" in recipes.refused(2, base="stage: [sft\n")
    assert "expected keys and values" in recipes.refused(2, base="- stage\n")
    assert "found nothing" in recipes.refused(2, base="# empty\n")
    assert "a second time" in recipes.refused(2, more="cutoff_len: 5\n")
    assert "no such file" in error_line(recipes.kt("train", "absent.yaml").stderr).lower()
    assert "expected KEY=VALUE" in recipes.refused(2, "learning_rate")
    for missing in ("model_name_or_path", "dataset", "output_dir"):
        line = recipes.refused(2, f"{missing}=null")
        assert missing in line and "missing" in line


# --- rows ------------------------------------------------------------------------------------------------------------

def test_rows_by_their_layout(recipes):
    data = recipes.folder / "data"
    data.mkdir()
    (data / "a.json").write_text(json.dumps([{"instruction": "a {", "input": "b \"}", "output": "c"}]))
    (data / "s.jsonl").write_text(
        json.dumps({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}))
    (data / "p.json").write_text(json.dumps([{"conversations": [{"from": "human", "value": "x"}],
                                              "chosen": {"from": "gpt", "value": "y"},
                                              "rejected": {"from": "gpt", "value": "z"}}]))
    (data / "dataset_info.json").write_text(json.dumps({
        "alp": {"file_name": "a.json"}, "shr": {"file_name": "s.jsonl", "formatting": "sharegpt"},
        "prf": {"file_name": "p.json", "formatting": "sharegpt", "ranking": True,
                "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
        "bad": {"file_name": "a.json", "columns": {"prompt": "question"}}, "far": {"hf_hub_url": "a/b"},
        "gone": {"file_name": "gone.json"}, "csv": {"file_name": "rows.csv"}}))
    (data / "rows.csv").write_text("a,b\n")
    plan = recipes.plan("dataset=alp,shr, messages.jsonl")
    assert [(rows["layout"], rows["ranking"])
            for rows in plan["data"]["train"]] == [("alpaca", False), ("sharegpt", False), ("messages", False)]
    assert (plan["data"]["train"][0]["columns"]["prompt"] == "instruction"
            and plan["data"]["train"][1]["tags"]["user_tag"] == "human")
    assert recipes.plan("dataset=prf", "stage=dpo")["data"]["train"][0]["ranking"]
    assert recipes.plan("dataset=pairs.jsonl", "stage=dpo")["data"]["train"][0]["layout"] == "pairs"
    assert recipes.plan("dataset=judged.jsonl", "stage=kto")["data"]["train"][0]["columns"]["kto_tag"] == "label"
    line = recipes.refused(2, "dataset=bad")
    assert "a.json: row 1 has no column 'question'; it has" in line and "instruction" in line
    assert "the nearest is alp" in recipes.refused(2, "dataset=alq")
    assert ("no such file" in recipes.refused(2, "dataset=rows.jsonl")
            and "rows.jsonl" in recipes.refused(2, "dataset=rows.jsonl"))
    assert "gone.json" in recipes.refused(2, "dataset=gone")
    assert "hf_hub_url" in recipes.refused(2, "dataset=far") and ".jsonl" in recipes.refused(2, "dataset=csv")
    for stage, rows, word in (("dpo", "messages.jsonl", "pairs"), ("kto", "pairs.jsonl", "judged"),
                              ("sft", "pairs.jsonl", "conversations"),
                              ("sft", "judged.jsonl", "conversations")):
        line = recipes.refused(2, f"stage={stage}", f"dataset={rows}")
        assert rows in line and word in line


@pytest.mark.parametrize("content, word", [
    ("", "no rows"), ("[]", "found ']'"), ("7", "found '7'"), ('{"a": 1}', "row 1 has the columns a"),
    ('{"a": 1', "does not end"),
    ('{"a": }', "row 1"),
])
def test_files_that_are_no_rows(recipes, content, word):
    (recipes.folder / "odd.jsonl").write_text(content)
    line = recipes.refused(2, "dataset=odd.jsonl")
    assert "odd.jsonl" in line and word in line


# --- what is trained -------------------------------------------------------------------------------------------------

def test_trained_parameters(recipes):
    """The figures of stock PEFT on this model."""
    def trainable(target, *more):
        lora = recipes.plan(f"lora_target={target}", *more)["lora"]
        assert lora["trainable"] == sum(part["trainable"] for part in lora["parts"].values())
        return lora["trainable"]

    assert trainable("all_attention") == 167424
    assert trainable("'all_attention,experts'") == 740864
    assert trainable("all") == 805376
    assert trainable("all", "lora_rank=1") == 805376 // 8
    assert trainable("[experts]") == trainable("'gate_up_proj,mlp.experts.down_proj'") == 740864 - 167424
    assert trainable("mlp.experts.gate_proj") == 5 * 16 * 8 * (256 + 2 * 128)
    # Routed gate and up of 5 layers, the shared gates, and the dense layer's.
    assert trainable("gate_proj") == 5 * 16 * 8 * 512 + 5 * 8 * (128 + 256) + 8 * (512 + 256)
    parts = recipes.plan("lora_target=o_proj")["lora"]["parts"]
    assert parts == {"attention": {"matrices": 6, "weights": 6 * 256 * 512, "trainable": 6 * 8 * (256 + 512)}}
    line = recipes.refused(2, "lora_target=q_prj")
    assert "no module of this model is called 'q_prj'" in line and "q_b_proj" in line
    assert "additional_target" in recipes.refused(2, "lora_target=lm_head")
    assert "embed_tokens" in recipes.refused(2, "additional_target=embed_token")


def test_memory(recipes):
    small = recipes.plan()["memory"]
    lora = recipes.plan()["lora"]["trainable"]
    assert small["lora"] == 16 * lora
    whole = recipes.plan("additional_target=lm_head")["memory"]
    assert whole["lora"] == 16 * (lora + 4096 * 256)
    # 13 M parameters: 7.9 M in experts, packed as bf16; the others in f32.
    assert small["experts"] == pytest.approx(5 * 16 * 3 * 128 * 256 * 2, rel=0.02)
    index = json.loads((DEMO / "model.safetensors.index.json").read_text())
    assert small["dense"] == pytest.approx((index["metadata"]["total_size"] - small["experts"]) * 2, rel=0.02)
    eight = recipes.plan("kt_config.kt_backend=AMXINT8")["memory"]
    assert eight["experts"] == pytest.approx(small["experts"] / 2, rel=0.05)
    twice = recipes.plan("cutoff_len=256")["memory"]
    for part in ("records", "activations", "logits"):
        assert twice[part] == pytest.approx(2 * small[part], rel=0.01)
    assert recipes.plan("kt_cpu_activation=recompute")["memory"]["records"] < small["records"] / 2
    assert recipes.plan("disable_gradient_checkpointing=true")["memory"]["activations"] > 2 * small["activations"]
    assert small["host"] == sum(small[part]
                                for part in ("experts", "dense", "lora", "records", "activations", "logits", "process"))
    assert small["fits"] and small["available"] > small["host"]


def test_what_does_not_fit(recipes):
    done = recipes.kt("train", recipes.write(), "per_device_train_batch_size=200000", "--dry-run")
    assert done.returncode == 3
    line = error_line("\n".join(line for line in done.stderr.splitlines() if not line.startswith("kt: note")) + "\n")
    assert re.search(r"memory needed \(logits [\d.]+ \wiB, .*\), .* available; try per_device_train_batch_size=100000",
                     line), line
    assert "does not fit" in done.stdout
    # What retain keeps is left out where that is enough.
    plan = recipes.plan("per_device_train_batch_size=8")
    assert plan["cpu_activation"] == "retain"


def test_batches_that_are_left_open(recipes):
    base = "model_name_or_path: demo\ndataset: messages.jsonl\noutput_dir: out\ncutoff_len: 64\ncpu_infer: 2\n"
    done = recipes.kt("train", recipes.write("", base), "--dry-run", "--json")
    plan = json.loads(done.stdout)
    assert plan["batch"]["rows"] in (1, 2, 4, 8, 16, 32, 64)
    assert (plan["batch"]["tokens"] == 64 * plan["batch"]["rows"]
            and plan["batch"]["rows_per_expert"] == plan["batch"]["tokens"] * 4 / 16)
    assert any(note.startswith("per_device_train_batch_size: ") for note in plan["notes"])
    given = json.loads(recipes.kt("train", recipes.write("", base), "per_device_train_batch_size=3", "--dry-run",
                                  "--json").stdout)
    assert given["batch"]["rows"] == 3


# --- model, weights and rules ----------------------------------------------------------------------------------------

RULES = """
- match: {name: "^model\\\\.layers\\\\..*\\\\.mlp\\\\.experts$"}
  replace:
    class: ktransformers.operators.experts.KTransformersExperts
    kwargs: {prefill_device: cpu, prefill_op: KExpertsTorch, generate_device: cpu, generate_op: KSFTExpertsCPU, \
out_device: cuda, backend: %s}
"""


def test_rules_and_formats(recipes):
    (recipes.folder / "rules.yaml").write_text(RULES % "AMXInt8")
    assert recipes.plan("kt_optimize_rule=rules.yaml")["model"]["format"] == "int8"
    (recipes.folder / "rules.yaml").write_text(RULES % "AMXBF16")
    assert recipes.plan("kt_optimize_rule=rules.yaml")["model"]["format"] is None
    (recipes.folder / "rules.yaml").write_text(RULES % "AMXInt7")
    line = recipes.refused(2, "kt_optimize_rule=rules.yaml")
    assert "rules.yaml:5: rule 1" in line and "AMXInt8" in line
    assert "no such file" in recipes.refused(2, "kt_optimize_rule=other.yaml")
    for backend, made in (("AMXBF16", None), ("AMXINT8", "int8"), ("INT8", "int8"), ("AMXINT4", "int4"), ("FP8", "fp8"),
                          ("auto", None)):
        assert recipes.plan(f"kt_config.kt_backend={backend}")["model"]["format"] == made
    skipped = recipes.plan("kt_config.kt_backend=AMXINT8_SkipLoRA")
    assert "routed experts" not in skipped["lora"]["parts"] and skipped["lora"]["trainable"] == 805376 - 573440


def test_converted_experts(recipes):
    out = recipes.folder / "int4"
    assert kt("quant", DEMO, "-o", out, "--method", "int4", "--numa-nodes", 1).returncode == 0
    for change in ("kt_weight_path=int4", "kt_config.kt_weight_path=int4", "kt_expert_checkpoint_path=int4"):
        plan = recipes.plan(change)
        assert (plan["model"]["weights"] == "int4" and plan["model"]["stored"] == "kt-int4"
                and plan["model"]["format"] is None)
    assert "takes it as kt_weight_path" in recipes.refused(2, "model_name_or_path=./int4")
    assert any("are trained as they are" in note
               for note in recipes.plan("kt_weight_path=int4", "kt_config.kt_backend=AMXINT8")["notes"])
    assert recipes.plan("kt_weight_path=int4",
                        "kt_config.kt_backend=AMXINT4")["notes"] == recipes.plan("kt_weight_path=int4")["notes"]


def test_models_that_cannot(recipes):
    assert "nowhere" in recipes.refused(2, "model_name_or_path=./nowhere")
    bare = recipes.folder / "bare"
    shutil.copytree(DEMO, bare, ignore=shutil.ignore_patterns("*.xz"))
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    assert "no chat template" in recipes.refused(2, "model_name_or_path=./bare")


# --- the output folder -----------------------------------------------------------------------------------------------

def checkpoint(folder, *without):
    folder.mkdir(parents=True)
    for name in ("trainer_state.json", "adapter_model.safetensors", "optimizer.pt", "scheduler.pt"):
        if name not in without:
            (folder / name).write_text("{}")


def test_where_a_run_begins(recipes):
    out = recipes.folder / "out"
    assert recipes.plan()["resume"] is None
    checkpoint(out / "checkpoint-5")
    checkpoint(out / "checkpoint-20")
    checkpoint(out / "checkpoint-100", "optimizer.pt")
    plan = recipes.plan()
    assert plan["resume"] == "out/checkpoint-20" and any("goes on from out/checkpoint-20" in note
                                                         for note in plan["notes"])
    assert recipes.plan("resume_from_checkpoint=true")["resume"] == "out/checkpoint-20"
    assert recipes.plan("resume_from_checkpoint=out/checkpoint-5")["resume"] == "out/checkpoint-5"
    assert recipes.plan("overwrite_output_dir=true")["resume"] is None
    assert "no optimizer.pt" in recipes.refused(2, "resume_from_checkpoint=out/checkpoint-100")
    assert "no such folder" in recipes.refused(2, "resume_from_checkpoint=out/checkpoint-6")
    shutil.rmtree(out)
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert "not empty" in recipes.refused(2) and "overwrite_output_dir" in recipes.refused(2)
    assert "no checkpoint" in recipes.refused(2, "resume_from_checkpoint=true")
    assert "is no folder" in recipes.refused(2, "output_dir=messages.jsonl")


def test_adapters(recipes):
    line = recipes.refused(2, "adapter_name_or_path=adapter")
    assert "no such folder: adapter" in line
    (recipes.folder / "all" / "adapter").mkdir(parents=True)
    change = ("adapter_name_or_path=adapter", "adapter_folder=all")
    assert "has no adapter_config.json" in recipes.refused(2, *change)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (recipes.folder / "all" / "adapter" / name).write_text("{}")
    assert recipes.plan(*change)["adapter"] == "all/adapter"
    assert "2 adapters" in recipes.refused(2, "adapter_name_or_path=a,b")
    assert "GGUF" in recipes.refused(2, "adapter_name_or_path=a.gguf")


# --- words -----------------------------------------------------------------------------------------------------------

def test_the_plan_for_people(recipes):
    done = recipes.kt("train", recipes.write(), "--dry-run")
    assert done.returncode == 0
    for phrase in ("demo: deepseek_v3, 6 layers", "16 in each of 5 layers, 4 for a token; bf16",
                   "sft, LoRA of rank 8, alpha 16",
                   "messages.jsonl (messages)", "805,376", "available: fits"):
        assert phrase in done.stdout, phrase
    assert done.stdout.endswith("next: kt sft train recipe.yaml\n")


def test_verbs(recipes):
    done = recipes.kt()
    assert done.returncode == 2 and "see kt sft --help" in done.stderr
    assert "train" in kt("sft", "--help").stdout and "keys" in kt("help", "sft").stdout
    one = recipes.kt("keys", "lora_target").stdout
    assert len(one.splitlines()) == 2 and "all_attention" in one
    assert "nearest is lora_target" in error_line(recipes.kt("keys", "lora_targets").stderr)
    many = error_line(recipes.kt("train", recipes.write(), WORLD_SIZE="2").stderr)
    assert "WORLD_SIZE is 2" in many and recipes.kt("train", recipes.write(), WORLD_SIZE="2").returncode == 4


def test_the_native_engine(recipes):
    """What chat and api become."""
    inference = ("model_name_or_path: demo\ntemplate: deepseek\ninfer_backend: ktransformers\ntrust_remote_code: true\n"
                 "use_kt: true\nkt_optimize_rule: examples/kt_optimize_rules/DeepSeek-V3-Chat-sft-amx.yaml\n"
                 "cpu_infer: 32\nchunk_size: 8192\n")
    name = recipes.write("", inference)

    def shown(verb, *changes, **env):
        done = recipes.kt(verb, name, *changes, "--dry-run", **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    common = "demo --threads 32 --chunked-prefill-size 8192"
    assert shown("chat") == f"kt chat {common}"
    assert shown("api") == f"kt run {common}"
    assert shown("api", API_PORT="8000", API_HOST="0.0.0.0").endswith("8192 --host 0.0.0.0 --port 8000")
    sampled = shown("chat", "temperature=0.5", "top_p=0.9", "top_k=20", "max_new_tokens=64", "default_system=Be brief.")
    assert sampled.endswith("--temperature 0.5 --top-p 0.9 --top-k 20 --max-tokens 64 --system 'Be brief.'")
    assert shown("chat", "do_sample=false", "temperature=0.5",
                   "max_new_tokens=64").endswith("8192 --temperature 0 --max-tokens 64")
    (recipes.folder / "saves").mkdir()
    assert ("--adapter saves " in shown("chat", "adapter_name_or_path=saves")
            and "--weights w" in shown("api", "kt_weight_path=w"))
    assert "--adapter" not in shown("chat", "output_dir=saves")
    (recipes.folder / "saves" / "adapter_config.json").write_text("{}")
    assert "--adapter saves " in shown("chat", "output_dir=saves")
    done = recipes.kt("chat", name, "adapter_name_or_path=gone")
    assert done.returncode == 2 and "no such folder or file: gone" in error_line(done.stderr)
    # And it is that command.
    done = recipes.kt("api", recipes.write("", "model_name_or_path: ./nowhere\n"))
    assert (done.returncode == 2 and done.stderr.startswith("$ kt run ./nowhere\n")
            and "nowhere" in error_line(done.stderr))


# --- Python ----------------------------------------------------------------------------------------------------------

HAS_ALL = {"torch": "2.13.0", "transformers": "5.22.2", "peft": "0.21.2", "accelerate": "1.15.0"}


def python(folder, packages=None, script="exit 0", importable=("kt_kernel",)):
    """A program that answers kt's question, and runs the script in place of the module."""
    facts = json.dumps({"version": "3.11.2", "packages": HAS_ALL if packages is None else packages,
                        "importable": list(importable)})
    program = folder / "python-of-the-test"
    program.write_text(f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo '{facts}'; echo '{{\"done\": true}}'; exit 0; fi\n"
                       f"{script}\n")
    program.chmod(0o755)
    return {"KT_PYTHON": str(program)}


def says(*events):
    return "\n".join(f"echo '{json.dumps(event)}'" for event in events)


def error_of(done):
    return error_line("".join(f"{line}\n" for line in done.stderr.splitlines() if not line.startswith("kt: note")))


@pytest.mark.parametrize("packages, changes, lacks, command", [
    ({}, [], ["torch", "transformers", "peft", "accelerate"],
     "pip install 'torch' 'transformers>=5' 'peft>=0.21' 'accelerate'"),
    ({**HAS_ALL, "peft": "0.18.1"}, [], ["peft 0.21 (it has 0.18.1)"], "pip install 'peft>=0.21'"),
    ({**HAS_ALL, "transformers": "4.57.1"}, [], ["transformers 5.0 (it has 4.57.1)"], "pip install 'transformers>=5'"),
    (HAS_ALL, ["stage=dpo", "dataset=pairs.jsonl"], ["trl", "datasets"], "pip install 'trl>=1' 'datasets'"),
], ids=["none", "old-peft", "old-transformers", "no-trl"])
def test_python_without_packages(recipes, packages, changes, lacks, command):
    done = recipes.kt("train", recipes.write(), *changes, **python(recipes.folder, packages))
    assert done.returncode == 4
    line = error_of(done)
    assert all(word in line for word in lacks) and command in line


def test_python_that_is_not_there(recipes):
    done = recipes.kt("train", recipes.write(), KT_PYTHON=str(recipes.folder / "none"))
    assert done.returncode == 4 and "KT_PYTHON" in error_of(done) and str(recipes.folder / "none") in error_of(done)
    done = recipes.kt("train", recipes.write(), **python(recipes.folder, importable=()))
    assert done.returncode == 4 and "kt_kernel" in error_of(done)


def test_python_gets_the_plan(recipes):
    done = recipes.kt("train", recipes.write(), "learning_rate=3e-4",
                      **python(recipes.folder,
                               script=f"echo \"$@\" > {recipes.folder}/words; cat > {recipes.folder}/plan.json"))
    assert done.returncode == 0, done.stderr
    assert (recipes.folder / "words").read_text().split() == ["-m", "kt_kernel.sft", "--plan", "-", "--events"]
    plan = json.loads((recipes.folder / "plan.json").read_text())
    assert plan["version"] == 1 and plan["settings"]["learning_rate"] == 3e-4 and plan["model"]["path"] == str(DEMO)


EVENTS = [
    {"event": "ready", "rows": 4, "steps": 2, "trainable": 805376},
    {"event": "note", "text": "a row dropped"},
    {"event": "step", "step": 1, "steps": 2, "loss": 3.25, "learning_rate": 1e-4, "grad_norm": 1.5,
     "tokens_per_s": 812.0, "expert_duty": 0.87,
     "forward_tflops": 1.25, "backward_tflops": 1.5, "left_s": 192.0},
    {"event": "evaluation", "step": 1, "eval_loss": 3.5},
    {"event": "saved", "path": "out/checkpoint-2", "step": 2},
    {"event": "done", "output": "out", "train_loss": 3.125, "seconds": 10.0, "tokens_per_s": 800.0,
     "peak_bytes": 1 << 30},
]


def test_progress(recipes):
    done = recipes.kt("train", recipes.write(), **python(recipes.folder, script=says(*EVENTS)))
    assert done.returncode == 0, done.stderr
    for phrase in ("4 rows, 2 steps, 805376 trained parameters",
                   "step 1/2  loss 3.2500  lr 1.00e-04  norm 1.50  812 tokens/s  experts 87",
                   "1.25 + 1.50 TFLOPS  left 3m12s", "step 1  evaluation: loss 3.5000", "saved out/checkpoint-2",
                   "3.1250", "1.0 GiB"):
        assert phrase in done.stdout, (phrase, done.stdout)
    assert "kt: note: a row dropped" in done.stderr
    done = recipes.kt("train", recipes.write(), "--json", **python(recipes.folder, script=says(*EVENTS)))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["event"] == "plan" and lines[0]["lora"]["trainable"] == 805376 and lines[1:] == EVENTS


@pytest.mark.parametrize("kind, code", [("input", 2), ("memory", 3), ("unsupported", 4), ("internal", 5)])
def test_errors_of_python(recipes, kind, code):
    script = says({"event": "error", "kind": kind, "message": "step 3: the loss is nan"}) + f"\nexit {code}"
    done = recipes.kt("train", recipes.write(), **python(recipes.folder, script=script))
    assert done.returncode == code and error_of(done) == "kt: step 3: the loss is nan"


def test_python_that_dies(recipes):
    done = recipes.kt("train", recipes.write(), **python(recipes.folder, script="kill -9 $$"))
    assert done.returncode == 3 and "was killed" in error_of(done) and "out are whole" in error_of(done)
    done = recipes.kt("train", recipes.write(), **python(recipes.folder, script="kill -11 $$"))
    assert done.returncode == 5 and "signal 11" in error_of(done)
    done = recipes.kt("train", recipes.write(), **python(recipes.folder, script="echo Traceback >&2; exit 7"))
    assert done.returncode == 5 and "code 7" in done.stderr and "Traceback" in done.stderr


WAITS = """
trap 'echo "{\\"event\\": \\"interrupted\\", \\"path\\": \\"out/checkpoint-7\\"}"; exit 130' INT
echo '{"event": "ready", "rows": 1, "steps": 1, "trainable": 1}'
while :; do sleep 0.05; done
"""


def begin(recipes, script):
    process = subprocess.Popen([KT, "sft", "train", recipes.write()], cwd=recipes.folder, text=True,
                               stdin=subprocess.DEVNULL,
                               env={**recipes.env, **python(recipes.folder, script=script)}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    for line in process.stdout:
        if "1 rows" in line:
            return process
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupts(recipes, number):
    """Passed on once; Python saves and ends, and so does kt."""
    process = begin(recipes, WAITS)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode == 130 and "saving a checkpoint" in errors
            and "interrupted; saved out/checkpoint-7" in errors)


def test_the_second_interrupt_ends_at_once(recipes):
    pid = recipes.folder / "pid"
    process = begin(recipes, f"trap '' INT\necho $$ > {pid}\necho '{{\"event\": \"ready\", \"rows\": 1, \"steps\": 1, "
                             f"\"trainable\": 1}}'\n"
                             "while :; do sleep 0.05; done")
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    for _ in range(100):  # the death of its parent is a signal to it
        if not pathlib.Path(f"/proc/{pid.read_text().strip()}/stat").exists():
            break
        time.sleep(0.1)
    else:
        raise AssertionError("Python goes on without kt")
