// CPUInfer of Python: a share in a CpuTeam.
#pragma once
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "bindings/bindings.h"
#include "hybrid/cpu_team.h"

namespace kt::python {

class CpuInfer {
 public:
  explicit CpuInfer(const CpuTeamOptions& options);
  ~CpuInfer();

  const std::shared_ptr<CpuTeam>& team() const {
    maker_.check("CPUInfer");
    return shared_->team;
  }

  // task() on the team's thread, in order. What it raises is raised by a later sync of this object, not of
  // another one that shares the team.
  void submit(nb::callable task) const;
  void sync(uint64_t allow_pending) const;
  // The same in the order of a stream, captured ones too. What a task raises is raised by a later call for
  // the same stream, or by sync(). A stream's callback neither calls Python nor gives a Python object back.
  void submit_on_stream(uintptr_t stream, nb::callable task) const;
  void sync_on_stream(uintptr_t stream, uint64_t allow_pending) const;

  // What tasks of this object share; lives as long as one of them may run.
  struct Shared {
    std::shared_ptr<CpuTeam> team;

    void keep(std::optional<uintptr_t> stream, std::exception_ptr thrown) noexcept;
    void rethrow(std::optional<uintptr_t> stream);  // of that stream; without one, of all
   private:
    struct Failure {
      std::optional<uintptr_t> stream;  // none: submitted by submit()
      std::exception_ptr thrown;
    };
    std::mutex mutex_;
    std::vector<Failure> failures_;  // the first of each stream
  };

 private:
  Maker maker_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace kt::python
