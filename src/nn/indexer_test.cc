// Keys chosen by an indexer, and attention that sees no others: against plain loops in double, and the same bits
// however a sequence is cut, whoever else is in the step and however many threads there are.
#include "nn/indexer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/testing/random_values.h"
#include "kernels/table.h"
#include "nn/attention.h"
#include "nn/kv_write.h"

namespace kt::inline nn {
namespace {

constexpr int kIndexHeads = 24, kDim = 40, kBudget = 80, kLengths[] = {700, 81, 5, 130};
constexpr int kWords = 11;  // pages of the longest

struct IndexSetting {
  KvType type;
  int heads, kv_heads, d, dv;
  bool shared;
};

// Queries of all sequences, one after the other: what they see, and what attention gives.
struct Result {
  std::vector<std::vector<uint64_t>> seen;  // of each sequence [tokens, kWords]
  std::vector<std::vector<float>> out;      // [tokens, heads * dv]
  bool operator==(const Result&) const = default;
};

class ChoosingLayer {
 public:
  explicit ChoosingLayer(const IndexSetting& setting) : s_(setting) {
    const unsigned width = static_cast<unsigned>(kIndexHeads * kDim);
    for (const int length : kLengths) {
      const auto rows = [&](int64_t columns, unsigned seed) {
        return random_values(static_cast<size_t>(length * columns), seed + static_cast<unsigned>(length));
      };
      sequences_.push_back({.length = length,
                            .iq = rows(width, 1),
                            .ik = rows(kDim, 2),
                            .weights = rows(kIndexHeads, 3),
                            .q = rows(s_.heads * s_.d, 4),
                            .k = rows(s_.kv_heads * s_.d, 5),
                            .v = rows(s_.kv_heads * s_.dv, 6)});
    }
  }

  // Steps of at most `chunk` tokens of each of these sequences.
  Result run(int threads, int chunk, const std::vector<size_t>& which) const {
    const auto pool = std::make_shared<Pool>(PoolOptions{.threads = threads, .pin = false});
    KvCache cache(
        {.planes = {{.heads = s_.kv_heads, .d = s_.d, .dv = s_.dv, .shared = s_.shared, .type = s_.type},
                    {.d = kDim, .type = s_.type}},
         .states = {}},
        40);
    IndexerWork indexer(pool, best_kernels());
    AttentionWork attention(pool, best_kernels());
    Result result;
    std::vector<std::vector<int32_t>> pages;
    int page = 39;
    for (const size_t i : which) {
      auto& mine = pages.emplace_back();
      for (int t = 0; t < sequences_[i].length; t += kPageTokens) mine.push_back(page--);
      result.seen.emplace_back();
      result.out.emplace_back();
    }
    for (int first = 0; first < 700; first += chunk) {
      std::vector<AttentionSequence> steps;
      std::vector<size_t> owners;
      Rows rows;
      int tokens = 0;
      for (size_t n = 0; n < which.size(); ++n) {
        const Sequence& one = sequences_[which[n]];
        const int end = std::min(one.length, first + chunk);
        if (first >= end) continue;
        steps.push_back({.first = tokens, .count = end - first, .position = first, .pages = pages[n].data()});
        owners.push_back(n);
        tokens += end - first;
        rows.take(one, first, end, s_);
      }
      step(cache, *pool, indexer, attention, steps, rows, tokens);
      for (size_t n = 0; n < steps.size(); ++n) {
        const auto take = [&](auto& to, const auto& from, int64_t columns) {
          to.insert(to.end(), from.begin() + steps[n].first * columns,
                    from.begin() + (steps[n].first + steps[n].count) * columns);
        };
        take(result.seen[owners[n]], rows.seen, kWords);
        take(result.out[owners[n]], rows.out, s_.heads * s_.dv);
      }
    }
    return result;
  }

