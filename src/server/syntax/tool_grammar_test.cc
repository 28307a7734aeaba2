#include <gmock/gmock.h>

#include <cmath>
#include <random>

#include "base/error.h"
#include "server/syntax/call_syntax.h"

namespace kt::inline server {
namespace {

using ::testing::HasSubstr;
using Kind = ReplyPiece::Kind;

// Every byte is a token, and so are the markers.
const Tokenizer& tokenizer() {
  static const Tokenizer made = [] {
    TokenizerParts parts{.name = "test", .bpe = {.bytes = true}, .decoding = {.byte_level = true}};
    for (int byte = 0; byte < 256; ++byte)
      parts.tokens.push_back(spell_bytes(std::string(1, static_cast<char>(byte))));
    const ToolMarkers seek = tool_markers(ToolSyntax::kDeepSeekV3), kimi = tool_markers(ToolSyntax::kKimiK2),
                      solar = tool_markers(ToolSyntax::kSolarOpen);
    TokenId id = 256;
    // Some are special, some ordinary, and one is a part of markers.
    for (const std::string_view marker : {std::string_view("<|eos|>"),
                                          std::string_view("<think>"),
                                          std::string_view("</think>"),
                                          std::string_view("<tool_call>"),
                                          std::string_view("</tool_call>"),
                                          seek.section_begin,
                                          seek.section_end,
                                          seek.call_begin,
                                          seek.separator,
                                          seek.call_end,
                                          kimi.section_begin,
                                          kimi.section_end,
                                          kimi.call_begin,
                                          kimi.separator,
                                          kimi.call_end,
                                          kChannels.start,
                                          kChannels.channel,
                                          kChannels.message,
                                          kChannels.constrain,
                                          kChannels.end,
                                          std::string_view("｜DSML｜"),
                                          std::string_view("<arg_key>"),
                                          std::string_view("</arg_value>"),
                                          std::string_view("<tool_sep:opensource>"),
                                          std::string_view("</arg_value:opensource>"),
                                          solar.section_begin,
                                          solar.call_begin,
                                          solar.id_mark,
                                          solar.separator,
                                          solar.call_end,
                                          kFrames.role,
                                          kFrames.thought,
                                          kFrames.text,
                                          tool_markers(ToolSyntax::kMistral).call_begin,
                                          tool_markers(ToolSyntax::kMistral).id_mark})
      parts.added.push_back(
          {.id = id++,
           .content = std::string(marker),
           .special = marker.starts_with("<|") || marker == "｜DSML｜" || marker.starts_with("[")});
    return Tokenizer(std::move(parts));
  }();
  return made;
}
constexpr TokenId kEnd = 256;  // <|eos|>

const TokenTrie& trie() {
  static const TokenTrie made(tokenizer());
  return made;
}

ChatSyntax thinking(ToolSyntax tools) {
  return with_tool_syntax({.think_begin = "<think>", .think_end = "</think>"}, tools);
}

OrderedJson tools() {
  return template_tools(OrderedJson::parse(R"([
    {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties":
      {"n": {"type": "integer"}, "unit": {"enum": ["C", "F"]}}, "required": ["n"], "additionalProperties": false}}},
    {"type": "function", "function": {"name": "now", "parameters":
      {"type": "object", "properties": {}, "additionalProperties": false}}}])"));
}

Grammar grammar_of(ToolSyntax syntax, ToolChoice choice, ReplyParser::Start start = {}) {
  choice.kind = ToolChoice::Kind::kRequired;
  return tool_call_grammar(thinking(syntax), tokenizer(), tools(), choice, start);
}

bool may_come(TokenConstraint& constraint, TokenId id) {
  std::vector<float> logits(tokenizer().size(), 0.0f);
  constraint.mask(logits);
  return logits[static_cast<size_t>(id)] == 0.0f;
}

// Whether the text may be the whole answer.
bool fits(const Grammar& grammar, std::string_view answer) {
  const auto constraint = constrain(trie(), grammar, std::array{kEnd});
  std::vector<TokenId> ids = tokenizer().encode(answer);
  ids.push_back(kEnd);
  for (const TokenId id : ids) {
    if (!may_come(*constraint, id)) return false;
    constraint->accept(id);
  }
  return true;
}

