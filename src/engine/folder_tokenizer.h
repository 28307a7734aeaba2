// The tokenizer of a model's folder: its tokenizer.json, SentencePiece's tokenizer.model where there is none, or the
// ranks in tiktoken.model where there is neither.
#pragma once
#include <optional>
#include <string>

#include "text/tokenizer/tokenizer.h"

namespace kt::inline engine {

// The file that the tokenizer would be read from; nullopt where none is there.
std::optional<std::string> tokenizer_file_of(const std::string& folder);

// Beside a tokenizer.model, tokenizer_config.json (added_tokens_decoder, add_bos_token, add_eos_token) and
// added_tokens.json say what is added to it; beside a tiktoken.model, tokenizer_config.json says whose it is
// (auto_map, tokenizer_class) and which ids are special (added_tokens_decoder). No code of a folder is run.
// Error(kInput) naming the file, tokenizer.json where there is none; Error(kUnsupported) for ranks of other tokenizers.
Tokenizer read_folder_tokenizer(const std::string& folder);

}  // namespace kt::inline engine
