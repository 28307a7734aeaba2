"""The YAML reader and writer of weights/ against PyYAML.

Needs pyyaml and the program weights_probe, named by KT_WEIGHTS_PROBE. Where the two differ on purpose, DIFFERENT says
how.
"""
import datetime
import json
import math
import os
import random
import string
import subprocess

import pytest

yaml = pytest.importorskip("yaml", reason="the pyyaml package is not installed")

PROBE = os.environ.get("KT_WEIGHTS_PROBE")
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_WEIGHTS_PROBE does not name the weights_probe program")

# Both read these, and the same.
SAME = [
    "", "# only a comment\n", "---\n", "--- text\n", "--- |\n a\n...\n", "a: 1\n", "- 1\n- [2, 3]\n", "a\nb\n\nc\n",
    "a: b\n  c\n d\ne: f\n", "a: b\n  - c\n",
    "a:\n- 1\n-\n- b: 2\n  c:\n  - 3\nd: 4\n", "- - - 1\n    - 2\n  - 3\n- 4\n",
    "-\n  a: 1\n-\n  - 2\n", "a: # x\n  # y\n\n  b: 1 # z\n   # w\nc: 2\n",
    "a: 'it''s' # x\nb: \"\\x41\\u00e9\\U0001F600\\n\\t\\\\\\\"\"\n",
    "a: 'one\n  two  \n\n   three'\n", "a: \"one \\\n  two\\\n\n  three \\ \n four\"\n",
    "a: |\n  b\n   c\n\n  d # e\nf: g\n", "a: |-\n  b\n\nc: |+\n  d\n\n\ne: |\n  f", "a: |2\n    b\n  c\n",
    "a: >\n  b\n  c\n\n  d\n    e\n    f\n\n  g\n\n\n  h\n", "a: >-\n\n  b\n  c\n", "a: >+\n  b\n\n",
    "- |\n a\n- >\n b\n c\n", "- a: |\n   b\n  c: d\n", "a: |\nb: >-\nc: |+\n\n\nd: 1\n", "{}", "[]",
    "{a: 1, b, c: , 'd': [x], \"e\":2, f: {g: h},}", "[a: 1, b]", "a: [\n  1, # one\n  [2,\n  3],\n]\nb: {\n x: 1\n}\n",
    "{\"a\": [1, -2.5e+3, \"x\\u0041\\/\", null, true]}", "[a-b, -c, d:e]", "a: b#c\nd: e:f\ng: h #i\n",
    "[yes, No, ON, off, true, False, ~, null, y, n, 'yes']", "[0, 7, -7, +7, 0x1f, 1.5, .5, 5., 1.0e-4, 1.5E+3]",
    "[1e, ., +, 1.2.3, 0x, --5, 1-2, 192.168.0.1:8080, 08:30, 22:99, cuda:0, 1.5b]", "  a: 1\n  b: 2\n",
    "a : 1\n'b' : 2\n\"c d\": 3\n", "a: 1\r\nb:\r\n  - 2\r\n", "a: \u00e9\u4e2d\U0001F600\n", "a:\n  'b\n   c'\nd: e\n",
    # A recipe and rules as people write them.
    "### model\nmodel_name_or_path: /data/DeepSeek-V2-Lite\ntrust_remote_code: true\n\n### method\nstage: sft\n"
    "do_train: true\n"
    "finetuning_type: lora\nlora_rank: 8\nlora_target: all\n\ndataset: identity, alpaca_en_demo\n"
    "learning_rate: 1.0e-4\n"
    "num_train_epochs: 3.0\nbf16: true\nddp_timeout: 180000000\nuse_kt: true # the rest\n"
    "kt_config: {threads: 32, backend: AMXInt8}\n",
    "- match:\n    name: \"^model\\\\.layers\\\\.(?!.*kv_b_proj).*$\"  # regular expression\n    class: "
    "torch.nn.Linear\n"
    "  replace:\n    class: KTransformersLinear\n    kwargs:\n      generate_device: \"cuda\"\n      "
    "prefill_device: 'cuda:0'\n"
    "- match:\n    name: '^model\\.layers\\..*\\.mlp\\.experts$'\n  replace:\n    class: default\n  recursive: "
    "False # not below\n",
]

