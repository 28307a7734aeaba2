// An ISA with a unit that multiplies whole tiles, on top of the vector ISA `Base`. Talks to the unit through the
// functions of tile_unit_amx.h only, so that tile_unit_emulated.h runs the same loops on any CPU.
//
// A tile is 16 rows of 64 bytes. A tile: 16 tokens x 64 s8 (32 bf16), in one piece (see kManySide).
// B tile: 16 consecutive steps of a panel block, 16 rows of the matrix x 4 bytes each, as they lie. C tile: 16 tokens
// x 16 matrix rows of s32 (f32).
//   s8    C += s8 * u8, exact: 255 * 127 * K < 2^31 for K <= 65,536
//   bf16  C += bf16 * bf16 in f32: sums of the even and of the odd columns of a tile, joined, then added to C;
//         denormals as zeros
// Two by two C tiles make four products of four loads: the loads (8 cycles each from L1) hide under the products
// (16 cycles each). Tiles 0-3 are C, 4-5 A, 6-7 B.
#pragma once
#include "kernels/isa/inline.h"

namespace KT_ISA_NAMESPACE {
namespace {

template <class Unit, class Base>
struct TiledIsa : Base {
  static constexpr bool kTileUnit = true;
  static constexpr int kTileRows = 16;
  static constexpr int kTileSide = 16;   // tokens and matrix rows of a C tile
  static constexpr int kTileBytes = 64;  // of K, per row of A

  // Around any number of tiles_* calls of one thread: the configuration is the thread's state.
  static KT_INLINE void begin_tiles() { Unit::configure(); }
  static KT_INLINE void end_tiles() { Unit::release(); }

  struct S8 {
    using C = int32_t;
    template <int kC, int kA, int kB> static KT_INLINE void dot(Unit& unit) { unit.template dot_s8<kC, kA, kB>(); }
  };
  struct Bf16 {
    using C = float;
    template <int kC, int kA, int kB> static KT_INLINE void dot(Unit& unit) { unit.template dot_bf16<kC, kA, kB>(); }
  };

  // C of kRT x kBT tiles, over k_bytes of K. a_stride: bytes of one whole packed row; b_stride: between blocks.
  template <class Product, int kRT, int kBT>
  static KT_INLINE void block(const uint8_t* a, int64_t a_stride, const uint8_t* b, int64_t b_stride, int64_t k_bytes,
                              typename Product::C* c, int64_t ldc, bool first, Ahead& ahead) {
    constexpr int64_t kCBytes = sizeof(typename Product::C);
    Unit unit;
    const auto each = [&](auto&& f) __attribute__((always_inline)) {
      unroll<kRT>([&](auto i) __attribute__((always_inline)) {
        unroll<kBT>([&](auto j) __attribute__((always_inline)) { f(i, j); });
      });
    };
    each([&](auto i, auto j) __attribute__((always_inline)) {
      if (first) unit.template zero<2 * i + j>();
      else unit.template load<2 * i + j>(c + i * kTileSide * ldc + j * kTileSide, ldc * kCBytes);
    });
    for (int64_t s = 0; s < k_bytes; s += kTileBytes) {
      ahead.fetch();
      unroll<kBT>([&](auto j) __attribute__((always_inline)) {
        unit.template load<6 + j>(b + j * b_stride + s * kTileSide, kTileBytes);
      });
      unroll<kRT>([&](auto i) __attribute__((always_inline)) {
        unit.template load<4 + i>(a + i * kTileSide * a_stride + s * kTileSide, kTileBytes);
        unroll<kBT>([&](auto j) __attribute__((always_inline)) {
          Product::template dot<2 * i + j, 4 + i, 6 + j>(unit);
        });
      });
    }
    each([&](auto i, auto j) __attribute__((always_inline)) {
      unit.template store<2 * i + j>(c + i * kTileSide * ldc + j * kTileSide, ldc * kCBytes);
    });
  }

  template <class Product>
  static KT_INLINE void tiles(const uint8_t* a, int64_t a_stride, int rows, const uint8_t* b, int64_t b_stride, int blocks,
                              int64_t k_bytes, typename Product::C* c, int64_t ldc, bool first, Ahead& ahead) {
    for (; rows > 0; rows -= 32, a += 32 * a_stride, c += 32 * ldc) {
      if (rows > kTileSide) {
        if (blocks == 2) block<Product, 2, 2>(a, a_stride, b, b_stride, k_bytes, c, ldc, first, ahead);
        else block<Product, 2, 1>(a, a_stride, b, b_stride, k_bytes, c, ldc, first, ahead);
      } else {
        if (blocks == 2) block<Product, 1, 2>(a, a_stride, b, b_stride, k_bytes, c, ldc, first, ahead);
        else block<Product, 1, 1>(a, a_stride, b, b_stride, k_bytes, c, ldc, first, ahead);
      }
    }
  }

