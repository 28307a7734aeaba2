// What the name of a routed expert's tensor says: layer, expert, projection and which of a module's tensors
// it is. Names only; shapes and bytes are the dialects' affair.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kt::inline weights {

// A projection as named: fused tensors hold two of them.
enum class NamedPart : uint8_t { kGate, kUp, kDown, kGateUp };

// Views into the tensor's name.
struct ExpertName {
  std::string_view prefix;  // up to and with "layers.": "model.layers."; "blk." for GGUF
  std::string_view stem;    // what stands before ".<expert>.<projection>": "model.layers.3.mlp.experts"
  std::string_view module;  // the name without its suffix: "model.layers.3.mlp.experts.7.gate_proj"
  int layer = 0;
  int expert = -1;  // -1: one tensor holds all experts
  NamedPart part = NamedPart::kGate;
  std::string_view projection;  // as spelled: "gate_proj", "w1", "ffn_gate_exps"
  std::string_view suffix;      // "weight", "weight_scale_inv", "blocks"; "" where the name ends before it
  bool extra = false;           // of a multi-token-prediction block beside the model's layers
};

// Nothing for any other tensor: shared experts, routers, biases of the router, dense layers. All naming
// styles and layer prefixes of safetensors models and of GGUF.
std::optional<ExpertName> parse_expert_name(std::string_view tensor);

}  // namespace kt::inline weights
