#include "text/tokenizer/piece_vocabulary.h"

#include <gmock/gmock.h>

#include <bit>
#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "text/tokenizer/detokenizer.h"
#include "text/tokenizer/sentencepiece_model.h"

namespace kt::inline texts {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Pieces as they are given, with "<unk>" before them.
struct Pieces {
  std::vector<std::string> texts = {"<unk>"};
  std::vector<float> scores = {0};
  std::vector<int32_t> types = {2};

  Pieces& add(std::string_view text, float score, PieceType type = PieceType::kNormal) {
    texts.emplace_back(text);
    scores.push_back(score);
    types.push_back(static_cast<int32_t>(type));
    return *this;
  }
  PieceVocabulary view() const {
    return {
        .name = "test", .pieces = texts, .scores = scores, .types = types, .add_prefix = false, .unknown = 0};
  }
};

std::vector<std::string> characters(std::string_view text) {
  std::vector<std::string> out;
  for (size_t at = 0; at < text.size();) {
    const size_t begin = at;
    next_code_point(text, at);
    out.emplace_back(text.substr(begin, at - begin));
  }
  return out;
}

// The definition, by strings: join the neighbours whose whole has the highest score until none is left; unused wholes
// come apart into what they were last offered as; characters without a piece are unknown, a run of them once.
std::vector<TokenId> by_definition(const Pieces& pieces, std::string_view text) {
  std::map<std::string, size_t> ids;
  for (size_t i = 1; i < pieces.texts.size(); ++i) ids.emplace(pieces.texts[i], i);
  std::vector<std::string> symbols = characters(text);
  std::map<std::string, std::pair<std::string, std::string>> offered;
  const auto offer = [&](size_t i) {
    if (i + 1 < symbols.size() && ids.contains(symbols[i] + symbols[i + 1]))
      offered[symbols[i] + symbols[i + 1]] = {symbols[i], symbols[i + 1]};
  };
  for (size_t i = 0; i < symbols.size(); ++i) offer(i);
  while (true) {
    std::optional<size_t> best;
    float score = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = ids.find(symbols[i] + symbols[i + 1]);
      if (found == ids.end() || (best && pieces.scores[found->second] <= score)) continue;
      best = i;
      score = pieces.scores[found->second];
    }
    if (!best) break;
    symbols[*best] += symbols[*best + 1];
    symbols.erase(symbols.begin() + static_cast<ptrdiff_t>(*best) + 1);
    if (*best > 0) offer(*best - 1);
    offer(*best);
  }
  std::vector<TokenId> out;
  const std::function<void(const std::string&)> put = [&](const std::string& symbol) {
    const auto found = ids.find(symbol);
    const size_t id = found == ids.end() ? 0 : found->second;
    if (pieces.types[id] == static_cast<int32_t>(PieceType::kUnused) && offered.contains(symbol)) {
      put(offered[symbol].first);
      put(offered[symbol].second);
    } else if (id > 0 || out.empty() || out.back() != 0) {
      out.push_back(static_cast<TokenId>(id));
    }
  };
  for (const std::string& symbol : symbols) put(symbol);
  return out;
}

TEST(Pieces, MergeByScoreAsDefined) {
  std::mt19937 rng(11);
  for (int round = 0; round < 300; ++round) {
    Pieces pieces;
    std::set<std::string> known;
    const bool has_unused = round % 3 == 0;
    const char* const alphabet[] = {"a", "b", "é", "▁", "😀"};
    const auto any_text = [&](size_t most) {
      std::string text;
      for (size_t i = 1 + rng() % most; i > 0; --i) text += alphabet[rng() % 5];
      return text;
    };
    for (int i = 0; i < 25; ++i) {
      const std::string text = any_text(i < 6 ? 1 : 5);  // not all characters, and not all halves, are pieces
      if (!known.insert(text).second) continue;
      const bool unused = has_unused && rng() % 4 == 0;
      pieces.add(text, static_cast<float>(rng() % 12), unused ? PieceType::kUnused : PieceType::kNormal);
    }
    const Tokenizer tokenizer(parts_of(pieces.view()));
    for (int i = 0; i < 30; ++i) {
      const std::string text = any_text(i < 25 ? 20 : 200);
      ASSERT_EQ(tokenizer.encode(text), by_definition(pieces, text)) << text;
    }
  }
}

TEST(Pieces, BytesWhereThereAreSome) {
  Pieces pieces;
  pieces.add("<0xC3>", 0, PieceType::kByte).add("<0xA9>", 0, PieceType::kByte).add("a", -1).add("▁", -2);
  const Tokenizer tokenizer(parts_of(pieces.view()));
  EXPECT_THAT(tokenizer.encode("aé à\nb"), ElementsAre(3, 1, 2, 4, 0));  // of "à" one byte has no piece
  EXPECT_THAT(tokenizer.encode("<0xC3>"), ElementsAre(0));
  EXPECT_EQ(tokenizer.token_bytes(1), "\xC3");
  EXPECT_EQ(tokenizer.token_bytes(4), " ");
  PieceVocabulary without = pieces.view();
  without.byte_fallback = false;
  EXPECT_THAT(Tokenizer(parts_of(without)).encode("aé"), ElementsAre(3, 0));
}

