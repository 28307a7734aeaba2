// The weight matrices of a checkpoint outside its routed experts: each module's tensors together, plain or
// quantised, and each openable as one StoredMatrix. Where one name of a module stands for several tensors is
// settled here, so that planners speak of modules.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "weights/checkpoint.h"
#include "weights/experts.h"

namespace kt::inline weights {

struct LinearModule {
  std::string module;                  // without ".weight"
  const Tensor* main = nullptr;        // the codes: .weight, .weight_packed or .qweight
  std::vector<const Tensor*> tensors;  // main and what only its quantisation needs; never the bias
  bool quantised = false;
  uint64_t bytes() const;  // of all tensors
};

// Every module with a matrix: 2-D .weight of floats (embeddings too: bytes cannot tell), or a quantised
// weight of any dialect that is not fused over experts; by name, ascending. Tensors for which `skip` is true
// do not exist. GGUF checkpoints come back under the names of the checkpoints they were made from.
std::vector<LinearModule> find_linears(const Checkpoint& checkpoint,
                                       const std::function<bool(std::string_view tensor)>& skip);

// Errors are those of the dialects: scales missing or of the wrong shape, types nobody reads.
std::unique_ptr<StoredMatrix> open_linear(const Checkpoint& checkpoint, const LinearModule& linear);

// The numbers of a tensor of BF16, F16 or F32: a norm, a bias; asked for by its published name. Errors name
// the tensor as it is stored: missing, of another type, not finite.
std::vector<float> read_vector(const Checkpoint& checkpoint, std::string_view name);

}  // namespace kt::inline weights
