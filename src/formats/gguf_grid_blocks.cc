// A block is described as the places of its fields, numbers of a few bits in a little-endian stream; decoding reads
// them and encoding writes them.
#include "formats/gguf_grid_blocks.h"

#include <array>
#include <bit>
#include <cstring>

#include "base/error.h"
#include "formats/grids.h"

namespace kt::inline formats {
namespace {

constexpr int kColumns = 256, kSigned = 8;  // columns of a block, and those whose signs stand together

struct Field {
  int bit = 0, width = 0;
};

uint32_t read(const uint8_t* block, Field field) {
  uint32_t bits = 0;
  for (int at = field.bit / 8, shift = 0; at * 8 < field.bit + field.width; ++at, shift += 8)
    bits |= uint32_t{block[at]} << shift;
  return bits >> field.bit % 8 & ((1u << field.width) - 1);
}

void write(uint8_t* block, Field field, uint32_t value) {
  value <<= field.bit % 8;
  for (int at = field.bit / 8; at * 8 < field.bit + field.width; ++at, value >>= 8)
    block[at] = static_cast<uint8_t>(block[at] | value);
}

// Low bits of index i.
constexpr Field low_of(GgufType type, int i) {
  switch (type) {
    case GgufType::kIQ2_XXS:
      return {16 + i / 4 * 64 + i % 4 * 8, 8};
    case GgufType::kIQ2_XS:
      return {16 + i * 16, 9};
    case GgufType::kIQ1_M:
      return {i * 8, 8};
    default:
      return {16 + i * 8, 8};
  }
}

// The bits of index i that lie elsewhere.
constexpr Field high_of(GgufType type, int i) {
  switch (type) {
    case GgufType::kIQ2_S:
      return {66 * 8 + i * 2, 2};
    case GgufType::kIQ3_S:
      return {66 * 8 + i, 1};
    case GgufType::kIQ1_S:
      return {34 * 8 + i / 4 * 16 + i % 4 * 3, 3};
    case GgufType::kIQ1_M:
      return {32 * 8 + i * 4, 3};
    default:
      return {};
  }
}

// Whether an eighth is taken from the numbers of index i instead of added.
constexpr Field eighth_of(GgufType type, int i) {
  return type == GgufType::kIQ1_S ? Field{34 * 8 + i / 4 * 16 + 15, 1} : Field{32 * 8 + i * 4 + 3, 1};
}

// Signs of eight numbers. Seven bits: the eighth number is negative where an odd number of them is set.
constexpr Field signs_of(GgufType type, int i) {
  switch (type) {
    case GgufType::kIQ2_XXS:
      return {16 + i / 4 * 64 + 32 + i % 4 * 7, 7};
    case GgufType::kIQ2_XS:
      return {16 + i * 16 + 9, 7};
    case GgufType::kIQ2_S:
      return {(34 + i) * 8, 8};
    case GgufType::kIQ3_XXS:
      return {66 * 8 + i / 4 * 32 + i % 4 * 7, 7};
    case GgufType::kIQ3_S:
      return {(74 + i) * 8, 8};
    default:
      return {};
  }
}

constexpr Field scale_of(GgufType type, int span) {
  switch (type) {
    case GgufType::kIQ2_XXS:
      return {16 + span * 64 + 60, 4};
    case GgufType::kIQ2_XS:
      return {66 * 8 + span * 4, 4};
    case GgufType::kIQ2_S:
      return {74 * 8 + span * 4, 4};
    case GgufType::kIQ3_XXS:
      return {66 * 8 + span * 32 + 28, 4};
    case GgufType::kIQ3_S:
      return {106 * 8 + span * 4, 4};
    case GgufType::kIQ1_S:
      return {34 * 8 + span * 16 + 12, 3};
    default:  // IQ1_M
      return {48 * 8 + span / 4 * 16 + span % 4 * 3, 3};
  }
}

// Four bits of the f16 factor, the lowest first.
constexpr Field nibble_of_super(GgufType type, int i) {
  return type == GgufType::kIQ1_M ? Field{48 * 8 + i * 16 + 12, 4} : Field{i * 4, 4};
}

uint32_t sign_byte(uint32_t stored, int width) {
  return width == 7 ? stored | static_cast<uint32_t>(std::popcount(stored) & 1) << 7 : stored;
}

uint32_t negative(const uint8_t* codes) {
  uint32_t signs = 0;
  for (int i = 0; i < kSigned; ++i) signs |= static_cast<uint32_t>(codes[i] < kGridBias) << i;
  return signs;
}

int spans_of(GgufType type) { return kColumns / gguf_format(type).span.k; }

}  // namespace

void decode_grid_block(GgufType type, const uint8_t* block, const GridBlock<uint8_t>& to) {
  const Code code = gguf_format(type).code;
  const int numbers = grid_of(code).numbers;
  for (int i = 0; i < kColumns / numbers; ++i) {
    const Field low = low_of(type, i);
    uint32_t index = read(block, low) | read(block, high_of(type, i)) << low.width;
    if (code == Code::kIq1) index |= read(block, eighth_of(type, i)) << 11;
    look_up(code, static_cast<int>(index), to.codes + i * numbers);
  }
  for (int i = 0; grid_of(code).signs && i < kColumns / kSigned; ++i) {
    const Field field = signs_of(type, i);
    uint8_t* codes = to.codes + i * kSigned;
    for (uint32_t signs = sign_byte(read(block, field), field.width); signs; signs &= signs - 1) {
      uint8_t& each = codes[std::countr_zero(signs)];
      each = negated_code(each);
    }
  }
  for (int i = 0; i < spans_of(type); ++i)
    to.scales[i] = static_cast<uint8_t>(2 * read(block, scale_of(type, i)) + 1);
  uint32_t super = 0;
  for (int i = 0; i < 4; ++i) super |= read(block, nibble_of_super(type, i)) << 4 * i;
  to.super[0] = static_cast<uint8_t>(super), to.super[1] = static_cast<uint8_t>(super >> 8);
}

void encode_grid_block(GgufType type, const GridBlock<const uint8_t>& from, uint8_t* block,
                       std::string_view name) {
  const Code code = gguf_format(type).code;
  const int numbers = grid_of(code).numbers;
  for (int i = 0; i < kColumns / numbers; ++i) {
    const int index = grid_index(code, from.codes + i * numbers);
    if (index < 0) fail("{}: {} has no such {} numbers side by side", name, name_of(type), numbers);
    const Field low = low_of(type, i), high = high_of(type, i);
    const auto bits = static_cast<uint32_t>(index);
    write(block, low, bits & ((1u << low.width) - 1));
    write(block, high, bits >> low.width & ((1u << high.width) - 1));
    if (code != Code::kIq1) continue;
    const Field eighth = eighth_of(type, i);
    const bool first = type != GgufType::kIQ1_S || i % 4 == 0;
    if (!first && read(block, eighth) != bits >> 11)
      fail("{}: {} adds an eighth to 32 columns or takes one, not both", name, name_of(type));
    if (first) write(block, eighth, bits >> 11);
  }
  for (int i = 0; grid_of(code).signs && i < kColumns / kSigned; ++i) {
    const Field field = signs_of(type, i);
    const uint32_t signs = negative(from.codes + i * kSigned), stored = signs & ((1u << field.width) - 1);
    if (sign_byte(stored, field.width) != signs)
      fail("{}: {} stores an even number of negative numbers in eight", name, name_of(type));
    write(block, field, stored);
  }
  for (int i = 0; i < spans_of(type); ++i) {
    const Field field = scale_of(type, i);
    const int scale = static_cast<int8_t>(from.scales[i]), most = (2 << field.width) - 1;
    if (scale < 1 || scale > most || scale % 2 == 0)
      fail("{}: {} stores odd scales of 1 to {}, got {}", name, name_of(type), most, scale);
    write(block, field, static_cast<uint32_t>(scale / 2));
  }
  for (int i = 0; i < 4; ++i)
    write(block, nibble_of_super(type, i), uint32_t{from.super[i / 2]} >> i % 2 * 4 & 15);
}

}  // namespace kt::inline formats
