// Converted experts, loaded and run, against the bf16 experts they were made from: the demo model, end to
// end.
#include "models/load_experts.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <random>

#include "base/text.h"
#include "models/testing/relative_error.h"
#include "weights/kt/kt_plan.h"
#include "weights/plans/compressed_plan.h"

namespace kt::inline models {
namespace {

constexpr int kLayer = 3, kTokens = 12, kTopK = 4;

std::vector<float> run(const ExpertSource& source, int nodes) {
  const auto pool =
      std::make_shared<Pool>(PoolOptions{.threads = nodes,
                                         .nodes = nodes,
                                         .topology = Topology::synthetic(text("numa:{} core:1", nodes)),
                                         .pin = false});
  Experts experts(pool, std::make_shared<Workspace>(), experts_shape(source),
                  experts_options(source, kLayer, {.precision = Precision::kF32}));
  fill_experts(*pool, fill_of(source, kLayer, pool->threads()), experts);
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> input(static_cast<size_t>(kTokens * source.hidden())), weights(kTokens * kTopK, 0.5f),
      output(input.size());
  std::vector<int32_t> ids;
  for (float& x : input) x = normal(random);
  for (int i = 0; i < kTokens * kTopK; ++i) ids.push_back(i % source.experts());
  experts.forward({.tokens = kTokens,
                   .top_k = kTopK,
                   .input = input.data(),
                   .ids = ids.data(),
                   .weights = weights.data(),
                   .output = output.data()});
  return output;
}

class LoadExperts : public testing::Test {
 protected:
  LoadExperts() : folder_(testing::TempDir() + "kt_load_" + std::to_string(getpid())), model_(KT_DEMO_MODEL) {
    source_ = open_experts(model_);
    expected_ = run(*source_, 1);
  }
  ~LoadExperts() override { std::filesystem::remove_all(folder_); }

  // The relative error of the layer's outputs, next to what the three weight errors together suggest:
  // independent roundings add as squares, and the product of gate and up takes both.
  void check(const ConversionPlan& plan, double bound_factor) {
    const ConversionResult result = run_conversion(plan, {.threads = 2, .overwrite = true});
    const PieceReport& report = result.layers.at(kLayer - 1).report;
    const double weights = std::sqrt(std::pow(report.gate.relative(), 2) + std::pow(report.up.relative(), 2) +
                                     std::pow(report.down.relative(), 2));
    std::optional<Checkpoint> converted;
    std::unique_ptr<ExpertSource> source;
    if (is_kt_weights(folder_)) {
      source = open_kt_weights(folder_);
    } else {
      converted.emplace(folder_);
      source = open_experts(*converted);
    }
    const std::vector<float> one = run(*source, 1);
    const double error = relative_error(one, expected_);
    EXPECT_LT(error, bound_factor * weights);
    EXPECT_GT(error, 0.3 * weights);  // else nothing was rounded, or the wrong file was read
    for (const int nodes : {2, 3}) EXPECT_LT(relative_error(run(*source, nodes), one), 1e-5) << nodes;
  }

  std::string folder_;
  Checkpoint model_;
  std::unique_ptr<ExpertSource> source_;
  std::vector<float> expected_;
};

TEST_F(LoadExperts, Int8) { check(plan_kt_weights(model_, *source_, {.output = folder_, .bits = 8}), 1.5); }

TEST_F(LoadExperts, Int4OfTwoPartsInFolders) {
  check(plan_kt_weights(model_, *source_, {.output = folder_, .bits = 4, .parts = 2, .merge = false}), 1.5);
}

TEST_F(LoadExperts, Int4InGroups) {
  check(plan_compressed(model_, source_.get(), {.output = folder_, .bits = 4, .group_size = 32}), 1.5);
}

}  // namespace
}  // namespace kt::inline models
