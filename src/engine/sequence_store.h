// What sequences own: pages of the KV cache and, for models that have them, slots for states. And which pages
// hold what, so that sequences with a common beginning share it: at the same time, and after they ended, until
// memory is needed. Touches no keys or values, and states only by copying them. One thread at a time.
//
// A state is what a recurrent layer remembers of all tokens so far: of fixed size, overwritten as tokens run,
// so it cannot be shared and says nothing of positions before its own. A common beginning is of use only where
// the state at its end is known. So full pages may have a snapshot, a copy of the state after their last token
// in a slot of its own, and a sequence begins with known pages up to the last one that has one; the others
// still lead to those behind them. Without states every page is as good as one with a snapshot.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "nn/kv_cache.h"
#include "text/tokenizer/bpe.h"

namespace kt::inline engine {

class StoredSequence;

struct StoreSizes {
  int pages = 0;
  int slots = 0;    // for states; 0: there are none
  int buckets = 0;  // of the table of tokens; 0: as many as serve it well
};

enum class SnapshotKind {
  kLasting,    // stays until its slot or its page is needed
  kMilestone,  // as well, but makes way for any other, unless somebody began from it
  kRolling,  // as kLasting, but makes way for the next one of the same sequence unless somebody began from it
};

// A page is free, held by one or more sequences, or cached: full, held by nobody, findable by its tokens and
// all tokens before them. Cached pages are given away when no page is free, the least recently used first; a
// page never before those that continue it, for whoever uses those uses it too. A snapshot goes with its page.
//
// A slot is free, held by one sequence that runs, or holds a snapshot. There are fewer slots than pages, so
// snapshots are given away on their own too, milestones before the others and then the least recently used first,
// whether their page is held or not.
class SequenceStore {
 public:
  using CopyState = std::function<void(int from_slot, int to_slot)>;
  // It must outlive its sequences. `copy_state` is needed where there are slots; its exceptions pass through
  // and leave the store whole.
  explicit SequenceStore(StoreSizes sizes, CopyState copy_state = {});
  SequenceStore(const SequenceStore&) = delete;
  SequenceStore& operator=(const SequenceStore&) = delete;

  int pages() const { return static_cast<int>(pages_.size()); }
  int pages_held() const { return held_; }
  int pages_cached() const { return cached_; }
  int pages_available() const { return pages() - held_; }  // free or cached
  int slots() const { return static_cast<int>(slots_.size()); }
  int slots_held() const { return slots() - static_cast<int>(free_slots_.size()) - snapshots_; }
  int snapshots() const { return snapshots_; }
  bool has_states() const { return !slots_.empty(); }

  // A sequence of these tokens, begun with the longest usable beginning in whole pages, but never all of them:
  // one token at least has to run for its logits. O(pages). Beginnings are shared within a family alone: the
  // same tokens have other keys and values where weights are others (an adapter's number; -1: none).
  StoredSequence start(std::span<const TokenId> tokens, int family = -1);
  // Forgets what is cached; what sequences hold stays theirs and findable.
  void drop_cached();

 private:
  friend class StoredSequence;
  static constexpr int32_t kNone = -1;
  static constexpr uint64_t kRoot = 0;
  // What first pages continue: a number for each family, below all serials.
  static constexpr uint64_t kFamilies = 1 << 16;
  static constexpr uint64_t root_of(int family) { return kRoot + static_cast<uint64_t>(family + 1); }
  struct Page {
    int holders = 0;
    // A full page that can be found: `serial` names this beginning for ever, `parent` the one it continues.
    uint64_t serial = kRoot, parent = kRoot;
    TokenId tokens[kPageTokens] = {};
    int32_t next_in_bucket = kNone;
    int32_t older = kNone, newer = kNone;  // among cached pages
    int32_t snapshot = kNone;              // slot
  };
  struct Slot {
    int32_t page = kNone;  // whose snapshot it holds
    int beginners = 0;     // sequences that are going to begin from it: it stays for them
    uint64_t used = 0;     // when it was taken, or found for a sequence to begin from
    SnapshotKind kind = SnapshotKind::kLasting;
  };
  Page& at(int32_t page) { return pages_[static_cast<size_t>(page)]; }
  Slot& slot(int32_t slot) { return slots_[static_cast<size_t>(slot)]; }
  int32_t& bucket_of(uint64_t parent, std::span<const TokenId> tokens);
  int32_t find(uint64_t parent, std::span<const TokenId> tokens);
  void enter(int32_t page, uint64_t parent, std::span<const TokenId> tokens);
  void forget(int32_t page);
  int32_t take();  // a page held once; one must be available
  void hold(int32_t page);
  void release(int32_t page);
  void link_newest(int32_t page);
  void unlink(int32_t page);
  // Full pages, each continuing the one before.
  StoredSequence start_behind(std::span<const int32_t> known, uint64_t root);
  bool free_a_slot();  // by dropping a snapshot if it must; false if there is none to drop
  int32_t take_slot();
  void attach(int32_t page, int32_t slot, SnapshotKind kind);
  void drop_snapshot(int32_t page);

