// Weights of grids that nobody calibrated, for measurements and tests: nothing rounds to these formats.
#pragma once
#include <cstdint>
#include <span>

#include "base/function_ref.h"
#include "formats/format.h"

namespace kt::inline formats {

// Any entries of the grid with any signs, as 64 bits at a time of `random` have it.
void fill_grid_codes(Code code, std::span<uint8_t> codes, FunctionRef<uint64_t()> random);

}  // namespace kt::inline formats
