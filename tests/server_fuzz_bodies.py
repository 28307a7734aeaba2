"""What server_fuzz sends: valid bodies to mutate, values that do not belong, hostile bodies written by hand, and bytes
that are not quite HTTP."""
import dataclasses
import json

DEEP = 100_000
MEGABYTE = 1 << 20

WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather",
                                            "parameters": {"type": "object", "properties": {"city": {"type": "string"}},
                                                           "required": ["city"]}}}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
          "required": ["name", "age"], "additionalProperties": False}
USER = [{"role": "user", "content": "Say hello."}]
CALLS = [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\": \"Rome\"}"}}]

# (path, body): short answers, every field the API knows.
VALID = [
    ("/v1/completions", {"model": "demo", "prompt": "Once upon", "max_tokens": 3}),
    ("/v1/completions",
     {"prompt": ["a", "b"], "max_tokens": 2, "n": 1, "echo": False, "logprobs": 2, "stop": ["x", "y"],
      "seed": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "suffix": None,
      "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "best_of": 1,
      "logit_bias": {"5": 1.5}, "user": "u"}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}),
    ("/v1/chat/completions", {"model": "demo", "messages": USER, "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "system", "content": "Be short."}, *USER,
                                           {"role": "assistant", "content": "Hello."}, *USER],
                              "max_completion_tokens": 3, "stream": True, "stream_options": {"include_usage": True},
                              "logprobs": True, "top_logprobs": 3, "n": 2, "seed": 1, "stop": "x"}),
    ("/v1/chat/completions",
     {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 3,
      "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 4, "response_format": {
        "type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}}),
    ("/v1/chat/completions", {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": CALLS},
                                           {"role": "tool", "tool_call_id": "c1", "content": "Sunny"}],
                              "tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": True, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": USER, "tools": [WEATHER], "max_tokens": 4,
                              "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}),
    ("/v1/embeddings", {"input": "hello", "model": "demo"}),
    ("/tokenize", {"prompt": "Once upon a time", "content": "Once upon a time", "text": "Once upon a time"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/messages", {"model": "demo", "max_tokens": 3, "messages": USER}),
]

# Each makes a fresh value. None is so large that a thousand of them take long.
VALUES = [lambda value=value: value for value in (
    None, True, False, 0, 1, -1, 2, -0.0, 0.5, -1e9, 1e308, 5e-324, float("nan"), float("inf"),
    float("-inf"), 2**31 - 1,
    2**31, -2**31, 2**32, 2**53, 2**63 - 1, 2**63, -2**63, 2**64, 10**30, "", " ", "a", "\x00", "\ud800",
    "\udfff\ud800",
    "\U0001f98a" * 50, "<|im_start|>", "<think>", "</tool_call>", "{{ messages }}", "{% for x in y %}", "auto",
    "required", "none", "null", "../../etc/passwd", "%n%s", "-1", "1e400", "user", "tool", "json_schema", "function")]
VALUES += [lambda: [], lambda: {}, lambda: [[]], lambda: [None], lambda: {"": None}, lambda: [1, "a", None, {}],
           lambda: {"type": "text"}, lambda: {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
           lambda: ["stop"] * 3000, lambda: "x" * 20_000, lambda: list(range(-5, 3000)),
           lambda: {str(i): i for i in range(2000)},
           lambda: [[1] * 40] * 40, lambda: {"a": {"b": {"c": {"d": [{}]}}}}, lambda: [float("nan")],
           lambda: [2**40, -1],
           lambda: {"type": "json_schema"}, lambda: {"type": "json_object", "schema": 3},
           lambda: {"-1": 100, "1e9": 5, "x": "y"}]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
POSTS = [COMPLETIONS, CHAT, "/v1/embeddings", "/tokenize", "/detokenize"]


def completion(**fields):
    return json.dumps({"prompt": "a", "max_tokens": 2, **fields}).encode()


def chat(**fields):
    return json.dumps({"messages": USER, "max_tokens": 2, **fields}).encode()


def with_schema(schema):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    head = json.dumps({"messages": USER, "max_tokens": 3})[:-1]
    return (head + ', "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": '
                   'true, "schema": '
            + text + "}}}").encode()


def with_tool(parameters, name="f"):
    return chat(tools=[{"type": "function", "function": {"name": name, "parameters": parameters}}],
                tool_choice="required")


def nested_schema(depth):
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def doubling_schema(levels):
    """Small text, 2^levels leaves when written out."""
    defs = {f"d{i}": {"type": "object",
                      "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"$ref": f"#/$defs/d{i + 1}"}},
                      "required": ["a", "b"]} for i in range(levels)}
    defs[f"d{levels}"] = {"type": "boolean"}
    return {"$defs": defs, "$ref": "#/$defs/d0"}


HOSTILE_SCHEMAS = {
    "not a schema": 5, "false": False, "true": True, "list": [], "empty": {}, "null": None,
    "self reference": {"$ref": "#"},
    "circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "recursive tree":
        {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}},
         "$ref": "#/$defs/n"},
    "missing reference": {"$ref": "#/$defs/none"}, "remote reference": {"$ref": "http://127.0.0.1:1/schema"},
    "file reference": {"$ref": "file:///etc/passwd"},
    "nested 300": nested_schema(300), "nested 20000": nested_schema(20_000),
    "doubling": doubling_schema(40),
    "huge enum": {"enum": [f"value{i}" for i in range(50_000)]},
    "huge anyOf": {"anyOf": [{"type": "string", "maxLength": i} for i in range(5_000)]},
    "anyOf tower": json.loads('{"anyOf":[{"type":"null"},' * 60 + '{"type":"null"}' + "]}" * 60),
    "huge counts": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9, "maxItems": 2**63 - 1},
    "negative counts": {"type": "array", "minItems": -5, "maxItems": -7},
    "impossible counts": {"type": "array", "minItems": 5, "maxItems": 2},
    "huge string": {"type": "string", "minLength": 10**12}, "fractional length": {"type": "string", "maxLength": 1.5},
    "exponential pattern": {"type": "string", "pattern": "^(a+)+$"},
    "repeat bomb": {"type": "string", "pattern": "((a{1000}){1000}){1000}"},
    "back reference": {"type": "string", "pattern": r"(a)\1"}, "broken pattern": {"type": "string", "pattern": "(["},
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5_000)}},
    "many required": {"type": "object", "properties": {}, "required": [f"p{i}" for i in range(5_000)]},
    "numbers out of range": {"type": "integer", "minimum": 1e308, "maximum": -1e308},
    "unknown type": {"type": "spaceship"}, "types of types": {"type": [["string"]]},
    "strange keys": {"type": "object", "properties": {"\x00": {}, "\"": {}, "\U0001f98a": {}, "a" * 10_000: {}}},
    "allOf circle": {"allOf": [{"$ref": "#"}]}, "const deep": {"const": json.loads("[" * 200 + "]" * 200)},
}


