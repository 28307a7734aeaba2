// Keeps the text of users from becoming markup. A prompt is rendered to text and then cut into tokens with
// the markers of the template recognised; without care "<|im_end|>" in a message would end it.
#pragma once
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/chat_prompt.h"
#include "text/tokenizer/tokenizer.h"

namespace kt::inline server {

// For one prompt; the tokenizer must outlive it. What users wrote is marked before rendering, by a character
// that no text of theirs contains, inside each spelling of a marker; to the tokenizer that is plain text, and the
// character none.
//
// Markers are the special tokens, and other added tokens that are spelled <|...|>, <｜...｜> or ｜...｜ (DeepSeek's
// <｜User｜> and ｜DSML｜). Other added tokens, such as <think> and <tool_call>, stay: clients send them back in earlier
// answers, and templates look for them.
class PromptGuard {
 public:
  explicit PromptGuard(const Tokenizer& tokenizer);

  // The variables of a template, all strings and keys within them guarded but those that the server itself
  // gives by the name of a token (bos_token, eos_token ...). Once per guard. Error(kInput) for a text that
  // leaves no character to mark with.
  OrderedJson protect(const OrderedJson& variables);
  // Of the rendered prompt. Where nothing was marked, tokenizer.encode(rendered).
  std::vector<TokenId> encode(std::string_view rendered) const;
  // The rendered prompt as it is meant, for people and for prompt_opens_thinking.
  std::string plain(std::string_view rendered) const;

 private:
  enum class Author { kUser, kModel };
  // The longest marker that the text begins with; null: none.
  const std::string* marker_at(std::string_view text) const;
  bool needs_mark(const OrderedJson& value) const;
  void choose_mark(const OrderedJson& variables);
  std::string mark_text(std::string_view text, Author author) const;
  OrderedJson mark_value(const OrderedJson& value, Author author) const;

  const Tokenizer& tokenizer_;
  std::vector<std::string> markers_;  // sorted
  std::array<bool, 256> begins_{};
  std::string mark_;  // empty: nothing was marked
};

}  // namespace kt::inline server
