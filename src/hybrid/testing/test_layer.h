// Layers of random weights and calls of them, for tests.
#pragma once
#include <memory>
#include <random>
#include <vector>

#include "base/testing/random_values.h"
#include "formats/floats.h"
#include "hybrid/expert_layer.h"

namespace kt::inline hybrid {

inline constexpr ExpertsShape kTestShape{.experts = 8, .hidden = 64, .inter = 96};

struct TestLayerOptions {
  int layer = 0, max_deferred = 0, max_tokens = 64;
  ExpertsShape shape = kTestShape;
  const char* method = "BF16";
};

inline std::unique_ptr<ExpertLayer> test_layer(const std::shared_ptr<CpuTeam>& team,
                                               const TestLayerOptions& o = {}) {
  auto layer = std::make_unique<ExpertLayer>(team, ExpertLayerOptions{.layer = o.layer,
                                                                      .shape = o.shape,
                                                                      .top_k = 4,
                                                                      .method = o.method,
                                                                      .max_tokens = o.max_tokens,
                                                                      .max_deferred = o.max_deferred});
  const size_t size = static_cast<size_t>(o.shape.experts) * static_cast<size_t>(o.shape.hidden) *
                      static_cast<size_t>(o.shape.inter);
  const auto seed = static_cast<unsigned>(100 * o.layer);
  const std::vector<float> gate = random_values(size, seed + 1, 0.1f),
                           up = random_values(size, seed + 2, 0.1f),
                           down = random_values(size, seed + 3, 0.1f);
  layer->load_values({.gate = gate.data(), .up = up.data(), .down = down.data(), .type = Real::kF32}, {});
  return layer;
}

// One batch in ordinary memory: f32 input, distinct experts for each token.
struct TestBatch {
  int tokens, top_k;
  std::vector<float> input, weights;
  std::vector<int64_t> ids;

  explicit TestBatch(int t, unsigned seed = 7, const ExpertsShape& shape = kTestShape, int k = 4)
      : tokens(t),
        top_k(k),
        input(random_values(static_cast<size_t>(t * shape.hidden), seed)),
        weights(static_cast<size_t>(t * k)) {
    std::mt19937 random(seed);
    std::vector<int64_t> all(static_cast<size_t>(shape.experts));
    for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int64_t>(e);
    for (int row = 0; row < t; ++row) {
      std::shuffle(all.begin(), all.end(), random);
      ids.insert(ids.end(), all.begin(), all.begin() + k);
    }
    for (float& w : weights) w = std::uniform_real_distribution<float>(0.05f, 0.5f)(random);
  }

  LayerCall call() const {
    return {.tokens = tokens,
            .top_k = top_k,
            .input = input.data(),
            .input_type = Real::kF32,
            .ids = ids.data(),
            .ids_are_64_bit = true,
            .weights = weights.data()};
  }
};

// What nn/experts gives for these ids, without a layer around it.
inline std::vector<float> plain_forward(const ExpertLayer& layer, const TestBatch& batch,
                                        const std::vector<int64_t>& ids, const uint8_t* skip = nullptr) {
  std::vector<float> out(batch.input.size());
  layer.experts().forward({.tokens = batch.tokens,
                           .top_k = batch.top_k,
                           .input = batch.input.data(),
                           .input_type = Real::kF32,
                           .ids64 = ids.data(),
                           .weights = batch.weights.data(),
                           .output = out.data(),
                           .output_type = Real::kF32,
                           .skip = skip});
  return out;
}
inline std::vector<float> plain_forward(const ExpertLayer& layer, const TestBatch& batch,
                                        const uint8_t* skip = nullptr) {
  return plain_forward(layer, batch, batch.ids, skip);
}

inline std::vector<float> sum_of(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> out(a.size());
  for (size_t i = 0; i < a.size(); ++i) out[i] = a[i] + b[i];
  return out;
}

}  // namespace kt::inline hybrid
