// Any bytes as a GGUF block whose numbers are looked up in a grid (the first byte says of which type): codes of the
// grid, and the same block again when it is made of them.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "formats/gguf_blocks.h"
#include "formats/grids.h"

namespace {

constexpr kt::GgufType kTypes[] = {kt::GgufType::kIQ2_XXS, kt::GgufType::kIQ2_XS, kt::GgufType::kIQ2_S,
                                   kt::GgufType::kIQ3_XXS, kt::GgufType::kIQ3_S,  kt::GgufType::kIQ1_S,
                                   kt::GgufType::kIQ1_M};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const kt::GgufType type = kTypes[data[0] % std::size(kTypes)];
  std::vector<std::byte> blocks(static_cast<size_t>(kt::gguf_block_bytes(type)));
  std::memcpy(blocks.data(), data + 1, std::min(size - 1, blocks.size()));
  const kt::Matrix w = kt::matrix_from_gguf(type, blocks, 1, 256, "input");
  const int numbers = kt::grid_of(w.format.code).numbers;
  for (int i = 0; i < 256; i += numbers)
    if (kt::grid_index(w.format.code, w.codes.data() + i) < 0) std::abort();
  if (kt::gguf_from_matrix(type, w.view(), "input") != blocks) std::abort();  // every bit has one meaning
  // Codes that come from nowhere: an Error, or the same codes again.
  kt::Matrix any = w;
  for (size_t i = 0; i + 1 < size && i < any.codes.size(); ++i) any.codes[i] = data[i + 1];
  try {
    const std::vector<std::byte> made = kt::gguf_from_matrix(type, any.view(), "input");
    if (kt::matrix_from_gguf(type, made, 1, 256, "input").codes != any.codes) std::abort();
  } catch (const kt::Error&) {
  }
  return 0;
}
