// Integer arithmetic on sizes that came from files and callers: an overflow is an Error that names the
// quantity, never a small number.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.h"

namespace kt::inline base {

// a * b and a + b, or Error(kInput) "<name>: 3 * 99 overflows". One overload each for sizes and for signed
// counts; mixed signs do not compile silently into one of them unless an argument says which.
inline size_t checked_mul(size_t a, size_t b, std::string_view name) {
  size_t out;
  if (__builtin_mul_overflow(a, b, &out)) [[unlikely]]
    fail("{}: {} * {} overflows 64 bits", name, a, b);
  return out;
}

inline int64_t checked_mul(int64_t a, int64_t b, std::string_view name) {
  int64_t out;
  if (__builtin_mul_overflow(a, b, &out)) [[unlikely]]
    fail("{}: {} * {} overflows 64 bits", name, a, b);
  return out;
}

inline size_t checked_add(size_t a, size_t b, std::string_view name) {
  size_t out;
  if (__builtin_add_overflow(a, b, &out)) [[unlikely]]
    fail("{}: {} + {} overflows 64 bits", name, a, b);
  return out;
}

inline int64_t checked_add(int64_t a, int64_t b, std::string_view name) {
  int64_t out;
  if (__builtin_add_overflow(a, b, &out)) [[unlikely]]
    fail("{}: {} + {} overflows 64 bits", name, a, b);
  return out;
}

// The least integer >= a / b. Requires a >= 0 and b > 0; cannot overflow.
template <std::integral T>
constexpr T ceil_div(T a, std::type_identity_t<T> b) {
  return static_cast<T>(a / b + (a % b != 0));
}

// The least multiple of `step` >= a. Requires a >= 0, step > 0 and a result that fits (see checked_round_up).
template <std::integral T>
constexpr T round_up(T a, std::type_identity_t<T> step) {
  return static_cast<T>(ceil_div(a, step) * step);
}

inline size_t checked_round_up(size_t a, size_t step, std::string_view name) {
  return checked_mul(ceil_div(a, step), step, name);
}

}  // namespace kt::inline base
