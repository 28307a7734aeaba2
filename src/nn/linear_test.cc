#include "nn/linear.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "base/error.h"
#include "base/testing/random_values.h"

namespace kt::inline nn {
namespace {

struct Case {
  Matrix weights;
  std::vector<float> bias, dense;
  Case(std::string_view format, int64_t n, int64_t k, unsigned seed)
      : weights(quantise(format_named(format), random_values(static_cast<size_t>(n * k), seed), n, k)),
        bias(random_values(static_cast<size_t>(n), seed + 1)),
        dense(static_cast<size_t>(n * k)) {
    dequantise(weights.view(), dense);
  }
  double expected(const float* x, int64_t row) const {
    double sum = bias[static_cast<size_t>(row)];
    for (int64_t i = 0; i < weights.k; ++i)
      sum += static_cast<double>(x[i]) * dense[static_cast<size_t>(row * weights.k + i)];
    return sum;
  }
};

TEST(Linear, EveryFormatAgainstDouble) {
  const auto pool = std::make_shared<Pool>(
      PoolOptions{.threads = 2, .nodes = 2, .topology = Topology::synthetic("numa:2 core:1")});
  LinearWork work(pool);
  for (const char* format : {"f32", "bf16", "int8", "int4_g32", "fp8", "q4_k"}) {
    const Case a(format, 100, 256, 1), b(format, 256, 256, 5);
    const Linear first(*pool, a.weights.view(), a.bias, {.precision = Precision::kF32}, "a");
    const Linear second(*pool, b.weights.view(), b.bias, {.precision = Precision::kF32}, "b");
    for (const int m : {1, 3, 40}) {
      const std::vector<float> x = random_values(static_cast<size_t>(m) * 260, 9);
      std::vector<float> y(static_cast<size_t>(m) * 101, -7), z(static_cast<size_t>(m) * 256);
      const LinearCall calls[] = {{&first, x.data(), 260, y.data(), 101},
                                  {&second, x.data(), 260, z.data(), 256}};
      work.run(m, calls);
      // f32 sums of 256 products of magnitude about 3 in any order: below 256 * 2^-24 * 256
      for (int i = 0; i < m; ++i) {
        for (int64_t n = 0; n < 100; ++n)
          ASSERT_NEAR(y[static_cast<size_t>(i * 101 + n)], a.expected(x.data() + i * 260, n), 4e-3)
              << format << m;
        EXPECT_EQ(y[static_cast<size_t>(i * 101 + 100)], -7);
        for (int64_t n = 0; n < 256; ++n)
          ASSERT_NEAR(z[static_cast<size_t>(i * 256 + n)], b.expected(x.data() + i * 260, n), 4e-3)
              << format << m;
      }
    }
  }
}

TEST(Linear, SameBitsForAnyThreadCount) {
  const Case c("int8", 333, 320, 3);
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 2, 3}) {
    const auto pool = std::make_shared<Pool>(PoolOptions{.threads = threads, .pin = false});
    LinearWork work(pool);
    const Linear linear(*pool, c.weights.view(), c.bias, {}, "c");
    std::vector<float> all;
    for (const int m : {1, 5, 70}) {
      const std::vector<float> x = random_values(static_cast<size_t>(m) * 320, 4);
      std::vector<float> y(static_cast<size_t>(m) * 333);
      const LinearCall call{&linear, x.data(), 320, y.data(), 333};
      work.run(m, {&call, 1});
      all.insert(all.end(), y.begin(), y.end());
    }
    results.push_back(all);
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

// Rows are packed by several workers, and a router's row blocks are dealt one by one: each row is as if it were alone.
TEST(Linear, RowsTogetherAreAsAlone) {
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = 3, .pin = false});
  LinearWork work(pool);
  for (const char* format : {"f32", "int8", "int4_g32", "q4_k", "q4_0", "fp8"})
    for (const Precision precision : {Precision::kDefault, Precision::kF32}) {
      // Where float weights meet rounded activations, some instruction sets take one row another way than several.
      if (precision == Precision::kDefault && !is_integer(format_named(format).code)) continue;
      const Case c(format, 130, 512, 21);
      const Linear linear(*pool, c.weights.view(), c.bias, {.precision = precision}, "c");
      for (const int m : {2, 3, 5, 8}) {
        const std::vector<float> x = random_values(static_cast<size_t>(m) * 512, 4);
        std::vector<float> y(static_cast<size_t>(m) * 130), alone(y.size());
        const LinearCall together{&linear, x.data(), 512, y.data(), 130};
        work.run(m, {&together, 1});
        for (int i = 0; i < m; ++i) {
          const LinearCall one{&linear, x.data() + i * 512, 512, alone.data() + i * 130, 130};
          work.run(1, {&one, 1});
        }
        EXPECT_EQ(y, alone) << format << m;
      }
    }
}

