#include "bench/limit_bench.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "bench/attention_bench.h"
#include "bench/linear_bench.h"

namespace kt::inline bench {
namespace {

AttentionSetup small_attention() {
  AttentionSetup setup;
  setup.pool = std::make_shared<Pool>(PoolOptions{.threads = 2});
  setup.kernels = &best_kernels();
  setup.heads = 8;
  setup.layers = 3;
  setup.shape = {.heads = 2, .d = 64, .dv = 64};
  setup.batch = 2;
  return setup;
}

void expect_sound(const LimitFigures& f) {
  EXPECT_GE(f.windows, 3);
  EXPECT_GT(f.seconds, 0);
  EXPECT_LE(f.best_seconds, f.seconds);
  EXPECT_GT(f.limit_seconds, 0);
  EXPECT_LE(f.p90_fraction, f.fraction);
  EXPECT_LE(f.fraction, f.best_fraction);
  EXPECT_EQ(f.counted.size(), static_cast<size_t>(f.noisy ? f.windows : f.windows - f.discarded));
}

TEST(LimitBench, RotatesOverItsCallsAndTakesTheLargerLimit) {
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = 2});
  Reader reader(pool, best_kernels(), 8 << 20);
  const std::vector<LimitCall> calls{{1e6, 1e3}, {1e6, 1e3}, {1e6, 1e3}};
  std::vector<size_t> order;
  const LimitFigures f = measure_against_limit({.pool = pool,
                                                .kernels = &best_kernels(),
                                                .product = Product::kF32,
                                                .reader = &reader,
                                                .calls = calls,
                                                .time = {.seconds = 0.02}},
                                               [&](size_t i) {
                                                 order.push_back(i);
                                                 std::this_thread::sleep_for(std::chrono::milliseconds(2));
                                               });
  expect_sound(f);
  EXPECT_TRUE(f.memory_bound);
  EXPECT_EQ(f.bytes, 1e6);
  EXPECT_EQ(f.operations, 1e3);
  EXPECT_EQ(f.product, Product::kF32);
  EXPECT_GE(f.seconds, 2e-3);
  ASSERT_EQ(order.size(), static_cast<size_t>(f.windows) + 1);
  EXPECT_EQ(order.front(), 2u);  // before the clock starts
  for (size_t i = 1; i < order.size(); ++i) EXPECT_EQ(order[i], (i - 1) % 3);
}

TEST(LimitBench, KindsTakeTurnsAndAreSummedUpApart) {
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = 2});
  Reader reader(pool, best_kernels(), 8 << 20);
  const std::vector<LimitCall> calls{{1e6, 1e3}, {2e6, 3e3}, {1e6, 1e3}, {2e6, 3e3}};
  std::vector<size_t> order;
  const std::vector<LimitFigures> kinds =
      measure_in_turns({.pool = pool,
                        .kernels = &best_kernels(),
                        .product = Product::kF32,
                        .reader = &reader,
                        .calls = calls,
                        .time = {.iterations = 5, .warmup = 2}},
                       2, [&](size_t i) {
                         order.push_back(i);
                         std::this_thread::sleep_for(std::chrono::milliseconds(i % 2 ? 8 : 2));
                       });
  ASSERT_EQ(kinds.size(), 2u);
  for (const LimitFigures& f : kinds) {
    expect_sound(f);
    EXPECT_EQ(f.windows, 5);
  }
  EXPECT_EQ(kinds[0].bytes, 1e6);
  EXPECT_EQ(kinds[1].bytes, 2e6);
  EXPECT_EQ(kinds[1].operations, 3e3);
  EXPECT_GE(kinds[0].seconds, 2e-3);
  EXPECT_GE(kinds[1].seconds, 8e-3);
  ASSERT_EQ(order.size(), 14u);  // two turns before the clock starts, five after
  for (size_t i = 0; i < order.size(); ++i) EXPECT_EQ(order[i], i % 4);
}

TEST(LimitBench, MultiplyingBindsWhereLittleIsRead) {
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = 2});
  Reader reader(pool, best_kernels(), 8 << 20);
  const std::vector<LimitCall> calls{{64, 1e9}};
  const LimitFigures f = measure_against_limit({.pool = pool,
                                                .kernels = &best_kernels(),
                                                .product = Product::kF32,
                                                .reader = &reader,
                                                .calls = calls,
                                                .time = {.seconds = 0.02}},
                                               [](size_t) {});
  EXPECT_FALSE(f.memory_bound);
  EXPECT_GT(f.fraction, 1);  // nothing was done
}

