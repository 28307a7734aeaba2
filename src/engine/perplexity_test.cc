#include "engine/perplexity.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <random>

#include "base/error.h"
#include "engine/testing/fake_model.h"

namespace kt::inline engine {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Every row says: token 0 with 1/2, 1 with 1/4, 2 with 1/4. Remembers what it was asked.
struct Fixed {
  std::vector<float> row{std::log(2.f), 0, 0};
  std::vector<float> out = {};
  std::vector<std::array<size_t, 3>> asked = {};  // first input, first, count
  std::span<const float> operator()(std::span<const TokenId> window, size_t first, size_t count) {
    asked.push_back({static_cast<size_t>(window[0]), first, count});
    out.clear();
    for (size_t i = 0; i < count; ++i) out.insert(out.end(), row.begin(), row.end());
    return out;
  }
};

TEST(Perplexity, ByHand) {
  Fixed logits;
  // Targets 0, 1, 2: -log of 1/2 * 1/4 * 1/4 is 5 log 2.
  const Perplexity result = measure_perplexity(std::vector<TokenId>{2, 0, 1, 2}, logits, {.context = 3});
  EXPECT_EQ(result.tokens, 3u);
  EXPECT_NEAR(result.nll, 5 * std::log(2.0), 1e-6);
  EXPECT_NEAR(result.perplexity, std::exp2(5.0 / 3), 1e-6);
}

TEST(Perplexity, WindowsDoNotOverlapAndTheTailIsLeftOut) {
  Fixed logits;
  const std::vector<TokenId> tokens{0, 1, 2, 2, 1, 0, 1, 1, 0, 2};  // 9 targets
  EXPECT_EQ(measure_perplexity(tokens, logits, {.context = 4, .chunk = 3}).tokens, 8u);
  using Asked = std::array<size_t, 3>;
  EXPECT_THAT(logits.asked, ElementsAre(Asked{0, 0, 3}, Asked{0, 3, 1}, Asked{1, 0, 3}, Asked{1, 3, 1}));
  EXPECT_EQ(measure_perplexity(tokens, logits, {.context = 3}).tokens, 9u);
  EXPECT_EQ(measure_perplexity(tokens, logits, {.context = 3, .most_tokens = 8}).tokens, 6u);
  EXPECT_EQ(measure_perplexity(tokens, logits, {.context = 100}).tokens, 9u);  // a short text is one window
  const auto stop = [](size_t done, size_t all) { return all == 3 && done < 2; };
  EXPECT_EQ(measure_perplexity(tokens, logits, {.context = 3, .on_window = stop}).tokens, 6u);
}

TEST(Divergence, ByHand) {
  Fixed reference, model;
  model.row = {0, 0, std::log(2.f)};  // 1/4, 1/4, 1/2
  const Divergence result =
      measure_divergence(std::vector<TokenId>{0, 0, 2}, reference, model, {.context = 2});
  // 1/2 log(1/2 / 1/4) + 1/4 log 1 + 1/4 log(1/4 / 1/2) = 1/4 log 2.
  EXPECT_NEAR(result.kl, 0.25 * std::log(2.0), 1e-7);
  EXPECT_NEAR(result.kl_most, result.kl, 1e-12);
  EXPECT_EQ(result.same_top, 0);
  EXPECT_NEAR(result.reference.nll, 3 * std::log(2.0), 1e-6);  // 1/2, 1/4
  EXPECT_NEAR(result.model.nll, 3 * std::log(2.0), 1e-6);      // 1/4, 1/2
  EXPECT_EQ(result.model.tokens, 2u);

  const Divergence same =
      measure_divergence(std::vector<TokenId>{0, 0, 2}, reference, reference, {.context = 2});
  EXPECT_EQ(same.kl, 0);
  EXPECT_EQ(same.same_top, 1);
  // What the reference excludes does not count; what only the model excludes is infinitely far.
  Fixed excludes;
  excludes.row = {0, 0, -std::numeric_limits<float>::infinity()};
  EXPECT_NEAR(measure_divergence(std::vector<TokenId>{0, 0}, excludes, reference, {}).kl,
              0.5 * std::log(1.0) + 0.5 * std::log(2.0), 1e-7);
  EXPECT_TRUE(std::isinf(measure_divergence(std::vector<TokenId>{0, 0}, reference, excludes, {}).kl));
}

TEST(Divergence, ThreadsAndChunksGiveTheSameBits) {
  std::mt19937 rng(4);
  std::vector<TokenId> tokens(300);
  for (TokenId& id : tokens) id = static_cast<TokenId>(rng() % 50);
  std::vector<float> out[2];
  const auto logits_of = [&](int which) {
    return [&out, which](std::span<const TokenId> window, size_t first, size_t count) {
      out[which].clear();
      for (size_t row = first; row < first + count; ++row)
        for (size_t i = 0; i < 50; ++i)
          out[which].push_back(
              static_cast<float>(5 * uniform(static_cast<uint64_t>(window[row] + 100 * which), i)));
      return std::span<const float>(out[which]);
    };
  };
  auto a = logits_of(0), b = logits_of(1);
  Pool pool({.threads = 3, .nodes = 1, .pin = false});
  const Divergence expected = measure_divergence(tokens, a, b, {.context = 64});
  const Divergence other = measure_divergence(tokens, a, b, {.context = 64, .chunk = 7}, &pool);
  EXPECT_EQ(expected.model.nll, other.model.nll);
  EXPECT_EQ(expected.reference.nll, other.reference.nll);
  EXPECT_EQ(expected.kl, other.kl);
  EXPECT_GT(expected.kl, 0.1);
  EXPECT_EQ(expected.model.nll, measure_perplexity(tokens, b, {.context = 64}, &pool).nll);
}

TEST(Perplexity, SaysWhatIsWrong) {
  Fixed logits;
  const auto message_of = [&](std::vector<TokenId> tokens, PerplexityOptions options) -> std::string {
    try {
      measure_perplexity(tokens, logits, options);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message_of({1}, {}), "perplexity: expected at least 2 tokens of text, got 1");
  EXPECT_EQ(message_of({1, 2}, {.context = 0}), "context: expected at least 1, got 0");
  EXPECT_EQ(message_of({1, 2}, {.chunk = 0}), "chunk: expected at least 1, got 0");
  EXPECT_EQ(message_of({1, 2, 3}, {}), "perplexity: token 3 at 2 is outside the vocabulary of 3");
  logits.row[1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(message_of({1, 2, 2}, {}), "perplexity: after token 0: logits: NaN for token 1 of 3");
  logits.row.clear();
  EXPECT_THAT(message_of({1, 2, 2}, {}), HasSubstr("expected logits for 2 rows"));
}

}  // namespace
}  // namespace kt::inline engine
