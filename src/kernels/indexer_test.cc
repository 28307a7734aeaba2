// Scores of an indexer, the choice of the best and gathered keys, of every table: against plain loops, and scores to
// the bit against the first table and against the same keys in another batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "formats/floats.h"
#include "kernels/attention.h"
#include "kernels/testing/guarded_row.h"
#include "kernels/testing/tables.h"

namespace kt::inline kernels {
namespace {

constexpr KvType kTypes[] = {KvType::kF32, KvType::kBf16, KvType::kS8};

size_t block_bytes(KvType type, int width) {
  return static_cast<size_t>(kKvBlock * (width * kv_bytes(type) + (type == KvType::kS8 ? 4 : 0)));
}

// Rows of `width` numbers in blocks of the cache, and what the numbers became there. Places behind the last row are
// filled with what nobody may look at.
struct CachedRows {
  CachedRows(KvType type, bool keys, const std::vector<float>& rows, int width) : of(type) {
    const int count = static_cast<int>(rows.size()) / width, pack = kv_pack(type);
    bytes.resize(static_cast<size_t>((count + kKvBlock - 1) / kKvBlock) * block_bytes(type, width),
                 std::byte{0xff});
    values.resize(rows.size());
    for (int r = 0; r < count; ++r) {
      std::byte* block = bytes.data() + static_cast<size_t>(r / kKvBlock) * block_bytes(type, width);
      float most = 0;
      for (int i = 0; i < width; ++i)
        most = std::max(most, std::fabs(rows[static_cast<size_t>(r * width + i)]));
      const float scale = most / 127;
      if (type == KvType::kS8)
        std::memcpy(block + kKvBlock * width + 4 * (r % kKvBlock), &scale, sizeof scale);
      for (int i = 0; i < width; ++i) {
        const auto at = static_cast<size_t>(r * width + i);
        const int64_t place =
            keys ? key_place(pack, r % kKvBlock, i) : value_place(pack, width, r % kKvBlock, i);
        if (type == KvType::kF32) {
          std::memcpy(block + 4 * place, &rows[at], 4);
          values[at] = rows[at];
        } else if (type == KvType::kBf16) {
          const bf16 x = to_bf16(rows[at]);
          std::memcpy(block + 2 * place, &x.bits, 2);
          values[at] = to_f32(x);
        } else {
          const auto code = static_cast<int8_t>(std::lrint(rows[at] / scale));
          std::memcpy(block + place, &code, 1);
          values[at] = static_cast<double>(code) * scale;
        }
      }
    }
    for (size_t b = 0; b < bytes.size(); b += block_bytes(type, width)) pointers.push_back(bytes.data() + b);
  }
  KvType of;
  std::vector<std::byte> bytes;
  std::vector<double> values;
  std::vector<const void*> pointers;
};

struct IndexCase {
  KvType type;
  int heads, d, keys;
};

std::vector<float> index_scores(const Kernels& table, const IndexCase& c, const std::vector<float>& q,
                                const std::vector<float>& weights, const CachedRows& k) {
  const auto rows = static_cast<size_t>(AttendSums::padded(c.heads));
  std::vector<float> wide(static_cast<size_t>(c.heads * c.d));
  std::vector<uint16_t> narrow(rows * static_cast<size_t>(c.d));
  const bool both = c.type == KvType::kF32 || c.heads < table.attention->narrow_rows;
  for (int h = 0; h < c.heads; ++h)
    table.attention->query(c.type, q.data() + h * c.d, c.d, 1, c.d, both ? wide.data() + h * c.d : nullptr,
                           narrow.data() + h * c.d);
  Guarded scratch(attend_scratch_bytes(c.type, c.heads, c.d, false), 64);
  const int room = (c.keys + kKvBlock - 1) / kKvBlock * kKvBlock;
  const Row scores(std::vector<float>(static_cast<size_t>(room)));
  table.attention->index_scores({.type = c.type,
                                 .heads = c.heads,
                                 .d = c.d,
                                 .q = both ? wide.data() : nullptr,
                                 .q_bf16 = narrow.data(),
                                 .weights = weights.data(),
                                 .k = k.pointers.data(),
                                 .keys = c.keys,
                                 .scratch = scratch.as<std::byte>(),
                                 .scores = scores.data()});
  EXPECT_TRUE(scores.memory.intact() && scratch.intact()) << table.name;
  return {scores.data(), scores.data() + c.keys};
}

TEST(IndexerKernels, ScoresOfEveryShape) {
  constexpr double kLog2e = 1.4426950408889634;
  for (const KvType type : kTypes)
    for (const int heads : {1, 2, 3, 24, 33, 64})
      for (const int d : {32, 96, 128})
        for (const int keys : {1, 63, 64, 65, 256}) {
          if (!full_tests() && (heads * d + keys) % 3 == 1) continue;
          const IndexCase c{type, heads, d, keys};
          const std::vector<float> q = random_row(heads * d, 1), weights = random_row(heads, 2);
          const CachedRows k(type, true, random_row(keys * d, 3), d);
          std::vector<float> first;
          for (const Kernels* table : tables_under_test()) {
            const std::vector<float> got = index_scores(*table, c, q, weights, k);
            if (first.empty()) first = got;
            EXPECT_EQ(got, first) << table->name << " " << heads << " " << d << " " << keys;
          }
          for (int j = 0; j < keys; ++j) {
            double want = 0, size = 0;
            for (int h = 0; h < heads; ++h) {
              double dot = 0, each = 0;
              for (int i = 0; i < d; ++i) {
                float x = q[static_cast<size_t>(h * d + i)] * 1.44269504f;
                if (type != KvType::kF32) x = to_f32(to_bf16(x));
                dot += x * k.values[static_cast<size_t>(j * d + i)];
                each += std::fabs(x * k.values[static_cast<size_t>(j * d + i)]);
              }
              want += weights[static_cast<size_t>(h)] * std::max(dot, 0.0);
              size += std::fabs(weights[static_cast<size_t>(h)]) * each;
            }
            // f32 sums of d and of heads terms; the scale of a query is rounded once more.
            EXPECT_NEAR(first[static_cast<size_t>(j)], want, size * 6e-8 * (d / 16 + 8 + heads / 4) * kLog2e);
          }
        }
}

TEST(IndexerKernels, AScoreDoesNotDependOnOtherKeys) {
  const int heads = 24, d = 64, keys = 200;
  const std::vector<float> q = random_row(heads * d, 1), weights = random_row(heads, 2),
                           rows = random_row(keys * d, 3);
  for (const KvType type : kTypes)
    for (const Kernels* table : tables_under_test()) {
      const std::vector<float> all =
          index_scores(*table, {type, heads, d, keys}, q, weights, CachedRows(type, true, rows, d));
      for (const int some : {1, 17, 64, 100}) {
        const std::vector<float> cut(rows.begin(), rows.begin() + some * d);
        const std::vector<float> alone =
            index_scores(*table, {type, heads, d, some}, q, weights, CachedRows(type, true, cut, d));
        EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.begin())) << table->name << " " << some;
      }
    }
}

