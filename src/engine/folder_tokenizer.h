// The tokenizer of a model's folder: its tokenizer.json, or SentencePiece's tokenizer.model where there is no other.
#pragma once
#include <optional>
#include <string>

#include "text/tokenizer/tokenizer.h"

namespace kt {

// The file that the tokenizer would be read from; nullopt where neither is there.
std::optional<std::string> tokenizer_file_of(const std::string& folder);

// Beside a tokenizer.model, tokenizer_config.json (added_tokens_decoder, add_bos_token, add_eos_token) and
// added_tokens.json say what is added to it. Error(kInput) naming the file; tokenizer.json where there is none.
Tokenizer read_folder_tokenizer(const std::string& folder);

}  // namespace kt
