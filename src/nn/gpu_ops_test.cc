// Operations on a GPU beside the same on the CPU, and attention beside a double loop. On the test driver, or on a GPU
// with KT_TEST_REAL_CUDA=1.
#include "nn/gpu_ops.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "base/testing/random_values.h"
#include "cuda/testing/test_cuda.h"
#include "nn/cpu_ops.h"
#include "nn/testing/reference_layer.h"

namespace kt::inline nn {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::shared_ptr<Pool> two_threads() {
  return std::make_shared<Pool>(PoolOptions{.threads = 2, .pin = false});
}
std::unique_ptr<Ops> on_gpu() {
  return make_gpu_ops(two_threads(), {.number = 0, .gpu = std::make_shared<Gpu>(0)});
}
std::unique_ptr<Ops> on_cpu() { return make_cpu_ops(two_threads()); }

// Sums in another order and other exponentials, of numbers of size one.
constexpr float kNear = 2e-5f;

void expect_close(const std::vector<float>& ours, const std::vector<float>& theirs, float bound = kNear) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); ++i)
    ASSERT_NEAR(ours[i], theirs[i], bound * (1 + std::abs(theirs[i]))) << "number " << i;
}

// What `run` leaves in the rows it returns, with x [tokens, width] in the rows it is given.
template <typename Run>
std::vector<float> result(Ops& ops, int tokens, int64_t width, const std::vector<float>& x, const Run& run) {
  const Rows in = ops.rows("in", width);
  const auto body = run(ops, in);
  ops.allocate(tokens);
  const StepScope scope(ops, {.sequences = {}, .tokens = tokens, .adapter = 0});
  ops.write(x, in);
  const Rows out = body();
  std::vector<float> y(static_cast<size_t>(tokens * out.width));
  ops.read(out, y);
  return y;
}

template <typename Run>
void expect_same(int tokens, int64_t width, const Run& run) {
  const std::vector<float> x = random_values(static_cast<size_t>(tokens * width), 7);
  const auto gpu = on_gpu(), cpu = on_cpu();
  expect_close(result(*gpu, tokens, width, x, run), result(*cpu, tokens, width, x, run));
}

TEST(GpuOps, NormsAndSums) {
  for (const int64_t width : {1, 7, 256, 2880}) {
    expect_same(3, width, [&](Ops& ops, Rows in) {
      const Rows out = ops.rows("out", width);
      std::shared_ptr<PlacedVector> weights = ops.make_vector(random_values(static_cast<size_t>(width), 2));
      return [&ops, in, out, weights] {
        ops.norm(in, *weights, 1e-6, out);
        ops.add_norm(in, out, *weights, 1e-5, out);
        ops.add(out, in);
        ops.sigmoid(out);
        return out;
      };
    });
  }
}

TEST(GpuOps, CopiesOfHeadsAndPickedRows) {
  expect_same(5, 12, [](Ops& ops, Rows in) {
    const Rows out = ops.rows("out", 10);
    return [&ops, in, out] {
      ops.write(std::vector<float>(50, 0.5f), out);
      ops.copy_heads(
          {.from = {in, 1}, .to = {out, 2}, .from_stride = 4, .to_stride = 3, .heads = 2, .count = 3});
      const int wanted[] = {0, 2, 3};
      ops.pick(out, wanted);
      return out;
    };
  });
}

