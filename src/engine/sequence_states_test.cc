// The store with states: slots, snapshots, and what a sequence may begin with.
#include <gtest/gtest.h>

#include <list>
#include <random>
#include <stdexcept>

#include "base/error.h"
#include "engine/sequence_store.h"
#include "engine/testing/counted_tokens.h"

namespace kt::inline engine {
namespace {

constexpr auto kLasting = SnapshotKind::kLasting;
constexpr auto kRolling = SnapshotKind::kRolling;

uint64_t digest(uint64_t state, std::span<const TokenId> tokens) {
  for (TokenId id : tokens) state = (state + static_cast<uint32_t>(id) + 1) * 0x9E3779B97F4A7C15u;
  return state;
}

// A store, and states that are digests of the tokens that ran.
struct TestStore {
  explicit TestStore(StoreSizes sizes)
      : states(static_cast<size_t>(sizes.slots), 0xDEAD), store(sizes, [this](int from, int to) {
          if (copy_throws) throw std::runtime_error("copy");
          states.at(static_cast<size_t>(to)) = states.at(static_cast<size_t>(from));
          ++copies;
        }) {}

  uint64_t& state(const StoredSequence& sequence) { return states.at(static_cast<size_t>(sequence.slot())); }
  // Runs what comes of these tokens up to `end`, and checks the state it goes on from.
  void run(StoredSequence& sequence, const Tokens& tokens, int end) {
    const auto position = static_cast<size_t>(sequence.tokens());
    const auto fresh = std::span(tokens).subspan(position, static_cast<size_t>(end) - position);
    ASSERT_TRUE(sequence.reserve(end));
    if (position == 0) state(sequence) = 0;
    ASSERT_EQ(state(sequence), digest(0, std::span(tokens).first(position)));
    state(sequence) = digest(state(sequence), fresh);
    sequence.commit(fresh);
  }
  // A sequence that ran all of them, with snapshots at these places.
  StoredSequence filled(const Tokens& tokens, std::initializer_list<int> snapshots,
                        SnapshotKind kind = kLasting) {
    StoredSequence sequence = store.start(tokens);
    EXPECT_TRUE(sequence.begin());
    for (int at : snapshots) {
      run(sequence, tokens, at);
      EXPECT_TRUE(sequence.snapshot(kind));
    }
    run(sequence, tokens, static_cast<int>(tokens.size()));
    return sequence;
  }
  int usable(const Tokens& tokens) { return store.start(tokens).tokens(); }

