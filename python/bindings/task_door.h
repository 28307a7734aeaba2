// The way of Python's tasks to the teams, which closes when the interpreter begins to end.
#pragma once
#include <mutex>

#include "base/fork_mutex.h"

namespace kt::python {

// A task that went through before close() is run before the interpreter ends. One that comes later is
// dropped: it neither runs nor touches the interpreter, and what would wait for it goes on. Any thread,
// callbacks of a CUDA driver included, with or without the GIL.
class TaskDoor {
 public:
  // submit() where it is open; false where the task is to be dropped. submit() gives it to a team and does
  // nothing else: the lock is held.
  template <typename Submit>
  static bool pass(const Submit& submit) {
    const std::lock_guard lock(the_one_.mutex_);
    if (the_one_.closed_) return false;
    submit();
    return true;
  }
  // When it returns, all tasks that will ever run are with their teams.
  static void close();

 private:
  static TaskDoor& the_one_;  // never destroyed; made before threads that fork
  ForkMutex mutex_{ForkLock::kTaskDoor};
  bool closed_ = false;
};

}  // namespace kt::python
