// What a model will take of this machine, and the speed it can have at best: computed from headers, shown by
// kt estimate and by kt run before it loads.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/opened_model.h"

namespace kt {

// What a model takes of a GPU that has all but its routed experts.
struct GpuEstimate {
  std::string name;  // "GPU 0 (NVIDIA H200)"
  uint64_t dense = 0, kv_cache = 0, workspace = 0, free = 0;
  uint64_t needed() const { return dense + kv_cache + workspace; }
  bool fits() const { return needed() <= free; }
};

struct Estimate {
  MemoryRequest use;
  MemoryPlan plan;
  uint64_t process = 0, available = 0;
  std::optional<GpuEstimate> gpu = {};
  Work one, all;  // a token of one request, and of each of them
  Rates rates;
  std::vector<int> node_ids = {};  // numbers of the NUMA nodes, where some were chosen

  uint64_t needed() const { return process + plan.peak(); }
  bool fits() const { return needed() <= available && (!gpu || gpu->fits()); }
};

Estimate estimate_model(const OpenedModel& model, const MemoryRequest& use, uint64_t max_memory,
                        const Rates& rates);
// What this machine reads and multiplies with so many threads: a few tenths of a second.
Rates measured_rates(int threads);

// "2 NUMA nodes", or "NUMA nodes 0, 2" where they were chosen; "2 thread pools on 1 NUMA node" where more were
// asked for than there are.
std::string pools_text(int pools, const std::vector<int>& node_ids);

void print_memory(const Estimate& estimate);
void print_speed(const Estimate& estimate);
nlohmann::ordered_json json_of(const Estimate& estimate);

}  // namespace kt