def hostile():
    """(name, path, body) by hand: each is sent once."""
    for path in POSTS:
        yield f"empty {path}", path, b""
        yield f"null {path}", path, b"null"
        yield f"list {path}", path, b"[]"
        yield f"object {path}", path, b"{}"
        yield f"open {path}", path, b"{"
        yield f"nul {path}", path, b"\x00" * 64
        yield f"utf8 {path}", path, b'{"prompt": "\xff\xfe\xed\xa0\x80", "messages": "\xc3", "tokens": "\xc3"}'
        yield f"utf16 {path}", path, '{"prompt": "a"}'.encode("utf-16")
        yield f"deep lists {path}", path, b"[" * DEEP
        yield f"deep closed lists {path}", path, b'{"prompt":' + b"[" * DEEP + b"]" * DEEP + b"}"
        yield f"deep objects {path}", path, b'{"a":' * DEEP + b"1" + b"}" * DEEP
    yield from hostile_sizes()
    yield from hostile_fields()
    for name, schema in HOSTILE_SCHEMAS.items():
        yield f"schema: {name}", CHAT, with_schema(schema)
        if not isinstance(schema, str):
            yield f"tool: {name}", CHAT, with_tool(schema)


def hostile_sizes():
    ten = 10 * MEGABYTE
    yield "10 MB prompt", COMPLETIONS, b'{"max_tokens":1,"prompt":"' + b"a b " * (ten // 4) + b'"}'
    yield "10 MB of one letter", COMPLETIONS, b'{"max_tokens":1,"prompt":"' + b"a" * ten + b'"}'
    yield "10 MB of spaces", COMPLETIONS, b" " * ten
    yield "10 MB of escapes", COMPLETIONS, b'{"max_tokens":1,"prompt":"' + b"\\u0041" * (ten // 6) + b'"}'
    yield "10 MB message", CHAT, b'{"max_tokens":1,"messages":[{"role":"user","content":"' + b"word " * (
        ten // 5) + b'"}]}'
    yield "10 MB of numbers", COMPLETIONS, b'{"max_tokens":1,"prompt":[' + b"1," * (ten // 2) + b"1]}"
    yield "10 MB tokenize", "/tokenize", (b'{"prompt":"' + b"a" * ten + b'"}')
    yield "10 MB detokenize", "/detokenize", b'{"tokens":[' + b"1," * (ten // 2) + b"1]}"
    yield "10 MB number", COMPLETIONS, b'{"prompt":"a","max_tokens":' + b"9" * ten + b"}"
    yield "1 MB key", COMPLETIONS, b'{"prompt":"a","max_tokens":1,"' + b"k" * MEGABYTE + b'":1}'
    yield "100k keys", COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 1,
                                                **{f"k{i}": i for i in range(100_000)}}).encode()
    yield "100k messages", CHAT, json.dumps({"messages": USER * 100_000, "max_tokens": 1}).encode()
    yield "100k prompts", COMPLETIONS, json.dumps({"prompt": ["a"] * 100_000, "max_tokens": 1}).encode()


def hostile_fields():
    for field in ("n", "max_tokens", "best_of", "logprobs", "seed", "top_k"):
        for value in (-1, 0, 10**6, 2**31, 2**63, 10**30, 1.5, "1", None, [], float("nan"), float("inf")):
            yield f"{field}={value!r}", COMPLETIONS, completion(**{field: value})
    for field in ("top_logprobs", "max_completion_tokens", "n"):
        for value in (-1, 21, 10**9, 2**64, "3", 0.5):
            yield f"chat {field}={value!r}", CHAT, chat(logprobs=True, **{field: value})
    for field in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        for value in (-1, -1e308, 1e308, float("nan"), float("inf"), "hot", [], 5e-324):
            yield f"{field}={value!r}", COMPLETIONS, completion(**{field: value})
        yield f"{field}=1e400", COMPLETIONS, completion()[:-1] + f', "{field}": 1e400}}'.encode()
    yield "100k stops", COMPLETIONS, completion(stop=["x"] * 100_000)
    yield "empty stops", COMPLETIONS, completion(stop=["", "", ""])
    yield "long stop", COMPLETIONS, completion(stop="x" * MEGABYTE)
    yield "numbers as stop", COMPLETIONS, completion(stop=[1, 2])
    for bias in ({"-1": 1}, {"999999999": 1}, {"a": 1}, {"1": "x"}, {"1": 1e400}, {"1": None},
                 {"1": float("nan")}, [], 5, "x",
                 {"99999999999999999999999": 1}, {"1.5": 1}, {str(i): -100 for i in range(60_000)}):
        yield f"logit_bias={str(bias)[:40]}", COMPLETIONS, completion(logit_bias=bias)
    yield "duplicate keys", COMPLETIONS, b'{"prompt":"a","prompt":[1],"max_tokens":1,"max_tokens":-5}'
    yield "lone surrogate", COMPLETIONS, b'{"prompt":"\\ud800 \\udc00\\ud800","max_tokens":1}'
    yield "nul in prompt", COMPLETIONS, b'{"prompt":"a\\u0000b","max_tokens":1}'
    for tokens in ([-1], [2**31], [2**63], [1.5], ["a"], [None], [[]], [999_999_999], "1", {"0": 1}):
        yield f"detokenize {tokens!r}", "/detokenize", json.dumps({"tokens": tokens}).encode()
        yield f"prompt {tokens!r}", COMPLETIONS, completion(prompt=tokens)
    for messages in ([], [{}], [None], [[]], "hi", {"role": "user"}, [{"role": "user"}], [{"content": "x"}],
                     [{"role": "king", "content": "x"}], [{"role": "user", "content": 5}],
                     [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user", "content": [None]}],
                     [{"role": "tool", "content": "x"}], [{"role": "assistant", "tool_calls": [{"function": {}}]}],
                     [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[["}}]}],
                     [{"role": "assistant", "content": "x"}], [{"role": "user", "content": "{{ 7*7 }}{% raw %}"}]):
        yield f"messages {str(messages)[:60]}", CHAT, chat(messages=messages)
    for tools in ([], {}, "x", [5], [{}], [{"type": "function"}], [{"type": "function", "function": {}}],
                  [{"type": "function", "function": {"name": ""}}],
                  [{"type": "function", "function": {"name": "a" * 100_000}}],
                  [{"type": "function", "function": {"name": "</tool_call>\"\n{"}}], [WEATHER] * 2_000):
        for choice in ("auto", "required", {"type": "function", "function": {"name": "nobody"}}, 5):
            yield f"tools {str(tools)[:40]} {choice}", CHAT, chat(tools=tools, tool_choice=choice)


@dataclasses.dataclass
class RawCase:
    name: str
    pieces: list
    wants: list = None  # lists of statuses that may come, in order; None: any reply that is in order, or none
    method: str = "POST"


def raw_cases():
    """Bytes on a socket."""
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    refused = [[400], []]
    for line in (b"", b"\r\n" * 50, b"GET\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
                 b"GET / HTTP/1.1 x\r\n\r\n",
                 b"/ GET HTTP/1.1\r\n\r\n", b"G\x00T / HTTP/1.1\r\n\r\n",
                 b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
                 b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET " + b"/a" * 40_000 + b" HTTP/1.1\r\n\r\n", b"\xff" * 5000,
                 b"GET /%zz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
                 b"GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", b"A" * 100_000,
                 b"GET http://[::1/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
                 b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
                 b"CONNECT a:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"TRACE / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        yield RawCase(f"line {line[:30]!r}", [line], method="GET")
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    yield RawCase("10k headers", [head + b"x: y\r\n" * 10_000 + b"\r\n"], [[431], [400], []], "GET")
    yield RawCase("1 MB header", [head + b"x: " + b"y" * MEGABYTE + b"\r\n\r\n"], [[431], [400], []], "GET")
    yield RawCase("header without end", [head + b"x: " + b"y" * 5000], None, "GET")
    yield RawCase("header with NUL", [head + b"x: a\x00b\r\n\r\n"], refused, "GET")
    yield RawCase("header without colon", [head + b"nonsense\r\n\r\n"], refused, "GET")
    yield RawCase("space before colon", [head + b"Content-Length : 3\r\n\r\nabc"], refused, "GET")
    yield RawCase("folded header", [head + b"x: a\r\n b\r\n\r\n"], None, "GET")
    post = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for length in (b"-1", b"abc", b"1e3", b"99999999999999999999999", b"0x10", b"+5", b"5, 6", b"", b"5 5"):
        yield RawCase(f"length {length!r}", [post + b"Content-Length: " + length + b"\r\n\r\nabcde"],
                      [[400], [413], []])
    yield RawCase("huge length", [post + b"Content-Length: 999999999999\r\n\r\n"], [[413], [400], []])
    yield RawCase("body cut short", [post + b"Content-Length: 500\r\n\r\n{"], None)
    # What one party reads as one request and another as two: refused, and the inner request is not answered.
    inner = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield RawCase("length and chunked",
                  [post + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner], refused)
    yield RawCase("two lengths", [post + b"Content-Length: 5\r\nContent-Length: 0\r\n\r\n" + inner], refused)
    yield RawCase("odd coding", [post + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + inner], [[400], [501], []])
    yield RawCase("coding twice",
                  [post + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + inner],
                  [[400], [501], []])
    chunked = post + b"Transfer-Encoding: chunked\r\n\r\n"
    for chunk in (b"zz\r\n", b"-1\r\n", b"fffffffffffffffff\r\nabc", b"5\r\nabcdefghij\r\n0\r\n\r\n",
                  b"5;" + b"x" * 100_000 + b"\r\n",
                  b"\r\n\r\n", b"5\nabcde\n0\n\n", b" 5\r\nabcde\r\n0\r\n\r\n", b"0x5\r\nabcde\r\n0\r\n\r\n"):
        yield RawCase(f"chunk {chunk[:20]!r}", [chunked + chunk], [[400], [413], [431], []])
    yield RawCase("trailers without end", [chunked + b"0\r\n" + b"x: y\r\n" * 10_000], [[400], [431], []])
    yield RawCase("tiny chunks", [chunked + b"1\r\n \r\n" * 3000 + b"2\r\n{}\r\n0\r\n\r\n"], [[400], [200]])
    yield RawCase("pipelined", [get + get + get], [[200, 200, 200]], "GET")
    yield RawCase("pipelined bad last", [get + b"nonsense\r\n\r\n"], [[200, 400], [200]], "GET")
    yield RawCase("continue", [post + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n", b"{}"], [[400], [200]])
    yield RawCase("other expectation", [post + b"Content-Length: 2\r\nExpect: magic\r\n\r\n{}"],
                  [[417], [400], [200], []])
    yield RawCase("HTTP/1.0", [b"GET /health HTTP/1.0\r\n\r\n"], [[200]], "GET")
    yield RawCase("head", [b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"],
                  [[200], [405]], "HEAD")
    yield RawCase("method not known", [b"BREW /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"],
                  [[405], [404], [501], [400]])
    yield RawCase("wrong method", [b"DELETE /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"],
                  [[405], [404]])
    yield RawCase("vanishes", [post + b"Content-Length: 100\r\n\r\n{\"prompt\": \"a"], None)
