#include "models/load_experts.h"

#include <algorithm>

#include "base/error.h"

namespace kt {
namespace {

enum class Workers { kCaller, kAll };

void load_expert(const ExpertSource& source, int layer, int expert, Workers workers, Experts& into) {
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
    into.load_together(expert, rows);
  } else {
    into.load(expert, rows);
  }
}

// Many experts go one to a worker. Few large ones would leave workers without: all share each of them.
bool loads_together(const ExpertSource& source, int layer, int threads) {
  if (source.experts() >= 8 * threads) return false;
  const auto gate = source.at(layer, 0, Projection::kGate);
  return gate->n / piece_rows(reader_of(*gate)) >= 4 * threads;
}

}  // namespace

ExpertsShape experts_shape(const ExpertSource& source) {
  return {.experts = source.experts(),
          .hidden = static_cast<int>(source.hidden()),
          .inter = static_cast<int>(source.inter())};
}

ExpertsOptions experts_options(const ExpertSource& source, int layer, ExpertsOptions rest) {
  rest.gate_up = source.at(layer, 0, Projection::kGate)->format;
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

void load_experts(const ExpertSource& source, int layer, Pool& pool, Experts& into) {
  if (loads_together(source, layer, pool.threads())) {
    for (int expert = 0; expert < source.experts(); ++expert)
      load_expert(source, layer, expert, Workers::kAll, into);
    return;
  }
  run_items(pool, source.experts(), [&](int64_t expert) {
    load_expert(source, layer, static_cast<int>(expert), Workers::kCaller, into);
  });
}

}  // namespace kt