# (text, what kt reads, what PyYAML reads or, for an exception, None)
DIFFERENT = [
    ("a: 1e-4", {"a": 1e-4}, {"a": "1e-4"}),  # YAML 1.2; PyYAML wants a dot and a sign
    ("a: 1.5e3", {"a": 1500.0}, {"a": "1.5e3"}),
    ("a: -.5", {"a": -0.5}, {"a": "-.5"}),
    ("a: 0o17", {"a": 15}, {"a": "0o17"}),
    ("a: 2001-12-14", {"a": "2001-12-14"}, {"a": datetime.date(2001, 12, 14)}),  # JSON has no dates
    ("1: a\ntrue: b", {"1": "a", "true": "b"}, {1: "b"}),  # keys are text, as written; 1 and True are one in Python
    ("a:\tb", {"a": "b"}, None),  # a tab that indents nothing
    ("a: =", {"a": "="}, None),
    ("[f?g]", ["f?g"], None),
    ("[?d]", ["?d"], [{"d": None}]),
    ("|\na\n", "a\n", None),
    ("\"\\ud83d\\ude00\"", "\U0001F600", "\ud83d\ude00"),  # a pair as JSON writes it
    ("a\u2028b", "a\u2028b", "a\u2028b"),
    ("'a\u0085b'", "a\u0085b", "a b"),  # a line break in YAML 1.1 only
]

# (text, the start of the error of kt behind the name of the file, what PyYAML reads)
REFUSED = [
    ("a: &x 1\nb: *x", "1:4: found \"&\", expected a value: anchors and aliases", {"a": 1, "b": 1}),
    ("a: !!str 1", "1:4: found \"!\", expected a value: tags", {"a": "1"}),
    ("a: {<<: {b: 1}}", "1:5: found \"<<\", expected a key: merge keys", {"a": {"b": 1}}),
    ("%YAML 1.1\n---\na: 1", "1:1: found \"%\", expected the document: directives", {"a": 1}),
    ("? a\n: b", "1:1: found \"?\", expected a key that is one scalar", {"a": "b"}),
    ("a: 1\na: 2", "2:1: found the key \"a\" a second time", {"a": 2}),
    ("a: .inf", "1:4: found .inf, expected a finite number", {"a": math.inf}),
    ("a: 010", "1:4: found 010, expected no zero in front", {"a": 8}),
    ("a: 1_000", "1:4: found 1_000, expected decimal digits only", {"a": 1000}),
    ("a: 1:30", "1:4: found 1:30, expected decimal digits only", {"a": 90}),
    ("a: 0b11", "1:4: found 0b11, expected decimal digits only", {"a": 3}),
    ("'a'#b", "1:4: found \"#\", expected the end of the line", "a"),
    ("a: 18446744073709551616", "1:4: found 18446744073709551616, expected an integer", {"a": 2**64}),
]

# Neither reads these.
BAD = ["a: b: c", "a: - b", "--- a: b", "a: 1\n  b: 2", "a:\n    b: 1\n  c: 2", "  a: 1\nb: 2", "- a\nb: 1",
       "a: 1\n- b", "a: 1\nb", "'a\n b': 1", "{a\n b: 1}", "[1, 2", "[1 2}", "[,]", "[a,,b]", "[- a]", "]", "'a", "\"b",
       "'a' b", "[a] b", "\"\\q\"", "\"\\x4g\"", "a: |x\n  b", "a: |10\n  b", "a: |\n  b\n c", "a:\n\tb: 1", "a: @b",
       "a\n---\nb", "a: *x", "a: \x01"]


def read(tmp_path, texts):
    """The values, with "error: ..." for a text that was refused."""
    paths = []
    for i, text in enumerate(texts):
        paths.append(tmp_path / f"{i}.yaml")
        paths[-1].write_bytes(text.encode("utf-8"))
    done = subprocess.run([PROBE, "yaml", *map(str, paths)], capture_output=True)
    assert done.returncode == 0, done.stderr
    # Not splitlines(): text may hold U+2028.
    lines = done.stdout.decode("utf-8").split("\n")
    assert lines.pop() == "" and len(lines) == len(texts)
    return [line.replace(f"{path}:", "") if line.startswith("error: ") else json.loads(line)
            for path, line in zip(paths, lines)]


