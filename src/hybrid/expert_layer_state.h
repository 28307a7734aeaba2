// What the parts of ExpertLayer share: calls in expert_layer.cc, streams in expert_layer_stream.cc, loading in
// expert_layer_load.cc, write-back in expert_layer_write.cc.
#pragma once
#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "hybrid/expert_layer.h"

namespace kt {

struct ExpertLayer::State {
  std::shared_ptr<CpuTeam> team;
  ExpertLayerOptions options;
  const WeightMethod* method = nullptr;
  std::optional<Experts> experts;  // from load() or load_values() on
  std::vector<int64_t> map;        // physical to logical, as loaded
  std::atomic<const uint8_t*> mask = nullptr;
};

}  // namespace kt
