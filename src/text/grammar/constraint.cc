// A grammar, a machine and masks made into what the scheduler asks.
#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "base/error.h"
#include "text/grammar/masks.h"

namespace kt::inline texts {
namespace {

constexpr size_t kMostSets = 6000;  // sets of threads, between tokens; a kilobyte or two each
constexpr size_t kMostSetWeight = 500'000;

// Keys of the objects that are open, for the rule that keys do not repeat: the one thing in JSON that a stack
// cannot hold. Objects are told apart by how deep they lie.
class SeenKeys {
 public:
  void read(GrammarMachine& machine, ConfigId config, uint8_t byte) {
    machine.marks(config, byte, marks_);
    for (auto& [depth, key] : open_) key.push_back(static_cast<char>(byte));
    for (const auto& [mark, depth] : marks_) {
      if (mark == Mark::kObjectBegin) seen_[depth].clear();
      if (mark == Mark::kKeyBegin) open_[depth].clear();
      if (mark != Mark::kKeyEnd) continue;
      seen_[depth].insert(open_[depth]);
      open_.erase(depth);
    }
  }
  // Whether a token completes a key that its object has, in the reading of some thread.
  bool would_repeat(GrammarMachine& machine, ConfigId config, std::string_view bytes) {
    std::vector<std::pair<int32_t, size_t>> begun;       // keys within the token
    std::vector<std::pair<int32_t, std::string>> ended;  // likewise
    std::vector<int32_t> fresh;                          // objects likewise
    for (size_t i = 0; i < bytes.size(); config = machine.step(config, static_cast<uint8_t>(bytes[i++]))) {
      machine.marks(config, static_cast<uint8_t>(bytes[i]), marks_);
      for (const auto& [mark, depth] : marks_) {
        if (mark == Mark::kObjectBegin) {
          fresh.push_back(depth);
          std::erase_if(ended, [d = depth](const auto& item) { return item.first == d; });
        }
        if (mark == Mark::kKeyBegin) begun.emplace_back(depth, i + 1);
        if (mark != Mark::kKeyEnd) continue;
        const auto from =
            std::ranges::find(begun.rbegin(), begun.rend(), depth, &std::pair<int32_t, size_t>::first);
        std::pair<int32_t, std::string> key{depth, from != begun.rend() ? "" : open_[depth]};
        const size_t begin = from != begun.rend() ? from->second : 0;
        key.second += bytes.substr(begin, i + 1 - begin);
        const bool old = std::ranges::find(fresh, depth) == fresh.end() && seen_[depth].contains(key.second);
        if (old || std::ranges::find(ended, key) != ended.end()) return true;
        ended.push_back(std::move(key));
      }
    }
    return false;
  }
  bool empty() const {
    return std::ranges::all_of(seen_, [](const auto& item) { return item.second.empty(); });
  }

 private:
  std::map<int32_t, std::set<std::string>> seen_;
  std::map<int32_t, std::string> open_;  // the keys that are being read, as far as they are
  std::vector<MarkAt> marks_;
};

// Ordinary tokens named by their ids may be spelled as well: adds their bytes beside them.
Grammar with_spelled_tokens(Grammar grammar, const Tokenizer& tokenizer) {
  if (!grammar->has_tokens) return grammar;
  for (const RuleEdge& edge : grammar->edges)
    if (edge.kind == RuleEdge::Kind::kToken && !tokenizer.token_of(edge.value))
      fail("grammar: token {} is not in the vocabulary", edge.value);
  RuleBuilder builder;
  const RuleFragment whole = builder.inlined(*grammar);
  builder.ends(whole.end);
  for (size_t from = 0; from < grammar->states.size(); ++from)
    for (uint32_t i = 0; i < grammar->states[from].count; ++i) {
      const RuleEdge& edge = grammar->edges[grammar->states[from].first + i];
      if (edge.kind != RuleEdge::Kind::kToken || tokenizer.is_special(edge.value)) continue;
      const std::string_view bytes = tokenizer.token_bytes(edge.value);
      if (!bytes.empty()) builder.empty(builder.bytes(static_cast<StateId>(from), bytes), edge.target);
    }
  return std::move(builder).finish(whole.begin);
}

class GrammarConstraint : public TokenConstraint {
 public:
  GrammarConstraint(const TokenTrie::State& trie, Grammar grammar, std::span<const TokenId> end_tokens)
      : trie_(trie),
        machine_(with_spelled_tokens(std::move(grammar), *trie.tokenizer)),
        masks_(trie, machine_),
        now_(machine_.start()),
        end_tokens_(end_tokens.begin(), end_tokens.end()) {
    std::erase_if(end_tokens_,
                  [&](TokenId id) { return id < 0 || static_cast<size_t>(id) >= trie_.tokenizer->size(); });
    std::ranges::sort(end_tokens_);
  }

