#include "engine/gpu_choice.h"

#include <charconv>

#include "base/error.h"

namespace kt::inline engine {
namespace {

constexpr size_t kMostGpus = 16;

}  // namespace

GpuChoice gpu_choice_named(std::string_view value) {
  if (value == "off") return {};
  if (value == "auto") return {.kind = GpuChoice::Kind::kAuto};
  GpuChoice out{.kind = GpuChoice::Kind::kNumber, .numbers = {}};
  const char* at = value.data();
  const char* const end = at + value.size();
  for (;;) {
    const auto [behind, error] = std::from_chars(at, end, out.numbers.emplace_back());
    const bool more = behind < end && *behind == ',';
    if (error != std::errc() || out.numbers.back() < 0 || (behind < end && !more) ||
        out.numbers.size() > kMostGpus)
      fail("`gpu` {}: expected the number of a device, or several as 0,1, auto or off", value);
    if (!more) return out;
    at = behind + 1;
  }
}

}  // namespace kt::inline engine