def same(left, right):
    """Equal in value and in type: 1, 1.0 and True differ."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def test_reads_as_pyyaml_does(tmp_path):
    for text, got in zip(SAME, read(tmp_path, SAME)):
        assert same(got, yaml.safe_load(text)), (text, got, yaml.safe_load(text))


def test_documented_differences(tmp_path):
    for (text, ours, theirs), got in zip(DIFFERENT, read(tmp_path, [case[0] for case in DIFFERENT])):
        assert same(got, ours), text
        if theirs is None:
            with pytest.raises(yaml.YAMLError):
                yaml.safe_load(text)
        else:
            assert yaml.safe_load(text) == theirs, text


def test_refused_on_purpose(tmp_path):
    for (text, error, theirs), got in zip(REFUSED, read(tmp_path, [case[0] for case in REFUSED])):
        assert isinstance(got, str) and got.startswith("error: " + error), (text, got)
        assert yaml.safe_load(text) == theirs, text


def test_what_neither_reads(tmp_path):
    for text, got in zip(BAD, read(tmp_path, BAD)):
        assert isinstance(got, str) and got.startswith("error: "), (text, got)
        with pytest.raises(yaml.YAMLError):
            yaml.safe_load(text)
            pytest.fail(f"PyYAML reads {text!r}")


WORDS = ["", "a", "yes", "no", "null", "~", "true", "1", "-1", "1.5", "010", "1_000", "1:30", "2001-12-14", ".inf",
         "<<", "=", "a: b", "a #b", "#", " a", "a ", "- a", "-", "?", ":", "[a]", "{a}", "*a", "&a", "!a", "|", ">",
         "%a", "@a", "'", '"', "\\", "---", "...", "a\nb", "a\n", "\n", "\n\na", " a\nb\n c\n", "a\n\n\n b", "\t",
         "a\tb", "a\r\nb", "\u00e9", "\u4e2d\u6587", "\U0001F600",
         "\u2028", "\u0085", "\ufeff", "\x00\x07\x7f", "cuda:0", r"^model\.layers\.(\d+)\.mlp$",
         "word " * 40, "x" * 300]


def random_text(rng):
    if rng.random() < 0.6:
        return rng.choice(WORDS)
    characters = string.ascii_letters + string.digits + " :-#'\"\\,[]{}\n\t!&*?|>%@`~_.\u00e9\u4e2d"
    return "".join(rng.choices(characters, k=rng.randrange(60)))


def random_value(rng, depth):
    kind = rng.randrange(8 if depth > 0 else 5)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice([0, 1, -1, rng.randrange(-2**63, 2**64)])
    if kind == 2:
        size = 10.0 ** rng.randrange(-300, 300)
        return rng.choice([0.0, 1.0, -0.5, 1e-4, 1e22, 1e300, rng.uniform(-1e3, 1e3), rng.random() * size])
    if kind in (5, 6):
        return {random_text(rng): random_value(rng, depth - 1) for _ in range(rng.randrange(6))}
    if kind == 7:
        return [random_value(rng, depth - 1) for _ in range(rng.randrange(6))]
    return random_text(rng)


def random_documents(count):
    rng = random.Random(5)
    # No anchors for values that come twice: those are not read.
    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data):
            return True

    documents = []
    while len(documents) < count:
        value = random_value(rng, 4)
        text = yaml.dump(value, Dumper=Dumper, default_flow_style=rng.choice([True, False, None]),
                         width=rng.choice([20, 80, 10000]), indent=rng.choice([2, 3, 4, 8]),
                         allow_unicode=rng.random() < 0.5,
                         default_style=rng.choice([None, None, None, "'", '"', "|", ">"]),
                         explicit_start=rng.random() < 0.3, explicit_end=rng.random() < 0.3, sort_keys=False)
        documents.append((value, text))
    return documents


def has_old_line_breaks(text):
    """Whether it has characters that break lines in YAML 1.1 only."""
    return any(character in text for character in "\u0085\u2028\u2029")


def needs_what_is_refused(text):
    """Whether the dump uses a complex key or a tag, which are refused on purpose."""
    return any(isinstance(token, yaml.TagToken) for token in yaml.scan(text)) or any(
        isinstance(token, yaml.KeyToken) and text[token.start_mark.index:token.start_mark.index + 2] in ("? ", "?\n")
        for token in yaml.scan(text))


def test_random_documents_of_pyyaml(tmp_path):
    documents = random_documents(600)
    read_back = read(tmp_path, [text for _, text in documents])
    compared = 0
    for (value, text), got in zip(documents, read_back):
        if needs_what_is_refused(text):
            assert isinstance(got, str) and got.startswith("error: "), text
            assert "tags are not read" in got or "complex keys are not read" in got, (text, got)
            continue
        if has_old_line_breaks(text):
            continue
        compared += 1
        assert same(got, value), (text, got, value)
    assert compared >= 300, compared


def test_pyyaml_reads_what_is_written(tmp_path):
    values = [value for value, _ in random_documents(150)] + WORDS + ["1e5", "0o17"]
    for i, value in enumerate(values):
        path = tmp_path / f"{i}.yaml"
        path.write_text(json.dumps(value), "utf-8")  # JSON is YAML
        done = subprocess.run([PROBE, "rewrite", path], capture_output=True)
        assert done.returncode == 0, done.stderr
        text = done.stdout.decode("utf-8")
        assert same(yaml.safe_load(text), value), (text, value)
