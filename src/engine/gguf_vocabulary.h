// The tokenizer of a GGUF file: its arrays read from the metadata, and written as the files of a folder.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "text/json.h"
#include "text/tokenizer/tokenizer.h"
#include "weights/checkpoint.h"
#include "weights/plans/conversion.h"

namespace kt::inline engine {

// The arrays a GgufVocabulary views.
struct GgufVocabularyArrays {
  std::string name, model, pre;
  std::vector<std::string> tokens, merges;
  std::vector<int32_t> types;
  std::vector<float> scores;
  std::optional<TokenId> add_bos, add_eos, unknown;
  bool add_prefix = true, collapse_spaces = false;
  GgufVocabulary view() const;  // valid while this is
};

// Errors name the file and the key: missing, of another type, a token id out of range.
GgufVocabularyArrays read_gguf_vocabulary(const Checkpoint& checkpoint);

// What tokenizer.json says of the same tokenizer: the same ids for the same text. Errors as Tokenizer's, and
// for what that file has no words for. gguf_tokenizer_json.cc.
Json tokenizer_json_of(const GgufVocabulary& vocabulary);
// tokenizer_config.json: the names of special tokens, and the chat template where the file has one.
Json tokenizer_config_of(const Checkpoint& checkpoint, const GgufVocabulary& vocabulary);

// The two as files of a folder. A tokenizer that is not read gives none of them, and a log line says why.
std::vector<SideFile> gguf_tokenizer_files(const Checkpoint& checkpoint);

}  // namespace kt::inline engine