  std::vector<Page> pages_;
  std::vector<int32_t> free_;
  std::vector<int32_t> buckets_;  // first page of each, a power of two
  int32_t oldest_ = kNone, newest_ = kNone;
  uint64_t serials_ = kFamilies;
  int held_ = 0, cached_ = 0;
  std::vector<Slot> slots_;
  std::vector<int32_t> free_slots_;
  int snapshots_ = 0;
  uint64_t uses_ = 0;
  CopyState copy_state_;
};

// The pages and the state of one sequence. Move-only; gives them back at its end.
class StoredSequence {
 public:
  StoredSequence(StoredSequence&& other) noexcept;
  StoredSequence& operator=(StoredSequence&& other) noexcept;
  ~StoredSequence() { release(); }

  // Pages of tokens 0..63, 64..127, ...: valid until the next call that is not const.
  std::span<const int32_t> pages() const { return pages_; }
  // How many tokens' keys and values the pages hold, from the first on. The state is that behind them.
  int tokens() const { return tokens_; }
  // How many tokens at its start were found in pages. More than it could begin with: others have this
  // beginning too, and there is no snapshot at its end.
  int known() const { return known_; }
  int slot() const { return slot_; }  // -1 before begin() and where there are no states

  // Room for so many tokens in all. False, and nothing changed, if not enough pages are available.
  bool reserve(int tokens);
  // Takes a slot and puts the state behind tokens() there; at the very beginning there is none, and the slot
  // holds anything. Once, before the first commit. False, and nothing changed, if other sequences have all
  // slots or are about to begin from what is in them. Without states always true. On its own because it may
  // copy much: whoever starts a sequence to see whether it fits calls this last.
  bool begin();
  // These tokens' keys and values have been written behind the others, into reserved room, and the state in the
  // slot is the one behind them. Pages that are full now can be found by others; where another sequence filled
  // an equal one before, that one takes its place in pages().
  void commit(std::span<const TokenId> tokens);
  // Keeps a copy of the state with the page that has just been filled: tokens() is a multiple of kPageTokens
  // and not 0. Where that page has a snapshot already it counts as used. False if there is no slot for it.
  bool snapshot(SnapshotKind kind);
  // Another sequence that begins with this one's full pages, up to the last with a snapshot where there are
  // states. What is behind them it has to run again.
  StoredSequence fork() const;
  // Gives all back, as the end does; pages that are full stay cached, and snapshots with them.
  void release();

 private:
  friend class SequenceStore;
  StoredSequence(SequenceStore& owner, uint64_t root) : owner_(&owner), root_(root) {}
  int32_t last_full() const { return pages_[static_cast<size_t>(tokens_ / kPageTokens - 1)]; }
  // Whether the snapshot it will begin from has to stay for it.
  bool awaits_snapshot() const {
    return owner_->has_states() && slot_ == SequenceStore::kNone && tokens_ > 0;
  }
  void drop_rolling();

  SequenceStore* owner_;
  uint64_t root_;  // of its family
  std::vector<int32_t> pages_;
  std::vector<TokenId> tail_;  // tokens of the page that is not full
  int tokens_ = 0, known_ = 0;
  int32_t slot_ = SequenceStore::kNone;
  int32_t rolling_ = SequenceStore::kNone;  // page of its own with its last rolling snapshot
};

}  // namespace kt::inline engine
