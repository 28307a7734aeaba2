#include "bindings/task_gil.h"

#include <atomic>
#include <mutex>

#include "base/fork_mutex.h"

namespace kt::python {
namespace {

struct Interpreter {
  ForkMutex mutex{14};
  PyInterpreterState* state = nullptr;
  std::atomic<bool> ends = false;
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
    const std::lock_guard lock(interpreter().mutex);
    it = PyThreadState_New(interpreter().state);
    return it;
  }
  ~ThreadState() {
    if (!it || interpreter().ends || !nb::is_alive()) return;
    PyEval_RestoreThread(it);
    PyThreadState_Clear(it);
    PyEval_SaveThread();
    const std::lock_guard lock(interpreter().mutex);
    PyThreadState_Delete(it);
  }
};

thread_local ThreadState own_state;

}  // namespace

TaskGil::TaskGil() { PyEval_RestoreThread(own_state.get()); }

TaskGil::~TaskGil() { PyEval_SaveThread(); }

void remember_interpreter() { interpreter().state = PyInterpreterState_Get(); }

void leave_states_to_the_interpreter() { interpreter().ends = true; }

}  // namespace kt::python
