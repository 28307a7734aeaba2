// The arrays that kt weights consist of: which there are, in what order converters write them, how large each
// is, and what is said about them in places old readers ignore.
#pragma once
#include <string>
#include <vector>

#include "text/json.h"
#include "weights/kt/kt_layout.h"
#include "weights/kt/kt_names.h"
#include "weights/safetensors.h"

namespace kt::inline weights {

// What the bytes of all experts have in common.
struct KtModel {
  int bits = 4;  // 4 or 8
  int64_t hidden = 0, inter = 0;
  int parts = 1;          // divides inter
  bool backward = false;  // transposed copies are there too
  std::string rounding;   // "established", "direct"; empty where nobody knows
  std::string source;     // dialect of the original: "bf16", "fp8", ...; empty where nobody knows
  std::string tool;       // "kt 0.1.0": who quantised
  bool operator==(const KtModel&) const = default;
};

// The matrix of this array's part, padded. Gate and up are cut by rows, down by columns; backward copies are
// those parts transposed.
KtShape kt_part_shape(const KtModel& model, const KtName& name);
// Whether some array of this model is padded: then readers other than this one cannot read it.
bool kt_padded(const KtModel& model);

// The arrays of one expert in the order of files: projections, forward before backward, parts, weight before
// scale.
std::vector<KtName> kt_expert_arrays(const KtModel& model, int layer, int expert);

uint64_t kt_array_bytes(const KtModel& model, const KtName& name);
// As a tensor of a merged file, I8 or F32, and as a file of a folder.
TensorSpec kt_tensor_spec(const KtModel& model, const KtName& name);
TensorSpec kt_file_spec(const KtModel& model, const KtName& name);

// `__metadata__` of a merged file with these arrays: format version, layout, and "kt.shape.<tensor>" = "N,K"
// of padded weights.
Metadata kt_metadata(const KtModel& model, const std::vector<KtName>& arrays);

// The same facts for a `.kt` folder, whose files have no place for them.
inline constexpr std::string_view kKtFactsFile = "kt_weights.json";
// `origin`, where experts stand without the rest of their model: kt_origin.h.
std::string kt_facts(const KtModel& model, const Json& origin = {});
// Error naming `file` for anything but what kt_facts() writes.
KtModel parse_kt_facts(const Json& json, std::string_view file);

}  // namespace kt::inline weights
