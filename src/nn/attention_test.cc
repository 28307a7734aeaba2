#include "nn/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "base/testing/random_values.h"
#include "kernels/testing/tables.h"
#include "nn/kv_write.h"

namespace kt::inline nn {
namespace {

struct Setting {
  int heads, kv_heads, d, dv, window = 0, chunk = 0;
  bool shared = false, sinks = false;
  KvType type = KvType::kF32;
};

// Sequences of several lengths, some with a past, fed in two steps; every output against the definition in
// double.
class AttentionBatch {
 public:
  AttentionBatch(const Setting& setting, int threads)
      : s_(setting), pool_(std::make_shared<Pool>(PoolOptions{.threads = threads, .pin = false})) {
    const KvShape shape{.heads = s_.kv_heads, .d = s_.d, .dv = s_.dv, .shared = s_.shared, .type = s_.type};
    cache_ = std::make_unique<KvCache>(SequenceShape{.planes = {shape, shape}, .states = {}}, 80);
    int page = 79;
    for (const int length : {1, 70, 1300, 200}) {
      Sequence one{.length = length};
      for (int i = 0; i < length; i += kPageTokens) one.pages.push_back(page--);
      const unsigned seed = static_cast<unsigned>(length);
      one.q = random_values(static_cast<size_t>(length * s_.heads * s_.d), seed);
      one.k = random_values(static_cast<size_t>(length * s_.kv_heads * s_.d), seed + 1);
      one.v = random_values(static_cast<size_t>(length * s_.kv_heads * s_.dv), seed + 2);
      sequences_.push_back(one);
    }
    sinks_ = random_values(static_cast<size_t>(s_.heads), 5);
  }

  // Feeds the tokens from `past` on (everything before is written without being asked about) and returns the
  // outputs.
  std::vector<float> run(const std::vector<int>& past) {
    AttentionWork work(pool_, best_kernels());
    for (int step = 0; step < 2; ++step) {
      std::vector<AttentionSequence> list;
      std::vector<float> q, k, v;
      int rows = 0;
      for (size_t i = 0; i < sequences_.size(); ++i) {
        const Sequence& one = sequences_[i];
        const int from = step == 0 ? 0 : past[i], to = step == 0 ? past[i] : one.length;
        if (from == to) continue;
        list.push_back({.first = rows, .count = to - from, .position = from, .pages = one.pages.data()});
        rows += to - from;
        const auto take = [&](std::vector<float>& all, const std::vector<float>& x, int width) {
          all.insert(all.end(), x.begin() + int64_t{from} * width, x.begin() + int64_t{to} * width);
        };
        take(q, one.q, s_.heads * s_.d);
        take(k, one.k, s_.kv_heads * s_.d);
        take(v, one.v, s_.kv_heads * s_.dv);
      }
      if (rows == 0) continue;
      write_cache(*cache_, *pool_, best_kernels(),
                  {.plane = 1,
                   .sequences = list,
                   .k = k.data(),
                   .v = v.data(),
                   .k_stride = s_.kv_heads * s_.d,
                   .v_stride = s_.kv_heads * s_.dv});
      if (step == 0) continue;
      std::vector<float> out(static_cast<size_t>(rows * s_.heads * s_.dv));
      work.run(*cache_, {.plane = 1,
                         .sequences = list,
                         .q = q.data(),
                         .q_stride = s_.heads * s_.d,
                         .heads = s_.heads,
                         .scale = kScale,
                         .window = s_.window,
                         .chunk = s_.chunk,
                         .sinks = s_.sinks ? sinks_.data() : nullptr,
                         .out = out.data(),
                         .out_stride = s_.heads * s_.dv});
      return out;
    }
    return {};
  }

  // The dv values of one head for token t.
  std::vector<double> expected(size_t sequence, int t, int head) const {
    const Sequence& one = sequences_[sequence];
    const int kv = head / (s_.heads / s_.kv_heads);
    double sum = s_.sinks ? std::exp(static_cast<double>(sinks_[static_cast<size_t>(head)])) : 0;
    std::vector<double> values(static_cast<size_t>(s_.dv));
    const int oldest = s_.chunk ? t / s_.chunk * s_.chunk : s_.window ? std::max(0, t - s_.window + 1) : 0;
    for (int j = oldest; j <= t; ++j) {
      const float* k = one.k.data() + (j * s_.kv_heads + kv) * s_.d;
      const float* v = s_.shared ? k : one.v.data() + (j * s_.kv_heads + kv) * s_.dv;
      double score = 0;
      for (int i = 0; i < s_.d; ++i)
        score += static_cast<double>(one.q[static_cast<size_t>((t * s_.heads + head) * s_.d + i)]) * k[i];
      const double p = std::exp(score * kScale);
      sum += p;
      for (size_t i = 0; i < values.size(); ++i) values[i] += p * v[i];
    }
    for (double& value : values) value /= sum;
    return values;
  }

