#include "bindings/task_gil.h"

#include <atomic>
#include <cstdio>
#include <mutex>

#include "base/fork_mutex.h"

namespace kt::python {
namespace {

struct Interpreter {
  ForkMutex mutex{ForkLock::kInterpreter};
  PyInterpreterState* state = nullptr;
  // Up to 3.12 a child made while a thread's state is on its way into the interpreter's list finds that list
  // locked for ever. Later ones hold the list's lock over fork() themselves, and ours inside of it would be
  // taken in the other order.
  bool guards_forks = true;
  std::atomic<bool> ends = false;

  std::unique_lock<ForkMutex> guard() {
    return guards_forks ? std::unique_lock(mutex) : std::unique_lock(mutex, std::defer_lock);
  }
};

Interpreter& interpreter() {
  static Interpreter& it = *new Interpreter;
  return it;
}

[[maybe_unused]] const Interpreter& made_early = interpreter();  // before threads that fork

// A thread's state, from its first task to its end.
struct ThreadState {
  PyThreadState* it = nullptr;

  PyThreadState* get() {
    if (it) return it;
    const auto lock = interpreter().guard();
    it = PyThreadState_New(interpreter().state);
    return it;
  }
  ~ThreadState() {
    if (!it || interpreter().ends || !nb::is_alive()) return;
    PyEval_RestoreThread(it);
    PyThreadState_Clear(it);
    PyEval_SaveThread();
    const auto lock = interpreter().guard();
    PyThreadState_Delete(it);
  }
};

thread_local ThreadState own_state;

}  // namespace

TaskGil::TaskGil() { PyEval_RestoreThread(own_state.get()); }

TaskGil::~TaskGil() { PyEval_SaveThread(); }

void remember_interpreter() {
  interpreter().state = PyInterpreterState_Get();
  int major = 0, minor = 0;  // of the Python that runs, which is not always the one compiled for
  if (std::sscanf(Py_GetVersion(), "%d.%d", &major, &minor) == 2)
    interpreter().guards_forks = major == 3 && minor < 13;
}

void leave_states_to_the_interpreter() { interpreter().ends = true; }

}  // namespace kt::python
