// With X [rows, dims] in bf16, H += X^T X is a product of X^T with itself. Some thousand rows of X are packed
// once, in the order that serves both sides (kernels/gram.h); workers then claim squares of H that touch the
// lower triangle. Packing costs a constant time for each number of X, the product dims operations. Sums are
// f32 and reach H once for each such stretch.
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
#include "kernels/gram.h"
#include "nn/reserve.h"

namespace kt::inline nn {
namespace {

// Strips of a side of the squares of H that workers claim: their sums and the columns' part of a panel have
// to stay in L2. A small H on one thread is one square, of which only half the sums are touched: every panel
// is multiplied as soon as it is packed and leaves L2 never.
constexpr int kSide = 16, kWholeSide = 24, kLeastSide = 4;
constexpr int kSquaresEach = 3;             // at least, for every worker, where there are as many
constexpr int kMostRows = 4096;             // whose products are summed before they are added to H
constexpr size_t kOperandBytes = 16 << 20;  // of bf16, about

// One stretch of rows on its way into H.
class RankUpdate {
 public:
  RankUpdate(int dims, int64_t rows, int workers, Buffer& memory);
  int groups() const { return static_cast<int>(ceil_div(rows_, int64_t{kGramGroup})); }
  // Group `group` of rows, first rows[group * kGramGroup] on.
  void pack(const HessianRows& rows, int64_t first, int group);
  int squares() const { return sides_ * (sides_ + 1) / 2; }
  void multiply(int square, int worker, float* h) const { multiply(square, worker, {0, rows_, h}); }
  // All of it, on one thread, where H is one square.
  bool in_one() const { return in_one_; }
  void run(const HessianRows& rows, int64_t first, float* h);

  static int64_t rows_at_once(int dims);

 private:
  struct Part {
    int64_t first, rows;  // of the stretch; whole panels, or its end
    float* h;
  };
  void multiply(int square, int worker, const Part& part) const;

  int dims_, strips_, side_ = 0, sides_ = 0;
  int64_t rows_, panels_held_ = 0;
  const GramKernels& kernels_ = gram_kernels(best_kernels());
  int64_t panel_bytes_;
  std::byte *panels_ = nullptr, *workers_ = nullptr;
  size_t worker_bytes_ = 0;
  bool in_one_ = false;
};

int64_t RankUpdate::rows_at_once(int dims) {
  const auto most = static_cast<int64_t>(kOperandBytes / (static_cast<size_t>(dims) * 2));
  return std::clamp<int64_t>(most / kGramRows * kGramRows, kGramRows, kMostRows);
}

RankUpdate::RankUpdate(int dims, int64_t rows, int workers, Buffer& memory)
    : dims_(dims),
      strips_(ceil_div(dims, kGramSide)),
      rows_(rows),
      panel_bytes_(gram_panel_bytes(dims, kernels_.code_bytes)) {
  const auto cut = [&](int side) {
    side_ = side;
    sides_ = ceil_div(strips_, side);
  };
  cut(strips_ <= kWholeSide ? strips_ : kSide);
  while (workers > 1 && squares() < kSquaresEach * workers && side_ / 2 >= kLeastSide) cut(side_ / 2);
  in_one_ = workers == 1 && squares() == 1;
  panels_held_ = in_one_ ? 1 : ceil_div(rows, int64_t{kGramRows});
  const size_t panels = static_cast<size_t>(panels_held_ * panel_bytes_);
  const size_t sums = static_cast<size_t>(side_) * static_cast<size_t>(side_) * kGramSide * kGramSide * 4;
  worker_bytes_ = round_up(sums + gram_strip_bytes(), size_t{4096});
  grow(memory, panels + worker_bytes_ * static_cast<size_t>(workers));
  panels_ = memory.data();
  workers_ = panels_ + panels;
}

// The number that is not finite in bf16, named; nothing where there is none.
void name_not_finite(const HessianRows& rows, const void* at, int64_t row, float factor, int dims) {
  for (int c = 0; c < dims; ++c) {
    const auto* from = static_cast<const std::byte*>(at) + int64_t{c} * (rows.type == Real::kF32 ? 4 : 2);
    uint16_t half;
    float full;
    if (rows.type == Real::kF32) {
      std::memcpy(&full, from, 4);
    } else {
      std::memcpy(&half, from, 2);
      full = rows.type == Real::kBf16 ? to_f32(bf16{half}) : to_f32(f16{half});
    }
    if (!is_finite(to_f32(to_bf16(full * factor))))
      fail("hessian: row {}, column {} is not a finite number", row, c);
  }
}

void RankUpdate::pack(const HessianRows& rows, int64_t first, int group) {
  const int64_t stride = rows.stride ? rows.stride : dims_, begin = int64_t{group} * kGramGroup;
  const int64_t size = rows.type == Real::kF32 ? 4 : 2;
  const int count = static_cast<int>(std::min<int64_t>(kGramGroup, rows_ - begin));
  const void* at[kGramGroup];
  int64_t number[kGramGroup];
  float roots[kGramGroup];
  for (int i = 0; i < count; ++i) {
    const int64_t t = first + begin + i;
    number[i] = rows.pick ? rows.pick[t] : t;
    at[i] = static_cast<const std::byte*>(rows.x) + number[i] * stride * size;
    roots[i] = rows.weight ? std::sqrt(rows.weight[t]) : 1;
  }
  if (kernels_.pack({.rows = at,
                     .type = rows.type,
                     .factors = rows.weight ? roots : nullptr,
                     .count = count,
                     .columns = dims_,
                     .group = static_cast<int>(begin % kGramRows) / kGramGroup,
                     .panel = panels_ + begin / kGramRows % panels_held_ * panel_bytes_}))
    return;
  for (int i = 0; i < count; ++i) name_not_finite(rows, at[i], number[i], roots[i], dims_);
}

void RankUpdate::run(const HessianRows& rows, int64_t first, float* h) {
  for (int64_t at = 0; at < rows_; at += kGramRows) {
    const int64_t some = std::min<int64_t>(kGramRows, rows_ - at);
    for (int64_t i = 0; i < some; i += kGramGroup) pack(rows, first, static_cast<int>((at + i) / kGramGroup));
    multiply(0, 0, {at, some, h});
  }
}

void RankUpdate::multiply(int square, int worker, const Part& part) const {
  int side = 0;
  while (square > side) square -= ++side;
  std::byte* scratch = workers_ + static_cast<size_t>(worker) * worker_bytes_;
  const auto strips = [&](int at) { return std::min(side_, strips_ - at * side_); };
  kernels_.add({.panels = panels_,
                .rows = static_cast<int>(part.rows),
                .columns = dims_,
                .row0 = side * side_,
                .row_strips = strips(side),
                .column0 = square * side_,
                .column_strips = strips(square),
                .sums = reinterpret_cast<float*>(scratch + gram_strip_bytes()),
                .strip = scratch,
                .fresh = part.first == 0,
                .fold = part.first + part.rows == rows_,
                .out = part.h,
                .ld = dims_});
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
    if (update.in_one()) {
      update.run(rows, first, sum_.as<float>().data());
      continue;
    }
    each(pool, update.groups(), [&](int group, int) { update.pack(rows, first, group); });
    each(pool, update.squares(),
         [&](int square, int worker) { update.multiply(square, worker, sum_.as<float>().data()); });
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

}  // namespace kt::inline nn
