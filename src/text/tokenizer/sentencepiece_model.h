// A tokenizer.model of SentencePiece: the few fields of its protocol buffer that say how text becomes pieces.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer/piece_vocabulary.h"

namespace kt::inline texts {

struct SentencePieceModel {
  std::string name = {};  // of the file, for errors
  std::vector<std::string> pieces = {};
  std::vector<float> scores = {};
  std::vector<int32_t> types = {};
  int model_type = 1;  // 1 unigram, 2 byte pairs, 3 words, 4 characters
  bool byte_fallback = false, space_as_suffix = false;
  int32_t bos = 1, eos = 2;  // -1: none
  std::string normalizer = {};
  bool has_charsmap = false, has_denormalizer = false;  // rules that change characters
  bool add_dummy_prefix = true, remove_extra_whitespaces = true, escape_whitespaces = true;
};

// Error(kInput) "<name>: ..." for bytes that are no such message; reads nothing outside them and keeps no more than
// they hold.
SentencePieceModel parse_sentencepiece(std::string_view bytes, std::string_view name);

// A view of the model's pieces, valid while it is. Error(kUnsupported) for what is not read, by its name.
PieceVocabulary vocabulary_of(const SentencePieceModel& model);

}  // namespace kt::inline texts