TEST(LimitBench, SoManyCallsAsWereAskedFor) {
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = 2});
  Reader reader(pool, best_kernels(), 8 << 20);
  const std::vector<LimitCall> calls{{1e6, 1e3}, {1e6, 1e3}};
  std::vector<size_t> order;
  const LimitFigures f = measure_against_limit({.pool = pool,
                                                .kernels = &best_kernels(),
                                                .product = Product::kF32,
                                                .reader = &reader,
                                                .calls = calls,
                                                .time = {.iterations = 5, .warmup = 3}},
                                               [&](size_t i) { order.push_back(i); });
  EXPECT_EQ(f.windows, 5);
  EXPECT_EQ(order, (std::vector<size_t>{1, 0, 1, 0, 1, 0, 1, 0}));
}

TEST(LimitBench, ItemsAreEachDoneOnce) {
  Pool pool(PoolOptions{.threads = 2});
  std::vector<std::atomic<int>> done(101);
  for_each_item(pool, done.size(), [&](size_t i) { ++done[i]; });
  for (const auto& count : done) EXPECT_EQ(count, 1);
  for_each_item(pool, 0, [](size_t) { FAIL(); });
}

TEST(LimitBench, BlocksFitTheMemory) {
  EXPECT_EQ(blocks_that_fit(1000, 100), 10u);
  EXPECT_EQ(blocks_that_fit(1001, 100), 11u);
  EXPECT_EQ(blocks_that_fit(1, 100), 1u);
  const size_t each = size_t{1} << 30;
  EXPECT_LT(blocks_that_fit(size_t{1} << 60, each), total_memory() / each + 1);
  EXPECT_EQ(blocks_that_fit(size_t{1} << 62, size_t{1} << 61), 1u);
}

