// Matrices in another format than the one on disk, rounded as they are read: for trying a format without
// converting.
#pragma once
#include <memory>

#include "formats/format.h"
#include "weights/experts.h"

namespace kt {

// Every matrix of `source` rounded to nearest into `format` (formats/matrix.h, quantise). `source` must
// outlive it.
std::unique_ptr<ExpertSource> requantised(const ExpertSource& source, const Format& format);

// The same of one matrix. Error(kInput) with its name if its shape cannot have the format.
std::unique_ptr<StoredMatrix> requantised(std::unique_ptr<StoredMatrix> matrix, const Format& format);

}  // namespace kt
