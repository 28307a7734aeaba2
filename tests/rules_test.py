"""Placement rules: kt's reader against PyYAML, its patterns against Python's re, and which rule takes which module
against a walk in Python over the trees of stock transformers models.

Needs pyyaml, torch, transformers and the program rules_probe, named by KT_RULES_PROBE. The files are those of
rule_files.py; a folder of others is tested too where KT_RULE_FILES names one."""
import functools
import json
import os
import pathlib
import random
import re
import subprocess
import warnings

import pytest

import rule_files
from rule_walk import text_of, walk

yaml = pytest.importorskip("yaml", reason="the pyyaml package is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
import tiny_models

PROBE = os.environ.get("KT_RULES_PROBE")
FOLDER = os.environ.get("KT_RULE_FILES")
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_RULES_PROBE does not name rules_probe")
# Llama 4's blocks are called feed_forward in transformers too, where rules for `mlp` mean them and its trees do not.
# Gemma 4's routers are a module around a matrix there, and a matrix here.
FAMILIES = [key for key in tiny_models.MODELS if "-" not in key and key not in ("llama4", "gemma4")]


def written(folder):
    """Every file, as (name, path, family, layers)."""
    out = []
    for name, (family, layers, count, rules) in rule_files.FILES.items():
        assert len(rules) == count, name
        path = folder / f"{name}.yaml"
        path.write_text(text_of(rules), encoding="utf-8")
        out.append((name, path, family, layers))
    if not FOLDER:
        print("KT_RULE_FILES names no folder: only the files of rule_files.py are tested")
    for path in sorted(pathlib.Path(FOLDER).rglob("*.y*ml")) if FOLDER else []:
        words = (("V2-Lite", ("deepseek_v2", 27)), ("V2", ("deepseek_v2", 60)), ("V3", ("deepseek_v3", 61)),
                 ("Moonlight", ("deepseek_v3", 27)),
                 ("Mixtral", ("mixtral", 32)), ("Qwen2", ("qwen2_moe", 28)), ("Qwen3Moe", ("qwen3_moe", 48)),
                 ("Qwen3-", ("qwen3_moe", 48)),
                 ("Glm4Moe", ("glm4_moe", 46)), ("Internlm", ("llama", 32)))
        out.append((path.name, path, *next((model for word, model in words if word in path.name), (None, 0))))
    return out


@functools.cache
def loaded(text):
    """What PyYAML reads, by its C half where there is one: the tests of reading use the other."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def probe(*arguments):
    done = subprocess.run([PROBE, *map(str, arguments)], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode("utf-8").split("\n")
    assert lines.pop() == ""
    return lines


def as_read(value):
    """PyYAML's value as rules_probe prints it: what is left out filled in, keys as text."""
    keyed = json.loads(json.dumps(value, default=str))
    return [dict(match=rule["match"], recursive=rule.get("recursive", True),
                 replace=dict({"class": "default", "kwargs": {}}, **rule["replace"])) for rule in keyed]


def lines_of(text):
    return [node.start_mark.line + 1 for node in yaml.compose(text).value]


def is_grammatical(value):
    """What a list of rules is, written again."""
    def mapping(it, keys):
        return isinstance(it, dict) and set(it) <= set(keys)
    def one(rule):
        if not mapping(rule, ("match", "replace", "recursive")) or not isinstance(rule.get("recursive", True), bool):
            return False
        match, replace = rule.get("match"), rule.get("replace")
        if not mapping(match, ("name", "class")) or not match or not all(isinstance(v, str) for v in match.values()):
            return False
        if not mapping(replace, ("class", "kwargs")) or not isinstance(replace.get("class", ""), str):
            return False
        try:
            re.compile(match.get("name", ""))
        except re.error:
            return False
        return isinstance(replace.get("kwargs", {}), dict) and match.get("class") != "" and replace.get("class") != ""
    return isinstance(value, list) and value != [] and all(map(one, value))


# What YAML allows and kt refuses, by the words it says so with.
REFUSED = ("anchors and aliases", "tags are not read", "a second time", "merge keys", "directives", "several lines",
           "complex keys", "no zero in front", "decimal digits only", "expected the end of the line", "one document",
           "a finite number")
# The same of patterns.
UNREAD = ("repetition of what may be empty", "an escape we do not know", "a group of a kind", "lookbehind over more",
          "repetition of an assertion", "takes more than", "repetitions at byte")


def mutated(text, rng):
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    kind = rng.randrange(9)
    if kind == 0:
        lines.insert(at, lines[at])
    elif kind == 1:
        del lines[at]
    elif kind == 2:
        lines[at] = " " * rng.randrange(1, 4) + lines[at]
    elif kind == 3:
        lines[at] = lines[at].replace(" ", "", 1)
    elif kind == 4:
        lines[at] = lines[at].replace(rng.choice(["match", "name", "class", "replace", "kwargs", "False", '"']),
                                      rng.choice(["mach", "names", "0", "'False'", "[a, b]", "{}", "~", "&x y",
                                                  "!!str z", "*x", "<<", "| ", "- "]), 1)
    elif kind == 5:
        lines[at], lines[at - 1] = lines[at - 1], lines[at]
    elif kind == 6:
        return text[: rng.randrange(len(text))]
    elif kind == 7:
        place = rng.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:place] + rng.choice(list("[](){}*+?|\\^$\"':#-,&!\t%@\u00e9")) + lines[at][place:]
    else:
        place = rng.randrange(len(lines[at]) + 1)
        lines[at] = lines[at][:place] + lines[at][place + 1:]
    return "\n".join(lines)


