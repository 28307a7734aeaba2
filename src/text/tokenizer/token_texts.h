// The texts of tokens by id and the ids by text, in few allocations; and the id of what two tokens spell side by side,
// found without spelling it. Knows nothing of ranks or of what a token means.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline texts {

using TokenId = int32_t;

// Immutable after the last add(); any number of threads may ask.
class TokenTexts {
 public:
  void reserve(size_t tokens, size_t bytes);
  // Ids come in rising order. False for a text that has an id already, which it keeps: this one then stands for no
  // text.
  bool add(TokenId id, std::string_view text);

  // One more than the highest id.
  size_t size() const { return hashes_.size(); }
  // Empty for an id without a text.
  std::string_view text_of(TokenId id) const {
    const size_t begin = begins_[static_cast<size_t>(id)];
    return std::string_view(texts_).substr(begin, begins_[static_cast<size_t>(id) + 1] - begin);
  }
  std::optional<TokenId> id_of(std::string_view text) const;
  // Of the text of `left` and behind it that of `right`, which both have. None where one is longer than kLongestPart.
  static constexpr size_t kLongestPart = 1024;
  std::optional<TokenId> id_of(TokenId left, TokenId right) const;

 private:
  struct Slot {
    uint32_t mark = 0;  // of the hash, to compare before texts are
    TokenId id = -1;    // -1: free
  };
  static uint64_t hash_of(std::string_view text);
  size_t place_of(uint64_t hash) const;
  void grow();

  std::string texts_;                   // one behind the other
  std::vector<size_t> begins_ = {0};    // by id, and the end of the last
  std::vector<uint64_t> hashes_;        // by id
  std::vector<uint64_t> powers_ = {1};  // of the hash's base, by length
  std::vector<Slot> slots_ = {Slot{}};  // open addressing, a power of two, half of it free
  size_t used_ = 0;                     // slots
};

}  // namespace kt::inline texts
