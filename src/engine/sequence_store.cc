#include "engine/sequence_store.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/error.h"

namespace kt {

SequenceStore::SequenceStore(StoreSizes sizes) {
  if (sizes.pages < 1) fail("KV cache: expected at least 1 page, got {}", sizes.pages);
  if (sizes.buckets < 0) fail("KV cache: expected at least 0 buckets, got {}", sizes.buckets);
  const auto count = static_cast<size_t>(sizes.pages);
  pages_.resize(count);
  buckets_.assign(std::bit_ceil(sizes.buckets > 0 ? static_cast<size_t>(sizes.buckets) : 2 * count), kNone);
  for (int32_t page = sizes.pages - 1; page >= 0; --page) free_.push_back(page);
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

StoredSequence SequenceStore::start(std::span<const TokenId> tokens) {
  StoredSequence sequence(*this);
  uint64_t parent = kRoot;
  for (size_t begin = 0; begin + kPageTokens < tokens.size(); begin += kPageTokens) {
    const int32_t page = find(parent, tokens.subspan(begin, kPageTokens));
    if (page == kNone) break;
    hold(page);
    sequence.pages_.push_back(page);
    parent = at(page).serial;
  }
  sequence.tokens_ = static_cast<int>(sequence.pages_.size()) * kPageTokens;
  return sequence;
}

StoredSequence::StoredSequence(StoredSequence&& other) noexcept
    : owner_(other.owner_),
      pages_(std::exchange(other.pages_, {})),
      tail_(std::exchange(other.tail_, {})),
      tokens_(std::exchange(other.tokens_, 0)) {}

StoredSequence& StoredSequence::operator=(StoredSequence&& other) noexcept {
  if (this == &other) return *this;
  release();
  owner_ = other.owner_;
  pages_ = std::exchange(other.pages_, {});
  tail_ = std::exchange(other.tail_, {});
  tokens_ = std::exchange(other.tokens_, 0);
  return *this;
}

bool StoredSequence::reserve(int tokens) {
  const size_t wanted = (static_cast<size_t>(std::max(tokens, 0)) + kPageTokens - 1) / kPageTokens;
  if (wanted <= pages_.size()) return true;
  if (wanted - pages_.size() > static_cast<size_t>(owner_->pages_available())) return false;
  while (pages_.size() < wanted) pages_.push_back(owner_->take());
  return true;
}

void StoredSequence::commit(std::span<const TokenId> tokens) {
  KT_CHECK(static_cast<size_t>(tokens_) + tokens.size() <= pages_.size() * kPageTokens,
           "{} tokens behind {} in {} pages", tokens.size(), tokens_, pages_.size());
  while (!tokens.empty()) {
    const size_t count = std::min(tokens.size(), kPageTokens - tail_.size());
    tail_.insert(tail_.end(), tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(count));
    tokens = tokens.subspan(count);
    tokens_ += static_cast<int>(count);
    if (tail_.size() < kPageTokens) return;
    const auto index = static_cast<size_t>(tokens_ / kPageTokens - 1);
    const uint64_t parent = index == 0 ? SequenceStore::kRoot : owner_->at(pages_[index - 1]).serial;
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

StoredSequence StoredSequence::fork() const {
  StoredSequence other(*owner_);
  const auto full = static_cast<ptrdiff_t>(tokens_ / kPageTokens);
  other.pages_.assign(pages_.begin(), pages_.begin() + full);
  for (int32_t page : other.pages_) owner_->hold(page);
  other.tokens_ = static_cast<int>(full) * kPageTokens;
  return other;
}

void StoredSequence::release() {
  // From the end, so that what continues a page is given away before it.
  while (!pages_.empty()) {
    owner_->release(pages_.back());
    pages_.pop_back();
  }
  tail_.clear();
  tokens_ = 0;
}

}  // namespace kt
