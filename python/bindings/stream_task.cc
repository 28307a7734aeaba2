#include "bindings/stream_task.h"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fork_mutex.h"
#include "bindings/task_door.h"
#include "bindings/task_gil.h"
#include "cuda/driver.h"

namespace kt::python {
namespace {

// Once, or at each replay of the graph that captured it.
struct StreamTask {
  std::shared_ptr<CpuInfer::Shared> shared;
  uintptr_t stream = 0;
  nb::object task;  // none: a wait
  uint64_t allow_pending = 0;
  CpuTeam::Task work;
  std::atomic<bool> called = false;  // by the stream, which will not come back unless it was captured

  void run() {
    const TaskGil gil;
    try {
      task();
    } catch (...) {
      shared->keep(stream, std::current_exception());
    }
  }
  bool finished() const { return called.load(std::memory_order_acquire) && shared->team->done(work.ticket); }

  static void call(void* argument) noexcept {
    StreamTask& it = *static_cast<StreamTask*>(argument);
    CpuTeam& team = *it.shared->team;
    if (it.work.run) {
      if (!team.done(it.work.ticket)) team.wait(it.work.ticket);  // of the replay before
      TaskDoor::pass([&] { team.submit(it.work); });
    } else {
      team.wait_for_all(it.allow_pending);
    }
    it.called.store(true, std::memory_order_release);
  }
};

using Tasks = std::vector<std::unique_ptr<StreamTask>>;

// Nobody can say when a graph is gone, so what was captured stays. Never destroyed.
struct StreamTasks {
  ForkMutex mutex{ForkLock::kStreamTasks};
  Tasks in_flight, captured;
};

StreamTasks& stream_tasks() {
  static StreamTasks& all = *new StreamTasks;
  return all;
}

[[maybe_unused]] const StreamTasks& made_early = stream_tasks();  // before threads that fork

}  // namespace

void put_in_stream(const std::shared_ptr<CpuInfer::Shared>& shared, uintptr_t stream, nb::object task,
                   uint64_t allow_pending) {
  const CudaDriver* const driver = cuda_driver();
  if (!driver) fail_as(ErrorKind::kUnsupported, "no CUDA stream can be used: {}", cuda_driver_status());
  auto made = std::make_unique<StreamTask>();
  StreamTask& it = *made;
  it.shared = shared;
  it.stream = stream;
  it.task = std::move(task);
  it.allow_pending = allow_pending;
  if (it.task.is_valid()) it.work.run = [&it] { it.run(); };
  // A driver may make the caller wait for callbacks, and those for tasks, which take the GIL.
  without_gil([&] {
    auto* const handle = reinterpret_cast<CudaStreamTag*>(stream);
    const bool captures = driver->capture(handle) != 0;
    Tasks* list = nullptr;
    {
      StreamTasks& all = stream_tasks();
      const std::lock_guard lock(all.mutex);
      list = captures ? &all.captured : &all.in_flight;
      list->push_back(std::move(made));
    }
    try {
      driver->call(&StreamTask::call, &it, handle);
    } catch (...) {
      it.called.store(true, std::memory_order_release);  // never; a captured one stays
      throw;
    }
  });
}

void collect_stream_tasks() {
  Tasks done;
  {
    StreamTasks& all = stream_tasks();
    const std::lock_guard lock(all.mutex);
    for (size_t i = 0; i < all.in_flight.size();) {
      if (!all.in_flight[i]->finished()) {
        ++i;
        continue;
      }
      done.push_back(std::move(all.in_flight[i]));
      all.in_flight[i] = std::move(all.in_flight.back());
      all.in_flight.pop_back();
    }
  }
  if (done.empty()) return;
  for (const auto& it : done) it->task.reset();
  without_gil([&] { done.clear(); });  // the last user of a team waits for its tasks
}

}  // namespace kt::python
