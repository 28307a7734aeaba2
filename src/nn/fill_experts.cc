#include "nn/fill_experts.h"

#include <vector>

#include "base/error.h"

namespace kt::inline nn {
namespace {

void check_map(const ExpertsFill& fill, int slots, std::span<const int64_t> map) {
  if (map.empty() && fill.experts != slots)
    fail("{}: {} experts to load, the weights have {}", fill.name, slots, fill.experts);
  if (!map.empty() && std::ssize(map) != slots)
    fail("{}: a map of {} experts for a layer of {}", fill.name, map.size(), slots);
  for (size_t i = 0; i < map.size(); ++i)
    if (map[i] < 0 || map[i] >= fill.experts)
      fail("{}: entry {} of the expert map is {}, expected 0 to {}", fill.name, i, map[i], fill.experts - 1);
}

}  // namespace

void fill_experts(Pool& pool, const ExpertsFill& fill, Experts& into, std::span<const int64_t> map) {
  const int slots = into.shape().experts;
  check_map(fill, slots, map);
  const auto expert_of = [&](int slot) {
    return map.empty() ? slot : static_cast<int>(map[static_cast<size_t>(slot)]);
  };
  std::vector<int> first(static_cast<size_t>(fill.experts), -1), loads;
  for (int slot = 0; slot < slots; ++slot) {
    int& earlier = first[static_cast<size_t>(expert_of(slot))];
    if (earlier >= 0) continue;
    earlier = slot;
    loads.push_back(slot);
  }
  if (fill.together) {
    for (const int slot : loads)
      fill.load(expert_of(slot), [&](const ExpertRows& rows) { into.load_together(slot, rows); });
  } else {
    run_items(pool, std::ssize(loads), [&](int64_t i) {
      const int slot = loads[static_cast<size_t>(i)];
      fill.load(expert_of(slot), [&](const ExpertRows& rows) { into.load(slot, rows); });
    });
  }
  for (int slot = 0; slot < slots; ++slot)
    into.copy(first[static_cast<size_t>(expert_of(slot))], slot);  // nothing, where that is the slot itself
}

}  // namespace kt::inline nn
