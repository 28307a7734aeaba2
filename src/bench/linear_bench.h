// One dense linear layer against the machine's limit: copies take turns, so that no cache of the CPU holds
// the next one; the measuring is in limit_bench.h.
#pragma once
#include <memory>
#include <vector>

#include "bench/limit_bench.h"
#include "nn/linear.h"

namespace kt::inline bench {

struct LinearSetup {
  std::shared_ptr<Pool> pool;
  const Kernels* kernels = nullptr;
  int n = 0, k = 0;  // y[tokens, n] = x[tokens, k] W^T
  int copies = 0;    // 0: enough that no cache holds them, as far as memory goes
  Precision precision = Precision::kDefault;
};

// Copies of one random matrix, packed and ready.
class LinearBench {
 public:
  // Error(kMemory) with the bytes needed and available.
  LinearBench(const LinearSetup& setup, const Format& format);

  int copies() const { return static_cast<int>(linears_.size()); }
  size_t bytes() const { return linears_.front().packed_bytes() * linears_.size(); }
  double packed_bytes_ratio() const;  // packed over stored

  // Bytes are those stored in a checkpoint, operations 2 n k for each token.
  LimitFigures measure(Reader& reader, int tokens, const MeasureFor& time) const;

 private:
  LinearSetup setup_;
  Format format_;
  std::vector<Linear> linears_;
};

}  // namespace kt::inline bench
