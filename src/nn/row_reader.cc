#include "nn/row_reader.h"

#include <algorithm>
#include <numeric>

#include "base/checked.h"
#include "formats/layout.h"

namespace kt::inline nn {
namespace {

constexpr int64_t kPieceBytes = 256 << 10;  // in plain order: read, checked and packed from L2

}  // namespace

int64_t piece_rows(const RowReader& reader) {
  const int64_t unit = std::lcm(int64_t{kBlockRows}, int64_t{reader.format.span.n});
  const int64_t row_bytes = reader.k * code_bytes(reader.format.code);
  const int64_t fitting = kPieceBytes / row_bytes / unit * unit;
  return std::max({unit, fitting, round_up(reader.at_once, unit)});
}

size_t piece_bytes(const RowReader& reader) {
  const int64_t values = std::min(piece_rows(reader), reader.n) * reader.k;
  return static_cast<size_t>(values) * (static_cast<size_t>(code_bytes(reader.format.code)) + sizeof(float));
}

void for_pieces(const RowReader& reader, int64_t begin, int64_t end, UsePiece use) {
  const int64_t step = piece_rows(reader);
  for (int64_t first = begin; first < end; first += step) {
    const Matrix piece = reader.rows(first, std::min(step, end - first));
    use(first, piece.view());
  }
}

void for_pieces(Pool& pool, const RowReader& reader, UsePiece use) {
  const int64_t step = piece_rows(reader);
  run_items(pool, ceil_div(reader.n, step),
            [&](int64_t i) { for_pieces(reader, i * step, std::min((i + 1) * step, reader.n), use); });
}

}  // namespace kt::inline nn
