// Heads of the gated delta rule, and how far a short convolution reaches: values, for specs too.
#pragma once
#include <cstdint>

namespace kt::inline nn {

inline constexpr int kMostTaps = 16;  // tokens of a short convolution

// Each head of values has a matrix [key_dim, value_dim].
struct DeltaShape {
  int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  // Value head h goes with key head h / (value_heads / key_heads), or h % key_heads where they are in turns.
  bool in_turns = false;
  bool operator==(const DeltaShape&) const = default;

  int64_t width() const {  // of q | k | v, heads side by side
    return 2 * int64_t{key_heads} * key_dim + int64_t{value_heads} * value_dim;
  }
  int key_of(int value_head) const {
    return in_turns ? value_head % key_heads : value_head / (value_heads / key_heads);
  }
};

}  // namespace kt::inline nn
