#include "hybrid/cpu_team.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/cpu_choice.h"
#include "base/error.h"
#include "base/fork_mutex.h"
#include "base/park.h"
#include "base/signal_mask.h"

namespace kt::inline hybrid {
namespace {

// After a task the thread and the pool's workers spin this long for the next one: attention of one layer on a
// GPU takes less, and waking a pool takes some 50 us.
constexpr std::chrono::nanoseconds kNextTaskSpin{300'000};

// How long the thread sleeps before it looks at its sources again: the first layer after a pause comes so
// much later at most.
std::chrono::nanoseconds nap_after(std::chrono::nanoseconds idle) {
  using namespace std::chrono_literals;
  return idle < 50ms ? 20us : idle < 2s ? 250us : 2ms;
}

struct TeamEntry {
  CpuTeamOptions options;
  uint32_t forks = 0;  // when it was made
  std::weak_ptr<CpuTeam> team;
};

// Never destroyed: teams may outlive static objects.
struct TeamRegistry {
  ForkMutex mutex{ForkLock::kCpuTeams};
  std::vector<TeamEntry> teams;
};

TeamRegistry& registry() {
  static TeamRegistry& it = *std::make_unique<TeamRegistry>().release();
  return it;
}

[[maybe_unused]] const TeamRegistry& made_early = registry();  // before threads that fork

PoolOptions pool_options(const CpuTeamOptions& options) {
  PoolOptions out{.threads = options.threads, .nodes = options.nodes, .topology = Topology::discover()};
  if (options.threads == 0 && options.spare > 0 && options.node_ids.empty()) {
    const int left = static_cast<int>(allowed_cpus().size()) - options.spare;
    out.threads = std::max({1, options.nodes, std::min(out.topology.cores(), left)});
  }
  if (options.node_ids.empty()) return out;
  for (size_t i = 0; i < options.node_ids.size(); ++i)
    if (std::find(options.node_ids.begin(), options.node_ids.begin() + static_cast<ptrdiff_t>(i),
                  options.node_ids[i]) != options.node_ids.begin() + static_cast<ptrdiff_t>(i))
      fail("cpu team: NUMA node {} is named twice", options.node_ids[i]);
  out.topology = chosen_nodes(out.topology, options.node_ids);
  return out;
}

}  // namespace

struct CpuTeam::State {
  std::shared_ptr<Pool> pool;
  std::shared_ptr<Workspace> workspace = std::make_shared<Workspace>();
  std::thread thread;
  const uint32_t made_after_forks = kt::forks();
  std::chrono::nanoseconds next_task_spin{};

  std::mutex mutex;  // of the queue
  Task* first = nullptr;
  Task* last = nullptr;
  std::exception_ptr error;
  std::vector<std::shared_ptr<TaskSource>> sources;  // all that listen() named

  std::atomic<uint64_t> submitted{0};  // written under the mutex
  std::atomic<uint64_t> completed{0};  // tasks in order: the ticket of the last one that is done
  std::atomic<uint32_t> parked{0};     // 1: the team's thread sleeps on this word, or is about to
  std::atomic<uint32_t> wakes{0};      // waiters sleep on this word
  std::atomic<int> sleepers{0};
  std::atomic<int> thread_cpu{-1};  // where the team's thread was last seen
  std::atomic<bool> has_error{false};
  std::atomic<bool> stop_asked{false};
  std::atomic<uint32_t> nudges{0};
  std::atomic<bool> listens{false};
  bool full = false;  // the pool has every cpu

  // The thread's own.
  std::vector<std::shared_ptr<TaskSource>> heard_sources;
  uint32_t heard_nudges = 0;

