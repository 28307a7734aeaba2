#include <gmock/gmock.h>

#include <cmath>
#include <random>

#include "base/error.h"
#include "server/chat_syntax.h"

namespace kt {
namespace {

using ::testing::HasSubstr;
using Kind = ReplyPiece::Kind;

// Every byte is a token, and so are the markers.
const Tokenizer& tokenizer() {
  static const Tokenizer made = [] {
    TokenizerParts parts{.name = "test", .bpe = {.bytes = true}, .decoding = {.byte_level = true}};
    for (int byte = 0; byte < 256; ++byte)
      parts.tokens.push_back(spell_bytes(std::string(1, static_cast<char>(byte))));
    const ToolMarkers seek = tool_markers(ToolSyntax::kDeepSeekV3);
    TokenId id = 256;
    for (const std::string_view marker :
         {std::string_view("<|end|>"), std::string_view("<think>"), std::string_view("</think>"),
          std::string_view("<tool_call>"), std::string_view("</tool_call>"), seek.section_begin,
          seek.section_end, seek.call_begin, seek.separator, seek.call_end})
      parts.added.push_back({.id = id++, .content = std::string(marker), .special = marker == "<|end|>"});
    return Tokenizer(std::move(parts));
  }();
  return made;
}
constexpr TokenId kEnd = 256;

const TokenTrie& trie() {
  static const TokenTrie made(tokenizer());
  return made;
}

ChatSyntax thinking(ToolSyntax tools) {
  return {.think_begin = "<think>", .think_end = "</think>", .tools = tools};
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

// Any answer that the grammar allows is read as calls and nothing else.
TEST(ToolGrammar, WhatItAllowsIsRead) {
  std::mt19937 random(11);
  for (const ToolSyntax syntax : {ToolSyntax::kHermes, ToolSyntax::kDeepSeekV3, ToolSyntax::kDeepSeekV31}) {
    const Grammar grammar =
        tool_call_grammar({.tools = syntax}, tokenizer(), tools(), {.kind = ToolChoice::Kind::kRequired});
    int ended = 0;
    for (int round = 0; round < 30; ++round) {
      const auto constraint = constrain(trie(), grammar, std::array{kEnd});
      std::string answer;
      for (int step = 0; step < 1000; ++step) {
        std::vector<float> logits(tokenizer().size(), 0.0f);
        constraint->mask(logits);
        std::vector<TokenId> allowed;
        for (size_t id = 0; id < logits.size(); ++id)
          if (logits[id] == 0.0f) allowed.push_back(static_cast<TokenId>(id));
        ASSERT_FALSE(allowed.empty()) << answer;
        const TokenId id = allowed[random() % allowed.size()];
        constraint->accept(id);
        if (id == kEnd) {
          ++ended;
          ReplyParser parser({.tools = syntax}, {.tools = true});
          std::vector<ReplyPiece> pieces = parser.push(answer);
          std::ranges::copy(parser.flush(), std::back_inserter(pieces));
          EXPECT_GE(parser.calls(), 1);
          for (const ReplyPiece& piece : pieces) {
            EXPECT_TRUE(piece.kind == Kind::kCall || piece.kind == Kind::kArguments) << answer;
            if (piece.kind == Kind::kArguments) {
              EXPECT_FALSE(OrderedJson::parse(piece.text, nullptr, false).is_discarded()) << answer;
            }
          }
          break;
        }
        answer += tokenizer().token_bytes(id);
      }
    }
    EXPECT_GT(ended, 10);
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
}

}  // namespace
}  // namespace kt
