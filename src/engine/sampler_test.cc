#include "engine/sampler.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "base/error.h"

namespace kt::inline engine {
namespace {

using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

TokenId pick(SamplingOptions options, std::vector<float> logits, std::vector<TokenId> prompt = {}) {
  return Sampler(options, prompt).pick(logits).id;
}

// What the filters mean, by sorting everything and taking each definition as it stands.
std::vector<double> exact(const SamplingOptions& options, const std::vector<float>& logits) {
  const size_t n = logits.size();
  std::vector<double> p(n);
  const float highest = *std::ranges::max_element(logits);
  for (size_t i = 0; i < n; ++i) p[i] = std::exp((double{logits[i]} - highest) / options.temperature);
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order,
                    [&](size_t a, size_t b) { return std::pair(-logits[a], a) < std::pair(-logits[b], b); });
  const auto normalise = [&] {
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& x : p) x /= sum;
  };
  if (options.top_k > 0 && options.top_k < static_cast<int>(n)) {
    const float kth = logits[order[static_cast<size_t>(options.top_k - 1)]];
    for (size_t i = 0; i < n; ++i)
      if (logits[i] < kth) p[i] = 0;
  }
  normalise();
  double before = 0;
  for (size_t i : order) {
    const double here = p[i];
    if (before >= options.top_p) p[i] = 0;
    before += here;
  }
  normalise();
  const double best = *std::ranges::max_element(p);
  for (double& x : p)
    if (x < options.min_p * best) x = 0;
  normalise();
  return p;
}

// Pearson's sum against the 99.9 % point of chi-square, by the approximation of Wilson and Hilferty. Tokens
// that cannot come must not.
void expect_distribution(const SamplingOptions& options, const std::vector<float>& logits) {
  constexpr int kDraws = 20000;
  const std::vector<double> p = exact(options, logits);
  std::vector<int> counts(logits.size());
  Sampler sampler(options);
  for (int i = 0; i < kDraws; ++i) {
    std::vector<float> row = logits;
    ++counts[static_cast<size_t>(sampler.pick(row).id)];
  }
  double sum = 0, rare = 0;
  int kinds = 0, rare_count = 0;
  const auto add = [&](double expected, int count) {
    if (expected < 5) return false;
    sum += (count - expected) * (count - expected) / expected;
    ++kinds;
    return true;
  };
  for (size_t i = 0; i < p.size(); ++i) {
    if (p[i] == 0) {
      EXPECT_EQ(counts[i], 0) << "token " << i;
    } else if (!add(p[i] * kDraws, counts[i])) {
      rare += p[i] * kDraws;
      rare_count += counts[i];
    }
  }
  add(rare, rare_count);
  const double freedom = std::max(kinds - 1, 1);
  const double w = 1 - 2 / (9 * freedom) + 3.09 * std::sqrt(2 / (9 * freedom));
  EXPECT_LT(sum, freedom * w * w * w);
}

std::vector<float> random_logits(size_t n, float spread, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<float> logits(n);
  for (float& x : logits) x = spread * (static_cast<float>(rng() % 2001) / 1000 - 1);
  return logits;
}

TEST(Sampler, DrawsFromTheDistribution) {
  for (size_t n : {1, 2, 7, 100, 1000})
    expect_distribution({.seed = n}, random_logits(n, 3, static_cast<uint32_t>(n)));
}

TEST(Sampler, FiltersFollowTheirDefinitions) {
  const std::vector<float> logits = random_logits(800, 4, 5);
  expect_distribution({.temperature = 0.5, .seed = 1}, logits);
  expect_distribution({.temperature = 2, .top_k = 5, .seed = 2}, logits);
  expect_distribution({.top_k = 400, .seed = 3}, logits);
  expect_distribution({.top_p = 0.3, .seed = 4}, logits);
  expect_distribution({.top_p = 0.95, .seed = 5}, logits);
  expect_distribution({.min_p = 0.2, .seed = 6}, logits);
  expect_distribution({.temperature = 1.5, .top_k = 50, .top_p = 0.8, .min_p = 0.3, .seed = 7}, logits);
  expect_distribution({.top_p = 1e-9, .seed = 8}, logits);
  // min-p keeps the first three; before top-p it would make two of them hold 0.65 of what is left.
  const std::vector<float> few{std::log(0.4f), std::log(0.2f), std::log(0.15f),
                               std::log(0.1f), std::log(0.1f), std::log(0.05f)};
  expect_distribution({.top_p = 0.65, .min_p = 0.3, .seed = 9}, few);
}