TEST(ToolGrammar, HermesCalls) {
  const std::string get =
      "<tool_call>\n{\"name\": \"get\", \"arguments\": {\"n\": 3, \"unit\": \"C\"}}\n</tool_call>";
  const std::string now = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
  const Grammar any = grammar_of(ToolSyntax::kHermes, {});
  EXPECT_TRUE(fits(any, get));
  EXPECT_TRUE(fits(any, now + "\n" + get + "\n" + now));
  EXPECT_TRUE(fits(any, "<think>\nhm <tool_call>\n</think>\n\n" + get));
  EXPECT_FALSE(fits(any, ""));
  EXPECT_FALSE(fits(any, "Hello"));
  EXPECT_FALSE(fits(any, "<tool_call>\n{\"name\": \"put\", \"arguments\": {}}\n</tool_call>"));
  EXPECT_FALSE(fits(any, "<tool_call>\n{\"name\": \"get\", \"arguments\": {\"n\": \"3\"}}\n</tool_call>"));
  EXPECT_FALSE(fits(grammar_of(ToolSyntax::kHermes, {.parallel = false}), now + "\n" + get));
  const Grammar named = grammar_of(ToolSyntax::kHermes, {.name = "now"});
  EXPECT_TRUE(fits(named, now));
  EXPECT_FALSE(fits(named, get));
}

TEST(ToolGrammar, ThinkingThatThePromptOpenedComesFirst) {
  const std::string now = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
  const Grammar opened = grammar_of(ToolSyntax::kHermes, {}, {.thinking = true});
  EXPECT_TRUE(fits(opened, "hm</think>" + now));
  EXPECT_TRUE(fits(opened, "\nhm\n</think>\n\n" + now));
  EXPECT_FALSE(fits(opened, now));
  const Grammar silent = tool_call_grammar({.tools = ToolSyntax::kHermes}, tokenizer(), tools(),
                                           {.kind = ToolChoice::Kind::kRequired});
  EXPECT_TRUE(fits(silent, now));
  EXPECT_FALSE(fits(silent, "<think>hm</think>" + now));
}

TEST(ToolGrammar, DeepSeekCalls) {
  EXPECT_TRUE(
      fits(grammar_of(ToolSyntax::kDeepSeekV3, {}),
           "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<"
           "｜tool▁call▁end｜>\n"
           "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{\"n\": -1}\n```<｜tool▁call▁end｜>"
           "<｜tool▁calls▁end｜>"));
  EXPECT_TRUE(
      fits(grammar_of(ToolSyntax::kDeepSeekV31, {}),
           "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
           "<｜tool▁call▁begin｜>get<｜tool▁sep｜>{\"n\": 0}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"));
}

TEST(ToolGrammar, CallsInTags) {
  EXPECT_TRUE(fits(grammar_of(ToolSyntax::kGlm45, {}),
                   "<tool_call>get\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n"
                   "<arg_value>C</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>"));
  const Grammar tight = grammar_of(ToolSyntax::kGlm47, {});
  EXPECT_TRUE(fits(
      tight,
      "<tool_call>get<arg_key>n</arg_key><arg_value>-3</arg_value></tool_call><tool_call>now</tool_call>"));
  EXPECT_FALSE(fits(tight, "<tool_call>get<arg_key>n</arg_key><arg_value>x</arg_value></tool_call>"));
  EXPECT_FALSE(fits(tight, "<tool_call>get<arg_key>n</arg_key><arg_value>\"3\"</arg_value></tool_call>"));
  EXPECT_FALSE(fits(tight, "<tool_call>get</tool_call>"));
  EXPECT_FALSE(fits(tight, "<tool_call>get<arg_key>unit</arg_key><arg_value>C</arg_value></tool_call>"));
  EXPECT_FALSE(fits(tight,
                    "<tool_call>get<arg_key>n</arg_key><arg_value>3</arg_value><arg_key>unit</arg_key>"
                    "<arg_value>K</arg_value></tool_call>"));
  EXPECT_TRUE(fits(grammar_of(ToolSyntax::kQwen3Coder, {}),
                   "<tool_call>\n<function=get>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"));
  EXPECT_TRUE(fits(grammar_of(ToolSyntax::kHy3, {}),
                   "<tool_calls>\n<tool_call>get<tool_sep>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n"
                   "</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>"));
  EXPECT_TRUE(fits(grammar_of(ToolSyntax::kHy3Open, {}),
                   "<tool_calls:opensource>\n<tool_call:opensource>get<tool_sep:opensource>\n"
                   "<arg_key:opensource>n</arg_key:opensource>\n"
                   "<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n"
                   "</tool_calls:opensource>"));
  EXPECT_FALSE(fits(grammar_of(ToolSyntax::kHy3, {}), "<tool_call>now<tool_sep>\n</tool_call>"));
  EXPECT_TRUE(
      fits(grammar_of(ToolSyntax::kMiniMaxM2, {}),
           "<minimax:tool_call>\n<invoke name=\"get\">\n<parameter name=\"n\">3</parameter>\n</invoke>\n"
           "<invoke name=\"now\">\n</invoke>\n</minimax:tool_call>"));
  EXPECT_TRUE(
      fits(grammar_of(ToolSyntax::kDeepSeekV32, {}),
           "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"get\">\n<｜DSML｜parameter name=\"n\" "
           "string=\"false\">3"
           "</｜DSML｜parameter>\n<｜DSML｜parameter name=\"unit\" string=\"true\">F</｜DSML｜parameter>\n"
           "</｜DSML｜invoke>\n</｜DSML｜function_calls>"));
}

