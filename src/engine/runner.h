// A model that is ready to run, wherever its layers are: steps for the scheduler, and what programs that show
// or measure them ask. LoadedModel::make_runner is the one place that knows which kind it is.
#pragma once
#include <cstdint>
#include <vector>

#include "engine/step_model.h"
#include "models/expert_counts.h"
#include "models/spec.h"
#include "nn/step_parts.h"
#include "nn/work.h"

namespace kt::inline engine {

// What all steps of a runner so far did.
struct StepTotals {
  Work work;
  double seconds = 0;
  uint64_t steps = 0;
  uint64_t prefill_tokens = 0, decode_tokens = 0;  // fed: in chunks of several, and one by one
  std::vector<StepPart> parts;  // of the seconds; also those of other runners of the model, before this one
};

class Runner : public StepModel {
 public:
  // Constant, from any thread.
  virtual const ModelSpec& spec() const = 0;
  virtual int max_tokens() const = 0;  // of one step, all sequences together
  virtual int threads() const = 0;     // workers on the CPU
  int vocabulary() const final { return spec().vocab; }
  int context() const final { return spec().context; }

  // From any thread, also while a step runs.
  virtual StepTotals totals() const = 0;
  // Choices of the routers, expert by expert; null for a dense model.
  virtual const ExpertCounts* expert_counts() const = 0;
};

}  // namespace kt::inline engine
