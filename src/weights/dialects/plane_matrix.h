// One stored matrix as planes of bytes: codes, scales and zero points, each with its own strides and packing,
// read into plain order. Every dialect is a way to fill in a StoredPlanes; reading is written once, here.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "formats/gguf_blocks.h"
#include "weights/experts.h"
#include "weights/tensor.h"

namespace kt::inline weights {

// How codes of (row, column) lie in StoredPlanes::codes.
enum class CodePacking : uint8_t {
  kPlain,        // whole codes at row * row_stride + column * column_stride
  kOffsetByte,   // the same, code + 128 in a byte
  kRowNibbles,   // two to a byte along a row, the lower column in the low nibble; rows row_stride apart
  kColumnWords,  // GPTQ: 32-bit words of consecutive columns, [k / per word, n]; words row_stride bytes a row
                 // of words
  kRowWords,     // AWQ: 32-bit words of eight rows in the order 0 2 4 6 1 3 5 7, [k, n / 8]; row_stride as
                 // above
  kGguf,         // blocks of gguf_type, rows row_stride apart, scales inside
};

// How zero points of (row, span) lie; words of eight 4-bit numbers.
enum class ZeroPacking : uint8_t {
  kNone,
  kInOrder,   // [spans, n / 8], low bits first
  kAwqOrder,  // [spans, n / 8], rows 0 2 4 6 1 3 5 7
  kRowsDown,  // [ceil(n / 8), spans]: compressed-tensors
};

struct StoredPlanes {
  Format format;
  int64_t n = 0, k = 0;
  CodePacking packing = CodePacking::kPlain;
  int bits = 4;  // of a packed integer code
  std::span<const std::byte> codes;
  int64_t row_stride = 0, column_stride = 0;  // bytes
  GgufType gguf_type = GgufType::kF32;

  // Scales: element (row / span.n, span) in its stored type, widened to format.scale where that is kF32.
  std::span<const std::byte> scales;
  Dtype scale_type = Dtype::kF32;
  float scale_factor = 1;                               // of all of them, where format.scale is kF32
  int64_t scale_row_stride = 0, scale_span_stride = 0;  // bytes

  ZeroPacking zero_packing = ZeroPacking::kNone;
  std::span<const std::byte> zeros;
  int64_t zero_stride = 0;      // bytes from one row of words to the next
  int zero_offset = 0;          // added to what is stored
  std::vector<int32_t> groups;  // [spans] stored span of each span of the format; empty: themselves

  // Rows first, first + step, ... of what is stored: how gate and up share a fused tensor. Scales held over
  // several rows allow step 1 and a first row that begins a block.
  void select_rows(int64_t first, int64_t step, int64_t count, std::string_view name);
};

// zero(row, span) as stored, without zero_offset.
int stored_zero(const StoredPlanes& planes, int64_t row, int64_t span);

std::unique_ptr<StoredMatrix> plane_matrix(std::string name, StoredPlanes planes);

}  // namespace kt::inline weights
