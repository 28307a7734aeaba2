"""`/v1/responses` of `kt run` through the openai client from PyPI: whole and streamed answers are those of chat
requests, events are what the client's own accumulator accepts, and what would need kept answers is refused by name.

KT_PROGRAM names kt."""
import json
import pathlib
import shutil
import sys

import pytest

openai = pytest.importorskip("openai", reason="openai is not installed")
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from checkpoints import KT, ROOT
from server_process import Server

pytestmark = pytest.mark.skipif(not KT, reason="KT_PROGRAM does not name the kt program")
STORY = "Tell me a story about a fox."
GREEDY = {"model": "demo", "temperature": 0, "max_output_tokens": 24}
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string", "maxLength": 12},
                                               "days": {"type": "integer", "minimum": 1, "maximum": 9}},
              "required": ["place", "days"], "additionalProperties": False}
TOOLS = [{"type": "function", "name": name, "description": f"Gets the {name}", "parameters": PARAMETERS, "strict": True}
         for name in ("weather", "news")]


def client_of(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=600)


@pytest.fixture(scope="module")
def client():
    with Server("demo") as running:
        yield client_of(running)


THINK = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
         "<|im_start|>assistant\n<think>\n")


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """A template that opens a thought, which the demo never closes by itself."""
    template = tmp_path_factory.mktemp("template") / "think.jinja"
    template.write_text(THINK)
    with Server("demo", "--chat-template", template) as running:
        yield client_of(running)


@pytest.fixture(scope="module")
def closing(tmp_path_factory):
    """The same with a vocabulary in which a word of its stories, " who", is written </think>."""
    folder = tmp_path_factory.mktemp("closing") / "model"
    shutil.copytree(ROOT / "demo" / "tiny-deepseekv3", folder)
    tokenizer, word = json.loads((folder / "tokenizer.json").read_text()), "\u0120who"
    words = tokenizer["model"]
    words["vocab"] = {"</think>" if name == word else name: number for name, number in words["vocab"].items()}
    pairs = [(merge, merge.split(" ") if isinstance(merge, str) else merge) for merge in words["merges"]]
    words["merges"] = [merge for merge, parts in pairs if word not in parts and "".join(parts) != word]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "think.jinja").write_text(THINK)
    with Server(folder, "--chat-template", folder / "think.jinja", "--served-model-name", "demo") as running:
        yield client_of(running)


def chat_text(client, messages):
    return client.chat.completions.create(model="demo", temperature=0, max_tokens=24,
                                          messages=messages).choices[0].message.content


def check_whole(response, status="incomplete"):
    """By the client's own type, strictly."""
    type(response).model_validate(response.model_dump(by_alias=True))
    assert response.object == "response" and response.id.startswith("resp_") and response.status == status
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.model_dump()["store"] is False and response.error is None


def test_text(client):
    expected = chat_text(client, [{"role": "system", "content": "Be kind."}, {"role": "user", "content": STORY}])
    reply = client.responses.create(input=STORY, instructions="Be kind.", metadata={"a": "b"}, **GREEDY)
    check_whole(reply)
    assert reply.output_text == expected and reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage.output_tokens == 24 and reply.instructions == "Be kind." and reply.metadata == {"a": "b"}
    message, = reply.output
    assert message.type == "message" and message.role == "assistant" and message.status == "incomplete"


def test_items(client):
    """A conversation as clients send it back: easy messages, parts, and output items of before."""
    first = client.responses.create(input=STORY, **GREEDY)
    expected = chat_text(client, [{"role": "system", "content": "Hm."}, {"role": "user", "content": STORY},
                                  {"role": "assistant", "content": first.output_text},
                                  {"role": "user", "content": "Go\non."}])
    items = [{"role": "developer", "content": "Hm."}, {"role": "user", "content": STORY}, *first.output,
             {"type": "message", "role": "user",
              "content": [{"type": "input_text", "text": "Go"}, {"type": "input_text", "text": "on."}]}]
    assert client.responses.create(input=items, store=False, **GREEDY).output_text == expected


