// A set of pairs of characters, for questions about every character of a text.
#pragma once
#include <cstdint>
#include <vector>

#include "text/unicode.h"

namespace kt::inline texts {

class CodePairs {
 public:
  void add(CodePoint left, CodePoint right);
  bool contains(CodePoint left, CodePoint right) const { return pairs_[place_of(key(left, right))] != kNone; }
  size_t size() const { return size_; }

 private:
  static constexpr uint64_t kNone = ~uint64_t{0};
  static uint64_t key(CodePoint left, CodePoint right) { return uint64_t{left} << 32 | right; }
  // Where it is, or where it would be.
  size_t place_of(uint64_t pair) const {
    size_t at = static_cast<size_t>((pair * 0x9E3779B97F4A7C15u) >> 32) & (pairs_.size() - 1);
    while (pairs_[at] != kNone && pairs_[at] != pair) at = (at + 1) & (pairs_.size() - 1);
    return at;
  }

  std::vector<uint64_t> pairs_ = {kNone};  // open addressing, a power of two, half of it free
  size_t size_ = 0;
};

}  // namespace kt::inline texts
