// The state of a TokenTrie: tokens by their bytes, as a tree in one array.
#pragma once
#include <vector>

#include "text/grammar/grammar.h"

namespace kt::inline texts {

// Bytes that grammars mostly treat alike; below 16.
inline int byte_class(uint8_t byte) {
  const auto within = [&](uint8_t low, uint8_t high) { return low <= byte && byte <= high; };
  if (byte >= 0x80) return 0;
  if (within('a', 'z')) return 1;
  if (within('A', 'Z')) return 2;
  if (within('0', '9')) return 3;
  if (byte == ' ') return 4;
  if (byte == '"') return 5;
  if (byte == '\\') return 6;
  if (byte < ' ') return 7;
  if (byte == '<') return 8;
  return byte == '_' ? 9 : 10;
}

struct TokenTrie::State {
  struct Node {
    uint32_t after = 0;   // the first node that is not below this one
    uint32_t tokens = 0;  // where its tokens begin in `ids`; they end where those of the next node begin
    uint16_t depth = 0;   // bytes up to here
    uint16_t below = 0;   // classes of the bytes below it, a bit each
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

}  // namespace kt::inline texts
