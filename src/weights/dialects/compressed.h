// The arithmetic of compressed-tensors "pack-quantized" weights: round to nearest as the compressed_tensors
// library does it on a CPU, to the bit, and codes packed into 32-bit words. Pure arithmetic on blocks of
// rows; names and files are compressed_plan.h's business.
//
// The library works in the weight's own type T (bf16, f16 or f32): every operation is done in f32 and its
// result rounded to T before the next one. With h = 7.5 for 4 bits and 127.5 for 8:
//
//   s = T(absmax / h) over a group or a row;  s == 0 -> eps of T (2^-7, 2^-10, 2^-23)
//   q = rhe(clamp(T(w / s), -8, 7))           or -128, 127
//
// so that in bf16 a quotient is rounded twice, first to 8 significant bits, then to an integer. (The
// library's GPU kernel leaves the first of these out, so that some of its codes differ from its own CPU's by
// one.) Symmetric only: no zero points are stored.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "formats/matrix.h"
#include "weights/plans/quality.h"
#include "weights/tensor.h"

namespace kt::inline weights {

struct PackedSpec {
  int bits = 4;               // 4 or 8
  int64_t group = 0;          // columns of one scale; 0: the whole row
  Dtype type = Dtype::kBf16;  // T: of the weights and of the stored scales; kBf16, kF16 or kF32

  int64_t words(int64_t k) const { return (k * bits + 31) / 32; }         // 32-bit words of a row
  int64_t groups(int64_t k) const { return group == 0 ? 1 : k / group; }  // scales of a row
  size_t scale_bytes() const { return static_cast<size_t>(dtype_bits(type)) / 8; }
};

// The group sizes of int4 that have a name among the formats, ascending: what is offered and advised. Weights are read
// and written with others too.
std::vector<int> usual_group_sizes();
// "32, 64 or 128".
std::string usual_group_text();

// Error(kInput) naming `name` unless bits, type and group are known ones and group divides k, which the
// library demands; the message lists group sizes that do.
void check_packed(const PackedSpec& spec, int64_t n, int64_t k, std::string_view name);

// Quantises `rows` rows. values: f32 [rows, k] with `stride` elements between rows; rounded to T first where
// they are not T's already. packed: [rows, words(k)]; element i of a row, plus 2^(bits-1), is at bits
// [i*bits, (i+1)*bits) of its words, little end first; bits behind the last are zero. scales: [rows,
// groups(k)] in T. Adds |stored - given| to `error`, stored = q * s. Rows are independent: disjoint blocks
// may run on several threads and any cut gives the same bytes. A value that is not a finite T is an Error
// naming `name`, its row (counted from `first`) and column. Calls check_packed.
void quantise_packed_rows(const PackedSpec& spec, int64_t rows, int64_t k, const float* values,
                          int64_t stride, uint32_t* packed, std::byte* scales, WeightError& error,
                          std::string_view name, int64_t first = 0);

// The format such weights are read back in: codes of 4 bits with bias 8, or two's complement of 8.
Format packed_format(const PackedSpec& spec);
// The one they are worked with in: 8-bit codes whose 16-bit scales no kernel takes have f32 scales of the
// same values.
Format packed_read_format(Format format);

// The same rounding, as a matrix in that format, for those who go on working with it.
// `first`: the number of the first row, for messages.
Matrix round_packed(const PackedSpec& spec, int64_t n, int64_t k, const float* values, std::string_view name,
                    int64_t first = 0);

// Any matrix in packed_format(spec), however it was rounded, to packed words [n, words(k)] and scales [n,
// groups(k)]; scales of zero become eps of T, which the library expects. Adds |stored - values| to `error`.
void pack_matrix(const PackedSpec& spec, const MatrixView& matrix, const float* values, uint32_t* packed,
                 std::byte* scales, WeightError& error);

}  // namespace kt::inline weights
