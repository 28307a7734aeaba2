// From experts on disk to experts that run: one layer, all workers.
#pragma once
#include "base/pool.h"
#include "nn/experts.h"
#include "weights/experts.h"

namespace kt {

// Shape and formats of a layer as the source stores it; the rest of the options are the caller's.
ExpertsShape experts_shape(const ExpertSource& source);
ExpertsOptions experts_options(const ExpertSource& source, int layer, ExpertsOptions rest = {});

// Reads, checks and packs every expert of the layer, experts in parallel over the pool's workers. Each worker
// holds one expert in plain order while it packs it. The first error stops all and is thrown; the layer is
// then part loaded.
void load_experts(const ExpertSource& source, int layer, Pool& pool, Experts& into);

}  // namespace kt
