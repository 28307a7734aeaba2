// The names under which engines ask for weights ("AMXINT4", "RAWINT4", ...). A name says how the weights are
// stored, never which CPU may run them.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "formats/format.h"
#include "weights/experts.h"

namespace kt {

struct WeightMethod {
  std::string_view name;
  std::string_view stored_as;  // for messages: "kt int4 weights", "GGUF", "FP8 in 128x128 blocks"
};

const std::vector<WeightMethod>& weight_methods();
// Error(kInput) listing the valid names.
const WeightMethod& weight_method_named(std::string_view name);

// The format in which values are stored under this method (load_values); group_size and zero_point where the
// method has groups. LLAMAFILE rounds to Q4_K-like... see the definition.
struct MethodFormats {
  Format gate_up, down;
};
MethodFormats formats_of(const WeightMethod& method, int64_t hidden, int64_t inter, int group_size,
                         bool zero_point);

// The routed experts under a path: a checkpoint's folder, a GGUF file or a folder of them, kt weights. Opened
// once and shared by all layers that ask for the same path while one of them lives.
std::shared_ptr<const ExpertSource> shared_experts(const std::string& path);

// Error(kInput) naming the method that fits, unless the source stores its experts as the method says.
void check_method(const WeightMethod& method, const ExpertSource& source, int layer, const std::string& path);

}  // namespace kt
