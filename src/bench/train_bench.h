// Training calls of one MoE layer against the machine's limit: forwards that keep, forwards with low-rank factors and
// backwards take turns over the layers of a MoeModel, so that no cache holds the weights, the factors or the rows that
// a call reads. The limit of each, backwards included, is that of a plain forward: the stored bytes of the experts that
// got a token, or 6 hidden * inter operations for each pair of token and expert. What is computed again is nobody's
// limit.
#pragma once
#include <optional>

#include "bench/moe_bench.h"

namespace kt::inline bench {

struct TrainSetup {
  int tokens = 1;  // of a call
  int rank = 8;    // of the factors of gate|up, which share one A, and of down
  Routing routing = Routing::kUniform;
  bool recompute = false;  // also backwards of forwards that kept nothing
};

// Each of one run, in the arithmetic of training: bf16 where the CPU multiplies that, else f32.
struct TrainFigures {
  LimitFigures forward;                     // plain
  LimitFigures keeping;                     // keeps what its backward needs
  LimitFigures lora;                        // with factors
  LimitFigures training;                    // with factors, and keeps: the forward of `backward`
  LimitFigures backward;                    // gradients of input, routing weights and all factors
  std::optional<LimitFigures> recomputing;  // the same, of a forward that kept nothing
  double experts_hit = 0;                   // mean
  // Bytes. Of values and gradients of the factors of a layer; of what one forward keeps; of what calls of this size
  // take of the workspace, which layers share: as held at the end (kept rows not in use apart) and as planned.
  size_t lora_bytes = 0, kept_bytes = 0, workspace_bytes = 0, planned_bytes = 0;
  size_t rotating_bytes = 0;  // of factors and kept rows that the measuring itself holds, to take turns with
  size_t resident_bytes = 0;  // of this process, while it holds all of these
};

// The product that training multiplies with, whatever the weights are.
Product training_product(const Kernels& kernels, Precision precision);

// Error(kMemory) where the factors of one layer do not fit: to be asked before there are layers.
void check_factors(const ExpertsShape& shape, int rank);
// Error(kMemory) where factors and kept rows do not fit beside the model.
TrainFigures measure_training(const MoeModel& model, Reader& reader, const TrainSetup& setup,
                              const MeasureFor& time);

}  // namespace kt::inline bench
