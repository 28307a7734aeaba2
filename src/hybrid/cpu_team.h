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

namespace kt::inline hybrid {

struct CpuTeamOptions {
  int threads = 0;              // 0: one for each core, but for `spare` of the cpus
  int spare = 0;                // that others need: a thread that waits for a GPU has its cpu to itself
  int nodes = 0;                // thread pools; 0: as many as the machine has NUMA nodes, or as node_ids has
  std::vector<int> node_ids{};  // the operating system's numbers of the nodes to use; empty: the first ones
  bool operator==(const CpuTeamOptions&) const = default;
};

// Work that nobody in this process submits (a GPU asks for it): the team's thread looks for it between tasks.
// What it takes comes behind what was submitted before.
class TaskSource {
 public:
  virtual ~TaskSource() = default;
  // On the team's thread.
  virtual bool ready() const noexcept = 0;  // there is something to take; asked again and again
  virtual void take() noexcept = 0;         // submits it to the team
  // On any thread.
  virtual bool expecting() const noexcept = 0;  // may become ready without a word to the team
  virtual uint64_t asked() const noexcept = 0;  // what there was to take so far
  virtual uint64_t taken() const noexcept = 0;  // of that
};

// submit() may be called from any thread, callbacks of a CUDA driver included: it takes a lock for a moment,
// never waits for a task, allocates nothing for a Task that is used again.
//
// The team's thread is worker 0 of the pool while a task runs. Other threads may run the pool too (a forward
// at once); the pool runs one after the other.
//
// A team does not survive fork(): in the child its threads are gone. There submit(Task&) does nothing, wait()
// returns at once, the destructor gives nothing back, and all others throw an Error that says so. shared()
// makes a new team there.
class CpuTeam {
 public:
  explicit CpuTeam(const CpuTeamOptions& options);
  // After the tasks submitted so far. When the last owner is a task of the team itself, at once: the thread
  // ends by itself after the tasks that are left.
  ~CpuTeam();
  CpuTeam(const CpuTeam&) = delete;
  CpuTeam& operator=(const CpuTeam&) = delete;

  // The team of these options, made when nobody has it yet. Teams end with their last user.
  static std::shared_ptr<CpuTeam> shared(const CpuTeamOptions& options);

  // Work that can be submitted again and again (by replays of a graph), once it is done. Owned by the caller,
  // who keeps it until then.
  struct Task {
    std::function<void()> run;
    uint64_t ticket = 0;  // of the last submit; written by it
    Task* next = nullptr;
    bool owned = false;  // by the team: set by submit(std::function) alone
  };

  uint64_t submit(Task& task) noexcept;         // its ticket: 1, 2, 3 ...
  uint64_t submit(std::function<void()> task);  // owned by the team
  // From now on the team takes from it too: between tasks, while it expects something every 20 us at first,
  // after seconds without work every 2 ms.
  void listen(std::shared_ptr<TaskSource> source);
  // Something will be ready soon, or expecting() has become true: the thread gets up.
  void nudge() noexcept;
  void wait(uint64_t ticket) noexcept;  // until this task and all before it are done
  // Until at most so many are left. What sources were asked for counts as submitted.
  void wait_for_all(uint64_t allow_pending = 0) noexcept;
  bool done(uint64_t ticket) const noexcept;
  void sync(uint64_t allow_pending = 0);     // the same; throws what failed first since
  bool failed() const noexcept;              // whether take_error() has something
  std::exception_ptr take_error() noexcept;  // of the first task that failed since the last call, or null

  bool inside() const noexcept;  // whether the calling thread is the team's own, in a task
  void check_outside() const;    // check_process(), and Error inside
  bool forked() const noexcept;  // whether this process was forked from the one that made the team
  void check_process() const;    // Error when forked()

  const std::shared_ptr<Pool>& pool() const;
  const std::shared_ptr<Workspace>& workspace() const;

 private:
  void take_what_is_asked() noexcept;

  struct State;
  std::shared_ptr<State> state_;  // the team's thread has the other
};

}  // namespace kt::inline hybrid