TEST(ToolGrammar, KimisAndChannelsCalls) {
  const Grammar kimi = grammar_of(ToolSyntax::kKimiK2, {});
  EXPECT_TRUE(
      fits(kimi,
           "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
           "<|tool_call_end|><|tool_call_begin|>functions.get:12<|tool_call_argument_begin|>{\"n\": 1}"
           "<|tool_call_end|><|tool_calls_section_end|>"));
  EXPECT_FALSE(fits(kimi,
                    "<|tool_calls_section_begin|><|tool_call_begin|>now<|tool_call_argument_begin|>{}"
                    "<|tool_call_end|><|tool_calls_section_end|>"));
  const Grammar gpt = grammar_of(ToolSyntax::kGptOss, {});
  const std::string now = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}";
  EXPECT_TRUE(fits(gpt, now));
  EXPECT_TRUE(fits(gpt, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + now));
  EXPECT_FALSE(fits(gpt, "<|channel|>final<|message|>Hello"));
  EXPECT_FALSE(fits(gpt, "<|channel|>analysis<|message|>hm<|end|>" + now));
  EXPECT_TRUE(
      fits(grammar_of(ToolSyntax::kGptOss, {}, {.thinking = true}), "hm<|end|><|start|>assistant" + now));
  EXPECT_TRUE(
      fits(grammar_of(ToolSyntax::kMistral, {}), "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get[ARGS]{\"n\": 1}"));
}

TEST(ToolGrammar, CallsWithIds) {
  const Grammar mistral = grammar_of(ToolSyntax::kMistral, {});
  EXPECT_TRUE(fits(mistral, "[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]get[ARGS]{\"n\": 1}"));
  EXPECT_FALSE(fits(mistral, "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}"));
  EXPECT_FALSE(fits(mistral, "[TOOL_CALLS]now[CALL_ID][ARGS]{}"));
  const auto call = [](std::string_view id, std::string_view rest) {
    return "<|tool_call:begin|>" + std::string(id) + "<|tool_call:name|>" + std::string(rest) +
           "<|tool_call:end|>";
  };
  const std::string now = call("a1b2c3d4e5", "now<|tool_call:args|>{}");
  const Grammar solar = grammar_of(ToolSyntax::kSolarOpen, {});
  EXPECT_TRUE(fits(solar, "<|tool_calls|>" + now));
  EXPECT_TRUE(
      fits(solar, "<|tool_calls|>" + now + call("zzzzzzzzz0", "get<|tool_call:args|>{\"n\": 1}") + now));
  EXPECT_TRUE(fits(solar, "<|think|>hm <tool_call><|end|><|begin|>assistant<|tool_calls|>" + now));
  EXPECT_TRUE(fits(grammar_of(ToolSyntax::kSolarOpen, {}, {.thinking = true}),
                   "hm<|end|><|begin|>assistant<|tool_calls|>" + now));
  EXPECT_FALSE(fits(solar, "<|think|>hm<|end|><|tool_calls|>" + now));
  EXPECT_FALSE(fits(solar, now));
  EXPECT_FALSE(fits(solar, "<|content|>Hello"));
  EXPECT_FALSE(fits(solar, "<|tool_calls|>" + call("A1b2c3d4e5", "now<|tool_call:args|>{}")));
  EXPECT_FALSE(fits(solar, "<|tool_calls|>" + call("a1b2", "now<|tool_call:args|>{}")));
  EXPECT_FALSE(fits(grammar_of(ToolSyntax::kSolarOpen, {.parallel = false}), "<|tool_calls|>" + now + now));
}