  explicit State(const CpuTeamOptions& options) : pool(std::make_shared<Pool>(pool_options(options))) {
    // Threads that spin for each other need cpus of their own; with none to spare they give way.
    const size_t cpus = allowed_cpus().size(), threads = static_cast<size_t>(pool->threads());
    full = threads >= cpus;
    if (threads <= cpus && cpus > 1) next_task_spin = kNextTaskSpin;
  }
  bool forked() const noexcept { return kt::forks() != made_after_forks; }
  uint64_t push(Task& task) noexcept;
  void wake_thread() noexcept;
  Task* take() noexcept;
  bool something() const noexcept;
  void take_from_sources() noexcept;
  bool hear() noexcept;
  void rest(std::chrono::steady_clock::time_point since) noexcept;
  Task* wait_for_task(std::optional<Pool::Burst>& burst) noexcept;
  void run(Task* task) noexcept;
  void keep_error(std::exception_ptr what) noexcept;
  void pin() const noexcept;
  void serve() noexcept;
};

uint64_t CpuTeam::State::push(Task& task) noexcept {
  uint64_t ticket = 0;
  task.next = nullptr;
  {
    const std::lock_guard lock(mutex);
    ticket = submitted.load(std::memory_order_relaxed) + 1;
    task.ticket = ticket;
    (last ? last->next : first) = &task;
    last = &task;
    submitted.exchange(ticket, std::memory_order_seq_cst);
  }
  wake_thread();
  return ticket;
}

// Together with wait_for_task(): whoever submits writes `submitted` and then looks at `parked`, the thread
// the other way round, both by read-modify-write operations (see Pool::State::start_generation).
void CpuTeam::State::wake_thread() noexcept {
  if (parked.load(std::memory_order_seq_cst) == 0) return;
  parked.store(0, std::memory_order_relaxed);
  futex_wake(parked, 1);
}

CpuTeam::Task* CpuTeam::State::take() noexcept {
  const std::lock_guard lock(mutex);
  Task* const task = first;
  if (!task) return nullptr;
  first = task->next;
  if (!first) last = nullptr;
  return task;
}

// Only the thread itself completes tasks: it alone can ask.
bool CpuTeam::State::something() const noexcept {
  if (submitted.load(std::memory_order_seq_cst) != completed.load(std::memory_order_relaxed)) return true;
  if (stop_asked.load(std::memory_order_seq_cst)) return true;
  if (nudges.load(std::memory_order_seq_cst) != heard_nudges) return true;
  return std::any_of(heard_sources.begin(), heard_sources.end(), [](const auto& it) { return it->ready(); });
}

void CpuTeam::State::take_from_sources() noexcept {
  for (const std::shared_ptr<TaskSource>& source : heard_sources)
    while (source->ready()) source->take();
}

// Sleeps until somebody submits or nudges, with naps while a source may become ready by itself.
void CpuTeam::State::rest(std::chrono::steady_clock::time_point since) noexcept {
  parked.exchange(1, std::memory_order_seq_cst);
  if (!something()) {
    const bool naps = std::any_of(heard_sources.begin(), heard_sources.end(),
                                  [](const auto& it) { return it->expecting(); });
    if (naps)
      futex_wait(parked, 1, nap_after(std::chrono::steady_clock::now() - since));
    else
      futex_wait(parked, 1);
  }
  parked.store(0, std::memory_order_relaxed);
}

// Whether somebody nudged.
bool CpuTeam::State::hear() noexcept {
  const uint32_t now = nudges.load(std::memory_order_seq_cst);
  if (now == heard_nudges) return false;
  heard_nudges = now;
  const std::lock_guard lock(mutex);
  heard_sources = sources;
  return true;
}

// Null when the team ends. The burst, if any, ends before the thread sleeps.
CpuTeam::Task* CpuTeam::State::wait_for_task(std::optional<Pool::Burst>& burst) noexcept {
  auto since = std::chrono::steady_clock::now();
  const Spin how = full ? Spin::kYields : Spin::kAlone;
  for (;;) {
    const bool ending = stop_asked.load(std::memory_order_seq_cst);
    if (hear()) {
      since = std::chrono::steady_clock::now();
      if (!burst && next_task_spin.count() > 0) burst.emplace(*pool, full);
    }
    take_from_sources();
    if (Task* const task = take()) return task;
    if (ending) return nullptr;
    if (spin_until([&] { return something(); }, burst ? next_task_spin : std::chrono::nanoseconds(0), how))
      continue;
    burst.reset();
    rest(since);
  }
}

void CpuTeam::State::keep_error(std::exception_ptr what) noexcept {
  const std::lock_guard lock(mutex);
  if (error) return;
  error = std::move(what);
  has_error.store(true, std::memory_order_release);
}

void CpuTeam::State::run(Task* task) noexcept {
  try {
    task->run();
  } catch (...) {
    keep_error(std::current_exception());
  }
  // Before the count: then its owner may destroy the task, and what a function held is given back.
  if (task->owned) const std::unique_ptr<Task> end(task);
  completed.fetch_add(1, std::memory_order_seq_cst);
  wakes.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) > 0) futex_wake(wakes, INT_MAX);
}

// The pool keeps worker 0's cpu free for whoever calls it; this thread is who mostly does.
void CpuTeam::State::pin() const noexcept {
  try {
    const std::vector<int> cpus = pool->cpus(0);
    const bool distinct = std::count(cpus.begin(), cpus.end(), cpus.front()) == 1;
    if (pool->memory_node(0) < 0 || !distinct || cpus.front() >= CPU_SETSIZE) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus.front(), &set);
    sched_setaffinity(0, sizeof(set), &set);
  } catch (...) {
    // Placement is speed, not correctness.
  }
}

