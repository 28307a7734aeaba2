// Attention on a GPU against a double loop over the numbers that the cache holds, and rows among others against the
// same rows alone. Slots that nobody sees are poisoned. On the test driver, or on a GPU with KT_TEST_REAL_CUDA=1.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/testing/random_values.h"
#include "base/text.h"
#include "cuda/testing/test_cuda.h"
#include "formats/floats.h"
#include "nn/gpu_ops.h"

namespace kt::inline nn {
namespace {

struct AttentionShape {
  KvShape shape;
  int heads = 1, window = 0;
  bool sinks = false;
};
// The last `count` of so many keys are those of the step's tokens; numbers are by `seed`.
struct TestSequence {
  int keys = 1, count = 1;
  unsigned seed = 0;
  int all = 0;  // tokens that queries are made for, the last `count` of which are used; 0: as many
};

std::vector<float> seeded(int64_t count, unsigned seed) {
  return random_values(static_cast<size_t>(count), seed);
}

// What a cache makes of a row.
void round_row(KvType type, std::span<float> row) {
  float largest = 0;
  for (const float x : row) largest = std::max(largest, std::abs(x));
  const float scale = largest / 127.0f, inverse = largest > 0 ? 127.0f / largest : 0.0f;
  for (float& x : row)
    if (type == KvType::kBf16)
      x = to_f32(to_bf16(x));
    else if (type == KvType::kS8)
      x = std::nearbyint(x * inverse) * scale;
}

class AttentionRun {
 public:
  AttentionRun(const AttentionShape& of, std::vector<TestSequence> sequences)
      : of_(of), shape_(of.shape), sequences_(std::move(sequences)), sink_(seeded(of.heads, 4)) {}

  // Rows of all sequences, one after the other.
  std::vector<float> ours();
  void check(const std::vector<float>& ours) const;
  int64_t width() const { return int64_t{of_.heads} * shape_.dv; }

 private:
  std::vector<float> queries(const TestSequence& of) const {
    std::vector<float> out = seeded(int64_t{std::max(of.all, of.count)} * of_.heads * shape_.d, of.seed + 1);
    out.erase(out.begin(), out.end() - int64_t{of.count} * of_.heads * shape_.d);
    return out;
  }
  // Of a head: [keys, columns].
  std::vector<float> keys(const TestSequence& of, int head) const {
    return seeded(int64_t{of.keys} * shape_.d, of.seed + 2 + 1000 * static_cast<unsigned>(head));
  }
  std::vector<float> values(const TestSequence& of, int head) const {
    return seeded(int64_t{of.keys} * shape_.dv, of.seed + 3 + 1000 * static_cast<unsigned>(head));
  }
  void fill(Ops& ops, SequenceCache& cache, const TestSequence& of, const std::vector<int32_t>& pages) const;
  std::vector<double> row(const TestSequence& of, int token, int head, std::span<const float> q,
                          std::span<const float> k, std::span<const float> v) const;

