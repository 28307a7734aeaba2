// How often routers chose each expert, from a file: what SGLang's recorder and kt_kernel.placement write, and what
// `expert_statistics` names. Counts alone; which experts they put on a GPU is models/expert_order.h.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline weights {

struct ExpertStatistics {
  int layers = 0, experts = 0;  // all layers of the model, those that do not route too
  std::vector<int64_t> counts;  // [layers, experts]
  int64_t at(int layer, int expert) const {
    return counts[static_cast<size_t>(layer) * static_cast<size_t>(experts) + static_cast<size_t>(expert)];
  }
  bool operator==(const ExpertStatistics&) const = default;
};

// A torch file or JSON, told apart by their first bytes: whole numbers [layers, experts], or [steps, layers, experts],
// which are summed, alone or under the key "logical_count" of a dict whose other keys are ignored. Error(kInput) in
// one line that begins with `name` otherwise. Nothing in a file is executed.
ExpertStatistics parse_expert_statistics(std::span<const std::byte> file, std::string_view name);
ExpertStatistics read_expert_statistics(const std::string& path);

}  // namespace kt::inline weights
