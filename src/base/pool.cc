#include "base/pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/park.h"
#include "base/signal.h"
#include "base/signal_mask.h"

namespace kt::inline base {

namespace {

// Two lines of 64 bytes: x86 prefetches them in pairs, and some ARM cores have lines of 128.
constexpr size_t kLine = 128;

// A worker that wakes up wakes this many others before it works. One thread waking 63 one by one takes longer
// than most tasks; a tree of fan-out 4 is three levels deep there.
constexpr int kFanOut = 4;

constexpr int kMostThreadsPerPu = 4;

// Longer than choosing a token from 100,000 logits takes, or the imbalance of a small task.
constexpr std::chrono::nanoseconds kBurstSpin{300'000};

// Bytes that a waiting worker fetches between two looks at whether the wait is over: some 100 ns.
constexpr size_t kFetchBytes = 1024, kFetchLine = 64;

// How long the caller spins before it looks whether it keeps a worker from running.
constexpr std::chrono::nanoseconds kFirstSpin{5'000};

// The part of a real node that one node of the pool gets.
struct Share {
  int node_id = 0;
  std::vector<std::vector<int>> cores;
  std::vector<int> cpus;  // in the order workers take them: the first PU of every core, then the second ones
  int workers = 0;
};

std::vector<int> cpus_in_order(const std::vector<std::vector<int>>& cores) {
  std::vector<int> out;
  for (size_t sibling = 0;; ++sibling) {
    const size_t before = out.size();
    for (const auto& core : cores)
      if (sibling < core.size()) out.push_back(core[sibling]);
    if (out.size() == before) return out;
  }
}

// Pool node i lives on real node i % real; the cores of a real node are dealt round to the pool nodes on it.
std::vector<Share> share_out(const Topology& topology, int nodes) {
  const int real = std::min(nodes, static_cast<int>(topology.nodes.size()));
  std::vector<Share> shares(static_cast<size_t>(nodes));
  for (int r = 0; r < real; ++r) {
    const Node& home = topology.nodes[static_cast<size_t>(r)];
    const int sharing = (nodes - r + real - 1) / real;
    const int cores = static_cast<int>(home.cores.size());
    // With fewer cores than sharers the cores go round more than once.
    for (int i = 0; i < std::max(cores, sharing); ++i) {
      Share& share = shares[static_cast<size_t>(r + i % sharing * real)];
      share.node_id = home.id;
      share.cores.push_back(home.cores[static_cast<size_t>(i % cores)]);
    }
  }
  for (Share& share : shares) share.cpus = cpus_in_order(share.cores);
  return shares;
}

// Deals threads to nodes one at a time: to nodes with a free core while there are any, then to nodes with a
// free PU, then to all.
void spread(std::vector<Share>& shares, int threads) {
  const auto deal = [&](auto room) {
    for (bool any = true; any && threads > 0;) {
      any = false;
      for (Share& share : shares) {
        if (threads == 0 || share.workers >= room(share)) continue;
        ++share.workers;
        --threads;
        any = true;
      }
    }
  };
  deal([](const Share& share) { return static_cast<int>(share.cores.size()); });
  deal([](const Share& share) { return static_cast<int>(share.cpus.size()); });
  deal([](const Share&) { return INT32_MAX; });
}

std::vector<Share> plan(const PoolOptions& options) {
  const Topology& topology = options.topology;
  if (options.threads < 0 || options.nodes < 0)
    fail("pool: expected counts >= 0, got {} threads and {} nodes", options.threads, options.nodes);
  for (const Node& node : topology.nodes) {
    const auto empty = [](const std::vector<int>& core) { return core.empty(); };
    if (node.cores.empty() || std::any_of(node.cores.begin(), node.cores.end(), empty))
      fail("pool: node {} of the topology has no cpus", node.id);
  }
  const int real = static_cast<int>(topology.nodes.size());
  const int most = kMostThreadsPerPu * topology.pus();
  if (options.threads > most)
    fail("pool: {} threads asked for, at most {} go on {} cpus", options.threads, most, topology.pus());
  int nodes = options.nodes;
  if (nodes == 0) nodes = options.threads == 0 ? real : std::min(real, options.threads);
  if (options.threads != 0 && nodes > options.threads)
    fail("pool: {} nodes need at least as many threads, got {}", nodes, options.threads);
  if (nodes > most) fail("pool: {} nodes asked for, at most {} go on {} cpus", nodes, most, topology.pus());

  std::vector<Share> shares = share_out(topology, nodes);
  int threads = options.threads;
  if (threads == 0)
    for (const Share& share : shares) threads += static_cast<int>(share.cores.size());
  spread(shares, threads);
  return shares;
}

// Moves the calling thread to these cpus. Placement is speed, not correctness: a refusal is logged.
void pin_to(const std::vector<int>& cpus) {
  const int highest = *std::max_element(cpus.begin(), cpus.end());
  std::vector<unsigned long> mask(static_cast<size_t>(highest) / (8 * sizeof(unsigned long)) + 1);
  const size_t bytes = mask.size() * sizeof(unsigned long);
  cpu_set_t* const set = reinterpret_cast<cpu_set_t*>(mask.data());
  for (const int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), bytes, set);
  if (sched_setaffinity(0, bytes, set) != 0)
    log_once(LogLevel::kWarning, "pool: a worker cannot be pinned to cpu {}: {}", cpus.front(),
             std::generic_category().message(errno));
}

// Into the second cache, until over() says that the wait is.
template <typename Over>
void fetch(const Ahead& ahead, Over&& over) noexcept {
  for (const Ahead::Stretch& stretch : ahead.stretches())
    for (size_t at = 0; at < stretch.size(); at += kFetchBytes) {
      if (over()) return;
      const size_t end = std::min(stretch.size(), at + kFetchBytes);
      for (size_t line = at; line < end; line += kFetchLine) __builtin_prefetch(stretch.data() + line, 0, 2);
    }
}

// Whether this thread is inside a task, of any pool. A nested run would wait for workers that wait for it.
thread_local bool inside_task = false;

}  // namespace

struct Pool::State {
  struct alignas(kLine) WorkerSlot {
    Worker who{};
    std::vector<int> pin_cpus;        // empty: not pinned
    std::thread thread;               // none for worker 0
    std::atomic<uint32_t> parked{0};  // 1: sleeps on this word, or is about to
  };
  struct alignas(kLine) Arrivals {
    Countdown left{1};
  };

