// Byte-pair merges: one word to token ids. Knows nothing of files, added tokens or how text becomes words.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/tokenizer/code_pairs.h"
#include "text/tokenizer/token_texts.h"
#include "text/unicode.h"

namespace kt::inline texts {

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

inline constexpr uint32_t kNoRank = 0xFFFFFFFF;

struct BpeParts {
  TokenTexts texts = {};  // what a word consists of, bytes or UTF-8
  std::vector<Merge> merges = {};
  // Instead of merges: any two neighbours that spell a token together may become it. By token, as long as `texts`: its
  // rank, or kNoRank for one that is neither made of others nor part of one. Characters of tokens that are none
  // themselves take part as well; what is left of one is as any other character without a token. Listed as merges,
  // these would be up to a thousand for each token.
  std::vector<uint32_t> ranks = {};
  BpeOptions options = {};
  // Tokens that only lead to others: what is left of one stands for the two it could last have been made of.
  std::vector<TokenId> unused = {};
};

// Immutable; any number of threads may encode, each with its own scratch.
class Bpe {
 public:
  Bpe() = default;
  explicit Bpe(BpeParts parts);

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
  struct Joined {
    uint32_t rank = kNoRank;  // kNoRank: the two stay two
    TokenId result = 0;
  };
  struct Slot {
    uint64_t pair = kFree;
    Joined joined = {};
  };
  static constexpr uint64_t kFree = ~uint64_t{0};

  // What unused tokens were last offered as.
  using Halves = std::unordered_map<TokenId, std::pair<TokenId, TokenId>>;

  void index_merges(const std::vector<Merge>& merges);
  void index_characters();
  void index_joints(const std::vector<Merge>& merges);
  bool add_joint(CodePoint left, CodePoint right);
  bool may_join(CodePoint left, CodePoint right) const;
  void encode_part(std::string_view word, Scratch& scratch, std::vector<TokenId>& out) const;
  Joined find(TokenId left, TokenId right) const;
  void first_symbols(std::string_view word, std::vector<TokenId>& out) const;
  bool append_bytes(std::string_view character, std::vector<TokenId>& out) const;
  void merge_few(Scratch& scratch) const;
  Halves merge_many(std::vector<TokenId>& symbols) const;
  void take_apart(const Halves& halves, std::vector<TokenId>& symbols) const;
  void leave_nameless(std::vector<TokenId>& symbols) const;
  bool is_nameless(TokenId id) const { return !ranks_.empty() && static_cast<size_t>(id) >= ranks_.size(); }
  bool is_unused(TokenId id) const {
    return static_cast<size_t>(id) < unused_.size() && unused_[static_cast<size_t>(id)];
  }

  TokenTexts texts_;                     // of tokens, and with ranks behind them of characters that are none
  std::array<TokenId, 256> byte_ids_{};  // with options.bytes, of the byte; else of "<0x..>"; -1: none
  std::vector<Slot> slots_;              // of merges; open addressing, a power of two
  std::vector<uint32_t> ranks_;          // as in BpeParts
  // Whether words are cut where no token reaches across: which two characters stand side by side within tokens, and
  // which are tokens.
  bool cuts_ = false;
  CodePairs joints_;
  CodeSet characters_;
  std::vector<bool> unused_;  // by token; empty: none is
  BpeOptions options_;
};

}  // namespace kt::inline texts
