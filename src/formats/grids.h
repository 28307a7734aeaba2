// The tables of codes that are looked up several numbers at a time (format.h: Grid). A code is that of a MatrixView,
// kGridBias above the number; what has signs of its own stands here with all of them positive.
#pragma once
#include <cstdint>

#include "formats/format.h"

namespace kt::inline formats {

// Entries of a grid: of kIq1 those without the eighth, which is the index's highest bit.
constexpr int grid_entries(Code code) { return 256 << (code == Code::kIq1 ? 3 : grid_of(code).high_bits); }
// Bits of an index, all of them.
constexpr int grid_index_bits(Code code) { return 8 + grid_of(code).high_bits; }

constexpr uint8_t negated_code(uint8_t code) { return static_cast<uint8_t>(2 * kGridBias - code); }

// [entries, numbers] codes; of kIq1 8 * -1, 0 or 1 above the bias, to which one is added or not by the index.
const uint8_t* grid_codes(Code code);
// The same as [numbers, 256], of grids without high bits; null for the others.
const uint8_t* grid_columns(Code code);

// The codes of an index of that many bits, `numbers` of them.
void look_up(Code code, int index, uint8_t* codes);
// The index that gives these codes but for their signs; -1 where the grid has none.
int grid_index(Code code, const uint8_t* codes);

}  // namespace kt::inline formats