  // In double, of the numbers as they are: what f32 keeps.
  void check(const Result& result) const {
    for (size_t i = 0; i < sequences_.size(); ++i)
      for (int t = 0; t < sequences_[i].length; ++t) check(sequences_[i], t, result.seen[i], result.out[i]);
  }

 private:
  struct Sequence {
    int length;
    std::vector<float> iq, ik, weights, q, k, v;
  };
  struct Rows {
    std::vector<float> iq, ik, weights, q, k, v, out;
    std::vector<uint64_t> seen;
    void take(const Sequence& one, int first, int end, const IndexSetting& s) {
      const auto add = [&](std::vector<float>& to, const std::vector<float>& from, int64_t columns) {
        to.insert(to.end(), from.begin() + first * columns, from.begin() + end * columns);
      };
      add(iq, one.iq, kIndexHeads * kDim);
      add(ik, one.ik, kDim);
      add(weights, one.weights, kIndexHeads);
      add(q, one.q, s.heads * s.d);
      add(k, one.k, s.kv_heads * s.d);
      add(v, one.v, s.kv_heads * s.dv);
    }
  };

  void step(KvCache& cache, Pool& pool, IndexerWork& indexer, AttentionWork& attention,
            const std::vector<AttentionSequence>& steps, Rows& rows, int tokens) const {
    rows.seen.assign(static_cast<size_t>(tokens * kWords), 0);
    rows.out.resize(static_cast<size_t>(tokens * s_.heads * s_.dv));
    write_cache(cache, pool, best_kernels(),
                {.plane = 0,
                 .sequences = steps,
                 .k = rows.k.data(),
                 .v = rows.v.data(),
                 .k_stride = s_.kv_heads * s_.d,
                 .v_stride = s_.kv_heads * s_.dv});
    write_cache(cache, pool, best_kernels(),
                {.plane = 1, .sequences = steps, .k = rows.ik.data(), .k_stride = kDim});
    indexer.run(cache, {.plane = 1,
                        .sequences = steps,
                        .q = rows.iq.data(),
                        .q_stride = kIndexHeads * kDim,
                        .weights = rows.weights.data(),
                        .weight_stride = kIndexHeads,
                        .heads = kIndexHeads,
                        .budget = kBudget,
                        .seen = rows.seen.data(),
                        .seen_stride = kWords});
    attention.run(cache, {.plane = 0,
                          .sequences = steps,
                          .q = rows.q.data(),
                          .q_stride = s_.heads * s_.d,
                          .heads = s_.heads,
                          .scale = 0.25f,
                          .out = rows.out.data(),
                          .out_stride = s_.heads * s_.dv,
                          .seen = rows.seen.data(),
                          .seen_stride = kWords,
                          .budget = kBudget});
  }

  void check(const Sequence& of, int t, const std::vector<uint64_t>& words,
             const std::vector<float>& out) const {
    const auto seen = [&](int key) {
      return t < kBudget || words[static_cast<size_t>(t * kWords + key / 64)] >> key % 64 & 1;
    };
    const auto at = [](const std::vector<float>& x, int64_t i) {
      return static_cast<double>(x[static_cast<size_t>(i)]);
    };
    if (t >= kBudget) {
      int count = 0;
      for (int w = 0; w < (t + 64) / 64; ++w)
        count += std::popcount(words[static_cast<size_t>(t * kWords + w)]);
      ASSERT_EQ(count, kBudget) << t;
      double worst = INFINITY, best = -INFINITY;
      for (int j = 0; j <= t; ++j) {
        double score = 0;
        for (int h = 0; h < kIndexHeads; ++h) {
          double dot = 0;
          for (int i = 0; i < kDim; ++i)
            dot += at(of.iq, (t * kIndexHeads + h) * kDim + i) * at(of.ik, j * kDim + i);
          score += at(of.weights, t * kIndexHeads + h) * std::max(dot, 0.0);
        }
        (seen(j) ? worst : best) = seen(j) ? std::min(worst, score) : std::max(best, score);
      }
      EXPECT_GT(worst, best - 1e-4) << t;  // scores are of a size of 20
    }
    const int group = s_.heads / s_.kv_heads;
    for (int h = 0; h < s_.heads; ++h) {
      std::vector<double> want(static_cast<size_t>(s_.dv));
      double sum = 0;
      for (int j = 0; j <= t; ++j) {
        if (!seen(j)) continue;
        double score = 0;
        const int64_t key = (j * s_.kv_heads + h / group) * s_.d;
        for (int i = 0; i < s_.d; ++i) score += at(of.q, (t * s_.heads + h) * s_.d + i) * at(of.k, key + i);
        const double p = std::exp(score * 0.25);
        sum += p;
        for (int i = 0; i < s_.dv; ++i)
          want[static_cast<size_t>(i)] +=
              p * (s_.shared ? at(of.k, key + i) : at(of.v, (j * s_.kv_heads + h / group) * s_.dv + i));
      }
      for (int i = 0; i < s_.dv; ++i)
        ASSERT_NEAR(at(out, (t * s_.heads + h) * s_.dv + i), want[static_cast<size_t>(i)] / sum, 2e-5) << t;
    }
  }