void CpuTeam::State::serve() noexcept {
  pthread_setname_np(pthread_self(), "kt-team");
  prctl(PR_SET_TIMERSLACK, 1'000);  // ns: naps are short
  pin();
  std::optional<Pool::Burst> burst;
  while (Task* const task = wait_for_task(burst)) {
    if (!burst && next_task_spin.count() > 0) burst.emplace(*pool, full);
    thread_cpu.store(sched_getcpu(), std::memory_order_relaxed);
    run(task);
  }
}

CpuTeam::CpuTeam(const CpuTeamOptions& options) {
  state_ = std::make_shared<State>(options);
  const BlockSignals block;
  try {
    state_->thread = std::thread([state = state_]() mutable {
      state->serve();
      state.reset();
    });
  } catch (const std::system_error& e) {
    fail_as(ErrorKind::kMemory, "cpu team: cannot start its thread: {}", e.what());
  }
}

CpuTeam::~CpuTeam() {
  State& s = *state_;
  // The child has no threads to join, and a pool that waits for its workers would wait for ever; the lost
  // thread's share of the state keeps it.
  if (s.forked()) return;
  s.stop_asked.exchange(true, std::memory_order_seq_cst);
  s.wake_thread();
  if (s.thread.get_id() == std::this_thread::get_id())
    s.thread.detach();
  else
    s.thread.join();
}

std::shared_ptr<CpuTeam> CpuTeam::shared(const CpuTeamOptions& asked) {
  CpuTeamOptions options = asked;
  if (options.threads > 0 || !options.node_ids.empty()) options.spare = 0;  // it says nothing there
  TeamRegistry& all = registry();
  const std::lock_guard lock(all.mutex);
  const uint32_t now = kt::forks();
  std::erase_if(all.teams,
                [&](const TeamEntry& entry) { return entry.forks != now || entry.team.expired(); });
  for (const TeamEntry& entry : all.teams)
    if (entry.options == options)
      if (std::shared_ptr<CpuTeam> team = entry.team.lock()) return team;
  auto team = std::make_shared<CpuTeam>(options);
  all.teams.push_back({options, now, team});
  return team;
}

uint64_t CpuTeam::submit(Task& task) noexcept { return state_->forked() ? 0 : state_->push(task); }

uint64_t CpuTeam::submit(std::function<void()> task) {
  check_process();
  auto owned = std::make_unique<Task>();
  owned->run = std::move(task);
  owned->owned = true;
  return state_->push(*owned.release());
}

void CpuTeam::listen(std::shared_ptr<TaskSource> source) {
  check_process();
  {
    const std::lock_guard lock(state_->mutex);
    state_->sources.push_back(std::move(source));
  }
  state_->listens.store(true, std::memory_order_relaxed);
  nudge();
}

void CpuTeam::nudge() noexcept {
  if (state_->forked()) return;
  state_->nudges.fetch_add(1, std::memory_order_seq_cst);
  state_->wake_thread();
}

bool CpuTeam::done(uint64_t ticket) const noexcept {
  return state_->completed.load(std::memory_order_acquire) >= ticket;
}

void CpuTeam::wait(uint64_t ticket) noexcept {
  State& s = *state_;
  if (s.forked()) return;
  // Spinning where the team's thread would run only keeps it from the work.
  const bool in_the_way = sched_getcpu() == s.thread_cpu.load(std::memory_order_relaxed);
  const auto patience = s.full ? default_spin_time() : std::max(default_spin_time(), s.next_task_spin);
  const auto spin = in_the_way ? std::chrono::nanoseconds(0) : patience;
  if (spin_until([&] { return done(ticket); }, spin)) return;
  s.sleepers.fetch_add(1, std::memory_order_seq_cst);
  for (;;) {
    const uint32_t seen = s.wakes.load(std::memory_order_seq_cst);
    if (s.completed.load(std::memory_order_seq_cst) >= ticket) break;
    futex_wait(s.wakes, seen);
  }
  s.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void CpuTeam::take_what_is_asked() noexcept {
  State& s = *state_;
  if (s.forked() || !s.listens.load(std::memory_order_relaxed)) return;
  std::vector<std::shared_ptr<TaskSource>> sources;
  {
    const std::lock_guard lock(s.mutex);
    sources = s.sources;
  }
  for (const std::shared_ptr<TaskSource>& source : sources) {
    const uint64_t asked = source->asked();
    while (source->taken() < asked) {
      nudge();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
}

void CpuTeam::wait_for_all(uint64_t allow_pending) noexcept {
  take_what_is_asked();
  const uint64_t last = state_->submitted.load(std::memory_order_acquire);
  if (last > allow_pending) wait(last - allow_pending);
}

void CpuTeam::sync(uint64_t allow_pending) {
  check_outside();
  wait_for_all(allow_pending);
  if (const std::exception_ptr error = take_error()) std::rethrow_exception(error);
}

bool CpuTeam::failed() const noexcept { return state_->has_error.load(std::memory_order_acquire); }

std::exception_ptr CpuTeam::take_error() noexcept {
  if (!failed()) return nullptr;
  const std::lock_guard lock(state_->mutex);
  state_->has_error.store(false, std::memory_order_relaxed);
  return std::exchange(state_->error, nullptr);
}

bool CpuTeam::inside() const noexcept { return state_->thread.get_id() == std::this_thread::get_id(); }

void CpuTeam::check_outside() const {
  check_process();
  if (inside()) fail("cpu team: a task of the team cannot wait for the team");
}

bool CpuTeam::forked() const noexcept { return state_->forked(); }

void CpuTeam::check_process() const {
  if (forked())
    fail("cpu team: it was made before fork(), and its threads are not in this process; make it after");
}

const std::shared_ptr<Pool>& CpuTeam::pool() const { return state_->pool; }
const std::shared_ptr<Workspace>& CpuTeam::workspace() const { return state_->workspace; }

}  // namespace kt::inline hybrid
