// Attention over blocks of keys, every table against a double-precision softmax over all keys at once.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/attention.h"
#include "kernels/testing/activations.h"
#include "kernels/testing/guarded.h"
#include "kernels/testing/tables.h"

namespace kt {
namespace {

struct Case {
  KvType type;
  int rows, keys, d, dv;
  int window;  // keys a row sees at most; 0: all up to its own place
};

// Keys and values in the layout of the cache, and what the numbers became.
struct Blocks {
  size_t block_bytes(int columns) const {
    return static_cast<size_t>(kKvBlock * columns * kv_bytes(type) +
                               (type == KvType::kS8 ? kKvBlock * 4 : 0));
  }

  Blocks(KvType t, int keys_count, int d, int dv)
      : type(t), k_bytes(block_bytes(d)), v_bytes(block_bytes(dv)) {
    const size_t blocks = static_cast<size_t>((keys_count + kKvBlock - 1) / kKvBlock);
    k.resize(blocks * k_bytes);
    v.resize(blocks * v_bytes);
    const auto kv = random_rows(keys_count, d + dv, 2);
    for (int key = 0; key < keys_count; ++key) {
      std::vector<float> row(kv.begin() + key * (d + dv), kv.begin() + (key + 1) * (d + dv));
      for (int i = 0; i < d; ++i) row[i] *= 0.2f;
      put(k.data() + static_cast<size_t>(key / kKvBlock) * k_bytes, key % kKvBlock, row.data(), d, true,
          k_values);
      put(v.data() + static_cast<size_t>(key / kKvBlock) * v_bytes, key % kKvBlock, row.data() + d, dv, false,
          v_values);
    }
  }

  void put(std::byte* block, int key, const float* row, int width, bool is_key, std::vector<double>& became) {
    float most = 0;
    for (int i = 0; i < width; ++i) most = std::max(most, std::fabs(row[i]));
    const float scale = most / 127;
    const int pack = kv_pack(type);
    for (int i = 0; i < width; ++i) {
      const int64_t place = is_key ? key_place(pack, key, i) : value_place(pack, width, key, i);
      if (type == KvType::kF32) {
        std::memcpy(block + 4 * place, &row[i], 4);
        became.push_back(row[i]);
      } else if (type == KvType::kBf16) {
        const bf16 x = to_bf16(row[i]);
        std::memcpy(block + 2 * place, &x.bits, 2);
        became.push_back(to_f32(x));
      } else {
        const auto code = static_cast<int8_t>(std::lrint(row[i] / scale));
        std::memcpy(block + place, &code, 1);
        became.push_back(static_cast<double>(code) * scale);
      }
    }
    if (type == KvType::kS8) std::memcpy(block + kKvBlock * width + 4 * key, &scale, 4);
  }

