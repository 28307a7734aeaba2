// Products with packed weights in f32: y = x W^T. A kernel for each code, width of a packed step and number of rows.
// nvcc compiles one code and step at a time (KT_CODE, KT_STEP), so that a model loads what it uses.
//
// A block takes 16 rows of the matrix. A result depends neither on the other rows of the call nor on how many there
// are.
#include "cuda/kernels/codes.h"
#include "cuda/kernels/packed.h"

namespace kt::inline cuda {

constexpr int kProductWarps = kProductThreads / gpu::kWarp, kWarpGroups = gpu::kWarp / kRowLanes;

// Sums of a warp's groups of lanes as add_lanes() adds them.
KT_GPU float sum_of_warp(const float* first, int stride) {
  float sums[kWarpGroups];
  for (int g = 0; g < kWarpGroups; ++g) sums[g] = first[g * stride];
  for (int step = 1; step < kWarpGroups; step *= 2)
    for (int g = 0; g < kWarpGroups; g += 2 * step) sums[g] += sums[g + step];
  return sums[0];
}

// Blocks of 8 warps, [row blocks, rows / kRows]: four neighbouring lanes are the 16 rows and take every 64th piece of
// columns; lanes of a warp are added in one order, then warps.
template <Code kCode, int kStep, int kRows>
KT_GPU void product(const ProductArgs& args, int block, float* parts) {
  const PackedRows& w = args.weights;
  const int row = gpu::thread() % kRowLanes * kLaneRows;
  const int first = gpu::block_y() * kRows, rows = args.m - first < kRows ? args.m - first : kRows;
  const InputRows x{args.x + first * args.x_stride, args.x_stride, rows};
  float sums[kRows][kLaneRows] = {};
  KT_UNROLL(1)
  for (int piece = gpu::thread() / kRowLanes; piece < pieces_of<kCode, kStep>(w.k);
       piece += kProductWarps * gpu::kWarp / kRowLanes)
    add_piece_of_rows<kCode, kStep, kRows>(w, w.blocks + block * w.block_bytes, piece, row, x, sums);
  const int group = gpu::thread() / kRowLanes;
  if constexpr (kRows == 1) {
    add_lanes(sums[0]);
    if (group % kWarpGroups == 0)
      for (int i = 0; i < kLaneRows; ++i) parts[group / kWarpGroups * kBlockRows + row + i] = sums[0][i];
  } else {  // too many numbers to pass from lane to lane
    for (int r = 0; r < kRows; ++r)
      for (int i = 0; i < kLaneRows; ++i) parts[(group * kRows + r) * kBlockRows + row + i] = sums[r][i];
  }
  gpu::barrier();
  for (int i = gpu::thread(); i < rows * kBlockRows; i += gpu::threads()) {
    const int r = i / kBlockRows, column = block * kBlockRows + i % kBlockRows;
    if (column >= w.n) continue;
    float sum = 0;
    for (int s = 0; s < kProductWarps; ++s)
      sum += kRows == 1 ? parts[s * kBlockRows + i]
                        : sum_of_warp(parts + s * kWarpGroups * kRows * kBlockRows + i, kRows * kBlockRows);
    if (args.bias) sum += args.bias[column];
    if (args.factors) sum *= args.factors[first + r];
    args.y[(first + r) * args.y_stride + column] = sum;
  }
}

// kt_product_u4_4_1: codes u4, steps of 4 bytes, one row.
#define KT_PRODUCT(name, code, step)                                                                        \
  KT_KERNEL_BESIDE(kt_product_##name##_##step##_1, ProductsArgs, args, kProductThreads, 2) {                \
    KT_SHARED(float, parts, kProductWarps * kBlockRows);                                                    \
    const int which = matrix_of_block(args);                                                                \
    product<Code::code, step, 1>(args.of[which], gpu::block() - args.first[which], parts);                  \
  }                                                                                                         \
  KT_KERNEL(kt_product_##name##_##step##_8, ProductsArgs, args, kProductThreads) {                          \
    KT_SHARED(float, parts, kProductWarps * kWarpGroups * kBlockRows * 8);                                  \
    const int which = matrix_of_block(args);                                                                \
    product<Code::code, step, 8>(args.of[which], gpu::block() - args.first[which], parts);                  \
  }

KT_FOR_CODES(KT_PRODUCT)

}  // namespace kt::inline cuda
