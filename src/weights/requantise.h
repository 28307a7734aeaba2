// Matrices in another format than the one on disk, rounded as they are read: for trying a format without
// converting.
#pragma once
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/format.h"
#include "weights/dialects/compressed.h"
#include "weights/experts.h"

namespace kt::inline weights {

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

// The same with formats layer by layer, each of gate, up and down; those behind the last are as stored. `dialect` is
// what it calls itself.
using ExpertFormats = std::vector<std::array<std::optional<Format>, 3>>;
std::unique_ptr<ExpertSource> requantised(const ExpertSource& source, ExpertFormats formats,
                                          const std::string& dialect);

// Formats that other matrices are rounded to, by the names of their modules in a model's spec; "lm_head" of a tied head
// too.
using LinearFormats = std::map<std::string, Format, std::less<>>;

// The same of one matrix. Error(kInput) with its name if its shape cannot have the format.
std::unique_ptr<StoredMatrix> requantised(std::unique_ptr<StoredMatrix> matrix, const Format& format);

// The same as packed weights are rounded (weights/dialects/compressed.h): what a checkpoint written and read back has.
std::unique_ptr<StoredMatrix> requantised(std::unique_ptr<StoredMatrix> matrix, const PackedSpec& spec);

// What is done to a matrix as it is read, by the name of its module: gives it back or another in its place.
using MatrixRounding =
    std::function<std::unique_ptr<StoredMatrix>(std::unique_ptr<StoredMatrix>, std::string_view module)>;
struct ModelRounding {
  MatrixRounding experts, linears;  // null: as stored
};

// `source` must outlive it.
std::unique_ptr<ExpertSource> requantised(const ExpertSource& source, MatrixRounding rounding,
                                          const std::string& dialect);

}  // namespace kt::inline weights
