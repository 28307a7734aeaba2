#include "engine/evaluation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "engine/testing/fake_model.h"

namespace kt::inline engine {
namespace {

std::vector<EvaluationCase> random_cases(size_t count) {
  std::mt19937 rng(5);
  std::vector<EvaluationCase> out(count);
  for (size_t i = 0; i < count; ++i) {
    EvaluationCase& one = out[i];
    one.prompt.resize(1 + rng() % 180);
    for (TokenId& id : one.prompt) id = static_cast<TokenId>(rng() % 250);
    one.answer_begins = one.prompt.size();
    one.whole = one.prompt;
    for (uint32_t more = rng() % 60; more > 0; --more) one.whole.push_back(static_cast<TokenId>(rng() % 250));
    if (i % 2 == 0) one.choices = {3, 200, 7, 90};
  }
  return out;
}

std::vector<float> logits_behind(const FakeModel& model, std::span<const TokenId> tokens) {
  std::vector<float> out(static_cast<size_t>(model.vocabulary()));
  model.write_logits(tokens, model.state_behind(tokens), out);
  return out;
}

void expect_answer(const FakeModel& model, const EvaluationCase& asked, const EvaluationOptions& options,
                   const EvaluationAnswer& answer) {
  GenerateRequest request{
      .prompt = asked.prompt, .max_tokens = options.max_tokens, .sampling = options.sampling};
  request.sampling.seed += answer.index;
  const std::vector<TokenId> said = plain_generation(model, request);
  EXPECT_EQ(answer.text, byte_tokenizer().decode(said));
  EXPECT_EQ(answer.tokens, static_cast<int>(said.size()));
  EXPECT_TRUE(answer.cut);  // nothing ends it
  double nll = 0;
  for (size_t i = asked.answer_begins; i < asked.whole.size(); ++i)
    nll -= *scored_token(logits_behind(model, std::span(asked.whole).first(i)), asked.whole[i], 0).logprob;
  EXPECT_NEAR(answer.nll, nll, 1e-9);
  EXPECT_EQ(answer.scored, static_cast<int64_t>(asked.whole.size() - asked.answer_begins));
  ASSERT_EQ(answer.choice.has_value(), !asked.choices.empty());
  if (asked.choices.empty()) return;
  const std::vector<float> last = logits_behind(model, asked.prompt);
  for (const TokenId id : asked.choices)
    EXPECT_LE(last[static_cast<size_t>(id)], last[static_cast<size_t>(asked.choices[*answer.choice])]);
}

TEST(Evaluation, AsksEverythingOfEveryCase) {
  const Tokenizer tokenizer = byte_tokenizer();
  const std::vector<EvaluationCase> cases = random_cases(16);
  for (const int sequences : {1, 4}) {
    for (const double temperature : {0.0, 1.0}) {
      FakeModel model({.pages = 40});
      const EvaluationOptions options{.max_tokens = 9,
                                      .sampling = {.temperature = temperature, .seed = 11},
                                      .sequences = sequences,
                                      .step_tokens = 64};
      std::vector<bool> seen(cases.size());
      evaluate(
          model, tokenizer, cases, options,
          [&](const EvaluationAnswer& answer) {
            ASSERT_FALSE(seen[answer.index]);
            seen[answer.index] = true;
            expect_answer(model, cases[answer.index], options, answer);
          },
          false);
      EXPECT_EQ(std::ranges::count(seen, true), 16);
      EXPECT_LE(model.most_sequences, static_cast<size_t>(sequences));
    }
  }
}

TEST(Evaluation, KeepsToTheLongestAndToWhatIsAsked) {
  const Tokenizer tokenizer = byte_tokenizer();
  FakeModel model({.pages = 40});
  std::vector<EvaluationCase> cases(3);
  for (size_t i = 0; i < cases.size(); ++i) cases[i].prompt = std::vector<TokenId>(10 * (i + 1), 5);
  std::vector<int> tokens(3);
  const auto note = [&](const EvaluationAnswer& answer) { tokens[answer.index] = answer.tokens; };
  evaluate(model, tokenizer, cases, {.max_tokens = 15, .longest = 31, .sampling = {.temperature = 0}}, note,
           false);
  EXPECT_EQ(tokens, (std::vector<int>{15, 11, 1}));
  evaluate(model, tokenizer, cases, {.generate = false}, note, false);
  EXPECT_EQ(tokens, (std::vector<int>{0, 0, 0}));
}

TEST(Evaluation, StopsAndTellsWhatBroke) {
  const Tokenizer tokenizer = byte_tokenizer();
  const std::vector<EvaluationCase> cases = random_cases(16);
  FakeModel model({.pages = 40});
  std::atomic<bool> stop = false;
  int answered = 0;
  evaluate(
      model, tokenizer, cases, {.max_tokens = 9, .sequences = 3},
      [&](const EvaluationAnswer&) {
        if (++answered >= 5) stop = true;
      },
      stop);
  EXPECT_GE(answered, 5);
  EXPECT_LE(answered, 8);  // those of the same step
  FakeModel broken({.pages = 40, .throw_for = cases[4].prompt[0]});
  EXPECT_THROW(
      evaluate(broken, tokenizer, cases, {.max_tokens = 9}, [](const EvaluationAnswer&) {}, false), Error);
}

}  // namespace
}  // namespace kt::inline engine
