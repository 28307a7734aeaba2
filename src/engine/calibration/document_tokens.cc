#include "engine/calibration/document_tokens.h"

#include <algorithm>

#include "base/error.h"

namespace kt::inline engine {

AroundText around_text(const Tokenizer& tokenizer) {
  const std::vector<TokenId> plain = tokenizer.encode("a"),
                             all = tokenizer.encode("a", {.add_special = true});
  const auto found = std::ranges::search(all, plain);
  return {{all.begin(), found.begin()}, {found.end(), all.end()}};
}

DocumentTokens::DocumentTokens(const Tokenizer& tokenizer, const std::vector<TextFile>& files, TokenId end,
                               std::string_view separator, size_t piece)
    : tokenizer_(tokenizer),
      around_(around_text(tokenizer)),
      files_(files),
      end_(end),
      separator_(separator),
      piece_size_(piece) {
  KT_CHECK(!files.empty());
  seek({.offset = files.front().begin()});
}

DocumentTokens::Mark DocumentTokens::mark() const {
  return {.tokens = first_ + tokens_.size(),
          .file = file_,
          .offset = reader_->offset(),
          .inside = reader_->inside()};
}

void DocumentTokens::seek(const Mark& mark) {
  first_ = mark.tokens;
  tokens_.clear();
  file_ = mark.file;
  reader_.emplace(files_[file_], mark.offset, mark.inside, separator_, piece_size_);
}

bool DocumentTokens::next() {
  while (!reader_->next(piece_)) {
    if (file_ + 1 == files_.size()) return false;
    seek({.tokens = first_ + tokens_.size(), .file = file_ + 1, .offset = files_[file_ + 1].begin()});
  }
  first_ += tokens_.size();
  const auto& [before, after] = around_;
  tokens_.clear();
  if (piece_.begins) tokens_ = before;
  const std::vector<TokenId> ids = tokenizer_.encode(piece_.text);
  tokens_.insert(tokens_.end(), ids.begin(), ids.end());
  if (!piece_.ends) return true;
  tokens_.insert(tokens_.end(), after.begin(), after.end());
  if (after.empty() || after.back() != end_) tokens_.push_back(end_);
  return true;
}

}  // namespace kt::inline engine
