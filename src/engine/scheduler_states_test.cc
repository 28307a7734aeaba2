// The scheduler with models that have states: where it takes snapshots, and that nothing begins without one.
#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "engine/engine.h"
#include "engine/testing/fake_model.h"
#include "engine/testing/requests.h"

namespace kt::inline engine {
namespace {

using Tokens = std::vector<TokenId>;

Tokens random_tokens(size_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  Tokens tokens(count);
  for (TokenId& id : tokens) id = static_cast<TokenId>(rng() % 250);
  return tokens;
}

Tokens joined(Tokens first, const Tokens& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

// Runs it alone to its end and checks what it said.
Finish answer(Scheduler& scheduler, const FakeModel& model, const GenerateRequest& request) {
  Heard heard;
  scheduler.submit(heard_by(heard, request));
  run(scheduler);
  EXPECT_EQ(heard.tokens, plain_generation(model, request));
  return heard.finish.value_or(Finish{});
}

TEST(SchedulerStates, TheNextTurnBeginsInTheAnswer) {
  FakeModel model({.slots = 4});
  Scheduler scheduler(model, nullptr, {.step_tokens = 512, .sequences = 2});
  const GenerateRequest first{.prompt = random_tokens(300, 1), .max_tokens = 100};
  EXPECT_EQ(answer(scheduler, model, first).cached_tokens, 0);
  EXPECT_EQ(scheduler.stats().snapshots,
            2);  // behind 256 of the prompt and, rolling, behind 384 of the answer
  EXPECT_EQ(scheduler.stats().tokens_fed, 399u);
  const Tokens whole = joined(first.prompt, plain_generation(model, first));
  const GenerateRequest second{.prompt = joined(whole, random_tokens(20, 2)), .max_tokens = 10};
  EXPECT_EQ(answer(scheduler, model, second).cached_tokens, 384);
  // Another answer to the first, and one to what an edited answer would be.
  EXPECT_EQ(answer(scheduler, model, first).cached_tokens, 256);
  const GenerateRequest edited{.prompt = joined(first.prompt, random_tokens(90, 3)), .max_tokens = 10};
  EXPECT_EQ(answer(scheduler, model, edited).cached_tokens, 256);
}

// One token has to run, so of a prompt of whole pages the last is not what others begin with.
TEST(SchedulerStates, PromptsOfWholePages) {
  FakeModel model({.slots = 8});
  Scheduler scheduler(model, nullptr, {});
  const GenerateRequest request{.prompt = random_tokens(192, 1), .max_tokens = 3};
  answer(scheduler, model, request);
  EXPECT_EQ(answer(scheduler, model, request).cached_tokens, 128);
  const GenerateRequest longer{.prompt = joined(request.prompt, {1}), .max_tokens = 3};
  EXPECT_EQ(answer(scheduler, model, longer).cached_tokens, 192);
}

// Where a common beginning ends shows when the second prompt comes; the third begins there.
TEST(SchedulerStates, CommonBeginningsAreFound) {
  FakeModel model({.slots = 8});
  Scheduler scheduler(model, nullptr, {});
  const Tokens shared = random_tokens(200, 1);
  const auto request = [&](uint32_t seed) {
    return GenerateRequest{.prompt = joined(shared, random_tokens(150, seed)), .max_tokens = 5};
  };
  EXPECT_EQ(answer(scheduler, model, request(2)).cached_tokens, 0);
  EXPECT_EQ(answer(scheduler, model, request(3)).cached_tokens, 0);
  EXPECT_EQ(answer(scheduler, model, request(4)).cached_tokens, 192);
  EXPECT_EQ(answer(scheduler, model, request(5)).cached_tokens, 192);
}

// Those who come while the first still runs wait for it to stop there.
TEST(SchedulerStates, CommonBeginningsAtOnce) {
  FakeModel model({.slots = 16});
  Scheduler scheduler(model, nullptr, {.step_tokens = 512, .sequences = 8});
  std::vector<GenerateRequest> requests;
  std::vector<Heard> heard(5);
  for (uint32_t i = 0; i < heard.size(); ++i) {
    requests.push_back(
        {.prompt = joined(random_tokens(200, 1), random_tokens(150, 10 + i)), .max_tokens = 5});
    scheduler.submit(heard_by(heard[i], requests[i]));
  }
  run(scheduler);
  for (size_t i = 0; i < heard.size(); ++i) {
    EXPECT_EQ(heard[i].tokens, plain_generation(model, requests[i]));
    EXPECT_EQ(heard[i].finish->cached_tokens, i == 0 ? 0 : 192);
  }
  EXPECT_EQ(scheduler.stats().tokens_fed, 5u * (350 + 4) - 4 * 192);
}

TEST(SchedulerStates, LongPromptsLeaveFewSnapshots) {
  FakeModel model({.context = 20000, .pages = 400, .slots = 100});
  Scheduler scheduler(model, nullptr, {.step_tokens = 512, .sequences = 2});
  const GenerateRequest request{.prompt = random_tokens(10000, 1), .max_tokens = 2};
  answer(scheduler, model, request);
  EXPECT_EQ(scheduler.stats().snapshots, 3);  // the last border and two milestones
  EXPECT_EQ(model.copies, 1u + 10000 / 4096);
  EXPECT_EQ(answer(scheduler, model, request).cached_tokens, 9984);
}

// Who goes away in the middle of a long prompt finds most of it when he comes back.
TEST(SchedulerStates, MilestonesSurviveCancelling) {
  FakeModel model({.context = 20000, .pages = 400, .slots = 4});
  Scheduler scheduler(model, nullptr, {.step_tokens = 500, .sequences = 2});
  const GenerateRequest request{.prompt = random_tokens(10000, 1), .max_tokens = 2};
  Heard heard;
  const RequestId id = scheduler.submit(heard_by(heard, request));
  for (int i = 0; i < 19; ++i) scheduler.run_once();
  EXPECT_EQ(scheduler.stats().slots_held, 1);
  scheduler.cancel(id);
  EXPECT_FALSE(scheduler.run_once());
  EXPECT_EQ(scheduler.stats().slots_held, 0);
  EXPECT_EQ(scheduler.stats().pages_held, 0);
  EXPECT_EQ(scheduler.stats().snapshots, 2);
  EXPECT_EQ(answer(scheduler, model, request).cached_tokens, 8192);
}

// However long a prompt is, its milestones push out each other and not what other prompts end with.
TEST(SchedulerStates, MilestonesMakeWayForOthers) {
  FakeModel model({.context = 40000, .pages = 800, .slots = 6});
  Scheduler scheduler(model, nullptr, {.step_tokens = 512, .sequences = 2});
  std::vector<GenerateRequest> shorts;
  for (uint32_t i = 0; i < 3; ++i) {
    shorts.push_back({.prompt = random_tokens(100, 10 + i), .max_tokens = 1});
    answer(scheduler, model, shorts.back());
  }
  const GenerateRequest request{.prompt = random_tokens(20000, 1), .max_tokens = 2};
  answer(scheduler, model, request);
  EXPECT_EQ(scheduler.stats().snapshots, 5);
  for (const GenerateRequest& one : shorts) EXPECT_EQ(answer(scheduler, model, one).cached_tokens, 64);
  EXPECT_EQ(answer(scheduler, model, request).cached_tokens, 19968);
  // Who parts from it in the middle finds the last milestone, which counts as the others from then on.
  GenerateRequest parted = request;
  parted.prompt.resize(19000);
  parted.prompt.back() ^= 1;
  parted.prompt[17000] ^= 1;
  EXPECT_EQ(answer(scheduler, model, parted).cached_tokens, 16384);
}

// Where the caller knows where prompts to come will part from this one, they begin there.
TEST(SchedulerStates, ASnapshotBeforeWhatIsLikelyToChange) {
  FakeModel model({.slots = 8});
  Scheduler scheduler(model, nullptr, {});
  const Tokens before = random_tokens(200, 1);
  const auto request = [&](uint32_t seed, size_t likely) {
    return GenerateRequest{
        .prompt = joined(before, random_tokens(150, seed)), .max_tokens = 5, .likely_shared = likely};
  };
  EXPECT_EQ(answer(scheduler, model, request(2, 200)).cached_tokens, 0);
  EXPECT_EQ(scheduler.stats().snapshots, 2);
  EXPECT_EQ(answer(scheduler, model, request(3, 0)).cached_tokens, 192);
}

// A long prompt that stops for a snapshot lets others in; it does not stall them when it goes on.
TEST(SchedulerStates, WhoGotInBesideALongPromptGoesOn) {
  FakeModel model({.context = 20000, .pages = 400, .slots = 4});
  Scheduler scheduler(model, nullptr, {.step_tokens = 100, .sequences = 4});
  Heard first, second;
  scheduler.submit(heard_by(first, {.prompt = random_tokens(10000, 1), .max_tokens = 1}));
  scheduler.submit(heard_by(second, {.prompt = {5}, .max_tokens = 40}));
  for (int i = 0; i < 200 && second.tokens.empty(); ++i) scheduler.run_once();
  ASSERT_EQ(second.tokens.size(), 1u);
  ASSERT_FALSE(first.finish);
  for (size_t i = 2; i <= 40; ++i) {
    scheduler.run_once();
    ASSERT_EQ(second.tokens.size(), i);
  }
  EXPECT_FALSE(first.finish);
  run(scheduler);
  EXPECT_TRUE(first.finish);
}

TEST(SchedulerStates, NoMoreSequencesThanSlots) {
  FakeModel model({.slots = 3});
  Scheduler scheduler(model, nullptr, {.step_tokens = 512, .sequences = 16});
  std::vector<GenerateRequest> requests;
  std::vector<Heard> heard(10);
  for (uint32_t i = 0; i < heard.size(); ++i) {
    requests.push_back({.prompt = random_tokens(70 + i, i), .max_tokens = 70});
    scheduler.submit(heard_by(heard[i], requests[i]));
  }
  scheduler.run_once();
  EXPECT_EQ(scheduler.stats().running, 3);
  EXPECT_EQ(scheduler.stats().waiting, 7);
  EXPECT_EQ(scheduler.stats().slots_held, 3);
  EXPECT_EQ(scheduler.stats().snapshots, 0);
  run(scheduler);
  for (size_t i = 0; i < heard.size(); ++i) EXPECT_EQ(heard[i].tokens, plain_generation(model, requests[i]));
  EXPECT_EQ(model.most_sequences, 3u);
  EXPECT_EQ(scheduler.stats().slots, 3);
  EXPECT_EQ(scheduler.stats().slots_held, 0);
}

TEST(SchedulerStates, PreemptedOnesBeginFromSnapshots) {
  FakeModel model({.pages = 16, .slots = 40});
  Scheduler scheduler(model, nullptr, {.step_tokens = 64, .sequences = 16});
  std::vector<GenerateRequest> requests;
  std::vector<Heard> heard(6);
  for (uint32_t i = 0; i < heard.size(); ++i) {
    requests.push_back({.prompt = random_tokens(100, i), .max_tokens = 250});
    scheduler.submit(heard_by(heard[i], requests[i]));
  }
  run(scheduler);
  EXPECT_GT(scheduler.stats().preemptions, 0u);
  EXPECT_GT(scheduler.stats().tokens_reused, 0u);  // nothing else begins alike
  for (size_t i = 0; i < heard.size(); ++i) EXPECT_EQ(heard[i].tokens, plain_generation(model, requests[i]));
}

TEST(SchedulerStates, AStepThatThrowsGivesSlotsBack) {
  FakeModel model({.slots = 2, .throw_for = 251});
  Scheduler scheduler(model, nullptr, {.step_tokens = 512, .sequences = 2});
  Heard thrown;
  scheduler.submit(heard_by(thrown, {.prompt = joined(random_tokens(100, 1), {251}), .max_tokens = 5}));
  run(scheduler);
  EXPECT_EQ(thrown.finish->reason, FinishReason::kError);
  EXPECT_EQ(scheduler.stats().slots_held, 0);
  const GenerateRequest request{.prompt = random_tokens(100, 1), .max_tokens = 5};
  EXPECT_EQ(answer(scheduler, model, request).cached_tokens, 64);
}

class BrokenCopies : public FakeModel {
 public:
  using FakeModel::FakeModel;
  void copy_state(int from_slot, int to_slot) override {
    if (copies == 1) throw std::runtime_error("the copy broke");
    FakeModel::copy_state(from_slot, to_slot);
  }
};

TEST(SchedulerStates, ACopyThatThrowsEndsRequestsAndNotTheEngine) {
  BrokenCopies model({.slots = 2});
  Engine engine(model, nullptr, {.step_tokens = 512, .sequences = 2});
  const GenerateRequest request{.prompt = random_tokens(100, 1), .max_tokens = 5};
  EXPECT_EQ(engine.generate(request).tokens.size(), 5u);               // the snapshot
  EXPECT_EQ(engine.generate(request).finish.error, "the copy broke");  // the restore
  EXPECT_EQ(engine.stats().slots_held, 0);
  EXPECT_EQ(engine.generate({.prompt = {1}, .max_tokens = 5}).tokens.size(), 5u);
}

// Chats that go on from any turn of any other, many at once, with cancels: each says what it says alone.
void soak_of_chats(FakeModelOptions options, SchedulerOptions limits) {
  FakeModel model(options);
  Scheduler scheduler(model, nullptr, limits);
  std::mt19937 rng(9);
  std::vector<Tokens> turns = {{}, random_tokens(150, 1), random_tokens(64, 2), random_tokens(65, 3)};
  struct Item {
    GenerateRequest request;
    Heard heard;
  };
  std::vector<std::unique_ptr<Item>> items;
  for (int step = 0; step < 1200; ++step) {
    if (rng() % 8 == 0) {
      const Tokens& before = turns[rng() % turns.size()];
      auto& item = *items.emplace_back(std::make_unique<Item>());
      item.request.prompt =
          joined(before.size() < 500 ? before : Tokens{}, random_tokens(rng() % 90 + 1, rng()));
      item.request.max_tokens = static_cast<int>(rng() % 150) + 1;
      item.request.sampling = {.temperature = rng() % 2 * 0.7, .seed = rng()};
      turns.push_back(item.request.prompt);
      scheduler.submit(heard_by(item.heard, item.request));
    }
    if (!items.empty() && rng() % 10 == 0) {
      const Item& item = *items[rng() % items.size()];
      if (item.heard.finish) turns.push_back(joined(item.request.prompt, item.heard.tokens));
      if (rng() % 4 == 0) scheduler.cancel(rng() % items.size() + 1);
    }
    scheduler.run_once();
  }
  run(scheduler);
  for (const auto& item : items) {
    ASSERT_TRUE(item->heard.finish);
    Tokens expected = plain_generation(model, item->request);
    if (item->heard.finish->reason == FinishReason::kCancelled) expected.resize(item->heard.tokens.size());
    ASSERT_EQ(item->heard.tokens, expected);
  }
  EXPECT_EQ(scheduler.stats().pages_held, 0);
  EXPECT_EQ(scheduler.stats().slots_held, 0);
  // A slot for each that may run leaves none for snapshots while all do.
  const bool scarce = options.slots > 0 && options.slots <= limits.sequences;
  EXPECT_GT(scheduler.stats().tokens_reused, scarce ? 0u : 1000u);
}

TEST(SchedulerStates, SoakOfChats) {
  for (int slots : {0, 4, 9, 60}) {
    SCOPED_TRACE(slots);
    soak_of_chats({.pages = 60, .slots = slots}, {.step_tokens = 100, .sequences = 8});
    soak_of_chats({.pages = 17, .slots = slots}, {.step_tokens = 37, .sequences = 5});
  }
}

}  // namespace
}  // namespace kt::inline engine
