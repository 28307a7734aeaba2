#include "text/tokenizer/detokenizer.h"

namespace kt::inline texts {

Detokenizer::Detokenizer(const Tokenizer& tokenizer, SpecialTokens special, TextPlace place)
    : tokenizer_(&tokenizer), special_(special), place_(place) {
  begin();
}

void Detokenizer::begin() {
  first_ = place_ == TextPlace::kBegin;
  strip_left_ = first_ ? tokenizer_->decoding().strip_count : 0;
}

std::string Detokenizer::push(TokenId id) {
  if (special_ == SpecialTokens::kSkip && tokenizer_->is_special(id)) return {};
  if (!tokenizer_->token_of(id)) return {};
  const Decoding& how = tokenizer_->decoding();
  const std::optional<uint8_t> byte = how.byte_fallback ? tokenizer_->byte_of(id) : std::nullopt;
  std::string prefix;
  if (byte) {
    pending_.push_back(static_cast<char>(*byte));
    first_ = false;
    if (whole_runs_) return {};
  } else {
    // With byte tokens only their runs make characters; other tokens are whole.
    if (how.byte_fallback) prefix = complete(true);
    std::string_view bytes = tokenizer_->token_bytes(id);
    if (first_ && !how.drop_in_first.empty()) {
      for (size_t at = 0; at < bytes.size(); ++at) {
        if (bytes.substr(at).starts_with(how.drop_in_first))
          at += how.drop_in_first.size() - 1;
        else
          pending_.push_back(bytes[at]);
      }
    } else {
      pending_.append(bytes);
    }
  }
  first_ = false;
  return prefix + complete(false);
}

std::string Detokenizer::flush() {
  std::string out = complete(true);
  begin();
  return out;
}

std::string Detokenizer::complete(bool at_end) {
  std::string out;
  if (whole_runs_ && !is_valid_utf8(pending_)) {
    std::string replaced;
    for (size_t i = 0; i < pending_.size(); ++i) replaced += kReplacement;
    pending_ = replaced;
  }
  std::string_view rest = pending_;
  while (!rest.empty()) {
    const Utf8Step step = decode_utf8(rest);
    if (step.cut && !at_end) break;
    const std::string_view character = step.valid ? rest.substr(0, step.bytes) : kReplacement;
    if (strip_left_ > 0 && character == tokenizer_->decoding().strip_left) {
      --strip_left_;
    } else {
      strip_left_ = 0;
      out.append(character);
    }
    rest.remove_prefix(step.bytes);
  }
  pending_.erase(0, pending_.size() - rest.size());
  return out;
}

}  // namespace kt::inline texts