std::vector<uint64_t> best_of(const std::vector<float>& scores, int best) {
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  std::vector<uint64_t> out((scores.size() + 63) / 64);
  for (size_t i = 0; i < static_cast<size_t>(best); ++i) out[order[i] / 64] |= uint64_t{1} << (order[i] % 64);
  return out;
}

TEST(IndexerKernels, TheBestAndOfEqualOnesTheFirst) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const int count : {2, 63, 64, 65, 130, 700, 5000})
    for (const int best : {1, 16, 63, 64, 129, 2048}) {
      if (best >= count) continue;
      std::vector<std::vector<float>> inputs = {random_row(count, 1), random_row(count, 2)};
      for (float& x : inputs[1]) x = std::round(x);  // many equal ones
      inputs.emplace_back(static_cast<size_t>(count), 0.0f);
      for (size_t i = 0; i < inputs[2].size(); i += 3) inputs[2][i] = -0.0f;  // as good as the others
      inputs.push_back(random_row(count, 3));
      for (float& x : inputs[3]) x = -std::fabs(x) * 1e-40f;
      inputs[3][1] = -kInfinity;
      inputs[3][static_cast<size_t>(count) - 1] = kInfinity;
      for (const std::vector<float>& scores : inputs)
        for (const Kernels* table : tables_under_test()) {
          const Row row(scores);
          Guarded seen(static_cast<size_t>((count + 63) / 64) * sizeof(uint64_t), 8);
          table->attention->choose(
              {.scores = row.data(), .count = count, .best = best, .seen = seen.as<uint64_t>()});
          EXPECT_TRUE(row.memory.intact() && seen.intact()) << table->name;
          const std::vector<uint64_t> want = best_of(scores, best);
          EXPECT_TRUE(std::equal(want.begin(), want.end(), seen.as<uint64_t>()))
              << table->name << " " << best << " of " << count;
        }
    }
}

TEST(IndexerKernels, GatheredKeysAreWhatTheyWere) {
  for (const KvType type : kTypes)
    for (const bool keys : {false, true})
      for (const int width : {32, 96})
        for (const int count : {1, 2, 3, 31, 64}) {
          const CachedRows from(type, keys, random_row(200 * width, 4), width);
          std::vector<const void*> blocks;
          std::vector<uint8_t> places;
          std::vector<float> chosen;
          for (int s = 0; s < count; ++s) {
            const int key = (s * 37 + 11) % 200;
            blocks.push_back(from.pointers[static_cast<size_t>(key / kKvBlock)]);
            places.push_back(static_cast<uint8_t>(key % kKvBlock));
            const auto first = static_cast<size_t>(key * width);
            for (size_t i = first; i < first + static_cast<size_t>(width); ++i)
              chosen.push_back(static_cast<float>(from.values[i]));
          }
          // As if they had been written there one after the other, zeros behind them.
          CachedRows want(type, keys, chosen, width);
          for (int s = count; s < kKvBlock; ++s) {
            const float zero = 0;
            for (int i = 0; i < width; ++i) {
              const int pack = kv_pack(type);
              const int64_t place = keys ? key_place(pack, s, i) : value_place(pack, width, s, i);
              std::memset(want.bytes.data() + place * kv_bytes(type), 0, static_cast<size_t>(kv_bytes(type)));
            }
            if (type == KvType::kS8) std::memcpy(want.bytes.data() + kKvBlock * width + 4 * s, &zero, 4);
          }
          for (size_t s = 0; s < places.size() && type == KvType::kS8; ++s)
            std::memcpy(want.bytes.data() + static_cast<size_t>(kKvBlock * width) + 4 * s,
                        static_cast<const std::byte*>(blocks[s]) + kKvBlock * width + 4 * places[s], 4);
          for (const Kernels* table : tables_under_test()) {
            Guarded to(block_bytes(type, width), 64);
            table->attention->gather({.type = type,
                                      .keys = keys,
                                      .width = width,
                                      .count = count,
                                      .from = blocks.data(),
                                      .place = places.data(),
                                      .to = to.as<std::byte>()});
            EXPECT_TRUE(to.intact()) << table->name;
            EXPECT_TRUE(std::equal(want.bytes.begin(), want.bytes.end(), to.as<std::byte>()))
                << table->name << " " << count << " of " << width;
          }
        }
}

}  // namespace
}  // namespace kt::inline kernels
