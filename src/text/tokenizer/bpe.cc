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

Bpe::Bpe(BpeParts parts)
    : ids_(std::move(parts.ids)),
      nameless_(std::move(parts.nameless)),
      first_nameless_(parts.first_nameless),
      options_(parts.options) {
  for (int byte = 0; byte < 256; ++byte)
    byte_ids_[byte] =
        id_of(options_.bytes ? std::string(1, static_cast<char>(byte)) : byte_name(byte)).value_or(-1);
  for (size_t i = 0; i < nameless_.size(); ++i)
    ids_.emplace(nameless_[i], first_nameless_ + static_cast<TokenId>(i));
  for (const TokenId id : parts.unused) {
    if (static_cast<size_t>(id) >= unused_.size()) unused_.resize(static_cast<size_t>(id) + 1);
    unused_[static_cast<size_t>(id)] = true;
  }
  slots_.resize(std::bit_ceil(2 * parts.merges.size() + 2));
  for (const Merge& merge : parts.merges) {
    const uint64_t pair = pair_key(merge.left, merge.right);
    size_t at = pair_hash(pair) & (slots_.size() - 1);
    while (slots_[at].pair != kFree && slots_[at].pair != pair) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = {pair, merge.rank, merge.result};  // of a repeated merge the last counts, as in tokenizers
  }
  // Whole words count where a word may be a token, and where the history of merges does.
  if (!options_.bytes && !options_.ignore_merges && unused_.empty()) index_joints(parts.merges);
}

void Bpe::index_joints(const std::vector<Merge>& merges) {
  struct Ends {
    CodePoint first = 0, last = 0;
  };
  std::vector<Ends> ends(static_cast<size_t>(first_nameless_) + nameless_.size());  // by symbol
  std::vector<CodeRange> characters;
  for (const auto& [text, id] : ids_) {
    if (text.empty()) continue;
    size_t at = 0;
    const CodePoint first = next_code_point(text, at);
    if (at == text.size() && id < first_nameless_) characters.push_back({first, first});
    at = previous_character(text, text.size());
    ends[static_cast<size_t>(id)] = {first, next_code_point(text, at)};
  }
  characters_ = CodeSet(std::move(characters));
  joints_.assign(std::bit_ceil(2 * merges.size() + 2), kFree);
  for (const Merge& merge : merges) {
    const Ends left = ends[static_cast<size_t>(merge.left)], right = ends[static_cast<size_t>(merge.right)];
    const uint64_t joint = uint64_t{left.last} << 32 | right.first;
    size_t at = pair_hash(joint) & (joints_.size() - 1);
    while (joints_[at] != kFree && joints_[at] != joint) at = (at + 1) & (joints_.size() - 1);
    joints_[at] = joint;
  }
}

bool Bpe::may_join(CodePoint left, CodePoint right) const {
  const uint64_t joint = uint64_t{left} << 32 | right;
  size_t at = pair_hash(joint) & (joints_.size() - 1);
  for (; joints_[at] != kFree; at = (at + 1) & (joints_.size() - 1))
    if (joints_[at] == joint) return true;
  return !characters_.contains(left) && !characters_.contains(right);  // may share one unknown token
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
    if (append_bytes(character, out)) {
      unknown_open = false;
      continue;
    }
    if (options_.unknown && !(unknown_open && options_.fuse_unknown)) out.push_back(*options_.unknown);
    unknown_open = options_.unknown.has_value();
  }
}

bool Bpe::append_bytes(std::string_view character, std::vector<TokenId>& out) const {
  const auto has_token = [&](char c) { return byte_ids_[static_cast<uint8_t>(c)] >= 0; };
  if (!options_.byte_fallback || !std::ranges::all_of(character, has_token)) return false;
  for (char c : character) out.push_back(byte_ids_[static_cast<uint8_t>(c)]);
  return true;
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

Bpe::Halves Bpe::merge_many(std::vector<TokenId>& symbols) const {
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
  Halves halves;
  const auto offer = [&](uint32_t at) {
    if (at >= count || next[at] >= count) return;
    const Slot* const slot = find(symbols[at], symbols[next[at]]);
    if (slot == nullptr) return;
    queue.push({slot->rank, at, symbols[at], symbols[next[at]]});
    if (static_cast<size_t>(slot->result) < unused_.size() && unused_[static_cast<size_t>(slot->result)])
      halves[slot->result] = {symbols[at], symbols[next[at]]};
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
  return halves;
}

void Bpe::take_apart(const Halves& halves, std::vector<TokenId>& symbols) const {
  std::vector<TokenId> out, todo;
  for (const TokenId symbol : symbols) {
    todo.assign(1, symbol);
    while (!todo.empty()) {
      const TokenId id = todo.back();
      todo.pop_back();
      const auto found = halves.find(id);
      if (found == halves.end()) {
        out.push_back(id);
      } else {
        todo.push_back(found->second.second);
        todo.push_back(found->second.first);
      }
    }
  }
  symbols = std::move(out);
}

void Bpe::leave_nameless(std::vector<TokenId>& symbols) const {
  std::vector<TokenId> out;
  for (TokenId id : symbols) {
    if (id >= first_nameless_) {
      if (append_bytes(nameless_[static_cast<size_t>(id - first_nameless_)], out) || !options_.unknown)
        continue;
      id = *options_.unknown;
    }
    const bool joins = options_.fuse_unknown && id == options_.unknown && !out.empty() && out.back() == id;
    if (!joins) out.push_back(id);
  }
  symbols = std::move(out);
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<TokenId>& out) const {
  if (joints_.empty() || word.size() <= kLongestCached) return encode_part(word, scratch, out);
  // Where no token reaches across, merges on either side do not see each other: parts are words of their own,
  // short ones, which repeat. A text that nothing else cuts would be one long word.
  size_t begin = 0, at = 0;
  CodePoint left = next_code_point(word, at);
  while (at < word.size()) {
    const size_t joint = at;
    const CodePoint right = next_code_point(word, at);
    if (!may_join(left, right)) {
      encode_part(word.substr(begin, joint - begin), scratch, out);
      begin = joint;
    }
    left = right;
  }
  encode_part(word.substr(begin), scratch, out);
}

void Bpe::encode_part(std::string_view word, Scratch& scratch, std::vector<TokenId>& out) const {
  const bool caches = word.size() <= kLongestCached && unused_.empty();
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
    if (scratch.symbols_.size() <= kFew && unused_.empty()) {
      merge_few(scratch);
    } else if (const Halves halves = merge_many(scratch.symbols_); !halves.empty()) {
      take_apart(halves, scratch.symbols_);
    }
    if (!nameless_.empty()) leave_nameless(scratch.symbols_);
  }
  out.insert(out.end(), scratch.symbols_.begin(), scratch.symbols_.end());
  if (!caches || scratch.words_.size() >= kMostCached) return;
  scratch.words_.emplace(word, Scratch::Place{static_cast<uint32_t>(scratch.cached_.size()),
                                              static_cast<uint32_t>(scratch.symbols_.size())});
  scratch.cached_.insert(scratch.cached_.end(), scratch.symbols_.begin(), scratch.symbols_.end());
}

}  // namespace kt
