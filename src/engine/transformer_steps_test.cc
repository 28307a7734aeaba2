#include "engine/transformer_steps.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <numeric>

#include "base/testing/temp_folder.h"
#include "engine/engine.h"
#include "engine/loaded_model.h"

namespace kt::inline engine {
namespace {

// The demo model, small enough to load for every test.
LoadedModel demo(Precision precision) {
  return OpenedModel(KT_DEMO_MODEL, {.precision = precision,
                                     .kv_type = precision == Precision::kF32 ? KvType::kF32 : KvType::kBf16,
                                     .threads = 2,
                                     .max_tokens = 96})
      .load();
}

std::vector<TokenId> prompt(const LoadedModel& model, int tokens, int seed) {
  const std::string story =
      "Once upon a time there was a small boat that wanted to see the sea. The wind was kind and the river "
      "was long, so the boat began to sing. ";
  std::vector<TokenId> ids{static_cast<TokenId>(40 + seed)};
  while (static_cast<int>(ids.size()) < tokens)
    for (TokenId id : model.tokenizer().encode(story)) ids.push_back(id);
  ids.resize(static_cast<size_t>(tokens));
  return ids;
}

GenerateRequest request(std::vector<TokenId> prompt, int max_tokens) {
  GenerateRequest out{.prompt = std::move(prompt), .max_tokens = max_tokens};
  out.sampling.temperature = 0;
  out.sampling.logprobs = 2;
  return out;
}

// All of them at once through one scheduler: without a thread of its own, so that who shares a step with whom
// does not depend on time.
std::vector<Generated> run(LoadedModel& model, int pages, const std::vector<GenerateRequest>& requests,
                           SchedulerStats* stats = nullptr) {
  const auto runner = model.make_runner(pages);
  std::vector<Generated> out(requests.size());
  Scheduler scheduler(*runner, &model.tokenizer(), {.step_tokens = 96, .sequences = 8});
  for (size_t i = 0; i < requests.size(); ++i) {
    GenerateRequest copy = requests[i];
    copy.on_event = [&out, i](const GenerateEvent& event) {
      if (event.token) out[i].tokens.push_back(*event.token);
      out[i].text += event.text;
      if (event.finish) out[i].finish = *event.finish;
    };
    scheduler.submit(std::move(copy));
  }
  while (scheduler.run_once()) {
  }
  if (stats) *stats = scheduler.stats();
  return out;
}

// The same tokens with log probabilities within `bound`; from a token on whose two best differ by less than
// twice the bound the texts may go different ways.
void expect_same(const Generated& a, const Generated& b, double bound) {
  ASSERT_EQ(a.finish.reason, FinishReason::kLength) << a.finish.error;
  ASSERT_EQ(b.finish.reason, FinishReason::kLength) << b.finish.error;
  for (size_t i = 0; i < std::min(a.tokens.size(), b.tokens.size()); ++i) {
    const SampledToken &x = a.tokens[i], &y = b.tokens[i];
    ASSERT_EQ(x.top.size(), 2u);
    EXPECT_NEAR(x.top[0].logprob, y.top[0].logprob, bound) << "token " << i;
    if (x.id == y.id) continue;
    EXPECT_LT(x.top[0].logprob - x.top[1].logprob, 2 * bound) << "token " << i;
    EXPECT_GT(i, 0u);
    return;
  }
  EXPECT_EQ(a.tokens.size(), b.tokens.size());
}

constexpr double kF32Bound = 1e-3;    // log probabilities of f32 logits within 1e-4 of about 10
constexpr double kInt8Bound = 0.125;  // bf16 rounding of other sums, seen through rounded activations

class Steps : public testing::TestWithParam<Precision> {
 protected:
  double bound() const { return GetParam() == Precision::kF32 ? kF32Bound : kInt8Bound; }
};

TEST_P(Steps, TheRestOfTheBatchChangesNothing) {
  LoadedModel model = demo(GetParam());
  std::vector<GenerateRequest> all;
  for (int i = 0; i < 7; ++i) all.push_back(request(prompt(model, 1 + i * 31, i), 6 + 5 * i));
  const auto together = run(model, 64, all);
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    expect_same(run(model, 64, {all[i]})[0], together[i], bound());
  }
}

TEST_P(Steps, CachedBeginningsChangeNothing) {
  LoadedModel model = demo(GetParam());
  const auto runner = model.make_runner(32);
  Engine engine(*runner, &model.tokenizer(), {.step_tokens = 96, .sequences = 4});
  const GenerateRequest one = request(prompt(model, 200, 1), 24);
  const Generated first = engine.generate(one), second = engine.generate(one);
  EXPECT_EQ(first.finish.cached_tokens, 0);
  EXPECT_EQ(second.finish.cached_tokens, 192);
  expect_same(first, second, bound());
  engine.drop_cache();
  EXPECT_EQ(engine.generate(one).finish.cached_tokens, 0);
}

TEST_P(Steps, PreemptedRequestsGoOnWhereTheyWere) {
  LoadedModel model = demo(GetParam());
  std::vector<GenerateRequest> all;
  for (int i = 0; i < 6; ++i) all.push_back(request(prompt(model, 60, i), 100));
  SchedulerStats stats;
  const auto tight = run(model, 8, all, &stats);
  EXPECT_GT(stats.preemptions, 0u);
  const auto roomy = run(model, 64, all);
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(tight[i].tokens.size(), 100u);
    expect_same(tight[i], roomy[i], bound());
  }
}

