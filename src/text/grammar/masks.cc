#include "text/grammar/masks.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>

namespace kt::inline texts {
namespace {

constexpr size_t kMostParts = 8;       // beyond, one walk with all threads is cheaper
constexpr uint32_t kLargeSubtree = 4;  // nodes; smaller ones are walked sooner than asked about
constexpr size_t kMostKept = 96;       // masks of either kind; 20 KB each for 150,000 tokens

}  // namespace

bool TokenBits::none() const {
  return std::ranges::all_of(words_, [](uint64_t word) { return word == 0; });
}

void TokenBits::unite(const TokenBits& other) {
  for (size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
}

void TokenBits::keep_only(std::span<float> logits) const {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  for (size_t begin = 0; begin < logits.size(); begin += 64) {
    const uint64_t word = begin / 64 < words_.size() ? words_[begin / 64] : 0;
    const auto part = logits.subspan(begin, std::min<size_t>(64, logits.size() - begin));
    if (word == 0) {
      std::ranges::fill(part, kNever);
      continue;
    }
    // Inside a string few are left out: this costs what they are.
    uint64_t never = ~word;
    if (part.size() < 64) never &= (uint64_t{1} << part.size()) - 1;
    for (; never != 0; never &= never - 1) part[static_cast<size_t>(std::countr_zero(never))] = kNever;
  }
}

const TokenBits& Masks::after(ConfigId config) {
  const auto found = bits_.find(config);
  if (found != bits_.end()) return found->second;
  if (bits_.size() >= kMostKept) bits_.clear();
  for (auto& kept : inside_)
    if (kept.size() >= kMostKept) kept.clear();
  TokenBits bits(trie_.tokenizer->size());
  add(config, bits);
  return bits_.emplace(config, std::move(bits)).first->second;
}

void Masks::forget() {
  bits_.clear();
  for (auto& kept : inside_) kept.clear();
  staying_.clear();
}

void Masks::add(ConfigId config, TokenBits& out) {
  std::map<StackId, std::vector<StateId>> parts;
  for (const Thread& thread : machine_.kernel(config)) parts[thread.stack].push_back(thread.state);
  if (parts.size() > kMostParts) {
    walk(0, config, out, nullptr);
    return;
  }
  for (const auto& [stack, states] : parts) {
    const ConfigId local = machine_.local(states, static_cast<int32_t>(trie_.deepest));
    const Inside& part = inside(local, stack != 0);
    if (machine_.too_deep(stack, part.reach)) {
      walk(0, config, out, nullptr);
      return;
    }
    out.unite(part.tokens);
    if (part.exits.empty()) continue;
    const ConfigId next = machine_.returned(stack);
    for (uint32_t node : part.exits) {
      if (node == 0)
        add(next, out);
      else
        walk(node, next, out, nullptr);
    }
  }
}

const Masks::Inside& Masks::inside(ConfigId local, bool wants_exits) {
  auto& kept = inside_[wants_exits];
  const auto found = kept.find(local);
  if (found != kept.end()) return found->second;
  Inside part{.tokens = TokenBits(trie_.tokenizer->size()), .exits = {}};
  if (wants_exits && machine_.ends(local)) part.exits.push_back(0);
  part.reach = walk(0, local, part.tokens, wants_exits ? &part.exits : nullptr);
  return kept.emplace(local, std::move(part)).first->second;
}

uint32_t Masks::find_staying(ConfigId config) {
  uint32_t classes = ~uint32_t{0};
  for (int byte = 0; byte < 256; ++byte) {
    const uint32_t bit = uint32_t{1} << byte_class(static_cast<uint8_t>(byte));
    if ((classes & bit) && machine_.step(config, static_cast<uint8_t>(byte)) != config) classes &= ~bit;
  }
  if (staying_.size() < machine_.size()) staying_.resize(machine_.size());
  return staying_[static_cast<size_t>(config)] = classes;
}

// Adds the tokens below a node that the machine can read from there on; `config` is what it is at the node.
int32_t Masks::walk(uint32_t from, ConfigId config, TokenBits& out, std::vector<uint32_t>* exits) {
  const auto* nodes = trie_.nodes.data();
  path_.resize(trie_.deepest + 1);
  path_[nodes[from].depth] = config;
  const uint32_t end = nodes[from].after;
  ConfigId last = config;
  int32_t reach = machine_.reach(config);
  for (uint32_t at = from + 1; at < end;) {
    const auto& node = nodes[at];
    const ConfigId now = path_[node.depth - 1u];
    if (now != last) reach = std::max(reach, machine_.reach(last = now));
    const ConfigId next = machine_.step(now, node.byte);
    if (next == 0) {
      at = node.after;
      continue;
    }
    path_[node.depth] = next;
    // All bytes below leave the machine where it is, as letters do inside a string.
    if (node.after - at > kLargeSubtree && (node.below & ~staying(next)) == 0 &&
        !(exits && machine_.ends(next))) {
      for (uint32_t i = node.tokens; i < nodes[node.after].tokens; ++i) out.set(trie_.ids[i]);
      reach = std::max(reach, machine_.reach(next));
      at = node.after;
      continue;
    }
    for (uint32_t i = node.tokens; i < nodes[at + 1].tokens; ++i) out.set(trie_.ids[i]);
    if (exits && nodes[at].after > at + 1 && machine_.ends(next)) exits->push_back(at);
    ++at;
  }
  return reach;
}

}  // namespace kt::inline texts
