#include "nn/lora_adapter.h"

#include <algorithm>

#include "base/error.h"
#include "kernels/gram.h"
#include "kernels/row_ops.h"
#include "nn/experts_state.h"
#include "nn/float_rows.h"

namespace kt::inline nn {
namespace {

constexpr int kReadRows = 16, kReadColumns = 512;  // as f32: 32 KiB, read once for each row of A
constexpr int kAddRows = 16, kAddBlocks = 4;       // sums of a product before they are added

void check(const LowRank& f, const char* what) {
  if (f.rank < 0) fail("LoRA of {}: rank {}, expected at least 0", what, f.rank);
  if (f.rank > 0 && !f.a != !f.b) fail("LoRA of {}: {} is null and the other is not", what, f.a ? "B" : "A");
}

// out[block, r, lane] = b[row_of(16 * block + lane), r], zeros where that is negative.
template <typename RowOf>
void turn_rows(const float* b, int rank, int r0, int ranks, int blocks, RowOf row_of, float* out) {
  for (int column = 0; column < blocks * kBlockRows; ++column) {
    float* to = out + int64_t{column / kBlockRows} * ranks * kBlockRows + column % kBlockRows;
    const int64_t row = row_of(column);
    for (int r = 0; r < ranks; ++r) to[r * kBlockRows] = row < 0 ? 0.0f : b[row * rank + r0 + r];
  }
}

}  // namespace

LoraAdapter::LoraAdapter(const Experts& experts, const ExpertLora& lora)
    : kernels_(experts.kernels()), shape_(experts.shape()), parts_(experts.state().padding), lora_(lora) {
  check(lora.gate_up, "gate and up");
  check(lora.down, "down");
}

int LoraAdapter::kept_floats(Input input) const noexcept {
  const LowRank& f = factors(input);
  return f.empty() ? 0 : f.rank;
}

void LoraAdapter::read(const Rows& rows) const noexcept {
  const bool tokens = rows.input == Input::kTokens;
  const LowRank& f = factors(rows.input);
  const int64_t in = tokens ? shape_.hidden : shape_.inter;
  const float* a = f.a + rows.expert * f.rank * in;
  const FloatRows source{.source = rows.source,
                         .type = rows.type,
                         .stride = rows.stride,
                         .index = tokens ? rows.tokens : nullptr};
  alignas(64) float memory[kReadRows * kReadColumns];
  std::fill_n(rows.kept, int64_t{rows.count} * f.rank, 0.0f);
  for (int64_t at = 0; at < rows.columns;) {
    // Columns of the rows from `at` on are those of A from `here.first` on.
    const int most = static_cast<int>(std::min<int64_t>(rows.columns - at, kReadColumns));
    const PaddedParts::Stretch here =
        tokens ? PaddedParts::Stretch{at, most, most} : parts_.stretch(rows.column + at, most);
    for (int first = 0; first < rows.count && here.count > 0; first += kReadRows) {
      const int count = std::min(kReadRows, rows.count - first);
      source.copy(kernels_, first, count, at, here.count, memory);
      for (int i = 0; i < count; ++i)
        for (int r = 0; r < f.rank; ++r)
          rows.kept[int64_t{first + i} * f.rank + r] += kernels_.rows->dot(
              memory + int64_t{i} * round_up(here.count, kChunk), a + r * in + here.first, here.count);
    }
    at += here.wide;
  }
  for (int64_t i = 0; i < int64_t{rows.count} * f.rank; ++i) rows.kept[i] *= f.scale;
}

void LoraAdapter::add(const Tile& tile) const noexcept {
  constexpr int kRanks = 64;
  const bool down = tile.part == ExpertPart::kDown;
  const LowRank& f = down ? lora_.down : lora_.gate_up;
  if (f.empty()) return;
  const GramKernels& products = gram_kernels(kernels_);
  const int64_t out = down ? shape_.hidden : 2 * int64_t{shape_.inter},
                begin = tile.part == ExpertPart::kUp ? shape_.inter : 0;
  const float* b = f.b + tile.expert * out * f.rank;
  alignas(64) float turned[kAddBlocks * kRanks * kBlockRows], sums[kAddRows * kAddBlocks * kBlockRows];
  const int all = ceil_div(tile.columns, kBlockRows);
  for (int block = 0; block < all; block += kAddBlocks) {
    const int blocks = std::min(kAddBlocks, all - block);
    const auto row_of = [&](int column) {
      const int64_t at = block * kBlockRows + column;
      if (at >= tile.columns) return int64_t{-1};
      if (down) return tile.column + at;
      const int64_t narrow = parts_.narrow(tile.column + at);
      return narrow < 0 ? narrow : begin + narrow;
    };
    for (int r0 = 0; r0 < f.rank; r0 += kRanks) {
      const int ranks = std::min(kRanks, f.rank - r0);
      turn_rows(b, f.rank, r0, ranks, blocks, row_of, turned);
      for (int first = 0; first < tile.m; first += kAddRows) {
        const int rows = std::min(kAddRows, tile.m - first);
        products.product_f32({.a = tile.kept + int64_t{first} * f.rank + r0,
                              .a_stride = f.rank,
                              .m = rows,
                              .k = ranks,
                              .b = turned,
                              .b_stride = int64_t{ranks} * kBlockRows,
                              .blocks = blocks,
                              .out = sums,
                              .out_stride = int64_t{blocks} * kBlockRows});
        for (int i = 0; i < rows; ++i)
          for (int j = 0; j < blocks; ++j)
            kernels_.add_scaled(tile.at(first + i, block + j), sums + (i * blocks + j) * kBlockRows, 1.0f,
                                kBlockRows);
      }
    }
  }
}

}  // namespace kt::inline nn
