// Weights that lie in host memory, as CpuOps makes and reads them; a device that leaves experts to the host reads
// those too.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nn/experts.h"
#include "nn/linear.h"
#include "nn/ops.h"

namespace kt::inline nn {

struct CpuVector final : PlacedVector {
  std::vector<float> values;

  explicit CpuVector(std::vector<float> from) : values(std::move(from)) {}
  int64_t size() const override { return std::ssize(values); }
  size_t packed_bytes() const override { return 0; }
  size_t packed_bytes(int) const override { return 0; }
  size_t plain_bytes() const override { return values.size() * sizeof(float); }
  double stored_bytes() const override { return 0; }
};

struct CpuLinear final : PlacedLinear {
  Linear linear;
  std::string name;  // "q_proj" of model.layers.3.self_attn.q_proj
  // Of CpuOps' parts: that of the calls it is the first linear of; known after the first.
  mutable std::optional<size_t> part = {};

  CpuLinear(Linear from, std::string_view module)
      : linear(std::move(from)), name(module.substr(module.rfind('.') + 1)) {}
  int64_t n() const override { return linear.n(); }
  int64_t k() const override { return linear.k(); }
  size_t packed_bytes() const override { return linear.packed_bytes(); }
  size_t packed_bytes(int node) const override { return linear.packed_bytes(node); }
  size_t plain_bytes() const override { return linear.bias_bytes(); }
  double stored_bytes() const override { return linear.stored_bytes(); }
};

struct CpuExperts final : PlacedExperts {
  Experts experts;

  explicit CpuExperts(Experts from) : experts(std::move(from)) {}
  const ExpertsShape& shape() const override { return experts.shape(); }
  size_t packed_bytes() const override { return experts.packed_bytes(); }
  size_t packed_bytes(int node) const override { return experts.packed_bytes(node); }
  size_t plain_bytes() const override { return 0; }
  double stored_bytes() const override { return experts.stored_bytes_per_expert() * experts.shape().experts; }
};

// The names of linears that run together, each once: heads of one matrix have one name.
inline std::string names_of(std::span<const LinearUse> uses) {
  std::string names;
  const std::string* last = nullptr;
  for (const LinearUse& use : uses) {
    const std::string& name = static_cast<const CpuLinear&>(*use.weights).name;
    if (!last || name != *last) names += (last ? " " : "") + name;
    last = &name;
  }
  return names;
}

inline const std::vector<float>& values_of(const PlacedVector& vector) {
  return static_cast<const CpuVector&>(vector).values;
}
inline const float* values_or_null(const PlacedVector* vector) {
  return vector ? values_of(*vector).data() : nullptr;
}
inline const Linear& linear_of(const PlacedLinear& linear) {
  return static_cast<const CpuLinear&>(linear).linear;
}
inline const Experts& experts_of(const PlacedExperts& experts) {
  return static_cast<const CpuExperts&>(experts).experts;
}

}  // namespace kt::inline nn
