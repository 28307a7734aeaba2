#include "weights/dialects/plane_matrix.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "base/checked.h"
#include "base/error.h"
#include "base/file.h"
#include "formats/floats.h"

namespace kt::inline weights {
namespace {

// Sources read across their order are read in tiles of this many rows and columns: the tile's lines of both
// sides stay in L1.
constexpr int64_t kTile = 64;

// Bit position / 4 of row i of eight in an AWQ word.
constexpr int kAwqNibble[8] = {0, 4, 1, 5, 2, 6, 3, 7};

const uint8_t* at(std::span<const std::byte> bytes, int64_t offset) {
  return reinterpret_cast<const uint8_t*>(bytes.data()) + offset;
}

template <class T>
T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

float widen_scale(Dtype type, const uint8_t* from) {
  switch (type) {
    case Dtype::kF32:
      return load<float>(from);
    case Dtype::kBf16:
      return to_f32(load<bf16>(from));
    case Dtype::kF16:
      return to_f32(load<f16>(from));
    case Dtype::kE8m0:
    case Dtype::kU8:
      return e8m0_to_f32(*from);
    case Dtype::kE4m3:
      return e4m3_to_f32(*from);
    default:
      KT_CHECK(false, "scales of type {}", name_of(type));
  }
  return 0;
}

// As to_f32, in arithmetic that vectorises: a denormal is its integer times a power of two, anything else is
// a shift of the exponent. Infinities and NaN come out as numbers: refuse them first.
float f16_value(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7FFF;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const auto denormal =
      std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * (1.0f / (1 << 24)));
  const uint32_t small = 0u - static_cast<uint32_t>(magnitude < 0x400);  // a mask; ?: would not vectorise
  return std::bit_cast<float>((denormal & small) | (normal & ~small) | ((bits & 0x8000) << 16));
}

// Exponent bits of a code; all ones mean it is no finite number. E4M3 has all of its magnitude there.
constexpr uint32_t exponent_mask(Code code) {
  switch (code) {
    case Code::kE4m3:
      return 0x7F;
    case Code::kBf16:
      return 0x7F80;
    case Code::kF16:
      return 0x7C00;
    case Code::kF32:
      return 0x7F800000;
    default:
      return 0;
  }
}

template <class T>
bool any_not_finite(const uint8_t* codes, int64_t count, uint32_t mask) {
  T bad = 0;  // as narrow as the codes, so that a vector holds as many
  const auto wanted = static_cast<T>(mask);
  for (int64_t i = 0; i < count; ++i)
    bad = static_cast<T>(bad | ((load<T>(codes + i * sizeof(T)) & wanted) == wanted ? 1 : 0));
  return bad != 0;
}

bool any_not_finite(Code code, const uint8_t* codes, int64_t count) {
  const uint32_t mask = exponent_mask(code);
  switch (code_bytes(code)) {
    case 1:
      return any_not_finite<uint8_t>(codes, count, mask);
    case 2:
      return any_not_finite<uint16_t>(codes, count, mask);
    default:
      return any_not_finite<uint32_t>(codes, count, mask);
  }
}

[[noreturn]] void not_finite(std::string_view name, std::string_view what, int64_t row, int64_t column) {
  fail("{}: {} of row {}, column {} is not a finite number", name, what, row, column);
}

// Codes [count, k] in plain order of rows first, first + 1, ...
void check_codes(std::string_view name, Code code, const uint8_t* codes, int64_t first, int64_t count,
                 int64_t k) {
  if (exponent_mask(code) == 0) return;
  const int64_t row_bytes = k * code_bytes(code);
  for (int64_t row = 0; row < count; ++row) {
    const uint8_t* begin = codes + row * row_bytes;
    if (!any_not_finite(code, begin, k)) continue;
    int64_t column = 0;
    while (!any_not_finite(code, begin + column * code_bytes(code), 1)) ++column;
    not_finite(name, "the weight", first + row, column);
  }
}

// Whether all stored scales and mins are finite, by their bits; false also where only their products tell.
bool surely_finite(const MatrixView& w) {
  const Format& f = w.format;
  const int64_t count = spans(f, w.k) * ceil_div(w.n, int64_t{f.span.n}), factors = supers(f, w.k) * w.n;
  const auto finite = [](Code code, const uint8_t* numbers, int64_t how_many) {
    return !any_not_finite(code, numbers, how_many);
  };
  const bool scales = f.scale == Scale::kNone    ? true
                      : f.scale == Scale::kF16   ? finite(Code::kF16, w.scales, count)
                      : f.scale == Scale::kBf16  ? finite(Code::kBf16, w.scales, count)
                      : f.scale == Scale::kF32   ? finite(Code::kF32, w.scales, count)
                      : f.scale == Scale::kS8F16 ? finite(Code::kF16, w.supers, factors)
                                                 : false;
  const bool mins = f.min == Min::kNone    ? true
                    : f.min == Min::kF16   ? finite(Code::kF16, w.mins, count)
                    : f.min == Min::kS8F16 ? finite(Code::kF16, w.super_mins, factors)
                                           : f.min == Min::kZero && f.scale == Scale::kF16;
  return scales && mins;
}

void check_scales(std::string_view name, const MatrixView& w, int64_t first) {
  if (surely_finite(w)) return;
  const int64_t step = w.format.span.k == 0 ? w.k : w.format.span.k;
  for (int64_t row = 0; row < w.n; ++row) {
    for (int64_t column = 0; column < w.k; column += step) {
      if (w.format.scale != Scale::kNone && row % w.format.span.n == 0 &&
          !is_finite(scale_at(w, row, column)))
        not_finite(name, "the scale", first + row, column);
      if (w.format.min != Min::kNone && !is_finite(min_at(w, row, column)))
        not_finite(name, "the min", first + row, column);
    }
  }
}

// T values of rows first.. at their strides into [count, k].
template <class T>
void gather(const StoredPlanes& p, int64_t first, int64_t count, uint8_t* out) {
  const uint8_t* source = at(p.codes, first * p.row_stride);
  if (p.column_stride == static_cast<int64_t>(sizeof(T))) {
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(out + row * p.k * sizeof(T), source + row * p.row_stride, p.k * sizeof(T));
    return;
  }
  // Through a tile of our own: strides of large powers of two would fight for the same cache sets.
  T tile[kTile][kTile + 1];  // [column, row]
  for (int64_t row0 = 0; row0 < count; row0 += kTile) {
    const int64_t tile_rows = std::min(kTile, count - row0);
    for (int64_t column0 = 0; column0 < p.k; column0 += kTile) {
      const int64_t tile_columns = std::min(kTile, p.k - column0);
      for (int64_t column = 0; column < tile_columns; ++column) {
        const uint8_t* from = source + row0 * p.row_stride + (column0 + column) * p.column_stride;
        if (p.row_stride == static_cast<int64_t>(sizeof(T))) {
          std::memcpy(tile[column], from, tile_rows * sizeof(T));
          continue;
        }
        for (int64_t row = 0; row < tile_rows; ++row) tile[column][row] = load<T>(from + row * p.row_stride);
      }
      for (int64_t row = 0; row < tile_rows; ++row) {
        uint8_t* to = out + ((row0 + row) * p.k + column0) * sizeof(T);
        for (int64_t column = 0; column < tile_columns; ++column)
          std::memcpy(to + column * sizeof(T), &tile[column][row], sizeof(T));
      }
    }
  }
}

void unpack_row_nibbles(const StoredPlanes& p, int64_t first, int64_t count, uint8_t* out) {
  for (int64_t row = 0; row < count; ++row) {
    const uint8_t* from = at(p.codes, (first + row) * p.row_stride);
    uint8_t* to = out + row * p.k;
    for (int64_t pair = 0; pair < p.k / 2; ++pair) {
      to[2 * pair] = from[pair] & 15;
      to[2 * pair + 1] = from[pair] >> 4;
    }
    if (p.k % 2 != 0) to[p.k - 1] = from[p.k / 2] & 15;
  }
}

void unpack_column_words(const StoredPlanes& p, int64_t first, int64_t count, uint8_t* out) {
  const int64_t per_word = 32 / p.bits;
  const uint32_t mask = (1u << p.bits) - 1;
  for (int64_t row0 = 0; row0 < count; row0 += kTile) {
    const int64_t row1 = std::min(row0 + kTile, count);
    for (int64_t word = 0; word < p.k / per_word; ++word) {
      const uint8_t* from = at(p.codes, word * p.row_stride + first * 4);
      for (int64_t row = row0; row < row1; ++row) {
        const auto packed = load<uint32_t>(from + row * 4);
        uint8_t* to = out + row * p.k + word * per_word;
        for (int64_t i = 0; i < per_word; ++i) to[i] = static_cast<uint8_t>((packed >> (p.bits * i)) & mask);
      }
    }
  }
}

void unpack_row_words(const StoredPlanes& p, int64_t first, int64_t count, uint8_t* out) {
  for (int64_t row0 = 0; row0 < count; row0 += kTile) {
    const int64_t row1 = std::min(row0 + kTile, count);
    for (int64_t column0 = 0; column0 < p.k; column0 += kTile) {
      const int64_t column1 = std::min(column0 + kTile, p.k);
      for (int64_t row = row0; row < row1; ++row) {
        const int64_t stored = first + row;
        const int shift = 4 * kAwqNibble[stored % 8];
        uint8_t* to = out + row * p.k;
        for (int64_t column = column0; column < column1; ++column)
          to[column] = (load<uint32_t>(at(p.codes, column * p.row_stride + stored / 8 * 4)) >> shift) & 15;
      }
    }
  }
}

void read_codes(const StoredPlanes& p, int64_t first, int64_t count, Matrix& out) {
  uint8_t* codes = out.codes.data();
  switch (p.packing) {
    case CodePacking::kPlain:
    case CodePacking::kOffsetByte:
      switch (code_bytes(p.format.code)) {
        case 1:
          gather<uint8_t>(p, first, count, codes);
          break;
        case 2:
          gather<uint16_t>(p, first, count, codes);
          break;
        default:
          gather<uint32_t>(p, first, count, codes);
      }
      break;
    case CodePacking::kRowNibbles:
      unpack_row_nibbles(p, first, count, codes);
      break;
    case CodePacking::kColumnWords:
      unpack_column_words(p, first, count, codes);
      break;
    case CodePacking::kRowWords:
      unpack_row_words(p, first, count, codes);
      break;
    case CodePacking::kGguf:
      KT_CHECK(false, "GGUF blocks hold their scales");
  }
  // An unsigned byte with offset 128 is a two's complement byte with its top bit turned.
  if (p.packing == CodePacking::kOffsetByte || (p.packing == CodePacking::kColumnWords && p.bits == 8))
    for (uint8_t& code : out.codes) code ^= 0x80;
}

void read_scales(const StoredPlanes& p, int64_t first, Matrix& out) {
  const int64_t blocks = ceil_div<int64_t>(out.n, p.format.span.n), columns = spans(p.format, p.k);
  const int bytes = scale_bytes(p.format.scale);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row_offset = (first / p.format.span.n + block) * p.scale_row_stride;
    for (int64_t span = 0; span < columns; ++span) {
      const int64_t group = p.groups.empty() ? span : p.groups[span];
      const uint8_t* from = at(p.scales, row_offset + group * p.scale_span_stride);
      uint8_t* to = out.scales.data() + (block * columns + span) * bytes;
      if (p.format.scale == Scale::kF32) {
        const float wide = widen_scale(p.scale_type, from) * p.scale_factor;
        std::memcpy(to, &wide, sizeof wide);
      } else {
        std::memcpy(to, from, bytes);
      }
    }
  }
}

