// One expert from its source into the arrays of kt weights: the work of one piece of a conversion.
#pragma once
#include <cstddef>
#include <cstdint>

#include "weights/experts.h"
#include "weights/kt/kt_arrays.h"
#include "weights/plans/conversion.h"

namespace kt::inline weights {

struct KtExpertJob {
  const ExpertSource* source = nullptr;
  KtModel model;
  Rounding rounding = Rounding::kEstablished;
  bool report = false;
  int layer = 0, expert = 0;
  size_t first_tensor = 0;  // of the expert's arrays in its shard, in the order of kt_expert_arrays()
};

// Anonymous memory kt_write_expert() needs.
uint64_t kt_expert_scratch(const KtExpertJob& job);

// Reads blocks of rows, rounds them to bf16 where they are anything else, quantises and writes. With `report`
// also runs the expert, SwiGLU in f32, on eight fixed random inputs of length 1, with the original and with
// the stored weights. Error if a matrix has another shape than the model says.
void kt_write_expert(const KtExpertJob& job, ShardOutput& out, Scratch& scratch, PieceReport& report);

}  // namespace kt::inline weights
