// LoRA of routed experts as it lies in an adapter's files, expert by expert, whatever the layout.
#pragma once
#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "text/json.h"
#include "weights/lora/lora_layouts.h"
#include "weights/lora/lora_view.h"
#include "weights/safetensors.h"

namespace kt::inline weights {

inline constexpr const char* kAdapterModelFile = "adapter_model.safetensors";
inline constexpr const char* kAdapterConfigFile = "adapter_config.json";
inline constexpr const char* kOtherExpertsFile = "fused_expert_lora.safetensors";

struct LoraMatrices {
  LoraView a, b;  // [rank, in], [out, rank]
};

enum StoredPart : size_t { kGatePart, kUpPart, kDownPart };
inline constexpr const char* kPublishedParts[3] = {"gate_proj", "up_proj", "down_proj"};
inline constexpr const char* kNumberedParts[3] = {"w1", "w3", "w2"};

// The routed experts of a layer.
struct StoredExperts {
  std::string prefix;  // "base_model.model.model.layers.3.mlp.experts"
  Dtype dtype = Dtype::kF32;
  std::vector<std::array<std::optional<LoraMatrices>, 3>> experts;
};

struct AdapterFiles {
  std::string folder;
  Json config;
  MappedFile file, others;
  std::vector<Tensor> tensors, other_tensors;
  LoraLayout found = LoraLayout::kFused;
  std::map<int, StoredExperts> layers;
  std::vector<const Tensor*> rest;  // of anything but routed experts
};

// Error(kInput) naming file, tensor and shapes for what is no such adapter. `alpha`: of one without
// adapter_config.json, or whose file does not say it.
AdapterFiles read_adapter(const std::string& folder, std::optional<double> alpha = {});

// The rank that adapter_config.json gives a parameter: that of a pattern that names it, or r.
int64_t rank_in(const AdapterFiles& adapter, const std::string& parameter);

}  // namespace kt::inline weights