void read_zeros(const StoredPlanes& p, int64_t first, Matrix& out) {
  const int64_t columns = spans(p.format, p.k);
  for (int64_t row = 0; row < out.n; ++row)
    for (int64_t span = 0; span < columns; ++span) {
      const int64_t group = p.groups.empty() ? span : p.groups[span];
      out.mins[row * columns + span] =
          static_cast<uint8_t>(stored_zero(p, first + row, group) + p.zero_offset);
    }
}

// Plain codes [count, k] of a format without scales.
void widen(Code code, const uint8_t* codes, int64_t count, float* out) {
  switch (code) {
    case Code::kBf16:
      for (int64_t i = 0; i < count; ++i)
        out[i] = std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(codes + 2 * i)) << 16);
      return;
    case Code::kF16:
      for (int64_t i = 0; i < count; ++i) out[i] = f16_value(load<uint16_t>(codes + 2 * i));
      return;
    default:
      std::memcpy(out, codes, count * sizeof(float));
  }
}

// Faster than arithmetic as for f16: 1.05 against 0.86 G values a second on one core.
constexpr std::array<float, 256> e4m3_table() {
  std::array<float, 256> table{};
  for (int code = 0; code < 256; ++code) table[code] = e4m3_to_f32(static_cast<uint8_t>(code));
  return table;
}
constexpr std::array<float, 256> kE4m3Table = e4m3_table();

