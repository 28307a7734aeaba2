#include "text/tokenizer/piece_vocabulary.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace kt::inline texts {
namespace {

constexpr size_t kLongestPiece = TokenTexts::kLongestPart;
constexpr size_t kMostCutBytes = size_t{1} << 31;  // what looking for halves may read: seconds

PieceType type_of(const PieceVocabulary& vocabulary, size_t id) {
  if (!vocabulary.types.empty()) return static_cast<PieceType>(vocabulary.types[id]);
  return spelled_byte(vocabulary.pieces[id]) ? PieceType::kByte : PieceType::kNormal;
}

void check_pieces(const PieceVocabulary& vocabulary) {
  const size_t count = vocabulary.pieces.size();
  if (count == 0) fail("{}: no pieces", vocabulary.name);
  if (vocabulary.scores.size() != count)
    fail("{}: {} tokens, but {} scores", vocabulary.name, count, vocabulary.scores.size());
  if (!vocabulary.types.empty() && vocabulary.types.size() != count)
    fail("{}: {} tokens, but {} token types", vocabulary.name, count, vocabulary.types.size());
  for (size_t i = 0; i < count; ++i) {
    const std::string& piece = vocabulary.pieces[i];
    if (piece.size() > kLongestPiece)
      fail("{}: token {} has {} bytes; at most {}", vocabulary.name, i, piece.size(), kLongestPiece);
    if (!is_valid_utf8(piece)) fail("{}: token {} is not UTF-8", vocabulary.name, i);
    if (std::isnan(vocabulary.scores[i]))
      fail("{}: the score of token {} is not a number", vocabulary.name, i);
    if (!vocabulary.types.empty() && (vocabulary.types[i] < 1 || vocabulary.types[i] > 6))
      fail("{}: token {} has type {}; expected 1 to 6", vocabulary.name, i, vocabulary.types[i]);
  }
}

bool is_mergeable(PieceType type) { return type == PieceType::kNormal || type == PieceType::kUnused; }

// By piece, the place of its score among all, highest first; equal scores share one.
std::vector<uint32_t> ranks_of(std::span<const float> scores) {
  std::vector<float> sorted(scores.begin(), scores.end());
  std::ranges::sort(sorted, std::greater<>());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  std::vector<uint32_t> ranks;
  ranks.reserve(scores.size());
  for (const float score : scores)
    ranks.push_back(
        static_cast<uint32_t>(std::ranges::lower_bound(sorted, score, std::greater<>()) - sorted.begin()));
  return ranks;
}

// What may become part of a piece: other pieces, and any character.
class Symbols {
 public:
  explicit Symbols(const PieceVocabulary& vocabulary)
      : count_(static_cast<TokenId>(vocabulary.pieces.size())) {
    for (size_t i = 0; i < vocabulary.pieces.size(); ++i) {
      const PieceType type = type_of(vocabulary, i);
      const bool merges = is_mergeable(type);
      const bool fixed = type == PieceType::kUserDefined;
      if (merges || fixed) ids_.emplace(vocabulary.pieces[i], merges ? static_cast<TokenId>(i) : kFixed);
    }
  }
  bool has(std::string_view part) const {
    const auto found = ids_.find(part);
    return found == ids_.end() ? is_character(part) : found->second != kFixed;
  }
  // Of one that it has.
  TokenId id_of(std::string_view part) {
    const auto [found, is_new] = ids_.emplace(part, count_ + static_cast<TokenId>(nameless_.size()));
    if (is_new) nameless_.emplace_back(part);
    return found->second;
  }
  std::vector<std::string> nameless() && { return std::move(nameless_); }

 private:
  static constexpr TokenId kFixed = -1;
  static bool is_character(std::string_view part) { return decode_utf8(part).bytes == part.size(); }

  TokenId count_;
  std::unordered_map<std::string_view, TokenId> ids_;  // views of the vocabulary's pieces
  std::vector<std::string> nameless_;
};

void add_added(const PieceVocabulary& vocabulary, TokenizerParts& parts) {
  parts.added = vocabulary.added;
  std::vector<bool> given(vocabulary.pieces.size());
  for (const AddedToken& token : vocabulary.added)
    if (token.id >= 0 && static_cast<size_t>(token.id) < given.size())
      given[static_cast<size_t>(token.id)] = true;
  for (size_t i = 0; i < vocabulary.pieces.size(); ++i) {
    const PieceType type = type_of(vocabulary, i);
    const auto id = static_cast<TokenId>(i);
    const bool special = type == PieceType::kControl || type == PieceType::kUnknown;
    if ((!special && type != PieceType::kUserDefined) || vocabulary.pieces[i].empty() || given[i]) continue;
    AddedToken token{.id = id, .content = vocabulary.pieces[i], .special = special};
    if (!special) {
      // A prefix would come before the normal form of the piece too; then it is looked for in the raw text.
      token.normalized = !vocabulary.cut_user_defined || !vocabulary.add_prefix;
      token.as_spelled = !vocabulary.cut_user_defined;
    }
    parts.added.push_back(std::move(token));
  }
}

}  // namespace

