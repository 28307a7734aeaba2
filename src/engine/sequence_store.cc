#include "engine/sequence_store.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/error.h"

namespace kt::inline engine {

SequenceStore::SequenceStore(StoreSizes sizes, CopyState copy_state) : copy_state_(std::move(copy_state)) {
  if (sizes.pages < 1) fail("KV cache: expected at least 1 page, got {}", sizes.pages);
  if (sizes.buckets < 0) fail("KV cache: expected at least 0 buckets, got {}", sizes.buckets);
  if (sizes.slots < 0) fail("states: expected at least 0 slots, got {}", sizes.slots);
  KT_CHECK(sizes.slots == 0 || copy_state_, "{} slots and no way to copy them", sizes.slots);
  const auto count = static_cast<size_t>(sizes.pages);
  pages_.resize(count);
  buckets_.assign(std::bit_ceil(sizes.buckets > 0 ? static_cast<size_t>(sizes.buckets) : 2 * count), kNone);
  for (int32_t page = sizes.pages - 1; page >= 0; --page) free_.push_back(page);
  slots_.resize(static_cast<size_t>(sizes.slots));
  for (int32_t slot = sizes.slots - 1; slot >= 0; --slot) free_slots_.push_back(slot);
}

int32_t& SequenceStore::bucket_of(uint64_t parent, std::span<const TokenId> tokens) {
  uint64_t hash = (parent + 1) * 0x9E3779B97F4A7C15u;
  for (TokenId id : tokens) {
    hash = (hash ^ static_cast<uint32_t>(id)) * 0xBF58476D1CE4E5B9u;
    hash ^= hash >> 29;
  }
  return buckets_[hash & (buckets_.size() - 1)];
}

int32_t SequenceStore::find(uint64_t parent, std::span<const TokenId> tokens) {
  for (int32_t page = bucket_of(parent, tokens); page != kNone; page = at(page).next_in_bucket)
    if (at(page).parent == parent && std::ranges::equal(at(page).tokens, tokens)) return page;
  return kNone;
}

void SequenceStore::enter(int32_t page, uint64_t parent, std::span<const TokenId> tokens) {
  Page& entry = at(page);
  entry.serial = ++serials_;
  entry.parent = parent;
  std::ranges::copy(tokens, entry.tokens);
  int32_t& first = bucket_of(parent, tokens);
  entry.next_in_bucket = std::exchange(first, page);
}

void SequenceStore::forget(int32_t page) {
  Page& entry = at(page);
  int32_t* link = &bucket_of(entry.parent, entry.tokens);
  while (*link != page) link = &at(*link).next_in_bucket;
  *link = entry.next_in_bucket;
  entry.serial = kRoot;
  if (entry.snapshot != kNone) drop_snapshot(page);
}

void SequenceStore::link_newest(int32_t page) {
  at(page).older = newest_;
  at(page).newer = kNone;
  (newest_ == kNone ? oldest_ : at(newest_).newer) = page;
  newest_ = page;
  ++cached_;
}

void SequenceStore::unlink(int32_t page) {
  const Page& entry = at(page);
  (entry.older == kNone ? oldest_ : at(entry.older).newer) = entry.newer;
  (entry.newer == kNone ? newest_ : at(entry.newer).older) = entry.older;
  --cached_;
}

int32_t SequenceStore::take() {
  KT_CHECK(pages_available() > 0);
  int32_t page = oldest_;
  if (!free_.empty()) {
    page = free_.back();
    free_.pop_back();
  } else {
    unlink(page);
    forget(page);
  }
  at(page).holders = 1;
  ++held_;
  return page;
}

void SequenceStore::hold(int32_t page) {
  if (at(page).holders++ > 0) return;
  unlink(page);
  ++held_;
}

void SequenceStore::release(int32_t page) {
  if (--at(page).holders > 0) return;
  --held_;
  if (at(page).serial != kRoot)
    link_newest(page);
  else
    free_.push_back(page);
}

void SequenceStore::drop_cached() {
  while (oldest_ != kNone) {
    const int32_t page = oldest_;
    unlink(page);
    forget(page);
    free_.push_back(page);
  }
}

StoredSequence SequenceStore::start(std::span<const TokenId> tokens, int family) {
  KT_CHECK(family >= -1 && root_of(family) < kFamilies, "family {}", family);
  std::vector<int32_t> known;
  uint64_t parent = root_of(family);
  for (size_t begin = 0; begin + kPageTokens < tokens.size(); begin += kPageTokens) {
    const int32_t page = find(parent, tokens.subspan(begin, kPageTokens));
    if (page == kNone) break;
    known.push_back(page);
    parent = at(page).serial;
  }
  return start_behind(known, root_of(family));
}

StoredSequence SequenceStore::start_behind(std::span<const int32_t> known, uint64_t root) {
  StoredSequence sequence(*this, root);
  sequence.known_ = static_cast<int>(known.size()) * kPageTokens;
  while (has_states() && !known.empty() && at(known.back()).snapshot == kNone)
    known = known.first(known.size() - 1);
  for (int32_t page : known) hold(page);
  sequence.pages_.assign(known.begin(), known.end());
  sequence.tokens_ = static_cast<int>(known.size()) * kPageTokens;
  if (sequence.awaits_snapshot()) {
    Slot& from = slot(at(known.back()).snapshot);
    ++from.beginners;
    from.used = ++uses_;
  }
  return sequence;
}

bool SequenceStore::free_a_slot() {
  if (!free_slots_.empty()) return true;
  const auto worth = [](const Slot& one) {
    return std::pair(one.kind != SnapshotKind::kMilestone, one.used);
  };
  const Slot* oldest = nullptr;
  for (const Slot& one : slots_)
    if (one.page != kNone && one.beginners == 0 && (!oldest || worth(one) < worth(*oldest))) oldest = &one;
  if (!oldest) return false;
  drop_snapshot(oldest->page);
  return true;
}

int32_t SequenceStore::take_slot() {
  const int32_t taken = free_slots_.back();
  free_slots_.pop_back();
  return taken;
}

void SequenceStore::attach(int32_t page, int32_t slot, SnapshotKind kind) {
  at(page).snapshot = slot;
  this->slot(slot) = {.page = page, .used = ++uses_, .kind = kind};
  ++snapshots_;
}

void SequenceStore::drop_snapshot(int32_t page) {
  const int32_t dropped = std::exchange(at(page).snapshot, kNone);
  slot(dropped) = {};
  free_slots_.push_back(dropped);
  --snapshots_;
}

StoredSequence::StoredSequence(StoredSequence&& other) noexcept : owner_(other.owner_), root_(other.root_) {
  *this = std::move(other);
}

StoredSequence& StoredSequence::operator=(StoredSequence&& other) noexcept {
  if (this == &other) return *this;
  release();
  owner_ = other.owner_;
  root_ = other.root_;
  pages_ = std::exchange(other.pages_, {});
  tail_ = std::exchange(other.tail_, {});
  tokens_ = std::exchange(other.tokens_, 0);
  known_ = std::exchange(other.known_, 0);
  slot_ = std::exchange(other.slot_, SequenceStore::kNone);
  rolling_ = std::exchange(other.rolling_, SequenceStore::kNone);
  return *this;
}

bool StoredSequence::reserve(int tokens) {
  const size_t wanted = (static_cast<size_t>(std::max(tokens, 0)) + kPageTokens - 1) / kPageTokens;
  if (wanted <= pages_.size()) return true;
  if (wanted - pages_.size() > static_cast<size_t>(owner_->pages_available())) return false;
  while (pages_.size() < wanted) pages_.push_back(owner_->take());
  return true;
}

bool StoredSequence::begin() {
  if (!owner_->has_states() || slot_ != SequenceStore::kNone) return true;
  const int32_t from = tokens_ > 0 ? owner_->at(last_full()).snapshot : SequenceStore::kNone;
  if (!owner_->free_a_slot()) {
    // Nothing is left but the snapshot itself: if nobody else waits for it, its slot becomes the sequence's.
    if (from == SequenceStore::kNone || owner_->slot(from).beginners > 1) return false;
    owner_->drop_snapshot(last_full());
    slot_ = owner_->take_slot();
    KT_CHECK(slot_ == from, "state in slot {}, sequence in {}", from, slot_);
    return true;
  }
  if (from != SequenceStore::kNone) {
    owner_->copy_state_(from, owner_->free_slots_.back());
    --owner_->slot(from).beginners;
    owner_->slot(from).kind = SnapshotKind::kLasting;
  }
  slot_ = owner_->take_slot();
  return true;
}

void StoredSequence::commit(std::span<const TokenId> tokens) {
  KT_CHECK(!owner_->has_states() || slot_ != SequenceStore::kNone, "{} tokens before begin()", tokens.size());
  KT_CHECK(static_cast<size_t>(tokens_) + tokens.size() <= pages_.size() * kPageTokens,
           "{} tokens behind {} in {} pages", tokens.size(), tokens_, pages_.size());
  while (!tokens.empty()) {
    const size_t count = std::min(tokens.size(), kPageTokens - tail_.size());
    tail_.insert(tail_.end(), tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(count));
    tokens = tokens.subspan(count);
    tokens_ += static_cast<int>(count);
    if (tail_.size() < kPageTokens) return;
    const auto index = static_cast<size_t>(tokens_ / kPageTokens - 1);
    const uint64_t parent = index == 0 ? root_ : owner_->at(pages_[index - 1]).serial;
    const int32_t equal = owner_->find(parent, tail_);
    if (equal == SequenceStore::kNone) {
      owner_->enter(pages_[index], parent, tail_);
    } else {
      owner_->hold(equal);
      owner_->release(std::exchange(pages_[index], equal));
    }
    tail_.clear();
  }
}

bool StoredSequence::snapshot(SnapshotKind kind) {
  KT_CHECK(slot_ != SequenceStore::kNone && tokens_ > 0 && tail_.empty(),
           "snapshot of slot {} behind {} tokens", slot_, tokens_);
  const int32_t page = last_full();
  if (kind == SnapshotKind::kRolling && rolling_ != page) drop_rolling();
  if (const int32_t known = owner_->at(page).snapshot; known != SequenceStore::kNone) {
    owner_->slot(known).used = ++owner_->uses_;
    if (kind == SnapshotKind::kLasting) owner_->slot(known).kind = kind;
    return true;
  }
  if (!owner_->free_a_slot()) return false;
  owner_->copy_state_(slot_, owner_->free_slots_.back());
  owner_->attach(page, owner_->take_slot(), kind);
  if (kind == SnapshotKind::kRolling) rolling_ = page;
  return true;
}

void StoredSequence::drop_rolling() {
  const int32_t page = std::exchange(rolling_, SequenceStore::kNone);
  if (page == SequenceStore::kNone || owner_->at(page).snapshot == SequenceStore::kNone) return;
  const SequenceStore::Slot& slot = owner_->slot(owner_->at(page).snapshot);
  if (slot.kind == SnapshotKind::kRolling && slot.beginners == 0) owner_->drop_snapshot(page);
}

StoredSequence StoredSequence::fork() const {
  return owner_->start_behind(pages().first(static_cast<size_t>(tokens_ / kPageTokens)), root_);
}

void StoredSequence::release() {
  if (slot_ != SequenceStore::kNone) {
    owner_->free_slots_.push_back(std::exchange(slot_, SequenceStore::kNone));
  } else if (awaits_snapshot()) {
    --owner_->slot(owner_->at(last_full()).snapshot).beginners;
  }
  // From the end, so that what continues a page is given away before it.
  while (!pages_.empty()) {
    owner_->release(pages_.back());
    pages_.pop_back();
  }
  tail_.clear();
  tokens_ = known_ = 0;
  rolling_ = SequenceStore::kNone;
}

}  // namespace kt::inline engine