void widen_e4m3(const uint8_t* __restrict codes, int64_t count, float scale, float* __restrict out) {
  for (int64_t i = 0; i < count; ++i) out[i] = kE4m3Table[codes[i]] * scale;
}

constexpr size_t kMostReadAhead = size_t{256} << 20;  // larger ones (embeddings) are read by rows

class PlaneMatrix : public StoredMatrix {
 public:
  PlaneMatrix(std::string source, StoredPlanes planes) : planes_(std::move(planes)) {
    name = std::move(source);
    format = planes_.format;
    n = planes_.n;
    k = planes_.k;
  }

  // Whoever reads some of a matrix reads all of it soon: one large read instead of one for each fault.
  void read_ahead() const override {
    if (asked_for_.load(std::memory_order_relaxed) || asked_for_.exchange(true)) return;
    if (planes_.codes.size() <= kMostReadAhead) will_need(planes_.codes);
  }

  Matrix rows(int64_t first, int64_t count) const override {
    KT_CHECK(first >= 0 && count >= 1 && first <= n - count, "{}: rows {} to {} of {}", name, first,
             first + count, n);
    read_ahead();
    KT_CHECK(first % format.span.n == 0 && (count % format.span.n == 0 || first + count == n),
             "{}: rows {} to {} cut a block of {}", name, first, first + count, format.span.n);
    if (planes_.packing == CodePacking::kGguf) return gguf_rows(first, count);
    Matrix out(format, count, k);
    read_codes(planes_, first, count, out);
    if (format.scale != Scale::kNone) read_scales(planes_, first, out);
    if (format.min == Min::kZero) read_zeros(planes_, first, out);
    check_codes(name, format.code, out.codes.data(), first, count, k);
    check_scales(name, out.view(), first);
    return out;
  }