  struct Sequence {
    int length;
    std::vector<int32_t> pages = {};
    std::vector<float> q = {}, k = {}, v = {};
  };
  static constexpr float kScale = 0.25f;
  Setting s_;
  std::shared_ptr<Pool> pool_;
  std::unique_ptr<KvCache> cache_;
  std::vector<Sequence> sequences_;
  std::vector<float> sinks_;
};

// Random values of deviation 1: bf16 rounds queries, keys and values at 2^-9, and scores of about 6 with
// them; s8 rounds keys and values at 1 / 254 of the largest of a row, about 3.
double bound(KvType type) { return type == KvType::kF32 ? 1e-4 : type == KvType::kBf16 ? 0.03 : 0.06; }

void check(const Setting& setting) {
  const std::vector<int> past = {0, 69, 1299, 150};  // one token over many groups, and many tokens
  AttentionBatch batch(setting, 2);
  const std::vector<float> out = batch.run(past);
  size_t at = 0;
  for (size_t i = 0; i < batch.sequences_.size(); ++i)
    for (int t = past[i]; t < batch.sequences_[i].length; ++t)
      for (int h = 0; h < setting.heads; ++h)
        for (const double want : batch.expected(i, t, h)) {
          ASSERT_NEAR(out[at++], want, bound(setting.type))
              << "sequence " << i << " token " << t << " head " << h;
        }
  for (const int threads : {1, 3}) EXPECT_EQ(AttentionBatch(setting, threads).run(past), out);
  // The same tokens in one step that begins earlier, mostly at the beginning: the same bits.
  const std::vector<int> before = {0, 0, full_tests() ? 0 : 1200, 0};
  const std::vector<float> whole = AttentionBatch(setting, 2).run(before);
  const int64_t width = int64_t{setting.heads} * setting.dv;
  auto part = out.begin();
  auto all = whole.begin();
  for (size_t i = 0; i < batch.sequences_.size(); ++i) {
    all += (past[i] - before[i]) * width;
    const int64_t count = (batch.sequences_[i].length - past[i]) * width;
    EXPECT_TRUE(std::equal(part, part + count, all)) << "sequence " << i;
    part += count;
    all += count;
  }
}

class Attention : public testing::TestWithParam<KvType> {};

TEST_P(Attention, GroupedHeads) {
  check({.heads = 8,
         .kv_heads = 2,
         .d = 24,
         .dv = 24,
         .window = 0,
         .shared = false,
         .sinks = false,
         .type = GetParam()});
}
TEST_P(Attention, WindowAndSinks) {
  check({.heads = 4,
         .kv_heads = 4,
         .d = 16,
         .dv = 16,
         .window = 100,
         .shared = false,
         .sinks = true,
         .type = GetParam()});
}
TEST_P(Attention, Chunks) {
  for (const int chunk : {7, 64, 300})
    check({.heads = 4, .kv_heads = 2, .d = 16, .dv = 16, .chunk = chunk, .type = GetParam()});
}
TEST_P(Attention, OneSharedLatent) {
  check({.heads = 40,
         .kv_heads = 1,
         .d = 40,
         .dv = 32,
         .window = 0,
         .shared = true,
         .sinks = false,
         .type = GetParam()});
}
INSTANTIATE_TEST_SUITE_P(Types, Attention, testing::Values(KvType::kF32, KvType::kBf16, KvType::kS8),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// A page that held something broken is clean for its next owner.
TEST(KvPagesOfOthers, LeaveNothingBehind) {
  const auto pool = std::make_shared<Pool>(PoolOptions{.threads = 2, .pin = false});
  for (const KvType type : {KvType::kF32, KvType::kBf16, KvType::kS8}) {
    KvCache cache({.planes = {{.heads = 1, .d = 16, .dv = 16, .type = type}}, .states = {}}, 1);
    const int32_t page = 0;
    const std::vector<float> bad(64 * 16, std::nanf("")), good(3 * 16, 0.5f);
    const auto write = [&](const AttentionSequence& one, const std::vector<float>& rows) {
      write_cache(cache, *pool, best_kernels(),
                  {.plane = 0,
                   .sequences = {&one, 1},
                   .k = rows.data(),
                   .v = rows.data(),
                   .k_stride = 16,
                   .v_stride = 16});
    };
    write({.first = 0, .count = 64, .position = 0, .pages = &page}, bad);
    const AttentionSequence one{.first = 0, .count = 3, .position = 0, .pages = &page};
    write(one, good);
    std::vector<float> out(3 * 16);
    AttentionWork(pool, best_kernels())
        .run(cache, {.plane = 0,
                     .sequences = {&one, 1},
                     .q = good.data(),
                     .q_stride = 16,
                     .heads = 1,
                     .out = out.data(),
                     .out_stride = 16});
    for (float x : out) EXPECT_NEAR(x, 0.5f, 0.01f) << name_of(type);
  }
}

}  // namespace
}  // namespace kt::inline nn
