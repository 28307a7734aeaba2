// A matrix with an adapter's factors added to it: W + scale * B A, where W is stored in any format. In f32, one row at
// a time; who writes it rounds once.
#pragma once
#include <memory>

#include "weights/experts.h"
#include "weights/lora/lora_file.h"

namespace kt::inline weights {

// values(first, count) are f32(w) + scale * sum over r of b[r] * a[r], the sum in the order of r. The adapter's file
// must outlive it. Holds A as f32.
std::unique_ptr<StoredMatrix> adapted(std::unique_ptr<StoredMatrix> base, const FactorViews& factors);

}  // namespace kt::inline weights
