#include "text/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <queue>

#include "base/text.h"
#include "base/utf8.h"

namespace kt {
namespace {

// Up to here scanning for the lowest rank beats a heap.
constexpr size_t kFew = 40;
// Words of natural text repeat; what is longer or comes after so many does not pay.
constexpr size_t kLongestCached = 48;
constexpr size_t kMostCached = size_t{1} << 16;
constexpr uint32_t kNoRank = 0xFFFFFFFF;

uint64_t pair_key(TokenId left, TokenId right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}
size_t pair_hash(uint64_t pair) { return static_cast<size_t>((pair * 0x9E3779B97F4A7C15u) >> 24); }

std::string byte_name(int byte) {
  constexpr std::string_view kDigits = "0123456789ABCDEF";
  return std::string("<0x") + kDigits[byte >> 4] + kDigits[byte & 15] + ">";
}

}  // namespace

Bpe::Bpe(std::unordered_map<std::string, TokenId> ids, const std::vector<Merge>& merges, BpeOptions options)
    : ids_(std::move(ids)), options_(options) {
  for (int byte = 0; byte < 256; ++byte)
    byte_ids_[byte] =
        id_of(options_.bytes ? std::string(1, static_cast<char>(byte)) : byte_name(byte)).value_or(-1);
  slots_.resize(std::bit_ceil(2 * merges.size() + 2));
  for (const Merge& merge : merges) {
    const uint64_t pair = pair_key(merge.left, merge.right);
    size_t at = pair_hash(pair) & (slots_.size() - 1);
    while (slots_[at].pair != kFree && slots_[at].pair != pair) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = {pair, merge.rank, merge.result};  // of a repeated merge the last counts, as in tokenizers
  }
}

const Bpe::Slot* Bpe::find(TokenId left, TokenId right) const {
  const uint64_t pair = pair_key(left, right);
  size_t at = pair_hash(pair) & (slots_.size() - 1);
  while (slots_[at].pair != pair) {
    if (slots_[at].pair == kFree) return nullptr;
    at = (at + 1) & (slots_.size() - 1);
  }
  return &slots_[at];
}

std::optional<TokenId> Bpe::id_of(std::string_view part) const {
  const auto found = ids_.find(std::string(part));
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

void Bpe::first_symbols(std::string_view word, std::vector<TokenId>& out) const {
  out.clear();
  if (options_.bytes) {
    for (char c : word)
      if (const TokenId id = byte_ids_[static_cast<uint8_t>(c)]; id >= 0) out.push_back(id);
    return;
  }
  bool unknown_open = false;
  for (size_t at = 0; at < word.size();) {
    const size_t begin = at;
    next_code_point(word, at);
    const std::string_view character = word.substr(begin, at - begin);
    if (const std::optional<TokenId> id = id_of(character)) {
      out.push_back(*id);
      unknown_open = false;
      continue;
    }
    const auto has_token = [&](char c) { return byte_ids_[static_cast<uint8_t>(c)] >= 0; };
    if (options_.byte_fallback && std::ranges::all_of(character, has_token)) {
      for (char c : character) out.push_back(byte_ids_[static_cast<uint8_t>(c)]);
      unknown_open = false;
      continue;
    }
    if (options_.unknown && !(unknown_open && options_.fuse_unknown)) out.push_back(*options_.unknown);
    unknown_open = options_.unknown.has_value();
  }
}

void Bpe::merge_few(Scratch& scratch) const {
  std::vector<TokenId>& symbols = scratch.symbols_;
  std::vector<uint32_t>& ranks = scratch.ranks_;  // ranks[i]: of symbols i and i + 1
  const auto rank_at = [&](size_t i) {
    const Slot* slot = find(symbols[i], symbols[i + 1]);
    return slot ? slot->rank : kNoRank;
  };
  ranks.clear();
  for (size_t i = 0; i + 1 < symbols.size(); ++i) ranks.push_back(rank_at(i));
  while (!ranks.empty()) {
    const auto least = std::ranges::min_element(ranks);  // the leftmost of equals
    if (*least == kNoRank) return;
    const size_t i = static_cast<size_t>(least - ranks.begin());
    symbols[i] = find(symbols[i], symbols[i + 1])->result;
    symbols.erase(symbols.begin() + i + 1);
    ranks.erase(ranks.begin() + i);
    if (i > 0) ranks[i - 1] = rank_at(i - 1);
    if (i < ranks.size()) ranks[i] = rank_at(i);
  }
}

void Bpe::merge_many(std::vector<TokenId>& symbols) const {
  struct Candidate {
    uint32_t rank;
    uint32_t at;
    TokenId left, right;
    bool operator<(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : at > other.at;  // the top is the lowest, then leftmost
    }
  };
  const auto count = static_cast<uint32_t>(symbols.size());
  std::vector<uint32_t> next(count), previous(count);
  for (uint32_t i = 0; i < count; ++i) next[i] = i + 1, previous[i] = i - 1;
  std::priority_queue<Candidate> queue;
  const auto offer = [&](uint32_t at) {
    if (at >= count || next[at] >= count) return;
    if (const Slot* slot = find(symbols[at], symbols[next[at]]))
      queue.push({slot->rank, at, symbols[at], symbols[next[at]]});
  };
  for (uint32_t i = 0; i < count; ++i) offer(i);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    const uint32_t right = next[best.at];
    if (symbols[best.at] != best.left || right >= count || symbols[right] != best.right)
      continue;  // merged since
    symbols[best.at] = find(best.left, best.right)->result;
    symbols[right] = -1;
    next[best.at] = next[right];
    if (next[right] < count) previous[next[right]] = best.at;
    offer(previous[best.at]);
    offer(best.at);
  }
  std::erase(symbols, -1);
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<TokenId>& out) const {
  const bool caches = word.size() <= kLongestCached;
  if (caches) {
    if (const auto found = scratch.words_.find(word); found != scratch.words_.end()) {
      const auto begin = scratch.cached_.begin() + found->second.begin;
      out.insert(out.end(), begin, begin + found->second.count);
      return;
    }
  }
  std::optional<TokenId> whole;
  if (options_.ignore_merges) whole = id_of(word);
  if (whole) {
    scratch.symbols_.assign(1, *whole);
  } else {
    first_symbols(word, scratch.symbols_);
    if (scratch.symbols_.size() <= kFew)
      merge_few(scratch);
    else
      merge_many(scratch.symbols_);
  }
  out.insert(out.end(), scratch.symbols_.begin(), scratch.symbols_.end());
  if (!caches || scratch.words_.size() >= kMostCached) return;
  scratch.words_.emplace(word, Scratch::Place{static_cast<uint32_t>(scratch.cached_.size()),
                                              static_cast<uint32_t>(scratch.symbols_.size())});
  scratch.cached_.insert(scratch.cached_.end(), scratch.symbols_.begin(), scratch.symbols_.end());
}

}  // namespace kt
