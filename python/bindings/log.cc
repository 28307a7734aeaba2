// KT's log lines as Python's. The sink only queues them: it is called on pool workers and callbacks of a CUDA
// driver, which must never wait for the interpreter.
#include <nanobind/stl/string.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include "base/fork_mutex.h"
#include "base/log.h"
#include "bindings/bindings.h"

namespace kt::python {
namespace {

constexpr size_t kMostLines =
    1000;  // more than this between two calls is a loop that logs; the rest is counted

struct Line {
  LogLevel level;
  std::string message;
};

struct Waiting {
  std::atomic<bool> any = false;
  ForkMutex mutex{ForkLock::kPythonLog};  // guards the two below
  std::vector<Line> lines;
  size_t dropped = 0;
};

// Never destroyed: threads may log to the very end.
Waiting& waiting() {
  static Waiting& all = *new Waiting;
  return all;
}

[[maybe_unused]] const Waiting& made_early = waiting();  // before threads that fork

void keep(LogLevel level, std::string_view line) {
  Waiting& all = waiting();
  const std::lock_guard lock(all.mutex);
  if (all.lines.size() < kMostLines)
    all.lines.push_back({level, std::string(line)});
  else
    ++all.dropped;
  all.any.store(true, std::memory_order_release);
}

// Levels of the module logging.
constexpr std::array<int, 4> kPythonLevels = {10, 20, 30, 40};

nb::object logger() { return nb::module_::import_("logging").attr("getLogger")("kt_kernel"); }

void pass_on(const std::vector<Line>& lines, size_t dropped) {
  const nb::object log = logger().attr("log");
  for (const Line& line : lines) log(kPythonLevels[static_cast<size_t>(line.level)], "%s", line.message);
  if (dropped) log(30, "%d more lines were dropped", dropped);
}

}  // namespace

void hand_over_log() {
  Waiting& all = waiting();
  if (!all.any.load(std::memory_order_acquire)) return;
  std::vector<Line> lines;
  size_t dropped = 0;
  {
    const std::lock_guard lock(all.mutex);
    lines.swap(all.lines);
    std::swap(dropped, all.dropped);
    all.any.store(false, std::memory_order_release);
  }
  // Called while an exception may be on its way, so a handler's own error must not replace it.
  try {
    const nb::error_scope keep_pending;
    pass_on(lines, dropped);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("kt_kernel: a logging handler failed");
  } catch (...) {
  }
}

void adopt_log_level() {
  if (std::getenv("KT_LOG_LEVEL")) return;
  const int wanted = nb::cast<int>(logger().attr("getEffectiveLevel")());
  LogLevel level = LogLevel::kError;
  for (size_t i = kPythonLevels.size(); i-- > 0;)
    if (kPythonLevels[i] >= wanted) level = static_cast<LogLevel>(i);
  set_log_level(level);
}

void add_logging(nb::module_& module) {
  set_log_sink(keep);
  module.def("_hand_over_log", &hand_over_log, "Gives lines that wait to the logger kt_kernel.");
  module.def(
      "_log", [](int level, const std::string& line) { log_line(static_cast<LogLevel>(level), line); },
      "Logs a line as the C++ side does; for tests.");
}

}  // namespace kt::python