def test_files_are_read_as_pyyaml_reads_them(tmp_path):
    files = written(tmp_path)
    assert len(files) >= 46
    for (name, path, _, _), line in zip(files, probe("read", *[path for _, path, _, _ in files])):
        assert not line.startswith("error"), line
        got, text = json.loads(line), path.read_text(encoding="utf-8")
        assert [rule.pop("line") for rule in got] == lines_of(text), name
        assert got == as_read(yaml.safe_load(text)), name


def test_mutations_are_read_as_pyyaml_reads_them_or_refused_by_name(tmp_path):
    rng = random.Random(24)
    files = written(tmp_path)
    sources = [text for _, path, _, _ in files if len(text := path.read_text(encoding="utf-8")) < 6000]
    texts = []
    for i in range(500):
        text = rng.choice(sources)
        for _ in range(rng.randrange(1, 4)):
            text = mutated(text, rng)
        texts.append(text)
        (tmp_path / f"m{i}.yaml").write_text(text, encoding="utf-8")
    counts = {"read": 0, "neither": 0, "grammar": 0, "named": 0}
    for i, (text, line) in enumerate(zip(texts, probe("read", *[tmp_path / f"m{i}.yaml" for i in range(500)]))):
        try:
            theirs = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError) as error:
            if "\\t" in str(error) and not line.startswith("error: "):
                continue  # a tab that indents nothing, which YAML 1.2 allows (yaml_test.py)
            assert line.startswith(f"error: {tmp_path}/m{i}.yaml"), (text, line)
            counts["neither"] += 1
            continue
        if not line.startswith("error: "):
            got = json.loads(line)
            assert [rule.pop("line") for rule in got] == lines_of(text)
            assert is_grammatical(theirs) and got == as_read(theirs), text
            counts["read"] += 1
            continue
        assert line.startswith(f"error: {tmp_path}/m{i}.yaml:") or "empty, expected a list" in line, line
        assert ": rule " in line or "list" in line or any(word in line for word in REFUSED), line
        counts["named" if is_grammatical(theirs) else "grammar"] += 1
        assert not is_grammatical(theirs) or any(word in line for word in REFUSED + UNREAD), (text, line)
    print(counts)
    assert min(counts["read"], counts["neither"], counts["grammar"], counts["named"]) >= 10


def made_pattern(rng, patterns, names):
    if rng.random() < 0.5:  # one that people wrote, changed in a few places
        pattern = rng.choice(patterns)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(pattern) + 1)
            added = rng.choice(["", "", ".", "*", "+", "?", "|", "(", ")", "[", "]", "^", "$", "\\", r"\d", r"\.",
                                "{2}", "{,3}", "{1,}", "-", "(?!", "(?:", "0-9", "(?i)", "(?P<a>", "(?<=.)", "(?<!s)",
                                r"\b", r"\w+", r"\Z", "+?", "*+", "a"])
            pattern = pattern[:at] + added + pattern[at + rng.randrange(0, 3):]
        return pattern
    parts = []
    for _ in range(rng.randrange(1, 5)):
        name = rng.choice(names)
        begin = rng.randrange(len(name) + 1)
        piece = name[begin:begin + rng.randrange(1, 12)]
        piece = re.escape(piece) if rng.random() < 0.5 else piece
        kind = rng.randrange(8)
        parts.append([piece, f"(?:{piece})?", f"({piece}|{rng.choice(names)[-4:]})",
                      f"[{rng.choice('a-z,0-9,^.,^0-4,_m,]a,a-,w-y'.split(','))}]",
                      rng.choice([".*", ".", r"\d+", r"\w*", ".+?", r"[^.]+", r"\S{2,4}", r"\D"]), f"(?!{piece})",
                      f"(?=.*{piece})", f"(?i:{piece.upper()})"][kind])
    return rng.choice(["", "^"]) + "".join(parts) + rng.choice(["", "$", r"\Z"])


