// What a checkpoint's files call the tensors and modules of a model, which is asked for by the names it was
// published with: others in GGUF files and beside converted experts.
#pragma once
#include <string>
#include <string_view>

#include "weights/checkpoint.h"

namespace kt::inline weights {

std::string stored_name(const Checkpoint& checkpoint, std::string_view published);
// Of a module, as find_linears() calls it: published names for GGUF files, and those of the files for others.
std::string linear_name(const Checkpoint& checkpoint, std::string_view published);

}  // namespace kt::inline weights
