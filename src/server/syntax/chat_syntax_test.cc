#include "server/syntax/chat_syntax.h"

#include <gmock/gmock.h>

#include <fstream>

#include "base/error.h"
#include "server/syntax/call_syntax.h"
#include "text/chat_template.h"

namespace kt::inline server {
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
        Row{"deepseek_v32", true, ToolSyntax::kDeepSeekV32, true},
        Row{"glm4_moe", true, ToolSyntax::kGlm45, true}, Row{"glm47", true, ToolSyntax::kGlm47, true},
        Row{"hy3_preview", true, ToolSyntax::kHy3, true}, Row{"kimi_k2", false, ToolSyntax::kKimiK2, true},
        Row{"llama3", false, ToolSyntax::kNone, true}, Row{"minimax_m2", true, ToolSyntax::kMiniMaxM2, true},
        Row{"mistral_ids", false, ToolSyntax::kMistral, true},
        Row{"mistral_list", false, ToolSyntax::kMistralList, true},
        Row{"mixtral", false, ToolSyntax::kNone, false}, Row{"qwen2", false, ToolSyntax::kHermes, true},
        Row{"qwen3", true, ToolSyntax::kHermes, true},
        Row{"qwen3_coder", false, ToolSyntax::kQwen3Coder, true}}) {
    const std::string source = template_named(row.name);
    const ChatSyntax syntax = chat_syntax_of(source, demo_tokenizer());
    EXPECT_EQ(syntax.think_begin, row.thinks ? "<think>" : "") << row.name;
    EXPECT_EQ(syntax.think_end, row.thinks ? "</think>" : "") << row.name;
    EXPECT_FALSE(syntax.channels) << row.name;
    EXPECT_EQ(syntax.tools, row.tools) << row.name;
    EXPECT_EQ(template_knows_tools(source), row.knows_tools) << row.name;
  }
}

TEST(ChatSyntax, OfTemplatesWithOtherThoughts) {
  const ChatSyntax gpt = chat_syntax_of(template_named("gpt_oss"), demo_tokenizer());
  EXPECT_EQ(gpt, (ChatSyntax{.think_begin = "<|channel|>analysis<|message|>",
                             .think_end = "<|end|>",
                             .tools = ToolSyntax::kGptOss,
                             .channels = true}));
  EXPECT_EQ(gpt, with_tool_syntax({}, ToolSyntax::kGptOss));
  EXPECT_EQ(chat_syntax_of(template_named("mistral"), demo_tokenizer()),
            (ChatSyntax{.think_begin = "[THINK]", .think_end = "[/THINK]", .tools = ToolSyntax::kMistral}));
  EXPECT_EQ(chat_syntax_of(template_named("hy3"), demo_tokenizer()),
            (ChatSyntax{.think_begin = "<think:opensource>",
                        .think_end = "</think:opensource>",
                        .tools = ToolSyntax::kHy3Open}));
  const ChatSyntax solar = chat_syntax_of(template_named("solar_open"), demo_tokenizer());
  EXPECT_EQ(solar, (ChatSyntax{.think_begin = "<|think|>",
                               .think_end = "<|end|>",
                               .tools = ToolSyntax::kSolarOpen,
                               .frames = true}));
  EXPECT_EQ(solar, with_tool_syntax({}, ToolSyntax::kSolarOpen));
  for (const char* name : {"hy3", "solar_open"}) EXPECT_TRUE(template_knows_tools(template_named(name)));
}

