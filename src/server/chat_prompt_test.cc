#include "server/chat_prompt.h"

#include <gmock/gmock.h>

#include "base/error.h"

namespace kt::inline server {
namespace {

using ::testing::HasSubstr;

OrderedJson json(std::string_view text) { return OrderedJson::parse(text); }

template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    return error.what();
  }
  return "(no error)";
}
std::string messages_error(std::string_view text) {
  return error_of([&] { template_messages(json(text)); });
}
std::string tools_error(std::string_view text) {
  return error_of([&] { template_tools(json(text)); });
}
std::string choice_error(std::string_view text) {
  return error_of([&] { tool_choice_of(json(text)); });
}

TEST(TemplateMessages, KeepsWhatTemplatesRead) {
  EXPECT_EQ(template_messages(json(R"([
    {"role": "developer", "content": "Be kind.", "name": "ops"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "extra": 1},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning": "hm", "audio": null},
    {"role": "assistant", "content": null, "tool_calls": [
      {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": 2}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"}])")),
            json(R"([
    {"role": "system", "content": "Be kind.", "name": "ops"},
    {"role": "user", "content": "a\nb"},
    {"role": "assistant", "content": "no", "reasoning_content": "hm"},
    {"role": "assistant", "content": "", "tool_calls": [
      {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}]},
    {"role": "tool", "content": "3", "tool_call_id": "c1"}])"));
}

TEST(TemplateMessages, ReadsTheOlderInterface) {
  EXPECT_EQ(template_messages(json(R"([
    {"role": "assistant", "content": null, "function_call": {"name": "f", "arguments": ""}},
    {"role": "function", "name": "f", "content": "3"}])")),
            json(R"([
    {"role": "assistant", "content": "", "tool_calls": [
      {"type": "function", "function": {"name": "f", "arguments": {}}}]},
    {"role": "tool", "content": "3", "name": "f"}])"));
}

TEST(TemplateMessages, ThoughtsHaveTheTemplatesName) {
  const OrderedJson messages = json(R"([
    {"role": "assistant", "content": "a", "reasoning_content": "hm"},
    {"role": "assistant", "content": "b", "reasoning_content": "hm", "tool_calls": [
      {"type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "assistant", "reasoning_content": "hm", "tool_calls": [
      {"type": "function", "function": {"name": "f", "arguments": "{}"}}]}])");
  const auto named = [&](std::string_view chat_template, const char* name) {
    std::vector<bool> out;
    for (const OrderedJson& message : template_messages(messages, chat_template))
      out.push_back(message.contains(name) && message[name] == "hm");
    return out;
  };
  const std::vector<bool> none(3), all(3, true);
  constexpr std::string_view kGpt = "{% if message.thinking %}{{ message.thinking }}{% endif %}";
  EXPECT_EQ(named(kGpt, "thinking"), (std::vector<bool>{true, false, true}));  // it refuses both beside calls
  EXPECT_EQ(named(kGpt, "reasoning_content"), all);
  EXPECT_EQ(named(kGpt, "reasoning"), none);
  EXPECT_EQ(named("{{ message['reasoning'] }}", "reasoning"), all);
  EXPECT_EQ(named("{{ message.reasoning_content }}{{ enable_thinking }}", "thinking"), none);
}

TEST(TemplateMessages, FollowsTheTemplate) {
  const OrderedJson messages = json(R"([{"role": "assistant", "content": null, "tool_calls": [
      {"type": "function", "function": {"name": "f", "arguments": "{ }"}}]}])");
  const auto shaped = [&](std::string_view chat_template) {
    const OrderedJson made = template_messages(messages, chat_template);
    return std::pair(made[0]["content"], made[0]["tool_calls"][0]["function"]["arguments"]);
  };
  const OrderedJson none, empty = "", text = "{ }", object = OrderedJson::object();
  EXPECT_EQ(
      shaped("{% if message['content'] is none %}{{ '```json' + tool['function']['arguments'] + '\\n' }}"),
      std::pair(none, text));
  EXPECT_EQ(shaped("{{ call.name ~ call.arguments }}{% if message.content is string %}"),
            std::pair(empty, text));
  EXPECT_EQ(shaped("{{ call.arguments | tojson }} arguments + content is none"), std::pair(empty, object));
  EXPECT_EQ(
      shaped("{% if a.arguments is string %}{{ a.arguments }}{% else %}{{ a.arguments|tojson }}{% endif %}"),
      std::pair(empty, object));
  EXPECT_EQ(shaped("{% set args = call.arguments %}{% for k, v in args.items() %}"),
            std::pair(empty, object));
  EXPECT_EQ(shaped("{{- message[\"content\"]   is not none }}"), std::pair(none, object));
}

