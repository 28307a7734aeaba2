// The runner on the CPU: a Transformer with a KV cache of its own.
#pragma once
#include <mutex>
#include <vector>

#include "engine/runner.h"
#include "models/transformer.h"

namespace kt {

class TransformerSteps final : public Runner {
 public:
  // The transformer must outlive it. Error(kMemory) if the pages do not fit.
  TransformerSteps(Transformer& transformer, int pages);

  const ModelSpec& spec() const override { return transformer_.spec(); }
  int max_tokens() const override { return transformer_.max_tokens(); }
  int threads() const override { return transformer_.pool().threads(); }
  int cache_pages() const override { return cache_.pages(); }
  void step(std::span<const StepSequence> sequences, std::span<float> logits) override;
  void spread(size_t n, FunctionRef<void(size_t)> work) override;

  StepTotals totals() const override;
  const ExpertCounts* expert_counts() const override { return transformer_.expert_counts(); }

 private:
  Transformer& transformer_;
  Pool::Burst burst_;  // the next step comes as soon as tokens are chosen
  KvCache cache_;
  std::vector<SequenceInput> inputs_;  // of one step
  mutable std::mutex mutex_;
  StepTotals totals_;  // under mutex_
};

}  // namespace kt
