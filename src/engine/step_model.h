// What the scheduler needs of a model: one step over a batch of sequences with a paged cache and, where the
// model has recurrent layers, a state for each.
#pragma once
#include <cstdint>
#include <span>

#include "base/error.h"
#include "base/function_ref.h"
#include "text/tokenizer/bpe.h"

namespace kt::inline engine {

// New tokens of one sequence.
struct StepSequence {
  std::span<const TokenId> tokens;  // at least one
  int position = 0;                 // of the first; those before are in the cache
  std::span<const int32_t> pages;   // of positions 0..63, 64..127, ...; room for all tokens
  enum class Logits { kNone, kLast, kAll } logits = Logits::kNone;  // of which new tokens
  // Of its state, and of nobody else's in the step; -1 where the model has no states.
  int slot = -1;
  int adapter = -1;  // of StepModel::adapters(), the same for all of a step; -1: none

  size_t logit_rows() const { return logits == Logits::kAll ? tokens.size() : logits == Logits::kLast; }
};

class StepModel {
 public:
  virtual ~StepModel() = default;
  // Constant, from any thread.
  virtual int vocabulary() const = 0;   // logits in a row
  virtual int context() const = 0;      // tokens a sequence may have
  virtual int cache_pages() const = 0;  // of kPageTokens tokens
  // Room for so many states: what the model keeps of a sequence besides keys and values, of fixed size and
  // overwritten by every token. 0: it keeps nothing else, and no slot is ever named. No more sequences run at
  // once than there are slots; those beyond hold snapshots for beginnings that come again.
  virtual int state_slots() const { return 0; }
  // Low-rank adapters that sequences may run with, numbered from 0.
  virtual int adapters() const { return 0; }

  // Writes the keys and values of all new tokens into their pages and the logits of those that want them, in
  // order: [rows, vocabulary]. Pages that sequences share are only read: new tokens go to pages of their own.
  // A sequence's state is read from its slot and left there as the last token makes it. At position 0 the
  // state is empty whatever the slot holds: the model clears it, nobody else does. At any other position the
  // slot holds the state behind the tokens before, left by a step or put there by copy_state.
  // An exception ends the sequences of this step, not the program; their slots then hold anything.
  virtual void step(std::span<const StepSequence> sequences, std::span<float> logits) = 0;

  // The state in to_slot becomes that in from_slot, as the last step left it, for the next step to go on from.
  // Between steps, on their thread, and only of models with states. An exception ends all requests.
  virtual void copy_state(int from_slot, int to_slot) {
    KT_CHECK(false, "copy of state {} to {} in a model without states", from_slot, to_slot);
  }

  // Calls work(i) for i in [0, n), each once, on the threads that are idle between steps. It must not throw.
  virtual void spread(size_t n, FunctionRef<void(size_t)> work) {
    for (size_t i = 0; i < n; ++i) work(i);
  }
};

}  // namespace kt::inline engine
