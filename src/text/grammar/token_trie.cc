#include "text/grammar/token_trie.h"

#include <algorithm>

namespace kt::inline texts {
namespace {

constexpr size_t kLongestToken = 4096;  // longer ones cannot come

}  // namespace

TokenTrie::TokenTrie(const Tokenizer& tokenizer) {
  auto state = std::make_unique<State>();
  state->tokenizer = &tokenizer;
  std::vector<std::pair<std::string_view, TokenId>> sorted;
  for (size_t i = 0; i < tokenizer.size(); ++i) {
    const auto id = static_cast<TokenId>(i);
    const std::string_view bytes = tokenizer.token_bytes(id);
    if (bytes.empty() || bytes.size() > kLongestToken || tokenizer.is_special(id)) continue;
    sorted.emplace_back(bytes, id);
    if (bytes.find('"') != std::string_view::npos) state->quoted.push_back(id);
  }
  std::ranges::sort(sorted);

  std::vector<uint32_t> path{0};  // the nodes of the last token
  state->nodes.emplace_back();
  const auto leave = [&](size_t depth) {
    for (; path.size() > depth + 1; path.pop_back()) {
      State::Node& node = state->nodes[path.back()];
      State::Node& parent = state->nodes[path[path.size() - 2]];
      node.after = static_cast<uint32_t>(state->nodes.size());
      parent.below = static_cast<uint16_t>(parent.below | node.below | 1u << byte_class(node.byte));
    }
  };
  std::string_view last;
  for (const auto& [bytes, id] : sorted) {
    const auto shared = static_cast<size_t>(std::ranges::mismatch(bytes, last).in1 - bytes.begin());
    leave(shared);
    for (size_t i = shared; i < bytes.size(); ++i) {
      path.push_back(static_cast<uint32_t>(state->nodes.size()));
      state->nodes.push_back({.tokens = static_cast<uint32_t>(state->ids.size()),
                              .depth = static_cast<uint16_t>(i + 1),
                              .byte = static_cast<uint8_t>(bytes[i])});
    }
    state->ids.push_back(id);
    state->deepest = std::max(state->deepest, static_cast<uint32_t>(bytes.size()));
    last = bytes;
  }
  leave(0);
  state->nodes[0].after = static_cast<uint32_t>(state->nodes.size());
  state->nodes.push_back({.tokens = static_cast<uint32_t>(state->ids.size())});
  state_ = std::move(state);
}

TokenTrie::~TokenTrie() = default;

}  // namespace kt::inline texts
