// Algebra: with X [rows, dims] in bf16, H += X^T X is a product of X^T with itself. Both operands are packed
// straight from some thousand rows of X: once in the order of weights (dims as rows of weights, rows as
// columns), where rows of X have only to be interleaved, and once in the order of activations, which
// transposes them. The packing costs a constant time for each number of X, the product dims operations.
// Only tiles that touch the lower triangle are multiplied; sums are f32 and reach H once for each such
// stretch.
#include "nn/hessian.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "base/function_ref.h"
#include "formats/floats.h"
#include "kernels/plan.h"
#include "nn/reserve.h"

namespace kt {
namespace {

constexpr int kTile = 256;         // dims of a side of the tiles of H that workers claim
constexpr int kDiagonalStep = 64;  // rows at once of tiles on the diagonal, half of which is not wanted
constexpr int kMostRows = 4096;    // whose products are summed before they are added to H
constexpr size_t kOperandBytes = 32 << 20;  // of each operand, about

using Eight = uint16_t __attribute__((vector_size(16)));

Eight low_halves(Eight a, Eight b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
Eight high_halves(Eight a, Eight b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }

// 8 x 8: three perfect shuffles.
void transpose(Eight (&x)[8]) {
  for (int round = 0; round < 3; ++round) {
    Eight y[8];
    for (int i = 0; i < 4; ++i) {
      y[2 * i] = low_halves(x[i], x[i + 4]);
      y[2 * i + 1] = high_halves(x[i], x[i + 4]);
    }
    std::copy_n(y, 8, x);
  }
}

// One stretch of rows on its way into H.
class RankUpdate {
 public:
  RankUpdate(int dims, int64_t rows, int workers, Buffer& memory);
  // Chunk `chunk` of 64 rows, first rows[chunk * 64] on, into both operands.
  void pack(const HessianRows& rows, int64_t first, int chunk, int worker);
  int chunks() const { return packing_.k_pad / kChunk; }
  int tiles() const { return sides_ * (sides_ + 1) / 2; }
  void multiply(int tile, int worker, float* h) const;

  static int64_t rows_at_once(int dims);

 private:
  void stage(const HessianRows& rows, int64_t first, int count, uint16_t* staged, float* weighed) const;
  void place(const uint16_t* staged, int block, int chunk) const;
  void place_acts(const Eight (&x)[8], int dim, int row) const;
  std::byte* worker_memory(int worker) const { return workers_ + worker * worker_bytes_; }

  int dims_, sides_;
  int64_t staged_stride_;  // a little more than dims: rows of a power of two would share sets of the cache
  const Kernels& kernels_ = kernels();
  Packing packing_;  // X^T as weights [dims, rows]
  Plan plan_;        // for a tile
  ActShape shape_;   // X^T as activations [dims, rows]
  std::byte *blocks_ = nullptr, *workers_ = nullptr;
  Acts acts_;
  size_t stage_bytes_ = 0, worker_bytes_ = 0;
};

int64_t RankUpdate::rows_at_once(int dims) {
  const auto most = static_cast<int64_t>(kOperandBytes / (static_cast<size_t>(dims) * 2));
  return std::clamp<int64_t>(most / 512 * 512, 512, kMostRows);
}

RankUpdate::RankUpdate(int dims, int64_t rows, int workers, Buffer& memory)
    : dims_(dims),
      sides_(ceil_div(dims, kTile)),
      staged_stride_(round_up(dims, kBlockRows) + 32),
      packing_(packing_for({.code = Code::kBf16}, dims, rows, kernels_.fragment, "hessian")) {
  const Route route = kernels_.many_bf16[packing_.layout] ? Route::kManyBf16 : Route::kManyF32;
  plan_ = plan_route(kernels_, packing_, route, kTile);
  shape_ = plan_.acts;
  shape_.rows = static_cast<int>(round_up(int64_t{dims}, kTile));
  stage_bytes_ = static_cast<size_t>(round_up(kChunk * staged_stride_ * 2 + staged_stride_ * 4, 64));
  worker_bytes_ = round_up(std::max(stage_bytes_, round_up(plan_.scratch_bytes, size_t{64}) +
                                                      size_t{kTile} * kTile * sizeof(float)),
                           size_t{4096});
  const size_t operand = round_up(packing_.bytes(), size_t{64});
  grow(memory,
       operand + round_up(act_bytes(shape_), size_t{64}) + worker_bytes_ * static_cast<size_t>(workers));
  blocks_ = memory.data();
  acts_ = acts_in(shape_, blocks_ + operand);
  workers_ = blocks_ + operand + round_up(act_bytes(shape_), size_t{64});
}

// [64, dims] in bf16, times the roots of their weights; zeros behind.
void RankUpdate::stage(const HessianRows& rows, int64_t first, int count, uint16_t* staged,
                       float* weighed) const {
  const int64_t stride = rows.stride ? rows.stride : dims_;
  const size_t size = rows.type == Real::kF32 ? 4 : 2;
  for (int i = 0; i < kChunk; ++i, staged += staged_stride_) {
    if (i >= count) {
      std::fill_n(staged, staged_stride_, uint16_t{0});
      continue;
    }
    const int64_t row = rows.pick ? rows.pick[first + i] : first + i;
    const auto* from = static_cast<const std::byte*>(rows.x) + static_cast<size_t>(row * stride) * size;
    const float root = rows.weight ? std::sqrt(rows.weight[first + i]) : 1;
    if (rows.type == Real::kBf16 && root == 1) {
      std::memcpy(staged, from, static_cast<size_t>(dims_) * 2);
    } else {
      for (int c = 0; c < dims_; ++c) {
        uint16_t half;
        float full;
        if (rows.type == Real::kF32) {
          std::memcpy(&full, from + c * 4, 4);
        } else {
          std::memcpy(&half, from + c * 2, 2);
          full = rows.type == Real::kBf16 ? to_f32(bf16{half}) : to_f32(f16{half});
        }
        weighed[c] = full * root;
      }
      kernels_.store(staged, Real::kBf16, weighed, dims_);
    }
    std::fill(staged + dims_, staged + staged_stride_, uint16_t{0});
    uint16_t largest = 0;
    for (int c = 0; c < dims_; ++c) largest = std::max(largest, static_cast<uint16_t>(staged[c] & 0x7FFF));
    if (largest < 0x7F80) continue;
    for (int c = 0; c < dims_; ++c)
      if ((staged[c] & 0x7FFF) >= 0x7F80) fail("hessian: row {}, column {} is not a finite number", row, c);
  }
}

// 8 rows of X, from `row` on, of 8 dims as activations (table.h, ActShape).
void RankUpdate::place_acts(const Eight (&x)[8], int dim, int row) const {
  const int64_t k_pad = shape_.k_pad;
  if (shape_.code == ActCode::kF32) {
    float* to = reinterpret_cast<float*>(acts_.codes) + dim * k_pad + row;
    for (int i = 0; i < 8; ++i, to += k_pad)
      for (int j = 0; j < 8; ++j) to[j] = to_f32(bf16{x[i][j]});
    return;
  }
  const int side = shape_.side, step = shape_.step_bytes, byte = row * 2;
  if (side == 1 || step % 16 == 0) {
    std::byte* to = acts_.codes + (side == 1 ? byte : int64_t{byte / step} * step * side + byte % step);
    for (int i = 0; i < 8; ++i)
      std::memcpy(to + (dim + i) / side * side * k_pad * 2 + (dim + i) % side * step, &x[i], 16);
    return;
  }
  for (int i = 0; i < 8; ++i) {
    std::byte* to = acts_.codes + (dim + i) / side * side * k_pad * 2 + (dim + i) % side * step;
    for (int b = 0; b < 16; b += 4)
      std::memcpy(to + int64_t{(byte + b) / step} * step * side + (byte + b) % step,
                  reinterpret_cast<const char*>(&x[i]) + b, 4);
  }
}

// 16 dims of a staged chunk.
void RankUpdate::place(const uint16_t* staged, int block, int chunk) const {
  const int step = kernels_.fragment.step_bytes;
  std::byte* weights =
      blocks_ + static_cast<size_t>(block) * packing_.block_bytes + chunk * chunk_bytes(Code::kBf16);
  for (int row = 0; row < kChunk; row += 8)
    for (int half = 0; half < kBlockRows; half += 8) {
      Eight x[8];
      for (int i = 0; i < 8; ++i)
        std::memcpy(&x[i], staged + (row + i) * staged_stride_ + block * kBlockRows + half, sizeof(Eight));
      if (step == 4)
        for (int i = 0; i < 8; i += 2) {
          const Eight pairs[] = {low_halves(x[i], x[i + 1]), high_halves(x[i], x[i + 1])};
          std::memcpy(weights + (row + i) / 2 * 4 * kBlockRows + half * 4, pairs, sizeof(pairs));
        }
      transpose(x);
      place_acts(x, block * kBlockRows + half, chunk * kChunk + row);
      if (step == 8)
        for (int i = 0; i < 16; ++i)
          std::memcpy(weights + ((row / 4 + i % 2) * kBlockRows + half + i / 2) * 8,
                      reinterpret_cast<const char*>(x) + i * 8, 8);
    }
}

void RankUpdate::pack(const HessianRows& rows, int64_t first, int chunk, int worker) {
  auto* staged = reinterpret_cast<uint16_t*>(worker_memory(worker));
  auto* weighed = reinterpret_cast<float*>(staged + kChunk * staged_stride_);
  const int64_t from = first + int64_t{chunk} * kChunk;
  stage(rows, from, static_cast<int>(std::clamp<int64_t>(first + packing_.k - from, 0, kChunk)), staged,
        weighed);
  for (int b = 0; b < packing_.blocks; ++b) place(staged, b, chunk);
}

void RankUpdate::multiply(int tile, int worker, float* h) const {
  int side = 0;
  while (tile > side) tile -= ++side;
  const int row0 = side * kTile, column0 = tile * kTile, rows = std::min(kTile, dims_ - row0);
  std::byte* scratch = worker_memory(worker);
  auto* sums = reinterpret_cast<float*>(scratch + round_up(plan_.scratch_bytes, size_t{64}));
  const int step = side == tile ? kDiagonalStep : kTile;
  const size_t size = shape_.code == ActCode::kF32 ? 4 : 2;
  for (int i = 0; i < rows; i += step) {
    const int some = std::min(step, rows - i);
    const int columns = std::min(side == tile ? i + some : kTile, dims_ - column0);
    Acts acts = acts_;
    acts.codes += static_cast<size_t>(row0 + i) * static_cast<size_t>(shape_.k_pad) * size;
    acts.shape.rows = round_up(some, kernels_.tile_rows);
    plan_.multiply({.packing = &packing_,
                    .blocks = blocks_ + static_cast<size_t>(column0 / kBlockRows) * packing_.block_bytes,
                    .count = ceil_div(columns, kBlockRows),
                    .acts = acts,
                    .m = some,
                    .out = sums,
                    .ld = kTile,
                    .scratch = scratch});
    for (int r = 0; r < some; ++r) {
      float* to = h + int64_t{row0 + i + r} * dims_ + column0;
      const float* from = sums + r * kTile;
      const int end = std::min(columns, row0 + i + r - column0 + 1);
      for (int c = 0; c < end; ++c) to[c] += from[c];
    }
  }
}

// item(i, worker) for all i below count.
void each(Pool* pool, int count, FunctionRef<void(int, int)> item) {
  if (!pool) {
    for (int i = 0; i < count; ++i) item(i, 0);
    return;
  }
  std::atomic<int> next{0};
  pool->run([&](const Worker& worker) {
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) item(i, worker.index);
  });
}

double checked_mass(const HessianRows& rows, int dims) {
  KT_CHECK(rows.rows >= 0 && (rows.stride == 0 || rows.stride >= dims), "hessian: {} rows, {} apart",
           rows.rows, rows.stride);
  if (!rows.weight) return static_cast<double>(rows.rows);
  double mass = 0;
  for (int64_t i = 0; i < rows.rows; ++i) {
    if (!(rows.weight[i] >= 0) || !is_finite(rows.weight[i]))
      fail("hessian: the weight of row {} is {}", i, rows.weight[i]);
    mass += static_cast<double>(rows.weight[i]);
  }
  return mass;
}

}  // namespace

Hessian::Hessian(int dims) : dims_(dims), sum_(bytes(dims)) {}

size_t Hessian::bytes(int dims) {
  if (dims < 1) fail("hessian: {} dimensions", dims);
  return checked_mul(static_cast<size_t>(dims) * sizeof(float), static_cast<size_t>(dims), "hessian");
}

void Hessian::add(Pool& pool, const HessianRows& rows, Buffer* scratch) { add(&pool, rows, scratch); }
void Hessian::add(const HessianRows& rows, Buffer* scratch) { add(nullptr, rows, scratch); }

void Hessian::add(Pool* pool, const HessianRows& rows, Buffer* scratch) {
  const double mass = checked_mass(rows, dims_);
  Buffer own;
  const int64_t most = RankUpdate::rows_at_once(dims_);
  for (int64_t first = 0; first < rows.rows; first += most) {
    RankUpdate update(dims_, std::min(most, rows.rows - first), pool ? pool->threads() : 1,
                      scratch ? *scratch : own);
    each(pool, update.chunks(), [&](int chunk, int worker) { update.pack(rows, first, chunk, worker); });
    each(pool, update.tiles(),
         [&](int tile, int worker) { update.multiply(tile, worker, sum_.as<float>().data()); });
  }
  rows_ += rows.rows;
  mass_ += mass;
}

void Hessian::add(double factor, const Hessian& other) {
  KT_CHECK(other.dims_ == dims_, "hessians of {} and {} dimensions", dims_, other.dims_);
  const auto f = static_cast<float>(factor);
  for (int64_t i = 0; i < dims_; ++i) {
    float* sum = sum_.as<float>().data() + i * dims_;
    const float* from = other.data() + i * dims_;
    for (int64_t j = 0; j <= i; ++j) sum[j] += f * from[j];
  }
  rows_ += other.rows_;
  mass_ += factor * other.mass_;
}

void Hessian::scale(double factor) {
  const auto f = static_cast<float>(factor);
  for (float& value : sum_.as<float>()) value *= f;
  mass_ *= factor;
}

double Hessian::mean_diagonal() const {
  double sum = 0;
  for (int i = 0; i < dims_; ++i) sum += static_cast<double>(at(i, i));
  return sum / dims_;
}

Hessian shrunk(const Hessian& own, const Hessian& prior, double strength) {
  Hessian out(own.dims());
  out.add(1, own);
  if (prior.mass() > 0 && strength > 0) out.add(strength / prior.mass(), prior);
  out.rows_ = own.rows();
  return out;
}

void Hessian::add_diagonal(double factor, const Hessian& other) {
  float* sum = sum_.as<float>().data();
  for (int64_t i = 0; i < dims_; ++i)
    sum[i * dims_ + i] += static_cast<float>(factor) * other.data()[i * dims_ + i];
}

Hessian shrunk_to_diagonal(const Hessian& own, double strength) {
  Hessian out(own.dims());
  out.add(1, own);
  if (own.rows() > 0) out.add_diagonal(strength / static_cast<double>(own.rows()), own);
  return out;
}

Hessian diagonal_of(const Hessian& own) {
  Hessian out(own.dims());
  out.add_diagonal(1, own);
  out.rows_ = own.rows();
  out.mass_ = own.mass();
  return out;
}

}  // namespace kt
