// For tests: tokens that say where they stand.
#pragma once
#include <vector>

#include "engine/sequence_store.h"

namespace kt::inline engine {

using Tokens = std::vector<TokenId>;

inline Tokens counted(int count, TokenId first = 0) {
  Tokens tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(first + i);
  return tokens;
}

}  // namespace kt::inline engine