TEST(Sampler, TopKKeepsWhatEqualsTheLast) {
  expect_distribution({.top_k = 2, .seed = 3}, {1, 0, 2, 1, 1, -1});
}

// A flat distribution makes top-p sort several pieces.
TEST(Sampler, TopPOfManyEqualTokensKeepsTheLowestIds) {
  SamplingOptions options{.top_p = 0.5};
  Sampler sampler(options);
  TokenId highest = 0;
  for (int i = 0; i < 4000; ++i) {
    std::vector<float> logits(2000, 0.f);
    highest = std::max(highest, sampler.pick(logits).id);
  }
  EXPECT_LT(highest, 1000);
  EXPECT_GT(highest, 950);
}

TEST(Sampler, GreedyTakesTheLowestIdAmongEquals) {
  EXPECT_EQ(pick({.temperature = 0}, {1, 3, 2, 3}), 1);
  EXPECT_EQ(pick({.temperature = 0}, {-kInf, -5, -kInf}), 1);
  EXPECT_EQ(pick({.temperature = 1e-300}, {1, 3, 2.999f}), 1);
  for (size_t at = 0; at < 40; ++at) {  // every lane, and the tail
    std::vector<float> logits(40, -1.f);
    logits[at] = 0;
    EXPECT_EQ(pick({.temperature = 0}, logits), static_cast<TokenId>(at));
  }
}

TEST(Sampler, StreamsDependOnSeedAndPlaceOnly) {
  const std::vector<float> logits = random_logits(500, 1, 9);
  const auto stream = [&](uint64_t seed) {
    Sampler sampler({.seed = seed});
    std::vector<TokenId> ids;
    for (int i = 0; i < 50; ++i) {
      std::vector<float> row = logits;
      ids.push_back(sampler.pick(row).id);
    }
    return ids;
  };
  EXPECT_EQ(stream(1), stream(1));
  EXPECT_NE(stream(1), stream(2));
  // The stream is part of the contract: these are its first numbers, computed apart in Python's integers.
  EXPECT_EQ(uniform(0, 0), 0x1.0e364ebc59307p-1);
  EXPECT_EQ(uniform(42, 7), 0x1.1e7531d4bc572p-1);
}

TEST(Sampler, PenaltiesByHand) {
  // Repetition 2 over the prompt {0, 1}: 3 -> 1.5, -1 -> -2; token 2 keeps 2 and wins.
  EXPECT_EQ(pick({.temperature = 0, .repetition_penalty = 2}, {3, -1, 2}, {0, 1, 0}), 2);
  EXPECT_EQ(pick({.temperature = 0}, {3, -1, 2}, {0, 1, 0}), 0);
  // -1 -> -2 loses against -1.5.
  EXPECT_EQ(pick({.temperature = 0, .repetition_penalty = 2}, {-1, -1.5f}, {0}), 1);
  // Presence and frequency do not see the prompt.
  EXPECT_EQ(pick({.temperature = 0, .presence_penalty = 2, .frequency_penalty = 2}, {1, 0}, {0, 0}), 0);

  // Frequency 0.5: 1 -> 0.5 -> 0 -> -0.5 after as many picks; 0.4 wins at the third, then both fall.
  Sampler frequent({.temperature = 0, .frequency_penalty = 0.5});
  std::vector<TokenId> ids;
  for (int i = 0; i < 6; ++i) {
    std::vector<float> row{1, 0.4f};
    ids.push_back(frequent.pick(row).id);
  }
  // Counts before each: (0,0) 1>.4; (1,0) .5>.4; (2,0) 0<.4; (2,1) 0>-.1; (3,1) -.5<-.1; (3,2) -.5>-.6.
  EXPECT_THAT(ids, testing::ElementsAre(0, 0, 1, 0, 1, 0));

  // Presence 0.5 is taken once: 1 -> 0.5, which always beats 0.4.
  Sampler present({.temperature = 0, .presence_penalty = 0.5});
  for (int i = 0; i < 3; ++i) {
    std::vector<float> row{1, 0.4f};
    EXPECT_EQ(present.pick(row).id, 0);
  }
  // All three: 4 / 2 - 2 * 0.25 - 0.5 = 1 after two picks of token 0.
  Sampler all(
      {.temperature = 0, .repetition_penalty = 2, .presence_penalty = 0.5, .frequency_penalty = 0.25});
  for (float other : {0.f, 0.f, 0.99f}) {
    std::vector<float> row{4, other};
    EXPECT_EQ(all.pick(row).id, 0);
    EXPECT_FLOAT_EQ(row[0], other > 0 ? 1 : row[0]);
  }
}

