// A small layer of experts, tokens for it, and what it computes by its definition.
#pragma once
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "base/error.h"
#include "formats/floats.h"
#include "formats/random_grid.h"
#include "nn/experts.h"

namespace kt::inline nn {

struct LayerFormats {
  Format gate, up, down;
};

// The values in that format; of one that nothing is rounded to, others of about their size.
inline Matrix made_of(const Format& format, std::span<const float> values, int64_t n, int64_t k,
                      std::mt19937& random) {
  if (can_round_to(format)) return quantise(format, values, n, k);
  Matrix out(format, n, k);
  fill_grid_codes(format.code, out.codes, [&] { return uint64_t{random()} << 32 | random(); });
  for (uint8_t& scale : out.scales) scale = static_cast<uint8_t>(2 * (random() % 8) + 1);
  const float half = 4 * code_unit(format.code) * static_cast<float>(grid_of(format.code).largest);
  const f16 factor = to_f16(1 / (half * std::sqrt(static_cast<float>(k))));
  for (size_t i = 0; i < out.supers.size(); i += 2) std::memcpy(&out.supers[i], &factor, 2);
  return out;
}

// Random experts of a layer.
struct Layer {
  ExpertsShape shape;
  LayerFormats formats;
  Format format;  // of all three, where they have one
  std::vector<Matrix> gate, up, down;
  std::vector<std::vector<float>> gate_bias, up_bias, down_bias;

  Layer(ExpertsShape s, const Format& f, unsigned seed, bool biases = false)
      : Layer(s, LayerFormats{f, f, f}, seed, biases) {}
  Layer(ExpertsShape s, const LayerFormats& f, unsigned seed, bool biases = false)
      : shape(s), formats(f), format(f.gate) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 1);
    const auto values = [&](size_t n, float scale) {
      std::vector<float> v(n);
      for (float& x : v) x = normal(random) * scale;
      return v;
    };
    for (int e = 0; e < s.experts; ++e) {
      const size_t size = static_cast<size_t>(s.hidden) * s.inter;
      const float in = 1 / std::sqrt(static_cast<float>(s.hidden)),
                  out = 1 / std::sqrt(static_cast<float>(s.inter));
      gate.push_back(made_of(f.gate, values(size, in), s.inter, s.hidden, random));
      up.push_back(made_of(f.up, values(size, in), s.inter, s.hidden, random));
      down.push_back(made_of(f.down, values(size, out), s.hidden, s.inter, random));
      if (!biases) continue;
      gate_bias.push_back(values(s.inter, 0.3f));
      up_bias.push_back(values(s.inter, 0.3f));
      down_bias.push_back(values(s.hidden, 0.3f));
    }
  }

  ExpertWeights weights(int e) const {
    ExpertWeights w{.gate = gate[e].view(), .up = up[e].view(), .down = down[e].view()};
    if (!gate_bias.empty()) {
      w.gate_bias = gate_bias[e].data();
      w.up_bias = up_bias[e].data();
      w.down_bias = down_bias[e].data();
    }
    return w;
  }
};

// Tokens, routed at random.
struct Batch {
  int tokens, top_k;
  std::vector<float> input, weights;
  std::vector<int32_t> ids;

  Batch(int t, int k, const ExpertsShape& shape, unsigned seed) : tokens(t), top_k(k) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 1);
    for (int i = 0; i < t * shape.hidden; ++i)
      input.push_back(to_f32(to_bf16(normal(random))));  // exact in every type but f16
    for (int i = 0; i < t * k; ++i) {
      weights.push_back(std::uniform_real_distribution<float>(0.05f, 0.5f)(random));
      ids.push_back(static_cast<int32_t>(random() % shape.experts));
    }
  }
  ForwardArgs args(void* out) const {
    return {.tokens = tokens,
            .top_k = top_k,
            .input = input.data(),
            .ids = ids.data(),
            .weights = weights.data(),
            .output = out};
  }
};

