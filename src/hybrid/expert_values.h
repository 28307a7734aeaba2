// Values in memory as a source of experts: rounded while they are read, a few rows at a time.
#pragma once
#include <memory>

#include "hybrid/expert_layer.h"
#include "weights/experts.h"

namespace kt::inline hybrid {

// One layer, `layer`, whose experts are `values` in these formats. The values must outlive it. Reading names
// expert, projection, row and column of a value that is not finite or that the format cannot hold.
std::unique_ptr<ExpertSource> source_of_values(const ExpertValues& values, const ExpertsShape& shape,
                                               const MethodFormats& formats, int layer);

// One matrix [n, k] of numbers in memory, rounded to `format` while it is read. They must outlive it.
std::unique_ptr<StoredMatrix> matrix_of_values(std::string name, const Format& format, int64_t n, int64_t k,
                                               const void* values, Real type);

// Writes the experts of the source's one layer as kt weights, `_layer_<layer>/_numa_<part>/*.kt` under
// `folder`, rounded from its values() on all workers; down is cut into `parts`. The layer appears whole or
// not at all and replaces an older one. Error if the folder holds kt weights of another kind.
struct KtLayer {
  std::string folder;
  int bits = 4, parts = 1;
};
void save_kt_layer(const ExpertSource& source, const KtLayer& to, Pool& pool);

}  // namespace kt::inline hybrid
