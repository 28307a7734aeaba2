// kt::Error as the exceptions that Python programs expect, and what happens after a fork.
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/fork_mutex.h"
#include "bindings/bindings.h"

namespace kt::python {
namespace {

PyObject* exception_for(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::kInput:
      // base/file ends its messages with the system's words.
      for (const auto& [code, type] :
           {std::pair{ENOENT, PyExc_FileNotFoundError}, {EACCES, PyExc_PermissionError}})
        if (std::strstr(error.what(), std::strerror(code))) return type;
      return PyExc_ValueError;
    case ErrorKind::kMemory:
      return PyExc_MemoryError;
    case ErrorKind::kUnsupported:
      return PyExc_NotImplementedError;
    case ErrorKind::kInternal:
      return PyExc_RuntimeError;
  }
  return PyExc_RuntimeError;
}

}  // namespace

Maker::Maker() : forks_(forks()) {}

bool Maker::is_this_process() const { return forks_ == forks(); }

void Maker::check(const char* what) const {
  if (is_this_process()) return;
  fail_as(
      ErrorKind::kInternal,
      "this {} was made before the process forked, and its threads are in the parent; make a new one after "
      "the fork",
      what);
}

void add_errors(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      PyErr_SetString(exception_for(error), error.what());
    }
  });
}

}  // namespace kt::python