INSTANTIATE_TEST_SUITE_P(Precisions, Steps, testing::Values(Precision::kF32, Precision::kInt8),
                         [](const auto& info) { return info.param == Precision::kF32 ? "f32" : "int8"; });

// One sequence on pages 0, 1, ...; the logits of what is asked for.
std::vector<float> step(Runner& runner, std::span<const TokenId> tokens, int position,
                        StepSequence::Logits which) {
  std::vector<int32_t> pages(static_cast<size_t>(runner.cache_pages()));
  std::iota(pages.begin(), pages.end(), 0);
  const StepSequence sequence{.tokens = tokens, .position = position, .pages = pages, .logits = which};
  std::vector<float> logits(sequence.logit_rows() * static_cast<size_t>(runner.vocabulary()));
  runner.step({&sequence, 1}, logits);
  return logits;
}

TEST(StepsLogits, OfAllTokensAreThoseOfEachAlone) {
  LoadedModel model = demo(Precision::kF32);
  const std::vector<TokenId> tokens = prompt(model, 70, 3);
  const auto runner = model.make_runner(2);
  const std::vector<float> all = step(*runner, tokens, 0, StepSequence::Logits::kAll);
  const auto width = static_cast<size_t>(runner->vocabulary());
  ASSERT_EQ(all.size(), tokens.size() * width);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto one =
        step(*runner, std::span(tokens).subspan(i, 1), static_cast<int>(i), StepSequence::Logits::kLast);
    ASSERT_EQ(one.size(), width);
    for (size_t v = 0; v < width; ++v) ASSERT_NEAR(one[v], all[i * width + v], kF32Bound) << i << " " << v;
  }
  EXPECT_TRUE(step(*runner, tokens, 0, StepSequence::Logits::kNone).empty());
}

TEST(StepsTotals, AreOfOneRunner) {
  LoadedModel model = demo(Precision::kInt8);
  const std::vector<TokenId> tokens = prompt(model, 5, 3);
  const auto first = model.make_runner(1);
  step(*first, tokens, 0, StepSequence::Logits::kNone);
  const auto second = model.make_runner(1);
  EXPECT_EQ(second->totals().work.total().bytes, 0);
  step(*second, tokens, 0, StepSequence::Logits::kNone);
  step(*second, std::span(tokens).first(1), 5, StepSequence::Logits::kLast);
  EXPECT_EQ(first->totals().steps, 1u);
  EXPECT_EQ(second->totals().steps, 2u);
  EXPECT_EQ(second->totals().prefill_tokens, 5u);
  EXPECT_EQ(second->totals().decode_tokens, 1u);
  EXPECT_GT(first->totals().work.total().bytes, 0);
  EXPECT_GT(second->totals().work.total().bytes, first->totals().work.total().bytes);
}

TEST(StepsErrors, CacheThatFitsNoMemoryIsRefused) {
  LoadedModel model = demo(Precision::kInt8);
  EXPECT_THROW(model.make_runner(1 << 30), Error);
}

// A file that shrinks, between the plan and the weights and under a model that runs.
TEST(TransformerSteps, AModelWhoseFileLosesItsEnd) {
  namespace fs = std::filesystem;
  const testing_files::TempFolder folder;
  fs::copy(KT_DEMO_MODEL, folder.at("loading"));
  fs::copy(KT_DEMO_MODEL, folder.at("running"));
  const auto shrink = [&](std::string_view name) {
    for (const auto& file : fs::directory_iterator(folder.at(name)))
      if (file.path().extension() == ".safetensors") fs::resize_file(file.path(), 4096);
  };
  const auto message_of = [](auto&& call) {
    try {
      call();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const ModelOptions options{.threads = 2, .max_tokens = 64};
  {
    OpenedModel opened(folder.at("loading"), options);
    shrink("loading");
    const std::string message = message_of([&] { std::move(opened).load(); });
    EXPECT_THAT(message,
                testing::MatchesRegex(".*/loading/model-.*safetensors: nothing at byte [0-9]+ of .*"));
  }
  LoadedModel model = OpenedModel(folder.at("running"), options).load();
  const auto runner = model.make_runner(4);
  const std::vector<TokenId> tokens = prompt(model, 8, 1);
  const std::vector<int32_t> pages = {0};
  std::vector<float> logits(static_cast<size_t>(runner->vocabulary()));
  const StepSequence sequence{
      .tokens = tokens, .position = 0, .pages = pages, .logits = StepSequence::Logits::kLast};
  const auto step = [&] { runner->step(std::span(&sequence, 1), logits); };
  EXPECT_EQ(message_of(step), "no error");
  shrink("running");
  for (int again = 0; again < 2; ++again)
    EXPECT_THAT(message_of(step), testing::HasSubstr("safetensors: nothing at byte "));
}

}  // namespace
}  // namespace kt::inline engine
