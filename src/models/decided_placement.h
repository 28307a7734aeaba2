// What of a model lies where and in which format, whoever decided it: rules, flags or the automatic plan. A value, so
// that two of them can be compared; written back as rules it is read as the same value again.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "models/placed_rules.h"
#include "models/placement.h"

namespace kt::inline models {

struct DecidedModule {
  std::string name;
  ModuleKind kind = ModuleKind::kModel;
  int layer = -1;
  std::string device = {};  // "cpu", "cuda:0", "host" of the embedding
  // Of its matrix, or of experts' gate, up and down: what it is rounded to, "stored" where it is not.
  std::vector<std::string> formats = {};
  bool rounds_again = false;     // what has few bits already, or fp8 of other blocks
  std::vector<int> on_gpu = {};  // of routed experts: ids whose copies the GPU holds
  bool operator==(const DecidedModule&) const = default;
};

struct DecidedPlacement {
  std::string family;
  bool beside_gpu = false;
  int64_t prefill_threshold = 0;            // tokens of a prompt from which experts are streamed; 0: never
  std::vector<DecidedModule> modules = {};  // of the tree, but for single experts and what holds nothing
  bool operator==(const DecidedPlacement&) const = default;
};

// `beside_gpu`: null where all runs on the CPU.
DecidedPlacement decided(const PlacedRules& placed, const Placement* beside_gpu);

// A rule file, which without other flags places the same model in the same way. `model` is for its first line.
std::string rules_text(const DecidedPlacement& decided, std::string_view model);

// What a cache of keys and values is planned for.
struct PlannedCache {
  int sequences = 0, context = 0;
  uint64_t bytes = 0;
};

// The plan as every door shows it: estimates, the server, Python.
OrderedJson json_of(const PlacedRules& placed, const Placement* beside_gpu, const PlannedCache& cache);

}  // namespace kt::inline models
