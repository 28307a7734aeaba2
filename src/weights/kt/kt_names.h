// Names of converted CPU weights, made and parsed: tensors of merged files and files of `.kt` folders. Knows
// no bytes.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "weights/experts.h"

namespace kt::inline weights {

// One array of one part of one expert's projection.
struct KtName {
  int layer = 0;
  Projection projection = Projection::kGate;
  bool backward = false;  // the transposed copy for training
  int expert = 0;
  int part = 0;
  bool scale = false;  // else the packed weights
  bool operator==(const KtName&) const = default;
};

// "blk.3.ffn_up_exps.7.numa.0.weight", "blk.3.ffn_down_bwd_exps.7.numa.1.scale"
std::string kt_tensor_name(const KtName& name);

// "_layer_3/_numa_0/INT4_up_7_16384Byte_quant_.kt": a path in the folder. bits is 4 or 8.
std::string kt_file_name(const KtName& name, int bits, uint64_t bytes);

// The parsers take names from files nobody vouches for: nothing unless the whole of it has exactly the form
// above, with numbers in plain decimal (no sign, no leading zero) of at most kLargestKtNumber.
inline constexpr int kLargestKtNumber = 99999;

std::optional<KtName> parse_kt_tensor_name(std::string_view name);

std::optional<int> parse_kt_layer_folder(std::string_view name);  // "_layer_3"
std::optional<int> parse_kt_part_folder(std::string_view name);   // "_numa_0"

// The last component of a path: layer and part of `name` are those of its folders, left 0 here.
struct KtFileName {
  KtName name;
  int bits = 8;
  uint64_t bytes = 0;  // as the name says; at most 2^48
  bool operator==(const KtFileName&) const = default;
};
std::optional<KtFileName> parse_kt_file_name(std::string_view name);

// The name a tensor that belongs to no expert has in merged files: "model.layers." becomes "blk.", a leading
// "model." goes. Of a module's name likewise, and of a name that has it already nothing changes.
std::string kt_other_name(std::string_view name);

}  // namespace kt::inline weights
