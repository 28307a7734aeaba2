// Two sets of weights side by side: checkpoints in any files, or folders of .kt files.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kt::inline weights {

struct TensorDifference {
  enum class Kind : uint8_t { kOnlyA, kOnlyB, kShape, kType, kValues };
  Kind kind = Kind::kValues;
  std::string name;            // of the tensor; the path below the folder for .kt files
  std::string a = {}, b = {};  // "BF16 [2048, 7168]"; "" where it is missing
  int64_t elements = 0;        // compared; bytes where the type is not a float
  int64_t differing = 0;
  bool floats = false;  // whether values were compared; bytes otherwise, whose differences have no size
  double largest = 0;   // difference of two floats; infinite where only one is a number
};

struct Comparison {
  int64_t tensors_a = 0, tensors_b = 0;
  int64_t equal = 0;            // in both, same shape and type, no element beyond the tolerance
  double largest = 0;           // over all floats compared, also those within the tolerance
  uint64_t bytes_compared = 0;  // of both
  std::vector<TensorDifference> differences = {};  // by name
  bool same() const { return differences.empty(); }
};

// Floats differ when |a - b| > tolerance, or when one is NaN and the other is not; everything else differs
// byte by byte. Floats of unlike types and like shapes are compared by value as well and reported as kType.
// `threads` 0: all cores. Errors: either path unreadable, a checkpoint against .kt files, a negative or NaN
// tolerance.
Comparison compare_weights(const std::string& a, const std::string& b, double tolerance, int threads = 0);

}  // namespace kt::inline weights
