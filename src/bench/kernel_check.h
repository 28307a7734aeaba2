// Does this CPU compute what the portable kernels compute? A few small multiplications of one format, on the
// routes that one row and many rows take.
#pragma once
#include <string>

#include "kernels/plan.h"

namespace kt::inline bench {

struct KernelCheck {
  std::string route;                               // "few", "many_s8", ...
  int rows = 0;                                    // of activations
  double difference = 0;                           // the largest |ours - portable| / sum |a * w|
  double bound = 0;                                // what rounding may make of it
  bool ok() const { return difference <= bound; }  // false for NaN
};

// For `rows` rows of activations against a 40 x 512 matrix of the format.
KernelCheck check_kernel(const Kernels& kernels, const Kernels& portable, const Format& format, int rows);

}  // namespace kt::inline bench