  void mask(std::span<float> logits) override {
    machine_.refill();
    TokenBits bits = masks_.after(now_);
    for (TokenId id : end_tokens_) bits.clear(id);
    if (machine_.rules().has_marks) drop_repeated_keys(bits);
    for (TokenId id : machine_.tokens(now_)) bits.set(id);
    if (machine_.ends(now_))
      for (TokenId id : end_tokens_) bits.set(id);
    if (bits.none()) fail("grammar: no token of the vocabulary can come next");
    bits.keep_only(logits);
  }

  void accept(TokenId id) override {
    if (ended_) return;
    const bool is_end = std::ranges::binary_search(end_tokens_, id);
    // Ordinary tokens that are named have their bytes in the grammar too.
    const ConfigId named = machine_.step_token(now_, id);
    if (named != 0 && (is_end || trie_.tokenizer->is_special(id))) {
      now_ = named;
    } else if (is_end) {
      if (!machine_.ends(now_)) fail("grammar: the answer cannot end here, and token {} ends it", id);
      ended_ = true;
    } else {
      read_bytes(id);
    }
    if (machine_.size() <= kMostSets && machine_.weight() <= kMostSetWeight) return;
    masks_.forget();
    now_ = machine_.forget_but(now_);
  }

 private:
  void read_bytes(TokenId id) {
    const bool exists = id >= 0 && static_cast<size_t>(id) < trie_.tokenizer->size();
    if (!exists || trie_.tokenizer->is_special(id) || trie_.tokenizer->token_bytes(id).empty())
      fail("grammar: token {} cannot come here", id);
    for (char c : trie_.tokenizer->token_bytes(id)) {
      const auto byte = static_cast<uint8_t>(c);
      if (machine_.rules().has_marks) keys_.read(machine_, now_, byte);
      now_ = machine_.step(now_, byte);
    }
    if (now_ == 0) fail("grammar: token {} cannot come here", id);
  }

  // A key ends with a quote, so only tokens that have one are read ahead.
  void drop_repeated_keys(TokenBits& bits) {
    if (keys_.empty()) return;
    for (TokenId id : trie_.quoted)
      if (bits.has(id) && keys_.would_repeat(machine_, now_, trie_.tokenizer->token_bytes(id)))
        bits.clear(id);
  }

  const TokenTrie::State& trie_;
  GrammarMachine machine_;
  Masks masks_;
  ConfigId now_;
  std::vector<TokenId> end_tokens_;  // sorted
  SeenKeys keys_;
  bool ended_ = false;
};

}  // namespace

size_t grammar_size(const Grammar& grammar) { return grammar->states.size(); }

std::unique_ptr<TokenConstraint> constrain(const TokenTrie& trie, Grammar grammar,
                                           std::span<const TokenId> end_tokens) {
  KT_CHECK(grammar != nullptr);
  return std::make_unique<GrammarConstraint>(trie.state(), std::move(grammar), end_tokens);
}

}  // namespace kt::inline texts
