#include "nn/step_forecast.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/testing/random_values.h"

namespace kt::inline nn {
namespace {

constexpr int kWidth = 256, kHeads = 2, kHead = 64;
constexpr Worker kWorkers[] = {{0, 0, 2, 0}, {0, 1, 2, 1}};

// Steps of linear a, attention over a plane, linear b, experts, twice; then the head.
class Steps {
 public:
  Steps()
      : a_(*pool_, weights(1).view(), {}, {}, "a"),
        b_(*pool_, weights(2).view(), {}, {}, "b"),
        head_(*pool_, weights(3).view(), {}, {}, "head") {}

  struct Seen {
    std::vector<Ahead> behind;  // of worker 1, in the order of operations
  };
  Seen step(int position, int rows = 1) {
    sequences_ = {{.first = 0, .count = 1, .position = position, .pages = pages_.data()}};
    forecast_.begin(&cache_, sequences_);
    Seen seen;
    for (int plane = 0; plane < 2; ++plane) {
      multiply(a_, rows, seen);
      const AttentionArgs args{.plane = plane,
                               .sequences = sequences_,
                               .q = x_.data(),
                               .q_stride = kWidth,
                               .heads = 2 * kHeads,
                               .out = y_.data(),
                               .out_stride = kWidth};
      const Forecast* then = forecast_.enter(&cache_, 1, plane);
      seen.behind.push_back(then->ahead(kWorkers[1]));
      attention_.run(cache_, args, then);
      forecast_.attended();
      multiply(b_, rows, seen);
      seen.behind.push_back(forecast_.enter(this, rows)->ahead(kWorkers[1]));  // as experts do
    }
    multiply(head_, 1, seen);
    return seen;
  }
  // Whether `ahead` is what worker 1 reads first in that linear: two stretches of it, neither at its beginning.
  static bool reads(const Ahead& ahead, const Linear& linear) {
    const std::span<const std::byte> all = linear.runs().front().bytes;
    const auto inside = [&](const Ahead::Stretch& one) {
      return !one.empty() && one.data() > all.data() && one.data() + one.size() <= all.data() + all.size();
    };
    return ahead.stretches().size() == 2 && std::ranges::all_of(ahead.stretches(), inside);
  }

  std::shared_ptr<Pool> pool_ = std::make_shared<Pool>(PoolOptions{.threads = 2, .pin = false});
  const KvShape shape_{.heads = kHeads, .d = kHead, .dv = kHead, .type = KvType::kBf16};
  KvCache cache_{SequenceShape{.planes = {shape_, shape_}, .states = {}}, 12};
  std::vector<int32_t> pages_ = {3, 5, 7, 9, 1};
  std::vector<AttentionSequence> sequences_;
  Linear a_, b_, head_;
  LinearWork linears_{pool_};
  AttentionWork attention_{pool_, best_kernels()};
  StepForecast forecast_{*pool_, linears_, attention_};

 private:
  static Matrix weights(unsigned seed) {
    return quantise(format_named("int8"), random_values(640 * kWidth, seed), 640, kWidth);
  }
  void multiply(const Linear& linear, int rows, Seen& seen) {
    const LinearCall call{&linear, x_.data(), kWidth, z_.data(), 640};
    const Forecast* then = forecast_.enter(&linear, rows);
    seen.behind.push_back(then->ahead(kWorkers[1]));
    linears_.run(rows, {&call, 1}, then);
    forecast_.multiplied();
  }
  std::vector<float> x_ = random_values(64 * kWidth, 7);
  std::vector<float> y_ = std::vector<float>(kWidth), z_ = std::vector<float>(64 * 640);
};

TEST(StepForecast, ASecondStepKnowsWhatComes) {
  Steps steps;
  steps.step(300);
  const Steps::Seen seen = steps.step(301);
  ASSERT_EQ(seen.behind.size(), 9u);
  EXPECT_TRUE(seen.behind[0].stretches().empty());  // no attention of this step's pages ran yet
  EXPECT_TRUE(Steps::reads(seen.behind[1], steps.b_));
  EXPECT_TRUE(Steps::reads(seen.behind[2], steps.a_));  // behind the experts, who are not chosen yet
  EXPECT_TRUE(Steps::reads(seen.behind[3], steps.a_));
  // Worker 1's item is the second group of pages of the first head: page 4 of the sequence, keys and values.
  const auto stretches = seen.behind[4].stretches();
  ASSERT_EQ(stretches.size(), 2u);
  EXPECT_EQ(stretches[0].data(), steps.cache_.keys(1, 1, 0));
  EXPECT_EQ(stretches[1].data(), steps.cache_.values(1, 1, 0));
  EXPECT_EQ(stretches[0].size(), steps.shape_.block_bytes(kHead));
  EXPECT_TRUE(Steps::reads(seen.behind[5], steps.b_));
  EXPECT_TRUE(Steps::reads(seen.behind[6], steps.head_));
  EXPECT_TRUE(Steps::reads(seen.behind[7], steps.head_));
  EXPECT_TRUE(Steps::reads(seen.behind[8], steps.a_));  // the next step's first
}

TEST(StepForecast, ManyRowsAreForecastAnew) {
  Steps steps;
  steps.step(300);
  steps.step(300, 64);
  const Steps::Seen seen = steps.step(301, 64);
  EXPECT_TRUE(seen.behind[1].stretches().empty());  // b_ with many rows: reading is little of it
  EXPECT_TRUE(Steps::reads(seen.behind[7], steps.head_));
}

}  // namespace
}  // namespace kt::inline nn
