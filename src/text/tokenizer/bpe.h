// Byte-pair merges: one word to token ids. Knows nothing of files, added tokens or how text becomes words.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace kt {

using TokenId = int32_t;

// `left` next to `right` may become `result`; lower ranks first.
struct Merge {
  TokenId left = 0, right = 0, result = 0;
  uint32_t rank = 0;
};

struct BpeOptions {
  bool bytes = false;                   // a word's first symbols are its bytes; else its characters
  bool ignore_merges = false;           // a word that is a token is that token
  bool byte_fallback = false;           // characters without a token become their bytes' tokens, "<0x0A>"
  bool fuse_unknown = false;            // neighbouring unknown characters share one unknown token
  std::optional<TokenId> unknown = {};  // without it, unknown characters are left out
};

// Immutable; any number of threads may encode, each with its own scratch.
class Bpe {
 public:
  Bpe() = default;
  // `ids` maps what a word consists of (bytes, or UTF-8) to tokens.
  Bpe(std::unordered_map<std::string, TokenId> ids, const std::vector<Merge>& merges, BpeOptions options);

  // The buffers and the cache of words of one caller.
  class Scratch {
   private:
    friend class Bpe;
    struct Hash {
      using is_transparent = void;
      size_t operator()(std::string_view word) const { return std::hash<std::string_view>()(word); }
    };
    struct Place {
      uint32_t begin = 0, count = 0;
    };
    std::unordered_map<std::string, Place, Hash, std::equal_to<>> words_;
    std::vector<TokenId> cached_;
    std::vector<TokenId> symbols_;
    std::vector<uint32_t> ranks_;
  };

  // Appends the tokens of `word`. O(n log n) in its length.
  void encode(std::string_view word, Scratch& scratch, std::vector<TokenId>& out) const;

 private:
  struct Slot {
    uint64_t pair = kFree;
    uint32_t rank = 0;
    TokenId result = 0;
  };
  static constexpr uint64_t kFree = ~uint64_t{0};

  const Slot* find(TokenId left, TokenId right) const;
  void first_symbols(std::string_view word, std::vector<TokenId>& out) const;
  void merge_few(Scratch& scratch) const;
  void merge_many(std::vector<TokenId>& symbols) const;
  std::optional<TokenId> id_of(std::string_view part) const;

  std::unordered_map<std::string, TokenId> ids_;
  std::array<TokenId, 256> byte_ids_{};  // with options.bytes, of the byte; else of "<0x..>"; -1: none
  std::vector<Slot> slots_;              // open addressing, a power of two
  BpeOptions options_;
};

}  // namespace kt
