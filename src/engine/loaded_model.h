// A model with its weights in memory, ready to run.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "engine/opened_model.h"
#include "engine/runner.h"

namespace kt::inline engine {

class LoadedModel : public DescribedModel {
 public:
  LoadedModel(LoadedModel&&) noexcept;
  ~LoadedModel();

  // To run it, with a cache of so many pages of kPageTokens. The model must outlive it; steps of two of them
  // must not overlap. Error(kMemory) if the pages do not fit. Where it keeps states, `states` says of how many
  // sequences at once, and how much memory snapshots may take; its context means nothing here.
  std::unique_ptr<Runner> make_runner(int pages, const MemoryRequest& states = {});
  const std::shared_ptr<Pool>& pool() const { return pool_; }                    // its workers on the CPU
  const std::vector<std::shared_ptr<const Gpu>>& gpus() const { return gpus_; }  // OpenedModel's
  int max_tokens() const;                                                        // of one step
  int shared_tokens() const {
    return shared_tokens_;
  }  // of one that somebody's answer is in (SchedulerOptions)
  double stored_bytes() const;  // of the weights, in the formats' own bytes

  const std::string& experts_dialect() const { return dialect_; }  // OpenedModel's
  const std::vector<std::string>& adapters() const {
    return adapters_;
  }  // their names, by StepSequence::adapter
  double load_seconds() const { return load_seconds_; }  // headers and weights, without the tokenizer

 private:
  friend class OpenedModel;
  LoadedModel(DescribedModel described, std::string dialect, std::vector<std::string> adapters,
              std::shared_ptr<Pool> pool, std::vector<std::shared_ptr<const Gpu>> gpus,
              std::unique_ptr<Transformer> transformer, int shared_tokens, double seconds);

  std::string dialect_;
  std::vector<std::string> adapters_;
  std::shared_ptr<Pool> pool_;
  std::vector<std::shared_ptr<const Gpu>> gpus_;
  std::unique_ptr<Transformer> transformer_;
  int shared_tokens_;
  double load_seconds_;
};

}  // namespace kt::inline engine
