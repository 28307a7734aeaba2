// What the files of the extension share: which process made an object, and how a blocking call is made.
// Nothing here computes; names of Python become values of hybrid/.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

namespace kt::python {

namespace nb = nanobind;

void add_logging(nb::module_& module);
void add_errors(nb::module_& module);
void add_cpu_infer(nb::module_& module);
void add_expert_layer(nb::module_& module);
void add_rules(nb::module_& module);
void add_checkpoint(nb::module_& module);
void add_linear_layer(nb::module_& module);

// Lines that any thread logged since the last call go to logging.getLogger("kt_kernel"). Needs the GIL;
// nothing else takes it for the sake of a line, so no thread of ours ever waits for it. One load when there
// is none.
void hand_over_log();
// Takes over the level of that logger, unless KT_LOG_LEVEL decides. For setup calls, not for each forward.
void adopt_log_level();

// The process that made an object. Threads do not survive a fork, so what has threads is of no use in the
// child: a call would wait for ever.
class Maker {
 public:
  Maker();
  bool is_this_process() const;
  void check(const char* what) const;  // Error(kInternal) naming the remedy

 private:
  uint32_t forks_;
};

// work() without the GIL, then the log. All calls that may wait for threads go through here.
template <typename Work>
decltype(auto) without_gil(Work&& work) {
  struct HandOver {
    ~HandOver() { hand_over_log(); }
  } last;  // after the GIL is back
  nb::gil_scoped_release released;
  return std::forward<Work>(work)();
}

}  // namespace kt::python
