// What rounding weights costs, added up in a fixed order so that reports do not depend on threads.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace kt::inline weights {

struct WeightError {
  double signal = 0;   // sum of w^2
  double noise = 0;    // sum of (stored - w)^2
  double largest = 0;  // max |stored - w|
  int64_t weights = 0;

  void add(const WeightError& other) {
    signal += other.signal;
    noise += other.noise;
    largest = std::max(largest, other.largest);
    weights += other.weights;
  }
  // Root of noise over signal; 0 for all zeros.
  double relative() const { return signal > 0 ? std::sqrt(noise / signal) : 0; }
};

}  // namespace kt::inline weights
