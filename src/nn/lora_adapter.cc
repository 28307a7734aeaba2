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
constexpr int kWideRows = 64, kWideColumns = 512;  // and in bf16

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

// In bf16 a worker's memory: a factor as right operand, a product of it, and what that takes.
struct Places {
  size_t turned = 0, sums = 0, part = 0, product = 0, bytes = 0;
  Places(const FactorProducts& products, int blocks, int rows, int k, int k_at_once) {
    sums = static_cast<size_t>(blocks * products.block_bytes(k));
    part = sums + static_cast<size_t>(rows) * blocks * kBlockRows * sizeof(float);
    product = part + (part - sums);
    bytes = product + products.product_bytes(rows, k_at_once);
  }
};
// A whole row of `in` columns, or kMostK of them that are packed here.
Places reading(const FactorProducts& products, const LowRank& f, int64_t in) {
  constexpr int kMostK = FactorProducts::kMostK;
  return {products, ceil_div(f.rank, kBlockRows), ExpertAdapter::kReadApart,
          std::max(static_cast<int>(in), kMostK), kMostK};
}
Places adding(const FactorProducts& products, const LowRank& f) {
  return {products, kWideColumns / kBlockRows, kWideRows, f.rank, f.rank};
}

}  // namespace

LoraAdapter::LoraAdapter(const Experts& experts, const ExpertLora& lora, bool bf16)
    : kernels_(experts.kernels()),
      shape_(experts.shape()),
      parts_(experts.state().padding),
      lora_(lora),
      products_(experts.kernels(), bf16 && lora.wide()) {
  check(lora.gate_up, "gate and up");
  check(lora.down, "down");
}

int LoraAdapter::kept_floats(Input input) const noexcept {
  const LowRank& f = factors(input);
  if (f.empty()) return 0;
  return products_.bf16() ? std::max(f.rank, round_up(f.rank, kChunk) / 2) : f.rank;
}

size_t LoraAdapter::scratch_bytes() const noexcept {
  size_t most = 0;
  for (const LowRank* f : {&lora_.gate_up, &lora_.down})
    if (products_.bf16() && !f->empty())
      most = std::max({most, reading(products_, *f, std::max<int64_t>(shape_.hidden, parts_.width())).bytes,
                       adding(products_, *f).bytes});
  return most;
}

// [count, rank in whole blocks], in the rows' scratch, before the scale.
float* LoraAdapter::read_bf16(const Rows& rows, const LowRank& f) const noexcept {
  const bool tokens = rows.input == Input::kTokens;
  const int64_t in = tokens ? shape_.hidden : shape_.inter, size = rows.type == Real::kF32 ? 4 : 2;
  const float* a = f.a + rows.expert * f.rank * in;
  const int blocks = ceil_div(f.rank, kBlockRows), width = blocks * kBlockRows;
  const Places at = reading(products_, f, std::max<int64_t>(shape_.hidden, parts_.width()));
  auto* const sums = reinterpret_cast<float*>(rows.scratch + at.sums);
  const auto turn = [&](const PaddedParts::Stretch& here, int k_pad) {
    products_.turn({.from = a + here.first,
                    .k_step = 1,
                    .lane_step = in,
                    .k = here.count,
                    .lanes = f.rank,
                    .blocks = blocks,
                    .k_pad = k_pad,
                    .out = rows.scratch,
                    .out_stride = products_.block_bytes(k_pad)});
  };
  if (rows.packed && (tokens || !parts_)) {
    turn({rows.column, rows.columns, rows.columns}, rows.packed->shape.k_pad);
    products_.multiply_packed(*rows.packed, rows.count, rows.scratch, blocks, sums, width,
                              rows.scratch + at.product);
    return sums;
  }
  auto* const part = reinterpret_cast<float*>(rows.scratch + at.part);
  std::fill_n(sums, int64_t{rows.count} * width, 0.0f);
  for (int64_t column = 0; column < rows.columns;) {
    const int most = static_cast<int>(std::min<int64_t>(rows.columns - column, FactorProducts::kMostK));
    const PaddedParts::Stretch here =
        tokens ? PaddedParts::Stretch{column, most, most} : parts_.stretch(rows.column + column, most);
    if (here.count > 0) {
      turn(here, round_up(here.count, kChunk));
      products_.multiply({.a = static_cast<const std::byte*>(rows.source) + column * size,
                          .type = rows.type,
                          .a_stride = rows.stride,
                          .index = tokens ? rows.tokens : nullptr,
                          .m = rows.count,
                          .k = here.count,
                          .turned = rows.scratch,
                          .blocks = blocks,
                          .out = part,
                          .out_stride = width},
                         rows.scratch + at.product);
      kernels_.add_scaled(sums, part, 1.0f, rows.count * width);
    }
    column += here.wide;
  }
  return sums;
}

