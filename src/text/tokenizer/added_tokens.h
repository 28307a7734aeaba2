// Tokens that are looked for in the text itself, before it is cut into words.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/function_ref.h"
#include "text/tokenizer/bpe.h"

namespace kt::inline texts {

struct AddedToken {
  TokenId id = 0;
  std::string content = {};
  bool special = false;      // markup, not text: left out by decode, may be forbidden in encode
  bool normalized = false;   // looked for after normalisation, in its own normal form
  bool as_spelled = false;   // ... or, if normalized, as it is spelled
  bool single_word = false;  // not inside a word
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // ... after it
};

// Finds the longest of many strings at the leftmost place. Immutable after the last add().
class AddedTokenTrie {
 public:
  // `content` may differ from the token's own: it may be normalised. Not empty. `token` must outlive the
  // trie.
  void add(std::string_view content, const AddedToken& token);
  bool empty() const { return nodes_.size() <= 1; }

  // Which matches to pass over, as text: tokens that it skips, and those that are spelled with the mark inside.
  struct Rules {
    FunctionRef<bool(const AddedToken&)> skips;
    std::string_view mark = {};  // empty: none
  };
  // Cuts `text` from left to right: text between tokens, marks in it, goes to `between` with its offset, a token to
  // `found`.
  void cut(std::string_view text, Rules rules, FunctionRef<void(std::string_view, size_t)> between,
           FunctionRef<void(const AddedToken&)> found) const;

 private:
  struct Node {
    std::vector<std::pair<uint8_t, uint32_t>> children;  // sorted by byte
    const AddedToken* token = nullptr;
  };
  struct Match {
    size_t begin = 0, end = 0;
    const AddedToken* token = nullptr;
    bool marked = false;
  };
  Match next_match(std::string_view text, size_t from, std::string_view mark) const;

  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::array<bool, 256> begins_{};  // which bytes a token begins with
};

}  // namespace kt::inline texts
