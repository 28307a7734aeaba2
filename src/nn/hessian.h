// Second moments of the inputs of linear layers, H = sum over rows of weight * x^T x: what calibrated
// rounding weighs its errors with.
#pragma once
#include <cstdint>
#include <memory>

#include "base/memory.h"
#include "base/pool.h"
#include "kernels/table.h"

namespace kt::inline nn {

struct HessianRows {
  const void* x = nullptr;  // [rows, dims]
  Real type = Real::kBf16;
  int64_t stride = 0;  // elements; 0: dims
  int64_t rows = 0;
  const int32_t* pick = nullptr;  // [rows] numbers of the rows to take; null: 0, 1, 2 ...
  const float* weight = nullptr;  // [rows] factors of x^T x, >= 0; null: all 1
};

// [dims, dims], f32, symmetric. Adding is a symmetric rank-k update on the CPU's matrix units: inputs, times
// the root of their weight, are rounded to bf16, sums are f32 over at most a few thousand rows and then added
// to the total.
class Hessian {
 public:
  explicit Hessian(int dims);
  Hessian(Hessian&&) noexcept = default;
  Hessian& operator=(Hessian&&) noexcept = default;

  int dims() const { return dims_; }
  int64_t rows() const { return rows_; }  // added so far
  double mass() const { return mass_; }   // sum of their weights
  // A value not finite is an Error(kInput) that names row (its number in x) and column; H is as it was before
  // the call or before some later rows of it. `scratch` is memory that grows as needed and may be handed to
  // the next call, of any Hessian: up to about 20 MiB, whose allocation would cost as much as the update. Results
  // are bitwise the same for any number of threads.
  void add(Pool& pool, const HessianRows& rows, Buffer* scratch = nullptr);
  // The same on the calling thread, for callers that have an expert for each worker.
  void add(const HessianRows& rows, Buffer* scratch = nullptr);
  void add(double factor, const Hessian& other);  // this += factor * other, rows and mass too
  void scale(double factor);                      // rows stay as they are, mass does not
  // [dims, dims], of which the lower triangle is filled and the rest is zero: half the traffic of an update.
  const float* data() const { return sum_.as<float>().data(); }
  float at(int i, int j) const {  // of either triangle
    return data()[static_cast<int64_t>(i > j ? i : j) * dims_ + (i > j ? j : i)];
  }
  double mean_diagonal() const;
  static size_t bytes(int dims);

 private:
  void add(Pool* pool, const HessianRows& rows, Buffer* scratch);
  friend Hessian shrunk(const Hessian& own, const Hessian& prior, double strength);
  friend Hessian shrunk_to_diagonal(const Hessian& own, double strength);
  friend Hessian diagonal_of(const Hessian& own);
  void add_diagonal(double factor, const Hessian& other);
  int dims_ = 0;
  int64_t rows_ = 0;
  double mass_ = 0;
  Buffer sum_;
};

// own + strength * prior / prior.mass(): what `strength` more rows would add that are like the prior's on the
// average. Where an expert saw many rows it is its own; where it saw few it is the layer's. A prior without
// mass adds nothing. Dims and rows() as own.
Hessian shrunk(const Hessian& own, const Hessian& prior, double strength);
// own + strength / own.rows() * its diagonal: trusts what inputs have in common the less the fewer rows it
// saw. For the inputs of down projections, which mean something else in every expert, so that the layer's are
// no prior for one expert's. Rows as own; without rows, a copy.
Hessian shrunk_to_diagonal(const Hessian& own, double strength);
// The diagonal alone: rounding to nearest, with scales searched for what inputs are large.
Hessian diagonal_of(const Hessian& own);

}  // namespace kt::inline nn
