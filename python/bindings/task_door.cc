#include "bindings/task_door.h"

namespace kt::python {

TaskDoor& TaskDoor::the_one_ = *new TaskDoor;

void TaskDoor::close() {
  const std::lock_guard lock(the_one_.mutex_);
  the_one_.closed_ = true;
}

}  // namespace kt::python
