// Matrices in another format than the one on disk, rounded as they are read: for trying a format without
// converting.
#pragma once
#include <memory>
#include <optional>

#include "formats/format.h"
#include "weights/experts.h"

namespace kt {

// Every matrix of `source` that has another format rounded to nearest into `format` (formats/matrix.h,
// quantise), which names the dialect too. `source` must outlive it.
std::unique_ptr<ExpertSource> requantised(const ExpertSource& source, const Format& format);

// The same with formats of their own; what is absent, and what has the format already, is as stored. The
// dialect is the source's.
struct RoundedFormats {
  std::optional<Format> gate_up = {}, down = {};
  bool through_bf16 = false;  // values become bf16 first, as the converter's are
};
std::unique_ptr<ExpertSource> requantised(const ExpertSource& source, const RoundedFormats& formats);

// The same of one matrix. Error(kInput) with its name if its shape cannot have the format.
std::unique_ptr<StoredMatrix> requantised(std::unique_ptr<StoredMatrix> matrix, const Format& format);

}  // namespace kt
