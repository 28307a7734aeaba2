#include "hybrid/cpu_team.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "base/signal.h"

namespace kt::inline hybrid {
namespace {

using ::testing::HasSubstr;

std::string message_of(const std::function<void()>& what) {
  try {
    what();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(CpuTeam, RunsTasksInOrderOnOneThread) {
  CpuTeam team({.threads = 2});
  std::vector<int> seen;
  std::thread::id first;
  for (int i = 0; i < 500; ++i)
    EXPECT_EQ(team.submit([&, i] {
      if (i == 0) first = std::this_thread::get_id();
      EXPECT_EQ(std::this_thread::get_id(), first);
      seen.push_back(i);
    }),
              static_cast<uint64_t>(i + 1));
  team.sync();
  std::vector<int> want(500);
  std::iota(want.begin(), want.end(), 0);
  EXPECT_EQ(seen, want);
  EXPECT_NE(first, std::this_thread::get_id());
}

TEST(CpuTeam, TasksRunThePool) {
  CpuTeam team({.threads = 2});
  std::atomic<int> calls = 0;
  team.submit([&] { team.pool()->run([&](const Worker&) { ++calls; }); });
  team.sync();
  EXPECT_EQ(calls, 2);
}

TEST(CpuTeam, ATaskCannotWaitForItsTeam) {
  CpuTeam team({.threads = 1});
  team.submit([&] { team.sync(); });
  EXPECT_THAT(message_of([&] { team.sync(); }), HasSubstr("a task of the team cannot wait for the team"));
}

TEST(CpuTeam, OneTaskIsUsedAgainAndAgain) {
  CpuTeam team({.threads = 1});
  int count = 0;
  CpuTeam::Task task;
  task.run = [&] { ++count; };
  for (uint64_t i = 1; i <= 2000; ++i) {
    EXPECT_EQ(team.submit(task), i);
    team.wait(task.ticket);
    ASSERT_EQ(count, static_cast<int>(i));
  }
}

TEST(CpuTeam, ManyThreadsSubmitAndWait) {
  CpuTeam team({.threads = 2});
  std::atomic<int> count = 0;
  int unguarded = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      CpuTeam::Task mine;
      mine.run = [&] { ++unguarded, ++count; };
      for (int i = 0; i < 500; ++i) {
        team.wait(team.submit(mine));
        EXPECT_TRUE(team.done(mine.ticket));
        if (i % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // let it go to sleep
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(count, 2000);
  EXPECT_EQ(unguarded, 2000);
}

TEST(CpuTeam, SyncAllowsSomeToBePending) {
  CpuTeam team({.threads = 1});
  Signal go;
  std::atomic<int> done = 0;
  team.submit([&] { ++done; });
  team.submit([&] {
    go.wait();
    ++done;
  });
  team.sync(1);
  EXPECT_EQ(done, 1);
  team.sync(5);
  go.set();
  team.sync();
  EXPECT_EQ(done, 2);
}

TEST(CpuTeam, TheFirstErrorIsKeptAndLaterTasksRun) {
  CpuTeam team({.threads = 1});
  bool ran = false;
  team.submit([] { fail("the first {}", 1); });
  team.submit([] { throw std::runtime_error("the second"); });
  team.submit([&] { ran = true; });
  EXPECT_EQ(message_of([&] { team.sync(); }), "the first 1");
  EXPECT_TRUE(ran);
  EXPECT_FALSE(team.failed());
  team.sync();
  team.submit([] { throw 3; });
  team.wait(4);
  EXPECT_TRUE(team.failed());
  EXPECT_TRUE(team.take_error());
  EXPECT_FALSE(team.take_error());
}

TEST(CpuTeam, EndsAfterItsTasks) {
  int count = 0;
  {
    CpuTeam team({.threads = 1});
    for (int i = 0; i < 100; ++i) team.submit([&] { ++count; });
  }
  EXPECT_EQ(count, 100);
}

TEST(CpuTeam, ItsOwnTaskMayBeTheLastOwner) {
  Signal let_go, ended;
  auto team = std::make_shared<CpuTeam>(CpuTeamOptions{.threads = 2});
  CpuTeam& it = *team;
  const std::weak_ptr<CpuTeam> watch = team;
  it.submit([team = std::move(team), &let_go] { let_go.wait(); });
  it.submit([&] { ended.set(); });
  let_go.set();
  ended.wait();
  EXPECT_TRUE(watch.expired());
}

TEST(CpuTeam, IsSharedByEqualOptionsWhileSomebodyHasIt) {
  const auto one = CpuTeam::shared({.threads = 1}), same = CpuTeam::shared({.threads = 1}),
             other = CpuTeam::shared({.threads = 2});
  EXPECT_EQ(one, same);
  EXPECT_NE(one, other);
}

TEST(CpuTeam, UsesTheNodesThatAreNamed) {
  const int node = Topology::discover().nodes.front().id;
  CpuTeam team({.threads = 1, .node_ids = {node}});
  EXPECT_EQ(team.pool()->nodes(), 1);
  EXPECT_EQ(team.pool()->memory_node(0), node);
  EXPECT_THAT(message_of([] { CpuTeam({.node_ids = {4711}}); }),
              HasSubstr("no NUMA node 4711; nodes: " + std::to_string(node)));
  EXPECT_THAT(message_of([&] { CpuTeam({.node_ids = {node, node}}); }), HasSubstr("named twice"));
  EXPECT_EQ(CpuTeam({.threads = 2, .nodes = 2, .node_ids = {node}}).pool()->nodes(), 2);
}

// In the child: no hang, an Error that says why, and a new team works.
TEST(CpuTeam, SaysThatItWasMadeBeforeFork) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer does not allow threads after fork()";
#endif
  auto team = CpuTeam::shared({.threads = 2});
  team->submit([] {});
  team->sync();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(300);
    int wrong = 0;
    CpuTeam::Task task;
    if (team->submit(task) != 0) wrong |= 1;
    team->wait(99);
    if (message_of([&] { team->sync(); }).find("made before fork") == std::string::npos) wrong |= 2;
    if (message_of([&] { team->submit([] {}); }).find("made before fork") == std::string::npos) wrong |= 4;
    const auto fresh = CpuTeam::shared({.threads = 2});
    if (fresh == team) wrong |= 8;
    int ran = 0;
    fresh->submit([&] { ran = 1; });
    fresh->sync();
    if (!ran) wrong |= 16;
    team.reset();
    _exit(wrong);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  team->submit([] {});
  team->sync();
}

// Work that somebody outside asks for, here by a counter.
class CountingSource final : public TaskSource {
 public:
  explicit CountingSource(CpuTeam& team) : team_(team) {
    task_.run = [this] { ++run; };
  }
  bool ready() const noexcept override {
    ++looks;
    return wanted.load() != taken_ && team_.done(task_.ticket);
  }
  void take() noexcept override {
    team_.submit(task_);
    ++taken_;
  }
  uint64_t asked() const noexcept override { return static_cast<uint64_t>(wanted.load()); }
  uint64_t taken() const noexcept override { return static_cast<uint64_t>(taken_.load()); }
  bool expecting() const noexcept override { return expects.load(); }

  std::atomic<int> wanted = 0, run = 0;
  mutable std::atomic<int> looks = 0;
  std::atomic<bool> expects = false;

 private:
  CpuTeam& team_;
  CpuTeam::Task task_;
  std::atomic<int> taken_ = 0;
};

void wait_until(const std::function<bool()>& done) {
  for (int i = 0; i < 300'000 && !done(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// Whether no thread of a team runs or wants to: a thread that waits for a cpu is not asleep.
bool teams_are_asleep() {
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name, line;
    std::getline(std::ifstream(thread.path() / "comm"), name);
    std::getline(std::ifstream(thread.path() / "stat"), line);
    if (name == "kt-team" && line.find(") S ") == std::string::npos) return false;
  }
  return true;
}

TEST(CpuTeam, TakesWhatASourceHasWithoutAWord) {
  CpuTeam team({.threads = 1});
  const auto source = std::make_shared<CountingSource>(team);
  source->expects = true;
  team.listen(source);
  for (const int pause : {0, 1, 60, 2100}) {  // ms: spinning, naps of all lengths
    std::this_thread::sleep_for(std::chrono::milliseconds(pause));
    const int before = source->run;
    source->wanted += 3;
    wait_until([&] { return source->run == before + 3; });
    EXPECT_EQ(source->run, before + 3) << pause;
  }
}

TEST(CpuTeam, SleepsWhileNothingIsExpected) {
  CpuTeam team({.threads = 1});
  const auto source = std::make_shared<CountingSource>(team);
  team.listen(source);
  int seen = 0;  // looks after which it has slept for a while
  for (int asleep = 0; asleep < 20; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    const bool still = source->looks > 0 && source->looks == seen && teams_are_asleep();
    asleep = still ? asleep + 1 : 0;
    seen = source->looks;
  }
  source->wanted = 1;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(source->run, 0);
  team.nudge();
  wait_until([&] { return source->run == 1; });
  EXPECT_EQ(source->run, 1);
}

TEST(CpuTeam, SyncWaitsForWhatASourceHas) {
  CpuTeam team({.threads = 1});
  const auto source = std::make_shared<CountingSource>(team);
  team.listen(source);
  for (int i = 1; i <= 200; ++i) {
    source->wanted = i;
    team.sync();
    ASSERT_EQ(source->run, i);
  }
}

// In the order in which they came, however much is submitted later.
TEST(CpuTeam, WhatASourceHasIsInOrder) {
  CpuTeam team({.threads = 1});
  const auto source = std::make_shared<CountingSource>(team);
  team.listen(source);
  int before = -1, after = -1;
  Signal queued;
  team.submit([&] {
    queued.wait();
    source->wanted = 1;
    team.submit([&] { before = source->run; });
  });
  team.submit([&] { team.submit([&] { after = source->run; }); });
  queued.set();
  team.sync();
  team.sync();
  EXPECT_EQ(before, 0);
  EXPECT_EQ(after, 1);
}

TEST(CpuTeam, LeavesCpusToOthers) {
  const int cpus = static_cast<int>(allowed_cpus().size());
  const CpuTeam all({}), most({.spare = 1}), least({.spare = cpus + 3}), asked({.threads = 2, .spare = 1});
  EXPECT_EQ(most.pool()->threads(), std::max(1, std::min(all.pool()->threads(), cpus - 1)));
  EXPECT_EQ(least.pool()->threads(), 1);
  EXPECT_EQ(asked.pool()->threads(), 2);
}

}  // namespace
}  // namespace kt::inline hybrid
