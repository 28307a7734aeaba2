#include "base/pool.h"

#include <gmock/gmock.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>
#include <thread>

#include "base/error.h"

namespace kt::inline base {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// A made-up machine with room for any test, so that tests do the same everywhere.
Topology machine(std::string_view spec = "numa:1 core:8 pu:2") { return Topology::synthetic(spec); }

std::vector<int> sizes(const Pool& pool) {
  std::vector<int> out;
  for (int node = 0; node < pool.nodes(); ++node) out.push_back(pool.threads(node));
  return out;
}

// Runs once and checks that every worker came exactly once, with the right card.
void expect_all_come(Pool& pool) {
  std::vector<std::atomic<int>> calls(static_cast<size_t>(pool.threads()));
  const auto caller = std::this_thread::get_id();
  pool.run([&](const Worker& worker) {
    ++calls[static_cast<size_t>(worker.index)];
    EXPECT_EQ(worker.ranks, pool.threads(worker.node));
    EXPECT_GE(worker.rank, 0);
    EXPECT_LT(worker.rank, worker.ranks);
    int before = worker.rank;
    for (int node = 0; node < worker.node; ++node) before += pool.threads(node);
    EXPECT_EQ(worker.index, before);
    EXPECT_EQ(worker.index == 0, std::this_thread::get_id() == caller);
  });
  for (const auto& count : calls) EXPECT_EQ(count, 1);
}

TEST(Pool, EveryWorkerComesOnce) {
  for (int threads = 1; threads <= 8; ++threads) {
    for (int nodes = 1; nodes <= threads; ++nodes) {
      Pool pool({.threads = threads, .nodes = nodes, .topology = machine()});
      EXPECT_EQ(pool.threads(), threads);
      EXPECT_EQ(pool.nodes(), nodes);
      expect_all_come(pool);
      expect_all_come(pool);
    }
  }
}

TEST(Pool, ThisMachine) {
  Pool pool;
  EXPECT_EQ(pool.threads(), Topology::discover().cores());
  expect_all_come(pool);
  for (int node = 0; node < pool.nodes(); ++node) EXPECT_GE(pool.memory_node(node), 0);
}

TEST(Pool, ThisMachineAsManyNodes) {
  const int most = 4 * Topology::discover().pus();
  for (int nodes = 1; nodes <= std::min(most, 8); ++nodes) {
    Pool pool({.nodes = nodes});
    EXPECT_EQ(pool.nodes(), nodes);
    expect_all_come(pool);
    Pool odd({.threads = std::min(most, nodes + 1), .nodes = nodes});
    expect_all_come(odd);
  }
}

TEST(Pool, WorkersArePinnedAndTheCallerIsNot) {
  const std::vector<int> before = allowed_cpus();
  const Topology here = Topology::discover();
  Pool pool({.threads = here.pus(), .nodes = 1, .topology = here});
  if (here.nodes.size() > 1) GTEST_SKIP() << "one node has fewer cpus than threads";
  const std::vector<int> cpus = pool.cpus(0);
  EXPECT_EQ(std::set<int>(cpus.begin(), cpus.end()).size(), cpus.size());
  std::vector<std::vector<int>> seen(static_cast<size_t>(pool.threads()));
  pool.run([&](const Worker& worker) { seen[static_cast<size_t>(worker.index)] = allowed_cpus(); });
  EXPECT_EQ(seen[0], before);
  for (size_t i = 1; i < seen.size(); ++i) EXPECT_THAT(seen[i], ElementsAre(cpus[i]));
  EXPECT_EQ(allowed_cpus(), before);
}

TEST(Pool, UnpinnedAndSyntheticWorkersGoAnywhere) {
  const std::vector<int> before = allowed_cpus();
  Pool loose({.threads = 2, .nodes = 1, .topology = {}, .pin = false});
  Pool synthetic({.threads = 2, .topology = machine()});
  for (Pool* pool : {&loose, &synthetic})
    pool->run([&](const Worker&) { EXPECT_EQ(allowed_cpus(), before); });
  EXPECT_EQ(synthetic.memory_node(0), -1);
}

TEST(PoolPlan, CoresFirstSiblingsLast) {
  Pool pool({.threads = 6, .topology = machine("numa:1 core:4 pu:2")});
  EXPECT_THAT(pool.cpus(0), ElementsAre(0, 2, 4, 6, 1, 3));
}

TEST(PoolPlan, AllCoresByDefault) {
  EXPECT_THAT(sizes(Pool({.topology = machine("pack:2 numa:2 core:3 pu:2")})), ElementsAre(3, 3, 3, 3));
  EXPECT_THAT(sizes(Pool({.topology = machine("numa:3 core:4,2,1")})), ElementsAre(4, 2, 1));
  EXPECT_THAT(sizes(Pool({.nodes = 2, .topology = machine("numa:3 core:4,2,1")})), ElementsAre(4, 2));
}

TEST(PoolPlan, SpreadsEvenlyAsFarAsCoresAllow) {
  EXPECT_THAT(sizes(Pool({.threads = 7, .topology = machine("numa:3 core:4")})), ElementsAre(3, 2, 2));
  EXPECT_THAT(sizes(Pool({.threads = 6, .topology = machine("numa:3 core:4,2,1")})), ElementsAre(3, 2, 1));
  EXPECT_THAT(sizes(Pool({.threads = 8, .topology = machine("numa:3 core:4,2,1 pu:2")})),
              ElementsAre(5, 2, 1));
  EXPECT_THAT(sizes(Pool({.threads = 2, .topology = machine("numa:3 core:4")})), ElementsAre(1, 1));
}

TEST(PoolPlan, LogicalNodesShareRealOnes) {
  const Pool even({.nodes = 4, .topology = machine("numa:2 core:4")});
  EXPECT_THAT(sizes(even), ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(even.cpus(0), ElementsAre(0, 2));
  EXPECT_THAT(even.cpus(1), ElementsAre(4, 6));
  EXPECT_THAT(even.cpus(2), ElementsAre(1, 3));
  const Pool odd({.nodes = 3, .topology = machine("numa:2 core:4")});
  EXPECT_THAT(odd.cpus(0), ElementsAre(0, 2));
  EXPECT_THAT(odd.cpus(1), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(odd.cpus(2), ElementsAre(1, 3));
  const Pool tight({.nodes = 3, .topology = machine("core:1")});
  EXPECT_THAT(sizes(tight), ElementsAre(1, 1, 1));
}

std::string error_of(PoolOptions options) {
  try {
    Pool pool(std::move(options));
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInput);
    return e.what();
  }
  return "no error";
}

TEST(PoolPlan, ErrorsHaveNumbers) {
  EXPECT_THAT(error_of({.threads = 2, .nodes = 3, .topology = machine()}),
              HasSubstr("3 nodes need at least"));
  EXPECT_THAT(error_of({.threads = 65, .topology = machine()}),
              HasSubstr("65 threads asked for, at most 64"));
  EXPECT_THAT(error_of({.nodes = 65, .topology = machine()}), HasSubstr("65 nodes"));
  EXPECT_THAT(error_of({.threads = -1, .topology = machine()}), HasSubstr("-1 threads"));
  Topology hollow = machine();
  hollow.nodes.push_back({.id = 7, .cores = {}, .memory = 0});
  EXPECT_THAT(error_of({.topology = hollow}), HasSubstr("node 7"));
  Pool pool({.threads = 1, .topology = machine()});
  EXPECT_THROW(pool.threads(1), Error);
  EXPECT_THROW(pool.cpus(-1), Error);
}

TEST(Pool, TheCallerSeesWhatWorkersWrote) {
  Pool pool({.threads = 4, .nodes = 2, .topology = machine()});
  std::vector<int> plain(4);
  for (int round = 1; round <= 5000; ++round) {
    pool.run([&](const Worker& worker) { plain[static_cast<size_t>(worker.index)] = round; });
    ASSERT_EQ(std::accumulate(plain.begin(), plain.end(), 0), 4 * round);
  }
}

TEST(Pool, WorkersAreConcurrent) {
  Pool pool({.threads = 5, .topology = machine()});
  std::atomic<int> here{0};
  pool.run([&](const Worker&) {  // ends only if all are inside at once
    ++here;
    while (here < 5) std::this_thread::yield();
  });
  EXPECT_EQ(here, 5);
}

// Counts who asked, and whether they had done their part.
class CountingForecast final : public Forecast {
 public:
  explicit CountingForecast(int threads) : asked(static_cast<size_t>(threads)), did(asked.size()) {}
  Ahead ahead(const Worker& worker) const noexcept override {
    const auto at = static_cast<size_t>(worker.index);
    asked[at] += did[at] ? 1 : 1000;
    Ahead out;
    for (size_t i = 0; i < 12; ++i) out.add(std::span(memory).first(i * 100));  // more than are taken
    return out;
  }
  mutable std::vector<int> asked;
  std::vector<uint8_t> did;
  std::vector<std::byte> memory = std::vector<std::byte>(1200);
};

TEST(Pool, WorkersAskForTheForecastWhenTheyAreDone) {
  Pool pool({.threads = Topology::discover().pus(), .pin = false});
  CountingForecast forecast(pool.threads());
  for (int round = 1; round <= 500; ++round) {
    std::ranges::fill(forecast.did, uint8_t{0});
    pool.run([&](const Worker& worker) { forecast.did[static_cast<size_t>(worker.index)] = 1; }, &forecast);
    EXPECT_THAT(forecast.asked, testing::Each(round));
    expect_all_come(pool);  // nobody asks: there is none
  }
}

TEST(Ahead, TakesEightStretches) {
  const std::vector<std::byte> memory(10);
  Ahead ahead;
  for (size_t i = 0; i < 10; ++i) ahead.add(std::span(memory).first(i));
  ASSERT_EQ(ahead.stretches().size(), 8u);
  EXPECT_EQ(ahead.stretches()[7].size(), 7u);
}

TEST(Pool, ManyRunsWithPausesThatPark) {
  Pool pool({.threads = 3, .topology = machine()});
  std::atomic<int> sum{0};
  for (int round = 0; round < 200; ++round) {
    pool.run([&](const Worker&) { ++sum; });
    if (round % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(round * 2));
  }
  EXPECT_EQ(sum, 600);
}

// Short runs meet workers that are just about to sleep: where a wake-up can be lost, this hangs.
TEST(Pool, NoWakeUpIsLost) {
  Pool pool({.threads = Topology::discover().pus() + 1});  // more threads than cpus: nobody spins
  std::atomic<int> sum{0};
  for (int round = 0; round < 60'000; ++round) pool.run([&](const Worker&) { ++sum; });
  EXPECT_EQ(sum, 60'000 * pool.threads());
}

TEST(Pool, SlowWorkersParkTheCaller) {
  Pool pool({.threads = 2, .topology = machine()});
  for (int round = 0; round < 20; ++round) {
    int written = 0;
    pool.run([&](const Worker& worker) {
      if (worker.index == 0) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      written = 1;
    });
    EXPECT_EQ(written, 1);
  }
}

TEST(Pool, OversubscriptionWorks) {
  Pool pool({.threads = 4 * Topology::discover().pus()});
  for (int round = 0; round < 200; ++round) expect_all_come(pool);
  Pool wide({.threads = 64, .nodes = 3, .topology = machine()});  // three levels of the wake-up tree
  for (int round = 0; round < 100; ++round) expect_all_come(wide);
}

TEST(Pool, ExceptionsReachTheCaller) {
  Pool pool({.threads = 4, .topology = machine()});
  for (int thrower = 0; thrower < 4; ++thrower) {
    std::atomic<int> others{0};
    try {
      pool.run([&](const Worker& worker) {
        if (worker.index == thrower) fail("worker {}", worker.index);
        ++others;
      });
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.what(), text("worker {}", thrower));
    }
    EXPECT_EQ(others, 3);
    expect_all_come(pool);
  }
}

TEST(Pool, OneOfManyExceptionsReachesTheCaller) {
  Pool pool({.threads = 4, .topology = machine()});
  for (int round = 0; round < 200; ++round)
    EXPECT_THROW(
        pool.run([&](const Worker& worker) { throw std::runtime_error(std::to_string(worker.index)); }),
        std::runtime_error);
  expect_all_come(pool);
}

TEST(RunItems, EachOnce) {
  Pool pool({.threads = 3, .topology = machine(), .pin = false});
  for (const int64_t count : {0, 1, 2, 100}) {
    std::vector<std::atomic<int>> done(static_cast<size_t>(count));
    run_items(pool, count, [&](int64_t i) { ++done[static_cast<size_t>(i)]; });
    EXPECT_TRUE(std::ranges::all_of(done, [](const auto& n) { return n == 1; })) << count;
  }
}

TEST(RunItems, AnErrorStopsTheClaiming) {
  Pool pool({.threads = 2, .topology = machine(), .pin = false});
  std::atomic<int> done = 0;
  EXPECT_THROW(run_items(pool, 1000000,
                         [&](int64_t i) {
                           ++done;
                           if (i == 5) fail("item {}", i);
                         }),
               Error);
  EXPECT_LT(done, 1000000);
}

TEST(Pool, NestedRunIsAnError) {
  Pool pool({.threads = 3, .topology = machine()});
  Pool other({.threads = 1, .topology = machine()});
  for (Pool* inner : {&pool, &other}) {
    try {
      pool.run([&](const Worker&) { inner->run([](const Worker&) {}); });
      FAIL();
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInternal);
      EXPECT_THAT(e.what(), HasSubstr("inside"));
    }
  }
  expect_all_come(pool);
  expect_all_come(other);
}

TEST(Pool, CallersTakeTurns) {
  Pool pool({.threads = 3, .topology = machine()});
  std::atomic<int> inside{0};
  int total = 0;  // guarded by the turns themselves
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c)
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round)
        pool.run([&](const Worker& worker) {
          EXPECT_LE(++inside, 3);
          if (worker.index == 0) ++total;
          --inside;
        });
    });
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(total, 800);
}

TEST(Pool, ManyPoolsInOneProcess) {
  std::vector<std::unique_ptr<Pool>> pools;
  for (int i = 0; i < 12; ++i)
    pools.push_back(std::make_unique<Pool>(PoolOptions{.threads = 1 + i % 4, .topology = machine()}));
  for (int round = 0; round < 20; ++round)
    for (auto& pool : pools) expect_all_come(*pool);
}

TEST(Pool, EndsWhetherWorkersStartSpinOrSleep) {
  for (int round = 0; round < 50; ++round) {
    Pool unused({.threads = 4, .topology = machine()});
    Pool used({.threads = 4, .topology = machine()});
    expect_all_come(used);
    if (round % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

}  // namespace
}  // namespace kt::inline base