TEST(ToolGrammar, CallsInAList) {
  const std::string get = "{\"name\": \"get\", \"arguments\": {\"n\": 3}}",
                    now = "{\"name\": \"now\", \"arguments\": {}}";
  const Grammar any = grammar_of(ToolSyntax::kMistralList, {});
  EXPECT_TRUE(fits(any, "[TOOL_CALLS] [" + get + "]"));
  EXPECT_TRUE(fits(any, "[TOOL_CALLS][" + get + ", " + now + ", " + get + "]"));
  EXPECT_TRUE(fits(any, "<think>\nhm\n</think>\n[TOOL_CALLS] [" + now + "]"));
  for (const char* bad : {"[TOOL_CALLS] []", "[TOOL_CALLS] [", "[TOOL_CALLS]now[ARGS]{}"})
    EXPECT_FALSE(fits(any, bad)) << bad;
  EXPECT_FALSE(fits(any, "[TOOL_CALLS] [" + get));
  EXPECT_FALSE(fits(any, "[TOOL_CALLS] [" + get + ", ]"));
  EXPECT_FALSE(fits(any, "[TOOL_CALLS] [" + get + "][TOOL_CALLS] [" + get + "]"));
  EXPECT_FALSE(fits(any, "[TOOL_CALLS] [{\"name\": \"get\", \"arguments\": {}}]"));
  const Grammar one = grammar_of(ToolSyntax::kMistralList, {.parallel = false});
  EXPECT_TRUE(fits(one, "[TOOL_CALLS] [" + get + "]"));
  EXPECT_FALSE(fits(one, "[TOOL_CALLS] [" + get + ", " + now + "]"));
}

TEST(ToolGrammar, AnswersOnAChannel) {
  const ChatSyntax gpt = with_tool_syntax({}, ToolSyntax::kGptOss);
  const Grammar held = answer_grammar(gpt, tokenizer(), literal_grammar("{}"), {});
  EXPECT_TRUE(fits(held, "<|channel|>final<|message|>{}"));
  EXPECT_TRUE(
      fits(held, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{}"));
  EXPECT_FALSE(fits(held, "{}"));
  const Grammar framed =
      answer_grammar(with_tool_syntax({}, ToolSyntax::kSolarOpen), tokenizer(), literal_grammar("{}"), {});
  EXPECT_TRUE(fits(framed, "<|content|>{}"));
  EXPECT_TRUE(fits(framed, "<|think|>hm<|end|><|begin|>assistant<|content|>{}"));
  EXPECT_FALSE(fits(framed, "{}"));
  const ChatSyntax qwen = thinking(ToolSyntax::kHermes);
  EXPECT_TRUE(fits(answer_grammar(qwen, tokenizer(), literal_grammar("{}"), {}), "{}"));
  EXPECT_TRUE(
      fits(answer_grammar(qwen, tokenizer(), literal_grammar("{}"), {.thinking = true}), "hm</think>\n{}"));
}

OrderedJson many_types() {
  return template_tools(OrderedJson::parse(R"([{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "$defs": {"mode": {"enum": ["null", "on", "5", "</arg_value>x"]}}, "properties": {
      "text": {"type": "string"}, "short": {"type": "string", "minLength": 1, "maxLength": 3},
      "bounded": {"type": "string", "maxLength": 5000}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
      "mode": {"anyOf": [{"$ref": "#/$defs/mode"}, {"type": "null"}]}, "maybe": {"type": ["string", "null", "integer"]},
      "size": {"type": "integer", "minimum": 3, "maximum": 12}, "part": {"type": "number"}, "on": {"type": "boolean"},
      "list": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
      "map": {"type": "object", "properties": {"k": {"type": "string"}}, "additionalProperties": false},
      "union": {"anyOf": [{"type": "string", "maxLength": 2},
                {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"],
                 "additionalProperties": false}]},
      "any": {}}, "required": ["text", "mode"]}}}])"));
}

