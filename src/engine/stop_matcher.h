// Stop strings in streaming text: they may begin in one piece and end in another. Knows nothing of tokens.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline engine {

// Holds back the end of the text while it could still become a stop string. The match is the one that is
// complete first, the longest among those that end together; so how the text is cut into pieces makes no
// difference. If the text is whole characters, so is what is emitted.
class StopMatcher {
 public:
  // Error(kInput) naming the string if one is empty, longer than 4096 bytes or not UTF-8, or there are more
  // than 64.
  explicit StopMatcher(std::span<const std::string> stops = {});

  struct Result {
    std::string text = {};            // that may be shown now: never a part of the stop string
    std::optional<size_t> stop = {};  // which one matched; what follows it in the piece is dropped
  };
  // O(bytes * stops), amortised. Not after a match.
  Result push(std::string_view piece);
  // The end of the text: what was held back.
  std::string flush();

 private:
  struct Stop {
    std::string bytes;
    std::vector<uint32_t> borders;  // [i]: length of the longest proper prefix of bytes that ends bytes[0, i]
    uint32_t matched = 0;           // bytes at the end of the text that begin this string
  };
  std::vector<Stop> stops_;
  std::string held_;
  bool done_ = false;
};

}  // namespace kt::inline engine
