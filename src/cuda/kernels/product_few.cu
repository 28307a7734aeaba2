// Products with packed weights of 1 to 16 rows, in bf16: y = x W^T on matrix units, sums in f32. Kernels for each code
// but f32 and each width of a packed step, by the rows of x (8 or 16) and the row blocks that a warp takes.
//
// Such a product is as fast as its weights arrive. Warps of a block take the same rows of the matrix and every eighth
// piece of columns each; a warp copies its next pieces to its own part of the block's memory while it multiplies one
// (operands.h), and waits for nobody else until the end, when the warps' sums are added in one order. A result depends
// neither on the other rows of the call nor on how many there are, nor on which of these kernels gave it.
#include "cuda/kernels/codes.h"
#include "cuda/kernels/few.h"

namespace kt::inline cuda {

// Words of a block: stages, then where they stood the warps' sums.
template <Code kCode, int kBlocks, int kGroups>
constexpr int kFewWords = kFewWarps * (kWarpWords<kCode, kBlocks> > kGroups * 8 * kBlocks * kBlockRows / 4
                                           ? kWarpWords<kCode, kBlocks>
                                           : kGroups * 8 * kBlocks * kBlockRows / 4);

// Blocks [row blocks / kBlocks of all matrices, rows / (8 kGroups)].
template <Code kCode, int kStep, int kBlocks, int kGroups>
KT_GPU void product_of_few(const ProductsArgs& all, gpu::Words* memory) {
  constexpr int kRows = kGroups * 8, kWide = kBlocks * kBlockRows;
  const int which = matrix_of_block(all);
  const ProductArgs& args = all.of[which];
  const int first_block = (gpu::block() - all.first[which]) * kBlocks, first = gpu::block_y() * kRows;
  const int warp = gpu::thread() / gpu::kWarp, i = gpu::thread() % gpu::kWarp / 4, j = gpu::thread() % 4;
  float sums[kBlocks][kGroups][4] = {};
  const PackedRows& w = args.weights;
  sum_pieces(w, PieceCopies<kCode, kBlocks>(w, w.blocks, first_block),
             FewInput<kCode, kStep, kGroups>(args.x + first * args.x_stride, args.x_stride, args.m - first, w.k),
             OneMatrix{warp, few_pieces<kCode>(w.k), kFewWarps}, memory + warp * kWarpWords<kCode, kBlocks>, sums);
  gpu::barrier();  // whose pieces stood where the sums will
  auto* const parts = reinterpret_cast<float*>(memory);
  for (int b = 0; b < kBlocks; ++b)
    for (int g = 0; g < kGroups; ++g)
      for (int s = 0; s < 2; ++s)
        gpu::store8(parts + (warp * kRows + g * 8 + 2 * j + s) * kWide + b * kBlockRows + 2 * i,
                    {{gpu::bits_of(sums[b][g][s]), gpu::bits_of(sums[b][g][s + 2])}});
  gpu::barrier();
  const int rows = args.m - first < kRows ? args.m - first : kRows;
  KT_UNROLL(1)
  for (int at = gpu::thread(); at < rows * kWide; at += kFewThreads) {
    const int row = at / kWide, column = first_block * kBlockRows + at % kWide;
    if (column >= args.weights.n) continue;
    float sum = 0;
    for (int s = 0; s < kFewWarps; ++s) sum += parts[s * kRows * kWide + at];
    if (args.bias) sum += args.bias[column];
    if (args.factors) sum *= args.factors[first + row];
    args.y[(first + row) * args.y_stride + column] = sum;
  }
}

// kt_product_few_u4_4_8_1: codes u4, steps of 4 bytes, up to 8 rows of x, one row block.
#define KT_PRODUCT_FEW_OF(name, code, step, rows, blocks)                                                        \
  KT_KERNEL_BESIDE(kt_product_few_##name##_##step##_##rows##_##blocks, ProductsArgs, args, kFewThreads, 2) {     \
    KT_SHARED(gpu::Words, memory, (kFewWords<Code::code, blocks, rows / 8>));                                    \
    product_of_few<Code::code, step, blocks, rows / 8>(args, memory);                                            \
  }
#define KT_PRODUCT_FEW(name, code, step)        \
  KT_PRODUCT_FEW_OF(name, code, step, 8, 1)     \
  KT_PRODUCT_FEW_OF(name, code, step, 8, 2)     \
  KT_PRODUCT_FEW_OF(name, code, step, 16, 1)    \
  KT_PRODUCT_FEW_OF(name, code, step, 16, 2)

KT_FOR_ROUNDED_CODES(KT_PRODUCT_FEW)

}  // namespace kt::inline cuda
