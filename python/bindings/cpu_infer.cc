// CPUInfer and WorkerPoolConfig, under the names that engines know.
#include "bindings/cpu_infer.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/cpu_choice.h"
#include "base/error.h"
#include "base/fork_mutex.h"
#include "base/log.h"
#include "base/topology.h"
#include "bindings/stream_task.h"
#include "bindings/task_door.h"
#include "bindings/task_gil.h"
#include "cuda/driver.h"

namespace kt::python {
namespace {

struct WorkerPoolConfig {
  int subpool_count = 0;
  std::vector<int> subpool_numa_map, subpool_thread_count;
};

CpuTeamOptions options_of(const WorkerPoolConfig& config) {
  const std::vector<int>& threads = config.subpool_thread_count;
  const std::vector<int>& nodes = config.subpool_numa_map;
  const auto count = static_cast<size_t>(std::max(config.subpool_count, 0));
  if (count == 0 || threads.size() != count || (!nodes.empty() && nodes.size() != count))
    fail(
        "WorkerPoolConfig: subpool_count {} with {} entries in subpool_numa_map and {} in "
        "subpool_thread_count",
        config.subpool_count, nodes.size(), threads.size());
  const auto [least, most] = std::minmax_element(threads.begin(), threads.end());
  if (*least < 1 || *most - *least > 1)
    fail(
        "WorkerPoolConfig: subpool_thread_count goes from {} to {}; expected the same number, at least 1, "
        "for each "
        "pool (one more for some is fine)",
        *least, *most);
  CpuTeamOptions options{.threads = std::accumulate(threads.begin(), threads.end(), 0),
                         .nodes = config.subpool_count};
  for (const int node : nodes)  // pools on one node share its cores
    if (std::find(options.node_ids.begin(), options.node_ids.end(), node) == options.node_ids.end())
      options.node_ids.push_back(node);
  return options;
}

CpuTeamOptions cut_to_cpus(CpuTeamOptions options) {
  const int nodes = std::max(options.nodes, static_cast<int>(options.node_ids.size()));
  options.threads = fitted({.threads = options.threads, .nodes = nodes}).threads;
  return options;
}

// Teams that may hold tasks of Python; never destroyed.
struct Teams {
  ForkMutex mutex{ForkLock::kPythonTeams};
  std::vector<std::weak_ptr<CpuTeam>> teams;
};

Teams& all_teams() {
  static Teams& all = *new Teams;
  return all;
}

[[maybe_unused]] const Teams& made_early = all_teams();  // before threads that fork

// Before the interpreter ends: afterwards a task of Python could not run any more. What streams and threads
// hand over from here on is dropped.
void finish_tasks() {
  without_gil([] {
    TaskDoor::close();
    std::vector<std::weak_ptr<CpuTeam>> teams;
    {
      const std::lock_guard lock(all_teams().mutex);
      teams.swap(all_teams().teams);
    }
    for (const std::weak_ptr<CpuTeam>& team : teams) try {
        if (const std::shared_ptr<CpuTeam> alive = team.lock()) alive->sync();
      } catch (...) {  // nobody is left who would sync
      }
  });
  collect_stream_tasks();
  leave_states_to_the_interpreter();
}

// The team of another one may end here, after its tasks, which may be Python's: not under the lock.
void remember(const std::shared_ptr<CpuTeam>& team) {
  std::vector<std::shared_ptr<CpuTeam>> alive;
  const std::lock_guard lock(all_teams().mutex);
  auto& teams = all_teams().teams;
  std::erase_if(teams, [](const auto& old) { return old.expired(); });
  for (const std::weak_ptr<CpuTeam>& old : teams) alive.push_back(old.lock());
  if (std::find(alive.begin(), alive.end(), team) == alive.end()) teams.push_back(team);
}

// A task that was given by submit(): the callable goes where it was called, under the same GIL.
struct HostTask {
  std::shared_ptr<CpuInfer::Shared> shared;
  nb::callable task;

