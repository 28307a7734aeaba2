// Experts that run on a GPU, by the kernels that GPU operations launch: against the definition in double, beside the
// CPU's own, the same bits whoever is in the step. On the test driver, or on a GPU with KT_TEST_REAL_CUDA=1.
#include "nn/gpu_experts.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>

#include "base/testing/random_values.h"
#include "cuda/testing/test_cuda.h"
#include "formats/known_formats.h"
#include "nn/cpu_ops.h"
#include "nn/gpu_ops.h"
#include "nn/padded_parts.h"
#include "nn/testing/reference_layer.h"

namespace kt::inline nn {
namespace {

// Sums of thousands of numbers in another order than the CPU's, twice: as tolerance() of f32, and half as much again.
constexpr double kHotBound = 3e-6;

// Operands of prompts are bf16: x, weights and what is between the products, each within 2^-9 of its size.
constexpr double kRoundedBound = 4e-3;

// The CPU's table with one packing or the other: enough to pack with.
Kernels packing_as(const Fragment& fragment) {
  Kernels out = best_kernels();
  out.fragment = fragment;
  return out;
}

std::vector<int> every_expert(const ExpertsShape& shape) {
  std::vector<int> out(static_cast<size_t>(shape.experts));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

// Copies on a stream of their own.
struct HotLayer {
  std::shared_ptr<Gpu> gpu = std::make_shared<Gpu>(0);
  GpuStream stream{gpu};
  GpuMemory memory{gpu, &stream};
  GpuExperts hot;

  HotLayer(const Experts& experts, std::span<const int> ids) : hot(memory, experts, ids, "layer") {}

  // What the copies give, to `before` where there are such rows; else to zeros. Poisoned behind each row.
  std::vector<float> run(const Batch& batch, int hidden, const std::vector<float>& before = {}) {
    const int64_t width = hidden + 3;
    const auto tokens = static_cast<size_t>(batch.tokens);
    std::vector<float> rows(tokens * static_cast<size_t>(width), std::nanf(""));
    for (size_t i = 0; i < before.size(); ++i)
      rows[i / static_cast<size_t>(hidden) * static_cast<size_t>(width) + i % static_cast<size_t>(hidden)] =
          before[i];
    const std::vector<float> poison(static_cast<size_t>(hot.mid_floats(batch.tokens, batch.top_k)),
                                    std::nanf(""));
    const auto hold = [&](const auto& values) {
      return memory.hold(values.data(), values.size() * sizeof(values[0]), "rows");
    };
    const DeviceBuffer x = hold(batch.input), ids = hold(batch.ids), weights = hold(batch.weights),
                       mid = hold(poison), out = hold(rows);
    const GpuExperts::Call call{.tokens = batch.tokens,
                                .top_k = batch.top_k,
                                .x = x.as<const float>(),
                                .x_stride = hidden,
                                .ids = ids.as<const int32_t>(),
                                .weights = weights.as<const float>(),
                                .mid = mid.as<float>(),
                                .out = out.as<float>(),
                                .out_stride = width,
                                .add = !before.empty()};
    if (batch.tokens > kMostHotTokens) {
      hot.run_many(stream, call);
    } else {
      hot.run_in(stream, call);
      hot.run_out(stream, call);
    }
    stream.copy(rows.data(), out.at(), rows.size() * sizeof(float));
    stream.wait();
    std::vector<float> got;
    for (size_t t = 0; t < tokens; ++t) {
      const auto row = rows.begin() + static_cast<int64_t>(t) * width;
      got.insert(got.end(), row, row + hidden);
      EXPECT_TRUE(std::all_of(row + hidden, row + width, [](float x) { return std::isnan(x); }))
          << "behind row " << t;
    }
    return got;
  }
};

// The experts that are not hot.
std::vector<uint8_t> cold_of(const ExpertsShape& shape, std::span<const int> hot) {
  std::vector<uint8_t> out(static_cast<size_t>(shape.experts), 1);
  for (const int expert : hot) out[static_cast<size_t>(expert)] = 0;
  return out;
}

struct HotCase {
  std::string_view name;
  Format format;
  Fragment fragment;
};

class GpuExpertsOfEveryFormat : public testing::TestWithParam<HotCase> {};

TEST_P(GpuExpertsOfEveryFormat, ByTheirDefinition) {
  const int unit = static_cast<int>(column_granularity(GetParam().format, 1 << 20));
  const int wide = std::max(unit, 128);
  const Layer layer({7, wide, 2 * wide}, GetParam().format, 1, /*biases=*/true);
  const Kernels table = packing_as(GetParam().fragment);
  Batch batch(2, 3, layer.shape, 2);
  batch.ids = {6, 2, 4, 0, 4, 6};
  const std::vector<int> hot = {2, 4, 6};
  const auto want = reference(layer, batch, {}, cold_of(layer.shape, hot).data());
  for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
    const Experts experts = make(layer, pool_of(1), {.precision = precision, .kernels = &table});
    HotLayer copies(experts, hot);
    const bool rounds = precision != Precision::kF32 && GetParam().format.code != Code::kF32;
    EXPECT_LT(relative_error(copies.run(batch, wide), want), rounds ? kRoundedBound : kHotBound);
  }
}

TEST_P(GpuExpertsOfEveryFormat, OfManyTokens) {
  const int unit = static_cast<int>(column_granularity(GetParam().format, 1 << 20));
  const int wide = std::max(unit, 64);
  const Layer layer({7, wide, 2 * wide}, GetParam().format, 1, /*biases=*/true);
  const Kernels table = packing_as(GetParam().fragment);
  const Experts experts = make(layer, pool_of(1), {.kernels = &table});
  const std::vector<int> hot = {2, 4, 6};
  HotLayer copies(experts, hot);
  EXPECT_EQ(copies.hot.takes(kMostHotTokens + 1), GetParam().format.code != Code::kF32);
  if (!copies.hot.takes(kMostHotTokens + 1)) return;
  const Batch batch(kMostHotTokens + 3, 3, layer.shape, 2);
  EXPECT_LT(
      relative_error(copies.run(batch, wide), reference(layer, batch, {}, cold_of(layer.shape, hot).data())),
      kRoundedBound);
}

std::vector<HotCase> hot_cases() {
  std::vector<HotCase> out;
  for (const NamedFormat& named : kFormats)
    if (gpu_reads(named.format))
      for (const Fragment& fragment : {Fragment{4, true}, Fragment{8, false}})
        out.push_back({named.name, named.format, fragment});
  return out;
}

INSTANTIATE_TEST_SUITE_P(All, GpuExpertsOfEveryFormat, testing::ValuesIn(hot_cases()), [](const auto& each) {
  return std::string(each.param.name) + "_" + std::to_string(each.param.fragment.step_bytes);
});

TEST(GpuExperts, OddShapesNoneSomeAndAllOfThem) {
  struct Shape {
    const char* format;
    int hidden, inter, tokens;
  };
  for (const Shape& of : {Shape{"f32", 197, 13, 3}, Shape{"bf16", 2880, 37, 1}, Shape{"int8", 33, 67, 5},
                          Shape{"q4_0", 2880, 96, 2}, Shape{"mxfp4", 96, 2880, 1}, Shape{"int4", 1, 1, 4}}) {
    const Layer layer({7, of.hidden, of.inter}, format_named(of.format), 3);
    const Experts experts = make(layer, pool_of(2), {.precision = Precision::kF32});
    const Batch batch(of.tokens, 3, layer.shape, 4);
    const auto want = reference(layer, batch, {});
    for (const std::vector<int>& hot : {std::vector<int>{}, {0, 1, 5}, every_expert(layer.shape)}) {
      HotLayer copies(experts, hot);
      EXPECT_EQ(copies.hot.bytes(), experts.packed_bytes() / 7 * hot.size());
      const std::vector<float> cold = run(experts, batch, copies.hot.skip());
      const auto got = hot.empty() ? cold : copies.run(batch, of.hidden, cold);
      EXPECT_LT(relative_error(got, want), kHotBound) << of.format << " " << of.hidden << " x " << of.inter;
    }
  }
}

TEST(GpuExperts, EveryActivationWithBiases) {
  const Layer layer({5, 80, 48}, format_named("f32"), 5, /*biases=*/true);
  const Batch batch(4, 2, layer.shape, 6);
  for (const Activation& activation :
       {Activation{.limit = 0.4f}, Activation{.limit = 7, .alpha = 1.702f},
        Activation{.limit = 0.3f, .alpha = 1.702f}, Activation{.kind = ActivationKind::kGeluTanh},
        Activation{.kind = ActivationKind::kGeluErf}}) {
    const Experts experts = make(layer, pool_of(1), {.activation = activation});
    HotLayer copies(experts, every_expert(layer.shape));
    EXPECT_LT(relative_error(copies.run(batch, 80), reference(layer, batch, activation)), kHotBound)
        << static_cast<int>(activation.kind) << ", " << activation.limit << ", " << activation.alpha;
  }
}

TEST(GpuExperts, GateAndUpOfTwoFormats) {
  for (const auto& [gate, up, down] :
       {std::tuple("q4_k", "q6_k", "q6_k"), std::tuple("bf16", "int4", "fp8_row"),
        std::tuple("mxfp4", "f32", "iq4_xs")}) {
    const Layer layer({4, 256, 256}, LayerFormats{format_named(gate), format_named(up), format_named(down)},
                      7, true);
    const Batch batch(3, 2, layer.shape, 8);
    for (const Precision precision : {Precision::kF32, Precision::kBf16}) {
      const Experts experts = make(layer, pool_of(1), {.precision = precision});
      HotLayer copies(experts, every_expert(layer.shape));
      EXPECT_LT(
          relative_error(copies.run(batch, 256), reference(layer, batch, {})),
          copies.hot.takes(kMostHotTokens + 1) ? kRoundedBound : kHotBound)  // which says whether it rounds
          << gate << ", " << up;
    }
  }
}

TEST(GpuExperts, PiecesOfSeveralNodes) {
  for (const char* format : {"int4_g32", "fp8", "f32"}) {
    const Layer layer({7, 160, format == std::string_view("f32") ? 83 : 256}, format_named(format), 9, true);
    const Batch batch(4, 3, layer.shape, 10);
    const std::vector<int> hot = {1, 2, 3, 6};
    for (const int nodes : {2, 3}) {
      const Experts experts = make(layer, pool_of(nodes, nodes), {.precision = Precision::kF32});
      HotLayer copies(experts, hot);
      EXPECT_EQ(copies.hot.bytes(), experts.packed_bytes() / 7 * 4);
      const auto got = copies.run(batch, 160, run(experts, batch, copies.hot.skip()));
      EXPECT_LT(relative_error(got, reference(layer, batch, {})), kHotBound)
          << format << ", " << nodes << " nodes";
    }
  }
}

// More tokens than a round has, one expert for nearly all of them and one for nobody, gate and up of two formats, two
// nodes, ids that are nobody's, and rows to which the copies add.
TEST(GpuExperts, PromptsOfAnyLengthAndChoice) {
  const Layer layer({6, 72, 96},
                    LayerFormats{format_named("int8"), format_named("bf16"), format_named("q8_0")}, 21,
                    /*biases=*/true);
  const Experts experts = make(layer, pool_of(2, 2));
  const std::vector<int> hot = {0, 2, 3, 5};
  HotLayer copies(experts, hot);
  for (const int tokens : {kMostHotTokens + 1, kRoundTokens, kRoundTokens + 65}) {
    Batch batch(tokens, 2, layer.shape, 22);
    for (size_t i = 0; i < batch.ids.size(); ++i) {
      int32_t& id = batch.ids[i];
      if (i % 2 == 0 && i % 6 != 0) id = 3;
      if (id == 5) id = i % 4 == 1 ? -1 : 6;
    }
    const std::vector<float> before = random_values(static_cast<size_t>(tokens * 72), 23);
    std::vector<double> want = reference(layer, batch, {}, cold_of(layer.shape, hot).data());
    for (size_t i = 0; i < want.size(); ++i) want[i] += before[i];
    EXPECT_LT(relative_error(copies.run(batch, 72, before), want), kRoundedBound) << tokens;
    // Pairs of an expert stand in another order when threads run in another one.
    const std::vector<float> once = copies.run(batch, 72);
    ::setenv("KT_TEST_CUDA_SEED", "77", 1);
    EXPECT_EQ(copies.run(batch, 72), once) << tokens;
    ::unsetenv("KT_TEST_CUDA_SEED");
  }
  Batch none(kMostHotTokens + 1, 2, layer.shape, 24);
  std::fill(none.ids.begin(), none.ids.end(), 4);
  const std::vector<float> zeros = copies.run(none, 72);
  EXPECT_TRUE(std::all_of(zeros.begin(), zeros.end(), [](float x) { return x == 0; }));
}

// Rows of a token alone, of the same in a step of others, and with threads in another order.
void check_batch_invariance(Precision precision) {
  const Layer layer({7, 192, 101}, format_named("int8"), 11, true);
  const Experts experts = make(layer, pool_of(1), {.precision = precision});
  Batch all(17, 4, layer.shape, 12);
  for (size_t i = 0; i < all.ids.size(); i += 5)
    all.ids[i] = i % 2 ? -1 : 7 + static_cast<int32_t>(i);        // nobody's
  for (size_t i = 1; i < all.ids.size(); i += 4) all.ids[i] = 3;  // everybody's, for some twice
  for (size_t i = 4 * 4; i < 5 * 4; ++i) all.ids[i] = 0;          // of a token that none of the copies is for
  HotLayer copies(experts, std::vector<int>{1, 3, 4, 6});
  const std::vector<float> whole = copies.run(all, 192);
  EXPECT_LT(relative_error(
                whole, reference(layer, all, {}, cold_of(layer.shape, std::vector<int>{1, 3, 4, 6}).data())),
            precision == Precision::kF32 ? kHotBound : kRoundedBound);
  EXPECT_TRUE(std::all_of(whole.begin() + 4 * 192, whole.begin() + 5 * 192, [](float x) { return x == 0; }));
  const auto part = [&](int first, int count) {
    Batch out = all;
    out.tokens = count;
    const auto cut = [&](auto& values, int each) {
      values.assign(values.begin() + first * each, values.begin() + (first + count) * each);
    };
    cut(out.input, 192);
    cut(out.weights, 4);
    cut(out.ids, 4);
    return out;
  };
  const char* const before = std::getenv("KT_TEST_CUDA_SEED");
  const std::string seed = before ? before : "1";
  for (const auto& [first, count] :
       {std::pair(0, 1), std::pair(3, 1), std::pair(16, 1), std::pair(5, 4), std::pair(0, 17)}) {
    ::setenv("KT_TEST_CUDA_SEED", std::to_string(first + 40).c_str(), 1);
    const std::vector<float> alone = copies.run(part(first, count), 192);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), whole.begin() + first * 192))
        << first << ", " << count;
  }
  ::setenv("KT_TEST_CUDA_SEED", seed.c_str(), 1);
}

