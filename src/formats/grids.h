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

// Grids of 256 entries as tables that registers hold: the levels of an entry, which count its grid's codes upwards,
// side by side in 16 bits, and what a level and a sign stand for.
//
// Words: column 0 in the low byte, 1 in the high one, 2 above 0 and so on, so that a shift brings two to the beginnings
// of their bytes. What a byte stands for: its level in the low bits, its sign at `sign` of step `step`.
struct GridWords {
  int numbers;
  constexpr int place(int column) const { return column % 2 * 8 + column / 2 * (numbers == 8 ? 2 : 4); }
  constexpr int sign(int step) const { return numbers == 8 ? 2 + step % 2 : 3; }
};
// Bytes: one column after the other. What six bits stand for: the level from bit `level` of step `step` on, the sign
// at a bit of its own for each of four steps.
struct GridBytes {
  int numbers;
  constexpr int bits() const { return numbers == 8 ? 2 : 3; }
  constexpr int place(int column) const { return column * bits(); }
  constexpr int level(int step) const { return numbers == 8 ? 4 : step % 4 < 3 ? 3 : 0; }
  constexpr int sign(int step) const { return step % 4; }
};
struct GridTables {
  alignas(64) uint16_t words[256];
  alignas(64) uint8_t halves[2][256];  // low and high bytes, as GridBytes has them
  alignas(64) uint8_t by_byte[4][64];  // codes by level and sign, of steps 0 to 3
  alignas(16) uint8_t by_word[2][16];  // of steps 0 and 1
};
// Null for the others.
const GridTables* grid_tables(Code code);

// The codes of an index of that many bits, `numbers` of them.
void look_up(Code code, int index, uint8_t* codes);
// The index that gives these codes but for their signs; -1 where the grid has none.
int grid_index(Code code, const uint8_t* codes);

}  // namespace kt::inline formats
