// One MoE layer against the machine's limit: weights dealt so that no cache holds them; the measuring is in
// limit_bench.h.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "bench/limit_bench.h"
#include "bench/random_matrix.h"
#include "nn/experts.h"

namespace kt::inline bench {

enum class Routing { kUniform, kZipf };

struct MoeSetup {
  std::shared_ptr<Pool> pool;
  const Kernels* kernels = nullptr;
  ExpertsShape shape;
  int top_k = 0;
  int layers = 0;  // 0: enough that no cache holds them
  int max_tokens = 1;
  Precision precision = Precision::kDefault;
};

// Layers of random experts of one format, loaded and ready.
class MoeModel {
 public:
  // Error(kMemory) with the bytes needed and available. `layers` of the setup may be cut when it is 0.
  MoeModel(const MoeSetup& setup, const Format& format);

  const MoeSetup& setup() const { return setup_; }
  const Format& format() const { return format_; }
  int layers() const { return static_cast<int>(layers_.size()); }
  const Experts& layer(int index) const { return layers_[static_cast<size_t>(index)]; }
  double packed_bytes_ratio() const;  // packed over stored
  size_t bytes() const { return layers_.front().packed_bytes() * layers_.size(); }

 private:
  void fill();

  MoeSetup setup_;
  Format format_;
  std::vector<Experts> layers_;
};

// Which experts of which layer the tokens of one call go to.
struct MoeCall {
  int layer = 0;
  int experts_hit = 0;
  std::vector<int32_t> ids;  // [tokens, top_k], without repetition within a token
};

// The calls of a benchmark, to be repeated in this order. One token, uniform: a shuffled deck of all (layer,
// expert), dealt without replacement. Otherwise layers take turns and ids are drawn afresh.
std::vector<MoeCall> deal_calls(const ExpertsShape& shape, int top_k, int layers, int tokens,
                                Routing routing);

struct MoeFigures : LimitFigures {  // bytes as stored in a checkpoint
  double experts_hit = 0;           // mean
  std::string plan;                 // route of the mean expert
};

MoeFigures measure_moe(const MoeModel& model, Reader& reader, Routing routing, int tokens,
                       const MeasureFor& time);

}  // namespace kt::inline bench