TEST(GpuExperts, TheSameBitsInAnyBatch) {
  check_batch_invariance(Precision::kF32);
  check_batch_invariance(Precision::kBf16);
}

TEST(GpuExperts, PlansNeedNoGpuAndErrorsNameTheLayer) {
  const Layer layer({3, 64, 64}, format_named("int8"), 13);
  const std::vector<int> hot = {0, 2};
  Experts sizes(pool_of(1), std::make_shared<Workspace>(), layer.shape,
                {.gate = layer.format, .up = layer.format, .down = layer.format, .sizes_only = true});
  EXPECT_EQ(GpuExperts({}, sizes, hot, "layer").bytes(), sizes.packed_bytes() / 3 * 2);
  const Experts experts = make(layer, pool_of(1));
  EXPECT_THROW(HotLayer(experts, std::vector<int>{2, 0}), Error);
  EXPECT_THROW(HotLayer(experts, std::vector<int>{3}), Error);
  if (TestCuda::real()) return;
  const auto gpu = std::make_shared<Gpu>(0);
  GpuStream stream(gpu);
  TestCuda::get().fail_next("cuMemAlloc_v2", 2);
  try {
    GpuExperts({gpu, &stream}, experts, hot, "model.layers.3");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("experts of model.layers.3 needs "), std::string::npos)
        << error.what();
    EXPECT_EQ(error.kind(), ErrorKind::kMemory);
  }
}

