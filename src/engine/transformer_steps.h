// A Transformer with a KV cache of its own, as the scheduler wants it.
#pragma once
#include <vector>

#include "engine/step_model.h"
#include "models/transformer.h"

namespace kt {

class TransformerSteps final : public StepModel {
 public:
  // The transformer must outlive it. Error(kMemory) if the pages do not fit.
  TransformerSteps(Transformer& transformer, int pages);

  int vocabulary() const override { return transformer_.spec().vocab; }
  int context() const override { return transformer_.spec().context; }
  int cache_pages() const override { return cache_.pages(); }
  void step(std::span<const StepSequence> sequences, std::span<float> logits) override;

 private:
  Transformer& transformer_;
  Pool::Burst burst_;  // the next step comes as soon as tokens are chosen
  KvCache cache_;
  std::vector<SequenceInput> inputs_;  // of one step
};

}  // namespace kt
