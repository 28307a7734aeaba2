#include "nn/expert_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/error.h"

namespace kt::inline nn {
namespace {

using ::testing::ElementsAre;

TEST(ExpertGroups, RowsStandByExpertInTheOrderOfTokens) {
  const std::vector<int32_t> ids = {2, 0, 2, -1, 0, 7, 3, 2};
  const std::vector<int64_t> ids64(ids.begin(), ids.end());
  const std::vector<float> weights = {.1f, .2f, .3f, .4f, .5f, .6f, .7f, .8f};
  const std::vector<uint8_t> loaded = {1, 0, 1, 1}, skip = {0, 0, 0, 1};
  ExpertRouting routing;
  RoutedSlots slots{.tokens = 4, .top_k = 2, .ids = ids.data(), .weights = weights.data()};
  for (const bool wide : {false, true}) {
    slots.ids = wide ? nullptr : ids.data();
    slots.ids64 = wide ? ids64.data() : nullptr;
    slots.skip = nullptr;
    route(slots, loaded, routing);
    ASSERT_EQ(routing.groups.size(), 3u);
    EXPECT_EQ(routing.groups[1].expert, 2);
    EXPECT_EQ(routing.groups[1].m, 3);
    EXPECT_EQ(routing.groups[1].first, 2);
    EXPECT_THAT(routing.token, ElementsAre(0, 2, 0, 1, 3, 3));
    EXPECT_THAT(routing.weight, ElementsAre(.2f, .5f, .1f, .3f, .8f, .7f));
    EXPECT_EQ(*routing.tokens_of(routing.groups[2]), 3);
    slots.skip = skip.data();
    route(slots, loaded, routing);
    EXPECT_EQ(routing.groups.size(), 2u);
    EXPECT_THAT(routing.token, ElementsAre(0, 2, 0, 1, 3));
  }
  const std::vector<uint8_t> fewer = {1, 0, 0, 1};
  EXPECT_THROW(route(slots, fewer, routing), Error);
}

TEST(ExpertGroups, EvenRoutingSpreadsRows) {
  const ExpertRouting routing = even_routing(4, 3, 2);
  std::vector<int> rows, first;
  for (const ExpertGroup& group : routing.groups) {
    rows.push_back(group.m);
    first.push_back(group.first);
  }
  EXPECT_THAT(rows, ElementsAre(2, 2, 1, 1));
  EXPECT_THAT(first, ElementsAre(0, 2, 4, 5));
  EXPECT_EQ(even_routing(8, 1, 2).groups.size(), 2u);
  EXPECT_TRUE(even_routing(8, 0, 2).groups.empty());
}

// Three stages, each after all items of the one before in its group, and a last one over all groups, as a
// forward and a backward have them. Every number of workers, also more than items and one that comes last,
// ends with the same sums, which are wrong wherever somebody did not wait.
TEST(ExpertGroups, AnyNumberOfWorkersComputesTheListInOrder) {
  enum : int { kFirst, kSecond, kEmpty, kLast, kStages };
  constexpr int kGroups = 7, kSize = 29;
  WorkList list;
  for (const int workers : {1, 2, 3, 9, 40}) {
    std::vector<int> one(kGroups * kSize, 0), two(kGroups * kSize, 0), last(kSize, 0);
    list.clear(kStages, kGroups);
    for (int g = 0; g < kGroups; ++g) list.add_pieces(kFirst, g, kSize, 4);
    for (int g = 0; g < kGroups; ++g) list.add_pieces(kSecond, g, kSize, 3);
    for (int i = 0; i < kSize; ++i) list.add({kLast, 0, i, 1});
    list.start();
    EXPECT_TRUE(list.done(kEmpty, 3));
    EXPECT_FALSE(list.done(kFirst, 3));
    const auto compute = [&](const WorkItem& item) {
      const int at = item.group * kSize;
      list.wait(item, kEmpty, item.group);
      if (item.stage == kFirst)
        for (int i = item.begin; i < item.begin + item.count; ++i) one[at + i] = i + item.group;
      if (item.stage == kSecond) {
        list.wait(item, kFirst, item.group);
        for (int i = item.begin; i < item.begin + item.count; ++i)
          two[at + i] = one[at + i] + one[at + kSize - 1 - i];
      }
      if (item.stage == kLast)
        for (int g = 0; g < kGroups; ++g) {
          list.wait(item, kSecond, g);
          last[item.begin] += two[g * kSize + item.begin];
        }
    };
    std::vector<std::thread> threads;
    for (int w = 1; w < workers; ++w) threads.emplace_back([&] { list.run(compute); });
    list.run(compute);
    for (std::thread& thread : threads) thread.join();
    for (int stage = 0; stage < kStages; ++stage) EXPECT_TRUE(list.done(stage, 0)) << stage;
    // kSize - 1 + 2 g in each group
    EXPECT_THAT(last, ::testing::Each(kGroups * (kSize - 1) + kGroups * (kGroups - 1))) << workers;
  }
}

TEST(ExpertGroups, ItemsHaveTheBlocksThatTheirStageAllows) {
  // few rows: 128 KiB a piece, but four items for each worker
  EXPECT_EQ(blocks_of_item({.all = 1000, .block_bytes = 32 << 10, .workers = 2, .stream_blocks = 12}), 4);
  EXPECT_EQ(blocks_of_item({.all = 1000, .block_bytes = 1 << 10, .workers = 2, .stream_blocks = 12}), 12);
  EXPECT_EQ(blocks_of_item({.all = 1000, .block_bytes = 1 << 20, .workers = 2, .stream_blocks = 12}), 1);
  EXPECT_EQ(blocks_of_item({.all = 24, .block_bytes = 1 << 10, .workers = 2, .stream_blocks = 12}), 2);
  // many: as many as asked for, two items for each worker, at least two
  EXPECT_EQ(blocks_of_item({.all = 1000, .block_bytes = 1 << 20, .workers = 2, .panel_blocks = 31}), 30);
  EXPECT_EQ(blocks_of_item({.all = 4, .block_bytes = 1 << 20, .workers = 2, .panel_blocks = 31}), 2);
}

TEST(ExpertGroups, MemoryIsLaidOutBeforeItIsTaken) {
  NodeMemory memory;
  const size_t a = memory.take(10), b = memory.take(100), c = memory.take(0);
  memory.take_for_workers(3, 5000);
  EXPECT_EQ(a, 0u);
  EXPECT_EQ(b, 64u);
  EXPECT_EQ(c, 64u + 128u);
  EXPECT_EQ(memory.held(), 0u);
  memory.allocate(-1);
  EXPECT_GE(memory.held(), memory.bytes());
  EXPECT_EQ(memory.at(b) - memory.at(a), 64);
  for (int w = 0; w < 3; ++w) std::fill_n(memory.of_worker(w), 5000, std::byte(w));
  EXPECT_GE(memory.of_worker(2) - memory.of_worker(1), 8192);
  EXPECT_LE(memory.of_worker(2) + 5000, memory.at(0) + memory.bytes());
  const size_t held = memory.held();
  memory.clear();
  memory.take(64);
  memory.allocate(-1);
  EXPECT_EQ(memory.held(), held) << "a smaller layout keeps what there is";
}

}  // namespace
}  // namespace kt::inline nn