// A router and its experts, as a layer of a model calls them.
struct RoutedStep {
  std::vector<float> out;
  Work work;
  size_t device_bytes = 0;
};

RoutedStep routed_step(Ops& ops, const Layer& layer, int tokens, std::span<const int> hot,
                       Precision precision = Precision::kF32) {
  constexpr int kTop = 3;
  const auto [experts, hidden, inter] = layer.shape;
  const auto placed = ops.make_experts(layer.shape,
                                       {.gate = layer.format,
                                        .up = layer.format,
                                        .down = layer.format,
                                        .precision = precision,
                                        .max_tokens = 128},
                                       {.name = "layer",
                                        .experts = experts,
                                        .load =
                                            [&](int e, FunctionRef<void(const ExpertRows&)> use) {
                                              const ExpertWeights w = layer.weights(e);
                                              use({.gate = reader_of_rows(w.gate),
                                                   .up = reader_of_rows(w.up),
                                                   .down = reader_of_rows(w.down)});
                                            }},
                                       hot);
  const auto router = ops.make_linear(
      quantise(format_named("f32"), random_values(static_cast<size_t>(experts * hidden), 3), experts, hidden)
          .view(),
      Precision::kF32, "router");
  const Rows x = ops.rows("x", hidden), scores = ops.rows("scores", experts), ids = ops.rows("ids", kTop),
             weights = ops.rows("weights", kTop), out = ops.rows("out", hidden);
  ops.allocate(tokens);
  const RouterSpec spec;
  RoutedStep done{.out = std::vector<float>(static_cast<size_t>(tokens * hidden)),
                  .work = {},
                  .device_bytes = placed->device_bytes()};
  const StepScope scope(ops, {.sequences = {}, .tokens = tokens});
  ops.write(random_values(static_cast<size_t>(tokens * hidden), 5), x);
  ops.route({.spec = &spec,
             .router = router.get(),
             .top_k = kTop,
             .x = x,
             .scores = scores,
             .ids = ids,
             .weights = weights});
  done.work -= ops.work();
  const RunExperts run{
      .experts = placed.get(), .top_k = kTop, .x = x, .ids = ids, .weights = weights, .out = out};
  ops.send_experts(run);
  ops.experts(run);
  ops.read(out, done.out);
  done.work += ops.work();
  return done;
}

