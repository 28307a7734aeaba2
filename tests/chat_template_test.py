"""Our chat templates against Python's Jinja2, set up as transformers does it. KT_TEMPLATE_PROBE names the program that
renders with ours; what both must agree on is the text, or that there is an error."""
import copy
import datetime
import itertools
import json
import os
import pathlib
import random
import subprocess

import pytest

PROBE = os.environ.get("KT_TEMPLATE_PROBE")
pytestmark = [pytest.mark.skipif(not PROBE, reason="KT_TEMPLATE_PROBE does not name template_probe"),
              pytest.mark.filterwarnings("ignore::SyntaxWarning")]  # of random templates, compiled to Python
jinja2 = pytest.importorskip("jinja2")
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = 1735787045
FOLDER = pathlib.Path(__file__).parent / "chat_templates"


class Generation(Extension):
    """{% generation %}: what marks the assistant's text for training; the text itself is unchanged."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller):
        return caller()


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.datetime.fromtimestamp(NOW).strftime(form)
    return env


ENV = environment()


def reference(source, variables):
    try:
        return "output", ENV.from_string(source).render(**copy.deepcopy(variables))  # |indent changes lists
    except Exception as e:  # whatever Python says, ours has to refuse too
        return "error", f"{type(e).__name__}: {e}"


class Probe:
    """One process for all cases; a case that kills it fails alone."""

    def __init__(self):
        self.start()

    def start(self):
        self.process = subprocess.Popen([PROBE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, source, variables):
        line = json.dumps({"template": source, "variables": variables, "now": NOW})
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            code = self.process.wait()
            self.start()
            pytest.fail(f"the probe ended with {code} on {source[:200]!r}")
        return json.loads(answer)


@pytest.fixture(scope="module")
def probe():
    p = Probe()
    yield p
    p.process.stdin.close()
    p.process.wait()


def agree(probe, source, variables):
    kind, wanted = reference(source, variables)
    got = probe(source, variables)
    if kind == "output":
        assert got.get("output", got) == wanted, source
    else:
        assert "error" in got, f"{source!r} gave {got} where Jinja2 says {wanted}"
        assert "\n" not in got["error"] and got["error"].startswith("chat template probe line ")
    return kind


# (a) The families.
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather, \"now\" <or> later",
    "parameters": {"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string", "description": "Ville, e.g. Orléans 🌧"},
        "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
        "days": {"type": "integer", "minimum": 1, "maximum": 10.5},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}},
                  "required": ["lat"]},
        "any": {"oneOf": [{"type": "string", "default": "x"}, {"type": "number"}]},
        "maybe": {"type": ["string", "null"], "nullable": True}}}}}
TIME = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}
CALL = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rom", "days": 2}}},
    {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": {}}}]}
RESULTS = [{"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "{\"sky\": \"grey\"}"},
           {"role": "tool", "tool_call_id": "call_2", "name": "now", "content": "12:00"}]
SYSTEM = {"role": "system", "content": "  You are <b>brief</b>.\n"}
USER = {"role": "user", "content": "Grüße! {{ not a tag }} {% nor this %}\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
REASONED = {"role": "assistant", "content": "Done.", "reasoning_content": "\nfirst this\n"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER, REASONED, USER],
    "turns without system": [USER, ANSWER, USER],
    "call": [SYSTEM, USER, CALL, *RESULTS],
    "call answered": [USER, CALL, *RESULTS, REASONED, USER],
    "call with content": [USER, {**CALL, "content": "I look.", "reasoning_content": "need it"}, RESULTS[0],
                          ANSWER, USER],
    "thoughts by other names": [USER, {**CALL, "thinking": "need it", "reasoning": "need it"}, *RESULTS,
                                {"role": "assistant", "content": "Done.", "thinking": "so", "reasoning": "so"}],
    "thought beside content and calls": [USER, {**CALL, "content": "I look.", "thinking": "need it"}, *RESULTS],
    "parts": [SYSTEM, PARTS],
    "ends with assistant": [USER, REASONED],
    "two users": [USER, USER],
    "one call": [SYSTEM, USER, {**CALL, "tool_calls": CALL["tool_calls"][:1]}, RESULTS[0], ANSWER, USER],
    "arguments as text": [USER, {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "browser", "arguments": "{\"q\": 1}"}}]}, RESULTS[1]],
    "ids of nine characters":
        [SYSTEM, USER, {**CALL, "tool_calls": [{**c, "id": f"abc123{c['id'][-1]}de"} for c in CALL["tool_calls"]]},
         *[{**r, "tool_call_id": f"abc123{r['tool_call_id'][-1]}de"} for r in RESULTS], REASONED, USER],
    "empty": [],
}
OPTIONS = [{}, {"add_generation_prompt": True}, {"add_generation_prompt": True, "enable_thinking": False},
           {"add_generation_prompt": True, "tools": [WEATHER, TIME]}, {"tools": [TIME], "enable_thinking": True},
           {"add_generation_prompt": True, "tools": [WEATHER], "builtin_tools": ["browser", "python"],
            "reasoning_effort": "high", "model_identity": "You are a test."}]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", sorted(p.name for p in FOLDER.glob("*.jinja")))
def test_family(probe, family, conversation):
    source = (FOLDER / family).read_text(encoding="utf-8")
    outcomes = [agree(probe, source, {"messages": CONVERSATIONS[conversation], "bos_token": "<s>", "eos_token": "</s>",
                                      **options}) for options in OPTIONS]
    if conversation in ("user", "system", "turns"):
        assert "output" in outcomes


# (b) The language.
VARIABLES = {
    "s": "Hello, Wörld", "empty": "", "multi": "  a\n b \n\nc\t", "n": 7, "neg": -3, "zero": 0, "f": 2.5, "big": 1e20,
    "small": 1e-7, "t": True, "no": False, "nil": None, "xs": [3, 1, 2], "words": ["b", "A", "c", "a"],
    "d": {"b": 1, "a": [1, {"x": None}], "items": 5}, "dd": {"one": {"k": 1, "v": "z"}, "two": {"k": 0, "v": "y"}},
    "rows": [{"k": 2, "v": "b", "g": "x"}, {"k": 1, "v": "a", "g": "y"}, {"k": 3, "g": "x"}],
    "nested": [[1, 2], [3], []],
    "path": "a/b/c.txt", "emoji": "😀é文", "quotes": "it's \"q\" \\ \t", "num": " 42 ", "hex": "0x1f",
}
VALUES = ["s", "empty", "multi", "n", "neg", "zero", "f", "big", "t", "no", "nil", "xs", "words", "d", "nested",
          "emoji", "missing", "'lit'", "[]", "{}", "()", "(1,)", "(1, 'a')", "1.0", "-0.0", "range(3)", "d.items()",
          "quotes", "small"]


def expressions():
    for v in VALUES:
        yield from (f"{{{{ {v} }}}}", f"{{{{ [{v}] }}}}" if v != "missing" else "", f"{{{{ {v}|tojson }}}}",
                    f"{{% if {v} %}}yes{{% else %}}no{{% endif %}}",
                    f"{{% for x in {v} %}}[{{{{ x }}}}]{{% else %}}-{{% endfor %}}", f"{{{{ {v}|length }}}}",
                    f"{{{{ {v}|string }}}}", f"{{{{ {v} is defined }}}}", f"{{{{ {v}|list }}}}", f"{{{{ {v}|first }}}}",
                    f"{{{{ {v}|last }}}}", f"{{{{ -{v} }}}}", f"{{{{ {v}|int }}}}", f"{{{{ {v}|float }}}}",
                    f"{{{{ {v}|abs }}}}", f"{{{{ {v}|upper }}}}", f"{{{{ {v}|trim }}}}", f"{{{{ {v}|title }}}}",
                    f"{{{{ {v}|capitalize }}}}", f"{{{{ {v}|sort }}}}", f"{{{{ {v}|reverse|list }}}}",
                    f"{{{{ {v}|default('D') }}}}", f"{{{{ {v}|default('D', true) }}}}", f"{{{{ {v}|join(',') }}}}",
                    f"{{{{ {v}|min }}}}", f"{{{{ {v}|max }}}}", f"{{{{ {v}|sum }}}}", f"{{{{ {v}|unique|list }}}}",
                    f"{{{{ {v}|items|list }}}}", f"{{{{ {v}|dictsort }}}}", f"{{{{ {v}|round }}}}",
                    f"{{{{ {v}|wordcount }}}}", f"{{{{ {v}[0] }}}}", f"{{{{ {v}[-1] }}}}", f"{{{{ {v}[1:] }}}}",
                    f"{{{{ {v}[::-1] }}}}", f"{{{{ {v}['a'] }}}}", f"{{{{ {v}.a }}}}", f"{{{{ {v}.a.b }}}}",
                    f"{{{{ {v}.__class__ }}}}", f"{{{{ {v}.__class__.__mro__ }}}}", f"{{{{ {v}() }}}}",
                    f"{{{{ {v}|indent }}}}", f"{{{{ {v} ~ '|' ~ {v} }}}}", f"{{{{ not {v} }}}}", f"{{{{ {v}|e }}}}",
                    f"{{{{ '%s' % {v} }}}}" if v not in ("(1, 'a')", "()", "missing") else "",
                    f"{{{{ {v}|replace('l', 'L') }}}}", f"{{{{ {v}|select|list }}}}",
                    f"{{{{ {v}|map('string')|list }}}}", f"{{% set a, b = {v} %}}{{{{ a }}}}")
        for test in ("none", "string", "number", "integer", "float", "boolean", "mapping", "sequence", "iterable",
                     "true", "false", "odd", "even", "divisibleby 3", "callable", "undefined", "sameas none",
                     "in [1, 7]", "eq 7", "gt 2",
                     "lower", "upper"):
            yield f"{{{{ {v} is {test} }}}}{{{{ {v} is not {test} }}}}"
    for a, b in itertools.product(["s", "n", "neg", "f", "t", "nil", "xs", "d", "missing", "'l'", "0", "2.0", "(1,)",
                                   "[1]"], repeat=2):
        for op in ("+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", ">=", "in", "not in", "and", "or", "~"):
            yield f"{{{{ {a} {op} {b} }}}}"
    strings = ["s", "multi", "path", "emoji", "quotes", "empty", "num"]
    calls = ["strip()", "lstrip()", "rstrip()", "strip('Hc ')", "strip(none)", "split()", "split('/')", "split('l', 1)",
             "rsplit('/', 1)", "rsplit(none, 1)", "split(none, 1)", "split('')", "splitlines()", "upper()", "lower()",
             "title()", "capitalize()", "startswith('a')", "startswith(('x', '  '))", "endswith('t')",
             "endswith(['t'])", "replace('l', 'LL')", "replace('', '-')", "replace('l', '', 1)", "find('l')",
             "rfind('l')", "find('zz')", "index('zz')", "count('l')", "count('')", "join(['a', 'b'])", "join('abc')",
             "join([1])", "isdigit()", "isalpha()", "isalnum()", "isspace()", "isupper()", "islower()", "zfill(20)",
             "ljust(15, '.')", "rjust(15)", "center(16)", "removeprefix('He')", "removesuffix('txt')", "partition('/')",
             "rpartition('/')", "find('l', 3)", "find('l', -3, 20)", "nosuch()", "strip", "encode", "format(1)",
             "swapcase2()", "startswith()", "upper(1)", "split(sep='/')", "split(maxsplit=1)"]
    for v, c in itertools.product(strings, calls):
        if c not in ("strip", "encode"):
            yield f"{{{{ {v}.{c} }}}}"
    for v in ("s", "xs", "emoji", "(1, 2, 3)", "d", "n", "nil"):
        for cut in (":", "1:", ":1", "-2:", ":-1", "::2", "::-1", "5:1:-2", "-100:100", "100:", "::0", "1:2:3",
                    "none:2", "'a':", ":missing"):
            yield f"{{{{ {v}[{cut}] }}}}"
    yield from LANGUAGE


LANGUAGE = [line for line in r"""
{{ 1 if t }}|{{ 1 if no }}|{{ 1 if no else 2 if no else 3 }}
{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 1 == 1.0 == true }}
{{ 2 ** 3 ** 2 }} {{ -2 ** 2 }} {{ 7 // -2 }} {{ -7 % 3 }} {{ 7.5 % -2 }} {{ 1 / 4 }} {{ 10 // 0 }}
{{ 1 + 2 ~ 3 }} {{ 'a' ~ 1 + 2 }} {{ not 1 == 2 }} {{ - 3|abs }} {{ -3|abs }} {{ (-3)|abs }}
{{ 1e3 }} {{ 1.5e-10 }} {{ 123456789012345678.0 }} {{ 0.1 + 0.2 }} {{ 1_000 }} {{ 0x1F }} {{ 0b11 }} {{ 0o17 }} \
{{ 1e16 }} {{ 1e15 }}
{{ 'a' 'b' "c" }} {{ 'it\'s' }} {{ "\u00e9\n\t\x41\101" }} {{ 'a\qb' }}
{{ {'a': 1, 'b': [1, 2.0, 'x', none, true]} }} {{ {1: 2, 1.0: 3, true: 4} }} {{ {'a': 1, 'a': 2} }}
{{ {[1]: 2} }}
{{ (1) }} {{ (1,) }} {{ () }} {{ 1, 2 }} {{ [1, 2,] }} {{ {'a': 1,} }}
{{ d.items is callable }}{{ d['items'] }} {{ d.b }} {{ d['a'][1].x }} {{ d.get('zz') }} {{ d.get('zz', 3) }} \
{{ d.get('b') }}
{{ d.keys()|list }} {{ d.values()|list }} {{ d.items()|list }} {{ d.keys() }} {{ d|list }} {{ 'b' in d }} {{ 1 in d }}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}
{% for k, v in dd|dictsort(reverse=true) %}{{ k }}{% endfor %}{% for k, v in dd|dictsort(by='value') %}{{ k }}\
{% endfor %}
{% for x in xs %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}\
{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.cycle('a', 'b') }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}
{% for x in xs if x > 1 %}{{ x }}{{ loop.length }}{% else %}none{% endfor %}{% for x in xs if x > 9 %}{{ x }}\
{% else %}none{% endfor %}
{% for x in xs %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}
{% for a in [1, 2] %}{% for b in [1, 2] %}{{ loop.index }}{% if b == 1 %}{% continue %}{% endif %}{{ a }}\
{% endfor %}{{ loop.index }}{% endfor %}
{% for a, b in [(1, 2), [3, 4], 'xy'] %}{{ a }}-{{ b }} {% endfor %}
{% for a, b in [(1, 2, 3)] %}{{ a }}{% endfor %}
{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}
{% for x in nil %}{{ x }}{% endfor %}
{% for x in 5 %}{{ x }}{% endfor %}
{% for x in missing %}{{ x }}{% else %}e{% endfor %}
{% for x in missing.a %}{{ x }}{% endfor %}
{% set x = 1 %}{% for i in xs %}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}
{% set ns = namespace(x=1, y=[]) %}{% for i in xs %}{% set ns.x = ns.x + i %}{% set ns.y = ns.y + [i] %}\
{% endfor %}{{ ns.x }}{{ ns.y }}{{ ns.zz }}
{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}
{% set d.x = 1 %}{{ d.x }}
{% set missing.x = 1 %}
{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set a, b = b, a %}{{ a }}{{ b }}
{% set a, b = [1] %}
{% set x = 1, 2 %}{{ x }}{% set x %}  block {{ n }} {% endset %}[{{ x }}]{% set x | upper | trim %} up {% endset %}\
[{{ x }}]
{% if n > 5 and s %}a{% elif n %}b{% else %}c{% endif %}{% if missing is defined %}x{% elif nil is none %}y{% endif %}
{% macro m(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, 3) }} {{ m(b=5, a=1) }} {{ m() }} \
{{ m(1, c=9) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(z=2) }}
{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, z=4) }}
{% macro m() %}<{{ caller() }}>{% endmacro %}{% call m() %}in{{ n }}{% endcall %}
{% macro m() %}<{{ caller(1, 2) }}>{% endmacro %}{% call(a, b) m() %}{{ a }}+{{ b }}{% endcall %}
{% macro m() %}x{% endmacro %}{% call m() %}in{% endcall %}
{% macro fact(n) %}{% if n > 1 %}{{ n * (fact(n - 1)|int) }}{% else %}1{% endif %}{% endmacro %}{{ fact(5) }}
{% macro m() %}{{ x }}{% endmacro %}{% set x = 1 %}{{ m() }}{% set x = 2 %}{{ m() }}
{% for i in xs %}{% macro m() %}{{ i }}{% endmacro %}{{ m() }}{% endfor %}
{% macro m() %}{% set n = 9 %}{{ n }}{% endmacro %}{{ m() }}{{ n }}
{% macro m() %}{{ loop.index }}{% endmacro %}{% for i in xs %}{{ m() }}{% endfor %}
{% filter upper %}abc {{ s }}{% endfilter %} {% filter replace('a', 'b')|upper %}abca{% endfilter %}
{% raw %}{{ x }} {% if %}{% endraw %}|{% raw -%}   x  {%- endraw %}|
{% generation %}abc{{ n }}{% set zz = 1 %}{% endgeneration %}{{ zz }}
{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}
{# comment #}a{#- c -#} b {# x {{ y }} {% z #}c
{{ raise_exception('my words') }}
{{ raise_exception() }}
{{ strftime_now('%Y-%m-%d %B %d') }}
{{ range(5)|list }} {{ range(2, 5)|list }} {{ range(5, 0, -2)|list }} {{ range(3) }} {{ range(0)|list }} \
{{ range(3)|length }} {{ range(5)[1] }}
{{ range(1, 2, 0) }}
{{ dict(a=1, b=2) }} {{ dict([('a', 1)]) }} {{ dict(d, z=1)|length }}
{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}\
{{ c.current }} {% set j = joiner('|') %}{{ j() }}a{{ j() }}b
{{ xs.append(1) }}
{{ d.update({'a': 1}) }}
{{ d.pop('a') }}
{% set _ = xs.pop() %}
{{ xs.index(1) }} {{ xs.count(1) }} {{ xs.index(99) }}
{{ rows|map(attribute='k')|list }} {{ rows|map(attribute='v', default='-')|join(',') }} {{ words|map('upper')|join }} \
{{ words|map('replace', 'a', 'x')|list }}
{{ rows|selectattr('k', 'gt', 1)|map(attribute='k')|list }} {{ rows|rejectattr('v', 'defined')|list|length }} \
{{ rows|selectattr('v')|list|length }} {{ rows|selectattr('g', 'equalto', 'x')|list|length }}
{{ xs|select('odd')|list }} {{ xs|reject('odd')|list }} {{ xs|select('>', 1)|list }} \
{{ xs|select('in', [1, 2])|list }} {{ xs|select|first }}
{{ xs|select('nosuch')|list }}
{{ xs|map('nosuch')|list }}
{{ s|nosuch }}
{{ s is nosuch }}
{% if xs|select('equalto', 99) %}true, as generators are{% endif %}
{% set g = xs|select %}{{ g|list }}{{ g|list }}
{{ xs|sort }} {{ xs|sort(reverse=true) }} {{ words|sort }} {{ words|sort(case_sensitive=true) }} \
{{ rows|sort(attribute='k')|map(attribute='k')|list }} {{ rows|sort(attribute='g,k')|map(attribute='k')|list }}
{{ words|unique|list }} {{ words|unique(true)|list }} {{ words|min }} {{ words|max }} {{ rows|max(attribute='k') }} \
{{ []|max }} {{ xs|sum(start=10) }} {{ rows|sum(attribute='k') }}
{{ nested|sum(start=[]) }} {{ nested|map('length')|list }} {{ nested|map('first')|list }}
{{ rows|groupby('g') }} {% for g, items in rows|groupby('g') %}{{ g }}{{ items|length }}{% endfor %}
{{ xs|batch(2)|list }} {{ xs|batch(2, 'x')|list }} {{ xs|join('-') }} {{ rows|join(',', attribute='k') }} \
{{ xs|reverse|join }} {{ 'abc'|reverse }}
{{ 'a b  c'|wordcount }} {{ 'foo bar-baz (qux'|title }} {{ 'fooBAR'|capitalize }} \
{{ 'x'|center(5) }}| {{ 'hello world foo'|truncate(9) }} {{ 'hello world foo'|truncate(9, true, '!', 0) }}
{{ multi|indent }} {{ multi|indent(2, true) }} {{ multi|indent(2, true, true) }} {{ multi|indent('> ') }} \
{{ multi|indent(width=1, first=True) }}
{{ d|tojson }} {{ d|tojson(indent=2) }} {{ d|tojson(sort_keys=true) }} {{ d|tojson(separators=(',', ':')) }} \
{{ rows|tojson(indent=4) }} {{ emoji|tojson(ensure_ascii=true) }} {{ quotes|tojson }}
{{ [1e20, 1.0, -0.5, 1e-7, true, none, 'é', '\u2028', '\x01', '\x7f', '<'] |tojson }} {{ [] |tojson(indent=2) }} \
{{ {} |tojson }} {{ (1, 2)|tojson }} {{ {1: 2, true: 3, none: 4, 1.5: 5}|tojson }}
{{ d|tojson(true) }} {{ d|tojson(indent='\t') }} {{ d|tojson(indent=0) }} {{ missing|tojson }}
{{ {(1, 2): 3}|tojson }}
{{ '3.7'|int }} {{ 'x'|int }} {{ 'x'|int(5) }} {{ num|int }} {{ hex|int(0, 16) }} {{ '1_0'|int }} {{ nil|int }} \
{{ [1]|int(9) }} {{ '1e3'|int }} {{ 'inf'|int }} {{ ' -5 '|int }} {{ '12abc'|int }}
{{ '3.7'|float }} {{ 'x'|float }} {{ 'x'|float(1.5) }} {{ '1e3'|float }} {{ 'inf'|float }} {{ true|float }} \
{{ '0x10'|float }}
{{ 2.5|round }} {{ 3.5|round }} {{ 2.675|round(2) }} {{ 2.1|round(1, 'ceil') }} {{ 2.19|round(1, 'floor') }} \
{{ 7|round }} {{ 1234|round(-2) }} {{ 0.5|round }}
{{ '%d %s %r %.2f %5d|%-5d|%05d %x %%' % (1, 'a', 'b', 1.239, 2, 3, 4, 255) }} {{ '%s' % 'x' }} \
{{ '%(a)s' % {'a': 1} }} {{ '%s-%s'|format(1, 2) }}
{{ '%s %s' % (1,) }}
{{ '%d' % 'x' }}
{{ '{} {} {0}'.format(1, 2) }}
{{ '{} {}'.format(1, 'b') }} {{ '{1}{0}{x}'.format(1, 2, x=3) }} {{ '{{}}'.format() }} {{ '{!r}'.format('a') }}
{{ d|attr('get') is callable }} {{ s|attr('nosuch') is defined }} {{ d|attr('b') is defined }}
{{ 'A'|lower ~ 'b'|upper }} {{ s|length > 3 }} {{ xs|first + xs|last }} {{ s|upper|lower|title }}
{{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ (1, 2) == (1, 2) }} {{ [1] == (1,) }} {{ 'a' == 1 }} {{ none == none }} \
{{ missing == missing }} {{ missing == none }}
{{ 1 < 'a' }}
{{ none < 1 }}
{{ missing < 1 }}
{{ missing + 1 }}
{{ missing() }}
{{ missing.x }}
{{ missing['x'] }}
{{ missing[0] }}
{{ missing|upper }} {{ missing ~ 'x' }} {{ missing|list }} {{ missing|length }} {{ missing|join }}
{{ s[100] }} {{ xs[100] }} {{ d.nosuch }} {{ n.nosuch }} {{ nil.nosuch }} {{ xs.nosuch }} {{ s.nosuch }}
{{ d.nosuch.more }}
{{ nil.a.b }}
{{ xs.0 }} {{ xs[true] }} {{ nested.0.1 }} {{ rows[0].k }} {{ rows.1.v }} {{ d['b'] }} {{ xs['0'] }} {{ d[1] }} \
{{ s['upper']() }}
{{ xs[0:2][1] }} {{ s[1:3].upper() }} {{ (xs + [4])[-1] }} {{ xs * 2 }} {{ 'ab' * 3 }} {{ 3 * 'ab' }} {{ [0] * -1 }}
{{ *xs }}
{{ dict(*[[('a', 1)]]) }} {{ range(*[1, 4])|list }} {{ dict(**{'a': 1}) }}
{{ dict(**xs) }}
{{ s }}{% if %}
{{ s
{% if t %}
{% for x in xs %}{% endif %}
{% endif %}
{% nosuch %}
{% include 'a' %}
{% extends 'a' %}
{% import 'a' as b %}
{% from 'a' import b %}
{% block a %}{% endblock %}{% unless %}
{% break %}
{% if t %}{% continue %}{% endif %}
{% for x in xs %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}
{{ 1 + }}
{{ a b }}
{{ (1 }}
{{ [1 }}
{{ 'abc }}
{{ a.b. }}
{{ a | }}
{{ a is }}
{{ 1 = 2 }}
{{ ! }}
{{ a[ }}
{{ }}
{%  %}
{{ $ }}
{% set 1 = 2 %}
{% set none = 2 %}
{% set x %}
{% macro m(a, a) %}{% endmacro %}
{% macro m(a=1, b) %}{% endmacro %}
{% for in xs %}{% endfor %}
{% for x xs %}{% endfor %}
{{ f(a=1, 2) }}
{{ f(a=1, a=2) }}
{{ range(stop=1) }}
{{ a is string is defined }}
{# unclosed
{% raw %}unclosed
{{ 12abc }}
{{ 1.2.3 }}
{{ x.1a }}
{{ ''.__class__ }}|{{ ''['__class__'] }}|{{ xs.__init__ }}|{{ range.__globals__ }}|{{ ns.__dict__ }}
{{ ''.__class__.__base__ }}
{{ xs.__len__() }}
{{ true and false or not none }} {{ True }}{{ False }}{{ None }} {{ true is true }} {{ 1 is true }} \
{{ 'a' in 'abc' }} {{ 'z' not in 'abc' }} {{ 1 in 'abc' }}
{{ 1 in xs }} {{ 9 not in xs }} {{ 'a' in nil }}
{{ not none in [none] }} {{ (not none) in [true] }}
{{ (1, 2) + (3,) }} {{ [1] + [2] }} {{ 'a' + 'b' }} {{ 1 + 1.5 }} {{ true + true }}
{{ [1] + (2,) }}
{{ 'a' + 1 }}
{{ d + d }}
{{ +3 }} {{ -f }} {{ - -3 }} {{ +s }}
{{ "x" if missing else "y" }} {{ (missing or 'z') }} {{ missing and 1 }} {{ nil or 0 or '' or 'last' }}
{% print 1, 2 %}
{{ loop }}
{{ d is mapping and d.b is number }} {{ n is divisibleby(7) }} {{ n is divisibleby 2 or t }} {{ s is string and n }} \
{{ 3 is in([1, 3]) }} {{ 3 is ne 4 }} {{ n is sameas n }}
{% if not (a is defined and a) %}1{% endif %}{% if a is not defined or not a %}2{% endif %}
{{ emoji|length }} {{ emoji[0] }} {{ emoji[1:] }} {{ emoji|upper }} {{ emoji|list }} {{ [emoji] }} {{ 'ÀÉ'|lower }} \
{{ 'straße'|upper }} {{ 'привет'|capitalize }} {{ 'σας'|upper }}
{{ quotes }} {{ [quotes] }} {{ ["it's"] }} {{ ['"'] }} {{ ['\n\t\x00\x7f\u00a0'] }} {{ ['\\'] }}
{{ s.replace('l', 'L', 1) }} {{ s.split('l')[-1].lstrip('\n') }} {{ s.split('zz')[0] }} \
{{ multi.strip().split('\n')|list }} {{ 'a,b,,c'.split(',') }} {{ ''.split() }} {{ ''.split(',') }}
{{ '</think>' in s and s.split('</think>')[0] or s }} {{ ('a' ~ n) in ['a7'] }} \
{{ s.strip().startswith('H') and not s.endswith('x') }}
{{ [1, [2, [3, {'a': (4,)}]]] }} {{ [none, true, 1.0] }} {{ {'k': none} }}
""".replace("\\\n", "").strip("\n").split("\n")]  # a line that ends with a backslash goes on

WHITE_SPACE = ["a\n  {% if t %}\n  b\n  {% endif %}\nc\n", "a {% if t %} b {% endif %} c",
               "a\n  {%- if t -%}\n  b\n  {%- endif -%}\nc", "a\n  {%+ if t +%}\n  b\n  {%+ endif %}\nc\n\n",
               "  {{ n }}  \n  {{- n -}}  \n x", "{# c #}\n  x\n  {# d #}  \n{#- e -#}\n y",
               "\n\n{% if t %}\n\n{% endif %}\n\n", "\t{% set x = 1 %}\n\t{{ x }}\n",
               "a\r\nb\rc{% if t %}\r\nd{% endif %}\r\n",
               "x {%- raw %} {{ a }} {% endraw -%} y", "{% raw %}\n a \n{% endraw %}\nb",
               "  {% raw -%}\n a \n  {%- endraw %}\nb", "{{ 'a' }}\n", "{{ 'a' }}\n\n",
               "{%- for x in xs %}\n{{ x }}\n{%- endfor %}\nend", "a\n{%- if t %} b{% endif -%}\n c", "  {#- x #}\n  b",
               "{% if t -%}\n   x\n{%- endif %}   \n  {% if t %}y{% endif %}", "a{{+ n }}b", "{{ n -}}\n\n x",
               "{% for x in xs -%}\n  {{ x }},\n{%- endfor %}", "\v{% if t %}a{% endif %}",
               "\u00a0{% if t %}a{% endif %}", "{", "{ {", "}}", "%}", "{{ '}}' }}",
               "{{ '%}' }}{% if '%}' %}x{% endif %}", "{{ {'a': {'b': 1}}}}",
               "{{ {'a': {'b': 1}} }}", "{{'{{'}}", "{%if t%}x{%endif%}", "{%-if t-%} x {%-endif-%}"]


# Where ours is smaller than Python: integers of 64 bits, no complex numbers, slices of a range print as lists.
# Jinja2 answers some slices of constants while compiling, with undefined where it would fail later.
SMALLER = {*(f"{{{{ {v}[{c}] }}}}" for v in ("{}", "1.0") for c in ("1:", "::-1")), "{{ (1, 2, 3)['a':] }}",
           "{{ missing.__class__ }}", "{{ big|int }}", "{{ neg ** f }}", "{{ range(3)[1:] }}", "{{ range(3)[::-1] }}"}


def test_language(probe):
    sources = [s for s in expressions() if s and s not in SMALLER] + WHITE_SPACE
    failures, outputs = [], 0
    for source in sources:
        try:
            outputs += agree(probe, source, VARIABLES) == "output"
        except AssertionError as e:
            failures.append(str(e).split("\n")[0] + " <- " + source + " wanted " + repr(reference(source, VARIABLES)))
    print(f"{len(sources)} cases, {outputs} with output")
    assert len(sources) > 1000 and 300 < outputs < len(sources)
    assert not failures, f"{len(failures)} of {len(sources)} differ:\n" + "\n".join(failures[:60])


FILTERS = ["length", "upper", "string", "list", "first", "last", "trim", "int", "tojson", "sort", "join", "unique|list",
           "reverse|list", "default(1)"]


def random_expression(rng, depth):
    if depth == 0 or rng.random() < 0.2:
        return rng.choice([v for v in VALUES if v != "range(3)"]
                          + ["1", "2", "'a'", "' b '", "xs[0]", "d.b", "rows", "words"])
    def inner():
        return random_expression(rng, depth - 1)
    return rng.choice([
        lambda: f"({inner()} "
                f"{rng.choice(['+', '-', '*', '//', '%', '==', '<', 'in', 'and', 'or', '~', '!=', 'not in'])} "
                f"{inner()})",
        lambda: f"{inner()}|{rng.choice(FILTERS)}",
        lambda: f"({inner()} if {inner()} else {inner()})",
        lambda: f"({inner()})[{rng.choice(['0', '-1', '1:', '::-1', ':2'])}]",
        lambda: f"({inner()} is "
                f"{rng.choice(['string', 'mapping', 'defined', 'none', 'number', 'sequence', 'iterable'])})",
        lambda: f"[{inner()}, {inner()}]", lambda: f"{{'k': {inner()}}}", lambda: f"not {inner()}",
        lambda: f"({inner()}).{rng.choice(['strip()', 'upper()', 'k', 'items()', 'split()', 'a'])}"])()


@pytest.mark.parametrize("seed", range(8))
def test_random_expressions(probe, seed):
    rng = random.Random(seed)
    failures = []
    for _ in range(400):
        source = "{{ " + random_expression(rng, 3) + " }}"
        kind, wanted = reference(source, VARIABLES)
        if kind == "output" and ("object at 0x" in wanted or "built-in" in wanted or len(wanted) > 10000):
            continue
        got = probe(source, VARIABLES)
        if "cannot be sliced" in got.get("error", ""):
            continue  # Jinja2 gives undefined for constants it folds, and an error at run time
        if (got.get("output") != wanted) if kind == "output" else ("error" not in got):
            failures.append(f"{source} gave {got}, wanted {kind} {wanted}")
    assert not failures, f"{len(failures)} differ:\n" + "\n".join(failures[:20])


# (c) Hostile ones: an error of one line, soon.
HOSTILE = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{{ range(10**12) }}", "{{ 'x' * 10**9 }}", "{{ 10**9 * 'x' }}", "{{ [0] * 10**9 }}", "{{ 9**9**9**9 }}",
    "{{ 2**63 }}", "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s.replace('x', 'xxxxxxxxxx') %}"
    "{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99999) %}{% set ns.s = [ns.s] %}{% endfor %}",
    "{% set ns = namespace(s={}) %}{% for i in range(99999) %}{% set ns.s = {'a': ns.s} %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99999) %}{% for j in [ns.s] %}{% set ns.s = loop %}"
    "{% endfor %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(99999) %}{% set ns.s = cycler(ns.s) %}{% endfor %}",
    "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns.a }}",
    "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(a) %}{{ m([a]) }}{% endmacro %}{{ m(1) }}",
    "{% macro a() %}{{ b() }}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{{ caller() }}{% endmacro %}{% call m() %}{% endcall %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "[" * 5000 + "]" * 5000 + " }}", "{{ " + "-" * 5000 + "1 }}",
    "{{ " + "not " * 5000 + "1 }}", "{{ 1" + "+1" * 5000 + " }}", "{{ x" + ".a" * 5000 + " }}",
    "{{ x" + "|upper" * 5000 + " }}",
    "{{ " + "f(" * 5000 + ")" * 5000 + " }}", "{{ 1" + " if 1 else 1" * 5000 + " }}", "{{ 1" + " if 1" * 5000 + " }}",
    "{{ x" + "[0]" * 5000 + " }}",
    "{{ x" + "()" * 5000 + " }}", "{{ x" + " is defined" * 5000 + " }}", "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{% for a in x %}" * 3000,
    "{% set " + "(" * 5000 + "a" + ")" * 5000 + " = 1 %}",
    "{% set x = 'a' * 1000000 %}{% for i in range(90000) %}{{ x.count('aab') }}{% endfor %}",
    "{% set x = 'a' * 8000000 %}{% set y = 'a' * 4000000 ~ 'b' %}{{ y in x }}{% for i in range(1000) %}"
    "{{ x.find(y) }}{{ x == x ~ 'a' }}{% endfor %}",
    "{% set x = ('a' * 8000000).split('a') %}", "{% set x = (' a' * 8000000).split() %}",
    "{{ ('\\n' * 16000000).splitlines()|length }}", "{% set x = ('a' * 16000000)|list %}",
    "{{ ('ab' * 8000000).strip('ab' * 100000) }}", "{{ 'a' * 16000000 ~ 'a' * 16000000 }}",
    "{{ range(99999)|map('string')|map('length')|sort|unique|list|tojson(indent='x' * 1000000) }}",
    "{% set x = range(99999)|list %}{% for i in x %}{% if -1 in x %}{% endif %}{% endfor %}",
    "{% set x = range(99999)|list %}{{ x|unique|list|length }}",
    "{% set x = [1] %}{% for i in range(90000) %}{{ x * 90000 == x * 90000 }}{% endfor %}",
    "{{ '%10000d' % 1 * 100000 }}", "{{ '%99999999d' % 1 }}", "{{ '%.99999999f' % 1 }}",
    "{{ 'x'.ljust(10**12) }}", "{{ 'x'.zfill(10**12) }}", "{{ 'x'|center(10**12) }}",
    "{{ 'x'|indent(10**12) }}", "{{ ('x\\n' * 1000000)|indent(1000000) }}", "{{ {'a': 1}|tojson(indent=10**12) }}",
    "{{ strftime_now('%99999999d') }}", "{{ strftime_now('%A' * 100000) }}", "{{ ('x,' * 1000000)|batch(1)|list }}",
    "{{ [1]|batch(10**12, 'x')|list }}", "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
    "{{ ('b' * 1000000).join('a' * 1000000) }}", "{{ range(99999)|join('b' * 1000000) }}",
    "{% for a in range(99999) %}{{ namespace(x=range(99999)) }}{% endfor %}",
    "{% filter upper %}" * 1000, "{{ -9223372036854775807 - 2 }}", "{{ (-9223372036854775807 - 1) // -1 }}",
    "{{ -(-9223372036854775807 - 1) }}",
]


@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_hostile(probe, case):
    answer = probe(HOSTILE[case], {})
    assert "error" in answer, f"{HOSTILE[case][:100]} gave {str(answer)[:200]}"
    assert "\n" not in answer["error"] and len(answer["error"]) < 400 and " line " in answer["error"]
    assert answer["seconds"] < 120, HOSTILE[case][:100]


def test_the_message_of_the_template(probe):
    answer = probe("a\nb\n{{ raise_exception('roles must\nalternate') }}", {})
    assert answer["error"] == "chat template probe line 3: roles must alternate"
