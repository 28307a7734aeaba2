#include "text/tokenizer/tokenizer.h"

#include <gmock/gmock.h>

#include <map>
#include <random>

#include "base/error.h"
#include "text/tokenizer/detokenizer.h"

namespace kt::inline texts {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Bytes, then what the merges make of them.
TokenizerParts byte_parts(const std::vector<std::pair<std::string, std::string>>& merges) {
  TokenizerParts parts{.name = "test"};
  parts.bpe.bytes = true;
  parts.decoding.byte_level = true;
  for (int byte = 0; byte < 256; ++byte)
    parts.tokens.push_back(spell_bytes(std::string(1, static_cast<char>(byte))));
  const auto id_of = [&](const std::string& bytes) {
    const auto found = std::ranges::find(parts.tokens, spell_bytes(bytes));
    return static_cast<TokenId>(found - parts.tokens.begin());
  };
  for (const auto& [left, right] : merges) {
    const auto rank = static_cast<uint32_t>(parts.merges.size());
    const TokenId a = id_of(left), b = id_of(right);
    if (static_cast<size_t>(id_of(left + right)) == parts.tokens.size())
      parts.tokens.push_back(spell_bytes(left + right));
    parts.merges.push_back({a, b, id_of(left + right), rank});
  }
  return parts;
}

std::vector<std::string> spelled(const Tokenizer& tokenizer, std::string_view text,
                                 EncodeOptions options = {}) {
  std::vector<std::string> out;
  for (TokenId id : tokenizer.encode(text, options)) out.emplace_back(*tokenizer.token_of(id));
  return out;
}

TEST(Bpe, LowestRankThenLeftmost) {
  const Tokenizer tokenizer(byte_parts({{"b", "c"}, {"a", "b"}, {"a", "a"}, {"ab", "c"}}));
  EXPECT_THAT(spelled(tokenizer, "abc"), ElementsAre("a", "bc"));
  EXPECT_THAT(spelled(tokenizer, "aaa"), ElementsAre("aa", "a"));
  EXPECT_THAT(spelled(tokenizer, "abab"), ElementsAre("ab", "ab"));
}

// The scan of short words and the heap of long ones are the same function.
TEST(Bpe, LongWordsMergeAsShortOnes) {
  std::mt19937 rng(3);
  const Tokenizer tokenizer(byte_parts({{"a", "b"},
                                        {"b", "a"},
                                        {"a", "a"},
                                        {"ab", "ab"},
                                        {"aa", "b"},
                                        {"b", "b"},
                                        {"ba", "bb"},
                                        {"abab", "a"}}));
  // "x" takes part in no merge, so it separates words without the tokenizer knowing.
  for (int round = 0; round < 200; ++round) {
    std::string all;
    std::vector<TokenId> expected;
    for (int word = 0; word < 10; ++word) {
      std::string text = "x";
      for (int i = 0; i < 20; ++i) text += rng() % 2 ? 'a' : 'b';
      const std::vector<TokenId> ids = tokenizer.encode(text);
      expected.insert(expected.end(), ids.begin(), ids.end());
      all += text;
    }
    ASSERT_EQ(tokenizer.encode(all), expected);
  }
}

TEST(Bpe, IgnoreMerges) {
  TokenizerParts parts = byte_parts({{"a", "b"}});
  parts.tokens.push_back("abc");
  EXPECT_THAT(spelled(Tokenizer(parts), "abc"), ElementsAre("ab", "c"));
  parts.bpe.ignore_merges = true;
  EXPECT_THAT(spelled(Tokenizer(parts), "abc"), ElementsAre("abc"));
}

TEST(AddedTokens, LongestLeftmostAndStripping) {
  TokenizerParts parts = byte_parts({});
  parts.added = {{.id = 300, .content = "<a>", .special = true},
                 {.id = 301, .content = "<a>>"},
                 {.id = 302, .content = "word", .single_word = true},
                 {.id = 303, .content = "[s]", .lstrip = true, .rstrip = true}};
  const Tokenizer tokenizer(parts);
  EXPECT_EQ(tokenizer.size(), 304u);
  EXPECT_THAT(tokenizer.encode("<a><a>>"), ElementsAre(300, 301));
  EXPECT_THAT(spelled(tokenizer, "<a><a>>", {.special = SpecialText::kAsText}),
              ElementsAre("<", "a", ">", "<a>>"));
  EXPECT_THAT(spelled(tokenizer, "word,swordx"), ElementsAre("word", ",", "s", "w", "o", "r", "d", "x"));
  EXPECT_THAT(spelled(tokenizer, "a \n[s]  [s]b"), ElementsAre("a", "[s]", "[s]", "b"));
  EXPECT_EQ(tokenizer.decode(std::vector<TokenId>{97, 300, 98}), "ab");
  EXPECT_EQ(tokenizer.decode(std::vector<TokenId>{97, 300, 98}, SpecialTokens::kKeep), "a<a>b");
}

TEST(Detokenizer, HoldsBackWhatIsNotWhole) {
  const Tokenizer tokenizer(byte_parts({}));
  Detokenizer detokenizer(tokenizer);
  EXPECT_EQ(detokenizer.push(0xE2), "");
  EXPECT_EQ(detokenizer.push(0x82), "");
  EXPECT_EQ(detokenizer.push(0xAC), "€");
  EXPECT_EQ(detokenizer.push(0xF0), "");
  EXPECT_EQ(detokenizer.push('a'), "\uFFFDa");
  EXPECT_EQ(detokenizer.push(0xC3), "");
  EXPECT_EQ(detokenizer.push(5000), "");  // a padded row
  EXPECT_EQ(detokenizer.flush(), "\uFFFD");
  EXPECT_EQ(detokenizer.flush(), "");
}

TEST(Detokenizer, AnyTokensAreValidAndEqualDecode) {
  const Tokenizer tokenizer(byte_parts({{"\xE2", "\x82"}, {"a", "\xF0"}, {"\x82", "\xAC"}}));
  std::mt19937 rng(5);
  for (int round = 0; round < 300; ++round) {
    std::vector<TokenId> ids;
    for (int i = 0; i < 30; ++i)
      ids.push_back(static_cast<TokenId>(rng() % 2 ? rng() % tokenizer.size() : 0x80 + rng() % 128));
    Detokenizer detokenizer(tokenizer);
    std::string out, bytes;
    for (TokenId id : ids) {
      const std::string piece = detokenizer.push(id);
      ASSERT_TRUE(is_valid_utf8(piece));
      out += piece;
      bytes += tokenizer.token_bytes(id);
    }
    out += detokenizer.flush();
    ASSERT_EQ(out, replace_invalid_utf8(bytes));
    ASSERT_EQ(out, tokenizer.decode(ids));
  }
}

template <typename Make>
std::string problem(Make make, ErrorKind kind = ErrorKind::kInput) {
  try {
    make();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    return error.what();
  }
  return "none";
}

TEST(Tokenizer, IdsOutsideTheVocabulary) {
  const Tokenizer tokenizer(byte_parts({}));
  EXPECT_THAT(problem([&] { tokenizer.decode(std::vector<TokenId>{256}); }), HasSubstr("256"));
  EXPECT_THAT(problem([&] { tokenizer.decode(std::vector<TokenId>{-1}); }), HasSubstr("-1"));
  EXPECT_FALSE(tokenizer.token_of(-1) || tokenizer.token_of(256) || tokenizer.id_of("nonsense"));
}

// Eight steps that each make a thousand letters of one.
TEST(Tokenizer, StepsThatMultiplyAreBounded) {
  const std::string thousand(1000, 'a');
  TokenizerParts normal = byte_parts({});
  for (int i = 0; i < 8; ++i) normal.normal_steps.push_back(ReplaceStep{Regex("a"), thousand});
  const Tokenizer tokenizer(normal);
  EXPECT_EQ(tokenizer.encode("bcd").size(), 3u);
  EXPECT_EQ(problem([&] { tokenizer.encode("abc"); }),
            "the tokenizer: normalizer or decoder make more than 65584 bytes of a text of 3");
  normal.added.push_back({.id = 256, .content = "<a>", .normalized = true});
  EXPECT_THAT(problem([&] { Tokenizer{normal}; }), HasSubstr("test: normalizer or decoder make more than"));

  TokenizerParts decoder = byte_parts({});
  decoder.decoding.byte_level = false;
  for (int i = 0; i < 8; ++i) decoder.decoding.replacements.emplace_back("a", thousand);
  EXPECT_THAT(problem([&] { Tokenizer{decoder}; }), HasSubstr("test: normalizer or decoder make more than"));
  // Many small texts together: each section between added tokens is normalised by itself.
  TokenizerParts sections = byte_parts({});
  sections.normal_steps.push_back(PrependStep{thousand});
  sections.added.push_back({.id = 256, .content = "<|>"});
  std::string text;
  for (int i = 0; i < 100; ++i) text += "b<|>";
  EXPECT_THAT(problem([&] { Tokenizer(sections).encode(text); }), HasSubstr("of a text of 400"));
}

// What the compatibility forms make of their worst character, with every space as three bytes, fits.
TEST(Tokenizer, HonestStepsFitTheirBudget) {
  TokenizerParts parts = byte_parts({});
  parts.normal_steps = {NormalForm::kNfkc, ReplaceStep{Regex(" "), "\u2581"}};
  std::string text;
  for (int i = 0; i < 50'000; ++i) text += "\uFDFA";
  EXPECT_EQ(Tokenizer(parts).encode(text).size(), 50'000u * 39);
}

TEST(Gguf, ArraysOfAFile) {
  const std::vector<std::string> tokens = {"a", "b", "Ġ", "ab", "Ġab", "<|end|>", "1", "2"};
  const std::vector<std::string> merges = {"a b", "Ġ ab"};
  const std::vector<int32_t> types = {1, 1, 1, 1, 1, 3, 1, 1};
  GgufVocabulary source{.name = "x.gguf",
                        .model = "gpt2",
                        .pre = "qwen2",
                        .tokens = tokens,
                        .merges = merges,
                        .types = types,
                        .add_bos = 5};
  const Tokenizer tokenizer = Tokenizer::from_gguf(source);
  EXPECT_THAT(tokenizer.encode("ab ab<|end|>12", {.add_special = true}), ElementsAre(5, 3, 4, 5, 6, 7));
  EXPECT_EQ(tokenizer.decode(std::vector<TokenId>{3, 4, 5}), "ab ab");

  source.pre = "klingon";
  EXPECT_THAT(problem([&] { Tokenizer::from_gguf(source); }, ErrorKind::kUnsupported),
              testing::AllOf(HasSubstr("x.gguf"), HasSubstr("klingon"), HasSubstr("llama-bpe")));
  source.pre = "";
  source.model = "bert";
  EXPECT_THAT(problem([&] { Tokenizer::from_gguf(source); }, ErrorKind::kUnsupported),
              HasSubstr("\"bert\" is not read; only \"gpt2\", \"llama\" and \"gemma4\""));
  source.model = "gpt2";
  source.types = std::span(types).first(3);
  EXPECT_THAT(problem([&] { Tokenizer::from_gguf(source); }), HasSubstr("8 tokens, but 3"));
  source.types = {};
  const std::vector<std::string> unknown = {"a c"};
  source.merges = unknown;
  EXPECT_THAT(problem([&] { Tokenizer::from_gguf(source); }), HasSubstr("\"a c\""));
}

TEST(Gguf, EveryNamedPatternCompiles) {
  for (const std::string_view name : split_names())
    for (std::string_view pattern : splits_of(name).patterns) EXPECT_NO_THROW(Regex{pattern}) << name;
}

TEST(AddedTokens, SpelledWithAMarkInside) {
  TokenizerParts parts = byte_parts({{"a", ">"}, {"b", "]"}});
  const auto first = static_cast<TokenId>(parts.tokens.size());
  for (const char* content : {"<a>", "<a", "[b]"})
    parts.added.push_back({.id = first + static_cast<TokenId>(parts.added.size()), .content = content});
  parts.added[0].special = true;
  parts.normal_steps.push_back(NormalForm::kNfc);
  parts.added[2].normalized = true;
  const Tokenizer tokenizer(std::move(parts));
  const EncodeOptions marked{.mark = "\uFDD0"};
  for (const char* mark : {"", "\uFDD0"})  // beside a token it changes nothing
    EXPECT_THAT(spelled(tokenizer, text("x{}<a>{}[b]{}<a{}", mark, mark, mark, mark), marked),
                ElementsAre("x", "<a>", "[b]", "<a"));
  EXPECT_EQ(tokenizer.encode("x<\uFDD0a>y", marked),
            tokenizer.encode("x<a>y", {.special = SpecialText::kAsText}));
  for (const char* text : {"<\uFDD0a>", "<a\uFDD0>"})
    EXPECT_THAT(spelled(tokenizer, text, marked), ElementsAre("<", "a>"));
  EXPECT_THAT(spelled(tokenizer, "[\uFDD0b]<\uFDD0a", marked), ElementsAre("[", "b]", "<", "a"));
  EXPECT_THAT(tokenizer.encode("[\uFDD0b]"), testing::SizeIs(5));  // without the option it is text
}

TEST(TokenTexts, ByTextAndByHalves) {
  TokenTexts texts;
  std::mt19937 rng(5);
  std::map<std::string, TokenId> ids;
  for (TokenId id = 0; id < 3000; id += 1 + static_cast<TokenId>(rng() % 2)) {
    std::string text;
    for (size_t i = rng() % 7; i > 0; --i) text.push_back("ab\xC3\0"[rng() % 4]);
    EXPECT_EQ(texts.add(id, text), ids.emplace(text, id).second);
    EXPECT_EQ(texts.size(), static_cast<size_t>(id) + 1);
  }
  const auto expected = [&](const std::string& text) {
    const auto found = ids.find(text);
    return found == ids.end() ? std::nullopt : std::optional(found->second);
  };
  size_t joined = 0;
  for (const auto& [text, id] : ids) {
    EXPECT_EQ(texts.id_of(text), id);
    EXPECT_EQ(texts.text_of(id), text);
    EXPECT_EQ(texts.id_of(text + "x"), std::nullopt);
    for (const auto& [other, second] : ids) {
      ASSERT_EQ(texts.id_of(id, second), expected(text + other)) << id << " " << second;
      joined += expected(text + other).has_value();
    }
  }
  EXPECT_GT(joined, 1000u);
  const std::string largest(TokenTexts::kLongestPart, 'x'), longer = largest + "x";
  for (const std::string& text : {std::string("x"), largest, longer, longer + "x"})
    texts.add(static_cast<TokenId>(texts.size()), text);
  const auto last = static_cast<TokenId>(texts.size()) - 1;
  EXPECT_EQ(texts.id_of(last - 2, last - 3), last - 1);
  EXPECT_EQ(texts.id_of(longer + "x"), last);
  EXPECT_EQ(texts.id_of(last - 1, last - 3), std::nullopt);
}

TEST(Tiktoken, ReservedIds) {
  const Tokenizer tokenizer = Tokenizer::from_tiktoken({.name = "r.tiktoken",
                                                        .characters = "YQ== 0\nYg== 1\nPA== 2\n",
                                                        .pattern = "\\w+|\\W+",
                                                        .added = {{.id = 4, .content = "<a>"}},
                                                        .reserved = 3});
  EXPECT_EQ(tokenizer.size(), 6u);
  EXPECT_THAT(tokenizer.encode("a<|reserved_token_3|><a><|reserved_token_5|>b"), ElementsAre(0, 3, 4, 5, 1));
  EXPECT_THAT(tokenizer.encode("<|reserved_token_3|><a>", {.special = SpecialText::kAsText}),
              ElementsAre(2, 4));  // of bytes that have a token
  EXPECT_TRUE(tokenizer.is_special(5));
  EXPECT_FALSE(tokenizer.is_special(4));
}

TEST(Tiktoken, RanksAndErrors) {
  const auto make = [](std::string_view ranks) {
    return Tokenizer::from_tiktoken({.name = "r.tiktoken", .characters = ranks, .pattern = "\\w+|\\W+"});
  };
  const Tokenizer tokenizer = make("YQ== 0\nYg== 1\nYWI= 2\nYWJi 3\nYmI= 4\n");  // a b ab abb bb
  EXPECT_THAT(tokenizer.encode("abbabbb"), ElementsAre(3, 3, 1));
  EXPECT_THAT(tokenizer.encode("abb"), ElementsAre(3));
  for (const char* ranks : {"", "YQ==", "YQ== x", "YQ= 0", "Y*== 0", "YQ== -1", "YQ== 0\nYg== 0",
                            "YQ== 0\nYQ== 1", "YQ== 99999999"})
    EXPECT_THAT(problem([&] { make(ranks); }), HasSubstr("r.tiktoken")) << ranks;
}

}  // namespace
}  // namespace kt::inline texts