TEST(GpuExperts, AsALayerCallsThemBesideTheCpu) {
  const Layer layer({11, 96, 64}, format_named("int4_g32"), 14);
  const auto operations = [](const Amount& amount) { return amount.integer_operations; };
  for (const int tokens : {1, 9, kMostHotTokens + 1}) {
    const auto cpu = make_cpu_ops(pool_of(2));
    const RoutedStep expected = routed_step(*cpu, layer, tokens, {});
    for (const std::vector<int>& hot : {std::vector<int>{}, {0, 3, 4, 7, 8, 10}, every_expert(layer.shape)}) {
      const auto gpu = make_gpu_ops(pool_of(2), {.number = 0, .gpu = std::make_shared<Gpu>(0)});
      RoutedStep found = routed_step(*gpu, layer, tokens, hot);
      ASSERT_LT(relative_error(found.out, std::vector<double>(expected.out.begin(), expected.out.end())),
                kHotBound)
          << tokens << " tokens, " << hot.size() << " hot";
      // Every pair counts once, where it runs: 6 of 11 experts have some of them, all have all.
      Work all = expected.work;
      const double pairs = operations(all.total()), there = operations(found.work.at(gpu->place())),
                   here = operations(found.work.at(kHost));
      EXPECT_DOUBLE_EQ(there + here, pairs);
      const bool few = tokens <= kMostHotTokens;
      EXPECT_EQ(there == 0, hot.empty() || !few);
      EXPECT_EQ(here == 0, hot.size() == 11 && few);
      EXPECT_EQ(found.device_bytes > 0, !hot.empty());
    }
  }
}

// With rounding allowed a prompt's hot pairs run on the GPU too.
TEST(GpuExperts, PromptsBesideTheCpu) {
  const Layer layer({11, 96, 64}, format_named("int4_g32"), 14);
  const int tokens = kMostHotTokens + 9;
  const auto cpu = make_cpu_ops(pool_of(2));
  const RoutedStep expected = routed_step(*cpu, layer, tokens, {});
  for (const std::vector<int>& hot : {std::vector<int>{0, 3, 4, 7, 8, 10}, every_expert(layer.shape)}) {
    const auto gpu = make_gpu_ops(pool_of(2), {.number = 0, .gpu = std::make_shared<Gpu>(0)});
    RoutedStep found = routed_step(*gpu, layer, tokens, hot, Precision::kBf16);
    EXPECT_LT(relative_error(found.out, std::vector<double>(expected.out.begin(), expected.out.end())),
              kRoundedBound);
    EXPECT_EQ(found.work.at(kHost).integer_operations == 0, hot.size() == 11);
  }
}

}  // namespace
}  // namespace kt::inline nn
