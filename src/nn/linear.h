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
#include "nn/row_reader.h"

namespace kt::inline nn {

struct LinearOptions {
  Precision precision = Precision::kDefault;
  const Kernels* kernels = nullptr;  // null: best_kernels()
  HugePages huge = HugePages::kAdvise;
  bool sizes_only = false;  // no memory and nothing read: for plans, which ask bytes and cannot run it
};

// Packed weights [n, k], their rows spread over the pool's nodes. Move-only.
class Linear {
 public:
  Linear() = default;
  // Errors name `name`. The bias is [n] or empty. Packing runs on the calling thread.
  Linear(const Pool& pool, const MatrixView& weights, std::span<const float> bias, LinearOptions options,
         std::string_view name);
  // Reads and packs on all workers of the pool; bitwise the same.
  Linear(Pool& pool, const RowReader& weights, std::span<const float> bias, LinearOptions options,
         std::string_view name);

  int n() const { return static_cast<int>(n_); }
  int k() const { return static_cast<int>(k_); }
  bool empty() const { return n_ == 0; }
  const Format& format() const { return format_; }
  size_t packed_bytes() const;
  size_t packed_bytes(int node) const;
  size_t bias_bytes() const { return bias_.size() * sizeof(float); }
  double stored_bytes() const;  // in the checkpoint's own bytes

  // Its row blocks in order, a run for each node that has some; what all runs are packed as, and the bias. For those
  // who copy it elsewhere.
  struct Run {
    int64_t first_block = 0;
    std::span<const std::byte> bytes;
  };
  std::vector<Run> runs() const;
  Packing packing() const;  // of the whole matrix
  std::span<const float> bias() const { return bias_; }

 private:
  friend class LinearWork;
  struct Slice {
    int64_t first_block = 0;  // rows / 16
    Packing packing;          // of this node's rows
    Buffer memory;
  };
  void lay_out(const Pool& pool, std::string_view name);
  void pack(int64_t first, const MatrixView& piece);

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
  // While workers wait for the next task they fetch what `then` says.
  void run(int m, std::span<const LinearCall> calls, const Forecast* then = nullptr);
  // After run(), while its calls are there: the weights that this worker read first, and will again in a step of the
  // same linears; nothing where rows are many, and weights little of the work.
  Ahead first_read(const Worker& worker) const;
  size_t bytes() const;

  // What a step needs of that memory; only which calls have the same x matters of their pointers.
  struct Bytes {
    size_t rows = 0;     // quantised rows
    size_t workers = 0;  // of all of them
  };
  Bytes bytes_for(int m, std::span<const LinearCall> calls) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kt::inline nn
