// Tasks of CPUInfer in the order of a CUDA stream.
#pragma once
#include <cstdint>
#include <memory>

#include "bindings/cpu_infer.h"

namespace kt::python {

// Puts a host function into the stream: it gives `task` to the team, or, where that is none, makes the stream
// wait until at most `allow_pending` tasks are left. Needs the GIL.
void put_in_stream(const std::shared_ptr<CpuInfer::Shared>& shared, uintptr_t stream, nb::object task,
                   uint64_t allow_pending);

// Gives back what streams and the team are done with. By calls of CPUInfer, with the GIL: a callback of the
// driver must not wait for it, and a thread of ours need not.
void collect_stream_tasks();

}  // namespace kt::python
