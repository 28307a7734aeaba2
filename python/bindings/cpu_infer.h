// CPUInfer of Python: a share in a CpuTeam.
#pragma once
#include <exception>
#include <memory>
#include <mutex>

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

  // task() on the team's thread, in order; what it raises is raised by a later sync.
  void submit(nb::callable task) const;
  void sync(uint64_t allow_pending) const;
  // The same in the order of a stream, captured ones too.
  void submit_on_stream(uintptr_t stream, nb::callable task) const;
  void sync_on_stream(uintptr_t stream, uint64_t allow_pending) const;

 private:
  // Lives as long as a stream may come back to it.
  struct Shared {
    std::shared_ptr<CpuTeam> team;
    std::mutex mutex;
    std::exception_ptr error;  // of a wait on a stream, for the next call

    void keep(std::exception_ptr thrown) noexcept;
    void rethrow();
  };
  struct StreamCall;

  void call_on_stream(uintptr_t stream, std::function<void(Shared&)> work) const;

  Maker maker_;
  std::shared_ptr<Shared> shared_;
};

}  // namespace kt::python