def check_events(events):
    """The order that the API promises: items one after the other, each opened, filled and closed."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        type(event).model_validate(event.model_dump(by_alias=True, warnings=False))
    names = [event.type for event in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] in ("response.completed", "response.incomplete")
    final, texts, open_item = events[-1].response, {}, None
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert open_item is None and event.output_index == len(texts) and event.item.status == "in_progress"
            open_item, texts[event.output_index] = event.item.id, ""
        elif event.type == "response.output_item.done":
            assert (event.item.id == open_item
                    and event.item.model_dump() == final.output[event.output_index].model_dump())
            open_item = None
        else:
            assert event.item_id == open_item and event.output_index == len(texts) - 1
            if event.type.endswith(".delta"):
                texts[event.output_index] += event.delta
            elif event.type.endswith("text.done"):
                assert event.text == texts[event.output_index]
            elif event.type.endswith("arguments.done"):
                assert event.arguments == texts[event.output_index]
    assert open_item is None and len(final.output) == len(texts)
    return final


def test_stream(client):
    whole = client.responses.create(input=STORY, **GREEDY)
    final = check_events(list(client.responses.create(input=STORY, stream=True, **GREEDY)))
    assert final.output_text == whole.output_text and final.usage.output_tokens == 24
    with client.responses.stream(input=STORY, **GREEDY) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
    assert texts[-1] == whole.output_text


def check_call(item):
    assert (item.type == "function_call" and item.name in ("weather", "news") and item.call_id
            and item.status == "completed")
    arguments = json.loads(item.arguments)
    assert isinstance(arguments["place"], str) and 1 <= arguments["days"] <= 9


def test_tools(client):
    request = {"model": "demo", "input": STORY, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
               "max_output_tokens": 300, "temperature": 0}
    reply = client.responses.create(**request)
    check_whole(reply, "completed")
    check_call(reply.output[-1])
    final = check_events(list(client.responses.create(stream=True, **request)))
    assert final.output[-1].arguments == reply.output[-1].arguments
    with client.responses.stream(**request) as stream:
        for _ in stream:
            pass
        check_call(stream.get_final_response().output[-1])
    named = client.responses.create(**{**request, "tool_choice": {"type": "function", "name": "news"}})
    assert named.output[-1].name == "news"
    # The call and its result go back.
    call = reply.output[-1]
    back = [{"role": "user", "content": STORY}, *reply.output,
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    chat = [{"role": "user", "content": STORY},
            {"role": "assistant", "content": None, "tool_calls": [{"id": call.call_id, "type": "function", "function": {
                "name": call.name, "arguments": call.arguments}}]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"}]
    assert client.responses.create(input=back, **GREEDY).output_text == chat_text(client, chat)


def test_formats(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"],
              "additionalProperties": False}
    reply = client.responses.create(model="demo", input=STORY, max_output_tokens=100,
                                    text={"format": {"type": "json_schema", "name": "n", "schema": schema,
                                                     "strict": True}})
    assert reply.status == "completed" and 1 <= json.loads(reply.output_text)["n"] <= 9
    pydantic = pytest.importorskip("pydantic")

    class Number(pydantic.BaseModel):
        big: bool
    parsed = client.responses.parse(model="demo", input=STORY, max_output_tokens=100, text_format=Number)
    assert isinstance(parsed.output_parsed, Number)


def test_reasoning(thinking):
    request = {"input": STORY, "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], **GREEDY}
    reply = thinking.responses.create(**request)
    check_whole(reply)
    thought, = reply.output
    assert thought.type == "reasoning" and len(thought.content[0].text) > 10 and thought.summary == []
    assert reply.usage.output_tokens_details.reasoning_tokens > 0 and reply.output_text == ""
    final = check_events(list(thinking.responses.create(stream=True, **request)))
    assert final.output[0].content[0].text == thought.content[0].text
    assert thinking.responses.create(input=[{"role": "user", "content": STORY}, *reply.output,
                                            {"role": "user", "content": "And?"}],
                                     **GREEDY).output  # it goes back


def test_a_thought_and_an_answer(closing):
    reply = closing.responses.create(**{**GREEDY, "input": STORY, "max_output_tokens": 60})
    check_whole(reply)
    thought, answer = reply.output
    assert [thought.type, answer.type] == ["reasoning", "message"] and len(thought.content[0].text) > 10
    assert reply.output_text and "</think>" not in thought.content[0].text
    assert 0 < reply.usage.output_tokens_details.reasoning_tokens < reply.usage.output_tokens == 60
    final = check_events(list(closing.responses.create(stream=True,
                                                       **{**GREEDY, "input": STORY, "max_output_tokens": 60})))
    assert [item.content[0].text for item in final.output] == [thought.content[0].text, answer.content[0].text]
    assert closing.responses.create(input=[{"role": "user", "content": STORY}, *reply.output,
                                           {"role": "user", "content": "And?"}],
                                    **GREEDY).output


@pytest.mark.parametrize("more, field", [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"extra_body": {"conversation": "conv_1"}}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "nobody"}}, None),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
     "input[0].content[0].type"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": []}, "input"),
    ({"tools": [{"type": "function", "parameters": {}}]}, "tools[0].name"),
    ({"metadata": 5}, "metadata"),
    ({"reasoning": "x"}, "reasoning"),
    ({"user": 5}, "user"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}}, "text.format.schema"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
])
def test_refusals(client, more, field):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "demo", "input": STORY, **more})
    assert refused.value.body["message"] and (field is None or refused.value.param == field), refused.value.body
    assert field is None or field in refused.value.body["message"]


def test_bad_bodies(client):
    for body in ({}, {"input": 1}, {"input": [1]}, {"input": STORY, "tools": 1}, {"input": STORY, "text": 1},
                 {"input": [{"role": "user"}]}, {"input": [{"role": "user", "content": [1]}]}):
        with pytest.raises(openai.BadRequestError):
            client.post("/responses", body=body, cast_to=object)


def test_messages_count_tokens(client):
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    other = anthropic.Anthropic(base_url=str(client.base_url).removesuffix("/v1/"), api_key="none", max_retries=0)
    request = {"model": "demo", "system": "Be kind.", "messages": [{"role": "user", "content": STORY}],
               "tools": [{"name": "weather", "description": "x", "input_schema": PARAMETERS}]}
    counted = other.messages.count_tokens(**request).input_tokens
    usage = other.messages.create(max_tokens=1, **request).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    fewer = other.messages.count_tokens(**{**request, "tools": []}).input_tokens
    assert 0 < fewer < counted
    with pytest.raises(anthropic.BadRequestError, match="messages") as refused:
        other.post("/v1/messages/count_tokens", body={"model": "demo"}, cast_to=object)
    assert refused.value.body["type"] == "error"