PieceMerges merges_of(const PieceVocabulary& vocabulary) {
  check_pieces(vocabulary);
  size_t cut_bytes = 0;
  for (const std::string& piece : vocabulary.pieces) cut_bytes += piece.size() * piece.size();
  if (cut_bytes > kMostCutBytes)
    fail("{}: {} tokens are too long to look for their halves", vocabulary.name, vocabulary.pieces.size());
  const std::vector<uint32_t> ranks = ranks_of(vocabulary.scores);
  Symbols symbols(vocabulary);
  PieceMerges out;
  const size_t most = 64 * vocabulary.pieces.size() + 65536;
  for (size_t i = 0; i < vocabulary.pieces.size(); ++i) {
    if (!is_mergeable(type_of(vocabulary, i))) continue;
    const std::string_view whole = vocabulary.pieces[i];
    for (size_t cut = 0; cut < whole.size();) {
      next_code_point(whole, cut);
      const std::string_view left = whole.substr(0, cut), right = whole.substr(cut);
      if (right.empty() || !symbols.has(left) || !symbols.has(right)) continue;
      if (out.merges.size() == most) fail("{}: more than {} merges", vocabulary.name, most);
      out.merges.push_back({symbols.id_of(left), symbols.id_of(right), static_cast<TokenId>(i), ranks[i]});
    }
  }
  out.nameless = std::move(symbols).nameless();
  return out;
}

TokenizerParts parts_of(const PieceVocabulary& vocabulary) {
  check_pieces(vocabulary);
  TokenizerParts parts{.name = vocabulary.name};
  parts.ranks = ranks_of(vocabulary.scores);
  parts.bpe = {
      .byte_fallback = vocabulary.byte_fallback, .fuse_unknown = true, .unknown = vocabulary.unknown};
  parts.tokens.reserve(vocabulary.pieces.size());
  for (size_t i = 0; i < vocabulary.pieces.size(); ++i) {
    parts.tokens.push_back(vocabulary.pieces[i].empty() ? std::nullopt : std::optional(vocabulary.pieces[i]));
    const PieceType type = type_of(vocabulary, i);
    if (!is_mergeable(type)) parts.ranks[i] = kNoRank;
    if (type == PieceType::kUnused) parts.unused.push_back(static_cast<TokenId>(i));
  }
  add_added(vocabulary, parts);
  parts.normal_steps = piece_normal_steps(vocabulary.add_prefix, vocabulary.collapse_spaces);
  parts.decoding = piece_decoding(vocabulary.byte_fallback, vocabulary.add_prefix);
  if (vocabulary.add_bos) parts.prefix.push_back(*vocabulary.add_bos);
  if (vocabulary.add_eos) parts.suffix.push_back(*vocabulary.add_eos);
  return parts;
}

std::vector<NormalStep> piece_normal_steps(bool add_prefix, bool collapse_spaces) {
  std::vector<NormalStep> steps;
  if (collapse_spaces) {
    steps.push_back(ReplaceStep{Regex(kFirstSpaces), ""});
    steps.push_back(ReplaceStep{Regex(kManySpaces), " "});
  }
  if (add_prefix) steps.push_back(PrependStep{std::string(kPieceSpace)});
  steps.push_back(ReplaceStep{Regex(" "), std::string(kPieceSpace)});
  if (collapse_spaces) steps.push_back(ReplaceStep{Regex(kLastPieceSpaces), ""});
  return steps;
}

Decoding piece_decoding(bool byte_fallback, bool add_prefix) {
  Decoding how{.byte_fallback = byte_fallback, .replacements = {{std::string(kPieceSpace), " "}}};
  if (add_prefix) {
    how.strip_left.assign(1, ' ');
    how.strip_count = 1;
  }
  return how;
}

}  // namespace kt::inline texts