void LoraAdapter::add_bf16(const Tile& tile, const LowRank& f) const noexcept {
  const bool down = tile.part == ExpertPart::kDown, both = tile.block_ld != kBlockRows;
  if (both && tile.part == ExpertPart::kUp) return;  // was added with gate
  const int64_t out = down ? shape_.hidden : 2 * int64_t{shape_.inter};
  const float* b = f.b + (tile.expert * out + (tile.part == ExpertPart::kUp ? shape_.inter : 0)) * f.rank;
  const Places at = adding(products_, f);
  auto* const sums = reinterpret_cast<float*>(tile.scratch + at.sums);
  const int each = both ? 2 : 1;
  const Acts kept = acts_in(products_.acts_shape(tile.m, f.rank),
                            reinterpret_cast<std::byte*>(const_cast<float*>(tile.kept)));  // read alone
  for (int column = 0; column < tile.columns;) {
    const int most = std::min(tile.columns - column, kWideColumns / each);
    const PaddedParts::Stretch here = down ? PaddedParts::Stretch{tile.column + column, most, most}
                                           : parts_.stretch(tile.column + column, most);
    const int blocks = ceil_div(here.count, kBlockRows), columns = each * blocks * kBlockRows;
    if (blocks > 0) {
      for (int part = 0; part < each; ++part)
        products_.turn({.from = b + (here.first + int64_t{part} * shape_.inter) * f.rank,
                        .k_step = 1,
                        .lane_step = f.rank,
                        .k = f.rank,
                        .lanes = here.count,
                        .blocks = blocks,
                        .k_pad = kept.shape.k_pad,
                        .out = tile.scratch + part * products_.block_bytes(f.rank),
                        .out_stride = each * products_.block_bytes(f.rank)});
      for (int first = 0; first < tile.m; first += kWideRows) {
        const int rows = std::min(kWideRows, tile.m - first);
        products_.multiply_packed(rows_from(kept, first, std::min(kWideRows, kept.shape.rows - first)), rows,
                                  tile.scratch, each * blocks, sums, columns, tile.scratch + at.product);
        for (int i = 0; i < rows; ++i)
          kernels_.add_scaled(tile.at(first + i, column / kBlockRows), sums + int64_t{i} * columns, 1.0f,
                              columns);
      }
    }
    column += here.wide;
  }
}

void LoraAdapter::read(const Rows& rows) const noexcept {
  const LowRank& f = factors(rows.input);
  if (!takes_bf16(rows.m)) return read_f32(rows, f);
  float* const sums = read_bf16(rows, f);
  const int width = round_up(f.rank, kBlockRows);
  for (int64_t i = 0; i < int64_t{rows.count} * width; ++i) sums[i] *= f.scale;
  const ActShape shape = products_.acts_shape(rows.m, f.rank);
  const bool last = rows.first + rows.count == rows.m;
  const Acts kept = acts_in(shape, reinterpret_cast<std::byte*>(rows.kept));
  kernels_.pack_acts({.source = sums,
                      .stride = width,
                      .m = rows.count,
                      .k = f.rank,
                      .out = rows_from(kept, rows.first, last ? shape.rows - rows.first : rows.count)});
}

void LoraAdapter::read_floats(const Rows& rows) const noexcept {
  const LowRank& f = factors(rows.input);
  if (!takes_bf16(rows.m)) return read_f32(rows, f);
  const float* const sums = read_bf16(rows, f);
  const int width = round_up(f.rank, kBlockRows);
  for (int i = 0; i < rows.count; ++i)
    for (int r = 0; r < f.rank; ++r)
      rows.kept[int64_t{rows.first + i} * f.rank + r] = f.scale * sums[int64_t{i} * width + r];
}

void LoraAdapter::read_f32(const Rows& rows, const LowRank& f) const noexcept {
  const bool tokens = rows.input == Input::kTokens;
  const int64_t in = tokens ? shape_.hidden : shape_.inter;
  const float* a = f.a + rows.expert * f.rank * in;
  const FloatRows source{.source = rows.source,
                         .type = rows.type,
                         .stride = rows.stride,
                         .index = tokens ? rows.tokens : nullptr};
  alignas(64) float memory[kReadRows * kReadColumns];
  float* const kept = rows.kept + int64_t{rows.first} * f.rank;
  std::fill_n(kept, int64_t{rows.count} * f.rank, 0.0f);
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
          kept[int64_t{first + i} * f.rank + r] += kernels_.rows->dot(
              memory + int64_t{i} * round_up(here.count, kChunk), a + r * in + here.first, here.count);
    }
    at += here.wide;
  }
  for (int64_t i = 0; i < int64_t{rows.count} * f.rank; ++i) kept[i] *= f.scale;
}

void LoraAdapter::add(const Tile& tile) const noexcept {
  constexpr int kRanks = 64;
  const bool down = tile.part == ExpertPart::kDown;
  const LowRank& f = down ? lora_.down : lora_.gate_up;
  if (f.empty()) return;
  if (takes_bf16(tile.m)) return add_bf16(tile, f);
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
