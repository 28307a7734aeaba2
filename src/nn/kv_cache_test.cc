#include "nn/kv_cache.h"

#include <gtest/gtest.h>

#include <cstring>

namespace kt::inline nn {
namespace {

// Layers of different kinds in one model: keys of one head size, none, keys of another.
TEST(KvCache, PlanesOfDifferentShapes) {
  const KvShape small{.heads = 2, .d = 32, .dv = 32, .type = KvType::kF32},
      latent{.heads = 1, .d = 96, .dv = 64, .shared = true};
  KvCache cache({.planes = {small, latent, small}, .states = {}}, 3);
  EXPECT_EQ(cache.bytes(), 3 * (2 * small.page_bytes() + latent.page_bytes()));
  std::byte fill{1};
  for (int plane = 0; plane < 3; ++plane)  // every block has bytes of its own
    for (int page = 0; page < 3; ++page)
      for (int head = 0; head < cache.shape(plane).heads; ++head) {
        const KvShape& shape = cache.shape(plane);
        std::memset(cache.keys(plane, page, head), static_cast<int>(fill), shape.block_bytes(shape.d_pad()));
        if (!shape.shared)
          std::memset(cache.values(plane, page, head), static_cast<int>(fill) + 100,
                      shape.block_bytes(shape.dv_pad()));
        fill = static_cast<std::byte>(static_cast<int>(fill) + 1);
      }
  fill = std::byte{1};
  for (int plane = 0; plane < 3; ++plane)
    for (int page = 0; page < 3; ++page)
      for (int head = 0; head < cache.shape(plane).heads; ++head) {
        const KvShape& shape = cache.shape(plane);
        const std::byte* keys = cache.keys(plane, page, head);
        EXPECT_EQ(keys[0], fill);
        EXPECT_EQ(keys[shape.block_bytes(shape.d_pad()) - 1], fill);
        if (shape.shared)
          EXPECT_EQ(cache.values(plane, page, head), keys);
        else
          EXPECT_EQ(static_cast<int>(cache.values(plane, page, head)[0]), static_cast<int>(fill) + 100);
        fill = static_cast<std::byte>(static_cast<int>(fill) + 1);
      }
}

TEST(KvCache, StatesAreClearedAndCopiedSlotBySlot) {
  KvCache cache({.planes = {}, .states = {12, 100}}, 0, 3);
  for (int slot = 0; slot < 3; ++slot)
    for (int state = 0; state < 2; ++state)
      std::memset(cache.state(state, slot), 10 * slot + state + 1, state == 0 ? 12 : 100);
  EXPECT_EQ(static_cast<int>(cache.state(1, 1)[99]), 12);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(cache.state(1, 2)) % 64, 0u);
  cache.copy_slot(2, 0);
  EXPECT_EQ(static_cast<int>(cache.state(0, 0)[11]), 21);
  EXPECT_EQ(static_cast<int>(cache.state(1, 0)[99]), 22);
  EXPECT_EQ(static_cast<int>(cache.state(0, 1)[0]), 11);
  cache.clear_slot(1);
  EXPECT_EQ(static_cast<int>(cache.state(1, 1)[99]), 0);
  EXPECT_EQ(static_cast<int>(cache.state(1, 2)[99]), 22);
}

}  // namespace
}  // namespace kt::inline nn
