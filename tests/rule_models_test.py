"""Models loaded by placement rules, against transformers with weights that torch rounds by the formulas of the formats;
the same from flags, to the bit; plans, and what is refused before anything is loaded.

KT_MODEL_PROBE names model_probe, KT_PROGRAM kt. The rules are files of rule_files.py; which modules they take,
rule_walk.py says."""
import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import rule_files
import tiny_models
from logits import PROBE, check, differences, probe, prompt
from rule_walk import text_of, walk

KT = os.environ.get("KT_PROGRAM")
ROOT = pathlib.Path(__file__).parent.parent
DEMO = ROOT / "demo" / "tiny-deepseekv3"
pytestmark = pytest.mark.skipif(not (KT and PROBE), reason="KT_PROGRAM and KT_MODEL_PROBE do not name the programs")
BOUND = 1e-4
CPU = ("--rule-devices", "cuda=cpu")
PROMPTS = [prompt(tokens, tiny_models.VOCAB) for tokens in (1, 7, 138)]
# A prompt of 130 tokens, then one token at a time.
STEPS = ("--cuts", ",".join(map(str, range(130, 138))))


def in_groups(weight, length, rounded):
    """Pieces of a row, of which the last may be shorter."""
    return torch.cat([rounded(piece) for piece in weight.split(length, dim=-1)], dim=-1)


def int8(weight):
    scale = weight.abs().amax(-1, keepdim=True) * torch.tensor(1 / 127, dtype=torch.float32)
    return (weight * (1 / scale)).round().clamp(-127, 127) * scale


def int4_group(weight):
    scale = (weight.abs().amax(-1, keepdim=True) / 7.5).to(torch.bfloat16).to(torch.float32)
    return (weight / scale).round().clamp(-8, 7) * scale


def fp8_block(weight):
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale


def fp8(weight):
    return torch.cat([in_groups(rows, 128, fp8_block) for rows in weight.split(128)])


def int4_g64(weight):
    return in_groups(weight, 64, int4_group)


ROUNDED = {
    "KLinearMarlin": int4_g64, "VLinearMarlin": int4_g64, "KLinearIPEXLLM": int4_g64, "KExpertsMarlin": int4_g64,
    "KLinearFP8": fp8, "KLinearQ8": int8, "KLinearTorchW8A8A2": int8, "KExpertsCPUW8A8": int8,
    "AMXInt8": int8, "AMXBF16": None, "llamafile": None, "KLinearTorch": None, "KLinearCPUInfer": None,
    "KExpertsCPU": None, "KSFTExpertsCPU": None,
}


def rounding_of(rule):
    kwargs = rule["replace"].get("kwargs", {})
    if "generate_op" not in kwargs:
        return None
    return ROUNDED[kwargs["backend"] if "backend" in kwargs and kwargs["generate_op"].endswith("CPU")
                   else kwargs["generate_op"]]


def round_by(model, rules):
    """The model with weights as the rules have them; how many matrices became others."""
    taken, count = {}, 0
    walk(model, "", rules, taken)
    for name, module in model.named_modules():
        rounded = rounding_of(rules[taken[name]]) if taken.get(name) is not None else None
        if rounded is None or name.endswith(("kv_b_proj", "shared_expert_gate")):
            continue
        for key, weight in list(module.named_parameters(recurse=False)):
            if weight.dim() < 2:
                continue
            setattr(module, key, torch.nn.Parameter(rounded(weight.detach())))
            count += 1
    return count


@functools.cache
def checkpoint(root, family, layers):
    model = tiny_models.build(family, torch.bfloat16, num_hidden_layers=layers)
    return tiny_models.save(model, root / f"{family}-{layers}", torch.bfloat16)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("rules")


def written(folder, name, rules):
    path = folder / f"{name}.yaml"
    path.write_text(text_of(rules), encoding="utf-8")
    return path


