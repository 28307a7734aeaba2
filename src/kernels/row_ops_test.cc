// The work on single rows, of every table: against plain loops, and to the bit against the portable one.
#include "kernels/row_ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "formats/floats.h"
#include "kernels/testing/guarded_row.h"
#include "kernels/testing/tables.h"

namespace kt::inline kernels {
namespace {

constexpr int kSizes[] = {1, 3, 15, 16, 17, 63, 64, 100, 128, 576, 2880};

TEST(RowOps, NormOfEveryLength) {
  for (const int n : kSizes) {
    const std::vector<float> x = random_row(n, 1, 3), weight = random_row(n, 2);
    double sum = 0;
    for (const float v : x) sum += double{v} * v;
    const double factor = 1 / std::sqrt(sum / n + 1e-5);
    std::vector<float> first;
    for (const Kernels* table : tables_under_test()) {
      const Row from(x), w(weight), to(std::vector<float>(x.size()));
      table->rows->norm(from.data(), w.data(), 1e-5f, n, to.data());
      EXPECT_TRUE(from.memory.intact() && w.memory.intact() && to.memory.intact());
      for (int i = 0; i < n; ++i) {
        const double want = x[static_cast<size_t>(i)] * factor * weight[static_cast<size_t>(i)];
        EXPECT_NEAR(to.data()[i], want, 1e-6 * (1 + std::abs(want))) << table->name << " " << n;
      }
      table->rows->norm(from.data(), w.data(), 1e-5f, n, from.data());
      EXPECT_EQ(from.values(), to.values()) << "in place, " << table->name;
      if (first.empty()) first = to.values();
      EXPECT_EQ(to.values(), first) << table->name << " " << n;
    }
  }
}

TEST(RowOps, LayerNormOfEveryLength) {
  for (const int n : kSizes) {
    std::vector<float> x = random_row(n, 1, 3);
    for (float& v : x) v += 5;
    const std::vector<float> weight = random_row(n, 2), bias = random_row(n, 3);
    double mean = 0, square = 0;
    for (const float v : x) mean += v / static_cast<double>(n);
    for (const float v : x) square += (v - mean) * (v - mean) / n;
    const double factor = 1 / std::sqrt(square + 1e-5);
    std::vector<float> first;
    for (const Kernels* table : tables_under_test()) {
      const Row from(x), w(weight), b(bias), to(std::vector<float>(x.size()));
      table->rows->layer_norm(from.data(), w.data(), b.data(), 1e-5f, n, to.data());
      EXPECT_TRUE(from.memory.intact() && w.memory.intact() && b.memory.intact() && to.memory.intact());
      for (size_t i = 0; i < x.size(); ++i) {
        const double want = (x[i] - mean) * factor * weight[i] + bias[i];
        EXPECT_NEAR(to.data()[i], want, 4e-6 * (1 + std::abs(want))) << table->name << " " << n;
      }
      table->rows->layer_norm(from.data(), w.data(), b.data(), 1e-5f, n, from.data());
      EXPECT_EQ(from.values(), to.values()) << "in place, " << table->name;
      if (first.empty()) first = to.values();
      EXPECT_EQ(to.values(), first) << table->name << " " << n;
    }
  }
}

TEST(RowOps, RotationsOfHalvesAndOfNeighbours) {
  for (const bool interleaved : {false, true})
    for (const int half : {1, 3, 8, 16, 32, 37, 64}) {
      const int heads = 3, stride = 2 * half + 5;
      const std::vector<float> x = random_row(heads * stride, 3), cosines = random_row(half, 4),
                               sines = random_row(half, 5);
      std::vector<float> want = x;
      for (int h = 0; h < heads; ++h)
        for (int i = 0; i < half; ++i) {
          float* head = want.data() + h * stride;
          float &a = head[interleaved ? 2 * i : i], &b = head[interleaved ? 2 * i + 1 : i + half];
          const auto at = static_cast<size_t>(i);
          const float p = a * cosines[at] - b * sines[at], q = b * cosines[at] + a * sines[at];
          a = p;
          b = q;
        }
      for (const Kernels* table : tables_under_test()) {
        const Row row(x), c(cosines), s(sines);
        table->rows->rotate({.x = row.data(),
                             .heads = heads,
                             .stride = stride,
                             .half = half,
                             .interleaved = interleaved,
                             .cosines = c.data(),
                             .sines = s.data()});
        EXPECT_TRUE(row.memory.intact());
        EXPECT_EQ(row.values(), want) << table->name << " " << half;
      }
    }
}

TEST(RowOps, ScoresOfRouters) {
  for (const int n : kSizes) {
    const std::vector<float> x = random_row(n, 6, 8);
    const double most = *std::max_element(x.begin(), x.end());
    double sum = 0;
    for (const float v : x) sum += std::exp(v - most);
    std::vector<float> first_soft, first_sigmoid;
    for (const Kernels* table : tables_under_test()) {
      const Row soft(x), each(x);
      table->rows->softmax(soft.data(), n);
      table->rows->sigmoid(each.data(), n);
      EXPECT_TRUE(soft.memory.intact() && each.memory.intact());
      for (int i = 0; i < n; ++i) {
        const double v = x[static_cast<size_t>(i)], p = std::exp(v - most) / sum, s = 1 / (1 + std::exp(-v));
        EXPECT_NEAR(soft.data()[i], p, 4e-6 * p + 1e-37) << table->name << " " << n;
        EXPECT_NEAR(each.data()[i], s, 1e-6 * s) << table->name << " " << n;
      }
      if (first_soft.empty()) first_soft = soft.values(), first_sigmoid = each.values();
      EXPECT_EQ(soft.values(), first_soft) << table->name;
      EXPECT_EQ(each.values(), first_sigmoid) << table->name;
    }
  }
}

// What a block of the cache says about one number.
float stored(const CacheRows& args, int slot, int column) {
  const int pack = kv_pack(args.type);
  const int64_t at =
      args.keys ? key_place(pack, slot, column) : value_place(pack, args.width_pad, slot, column);
  if (args.type == KvType::kF32) return static_cast<const float*>(args.block)[at];
  if (args.type == KvType::kBf16) return to_f32(bf16{static_cast<const uint16_t*>(args.block)[at]});
  return static_cast<float>(static_cast<const int8_t*>(args.block)[at]) * args.scales[slot];
}

TEST(RowOps, RowsOfTheCacheInEveryTypeAndPlace) {
  for (const KvType type : {KvType::kF32, KvType::kBf16, KvType::kS8})
    for (const bool keys : {true, false})
      for (const int width : {1, 17, 32, 100, 128})
        for (const auto& [slot, count] : {std::pair{0, 64}, {0, 1}, {3, 1}, {1, 7}, {62, 2}, {5, 59}}) {
          const int pad = (width + kKvColumns - 1) / kKvColumns * kKvColumns, stride = width + 3;
          const std::vector<float> rows = random_row((count - 1) * stride + width, 7);
          for (const Kernels* table : tables_under_test()) {
            const Row from(rows);
            Guarded block(static_cast<size_t>(kKvBlock * pad * kv_bytes(type)), 4), scales(kKvBlock * 4, 4);
            std::memset(block.as(), 0, block.size());
            const CacheRows args{.type = type,
                                 .keys = keys,
                                 .rows = from.data(),
                                 .stride = stride,
                                 .count = count,
                                 .slot = slot,
                                 .width = width,
                                 .width_pad = pad,
                                 .block = block.as(),
                                 .scales = scales.as<float>()};
            table->rows->write_cache(args);
            ASSERT_TRUE(block.intact() && scales.intact()) << table->name;
            for (int s = 0; s < kKvBlock; ++s)
              for (int c = 0; c < width; ++c) {
                const bool inside = s >= slot && s < slot + count;
                const float want = inside ? rows[static_cast<size_t>((s - slot) * stride + c)] : 0;
                const float step = type == KvType::kF32 || !inside ? 0
                                   : type == KvType::kBf16         ? std::abs(want) / 256
                                                                   : args.scales[s] / 2 * 1.0001f;
                if (!inside && type == KvType::kS8) {
                  ASSERT_EQ(block.as<int8_t>()[keys ? key_place(4, s, c) : value_place(4, pad, s, c)], 0);
                } else {
                  ASSERT_NEAR(stored(args, s, c), want, step)
                      << table->name << " " << width << " " << s << " " << c;
                }
              }
          }
        }
}

}  // namespace
}  // namespace kt::inline kernels
