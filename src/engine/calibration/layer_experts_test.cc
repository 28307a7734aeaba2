// Experts of the demo model, some matrices rounded and others not, against a layer that holds the same
// values as f32.
#include "engine/calibration/layer_experts.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "base/text.h"
#include "models/load_experts.h"

namespace kt::inline engine {
namespace {

constexpr int kLayer = 3, kTokens = 40, kTopK = 4;
constexpr PackedSpec kSpec{.bits = 4, .group = 32};

// The source with the rounded matrices' values in their place.
class Mixed : public ExpertSource {
 public:
  Mixed(const ExpertSource& source, const RoundedLayer& rounded) : source_(source), rounded_(rounded) {}
  std::string_view dialect() const override { return "f32"; }
  std::vector<int> layers() const override { return source_.layers(); }
  int experts() const override { return source_.experts(); }
  int64_t hidden() const override { return source_.hidden(); }
  int64_t inter() const override { return source_.inter(); }
  bool owns(std::string_view tensor) const override { return source_.owns(tensor); }
  std::string module_name(int layer, int expert, Projection projection) const override {
    return source_.module_name(layer, expert, projection);
  }
  std::unique_ptr<StoredMatrix> at(int layer, int expert, Projection projection) const override {
    const auto stored = source_.at(layer, expert, projection);
    std::vector<float> values(static_cast<size_t>(stored->n * stored->k));
    stored->values(0, stored->n, values.data());
    if (const auto matrix = rounded_.at(module_name(layer, expert, projection), kSpec))
      dequantise(matrix->view(), values);
    return std::make_unique<Held>(quantise(format_named("f32"), values, stored->n, stored->k));
  }

 private:
  struct Held : StoredMatrix {
    explicit Held(Matrix from) : matrix(std::move(from)) {
      format = matrix.format;
      n = matrix.n;
      k = matrix.k;
    }
    Matrix rows(int64_t first, int64_t count) const override {
      Matrix out(format, count, k);
      std::copy_n(matrix.codes.data() + first * k * 4, out.codes.size(), out.codes.data());
      return out;
    }
    Matrix matrix;
  };
  const ExpertSource& source_;
  const RoundedLayer& rounded_;
};

TEST(LayerExperts, RoundedAndKeptMatricesRunTogether) {
  const Checkpoint model(KT_DEMO_MODEL);
  const auto source = open_experts(model);
  RoundedMatrices layer;
  layer.figures.layer = kLayer;
  layer.figures.experts.resize(static_cast<size_t>(source->experts()));
  for (int e = 0; e < source->experts(); ++e)
    for (const Projection projection : kProjections) {
      // Expert 1 stays whole, expert 2 keeps gate, expert 5 down.
      if (e == 1 || (e == 2 && projection == Projection::kGate) ||
          (e == 5 && projection == Projection::kDown))
        continue;
      const auto stored = source->at(kLayer, e, projection);
      std::vector<float> values(static_cast<size_t>(stored->n * stored->k));
      stored->values(0, stored->n, values.data());
      layer.matrices.emplace(source->module_name(kLayer, e, projection),
                             round_packed(kSpec, stored->n, stored->k, values.data(), stored->name));
    }
  const std::string path = testing::TempDir() + "kt_layer_" + std::to_string(getpid()) + ".safetensors";
  save_rounded_layer(path, layer, "settings");
  const RoundedLayer rounded(path);
  EXPECT_EQ(rounded.settings(), "settings");
  EXPECT_FALSE(rounded.has(source->module_name(kLayer, 1, Projection::kUp)));
  for (const auto& [module, matrix] : layer.matrices) {
    const Matrix back = rounded.at(module, kSpec).value();
    ASSERT_EQ(back.codes, matrix.codes) << module;
    ASSERT_EQ(back.scales, matrix.scales) << module;
  }

  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = 2, .nodes = 1, .pin = false});
  const auto hidden = static_cast<size_t>(source->hidden());
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> input(kTokens * hidden), weights(kTokens * kTopK), output(input.size()),
      expected(input.size()), scratch;
  std::vector<int32_t> ids;
  for (float& x : input) x = normal(random);
  for (float& w : weights) w = normal(random);
  for (int i = 0; i < kTokens * kTopK; ++i) ids.push_back(i % (source->experts() + 1));  // one is nobody's
  ForwardArgs args{.tokens = kTokens,
                   .top_k = kTopK,
                   .input = input.data(),
                   .ids = ids.data(),
                   .weights = weights.data(),
                   .output = output.data()};
  const ExpertsOptions options{.precision = Precision::kF32};
  LayerExperts(pool, *source, rounded, kSpec, options).forward(args, scratch);
  const Mixed mixed(*source, rounded);
  Experts whole(pool, std::make_shared<Workspace>(), experts_shape(mixed),
                experts_options(mixed, kLayer, options));
  fill_experts(*pool, fill_of(mixed, kLayer, pool->threads()), whole);
  args.output = expected.data();
  whole.forward(args);
  // Sums of f32 in another order.
  for (size_t i = 0; i < output.size(); ++i) ASSERT_NEAR(output[i], expected[i], 1e-4f) << i;
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace kt::inline engine
