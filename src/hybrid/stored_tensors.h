// The tensors of a checkpoint, whatever files and dialect, under the names that a model of torch has for them: for
// operators of others, which ask for numbers by name.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "weights/checkpoint.h"
#include "weights/experts.h"
#include "weights/linears.h"

namespace kt::inline hybrid {

// Any thread may ask. "model.layers.3.mlp.experts.7.up_proj.weight" and the fused "...experts.gate_up_proj"
// [experts, 2 inter, hidden] and "...experts.down_proj" are known too, whichever of them is stored.
class StoredTensors {
 public:
  explicit StoredTensors(const std::string& path);

  const Checkpoint& checkpoint() const { return checkpoint_; }
  // Names of matrices as they were published, with ".weight", and of all other tensors as the files have them;
  // ascending.
  std::vector<std::string> names() const;

  struct Description {
    std::vector<int64_t> shape;
    std::string stored;  // "bf16", "q4_k", "F32"
    std::string file;    // that has it, or its first one; "" of routed experts
  };
  bool has(std::string_view name) const;
  Description describe(std::string_view name) const;  // Error with the nearest name
  void values(std::string_view name, float* out) const;
  // The matrix of a linear module, without ".weight"; Error with the nearest name.
  std::unique_ptr<StoredMatrix> matrix(std::string_view module) const;

 private:
  struct Found {
    const LinearModule* linear = nullptr;
    const Tensor* tensor = nullptr;
    int layer = -1, expert = -1;  // of routed experts; expert -1: all of them
    std::vector<Projection> projections = {};
    bool is_there() const { return linear || tensor || layer >= 0; }
  };
  Found find(std::string_view name) const;
  Found find_exactly(const std::string& name) const;
  Found find_experts(std::string_view name) const;
  Found found(std::string_view name) const;  // or Error
  const ExpertSource* experts() const;       // null: there are none

  Checkpoint checkpoint_;
  std::map<std::string, LinearModule, std::less<>> linears_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const ExpertSource> experts_;
  mutable bool looked_ = false;
};

}  // namespace kt::inline hybrid