  void values(int64_t first, int64_t count, float* out) const override {
    KT_CHECK(first >= 0 && count >= 0 && first <= n - count, "{}: rows {} to {} of {}", name, first,
             first + count, n);
    read_ahead();
    const bool in_order =
        planes_.packing == CodePacking::kPlain && planes_.column_stride == code_bytes(format.code);
    if (in_order && format.scale == Scale::kNone) {
      for (int64_t row = first; row < first + count; ++row) {
        const uint8_t* codes = at(planes_.codes, row * planes_.row_stride);
        check_codes(name, format.code, codes, row, 1, k);
        widen(format.code, codes, k, out + (row - first) * k);
      }
    } else if (in_order && format.code == Code::kE4m3) {
      for (int64_t row = first; row < first + count; ++row) fp8_row(row, out + (row - first) * k);
    } else if (planes_.packing == CodePacking::kPlain && format.scale == Scale::kNone) {
      for (int64_t done = 0; done < count; done += kTile) {
        const int64_t some = std::min(kTile, count - done);
        const Matrix codes = rows(first + done, some);
        widen(format.code, codes.codes.data(), some * k, out + done * k);
      }
    } else {
      StoredMatrix::values(first, count, out);
    }
  }

 private:
  Matrix gguf_rows(int64_t first, int64_t count) const {
    const int64_t row_bytes = k / gguf_block_size(planes_.gguf_type) * gguf_block_bytes(planes_.gguf_type);
    Matrix out;
    if (planes_.row_stride == row_bytes) {
      out = matrix_from_gguf(planes_.gguf_type, planes_.codes.subspan(first * row_bytes, count * row_bytes),
                             count, k, name);
    } else {
      std::vector<std::byte> blocks(count * row_bytes);
      for (int64_t row = 0; row < count; ++row)
        std::memcpy(blocks.data() + row * row_bytes, at(planes_.codes, (first + row) * planes_.row_stride),
                    row_bytes);
      out = matrix_from_gguf(planes_.gguf_type, blocks, count, k, name);
    }
    check_scales(name, out.view(), first);
    return out;
  }

