#include "text/tokenizer/token_texts.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace kt::inline texts {
namespace {

// A text is the polynomial of its bytes, so that the hash of two texts side by side follows from theirs. Hashes only
// say where to look: texts are compared.
constexpr uint64_t kBase = 0x9E6C63D0676A9A99u;
constexpr uint64_t kSpread = 0x9E3779B97F4A7C15u;

}  // namespace

uint64_t TokenTexts::hash_of(std::string_view text) {
  uint64_t hash = 0;
  for (const char c : text) hash = hash * kBase + static_cast<uint8_t>(c) + 1;
  return hash;
}

size_t TokenTexts::place_of(uint64_t hash) const {
  return static_cast<size_t>((hash * kSpread) >> 32) & (slots_.size() - 1);
}

void TokenTexts::reserve(size_t tokens, size_t bytes) {
  texts_.reserve(bytes);
  begins_.reserve(tokens + 1);
  hashes_.reserve(tokens);
}

bool TokenTexts::add(TokenId id, std::string_view text) {
  KT_CHECK(id >= 0 && static_cast<size_t>(id) >= size(), "token {} behind {}", id, size());
  begins_.resize(static_cast<size_t>(id) + 2, texts_.size());
  hashes_.resize(static_cast<size_t>(id) + 1);
  if (id_of(text)) return false;
  if (2 * (used_ + 1) > slots_.size()) grow();
  const uint64_t hash = hash_of(text);
  hashes_.back() = hash;
  while (powers_.size() <= std::min(text.size(), kLongestPart)) powers_.push_back(powers_.back() * kBase);
  texts_ += text;
  begins_.back() = texts_.size();
  size_t at = place_of(hash);
  while (slots_[at].id >= 0) at = (at + 1) & (slots_.size() - 1);
  slots_[at] = {static_cast<uint32_t>(hash), id};
  ++used_;
  return true;
}

void TokenTexts::grow() {
  const std::vector<Slot> before = std::exchange(slots_, std::vector<Slot>(2 * slots_.size()));
  for (const Slot& slot : before) {
    if (slot.id < 0) continue;
    size_t at = place_of(hashes_[static_cast<size_t>(slot.id)]);
    while (slots_[at].id >= 0) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = slot;
  }
}

std::optional<TokenId> TokenTexts::id_of(std::string_view text) const {
  const uint64_t hash = hash_of(text);
  for (size_t at = place_of(hash); slots_[at].id >= 0; at = (at + 1) & (slots_.size() - 1))
    if (slots_[at].mark == static_cast<uint32_t>(hash) && text_of(slots_[at].id) == text)
      return slots_[at].id;
  return std::nullopt;
}

std::optional<TokenId> TokenTexts::id_of(TokenId left, TokenId right) const {
  const std::string_view first = text_of(left), second = text_of(right);
  if (first.size() > kLongestPart || second.size() > kLongestPart) return std::nullopt;
  const uint64_t hash =
      hashes_[static_cast<size_t>(left)] * powers_[second.size()] + hashes_[static_cast<size_t>(right)];
  for (size_t at = place_of(hash); slots_[at].id >= 0; at = (at + 1) & (slots_.size() - 1)) {
    if (slots_[at].mark != static_cast<uint32_t>(hash)) continue;
    const std::string_view both = text_of(slots_[at].id);
    if (both.size() == first.size() + second.size() && both.starts_with(first) && both.ends_with(second))
      return slots_[at].id;
  }
  return std::nullopt;
}

}  // namespace kt::inline texts
