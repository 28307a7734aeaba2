"""Calls that the families' templates write, rendered by Python's Jinja2, read back by the server's own reader.
KT_SYNTAX_PROBE names the program that reads, whole and cut at every byte."""
import json
import os
import random
import subprocess

import pytest

PROBE = os.environ.get("KT_SYNTAX_PROBE")
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_SYNTAX_PROBE does not name syntax_probe")
pytest.importorskip("jinja2")
from chat_template_test import ENV, FOLDER

# What a template shows, and the most calls that it writes in one answer.
FAMILIES = {"deepseek_v3": ("deepseekv3", 9), "deepseek_v32": ("deepseekv32", 9), "glm4_moe": ("glm45", 9),
            "glm47": ("glm47", 9),
            "gpt_oss": ("gpt-oss", 1), "hy3": ("hy_v3-opensource", 9), "hy3_preview": ("hy_v3", 9),
            "kimi_k2": ("kimi_k2", 9),
            "minimax_m2": ("minimax-m2", 9), "mistral": ("mistral", 9), "mistral_ids": ("mistral", 9),
            "mistral_list": ("mistral-list", 9),
            "qwen2": ("hermes", 9), "qwen3": ("hermes", 9), "qwen3_coder": ("qwen3_coder", 9),
            "solar_open": ("solar_open", 9)}
# Those whose calls have ids in the text.
WITH_IDS = ("kimi_k2", "mistral_ids", "solar_open")
MARKERS = ["</tool_call>", "<tool_call>", "<arg_key>", "<arg_value>", "</arg_key>", "</arg_value>", "<parameter=a>",
           "</parameter>", "</function>", "</invoke>", "<invoke name=\"x\">", "<|call|>", "<|end|>",
           "<|tool_call_end|>", "<|tool_calls_section_end|>", "<｜tool▁call▁end｜>", "</｜DSML｜parameter>",
           "</｜DSML｜invoke>", "[TOOL_CALLS]", "[ARGS]", "</minimax:tool_call>", "<think>", "</think>", "<tool_sep>",
           "</tool_calls>", "</arg_value:opensource>", "</tool_call:opensource>", "<|tool_call:end|>",
           "<|tool_call:args|>", "<|calls|>", "<|begin|>assistant", "<|content|>", "[CALL_ID]", "```", "{", "}", "\"",
           "\\", "<", "</"]


@pytest.fixture(scope="module")
def probe():
    process = subprocess.Popen([PROBE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(**case):
        process.stdin.write(json.dumps(case).encode() + b"\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        assert "error" not in answer, answer
        return answer

    yield ask
    process.stdin.close()
    assert process.wait() == 0


def schema_of(kind, rng):
    return {"string": {"type": "string"}, "integer": {"type": "integer"}, "number": {"type": "number"},
            "boolean": {"type": "boolean"},
            "object": {"type": "object"}, "array": {"type": "array"},
            "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "enum": {"type": "string", "enum": ["c", "f"]}, "reference": {"$ref": "#/$defs/name"}}[kind]


def text_of(rng):
    words = ["Rome", "5", "true", "null", "é😀", " ", "\n", "  two  ", "3.5", "[1]", "a\tb", *MARKERS]
    return "".join(rng.choice(words) for _ in range(rng.randrange(5)))


def value_of(kind, rng):
    if kind in ("string", "reference"):
        return text_of(rng)
    if kind == "optional":
        return rng.choice([None, "x" + text_of(rng)])
    return {"integer": lambda: rng.randrange(-9, 10**12), "number": lambda: rng.choice([0.5, -1.25, 3, 1e20]),
            "boolean": lambda: rng.random() < 0.5, "enum": lambda: rng.choice("cf"),
            "object": lambda: {"k": text_of(rng), "list": [text_of(rng), None, {"x": 1}]},
            "array": lambda: [text_of(rng) for _ in range(rng.randrange(3))]}[kind]()


KINDS = ["string", "integer", "number", "boolean", "object", "array", "optional", "enum", "reference"]
ENDS = {"glm45": "</arg_value>", "glm47": "</arg_value>", "qwen3_coder": "</parameter>", "minimax-m2": "</parameter>",
        "deepseekv32": "</｜DSML｜parameter>", "hy_v3": "</arg_value>", "hy_v3-opensource": "</arg_value:opensource>"}


def readable(syntax, text):
    """Whether a bare string can be told from the tags around it: what ends it is followed by no tag within it."""
    end = ENDS.get(syntax)
    return end is None or end not in text


def random_call(syntax, rng, number):
    properties, arguments = {}, {}
    for i in range(rng.randrange(5)):
        kind = rng.choice(KINDS)
        value = value_of(kind, rng)
        while isinstance(value, str) and not readable(syntax, value):
            value = value_of(kind, rng)
        properties[f"{kind}_{i}"] = schema_of(kind, rng)
        arguments[f"{kind}_{i}"] = value
    name = rng.choice(["get_weather", "ns.now", "f-2"]) + str(number)
    tool = {"type": "function", "function": {"name": name, "description": "x", "parameters": {
        "type": "object", "properties": properties, "$defs": {"name": {"type": "string"}}}}}
    call_id = f"abc12345{number}" if syntax.startswith("mistral") else f"functions.{name}:{number}"
    return tool, {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls_in(pieces):
    names = [text for kind, _, text, _ in pieces if kind == "call"]
    arguments = ["" for _ in names]
    for kind, call, text, _ in pieces:
        if kind == "arguments":
            arguments[call] += text
    return names, [json.loads(text) for text in arguments]


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_that_templates_write_come_back(probe, family):
    syntax, most = FAMILIES[family]
    source = (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")
    template = ENV.from_string(source)
    rng = random.Random(family)
    for _ in range(25):
        made = [random_call(syntax, rng, i) for i in range(rng.randint(1, min(most, 3)))]
        tools = [tool for tool, _ in made]
        user = {"role": "user", "content": "Go."}
        answer = {"role": "assistant", "content": rng.choice(["", "I look."]), "tool_calls": [call for _, call in made]}
        common = {"tools": tools, "bos_token": "<s>", "eos_token": "</s>"}
        before = template.render(messages=[user], **common)
        after = template.render(messages=[user, answer], **common)
        # GLM's older template puts a line break before the answer which the prompt without one has not.
        text = after[len(os.path.commonprefix([before, after])):]
        read = probe(template=source, tools=tools, text=text)
        assert read["syntax"] == syntax and read["differs"] == 0, text
        names, arguments = calls_in(read["pieces"])
        assert names == [call["function"]["name"] for _, call in made], text
        assert arguments == [call["function"]["arguments"] for _, call in made], text
        assert not read["cut_off"]
        ids = [p[3] for p in read["pieces"] if p[0] == "call"]
        assert ids == [call["id"] if family in WITH_IDS else "" for _, call in made]


def test_pythons_words_for_booleans(probe):
    """Qwen3-Coder's template writes True and None; a string stays what it is."""
    source = (FOLDER / "qwen3_coder.jinja").read_text(encoding="utf-8")
    properties = {"a": {"type": "boolean"}, "b": {"type": ["string", "null"]}, "c": {"type": "string"}}
    tools = [{"type": "function",
              "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}]
    arguments = {"a": True, "b": None, "c": "True"}
    text = ENV.from_string(source).render(tools=tools, messages=[{"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": arguments}}]}])
    assert "\nTrue\n" in text and "\nNone\n" in text
    assert (calls_in(probe(template=source, tools=tools, text=text[text.index("<|im_start|>assistant"):])["pieces"])[1]
            == [arguments])
