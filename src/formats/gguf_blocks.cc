// Every layout is written down once, as the places where a code's or an integer scale's bits lie in the
// block; decoding gathers from those places and encoding scatters to them.
#include "formats/gguf_blocks.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/checked.h"
#include "base/error.h"
#include "formats/gguf_grid_blocks.h"

namespace kt {
namespace {

constexpr int kNowhere = -1;

struct Layout {
  GgufType type;
  std::string_view name;
  std::string_view format;
  int size;  // columns
  int bytes;
  int scale_at;      // offset of the scale, or of the f16 factor of a super-block
  int min_at;        // the same for mins
  int scale_offset;  // what stored integer scales are above their value
};

constexpr auto kLayouts = std::to_array<Layout>({
    {GgufType::kF32, "F32", "f32", 1, 4, kNowhere, kNowhere, 0},
    {GgufType::kF16, "F16", "fp16", 1, 2, kNowhere, kNowhere, 0},
    {GgufType::kBF16, "BF16", "bf16", 1, 2, kNowhere, kNowhere, 0},
    {GgufType::kQ4_0, "Q4_0", "q4_0", 32, 18, 0, kNowhere, 0},
    {GgufType::kQ4_1, "Q4_1", "q4_1", 32, 20, 0, 2, 0},
    {GgufType::kQ5_0, "Q5_0", "q5_0", 32, 22, 0, kNowhere, 0},
    {GgufType::kQ5_1, "Q5_1", "q5_1", 32, 24, 0, 2, 0},
    {GgufType::kQ8_0, "Q8_0", "q8_0", 32, 34, 0, kNowhere, 0},
    {GgufType::kQ2_K, "Q2_K", "q2_k", 256, 84, 80, 82, 0},
    {GgufType::kQ3_K, "Q3_K", "q3_k", 256, 110, 108, kNowhere, 32},
    {GgufType::kQ4_K, "Q4_K", "q4_k", 256, 144, 0, 2, 0},
    {GgufType::kQ5_K, "Q5_K", "q5_k", 256, 176, 0, 2, 0},
    {GgufType::kQ6_K, "Q6_K", "q6_k", 256, 210, 208, kNowhere, 0},
    {GgufType::kIQ4_NL, "IQ4_NL", "iq4_nl", 32, 18, 0, kNowhere, 0},
    {GgufType::kIQ4_XS, "IQ4_XS", "iq4_xs", 256, 136, 0, kNowhere, 32},
    {GgufType::kMXFP4, "MXFP4", "mxfp4", 32, 17, 0, kNowhere, 0},
    {GgufType::kIQ2_XXS, "IQ2_XXS", "iq2_xxs", 256, 66, 0, kNowhere, 0},
    {GgufType::kIQ2_XS, "IQ2_XS", "iq2_xs", 256, 74, 0, kNowhere, 0},
    {GgufType::kIQ2_S, "IQ2_S", "iq2_s", 256, 82, 0, kNowhere, 0},
    {GgufType::kIQ3_XXS, "IQ3_XXS", "iq3_xxs", 256, 98, 0, kNowhere, 0},
    {GgufType::kIQ3_S, "IQ3_S", "iq3_s", 256, 110, 0, kNowhere, 0},
    {GgufType::kIQ1_S, "IQ1_S", "iq1_s", 256, 50, 0, kNowhere, 0},
    {GgufType::kIQ1_M, "IQ1_M", "iq1_m", 256, 56, 0, kNowhere, 0},
    {GgufType::kNVFP4, "NVFP4", "nvfp4", 64, 36, 0, kNowhere, 0},
});

const Layout& layout_of(GgufType type) {
  const auto found =
      std::find_if(kLayouts.begin(), kLayouts.end(), [&](const Layout& l) { return l.type == type; });
  KT_CHECK(found != kLayouts.end(), "GGUF type {}", static_cast<uint32_t>(type));
  return *found;
}

// `width` bits of byte `byte` from bit `shift` up.
struct Bits {
  int byte = 0, shift = 0, width = 0;
};

// Where an integer lies: its low bits, and its high bits where those lie elsewhere.
struct Place {
  Bits low, high = {};
};

// Nibbles of `size` consecutive columns from byte `start`: the first half low, the second half high.
constexpr Bits nibble(int start, int column, int size) {
  const int half = size / 2, block = column / size, within = column % size;
  return {start + block * half + within % half, within / half * 4, 4};
}

// Pairs of bits from byte `start`: 32 bytes hold 128 columns, in four layers.
constexpr Bits bit_pair(int start, int column) {
  return {start + column / 128 * 32 + column % 32, column % 128 / 32 * 2, 2};
}

// Single bits from byte `start`: 32 bytes hold 256 columns, in eight layers.
constexpr Bits bit_layer(int start, int column) { return {start + column % 32, column / 32, 1}; }

constexpr Place place_of_code(GgufType type, int column) {
  switch (type) {
    case GgufType::kQ4_0:
    case GgufType::kIQ4_NL:
      return {nibble(2, column, 32)};
    case GgufType::kQ4_1:
      return {nibble(4, column, 32)};
    case GgufType::kQ5_0:
      return {nibble(6, column, 32), {2 + column / 8, column % 8, 1}};
    case GgufType::kQ5_1:
      return {nibble(8, column, 32), {4 + column / 8, column % 8, 1}};
    case GgufType::kQ8_0:
      return {{2 + column, 0, 8}};
    case GgufType::kMXFP4:
      return {nibble(1, column, 32)};
    case GgufType::kQ2_K:
      return {bit_pair(16, column)};
    case GgufType::kQ3_K:
      return {bit_pair(32, column), bit_layer(0, column)};
    case GgufType::kQ4_K:
      return {nibble(16, column, 64)};
    case GgufType::kQ5_K:
      return {nibble(48, column, 64), bit_layer(16, column)};
    case GgufType::kQ6_K:
      return {nibble(0, column, 128), bit_pair(128, column)};
    case GgufType::kIQ4_XS:
      return {nibble(8, column, 32)};
    case GgufType::kNVFP4:
      return {nibble(4, column, 16)};
    case GgufType::kF32:
    case GgufType::kF16:
    case GgufType::kBF16:
    case GgufType::kIQ2_XXS:  // of grids: gguf_grid_blocks.cc
    case GgufType::kIQ2_XS:
    case GgufType::kIQ2_S:
    case GgufType::kIQ3_XXS:
    case GgufType::kIQ3_S:
    case GgufType::kIQ1_S:
    case GgufType::kIQ1_M:
      break;
  }
  return {};
}

// The six-bit scales (first = 4) and mins (first = 8) of Q4_K and Q5_K: spans 0 to 3 lie in the low bits of
// four bytes, whose two top bits belong to spans 4 to 7; the rest of those is in nibbles of bytes 12 to 15.
constexpr Place place_of_six_bits(int first, int nibble_shift, int span) {
  if (span < 4) return {{first + span, 0, 6}};
  return {{12 + span - 4, nibble_shift, 4}, {first + span - 4, 6, 2}};
}

constexpr Place place_of_scale(GgufType type, int span) {
  switch (type) {
    case GgufType::kQ2_K:
      return {{span, 0, 4}};
    case GgufType::kQ3_K:
      return {{96 + span % 8, span / 8 * 4, 4}, {104 + span % 4, span / 4 * 2, 2}};
    case GgufType::kQ4_K:
    case GgufType::kQ5_K:
      return place_of_six_bits(4, 0, span);
    case GgufType::kQ6_K:
      return {{192 + span, 0, 8}};
    case GgufType::kIQ4_XS:
      return {{4 + span / 2, span % 2 * 4, 4}, {2 + span / 4, span % 4 * 2, 2}};
    default:
      return {};
  }
}

constexpr Place place_of_min(GgufType type, int span) {
  return type == GgufType::kQ2_K ? Place{{span, 4, 4}} : place_of_six_bits(8, 4, span);
}

uint32_t gather(const uint8_t* block, const Place& place) {
  const auto bits = [&](const Bits& b) {
    return (uint32_t{block[b.byte]} >> b.shift) & ((1u << b.width) - 1);
  };
  return bits(place.low) | bits(place.high) << place.low.width;
}

// Ors into zeroed bytes; `value` fits.
void scatter(uint8_t* block, const Place& place, uint32_t value) {
  const auto put = [&](const Bits& b, uint32_t v) {
    block[b.byte] = static_cast<uint8_t>(block[b.byte] | (v & ((1u << b.width) - 1)) << b.shift);
  };
  put(place.low, value);
  put(place.high, value >> place.low.width);
}

// Neighbouring columns whose bits lie in neighbouring bytes: what decoding walks, many at a time.
struct Strip {
  int column, byte, count;
  int shift, width;  // in each byte
  int up;            // where these bits belong in the code
};

// The places of a type, laid out for the loops.
struct Places {
  std::vector<Place> codes, scales, mins;
  std::vector<Strip> strips;  // of codes
};

std::vector<Strip> strips_of(const std::vector<Place>& codes) {
  std::vector<Strip> out;
  const auto add = [&](int column, const Bits& bits, int up) {
    if (bits.width == 0) return;
    const auto goes_on = [&](const Strip& s) {
      return s.column + s.count == column && s.byte + s.count == bits.byte && s.shift == bits.shift &&
             s.width == bits.width && s.up == up;
    };
    const auto found = std::find_if(out.begin(), out.end(), goes_on);
    if (found != out.end())
      ++found->count;
    else
      out.push_back({column, bits.byte, 1, bits.shift, bits.width, up});
  };
  for (int column = 0; column < std::ssize(codes); ++column) {
    const Place& place = codes[static_cast<size_t>(column)];
    add(column, place.low, 0);
    add(column, place.high, place.low.width);
  }
  return out;
}

constexpr int kStripStep = 16;  // columns the compiler makes vectors of

void decode_strip(const Strip strip, const uint8_t* block, uint8_t* codes) {
  const uint8_t* from = block + strip.byte;
  uint8_t* to = codes + strip.column;
  const int shift = strip.shift, up = strip.up;
  const auto mask = static_cast<uint8_t>((1u << strip.width) - 1);
  int i = 0;
  if (strip.width == 4 && up == 0)  // nibbles, most of what there is: with shifts that are constants
    for (; i + kStripStep <= strip.count; i += kStripStep) {
      std::array<uint8_t, kStripStep> part;
      std::memcpy(part.data(), from + i, kStripStep);
      if (shift == 0)
        for (uint8_t& code : part) code &= 15;
      else
        for (uint8_t& code : part) code = static_cast<uint8_t>(code >> 4);
      std::memcpy(to + i, part.data(), kStripStep);
    }
  for (; i + kStripStep <= strip.count; i += kStripStep) {
    std::array<uint8_t, kStripStep> part;  // apart from both, so that nothing aliases
    for (int j = 0; j < kStripStep; ++j)
      part[j] = static_cast<uint8_t>(((from[i + j] >> shift) & mask) << up);
    for (int j = 0; j < kStripStep; ++j) to[i + j] |= part[j];
  }
  for (; i < strip.count; ++i) to[i] = static_cast<uint8_t>(to[i] | ((from[i] >> shift) & mask) << up);
}

Places make_places(const Layout& layout) {
  const Format format = format_named(layout.format);
  Places places;
  if (is_grid(format.code)) return places;
  for (int i = 0; i < layout.size; ++i) places.codes.push_back(place_of_code(layout.type, i));
  places.strips = strips_of(places.codes);
  if (format.scale == Scale::kS8F16) {
    for (int i = 0; i < layout.size / format.span.k; ++i)
      places.scales.push_back(place_of_scale(layout.type, i));
  }
  if (format.min == Min::kS8F16) {
    for (int i = 0; i < layout.size / format.span.k; ++i) places.mins.push_back(place_of_min(layout.type, i));
  }
  return places;
}

const Places& places_of(const Layout& layout) {
  static const std::vector<Places> all = [] {
    std::vector<Places> made;
    for (const Layout& each : kLayouts) made.push_back(make_places(each));
    return made;
  }();
  return all[static_cast<size_t>(&layout - kLayouts.data())];
}

// Files add a min where a Format subtracts it; the sign bit of an f16 is the top bit of its second byte.
void negate_f16(uint8_t* bytes) { bytes[1] ^= 0x80; }

void decode_block(const Layout& layout, const Places& places, const uint8_t* block, int64_t index,
                  Matrix& out) {
  const Format& format = out.format;
  uint8_t* codes = out.codes.data() + index * layout.size;
  const int64_t count = format.span.k ? layout.size / format.span.k : 1;  // scales of a block
  if (is_grid(format.code))
    return decode_grid_block(layout.type, block,
                             {codes, out.scales.data() + index * count, out.supers.data() + index * 2});
  std::memset(codes, 0, static_cast<size_t>(layout.size));
  for (const Strip& strip : places.strips) decode_strip(strip, block, codes);
  if (format.code == Code::kE2m1) {
    // The reference has no minus zero among its code values.
    for (int i = 0; i < layout.size; ++i) codes[i] = codes[i] == 8 ? 0 : codes[i];
  }
  if (format.scale != Scale::kS8F16) {
    const int64_t bytes = count * scale_bytes(format.scale);
    uint8_t* scales = out.scales.data() + index * bytes;
    std::memcpy(scales, block + layout.scale_at, static_cast<size_t>(bytes));
    if (format.scale == Scale::kE4m3)  // the reference reads no sign, and the pattern of NaN as zero
      for (int64_t i = 0; i < bytes; ++i) scales[i] = (scales[i] & 0x7F) == 0x7F ? 0 : scales[i] & 0x7F;
  } else {
    std::memcpy(out.supers.data() + index * 2, block + layout.scale_at, 2);
    uint8_t* scales = out.scales.data() + index * std::ssize(places.scales);
    for (size_t i = 0; i < places.scales.size(); ++i) {
      scales[i] = static_cast<uint8_t>(gather(block, places.scales[i]) - layout.scale_offset);
    }
  }
  if (format.min == Min::kF16) {
    std::memcpy(out.mins.data() + index * 2, block + layout.min_at, 2);
    negate_f16(out.mins.data() + index * 2);
  } else if (format.min == Min::kS8F16) {
    std::memcpy(out.super_mins.data() + index * 2, block + layout.min_at, 2);
    uint8_t* mins = out.mins.data() + index * std::ssize(places.mins);
    for (size_t i = 0; i < places.mins.size(); ++i)
      mins[i] = static_cast<uint8_t>(gather(block, places.mins[i]));
  }
}

// A stored integer scale or min, checked against the bits there are for it.
uint32_t stored_integer(int8_t value, int offset, int bits, std::string_view name) {
  if (bits == 8) return static_cast<uint8_t>(value);
  const int stored = value + offset;
  if (stored < 0 || stored >= 1 << bits) {
    fail("{}: expected scales of {} to {}, got {}", name, -offset, (1 << bits) - 1 - offset, value);
  }
  return static_cast<uint32_t>(stored);
}

void encode_block(const Layout& layout, const Places& places, const MatrixView& w, int64_t index,
                  uint8_t* block, std::string_view name) {
  const Format& format = w.format;
  const uint8_t* codes = w.codes + index * layout.size;
  const int64_t count = format.span.k ? layout.size / format.span.k : 1;
  if (is_grid(format.code))
    return encode_grid_block(layout.type, {codes, w.scales + index * count, w.supers + index * 2}, block,
                             name);
  for (int i = 0; i < layout.size; ++i) scatter(block, places.codes[i], codes[i]);
  const int bits = span_scale_bits(format.code);
  if (format.scale != Scale::kS8F16) {
    const int64_t bytes = count * scale_bytes(format.scale);
    std::memcpy(block + layout.scale_at, w.scales + index * bytes, static_cast<size_t>(bytes));
  } else {
    std::memcpy(block + layout.scale_at, w.supers + index * 2, 2);
    const uint8_t* scales = w.scales + index * std::ssize(places.scales);
    for (size_t i = 0; i < places.scales.size(); ++i) {
      const auto integer = static_cast<int8_t>(scales[i]);
      scatter(block, places.scales[i], stored_integer(integer, layout.scale_offset, bits, name));
    }
  }
  if (format.min == Min::kF16) {
    std::memcpy(block + layout.min_at, w.mins + index * 2, 2);
    negate_f16(block + layout.min_at);
  } else if (format.min == Min::kS8F16) {
    std::memcpy(block + layout.min_at, w.super_mins + index * 2, 2);
    const uint8_t* mins = w.mins + index * std::ssize(places.mins);
    for (size_t i = 0; i < places.mins.size(); ++i) {
      scatter(block, places.mins[i], stored_integer(static_cast<int8_t>(mins[i]), 0, bits, name));
    }
  }
}

// Blocks in an n x k matrix.
int64_t block_count(const Layout& layout, int64_t n, int64_t k, std::string_view name) {
  check_shape(format_named(layout.format), n, k, name);
  if (k % layout.size != 0) {
    fail("{}: {} needs a multiple of {} columns, got [{}, {}]", name, layout.name, layout.size, n, k);
  }
  return n * (k / layout.size);
}

template <class Match>
std::optional<GgufType> find_type(Match match) {
  const auto found = std::find_if(kLayouts.begin(), kLayouts.end(), match);
  return found == kLayouts.end() ? std::nullopt : std::optional(found->type);
}

}  // namespace

std::optional<GgufType> gguf_type(uint32_t number) {
  return find_type([&](const Layout& l) { return static_cast<uint32_t>(l.type) == number; });
}

std::optional<GgufType> gguf_type(std::string_view name) {
  return find_type([&](const Layout& l) { return l.name == name; });
}

std::optional<GgufType> gguf_type(const Format& format) {
  return find_type([&](const Layout& l) { return format_named(l.format) == format; });
}

std::string_view name_of(GgufType type) { return layout_of(type).name; }
int gguf_block_size(GgufType type) { return layout_of(type).size; }
int gguf_block_bytes(GgufType type) { return layout_of(type).bytes; }
Format gguf_format(GgufType type) { return format_named(layout_of(type).format); }

Matrix matrix_from_gguf(GgufType type, std::span<const std::byte> rows, int64_t n, int64_t k,
                        std::string_view name) {
  const Layout& layout = layout_of(type);
  const int64_t count = block_count(layout, n, k, name);
  const int64_t expected = checked_mul(count, int64_t{layout.bytes}, name);
  if (std::ssize(rows) != expected) {
    fail("{}: expected {} bytes for [{}, {}] of {}, found {}", name, expected, n, k, layout.name,
         rows.size());
  }
  Matrix out(gguf_format(type), n, k);
  if (layout.scale_at == kNowhere) {
    std::memcpy(out.codes.data(), rows.data(), rows.size());
    return out;
  }
  const Places& places = places_of(layout);
  const auto* blocks = reinterpret_cast<const uint8_t*>(rows.data());
  for (int64_t i = 0; i < count; ++i) decode_block(layout, places, blocks + i * layout.bytes, i, out);
  return out;
}

std::vector<std::byte> gguf_from_matrix(GgufType type, const MatrixView& w, std::string_view name) {
  const Layout& layout = layout_of(type);
  if (w.format != gguf_format(type)) {
    fail("{}: {} stores {}, the matrix is {}", name, layout.name, layout.format, name_of(w.format));
  }
  const int64_t count = block_count(layout, w.n, w.k, name);
  std::vector<std::byte> out(static_cast<size_t>(checked_mul(count, int64_t{layout.bytes}, name)));
  if (layout.scale_at == kNowhere) {
    std::memcpy(out.data(), w.codes, out.size());
    return out;
  }
  const Places& places = places_of(layout);
  auto* blocks = reinterpret_cast<uint8_t*>(out.data());
  for (int64_t i = 0; i < count; ++i) encode_block(layout, places, w, i, blocks + i * layout.bytes, name);
  return out;
}

}  // namespace kt
