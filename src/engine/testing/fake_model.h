// For tests: a model whose logits are a function of every token before, read back through the pages, and, if it
// has states, of every token before as its slot remembers them: a running hash that nothing else could tell.
#pragma once
#include <algorithm>
#include <limits>
#include <set>
#include <stdexcept>

#include "engine/scheduler.h"
#include "engine/sequence_store.h"

namespace kt::inline engine {

struct FakeModelOptions {
  int vocabulary = 256, context = 1024, pages = 64;
  int slots = 0;  // of states; 0: none
  int adapters = 0;
  TokenId nan_for = -1;    // a sequence that begins with it gets NaN logits ...
  size_t nan_after = 0;    // ... once it is so long
  TokenId throw_for = -1;  // a step with it throws
};

class FakeModel : public StepModel {
 public:
  explicit FakeModel(FakeModelOptions options = {})
      : options_(options), memory_(static_cast<size_t>(options.pages) * kPageTokens, -1) {
    // What was there before is nobody's state.
    for (int slot = 0; slot < options.slots; ++slot)
      states_.push_back(0xDEAD0000u + static_cast<uint64_t>(slot));
  }
  int vocabulary() const override { return options_.vocabulary; }
  int context() const override { return options_.context; }
  int cache_pages() const override { return options_.pages; }
  int state_slots() const override { return options_.slots; }
  int adapters() const override { return options_.adapters; }
  void copy_state(int from_slot, int to_slot) override {
    if (from_slot == to_slot) throw std::runtime_error("copy onto itself");
    state(to_slot) = state(from_slot);
    ++copies;
  }

  void step(std::span<const StepSequence> sequences, std::span<float> logits) override {
    size_t row = 0;
    most_sequences = std::max(most_sequences, sequences.size());
    run_states(sequences);  // first: a step that throws leaves them changed
    for (const StepSequence& sequence : sequences) {
      const size_t end = static_cast<size_t>(sequence.position) + sequence.tokens.size();
      if (end > sequence.pages.size() * kPageTokens) throw std::runtime_error("tokens outside pages");
      for (size_t i = 0; i < sequence.tokens.size(); ++i) {
        if (sequence.tokens[i] == options_.throw_for) throw std::runtime_error("the step broke");
        if (sequence.adapter != sequences.front().adapter) throw std::runtime_error("two adapters in a step");
        place(sequence, static_cast<size_t>(sequence.position) + i) =
            kept(sequence.tokens[i], sequence.adapter);
      }
    }
    for (const StepSequence& sequence : sequences) {
      const size_t end = static_cast<size_t>(sequence.position) + sequence.tokens.size();
      std::vector<TokenId> tokens;
      for (size_t i = 0; i < end; ++i) {
        tokens.push_back(place(sequence, i));
        if (end - i <= sequence.logit_rows())
          write_logits(tokens, sequence.slot < 0 ? 0 : state(sequence.slot),
                       logits.subspan(row++ * width(), width()));
      }
    }
    if (row * width() != logits.size()) throw std::runtime_error("rows");
  }

  // What pages keep of a token that ran with an adapter.
  static TokenId kept(TokenId id, int adapter) { return id + (adapter + 1) * 1'000'000; }

  // What the state behind these tokens has to be.
  uint64_t state_behind(std::span<const TokenId> tokens) const {
    return options_.slots > 0 ? advanced(kEmptyState, tokens) : 0;
  }

  void write_logits(std::span<const TokenId> tokens, uint64_t state, std::span<float> logits) const {
    uint64_t hash = 1 + state;
    for (TokenId id : tokens) hash = (hash ^ static_cast<uint32_t>(id)) * 0x9E3779B97F4A7C15u + 1;
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(4 * uniform(hash, i));
    if (tokens[0] == options_.nan_for && tokens.size() >= options_.nan_after)
      logits[3] = std::numeric_limits<float>::quiet_NaN();
  }

  size_t most_sequences = 0, copies = 0;

 private:
  static constexpr uint64_t kEmptyState = 0x5EED;
  static uint64_t advanced(uint64_t state, std::span<const TokenId> tokens) {
    for (TokenId id : tokens)
      state = (state + static_cast<uint32_t>(id) + 1) * 0xBF58476D1CE4E5B9u ^ state >> 31;
    return state;
  }
  uint64_t& state(int slot) { return states_.at(static_cast<size_t>(slot)); }
  void run_states(std::span<const StepSequence> sequences) {
    std::set<int> slots;
    for (const StepSequence& sequence : sequences) {
      if (options_.slots == 0 && sequence.slot != -1) throw std::runtime_error("a slot without states");
      if (options_.slots == 0) continue;
      if (!slots.insert(sequence.slot).second) throw std::runtime_error("two sequences in one slot");
      const uint64_t before = sequence.position == 0 ? kEmptyState : state(sequence.slot);
      state(sequence.slot) = advanced(before, sequence.tokens);
    }
  }
  size_t width() const { return static_cast<size_t>(options_.vocabulary); }
  TokenId& place(const StepSequence& sequence, size_t at) {
    return memory_[static_cast<size_t>(sequence.pages[at / kPageTokens]) * kPageTokens + at % kPageTokens];
  }
  FakeModelOptions options_;
  std::vector<TokenId> memory_;
  std::vector<uint64_t> states_;  // [slots]
};

// What one request alone gives, without pages, slots, batches or chunks.
inline std::vector<TokenId> plain_generation(const FakeModel& model, const GenerateRequest& request) {
  Sampler sampler(request.sampling, request.prompt);
  std::vector<TokenId> tokens = request.prompt, output;
  std::vector<float> logits(static_cast<size_t>(model.vocabulary()));
  while (output.size() < static_cast<size_t>(request.max_tokens) &&
         tokens.size() < static_cast<size_t>(model.context())) {
    std::vector<TokenId> kept;
    for (const TokenId id : tokens) kept.push_back(FakeModel::kept(id, request.adapter));
    model.write_logits(kept, model.state_behind(tokens), logits);
    output.push_back(sampler.pick(logits).id);
    tokens.push_back(output.back());
    if (std::ranges::find(request.end_tokens, output.back()) != request.end_tokens.end()) break;
  }
  return output;
}

// One token for each byte.
inline Tokenizer byte_tokenizer() {
  TokenizerParts parts{.name = "bytes"};
  parts.bpe.bytes = true;
  parts.decoding.byte_level = true;
  for (int byte = 0; byte < 256; ++byte)
    parts.tokens.push_back(spell_bytes(std::string(1, static_cast<char>(byte))));
  return Tokenizer(std::move(parts));
}

}  // namespace kt::inline engine
