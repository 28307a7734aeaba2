#include "models/load_experts.h"

#include <algorithm>
#include <vector>

#include "base/error.h"

namespace kt::inline models {
namespace {

// Expert `expert` of the source, opened for packing.
void open_expert(const ExpertSource& source, int layer, int expert,
                 FunctionRef<void(const ExpertRows&)> use) {
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
  use({.gate = reader_of(*gate),
       .up = reader_of(*up),
       .down = reader_of(*down),
       .gate_bias = data(gate_bias),
       .up_bias = data(up_bias),
       .down_bias = data(down_bias)});
}

// Few large experts: more pieces of each than workers, fewer experts.
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

ExpertsFill fill_of(const ExpertSource& source, int layer, int threads) {
  return {.name = text("layer {}", layer),
          .experts = source.experts(),
          .load = [&source, layer](
                      int expert,
                      FunctionRef<void(const ExpertRows&)> use) { open_expert(source, layer, expert, use); },
          .together = loads_together(source, layer, threads)};
}

}  // namespace kt::inline models
