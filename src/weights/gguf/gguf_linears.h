// A GGUF file's tensors outside its routed experts as the checkpoint they came from has them: names, order of
// rows, kv_b in one piece. The public converter permutes the rows of q and k for families that it rotates by
// neighbours, and stores the keys' half of kv_b transposed; both end here.
#pragma once
#include <memory>
#include <string_view>
#include <vector>

#include "weights/linears.h"

namespace kt::inline weights {

// As find_linears and open_linear of linears.h, which call these for GGUF checkpoints. Modules have their
// published names; tensors without one are none.
std::vector<LinearModule> find_gguf_linears(const Checkpoint& checkpoint,
                                            const std::function<bool(std::string_view tensor)>& skip);
std::unique_ptr<StoredMatrix> open_gguf_linear(const Checkpoint& checkpoint, const LinearModule& linear);

// Values of a vector of such a file under its published name `name`: as read_vector.
std::vector<float> read_gguf_vector(const Checkpoint& checkpoint, const Tensor& tensor,
                                    std::string_view name);

}  // namespace kt::inline weights
