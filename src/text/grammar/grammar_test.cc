#include "text/grammar/grammar.h"

#include <gmock/gmock.h>

#include <chrono>
#include <limits>
#include <random>

#include "base/error.h"

namespace kt::inline texts {
namespace {

using Json = nlohmann::ordered_json;
using testing::HasSubstr;

// Bytes, then the end token 256, the special token 257 and the ordinary added ones 258 and 259.
Tokenizer small_tokenizer() {
  TokenizerParts parts{.name = "bytes"};
  parts.bpe.bytes = true;
  parts.decoding.byte_level = true;
  for (int byte = 0; byte < 256; ++byte)
    parts.tokens.push_back(spell_bytes(std::string(1, static_cast<char>(byte))));
  const char* names[] = {"<end>", "<mark>", "<tool_call>", "\":\""};
  for (int i = 0; i < 4; ++i) {
    AddedToken token;
    token.id = 256 + i;
    token.content = names[i];
    token.special = i < 2;
    parts.added.push_back(token);
  }
  return Tokenizer(std::move(parts));
}

constexpr TokenId kEndToken = 256;

struct World {
  Tokenizer tokenizer = small_tokenizer();
  TokenTrie trie{tokenizer};
};
const World& world() {
  static const World value;
  return value;
}

std::unique_ptr<TokenConstraint> constraint_of(Grammar grammar) {
  const TokenId ends[] = {kEndToken};
  return constrain(world().trie, std::move(grammar), ends);
}

std::vector<TokenId> allowed(TokenConstraint& constraint) {
  std::vector<float> logits(world().tokenizer.size() + 3, 0);
  constraint.mask(logits);
  std::vector<TokenId> ids;
  for (size_t i = 0; i < logits.size(); ++i)
    if (logits[i] == 0) ids.push_back(static_cast<TokenId>(i));
  return ids;
}

bool can(TokenConstraint& constraint, TokenId id) {
  const std::vector<TokenId> ids = allowed(constraint);
  return std::ranges::find(ids, id) != ids.end();
}

// How many bytes are accepted, and whether the text may end there.
std::pair<size_t, bool> read(Grammar grammar, std::string_view text) {
  const auto constraint = constraint_of(std::move(grammar));
  for (size_t i = 0; i < text.size(); ++i) {
    const auto id = static_cast<TokenId>(static_cast<uint8_t>(text[i]));
    if (!can(*constraint, id)) return {i, false};
    constraint->accept(id);
  }
  return {text.size(), can(*constraint, kEndToken)};
}

bool accepts(Grammar grammar, std::string_view text) {
  const auto [count, ends] = read(std::move(grammar), text);
  return count == text.size() && ends;
}

Grammar schema(const char* text) { return json_schema_grammar(Json::parse(text)); }

std::string error_of(const Json& schema) {
  try {
    json_schema_grammar(schema);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    return error.what();
  }
  return "no error";
}
std::string error_of(const char* text) { return error_of(Json::parse(text)); }

TEST(Grammar, TextAndCombinators) {
  EXPECT_TRUE(accepts(literal_grammar("ab"), "ab"));
  EXPECT_EQ(read(literal_grammar("ab"), "abc").first, 2u);
  EXPECT_TRUE(accepts(literal_grammar(""), ""));
  EXPECT_TRUE(accepts(sequence_grammar({literal_grammar("a"), literal_grammar("b")}), "ab"));
  EXPECT_TRUE(accepts(sequence_grammar({}), ""));
  const Grammar choice = choice_grammar({literal_grammar("ab"), literal_grammar("ac")});
  EXPECT_TRUE(accepts(choice, "ac"));
  EXPECT_FALSE(accepts(choice, "a"));
  const Grammar few = repeat_grammar(choice, 1, 3);
  for (const auto& [text, fits] : {std::pair("", false), {"ab", true}, {"abacab", true}, {"abababab", false}})
    EXPECT_EQ(accepts(few, text), fits) << text;
  const Grammar many = repeat_grammar(choice, 2, -1);
  for (const auto& [text, fits] : {std::pair("ab", false), {"abac", true}, {"abacababac", true}})
    EXPECT_EQ(accepts(many, text), fits) << text;
  EXPECT_TRUE(accepts(repeat_grammar(literal_grammar(""), 0, -1), ""));
  EXPECT_THROW(choice_grammar({}), Error);
  EXPECT_THROW(repeat_grammar(choice, 3, 2), Error);
  EXPECT_THROW(repeat_grammar(choice, 0, 1 << 30), Error);
}

TEST(Grammar, MarkersAreFoundWhereverTheyBegin) {
  const Grammar until = until_grammar("aab");
  for (const auto& [text, fits] : {std::pair("aab", true),
                                   {"aaab", true},
                                   {"xaaaab", true},
                                   {"aa", false},
                                   {"", false},
                                   {"a\xFF"
                                    "aab",
                                    true}})
    EXPECT_EQ(accepts(until, text), fits) << text;
  EXPECT_EQ(read(until, "aabx").first, 3u);
  EXPECT_TRUE(accepts(until_grammar(""), ""));
  const Grammar without = text_without_grammar("aab");
  for (const auto& [text, fits] : {std::pair("", true), {"aaaa", true}, {"abab", true}, {"xaaaab", false}})
    EXPECT_EQ(accepts(without, text), fits) << text;
  EXPECT_TRUE(accepts(text_without_grammar(""), "anything \x80"));
  const Grammar both =
      sequence_grammar({text_without_grammar("<t>"), literal_grammar("<t>"), json_value_grammar()});
  EXPECT_TRUE(accepts(both, "some <text> <t>[1]"));
  EXPECT_FALSE(accepts(both, "some <text> <t>"));
}

TEST(Grammar, TokensByTheirIds) {
  const auto marked =
      constraint_of(sequence_grammar({token_grammar(257), literal_grammar("x"), token_grammar(258)}));
  EXPECT_EQ(allowed(*marked), (std::vector<TokenId>{257}));
  marked->accept(257);
  EXPECT_EQ(allowed(*marked), (std::vector<TokenId>{'x'}));
  marked->accept('x');
  EXPECT_EQ(allowed(*marked), (std::vector<TokenId>{'<', 258}));  // whole, or spelled
  const auto again = constraint_of(token_grammar(258));
  for (char c : std::string_view("<tool_call>")) again->accept(c);
  EXPECT_EQ(allowed(*again), (std::vector<TokenId>{kEndToken}));
  marked->accept(258);
  EXPECT_EQ(allowed(*marked), (std::vector<TokenId>{kEndToken}));
  // Special tokens never come by their bytes, and after the end nothing but the end does.
  const auto text = constraint_of(text_without_grammar(""));
  EXPECT_FALSE(can(*text, 257));
  EXPECT_TRUE(can(*text, kEndToken));
  EXPECT_TRUE(can(*text, 258));
  EXPECT_THROW(constraint_of(token_grammar(900)), Error);
  // An end token that is named is a part of the text as well.
  const auto named = constraint_of(sequence_grammar({literal_grammar("a"), token_grammar(kEndToken)}));
  named->accept('a');
  EXPECT_EQ(allowed(*named), (std::vector<TokenId>{kEndToken}));
  named->accept(kEndToken);
  EXPECT_THROW(constraint_of(literal_grammar("a"))->accept('b'), Error);
  EXPECT_THROW(constraint_of(literal_grammar("a"))->accept(kEndToken), Error);
}

TEST(Grammar, NothingToSayIsAnError) {
  TokenizerParts parts{.name = "few"};
  parts.bpe.bytes = true;
  parts.decoding.byte_level = true;
  parts.tokens = {"a", "bc"};
  const Tokenizer tokenizer(std::move(parts));
  const TokenTrie trie(tokenizer);
  const auto constraint = constrain(trie, literal_grammar("ab"), {});
  std::vector<float> logits(2);
  constraint->mask(logits);
  EXPECT_EQ(logits[1], -std::numeric_limits<float>::infinity());
  constraint->accept(0);
  EXPECT_THROW(constraint->mask(logits), Error);
}

TEST(Grammar, Json) {
  const Grammar any = json_value_grammar();
  for (const char* text :
       {"{}", "[]", "0", "-1.5e-7", "\"\"", "true", "null", "{ }", "[\n]", "{\"a\":{\"b\":[1,2,{}]}}",
        "[\n  1,\n  \"x\"\n]", "\"\\u00e9\\ud83d\\ude00\\n\\/\"", "\"\xC3\xA9\xF0\x9F\x98\x80\"", "{\"\": 1}",
        "1e279", "{\"\\u0001\": 1, \"\\n\": 2}"})
    EXPECT_TRUE(accepts(any, text)) << text;
  for (const char* text : {"",
                           "01",
                           "1.",
                           ".5",
                           "-",
                           "+1",
                           "[1,]",
                           "{\"a\"}",
                           "{\"a\":1,}",
                           "{a:1}",
                           "'x'",
                           "\"\x01\"",
                           "\"\n\"",
                           "\"\\x\"",
                           "\"\\ud800\"",
                           "\"\\ud800\\u0041\"",
                           "\"\\udc00\"",
                           "\"\xC3\"",
                           "\"\xED\xA0\x80\"",
                           "\"\xC0\x80\"",
                           "\"\xF4\x90\x80\x80\"",
                           "[1 ,2]",
                           "[  1]",
                           "[\n\n1]",
                           " 1",
                           "1 ",
                           "{\"a\" :1}",
                           "1e280",
                           "{\"\\u0061\": 1}",
                           "tru",
                           "[1",
                           "{\"a\":1,\"a\":2}",
                           "{\"a\":1,\"b\":2,\"a\":3}"})
    EXPECT_FALSE(accepts(any, text)) << text;
  EXPECT_TRUE(accepts(any, "{\"a\":{\"a\":1},\"b\":{\"a\":1}}"));
  EXPECT_TRUE(accepts(json_object_grammar(), "{\"a\": [1]}"));
  EXPECT_FALSE(accepts(json_object_grammar(), "[1]"));
  // Blanks end.
  EXPECT_EQ(read(any, "[\n" + std::string(41, ' ')).first, 42u);
}

TEST(JsonSchema, SaysWhatIsNotSupported) {
  EXPECT_EQ(error_of(R"({"properties": {"x": {"not": {}}}})"),
            "json_schema.properties.x.not: this keyword is not supported");
  EXPECT_EQ(error_of(R"({"$ref": "#"})"),
            "json_schema.$ref.$ref: leads back to itself without an object or array between");
  EXPECT_EQ(error_of("false"), "json_schema: no value is valid");
  EXPECT_TRUE(accepts(schema(R"({"type": "integer", "minimum": 3, "maximum": 12})"), "12"));
}

}  // namespace
}  // namespace kt::inline texts
