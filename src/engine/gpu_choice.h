// Which GPU, if any, takes a model's attention, dense parts and cache.
#pragma once
#include <string_view>

namespace kt {

struct GpuChoice {
  // kAuto: the first device, where there is one that can and the model fits; the CPU otherwise, and a note says why.
  enum class Kind { kOff, kAuto, kNumber } kind = Kind::kOff;
  int number = 0;
};

// "off", "auto" or the number of a device; Error otherwise.
GpuChoice gpu_choice_named(std::string_view words);

}  // namespace kt