TEST(Pieces, UserDefinedOnesMergeWithNothing) {
  Pieces pieces;
  pieces.add("<x>", 0, PieceType::kUserDefined)
      .add("▁▁", 0, PieceType::kUserDefined)
      .add("<s>", 0, PieceType::kControl);
  for (const char* piece : {"▁", "a", "<", "s", ">", "▁a", "a<", "<s", "s>"}) pieces.add(piece, -1);
  PieceVocabulary vocabulary = pieces.view();
  const auto said = [&](std::string_view text, EncodeOptions options = {}) {
    const Tokenizer tokenizer(parts_of(vocabulary));
    std::string out;
    for (const TokenId id : tokenizer.encode(text, options)) out.append(*tokenizer.token_of(id)).append("|");
    return out;
  };
  EXPECT_EQ(said("a<x>a   a"), "a|<x>|a|▁▁|▁a|");
  EXPECT_EQ(said("<s>a", {.special = SpecialText::kAsText}), "<s|>|a|");  // never the control piece
  EXPECT_EQ(said("<s>a"), "<s>|a|");
  vocabulary.add_prefix = true;
  EXPECT_EQ(said("a<x>a"), "▁a|<x>|a|");
  EXPECT_EQ(said("a<s>a"), "▁a|<s>|▁a|");
  vocabulary.cut_user_defined = true;
  EXPECT_EQ(said("a<x>a"), "▁a|<x>|▁a|");
}

// Half a million ways to cut them in two, none of which is kept.
TEST(Pieces, OnesThatAreCutInManyWays) {
  Pieces pieces;
  for (size_t size = 1; size <= 1024; ++size) pieces.add(std::string(size, 'a'), -static_cast<float>(size));
  const Tokenizer tokenizer(parts_of(pieces.view()));
  EXPECT_THAT(tokenizer.encode(std::string(1024, 'a')), ElementsAre(1024));
  EXPECT_THAT(tokenizer.encode(std::string(3 * 1024, 'a')), ElementsAre(1024, 1024, 1024));
  EXPECT_THAT(tokenizer.encode("aaaaa"), ElementsAre(5));
  EXPECT_THAT(error_of([&] { merges_of(pieces.view()); }), HasSubstr("test: more than 131136 merges"));
}

TEST(Pieces, TextComesBackAlsoInTheMiddle) {
  Pieces pieces;
  pieces.add("<0x0A>", 0, PieceType::kByte)
      .add("<0xE2>", 0, PieceType::kByte)
      .add("▁a", -1)
      .add("▁", -2)
      .add("a", -3);
  PieceVocabulary vocabulary = pieces.view();
  vocabulary.add_prefix = true;
  const Tokenizer tokenizer(parts_of(vocabulary));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(" a\na  a")), " a\na  a");
  const std::vector<TokenId> answer = {3, 1, 4, 3, 2, 3};
  EXPECT_EQ(tokenizer.decode(answer), "a\n  a\uFFFD a");
  Detokenizer stream(tokenizer, SpecialTokens::kSkip, TextPlace::kMiddle);
  for (int time = 0; time < 2; ++time) {
    std::string text;
    for (const TokenId id : answer) text += stream.push(id);
    EXPECT_EQ(text + stream.flush(), " a\n  a\uFFFD a");
  }
}

TEST(Pieces, BadVocabularies) {
  const auto refusal = [](const PieceVocabulary& vocabulary) {
    return error_of([&] { Tokenizer(parts_of(vocabulary)); });
  };
  const Pieces twice = Pieces().add("a", 0).add("b", 0).add("a", -1);
  EXPECT_EQ(refusal(twice.view()), "test: \"a\" has two ids, 1 and 3");
  const Pieces pieces = Pieces().add("a", 0);
  PieceVocabulary vocabulary = pieces.view();
  vocabulary.scores = vocabulary.scores.first(1);
  EXPECT_EQ(refusal(vocabulary), "test: 2 tokens, but 1 scores");
  vocabulary = pieces.view();
  vocabulary.types = vocabulary.types.first(1);
  EXPECT_EQ(refusal(vocabulary), "test: 2 tokens, but 1 token types");
  EXPECT_EQ(refusal({.name = "test"}), "test: no pieces");
  EXPECT_EQ(refusal(Pieces().add("a", NAN).view()), "test: the score of token 1 is not a number");
  EXPECT_EQ(refusal(Pieces().add("a", 0, static_cast<PieceType>(7)).view()),
            "test: token 1 has type 7; expected 1 to 6");
  EXPECT_EQ(refusal(Pieces().add("\xFF", 0).view()), "test: token 1 is not UTF-8");
  EXPECT_EQ(refusal(Pieces().add(std::string(1025, 'a'), 0).view()),
            "test: token 1 has 1025 bytes; at most 1024");
  vocabulary = pieces.view();
  vocabulary.unknown = 7;
  EXPECT_EQ(refusal(vocabulary), "test: no token 7, the unknown one");
}