// Valid against the schema above, checked by hand.
void check_types(const OrderedJson& value, const std::string& answer) {
  const auto at = [&](const char* key) -> const OrderedJson* {
    const auto found = value.find(key);
    return found == value.end() ? nullptr : &*found;
  };
  ASSERT_TRUE(value.is_object() && at("text") && at("text")->is_string()) << answer;
  ASSERT_TRUE(at("mode") && (at("mode")->is_null() || at("mode")->is_string())) << answer;
  if (at("mode")->is_string()) {
    EXPECT_THAT(at("mode")->get<std::string>(), ::testing::AnyOf("null", "on", "5", "</arg_value>x"))
        << answer;
  }
  const auto characters = [](const OrderedJson& text) {
    size_t count = 0;
    for (const char c : text.get<std::string>()) count += (c & 0xC0) != 0x80;
    return count;
  };
  if (at("short")) {
    EXPECT_TRUE(at("short")->is_string() && characters(*at("short")) - 1 < 3) << answer;
  }
  if (at("bounded")) {
    EXPECT_TRUE(at("bounded")->is_string()) << answer;
  }
  if (at("zip")) {
    EXPECT_TRUE(at("zip")->is_string() && at("zip")->get<std::string>().size() == 5) << answer;
  }
  if (at("maybe")) {
    EXPECT_TRUE(at("maybe")->is_string() || at("maybe")->is_null() || at("maybe")->is_number_integer())
        << answer;
  }
  if (at("size")) {
    EXPECT_TRUE(at("size")->is_number_integer() && *at("size") >= 3 && *at("size") <= 12) << answer;
  }
  if (at("part")) {
    EXPECT_TRUE(at("part")->is_number()) << answer;
  }
  if (at("on")) {
    EXPECT_TRUE(at("on")->is_boolean()) << answer;
  }
  if (at("list")) {
    EXPECT_TRUE(at("list")->is_array() && at("list")->size() <= 2) << answer;
  }
  if (at("map")) {
    EXPECT_TRUE(at("map")->is_object()) << answer;
  }
  if (at("union")) {
    EXPECT_TRUE(at("union")->is_object() || (at("union")->is_string() && characters(*at("union")) <= 2))
        << answer;
  }
}

// An answer that ends, of random tokens: those of markers and the end often, and what spells `goal`, or strings would
// never end.
std::optional<std::string> random_answer(const Grammar& grammar, const std::string& goal,
                                         std::mt19937& random) {
  const auto constraint = constrain(trie(), grammar, std::array{kEnd});
  const std::string likely = "</>_argvluepmt\"}]\n0123456789null";
  std::string answer;
  for (int step = 0; step < 3000; ++step) {
    std::vector<float> logits(tokenizer().size(), 0.0f);
    constraint->mask(logits);
    std::vector<TokenId> allowed, wanted;
    for (size_t id = 0; id < logits.size(); ++id) {
      if (logits[id] != 0.0f) continue;
      allowed.push_back(static_cast<TokenId>(id));
      const std::string_view bytes = tokenizer().token_bytes(static_cast<TokenId>(id));
      if (id >= 256 || (bytes.size() == 1 && likely.find(bytes) != std::string::npos))
        wanted.push_back(static_cast<TokenId>(id));
    }
    EXPECT_FALSE(allowed.empty()) << answer;
    if (allowed.empty()) return std::nullopt;
    size_t spelled = std::min(goal.size(), answer.size());
    while (spelled > 0 && !std::string_view(answer).ends_with(std::string_view(goal).substr(0, spelled)))
      --spelled;
    if (spelled < goal.size() && random() % 8 != 0) {
      const auto next = static_cast<TokenId>(static_cast<uint8_t>(goal[spelled]));
      if (std::ranges::find(allowed, next) != allowed.end()) wanted = {next};
    }
    const std::vector<TokenId>& from = !wanted.empty() && random() % 4 != 0 ? wanted : allowed;
    const TokenId id = from[random() % from.size()];
    constraint->accept(id);
    if (id == kEnd) return answer;
    answer += tokenizer().token_bytes(id);
  }
  return std::nullopt;
}

