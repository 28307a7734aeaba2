#include "weights/stored_names.h"

#include "weights/gguf/gguf_names.h"
#include "weights/kt/kt_names.h"

namespace kt::inline weights {

std::string stored_name(const Checkpoint& checkpoint, std::string_view published) {
  if (!checkpoint.is_gguf()) return linear_name(checkpoint, published);
  return gguf_name(checkpoint.gguf_family(), published).value_or(std::string(published));
}

// Only this way round: which names had a "model." before them is not written down.
std::string linear_name(const Checkpoint& checkpoint, std::string_view published) {
  return checkpoint.has_kt_experts() ? kt_other_name(published) : std::string(published);
}

}  // namespace kt::inline weights
