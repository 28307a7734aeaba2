// Products with packed weights of many rows, in bf16: y = x W^T on matrix units, sums in f32. A kernel for each code
// but f32 and each width of a packed step; nvcc compiles one of them at a time.
//
// A block of four warps gives 128 rows of x times 128 rows of the matrix. For every 64 columns its threads widen the
// packed codes to bf16 in shared memory, once for all rows of x, in the order in which a warp's matrix instruction
// takes them; the codes of the next columns and the next columns of x are under way meanwhile. Two blocks run side by
// side on a multiprocessor: one widens while the other multiplies.
//
// Which columns an instruction adds up is free, as long as both sides agree: of 32 columns lane 4 i + j takes 8 j to 8
// j + 7, the first four for one instruction and the others for the next. So 16 bytes of a row of x are what a lane
// wants for two instructions, and four neighbouring columns of a widened row are 8 bytes.
#include "cuda/kernels/codes.h"
#include "cuda/kernels/packed.h"

namespace kt::inline cuda {

constexpr int kSlab = kChunk;                             // columns at once
constexpr int kManyBlocks = kTileColumns / kBlockRows;  // row blocks
constexpr int kFragment = gpu::kWarp;                     // Words of 16 x 16 weights
constexpr int kWeightWords = kManyBlocks * kSlab / 16 * kFragment;
constexpr int kHalf = 32 * 2 / 16;  // Words of half a slab's columns of a row of x
constexpr int kInputWords = kTileRows * kSlab * 2 / 16;
constexpr int kWarpBlocks = 4, kWarpGroups = 8;  // of a warp: row blocks, groups of 8 rows of x

static_assert(kManyThreads == kManyBlocks * kRowLanes * (kSlab / 16),
              "a thread widens four rows by 16 columns");

// What a thread widens of a slab.
template <Code kCode, int kStep>
struct LoadedPiece {
  LoadedCodes<kCode, kStep, 16> codes;
  RowFactors factors[1][kLaneRows];
};

// Which rows and columns that is: threads of a row block are neighbours.
struct PiecePlace {
  int thread, block = thread / (kRowLanes * (kSlab / 16)), part = thread / kRowLanes % (kSlab / 16),
              row = thread % kRowLanes * kLaneRows;
};

template <Code kCode, int kStep>
KT_GPU LoadedPiece<kCode, kStep> load_piece(const PackedRows& w, const uint8_t* block, int slab,
                                      const PiecePlace& place) {
  const PieceAt at = piece_from<kCode>(w, block, slab * kSlab + place.part * 16);
  LoadedPiece<kCode, kStep> out;
  out.codes = load_codes<kCode, kStep, 16>(chunk_of<kCode>(w, at), place.row, at.k0);
  if constexpr (CodeReading<kCode, kStep>::kScaled)
    load_factors<kCode, 1>(w, at.header, at.column + at.k0, place.row, out.factors);
  return out;
}

// Columns [k, k + 4) of the thread's row i.
template <Code kCode, int kStep>
KT_GPU gpu::Words2 widened(const PackedRows& w, const LoadedPiece<kCode, kStep>& piece, const PiecePlace& place,
                           int i, int k) {
  using R = CodeReading<kCode, kStep, 16>;
  if constexpr (kCode == Code::kBf16) {
    const uint32_t* const words = piece.codes.low + i * R::kLow + k / 2;
    return {{words[0], words[1]}};
  } else {
    FourNumbers four = four_numbers<kCode, kStep>(piece.codes, i, place.part * 16, k, flip_of(w));
    if constexpr (R::kScaled)
      for (float& x : four.x) x = scaled<kCode>(x, piece.factors[0][i], base_of(w));
    return {{gpu::bf16_pair(four.x[0], four.x[1]), gpu::bf16_pair(four.x[2], four.x[3])}};
  }
}

// Fragments are [row block][half of the slab][which four of a lane's columns]. Where a lane's Words stand in theirs is
// turned by what the threads of a warp differ in, so that they write to different banks.
KT_GPU int turned(int block, int half) { return half | (block & 1) << 2; }

template <Code kCode, int kStep>
KT_GPU void store_piece(const PackedRows& w, const LoadedPiece<kCode, kStep>& piece, const PiecePlace& place,
                        gpu::Words* weights) {
  const int half = place.part / 2;
  const int first = (place.row % 8 * 4 + place.part % 2 * 2) ^ turned(place.block, half);
  uint8_t* const to =
      reinterpret_cast<uint8_t*>(weights + (place.block * 2 + half) * 2 * kFragment) + place.row / 8 * 8;
  for (int k = 0; k < 16; k += 4)
    for (int i = 0; i < kLaneRows; ++i)
      gpu::store8(to + (k / 4 % 2 * kFragment + (first ^ (i * 4 + k / 8))) * 16,
                  widened(w, piece, place, i, k));
}

// Words of a slab of x: [half of the slab][row][Words]; rows of the second half stand in pairs turned around, for the
// banks.
KT_GPU int input_word(int half, int row) { return (half * kTileRows + (row ^ half)) * kHalf; }

// `x` is the thread's own place in the first row, `to` as well.
constexpr int kRowWords = kSlab * 2 / 16, kRowsAtOnce = kManyThreads / kRowWords;
KT_GPU void copy_input(const uint16_t* x, int64_t stride, gpu::Words* to) {
  for (int i = 0; i < kTileRows / kRowsAtOnce; ++i)
    gpu::copy16(to + i * kRowsAtOnce * kHalf, x + i * kRowsAtOnce * stride);
  gpu::end_copies();
}

// A warp's share of a slab: 64 rows of the matrix times 64 of x.
KT_GPU void multiply_slab(const gpu::Words* weights, const gpu::Words* x, int first_block, int first_row,
                          float (&sums)[kWarpBlocks][kWarpGroups][4]) {
  const int lane = gpu::thread() % gpu::kWarp;
  KT_UNROLL(1)
  for (int half = 0; half < 2; ++half) {
    gpu::Words a[2][kWarpBlocks];
    for (int four = 0; four < 2; ++four) {
      for (int b = 0; b < kWarpBlocks; ++b) {
        const int block = first_block + b;
        const gpu::Words stored =
            weights[((block * 2 + half) * 2 + four) * kFragment + (lane ^ turned(block, half))];
        a[four][b] = {{stored.word[0], stored.word[2], stored.word[1], stored.word[3]}};
      }
    }
    KT_UNROLL(kWarpGroups)
    for (int g = 0; g < kWarpGroups; ++g) {
      const gpu::Words in = x[input_word(half, first_row + g * 8 + lane / 4) + lane % 4];
      for (int b = 0; b < kWarpBlocks; ++b)
        gpu::multiply_add(sums[b][g], a[0][b], {{in.word[0], in.word[1]}});
      for (int b = 0; b < kWarpBlocks; ++b)
        gpu::multiply_add(sums[b][g], a[1][b], {{in.word[2], in.word[3]}});
    }
  }
}

// Sums of the first or the second 64 rows of x on their way to y: [row][column], a few floats further from row to row
// than they are wide, for the banks.
constexpr int kOutStride = kTileColumns + 4;
static_assert(kWarpGroups * 8 * kOutStride <= (kWeightWords + 2 * kInputWords) * 4,
              "they stand where the operands stood");

KT_GPU void lay_out(const float (&sums)[kWarpBlocks][kWarpGroups][4], int warp_block, float* out) {
  const int lane = gpu::thread() % gpu::kWarp;
  float* const to = out + lane % 4 * 2 * kOutStride + warp_block * kBlockRows + lane / 4;
  KT_UNROLL(kWarpGroups)
  for (int g = 0; g < kWarpGroups; ++g)
    for (int b = 0; b < kWarpBlocks; ++b)
      for (int s = 0; s < 4; ++s)
        to[(g * 8 + s % 2) * kOutStride + b * kBlockRows + s / 2 * 8] = sums[b][g][s];
}

// What a block takes.
struct ManyPlace {
  const ProductsArgs& all;
  int which;

