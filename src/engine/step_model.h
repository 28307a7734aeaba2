// What the scheduler needs of a model: one step over a batch of sequences with a paged cache.
#pragma once
#include <cstdint>
#include <span>

#include "base/function_ref.h"
#include "text/tokenizer/bpe.h"

namespace kt {

// New tokens of one sequence.
struct StepSequence {
  std::span<const TokenId> tokens;  // at least one
  int position = 0;                 // of the first; those before are in the cache
  std::span<const int32_t> pages;   // of positions 0..63, 64..127, ...; room for all tokens
  enum class Logits { kNone, kLast, kAll } logits = Logits::kNone;  // of which new tokens

  size_t logit_rows() const { return logits == Logits::kAll ? tokens.size() : logits == Logits::kLast; }
};

class StepModel {
 public:
  virtual ~StepModel() = default;
  // Constant, from any thread.
  virtual int vocabulary() const = 0;   // logits in a row
  virtual int context() const = 0;      // tokens a sequence may have
  virtual int cache_pages() const = 0;  // of kPageTokens tokens

  // Writes the keys and values of all new tokens into their pages and the logits of those that want them, in
  // order: [rows, vocabulary]. Pages that sequences share are only read: new tokens go to pages of their own.
  // An exception ends the sequences of this step, not the program.
  virtual void step(std::span<const StepSequence> sequences, std::span<float> logits) = 0;

  // Calls work(i) for i in [0, n), each once, on the threads that are idle between steps. It must not throw.
  virtual void spread(size_t n, FunctionRef<void(size_t)> work) {
    for (size_t i = 0; i < n; ++i) work(i);
  }
};

}  // namespace kt
