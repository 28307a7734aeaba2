#include "formats/random_grid.h"

#include "base/error.h"
#include "formats/grids.h"

namespace kt::inline formats {

void fill_grid_codes(Code code, std::span<uint8_t> codes, FunctionRef<uint64_t()> random) {
  const Grid grid = grid_of(code);
  const auto numbers = static_cast<size_t>(grid.numbers);
  KT_CHECK(codes.size() % numbers == 0, "{} codes of a grid of {}", codes.size(), numbers);
  for (size_t i = 0; i < codes.size(); i += numbers) {
    const uint64_t bits = random();
    look_up(code, static_cast<int>(bits & ((1u << grid_index_bits(code)) - 1)), codes.data() + i);
    for (size_t j = 0; grid.signs && j < numbers; ++j)
      if (bits >> (32 + j) & 1) codes[i + j] = negated_code(codes[i + j]);
  }
}

}  // namespace kt::inline formats