def test_patterns_find_what_re_finds(tmp_path):
    rng = random.Random(5)
    names = {""}
    for family in FAMILIES:
        (tmp_path / "config.json").write_text(json.dumps(config_of(family, 2).to_dict()))
        names |= set(json.loads(probe("match", tmp_path / "config.json")[0]))
    names = sorted(names)
    patterns = sorted({rule["match"]["name"] for _, _, _, rules in rule_files.FILES.values() for rule in rules
                       if "name" in rule["match"]})
    if FOLDER:
        published = [rule["match"].get("name", "") for _, path, _, _ in written(tmp_path)
                     for rule in loaded(path.read_text(encoding="utf-8"))]
        patterns = sorted(set(patterns) | set(published))
    tried = patterns + [made_pattern(rng, patterns, names) for _ in range(5000)]
    (tmp_path / "patterns.json").write_text(json.dumps(tried))
    (tmp_path / "names.json").write_text(json.dumps(names))
    counts = {"same": 0, "neither": 0, "unread": 0}
    said = probe("search", tmp_path / "patterns.json", tmp_path / "names.json")
    for i, (pattern, line) in enumerate(zip(tried, said)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = re.compile(pattern)
        except re.error:
            assert line.startswith("error: "), (pattern, line)
            counts["neither"] += 1
            continue
        if line.startswith("error: "):
            assert i >= len(patterns) and any(word in line for word in UNREAD), (pattern, line)
            counts["unread"] += 1
            continue
        assert line == "".join("1" if theirs.search(name) else "0" for name in names), pattern
        counts["same"] += 1
    print(len(names), "names,", counts)
    assert counts["same"] > 3500 and counts["neither"] > 100


def config_of(family, layers):
    name, overrides = tiny_models.MODELS[family]
    count = {} if layers == 3 and "layer_types" in overrides else {"num_hidden_layers": layers}  # a list has its own
    kind = getattr(transformers, name + "TextConfig", None) or getattr(transformers, name + "Config")
    return kind(**{**tiny_models.SIZES, **overrides, **count})


def tree_of(family, layers):
    config = config_of(family, layers)
    with torch.device("meta"):
        return config, getattr(transformers, tiny_models.MODELS[family][0] + "ForCausalLM")(config)


def ours_of(line, names):
    found = json.loads(line)
    spelled = [name.replace("block_sparse_moe", "mlp").replace("mlp.router.gate",
                                                               "mlp.gate").replace("shared_mlp", "shared_experts")
               for name in names]
    return ({name: rule if rule >= 0 else None for name, rule in zip(spelled, found["rule"]) if rule != -2},
            found["idle"])


@pytest.mark.parametrize("family, layers", [(family, 3) for family in FAMILIES] +
                         [("deepseek_v2", 60), ("deepseek_v2", 27), ("deepseek_v3", 61), ("deepseek_v3", 27),
                          ("mixtral", 32),
                          ("qwen2_moe", 28), ("qwen3_moe", 48), ("glm4_moe", 46), ("llama", 32)])
def test_rules_take_the_modules_of_stock_trees(tmp_path, family, layers):
    config, model = tree_of(family, layers)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    files = [each for each in written(tmp_path) if layers == 3 or each[2:] == (family, layers)]
    lines = probe("match", tmp_path / "config.json", *[path for _, path, _, _ in files])
    names = json.loads(lines.pop(0))
    matched = 0
    for (name, path, _, _), line in zip(files, lines):
        rules = loaded(path.read_text(encoding="utf-8"))
        if family == "hy_v3" and any(r"mlp\.gate)" in rule["match"].get("name", "") for rule in rules):
            continue  # its checkpoint has shared_mlp.gate_proj, which such a pattern means to leave out too
        theirs = {}
        walk(model, "", rules, theirs)
        # A convolution's taps stay as they are: no rule can place them. Norms of q and k without weights are none here.
        theirs = {at: rule for at, rule in theirs.items()
                  if not at.endswith((".act_fn", ".activation_fn", ".moe_statics", ".conv1d", ".qk_norm"))}
        if all(rule is None for rule in theirs.values()):
            assert line.startswith("error: ") and "none of" in line, (name, line)
            continue
        ours, idle = ours_of(line, names)
        single = {at for at in ours if re.search(r"experts\.\d+$", at)}  # transformers has no module for one expert
        assert {at: rule for at, rule in ours.items() if at not in single} == theirs, name
        assert ({rule for rule, _ in idle} == set(range(len(rules))) - set(theirs.values())
                - {ours[at] for at in single}), name
        matched += 1
    assert matched >= 1
