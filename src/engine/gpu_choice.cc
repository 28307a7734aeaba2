#include "engine/gpu_choice.h"

#include <charconv>

#include "base/error.h"

namespace kt::inline engine {

GpuChoice gpu_choice_named(std::string_view value) {
  if (value == "off") return {};
  if (value == "auto") return {.kind = GpuChoice::Kind::kAuto};
  GpuChoice out{.kind = GpuChoice::Kind::kNumber};
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out.number);
  if (value.empty() || error != std::errc() || end != value.data() + value.size() || out.number < 0)
    fail("`gpu` {}: expected the number of a device, auto or off", value);
  return out;
}

}  // namespace kt::inline engine
