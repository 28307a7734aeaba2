// A vocabulary of SentencePiece's byte-pair kind, whatever file holds it: pieces with scores instead of merges. Two
// neighbours become one where the two together are a piece, the highest score first, and the leftmost of equals. The
// reference is PyPI's sentencepiece.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "text/tokenizer/tokenizer.h"

namespace kt::inline texts {

// As tokenizer.model and GGUF files number them.
enum class PieceType : int32_t { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };

struct PieceVocabulary {
  std::string name = {};                     // of the file, for errors
  std::span<const std::string> pieces = {};  // by id; an empty one is none
  std::span<const float> scores = {};        // by id
  std::span<const int32_t> types = {};       // PieceType by id; empty: all normal but "<0x0A>" and its like
  bool byte_fallback = true;     // a character without a piece becomes bytes, where the pieces for them exist
  bool add_prefix = true;        // a space before every text
  bool collapse_spaces = false;  // none at its ends, and one between words
  // Where user-defined pieces are looked for: in the text as it is given, so that what follows one is a text by
  // itself, as in GGUF files; or within the normalised text, as sentencepiece does.
  bool cut_user_defined = false;
  std::optional<TokenId> unknown = {};
  std::optional<TokenId> add_bos = {}, add_eos = {};  // put around by add_special
  std::vector<AddedToken> added = {};                 // beside the control pieces
};

inline constexpr std::string_view kPieceSpace = "\u2581";

// Errors begin with the name: sizes that differ, types, scores that are no numbers, pieces that are too long.
TokenizerParts parts_of(const PieceVocabulary& vocabulary);

// Every way in which two symbols become a piece, ranks by score, for files that list them; a Bpe needs no list. Errors
// as those of parts_of, and of more than a list may hold.
struct PieceMerges {
  std::vector<Merge> merges = {};
  std::vector<std::string> nameless = {};  // characters without a piece, by ids from the number of pieces on
};
PieceMerges merges_of(const PieceVocabulary& vocabulary);

// What such vocabularies do before and after the merges; tokenizer.json says the same in words.
std::vector<NormalStep> piece_normal_steps(bool add_prefix, bool collapse_spaces);
Decoding piece_decoding(bool byte_fallback, bool add_prefix);
// The patterns by which spaces collapse, and what stands for their matches: two before the prefix and the
// escaping of spaces, one behind them.
inline constexpr std::string_view kFirstSpaces = "\\A +", kManySpaces = "  +",
                                  kLastPieceSpaces = "(?<!\u2581)\u2581++\\z";

}  // namespace kt::inline texts
