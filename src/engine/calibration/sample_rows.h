// A row of a dataset, JSON, made into the tokens of a sample.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "engine/described_model.h"
#include "text/chat_template.h"

namespace kt::inline engine {

// "text" is encoded as the tokenizer says, with its begin of text. "messages" (role, content) and
// "conversations" (from, value) go through the model's chat template. Contents may be lists of text parts,
// which are joined by line breaks; an assistant's that is null, where it calls tools, is empty.
class SampleRows {
 public:
  explicit SampleRows(const DescribedModel& model);
  // Empty: a text of fewer than two tokens. Errors begin with `where`: no JSON, none of those columns (names
  // those there are), messages without a chat template or with contents of another kind.
  std::vector<TokenId> tokens(std::string_view row, const std::string& where) const;

 private:
  std::string rendered(const Json& messages, const std::string& where) const;

  const DescribedModel& model_;
  std::optional<ChatTemplate> template_;
  size_t around_ = 0;  // tokens that the tokenizer puts around a text
};

// The token that ends a document of a text: <|endoftext|>, or else the model's first. Error naming `path`.
TokenId document_end(const DescribedModel& model, const std::string& path);

}  // namespace kt::inline engine