// --- tokenizer.model -------------------------------------------------------------------------------------------------

std::string varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>(value | 0x80));
  return out + static_cast<char>(value);
}
std::string field(int number, uint64_t value) {
  return varint(static_cast<uint64_t>(number) << 3) + varint(value);
}
std::string field(int number, std::string_view bytes) {
  return varint(static_cast<uint64_t>(number) << 3 | 2) + varint(bytes.size()) + std::string(bytes);
}
std::string piece(std::string_view text, float score, uint64_t type) {
  std::string bits(4, '\0');
  for (int i = 0; i < 4; ++i)
    bits[static_cast<size_t>(i)] = static_cast<char>(std::bit_cast<uint32_t>(score) >> 8 * i);
  return field(1, field(1, text) + varint(2 << 3 | 5) + bits + field(3, type));
}
const std::string kPieces = piece("<unk>", 0, 2) + piece("<s>", 0, 3) + piece("</s>", 0, 3) +
                            piece("▁a", -1, 1) + piece("▁", -2, 1) + piece("a", -3, 1);
const std::string kByPairs = field(2, field(3, 2));

TEST(SentencePiece, FieldsAndDefaults) {
  const std::string file = field(99, "later fields") + kPieces +
                           field(2, field(3, 2) + field(41, 2) + field(4, 6)) +
                           field(3, field(1, "identity") + field(4, uint64_t{0}));
  const Tokenizer tokenizer = Tokenizer::from_sentencepiece(file, "t");
  EXPECT_THAT(tokenizer.encode("a  a", {.add_special = true}), ElementsAre(2, 3, 4, 3));
  const Tokenizer collapsed = Tokenizer::from_sentencepiece(kPieces + kByPairs, "t");
  EXPECT_THAT(collapsed.encode("  a   a \u2581"), ElementsAre(3, 3));
  EXPECT_THAT(collapsed.encode("  "), ElementsAre());
  const Tokenizer added = Tokenizer::from_sentencepiece(
      kPieces + kByPairs, "t",
      {.added = {{.id = 6, .content = "<|im|>", .special = true}}, .add_bos = false, .add_eos = true});
  EXPECT_THAT(added.encode("a<|im|>a", {.add_special = true}), ElementsAre(3, 6, 3, 2));
}

TEST(SentencePiece, WhatIsNotReadIsNamed) {
  const auto refusal = [](const std::string& file) {
    return error_of([&] { Tokenizer::from_sentencepiece(file, "t.model"); });
  };
  EXPECT_EQ(refusal(kPieces), "t.model: a SentencePiece model of type \"unigram\", not bpe, is not read");
  EXPECT_EQ(refusal(kPieces + field(2, field(3, 9))),
            "t.model: a SentencePiece model of type 9, not bpe, is not read");
  EXPECT_EQ(refusal(kPieces + kByPairs + field(3, field(1, "nmt_nfkc") + field(2, "rules"))),
            "t.model: the normalizer \"nmt_nfkc\", not identity, is not read");
  EXPECT_THAT(refusal(kPieces + field(2, field(3, 2) + field(24, 1))),
              HasSubstr("treat_whitespace_as_suffix"));
  EXPECT_THAT(refusal(kPieces + kByPairs + field(3, field(5, uint64_t{0}))), HasSubstr("escape_whitespaces"));
  EXPECT_THAT(refusal(kPieces + kByPairs + field(5, field(2, "x"))), HasSubstr("a denormalizer is not read"));
  EXPECT_THAT(refusal(kPieces + kByPairs + piece("b c", 0, 4)), HasSubstr("the user-defined piece \"b c\""));
  EXPECT_THAT(refusal(kPieces + kByPairs + piece("<unk2>", 0, 2)),
              HasSubstr("pieces 0 and 6 are both the unknown one"));
  EXPECT_EQ(refusal(piece("a", 0, 1) + kByPairs), "t.model: no piece is the unknown one");
  EXPECT_EQ(refusal(kPieces + kByPairs + piece("", 0, 1)), "t.model: piece 6 is empty");
  EXPECT_THAT(refusal(""), HasSubstr("t.model: no pieces"));
}

TEST(SentencePiece, NoBytesButAModelAreOne) {
  const std::string good = kPieces + kByPairs;
  EXPECT_EQ(error_of([&] { Tokenizer::from_sentencepiece(good, "t"); }), "no error");
  for (size_t end = 0; end < good.size(); ++end)  // cut off anywhere: an Error, or the whole fields before it
    error_of([&] { Tokenizer::from_sentencepiece(good.substr(0, end), "t"); });
  for (const std::string& bad : {std::string("\x0A\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF\x01x"),
                                 std::string("\x0A\x05"
                                             "ab"),
                                 std::string("\x0B"), std::string(11, '\x80'), std::string("\x02\x00", 2),
                                 good + field(1, uint64_t{5}), good + field(2, field(3, "x"))})
    EXPECT_THAT(error_of([&] { Tokenizer::from_sentencepiece(bad, "t"); }),
                HasSubstr("t: not a tokenizer.model"))
        << bad;
}

}  // namespace
}  // namespace kt::inline texts
