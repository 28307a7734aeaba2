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

#include "base/error.h"
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
  return {.threads = std::accumulate(threads.begin(), threads.end(), 0),
          .nodes = config.subpool_count,
          .node_ids = nodes};
}

// A Python callable that any thread may call and any thread may let go.
std::function<void()> callable(nb::callable task) {
  const std::shared_ptr<nb::callable> shared(new nb::callable(std::move(task)), [](nb::callable* owned) {
    if (!nb::is_alive()) return;
    const nb::gil_scoped_acquire gil;
    delete owned;
  });
  return [shared] {
    if (!nb::is_alive()) return;
    const nb::gil_scoped_acquire gil;
    (*shared)();
  };
}

// Teams that may hold tasks of Python; never destroyed.
struct Teams {
  std::mutex mutex;
  std::vector<std::weak_ptr<CpuTeam>> teams;
};

Teams& all_teams() {
  static Teams& all = *new Teams;
  return all;
}

// Before the interpreter ends: afterwards a task of Python could not run any more.
void finish_tasks() {
  without_gil([] {
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
}

void remember(const std::shared_ptr<CpuTeam>& team) {
  const std::lock_guard lock(all_teams().mutex);
  auto& teams = all_teams().teams;
  std::erase_if(teams, [](const auto& old) { return old.expired(); });
  if (std::none_of(teams.begin(), teams.end(), [&](const auto& old) { return old.lock() == team; }))
    teams.push_back(team);
}

}  // namespace

CpuInfer::CpuInfer(const CpuTeamOptions& options) : shared_(std::make_shared<Shared>()) {
  adopt_log_level();
  without_gil([&] {
    shared_->team = CpuTeam::shared(options);
    remember(shared_->team);
  });
}

// The last user of a team waits for its tasks, which may be Python's; in a forked child there is nobody to
// wait for.
CpuInfer::~CpuInfer() {
  if (!maker_.is_this_process())
    new std::shared_ptr<Shared>(std::move(shared_));
  else
    without_gil([this] { shared_.reset(); });
}

void CpuInfer::Shared::keep(std::exception_ptr thrown) noexcept {
  const std::lock_guard lock(mutex);
  if (!error) error = std::move(thrown);
}

void CpuInfer::Shared::rethrow() {
  std::exception_ptr thrown;
  {
    const std::lock_guard lock(mutex);
    std::swap(thrown, error);
  }
  if (thrown) std::rethrow_exception(thrown);
}

void CpuInfer::submit(nb::callable task) const {
  const std::shared_ptr<CpuTeam>& to = team();
  auto work = callable(std::move(task));
  without_gil([&] { to->submit(std::move(work)); });
}

void CpuInfer::sync(uint64_t allow_pending) const {
  const std::shared_ptr<CpuTeam>& with = team();
  without_gil([&] {
    with->sync(allow_pending);
    shared_->rethrow();
  });
}

// What a stream calls: once, or at each replay of the graph that captured it. Then nobody can say when the
// graph is gone, so it stays.
struct CpuInfer::StreamCall {
  std::shared_ptr<Shared> shared;
  std::function<void(Shared&)> work;
  bool stays = false;

  static void run(void* argument) noexcept {
    auto* call = static_cast<StreamCall*>(argument);
    try {
      call->work(*call->shared);
    } catch (...) {
      call->shared->keep(std::current_exception());
    }
    if (!call->stays) delete call;
  }
};

void CpuInfer::call_on_stream(uintptr_t stream, std::function<void(Shared&)> work) const {
  const CudaDriver* driver = cuda_driver();
  if (!driver) fail_as(ErrorKind::kUnsupported, "no CUDA stream can be used: {}", cuda_driver_status());
  team();
  without_gil([&] {
    shared_->rethrow();
    auto* const handle = reinterpret_cast<CudaStreamTag*>(stream);
    auto call = std::make_unique<StreamCall>(shared_, std::move(work), driver->capture(handle) != 0);
    driver->call(&StreamCall::run, call.get(), handle);
    call.release();
  });
}

void CpuInfer::submit_on_stream(uintptr_t stream, nb::callable task) const {
  call_on_stream(stream, [work = callable(std::move(task))](Shared& shared) { shared.team->submit(work); });
}

void CpuInfer::sync_on_stream(uintptr_t stream, uint64_t allow_pending) const {
  call_on_stream(stream, [allow_pending](Shared& shared) { shared.team->sync(allow_pending); });
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
          [](CpuInfer* self, int threads, int pools, const std::vector<int>& numa_nodes) {
            new (self) CpuInfer({.threads = threads, .nodes = pools, .node_ids = numa_nodes});
          },
          nb::arg("threads"), nb::arg("pools") = 0, nb::arg("numa_nodes") = std::vector<int>())
      .def(
          "__init__",
          [](CpuInfer* self, const WorkerPoolConfig& config) { new (self) CpuInfer(options_of(config)); },
          nb::arg("config"))
      .def("submit", &CpuInfer::submit, nb::arg("task"),
           "task() on the queue's thread; what it raises is raised by sync.")
      .def("sync", &CpuInfer::sync, nb::arg("allow_n_pending") = 0,
           "Waits until at most so many tasks are left.")
      .def("_submit_on_stream", &CpuInfer::submit_on_stream, nb::arg("stream"), nb::arg("task"))
      .def("_sync_on_stream", &CpuInfer::sync_on_stream, nb::arg("stream"), nb::arg("allow_n_pending") = 0)
      .def("__getattr__", &stream_method, nb::arg("name"))
      .def_prop_ro("threads", [](const CpuInfer& self) { return self.team()->pool()->threads(); })
      .def_prop_ro("pools", [](const CpuInfer& self) { return self.team()->pool()->nodes(); });
}

}  // namespace kt::python