TEST(ChatSyntax, OfOtherTexts) {
  EXPECT_EQ(chat_syntax_of("", demo_tokenizer()), ChatSyntax{});
  EXPECT_EQ(chat_syntax_of("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}",
                           demo_tokenizer())
                .tools,
            ToolSyntax::kDeepSeekV31);
  EXPECT_EQ(chat_syntax_of("<tool_call>\n<function=name>", demo_tokenizer()).tools, ToolSyntax::kQwen3Coder);
  EXPECT_EQ(chat_syntax_of("ns ~ '<tool_call>' ~ ns ~ '<invoke name=' ~ '<mm:think>'", demo_tokenizer()),
            (ChatSyntax{.think_begin = "<mm:think>", .think_end = "</mm:think>"}));
  // Hy3's markers with something else behind their names, and a separator that is none of Hy3's.
  for (const char* source :
       {"'<tool_sep{}>'.format(':x') '<arg_key{}>' '<tool_call>'", "content.split('<tool_sep>')"})
    EXPECT_EQ(chat_syntax_of(source, demo_tokenizer()).tools, ToolSyntax::kNone) << source;
  EXPECT_EQ(chat_syntax_of("'<' ~ '｜DSML｜' ~ 'tool_calls'", demo_tokenizer()).tools,
            ToolSyntax::kDeepSeekV4);
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
  // A token within a marker, and those of channels.
  const Tokenizer more(TokenizerParts{.name = "test",
                                      .tokens = {"a"},
                                      .added = {{.id = 1, .content = "｜DSML｜", .special = true},
                                                {.id = 2, .content = "<|message|>", .special = true},
                                                {.id = 3, .content = "<|call|>", .special = true}}});
  EXPECT_EQ(answer_decoding({.tools = ToolSyntax::kDeepSeekV32}, more), SpecialTokens::kKeep);
  EXPECT_EQ(answer_decoding({.tools = ToolSyntax::kHermes}, more), SpecialTokens::kSkip);
  EXPECT_EQ(answer_decoding(with_tool_syntax({}, ToolSyntax::kGptOss), more), SpecialTokens::kKeep);
  for (const bool is_special : {false, true}) {
    const Tokenizer bracketed(
        TokenizerParts{.name = "test",
                       .tokens = {"a"},
                       .added = {{.id = 1, .content = "[TOOL_CALLS]", .special = is_special}}});
    EXPECT_EQ(answer_decoding({.tools = ToolSyntax::kMistralList}, bracketed),
              is_special ? SpecialTokens::kKeep : SpecialTokens::kSkip);
  }
  EXPECT_EQ(answer_end_tokens(with_tool_syntax({}, ToolSyntax::kGptOss), more), std::vector<TokenId>{3});
  EXPECT_TRUE(answer_end_tokens({.tools = ToolSyntax::kHermes}, more).empty());
  const Tokenizer framed(TokenizerParts{.name = "test",
                                        .tokens = {"a"},
                                        .added = {{.id = 1, .content = "<|begin|>", .special = true},
                                                  {.id = 2, .content = "<|flush|>", .special = true},
                                                  {.id = 3, .content = "<|calls|>", .special = true}}});
  const ChatSyntax solar = with_tool_syntax({}, ToolSyntax::kSolarOpen);
  EXPECT_EQ(answer_end_tokens(solar, framed), (std::vector<TokenId>{2, 3}));
  EXPECT_EQ(answer_decoding(with_reasoning(solar, {}), framed), SpecialTokens::kKeep);
  EXPECT_EQ(answer_decoding({}, framed), SpecialTokens::kSkip);
}

TEST(ChatSyntax, ByName) {
  EXPECT_EQ(tool_syntax_named("qwen25"), ToolSyntax::kHermes);
  EXPECT_EQ(tool_syntax_named("deepseekv3"), ToolSyntax::kDeepSeekV3);
  EXPECT_EQ(tool_syntax_named("deepseek_v31"), ToolSyntax::kDeepSeekV31);
  EXPECT_EQ(tool_syntax_named("none"), ToolSyntax::kNone);
  // As issue trackers and launch lines spell them.
  for (const auto& [name, syntax] :
       std::to_array<std::pair<std::string_view, ToolSyntax>>({{"glm45", ToolSyntax::kGlm45},
                                                               {"glm", ToolSyntax::kGlm45},
                                                               {"glm47", ToolSyntax::kGlm47},
                                                               {"qwen3_coder", ToolSyntax::kQwen3Coder},
                                                               {"qwen3-coder", ToolSyntax::kQwen3Coder},
                                                               {"minimax-m2", ToolSyntax::kMiniMaxM2},
                                                               {"minimax_m2", ToolSyntax::kMiniMaxM2},
                                                               {"kimi_k2", ToolSyntax::kKimiK2},
                                                               {"gpt-oss", ToolSyntax::kGptOss},
                                                               {"openai", ToolSyntax::kGptOss},
                                                               {"deepseekv32", ToolSyntax::kDeepSeekV32},
                                                               {"deepseek_v32", ToolSyntax::kDeepSeekV32},
                                                               {"mistral", ToolSyntax::kMistral},
                                                               {"hunyuan", ToolSyntax::kHy3},
                                                               {"hy_v3", ToolSyntax::kHy3},
                                                               {"solar_open", ToolSyntax::kSolarOpen},
                                                               {"mistral_list", ToolSyntax::kMistralList}}))
    EXPECT_EQ(tool_syntax_named(name), syntax) << name;
  EXPECT_EQ(reasoning_syntax_named("deepseek-r1")->think_begin, "<think>");
  EXPECT_EQ(reasoning_syntax_named("minimax-append-think")->think_begin, "<think>");
  EXPECT_EQ(reasoning_syntax_named("minimax_m3")->think_begin, "<mm:think>");
  EXPECT_EQ(reasoning_syntax_named("gpt-oss")->channels, true);
  EXPECT_EQ(reasoning_syntax_named("solar_open")->frames, true);
  EXPECT_EQ(reasoning_syntax_named("hunyuan")->think_begin, "<think>");
  // One name for both of its spellings: the template tells which.
  const ChatSyntax open = chat_syntax_of(template_named("hy3"), demo_tokenizer());
  for (const char* name : {"hy_v3", "hunyuan"}) {
    EXPECT_EQ(tool_syntax_named(name, open), ToolSyntax::kHy3Open);
    EXPECT_EQ(with_reasoning(open, *reasoning_syntax_named(name, open)), open);
  }
  EXPECT_EQ(tool_syntax_named("glm45", open), ToolSyntax::kGlm45);
  EXPECT_EQ(reasoning_syntax_named("none"), ChatSyntax{});
  EXPECT_EQ(tool_syntax_named("gpt"), std::nullopt);
  EXPECT_EQ(tool_syntax_named("deepseek-r1"), std::nullopt);
  EXPECT_EQ(reasoning_syntax_named(""), std::nullopt);
  EXPECT_EQ(reasoning_syntax_named("hermes"), std::nullopt);
  // Every syntax has a name, which leads back to it.
  for (const ToolSyntax syntax : kToolSyntaxes) EXPECT_EQ(tool_syntax_named(name_of(syntax)), syntax);
  EXPECT_EQ(tool_parser_names().size(), kToolSyntaxes.size() + 1);
}

