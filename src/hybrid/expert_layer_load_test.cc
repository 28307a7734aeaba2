// A layer's weights from values and from files, against nn/experts loaded with quantise() of the same values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <thread>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "hybrid/shared_experts.h"
#include "hybrid/testing/test_layer.h"
#include "models/load_experts.h"
#include "weights/kt/kt_plan.h"
#include "weights/testing/tiny_model.h"

namespace kt::inline hybrid {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr ExpertsShape kShape{.experts = 4, .hidden = 256, .inter = 128};

std::shared_ptr<CpuTeam> team_of(int nodes) {
  return CpuTeam::shared({.threads = std::max(2, nodes), .nodes = nodes});
}

struct Values {
  std::vector<float> gate, up, down;
  Values() {
    const size_t size = static_cast<size_t>(kShape.experts * kShape.hidden) * kShape.inter;
    gate = random_values(size, 1, 0.1f);
    up = random_values(size, 2, 0.1f);
    down = random_values(size, 3, 0.1f);
  }
  ExpertValues view() const { return {gate.data(), up.data(), down.data(), Real::kF32}; }
  Matrix matrix(const std::vector<float>& all, const Format& format, int expert, int64_t n, int64_t k) const {
    return quantise(format,
                    std::span(all).subspan(static_cast<size_t>(expert * n * k), static_cast<size_t>(n * k)),
                    n, k);
  }
};

ExpertLayer made(const std::string& method, int nodes, const std::string& weights = {}, bool save = false,
                 int layer = 1) {
  return {team_of(nodes),
          {.layer = layer,
           .shape = kShape,
           .top_k = 4,
           .method = method,
           .weights = weights,
           .group_size = 32,
           .save = save}};
}

std::vector<float> forward(const Experts& experts) {
  const TestBatch batch(5, 7, kShape);
  std::vector<float> out(batch.input.size());
  experts.forward({.tokens = batch.tokens,
                   .top_k = batch.top_k,
                   .input = batch.input.data(),
                   .ids64 = batch.ids.data(),
                   .weights = batch.weights.data(),
                   .output = out.data()});
  return out;
}

TEST(ExpertLoad, ValuesGiveTheBitsOfQuantise) {
  const Values values;
  const std::vector<int64_t> map = {2, 0, 0, 3};
  for (const WeightMethod& method : weight_methods())
    for (const int nodes : {1, 2, 3}) {
      ExpertLayer layer = made(std::string(method.name), nodes);
      layer.load_values(values.view(), map);
      const MethodFormats f = formats_of(method, kShape.hidden, kShape.inter, 32, true);
      Experts plain(layer.team().pool(), layer.team().workspace(), kShape,
                    {.gate = f.gate_up, .up = f.gate_up, .down = f.down, .max_tokens = 512});
      for (int slot = 0; slot < kShape.experts; ++slot) {
        const int e = static_cast<int>(map[static_cast<size_t>(slot)]);
        const Matrix gate = values.matrix(values.gate, f.gate_up, e, kShape.inter, kShape.hidden),
                     up = values.matrix(values.up, f.gate_up, e, kShape.inter, kShape.hidden),
                     down = values.matrix(values.down, f.down, e, kShape.hidden, kShape.inter);
        plain.load(slot, ExpertWeights{.gate = gate.view(), .up = up.view(), .down = down.view()});
      }
      EXPECT_EQ(forward(layer.experts()), forward(plain)) << method.name << " " << nodes;
    }
}

TEST(ExpertLoad, NarrowValues) {
  const Values values;
  const auto check = [&]<typename T>(Real type, T (*narrow)(float)) {
    const auto all = [&](const std::vector<float>& from) {
      std::vector<T> out;
      for (const float x : from) out.push_back(narrow(x));
      return out;
    };
    const std::vector<T> gate = all(values.gate), up = all(values.up), down = all(values.down);
    Values wide = values;
    for (size_t i = 0; i < gate.size(); ++i) {
      wide.gate[i] = to_f32(gate[i]);
      wide.up[i] = to_f32(up[i]);
      wide.down[i] = to_f32(down[i]);
    }
    for (const char* method : {"BF16", "AMXINT4", "FP8"}) {
      ExpertLayer a = made(method, 2), b = made(method, 2);
      a.load_values({gate.data(), up.data(), down.data(), type}, {});
      b.load_values(wide.view(), {});
      EXPECT_EQ(forward(a.experts()), forward(b.experts())) << method;
    }
  };
  check.operator()<bf16>(Real::kBf16, [](float x) { return to_bf16(x); });
  check.operator()<f16>(Real::kF16, [](float x) { return to_f16(x); });
}

TEST(ExpertLoad, NamesTheValueThatIsNotFinite) {
  Values values;
  values.up[static_cast<size_t>(3 * kShape.hidden * kShape.inter + 70 * kShape.hidden + 9)] =
      std::numeric_limits<float>::quiet_NaN();
  for (const char* method : {"BF16", "AMXINT4", "MXFP4"}) {
    ExpertLayer layer = made(method, 1);
    EXPECT_THAT(error_of([&] { layer.load_values(values.view(), {}); }),
                AllOf(HasSubstr("expert 3 up"), HasSubstr("row 70, column 9")))
        << method;
    EXPECT_FALSE(layer.loaded());
  }
}

TEST(ExpertLoad, NamesWhatIsWrongWithAMap) {
  const Values values;
  ExpertLayer layer = made("BF16", 1);
  const auto load = [&](const std::vector<int64_t>& map) {
    return error_of([&] { layer.load_values(values.view(), map); });
  };
  EXPECT_THAT(load({0, 1, 2}), AllOf(HasSubstr("3"), HasSubstr("4")));
  EXPECT_THAT(load({0, 1, 4, 2}), AllOf(HasSubstr("entry 2"), HasSubstr("is 4")));
  EXPECT_THAT(load({0, -1, 3, 2}), AllOf(HasSubstr("entry 1"), HasSubstr("is -1")));
  EXPECT_EQ(load({3, 3, 3, 3}), "no error");
}

TEST(ExpertLoad, SavedValuesAreTheBitsThatRun) {
  const Values values;
  for (const char* method : {"AMXINT4", "AMXINT8", "MOE_INT8"})
    for (const int nodes : {1, 2, 3}) {
      const TemporaryFolder folder;
      for (const int layer : {1, 2}) {
        ExpertLayer saved = made(method, nodes, folder.path(), true, layer),
                    read = made(method, nodes, folder.path(), false, layer);
        const std::vector<int64_t> map = {1, 0, 2, 2};
        saved.load_values(values.view(), map);
        read.load(map);
        EXPECT_EQ(forward(saved.experts()), forward(read.experts())) << method << " " << nodes;
      }
      EXPECT_TRUE(is_kt_weights(folder.path()));
      EXPECT_EQ(std::filesystem::exists(folder / "_layer_2/_numa_1"), nodes > 1) << nodes;
      EXPECT_FALSE(std::filesystem::exists(folder / "_layer_2/_numa_2"));  // 3 does not divide 128: 2 parts
      ExpertLayer other =
          made(std::string(method) == "AMXINT4" ? "AMXINT8" : "AMXINT4", nodes, folder.path(), true, 3);
      EXPECT_THAT(error_of([&] { other.load_values(values.view(), {}); }), HasSubstr(folder.path()));
    }
  ExpertLayer fp8 = made("FP8", 1, "anywhere", true);
  EXPECT_THAT(error_of([&] { fp8.load_values(values.view(), {}); }),
              AllOf(HasSubstr("FP8"), HasSubstr("AMXINT4")));
}

class LoadFiles : public testing::Test {
 protected:
  LoadFiles() { write_tiny_model({.experts = 4}, folder_ / "model"); }
  std::string converted(int bits, int parts, bool merge) {
    const std::string out = folder_ / text("kt_{}_{}_{}", bits, parts, merge);
    const Checkpoint checkpoint(folder_ / "model");
    const auto source = open_experts(checkpoint);
    run_conversion(
        plan_kt_weights(checkpoint, *source, {.output = out, .bits = bits, .parts = parts, .merge = merge}),
        {.threads = 1});
    return out;
  }
  TemporaryFolder folder_;
};

TEST_F(LoadFiles, AsTheEngineLoads) {
  for (const auto& [method, path] : {std::pair("BF16", folder_ / "model"),
                                     {"AMXINT8", converted(8, 2, true)},
                                     {"MOE_INT4", converted(4, 2, false)}})
    for (const int nodes : {1, 2, 3}) {
      ExpertLayer layer = made(method, nodes, path);
      layer.load({});
      const auto source = shared_experts(path);
      Experts plain(layer.team().pool(), layer.team().workspace(), kShape,
                    experts_options(*source, 1, {.max_tokens = 512}));
      fill_experts(*layer.team().pool(), fill_of(*source, 1, layer.team().pool()->threads()), plain);
      EXPECT_EQ(forward(layer.experts()), forward(plain)) << method << " " << nodes;
    }
}

TEST_F(LoadFiles, RoundsWhatWasNotConverted) {
  const std::string path = converted(4, 1, true);
  ExpertLayer now = made("AMXINT4", 2, folder_ / "model"), before = made("AMXINT4", 2, path);
  now.load({});
  before.load({});
  EXPECT_EQ(forward(now.experts()), forward(before.experts()));
}

TEST_F(LoadFiles, NamesWhatDoesNotFit) {
  ExpertLayer none = made("BF16", 1), far = made("BF16", 1, folder_ / "model", false, 9);
  EXPECT_THAT(error_of([&] { none.load({}); }), HasSubstr("no path"));
  EXPECT_THAT(error_of([&] { far.load({}); }), HasSubstr("layer 9"));
  ExpertLayer narrow(team_of(1), {.layer = 1,
                                  .shape = {.experts = 4, .hidden = 256, .inter = 64},
                                  .top_k = 2,
                                  .method = "BF16",
                                  .weights = folder_ / "model"});
  EXPECT_THAT(error_of([&] { narrow.load({}); }), AllOf(HasSubstr("inter 64"), HasSubstr("inter 128")));
  ExpertLayer many(team_of(1), {.layer = 1,
                                .shape = {.experts = 6, .hidden = 256, .inter = 128},
                                .top_k = 2,
                                .method = "BF16",
                                .weights = folder_ / "model"});
  EXPECT_THAT(error_of([&] { many.load({}); }), AllOf(HasSubstr("6"), HasSubstr("4")));
  const std::vector<int64_t> redundant = {0, 1, 2, 3, 0, 3};
  EXPECT_EQ(error_of([&] { many.load(redundant); }), "no error");
}

// A forward at any time has the weights from before or from after, never between.
TEST_F(LoadFiles, ReplacesWeightsUnderForwards) {
  const Values values;
  ExpertLayer layer = made("BF16", 1, folder_ / "model");
  const TestBatch batch(3, 7, kShape);
  const auto run = [&] {
    std::vector<float> out(batch.input.size());
    layer.forward(batch.call(), out.data());
    return out;
  };
  layer.load({});
  const std::vector<float> one = run();
  layer.load_values(values.view(), {});
  const std::vector<float> two = run();
  ASSERT_NE(one, two);
  std::atomic<bool> stop = false;
  int wrong = 0;
  std::thread forwards([&] {
    while (!stop) {
      const std::vector<float> got = run();
      if (got != one && got != two) ++wrong;
    }
  });
  for (int i = 0; i < 10; ++i) i % 2 ? layer.load_values(values.view(), {}) : layer.load({});
  stop = true;
  forwards.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(LoadFiles, AFailedLoadKeepsTheOldWeights) {
  Values values;
  ExpertLayer layer = made("BF16", 1, folder_ / "model");
  layer.load({});
  const std::vector<float> before = forward(layer.experts());
  values.down[5] = std::numeric_limits<float>::infinity();
  EXPECT_THAT(error_of([&] { layer.load_values(values.view(), {}); }), HasSubstr("expert 0 down"));
  EXPECT_EQ(forward(layer.experts()), before);
}

}  // namespace
}  // namespace kt::inline hybrid
