// Products with packed weights in f32: y = x W^T. A kernel for each code, width of a packed step and number of rows.
// nvcc compiles one code and step at a time (KT_CODE, KT_STEP), so that a model loads what it uses.
//
// A block takes 16 rows of the matrix. A result depends neither on the other rows of the call nor on how many there are.
#include "cuda/kernels/codes.h"
#include "cuda/kernels/packed.h"

namespace kt {

// Blocks of 16 lanes for each slice, [row blocks, rows / kRows]: lane l of warp w is row l % 16 of the block, and its slice has
// chunk w * 2 + l / 16 and every so manieth behind it; slices are added in order.
template <Code kCode, int kStep, int kRows>
KT_GPU void product(const ProductArgs& args, int block, float* slices) {
  const PackedRows& w = args.weights;
  const int row = gpu::thread() % kBlockRows, slice = gpu::thread() / kBlockRows, all = product_slices(w.k);
  const int first = gpu::block_y() * kRows, rows = args.m - first < kRows ? args.m - first : kRows;
  const InputRows x{args.x + first * args.x_stride, args.x_stride, rows};
  float sums[kRows] = {};
  for (int chunk = slice; slice < all && chunk * kChunk < w.k; chunk += all)
    add_chunk_of_rows<kCode, kStep, kRows>(w, w.blocks + block * w.block_bytes, chunk, row, x, sums);
  for (int r = 0; r < kRows; ++r) slices[(slice * kRows + r) * kBlockRows + row] = sums[r];
  gpu::barrier();
  for (int i = gpu::thread(); i < rows * kBlockRows; i += gpu::threads()) {
    const int r = i / kBlockRows, column = block * kBlockRows + i % kBlockRows;
    if (column >= w.n) continue;
    float sum = 0;
    for (int s = 0; s < all; ++s) sum += slices[(s * kRows + r) * kBlockRows + i % kBlockRows];
    if (args.bias) sum += args.bias[column];
    if (args.factors) sum *= args.factors[first + r];
    args.y[(first + r) * args.y_stride + column] = sum;
  }
}

KT_GPU int matrix_of_block(const ProductsArgs& args) {
  int which = 0;
  while (which + 1 < args.count && gpu::block() >= args.first[which + 1]) ++which;
  return which;
}

// kt_product_u4_4_1: codes u4, steps of 4 bytes, one row.
#define KT_PRODUCT(name, code, step)                                                                      \
  KT_KERNEL(kt_product_##name##_##step##_1, ProductsArgs, args, kMostSlices * kBlockRows) {               \
    KT_SHARED(float, slices, kMostSlices * kBlockRows);                                                   \
    const int which = matrix_of_block(args);                                                              \
    product<Code::code, step, 1>(args.of[which], gpu::block() - args.first[which], slices);               \
  }                                                                                                       \
  KT_KERNEL(kt_product_##name##_##step##_8, ProductsArgs, args, kMostSlices * kBlockRows) {               \
    KT_SHARED(float, slices, kMostSlices * kBlockRows * 8);                                               \
    const int which = matrix_of_block(args);                                                              \
    product<Code::code, step, 8>(args.of[which], gpu::block() - args.first[which], slices);               \
  }

KT_FOR_CODES(KT_PRODUCT)

}  // namespace kt
