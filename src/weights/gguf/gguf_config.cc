#include "weights/gguf/gguf_config.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.h"
#include "base/utf8.h"
#include "text/shown.h"

namespace kt::inline weights {
namespace {

struct KeyRow {
  enum class Kind : uint8_t { kCount, kReal, kFlag };
  std::string_view gguf, json;
  Kind kind = Kind::kCount;
};
// Behind "<architecture>.".
constexpr auto kKeys = std::to_array<KeyRow>({
    {"context_length", "max_position_embeddings"},
    {"embedding_length", "hidden_size"},
    {"feed_forward_length", "intermediate_size"},
    {"vocab_size", "vocab_size"},
    {"attention.head_count", "num_attention_heads"},
    {"attention.head_count_kv", "num_key_value_heads"},
    {"attention.layer_norm_rms_epsilon", "rms_norm_eps", KeyRow::Kind::kReal},
    {"attention.q_lora_rank", "q_lora_rank"},
    {"attention.kv_lora_rank", "kv_lora_rank"},
    {"attention.indexer.head_count", "index_n_heads"},
    {"attention.indexer.key_length", "index_head_dim"},
    {"attention.indexer.top_k", "index_topk"},
    {"attention.sliding_window", "sliding_window"},
    {"attention.shared_kv_layers", "num_kv_shared_layers"},
    {"attention.temperature_scale", "llama_4_scaling_beta", KeyRow::Kind::kReal},
    {"embedding_length_per_layer_input", "hidden_size_per_layer_input"},
    {"final_logit_softcapping", "final_logit_softcapping", KeyRow::Kind::kReal},
    {"rope.freq_base", "rope_theta", KeyRow::Kind::kReal},
    {"expert_used_count", "num_experts_per_tok"},
    {"expert_feed_forward_length", "moe_intermediate_size"},
    {"expert_shared_count", "n_shared_experts"},
    {"expert_shared_feed_forward_length", "shared_expert_intermediate_size"},
    {"expert_weights_scale", "routed_scaling_factor", KeyRow::Kind::kReal},
    {"expert_weights_norm", "norm_topk_prob", KeyRow::Kind::kFlag},
    {"expert_group_count", "n_group"},
    {"expert_group_used_count", "topk_group"},
    {"leading_dense_block_count", "first_k_dense_replace"},
    {"nextn_predict_layers", "num_nextn_predict_layers"},
    {"interleave_moe_layer_step", "interleave_moe_layer_step"},
    {"ssm.conv_kernel", "linear_conv_kernel_dim"},
    {"ssm.state_size", "linear_key_head_dim"},
    {"ssm.group_count", "linear_num_key_heads"},
    {"ssm.time_step_rank", "linear_num_value_heads"},
    {"ssm.inner_size", "linear_inner_size"},
});

// What gguf_model.cc makes of other keys; for errors.
constexpr auto kDerivedKeys = std::to_array<KeyRow>({
    {"block_count", "num_hidden_layers"},
    {"expert_count", "num_experts"},
    {"expert_count", "n_routed_experts"},
    {"expert_count", "num_local_experts"},
    {"expert_count", "moe_num_experts"},
    {"expert_count", "moe_num_primary_experts"},
    {"expert_used_count", "moe_num_active_primary_experts"},
    {"expert_used_count", "top_k_experts"},
    {"attention.sliding_window_pattern", "layer_types"},
    {"expert_feed_forward_length", "moe_ffn_hidden_size"},
    {"attention.sliding_window", "attention_chunk_size"},
    {"attention.sliding_window", "sliding_window_size"},
    {"feed_forward_length", "intermediate_size_mlp"},
    {"expert_used_count", "moe_k"},
    {"expert_shared_count", "moe_num_shared_experts"},
    {"leading_dense_block_count", "moe_layer_start_index"},
    {"interleave_moe_layer_step", "moe_layer_interval"},
    {"expert_shared_feed_forward_length", "num_shared_experts"},
    {"expert_weights_scale", "router_scaling_factor"},
    {"expert_gating_func", "scoring_func"},
    {"attention.indexer.types", "indexer_types"},
    {"attention.key_length", "head_dim"},
    {"ssm.inner_size", "linear_value_head_dim"},
    {"attention.key_length_mla", "qk_nope_head_dim"},
    {"attention.value_length_mla", "v_head_dim"},
    {"rope.dimension_count", "qk_rope_head_dim"},
    {"rope.dimension_count", "partial_rotary_factor"},
    {"rope.scaling.type", "rope_scaling.rope_type"},
    {"rope.scaling.factor", "rope_scaling.factor"},
    {"rope.scaling.original_context_length", "rope_scaling.original_max_position_embeddings"},
    {"rope.scaling.yarn_beta_fast", "rope_scaling.beta_fast"},
    {"rope.scaling.yarn_beta_slow", "rope_scaling.beta_slow"},
    {"rope.scaling.yarn_attn_factor", "rope_scaling.attention_factor"},
    {"rope.scaling.yarn_log_multiplier", "rope_scaling.mscale_all_dim"},
    {"attention.temperature_scale", "rope_scaling.llama_4_scaling_beta"},
});
// Tensors that gguf_model.cc takes into the config; rope_freqs stands for both lists.
constexpr auto kTensorsOf = std::to_array<KeyRow>({
    {"rope_factors_short.weight", "rope_scaling.short_factor"},
    {"rope_factors_long.weight", "rope_scaling.long_factor"},
    {"rope_freqs.weight", "rope_parameters.full_attention.short_factor"},
});
constexpr std::string_view kOneTensorOf = "rope_freqs.weight";

struct OtherRow {
  std::string_view gguf, json, experts;
};
// Words of architectures whose experts are read and which are no family here.
constexpr auto kOthers = std::to_array<OtherRow>({
    {"qwen3vlmoe", "qwen3_vl_moe", "num_experts"},
    {"bailingmoe2", "bailing_moe", "num_experts"},
});

std::string value_text(const GgufValue& value) {
  if (const auto* const array = std::get_if<GgufArray>(&value)) return text("a list of {}", array->count);
  if (const auto* const string = std::get_if<std::string_view>(&value)) return text("\"{}\"", shown(*string));
  if (const auto* const number = std::get_if<uint64_t>(&value)) return text("{}", *number);
  if (const auto* const number = std::get_if<int64_t>(&value)) return text("{}", *number);
  if (const auto* const number = std::get_if<double>(&value)) return text("{}", *number);
  return std::get<bool>(value) ? "true" : "false";
}

[[noreturn]] void refuse_value(const GgufHeader& header, std::string_view key, std::string_view expected) {
  fail("{}: {} is {}, expected {}", header.name, shown(key), value_text(header.metadata.find(key)->second),
       expected);
}

const GgufValue* find_value(const GgufHeader& header, std::string_view key) {
  const auto found = header.metadata.find(key);
  return found == header.metadata.end() ? nullptr : &found->second;
}

// Of expert_gating_func; 3 is a softmax over the chosen alone, which the family that has it knows.
std::string scoring_name(uint64_t function) {
  constexpr std::string_view kNames[] = {"none", "softmax", "sigmoid", "softmax", "sqrtsoftplus"};
  static_assert(kNames[kGgufSigmoid] == "sigmoid");
  return function < std::size(kNames) ? std::string(kNames[function]) : text("{}", function);
}

// Elements of a number array that are all equal, as one value; null where they are not.
Json uniform(const GgufHeader& header, std::string_view key, const GgufArray& array) {
  constexpr std::string_view kExpected = "whole numbers of at least 0";
  std::optional<int64_t> first;
  bool equal = true;
  for (uint64_t i = 0; i < array.count; ++i) {
    const std::optional<int64_t> value = array.whole(i);
    if (!value) refuse_value(header, key, kExpected);
    if (*value < 0) fail("{}: {}[{}] is {}, expected {}", header.name, shown(key), i, *value, kExpected);
    if (first && *first != *value) equal = false;
    first = value;
  }
  return first && equal ? Json(*first) : Json(nullptr);
}

Json value_of(const GgufHeader& header, const std::string& key, KeyRow::Kind kind) {
  const GgufValue* const value = find_value(header, key);
  if (value == nullptr) return nullptr;
  switch (kind) {
    case KeyRow::Kind::kCount:
      if (const auto* const array = std::get_if<GgufArray>(value)) return uniform(header, key, *array);
      return *gguf_unsigned(header, key);
    case KeyRow::Kind::kReal:
      return *gguf_real(header, key);
    case KeyRow::Kind::kFlag:
      if (const auto* const flag = std::get_if<bool>(value)) return *flag;
      refuse_value(header, key, "true or false");
  }
  return nullptr;
}

}  // namespace

std::optional<uint64_t> gguf_unsigned(const GgufHeader& header, std::string_view key) {
  const GgufValue* const found = find_value(header, key);
  if (found == nullptr) return std::nullopt;
  if (const auto* const value = std::get_if<uint64_t>(found); value && *value <= INT64_MAX) return *value;
  const auto* const value = std::get_if<int64_t>(found);
  if (value == nullptr || *value < 0) refuse_value(header, key, "a whole number of at least 0");
  return static_cast<uint64_t>(*value);
}

std::vector<bool> gguf_flags(const GgufHeader& header, std::string_view key) {
  const GgufValue* const found = find_value(header, key);
  if (found == nullptr) return {};
  constexpr std::string_view kExpected = "a list of true and false";
  const auto* const array = std::get_if<GgufArray>(found);
  if (array == nullptr) refuse_value(header, key, kExpected);
  std::vector<bool> out;
  for (uint64_t i = 0; i < array->count; ++i) {
    const std::optional<bool> flag = array->flag(i);
    if (!flag) fail("{}: {}[{}] is something else, expected {}", header.name, shown(key), i, kExpected);
    out.push_back(*flag);
  }
  return out;
}

std::vector<uint64_t> gguf_counts(const GgufHeader& header, std::string_view key, uint64_t count) {
  const GgufValue* const found = find_value(header, key);
  if (found == nullptr) return {};
  const auto* const array = std::get_if<GgufArray>(found);
  if (array == nullptr) return std::vector<uint64_t>(count, *gguf_unsigned(header, key));
  if (array->count != count)
    fail("{}: {} has {} numbers, expected {}", header.name, shown(key), array->count, count);
  uniform(header, key, *array);  // refuses what is no count
  std::vector<uint64_t> out;
  for (uint64_t i = 0; i < count; ++i) out.push_back(static_cast<uint64_t>(*array->whole(i)));
  return out;
}

std::optional<double> gguf_real(const GgufHeader& header, std::string_view key) {
  const GgufValue* const found = find_value(header, key);
  if (found == nullptr) return std::nullopt;
  if (const auto* const value = std::get_if<uint64_t>(found)) return static_cast<double>(*value);
  if (const auto* const value = std::get_if<int64_t>(found)) return static_cast<double>(*value);
  const auto* const value = std::get_if<double>(found);
  if (value == nullptr || !std::isfinite(*value)) refuse_value(header, key, "a finite number");
  return *value;
}

std::string_view gguf_string(const GgufHeader& header, std::string_view key) {
  const GgufValue* const found = find_value(header, key);
  if (found == nullptr) return {};
  const auto* const value = std::get_if<std::string_view>(found);
  if (value == nullptr) refuse_value(header, key, "a string");
  if (!is_valid_utf8(*value)) fail("{}: {} is not UTF-8", header.name, shown(key));
  return *value;
}

std::optional<uint64_t> gguf_token_id(const GgufHeader& header, std::string_view key, uint64_t tokens) {
  const auto id = gguf_unsigned(header, key);
  if (id && *id >= tokens) fail("{}: {} is {}, there are {} tokens", header.name, shown(key), *id, tokens);
  return id;
}

bool is_gguf_config_tensor(std::string_view name) {
  return name == kOneTensorOf || std::ranges::find(kTensorsOf, name, &KeyRow::gguf) != kTensorsOf.end();
}

KeyNames gguf_key_names(const GgufHeader& header) {
  const bool one = std::ranges::find(header.tensors, kOneTensorOf, &Tensor::name) != header.tensors.end();
  return
      [architecture = std::string(gguf_string(header, "general.architecture")), one](std::string_view key) {
        const auto found = std::ranges::find(kTensorsOf, key, &KeyRow::json);
        if (found != kTensorsOf.end()) return std::string(one ? kOneTensorOf : found->gguf);
        for (const KeyRow& row : kKeys)
          if (row.json == key) return text("{}.{}", architecture, row.gguf);
        for (const KeyRow& row : kDerivedKeys)
          if (row.json == key) return text("{}.{}", architecture, row.gguf);
        return std::string(key);
      };
}

Json gguf_config(const GgufHeader& header, const GgufFamily* family) {
  Json out = Json::object();
  const std::string architecture(gguf_string(header, "general.architecture"));
  if (architecture.empty()) return out;
  const auto key = [&](std::string_view tail) { return architecture + "." + std::string(tail); };
  for (const KeyRow& row : kKeys) {
    Json value = value_of(header, key(row.gguf), row.kind);
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
  if (gating && *gating != 0) out["scoring_func"] = scoring_name(*gating);
  // Files count the layers that predict further tokens among their blocks; config.json does not.
  if (const auto blocks = gguf_unsigned(header, key("block_count"))) {
    const uint64_t extra = gguf_unsigned(header, key("nextn_predict_layers")).value_or(0);
    out["num_hidden_layers"] = *blocks >= extra ? *blocks - extra : *blocks;
  }
  return out;
}

}  // namespace kt::inline weights