  KvType type;
  size_t k_bytes, v_bytes;
  std::vector<std::byte> k, v;
  std::vector<double> k_values, v_values;  // [keys, d], [keys, dv]
};

// Row r stands at key keys - all + r and sees keys up to there.
struct Place {
  const Case& c;
  int all;
  int last(int r) const { return c.keys - all + r; }
  int first(int r) const { return c.window ? std::max(0, last(r) - c.window + 1) : 0; }
};

// out / sum of rows [begin, begin + rows), queries of all `c.rows`.
std::vector<float> attend(const Kernels& t, const Case& c, const Blocks& blocks, const std::vector<float>& q,
                          int begin, int rows) {
  const Place place{c, c.rows};
  const size_t tiles = static_cast<size_t>((rows + 15) / 16 * 16);
  Guarded scores(tiles * kKvBlock * 4), weights(tiles * kKvBlock * 2),
      out(static_cast<size_t>(rows * c.dv) * 4);
  std::memset(out.as(), 0, out.size());
  std::vector<uint16_t> q_bf16(tiles * static_cast<size_t>(c.d));
  const float* from = q.data() + begin * c.d;
  for (int i = 0; i < rows * c.d; ++i) q_bf16[static_cast<size_t>(i)] = to_bf16(from[i]).bits;
  std::vector<float> top(static_cast<size_t>(rows), -std::numeric_limits<float>::infinity()),
      sum(static_cast<size_t>(rows)), shrink(static_cast<size_t>(rows));
  for (int at = 0; at < c.keys; at += kKvBlock) {
    std::vector<int32_t> first, last;
    for (int r = begin; r < begin + rows; ++r) {
      first.push_back(place.first(r) - at);
      last.push_back(place.last(r) + 1 - at);
    }
    const std::byte* k = blocks.k.data() + static_cast<size_t>(at / kKvBlock) * blocks.k_bytes;
    const std::byte* v = blocks.v.data() + static_cast<size_t>(at / kKvBlock) * blocks.v_bytes;
    t.attention->attend({.type = c.type,
                         .rows = rows,
                         .d = c.d,
                         .dv = c.dv,
                         .q = from,
                         .q_bf16 = q_bf16.data(),
                         .k = k,
                         .v = v,
                         .v_width = c.dv,
                         .k_scales = reinterpret_cast<const float*>(k + kKvBlock * c.d),
                         .v_scales = reinterpret_cast<const float*>(v + kKvBlock * c.dv),
                         .keys = std::min(kKvBlock, c.keys - at),
                         .begin = first.data(),
                         .end = last.data(),
                         .scores = scores.as<float>(),
                         .weights = weights.as(),
                         .shrink = shrink.data(),
                         .top = top.data(),
                         .sum = sum.data(),
                         .out = out.as<float>()});
  }
  EXPECT_TRUE(out.intact() && scores.intact() && weights.intact()) << t.name;
  std::vector<float> result(out.as<float>(), out.as<float>() + rows * c.dv);
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < c.dv; ++i) result[static_cast<size_t>(r * c.dv + i)] /= sum[static_cast<size_t>(r)];
  return result;
}

std::vector<float> queries(const Case& c) {
  auto q = random_rows(c.rows, c.d, 1);
  if (c.type == KvType::kBf16)
    for (float& x : q) x = to_f32(to_bf16(x));
  return q;
}

void check(const Kernels& t, const Case& c) {
  const auto q = queries(c);
  const Blocks blocks(c.type, c.keys, c.d, c.dv);
  const std::vector<float> got = attend(t, c, blocks, q, 0, c.rows);
  const Place place{c, c.rows};
  // Scores carry f32 error of d products (|q k| sums to a few hundred at most with the outliers): 1e-4 of the
  // exponent. Weights rounded to bf16 are off by 2^-9 of values up to about 10, mostly cancelling.
  const double bound = c.type == KvType::kBf16 ? 2e-2 : 2e-3;
  for (int r = 0; r < c.rows; ++r) {
    std::vector<double> want(static_cast<size_t>(c.dv)), s(static_cast<size_t>(c.keys));
    double most = -1e300, all = 0;
    for (int j = place.first(r); j <= place.last(r); ++j) {
      for (int i = 0; i < c.d; ++i)
        s[j] += static_cast<double>(q[r * c.d + i]) * blocks.k_values[j * c.d + i];
      most = std::max(most, s[j]);
    }
    for (int j = place.first(r); j <= place.last(r); ++j) {
      const double p = std::exp(s[j] - most);
      all += p;
      for (int i = 0; i < c.dv; ++i) want[i] += p * blocks.v_values[j * c.dv + i];
    }
    for (int i = 0; i < c.dv; ++i)
      ASSERT_NEAR(got[r * c.dv + i], want[i] / all, bound)
          << t.name << " row " << r << " column " << i << " keys " << c.keys;
  }
  // Each row alone, and in company of another size: the same bits.
  for (int r = 0; r < c.rows; ++r) {
    const auto alone = attend(t, c, blocks, q, r, 1);
    ASSERT_EQ(std::vector<float>(got.begin() + r * c.dv, got.begin() + (r + 1) * c.dv), alone)
        << t.name << " row " << r;
  }
  const auto half = attend(t, c, blocks, q, c.rows / 2, c.rows - c.rows / 2);
  ASSERT_EQ(std::vector<float>(got.begin() + c.rows / 2 * c.dv, got.end()), half) << t.name;
}

TEST(Attend, EveryTableAgainstDouble) {
  for (const Kernels* t : tables_under_test())
    for (const KvType type : {KvType::kF32, KvType::kBf16, KvType::kS8})
      for (const Case& c :
           {Case{type, 1, 1, 32, 32, 0}, Case{type, 1, 37, 64, 64, 0}, Case{type, 4, 40, 32, 96, 0},
            Case{type, 5, 133, 96, 64, 0}, Case{type, 9, 64, 64, 32, 5}, Case{type, 3, 150, 160, 32, 2},
            Case{type, 37, 200, 128, 128, 0}})
        check(*t, c);
}

// A block in which a row sees nothing must leave the row's sums as they are.
TEST(Attend, UnseenBlocksChangeNothing) {
  for (const Kernels* t : tables_under_test()) {
    const Blocks blocks(KvType::kF32, 8, 32, 32);
    const auto q = random_rows(2, 32, 1);
    std::vector<float> scores(16 * kKvBlock), top = {3, 4}, sum = {5, 6}, out(64, 1.5f), shrink(2);
    const int32_t begin[] = {0, 9}, end[] = {-3, 20};
    t->attention->attend({.type = KvType::kF32,
                          .rows = 2,
                          .d = 32,
                          .dv = 32,
                          .q = q.data(),
                          .k = blocks.k.data(),
                          .v = blocks.v.data(),
                          .v_width = 32,
                          .keys = 8,
                          .begin = begin,
                          .end = end,
                          .scores = scores.data(),
                          .shrink = shrink.data(),
                          .top = top.data(),
                          .sum = sum.data(),
                          .out = out.data()});
    EXPECT_EQ(top, (std::vector<float>{3, 4})) << t->name;
    EXPECT_EQ(sum, (std::vector<float>{5, 6})) << t->name;
    EXPECT_EQ(out, std::vector<float>(64, 1.5f)) << t->name;
  }
}

// A key that is no number must not be left out, nor make keys visible that are not.
TEST(Attend, ScoresThatAreNoNumbers) {
  for (const Kernels* t : tables_under_test())
    for (const KvType type : {KvType::kF32, KvType::kBf16}) {
      const Case c{type, 1, 5, 32, 32, 0};
      Blocks blocks(type, c.keys, c.d, c.dv);
      const uint32_t nan = 0x7fc00000u, half = 0x7fc07fc0u;
      std::memcpy(blocks.k.data() + 4 * 2, type == KvType::kF32 ? &nan : &half, 4);  // a word of key 2
      for (const float x : attend(*t, c, blocks, queries(c), 0, 1)) ASSERT_TRUE(std::isnan(x)) << t->name;
    }
}

TEST(Attend, KeysOfValues) {
  constexpr int kWidth = 96;
  for (const Kernels* t : tables_under_test())
    for (const KvType type : {KvType::kF32, KvType::kBf16, KvType::kS8}) {
      const auto size = static_cast<size_t>(kv_bytes(type));
      std::vector<std::byte> values(kKvBlock * kWidth * size);
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::byte>(i * 131 + i / 256);
      Guarded keys(values.size());
      t->attention->keys_of_values(type, values.data(), kWidth, keys.as());
      ASSERT_TRUE(keys.intact()) << t->name;
      for (int key = 0; key < kKvBlock; ++key)
        for (int c = 0; c < kWidth; ++c)
          ASSERT_EQ(std::memcmp(keys.as() + static_cast<size_t>(key_place(kv_pack(type), key, c)) * size,
                                values.data() +
                                    static_cast<size_t>(value_place(kv_pack(type), kWidth, key, c)) * size,
                                size),
                    0)
              << t->name << " key " << key << " column " << c;
    }
}

}  // namespace
}  // namespace kt