TEST(Sampler, LogprobsAreTheModelsOwn) {
  const std::vector<float> logits{1, 2, 0, 2};
  const double log_sum = std::log(2 * std::exp(2.0) + std::exp(1.0) + 1);
  std::vector<float> row = logits;
  Sampler sampler({.temperature = 0, .repetition_penalty = 4, .logprobs = 3}, std::vector<TokenId>{1, 3});
  const SampledToken token = sampler.pick(row);
  EXPECT_EQ(token.id, 0);
  EXPECT_NEAR(*token.logprob, 1 - log_sum, 1e-12);
  ASSERT_EQ(token.top.size(), 3u);
  EXPECT_EQ(token.top[0].id, 1);
  EXPECT_EQ(token.top[1].id, 3);
  EXPECT_EQ(token.top[2].id, 0);
  EXPECT_NEAR(token.top[0].logprob, 2 - log_sum, 1e-12);
  EXPECT_NEAR(token.top[2].logprob, 1 - log_sum, 1e-12);

  row = logits;
  const SampledToken alone = Sampler({.logprobs = 0}).pick(row);
  EXPECT_TRUE(alone.logprob && alone.top.empty());
  row = logits;
  EXPECT_EQ(Sampler({.logprobs = 100}).pick(row).top.size(), 4u);
  row = logits;
  EXPECT_FALSE(Sampler({}).pick(row).logprob);
}

// The exponential is our own; each is within 2 units in the last place, and so is their sum.
TEST(Sampler, LogSumExpAgreesWithTheCLibrary) {
  for (size_t n : {1, 3, 8, 17, 1000}) {
    std::vector<float> logits = random_logits(n, 400, static_cast<uint32_t>(n));
    logits.back() = n > 1 ? -kInf : 5;
    const float highest = highest_logit(logits);
    double sum = 0;
    for (float logit : logits) sum += std::exp(double{logit} - highest);
    EXPECT_NEAR(log_sum_exp(logits, highest), highest + std::log(sum), 1e-13);
  }
  for (int i = 0; i <= 20000; ++i) {  // one at a time: log(1 + e^x) - 0
    const float x = -static_cast<float>(i) / 500;
    EXPECT_NEAR(log_sum_exp(std::vector<float>{0, x}, 0), std::log1p(std::exp(double{x})), 3e-16) << x;
  }
}

std::string message_of(SamplingOptions options, std::vector<float> logits) {
  try {
    Sampler(options).pick(logits);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    return error.what();
  }
  return "no error";
}

TEST(Sampler, SaysWhatIsWrong) {
  EXPECT_EQ(message_of({}, {1, kNan, 2}), "logits: NaN for token 1 of 3");
  EXPECT_EQ(message_of({.temperature = 0}, {1, 2, kNan}), "logits: NaN for token 2 of 3");
  EXPECT_EQ(message_of({}, {1, kInf}), "logits: +inf for token 1 of 2");
  EXPECT_EQ(message_of({}, std::vector<float>(20, -kInf)), "logits: all 20 are -inf");
  EXPECT_EQ(message_of({}, {}), "logits: none");
  EXPECT_EQ(message_of({.temperature = -1}, {1}), "temperature: expected a number of at least 0, got -1");
  EXPECT_THAT(message_of({.temperature = kNan}, {1}), HasSubstr("temperature: expected"));
  EXPECT_THAT(message_of({.temperature = kInf}, {1}), HasSubstr("temperature: expected"));
  EXPECT_EQ(message_of({.top_k = -2}, {1}), "top_k: expected a number of at least 0, or -1 for all, got -2");
  EXPECT_EQ(message_of({.top_p = 0}, {1}), "top_p: expected a number in (0, 1], got 0");
  EXPECT_EQ(message_of({.top_p = 1.5}, {1}), "top_p: expected a number in (0, 1], got 1.5");
  EXPECT_THAT(message_of({.min_p = -0.5}, {1}), HasSubstr("min_p: expected a number in [0, 1]"));
  EXPECT_THAT(message_of({.repetition_penalty = 0}, {1}), HasSubstr("repetition_penalty: expected"));
  EXPECT_THAT(message_of({.presence_penalty = 3}, {1}), HasSubstr("presence_penalty: expected"));
  EXPECT_THAT(message_of({.frequency_penalty = -3}, {1}), HasSubstr("frequency_penalty: expected"));
  EXPECT_EQ(message_of({.logprobs = 5000}, {1}), "logprobs: expected a number in [0, 1000], got 5000");
}

}  // namespace
}  // namespace kt::inline engine