TEST(KeysSeen, CausalChunks) {
  EXPECT_EQ(keys_seen(1, 1, 0), 1);
  EXPECT_EQ(keys_seen(1000, 1, 0), 1000);
  EXPECT_EQ(keys_seen(5, 5, 0), 1 + 2 + 3 + 4 + 5);
  EXPECT_EQ(keys_seen(10, 3, 0), 8 + 9 + 10);
  EXPECT_EQ(keys_seen(100'000, 100'000, 0), int64_t{100'000} * 100'001 / 2);  // more than 32 bits hold
}

TEST(KeysSeen, Windows) {
  EXPECT_EQ(keys_seen(10, 1, 4), 4);
  EXPECT_EQ(keys_seen(3, 1, 4), 3);
  EXPECT_EQ(keys_seen(6, 6, 4), 1 + 2 + 3 + 4 + 4 + 4);
  EXPECT_EQ(keys_seen(10, 3, 100), 8 + 9 + 10);
  EXPECT_EQ(keys_seen(10, 10, 1), 10);
}

TEST(AttentionCall, CountsStoredBytesOnceAndCausalOperations) {
  AttentionSetup setup = small_attention();
  const LimitCall decode = attention_call(setup, 100, 1);
  EXPECT_EQ(decode.bytes, 2.0 * 100 * 2 * (64 + 64) * 2);  // batch, keys, heads, width, bf16
  EXPECT_EQ(decode.operations, 2.0 * 2 * 8 * 100 * (64 + 64));
  const LimitCall chunk = attention_call(setup, 100, 3);
  EXPECT_EQ(chunk.bytes, decode.bytes);
  EXPECT_EQ(chunk.operations, 2.0 * 2 * 8 * (98 + 99 + 100) * (64 + 64));
  setup.shape.type = KvType::kF32;
  EXPECT_EQ(attention_call(setup, 100, 3).bytes, 2 * decode.bytes);
  EXPECT_EQ(attention_call(setup, 100, 3).operations, chunk.operations);
}

TEST(AttentionCall, WindowsReadWhatTheirTokensSee) {
  AttentionSetup setup = small_attention();
  setup.window = 10;
  const double token_bytes = 2.0 * 2 * (64 + 64) * 2;
  EXPECT_EQ(attention_call(setup, 100, 1).bytes, token_bytes * 10);
  EXPECT_EQ(attention_call(setup, 100, 3).bytes, token_bytes * 12);  // the first sees two more
  EXPECT_EQ(attention_call(setup, 100, 100).bytes, token_bytes * 100);
  EXPECT_EQ(attention_call(setup, 7, 1).bytes, token_bytes * 7);
  EXPECT_EQ(attention_call(setup, 100, 3).operations, 2.0 * 2 * 8 * 30 * (64 + 64));
}

TEST(AttentionCall, SharedValuesAreReadWithTheKeys) {
  AttentionSetup setup = small_attention();
  setup.heads = 16;
  setup.batch = 1;
  setup.layers = 1;
  setup.shape = {.heads = 1, .d = 576, .dv = 512, .shared = true};
  EXPECT_EQ(attention_call(setup, 64, 1).bytes, 64.0 * 576 * 2);
  EXPECT_EQ(attention_call(setup, 64, 1).operations, 2.0 * 16 * 64 * (576 + 512));
}

TEST(AttentionBench, MeasuresDecodeAndChunks) {
  const AttentionSetup setup = small_attention();
  const AttentionBench bench(setup, 200);
  EXPECT_EQ(bench.layers(), 3);
  EXPECT_EQ(bench.bytes(), 3u * 2 * 4 * setup.shape.page_bytes());
  Reader reader(setup.pool, *setup.kernels, 8 << 20);
  for (const int tokens : {1, 70, 200}) {
    const LimitFigures f = bench.measure(reader, tokens, {.seconds = 0.03});
    expect_sound(f);
    EXPECT_EQ(f.bytes, attention_call(setup, 200, tokens).bytes);
    EXPECT_EQ(f.operations, attention_call(setup, 200, tokens).operations);
  }
}

TEST(AttentionCall, ChosenKeysAreReadAndAllKeysOfTheIndexer) {
  AttentionSetup setup = small_attention();
  setup.indexer = {.budget = 10, .heads = 3, .dim = 32};
  const double token_bytes = 2.0 * 2 * (64 + 64) * 2, index_bytes = 2.0 * 32 * 2;
  const double seen = 2.0 * 2 * 8 * (64 + 64), scored = 2.0 * 2 * 3 * 32;
  const LimitCall decode = attention_call(setup, 100, 1);
  EXPECT_EQ(decode.bytes, token_bytes * 10 + index_bytes * 100);
  EXPECT_EQ(decode.operations, seen * 10 + scored * 100);
  // The first ten see no more than the budget, and nobody chooses for them.
  EXPECT_EQ(attention_call(setup, 12, 12).operations, seen * (45 + 3 * 10) + scored * (11 + 12));
  EXPECT_EQ(attention_call(setup, 10, 1).bytes, token_bytes * 10);
  EXPECT_EQ(attention_call(setup, 10, 1).operations, seen * 10);
}

TEST(AttentionBench, MeasuresChosenKeys) {
  AttentionSetup setup = small_attention();
  setup.indexer = {.budget = 20, .heads = 3, .dim = 32};
  const AttentionBench bench(setup, 200);
  EXPECT_EQ(bench.layers(), 3);
  const KvShape keys{.d = 32};
  EXPECT_EQ(bench.bytes(), 3u * 2 * 4 * (setup.shape.page_bytes() + keys.page_bytes()));
  Reader reader(setup.pool, *setup.kernels, 8 << 20);
  for (const int tokens : {1, 200}) {
    const LimitFigures f = bench.measure(reader, tokens, {.seconds = 0.03});
    expect_sound(f);
    EXPECT_EQ(f.operations, attention_call(setup, 200, tokens).operations);
  }
}

TEST(LinearBench, MeasuresCopies) {
  LinearSetup setup;
  setup.pool = std::make_shared<Pool>(PoolOptions{.threads = 2});
  setup.kernels = &best_kernels();
  setup.n = 96;
  setup.k = 256;
  setup.copies = 5;
  const LinearBench bench(setup, format_named("int8"));
  EXPECT_EQ(bench.copies(), 5);
  EXPECT_GE(bench.packed_bytes_ratio(), 0.9);
  Reader reader(setup.pool, *setup.kernels, 8 << 20);
  for (const int tokens : {1, 33}) {
    const LimitFigures f = bench.measure(reader, tokens, {.seconds = 0.03});
    expect_sound(f);
    EXPECT_EQ(f.operations, 2.0 * 96 * 256 * tokens);
    EXPECT_EQ(f.product, Product::kS8);
    EXPECT_NEAR(f.bytes, 96.0 * 256, 96.0 * 8);  // codes and a scale for each row
  }
}

}  // namespace
}  // namespace kt::inline bench
