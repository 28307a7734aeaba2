// kt::Error as the exceptions that Python programs expect, and what happens after a fork.
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "bindings/bindings.h"

namespace kt::python {
namespace {

std::atomic<uint64_t> forks = 0;

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

Maker::Maker() : forks_(forks.load(std::memory_order_relaxed)) {}

bool Maker::is_this_process() const { return forks_ == forks.load(std::memory_order_relaxed); }

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
  pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
}

}  // namespace kt::python
