#include "text/tokenizer/code_pairs.h"

#include <utility>

namespace kt::inline texts {

void CodePairs::add(CodePoint left, CodePoint right) {
  if (contains(left, right)) return;
  if (2 * (size_ + 1) > pairs_.size()) {
    const std::vector<uint64_t> before =
        std::exchange(pairs_, std::vector<uint64_t>(2 * pairs_.size(), kNone));
    for (const uint64_t pair : before)
      if (pair != kNone) pairs_[place_of(pair)] = pair;
  }
  const uint64_t pair = key(left, right);
  pairs_[place_of(pair)] = pair;
  ++size_;
}

}  // namespace kt::inline texts