# One of each kind: as stored, 4 bits, 8 bits, fp8, experts of other formats, layers with other rules, another spelling.
CASES = [("V2-Lite-Chat-use-adapter", 3, False), ("V2-Lite-Chat-gpu-cpu", 12, True), ("V3-Chat-amx", 3, True),
         ("V3-Chat-fp8-serve", 3, True),
         ("V3-Chat-multi-gpu-marlin", 32, True), ("Mixtral", 3, True), ("Qwen2-serve-amx", 3, True),
         ("Qwen3Moe-serve-amx", 3, True),
         ("Glm4Moe-serve", 3, True), ("Internlm2_5-7b-Chat-1m", 3, False), ("rocm-V3", 3, True),
         ("Qwen3Moe-sft-amx", 3, True)]
if os.environ.get("KT_TEST_FULL") == "1":
    CASES += [(name, 3, None) for name, (family, _, _, _) in rule_files.FILES.items()
              if family and name not in [case[0] for case in CASES] and not name.startswith(("xpu", "npu"))]


@pytest.mark.parametrize("name, layers, rounds", CASES)
def test_logits_are_those_of_transformers(root, name, layers, rounds):
    family, _, _, rules = rule_files.FILES[name]
    folder = checkpoint(root, family, layers)
    model = tiny_models.build(family, torch.bfloat16, num_hidden_layers=layers)
    stored = tiny_models.logits(model, PROMPTS)
    count = round_by(model, rules)
    assert rounds is None or (count > 0) == rounds
    expected = tiny_models.logits(model, PROMPTS)
    ours = probe(folder, PROMPTS, tiny_models.VOCAB, "--rules", written(root, name, rules), *CPU, *STEPS)
    check(ours, expected, BOUND)
    # What rounding does can be seen.
    assert not rounds or differences(ours, stored).max() > 10 * BOUND


@pytest.mark.parametrize("family, by_rules, by_flags", [
    ("deepseek_v3", ["--place", ".*=cpu:int8"], ["--format", "int8", "--linear-format", "int8"]),
    ("qwen2_moe", ["--place", "experts$=cpu:int4_g32"], ["--format", "int4_g32"]),
    ("glm4_moe", ["--place", r"experts(\.\d+)?$=cpu:stored", "--place", "layers|lm_head=cuda:int4",
                  "--rule-devices", "cuda=cpu"], ["--linear-format", "int4"]),
    ("ernie4_5_moe", ["--place", "=cpu:q8_0"], None),
    ("ernie4_5_moe", ["--place", "lm_head|layers=cpu:q8_0"], ["--format", "q8_0", "--linear-format", "q8_0"]),
    # Where rules are silent, or say nothing of a format, the flags hold.
    ("mixtral", ["--place", "layers=cpu", "--format", "int8", "--linear-format", "int4_g32"],
     ["--format", "int8", "--linear-format", "int4_g32"]),
    ("qwen3_next", ["--place", "layers=cpu:int8"], None),
])
def test_rules_and_flags_give_the_same_bits(root, family, by_rules, by_flags):
    layers = 4 if family == "qwen3_next" else 3
    folder = checkpoint(root, family, layers)
    if by_rules[1].startswith("="):
        done = subprocess.run([PROBE, folder, *by_rules], input=b"1\n", capture_output=True)
        assert done.returncode == 2 and b"expected REGEX=DEVICE" in done.stderr
        return
    ours = probe(folder, PROMPTS, tiny_models.VOCAB, *by_rules)
    if by_flags is None:  # the head is not among them
        by_flags = ["--format", "int8", "--linear-format", "int8", "--place", "lm_head=cpu:stored"]
    assert np.array_equal(ours, probe(folder, PROMPTS, tiny_models.VOCAB, *by_flags))
    assert differences(ours, probe(folder, PROMPTS, tiny_models.VOCAB)).max() > BOUND


def test_layers_have_experts_of_their_own_formats(root):
    folder = checkpoint(root, "qwen3_moe", 3)
    model = tiny_models.build("qwen3_moe", torch.bfloat16)
    for layer, rounded in ((0, int8), (2, int4_g64)):
        experts = model.model.layers[layer].mlp.experts
        for key, weight in list(experts.named_parameters()):
            setattr(experts, key, torch.nn.Parameter(rounded(weight.detach())))
    attention = model.model.layers[1].self_attn
    attention.o_proj.weight = torch.nn.Parameter(fp8(attention.o_proj.weight.detach()))
    ours = probe(folder, PROMPTS, tiny_models.VOCAB, "--place", r"layers\.0\.mlp\.experts=cpu:int8",
                 "--place", r"layers\.2\..*experts=cpu:int4_g64", "--place", r"1\.self_attn\.o_proj=cpu:fp8")
    check(ours, tiny_models.logits(model, PROMPTS), BOUND)