  AttentionShape of_;
  KvShape shape_;
  std::vector<TestSequence> sequences_;
  std::vector<float> sink_;
  Rows q_, k_, v_, out_;
  int rotation_ = 0;
};

// Every slot of every page, those behind the last key with numbers that show wherever they get to.
void AttentionRun::fill(Ops& ops, SequenceCache& cache, const TestSequence& of,
                        const std::vector<int32_t>& pages) const {
  const float poison = shape_.type == KvType::kS8 ? std::numeric_limits<float>::max()
                                                  : std::numeric_limits<float>::quiet_NaN();
  std::vector<std::vector<float>> k, v;
  for (int h = 0; h < shape_.heads; ++h) {
    k.push_back(keys(of, h));
    v.push_back(values(of, h));
  }
  const auto copied = [&](int page, int columns, const std::vector<std::vector<float>>& numbers) {
    std::vector<float> rows(static_cast<size_t>(kPageTokens * shape_.heads * columns), poison);
    for (int h = 0; h < shape_.heads; ++h) {
      const std::vector<float>& all = numbers[static_cast<size_t>(h)];
      for (int t = 0; t < kPageTokens && page * kPageTokens + t < of.keys; ++t)
        std::copy_n(all.begin() + int64_t{page * kPageTokens + t} * columns, columns,
                    rows.begin() + (int64_t{t} * shape_.heads + h) * columns);
    }
    return rows;
  };
  for (int page = 0; page < std::ssize(pages); ++page) {
    const AttentionSequence sequence{
        .first = 0, .count = kPageTokens, .position = page * kPageTokens, .pages = pages.data()};
    const StepScope scope(ops, {.sequences = {&sequence, 1}, .tokens = kPageTokens, .cache = &cache});
    ops.write(copied(page, shape_.d, k), k_);
    ops.write(copied(page, shape_.dv, v), v_);
    ops.rotate_write({.plane = 0,
                      .rotation = rotation_,
                      .q = {.rows = q_, .heads = 1, .stride = shape_.d},
                      .k = {.rows = k_, .heads = shape_.heads, .stride = shape_.d},
                      .v = shape_.shared ? Rows{} : v_});
  }
}

std::vector<float> AttentionRun::ours() {
  const auto ops = make_gpu_ops(std::make_shared<Pool>(PoolOptions{.threads = 1, .pin = false}),
                                {.number = 0, .gpu = std::make_shared<Gpu>(0)});
  const auto sinks = ops->make_vector(sink_);
  rotation_ = ops->make_rotation({.dims = 0});
  q_ = ops->rows("q", int64_t{of_.heads} * shape_.d);
  k_ = ops->rows("k", int64_t{shape_.heads} * shape_.d);
  v_ = ops->rows("v", int64_t{shape_.heads} * shape_.dv);
  out_ = ops->rows("out", width());
  int tokens = 0, used = 0;
  std::vector<std::vector<int32_t>> pages;
  std::vector<AttentionSequence> step;
  for (const TestSequence& each : sequences_) {
    std::vector<int32_t> mine(static_cast<size_t>((each.keys + kPageTokens - 1) / kPageTokens));
    std::iota(mine.begin(), mine.end(), used);
    std::ranges::reverse(mine);
    used += static_cast<int>(mine.size());
    pages.push_back(std::move(mine));
    step.push_back({.first = tokens,
                    .count = each.count,
                    .position = each.keys - each.count,
                    .pages = pages.back().data()});
    tokens += each.count;
  }
  ops->allocate(std::max(tokens, kPageTokens));
  const auto cache = ops->make_cache({.planes = {shape_}, .states = {}}, used, 0);
  std::vector<float> all;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    fill(*ops, *cache, sequences_[i], pages[i]);
    const std::vector<float> mine = queries(sequences_[i]);
    all.insert(all.end(), mine.begin(), mine.end());
  }
  const StepScope scope(*ops, {.sequences = step, .tokens = tokens, .cache = cache.get()});
  ops->write(all, q_);
  ops->write(std::vector<float>(static_cast<size_t>(tokens * width()), std::nanf("")), out_);
  ops->attend({.plane = 0,
               .q = q_,
               .out = out_,
               .heads = of_.heads,
               .scale = 1 / std::sqrt(static_cast<float>(shape_.d)),
               .window = of_.window,
               .sinks = of_.sinks ? sinks.get() : nullptr});
  std::vector<float> rows(static_cast<size_t>(tokens * width()));
  ops->read(out_, rows);
  return rows;
}

std::vector<double> AttentionRun::row(const TestSequence& of, int token, int head, std::span<const float> q,
                                      std::span<const float> k, std::span<const float> v) const {
  const int last = of.keys - of.count + token, oldest = of_.window ? std::max(0, last - of_.window + 1) : 0;
  const int stride = shape_.shared ? shape_.d : shape_.dv;
  std::vector<double> out(static_cast<size_t>(shape_.dv));
  double sum = of_.sinks ? std::exp(static_cast<double>(sink_[static_cast<size_t>(head)])) : 0;
  for (int s = oldest; s <= last; ++s) {
    double dot = 0;
    for (int i = 0; i < shape_.d; ++i)
      dot += static_cast<double>(q[static_cast<size_t>((token * of_.heads + head) * shape_.d + i)]) *
             static_cast<double>(k[static_cast<size_t>(s * shape_.d + i)]);
    const double p = std::exp(dot / std::sqrt(shape_.d));
    sum += p;
    for (int i = 0; i < shape_.dv; ++i)
      out[static_cast<size_t>(i)] += p * static_cast<double>(v[static_cast<size_t>(s * stride + i)]);
  }
  for (double& x : out) x /= sum;
  return out;
}

// Queries and weights of keys are rounded to bf16, by 2^-9 of them at most, and values reach 4; far less on average.
constexpr double kMatrixBound = 0.02, kMatrixMean = 0.002, kPlainBound = 2e-5;

void AttentionRun::check(const std::vector<float>& ours) const {
  const double bound = shape_.type == KvType::kF32 ? kPlainBound : kMatrixBound;
  size_t at = 0;
  double errors = 0;
  for (const TestSequence& each : sequences_) {
    const std::vector<float> q = queries(each);
    std::vector<std::vector<float>> k, v;
    for (int h = 0; h < shape_.heads; ++h) {
      const auto rounded = [&](std::vector<float> all, int columns) {
        for (int s = 0; s < each.keys; ++s)
          round_row(shape_.type,
                    std::span(all).subspan(static_cast<size_t>(s * columns), static_cast<size_t>(columns)));
        return all;
      };
      k.push_back(rounded(keys(each, h), shape_.d));
      v.push_back(shape_.shared ? k.back() : rounded(values(each, h), shape_.dv));
    }
    for (int t = 0; t < each.count; ++t)
      for (int h = 0; h < of_.heads; ++h) {
        const auto kv = static_cast<size_t>(h / (of_.heads / shape_.heads));
        const std::vector<double> expected = row(each, t, h, q, k[kv], v[kv]);
        for (int i = 0; i < shape_.dv; ++i, ++at) {
          const double theirs = expected[static_cast<size_t>(i)];
          ASSERT_NEAR(ours[at], theirs, bound)
              << each.keys << " keys, token " << t << ", head " << h << ", column " << i << " of d "
              << shape_.d << ", " << of_.heads << " heads";
          errors += std::abs(static_cast<double>(ours[at]) - theirs);
        }
      }
  }
  EXPECT_LE(errors / static_cast<double>(at), kMatrixMean);
}

void check(const AttentionShape& of, const std::vector<TestSequence>& sequences) {
  AttentionRun run(of, sequences);
  const std::vector<float> ours = run.ours();
  run.check(ours);
}

constexpr KvType kRoundedTypes[] = {KvType::kBf16, KvType::kS8};

TEST(GpuAttention, OneTokenOverAnyNumberOfKeys) {
  for (const KvType type : kRoundedTypes)
    for (const int keys : {1, 63, 64, 65, 1000}) {
      check({.shape = {.heads = 2, .d = 64, .dv = 64, .type = type}, .heads = 6}, {{.keys = keys}});
      check({.shape = {.heads = 1, .d = 72, .dv = 40, .shared = true, .type = type}, .heads = 5},
            {{.keys = keys}});
    }
}

TEST(GpuAttention, AnyNumberOfHeadsThatShareKeys) {
  for (const KvType type : kRoundedTypes)
    for (const int sharing : {1, 3, 7, 16, 17}) {
      check({.shape = {.heads = 2, .d = 32, .dv = 32, .type = type}, .heads = 2 * sharing}, {{.keys = 70}});
      check({.shape = {.heads = 1, .d = 48, .dv = 32, .shared = true, .type = type}, .heads = 2 * sharing},
            {{.keys = 70}});
    }
}

TEST(GpuAttention, HeadsOfEveryWidth) {
  for (const KvType type : kRoundedTypes) {
    for (const int width : {8, 80, 96, 128, 192, 256})
      check({.shape = {.heads = 1, .d = width, .dv = width, .type = type}, .heads = 8}, {{.keys = 100}});
    check({.shape = {.heads = 2, .d = 192, .dv = 128, .type = type}, .heads = 4}, {{.keys = 150}});
    check({.shape = {.heads = 1, .d = 61, .dv = 131, .type = type}, .heads = 2}, {{.keys = 20}});
    check({.shape = {.heads = 1, .d = 300, .dv = 300, .type = type}, .heads = 2}, {{.keys = 20}});
    check({.shape = {.heads = 1, .d = 576, .dv = 512, .shared = true, .type = type}, .heads = 33},
          {{.keys = 81}});
    check({.shape = {.heads = 1, .d = 320, .dv = 256, .shared = true, .type = type}, .heads = 16},
          {{.keys = 33}});
    check({.shape = {.heads = 1, .d = 540, .dv = 500, .shared = true, .type = type}, .heads = 2},
          {{.keys = 17}});
  }
}

TEST(GpuAttention, WindowsAndSinks) {
  for (const KvType type : kRoundedTypes)
    for (const int window : {1, 17, 64, 128, 700})
      for (const bool shared : {false, true})
        check({.shape = {.heads = 1, .d = 40, .dv = shared ? 32 : 24, .shared = shared, .type = type},
               .heads = 3,
               .window = window,
               .sinks = true},
              {{.keys = 5}, {.keys = 200, .count = 2, .seed = 5}, {.keys = 800, .seed = 9}});
}

// Prompts, whole and from the middle on, among answers; tokens of one block see different keys.
TEST(GpuAttention, ManyTokensOfASequence) {
  const std::vector<TestSequence> some = {{.keys = 90},
                                          {.keys = 75, .count = 75, .seed = 10},
                                          {.keys = 30, .count = 2, .seed = 20},
                                          {.keys = 200, .count = 40, .seed = 30}};
  for (const KvType type : kRoundedTypes)
    for (const int window : {0, 33}) {
      for (const int sharing : {1, 3, 7, 16, 64})
        check({.shape = {.heads = sharing < 16 ? 2 : 1, .d = 40, .dv = 32, .type = type},
               .heads = sharing < 16 ? 2 * sharing : sharing,
               .window = window,
               .sinks = sharing == 3},
              some);
      for (const int width : {96, 128, 160})
        check({.shape = {.heads = 1, .d = width, .dv = width, .type = type}, .heads = 2, .window = window},
              some);
    }
  // So many that none has its pages split.
  check({.shape = {.heads = 1, .d = 64, .dv = 32, .shared = true}, .heads = 130},
        {{.keys = 103, .count = 103}, {.keys = 9, .count = 9, .seed = 5}});
  check({.shape = {.heads = 33, .d = 136, .dv = 136}, .heads = 33}, {{.keys = 70, .count = 16}});
}

TEST(GpuAttention, APromptsRowsGetTheSameBitsHoweverItIsCut) {
  for (const KvType type : kRoundedTypes) {
    const AttentionShape of{.shape = {.heads = 1, .d = 32, .dv = 32, .type = type}, .heads = 3, .window = 70};
    AttentionRun whole(of, {{.keys = 150, .count = 150}});
    const std::vector<float> all = whole.ours();
    AttentionRun late(of, {{.keys = 150, .count = 37, .all = 150}});
    const std::vector<float> last = late.ours();
    EXPECT_TRUE(std::equal(last.rbegin(), last.rend(), all.rbegin()));
  }
}

// More pages than groups, so that a group has two; several sequences; sinks of one group and of many.
TEST(GpuAttention, RowsGetTheSameBitsInAnyBatch) {
  const TestSequence some[] = {
      {.keys = 4200}, {.keys = 50, .seed = 10}, {.keys = 129, .count = 3, .seed = 20}};
  for (const KvType type : kRoundedTypes)
    for (const bool shared : {false, true}) {
      const AttentionShape of{
          .shape = {.heads = 1, .d = 64, .dv = shared ? 32 : 64, .shared = shared, .type = type},
          .heads = 4,
          .sinks = true};
      AttentionRun together(of, {some[0], some[1], some[2]});
      const std::vector<float> all = together.ours();
      together.check(all);
      auto at = all.begin();
      for (const TestSequence& each : some) {
        AttentionRun alone(of, {each});
        const std::vector<float> own = alone.ours();
        EXPECT_TRUE(std::equal(own.begin(), own.end(), at)) << each.keys << " keys";
        at += std::ssize(own);
      }
    }
}

}  // namespace
}  // namespace kt::inline nn