  std::vector<Share> shares;
  std::vector<WorkerSlot> slots;
  std::vector<Arrivals> arrivals;  // one for each node, so that not all workers meet on one cache line
  std::chrono::nanoseconds spin{};
  std::atomic<int> bursts{0}, yielding_bursts{0};
  bool real = false;

  std::mutex running;
  // These are written between generations, by the thread that holds `running`.
  bool stopping = false;
  const FunctionRef<void(const Worker&)>* task = nullptr;
  const Forecast* then = nullptr;
  std::exception_ptr error;  // written by the worker that wins `failed`, read after all are done
  // Where the caller and each worker were last seen running. The caller's affinity is its own, so the
  // scheduler may put it on a worker's cpu; if both then spin, each run costs two full spins, 63 us instead
  // of 12.
  std::atomic<int> caller_cpu{-1};
  std::vector<std::atomic<int>> worker_cpus;  // by index; written on change only, so reading is cheap
  alignas(kLine) std::atomic<uint32_t> generation{0};
  alignas(kLine) std::atomic<bool> failed{false};
  Countdown nodes_left{1};
  Signal done;

  explicit State(const PoolOptions& options);
  ~State() { stop(); }

  void place_workers(bool pin);
  void start_workers();
  void stop() noexcept;
  void start_generation() noexcept;
  std::chrono::nanoseconds patience() const noexcept {
    return bursts.load(std::memory_order_relaxed) > 0 && spin.count() > 0 ? kBurstSpin : spin;
  }
  void wait_for_generation(WorkerSlot& slot, uint32_t seen) noexcept;
  void wake_children(int index) noexcept;
  void wait_for_workers() noexcept;
  Ahead work(const Worker& who) noexcept;
  void serve(WorkerSlot& slot) noexcept;
  void run(const FunctionRef<void(const Worker&)>& wanted, const Forecast* after);
};

Pool::State::State(const PoolOptions& options) : shares(plan(options)) {
  real = options.topology.real();
  int threads = 0;
  for (const Share& share : shares) threads += share.workers;
  slots = std::vector<WorkerSlot>(static_cast<size_t>(threads));
  arrivals = std::vector<Arrivals>(shares.size());
  worker_cpus = std::vector<std::atomic<int>>(slots.size());
  for (auto& cpu : worker_cpus) cpu.store(-1, std::memory_order_relaxed);
  // More threads than cpus: whoever spins keeps somebody from working.
  if (static_cast<size_t>(threads) <= allowed_cpus().size()) spin = default_spin_time();
  place_workers(options.pin && real);
  start_workers();
}

void Pool::State::place_workers(bool pin) {
  int index = 0;
  for (size_t node = 0; node < shares.size(); ++node) {
    const Share& share = shares[node];
    for (int rank = 0; rank < share.workers; ++rank, ++index) {
      WorkerSlot& slot = slots[static_cast<size_t>(index)];
      slot.who = {.node = static_cast<int>(node), .rank = rank, .ranks = share.workers, .index = index};
      if (!pin) continue;
      const bool enough = static_cast<size_t>(share.workers) <= share.cpus.size();
      slot.pin_cpus = enough ? std::vector<int>{share.cpus[static_cast<size_t>(rank)]} : share.cpus;
    }
  }
}

void Pool::State::start_workers() {
  const BlockSignals block;
  for (size_t i = 1; i < slots.size(); ++i) {
    WorkerSlot& slot = slots[i];
    try {
      slot.thread = std::thread([this, &slot] { serve(slot); });
    } catch (const std::system_error& e) {
      stop();
      fail_as(ErrorKind::kMemory, "pool: cannot start thread {} of {}: {}", i + 1, slots.size(), e.what());
    }
  }
}

void Pool::State::stop() noexcept {
  const std::lock_guard lock(running);
  stopping = true;
  start_generation();
  for (WorkerSlot& slot : slots)
    if (slot.thread.joinable()) slot.thread.join();
}

// Everything written before is visible to workers that see the new generation. Sequentially consistent
// together with `parked`: a worker that announces itself and still sees the old generation is seen parked by
// whoever has seen the new one. Both write by read-modify-write operations, which cost the same here: QEMU's
// aarch64 on an x86 host lets a plain sequentially consistent store pass a later load (both sides of such a
// pair saw the old value in 4 % of tries), and a wake-up is lost.
void Pool::State::start_generation() noexcept {
  generation.fetch_add(1, std::memory_order_seq_cst);
  wake_children(0);
}

void Pool::State::wait_for_generation(WorkerSlot& slot, uint32_t seen) noexcept {
  const bool in_the_way = sched_getcpu() == caller_cpu.load(std::memory_order_relaxed);
  const auto budget = in_the_way ? std::chrono::nanoseconds(0) : patience();
  const Spin how = yielding_bursts.load(std::memory_order_relaxed) > 0 ? Spin::kYields : Spin::kAlone;
  if (spin_until([&] { return generation.load(std::memory_order_seq_cst) != seen; }, budget, how)) return;
  for (;;) {
    slot.parked.exchange(1, std::memory_order_seq_cst);
    if (generation.load(std::memory_order_seq_cst) != seen) break;
    futex_wait(slot.parked, 1);
  }
  slot.parked.store(0, std::memory_order_relaxed);
}

void Pool::State::wake_children(int index) noexcept {
  const size_t first = static_cast<size_t>(index) * kFanOut + 1;
  for (size_t i = first; i < std::min(first + kFanOut, slots.size()); ++i) {
    std::atomic<uint32_t>& parked = slots[i].parked;
    if (parked.load(std::memory_order_seq_cst) == 0)
      continue;  // spins or works: no need, and mostly no system call
    parked.store(0, std::memory_order_relaxed);
    futex_wake(parked, 1);
  }
}

void Pool::State::wait_for_workers() noexcept {
  // First a short spin: workers that were just woken are not yet where they will run.
  if (spin_until([&] { return done.is_set(); }, std::min(spin, kFirstSpin))) return;
  const int here = sched_getcpu();
  const bool in_the_way =
      std::any_of(worker_cpus.begin() + 1, worker_cpus.end(),
                  [&](const std::atomic<int>& cpu) { return cpu.load(std::memory_order_relaxed) == here; });
  done.wait(in_the_way ? std::chrono::nanoseconds(0) : patience() - std::min(spin, kFirstSpin));
}

Ahead Pool::State::work(const Worker& who) noexcept {
  inside_task = true;
  try {
    (*task)(who);
  } catch (...) {
    if (!failed.exchange(true, std::memory_order_relaxed)) error = std::current_exception();
  }
  inside_task = false;
  // Who may not spin has no time to fetch either: somebody else wants the cpu.
  Ahead ahead;
  if (then && spin.count() > 0) ahead = then->ahead(who);
  if (arrivals[static_cast<size_t>(who.node)].left.arrive() && nodes_left.arrive()) done.set();
  return ahead;
}

void Pool::State::serve(WorkerSlot& slot) noexcept {
  try {
    pthread_setname_np(pthread_self(), text("kt-{}-{}", slot.who.node, slot.who.rank).substr(0, 15).c_str());
    if (!slot.pin_cpus.empty()) pin_to(slot.pin_cpus);
  } catch (...) {
    // Out of memory for a name or a mask: the thread works without.
  }
  std::atomic<int>& my_cpu = worker_cpus[static_cast<size_t>(slot.who.index)];
  for (uint32_t seen = 0;; ++seen) {
    wait_for_generation(slot, seen);
    wake_children(slot.who.index);
    if (stopping) return;
    if (const int here = sched_getcpu(); here != my_cpu.load(std::memory_order_relaxed))
      my_cpu.store(here, std::memory_order_relaxed);
    fetch(work(slot.who), [&] { return generation.load(std::memory_order_relaxed) != seen + 1; });
  }
}

void Pool::State::run(const FunctionRef<void(const Worker&)>& wanted, const Forecast* after) {
  if (inside_task) fail_as(ErrorKind::kInternal, "pool: run() was called from inside a pool's task");
  const std::lock_guard lock(running);
  for (size_t node = 0; node < shares.size(); ++node) arrivals[node].left.reset(shares[node].workers);
  nodes_left.reset(static_cast<int>(shares.size()));
  failed.store(false, std::memory_order_relaxed);
  done.reset();
  task = &wanted;
  then = after;
  caller_cpu.store(sched_getcpu(), std::memory_order_relaxed);
  start_generation();
  fetch(work(slots.front().who), [&] { return done.is_set(); });
  wait_for_workers();
  if (failed.load(std::memory_order_relaxed)) std::rethrow_exception(std::exchange(error, nullptr));
}

Pool::Burst::Burst(Pool& pool, bool yield) : pool_(pool), yield_(yield) {
  pool_.state_->bursts.fetch_add(1, std::memory_order_relaxed);
  if (yield_) pool_.state_->yielding_bursts.fetch_add(1, std::memory_order_relaxed);
}
Pool::Burst::~Burst() {
  pool_.state_->bursts.fetch_sub(1, std::memory_order_relaxed);
  if (yield_) pool_.state_->yielding_bursts.fetch_sub(1, std::memory_order_relaxed);
}

Pool::Pool(PoolOptions options) {
  if (options.topology.nodes.empty()) options.topology = Topology::discover();
  state_ = std::make_unique<State>(options);
}

Pool::~Pool() = default;

int Pool::threads() const { return static_cast<int>(state_->slots.size()); }

int Pool::nodes() const { return static_cast<int>(state_->shares.size()); }

namespace {

const Share& share_at(const std::vector<Share>& shares, int node) {
  if (node < 0 || static_cast<size_t>(node) >= shares.size())
    fail("pool: expected a node below {}, got {}", shares.size(), node);
  return shares[static_cast<size_t>(node)];
}

}  // namespace

int Pool::threads(int node) const { return share_at(state_->shares, node).workers; }

void Pool::run(FunctionRef<void(const Worker&)> task, const Forecast* then) { state_->run(task, then); }

void run_items(Pool& pool, int64_t count, FunctionRef<void(int64_t)> item) {
  std::atomic<int64_t> next = 0;
  std::atomic<bool> stop = false;
  pool.run([&](const Worker&) {
    try {
      for (int64_t i; !stop && (i = next.fetch_add(1)) < count;) item(i);
    } catch (...) {
      stop = true;
      throw;
    }
  });
}

std::vector<int> Pool::cpus(int node) const {
  const Share& share = share_at(state_->shares, node);
  std::vector<int> out;
  for (int rank = 0; rank < share.workers; ++rank)
    out.push_back(share.cpus[static_cast<size_t>(rank) % share.cpus.size()]);
  return out;
}

int Pool::memory_node(int node) const {
  const int id = share_at(state_->shares, node).node_id;
  return state_->real ? id : -1;
}

}  // namespace kt::inline base
