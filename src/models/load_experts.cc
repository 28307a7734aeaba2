#include "models/load_experts.h"

#include <algorithm>
#include <vector>

#include "base/error.h"

namespace kt {
namespace {

enum class Workers { kCaller, kAll };

// Expert `expert` of the source becomes expert `slot`.
void load_expert(const ExpertSource& source, int layer, int expert, int slot, Workers workers,
                 Experts& into) {
  // Opened together, so that the disk reads the others while one is packed.
  const auto gate = source.at(layer, expert, Projection::kGate),
             up = source.at(layer, expert, Projection::kUp),
             down = source.at(layer, expert, Projection::kDown);
  for (const StoredMatrix* matrix : {gate.get(), up.get(), down.get()}) matrix->read_ahead();
  const auto gate_bias = source.bias(layer, expert, Projection::kGate),
             up_bias = source.bias(layer, expert, Projection::kUp),
             down_bias = source.bias(layer, expert, Projection::kDown);
  const auto data = [](const std::optional<std::vector<float>>& bias) {
    return bias ? bias->data() : nullptr;
  };
  const ExpertRows rows{.gate = reader_of(*gate),
                        .up = reader_of(*up),
                        .down = reader_of(*down),
                        .gate_bias = data(gate_bias),
                        .up_bias = data(up_bias),
                        .down_bias = data(down_bias)};
  if (workers == Workers::kAll) {
    into.load_together(slot, rows);
  } else {
    into.load(slot, rows);
  }
}

// Many experts go one to a worker. Few large ones would leave workers without: all share each of them.
bool loads_together(const ExpertSource& source, int layer, int threads) {
  if (source.experts() >= 8 * threads) return false;
  const auto gate = source.at(layer, 0, Projection::kGate);
  return gate->n / piece_rows(reader_of(*gate)) >= 4 * threads;
}

void check_map(const ExpertSource& source, int layer, int slots, std::span<const int64_t> map) {
  const int experts = source.experts();
  if (map.empty() && experts != slots)
    fail("layer {}: {} experts to load, the weights have {}", layer, slots, experts);
  if (!map.empty() && std::ssize(map) != slots)
    fail("layer {}: a map of {} experts for a layer of {}", layer, map.size(), slots);
  for (size_t i = 0; i < map.size(); ++i)
    if (map[i] < 0 || map[i] >= experts)
      fail("layer {}: entry {} of the expert map is {}, expected 0 to {}", layer, i, map[i], experts - 1);
}

}  // namespace

ExpertsShape experts_shape(const ExpertSource& source) {
  return {.experts = source.experts(),
          .hidden = static_cast<int>(source.hidden()),
          .inter = static_cast<int>(source.inter())};
}

ExpertsOptions experts_options(const ExpertSource& source, int layer, ExpertsOptions rest) {
  rest.gate = source.at(layer, 0, Projection::kGate)->format;
  rest.up = source.at(layer, 0, Projection::kUp)->format;
  rest.down = source.at(layer, 0, Projection::kDown)->format;
  return rest;
}

RowReader reader_of(const StoredMatrix& stored) {
  return {.format = stored.format,
          .n = stored.n,
          .k = stored.k,
          .at_once = stored.rows_at_once(),
          .rows = [&stored](int64_t first, int64_t count) { return stored.rows(first, count); }};
}

size_t loading_bytes(std::span<const StoredMatrix* const> together) {
  size_t piece = 0, held = 0;
  for (const StoredMatrix* matrix : together) {
    piece = std::max(piece, piece_bytes(reader_of(*matrix)));
    held += matrix->held_bytes();
  }
  return piece + held;
}

void load_experts(const ExpertSource& source, int layer, Pool& pool, Experts& into,
                  std::span<const int64_t> map) {
  const int slots = into.shape().experts;
  check_map(source, layer, slots, map);
  const auto expert_of = [&](int slot) {
    return map.empty() ? slot : static_cast<int>(map[static_cast<size_t>(slot)]);
  };
  std::vector<int> first(static_cast<size_t>(source.experts()), -1), loads;
  for (int slot = 0; slot < slots; ++slot) {
    int& earlier = first[static_cast<size_t>(expert_of(slot))];
    if (earlier >= 0) continue;
    earlier = slot;
    loads.push_back(slot);
  }
  if (loads_together(source, layer, pool.threads())) {
    for (const int slot : loads) load_expert(source, layer, expert_of(slot), slot, Workers::kAll, into);
  } else {
    run_items(pool, std::ssize(loads), [&](int64_t i) {
      const int slot = loads[static_cast<size_t>(i)];
      load_expert(source, layer, expert_of(slot), slot, Workers::kCaller, into);
    });
  }
  for (int slot = 0; slot < slots; ++slot)
    into.copy(first[static_cast<size_t>(expert_of(slot))], slot);  // nothing, where that is the slot itself
}

}  // namespace kt
