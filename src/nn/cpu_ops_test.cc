#include "nn/cpu_ops.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "base/testing/random_values.h"

namespace kt::inline nn {
namespace {

std::shared_ptr<Pool> cpu_pool(int threads) {
  return std::make_shared<Pool>(PoolOptions{.threads = threads, .pin = false});
}

std::unique_ptr<PlacedLinear> linear_of(Ops& ops, const std::vector<float>& values, int64_t n, int64_t k) {
  return ops.make_linear(quantise(format_named("f32"), values, n, k).view(), Precision::kF32, "w");
}

// x W^T in double.
std::vector<double> product(const std::vector<float>& x, const std::vector<float>& w, int m, int64_t n,
                            int64_t k) {
  std::vector<double> out(static_cast<size_t>(m * n));
  for (int i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t c = 0; c < k; ++c)
        out[static_cast<size_t>(i * n + j)] += static_cast<double>(x[static_cast<size_t>(i * k + c)]) *
                                               static_cast<double>(w[static_cast<size_t>(j * k + c)]);
  return out;
}

// Numbers of size one: sums of up to 64 products of f32 are off by less than 64 * 2^-23 of them.
constexpr double kClose = 1e-4;

TEST(CpuOps, AnAdapterAddsToItsLinearAlone) {
  constexpr int kTokens = 5, kRank = 4;
  constexpr int64_t kIn = 48, kOut = 33;
  const auto ops = make_cpu_ops(cpu_pool(2));
  const std::vector<float> w = random_values(kOut * kIn, 1), other = random_values(kOut * kIn, 2),
                           a = random_values(kRank * kIn, 3), b = random_values(kOut * kRank, 4),
                           x = random_values(kTokens * kIn, 5);
  const auto linear = linear_of(*ops, w, kOut, kIn), plain = linear_of(*ops, other, kOut, kIn);
  auto down = linear_of(*ops, a, kRank, kIn), up = linear_of(*ops, b, kOut, kRank);
  const Rows in = ops->rows("in", kIn), out = ops->rows("out", kOut), beside = ops->rows("beside", kOut);
  ops->allocate(kTokens);
  linear->adapters.resize(2);  // the first adapter has nothing for it
  linear->adapters[1] = {.down = std::move(down), .up = std::move(up), .scale = 0.5f};
  const StepScope scope(*ops, {.sequences = {}, .tokens = kTokens, .adapter = 1});
  ops->write(x, in);
  const LinearUse uses[] = {{.weights = linear.get(), .x = in, .y = out},
                            {.weights = plain.get(), .x = in, .y = beside}};
  ops->linear(uses);
  std::vector<float> y(kTokens * kOut), z(kTokens * kOut);
  ops->read(out, y);
  ops->read(beside, z);
  std::vector<float> low;
  for (const double value : product(x, a, kTokens, kRank, kIn)) low.push_back(static_cast<float>(value));
  const auto base = product(x, w, kTokens, kOut, kIn), added = product(low, b, kTokens, kOut, kRank),
             untouched = product(x, other, kTokens, kOut, kIn);
  for (size_t i = 0; i < y.size(); ++i) {
    EXPECT_NEAR(y[i], base[i] + 0.5 * added[i], kClose);
    EXPECT_NEAR(z[i], untouched[i], kClose);
  }
}

// Steps without an adapter have the bits of a model that never had one, and so have those of another's.
TEST(CpuOps, OtherAdaptersChangeNoBit) {
  constexpr int64_t kIn = 48, kOut = 33;
  const auto ops = make_cpu_ops(cpu_pool(2));
  const std::vector<float> w = random_values(kOut * kIn, 1), x = random_values(kIn, 5);
  const auto plain = linear_of(*ops, w, kOut, kIn), adapted = linear_of(*ops, w, kOut, kIn);
  adapted->adapters.push_back({.down = linear_of(*ops, random_values(2 * kIn, 3), 2, kIn),
                               .up = linear_of(*ops, random_values(kOut * 2, 4), kOut, 2)});
  const Rows in = ops->rows("in", kIn), out = ops->rows("out", kOut), beside = ops->rows("beside", kOut);
  ops->allocate(1);
  for (const int adapter : {-1, 1, 0}) {
    const StepScope scope(*ops, {.sequences = {}, .tokens = 1, .adapter = adapter});
    ops->write(x, in);
    const LinearUse uses[] = {{.weights = plain.get(), .x = in, .y = out},
                              {.weights = adapted.get(), .x = in, .y = beside}};
    ops->linear(uses);
    std::vector<float> y(kOut), z(kOut);
    ops->read(out, y);
    ops->read(beside, z);
    EXPECT_EQ(y == z, adapter != 0) << "adapter " << adapter;
  }
}

// A step's angles are those of its positions, whatever ran before.
TEST(CpuOps, RotatesByThePositionsOfTheStep) {
  constexpr int kHeads = 2, kDims = 8;
  const auto ops = make_cpu_ops(cpu_pool(1));
  const KvShape shape{.heads = kHeads, .d = kDims, .dv = kDims, .type = KvType::kF32};
  const int first = ops->make_rotation({.dims = kDims}), again = ops->make_rotation({.dims = kDims}),
            other = ops->make_rotation({.dims = kDims, .theta = 100});
  EXPECT_EQ(first, again);
  EXPECT_NE(first, other);
  const Rows q = ops->rows("q", kHeads * kDims), k = ops->rows("k", kHeads * kDims),
             v = ops->rows("v", kHeads * kDims);
  ops->allocate(8);
  KvCache cache({.planes = {shape}, .states = {}}, 2);
  const int32_t pages[] = {0, 1};
  const std::vector<float> x = random_values(3 * kHeads * kDims, 9);
  for (const int position : {0, 7, 61}) {  // the last crosses a page
    const AttentionSequence sequence{.first = 0, .count = 3, .position = position, .pages = pages};
    const StepScope scope(*ops, {.sequences = {&sequence, 1}, .tokens = 3, .cache = &cache});
    for (const Rows rows : {q, k, v}) ops->write(x, rows);
    const HeadRows queries{.rows = q, .heads = kHeads, .stride = kDims},
        keys{.rows = k, .heads = kHeads, .stride = kDims};
    ops->rotate_write({.plane = 0, .rotation = other, .q = queries, .k = keys, .v = v});
    std::vector<float> rotated(x.size());
    ops->read(q, rotated);
    for (size_t t = 0; t < 3; ++t)
      for (size_t h = 0; h < kHeads; ++h)
        for (size_t i = 0; i < kDims / 2; ++i) {
          const size_t at = (t * kHeads + h) * kDims + i;
          const double angle =
              (position + static_cast<double>(t)) * std::pow(100.0, -2.0 * static_cast<double>(i) / kDims);
          EXPECT_NEAR(rotated[at], x[at] * std::cos(angle) - x[at + kDims / 2] * std::sin(angle), 1e-4);
        }
  }
}

// Whole queries, by the position of each token, whichever step it comes in; keys stay.
TEST(CpuOps, QueriesGrowWithTheirPositions) {
  constexpr int kHeads = 2, kDims = 8, kTokens = 70;
  constexpr QueryGrowth kGrowth{.beta = 0.25, .length = 16};
  const auto ops = make_cpu_ops(cpu_pool(2));
  const KvShape shape{.heads = kHeads, .d = kDims, .dv = kDims, .type = KvType::kF32};
  const int rotation = ops->make_rotation({.dims = 4});
  const Rows q = ops->rows("q", kHeads * kDims), k = ops->rows("k", kHeads * kDims),
             v = ops->rows("v", kHeads * kDims);
  ops->allocate(kTokens);
  KvCache cache({.planes = {shape}, .states = {}}, 2);
  const int32_t pages[] = {0, 1};
  const std::vector<float> x = random_values(kTokens * kHeads * kDims, 9);
  const auto run = [&](int from, int count, const QueryGrowth& growth, Rows read) {
    const AttentionSequence sequence{.first = 0, .count = count, .position = from, .pages = pages};
    const StepScope scope(*ops, {.sequences = {&sequence, 1}, .tokens = count, .cache = &cache});
    const auto rows = std::span<const float>(x).subspan(static_cast<size_t>(from * kHeads * kDims),
                                                        static_cast<size_t>(count * kHeads * kDims));
    for (const Rows each : {q, k, v}) ops->write(rows, each);
    ops->rotate_write({.plane = 0,
                       .rotation = rotation,
                       .q = {.rows = q, .heads = kHeads, .stride = kDims},
                       .k = {.rows = k, .heads = kHeads, .stride = kDims},
                       .v = v,
                       .growth = growth});
    std::vector<float> out(rows.size());
    ops->read(read, out);
    return out;
  };
  const std::vector<float> plain = run(0, kTokens, {}, q), grown = run(0, kTokens, kGrowth, q);
  EXPECT_EQ(run(0, kTokens, {}, k), run(0, kTokens, kGrowth, k));
  for (size_t i = 0; i < plain.size(); ++i) {
    const int position = static_cast<int>(i) / (kHeads * kDims);
    const double factor = 1 + 0.25 * std::log(1.0 + position / 16);
    EXPECT_NEAR(grown[i], plain[i] * factor, 1e-6 * std::abs(plain[i]));
    EXPECT_TRUE(position >= 16 || grown[i] == plain[i]);
  }
  for (const int cut : {1, 15, 16, 17, 64, 69}) {
    std::vector<float> pieces = run(0, cut, kGrowth, q);
    const std::vector<float> rest = run(cut, kTokens - cut, kGrowth, q);
    pieces.insert(pieces.end(), rest.begin(), rest.end());
    EXPECT_EQ(pieces, grown) << cut;
  }
}

// Pairs without a frequency have the bits they had, whatever the position; the others turn as in the whole head.
TEST(CpuOps, SomePairsStayStill) {
  constexpr int kDims = 8, kStill = 3, kTokens = 5;
  const auto ops = make_cpu_ops(cpu_pool(1));
  const KvShape shape{.heads = 1, .d = kDims, .dv = kDims, .type = KvType::kF32};
  const int all = ops->make_rotation({.dims = kDims}),
            some = ops->make_rotation({.dims = kDims, .still = kStill});
  EXPECT_NE(all, some);
  const Rows q = ops->rows("q", kDims), k = ops->rows("k", kDims), v = ops->rows("v", kDims);
  ops->allocate(kTokens);
  KvCache cache({.planes = {shape}, .states = {}}, 1);
  const int32_t page = 0;
  const std::vector<float> x = random_values(kTokens * kDims, 9);
  const auto run = [&](int rotation) {
    const AttentionSequence sequence{.first = 0, .count = kTokens, .position = 3, .pages = &page};
    const StepScope scope(*ops, {.sequences = {&sequence, 1}, .tokens = kTokens, .cache = &cache});
    for (const Rows rows : {q, k, v}) ops->write(x, rows);
    ops->rotate_write({.plane = 0,
                       .rotation = rotation,
                       .q = {.rows = q, .heads = 1, .stride = kDims},
                       .k = {.rows = k, .heads = 1, .stride = kDims},
                       .v = v});
    std::vector<float> out(x.size());
    ops->read(q, out);
    return out;
  };
  const std::vector<float> whole = run(all), part = run(some);
  for (size_t i = 0; i < x.size(); ++i)
    EXPECT_EQ(part[i], i % (kDims / 2) < kDims / 2 - kStill ? whole[i] : x[i]) << i;
  EXPECT_THROW(ops->make_rotation({.dims = kDims, .still = 5}), Error);
}

// Each head of values by itself; queries and keys stay.
TEST(CpuOps, ValuesAreNormed) {
  constexpr int kHeads = 3, kDims = 10, kTokens = 5;
  const auto ops = make_cpu_ops(cpu_pool(2));
  const KvShape shape{.heads = kHeads, .d = kDims, .dv = kDims, .type = KvType::kF32};
  const int still = ops->make_rotation({});
  const Rows q = ops->rows("q", kHeads * kDims), k = ops->rows("k", kHeads * kDims),
             v = ops->rows("v", kHeads * kDims);
  const auto ones = ops->make_vector(std::vector<float>(kDims, 1.0f));
  ops->allocate(kTokens);
  KvCache cache({.planes = {shape}, .states = {}}, 1);
  const int32_t page = 0;
  const std::vector<float> x = random_values(kTokens * kHeads * kDims, 9);
  const AttentionSequence sequence{.first = 0, .count = kTokens, .pages = &page};
  const StepScope scope(*ops, {.sequences = {&sequence, 1}, .tokens = kTokens, .cache = &cache});
  for (const Rows rows : {q, k, v}) ops->write(x, rows);
  ops->rotate_write({.plane = 0,
                     .rotation = still,
                     .norm_eps = 1e-3,
                     .q = {.rows = q, .heads = kHeads, .stride = kDims},
                     .k = {.rows = k, .heads = kHeads, .stride = kDims},
                     .v = v,
                     .v_norm = ones.get()});
  std::vector<float> keys(x.size()), values(x.size());
  ops->read(k, keys);
  ops->read(v, values);
  EXPECT_EQ(keys, x);
  for (size_t head = 0; head < kTokens * kHeads; ++head) {
    double squares = 0;
    for (size_t i = 0; i < kDims; ++i) squares += std::pow(static_cast<double>(x[head * kDims + i]), 2);
    for (size_t i = 0; i < kDims; ++i)
      EXPECT_NEAR(values[head * kDims + i], x[head * kDims + i] / std::sqrt(squares / kDims + 1e-3), 1e-6);
  }
}

// Also of more logits than one worker caps at a time. An ulp of the cap is 2e-6, and the logits below are off by as
// much as a product is.
TEST(CpuOps, LogitsUnderACap) {
  constexpr int kTokens = 3;
  constexpr int64_t kIn = 8, kOut = 9001;
  constexpr double kCap = 5;
  const auto ops = make_cpu_ops(cpu_pool(2));
  std::vector<float> w = random_values(kOut * kIn, 1);
  for (float& value : w) value *= 4;
  const std::vector<float> x = random_values(kTokens * kIn, 2);
  const auto head = linear_of(*ops, w, kOut, kIn);
  const Rows in = ops->rows("in", kIn);
  ops->allocate(kTokens);
  std::vector<float> capped(kTokens * kOut), plain(capped.size());
  for (const bool cap : {true, false}) {
    const StepScope scope(*ops,
                          {.sequences = {}, .tokens = kTokens, .logits = cap ? capped.data() : plain.data()});
    ops->write(x, in);
    ops->project(*head, in, kTokens, cap ? kCap : 0);
  }
  double largest = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_NEAR(capped[i], kCap * std::tanh(static_cast<double>(plain[i]) / kCap), 4e-6) << i;
    largest = std::max(largest, std::abs(static_cast<double>(plain[i])));
  }
  EXPECT_GT(largest, 2 * kCap);
}

TEST(CpuOps, EachExpertHasAScale) {
  constexpr int kTokens = 6, kExperts = 5, kTopK = 2;
  constexpr int64_t kIn = 8;
  const auto ops = make_cpu_ops(cpu_pool(2));
  const auto router = linear_of(*ops, random_values(kExperts * kIn, 1), kExperts, kIn);
  const std::vector<float> factors = {2, 3, 5, 7, 11};
  const auto scales = ops->make_vector(factors);
  const RouterSpec spec{.normalise = true};
  const Rows x = ops->rows("x", kIn), scores = ops->rows("scores", kExperts), ids = ops->rows("ids", kTopK),
             weights = ops->rows("weights", kTopK);
  ops->allocate(kTokens);
  const auto run = [&](const PlacedVector* with) {
    const StepScope scope(*ops, {.sequences = {}, .tokens = kTokens});
    ops->write(random_values(kTokens * kIn, 2), x);
    ops->route({.spec = &spec,
                .router = router.get(),
                .scales = with,
                .top_k = kTopK,
                .x = x,
                .scores = scores,
                .ids = ids,
                .weights = weights});
    std::pair<std::vector<int32_t>, std::vector<float>> out;
    out.first.resize(kTokens * kTopK);
    out.second.resize(kTokens * kTopK);
    ops->read_ids(ids, out.first);
    ops->read(weights, out.second);
    ops->scale(weights, 0.5f);
    std::vector<float> half(out.second.size());
    ops->read(weights, half);
    for (size_t i = 0; i < half.size(); ++i) EXPECT_EQ(half[i], out.second[i] / 2);
    return out;
  };
  const auto plain = run(nullptr), scaled = run(scales.get());
  EXPECT_EQ(plain.first, scaled.first);
  for (size_t i = 0; i < plain.second.size(); ++i)
    EXPECT_EQ(scaled.second[i], plain.second[i] * factors[static_cast<size_t>(plain.first[i])]);
}

TEST(CpuOps, MeasuringRunsNothing) {
  const auto ops = make_cpu_ops(cpu_pool(1), {.sizes_only = true});
  const RowReader shape{.format = format_named("int8"), .n = 64, .k = 32};
  const auto linear = ops->make_linear(shape, {}, Precision::kDefault, "w");
  const Rows in = ops->rows("in", 32), out = ops->rows("out", 64);
  const StepNeeds needs = ops->measure({.sequences = {}, .tokens = 10}, {}, [&] {
    const LinearUse use{.weights = linear.get(), .x = in, .y = out};
    ops->linear({&use, 1});
  });
  EXPECT_EQ(needs.work.total().integer_operations, 2.0 * 64 * 32 * 10);
  EXPECT_EQ(needs.work.total().bytes, linear->stored_bytes());
  EXPECT_GT(needs.workspace, 0u);
  EXPECT_EQ(ops->work().total().bytes, 0);
  EXPECT_THROW(ops->begin({}), Error);
}

}  // namespace
}  // namespace kt::inline nn
