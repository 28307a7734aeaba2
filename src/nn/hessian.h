// Second moments of the inputs of linear layers, H = sum over rows of weight * x^T x: what calibrated
// rounding weighs its errors with.
#pragma once
#include <cstdint>
#include <memory>

#include "base/memory.h"
#include "base/pool.h"
#include "kernels/table.h"

namespace kt {

struct HessianRows {
  const void* x = nullptr;  // [rows, dims]
  Real type = Real::kBf16;
  int64_t stride = 0;  // elements; 0: dims
  int64_t rows = 0;
  const int32_t* pick = nullptr;  // [rows] numbers of the rows to take; null: 0, 1, 2 ...
  const float* weight = nullptr;  // [rows] factors of x^T x, >= 0; null: all 1
};

// [dims, dims], f32, symmetric. Adding is a symmetric rank-k update on the CPU's matrix units: inputs are
// rounded to bf16, sums are f32 over at most a few thousand rows and then added to the total.
class Hessian {
 public:
  explicit Hessian(int dims);
  Hessian(Hessian&&) noexcept = default;
  Hessian& operator=(Hessian&&) noexcept = default;

  int dims() const { return dims_; }
  int64_t rows() const { return rows_; }  // added so far
  double mass() const { return mass_; }   // sum of their weights
  // A value not finite is an Error(kInput) that names row and column.
  void add(Pool& pool, const HessianRows& rows);
  // The same on the calling thread, for callers that have an expert for each worker.
  void add(const HessianRows& rows);
  void add(double factor, const Hessian& other);  // this += factor * other
  void scale(double factor);
  const float* data() const;  // [dims, dims], both triangles filled
  static size_t bytes(int dims);

 private:
  int dims_ = 0;
  int64_t rows_ = 0;
  double mass_ = 0;
  Buffer sum_;
};

}  // namespace kt
