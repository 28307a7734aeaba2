// A Transformer with a cache of its own.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

#include "base/pool.h"
#include "engine/runner.h"
#include "models/transformer.h"

namespace kt::inline engine {

class TransformerSteps final : public Runner {
 public:
  // The transformer, which runs on this pool, must outlive it. Error(kMemory) if pages and slots do not fit.
  TransformerSteps(Transformer& transformer, std::shared_ptr<Pool> pool, int pages, int slots = 0);

  const ModelSpec& spec() const override { return transformer_.spec(); }
  int max_tokens() const override { return transformer_.max_tokens(); }
  int threads() const override { return pool_->threads(); }
  int cache_pages() const override { return cache_->pages(); }
  int state_slots() const override { return cache_->slots(); }
  int adapters() const override { return transformer_.adapters(); }
  void copy_state(int from, int to) override { cache_->copy_slot(from, to); }
  void step(std::span<const StepSequence> sequences, std::span<float> logits) override;
  void spread(size_t n, FunctionRef<void(size_t)> work) override;

  StepTotals totals() const override;
  const ExpertCounts* expert_counts() const override { return transformer_.expert_counts(); }

 private:
  Transformer& transformer_;
  std::shared_ptr<Pool> pool_;
  Pool::Burst burst_;  // the next step comes as soon as tokens are chosen
  std::unique_ptr<SequenceCache> cache_;
  std::vector<SequenceInput> inputs_;  // of one step
  mutable std::mutex mutex_;
  StepTotals totals_;  // under mutex_
};

}  // namespace kt::inline engine
