// GGUF blocks of types whose numbers are looked up in a grid: one block of 256 columns to plain codes and back. Not for
// others than gguf_blocks.cc.
#pragma once
#include <cstdint>
#include <string_view>

#include "formats/gguf_blocks.h"

namespace kt::inline formats {

// Plain codes of a block's 256 columns, the integer scales of its spans and their f16 factor.
template <class Byte>
struct GridBlock {
  Byte* codes;
  Byte* scales;
  Byte* super;
};

void decode_grid_block(GgufType type, const uint8_t* block, const GridBlock<uint8_t>& to);
// Ors into zeroed bytes. An Error naming `name` where codes are none of the grid, or signs, eighths or scales none that
// the type stores.
void encode_grid_block(GgufType type, const GridBlock<const uint8_t>& from, uint8_t* block,
                       std::string_view name);

}  // namespace kt::inline formats
