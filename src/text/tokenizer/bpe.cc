#include "text/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <queue>

#include "base/error.h"
#include "base/text.h"
#include "base/utf8.h"

namespace kt::inline texts {
namespace {

// Up to here scanning for the lowest rank beats a heap.
constexpr size_t kFew = 40;
// Words of natural text repeat; what is longer or comes after so many does not pay.
constexpr size_t kLongestCached = 48;
constexpr size_t kMostCached = size_t{1} << 16;
// More pairs of characters than any script has in words: 32 MB of them.
constexpr size_t kMostJoints = size_t{1} << 21;

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
    : texts_(std::move(parts.texts)), ranks_(std::move(parts.ranks)), options_(parts.options) {
  KT_CHECK(ranks_.empty() || ranks_.size() >= texts_.size());
  for (int byte = 0; byte < 256; ++byte)
    byte_ids_[byte] =
        texts_.id_of(options_.bytes ? std::string(1, static_cast<char>(byte)) : byte_name(byte)).value_or(-1);
  for (const TokenId id : parts.unused) {
    if (static_cast<size_t>(id) >= unused_.size()) unused_.resize(static_cast<size_t>(id) + 1);
    unused_[static_cast<size_t>(id)] = true;
  }
  // Whole words count where a word may be a token, and where the history of merges does.
  cuts_ = !options_.bytes && !options_.ignore_merges && unused_.empty();
  if (ranks_.empty()) {
    index_merges(parts.merges);
    if (cuts_) index_joints(parts.merges);
  } else if (!options_.bytes) {
    index_characters();
  }
}

void Bpe::index_merges(const std::vector<Merge>& merges) {
  slots_.resize(std::bit_ceil(2 * merges.size() + 2));
  for (const Merge& merge : merges) {
    const uint64_t pair = pair_key(merge.left, merge.right);
    size_t at = pair_hash(pair) & (slots_.size() - 1);
    while (slots_[at].pair != kFree && slots_[at].pair != pair) at = (at + 1) & (slots_.size() - 1);
    slots_[at] = {pair, {merge.rank, merge.result}};  // of a repeated merge the last counts, as in tokenizers
  }
}

// False where there are so many that a text is not cut any more.
bool Bpe::add_joint(CodePoint left, CodePoint right) {
  joints_.add(left, right);
  if (joints_.size() > kMostJoints) {
    cuts_ = false;
    joints_ = {};
  }
  return cuts_;
}

// The joints of merges.
void Bpe::index_joints(const std::vector<Merge>& merges) {
  struct Ends {
    CodePoint first = 0, last = 0;
  };
  std::vector<Ends> ends(texts_.size());  // by token
  std::vector<CodeRange> characters;
  for (size_t id = 0; id < texts_.size(); ++id) {
    const std::string_view text = texts_.text_of(static_cast<TokenId>(id));
    if (text.empty()) continue;
    size_t at = 0;
    const CodePoint first = next_code_point(text, at);
    if (at == text.size()) characters.push_back({first, first});
    at = previous_character(text, text.size());
    ends[id] = {first, next_code_point(text, at)};
  }
  characters_ = CodeSet(std::move(characters));
  for (const Merge& merge : merges)
    if (!add_joint(ends[static_cast<size_t>(merge.left)].last, ends[static_cast<size_t>(merge.right)].first))
      return;
}

// With ranks: the joints are all neighbours within tokens, and characters that are no tokens get ids behind them.
void Bpe::index_characters() {
  std::vector<bool> seen(kLastCodePoint + 1);
  std::vector<CodePoint> within;  // tokens, each once
  std::vector<CodeRange> characters;
  const auto see = [&](CodePoint code) {
    if (!seen[code]) within.push_back(code);
    seen[code] = true;
  };
  for (size_t id = 0; id < texts_.size(); ++id) {
    const std::string_view text = texts_.text_of(static_cast<TokenId>(id));
    if (text.empty()) continue;
    size_t at = 0;
    CodePoint left = next_code_point(text, at);
    if (at == text.size()) characters.push_back({left, left});
    if (ranks_[id] == kNoRank) continue;
    see(left);
    while (at < text.size()) {
      const CodePoint right = next_code_point(text, at);
      see(right);
      if (cuts_) add_joint(left, right);
      left = right;
    }
  }
  characters_ = CodeSet(std::move(characters));
  auto next = static_cast<TokenId>(ranks_.size());
  for (const CodePoint code : within)
    if (const std::string character = to_utf8(code); !texts_.id_of(character)) texts_.add(next++, character);
}

bool Bpe::may_join(CodePoint left, CodePoint right) const {
  if (joints_.contains(left, right)) return true;
  return !characters_.contains(left) && !characters_.contains(right);  // may share one unknown token
}

Bpe::Joined Bpe::find(TokenId left, TokenId right) const {
  if (!ranks_.empty()) {
    const std::optional<TokenId> both = texts_.id_of(left, right);
    const auto takes_part = [&](TokenId id) {
      return is_nameless(id) || ranks_[static_cast<size_t>(id)] != kNoRank;
    };
    if (!both || !takes_part(left) || !takes_part(right)) return {};
    return {ranks_[static_cast<size_t>(*both)], *both};
  }
  const uint64_t pair = pair_key(left, right);
  size_t at = pair_hash(pair) & (slots_.size() - 1);
  while (slots_[at].pair != pair) {
    if (slots_[at].pair == kFree) return {};
    at = (at + 1) & (slots_.size() - 1);
  }
  return slots_[at].joined;
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
    if (const std::optional<TokenId> id = texts_.id_of(character)) {
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
  const auto rank_at = [&](size_t i) { return find(symbols[i], symbols[i + 1]).rank; };
  ranks.clear();
  for (size_t i = 0; i + 1 < symbols.size(); ++i) ranks.push_back(rank_at(i));
  while (!ranks.empty()) {
    const auto least = std::ranges::min_element(ranks);  // the leftmost of equals
    if (*least == kNoRank) return;
    const size_t i = static_cast<size_t>(least - ranks.begin());
    symbols[i] = find(symbols[i], symbols[i + 1]).result;
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
    const Joined joined = find(symbols[at], symbols[next[at]]);
    if (joined.rank == kNoRank) return;
    queue.push({joined.rank, at, symbols[at], symbols[next[at]]});
    if (is_unused(joined.result)) halves[joined.result] = {symbols[at], symbols[next[at]]};
  };
  for (uint32_t i = 0; i < count; ++i) offer(i);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    const uint32_t right = next[best.at];
    if (symbols[best.at] != best.left || right >= count || symbols[right] != best.right)
      continue;  // merged since
    symbols[best.at] = find(best.left, best.right).result;
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
    if (is_nameless(id)) {
      if (append_bytes(texts_.text_of(id), out) || !options_.unknown) continue;
      id = *options_.unknown;
    }
    const bool joins = options_.fuse_unknown && id == options_.unknown && !out.empty() && out.back() == id;
    if (!joins) out.push_back(id);
  }
  symbols = std::move(out);
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<TokenId>& out) const {
  if (!cuts_ || word.size() <= kLongestCached) return encode_part(word, scratch, out);
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
  if (options_.ignore_merges) whole = texts_.id_of(word);
  if (whole) {
    scratch.symbols_.assign(1, *whole);
  } else {
    first_symbols(word, scratch.symbols_);
    if (scratch.symbols_.size() <= kFew && unused_.empty()) {
      merge_few(scratch);
    } else if (const Halves halves = merge_many(scratch.symbols_); !halves.empty()) {
      take_apart(halves, scratch.symbols_);
    }
    if (!ranks_.empty() && texts_.size() > ranks_.size()) leave_nameless(scratch.symbols_);
  }
  out.insert(out.end(), scratch.symbols_.begin(), scratch.symbols_.end());
  if (!caches || scratch.words_.size() >= kMostCached) return;
  scratch.words_.emplace(word, Scratch::Place{static_cast<uint32_t>(scratch.cached_.size()),
                                              static_cast<uint32_t>(scratch.symbols_.size())});
  scratch.cached_.insert(scratch.cached_.end(), scratch.symbols_.begin(), scratch.symbols_.end());
}

}  // namespace kt::inline texts
