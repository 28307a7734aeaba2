// From experts on disk to experts that run: one layer, all workers.
#pragma once
#include <span>

#include "base/pool.h"
#include "nn/experts.h"
#include "weights/experts.h"

namespace kt {

// Shape and formats of a layer as the source stores its first expert; the rest of the options are the
// caller's. Gate, up and down may differ, experts may not: load_experts() names the first one that does.
ExpertsShape experts_shape(const ExpertSource& source);
ExpertsOptions experts_options(const ExpertSource& source, int layer, ExpertsOptions rest = {});

// A stored matrix for packing in pieces; it must outlive the reader.
RowReader reader_of(const StoredMatrix& stored);

// Memory that one worker takes while it reads and packs these; matrices of one expert, or a single one.
size_t loading_bytes(std::span<const StoredMatrix* const> together);

// Reads, checks and packs every expert of the layer on all of the pool's workers. Each worker
// holds a piece of an expert in plain order while it packs it. The first error stops all and is thrown; the
// layer is then part loaded. With a map, expert i of `into` is the source's map[i], which may be there more
// than once: one number in [0, source.experts()) for each expert of `into`.
void load_experts(const ExpertSource& source, int layer, Pool& pool, Experts& into,
                  std::span<const int64_t> map = {});

}  // namespace kt
