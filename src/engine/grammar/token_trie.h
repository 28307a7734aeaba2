// The state of a TokenTrie: tokens by their bytes, as a tree in one array.
#pragma once
#include <vector>

#include "engine/grammar/grammar.h"

namespace kt {

struct TokenTrie::State {
  struct Node {
    uint32_t after = 0;   // the first node that is not below this one
    uint32_t tokens = 0;  // where its tokens begin in `ids`; they end where those of the next node begin
    uint16_t depth = 0;   // bytes up to here
    uint8_t byte = 0;
  };
  const Tokenizer* tokenizer = nullptr;
  // Parents before children, children by byte; [0] is the root. One more than there are nodes at the end.
  std::vector<Node> nodes;
  std::vector<TokenId> ids;     // by their bytes; without special and empty tokens
  std::vector<TokenId> quoted;  // those with a '"'
  uint32_t deepest = 0;         // bytes of the longest token

  uint32_t size() const { return static_cast<uint32_t>(nodes.size()) - 1; }
};

}  // namespace kt
