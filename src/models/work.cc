#include "models/work.h"

namespace kt {
namespace {

double seconds(double amount, double rate) { return rate > 0 ? amount / rate : 0; }

}  // namespace

Work& Work::operator+=(const Work& other) {
  bytes += other.bytes;
  integer_operations += other.integer_operations;
  float_operations += other.float_operations;
  return *this;
}

Work& Work::operator-=(const Work& other) {
  bytes -= other.bytes;
  integer_operations -= other.integer_operations;
  float_operations -= other.float_operations;
  return *this;
}

Limit limit_of(const Work& work, const Rates& rates) {
  const double reading = seconds(work.bytes, rates.read_bytes),
               multiplying = seconds(work.integer_operations, rates.integer_operations) +
                             seconds(work.float_operations, rates.float_operations);
  return multiplying > reading ? Limit{multiplying, "multiply"} : Limit{reading, "memory"};
}

}  // namespace kt