  std::vector<uint64_t> states;
  int copies = 0;
  bool copy_throws = false;
  SequenceStore store;
};

TEST(SequenceStates, ReuseEndsAtTheLastSnapshot) {
  TestStore test({.pages = 20, .slots = 4});
  const Tokens tokens = counted(300);
  {
    StoredSequence first = test.filled(tokens, {128});
    EXPECT_EQ(test.store.slots_held(), 1);
    EXPECT_EQ(test.store.snapshots(), 1);
    StoredSequence second = test.store.start(tokens);  // while the first runs
    EXPECT_EQ(second.tokens(), 128);
    EXPECT_EQ(second.known(), 256);
    EXPECT_EQ(second.slot(), -1);
    ASSERT_TRUE(second.begin());
    EXPECT_NE(second.slot(), first.slot());
    test.run(second, tokens, 300);
    EXPECT_EQ(test.state(second), test.state(first));
    EXPECT_TRUE(std::ranges::equal(second.pages().first(4), first.pages().first(4)));
  }
  EXPECT_EQ(test.store.slots_held(), 0);
  EXPECT_EQ(test.store.pages_cached(), 4);
  EXPECT_EQ(test.usable(tokens), 128);
  EXPECT_EQ(test.usable(counted(129)), 128);
  EXPECT_EQ(test.usable(counted(128)), 0);  // one token has to run, and behind 64 there is no snapshot
  EXPECT_EQ(test.store.start(counted(128)).known(), 64);
  test.filled(counted(65), {64});
  EXPECT_EQ(test.usable(counted(128)), 64);
}

TEST(SequenceStates, ASnapshotGoesWithItsPage) {
  TestStore test({.pages = 4, .slots = 4});
  test.filled(counted(130), {64, 128});
  EXPECT_EQ(test.store.snapshots(), 2);
  {
    StoredSequence other = test.store.start({});
    ASSERT_TRUE(other.reserve(192));  // the third page
    EXPECT_EQ(test.store.snapshots(), 1);
    EXPECT_EQ(test.usable(counted(130)), 64);
  }
  test.store.drop_cached();
  EXPECT_EQ(test.store.snapshots(), 0);
  EXPECT_EQ(test.usable(counted(130)), 0);
  // What is held stays findable, its snapshot too.
  StoredSequence held = test.filled(counted(70), {64});
  test.store.drop_cached();
  EXPECT_EQ(test.usable(counted(70)), 64);
}

TEST(SequenceStates, TheLeastRecentlyUsedSnapshotMakesWay) {
  TestStore test({.pages = 20, .slots = 3});
  const Tokens a = counted(70), b = counted(70, 1000), c = counted(70, 2000);
  test.filled(a, {64});
  test.filled(b, {64});
  EXPECT_EQ(test.usable(a), 64);  // a is used later than b now
  StoredSequence running = test.filled(c, {64});
  EXPECT_EQ(test.store.snapshots(), 2);
  EXPECT_EQ(test.usable(a), 64);
  EXPECT_EQ(test.usable(b), 0);
  EXPECT_EQ(test.store.start(b).known(), 64);  // the page is still there
  EXPECT_EQ(test.usable(c), 64);               // and that of a page that is held may go as well
  EXPECT_EQ(test.usable(a), 64);
  test.filled(b, {64});
  EXPECT_EQ(test.usable(c), 0);
}

TEST(SequenceStates, SequencesComeBeforeSnapshots) {
  TestStore test({.pages = 20, .slots = 2});
  StoredSequence a = test.filled(counted(70), {64});
  StoredSequence b = test.store.start({}), c = test.store.start({});
  ASSERT_TRUE(b.begin());
  EXPECT_EQ(test.store.snapshots(), 0);
  EXPECT_EQ(test.store.slots_held(), 2);
  EXPECT_FALSE(c.begin());
  EXPECT_EQ(c.slot(), -1);
  const Tokens tokens = counted(64, 500);
  test.run(b, tokens, 64);
  EXPECT_FALSE(b.snapshot(kLasting));
  EXPECT_FALSE(b.snapshot(kRolling));
  a.release();
  ASSERT_TRUE(c.begin());
  EXPECT_TRUE(c.begin());  // has one
  EXPECT_EQ(test.store.slots_held(), 2);
}

TEST(SequenceStates, TheLastSlotIsTheSnapshotItself) {
  TestStore test({.pages = 20, .slots = 2});
  const Tokens tokens = counted(100);
  test.filled(tokens, {64});
  StoredSequence other = test.store.start({});
  ASSERT_TRUE(other.begin());
  StoredSequence first = test.store.start(tokens), second = test.store.start(tokens);
  EXPECT_FALSE(first.begin());  // the other one needs it, too
  EXPECT_FALSE(second.begin());
  second.release();
  const int copies = test.copies;
  ASSERT_TRUE(first.begin());
  EXPECT_EQ(test.copies, copies);
  EXPECT_EQ(test.store.snapshots(), 0);
  test.run(first, tokens, 100);
}

// A sequence between start and begin keeps its snapshot from others.
TEST(SequenceStates, WhatASequenceWillBeginFromStays) {
  TestStore test({.pages = 20, .slots = 2});
  const Tokens tokens = counted(100), others = counted(64, 1000);
  test.filled(tokens, {64});
  StoredSequence waiting = test.store.start(tokens);
  StoredSequence moved = std::move(waiting);
  StoredSequence other = test.store.start(others);
  ASSERT_TRUE(other.begin());
  test.run(other, others, 64);
  EXPECT_FALSE(other.snapshot(kLasting));
  other.release();
  ASSERT_TRUE(moved.begin());
  test.run(moved, tokens, 100);
  moved.release();
  // And given back without having begun, it keeps nothing.
  test.store.start(tokens).release();
  StoredSequence a = test.store.start(others), b = test.store.start(others);
  EXPECT_TRUE(a.begin() && b.begin());
}

TEST(SequenceStates, ARollingSnapshotFollowsItsSequence) {
  TestStore test({.pages = 20, .slots = 8});
  const Tokens tokens = counted(400);
  StoredSequence sequence = test.filled(counted(65), {64}, kLasting);
  const auto roll_to = [&](int end) {
    test.run(sequence, tokens, end);
    ASSERT_TRUE(sequence.snapshot(kRolling));
  };
  roll_to(128);
  EXPECT_TRUE(sequence.snapshot(kRolling));  // it is there
  EXPECT_EQ(test.store.snapshots(), 2);
  roll_to(192);
  EXPECT_EQ(test.store.snapshots(), 2);
  EXPECT_EQ(test.usable(counted(192)), 64);
  EXPECT_EQ(test.usable(tokens), 192);
  {
    StoredSequence other = test.store.start(tokens);
    ASSERT_TRUE(other.begin());
  }
  roll_to(256);  // 192 stays: others begin there
  EXPECT_EQ(test.store.snapshots(), 3);
  EXPECT_EQ(test.usable(counted(193)), 192);
  StoredSequence waiting = test.store.start(tokens);
  roll_to(320);  // 256 stays: somebody is about to
  ASSERT_EQ(waiting.tokens(), 256);
  ASSERT_TRUE(waiting.begin());
  test.run(waiting, tokens, 400);
  EXPECT_EQ(test.usable(tokens), 320);
  EXPECT_TRUE(sequence.snapshot(kLasting));  // it becomes one that lasts
  roll_to(384);
  EXPECT_EQ(test.usable(counted(384)), 320);
}

TEST(SequenceStates, AForkBeginsAtTheLastSnapshot) {
  TestStore test({.pages = 20, .slots = 4});
  const Tokens tokens = counted(200);
  StoredSequence parent = test.filled(tokens, {64});
  StoredSequence child = parent.fork();
  EXPECT_EQ(child.tokens(), 64);
  EXPECT_EQ(child.known(), 192);
  ASSERT_TRUE(child.begin());
  test.run(child, tokens, 200);
  EXPECT_EQ(test.state(child), test.state(parent));
  const Tokens more = counted(300);
  test.run(parent, more, 300);  // its own state is untouched
}

TEST(SequenceStates, ACopyThatThrowsLeavesTheStoreWhole) {
  TestStore test({.pages = 20, .slots = 2});
  const Tokens tokens = counted(100);
  StoredSequence sequence = test.store.start(tokens);
  ASSERT_TRUE(sequence.begin());
  test.run(sequence, tokens, 64);
  test.copy_throws = true;
  EXPECT_THROW(sequence.snapshot(kLasting), std::runtime_error);
  EXPECT_EQ(test.store.snapshots(), 0);
  test.copy_throws = false;
  EXPECT_TRUE(sequence.snapshot(kLasting));
  sequence.release();
  StoredSequence again = test.store.start(tokens);
  test.copy_throws = true;
  EXPECT_THROW(again.begin(), std::runtime_error);
  EXPECT_EQ(test.store.slots_held(), 0);
  test.copy_throws = false;
  ASSERT_TRUE(again.begin());
  test.run(again, tokens, 100);
}

TEST(SequenceStates, SaysWhatOnlyWeCanCause) {
  EXPECT_THROW(SequenceStore({.pages = 1, .slots = -1}), Error);
  EXPECT_THROW(SequenceStore({.pages = 1, .slots = 1}), Error);
  TestStore test({.pages = 4, .slots = 2});
  const Tokens tokens = counted(70);
  StoredSequence sequence = test.store.start(tokens);
  ASSERT_TRUE(sequence.reserve(70));
  EXPECT_THROW(sequence.commit(tokens), Error);  // before begin
  ASSERT_TRUE(sequence.begin());
  EXPECT_THROW(sequence.snapshot(kLasting), Error);  // of nothing
  test.run(sequence, tokens, 70);
  EXPECT_THROW(sequence.snapshot(kLasting), Error);  // inside a page
  SequenceStore plain({.pages = 4});
  StoredSequence stateless = plain.start({});
  EXPECT_TRUE(stateless.begin());
  EXPECT_EQ(stateless.slot(), -1);
}

// Few first tokens and long runs of equal ones, so that beginnings are shared often.
void grow(Tokens& tokens, size_t count, std::mt19937& rng) {
  for (; count > 0; --count) tokens.push_back(rng() % 100 == 0 ? static_cast<TokenId>(rng() % 3) : 0);
}

struct Running {
  Tokens tokens;
  StoredSequence sequence, plain;
};

// With a snapshot behind every page and slots for all of them, states change nothing.
TEST(SequenceStates, EnoughSnapshotsReuseAsMuchAsNoStates) {
  std::mt19937 rng(4);
  TestStore test({.pages = 40, .slots = 40 + 14});
  SequenceStore plain({.pages = 40});
  std::list<Running> live;
  int reused = 0;
  for (int step = 0; step < 4000; ++step) {
    const uint32_t action = rng() % 8;
    const auto pick = live.empty() ? live.end() : std::next(live.begin(), rng() % live.size());
    if (live.empty() || action < 2) {
      Tokens tokens;
      grow(tokens, rng() % 300, rng);
      live.push_back({tokens, test.store.start(tokens), plain.start(tokens)});
    } else if (action < 6) {
      const size_t before = pick->tokens.size();
      grow(pick->tokens, rng() % 150, rng);
      const auto end = static_cast<int>(pick->tokens.size());
      const bool fits = pick->plain.reserve(end);
      ASSERT_EQ(pick->sequence.reserve(end), fits);
      if (!fits) {
        pick->tokens.resize(before);
        continue;
      }
      for (int border = (pick->plain.tokens() / 64 + 1) * 64; border <= end; border += 64) {
        test.run(pick->sequence, pick->tokens, border);
        ASSERT_TRUE(pick->sequence.snapshot(kLasting));
      }
      test.run(pick->sequence, pick->tokens, end);
      pick->plain.commit(std::span(pick->tokens).subspan(before));
    } else if (action == 6) {
      live.push_back({pick->tokens, pick->sequence.fork(), pick->plain.fork()});
    } else {
      live.erase(pick);
    }
    if (!live.empty() && live.back().sequence.slot() < 0) {
      ASSERT_TRUE(live.back().sequence.begin());
      reused += live.back().sequence.tokens() > 0;
      live.back().tokens.resize(static_cast<size_t>(live.back().sequence.tokens()));
    }
    if (live.size() > 12) live.pop_front();
    ASSERT_EQ(test.store.pages_held(), plain.pages_held()) << "step " << step;
    ASSERT_EQ(test.store.pages_cached(), plain.pages_cached()) << "step " << step;
    for (const Running& one : live) {
      ASSERT_EQ(one.sequence.tokens(), one.plain.tokens());
      ASSERT_TRUE(std::ranges::equal(one.sequence.pages(), one.plain.pages()));
    }
  }
  EXPECT_GT(reused, 50);
}

// With few slots whatever a sequence begins with has the right state, and no slot is lost or used twice.
TEST(SequenceStates, RandomUseOfFewSlots) {
  std::mt19937 rng(6);
  TestStore test({.pages = 40, .slots = 9});
  std::list<std::pair<Tokens, StoredSequence>> live;
  int reused = 0, waited = 0, refused = 0;
  for (int step = 0; step < 8000; ++step) {
    const uint32_t action = rng() % 8;
    const auto pick = live.empty() ? live.end() : std::next(live.begin(), rng() % live.size());
    if (live.empty() || (action < 2 && live.size() < 12)) {
      Tokens tokens;
      grow(tokens, rng() % 300, rng);
      live.emplace_back(tokens, test.store.start(tokens));
    } else if (action < 6) {
      auto& [tokens, sequence] = *pick;
      if (!sequence.begin()) {
        ++waited;
        continue;
      }
      tokens.resize(static_cast<size_t>(sequence.tokens()));
      grow(tokens, rng() % 150, rng);
      for (int end = sequence.tokens(); end < static_cast<int>(tokens.size());) {
        end = std::min(end / 64 * 64 + 64, static_cast<int>(tokens.size()));
        if (!sequence.reserve(end)) break;
        test.run(sequence, tokens, end);
        if (end % 64 == 0 && rng() % 2 == 0)
          refused += !sequence.snapshot(rng() % 2 == 0 ? kLasting : kRolling);
      }
    } else if (action == 6 && live.size() < 12) {
      live.emplace_back(pick->first, pick->second.fork());
      reused += live.back().second.tokens() > 0;
    } else {
      live.erase(pick);
    }
    if (rng() % 500 == 0) test.store.drop_cached();
    int held = 0;
    for (const auto& [tokens, sequence] : live) {
      if (sequence.slot() < 0) continue;
      ++held;
      if (sequence.tokens() == 0) continue;
      const auto ran = std::span(tokens).first(static_cast<size_t>(sequence.tokens()));
      ASSERT_EQ(test.state(sequence), digest(0, ran)) << "step " << step;
    }
    ASSERT_EQ(test.store.slots_held(), held);
    ASSERT_LE(held + test.store.snapshots(), 9);
  }
  EXPECT_GT(reused, 100);
  EXPECT_GT(waited, 100);
  EXPECT_GT(refused, 100);
  live.clear();
  test.store.drop_cached();
  EXPECT_EQ(test.store.snapshots(), 0);
  EXPECT_EQ(test.store.slots_held(), 0);
  std::list<StoredSequence> all;
  while (all.size() < 9) ASSERT_TRUE(all.emplace_back(test.store.start({})).begin());
}

}  // namespace
}  // namespace kt::inline engine
