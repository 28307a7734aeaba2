// From experts on disk to experts that run: what a source has, in the words of nn/.
#pragma once
#include <span>

#include "nn/fill_experts.h"
#include "weights/experts.h"

namespace kt::inline models {

// Shape and formats of a layer as the source stores its first expert; the rest of the options are the
// caller's. Gate, up and down may differ, experts may not: load_experts() names the first one that does.
ExpertsShape experts_shape(const ExpertSource& source);
ExpertsOptions experts_options(const ExpertSource& source, int layer, ExpertsOptions rest = {});

// A stored matrix for packing in pieces; it must outlive the reader.
RowReader reader_of(const StoredMatrix& stored);

// Memory that one worker takes while it reads and packs these; matrices of one expert, or a single one.
size_t loading_bytes(std::span<const StoredMatrix* const> together);

// How to fill a layer with the source's experts (nn/fill_experts.h), on so many threads. The source must outlive
// it.
ExpertsFill fill_of(const ExpertSource& source, int layer, int threads);

}  // namespace kt::inline models