def kt(*args, **more):
    return subprocess.run([KT, *map(str, args)], capture_output=True, text=True, **more)


def refused(code, *args):
    result = kt(*args)
    assert result.returncode == code, (result.stdout, result.stderr)
    line, = result.stderr.splitlines()
    return line


PLAN = """- match: {name: "^model.embed_tokens"}
  replace: {kwargs: {generate_device: cpu}}
- match: {name: "mlp\\\\.experts$"}
  replace: {class: a.KTransformersExperts, kwargs: {backend: AMXInt8, out_device: cuda}}
  recursive: False
- match: {class: torch.nn.Linear, name: "^model\\\\.layers\\\\."}
  replace: {class: a.KTransformersLinear, kwargs: {generate_device: "cuda:0", prefill_op: KLinearTorch}}
- match: {name: "experts\\\\.3$"}
  replace: {class: default}
"""


@pytest.mark.parametrize("verb", [["estimate"], ["run", "--dry-run"]])
def test_the_plan(tmp_path, verb):
    path = tmp_path / "r.yaml"
    path.write_text(PLAN)
    flags = [*verb, DEMO, "--rules", path, *CPU, "--place", "lm_head=cpu:int4_g32"]
    done = kt(*flags)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("placement of deepseek_v3, "))
    assert lines[at].endswith(f"layers: {path} (5 rules)")
    assert lines[at + 1].split() == ["part", "layers", "device", "format", "bytes", "decided", "by"]
    cells = {line.split("  ")[0]: line for line in lines[at + 2:]}
    assert ("host" in cells["embedding"] and "bf16, mapped" in cells["embedding"]
            and "rule 1, line 1" in cells["embedding"])
    assert (" cpu " in cells["routed experts"] and " int8 " in cells["routed experts"]
            and cells["routed experts"].endswith("rule 2, line 3"))
    assert " int4_g32 " in cells["head"] and cells["head"].endswith("--place 1")
    assert " cpu " in cells["attention"] and "int4_g64" in cells["attention"] and "rule 3, line 6" in cells["attention"]
    assert "idle: rule 4, line 8: names only what is below rule 2, not recursive" in lines
    assert f"note: {path}: no meaning here: out_device (rule 2); prefill_op (rule 3)" in lines
    assert any("model.layers.0.self_attn.kv_b_proj and 5 more are kept as stored" in line for line in lines)
    said = json.loads(kt(*flags, "--json").stdout)
    config = json.loads((DEMO / "config.json").read_text())
    routed, = [part for part in said["rules"]["parts"] if part["part"] == "routed experts"]
    inter, hidden, experts = config["moe_intermediate_size"], config["hidden_size"], config["n_routed_experts"]
    each = 3 * inter * hidden + 4 * (2 * inter + hidden)
    assert routed["bytes"] == len(routed["layers"]) * experts * each
    assert (routed["device"], routed["formats"], routed["rules"]) == ("cpu", ["int8"], [2])
    assert said["rules"]["bytes"]["cpu"] == sum(part["bytes"] for part in said["rules"]["parts"]
                                                if part["device"] == "cpu")
    assert said["rules"]["idle"][0]["rule"] == 4
    # What is planned is what is held: experts are packed as they are stored.
    assert said["bytes"]["experts"] == pytest.approx(routed["bytes"], rel=0.05)