  void run() {
    const TaskGil gil;
    try {
      task();
    } catch (...) {
      shared->keep(std::nullopt, std::current_exception());
    }
    task.reset();
  }
};

}  // namespace

CpuInfer::CpuInfer(const CpuTeamOptions& options) : shared_(std::make_shared<Shared>()) {
  adopt_log_level();
  without_gil([&] {
    shared_->team = CpuTeam::shared(cut_to_cpus(options));
    remember(shared_->team);
  });
}

// The last user of a team waits for its tasks, which may be Python's; in a forked child there is nobody to
// wait for.
CpuInfer::~CpuInfer() {
  if (!maker_.is_this_process()) {
    new std::shared_ptr<Shared>(std::move(shared_));
    return;
  }
  collect_stream_tasks();
  without_gil([this] { shared_.reset(); });
}

// A failure that is not kept goes after the lock: it may hold objects of Python.
void CpuInfer::Shared::keep(std::optional<uintptr_t> stream, std::exception_ptr thrown) noexcept try {
  const std::lock_guard lock(mutex_);
  const auto same = [&](const Failure& other) { return other.stream == stream; };
  if (std::none_of(failures_.begin(), failures_.end(), same))
    failures_.push_back({stream, std::move(thrown)});
} catch (...) {
}

void CpuInfer::Shared::rethrow(std::optional<uintptr_t> stream) {
  std::exception_ptr thrown;
  {
    const std::lock_guard lock(mutex_);
    const auto wanted = [&](const Failure& other) { return !stream || other.stream == stream; };
    const auto found = std::find_if(failures_.begin(), failures_.end(), wanted);
    if (found == failures_.end()) return;
    thrown = std::move(found->thrown);
    failures_.erase(found);
  }
  std::rethrow_exception(thrown);
}

void CpuInfer::submit(nb::callable task) const {
  const std::shared_ptr<CpuTeam>& to = team();
  collect_stream_tasks();
  auto work = std::make_shared<HostTask>(shared_, std::move(task));
  without_gil([&] { TaskDoor::pass([&] { to->submit([work] { work->run(); }); }); });
}

void CpuInfer::sync(uint64_t allow_pending) const {
  const std::shared_ptr<CpuTeam>& with = team();
  without_gil([&] {
    with->check_outside();
    with->wait_for_all(allow_pending);
  });
  collect_stream_tasks();
  shared_->rethrow(std::nullopt);
}

void CpuInfer::submit_on_stream(uintptr_t stream, nb::callable task) const {
  team();
  collect_stream_tasks();
  shared_->rethrow(stream);
  put_in_stream(shared_, stream, std::move(task), 0);
}

void CpuInfer::sync_on_stream(uintptr_t stream, uint64_t allow_pending) const {
  team();
  collect_stream_tasks();
  put_in_stream(shared_, stream, {}, allow_pending);
  shared_->rethrow(stream);
}

namespace {

// Streams only where there is a driver: engines ask with hasattr. The driver is looked for here, not at
// import, so that a server may fork first.
nb::object stream_method(nb::handle self, const std::string& name) {
  const bool submit = name == "submit_with_cuda_stream";
  if ((submit || name == "sync_with_cuda_stream") && cuda_driver())
    return nb::getattr(self, submit ? "_submit_on_stream" : "_sync_on_stream");
  throw nb::attribute_error(("'CPUInfer' object has no attribute '" + name + "'").c_str());
}

}  // namespace

void add_cpu_infer(nb::module_& module) {
  remember_interpreter();
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&finish_tasks));
  nb::class_<WorkerPoolConfig>(module, "WorkerPoolConfig",
                               "Thread pools: how many, on which NUMA nodes, how large.")
      .def(nb::init<>())
      .def_rw("subpool_count", &WorkerPoolConfig::subpool_count)
      .def_rw("subpool_numa_map", &WorkerPoolConfig::subpool_numa_map)
      .def_rw("subpool_thread_count", &WorkerPoolConfig::subpool_thread_count);
  nb::class_<CpuInfer>(
      module, "CPUInfer",
      "Worker threads, and a queue of tasks that run on them in order. Objects with the same numbers "
      "share one set of threads.")
      .def(
          "__init__",
          [](CpuInfer* self, int threads, int pools, const std::vector<int>& numa_nodes, int spare) {
            new (self) CpuInfer({.threads = threads, .spare = spare, .nodes = pools, .node_ids = numa_nodes});
          },
          nb::arg("threads"), nb::arg("pools") = 0, nb::arg("numa_nodes") = std::vector<int>(),
          nb::arg("spare") = 0)
      .def(
          "__init__",
          [](CpuInfer* self, const WorkerPoolConfig& config) { new (self) CpuInfer(options_of(config)); },
          nb::arg("config"))
      .def("submit", &CpuInfer::submit, nb::arg("task"),
           "task() on the queue's thread; what it raises is raised by sync. When the interpreter ends, tasks "
           "that "
           "were submitted before are run first; later ones are dropped.")
      .def("sync", &CpuInfer::sync, nb::arg("allow_n_pending") = 0,
           "Waits until at most so many tasks are left.")
      .def("_submit_on_stream", &CpuInfer::submit_on_stream, nb::arg("stream"), nb::arg("task"))
      .def("_sync_on_stream", &CpuInfer::sync_on_stream, nb::arg("stream"), nb::arg("allow_n_pending") = 0)
      .def("__getattr__", &stream_method, nb::arg("name"))
      .def_prop_ro(
          "backend_", [](nb::object self) { return self; }, "What MOEConfig.pool takes: itself.")
      .def_prop_ro("threads", [](const CpuInfer& self) { return self.team()->pool()->threads(); })
      .def_prop_ro("pools", [](const CpuInfer& self) { return self.team()->pool()->nodes(); });
}

}  // namespace kt::python
