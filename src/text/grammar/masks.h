// Which tokens can come after a set of threads: the trie walked with the machine, with what was found kept.
#pragma once
#include <unordered_map>
#include <vector>

#include "text/grammar/machine.h"
#include "text/grammar/token_trie.h"

namespace kt::inline texts {

// A bit for each id.
class TokenBits {
 public:
  TokenBits() = default;
  explicit TokenBits(size_t tokens) : words_((tokens + 63) / 64) {}
  void set(TokenId id) { words_[static_cast<size_t>(id) / 64] |= uint64_t{1} << id % 64; }
  void clear(TokenId id) { words_[static_cast<size_t>(id) / 64] &= ~(uint64_t{1} << id % 64); }
  bool has(TokenId id) const { return words_[static_cast<size_t>(id) / 64] >> id % 64 & 1; }
  bool none() const;
  void unite(const TokenBits& other);
  // Logits of all others, and those past the bits, become -inf.
  void keep_only(std::span<float> logits) const;

 private:
  std::vector<uint64_t> words_;
};

// A network's own tokens do not depend on who called it. So a set of threads is cut into parts with one stack
// each: the tokens that stay inside the part's network are kept for all its callers (most of the vocabulary,
// inside a string), and only what leaves it is walked for each of them. Near the depth where calls end that does not
// hold, and the whole set is walked.
class Masks {
 public:
  Masks(const TokenTrie::State& trie, GrammarMachine& machine) : trie_(trie), machine_(machine) {}
  // Tokens whose bytes lead on. Valid until the next call.
  const TokenBits& after(ConfigId config);
  // To be called when the machine forgets.
  void forget();

 private:
  struct Inside {
    TokenBits tokens;             // that end inside, or just where the network may return
    std::vector<uint32_t> exits;  // nodes at which it may return; 0: before any byte
    int32_t reach = 0;            // calls within each other that some token needs
  };
  const Inside& inside(ConfigId local, bool wants_exits);
  void add(ConfigId config, TokenBits& out);
  // The classes of bytes (byte_class) that do not change a set of threads.
  uint32_t staying(ConfigId config) {
    const auto index = static_cast<size_t>(config);
    return index < staying_.size() && staying_[index] != 0 ? staying_[index] : find_staying(config);
  }
  uint32_t find_staying(ConfigId config);
  // The depth of calls that was looked at.
  int32_t walk(uint32_t from, ConfigId config, TokenBits& out, std::vector<uint32_t>* exits);

  const TokenTrie::State& trie_;
  GrammarMachine& machine_;
  std::unordered_map<ConfigId, TokenBits> bits_;
  std::unordered_map<ConfigId, Inside> inside_[2];  // without and with exits
  std::vector<uint32_t> staying_;                   // by config; 0: not known yet, for bit 31 is set
  std::vector<ConfigId> path_;                      // by depth
};

}  // namespace kt::inline texts
