// The names under which engines and users ask for weights ("AMXINT4", "RAWINT4", ...): the one table that the program,
// its settings and completions, and Python read. A name says how the weights are stored, never which CPU may run them.
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "formats/format.h"
#include "weights/experts.h"

namespace kt::inline weights {

struct WeightMethod {
  std::string_view name;
  std::string_view word;         // a short name that is known as well; empty: none
  std::string_view stored_as;    // for messages: "kt int4 weights", "GGUF", "FP8 in 128x128 blocks"
  std::string_view format = {};  // of values stored under it; empty: see formats_of
  int kt_bits = 0;               // 4 or 8 where converted kt weights of so many bits are what it loads
};

std::span<const WeightMethod> weight_methods();
// By its name or its word, in any case. Error(kInput) listing them.
const WeightMethod& weight_method_named(std::string_view name);

// The format in which values are stored under this method (load_values); group_size and zero_point where the
// method has groups. LLAMAFILE, which names no block type, rounds to Q4_K, the usual one of published files,
// and to Q4_0 where the columns do not fill its super-blocks of 256.
struct MethodFormats {
  Format gate_up, down;
};
MethodFormats formats_of(const WeightMethod& method, int64_t hidden, int64_t inter, int group_size,
                         bool zero_point);

// The method that loads the experts of a source as they are stored: those of its first layer.
const WeightMethod& stored_method(const ExpertSource& source);

// Whether a layer of a source is loaded under this method: as it is stored or, for methods of converted weights, floats
// and FP8 rounded while they are read.
bool loads_method(const WeightMethod& method, const ExpertSource& source, int layer);
// The same, or an Error(kInput) with the method, how the experts are stored, the path and the method that fits. Error
// too if the layer is not there.
void check_method(const WeightMethod& method, const ExpertSource& source, int layer, const std::string& path);

// After check_method: the format that the experts are rounded to while they are loaded; none: as they are stored.
std::optional<Format> rounded_format(const WeightMethod& method, const ExpertSource& source, int layer);

// After check_method: null where the layer is loaded as it is stored, else a view of the source that rounds
// while it is read, and a line in the log that says so: methods of converted weights round other experts as
// `kt quant` does. The source must outlive it.
std::unique_ptr<ExpertSource> rounded_for(const WeightMethod& method, const ExpertSource& source, int layer,
                                          const std::string& path);

}  // namespace kt::inline weights
