"""What grammars of JSON Schemas let through, against Python's json and PyPI's jsonschema.

KT_GRAMMAR_PROBE names the program grammar_probe (src/text/testing/grammar_probe.cc). Random walks over the tokens that
masks leave must end in valid instances; valid instances, printed as Python prints them, must pass token by token;
invalid ones must not.
"""

import json
import os
import pathlib
import random
import subprocess

import pytest

jsonschema = pytest.importorskip("jsonschema")

PROBE = os.environ.get("KT_GRAMMAR_PROBE")
pytestmark = pytest.mark.skipif(not PROBE, reason="KT_GRAMMAR_PROBE does not name grammar_probe")
TOKENIZER = pathlib.Path(__file__).resolve().parent.parent / "demo/tiny-deepseekv3/tokenizer.json"

ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "number": {"type": "integer"}, "zip": {"type": ["string", "null"]}},
    "required": ["street", "number", "zip"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": {"type": "integer"},
                           "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}

# name: schema, instances that are valid, instances that are not
SCHEMAS = {
    "strict object": (ADDRESS,
                      [{"street": "a", "number": 1, "zip": None}, {"street": "é\n\"", "number": -20, "zip": "9"}],
                      [{}, {"street": "a", "number": 1}, {"street": 1, "number": 1, "zip": None}, [],
                       {"street": "a", "number": 1, "zip": None, "more": 1},
                       {"street": "a", "number": 1.5, "zip": None}]),
    "optional":
        ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"const": "x"}},
          "required": ["b"], "additionalProperties": False},
         [{"b": True}, {"a": 1, "b": False}, {"b": True, "c": "x"}, {"a": 0, "b": True, "c": "x"}],
         [{}, {"a": 1}, {"b": 1}, {"b": True, "c": "y"}]),
    "open object": ({"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
                    [{"id": 1}, {"id": 1, "ide": 2}, {"id": 1, "i": [], "x": {"id": "any"}},
                     {"id": 3, "Ω\t": {}, "": 0}],
                    [{}, {"id": "x"}, {"ide": 1}]),
    "typed extras": ({"type": "object", "additionalProperties": {"type": "number"}},
                     [{}, {"a": 1}, {"a": 1.5, "b": -2}], [{"a": "x"}, {"a": 1, "b": None}]),
    "required only": ({"type": "object", "required": ["k"]}, [{"k": [1]}, {"k": None, "l": 2}], [{}, {"l": 1}]),
    "no type": ({"properties": {"a": {"type": "string"}}, "required": ["a"]}, [{"a": "x"}], [{"a": 1}, {}]),
    "anything": ({}, [1, "x", None, [[]], {"a": {"b": [True, 1.25e-3]}}], []),
    "enum": ({"enum": ["red", "green", "gre", 3, 2.5, None, True, {"a": [1, 2]}, []]},
             ["red", "gre", "green", 3, 2.5, None, True, {"a": [1, 2]}, []], ["blue", "re", 4, False, {"a": [1]}, {}]),
    "enum of type": ({"type": "string", "enum": ["a", "b", 3]}, ["a", "b"], [3, "c"]),
    "const": ({"const": "a\"\\\u00e9"}, ["a\"\\\u00e9"], ["a", None]),
    "types": ({"type": ["integer", "null", "array"], "items": {"type": "string"}, "minimum": 5}, [5, None, ["x"], []],
              [4, "x", [1]]),
    "anyOf": ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer"},
                         {"type": "array", "items": {"type": "null"}}]},
              ["abc", 12, [None, None]], ["abcd", 1.5, [1]]),
    "anyOf beside": ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                      "additionalProperties": False, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
                     [{"a": 1}, {"b": 1}, {"a": 1, "b": 2}], [{}, {"c": 1}]),
    "oneOf by tag": ({"oneOf": [
        {"type": "object", "properties": {"kind": {"const": "circle"}, "r": {"type": "number"}},
         "required": ["kind", "r"]},
        {"type": "object", "properties": {"kind": {"const": "box"}, "w": {"type": "number"}},
         "required": ["kind", "w"]}]},
        [{"kind": "circle", "r": 1.5}, {"kind": "box", "w": 2}], [{"kind": "box", "r": 1}, {"kind": "ball"}]),
    "oneOf by type": ({"oneOf": [{"type": "string"}, {"type": "boolean"}]}, ["a", False], [1, None]),
    "oneOf of constants": ({"oneOf": [{"enum": ["a", 2]}, {"type": "null"}, {"const": "b"}, {"type": "array"}]},
                           ["a", 2, None, "b", [1]], ["c", 3, {}]),
    "allOf": ({"allOf": [{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
                         {"properties": {"a": {"maximum": 9}, "b": {"type": "string"}}, "required": ["b"]}]},
              [{"a": 3, "b": ""}, {"a": 9, "b": "x"}], [{"a": 3}, {"a": 10, "b": ""}, {"a": 2, "b": ""}]),
    "allOf ref": ({"allOf": [{"$ref": "#/$defs/base"}], "properties": {"x": {"type": "null"}}, "required": ["x"],
                   "$defs": {"base": {"type": "object", "properties": {"id": {"type": "integer"}},
                                      "required": ["id"]}}},
                  [{"x": None, "id": 1}], [{"id": 1}, {"x": None}]),
    "tree": (TREE, [{"value": 1}, {"value": 1, "children": [{"value": 2, "children": []}, {"value": 3}]}],
             [{}, {"value": 1, "children": [{}]}, {"value": 1, "children": {}}]),
    "list": ({"anyOf": [{"type": "null"},
                        {"type": "object", "properties": {"head": {"type": "integer"}, "tail": {"$ref": "#"}},
                         "required": ["head", "tail"], "additionalProperties": False}]},
             [None, {"head": 1, "tail": {"head": 2, "tail": None}}], [{"head": 1}, 1]),
    "arrays": ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
               [[True, False], [True] * 4],
               [[], [True], [True] * 5, [1, 2]]),
    "no items": ({"type": "array", "maxItems": 0}, [[]], [[1]]),
    "many items": ({"type": "array", "items": {"const": 1}, "minItems": 30}, [[1] * 30, [1] * 60], [[1] * 29]),
    "tuple": ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False,
               "minItems": 1},
              [["a"], ["a", 1]], [[], [1], ["a", 1, 2]]),
    "tuple and more": ({"type": "array", "prefixItems": [{"const": 0}], "items": {"const": 1}}, [[], [0], [0, 1, 1]],
                       [[1], [0, 0]]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 5}, ["ab", "abcde", "éé😀😀é", "\n\n"],
                ["", "a", "abcdef"]),
    "long": ({"type": "string", "minLength": 100}, ["x" * 100, "x" * 300], ["x" * 99]),
    "pattern": ({"type": "string", "pattern": "^[a-z]{2,4}(-[0-9]+)?$"}, ["ab", "abcd-17"],
                ["a", "abcde", "ab-", "AB"]),
    "pattern inside": ({"type": "string", "pattern": "b+c"}, ["bc", "aabbc\n\"", "xbcx"], ["b", "ac", ""]),
    "pattern choices": ({"type": "string", "pattern": "^(foo|ba[rz])$|^\\d{3}$"}, ["foo", "baz", "123"],
                        ["fo", "bar1", "12"]),
    "pattern of all": ({"type": "string", "pattern": "^[^\"\\\\]\\w[ \\t].$"}, ["éa b", "\n_\t\""], ["\"a b", "a b"]),
    "pattern and length": ({"type": "string", "pattern": "^(ab)*$", "minLength": 3, "maxLength": 7}, ["abab", "ababab"],
                           ["ab", "abababab", "aba"]),
    "uuid": ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", ""]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29", "1999-12-31"],
             ["2023-02-29", "2023-13-01", "23-1-1"]),
    "date-time": ({"type": "string", "format": "date-time"}, ["2024-02-29T23:59:59Z", "2024-01-01T00:00:00.5+01:00"],
                  ["2024-01-01", "2024-01-01T25:00:00Z"]),
    "time": ({"type": "string", "format": "time"}, ["23:59:59Z"], ["24:00:00Z", "1:00"]),
    "ipv4": ({"type": "string", "format": "ipv4"}, ["127.0.0.1", "255.1.20.0"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": ({"type": "string", "format": "ipv6"}, ["::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "::"],
             ["1:2", ":::", "1::2::3"]),
    "email": ({"type": "string", "format": "email"}, ["a.b+c@example.org"], ["a@b@c", "a"]),
    "other format": ({"type": "string", "format": "colour"}, ["anything"], [1]),
    "integers": ({"type": "integer", "minimum": -15, "maximum": 207}, [-15, -9, 0, 7, 99, 100, 207],
                 [-16, 208, 1.5, 1000]),
    "from 100": ({"type": "integer", "exclusiveMinimum": 99}, [100, 101, 99999], [99, 10, 0, -100]),
    "to -5": ({"type": "integer", "maximum": -5}, [-5, -6, -1000], [-4, 0, 5]),
    "even": ({"type": "integer", "multipleOf": 2, "minimum": 0}, [0, 2, 1024], [1, 33, -2]),
    "sevens": ({"type": "integer", "multipleOf": 7, "maximum": 100, "minimum": -100}, [-98, 0, 7, 98], [1, 105, -99]),
    "fraction": ({"type": "number", "minimum": 0, "maximum": 1}, [0, 1, 0.5, 0.999, 1.0], [1.01, -0.1, 2]),
    "odd bounds": ({"type": "number", "exclusiveMinimum": -1.25, "maximum": 3.5}, [-1.24, -1, 0, 3.5, 3.49],
                   [-1.25, 3.51, 4, -2]),
    "narrow": ({"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.12}, [0.11, 0.105], [0.1, 0.12, 1]),
    "halves": ({"type": "number", "multipleOf": 0.5, "minimum": -2}, [0, 0.5, -1.5, 12], [0.25, -3]),
    "booleans": ({"type": "boolean"}, [True, False], [0, "true"]),
    "null": ({"type": "null"}, [None], [0, ""]),
    "annotated": ({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "t",
                   "description": "d", "default": 3,
                   "examples": [1], "$comment": "c", "type": "integer"}, [1], ["x"]),
}

# Quickly refused, each with the place it is about.
REFUSED = {
    "json_schema.properties.x.not: ": {"properties": {"x": {"not": {"type": "string"}}}},
    "json_schema.items.if: ": {"items": {"if": {}, "then": {}}},
    "json_schema.patternProperties: ": {"patternProperties": {"^a": {}}},
    "json_schema.uniqueItems: ": {"type": "array", "uniqueItems": True},
    "json_schema.oneOf: alternatives 0 and 1 may both hold": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "json_schema.oneOf: alternatives 0 and 1 may": {"oneOf": [{"required": ["x"]}, {"type": "string"}]},
    "json_schema.$ref: expected": {"$ref": "https://example.org/x.json"},
    "json_schema.$ref: the schema has no": {"$ref": "#/$defs/none"},
    "json_schema.type: expected": {"type": "text"},
    "json_schema: minItems 3 is above maxItems 2": {"type": "array", "minItems": 3, "maxItems": 2},
    "json_schema: the minimum is above": {"type": "number", "minimum": 2, "maximum": 1},
    "json_schema.pattern: pattern": {"type": "string", "pattern": "(?=a)b"},
    "json_schema.multipleOf: ": {"type": "integer", "multipleOf": 0},
    "json_schema: no value is valid": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "json_schema.additionalProperties: expected a schema": {"type": "object", "additionalProperties": 3},
}


def nested(depth, wrap, inner):
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def hostile():
    refs = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)}
    alls = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)}
    yield "nested anyOf", nested(200, lambda s: {"anyOf": [s]}, {"type": "string"}), True
    yield "very nested anyOf", '{"anyOf":[' * 10000 + "{}" + "]}" * 10000, True
    yield "wide anyOf", {"anyOf": [{"const": i} for i in range(30000)]}, True
    yield "refs", {"$ref": "#/$defs/a0", "$defs": {**refs, "a60": {"type": "string"}}}, False
    yield "all refs", {"$ref": "#/$defs/a0", "$defs": {**alls, "a60": {"type": "string"}}}, True
    yield "all of itself", {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, True
    yield "any of itself", {"anyOf": [{"$ref": "#"}, {"type": "string"}]}, True
    yield "items", {"type": "array", "maxItems": 10**9}, True
    yield "length", {"type": "string", "minLength": 10**9}, True
    yield "huge count", {"type": "string", "minLength": 1e300}, True
    yield "items of items", nested(40, lambda s: {"type": "array", "minItems": 9000, "items": s},
                                   {"type": "null"}), True
    yield "pattern", {"type": "string", "pattern": "(a{1000}){1000}"}, True
    yield "deep pattern", {"type": "string", "pattern": "(" * 5000 + "a" + ")" * 5000}, True
    yield "pattern product", {"type": "string", "pattern": "^(a|b|c|d|e){0,900}$", "maxLength": 9000}, True
    yield "many steps", {"type": "number", "multipleOf": 0.00012345}, True
    yield "big keys", {"type": "object", "properties": {f"key{i}" * 50: {} for i in range(3000)}}, True


@pytest.fixture(scope="module")
def probe():
    process = subprocess.Popen([PROBE, str(TOKENIZER), "walk"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)

    def ask(schema, **question):
        # A schema that is text is too deep for Python to print.
        schema = schema if isinstance(schema, str) else json.dumps(schema)
        process.stdin.write(json.dumps(question)[:-1] + (", " if question else "") + f'"schema": {schema}}}\n')
        process.stdin.flush()
        line = process.stdout.readline()
        assert line, "grammar_probe ended"
        return json.loads(line)

    yield ask
    process.stdin.close()
    assert process.wait(timeout=300) == 0


def validator(schema):
    checker = jsonschema.FormatChecker(formats=["date", "ipv4", "ipv6", "uuid", "email"])
    return jsonschema.Draft202012Validator(schema, format_checker=checker)


def no_repeats(pairs):
    assert len({key for key, _ in pairs}) == len(pairs), f"a key repeats in {pairs}"
    return dict(pairs)




@pytest.mark.parametrize("name", SCHEMAS)
def test_walks_are_valid(probe, name):
    schema = SCHEMAS[name][0]
    answer = probe(schema=schema, walks=40, seed=7)
    assert "error" not in answer, answer["error"]
    ended = [text for text in answer["walks"] if text is not None]
    # Few random characters happen to be the match that must come somewhere.
    assert len(ended) >= (0 if name == "pattern inside" else 25)
    check = validator(schema)
    for text in ended:
        value = json.loads(text, object_pairs_hook=no_repeats)
        if name == "halves":
            assert value * 2 == int(value * 2) and value >= -2
            continue
        check.validate(value)
    if len(SCHEMAS[name][1]) > 2 and name != "pattern inside":
        assert len(set(ended)) > 2


@pytest.mark.parametrize("name", SCHEMAS)
def test_instances(probe, name):
    schema, valid, invalid = SCHEMAS[name]
    check = validator(schema)
    texts = []
    for value in valid:
        check.validate(value)
        texts += [json.dumps(value, ensure_ascii=False, separators=(",", ":")), json.dumps(value, ensure_ascii=False)]
        texts.append(json.dumps(value, ensure_ascii=False, indent=2))
    answer = probe(schema=schema, texts=texts)
    assert answer.get("error") is None
    assert [text for text, fits in zip(texts, answer["fits"]) if not fits] == []
    texts = [json.dumps(value, ensure_ascii=False) for value in invalid]
    answer = probe(schema=schema, texts=texts)
    assert [text for text, fits in zip(texts, answer["fits"]) if fits] == []


@pytest.mark.parametrize("message", REFUSED)
def test_says_what_is_not_supported(probe, message):
    assert probe(schema=REFUSED[message]).get("error", "no error").startswith(message)


@pytest.mark.parametrize("name,schema,refused", hostile(), ids=[name for name, _, _ in hostile()])
def test_hostile_schemas_end_quickly(probe, name, schema, refused):
    answer = probe(schema=schema, walks=0 if refused else 3)
    assert ("error" in answer) == refused, answer
    assert answer["seconds"] < 120  # milliseconds on an idle machine; without bounds these take hours
    assert "\n" not in answer.get("error", "")


def random_schema(rng, depth):
    kind = rng.choice(["string", "integer", "number", "boolean", "null", "enum"]
                      + ["object", "array", "anyOf"] * (depth > 0))
    if kind == "enum":
        return {"enum": rng.sample(["a", "ab", "b\n", 1, 2.5, None, True, [1], {"k": "v"}], 3)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    schema = {"type": kind}
    if kind == "object":
        names = rng.sample(["a", "ab", "b", "name", "näme", "x y", "\"q\""], rng.randint(0, 4))
        schema["properties"] = {name: random_schema(rng, depth - 1) for name in names}
        schema["required"] = [name for name in names if rng.random() < 0.5]
        if rng.random() < 0.7:
            schema["additionalProperties"] = rng.choice([False, False, True, random_schema(rng, 0)])
    if kind == "array":
        schema["items"] = random_schema(rng, depth - 1)
        if rng.random() < 0.5:
            schema["minItems"] = rng.randint(0, 3)
            schema["maxItems"] = schema["minItems"] + rng.randint(0, 3)
    if kind in ("integer", "number") and rng.random() < 0.7:
        low = rng.choice([rng.randint(-1000, 1000), rng.randint(-20, 20), round(rng.uniform(-5, 5), 3)])
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if rng.random() < 0.7:
            range_ = rng.choice([2, 11, 130, 1.5 if kind == "number" else 4])
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + range_
    if kind == "string" and rng.random() < 0.5:
        schema.update(rng.choice([{"maxLength": rng.randint(0, 12)}, {"minLength": 3}, {"pattern": "^[a-f]*x?$"}]))
    return schema


def test_random_schemas(probe):
    rng = random.Random(11)
    for seed in range(150):
        schema = random_schema(rng, 3)
        answer = probe(schema=schema, walks=6, seed=seed)
        assert "error" not in answer, (schema, answer)
        check = validator(schema)
        texts = []
        for text in answer["walks"]:
            if text is None:
                continue
            value = json.loads(text, object_pairs_hook=no_repeats)
            check.validate(value)
            numbers = json.loads(text, parse_float=lambda _: 1e300)
            # What came of a walk and has no floats is printed as Python would and must fit as well.
            if "1e+300" not in json.dumps(numbers):
                texts += [json.dumps(value, ensure_ascii=False), json.dumps(value, ensure_ascii=False, indent=2)]
        answer = probe(schema=schema, texts=texts)
        assert all(answer["fits"]), (schema, [t for t, fits in zip(texts, answer["fits"]) if not fits])
