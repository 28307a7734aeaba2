// Matrices in another format than the one on disk, rounded as they are read: for trying a format without
// converting.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "formats/format.h"
#include "weights/compressed.h"
#include "weights/experts.h"

namespace kt {

// Every matrix of `source` rounded to nearest into `format` (formats/matrix.h, quantise). `source` must
// outlive it.
std::unique_ptr<ExpertSource> requantised(const ExpertSource& source, const Format& format);

// The same of one matrix. Error(kInput) with its name if its shape cannot have the format.
std::unique_ptr<StoredMatrix> requantised(std::unique_ptr<StoredMatrix> matrix, const Format& format);

// The same as packed weights are rounded (weights/compressed.h): what a checkpoint written and read back has.
std::unique_ptr<StoredMatrix> requantised(std::unique_ptr<StoredMatrix> matrix, const PackedSpec& spec);

// What is done to a matrix as it is read, by the name of its module: gives it back or another in its place.
using MatrixRounding =
    std::function<std::unique_ptr<StoredMatrix>(std::unique_ptr<StoredMatrix>, std::string_view module)>;
struct ModelRounding {
  MatrixRounding experts, linears;  // null: as stored
};

// `source` must outlive it.
std::unique_ptr<ExpertSource> requantised(const ExpertSource& source, MatrixRounding rounding,
                                          std::string dialect);

}  // namespace kt
