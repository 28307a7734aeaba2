#include "weights/gguf/gguf_config.h"

#include <array>
#include <cmath>
#include <cstring>

namespace kt {
namespace {

struct KeyRow {
  std::string_view gguf, json;
};
// Behind "<architecture>.".
constexpr auto kKeys = std::to_array<KeyRow>({
    {"context_length", "max_position_embeddings"},
    {"embedding_length", "hidden_size"},
    {"feed_forward_length", "intermediate_size"},
    {"vocab_size", "vocab_size"},
    {"attention.head_count", "num_attention_heads"},
    {"attention.head_count_kv", "num_key_value_heads"},
    {"attention.layer_norm_rms_epsilon", "rms_norm_eps"},
    {"attention.q_lora_rank", "q_lora_rank"},
    {"attention.kv_lora_rank", "kv_lora_rank"},
    {"attention.sliding_window", "sliding_window"},
    {"rope.freq_base", "rope_theta"},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_shared_count", "n_shared_experts"},
    {"expert_shared_feed_forward_length", "shared_expert_intermediate_size"},
    {"expert_weights_scale", "routed_scaling_factor"},
    {"expert_weights_norm", "norm_topk_prob"},
    {"expert_group_count", "n_group"},
    {"expert_group_used_count", "topk_group"},
    {"leading_dense_block_count", "first_k_dense_replace"},
    {"nextn_predict_layers", "num_nextn_predict_layers"},
    {"interleave_moe_layer_step", "interleave_moe_layer_step"},
});

struct OtherRow {
  std::string_view gguf, json, experts;
};
// Words of architectures whose experts are read and which are no family here.
constexpr auto kOthers = std::to_array<OtherRow>({
    {"qwen3next", "qwen3_next", "num_experts"},
    {"qwen3vlmoe", "qwen3_vl_moe", "num_experts"},
    {"llama4", "llama4_text", "num_local_experts"},
    {"bailingmoe2", "bailing_moe", "num_experts"},
});

// Elements of a number array that are all equal, as one value.
Json uniform(const GgufArray& array) {
  const size_t size = array.count == 0 ? 0 : array.bytes.size() / array.count;
  if (size == 0 || array.bytes.size() != size * array.count) return nullptr;
  for (uint64_t i = 1; i < array.count; ++i)
    if (std::memcmp(array.bytes.data(), array.bytes.data() + i * size, size) != 0) return nullptr;
  constexpr uint32_t kU32 = 4, kI32 = 5;
  if (array.element_type != kU32 && array.element_type != kI32) return nullptr;
  int32_t value = 0;
  std::memcpy(&value, array.bytes.data(), sizeof value);
  return value >= 0 ? Json(value) : Json(nullptr);
}

struct ToJson {
  Json operator()(bool value) const { return value; }
  Json operator()(uint64_t value) const { return value; }
  Json operator()(int64_t value) const { return value; }
  Json operator()(double value) const { return std::isfinite(value) ? Json(value) : Json(nullptr); }
  Json operator()(std::string_view value) const { return value; }
  Json operator()(const GgufArray& value) const { return uniform(value); }
};

}  // namespace

std::optional<uint64_t> gguf_unsigned(const GgufHeader& header, std::string_view key) {
  const auto found = header.metadata.find(key);
  if (found == header.metadata.end()) return std::nullopt;
  if (const auto* value = std::get_if<uint64_t>(&found->second)) return *value;
  const auto* value = std::get_if<int64_t>(&found->second);
  if (value == nullptr || *value < 0) return std::nullopt;
  return static_cast<uint64_t>(*value);
}

std::string_view gguf_string(const GgufHeader& header, std::string_view key) {
  const auto found = header.metadata.find(key);
  if (found == header.metadata.end()) return {};
  const auto* const value = std::get_if<std::string_view>(&found->second);
  return value == nullptr ? std::string_view() : *value;
}

Json gguf_config(const GgufHeader& header, const GgufFamily* family) {
  Json out = Json::object();
  const std::string architecture(gguf_string(header, "general.architecture"));
  if (architecture.empty()) return out;
  const auto key = [&](std::string_view tail) { return architecture + "." + std::string(tail); };
  for (const KeyRow& row : kKeys) {
    const auto found = header.metadata.find(key(row.gguf));
    if (found == header.metadata.end()) continue;
    Json value = std::visit(ToJson(), found->second);
    if (!value.is_null()) out[std::string(row.json)] = std::move(value);
  }
  const auto experts = gguf_unsigned(header, key("expert_count"));
  const auto gating = gguf_unsigned(header, key("expert_gating_func"));
  std::string_view type = architecture, experts_key = "num_experts";
  for (const OtherRow& row : kOthers)
    if (row.gguf == architecture) type = row.json, experts_key = row.experts;
  if (family) type = family->model_type, experts_key = family->expert_count;
  out["model_type"] = type;
  if (experts) out[std::string(experts_key)] = *experts;
  if (gating) out["scoring_func"] = *gating == kGgufSigmoid ? "sigmoid" : "softmax";
  // Files count the layers that predict further tokens among their blocks; config.json does not.
  if (const auto blocks = gguf_unsigned(header, key("block_count"))) {
    const uint64_t extra = gguf_unsigned(header, key("nextn_predict_layers")).value_or(0);
    out["num_hidden_layers"] = *blocks >= extra ? *blocks - extra : *blocks;
  }
  return out;
}

}  // namespace kt
