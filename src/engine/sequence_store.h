// Who holds which page of the KV cache, and which pages hold what, so that sequences with a common beginning
// share it: at the same time, and after they ended, until memory is needed. Touches no keys or values.
// One thread at a time.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "nn/kv_cache.h"
#include "text/tokenizer/bpe.h"

namespace kt {

class StoredSequence;

struct StoreSizes {
  int pages = 0;
  int buckets = 0;  // of the table of tokens; 0: as many as serve it well
};

// A page is free, held by one or more sequences, or cached: full, held by nobody, findable by its tokens and
// all tokens before them. Cached pages are given away when no page is free, the least recently used first; a
// page never before those that continue it, for whoever uses those uses it too.
class SequenceStore {
 public:
  // It must outlive its sequences.
  explicit SequenceStore(StoreSizes sizes);
  SequenceStore(const SequenceStore&) = delete;
  SequenceStore& operator=(const SequenceStore&) = delete;

  int pages() const { return static_cast<int>(pages_.size()); }
  int pages_held() const { return held_; }
  int pages_cached() const { return cached_; }
  int pages_available() const { return pages() - held_; }  // free or cached

  // A sequence of these tokens, begun with the longest cached beginning in whole pages, but never all of
  // them: one token at least has to run for its logits. O(pages).
  StoredSequence start(std::span<const TokenId> tokens);
  // Forgets what is cached; what sequences hold stays theirs and findable.
  void drop_cached();

 private:
  friend class StoredSequence;
  static constexpr int32_t kNone = -1;
  static constexpr uint64_t kRoot = 0;
  struct Page {
    int holders = 0;
    // A full page that can be found: `serial` names this beginning for ever, `parent` the one it continues.
    uint64_t serial = kRoot, parent = kRoot;
    TokenId tokens[kPageTokens] = {};
    int32_t next_in_bucket = kNone;
    int32_t older = kNone, newer = kNone;  // among cached pages
  };
  Page& at(int32_t page) { return pages_[static_cast<size_t>(page)]; }
  int32_t& bucket_of(uint64_t parent, std::span<const TokenId> tokens);
  int32_t find(uint64_t parent, std::span<const TokenId> tokens);
  void enter(int32_t page, uint64_t parent, std::span<const TokenId> tokens);
  void forget(int32_t page);
  int32_t take();  // a page held once; one must be available
  void hold(int32_t page);
  void release(int32_t page);
  void link_newest(int32_t page);
  void unlink(int32_t page);

  std::vector<Page> pages_;
  std::vector<int32_t> free_;
  std::vector<int32_t> buckets_;  // first page of each, a power of two
  int32_t oldest_ = kNone, newest_ = kNone;
  uint64_t serials_ = kRoot;
  int held_ = 0, cached_ = 0;
};

// The pages of one sequence. Move-only; gives them back at its end.
class StoredSequence {
 public:
  StoredSequence(StoredSequence&& other) noexcept;
  StoredSequence& operator=(StoredSequence&& other) noexcept;
  ~StoredSequence() { release(); }

  // Pages of tokens 0..63, 64..127, ...: valid until the next call that is not const.
  std::span<const int32_t> pages() const { return pages_; }
  // How many tokens' keys and values the pages hold, from the first on.
  int tokens() const { return tokens_; }

  // Room for so many tokens in all. False, and nothing changed, if not enough pages are available.
  bool reserve(int tokens);
  // These tokens' keys and values have been written behind the others, into reserved room. Pages that are
  // full now can be found by others; where another sequence filled an equal one before, that one takes its
  // place in pages().
  void commit(std::span<const TokenId> tokens);
  // Another sequence that holds this one's full pages. What is in a page that is not full it has to run
  // again.
  StoredSequence fork() const;
  // Gives all pages back, as the end does; those that are full stay cached.
  void release();

 private:
  friend class SequenceStore;
  explicit StoredSequence(SequenceStore& owner) : owner_(&owner) {}

  SequenceStore* owner_;
  std::vector<int32_t> pages_;
  std::vector<TokenId> tail_;  // tokens of the page that is not full
  int tokens_ = 0;
};

}  // namespace kt