inline double activation(double gate, double up, const Activation& f) {
  if (f.kind == ActivationKind::kRelu) return std::max(gate, 0.0) * up;
  if (f.kind == ActivationKind::kGeluErf) return 0.5 * gate * (1 + std::erf(gate / std::sqrt(2.0))) * up;
  if (f.kind == ActivationKind::kGeluTanh)
    return 0.5 * gate * (1 + std::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate))) * up;
  if (f.limit > 0) {
    gate = std::min<double>(gate, f.limit);
    up = std::clamp<double>(up, -f.limit, f.limit);
  }
  if (f.alpha > 0) return gate / (1 + std::exp(-f.alpha * gate)) * (up + 1);
  return gate / (1 + std::exp(-gate)) * up;
}

// What is done to an expert's dequantised weights before they are used.
using ChangeWeights = std::function<void(int expert, std::vector<float>& gate, std::vector<float>& up,
                                         std::vector<float>& down)>;

// The definition, in double, on dequantised weights.
inline std::vector<double> reference(const Layer& layer, const Batch& batch, const Activation& f,
                                     const uint8_t* skip = nullptr, const ChangeWeights& change = nullptr) {
  const auto [experts, hidden, inter] = layer.shape;
  std::vector<double> out(static_cast<size_t>(batch.tokens) * hidden);
  std::vector<float> gate(static_cast<size_t>(hidden) * inter), up(gate.size()), down(gate.size());
  for (int e = 0; e < experts; ++e) {
    if (skip && skip[e]) continue;
    dequantise(layer.gate[e].view(), gate);
    dequantise(layer.up[e].view(), up);
    dequantise(layer.down[e].view(), down);
    if (change) change(e, gate, up, down);
    for (int slot = 0; slot < batch.tokens * batch.top_k; ++slot) {
      if (batch.ids[slot] != e) continue;
      const float* x = batch.input.data() + slot / batch.top_k * hidden;
      std::vector<double> mid(inter);
      for (int i = 0; i < inter; ++i) {
        double g = layer.gate_bias.empty() ? 0 : layer.gate_bias[e][i],
               u = layer.up_bias.empty() ? 0 : layer.up_bias[e][i];
        for (int h = 0; h < hidden; ++h) {
          g += double{x[h]} * gate[static_cast<size_t>(i) * hidden + h];
          u += double{x[h]} * up[static_cast<size_t>(i) * hidden + h];
        }
        mid[i] = activation(g, u, f);
      }
      for (int h = 0; h < hidden; ++h) {
        double y = layer.down_bias.empty() ? 0 : layer.down_bias[e][h];
        for (int i = 0; i < inter; ++i) y += mid[i] * down[static_cast<size_t>(h) * inter + i];
        out[static_cast<size_t>(slot / batch.top_k) * hidden + h] += batch.weights[slot] * y;
      }
    }
  }
  return out;
}

inline double relative_error(const std::vector<float>& got, const std::vector<double>& want) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
    if (!std::isfinite(got[i])) return std::numeric_limits<double>::infinity();
  }
  return std::sqrt(difference / size);
}

inline std::shared_ptr<Pool> pool_of(int threads, int nodes = 1) {
  return std::make_shared<Pool>(PoolOptions{.threads = threads, .nodes = nodes});
}

inline Experts make(const Layer& layer, std::shared_ptr<Pool> pool, ExpertsOptions options = {}) {
  options.gate = layer.formats.gate;
  options.up = layer.formats.up;
  options.down = layer.formats.down;
  Experts experts(std::move(pool), std::make_shared<Workspace>(), layer.shape, options);
  for (int e = 0; e < layer.shape.experts; ++e) experts.load(e, layer.weights(e));
  return experts;
}

inline std::vector<float> run(const Experts& experts, const Batch& batch, const uint8_t* skip = nullptr) {
  std::vector<float> out(static_cast<size_t>(batch.tokens) * experts.shape().hidden, std::nanf(""));
  ForwardArgs args = batch.args(out.data());
  args.skip = skip;
  experts.forward(args);
  return out;
}

// Relative error of the whole output that the precision of activations and panels may cost. int8 activations
// carry 1/127/sqrt(12) of their largest value, about 4 standard deviations: 0.9 % a projection, two of them;
// a rounded panel adds about as much again for each.
inline double tolerance(const Format& format, Precision precision) {
  if (precision == Precision::kF32) return 2e-6;
  if (is_integer(format.code)) return 0.03;
  return 0.008;  // bf16 rounding of activations and of folded scales, 2^-9 each
}

template <class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace kt::inline nn
