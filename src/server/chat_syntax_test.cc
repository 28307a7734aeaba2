#include "server/chat_syntax.h"

#include <gmock/gmock.h>

#include <fstream>

#include "base/error.h"
#include "text/chat_template.h"

namespace kt {
namespace {

using ::testing::HasSubstr;
using Kind = ReplyPiece::Kind;

std::string template_named(const std::string& name) {
  std::ifstream file(KT_CHAT_TEMPLATES "/" + name + ".jinja");
  EXPECT_TRUE(file.good()) << name;
  return {std::istreambuf_iterator<char>(file), {}};
}

const Tokenizer& demo_tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::from_file(KT_DEMO_MODEL "/tokenizer.json");
  return tokenizer;
}

TEST(ChatSyntax, OfTheTemplatesOfManyModels) {
  struct Row {
    std::string name;
    bool thinks;
    ToolSyntax tools;
    bool knows_tools;
  };
  for (const Row& row :
       {Row{"deepseek_v2", false, ToolSyntax::kNone, false},
        Row{"deepseek_v3", true, ToolSyntax::kDeepSeekV3, true},
        Row{"glm4_moe", true, ToolSyntax::kNone, true}, Row{"gpt_oss", false, ToolSyntax::kNone, true},
        Row{"kimi_k2", false, ToolSyntax::kNone, true}, Row{"llama3", false, ToolSyntax::kNone, true},
        Row{"minimax_m2", true, ToolSyntax::kNone, true}, Row{"mixtral", false, ToolSyntax::kNone, false},
        Row{"qwen2", false, ToolSyntax::kHermes, true}, Row{"qwen3", true, ToolSyntax::kHermes, true}}) {
    const std::string source = template_named(row.name);
    const ChatSyntax syntax = chat_syntax_of(source, demo_tokenizer());
    EXPECT_EQ(syntax.think_begin, row.thinks ? "<think>" : "") << row.name;
    EXPECT_EQ(syntax.think_end, row.thinks ? "</think>" : "") << row.name;
    EXPECT_EQ(syntax.tools, row.tools) << row.name;
    EXPECT_EQ(template_knows_tools(source), row.knows_tools) << row.name;
  }
}

TEST(ChatSyntax, OfOtherTexts) {
  EXPECT_EQ(chat_syntax_of("", demo_tokenizer()), ChatSyntax{});
  EXPECT_EQ(chat_syntax_of("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}",
                           demo_tokenizer())
                .tools,
            ToolSyntax::kDeepSeekV31);
  EXPECT_EQ(chat_syntax_of("<tool_call>\n<function=name>", demo_tokenizer()).tools, ToolSyntax::kNone);
  const Tokenizer thinking(
      TokenizerParts{.name = "test",
                     .tokens = {"a"},
                     .added = {{.id = 1, .content = "<think>"}, {.id = 2, .content = "</think>"}}});
  EXPECT_EQ(chat_syntax_of("", thinking).think_end, "</think>");
  EXPECT_EQ(chat_syntax_of("{{ messages }}", thinking), ChatSyntax{});
  EXPECT_EQ(answer_decoding(chat_syntax_of("", thinking), thinking), SpecialTokens::kSkip);
  const Tokenizer special(TokenizerParts{
      .name = "test", .tokens = {"a"}, .added = {{.id = 1, .content = "<tool_call>", .special = true}}});
  EXPECT_EQ(answer_decoding({.tools = ToolSyntax::kHermes}, special), SpecialTokens::kKeep);
  EXPECT_EQ(answer_decoding({}, special), SpecialTokens::kSkip);
}

TEST(ChatSyntax, ByName) {
  EXPECT_EQ(tool_syntax_named("qwen25"), ToolSyntax::kHermes);
  EXPECT_EQ(tool_syntax_named("deepseekv3"), ToolSyntax::kDeepSeekV3);
  EXPECT_EQ(tool_syntax_named("deepseek_v31"), ToolSyntax::kDeepSeekV31);
  EXPECT_EQ(tool_syntax_named("none"), ToolSyntax::kNone);
  EXPECT_EQ(reasoning_syntax_named("deepseek-r1").think_begin, "<think>");
  EXPECT_EQ(reasoning_syntax_named("none"), ChatSyntax{});
  const auto message = [](auto call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_THAT(message([] { tool_syntax_named("gpt"); }),
              HasSubstr("\"gpt\"; expected one of hermes, qwen, qwen25, qwen3, deepseekv3"));
  EXPECT_THAT(message([] { reasoning_syntax_named(""); }), HasSubstr("qwen3, deepseek-r1, deepseek_r1"));
}

TEST(ChatSyntax, PromptsThatOpenThinking) {
  const ChatSyntax thinks = reasoning_syntax_named("qwen3");
  EXPECT_TRUE(prompt_opens_thinking(thinks, "<|im_start|>assistant\n<think>\n"));
  EXPECT_TRUE(prompt_opens_thinking(thinks, "<think>"));
  EXPECT_FALSE(prompt_opens_thinking(thinks, "<think>\n\n</think>\n\n"));
  EXPECT_FALSE(prompt_opens_thinking(thinks, ""));
  EXPECT_FALSE(prompt_opens_thinking({}, "<think>"));
}

OrderedJson conversation() {
  return OrderedJson::parse(R"({
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters":
                 {"type": "object", "properties": {"city": {"type": "string"}}}}},
              {"type": "function", "function": {"name": "now"}}],
    "messages": [
      {"role": "developer", "content": "Be brief."},
      {"role": "user", "content": [{"type": "text", "text": "Weather in Bonn?"}]},
      {"role": "assistant", "content": null, "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\": \"Bonn\\n\\\"x\\\"\"}"}},
        {"id": "b", "type": "function", "function": {"name": "now", "arguments": ""}}]},
      {"role": "tool", "tool_call_id": "a", "content": "sun"},
      {"role": "tool", "tool_call_id": "b", "content": "noon"},
      {"role": "assistant", "content": "Sun."},
      {"role": "user", "content": "Thanks"}]})");
}

