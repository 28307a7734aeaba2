// From the plain order of formats/ to the packed order the kernels walk (layout.h), and back.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "formats/layout.h"
#include "formats/matrix.h"

namespace kt::inline kernels {

// The packed form of an n x k matrix: every size a kernel or an allocator needs.
struct Packing {
  Format format;  // as given
  Fragment fragment;
  int layout = 0;  // index into kLayouts
  int64_t n = 0, k = 0;
  int bias = 0;      // what the kernel subtracts from a stored code
  int k_pad = 0;     // columns stored
  int span = 0;      // columns one packed scale holds over
  int record_k = 0;  // columns of a record; the last record may be shorter
  int header_bytes = 0;
  int64_t blocks = 0;      // row blocks, the last padded with zero rows
  size_t block_bytes = 0;  // of one row block; a multiple of 64
  size_t bytes() const { return static_cast<size_t>(blocks) * block_bytes; }
  std::string describe() const;
};

// Throws an Error naming `name` when the format or the shape cannot be packed.
Packing packing_for(const Format& format, int64_t n, int64_t k, const Fragment& fragment,
                    std::string_view name);

// The columns at which a matrix of this format may be cut without splitting a span.
int column_granularity(const Format& format, int64_t k);

// Packs row block `block` of w (or of its columns [first_column, first_column + packing.k)) into `out`,
// block_bytes long and 64-byte aligned. Rows past the matrix become zeros.
void pack_block(const Packing& packing, const MatrixView& w, int64_t first_column, int64_t block,
                std::byte* out);

// The inverse of pack_block: the `rows` (at most 16) rows of a packed block into the first rows of `out`,
// from its column `first_column` on. out.format is unpacked_format(packing), and first_column what the block
// was packed with: out gets the same codes, scales and mins.
void unpack_block(const Packing& packing, const std::byte* block, int64_t rows, int64_t first_column,
                  Matrix& out);
// The format that was packed, with the scale of each row apart (span.n = 1).
Format unpacked_format(const Packing& packing);

// The value at (row, column) of packed blocks, by the definition of the layout: slow, for tests.
float packed_value(const Packing& packing, const std::byte* blocks, int64_t row, int64_t column);

}  // namespace kt::inline kernels