  void fp8_row(int64_t row, float* out) const {
    const StoredPlanes& p = planes_;
    const uint8_t* codes = at(p.codes, row * p.row_stride);
    check_codes(name, format.code, codes, row, 1, k);
    const int64_t step = format.span.k == 0 ? k : format.span.k;
    const uint8_t* scales = at(p.scales, row / format.span.n * p.scale_row_stride);
    for (int64_t begin = 0; begin < k; begin += step) {
      const float scale = widen_scale(p.scale_type, scales + begin / step * p.scale_span_stride);
      if (!is_finite(scale)) not_finite(name, "the scale", row, begin);
      const int64_t end = std::min(begin + step, k);
      widen_e4m3(codes + begin, end - begin, scale, out + begin);
    }
  }

  StoredPlanes planes_;
  mutable std::atomic<bool> asked_for_ = false;
};

}  // namespace

int stored_zero(const StoredPlanes& p, int64_t row, int64_t span) {
  const auto word = [&](int64_t offset) { return load<uint32_t>(at(p.zeros, offset)); };
  const int64_t per_word = 32 / p.bits;
  const uint32_t mask = (1u << p.bits) - 1;
  switch (p.zero_packing) {
    case ZeroPacking::kNone:
      return 0;
    case ZeroPacking::kInOrder:
      return static_cast<int>(
          (word(span * p.zero_stride + row / per_word * 4) >> (p.bits * (row % per_word))) & mask);
    case ZeroPacking::kAwqOrder:
      return static_cast<int>((word(span * p.zero_stride + row / 8 * 4) >> (4 * kAwqNibble[row % 8])) & 15);
    case ZeroPacking::kRowsDown:
      return static_cast<int>(
          (word(row / per_word * p.zero_stride + span * 4) >> (p.bits * (row % per_word))) & mask);
  }
  return 0;
}

void StoredPlanes::select_rows(int64_t first, int64_t step, int64_t count, std::string_view name) {
  if (packing == CodePacking::kColumnWords || packing == CodePacking::kRowWords ||
      zero_packing != ZeroPacking::kNone)
    fail_as(ErrorKind::kUnsupported, "{}: gate and up fused in one tensor with zero points are not read",
            name);
  if (format.span.n > 1 && (step != 1 || first % format.span.n != 0))
    fail_as(ErrorKind::kUnsupported, "{}: rows from {} by {} cut scale blocks of {} rows", name, first, step,
            format.span.n);
  const auto tail = [](std::span<const std::byte> bytes, int64_t offset) {
    return bytes.subspan(std::min(static_cast<size_t>(offset), bytes.size()));
  };
  codes = tail(codes, first * row_stride);
  row_stride *= step;
  scales = tail(scales, first / format.span.n * scale_row_stride);
  scale_row_stride *= step;
  n = count;
}

std::unique_ptr<StoredMatrix> plane_matrix(std::string name, StoredPlanes planes) {
  check_shape(planes.format, planes.n, planes.k, name);
  return std::make_unique<PlaneMatrix>(std::move(name), std::move(planes));
}

}  // namespace kt::inline weights