// Every worker's first stretch lies in the matrix, and no two have a byte in common; of many rows there is none.
TEST(Linear, WhatWorkersReadFirst) {
  const auto pool = std::make_shared<Pool>(
      PoolOptions{.threads = 3, .nodes = 2, .topology = Topology::synthetic("numa:2 core:2"), .pin = false});
  LinearWork work(pool);
  const Case c("int8", 640, 256, 3);
  const Linear linear(*pool, c.weights.view(), c.bias, {}, "c");
  const std::vector<float> x = random_values(64 * 256, 4);
  std::vector<float> y(64 * 640);
  const LinearCall call{&linear, x.data(), 256, y.data(), 640};
  const Worker workers[] = {{0, 0, 2, 0}, {0, 1, 2, 1}, {1, 0, 1, 2}};
  work.run(1, {&call, 1});
  std::vector<Ahead::Stretch> firsts;
  std::vector<int> nodes;
  for (const Worker& worker : workers)
    for (const Ahead ahead = work.first_read(worker); const Ahead::Stretch& first : ahead.stretches()) {
      firsts.push_back(first);
      nodes.push_back(worker.node);
    }
  ASSERT_EQ(firsts.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    const std::span<const std::byte> node = linear.runs()[static_cast<size_t>(nodes[i])].bytes;
    ASSERT_FALSE(firsts[i].empty());
    EXPECT_GE(firsts[i].data(), node.data());
    EXPECT_LE(firsts[i].data() + firsts[i].size(), node.data() + node.size());
    for (size_t j = 0; j < i; ++j)
      EXPECT_TRUE(firsts[i].data() >= firsts[j].data() + firsts[j].size() ||
                  firsts[j].data() >= firsts[i].data() + firsts[i].size());
  }
  work.run(64, {&call, 1});
  EXPECT_TRUE(work.first_read(workers[0]).stretches().empty());
}

RowReader pieces_of(const Matrix& whole) {
  return {.format = whole.format, .n = whole.n, .k = whole.k, .rows = [&whole](int64_t first, int64_t count) {
            Matrix piece(whole.format, count, whole.k);
            const auto cut = [&](const std::vector<uint8_t>& from, int64_t rows_together,
                                 std::vector<uint8_t>& to) {
              if (to.empty()) return;
              const auto rows = static_cast<size_t>((whole.n + rows_together - 1) / rows_together);
              const size_t row = from.size() / rows;
              std::copy_n(from.begin() + first / rows_together * static_cast<int64_t>(row), to.size(),
                          to.begin());
            };
            cut(whole.codes, 1, piece.codes);
            cut(whole.scales, whole.format.span.n, piece.scales);
            cut(whole.mins, 1, piece.mins);
            cut(whole.supers, 1, piece.supers);
            cut(whole.super_mins, 1, piece.super_mins);
            return piece;
          }};
}

