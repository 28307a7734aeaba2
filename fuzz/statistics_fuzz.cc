// Any bytes as statistics of experts: an Error of one line, or as many counts as the table has, none below zero.
#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "weights/expert_statistics.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const kt::ExpertStatistics found =
        kt::parse_expert_statistics(std::as_bytes(std::span(data, size)), "input");
    if (found.layers < 1 || found.experts < 1) std::abort();
    if (found.counts.size() != static_cast<size_t>(found.layers) * static_cast<size_t>(found.experts))
      std::abort();
    for (const int64_t count : found.counts)
      if (count < 0) std::abort();
  } catch (const kt::Error& error) {
    const std::string_view line = error.what();
    if (!line.starts_with("input: ") || line.find('\n') != line.npos || line.size() > 2000) std::abort();
  }
  return 0;
}
