#include "engine/scheduler.h"

#include <gmock/gmock.h>

#include <map>

#include "engine/testing/fake_model.h"
#include "engine/testing/requests.h"
#include "text/tokenizer/detokenizer.h"

namespace kt::inline engine {
namespace {

using testing::HasSubstr;

struct Setting {
  int step_tokens, sequences, pages, slots = 0, adapters = 0;
};

TEST(Scheduler, BatchesChunksAndCacheChangeNothing) {
  const Tokenizer tokenizer = byte_tokenizer();
  for (const Setting& s :
       {Setting{512, 64, 400}, Setting{1, 1, 16}, Setting{7, 3, 16}, Setting{64, 16, 16}, Setting{33, 33, 40},
        Setting{512, 64, 400, 200}, Setting{1, 1, 16, 2}, Setting{7, 3, 16, 5}, Setting{64, 16, 16, 16},
        Setting{64, 16, 16, 60}, Setting{33, 33, 40, 4}, Setting{512, 64, 400, 0, 3}, Setting{7, 3, 16, 0, 2},
        Setting{64, 16, 16, 0, 3}, Setting{64, 16, 16, 60, 2}, Setting{33, 33, 40, 4, 1}}) {
    SCOPED_TRACE(testing::Message() << "step_tokens " << s.step_tokens << ", slots " << s.slots
                                    << ", adapters " << s.adapters);
    FakeModel model({.pages = s.pages, .slots = s.slots, .adapters = s.adapters});
    Scheduler scheduler(model, &tokenizer, {.step_tokens = s.step_tokens, .sequences = s.sequences});
    std::mt19937 rng(5);
    for (int round = 0; round < 2; ++round) {
      std::vector<GenerateRequest> requests;
      for (int i = 0; i < 40; ++i) {
        requests.push_back(random_request(rng));
        if (s.adapters > 0)
          requests.back().adapter = static_cast<int>(rng() % static_cast<unsigned>(s.adapters + 1)) - 1;
      }
      std::vector<Heard> heard(requests.size());
      for (size_t i = 0; i < requests.size(); ++i) scheduler.submit(heard_by(heard[i], requests[i]));
      run(scheduler);
      for (size_t i = 0; i < requests.size(); ++i) {
        ASSERT_TRUE(heard[i].finish);
        const std::vector<TokenId> expected = plain_generation(model, requests[i]);
        ASSERT_EQ(heard[i].tokens, expected) << "request " << i;
        EXPECT_EQ(heard[i].finish->output_tokens, static_cast<int>(expected.size()));
        const bool ended = heard[i].finish->end_token.has_value();
        EXPECT_EQ(name_of(heard[i].finish->reason), ended ? "stop" : "length");
        EXPECT_EQ(heard[i].text, tokenizer.decode(std::span(expected).first(expected.size() - ended)));
      }
      EXPECT_EQ(scheduler.stats().pages_held, 0);
      EXPECT_EQ(scheduler.stats().slots_held, 0);
      EXPECT_TRUE(scheduler.idle());
    }
    EXPECT_LE(model.most_sequences, static_cast<size_t>(s.sequences));
    EXPECT_GT(scheduler.stats().tokens_reused, 0u);
  }
}

// The same prompt under two adapters shares nothing, at the same time and afterwards.
TEST(Scheduler, BeginningsBelongToTheirAdapter) {
  FakeModel model({.adapters = 2});
  Scheduler scheduler(model, nullptr);
  const auto ask = [&](int adapter) {
    GenerateRequest request{.prompt = std::vector<TokenId>(200, 7), .max_tokens = 5, .adapter = adapter};
    Heard heard;
    scheduler.submit(heard_by(heard, request));
    run(scheduler);
    EXPECT_EQ(heard.tokens, plain_generation(model, request)) << "adapter " << adapter;
    return heard.finish->cached_tokens;
  };
  EXPECT_EQ(ask(-1), 0);
  EXPECT_EQ(ask(0), 0);
  EXPECT_EQ(ask(1), 0);
  for (const int adapter : {1, -1, 0}) EXPECT_EQ(ask(adapter), 192);
  EXPECT_THAT([&] { scheduler.submit({.prompt = {1}, .adapter = 2}); },
              testing::ThrowsMessage<Error>("adapter: 2 of 2"));
}

// None waits for another's end.
TEST(Scheduler, AdaptersTakeTurns) {
  FakeModel model({.adapters = 2});
  Scheduler scheduler(model, nullptr);
  std::vector<Heard> heard(3);
  for (int i = 0; i < 3; ++i)
    scheduler.submit(
        heard_by(heard[static_cast<size_t>(i)], {.prompt = {1, 2, 3}, .max_tokens = 50, .adapter = i - 1}));
  for (int step = 0; step < 30; ++step) scheduler.run_once();
  for (const Heard& one : heard) EXPECT_NEAR(static_cast<double>(one.tokens.size()), 10, 2);
  run(scheduler);
  for (const Heard& one : heard) EXPECT_TRUE(one.finish);
}

void check_preemption(int slots) {
  FakeModel model({.pages = 16, .slots = slots});
  Scheduler scheduler(model, nullptr, {.step_tokens = 64, .sequences = 16});
  std::vector<Heard> heard(12);
  std::vector<GenerateRequest> requests;
  std::vector<size_t> order;
  for (size_t i = 0; i < heard.size(); ++i) {
    GenerateRequest request{.prompt = {static_cast<TokenId>(i)}, .max_tokens = 200};
    requests.push_back(request);
    request = heard_by(heard[i], request);
    request.on_event = [inner = request.on_event, &order, i](const GenerateEvent& event) {
      inner(event);
      if (event.finish) order.push_back(i);
    };
    scheduler.submit(std::move(request));
  }
  run(scheduler);
  EXPECT_GT(scheduler.stats().preemptions, 0u);
  for (size_t i = 0; i < heard.size(); ++i) EXPECT_EQ(heard[i].tokens, plain_generation(model, requests[i]));
  EXPECT_TRUE(std::ranges::is_sorted(order));  // equal work, so first come, first served
}

TEST(Scheduler, PreemptsTheYoungestAndAllEnd) {
  for (int slots : {0, 12, 40}) {
    SCOPED_TRACE(slots);
    check_preemption(slots);
  }
}

// Answers to one prompt wait for its first pages instead of computing them again.
void check_equal_prompts(int slots) {
  FakeModel model({.slots = slots});
  Scheduler scheduler(model, nullptr, {.step_tokens = 2000, .sequences = 8});
  GenerateRequest request{.prompt = std::vector<TokenId>(300, 5), .max_tokens = 2};
  std::vector<Heard> heard(4);
  std::vector<std::vector<TokenId>> expected;
  for (Heard& h : heard) {
    request.sampling.seed++;
    expected.push_back(plain_generation(model, request));
    scheduler.submit(heard_by(h, request));
  }
  run(scheduler);
  for (size_t i = 0; i < heard.size(); ++i) EXPECT_EQ(heard[i].tokens, expected[i]);
  EXPECT_EQ(scheduler.stats().tokens_reused, 3u * 256);
  EXPECT_EQ(heard[0].finish->cached_tokens, 0);
  EXPECT_EQ(heard[3].finish->cached_tokens, 256);
  EXPECT_EQ(scheduler.stats().tokens_fed, 300u + 3 * 44 + 4);
}

TEST(Scheduler, EqualPromptsAreComputedOnce) {
  check_equal_prompts(0);
  check_equal_prompts(5);
}

// Generating goes on while a long prompt is fed in chunks.
TEST(Scheduler, LongPromptsDoNotStallOthers) {
  FakeModel model;
  Scheduler scheduler(model, nullptr, {.step_tokens = 16, .sequences = 4});
  Heard first, second;
  scheduler.submit(heard_by(first, {.prompt = {1}, .max_tokens = 100}));
  scheduler.run_once();
  scheduler.submit(heard_by(second, {.prompt = std::vector<TokenId>(300, 5), .max_tokens = 1}));
  for (int step = 0; step < 20; ++step) scheduler.run_once();
  EXPECT_EQ(first.tokens.size(), 21u);
  EXPECT_TRUE(second.finish);  // 300 / 15 = 20
}

// A prompt that is alone has the whole step; beside an answer it has what takes no longer than the pause, by the last
// large step, and the shared tokens at least.
TEST(Scheduler, LargeStepsAreForPromptsThatNobodyWaitsFor) {
  const auto steps_of_prompt = [](std::chrono::milliseconds pause, bool beside_an_answer) {
    FakeModel model;
    Scheduler scheduler(model, nullptr,
                        {.step_tokens = 256, .sequences = 4, .shared_tokens = 16, .max_pause = pause});
    Heard warm, first, second;
    scheduler.submit(heard_by(warm, {.prompt = std::vector<TokenId>(256, 3), .max_tokens = 1}));
    scheduler.run_once();
    if (beside_an_answer) scheduler.submit(heard_by(first, {.prompt = {1}, .max_tokens = 100}));
    scheduler.run_once();
    scheduler.submit(heard_by(second, {.prompt = std::vector<TokenId>(240, 5), .max_tokens = 1}));
    int steps = 0;
    while (!second.finish && steps < 100) ++steps, scheduler.run_once();
    return steps;
  };
  using std::chrono::milliseconds;
  EXPECT_EQ(steps_of_prompt(milliseconds(0), /*beside_an_answer=*/false), 1);
  EXPECT_EQ(steps_of_prompt(milliseconds(0), true), 16);  // 240 / 15
  EXPECT_EQ(steps_of_prompt(milliseconds(3'600'000), true), 1);
}

TEST(Scheduler, CancelFreesPages) {
  FakeModel model;
  Scheduler scheduler(model, nullptr, {.step_tokens = 32, .sequences = 1});
  Heard running, waiting;
  const RequestId a =
      scheduler.submit(heard_by(running, {.prompt = std::vector<TokenId>(200, 1), .max_tokens = 50}));
  const RequestId b = scheduler.submit(heard_by(waiting, {.prompt = {2}, .max_tokens = 50}));
  scheduler.run_once();
  scheduler.run_once();
  EXPECT_GT(scheduler.stats().pages_held, 0);
  scheduler.cancel(a);
  scheduler.cancel(b);
  scheduler.cancel(999);
  EXPECT_FALSE(scheduler.run_once());
  EXPECT_EQ(running.finish->reason, FinishReason::kCancelled);
  EXPECT_EQ(waiting.finish->reason, FinishReason::kCancelled);
  EXPECT_EQ(scheduler.stats().pages_held, 0);
  EXPECT_EQ(scheduler.stats().pages_cached, 1);
  EXPECT_EQ(scheduler.take_ended(), (std::vector<RequestId>{a, b}));
}

TEST(Scheduler, ErrorsEndTheirOwnRequest) {
  FakeModel model({.nan_for = 9, .nan_after = 5, .throw_for = 251});
  Scheduler scheduler(model, nullptr, {.step_tokens = 32, .sequences = 8});
  Heard good, bad, thrower;
  const GenerateRequest plain{.prompt = {1}, .max_tokens = 20, .sampling = {.top_k = 5}};
  scheduler.submit(heard_by(good, plain));
  scheduler.submit(heard_by(bad, {.prompt = {9, 1}, .max_tokens = 50, .sampling = {.temperature = 0}}));
  int calls = 0;
  scheduler.submit({.prompt = {4}, .max_tokens = 50, .on_event = [&](const GenerateEvent&) {
                      ++calls;
                      throw std::runtime_error("callback");
                    }});
  for (int i = 0; i < 10; ++i) scheduler.run_once();
  ASSERT_TRUE(bad.finish);
  EXPECT_EQ(bad.finish->error, "logits: NaN for token 3 of 256");
  EXPECT_EQ(bad.tokens.size(), 3u);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(scheduler.stats().running, 1);
  run(scheduler);
  EXPECT_EQ(good.tokens, plain_generation(model, plain));

  // A step that throws ends who was in it; the next ones run.
  scheduler.submit(heard_by(thrower, {.prompt = {251}, .max_tokens = 5}));
  run(scheduler);
  EXPECT_EQ(thrower.finish->reason, FinishReason::kError);
  EXPECT_EQ(thrower.finish->error, "the step broke");
  Heard again;
  scheduler.submit(heard_by(again, plain));
  run(scheduler);
  EXPECT_EQ(again.tokens, good.tokens);
  EXPECT_EQ(scheduler.stats().pages_held, 0);
}

// Token i of the answer leaves remainder i modulo 5; throws at a place that is given.
class CountingConstraint : public TokenConstraint {
 public:
  CountingConstraint(size_t throw_in_mask, size_t throw_in_accept)
      : throw_in_mask_(throw_in_mask), throw_in_accept_(throw_in_accept) {}
  void mask(std::span<float> logits) override {
    if (accepted.size() == throw_in_mask_) fail("answer: no token can come");
    for (size_t id = 0; id < logits.size(); ++id)
      if (id % 5 != accepted.size() % 5) logits[id] = -std::numeric_limits<float>::infinity();
  }
  void accept(TokenId id) override {
    if (accepted.size() == throw_in_accept_) throw std::runtime_error("accept broke");
    accepted.push_back(id);
  }
  std::vector<TokenId> accepted;

