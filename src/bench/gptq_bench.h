// The parts of calibrated rounding of one expert, every worker on an expert of its own as a conversion does
// it, against what the machine multiplies at best; and what they add up to for a layer.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "bench/limit_bench.h"
#include "nn/gptq.h"

namespace kt::inline bench {

struct GptqShape {
  int hidden = 0, inter = 0, experts = 0, top_k = 0;
  int64_t tokens = 0;                                                            // of the calibration text
  double rows() const { return static_cast<double>(tokens) * top_k / experts; }  // a mean expert's
};

// What is measured.
struct GptqPart {
  const char* name;
  const char* floor;  // "moments" or "rounding": which of a layer's two floors it belongs to
  double times = 1;   // that an expert of the layer needs the measured call
  LimitFigures figures = {};
};

struct GptqSetup {
  std::shared_ptr<Pool> pool;
  const Kernels* kernels = nullptr;
  GptqShape shape;
  int64_t rows = 0;  // of one update of the moments
  Format format;
  double seconds = 1;  // for each part
};

// One worker's expert: inputs, weights, moments and factors, of random numbers.
class GptqBench {
 public:
  // Error(kMemory) with the bytes needed and available.
  explicit GptqBench(const GptqSetup& setup);
  ~GptqBench();
  std::vector<GptqPart> measure();

 private:
  struct Expert;
  GptqPart measure(GptqPart part, Product product, LimitCall call, FunctionRef<void(Expert&)> work);

  GptqSetup setup_;
  std::vector<std::unique_ptr<Expert>> experts_;  // one per worker
  std::unique_ptr<Reader> reader_;
};

// Of a whole layer, all workers on experts, in seconds.
struct GptqLayer {
  double moments = 0, rounding = 0;              // as measured
  double moments_floor = 0, rounding_floor = 0;  // operations over the peaks
};
GptqLayer layer_of(const GptqSetup& setup, const std::vector<GptqPart>& parts);

}  // namespace kt::inline bench
