// Adapters of PEFT in the two layouts that LoRA of routed experts is stored in, turned into one another without
// rounding:
//
//   fused       one pair of matrices for gate and up of all experts of a layer and one for down, with one A for gate
//               and up: ...mlp.experts.base_layer.lora_A [E*r, H], lora_B [2I, r*E]; ...mlp.experts.lora_A [E*r, I],
//               lora_B [H, r*E]. Rows of A are expert*r + rank, columns of B rank*E + expert.
//   per expert  ...mlp.experts.E.{gate,up,down}_proj.lora_{A,B}, [r, in] and [out, r].
//
// Where gate and up have an A of their own, the fused one is both, below each other, and B has zeros where one does not
// meet the other. Nothing is computed: values are moved.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace kt::inline weights {

enum class LoraLayout : uint8_t { kFused, kPerExpert };

enum class LoraShare : uint8_t { kAll, kExperts, kRest };  // of the adapter's modules

struct LoraExport {
  std::string from, to;  // folders
  LoraLayout layout = LoraLayout::kPerExpert;
  bool overwrite = false;
  LoraShare share = LoraShare::kAll;
  std::string base_model = {};       // what adapter_config.json calls the base model; "": as it was
  std::optional<double> alpha = {};  // of a folder whose adapter_config.json is missing, or says none
};

struct LoraExported {
  LoraLayout found = LoraLayout::kFused;
  std::string beside =
      {};  // a file of another program whose experts were read: "fused_expert_lora.safetensors"
  int layers = 0, experts = 0, gate_up_rank = 0, down_rank = 0;  // ranks as written
  uint64_t tensors = 0, bytes = 0;
};

// Reads adapter_config.json and adapter_model.safetensors of `from` (and the experts of a
// fused_expert_lora.safetensors, beside which the second may be missing, and the first where alpha is given), and
// writes both to `to`, beside copies of what else is small and not a checkpoint. Files appear whole or not at all.
// Errors name file, tensor and shapes; a folder `to` that holds something, unless it may be overwritten; an adapter
// without LoRA on experts.
LoraExported export_lora(const LoraExport& request);

}  // namespace kt::inline weights
