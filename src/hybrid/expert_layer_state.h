// What the parts of ExpertLayer share: calls in expert_layer.cc, streams in expert_layer_stream.cc, loading
// in expert_layer_load.cc, write-back in expert_layer_write.cc.
#pragma once
#include <atomic>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "hybrid/expert_layer.h"

namespace kt {

struct ExpertLayer::State {
  std::shared_ptr<CpuTeam> team;
  ExpertLayerOptions options;
  const WeightMethod* method = nullptr;
  std::optional<Experts> experts;  // from load() or load_values() on
  std::vector<int64_t> map;        // physical to logical, as loaded
  // What load() read, kept open for the layers that are loaded next.
  std::shared_ptr<const ExpertSource> source;
  // Held shared by whoever uses `experts`, exclusively while another load() replaces them.
  mutable std::shared_mutex in_use;
  std::atomic<const uint8_t*> mask = nullptr;

  // In the team's order, after what was submitted; returns when it is done. An empty map is 0, 1, 2 ...
  void replace(Experts loaded, std::span<const int64_t> physical_to_logical,
               std::shared_ptr<const ExpertSource> from);
};

}  // namespace kt