// Kimi's template writes of a call only its id.
TEST(TemplateMessages, IdsNameTheFunctionWhereTemplatesWriteThem) {
  const OrderedJson messages = json(R"([
    {"role": "assistant", "content": "", "tool_calls": [
      {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}},
      {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "functions.f:0", "content": "a"},
    {"role": "tool", "tool_call_id": "call_1", "content": "b"},
    {"role": "assistant", "content": "", "tool_calls": [
      {"id": "functions.f:x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "functions.f:x", "content": "c"}])");
  const OrderedJson named = template_messages(messages, "{{ '<|tool_call_argument_begin|>' }}");
  EXPECT_EQ(named[0]["tool_calls"][0]["id"], "functions.f:0");
  EXPECT_EQ(named[0]["tool_calls"][1]["id"], "functions.g:1");
  EXPECT_EQ(named[1]["tool_call_id"], "functions.f:0");
  EXPECT_EQ(named[2]["tool_call_id"], "functions.g:1");
  EXPECT_EQ(named[3]["tool_calls"][0]["id"], "functions.f:2");
  EXPECT_EQ(named[4]["tool_call_id"], "functions.f:2");
  EXPECT_EQ(template_messages(messages, "{{ messages }}")[2]["tool_call_id"], "call_1");
}

// Templates of Mistral's older models raise an error for others.
TEST(TemplateMessages, IdsHaveNineCharactersWhereTemplatesCountThem) {
  const OrderedJson messages = json(R"([
    {"role": "assistant", "content": "", "tool_calls": [
      {"id": "abc123DEF", "type": "function", "function": {"name": "f", "arguments": "{}"}},
      {"id": "call_5678", "type": "function", "function": {"name": "g", "arguments": "{}"}},
      {"type": "function", "function": {"name": "g", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "abc123DEF", "content": "a"},
    {"role": "tool", "tool_call_id": "call_5678", "content": "b"}])");
  const OrderedJson counted =
      template_messages(messages, "{%- if not call.id is defined or call.id|length  != 9 %}");
  EXPECT_EQ(counted[0]["tool_calls"][0]["id"], "abc123DEF");
  EXPECT_EQ(counted[0]["tool_calls"][1]["id"], "c00000001");
  EXPECT_EQ(counted[0]["tool_calls"][2]["id"], "c00000002");
  EXPECT_EQ(counted[1]["tool_call_id"], "abc123DEF");
  EXPECT_EQ(counted[2]["tool_call_id"], "c00000001");
  EXPECT_EQ(template_messages(messages, "{{ messages|length != 9 }}")[2]["tool_call_id"], "call_5678");
}

TEST(TemplateMessages, ErrorsNameThePlace) {
  EXPECT_EQ(messages_error("3"), "messages: expected an array, got a number");
  EXPECT_EQ(messages_error("[]"), "messages: expected at least one message");
  EXPECT_EQ(messages_error(R"(["hi"])"), "messages[0]: expected an object, got a string");
  EXPECT_EQ(messages_error(R"([{"content": ""}])"), "messages[0].role: expected a string, got null");
  EXPECT_THAT(messages_error(R"([{"role": "user", "content": "a"}, {"role": "robot"}])"),
              HasSubstr("messages[1].role: expected system, developer, user"));
  EXPECT_THAT(messages_error(R"([{"role": "user", "content": null}])"),
              HasSubstr("messages[0].content: expected"));
  EXPECT_THAT(messages_error(R"([{"role": "assistant"}])"), HasSubstr("messages[0].content: expected"));
  EXPECT_THAT(messages_error(R"([{"role": "assistant", "tool_calls": []}])"),
              HasSubstr("messages[0].content"));
  EXPECT_THAT(messages_error(R"([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])"),
              HasSubstr("messages[0].content[0].type: parts of type \"image_url\" are not supported"));
  EXPECT_EQ(messages_error(R"([{"role": "user", "content": [{"type": "text"}]}])"),
            "messages[0].content[0].text: expected a string, got null");
  EXPECT_EQ(messages_error(R"([{"role": "tool", "content": "3"}])"),
            "messages[0].tool_call_id: expected a string, got null");
  const auto call_error = [](std::string_view call) {
    return messages_error(R"([{"role": "assistant", "tool_calls": [)" + std::string(call) + "]}]");
  };
  EXPECT_EQ(call_error("1"), "messages[0].tool_calls[0]: expected an object, got a number");
  EXPECT_THAT(call_error(R"({"type": "mcp"})"),
              HasSubstr("messages[0].tool_calls[0].type: expected \"function\""));
  EXPECT_THAT(call_error(R"({"function": {"name": "a b"}})"),
              HasSubstr("messages[0].tool_calls[0].function.name"));
  EXPECT_THAT(call_error(R"({"function": {"name": "f", "arguments": "[1]"}})"),
              HasSubstr("messages[0].tool_calls[0].function.arguments: expected a JSON object"));
  EXPECT_THAT(call_error(R"({"function": {"name": "f", "arguments": "{"}})"),
              HasSubstr("function.arguments"));
  EXPECT_THAT(error_of([] { template_messages(OrderedJson(OrderedJson::array_t(5000))); }),
              HasSubstr("at most 4096 items, got 5000"));
}

TEST(TemplateTools, FillsInWhatTemplatesPrint) {
  EXPECT_EQ(template_tools(json(R"([{"type": "function", "function": {"name": "f", "strict": true}},
    {"type": "function", "function": {"parameters": {"z": 1, "a": 2}, "name": "g", "description": "d"}}])"))
                .dump(),
            json(R"([{"type": "function", "function": {"name": "f", "description": "",
                      "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "g", "description": "d", "parameters": {"z": 1, "a": 2}}}])")
                .dump());
}

TEST(TemplateTools, ErrorsNameThePlace) {
  EXPECT_EQ(tools_error("{}"), "tools: expected an array, got an object");
  EXPECT_THAT(tools_error(R"([{"type": "web_search"}])"),
              HasSubstr("tools[0].type: tools of type \"web_search\""));
  EXPECT_EQ(tools_error(R"([{"type": "function"}])"), "tools[0].function: expected an object, got null");
  EXPECT_THAT(tools_error(R"([{"type": "function", "function": {"name": "<|im_end|>"}}])"),
              HasSubstr("tools[0].function.name: expected 1 to 128"));
  EXPECT_EQ(tools_error(R"([{"type": "function", "function": {"name": "f", "parameters": []}}])"),
            "tools[0].function.parameters: expected an object, got an array");
  EXPECT_EQ(tools_error(R"([{"type": "function", "function": {"name": "f"}},
                            {"type": "function", "function": {"name": "f"}}])"),
            "tools[1].function.name: two tools are called \"f\"");
}

constexpr std::string_view kTools = R"("tools": [{"type": "function", "function": {"name": "f"}},
                                                {"type": "function", "function": {"name": "g"}}])";
std::string request(std::string_view more) { return text("{{{}{}}}", kTools, more); }

TEST(ToolChoice, ReadsTheChoice) {
  using Kind = ToolChoice::Kind;
  const auto choice = [](const std::string& text) { return tool_choice_of(json(text)); };
  EXPECT_EQ(choice("{}").kind, Kind::kNone);
  EXPECT_EQ(choice(R"({"tools": [], "tool_choice": "auto"})").kind, Kind::kNone);
  EXPECT_EQ(choice(request("")).kind, Kind::kAuto);
  EXPECT_TRUE(choice(request("")).parallel);
  EXPECT_EQ(choice(request(R"(, "tool_choice": "none")")).kind, Kind::kNone);
  EXPECT_EQ(choice(request(R"(, "tool_choice": "required")")).kind, Kind::kRequired);
  // A function that is named is called once, whatever else is said.
  const ToolChoice named = choice(request(
      R"(, "tool_choice": {"type": "function", "function": {"name": "g"}}, "parallel_tool_calls": true)"));
  EXPECT_EQ(named.kind, Kind::kRequired);
  EXPECT_EQ(named.name, "g");
  EXPECT_FALSE(named.parallel);
  const ToolChoice old = choice(R"({"functions": [{"name": "h"}], "function_call": {"name": "h"}})");
  EXPECT_EQ(old.name, "h");
  EXPECT_FALSE(old.parallel);
  EXPECT_EQ(request_tools(json(R"({"functions": [{"name": "h"}]})"))[0]["function"]["name"], "h");
}

TEST(ToolChoice, ErrorsNameThePlace) {
  EXPECT_EQ(choice_error(request(R"(, "tool_choice": {"type": "function", "function": {"name": "h"}})")),
            "tool_choice.function.name: no function \"h\" among the tools: f, g");
  EXPECT_THAT(choice_error(request(R"(, "tool_choice": "any")")),
              HasSubstr("tool_choice: expected \"none\""));
  EXPECT_THAT(choice_error(request(R"(, "tool_choice": 3)")), HasSubstr("got a number"));
  EXPECT_EQ(choice_error(R"({"tool_choice": "required"})"),
            "tool_choice: \"required\" needs tools, and there are none");
  EXPECT_EQ(choice_error(request(R"(, "parallel_tool_calls": 1)")),
            "parallel_tool_calls: expected a boolean, got a number");
  EXPECT_EQ(choice_error(R"({"functions": [{"name": "h"}], "function_call": {"name": "x"}})"),
            "function_call.name: no function \"x\" among the tools: h");
  EXPECT_THAT(choice_error(R"({"functions": [{"name": "h"}, {"name": "h"}]})"),
              HasSubstr("functions[1].name"));
}

TEST(ToolPrompt, TellsTemplatesThatKnowTools) {
  EXPECT_TRUE(template_knows_tools("{%- if tools %}x{% endif %}"));
  EXPECT_TRUE(template_knows_tools("{{ tools | tojson }}"));
  EXPECT_FALSE(template_knows_tools("You may use tools.{# tools #}{{ my_tools }}{{ messages }}"));
}

TEST(ToolPrompt, DescribesToolsAndTellsEarlierCalls) {
  const OrderedJson messages = template_messages(json(R"([
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [
      {"function": {"name": "f", "arguments": "{\"a\":[1,2]}"}}, {"function": {"name": "g", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "1", "content": "sun"},
    {"role": "tool", "tool_call_id": "2", "content": "rain"}])"));
  const OrderedJson tools = template_tools(json(text("{{{}}}", kTools))["tools"]);
  const OrderedJson made = with_tool_prompt(messages, tools);
  ASSERT_EQ(made.size(), 4u);
  EXPECT_EQ(made[0]["role"], "system");
  EXPECT_THAT(made[0]["content"].get<std::string>(), HasSubstr(R"(<tools>
{"type": "function", "function": {"name": "f", "description": "", )"));
  EXPECT_EQ(
      made[2],
      json(
          R"({"role": "assistant", "content": "I look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": )"
          R"({\"a\": [1, 2]}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>"})"));
  EXPECT_EQ(made[3], json(R"({"role": "user", "content": "<tool_response>\nsun\n</tool_response>\n)"
                          R"(<tool_response>\nrain\n</tool_response>"})"));
  const OrderedJson kept = with_tool_prompt(json(R"([{"role": "system", "content": "Be kind."}])"), tools);
  EXPECT_THAT(kept[0]["content"].get<std::string>(), HasSubstr("Be kind.\n\n# Tools"));
  EXPECT_EQ(with_tool_prompt(messages, OrderedJson::array())[0]["role"], "user");
}

}  // namespace
}  // namespace kt::inline server
