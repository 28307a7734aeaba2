// A Transformer with a KV cache of its own, as the scheduler wants it.
#pragma once
#include <mutex>
#include <vector>

#include "engine/step_model.h"
#include "models/transformer.h"

namespace kt {

// What all steps so far did.
struct StepTotals {
  Work work;
  double seconds = 0;
  uint64_t steps = 0;
  uint64_t prefill_tokens = 0, decode_tokens = 0;  // fed: in chunks of several, and one by one
};

class TransformerSteps final : public StepModel {
 public:
  // The transformer must outlive it. Error(kMemory) if the pages do not fit.
  TransformerSteps(Transformer& transformer, int pages);

  int vocabulary() const override { return transformer_.spec().vocab; }
  int context() const override { return transformer_.spec().context; }
  int cache_pages() const override { return cache_.pages(); }
  void step(std::span<const StepSequence> sequences, std::span<float> logits) override;

  void spread(size_t n, FunctionRef<void(size_t)> work) override;

  StepTotals totals() const;  // from any thread

 private:
  Transformer& transformer_;
  Pool::Burst burst_;  // the next step comes as soon as tokens are chosen
  KvCache cache_;
  std::vector<SequenceInput> inputs_;  // of one step
  mutable std::mutex mutex_;
  StepTotals totals_;  // under mutex_
};

}  // namespace kt
