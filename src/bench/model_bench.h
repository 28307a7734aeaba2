// A whole model against the machine's limit: speed of prefill and decode, the limit looked at between steps, how tokens
// spread over experts, and a step taken apart.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "bench/limit_windows.h"
#include "engine/bench.h"
#include "engine/loaded_model.h"
#include "models/expert_use.h"

namespace kt::inline bench {

// One operation, of an average step.
struct PartFigures {
  std::string name;
  double calls = 0, seconds = 0;
  Limit limit = {};  // the least it could take; zero seconds: nothing that counts
};

struct PhaseFigures {
  double tokens_per_s = 0;  // median
  double fraction = 0;      // of the machine's limit, median
  Rates rates = {};         // of the machine, while this ran; medians
  std::optional<ExpertUse> experts;
  double step_seconds = 0;         // mean
  std::vector<PartFigures> parts;  // the longest first; the last is what happens between the model's steps
  double explained = 0;            // the share of a step that the parts are
};

struct ModelFigures {
  BenchCase at;
  PhaseFigures prefill, decode;
};

ModelFigures measure_model(LoadedModel& model, LimitWindows& limits, const BenchCase& at, int repeat);

}  // namespace kt::inline bench
