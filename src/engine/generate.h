// One completion from a loaded model, for programs that run one at a time.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/loaded_model.h"
#include "engine/sampler.h"
#include "models/expert_use.h"

namespace kt::inline engine {

struct GenerateOptions {
  int max_tokens = 256;
  SamplingOptions sampling;
  std::vector<std::string> stops;
  bool ignore_end = false;  // go on past the tokens that end a turn
  int adapter = -1;         // of LoadedModel::adapters(); -1: none
};

struct Generation {
  std::vector<int32_t> prompt, tokens;
  std::string text;
  std::string finish;                              // "stop" or "length"
  double prefill_seconds = 0, decode_seconds = 0;  // decode: from the first token to the last
  int decode_steps = 0;                            // in that time: a token each, one that ends the turn too
  Work prefill_work, decode_work;                  // that the model did meanwhile
  std::optional<ExpertUse> experts = {};           // none: no layer routes
};

// `emit` gets the text as it comes, whole characters only. Errors: an empty prompt, a prompt that leaves no
// room in the context (both numbers), NaN logits.
Generation generate(LoadedModel& model, std::vector<int32_t> prompt, const GenerateOptions& options,
                    const std::function<void(std::string_view)>& emit = {});

}  // namespace kt::inline engine
