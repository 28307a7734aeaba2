#include "bench/train_bench.h"

#include <gtest/gtest.h>

#include "formats/known_formats.h"

namespace kt::inline bench {
namespace {

MoeSetup small(int layers) {
  MoeSetup setup;
  setup.pool = std::make_shared<Pool>(PoolOptions{.threads = 2});
  setup.kernels = &best_kernels();
  setup.shape = {.experts = 4, .hidden = 256, .inter = 128};
  setup.top_k = 2;
  setup.layers = layers;
  setup.max_tokens = 5;
  return setup;
}

TEST(MeasureTraining, FiguresHangTogether) {
  // 1 and 2: fewer layers than kinds of calls; 13: a backward two turns after its forward.
  for (const int layers : {1, 2, 13})
    for (const bool recompute : {false, true}) {
      SCOPED_TRACE(layers);
      const MoeSetup setup = small(layers);
      const MoeModel model(setup, format_named("int4"));
      Reader reader(setup.pool, *setup.kernels, 8 << 20);
      const TrainFigures f = measure_training(model, reader, {.tokens = 5, .rank = 3, .recompute = recompute},
                                              {.iterations = 40, .warmup = 3});
      EXPECT_EQ(f.recomputing.has_value(), recompute);
      for (const LimitFigures* call : {&f.forward, &f.keeping, &f.lora, &f.training, &f.backward}) {
        EXPECT_EQ(call->windows, 40);
        EXPECT_GT(call->seconds, 0);
        EXPECT_GT(call->limit_seconds, 0);
        EXPECT_EQ(call->operations, 6.0 * 256 * 128 * 2 * 5);
        EXPECT_EQ(call->product, training_product(best_kernels(), Precision::kDefault));
      }
      EXPECT_GT(f.experts_hit, 2);
      EXPECT_LE(f.experts_hit, 4);
      // gate|up: A [3, 256] and B [256, 3]; down: A [3, 128] and B [256, 3]; values and gradients
      EXPECT_EQ(f.lora_bytes, 4u * 3 * (256 + 256 + 128 + 256) * 2 * sizeof(float));
      EXPECT_GT(f.kept_bytes, 5u * 2 * 2 * 128 * 2);
      EXPECT_GT(f.workspace_bytes, 0u);
      EXPECT_GE(f.planned_bytes, f.kept_bytes);
    }
}

TEST(MeasureTraining, F32IsJudgedByItsOwnProduct) {
  EXPECT_EQ(training_product(best_kernels(), Precision::kF32), Product::kF32);
  const Product otherwise = has_product(best_kernels(), Product::kBf16) ? Product::kBf16 : Product::kF32;
  for (const Precision p : {Precision::kDefault, Precision::kInt8, Precision::kBf16})
    EXPECT_EQ(training_product(best_kernels(), p), otherwise);
}

}  // namespace
}  // namespace kt::inline bench