TEST(GpuOps, MlpsOfEveryActivationWithFactors) {
  constexpr int64_t kHidden = 48, kInter = 80;
  for (const Activation& activation :
       {Activation{}, Activation{.kind = ActivationKind::kSwiGlu, .limit = 0.5f, .alpha = 1.7f},
        Activation{.kind = ActivationKind::kGeluTanh}, Activation{.kind = ActivationKind::kGeluErf}}) {
    expect_same(9, kHidden, [&](Ops& ops, Rows in) {
      const Rows out = ops.rows("out", kHidden), factors = ops.rows("factors", 1);
      const Format f32 = format_named("f32");
      // So small that numbers of every product are of size one.
      const auto small = [&](unsigned seed) {
        std::vector<float> values = random_values(kInter * kHidden, seed);
        for (float& value : values) value *= 0.12f;
        return values;
      };
      const Matrix gate = quantise(f32, small(1), kInter, kHidden),
                   up = quantise(f32, small(2), kInter, kHidden),
                   down = quantise(f32, small(3), kHidden, kInter);
      const std::vector<float> bias = random_values(kInter, 4), out_bias = random_values(kHidden, 5);
      const auto reader = [](const Matrix& matrix) {
        return RowReader{.format = matrix.format,
                         .n = matrix.n,
                         .k = matrix.k,
                         .rows = [&matrix](int64_t first, int64_t count) {
                           std::vector<float> all(static_cast<size_t>(matrix.n * matrix.k));
                           dequantise(matrix.view(), all);
                           return quantise(matrix.format,
                                           std::span(all).subspan(static_cast<size_t>(first * matrix.k),
                                                                  static_cast<size_t>(count * matrix.k)),
                                           count, matrix.k);
                         }};
      };
      std::shared_ptr<PlacedExperts> mlp = ops.make_mlp(
          {.experts = 1, .hidden = kHidden, .inter = kInter},
          {.gate = f32,
           .up = f32,
           .down = f32,
           .activation = activation,
           .precision = Precision::kF32,
           .max_tokens = 16},
          {.name = "mlp", .experts = 1, .load = [&](int, FunctionRef<void(const ExpertRows&)> use) {
             use({.gate = reader(gate),
                  .up = reader(up),
                  .down = reader(down),
                  .gate_bias = bias.data(),
                  .up_bias = bias.data(),
                  .down_bias = out_bias.data()});
           }});
      return [&ops, in, out, factors, mlp] {
        ops.write(random_values(9, 6), factors);
        ops.mlp({.mlp = mlp.get(), .x = in, .factors = factors, .out = out});
        return out;
      };
    });
  }
}

TEST(GpuOps, AnAdapterAddsToItsLinear) {
  expect_same(5, 48, [](Ops& ops, Rows in) {
    const auto linear = [&](int64_t n, int64_t k, unsigned seed) {
      const Matrix values =
          quantise(format_named("f32"), random_values(static_cast<size_t>(n * k), seed), n, k);
      return ops.make_linear(values.view(), Precision::kF32, "w");
    };
    const Rows out = ops.rows("out", 33);
    const std::shared_ptr<PlacedLinear> w = linear(33, 48, 1);
    w->adapters.push_back({.down = linear(4, 48, 2), .up = linear(33, 4, 3), .scale = 0.5f});
    return [&ops, in, out, w] {
      const LinearUse use{.weights = w.get(), .x = in, .y = out};
      ops.linear({&use, 1});
      return out;
    };
  });
}

