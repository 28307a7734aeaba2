#include "nn/padded_parts.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "formats/layout.h"

namespace kt::inline nn {
namespace {

// Rows of one array; each is as many bytes in both.
void copy_rows(const std::vector<uint8_t>& from, int64_t from_rows, int64_t first, int64_t count,
               std::vector<uint8_t>& to, int64_t at) {
  if (from.empty()) return;
  const size_t bytes = from.size() / static_cast<size_t>(from_rows);
  std::memcpy(to.data() + static_cast<size_t>(at) * bytes, from.data() + static_cast<size_t>(first) * bytes,
              static_cast<size_t>(count) * bytes);
}

void copy_rows(const Matrix& from, int64_t first, int64_t count, Matrix& to, int64_t at) {
  for (const auto array :
       {&Matrix::codes, &Matrix::scales, &Matrix::mins, &Matrix::supers, &Matrix::super_mins})
    copy_rows(from.*array, from.n, first, count, to.*array, at);
}

Matrix copied_rows(const MatrixView& from, int64_t first, int64_t count) {
  Matrix out(from.format, count, from.k);
  const auto copy = [&](const uint8_t* array, std::vector<uint8_t>& to) {
    if (!to.empty())
      std::memcpy(to.data(), array + static_cast<int64_t>(to.size()) / count * first, to.size());
  };
  copy(from.codes, out.codes);
  copy(from.scales, out.scales);
  copy(from.mins, out.mins);
  copy(from.supers, out.supers);
  copy(from.super_mins, out.super_mins);
  return out;
}

bool has_scales_of_rows(const Format& format) { return format.span.n <= 1; }

}  // namespace

RowReader reader_of_rows(const MatrixView& matrix) {
  return {
      .format = matrix.format, .n = matrix.n, .k = matrix.k, .rows = [&matrix](int64_t first, int64_t count) {
        return copied_rows(matrix, first, count);
      }};
}

PaddedParts padded_parts(const ExpertsOptions& options, int64_t inter) {
  const Format& down = options.down;
  const int64_t part = down.span.k;
  const bool plain = is_integer(down.code) && down.scale == Scale::kF32 && down.min == Min::kNone &&
                     has_scales_of_rows(down) && code_bytes(down.code) == 1;
  if (part == 0 || part >= inter || part % 32 == 0 || !plain || !has_scales_of_rows(options.gate) ||
      !has_scales_of_rows(options.up))
    return {.inter = inter};
  return {.inter = inter, .part = part, .padded = round_up<int64_t>(part, kChunk)};
}

PaddedParts::Stretch PaddedParts::stretch(int64_t i, int most) const {
  const int64_t length = part > 0 ? part : inter,
                room = part > 0 ? padded : std::max<int64_t>(inter, i + most);
  const int64_t within = i % room, first = i / room * length + within;
  const int64_t real = std::min(length - within, inter - first),
                wide = std::min<int64_t>(most, room - within);
  return {first, static_cast<int>(std::clamp<int64_t>(real, 0, wide)), static_cast<int>(wide)};
}

Format PaddedParts::down(Format format) const {
  if (part > 0) format.span.k = static_cast<int>(padded);
  return format;
}

RowReader PaddedParts::wide_rows(const RowReader& from) const {
  RowReader out = from;
  out.n = width();
  out.rows = [sizes = *this, &from](int64_t first, int64_t count) {
    Matrix wide(from.format, count, from.k);
    for (int64_t row = first; row < first + count;) {
      const int64_t begin = row / sizes.padded * sizes.part, within = row % sizes.padded;
      const int64_t filled = std::min(sizes.part, sizes.inter - begin);
      const int64_t end = std::min(row - within + sizes.padded, first + count);
      const int64_t rows = std::min(filled - within, end - row);
      if (rows > 0) copy_rows(from.rows(begin + within, rows), 0, rows, wide, row - first);
      row = end;
    }
    return wide;
  };
  return out;
}

RowReader PaddedParts::wide_columns(const RowReader& from) const {
  RowReader out = from;
  out.k = width();
  out.format = down(from.format);
  out.rows = [sizes = *this, format = out.format, &from](int64_t first, int64_t count) {
    const Matrix narrow = from.rows(first, count);
    Matrix wide(format, count, sizes.width());
    for (int64_t row = 0; row < count; ++row)
      for (int64_t begin = 0; begin < sizes.inter; begin += sizes.part)
        std::memcpy(wide.codes.data() + row * wide.k + sizes.at(begin),
                    narrow.codes.data() + row * narrow.k + begin,
                    static_cast<size_t>(std::min(sizes.part, sizes.inter - begin)));
    wide.scales = narrow.scales;
    return wide;
  };
  return out;
}

std::vector<float> PaddedParts::wide_bias(const float* from) const {
  if (!from) return {};
  std::vector<float> out(static_cast<size_t>(width()));
  for (int64_t i = 0; i < inter; ++i) out[static_cast<size_t>(at(i))] = from[i];
  return out;
}

void PaddedParts::narrow_row(const Matrix& wide, int64_t from, Matrix& out, int64_t to) {
  copy_rows(wide, from, 1, out, to);
}

void PaddedParts::narrow_columns(const Matrix& wide, int64_t rows, Matrix& out) const {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t begin = 0; begin < inter; begin += part)
      std::memcpy(out.codes.data() + row * out.k + begin, wide.codes.data() + row * wide.k + at(begin),
                  static_cast<size_t>(std::min(part, inter - begin)));
  out.scales = wide.scales;
}

}  // namespace kt::inline nn
