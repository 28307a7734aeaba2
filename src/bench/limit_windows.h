// The machine's limits in windows between pieces of work, with the same workers: what a machine can do changes from
// moment to moment, so that a limit measured once says little about work of another second.
#pragma once
#include <memory>
#include <vector>

#include "bench/measure.h"

namespace kt::inline bench {

class LimitWindows {
 public:
  LimitWindows(const std::shared_ptr<Pool>& pool, const Kernels& kernels);

  // A few milliseconds of reading and multiplying, unless the last look is less than kLookAfter ago: work that fits
  // a cache is not to find it emptied after every step.
  void look();
  void look_now();
  // Medians of all looks since the last call; there has been one.
  Rates take();

  static constexpr double kLookAfter = 50e-3;  // seconds

 private:
  Reader reader_;
  std::vector<Multiplier> multipliers_;  // of integer codes, of float codes
  size_t window_bytes_;
  double looked_at_ = 0;
  std::vector<double> reads_, integers_, floats_;
};

}  // namespace kt::inline bench
