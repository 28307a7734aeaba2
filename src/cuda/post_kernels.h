// Kernels of CudaDriver::post() and fetch(), in the assembly language that the driver compiles for whatever
// GPU it finds: no build needs a toolkit, none is tied to a generation.
#pragma once

namespace kt::inline cuda {

extern const char kPostKernels[];

}  // namespace kt::inline cuda
