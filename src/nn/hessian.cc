#include "nn/hessian.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "base/checked.h"
#include "base/error.h"
#include "formats/floats.h"

namespace kt {
namespace {

float load(const HessianRows& rows, int64_t at) {
  if (rows.type == Real::kF32) return static_cast<const float*>(rows.x)[at];
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(rows.x) + at * 2, 2);
  return rows.type == Real::kBf16 ? to_f32(bf16{bits}) : to_f32(f16{bits});
}

}  // namespace

Hessian::Hessian(int dims) : dims_(dims), sum_(bytes(dims)) {}

size_t Hessian::bytes(int dims) {
  if (dims < 1) fail("hessian: {} dimensions", dims);
  return checked_mul(static_cast<size_t>(dims) * sizeof(float), static_cast<size_t>(dims), "hessian");
}

void Hessian::add(Pool&, const HessianRows& rows, Buffer* scratch) { add(rows, scratch); }

void Hessian::add(const HessianRows& rows, Buffer*) {
  float* sum = sum_.as<float>().data();
  std::vector<float> x(static_cast<size_t>(dims_));
  for (int64_t i = 0; i < rows.rows; ++i) {
    const int64_t row = rows.pick ? rows.pick[i] : i;
    const float weight = rows.weight ? rows.weight[i] : 1, root = std::sqrt(weight);
    for (int c = 0; c < dims_; ++c) {
      const float value = load(rows, row * (rows.stride ? rows.stride : dims_) + c) * root;
      x[static_cast<size_t>(c)] = to_f32(to_bf16(value));
      if (!is_finite(x[static_cast<size_t>(c)]))
        fail("hessian: row {}, column {} is not a finite number", row, c);
    }
    for (int r = 0; r < dims_; ++r)
      for (int c = 0; c <= r; ++c)
        sum[static_cast<int64_t>(r) * dims_ + c] += x[static_cast<size_t>(r)] * x[static_cast<size_t>(c)];
    ++rows_;
    mass_ += weight;
  }
}

void Hessian::add(double factor, const Hessian& other) {
  KT_CHECK(other.dims_ == dims_, "hessians of {} and {} dimensions", dims_, other.dims_);
  float* sum = sum_.as<float>().data();
  const float* from = other.data();
  const auto f = static_cast<float>(factor);
  for (int64_t i = 0; i < int64_t{dims_} * dims_; ++i) sum[i] += f * from[i];
  rows_ += other.rows_;
  mass_ += factor * other.mass_;
}

void Hessian::scale(double factor) {
  const auto f = static_cast<float>(factor);
  for (float& value : sum_.as<float>()) value *= f;
  mass_ *= factor;
}

float Hessian::at(int i, int j) const {
  return data()[static_cast<int64_t>(std::max(i, j)) * dims_ + std::min(i, j)];
}

double Hessian::mean_diagonal() const {
  double sum = 0;
  for (int i = 0; i < dims_; ++i) sum += at(i, i);
  return sum / dims_;
}

Hessian shrunk(const Hessian& own, const Hessian& prior, double strength) {
  Hessian out(own.dims());
  out.add(1, own);
  if (prior.mass() > 0 && strength > 0) out.add(strength / prior.mass(), prior);
  out.rows_ = own.rows();
  return out;
}

}  // namespace kt
