// Attention over groups of blocks of keys, every table against a double-precision softmax over all keys at once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/attention.h"
#include "kernels/testing/activations.h"
#include "kernels/testing/guarded.h"
#include "kernels/testing/tables.h"

namespace kt::inline kernels {
namespace {

struct Case {
  KvType type;
  int rows, keys, d, dv;
  int window;           // keys a row sees at most; 0: all up to its own place
  bool shared = false;  // values are the first numbers of the keys
};

// Keys and values in the layout of the cache, and what the numbers became.
struct Blocks {
  size_t block_bytes(int columns) const {
    return static_cast<size_t>(kKvBlock * columns * kv_bytes(type) +
                               (type == KvType::kS8 ? kKvBlock * 4 : 0));
  }

  // shared: the keys stored as values, in v.
  Blocks(KvType t, int keys_count, int d, int dv, bool shared = false)
      : type(t), k_bytes(block_bytes(d)), v_bytes(shared ? k_bytes : block_bytes(dv)) {
    const size_t blocks = static_cast<size_t>((keys_count + kKvBlock - 1) / kKvBlock);
    k.resize(blocks * k_bytes);
    v.resize(blocks * v_bytes);
    const auto kv = random_rows(keys_count, d + dv, 2);
    for (int key = 0; key < keys_count; ++key) {
      std::vector<float> row(kv.begin() + key * (d + dv), kv.begin() + (key + 1) * (d + dv));
      for (int i = 0; i < d; ++i) row[i] *= 0.2f;
      std::byte* block = (shared ? v : k).data() + static_cast<size_t>(key / kKvBlock) * k_bytes;
      put(block, key % kKvBlock, row.data(), d, !shared, k_values);
      if (shared) continue;
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

// Rows as the kernels want them: as f32 where they ask for it.
struct Queries {
  Queries(const Kernels& t, const Case& c, const float* from, int rows)
      : q(static_cast<size_t>(rows * c.d)), narrow(static_cast<size_t>(AttendSums::padded(rows) * c.d)) {
    wide = c.type == KvType::kF32 || rows < t.attention->narrow_rows;
    for (int r = 0; r < rows; ++r)
      t.attention->query(c.type, from + r * c.d, c.d, 1.0f, c.d, wide ? q.data() + r * c.d : nullptr,
                         narrow.data() + r * c.d);
  }
  std::vector<float> q;
  std::vector<uint16_t> narrow;
  bool wide;
};

// Rows [begin, begin + rows) of all `c.rows` over the blocks from `first_block` on, a group or each block in a call of
// its own; sums as attend leaves them. `unseen` keys behind the last and before the first are blocks given in vain.
struct Run {
  int begin = 0, rows = 0;
  bool joined = false;  // groups by merge and join, not by attend
};

class Attending {
 public:
  Attending(const Kernels& t, const Case& c, const Blocks& blocks, const std::vector<float>& q,
            const Run& run)
      : t_(t), c_(c), blocks_(blocks), run_(run), queries_(t, c, q.data() + run.begin * c.d, run.rows) {
    const int groups = (c.keys + kGroupKeys - 1) / kGroupKeys;
    const int64_t floats = AttendSums::floats(run.rows, c.dv);
    Guarded memory(static_cast<size_t>(floats * (run.joined ? groups : 1)) * 4);
    for (int g = 0; g < groups; ++g) {
      const AttendSums sums = AttendSums::in(memory.as<float>() + (run.joined ? g * floats : 0), run.rows);
      group(g, sums, run.joined || g == 0);
    }
    const AttendSums whole = AttendSums::in(memory.as<float>(), run.rows);
    if (run.joined) {
      for (int g = 1; g < groups; ++g) {
        const AttendSums next = AttendSums::in(memory.as<float>() + g * floats, run.rows);
        t.attention->merge(static_cast<int>(AttendSums::padded(run.rows)), whole.top, whole.sum, next.top,
                           next.sum);
      }
      for (int row = 0; row < run.rows; row += 3)
        t.attention->join({.parts = memory.as<float>(),
                           .count = groups,
                           .rows = run.rows,
                           .dv = c.dv,
                           .row = row,
                           .end = std::min(run.rows, row + 3)});
    }
    EXPECT_TRUE(memory.intact()) << t.name;
    result.assign(whole.out, whole.out + run.rows * c.dv);
    for (int r = 0; r < run.rows; ++r)
      for (int i = 0; i < c.dv; ++i) result[static_cast<size_t>(r * c.dv + i)] /= whole.sum[r];
  }
  std::vector<float> result;  // out / sum

 private:
  // A row that stands far behind leaves blocks at the beginning unseen: those before the first that any row sees are
  // not even given.
  void group(int g, const AttendSums& sums, bool first) {
    const Place place{c_, c_.rows};
    const int blocks = (c_.keys + kKvBlock - 1) / kKvBlock;
    const int end =
        std::min({blocks, (g + 1) * kGroupBlocks, place.last(run_.begin + run_.rows - 1) / kKvBlock + 1});
    const int begin =
        std::clamp(place.first(run_.begin) / kKvBlock, g * kGroupBlocks, std::max(g * kGroupBlocks, end - 1));
    const int at = begin * kKvBlock;
    std::vector<const void*> k, v;
    for (int b = begin; b < std::max(end, begin + 1); ++b) {
      k.push_back(blocks_.k.data() + static_cast<size_t>(b) * blocks_.k_bytes);
      v.push_back(blocks_.v.data() + static_cast<size_t>(b) * blocks_.v_bytes);
    }
    std::vector<int32_t> from, to;
    for (int r = run_.begin; r < run_.begin + run_.rows; ++r) {
      from.push_back(place.first(r) - at);
      to.push_back(place.last(r) + 1 - at);
    }
    const int seen = place.last(run_.begin + run_.rows - 1) + 1 - at;
    Guarded scratch(attend_scratch_bytes(c_.type, run_.rows, c_.d, c_.shared));
    t_.attention->attend({.type = c_.type,
                          .rows = run_.rows,
                          .d = c_.d,
                          .dv = c_.dv,
                          .q = queries_.wide ? queries_.q.data() : nullptr,
                          .q_bf16 = c_.type == KvType::kF32 ? nullptr : queries_.narrow.data(),
                          .k = c_.shared ? nullptr : k.data(),
                          .v = v.data(),
                          .v_width = c_.shared ? c_.d : c_.dv,
                          .keys = std::clamp(seen, 1, static_cast<int>(k.size()) * kKvBlock),
                          .next = k.data(),
                          .next_count = 1,
                          .next_bytes = 256,
                          .begin = from.data(),
                          .end = to.data(),
                          .first = first,
                          .scratch = scratch.as(),
                          .sums = sums});
    EXPECT_TRUE(scratch.intact()) << t_.name;
  }

  const Kernels& t_;
  const Case& c_;
  const Blocks& blocks_;
  Run run_;
  Queries queries_;
};

std::vector<float> attend(const Kernels& t, const Case& c, const Blocks& blocks, const std::vector<float>& q,
                          const Run& run) {
  return Attending(t, c, blocks, q, run).result;
}

std::vector<float> queries(const Case& c) { return random_rows(c.rows, c.d, 1); }

// What becomes of a query: a logarithm to base 2, rounded as the type wants it.
double became(const Case& c, float q) {
  const float scaled = q * 1.44269504f;
  return c.type == KvType::kF32 ? scaled : to_f32(to_bf16(scaled));
}

// Each row alone, in batches of other sizes, and with groups joined behind each other's back: the same bits.
void check_batch_invariance(const Kernels& t, const Case& c, const Blocks& blocks,
                            const std::vector<float>& q, const std::vector<float>& got) {
  const auto rows_of = [&](int begin, int rows) {
    return std::vector<float>(got.begin() + begin * c.dv, got.begin() + (begin + rows) * c.dv);
  };
  for (int r = 0; r < c.rows; r += c.rows > 8 ? 7 : 1)
    ASSERT_EQ(rows_of(r, 1), attend(t, c, blocks, q, {r, 1})) << t.name << " row " << r;
  for (const int rows : {2, 3, 4, c.rows - c.rows / 2}) {
    if (rows > c.rows) continue;
    ASSERT_EQ(rows_of(c.rows - rows, rows), attend(t, c, blocks, q, {c.rows - rows, rows}))
        << t.name << " " << rows;
  }
  ASSERT_EQ(got, attend(t, c, blocks, q, {.begin = 0, .rows = c.rows, .joined = true})) << t.name;
}

void check(const Kernels& t, const Case& c) {
  const auto q = queries(c);
  const Blocks blocks(c.type, c.keys, c.d, c.shared ? 0 : c.dv, c.shared);
  const std::vector<float> got = attend(t, c, blocks, q, {0, c.rows});
  const Place place{c, c.rows};
  const int v_stride = c.shared ? c.d : c.dv;
  const std::vector<double>& values = c.shared ? blocks.k_values : blocks.v_values;
  for (int r = 0; r < c.rows; ++r) {
    std::vector<double> s(static_cast<size_t>(c.keys));
    double most = -1e300, all = 0;
    for (int j = place.first(r); j <= place.last(r); ++j) {
      for (int i = 0; i < c.d; ++i) s[j] += became(c, q[r * c.d + i]) * blocks.k_values[j * c.d + i];
      most = std::max(most, s[j]);
    }
    for (int j = place.first(r); j <= place.last(r); ++j) all += s[j] = std::exp2(s[j] - most);
    for (int i = 0; i < c.dv; ++i) {
      double want = 0, away = 0;
      for (int j = place.first(r); j <= place.last(r); ++j) want += s[j] / all * values[j * v_stride + i];
      for (int j = place.first(r); j <= place.last(r); ++j)
        away += s[j] / all * std::fabs(values[j * v_stride + i] - want);
      // Scores carry f32 error of d products (|q k| sums to a few hundred at most with the outliers): 1e-4 of the
      // exponent. Weights rounded to bf16 are off by 2^-8 each, and so is their sum.
      const double bound = 2e-3 + (c.type == KvType::kF32 ? 0 : away / 255);
      ASSERT_NEAR(got[r * c.dv + i], want, bound)
          << t.name << " row " << r << " column " << i << " keys " << c.keys;
    }
  }
  check_batch_invariance(t, c, blocks, q, got);
}

TEST(Attend, EveryTableAgainstDouble) {
  for (const Kernels* t : tables_under_test())
    for (const KvType type : {KvType::kF32, KvType::kBf16, KvType::kS8})
      for (const Case& c :
           {Case{type, 1, 1, 32, 32, 0}, Case{type, 1, 37, 64, 64, 0}, Case{type, 4, 40, 32, 96, 0},
            Case{type, 5, 133, 96, 64, 0}, Case{type, 9, 64, 64, 32, 5}, Case{type, 3, 350, 160, 32, 2},
            Case{type, 37, 200, 64, 128, 0}, Case{type, 33, 300, 32, 64, 70}, Case{type, 2, 257, 32, 32, 0},
            Case{type, 130, 330, 32, 32, 0}, Case{type, 6, 700, 32, 64, 200},
            Case{type, 8, 290, 64, 32, 0, true}, Case{type, 2, 130, 96, 96, 50, true}})
        check(*t, c);
}

// Keys cut anywhere in a group.
TEST(Attend, EveryNumberOfKeys) {
  for (const Kernels* t : tables_under_test())
    for (const KvType type : {KvType::kF32, KvType::kBf16, KvType::kS8})
      for (int keys = 4; keys <= 2 * kGroupKeys; keys += full_tests() ? 1 : 61)
        check(*t, {type, 4, keys, 32, 32, 0});
}

// Rows that see nothing of the group keep what they had; what they do not see may be anything among the keys.
TEST(Attend, UnseenKeysChangeNothing) {
  for (const Kernels* t : tables_under_test())
    for (const KvType type : {KvType::kF32, KvType::kBf16, KvType::kS8})
      for (const int rows : {2, 5}) {
        const Case c{type, rows, 200, 32, 32, 0};
        Blocks blocks(type, c.keys, c.d, c.dv);
        const Queries q(*t, c, queries(c).data(), rows);
        std::vector<int32_t> begin(static_cast<size_t>(rows), 140), end(static_cast<size_t>(rows), 150);
        begin[0] = 0, end[0] = -3;
        begin[1] = 190, end[1] = 190;
        const void *k[4], *v[4];
        for (int b = 0; b < 4; ++b) {
          k[b] = blocks.k.data() + static_cast<size_t>(b) * blocks.k_bytes;
          v[b] = blocks.v.data() + static_cast<size_t>(b) * blocks.v_bytes;
        }
        const auto sums = [&](bool first) {
          std::vector<float> memory(static_cast<size_t>(AttendSums::floats(rows, c.dv)), 1.5f);
          const AttendSums out = AttendSums::in(memory.data(), rows);
          std::fill_n(out.top, AttendSums::padded(rows), 3.0f);
          Guarded scratch(attend_scratch_bytes(type, rows, c.d, false));
          t->attention->attend({.type = type,
                                .rows = rows,
                                .d = c.d,
                                .dv = c.dv,
                                .q = q.wide ? q.q.data() : nullptr,
                                .q_bf16 = q.narrow.data(),
                                .k = k,
                                .v = v,
                                .v_width = c.dv,
                                .keys = 200,
                                .begin = begin.data(),
                                .end = end.data(),
                                .first = first,
                                .scratch = scratch.as(),
                                .sums = out});
          return memory;
        };
        const std::vector<float> before = sums(false), alone = sums(true);
        const AttendSums kept = AttendSums::in(const_cast<float*>(before.data()), rows);
        const AttendSums none = AttendSums::in(const_cast<float*>(alone.data()), rows);
        for (int r = 0; r < 2; ++r) {
          EXPECT_EQ(kept.top[r], 3) << t->name;
          EXPECT_EQ(kept.sum[r], 1.5f) << t->name;
          EXPECT_EQ(none.sum[r], 0) << t->name;
          for (int i = 0; i < c.dv; ++i) EXPECT_EQ(kept.out[r * c.dv + i], 1.5f) << t->name;
        }
        std::vector<float> with_nans;
        const uint32_t nan = 0x7fc07fc0u;
        for (const int key : {0, 139, 150, 199})
          for (int word = 0; word < c.d / kv_pack(type); ++word)
            std::memcpy(blocks.k.data() + static_cast<size_t>(key / 64) * blocks.k_bytes +
                            static_cast<size_t>((word * 64 + key % 64) * 4),
                        &nan, 4);
        for (const bool first : {true, false}) EXPECT_EQ(sums(first), first ? alone : before) << t->name;
      }
}

// A key that is no number must not be left out, nor make keys visible that are not.
TEST(Attend, ScoresThatAreNoNumbers) {
  for (const Kernels* t : tables_under_test())
    for (const KvType type : {KvType::kF32, KvType::kBf16})
      for (const int rows : {1, 3}) {
        const Case c{type, rows, 5 + rows, 32, 32, 0};
        Blocks blocks(type, c.keys, c.d, c.dv);
        const uint32_t nan = 0x7fc00000u, half = 0x7fc07fc0u;
        std::memcpy(blocks.k.data() + 4 * 2, type == KvType::kF32 ? &nan : &half, 4);  // a word of key 2
        for (const float x : attend(*t, c, blocks, queries(c), {0, rows}))
          ASSERT_TRUE(std::isnan(x)) << t->name;
      }
}

// Scores so far from zero that their logarithm has no fraction: the largest takes all.
TEST(Attend, ScoresOfAnySize) {
  for (const Kernels* t : tables_under_test())
    for (const KvType type : {KvType::kF32, KvType::kBf16})
      for (const float size : {1e4f, -1e4f, 1e7f, -1e7f, 1e15f, -1e15f}) {
        const Case c{type, 3, 70, 32, 32, 0};
        Blocks blocks(type, c.keys, c.d, c.dv);
        std::vector<float> q(static_cast<size_t>(c.rows * c.d), size);
        const auto got = attend(*t, c, blocks, q, {0, c.rows});
        for (int r = 0; r < c.rows; ++r) {
          std::vector<double> s(static_cast<size_t>(c.keys - c.rows + r + 1));
          for (size_t j = 0; j < s.size(); ++j)
            for (int i = 0; i < c.d; ++i)
              s[j] += blocks.k_values[j * static_cast<size_t>(c.d) + static_cast<size_t>(i)] * size;
          const auto most = static_cast<size_t>(std::max_element(s.begin(), s.end()) - s.begin());
          for (int i = 0; i < c.dv; ++i)
            ASSERT_NEAR(got[static_cast<size_t>(r * c.dv + i)],
                        blocks.v_values[most * static_cast<size_t>(c.dv) + static_cast<size_t>(i)], 1e-4)
                << t->name << " " << size;
        }
      }
}

TEST(Attend, KeysOfValues) {
  constexpr int kWidth = 96;
  for (const Kernels* t : tables_under_test())
    for (const KvType type : {KvType::kF32, KvType::kBf16}) {
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
}  // namespace kt::inline kernels