TEST(GpuOps, RoutersChooseWhatTheCpuChooses) {
  std::vector<RouterSpec> specs(7);
  specs[1].normalise = true;
  specs[2].score_of_chosen = true;
  specs[3].score = RouterSpec::Score::kSigmoid;
  specs[3].normalise = true, specs[3].normalise_floor = 1e-20, specs[3].scale = 2.5;
  specs[4] = specs[3];
  specs[4].groups = 6, specs[4].top_groups = 2, specs[4].group_score = RouterSpec::GroupScore::kTopTwo;
  specs[4].correction_bias = true;
  specs[5].groups = 3, specs[5].top_groups = 1;
  specs[6].normalise = true, specs[6].normalise_least = 0.9;
  constexpr int kExperts = 42, kTokens = 33, kTop = 5;
  constexpr int64_t kHidden = 24;
  std::vector<float> w = random_values(kExperts * kHidden, 3);
  std::copy_n(w.begin() + 7 * kHidden, 2 * kHidden,
              w.begin() + 20 * kHidden);  // 20 and 21 score as 7 and 8 do
  for (const RouterSpec& spec : specs) {
    std::vector<int32_t> ids[2];
    std::vector<float> weights[2];
    for (const bool gpu : {false, true}) {
      const auto ops = gpu ? on_gpu() : on_cpu();
      const auto router =
          ops->make_linear(quantise(format_named("f32"), w, kExperts, kHidden).view(), Precision::kF32, "r");
      const auto correction = ops->make_vector(random_values(kExperts, 9));
      const Rows x = ops->rows("x", kHidden), scores = ops->rows("scores", kExperts),
                 chosen = ops->rows("ids", kTop), factors = ops->rows("weights", kTop);
      ops->allocate(kTokens);
      const StepScope scope(*ops, {.sequences = {}, .tokens = kTokens});
      ops->write(random_values(kTokens * kHidden, 5), x);
      ops->route({.spec = &spec,
                  .router = router.get(),
                  .correction = spec.correction_bias ? correction.get() : nullptr,
                  .top_k = kTop,
                  .x = x,
                  .scores = scores,
                  .ids = chosen,
                  .weights = factors});
      ids[gpu].resize(kTokens * kTop);
      ops->read_ids(chosen, ids[gpu]);
      weights[gpu].resize(kTokens * kTop);
      ops->read(factors, weights[gpu]);
    }
    EXPECT_EQ(ids[1], ids[0]);
    expect_close(weights[1], weights[0]);
  }
}

// Softmax attention by its definition, of one sequence in two steps.
struct AttentionCase {
  KvShape shape;
  int heads = 1, window = 0;
  bool sinks = false, exact = true;
};

void check_attention(const AttentionCase& of) {
  constexpr int kTokens = 150, kCut = 70;
  const KvShape& shape = of.shape;
  const int64_t q_width = int64_t{of.heads} * shape.d, k_width = int64_t{shape.heads} * shape.d,
                v_width = int64_t{shape.heads} * shape.dv, out_width = int64_t{of.heads} * shape.dv;
  const std::vector<float> q = random_values(kTokens * q_width, 1), k = random_values(kTokens * k_width, 2),
                           v = random_values(kTokens * v_width, 3), sink = random_values(of.heads, 4);
  const auto ops = on_gpu();
  const auto sinks = ops->make_vector(sink);
  const int rotation = ops->make_rotation({.dims = 0});
  const Rows qs = ops->rows("q", q_width), ks = ops->rows("k", k_width), vs = ops->rows("v", v_width),
             outs = ops->rows("out", out_width);
  ops->allocate(kTokens);
  const auto cache = ops->make_cache({.planes = {shape}, .states = {}}, 4, 0);
  const int32_t pages[] = {2, 0, 3};
  std::vector<float> ours;
  for (const auto& [begin, end] : {std::pair(0, kCut), std::pair(kCut, kTokens)}) {
    const AttentionSequence sequence{.first = 0, .count = end - begin, .position = begin, .pages = pages};
    const StepScope scope(*ops, {.sequences = {&sequence, 1}, .tokens = end - begin, .cache = cache.get()});
    const auto part = [&, first = begin, last = end](const std::vector<float>& all, int64_t width) {
      return std::span(all).subspan(static_cast<size_t>(first * width),
                                    static_cast<size_t>((last - first) * width));
    };
    ops->write(part(q, q_width), qs);
    ops->write(part(k, k_width), ks);
    ops->write(part(v, v_width), vs);
    ops->rotate_write({.plane = 0,
                       .rotation = rotation,
                       .q = {.rows = qs, .heads = of.heads, .stride = shape.d},
                       .k = {.rows = ks, .heads = shape.heads, .stride = shape.d},
                       .v = shape.shared ? Rows{} : vs});
    ops->attend({.plane = 0,
                 .q = qs,
                 .out = outs,
                 .heads = of.heads,
                 .scale = 0.3f,
                 .window = of.window,
                 .sinks = of.sinks ? sinks.get() : nullptr,
                 .exact = of.exact});
    std::vector<float> rows(static_cast<size_t>((end - begin) * out_width));
    ops->read(outs, rows);
    ours.insert(ours.end(), rows.begin(), rows.end());
  }
  // bf16 rounds keys and values by 2^-9 of them, int8 by 1/254 of a row's largest number.
  const double bound = shape.type == KvType::kF32 ? 2e-5 : 0.04;
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < of.heads; ++h) {
      const int kv = h / (of.heads / shape.heads), oldest = of.window ? std::max(0, t - of.window + 1) : 0;
      std::vector<double> out(static_cast<size_t>(shape.dv));
      double sum = of.sinks ? std::exp(static_cast<double>(sink[static_cast<size_t>(h)])) : 0;
      for (int s = oldest; s <= t; ++s) {
        double dot = 0;
        for (int i = 0; i < shape.d; ++i)
          dot += static_cast<double>(q[static_cast<size_t>(t * q_width + h * shape.d + i)]) *
                 static_cast<double>(k[static_cast<size_t>(s * k_width + kv * shape.d + i)]);
        const double p = std::exp(dot * static_cast<double>(0.3f));
        sum += p;
        for (int i = 0; i < shape.dv; ++i)
          out[static_cast<size_t>(i)] +=
              p * static_cast<double>(shape.shared ? k[static_cast<size_t>(s * k_width + kv * shape.d + i)]
                                                   : v[static_cast<size_t>(s * v_width + kv * shape.dv + i)]);
      }
      for (int i = 0; i < shape.dv; ++i)
        ASSERT_NEAR(ours[static_cast<size_t>(t * out_width + h * shape.dv + i)],
                    out[static_cast<size_t>(i)] / sum, bound)
            << "token " << t << ", head " << h << ", column " << i;
    }
  }
}