TEST(ChatSyntax, FlagsBesideWhatIsShown) {
  const ChatSyntax qwen{.think_begin = "<think>", .think_end = "</think>", .tools = ToolSyntax::kHermes};
  EXPECT_EQ(with_tool_syntax(qwen, ToolSyntax::kGlm47).think_begin, "<think>");
  EXPECT_TRUE(with_tool_syntax(qwen, ToolSyntax::kGptOss).channels);
  const ChatSyntax gpt = with_tool_syntax({}, ToolSyntax::kGptOss);
  EXPECT_TRUE(with_reasoning(gpt, {}).channels);
  EXPECT_TRUE(with_tool_syntax(gpt, ToolSyntax::kHermes).channels);
  EXPECT_FALSE(with_reasoning(with_tool_syntax(gpt, ToolSyntax::kHermes), qwen).channels);
  const ChatSyntax solar = with_tool_syntax({}, ToolSyntax::kSolarOpen);
  EXPECT_TRUE(with_reasoning(solar, {}).frames);
  EXPECT_TRUE(with_reasoning(solar, qwen).frames);
  EXPECT_TRUE(with_tool_syntax(solar, ToolSyntax::kHermes).frames);
  EXPECT_FALSE(with_reasoning(with_tool_syntax(solar, ToolSyntax::kHermes), qwen).frames);
  EXPECT_FALSE(with_tool_syntax(solar, ToolSyntax::kGptOss).frames);
}

TEST(ChatSyntax, PromptsThatOpenThinking) {
  const ChatSyntax thinks = *reasoning_syntax_named("qwen3");
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
        {"id": "a", "type": "function",
         "function": {"name": "get_weather", "arguments": "{\"city\": \"Bonn\\n\\\"x\\\"\"}"}},
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
  const auto types = std::make_shared<const ArgumentTypes>(request_tools(conversation()));
  ReplyParser parser(syntax, {.tools = true, .types = types});
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
  for (const std::string name : {"qwen2", "qwen3", "deepseek_v3", "appending", "deepseek_v32", "glm4_moe",
                                 "glm47", "hy3", "hy3_preview", "kimi_k2", "minimax_m2", "mistral",
                                 "mistral_ids", "mistral_list", "qwen3_coder", "solar_open"}) {
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
    const ToolMarkers& markers = tool_markers(syntax.tools);
    const size_t begin =
        prompt.find(markers.section_begin.empty() ? markers.call_begin : markers.section_begin,
                    prompt.find("Weather in Bonn?"));
    ASSERT_NE(begin, std::string::npos) << name;
    const Calls calls = read_calls(syntax, std::string_view(prompt).substr(begin));
    EXPECT_EQ(calls.names, (std::vector<std::string>{"get_weather", "now"})) << name;
    ASSERT_EQ(calls.arguments.size(), 2u) << prompt;
    EXPECT_EQ(calls.arguments[0], OrderedJson({{"city", "Bonn\n\"x\""}})) << name;
    EXPECT_EQ(calls.arguments[1], OrderedJson::object()) << name;
  }
}

// Under whichever name a template has for them.
TEST(ChatSyntax, ThoughtsThatAreSentBackReachTheTemplate) {
  const OrderedJson messages = OrderedJson::parse(R"([
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": null, "reasoning_content": "I must look.", "tool_calls": [
      {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "a", "content": "noon"}])");
  for (const std::string name : {"gpt_oss", "hy3", "hy3_preview", "solar_open", "glm47", "minimax_m2"}) {
    const std::string source = template_named(name);
    const ChatSyntax syntax = chat_syntax_of(source, demo_tokenizer());
    const std::string prompt = ChatTemplate(source, name)
                                   .render({{"messages", template_messages(messages, source)},
                                            {"tools", request_tools(conversation())},
                                            {"add_generation_prompt", true},
                                            {"bos_token", "<s>"},
                                            {"eos_token", "</s>"}});
    const size_t at = prompt.find("I must look.");
    ASSERT_NE(at, std::string::npos) << name << prompt;
    EXPECT_TRUE(prompt_opens_thinking(syntax, prompt.substr(0, at))) << name;
    EXPECT_THAT(prompt.substr(at), HasSubstr(syntax.think_end)) << name;
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
}  // namespace kt::inline server
