#include "engine/gpu_choice.h"

#include <charconv>

#include "base/error.h"

namespace kt::inline engine {

GpuChoice gpu_choice_named(std::string_view words) {
  if (words == "off") return {};
  if (words == "auto") return {.kind = GpuChoice::Kind::kAuto};
  GpuChoice out{.kind = GpuChoice::Kind::kNumber};
  const auto [end, error] = std::from_chars(words.data(), words.data() + words.size(), out.number);
  if (words.empty() || error != std::errc() || end != words.data() + words.size() || out.number < 0)
    fail("`gpu` {}: expected the number of a device, auto or off", words);
  return out;
}

}  // namespace kt::inline engine
