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

// 4 or 8 where converted kt weights of so many bits are what the method loads; 0 for the others.
int kt_bits(const WeightMethod& method);

// The format in which values are stored under this method (load_values); group_size and zero_point where the
// method has groups. LLAMAFILE, which names no block type, rounds to Q4_K, the usual one of published files,
// and to Q4_0 where the columns do not fill its super-blocks of 256.
struct MethodFormats {
  Format gate_up, down;
};
MethodFormats formats_of(const WeightMethod& method, int64_t hidden, int64_t inter, int group_size,
                         bool zero_point);

// The routed experts under a path: a checkpoint's folder, a GGUF file or a folder of them, kt weights. Opened
// once and shared by all layers that ask for the same path while one of them lives.
std::shared_ptr<const ExpertSource> shared_experts(const std::string& path);
// The next shared_experts(path) opens it again: for who changed what is there.
void forget_experts(const std::string& path);

// Error(kInput) naming the method that fits, unless the source stores its experts as the method says, or
// holds floats or FP8 and the method is one of converted weights. Error too if the layer is not there.
void check_method(const WeightMethod& method, const ExpertSource& source, int layer, const std::string& path);

// After check_method: null where the layer is loaded as it is stored, else a view of the source that rounds
// while it is read, and a line in the log that says so: methods of converted weights round other experts as
// `kt quant` does. The source must outlive it.
std::unique_ptr<ExpertSource> rounded_for(const WeightMethod& method, const ExpertSource& source, int layer,
                                          const std::string& path);

}  // namespace kt
