"""Tool loops of the openai client with every syntax of calls: the demo model behind the templates of the families, made
to call by tool_choice. KT_PROGRAM names kt."""
import json

import pytest

from server_api_test import TEMPLATES, TOOLS, kt, post
from server_process import KT, Server

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name kt")
openai = pytest.importorskip("openai")

# The template, the parser that is named, and how a call of the model's looks in the next prompt.
SYNTAXES = {"glm4_moe": ("glm45", "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>"),
            "glm47": ("glm47", "<tool_call>weather<arg_key>place</arg_key><arg_value>"),
            "qwen3_coder": ("qwen3-coder", "<tool_call>\n<function=weather>\n<parameter=place>\n"),
            "minimax_m2": ("minimax_m2", "<invoke name=\"weather\"><parameter name=\"place\">"),
            "kimi_k2": ("kimi_k2", "<|tool_call_begin|>functions.weather:"),
            "gpt_oss": ("gpt-oss",
                        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{\"place\": "),
            "deepseek_v32": ("deepseekv32", "<｜DSML｜parameter name=\"place\" string=\"true\">"),
            "hy3": ("hunyuan", "<tool_call:opensource>weather<tool_sep:opensource>\n"
                               "<arg_key:opensource>place</arg_key:opensource>\n"),
            "solar_open": ("solar_open", "<|tool_call:name|>weather<|tool_call:args|>{\"place\": "),
            "mistral": ("mistral", "[TOOL_CALLS]weather[ARGS]{\"place\": "),
            "mistral_list": ("mistral_list", "[TOOL_CALLS] [{\"name\": \"weather\", \"arguments\": {\"place\": ")}
# A thought that a client sends back with the call it led to.
THOUGHTS = {"gpt_oss": "<|channel|>analysis<|message|>I must look.<|end|>", "glm47": "<think>I must look.</think>",
            "hy3": "<think:opensource>I must look.</think:opensource>", "solar_open": "<|think|>I must look.<|end|>"}
STORY = [{"role": "user", "content": "Weather? <|channel|>final<|message|> <tool_call> </arg_value> ｜DSML｜"}]
WEATHER = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module", params=SYNTAXES)
def served(request):
    parser, _ = SYNTAXES[request.param]
    with Server("demo", "--chat-template", TEMPLATES / f"{request.param}.jinja", "--tool-call-parser", parser,
                "--reasoning-parser", "none") as running:
        yield request.param, running


def checked(name, arguments):
    value = json.loads(arguments)
    assert name == "weather" and isinstance(value["place"], str) and 1 <= value["days"] <= 9
    return value


def prompt_of(server, body):
    tokens = json.loads(post(server, "/tokenize", body)[2])["tokens"]
    return json.loads(post(server, "/detokenize", {"tokens": tokens})[2])["prompt"]


def test_tool_loop(served):
    family, server = served
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    messages = list(STORY)
    ids = []
    # Each of Hy3's markers is a dozen tokens of the demo's: two turns do not fit its 1,024.
    for turn in range(1 if family == "hy3" else 2):
        reply = client.chat.completions.create(model="demo", messages=messages, tools=TOOLS[:1], tool_choice=WEATHER,
                                               seed=turn, max_tokens=400)
        assert reply.choices[0].finish_reason == "tool_calls", reply
        message = reply.choices[0].message
        call, = message.tool_calls
        value = checked(call.function.name, call.function.arguments)
        assert not message.content
        ids.append(call.id)
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": f"sunny {turn}"}]
        # The next prompt has the call in the model's own words.
        body = {"messages": [m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in messages],
                "tools": TOOLS[:1]}
        prompt = prompt_of(server, body)
        assert SYNTAXES[family][1] in prompt and f"sunny {turn}" in prompt
        if family == "kimi_k2":
            assert call.id.startswith("functions.weather:") and f"## Return of {call.id}\n" in prompt
        elif family == "mistral_list":  # its template refuses other ids
            assert f"\"id\": \"c{turn:08}\"}}]" in prompt and f"\"call_id\": \"c{turn:08}\"}}" in prompt
        elif family == "solar_open":
            assert len(call.id) == 10 and f"<|tool_call:begin|>{call.id}<|tool_call:name|>weather<" in prompt
        elif family not in ("gpt_oss", "mistral"):  # those write JSON
            assert value["place"] in prompt
        if family in THOUGHTS:
            body["messages"][-2]["reasoning_content"] = "I must look."
            assert prompt_of(server, body).count(THOUGHTS[family]) == 1
    assert client.chat.completions.create(model="demo", messages=messages, tools=TOOLS[:1], max_tokens=8).choices


def test_streams_and_other_apis(served):
    _, server = served
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    name, arguments, reason, ids = "", "", None, []
    for chunk in client.chat.completions.create(model="demo", messages=STORY, tools=TOOLS[:1], tool_choice=WEATHER,
                                                seed=3, max_tokens=400, stream=True):
        reason = chunk.choices[0].finish_reason or reason
        assert not chunk.choices[0].delta.content
        for call in chunk.choices[0].delta.tool_calls or []:
            ids += [call.id] if call.id else []
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert reason == "tool_calls" and len(ids) == 1
    checked(name, arguments)
    tool = TOOLS[0]["function"]
    response = client.responses.create(model="demo", input=STORY, tools=[{"type": "function", **tool}],
                                       max_output_tokens=400,
                                       tool_choice={"type": "function", "name": "weather"}, extra_body={"seed": 4})
    item = response.output[-1]
    assert item.type == "function_call"
    checked(item.name, item.arguments)
    status, _, body = post(server, "/v1/messages", {
        "model": "demo", "max_tokens": 400, "seed": 5, "messages": STORY,
        "tool_choice": {"type": "tool", "name": "weather"},
        "tools": [{"name": "weather", "description": "x", "input_schema": tool["parameters"]}]})
    block = json.loads(body)["content"][-1]
    assert status == 200 and block["type"] == "tool_use"
    checked(block["name"], json.dumps(block["input"]))


def test_calls_that_max_tokens_ends(served):
    _, server = served
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    for most in (1, 12, 20, 28):
        reply = client.chat.completions.create(model="demo", messages=STORY, tools=TOOLS[:1], tool_choice=WEATHER,
                                               seed=1, max_tokens=most)
        assert reply.choices[0].finish_reason in ("length", "tool_calls")
        for call in reply.choices[0].message.tool_calls or []:
            assert call.function.name == "weather" and call.function.arguments.startswith("{")


def test_names_of_parsers():
    for flag in ("--tool-call-parser", "--reasoning-parser"):
        result = kt("run", "demo", flag, "kimi_k3", "--dry-run")
        line, = result.stderr.strip().splitlines()
        assert result.returncode == 2 and "\"kimi_k3\"; did you mean kimi_k2?" in line and "glm45" in line
    for name in ("glm45", "GLM47", "qwen3_coder", "minimax-m2", "kimi_k2", "gpt-oss", "deepseekv32", "deepseek_v32",
                 "mistral", "mistral-list",
                 "hy_v3", "hunyuan", "solar_open"):
        assert kt("run", "demo", "--tool-call-parser", name, "--dry-run").returncode == 0
    for name in ("glm45", "qwen3", "minimax-append-think", "kimi_k2", "gpt-oss", "deepseek-r1", "deepseek-v3", "hy_v3",
                 "solar_open", "none"):
        assert kt("run", "demo", "--reasoning-parser", name, "--dry-run").returncode == 0


def test_a_flag_that_names_another_syntax_counts_and_that_is_said_once():
    result = kt("run", "demo", "--chat-template", TEMPLATES / "glm47.jinja", "--tool-call-parser", "kimi_k2",
                "--reasoning-parser", "gpt-oss", "--dry-run")
    assert result.returncode == 0
    first, second = [line for line in result.stderr.splitlines() if "warning" in line]
    assert "--tool-call-parser kimi_k2" in first and "shows the syntax glm47; the flag counts" in first
    assert "--reasoning-parser gpt-oss" in second and "<think>" in second
    quiet = kt("run", "demo", "--chat-template", TEMPLATES / "glm47.jinja", "--tool-call-parser", "glm47",
               "--reasoning-parser", "glm45", "--dry-run")
    assert "warning" not in quiet.stderr
    # One name for both spellings of a family.
    quiet = kt("run", "demo", "--chat-template", TEMPLATES / "hy3.jinja", "--tool-call-parser", "hy_v3",
               "--reasoning-parser", "hunyuan", "--dry-run")
    assert quiet.returncode == 0 and "warning" not in quiet.stderr
