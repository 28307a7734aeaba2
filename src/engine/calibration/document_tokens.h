// The tokens of texts of documents, one file after the other, without holding more than a piece of them.
#pragma once
#include <optional>
#include <vector>

#include "engine/calibration/text_file.h"
#include "text/tokenizer/tokenizer.h"

namespace kt::inline engine {

// What a tokenizer puts around a text: begin of text, and their like.
struct AroundText {
  std::vector<TokenId> before, after;
};
AroundText around_text(const Tokenizer& tokenizer);

// Each document alone, as the tokenizer says for a text (with its begin of text), followed by `end`. Markup
// within documents is text to the tokenizer's rules (SpecialText::kRecognise). The end of a file ends a
// document.
class DocumentTokens {
 public:
  struct Mark {  // where pieces begin
    size_t tokens = 0, file = 0;
    uint64_t offset = 0;
    bool inside = false;
  };

  // All must outlive this.
  DocumentTokens(const Tokenizer& tokenizer, const std::vector<TextFile>& files, TokenId end,
                 std::string_view separator = "<|endoftext|>", size_t piece = DocumentReader::kPiece);
  // To the next piece; false: there is none.
  bool next();
  const std::vector<TokenId>& tokens() const { return tokens_; }  // of the piece
  size_t first() const { return first_; }                         // number of the first of them
  size_t file() const { return file_; }
  uint64_t offset() const { return piece_.offset; }
  // What follows begins with; seek() goes there.
  Mark mark() const;
  void seek(const Mark& mark);

 private:
  const Tokenizer& tokenizer_;
  const AroundText around_;
  const std::vector<TextFile>& files_;
  TokenId end_;
  std::string separator_;
  size_t piece_size_;
  std::optional<DocumentReader> reader_;
  size_t file_ = 0;
  DocumentPiece piece_;
  std::vector<TokenId> tokens_;
  size_t first_ = 0;
};

}  // namespace kt::inline engine
