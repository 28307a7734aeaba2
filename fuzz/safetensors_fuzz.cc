// Any bytes as a safetensors file: an Error, or tensors whose bytes all lie in it.
#include <cstdlib>

#include "base/error.h"
#include "weights/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = std::as_bytes(std::span(data, size));
  try {
    const kt::SafetensorsHeader header = kt::parse_safetensors(file, "input");
    size_t covered = 0;
    std::vector<kt::TensorSpec> specs;
    for (const kt::Tensor& t : header.tensors) {
      covered += t.bytes.size();
      if (!t.bytes.empty() &&
          (t.bytes.data() < file.data() || t.bytes.data() + t.bytes.size() > file.data() + file.size()))
        std::abort();
      specs.push_back({t.name, t.dtype, t.shape});
    }
    // What was read can be written, and says the same.
    std::string again = kt::safetensors_header(specs, header.metadata);
    again.resize(again.size() + covered);
    const kt::SafetensorsHeader second = kt::parse_safetensors(std::as_bytes(std::span(again)), "again");
    if (second.metadata != header.metadata || second.tensors.size() != header.tensors.size()) std::abort();
    for (size_t i = 0; i < specs.size(); ++i) {
      // Empty tensors may change places among those at one offset.
      if (header.tensors[i].bytes.size() != second.tensors[i].bytes.size()) std::abort();
    }
  } catch (const kt::Error&) {
  }
  return 0;
}