// Any answer that the grammar allows is read as calls and nothing else, with arguments that fit their schemas.
TEST(ToolGrammar, WhatItAllowsIsRead) {
  std::mt19937 random(11);
  for (const ToolSyntax syntax : kToolSyntaxes)
    for (const bool many : {false, true}) {
      const OrderedJson offered = many ? many_types() : tools();
      const ChatSyntax plain = with_reasoning(with_tool_syntax({}, syntax), {});
      const Grammar grammar = tool_call_grammar(plain, tokenizer(), offered,
                                                {.kind = ToolChoice::Kind::kRequired, .parallel = !many});
      const ReplyParser::Start start{.tools = true, .types = std::make_shared<const ArgumentTypes>(offered)};
      const TagMarkers& tags = call_syntax(syntax).tags;
      const std::string goal = (tags.value_lines ? "\n" : "") + std::string(tags.value_end);
      int ended = 0;
      for (int round = 0; round < 20; ++round) {
        const std::optional<std::string> answer = random_answer(grammar, goal, random);
        if (!answer) continue;
        ++ended;
        ReplyParser parser(plain, start);
        std::vector<ReplyPiece> pieces = parser.push(*answer);
        std::ranges::copy(parser.flush(), std::back_inserter(pieces));
        EXPECT_GE(parser.calls(), 1) << *answer;
        EXPECT_FALSE(parser.cut_off()) << *answer;
        for (const ReplyPiece& piece : pieces) {
          ASSERT_TRUE(piece.kind == Kind::kCall || piece.kind == Kind::kArguments) << *answer;
          if (piece.kind != Kind::kArguments) continue;
          const OrderedJson value = OrderedJson::parse(piece.text, nullptr, false);
          ASSERT_FALSE(value.is_discarded()) << *answer << "\n" << piece.text;
          if (many) check_types(value, *answer);
        }
      }
      EXPECT_GT(ended, 5) << name_of(syntax) << many;
    }
}

TEST(ToolGrammar, Errors) {
  const auto message = [](auto call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  EXPECT_THAT(message([] { tool_call_grammar({}, tokenizer(), tools(), {}); }),
              HasSubstr("no syntax for calls"));
  EXPECT_THAT(message([] { grammar_of(ToolSyntax::kHermes, {.name = "put"}); }),
              HasSubstr("no function \"put\""));
  const OrderedJson bad = OrderedJson::parse(
      R"([{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}])");
  EXPECT_THAT(message([&] { tool_call_grammar(thinking(ToolSyntax::kHermes), tokenizer(), bad, {}); }),
              HasSubstr("tools[0].function.parameters: "));
  const auto glm = [&](const char* parameters) {
    const OrderedJson tool = {{"type", "function"},
                              {"function", {{"name", "f"}, {"parameters", OrderedJson::parse(parameters)}}}};
    return message([&] {
      tool_call_grammar(thinking(ToolSyntax::kGlm47), tokenizer(), OrderedJson::array({tool}), {});
    });
  };
  EXPECT_THAT(glm(R"({"anyOf": [{"type": "object"}]})"), HasSubstr("json_schema.anyOf: cannot be held"));
  EXPECT_THAT(glm(R"({"type": "object", "properties": {"a<b": {}}})"),
              HasSubstr("\"a<b\" cannot be written"));
  EXPECT_THAT(
      glm(R"({"type": "object", "properties": {"a": {"enum": ["</arg_value>"]}}, "required": ["a"]})"),
      HasSubstr("properties.a: no value is valid"));
  EXPECT_THAT(glm(R"({"type": "string"})"), HasSubstr("expected \"object\""));
  EXPECT_EQ(glm(R"({"type": "object", "properties": {"a": {"type": "string", "maxLength": 20000}}})"), "");
  EXPECT_EQ(
      glm(R"({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/b"}}},
                  "b": {"type": "string"}}})"),
      "");
  // Each property by itself is allowed, all of them are not made.
  std::string many = R"({"$defs": {"b": {"type": "object", "properties": {)";
  for (char c = 'a'; c < 'o'; ++c)
    many += text("{}\"{}\": {{\"type\": \"string\", \"minLength\": 19000}}", c == 'a' ? "" : ", ", c);
  many += R"(}}}, "type": "object", "properties": {)";
  for (int i = 0; i < 300; ++i) many += text("{}\"p{}\": {{\"$ref\": \"#/$defs/b\"}}", i == 0 ? "" : ", ", i);
  EXPECT_THAT(glm((many + "}}").c_str()), HasSubstr("too large; expected at most 300000 states, \"p"));
}

}  // namespace
}  // namespace kt::inline server