def test_every_door_takes_rules(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(PLAN)
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a fox. " * 20)
    for verb in (["generate", DEMO, "-p", "Once", "--max-tokens", "4", "--acts", "f32"],
                 ["perplexity", DEMO, "--file", text, "--context", "64"],
                 ["bench", DEMO, "--prompt", "8", "--batch", "1", "--tokens", "4", "--repeat", "1"]):
        done = kt(*verb, "--kt_optimize_rule", path, *CPU)
        assert done.returncode == 0, done.stderr
        note = f"kt: note: {path}: idle: rule 4 (names only what is below rule 2, not recursive)"
        assert note in done.stderr.splitlines()
    # A setting of kt run, which a flag overrules.
    home = dict(os.environ, KT_HOME=str(tmp_path / "home"), HOME=str(tmp_path),
                XDG_CONFIG_HOME=str(tmp_path / "config"))
    assert kt("config", "set", "run.rules", path, env=home).returncode == 0
    done = kt("run", DEMO, "--dry-run", "--json", *CPU, env=home)
    assert json.loads(done.stdout)["rules"]["file"] == str(path), done.stderr
    done = kt("run", DEMO, "--dry-run", "--json", "--rules", "", env=home)
    assert done.returncode == 0 and "rules" not in json.loads(done.stdout), done.stderr


def one(match, replace, more=""):
    return f"- match: {{{match}}}\n  replace: {{{replace}}}\n{more}"


Q = r"name: 'layers\.1\.self_attn\.q_a_proj'"
ATTENTION = r"name: 'layers\.1\.self_attn$'"
EXPERTS = r"name: 'layers\.1\.mlp\.experts$'"
REFUSED = {
    "two devices in a dense half": (one(Q, "kwargs: {device: cpu}") + one(ATTENTION, "kwargs: {device: 'cuda:0'}"), 2,
                                    ":1: rule 1: model.layers.1.self_attn.q_a_proj: on cpu, "
                                    "and model.layers.1.self_attn of the same layer is on cuda:0 (rule 2, line 3)"),
    "experts on another GPU": (one(ATTENTION, "kwargs: {device: 'cuda:0'}")
                               + one(EXPERTS, "class: KTransformersExperts, kwargs: {generate_device: 'cuda:1', "
                                              "generate_op: KExpertsMarlin}"), 2,
                               ":3: rule 2: model.layers.1.mlp.experts: on cuda:1, and its layer is on cuda:0 (rule 1, "
                               "line 1): routed experts lie there or on the CPU"),
    "a shared expert elsewhere": (one(ATTENTION, "kwargs: {device: cpu}")
                                  + one(r"name: 'layers\.1\.mlp\.shared_experts$'", "kwargs: {device: 'cuda:0'}"), 2,
                                  ":3: rule 2: model.layers.1.mlp.shared_experts: on cuda:0, and its layer is on cpu"),
    "gate and up": (one(r"name: 'layers\.1\..*shared_experts\.gate_proj'", "kwargs: {device: cpu, format: int8}")
                    + one(r"name: 'layers\.1\..*shared_experts\.up_proj'", "kwargs: {device: cpu, format: int4_g32}"),
                    2, ":3: rule 2: model.layers.1.mlp.shared_experts.up_proj: becomes int4_g32, "
                       "and model.layers.1.mlp.shared_experts.gate_proj, which it is multiplied with, int8"),
    "an operation of the CPU": (one(EXPERTS, "class: KTransformersExperts, kwargs: {generate_device: cuda}"), 2,
                                ":2: rule 1: kwargs: generate_device: KExpertsCPU runs on the cpu, found cuda"),
    "a transfer_map": (one("name: '^model$'", "class: KDeepseekV2Model, kwargs: {transfer_map: {1: 'cuda:1'}}")
                       + one(ATTENTION, "kwargs: {device: 'cuda:0'}"), 2,
                       ":2: rule 1: kwargs: transfer_map: layer 1 on cuda:1, and model.layers.1 is on cuda:0 (rule "
                       "2, line 3)"),
    "an operator": (one(Q, "class: a.KTransformersLinea"), 2,
                    ':2: rule 1: replace: class: no operator "KTransformersLinea"; the nearest is KTransformersLinear'),
    "an argument": (one(Q, "kwargs: {devise: cpu}"), 2,
                    ":2: rule 1: kwargs: devise: default takes no such argument; the nearest is device"),
    "a device": (one(Q, "kwargs: {device: cudo}"), 2,
                 ':2: rule 1: kwargs: device: no device "cudo"; the nearest is cuda'),
    "a format": (one(Q, "kwargs: {format: int4_g65}"), 2,
                 ':2: rule 1: kwargs: format: no format "int4_g65"; the nearest is int4_g6'),
    "a way of prompts": (one(EXPERTS, "class: KTransformersExperts, kwargs: {prefill: steam}"), 2,
                         ':2: rule 1: kwargs: prefill: no way "steam"; the nearest is stream'),
    "blocks that do not divide": (one(r"name: 'layers\.1\.self_attn\.q_b_proj'", "kwargs: {device: cpu, format: q4_k}"),
                                  2, ":1: rule 1: model.layers.1.self_attn.q_b_proj: q4_k needs a multiple of "
                                     "256 columns"),
    "xpu": (one(ATTENTION, "kwargs: {generate_device: xpu}"), 2, ":1: rule 1: model.layers.1.self_attn: on xpu: "
            "models run on the CPU and on CUDA devices; --rule-devices xpu=cuda:0 or xpu=cpu"),
    "npu by default": (one(Q, "class: KTransformersLinearW8A8A2"), 2,
                       ":1: rule 1: model.layers.1.self_attn.q_a_proj: on npu: "),
    "another family": (one("class: a.Qwen3MoeMLP", ""), 2,
                       ": none of 1 rules matches a module of this model, deepseek_v3; rule 1 this model, deepseek_v3, "
                       "has no class Qwen3MoeMLP"),
    "no GPU": (one(ATTENTION, "kwargs: {device: cuda}"), 2,
               ":1: rule 1: model.layers.1.self_attn: on cuda:0, and no GPU is used here: --gpu N takes one, "
               "--rule-devices cuda=cpu puts all on the CPU"),
    "experts on a GPU that is not there":
        (one(EXPERTS, "class: KTransformersExperts, kwargs: {generate_device: cuda, generate_op: KExpertsMarlin}"), 2,
         ":1: rule 1: model.layers.1.mlp.experts: on cuda:0, and no GPU is used here: --gpu N takes one"),
    "experts on the GPU, their layer on the CPU": (one(ATTENTION, "kwargs: {device: cpu}")
                                                   + one(EXPERTS, "kwargs: {device: cuda}"), 2,
                                                   ":3: rule 2: model.layers.1.mlp.experts: on cuda:0, and its layer "
                                                   "is on cpu (rule 1, line 1): routed experts lie there or "
                                                   "on the CPU"),
    "more copies than experts": (one(EXPERTS, "class: KTransformersExperts, kwargs: {gpu_experts: 17}"), 2,
                                 ":2: rule 1: kwargs: gpu_experts: 17 of 16 experts a layer"),
    "copies of an expert that is not there": (one(EXPERTS, "kwargs: {gpu_experts: [16]}"), 2, ":2: rule 1: kwargs: "
                                              "gpu_experts: expected numbers of experts, 0 to 15, found 16"),
    "copies beside a layer on the CPU": (one(ATTENTION, "kwargs: {device: cpu}")
                                         + one(EXPERTS, "kwargs: {gpu_experts: 2}"), 2,
                                         ":4: rule 2: kwargs: gpu_experts: copies lie on the GPU of the layer, "
                                         "and model.layers.1 lies on the CPU"),
    "copies of no experts": (one(Q, "kwargs: {gpu_experts: 2}"), 2, ":2: rule 1: kwargs: gpu_experts: of routed "
                             "experts, and model.layers.1.self_attn.q_a_proj is none of them"),
    "a strategy": (one(EXPERTS, "kwargs: {strategy: unifrom}"), 2,
                   ":2: rule 1: kwargs: strategy: unknown placement strategy 'unifrom'; there are "),
    "statistics that are not there": (one(EXPERTS, "kwargs: {statistics: /nowhere/s.json}"), 2,
                                      ":1: rule 1: kwargs: statistics: "),
    # Valid, and not there yet.
    "the head beside its norm": (one("name: '^model.norm$'", "kwargs: {device: cuda}")
                                 + one("name: lm_head", "kwargs: {device: cpu}"), 4,
                                 ":3: rule 2: lm_head: on cpu, and model.norm is on cuda:0 (rule 1, line 1): the last "
                                 "norm and the head in two places are not there yet"),
    "a shared expert on the CPU": (one(ATTENTION, "kwargs: {device: cuda}")
                                   + one("name: shared_experts", "kwargs: {device: cpu}"), 4,
                                   ":3: rule 2: model.layers.1.mlp.shared_experts: on cpu, and "
                                   "model.layers.1.self_attn of the same layer is on cuda:0 (rule 1, line 1): dense "
                                   "parts of a layer in two places are not there yet"),
    "a single expert": (one(r"name: 'layers\.1\.mlp\.experts\.2$'", "kwargs: {device: cpu, format: int8}"), 4,
                        ":1: rule 1: model.layers.1.mlp.experts.2: experts of a layer have one format so far: "
                        "int8 of single ones is not there yet"),
    "streaming": (one("name: '^model$'", "class: KDeepseekV2Model, kwargs: {per_layer_prefill_intput_threshold: 5000}"),
                  4, ":2: rule 1: kwargs: per_layer_prefill_intput_threshold: 5000 tokens: experts are not streamed"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_is_loaded(tmp_path, what):
    text, code, expected = REFUSED[what]
    path = tmp_path / "r.yaml"
    path.write_text(text)
    for verb in (["estimate", DEMO], ["generate", DEMO, "-p", "x"]):
        line = refused(code, *verb, "--gpu", "off", "--rules", path)
        assert line.startswith(f"kt: {path}{expected}"), line


@pytest.mark.parametrize("flags, expected", [
    (["--place", "q_proj"], "--place 'q_proj': expected REGEX=DEVICE or REGEX=DEVICE:FORMAT"),
    (["--place", "q_(proj=cpu"], "--place 'q_(proj=cpu': pattern \"q_(proj\""),
    (["--place", "q_a_proj=gpu"], "--place 'q_a_proj=gpu': no device \"gpu\"; the nearest is cpu"),
    (["--place", "q_a_proj=cpu:int5"],
     "--place 'q_a_proj=cpu:int5': kwargs: format: no format \"int5\"; the nearest is int8"),
    (["--place", "nothing=cpu"],
     "--place: none of 1 rules matches a module of this model, deepseek_v3; --place 1 matches no module"),
    (["--rule-devices", "cuda=cpu"], "--rule-devices cuda=cpu: there are no --rules"),
    (["--place", "layers=cuda", "--rule-devices", "cuda"],
     "--rule-devices cuda: expected OLD=NEW of cpu, cuda, cuda:N, xpu, npu; found \"\""),
    (["--place", "layers=cuda", "--rule-devices", "cuda=gpu"], "--rule-devices cuda=gpu: expected OLD=NEW"),
    (["--place", "layers=cuda", "--rule-devices", "cuda=cpu,cuda=cuda:0"],
     "--rule-devices: cuda becomes cpu and cuda:0"),
    (["--rules", "/nowhere/r.yaml"], "/nowhere/r.yaml"),
])
def test_words_that_are_no_rules(flags, expected):
    line = refused(2, "estimate", DEMO, *flags)
    assert line.startswith(f"kt: {expected}"), line


def test_what_is_said(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(one("name: embed", "kwargs: {device: cuda}")
                    + one("name: '^model$'",
                          "class: KDeepseekV2Model, kwargs: {device: cuda, transfer_map: {30: 'cuda:1'}}")
                    + one("class: torch.nn.Linear",
                          "class: KTransformersLinear, kwargs: {act_order: false, stride: 16}"))
    said = json.loads(kt("estimate", DEMO, "--rules", path, *CPU, "--json",
                         "--bandwidth", "10").stdout)["rules"]["notes"]
    assert said[0] == f"{path}:4: rule 2: kwargs: transfer_map: behind the last layer, 5: 30", said
    assert any("device of a model (rule 2)" in line and "act_order (rule 3)" in line and "stride (rule 3)" in line
               for line in said), said
    assert any("kv_b_proj" in line and "kept as stored" in line and line.endswith("(rule 3)") for line in said), said
