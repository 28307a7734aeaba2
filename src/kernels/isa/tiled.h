// An ISA with a unit that multiplies whole tiles, on top of the vector ISA `Base`. Talks to the unit through the
// functions of tile_unit_amx.h only, so that tile_unit_emulated.h runs the same loops on any CPU.
//
// A tile is 16 rows of 64 bytes. A tile: 16 tokens x 64 s8 (32 bf16), in one piece (see kManySide).
// B tile: 16 consecutive steps of a panel block, 16 rows of the matrix x 4 bytes each, as they lie. C tile: 16 tokens
// x 16 matrix rows of s32 (f32).
//   s8    C += s8 * u8, exact: 255 * 127 * K < 2^31 for K <= 65,536
//   bf16  C += bf16 * bf16 in f32: sums of the even and of the odd columns of a tile, joined, then added to C;
//         denormals as zeros
// Two by two C tiles make four products of four loads: the loads (8 cycles each from L1, 21 from L2) hide under the
// products (16 cycles each) while one operand is in L1. Two by three make six products of five tiles, for operands from
// L2. Tiles 0-3 are C, 4-5 A, 6-7 B; or 0-5 C, 6 A, 7 B.
#pragma once
#include "kernels/isa/inline.h"

namespace KT_ISA_NAMESPACE {
namespace {

template <class Unit, class Base>
struct TiledIsa : Base {
  static constexpr bool kTileUnit = true;
  static constexpr bool kRoundedPanels = true;
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

  // One step of K: kRT x kBT products, before each of which beside(its number) is called. With three blocks C takes six
  // registers, and the second row of tiles walks the blocks backwards: seven loads for six products, two of them of
  // tiles just read.
  template <class Product, int kRT, int kBT, class Beside>
  static KT_INLINE void step(Unit& unit, const uint8_t* a, int64_t a_tile, const uint8_t* b, int64_t b_stride,
                             Beside&& beside) {
    constexpr int kA = kBT == 3 ? 6 : 4, kB = kBT == 3 ? 7 : 6;
    if constexpr (kBT == 3) {
      unit.template load<kA>(a, kTileBytes);
      unroll<3>([&](auto j) __attribute__((always_inline)) {
        unit.template load<kB>(b + j * b_stride, kTileBytes);
        beside(j);
        Product::template dot<j, kA, kB>(unit);
      });
      if constexpr (kRT == 2) {
        unit.template load<kA>(a + a_tile, kTileBytes);
        unroll<3>([&](auto i) __attribute__((always_inline)) {
          constexpr int kJ = 2 - i.value;
          if constexpr (kJ < 2) unit.template load<kB>(b + kJ * b_stride, kTileBytes);
          beside(Int<3 + i.value>{});
          Product::template dot<3 + kJ, kA, kB>(unit);
        });
      }
    } else {
      unroll<kBT>([&](auto j) __attribute__((always_inline)) {
        unit.template load<kB + j>(b + j * b_stride, kTileBytes);
      });
      unroll<kRT>([&](auto i) __attribute__((always_inline)) {
        unit.template load<kA + i>(a + i * a_tile, kTileBytes);
        unroll<kBT>([&](auto j) __attribute__((always_inline)) {
          beside(Int<kBT * i.value + j.value>{});
          Product::template dot<kBT * i + j, kA + i, kB + j>(unit);
        });
      });
    }
  }

  // C of kRT x kBT tiles, over k_bytes of K. a_stride: bytes of one whole packed row.
  // beside(s, i) is called before product i of step s of K, for what the vector units can do meanwhile: some ten
  // instructions each are free, many at once stop the products.
  template <class Product, int kRT, int kBT, class Beside>
  static KT_INLINE void block(const uint8_t* a, int64_t a_stride, const Panel& b, int64_t k_bytes,
                              typename Product::C* c, int64_t ldc, bool first, Beside&& beside) {
    constexpr int64_t kCBytes = sizeof(typename Product::C);
    Unit unit;
    const auto each = [&](auto&& f) __attribute__((always_inline)) {
      unroll<kRT>([&](auto i) __attribute__((always_inline)) {
        unroll<kBT>([&](auto j) __attribute__((always_inline)) { f(i, j); });
      });
    };
    each([&](auto i, auto j) __attribute__((always_inline)) {
      if (first) unit.template zero<kBT * i + j>();
      else unit.template load<kBT * i + j>(c + i * kTileSide * ldc + j * kTileSide, ldc * kCBytes);
    });
    for (int64_t s = 0; s < k_bytes; s += kTileBytes) {
      step<Product, kRT, kBT>(
          unit, a + s * kTileSide, kTileSide * a_stride, b.at + ((b.phase + s * kTileSide) & b.mask), b.stride,
          [&](auto i) __attribute__((always_inline)) { beside(static_cast<int>(s / kTileBytes), i); });
    }
    each([&](auto i, auto j) __attribute__((always_inline)) {
      unit.template store<kBT * i + j>(c + i * kTileSide * ldc + j * kTileSide, ldc * kCBytes);
    });
  }

