// What a model will take of this machine, and the speed it can have at best: computed from headers, shown by
// kt estimate and by kt run before it loads.
#pragma once
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "engine/opened_model.h"

namespace kt::inline cli {

struct Estimate {
  MemoryRequest use;
  MemoryPlan plan;
  uint64_t process = 0, available = 0;
  std::optional<Placement> placement = {};  // beside a GPU, where the model fits it
  std::string gpu_problem = {};             // why it does not
  Work one, all;                            // a token of one request, and of each of them
  Rates rates;
  std::string rules = {};  // what rules decide, as a table and as JSON; empty: there are none
  nlohmann::ordered_json rules_json = {};
  nlohmann::ordered_json placement_json = {};  // OpenedModel's; null: it does not fit
  std::vector<int> node_ids = {};              // numbers of the NUMA nodes, where some were chosen

  uint64_t needed() const { return process + plan.peak(); }
  bool fits() const { return needed() <= available && gpu_problem.empty(); }
  bool has_gpu() const { return placement || !gpu_problem.empty(); }
};

// A model whose `gpu` is auto and does not fit leaves it (OpenedModel::settle).
Estimate estimate_model(OpenedModel& model, const MemoryRequest& use, uint64_t max_memory,
                        const Rates& rates);
// What this machine reads and multiplies with so many threads: a few tenths of a second.
Rates measured_rates(int threads);

// "2 NUMA nodes", or "NUMA nodes 0, 2" where they were chosen; "2 thread pools on 1 NUMA node" where more were
// asked for than there are.
std::string pools_text(int pools, const std::vector<int>& node_ids);

// `verb`: whose flags are meant where an option is named.
void print_memory(const Estimate& estimate, const CLI::App& verb);
void print_speed(const Estimate& estimate);
nlohmann::ordered_json json_of(const Estimate& estimate);

}  // namespace kt::inline cli
