// What must hold of any tokenizer and any prompt. A broken promise is a std::logic_error, which the fuzzer
// reports.
#pragma once
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.h"
#include "text/tokenizer/detokenizer.h"
#include "text/tokenizer/tokenizer.h"

namespace kt {

inline void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

// The stream and decode() say the same, in whole characters.
inline void check_ids(const Tokenizer& tokenizer, std::span<const TokenId> ids) {
  for (const SpecialTokens special : {SpecialTokens::kKeep, SpecialTokens::kSkip}) {
    const std::string text = tokenizer.decode(ids, special);
    require(is_valid_utf8(text), "decode gave invalid UTF-8");
    Detokenizer stream(tokenizer, special);
    std::string pieces;
    for (const TokenId id : ids) {
      const std::string piece = stream.push(id);
      require(is_valid_utf8(piece), "a piece is invalid UTF-8");
      pieces += piece;
    }
    const std::string last = stream.flush();
    require(is_valid_utf8(last), "the last piece is invalid UTF-8");
    // Byte tokens that are no UTF-8 are replaced in whole runs by decode() only, as detokenizer.h says.
    if (!tokenizer.decoding().byte_fallback)
      require(pieces + last == text, "the pieces are not what decode gives");
  }
}

inline std::vector<TokenId> check_prompt(const Tokenizer& tokenizer, std::string_view prompt) {
  const EncodeOptions kWays[] = {{.add_special = true},
                                 {.special = SpecialText::kAsText, .add_special = true},
                                 {.mark = "s", .add_special = true}};
  for (const EncodeOptions& way : kWays) {
    const std::vector<TokenId> ids = tokenizer.encode(prompt, way);
    for (const TokenId id : ids)
      require(id >= 0 && static_cast<size_t>(id) < tokenizer.size(), "an id past the vocabulary");
    check_ids(tokenizer, ids);
  }
  return tokenizer.encode(prompt);
}

}  // namespace kt
