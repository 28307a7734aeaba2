// Prompts for load: plain words, each prompt other than all before it from its first word on, so that a
// server's prefix cache has nothing to find unless a common beginning is asked for.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace kt::inline bench {

// How many tokens a text has, or about how many.
using CountTokens = std::function<int64_t(const std::string& text)>;

class LoadPrompts {
 public:
  // The same seed gives the same prompts.
  explicit LoadPrompts(uint64_t seed) : seed_(seed), state_(seed) {}

  // How many words make about `tokens` tokens; asks `count` twice.
  static int words_for(int64_t tokens, const CountTokens& count);

  // `words` words, one at least, after `prefix`, which may be empty.
  std::string next(int words, std::string_view prefix = {});
  // The beginning that prompts share: the same for a seed.
  std::string shared(int words) const;

 private:
  uint64_t seed_, state_;
  uint64_t made_ = 0;
};

}  // namespace kt::inline bench
