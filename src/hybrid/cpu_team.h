// The CPU's side of a foreign engine: one pool of workers, one thread that runs tasks on it in the order they
// were submitted. Layers of all models of a process share one team for each choice of threads and nodes.
#pragma once
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "base/pool.h"
#include "nn/experts.h"

namespace kt {

struct CpuTeamOptions {
  int threads = 0;              // 0: one for each core
  int nodes = 0;                // thread pools; 0: as many as the machine has NUMA nodes
  std::vector<int> node_ids{};  // the operating system's numbers of the nodes to use; empty: the first ones
  bool operator==(const CpuTeamOptions&) const = default;
};

// submit() may be called from any thread, callbacks of a CUDA driver included: it takes a lock for a moment,
// never waits for a task, allocates nothing for a Task that is used again.
class CpuTeam {
 public:
  explicit CpuTeam(const CpuTeamOptions& options);
  ~CpuTeam();  // after the tasks submitted so far

  // The team of these options, made when nobody has it yet. Teams end with their last user.
  static std::shared_ptr<CpuTeam> shared(const CpuTeamOptions& options);

  // Work that can be submitted again and again (by replays of a graph), once it is done. Owned by the caller,
  // who keeps it until then.
  struct Task {
    std::function<void()> run;
    uint64_t ticket = 0;  // of the last submit; written by it
    Task* next = nullptr;
  };

  uint64_t submit(Task& task) noexcept;         // its ticket: 1, 2, 3 ...
  uint64_t submit(std::function<void()> task);  // owned by the team
  void wait(uint64_t ticket) noexcept;          // until this task and all before it are done
  void sync(uint64_t allow_pending = 0);     // until at most so many are left; throws what failed first since
  bool failed() const noexcept;              // whether take_error() has something
  std::exception_ptr take_error() noexcept;  // of the first task that failed since the last call, or null

  const std::shared_ptr<Pool>& pool() const;
  const std::shared_ptr<Workspace>& workspace() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kt