struct Calls {
  std::vector<std::string> names = {};
  std::vector<OrderedJson> arguments = {};
};
Calls read_calls(const ChatSyntax& syntax, std::string_view text) {
  ReplyParser parser(syntax, {.tools = true});
  std::vector<ReplyPiece> pieces = parser.push(text);
  std::ranges::copy(parser.flush(), std::back_inserter(pieces));
  Calls calls;
  for (const ReplyPiece& piece : pieces) {
    if (piece.kind == Kind::kCall) calls.names.push_back(piece.text);
    if (piece.kind == Kind::kArguments) calls.arguments.push_back(OrderedJson::parse(piece.text));
  }
  return calls;
}

// What a template writes for earlier calls is what the model learnt to write, so the parser must read it.
TEST(ChatSyntax, CallsThatTemplatesWriteAreReadBack) {
  const OrderedJson request = conversation();
  // As the published template of DeepSeek V3 has it, which appends arguments and asks for a content of none.
  const std::string appending =
      "{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}"
      "{{'<｜Assistant｜><｜tool▁calls▁begin｜>'}}{% for tool in message['tool_calls'] "
      "%}{{'<｜tool▁call▁begin｜>' + "
      "tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + "
      "tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>'}}{% endfor "
      "%}{{'<｜tool▁calls▁end｜>'}}"
      "{% else %}{{ message['content'] + '<｜Assistant｜>' }}{% endif %}{% endfor %}";
  for (const std::string name : {"qwen2", "qwen3", "deepseek_v3", "appending"}) {
    const std::string source = name == "appending" ? appending : template_named(name);
    const ChatSyntax syntax = chat_syntax_of(source, demo_tokenizer());
    const OrderedJson messages = template_messages(request["messages"], source);
    const std::string prompt = ChatTemplate(source, name)
                                   .render({{"messages", messages},
                                            {"tools", request_tools(request)},
                                            {"add_generation_prompt", true},
                                            {"bos_token", "<s>"},
                                            {"eos_token", "</s>"}});
    // The answer that holds the calls.
    const std::string_view head =
        syntax.tools == ToolSyntax::kHermes ? "<|im_start|>assistant" : "<｜Assistant｜>";
    const size_t begin = prompt.find(tool_markers(syntax.tools).call_begin, prompt.find(head));
    ASSERT_NE(begin, std::string::npos) << name;
    const Calls calls = read_calls(syntax, std::string_view(prompt).substr(begin));
    EXPECT_EQ(calls.names, (std::vector<std::string>{"get_weather", "now"})) << name;
    ASSERT_EQ(calls.arguments.size(), 2u) << prompt;
    EXPECT_EQ(calls.arguments[0], OrderedJson({{"city", "Bonn\n\"x\""}})) << name;
    EXPECT_EQ(calls.arguments[1], OrderedJson::object()) << name;
  }
}

TEST(ChatSyntax, ConversationsWithCallsRenderForTheOtherTemplates) {
  const OrderedJson request = conversation();
  for (const std::string name : {"glm4_moe", "kimi_k2", "minimax_m2"}) {
    const std::string source = template_named(name);
    const std::string prompt = ChatTemplate(source, name)
                                   .render({{"messages", template_messages(request["messages"], source)},
                                            {"tools", request_tools(request)}});
    EXPECT_THAT(prompt, HasSubstr("Bonn")) << name;
  }
}

TEST(ChatSyntax, ToolsWithATemplateThatDoesNotKnowThem) {
  const OrderedJson request = conversation();
  const std::string chat_ml =
      "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% "
      "endfor %}";
  for (const std::string& source : {chat_ml, template_named("mixtral"), template_named("deepseek_v2")}) {
    ASSERT_FALSE(template_knows_tools(source));
    const OrderedJson messages =
        with_tool_prompt(template_messages(request["messages"], source), request_tools(request));
    const std::string prompt =
        ChatTemplate(source, "plain")
            .render({{"messages", messages}, {"bos_token", "<s>"}, {"eos_token", "</s>"}});
    EXPECT_THAT(prompt, HasSubstr("Be brief.\n\n# Tools"));
    const size_t begin = prompt.find("<tool_call>\n{\"name\": \"get_weather\"");
    ASSERT_NE(begin, std::string::npos) << prompt;
    const Calls calls = read_calls({.tools = ToolSyntax::kHermes}, prompt.substr(begin));
    EXPECT_EQ(calls.names, (std::vector<std::string>{"get_weather", "now"}));
  }
}

}  // namespace
}  // namespace kt