  KT_GPU explicit ManyPlace(const ProductsArgs& args) : all(args), which(matrix_of_block(args)) {}
  KT_GPU int first_block() const { return (gpu::block() - all.first[which]) * kManyBlocks; }
  KT_GPU bool there() const { return !all.tiles || gpu::block_y() < all.found->tiles; }
  KT_GPU RowTile tile(int rows) const {
    const int y = gpu::block_y(), left = rows - y * kTileRows;
    return all.tiles ? all.tiles[y] : RowTile{0, y * kTileRows, left < kTileRows ? left : kTileRows};
  }
};

// To y, through the block's memory. The tile is found again rather than kept in registers meanwhile.
KT_GPU void write_tile(const ProductsArgs& all, const float (&sums)[kWarpBlocks][kWarpGroups][4],
                       int warp_block, int warp_row, gpu::Words* memory) {
  const ManyPlace place(all);
  const ProductArgs& args = all.of[place.which];
  const int n = args.weights.n, column = place.first_block() * kBlockRows + gpu::thread();
  const RowTile tile = place.tile(args.m);
  auto* const out = reinterpret_cast<float*>(memory);
  KT_UNROLL(1)
  for (int first = 0; first < tile.rows; first += kWarpGroups * 8) {
    gpu::barrier();
    if (warp_row == first) lay_out(sums, warp_block, out);
    gpu::barrier();
    if (column >= n) continue;
    const float bias = args.bias ? args.bias[int64_t{tile.slot} * n + column] : 0.0f;
    for (int r = 0; r < kWarpGroups * 8 && first + r < tile.rows; ++r) {
      const int row = tile.first + first + r;
      float sum = out[r * kOutStride + gpu::thread()] + bias;
      if (args.factors) sum *= args.factors[row];
      args.y[row * args.y_stride + column] = sum;
    }
  }
}
static_assert(kManyThreads == kTileColumns, "a thread writes a column");

// 128 rows of a matrix times a tile's rows of x.
template <Code kCode, int kStep>
KT_GPU void product_of_many(const ProductsArgs& all, gpu::Words* memory) {
  const ManyPlace at(all);
  const ProductArgs& args = all.of[at.which];
  if (!at.there()) return;
  const PackedRows& w = args.weights;
  const RowTile tile = at.tile(args.m);
  const int rows = tile.rows, first_row = tile.first, first_block = at.first_block();
  const PiecePlace place{gpu::thread()};
  const int last_block = (w.n - 1) / kBlockRows, mine = first_block + place.block;
  const uint8_t* const block =
      w.blocks + tile.slot * args.slot_bytes + (mine < last_block ? mine : last_block) * w.block_bytes;
  const int warp = gpu::thread() / gpu::kWarp;
  const int warp_block = warp / 2 * kWarpBlocks, warp_row = warp % 2 * (kWarpGroups * 8);
  float sums[kWarpBlocks][kWarpGroups][4] = {};

  gpu::Words* const x = memory + kWeightWords;
  const int word = gpu::thread() % kRowWords, row = gpu::thread() / kRowWords;
  const uint16_t* from = args.rounded + int64_t{first_row + row} * w.k_pad + word * 8;
  gpu::Words* const to = x + input_word(word / kHalf, row) + word % kHalf;
  copy_input(from, w.k_pad, to);
  LoadedPiece<kCode, kStep> piece = load_piece<kCode, kStep>(w, block, 0, place);
  const int slabs = w.k_pad / kSlab;
  KT_UNROLL(1)
  for (int slab = 0; slab < slabs; ++slab) {
    gpu::await_copies<0>();
    gpu::barrier();  // the slab before is multiplied
    store_piece(w, piece, PiecePlace{gpu::thread_again()}, memory);
    if (slab + 1 < slabs) {
      piece = load_piece<kCode, kStep>(w, block, slab + 1, place);
      copy_input(from += kSlab, w.k_pad, to + (slab + 1) % 2 * kInputWords);
    }
    gpu::barrier();
    if (warp_row < rows) multiply_slab(memory, x + slab % 2 * kInputWords, warp_block, warp_row, sums);
  }

  write_tile(all, sums, warp_block, warp_row, memory);
}
// kt_product_many_u4_4: codes u4, steps of 4 bytes; [tiles of all matrices, tiles of rows].
#define KT_PRODUCT_MANY(name, code, step)                                                  \
  KT_KERNEL_BESIDE(kt_product_many_##name##_##step, ProductsArgs, args, kManyThreads, 2) { \
    KT_SHARED(gpu::Words, memory, kWeightWords + 2 * kInputWords);                         \
    product_of_many<Code::code, step>(args, memory);                                       \
  }

KT_FOR_ROUNDED_CODES(KT_PRODUCT_MANY)

}  // namespace kt::inline cuda
