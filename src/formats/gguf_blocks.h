// GGUF tensor types: blocks of packed codes with their scales inside, turned into a plain Matrix and back.
// The one place that knows their bit layouts; files, headers and tensor names are somebody else's.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "formats/format.h"
#include "formats/matrix.h"

namespace kt::inline formats {

// The values are the type numbers in files.
enum class GgufType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ2_XXS = 16,
  kIQ2_XS = 17,
  kIQ3_XXS = 18,
  kIQ1_S = 19,
  kIQ4_NL = 20,
  kIQ3_S = 21,
  kIQ2_S = 22,
  kIQ4_XS = 23,
  kIQ1_M = 29,
  kBF16 = 30,
  kMXFP4 = 39,
  kNVFP4 = 40,
};

// The type of that number or of that name ("Q4_K", in capitals as files' tools print it); nothing if unknown.
std::optional<GgufType> gguf_type(uint32_t number);
std::optional<GgufType> gguf_type(std::string_view name);
// The type that stores this format, if one does.
std::optional<GgufType> gguf_type(const Format& format);

std::string_view name_of(GgufType type);
int gguf_block_size(GgufType type);   // columns in a block; a row is a whole number of blocks
int gguf_block_bytes(GgufType type);  // bytes of a block
Format gguf_format(GgufType type);    // what the decoded matrix has

// Decodes `rows`, [n, k / block] blocks, so that value_at() gives the bits that the reference dequantisation
// gives. Errors name `name`, and the bytes or columns expected and found. Copies; n * k code bytes.
Matrix matrix_from_gguf(GgufType type, std::span<const std::byte> rows, int64_t n, int64_t k,
                        std::string_view name = "tensor");
// The inverse: blocks that decode to the same values. w.format must be gguf_format(type), and integer scales
// within what the type stores, which holds for what quantise() and matrix_from_gguf() make.
std::vector<std::byte> gguf_from_matrix(GgufType type, const MatrixView& w, std::string_view name = "tensor");

}  // namespace kt::inline formats
