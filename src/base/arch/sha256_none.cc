#include "base/sha256_blocks.h"

namespace kt::inline base {

void sha256_instructions(uint32_t* state, const std::byte* blocks, size_t count) noexcept {
  sha256_portable(state, blocks, count);
}

}  // namespace kt::inline base