  template <class Product, int kRT, class Beside>
  static KT_INLINE void row_of_tiles(const uint8_t* a, int64_t a_stride, const Panel& b, int64_t k_bytes,
                                     typename Product::C* c, int64_t ldc, bool first, Beside&& beside) {
    if (b.blocks == 3) block<Product, kRT, 3>(a, a_stride, b, k_bytes, c, ldc, first, beside);
    else if (b.blocks == 2) block<Product, kRT, 2>(a, a_stride, b, k_bytes, c, ldc, first, beside);
    else block<Product, kRT, 1>(a, a_stride, b, k_bytes, c, ldc, first, beside);
  }
  template <class Product, class Beside>
  static KT_INLINE void tiles(const uint8_t* a, int64_t a_stride, int rows, const Panel& b, int64_t k_bytes,
                              typename Product::C* c, int64_t ldc, bool first, Beside&& beside) {
    if (rows > kTileSide) row_of_tiles<Product, 2>(a, a_stride, b, k_bytes, c, ldc, first, beside);
    else row_of_tiles<Product, 1>(a, a_stride, b, k_bytes, c, ldc, first, beside);
  }

  // C[rows, 16 * blocks] (+)= A[rows, k] * B; 16 or 32 rows, 1 to 3 blocks, k a multiple of 64.
  template <class Beside>
  static KT_INLINE void tiles_s8(const int8_t* a, int k_pad, int rows, const Panel& b, int k, int32_t* c, int64_t ldc,
                                 bool first, Beside&& beside) {
    tiles<S8>(reinterpret_cast<const uint8_t*>(a), k_pad, rows, b, k, c, ldc, first, beside);
  }
  template <class Beside>
  static KT_INLINE void tiles_bf16(const uint8_t* a, int k_pad, int rows, const Panel& b, int k, float* c, int64_t ldc,
                                   bool first, Beside&& beside) {
    tiles<Bf16>(a, 2 * int64_t{k_pad}, rows, b, 2 * int64_t{k}, c, ldc, first, beside);
  }

  // B as it lies, in pieces of steps_each times 32 columns of K: `stride` bytes between pairs of columns, the first at
  // `offset` of each piece.
  struct PlainB {
    const uint8_t* const* pieces;
    int64_t offset, stride;
    int steps_each, steps;
  };
  // C[16 * kRT, 16 * kBT] = A * B for bf16 rows as they lie, a_stride bytes between rows of A.
  template <int kRT, int kBT, class Fetch>
  static KT_INLINE void plain_block(const uint8_t* a, int64_t a_stride, const PlainB& b, float* c, int64_t ldc,
                                    Fetch& ahead) {
    Unit unit;
    unroll<kRT>([&](auto i) __attribute__((always_inline)) {
      unroll<kBT>([&](auto j) __attribute__((always_inline)) { unit.template zero<2 * i + j>(); });
    });
    const uint8_t* const* piece = b.pieces;
    for (int s = 0; s < b.steps;) {
      const int end = b.steps - s < b.steps_each ? b.steps : s + b.steps_each;
      for (const uint8_t* at = *piece++ + b.offset; s < end; ++s, a += kTileBytes, at += kTileSide * b.stride) {
        ahead.fetch();
        unroll<kBT>([&](auto j) __attribute__((always_inline)) {
          unit.template load<6 + j>(at + j * kTileBytes, b.stride);
        });
        unroll<kRT>([&](auto i) __attribute__((always_inline)) {
          unit.template load<4 + i>(a + i * kTileSide * a_stride, a_stride);
          unroll<kBT>([&](auto j) __attribute__((always_inline)) {
            Bf16::template dot<2 * i + j, 4 + i, 6 + j>(unit);
          });
        });
      }
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