 private:
  size_t throw_in_mask_, throw_in_accept_;
};

TEST(Scheduler, ConstraintsMaskAndSurvivePreemption) {
  FakeModel model({.pages = 16});
  Scheduler scheduler(model, nullptr, {.step_tokens = 64, .sequences = 16});
  std::vector<Heard> heard(12);
  std::vector<std::shared_ptr<CountingConstraint>> constraints;
  for (size_t i = 0; i < heard.size(); ++i) {
    constraints.push_back(std::make_shared<CountingConstraint>(i == 3 ? 20 : 1000, i == 7 ? 30 : 1000));
    GenerateRequest request{.prompt = {static_cast<TokenId>(i)}, .max_tokens = 200};
    request.sampling = {.temperature = i % 2 * 0.9, .top_k = 30, .seed = i};
    if (i % 3 == 0) request.sampling.repetition_penalty = 1.2;
    if (i != 5) request.constraint = constraints.back();
    scheduler.submit(heard_by(heard[i], std::move(request)));
  }
  run(scheduler);
  EXPECT_GT(scheduler.stats().preemptions, 0u);
  for (size_t i = 0; i < heard.size(); ++i) {
    SCOPED_TRACE(i);
    ASSERT_TRUE(heard[i].finish);
    const size_t expected = i == 3 ? 20 : i == 7 ? 30 : 200;
    EXPECT_EQ(heard[i].tokens.size(), expected);
    EXPECT_EQ(heard[i].finish->reason, expected == 200 ? FinishReason::kLength : FinishReason::kError);
    if (i == 5) continue;
    EXPECT_EQ(constraints[i]->accepted, heard[i].tokens);
    for (size_t at = 0; at < heard[i].tokens.size(); ++at) EXPECT_EQ(heard[i].tokens[at] % 5, at % 5);
  }
  EXPECT_EQ(heard[3].finish->error, "answer: no token can come");
  EXPECT_EQ(heard[3].finish->error_kind, ErrorKind::kInput);
  EXPECT_EQ(heard[7].finish->error, "accept broke");
}

TEST(Scheduler, LogprobsAreThoseBeforeTheMask) {
  FakeModel model;
  Scheduler scheduler(model, nullptr, {});
  std::optional<SampledToken> free, held;
  GenerateRequest request{.prompt = {1}, .max_tokens = 1, .sampling = {.temperature = 0, .logprobs = 256}};
  request.on_event = [&](const GenerateEvent& event) { free = *event.token; };
  scheduler.submit(request);
  request.constraint = std::make_shared<CountingConstraint>(1000, 1000);
  request.on_event = [&](const GenerateEvent& event) { held = *event.token; };
  scheduler.submit(request);
  run(scheduler);
  EXPECT_EQ(held->id % 5, 0);
  const auto found = std::ranges::find(free->top, held->id, &TokenLogprob::id);
  ASSERT_NE(found, free->top.end());
  EXPECT_EQ(held->logprob, found->logprob);
  EXPECT_EQ(held->top[0].id, free->id);
}

TEST(Scheduler, StopStringsAndWholeCharacters) {
  const Tokenizer tokenizer = byte_tokenizer();
  FakeModel model;
  Scheduler scheduler(model, &tokenizer, {});
  GenerateRequest request{.prompt = {1, 2}, .max_tokens = 60, .sampling = {.temperature = 0}};
  const std::string whole = tokenizer.decode(plain_generation(model, request));
  Heard all;
  std::vector<std::string> pieces;
  GenerateRequest plain = heard_by(all, request);
  plain.on_event = [inner = plain.on_event, &pieces](const GenerateEvent& event) {
    inner(event);
    pieces.emplace_back(event.text);
  };
  scheduler.submit(std::move(plain));
  run(scheduler);
  EXPECT_EQ(all.text, whole);
  EXPECT_EQ(all.finish->reason, FinishReason::kLength);
  for (const std::string& piece : pieces) EXPECT_TRUE(is_valid_utf8(piece));

  size_t at = 20, end = 20;
  while ((whole[at] & 0xC0) == 0x80) ++at;
  for (end = at + 4; end < whole.size() && (whole[end] & 0xC0) == 0x80;) ++end;
  Heard stopped;
  request.stop = {"never to be seen", whole.substr(at, end - at)};
  scheduler.submit(heard_by(stopped, request));
  run(scheduler);
  EXPECT_EQ(stopped.text, whole.substr(0, whole.find(request.stop[1])));
  EXPECT_EQ(stopped.finish->reason, FinishReason::kStop);
  EXPECT_EQ(stopped.finish->stop, 1u);
}

TEST(Scheduler, ContextEndsTheAnswer) {
  FakeModel model({.context = 100});
  Scheduler scheduler(model, nullptr, {});
  Heard heard;
  scheduler.submit(heard_by(heard, {.prompt = std::vector<TokenId>(90, 1), .max_tokens = 1000}));
  run(scheduler);
  EXPECT_EQ(heard.tokens.size(), 10u);
  EXPECT_EQ(heard.finish->reason, FinishReason::kLength);
}

// Scores of a prompt, one token after the other, without pages and batches.
void expect_scores(const FakeModel& model, const GenerateRequest& request,
                   const std::vector<SampledToken>& got) {
  const size_t from = request.prompt_logprobs_from;
  ASSERT_EQ(got.size(), request.prompt.size() - from);
  std::vector<float> logits(static_cast<size_t>(model.vocabulary()));
  for (size_t i = from; i < request.prompt.size(); ++i) {
    const auto before = std::span(request.prompt).first(i);
    model.write_logits(before, model.state_behind(before), logits);
    const SampledToken expected = scored_token(logits, request.prompt[i], *request.prompt_logprobs);
    ASSERT_EQ(got[i - from].id, request.prompt[i]) << i;
    ASSERT_EQ(got[i - from].logprob, expected.logprob) << i;
    ASSERT_EQ(got[i - from].top.size(), static_cast<size_t>(*request.prompt_logprobs));
    if (!expected.top.empty()) {
      ASSERT_EQ(got[i - from].top[0].id, expected.top[0].id) << i;
    }
  }
}

// In a batch, in pieces, behind what the cache knows, and preempted: 8 pages are too few for all.
TEST(Scheduler, ScoresPrompts) {
  FakeModel model({.pages = 8});
  Scheduler scheduler(model, nullptr, {.step_tokens = 100, .sequences = 8});
  std::mt19937 rng(3);
  std::vector<GenerateRequest> requests;
  for (int i = 0; i < 24; ++i) {
    requests.push_back(random_request(rng));
    if (i % 3 != 0) requests.back().max_tokens = 250;
    if (i % 3 == 2) continue;
    requests.back().prompt_logprobs = i % 5;
    if (i % 2 == 1) requests.back().prompt_logprobs_from = 1 + static_cast<size_t>(i) * 7 % 90;
    if (i % 3 == 0) requests.back().max_tokens = i % 2;
  }
  std::vector<Heard> heard(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) scheduler.submit(heard_by(heard[i], requests[i]));
  run(scheduler);
  EXPECT_GT(scheduler.stats().preemptions, 0u);
  EXPECT_GT(scheduler.stats().tokens_reused, 0u);
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(heard[i].tokens, plain_generation(model, requests[i]));
    EXPECT_EQ(heard[i].finish->output_tokens, static_cast<int>(heard[i].tokens.size()));
    if (requests[i].max_tokens == 0) {
      EXPECT_EQ(heard[i].finish->reason, FinishReason::kLength);
    }
    if (!requests[i].prompt_logprobs || requests[i].prompt.size() <= requests[i].prompt_logprobs_from) {
      EXPECT_TRUE(heard[i].prompt.empty());
    } else {
      expect_scores(model, requests[i], heard[i].prompt);
    }
  }
}

// What comes before the first token that is scored is taken from the cache, as far as it is whole pages.
TEST(Scheduler, ScoresAnEndOfAPromptThatIsKnown) {
  FakeModel model({.pages = 8});
  Scheduler scheduler(model, nullptr, {.step_tokens = 100, .sequences = 2});
  GenerateRequest request{.prompt = std::vector<TokenId>(200, 9), .max_tokens = 1};
  Heard first, scored;
  scheduler.submit(heard_by(first, request));
  run(scheduler);
  request.prompt_logprobs = 2;
  request.prompt_logprobs_from = 150;
  scheduler.submit(heard_by(scored, request));
  run(scheduler);
  expect_scores(model, request, scored.prompt);
  EXPECT_EQ(scored.finish->cached_tokens, 128);
  EXPECT_EQ(scored.tokens, first.tokens);
}

TEST(Scheduler, APromptAloneMayFillTheContext) {
  FakeModel model({.context = 128, .pages = 2});
  Scheduler scheduler(model, nullptr, {});
  GenerateRequest request{.prompt = std::vector<TokenId>(128, 5), .max_tokens = 0, .prompt_logprobs = 1};
  Heard heard;
  scheduler.submit(heard_by(heard, request));
  run(scheduler);
  expect_scores(model, request, heard.prompt);
  EXPECT_EQ(heard.finish->reason, FinishReason::kLength);
}

TEST(Scheduler, SaysWhatIsWrong) {
  FakeModel model({.context = 100, .pages = 1});
  Scheduler scheduler(model, nullptr, {});
  const auto message_of = [&](GenerateRequest request) -> std::string {
    try {
      scheduler.submit(std::move(request));
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message_of({}), "prompt: empty; expected at least 1 token");
  EXPECT_EQ(
      message_of({.prompt = std::vector<TokenId>(64, 1)}),
      "prompt: 64 tokens leave no room for an answer in 64 tokens (context 100, KV cache 1 pages of 64)");
  EXPECT_EQ(message_of({.prompt = {256}}), "prompt: token 256 is outside the vocabulary of 256");
  EXPECT_EQ(message_of({.prompt = {-1}}), "prompt: token -1 is outside the vocabulary of 256");
  EXPECT_EQ(message_of({.prompt = {1}, .max_tokens = -1}), "max_tokens: expected at least 0, got -1");
  EXPECT_THAT(message_of({.prompt = {1}, .prompt_logprobs = -1}), HasSubstr("logprobs: expected"));
  EXPECT_THAT(message_of({.prompt = {1}, .prompt_logprobs = 0, .prompt_logprobs_from = 0}),
              HasSubstr("prompt_logprobs_from: expected at least 1"));
  EXPECT_THAT(message_of({.prompt = {1}, .sampling = {.top_p = 2}}), HasSubstr("top_p: expected"));
  EXPECT_THAT(message_of({.prompt = {1}, .stop = {"x"}}), HasSubstr("stop: strings need a tokenizer"));
  EXPECT_TRUE(scheduler.idle());
  EXPECT_THROW(Scheduler(model, nullptr, {.step_tokens = 3, .sequences = 4}), Error);
}

void soak_of_submits_and_cancels(int slots) {
  const Tokenizer tokenizer = byte_tokenizer();
  FakeModel model({.pages = 24, .slots = slots, .nan_for = 13, .nan_after = 40});
  Scheduler scheduler(model, &tokenizer, {.step_tokens = 48, .sequences = 12});
  std::mt19937 rng(21);
  std::map<RequestId, std::pair<GenerateRequest, Heard>> all;
  for (int step = 0; step < 4000; ++step) {
    if (rng() % 6 == 0 && all.size() < 400) {
      auto item = std::make_unique<std::pair<GenerateRequest, Heard>>(random_request(rng), Heard{});
      if (rng() % 8 == 0)
        item->first.stop = {"a",
                            "\xC3"
                            "\xA9"};
      const RequestId next = all.empty() ? 1 : all.rbegin()->first + 1;
      auto& [request, heard] = all[next] = std::move(*item);
      ASSERT_EQ(scheduler.submit(heard_by(heard, request)), next);
    }
    if (!all.empty() && rng() % 12 == 0) scheduler.cancel(rng() % all.size() + 1);
    if (rng() % 200 == 0) scheduler.cancel_all();
    if (rng() % 100 == 0) scheduler.drop_cache();
    scheduler.run_once();
  }
  run(scheduler);
  EXPECT_EQ(scheduler.stats().pages_held, 0);
  EXPECT_EQ(scheduler.stats().slots_held, 0);
  std::map<FinishReason, int> reasons;
  for (const auto& [id, item] : all) {
    const auto& [request, heard] = item;
    ASSERT_TRUE(heard.finish);
    ++reasons[heard.finish->reason];
    if (heard.finish->reason == FinishReason::kError || request.prompt[0] == 13) continue;
    const std::vector<TokenId> expected = plain_generation(model, request);
    ASSERT_LE(heard.tokens.size(), expected.size());
    EXPECT_TRUE(std::equal(heard.tokens.begin(), heard.tokens.end(), expected.begin())) << id;
  }
  EXPECT_GT(reasons[FinishReason::kLength], 20);
  EXPECT_GT(reasons[FinishReason::kStop], 5);
  EXPECT_GT(reasons[FinishReason::kCancelled], 20);
  EXPECT_GT(scheduler.stats().tokens_reused, 1000u);
}

TEST(Scheduler, SoakOfSubmitsAndCancels) {
  for (int slots : {0, 5, 30}) {
    SCOPED_TRACE(slots);
    soak_of_submits_and_cancels(slots);
  }
}

}  // namespace
}  // namespace kt::inline engine