  const IndexSetting s_;
  std::vector<Sequence> sequences_;
};

TEST(Indexer, ChoosesTheBestAndAttentionSeesNoOthers) {
  for (const IndexSetting& setting :
       {IndexSetting{KvType::kF32, 6, 1, 40, 24, true}, IndexSetting{KvType::kF32, 6, 2, 24, 40, false}}) {
    const ChoosingLayer layer(setting);
    layer.check(layer.run(2, 700, {0, 1, 2, 3}));
  }
}

TEST(Indexer, CutsBatchesAndThreadsChangeNoBit) {
  for (const KvType type : {KvType::kF32, KvType::kBf16, KvType::kS8})
    for (const bool shared : {true, false}) {
      const ChoosingLayer layer({type, 6, shared ? 1 : 2, 40, 24, shared});
      const Result whole = layer.run(1, 700, {0, 1, 2, 3});
      EXPECT_EQ(layer.run(3, 700, {0, 1, 2, 3}), whole);
      EXPECT_EQ(layer.run(2, 77, {0, 1, 2, 3}), whole);
      const Result alone = layer.run(2, 1, {1});
      EXPECT_EQ(alone.out[0], whole.out[1]);
      EXPECT_EQ(alone.seen[0], whole.seen[1]);
      const Result longest = layer.run(3, 64, {0});
      EXPECT_EQ(longest.out[0], whole.out[0]);
    }
}

// With as many keys as the budget has nobody chooses: the numbers are those of attention over all keys.
TEST(Indexer, ABudgetForAllKeysIsDenseAttention) {
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = 2, .pin = false});
  KvCache cache({.planes = {{.d = 40, .dv = 24, .shared = true, .type = KvType::kBf16}}, .states = {}}, 3);
  const std::vector<int32_t> pages = {2, 0, 1};
  const AttentionSequence all[] = {{.first = 0, .count = 130, .position = 0, .pages = pages.data()}};
  const std::vector<float> k = random_values(130 * 40, 1), q = random_values(130 * 160, 2);
  write_cache(cache, *pool, best_kernels(), {.plane = 0, .sequences = all, .k = k.data(), .k_stride = 40});
  AttentionWork attention(pool, best_kernels());
  AttentionArgs args{
      .plane = 0, .sequences = all, .q = q.data(), .q_stride = 160, .heads = 4, .scale = 0.25f};
  std::vector<float> dense(130 * 96), chosen(130 * 96);
  args.out_stride = 96;
  args.out = dense.data();
  attention.run(cache, args);
  const std::vector<uint64_t> words(130 * 3);
  args.seen = words.data();
  args.seen_stride = 3;
  args.budget = 130;
  args.out = chosen.data();
  attention.run(cache, args);
  EXPECT_EQ(dense, chosen);
}

}  // namespace
}  // namespace kt::inline nn
