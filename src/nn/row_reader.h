// A matrix that is read in pieces of rows while it is packed, so that it never stands in plain order as a
// whole and all workers take part. Where the rows come from is the caller's business.
#pragma once
#include <cstdint>
#include <functional>

#include "base/function_ref.h"
#include "base/pool.h"
#include "formats/matrix.h"

namespace kt::inline nn {

struct RowReader {
  Format format;
  int64_t n = 0, k = 0;
  int64_t at_once = 16;  // rows worth reading together
  // Rows [first, first + count) in plain order, on several threads at once. first is a multiple of
  // format.span.n, and count too unless the matrix ends there.
  std::function<Matrix(int64_t first, int64_t count)> rows = {};
};

// Rows of a piece: whole row blocks of the packing and of the scales, about as many as a core's cache holds.
int64_t piece_rows(const RowReader& reader);
// Memory of a piece in plain order, and of its values on the way there where it is rounded.
size_t piece_bytes(const RowReader& reader);

// Rows [first, first + piece.n) of the matrix.
using UsePiece = FunctionRef<void(int64_t first, const MatrixView& piece)>;

// Calls use(first, piece) for every piece of [begin, end) in order, on the calling thread. begin is a
// multiple of 16 and of the format's blocks of rows.
void for_pieces(const RowReader& reader, int64_t begin, int64_t end, UsePiece use);
// The same of all rows, pieces in parallel over the pool's workers. The first error stops all and is thrown.
void for_pieces(Pool& pool, const RowReader& reader, UsePiece use);

}  // namespace kt::inline nn
