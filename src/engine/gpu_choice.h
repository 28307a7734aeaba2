// Which GPUs, if any, take a model's attention, dense parts and cache, and how much of them.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/expert_order.h"

namespace kt::inline engine {

struct GpuChoice {
  // kAuto: the first device, where there is one that can and the model fits; the CPU otherwise, and a note says why.
  enum class Kind { kOff, kAuto, kNumber } kind = Kind::kOff;
  // Layers are split over them, in this order; one that is named twice is used as two.
  std::vector<int> numbers = {0};
};

// "off", "auto" or numbers of devices, "0" or "0,1"; Error otherwise.
GpuChoice gpu_choice_named(std::string_view value);

// How GPUs are used, where there are any (models/placement.h).
struct PlacementOptions {
  uint64_t gpu_memory = 0;  // all that the process may take of each; 0: as the share says
  double share = 0;         // of the card, up to 1; 0: what is free less 5 %
  ExpertWish experts = {};
  std::optional<ExpertStrategy> strategy = {};  // none: by frequency where there are statistics, else uniform
  std::string statistics = {};                  // a file of them; empty: none
  // Prompts: routed experts without a copy pass through the GPU for steps of at least so many tokens; 0: never; none:
  // from where on that is faster.
  std::optional<int> prefill_from = {};
  int prefill_chunk = 0;  // tokens of a prompt's step while nobody is answering; 0: as many as pay and fit
};

}  // namespace kt::inline engine
