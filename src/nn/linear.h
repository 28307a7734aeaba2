// Dense linear layers on the CPU: y = x W^T + b, in any format, several at a time over the same rows.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/memory.h"
#include "base/pool.h"
#include "formats/matrix.h"
#include "kernels/plan.h"

namespace kt {

struct LinearOptions {
  Precision precision = Precision::kDefault;
  const Kernels* kernels = nullptr;  // null: kernels()
  HugePages huge = HugePages::kAdvise;
};

// Packed weights [n, k], their rows spread over the pool's nodes. Packing runs on the calling thread.
// Move-only.
class Linear {
 public:
  Linear() = default;
  // Errors name `name`. The bias is [n] or empty.
  Linear(const Pool& pool, const MatrixView& weights, std::span<const float> bias, LinearOptions options,
         std::string_view name);

  int n() const { return static_cast<int>(n_); }
  int k() const { return static_cast<int>(k_); }
  bool empty() const { return n_ == 0; }
  size_t packed_bytes() const;
  double stored_bytes() const;  // in the checkpoint's own bytes

 private:
  friend class LinearWork;
  struct Slice {
    int64_t first_block = 0;  // rows / 16
    Packing packing;          // of this node's rows
    Buffer memory;
  };
  int64_t n_ = 0, k_ = 0;
  Format format_;
  LinearOptions options_;
  std::vector<Slice> slices_;  // one for each node; may be empty
  std::vector<float> bias_;    // [n] or empty
};

// y[m, n] = x[m, k] W^T + bias. x and y may not overlap. Strides are in elements.
struct LinearCall {
  const Linear* linear = nullptr;
  const float* x = nullptr;
  int64_t x_stride = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
};

// Runs linears in one parallel step; calls with the same x share its quantised rows. Holds the memory that
// takes, grown to the largest step seen. One step at a time. Results are bitwise the same for any number of
// threads.
class LinearWork {
 public:
  explicit LinearWork(std::shared_ptr<Pool> pool);
  ~LinearWork();
  void run(int m, std::span<const LinearCall> calls);
  size_t bytes() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kt