// Shapes of several pieces and of a part of one; scales that reach over 128 rows; two nodes.
TEST(Linear, PackedInPiecesItIsTheSame) {
  const auto pool = std::make_shared<Pool>(
      PoolOptions{.threads = 3, .nodes = 2, .topology = Topology::synthetic("numa:2 core:2"), .pin = false});
  LinearWork work(pool);
  for (const char* format : {"f32", "bf16", "int8", "int4_g32", "int4_g32_zero", "fp8", "q4_k"})
    for (const int64_t n : {1, 100, 1429}) {
      const Case c(format, n, 512, 11);
      const Linear whole(*pool, c.weights.view(), c.bias, {}, "whole"),
          pieces(*pool, pieces_of(c.weights), c.bias, {}, "pieces"),
          sizes(*pool, {.format = c.weights.format, .n = n, .k = 512}, c.bias, {.sizes_only = true}, "sizes");
      const std::vector<float> x = random_values(512, 2);
      std::vector<float> y(static_cast<size_t>(n)), z(static_cast<size_t>(n));
      const LinearCall calls[] = {{&whole, x.data(), 512, y.data(), n},
                                  {&pieces, x.data(), 512, z.data(), n}};
      work.run(1, calls);
      EXPECT_EQ(y, z) << format << n;
      EXPECT_EQ(sizes.packed_bytes(), whole.packed_bytes());
      EXPECT_EQ(whole.packed_bytes(0) + whole.packed_bytes(1), whole.packed_bytes());
    }
}

TEST(Linear, PiecesCutAtBlocksOfScales) {
  RowReader reader{.format = format_named("fp8"), .n = 1000, .k = 4096};
  EXPECT_EQ(piece_rows(reader), 128);
  reader.k = 256;
  EXPECT_EQ(piece_rows(reader) % 128, 0);
  EXPECT_LE(piece_rows(reader) * 256, 256 << 10);
  reader.format = format_named("bf16");
  reader.at_once = 100;
  reader.k = 1 << 20;
  EXPECT_EQ(piece_rows(reader), 112);
}

TEST(Linear, AnErrorWhileReadingIsThrown) {
  Pool pool({.threads = 2, .pin = false});
  const RowReader reader{
      .format = format_named("bf16"), .n = 4096, .k = 512, .rows = [](int64_t first, int64_t count) {
        if (first > 0) fail("row {} is bad", first);
        return Matrix(format_named("bf16"), count, 512);
      }};
  EXPECT_THROW(Linear(pool, reader, {}, {}, "q_proj"), Error);
}

// What a plan says is what a run takes.
TEST(Linear, WorkBytesAreKnownBefore) {
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = 2, .pin = false});
  const Case c("int8", 333, 320, 3);
  const Linear linear(*pool, c.weights.view(), c.bias, {}, "c"),
      sizes(*pool, {.format = c.weights.format, .n = 333, .k = 320}, c.bias, {.sizes_only = true}, "c");
  for (const int m : {1, 5, 70}) {
    LinearWork work(pool);
    const std::vector<float> x = random_values(static_cast<size_t>(m) * 320, 4);
    std::vector<float> y(static_cast<size_t>(m) * 333);
    const LinearCall planned{&sizes, x.data(), 320, nullptr, 333},
        call{&linear, x.data(), 320, y.data(), 333};
    const LinearWork::Bytes bytes = work.bytes_for(m, {&planned, 1});
    EXPECT_EQ(work.bytes(), 0u);
    work.run(m, {&call, 1});
    EXPECT_EQ(work.bytes(), bytes.rows + bytes.workers) << m;
    EXPECT_THROW(work.run(m, {&planned, 1}), Error);
  }
}

TEST(Linear, BadBias) {
  const Pool pool({.threads = 1});
  const Case c("bf16", 32, 64, 1);
  const std::vector<float> bias(31);
  try {
    const Linear linear(pool, c.weights.view(), bias, {}, "q_proj");
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "q_proj: expected 32 biases, got 31");
  }
}

}  // namespace
}  // namespace kt::inline nn
