// Threads that run one task at a time, all together: each worker calls the same function once and learns who
// it is. No queue, no futures, no work stealing; dividing the work is the task's business.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "base/topology.h"

namespace kt::inline base {

struct Worker {
  int node;   // 0 .. Pool::nodes() - 1
  int rank;   // within the node
  int ranks;  // workers in this node, at least 1
  int index;  // over all nodes, node by node
};

// Memory that one worker will read soon, in order.
class Ahead {
 public:
  using Stretch = std::span<const std::byte>;
  void add(Stretch stretch) {
    if (count_ < kMost) stretches_[count_++] = stretch;
  }
  std::span<const Stretch> stretches() const { return {stretches_.data(), count_}; }

 private:
  static constexpr size_t kMost = 8;  // what is more is not fetched
  std::array<Stretch, kMost> stretches_;
  size_t count_ = 0;
};

// Knows what comes after a task.
class Forecast {
 public:
  // What this worker will probably read first in the next task. Called on the worker when it is done with its
  // part of this one, before the caller may go on; quick.
  virtual Ahead ahead(const Worker& worker) const noexcept = 0;

 protected:
  ~Forecast() = default;
};

struct PoolOptions {
  int threads = 0;         // 0: one for each core of the chosen nodes
  int nodes = 0;           // 0: all nodes of the topology, but no more than threads
  Topology topology = {};  // empty: Topology::discover()
  bool pin = true;         // has no effect on a topology that is not real()
};

// Workers take distinct cores first and SMT siblings last, spread evenly over the nodes as far as the nodes'
// cores allow. Each worker is pinned to one cpu; where a node has more workers than cpus, to the node's cpus.
//
// With fewer nodes than the topology has, the first ones are used. With more, nodes are logical: they share
// the real ones, whose cores are dealt round, so code that shards over nodes can be tested on any machine.
// (Nodes share cpus only when there are more nodes than cores.)
//
// Waiting, on both sides, spins for about 30 us (more within a Burst) and then sleeps in the kernel; with
// more threads than usable cpus it does not spin at all, and a caller and a worker that find themselves on
// one cpu do not spin against each other.
class Pool {
 public:
  // Error(kInput) for negative numbers, for more nodes than threads, and for more than four threads for each
  // PU.
  explicit Pool(PoolOptions options = {});
  ~Pool();  // waits for a run() in progress
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const;
  int nodes() const;
  int threads(int node) const;

  // Calls task once on every worker, concurrently, and returns when all are done. The calling thread is
  // worker 0 (node 0, rank 0); its affinity is left alone. What one worker wrote before returning, the caller
  // sees. The first exception is rethrown here after all workers are done. Calls from several threads run one
  // after the other. A call from inside a task, of this or any other pool, throws Error(kInternal). Costs
  // about a microsecond when the workers still spin. Workers that wait for others, and then for the next
  // task, fetch what `then` says into their caches meanwhile: memory would be idle.
  void run(FunctionRef<void(const Worker&)> task, const Forecast* then = nullptr);

  // While one of these lives, whoever waits spins for a fraction of a millisecond instead: for callers that
  // run many short tasks one after another, with a little work of their own between them. Where the pool has
  // every cpu and other threads of the process have work of their own meanwhile, workers that `yield` let
  // them.
  class Burst {
   public:
    explicit Burst(Pool& pool, bool yield = false);
    ~Burst();
    Burst(const Burst&) = delete;
    Burst& operator=(const Burst&) = delete;

   private:
    Pool& pool_;
    bool yield_;
  };

  // The cpus this node's workers take, by rank; worker 0's is kept free for the caller. Where the pool pins,
  // the entry is the cpu itself, or one of the node's cpus if the node has more workers than cpus.
  std::vector<int> cpus(int node) const;

  // The operating system's number of the node, to bind memory to (BufferOptions::node); -1 if there is none
  // because the topology is not real.
  int memory_node(int node) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Calls item(i) for every i in [0, count), claimed in order by the pool's workers. The first exception stops
// the claiming and is rethrown. For items of some length: each costs an atomic add.
void run_items(Pool& pool, int64_t count, FunctionRef<void(int64_t)> item);

}  // namespace kt::inline base
