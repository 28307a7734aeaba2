// The GIL for tasks of Python on threads of KT.
#pragma once
#include "bindings/bindings.h"

namespace kt::python {

// Holds the GIL while it lives, on a thread that Python did not start. Unlike PyGILState_Ensure it makes the
// thread's state once, and under a lock that fork() waits for: the interpreter's own list of states is
// locked for that, and before 3.12 a child that was forked meanwhile waits for that lock for ever.
class TaskGil {
 public:
  TaskGil();
  ~TaskGil();
  TaskGil(const TaskGil&) = delete;
  TaskGil& operator=(const TaskGil&) = delete;
};

// From the thread that imports the module.
void remember_interpreter();
// The interpreter ends: threads that end later leave their states to it.
void leave_states_to_the_interpreter();

}  // namespace kt::python
