// Tokens to text while they come. What it returns is always whole characters.
#pragma once
#include <string>

#include "text/tokenizer/tokenizer.h"

namespace kt::inline texts {

enum class TextPlace {
  kBegin,   // the space that some tokenizers put before every text is taken away again
  kMiddle,  // of a text: what continues a prompt keeps it
};

// One stream of tokens. The tokenizer must outlive it. Cheap to make.
class Detokenizer {
 public:
  explicit Detokenizer(const Tokenizer& tokenizer, SpecialTokens special = SpecialTokens::kSkip,
                       TextPlace place = TextPlace::kBegin);

  // The text that became complete with this token: empty while a character is only begun. Bytes that can no
  // longer become UTF-8 come out as U+FFFD. An id without a token (a row that pads the model's vocabulary) is
  // no text.
  std::string push(TokenId id);
  // The end: U+FFFD if a character was begun. Afterwards as new.
  std::string flush();

 private:
  friend class Tokenizer;
  std::string complete(bool at_end);
  void begin();

  const Tokenizer* tokenizer_;
  SpecialTokens special_;
  TextPlace place_;
  std::string pending_;      // bytes of a character begun
  bool first_ = true;        // no token of the text pushed yet
  uint32_t strip_left_ = 0;  // how many characters may still be removed at the start
  // decode() knows the whole text, and does as tokenizers does: a run of byte tokens that is not all UTF-8 is
  // one U+FFFD for each byte. A stream that waited for the end of runs would stall.
  bool whole_runs_ = false;
};

}  // namespace kt::inline texts
