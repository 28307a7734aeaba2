// The byte order and the rounding of converted CPU weights ("kt weights"), to the bit: what existing files
// hold. Pure arithmetic on blocks of rows; file names are in kt_names.h.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "formats/matrix.h"
#include "weights/plans/quality.h"

namespace kt::inline weights {

enum class Rounding : uint8_t {
  kEstablished,  // int4 rounds twice, as existing files do
  kDirect,       // int4 rounds once: nibble = rhe(w * 7 / amax), d = amax / 112; the same file format
};

// One part of one projection as stored: n x k, padded to the layout's granule.
struct KtShape {
  int bits = 8;                  // 4 or 8
  int64_t n = 0, k = 0;          // of the matrix
  int64_t n_pad = 0, k_pad = 0;  // as stored: n to 32; k to 128 (int4) or 64 (int8)
  size_t weight_bytes = 0;       // n_pad * k_pad * bits / 8
  size_t scale_bytes = 0;        // n_pad * 4
  bool padded() const { return n != n_pad || k != k_pad; }
};
KtShape kt_shape(int bits, int64_t n, int64_t k);

// Rows a block of work may start at: every block of 32 rows is 32 * k_pad elements of the file, in one or
// more pieces.
inline constexpr int kKtRowStep = 32;
// Rows that are rounded together.
inline constexpr int kKtRowGroup = 4;

// Quantises rows [first, first + count) of a part into its bytes. first is a multiple of kKtRowGroup; count
// too, unless the matrix ends there (padding rows are then written as well). values: f32 [count, k] with
// `stride` elements between rows. `packed` (weight_bytes) and `scales` (n_pad floats) are whole arrays of the
// part, zero or not; only these rows' bytes are written. Adds what the rounding lost to `error`. Disjoint
// blocks may run on several threads. A value not finite is an Error naming `name`, row and column.
void kt_quantise_rows(const KtShape& shape, Rounding rounding, int64_t first, int64_t count,
                      const float* values, int64_t stride, std::span<std::byte> packed,
                      std::span<float> scales, WeightError& error, std::string_view name);

// Codes of rows [first, first + count), any first, in plain order: int8 as stored; int4 as unsigned code =
// nibble + 8. out: [count, k] bytes, `stride` between rows.
void kt_unpack_rows(const KtShape& shape, std::span<const std::byte> packed, int64_t first, int64_t count,
                    uint8_t* out, int64_t stride);

}  // namespace kt::inline weights
