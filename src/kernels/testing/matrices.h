// Quantised matrices and their packed form, for tests.
#pragma once
#include <algorithm>
#include <cstring>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "formats/floats.h"
#include "formats/grids.h"
#include "formats/known_formats.h"
#include "formats/matrix.h"
#include "formats/random_grid.h"
#include "kernels/pack.h"
#include "kernels/testing/guarded.h"

namespace kt::inline kernels {

inline void PrintTo(const NamedFormat& format, std::ostream* out) { *out << format.name; }  // for GoogleTest

// What the scales of a random matrix look like.
enum class Scales { kUsual, kTiny, kHuge, kNegative, kDenormal };

// A factor of about 1/64, of both signs, or an extreme one.
inline float random_factor(std::mt19937& random, Scales kind) {
  const float size = (static_cast<float>(random() % 1000) + 24) / 32768;
  switch (kind) {
    case Scales::kTiny:
      return size * 1e-30f;
    case Scales::kHuge:
      return size * 1e30f;
    case Scales::kNegative:
      return -size;
    case Scales::kDenormal:
      return size * 1e-39f;
    case Scales::kUsual:
      break;
  }
  return random() % 4 ? size : -size;
}
// The same as an f16, where 1e30 has no place.
inline f16 random_half(std::mt19937& random, Scales kind) {
  const float usual = random_factor(random, kind == Scales::kNegative ? kind : Scales::kUsual);
  if (kind == Scales::kHuge) return to_f16(usual * 65536 * 16);
  if (kind == Scales::kTiny || kind == Scales::kDenormal)
    return {static_cast<uint16_t>(random() % 1024 | (random() & 1) << 15)};
  return to_f16(usual);
}

inline void fill_factors(std::vector<uint8_t>& out, Scale type, std::mt19937& random, Scales kind) {
  const size_t size = std::max(1, scale_bytes(type));
  for (size_t i = 0; i < out.size(); i += size) {
    if (type == Scale::kF32) {
      const float f = random_factor(random, kind);
      std::memcpy(&out[i], &f, 4);
    } else if (type == Scale::kBf16) {
      const bf16 f = to_bf16(random_factor(random, kind));
      std::memcpy(&out[i], &f, 2);
    } else if (type == Scale::kF16) {
      const f16 f = random_half(random, kind);
      std::memcpy(&out[i], &f, 2);
    } else if (type == Scale::kE8m0) {
      const int base = kind == Scales::kTiny       ? 30
                       : kind == Scales::kHuge     ? 220
                       : kind == Scales::kDenormal ? 0
                                                   : 116;
      out[i] = static_cast<uint8_t>(base + random() % 10);
    } else if (type == Scale::kE4m3) {  // no sign; 0x7F is NaN
      const int base = kind == Scales::kHuge                                ? 0x70
                       : kind == Scales::kTiny || kind == Scales::kDenormal ? 0
                                                                            : 0x30;
      out[i] = static_cast<uint8_t>(base + random() % 15);
    } else if (type == Scale::kS8F16) {
      out[i] = static_cast<uint8_t>(random());
    }
  }
}

// Every code pattern that is a finite number, scales of both signs, mins and zero points as checkpoints have
// them.
inline Matrix random_matrix(const Format& format, int64_t n, int64_t k, uint32_t seed,
                            Scales kind = Scales::kUsual) {
  std::mt19937 random(seed);
  Matrix out(format, n, k);
  const uint32_t mask = (1u << std::min(8, code_bits(format.code))) - 1;
  std::normal_distribution<float> normal(0, 0.05f);
  for (int64_t i = 0; i < n * k; ++i) {
    if (format.code == Code::kF32) {
      const float f = normal(random);
      std::memcpy(&out.codes[i * 4], &f, 4);
    } else if (format.code == Code::kBf16) {
      const bf16 f = to_bf16(normal(random));
      std::memcpy(&out.codes[i * 2], &f, 2);
    } else if (format.code == Code::kF16) {
      const f16 f = random() % 8 ? to_f16(normal(random)) : f16{static_cast<uint16_t>(random() % 0x400)};
      std::memcpy(&out.codes[i * 2], &f, 2);
    } else {
      out.codes[i] = static_cast<uint8_t>(random() & mask);
      if (format.code == Code::kE4m3 && is_nan_e4m3(out.codes[i])) out.codes[i] = 0;
    }
  }
  if (is_grid(format.code))
    fill_grid_codes(format.code, out.codes, [&] { return uint64_t{random()} << 32 | random(); });
  fill_factors(out.scales, format.scale, random, kind);
  fill_factors(out.supers, Scale::kF16, random, kind);
  fill_factors(out.super_mins, Scale::kF16, random, kind);
  if (format.min == Min::kF16)
    fill_factors(out.mins, Scale::kF16, random, kind);
  else
    for (auto& m : out.mins) m = static_cast<uint8_t>(format.min == Min::kZero ? random() % 17 : random());
  return out;
}

// The columns a test may ask of a format: whole super-blocks where it has them.
inline int64_t fitting_columns(const Format& format, int64_t k) {
  const int super = std::max(1, format.span.super_k);
  return (k + super - 1) / super * super;
}

struct Packed {
  Packing packing;
  Guarded memory;
  Packed(const MatrixView& w, const Fragment& fragment, int64_t first_column, int64_t columns)
      : packing(packing_for(w.format, w.n, columns, fragment, "w")), memory(packing.bytes()) {
    for (int64_t b = 0; b < packing.blocks; ++b)
      pack_block(packing, w, first_column, b, memory.as() + static_cast<size_t>(b) * packing.block_bytes);
  }
  Packed(const MatrixView& w, const Fragment& fragment) : Packed(w, fragment, 0, w.k) {}
};

}  // namespace kt::inline kernels
