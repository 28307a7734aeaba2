#include "models/load_experts.h"

#include <atomic>

#include "base/error.h"

namespace kt {
namespace {

void load_expert(const ExpertSource& source, int layer, int expert, Experts& into) {
  // Opened together, so that the disk reads the others while one is packed.
  const auto stored_gate = source.at(layer, expert, Projection::kGate),
             stored_up = source.at(layer, expert, Projection::kUp),
             stored_down = source.at(layer, expert, Projection::kDown);
  const Matrix gate = stored_gate->matrix(), up = stored_up->matrix(), down = stored_down->matrix();
  const auto gate_bias = source.bias(layer, expert, Projection::kGate),
             up_bias = source.bias(layer, expert, Projection::kUp),
             down_bias = source.bias(layer, expert, Projection::kDown);
  const auto data = [](const std::optional<std::vector<float>>& bias) {
    return bias ? bias->data() : nullptr;
  };
  into.load(expert, {.gate = gate.view(),
                     .up = up.view(),
                     .down = down.view(),
                     .gate_bias = data(gate_bias),
                     .up_bias = data(up_bias),
                     .down_bias = data(down_bias)});
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

void load_experts(const ExpertSource& source, int layer, Pool& pool, Experts& into) {
  std::atomic<int> next = 0;
  std::atomic<bool> stop = false;
  pool.run([&](const Worker&) {
    try {
      for (int expert; !stop && (expert = next.fetch_add(1)) < source.experts();)
        load_expert(source, layer, expert, into);
    } catch (...) {
      stop = true;
      throw;
    }
  });
}

}  // namespace kt