TEST(GpuOps, AttentionByItsDefinition) {
  for (const KvType type : {KvType::kF32, KvType::kBf16, KvType::kS8}) {
    check_attention({.shape = {.heads = 2, .d = 8, .dv = 8, .type = type}, .heads = 4});
    check_attention(
        {.shape = {.heads = 1, .d = 40, .dv = 24, .type = type}, .heads = 3, .window = 17, .sinks = true});
    check_attention({.shape = {.heads = 1, .d = 36, .dv = 32, .shared = true, .type = type}, .heads = 5});
    check_attention({.shape = {.heads = 1, .d = 40, .dv = 136, .type = type}, .heads = 3, .exact = false});
  }
}

TEST(GpuOps, HeadsThatAreTooWideAreRefused) {
  const auto ops = on_gpu();
  EXPECT_THROW(ops->make_cache({.planes = {{.heads = 1, .d = 1024, .dv = 1024}}, .states = {}}, 1, 0), Error);
}

TEST(GpuOps, FormatsThatNoKernelReadsAreRefusedByName) {
  const auto ops = make_gpu_ops(two_threads(), {.number = 0, .sizes_only = true});
  for (const char* name : {"iq2_xxs", "iq3_s", "iq1_m", "nvfp4"}) {
    std::mt19937 random(1);
    const Matrix w = made_of(format_named(name), random_values(16 * 256, 1), 16, 256, random);
    EXPECT_THAT(error_of([&] { ops->make_linear(w.view(), Precision::kDefault, "blk.3.attn_q"); }),
                AllOf(HasSubstr("blk.3.attn_q"), HasSubstr(name), HasSubstr("`linear_format`")));
  }
}

TEST(GpuOps, PlansNeedNoGpu) {
  const auto ops = make_gpu_ops(two_threads(), {.number = 3, .sizes_only = true});
  const auto linear = ops->make_linear(
      quantise(format_named("int8"), random_values(64 * 64, 1), 64, 64).view(), Precision::kDefault, "w");
  EXPECT_EQ(ops->place(), (Place{.kind = Place::Kind::kGpu, .index = 3}));
  EXPECT_EQ(linear->packed_bytes(0), 0u);
  EXPECT_GE(linear->device_bytes(), 64u * 64u);
}

}  // namespace
}  // namespace kt::inline nn