  // C[rows, 16 * blocks] (+)= A[rows, k] * B; rows a multiple of 16, blocks 1 or 2, k a multiple of 64.
  static KT_INLINE void tiles_s8(const int8_t* a, int k_pad, int rows, const uint8_t* b, int64_t block_stride, int blocks,
                                 int k, int32_t* c, int64_t ldc, bool first, Ahead& ahead) {
    tiles<S8>(reinterpret_cast<const uint8_t*>(a), k_pad, rows, b, block_stride, blocks, k, c, ldc, first, ahead);
  }
  static KT_INLINE void tiles_bf16(const uint8_t* a, int k_pad, int rows, const uint8_t* b, int64_t block_stride, int blocks,
                                   int k, float* c, int64_t ldc, bool first, Ahead& ahead) {
    tiles<Bf16>(a, 2 * int64_t{k_pad}, rows, b, block_stride, blocks, 2 * int64_t{k}, c, ldc, first, ahead);
  }

  // C[16 * kRT, 16 * kBT] = A * B for bf16 rows as they lie: a_stride bytes between rows of A, b_stride bytes between
  // pairs of columns, `steps` times 32 columns.
  template <int kRT, int kBT>
  static KT_INLINE void plain_block(const uint8_t* a, int64_t a_stride, const uint8_t* b, int64_t b_stride, int steps,
                                    float* c, int64_t ldc, Ahead& ahead) {
    Unit unit;
    unroll<kRT>([&](auto i) __attribute__((always_inline)) {
      unroll<kBT>([&](auto j) __attribute__((always_inline)) { unit.template zero<2 * i + j>(); });
    });
    for (int s = 0; s < steps; ++s, a += kTileBytes, b += kTileSide * b_stride) {
      ahead.fetch();
      unroll<kBT>([&](auto j) __attribute__((always_inline)) {
        unit.template load<6 + j>(b + j * kTileBytes, b_stride);
      });
      unroll<kRT>([&](auto i) __attribute__((always_inline)) {
        unit.template load<4 + i>(a + i * kTileSide * a_stride, a_stride);
        unroll<kBT>([&](auto j) __attribute__((always_inline)) {
          Bf16::template dot<2 * i + j, 4 + i, 6 + j>(unit);
        });
      });
    }
    unroll<kRT>([&](auto i) __attribute__((always_inline)) {
      unroll<kBT>([&](auto j) __attribute__((always_inline)) {
        unit.template store<2 * i + j>(c + i * kTileSide * ldc + j * kTileSide, ldc * 4);
      });
    });
  }

  template <class Product>
  static KT_INLINE double peak_tiles(int64_t rounds, void* buffer, int k) {
    auto* at = static_cast<uint8_t*>(buffer);
    begin_tiles();
    Unit unit;
    unroll<4>([&](auto i) __attribute__((always_inline)) { unit.template zero<i>(); });
    unroll<4>([&](auto i) __attribute__((always_inline)) { unit.template load<4 + i>(at + i * 1024, kTileBytes); });
    for (int64_t r = 0; r < rounds; ++r) {
      Product::template dot<0, 4, 6>(unit);
      Product::template dot<1, 4, 7>(unit);
      Product::template dot<2, 5, 6>(unit);
      Product::template dot<3, 5, 7>(unit);
    }
    unroll<4>([&](auto i) __attribute__((always_inline)) { unit.template store<i>(at + i * 1024, kTileBytes); });
    end_tiles();
    return 2.0 * static_cast<double>(rounds) * 4 * kTileSide * kTileSide * k;
  }
  static KT_INLINE double peak_tiles_s8(int64_t rounds, void* buffer) { return peak_tiles<S8>(rounds, buffer, 64); }
  static KT_INLINE double peak_tiles_bf16(int64_t rounds, void* buffer) { return peak_tiles<Bf16>(rounds, buffer, 32); }
};

}  // namespace
}  // namespace KT_ISA_NAMESPACE
