// What the GGUF files of one model family have of their own: their word for it, the names of their tensors,
// what they leave unsaid. A value: each family's stands beside its model (models/<x>.cc), and who opens a
// checkpoint hands the list down. A file of none of them is tensors and metadata, not a model.
#pragma once
#include <array>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "weights/gguf/gguf.h"

namespace kt::inline weights {

class GgufFacts;  // gguf_model.h
using TensorFinder = std::function<const Tensor*(std::string_view name)>;

// Modules of a layer, to which ".weight" or ".bias" is added; or whole tensors, where the ends differ: told by a dot,
// or said where a name has none.
struct GgufName {
  enum class Kind : uint8_t { kTold, kTensor };
  std::string_view gguf, published;
  Kind kind = Kind::kTold;
};

struct GgufFamily {
  std::string_view gguf;          // general.architecture
  std::string_view model_type;    // of config.json
  std::string_view architecture;  // of config.json
  // Where several families share a general.architecture: whether a file is of this one.
  bool (*owns)(const GgufHeader&, const TensorFinder&) = nullptr;
  bool interleaved = false;              // rows of q and k are stored for rotation of neighbours
  std::span<const GgufName> names = {};  // that are not the usual ones of gguf_names.cc
  // Published names of an expert: "model.layers.3." + "mlp.experts" + ".7." + "gate_proj".
  std::string_view experts = "mlp.experts";
  std::array<std::string_view, 3> projections = {"gate_proj", "up_proj", "down_proj"};
  std::string_view expert_count = "num_experts";  // of config.json
  // Adds what only this family's config.json says.
  void (*complete)(GgufFacts&) = nullptr;
};
using GgufFamilies = std::span<const GgufFamily* const>;

// The family of a file with these tensors, or null.
const GgufFamily* find_gguf_family(GgufFamilies families, const GgufHeader& header, const TensorFinder& find);
std::string gguf_architectures(GgufFamilies families);  // "deepseek2, glm4moe, ..."

}  // namespace kt::inline weights
