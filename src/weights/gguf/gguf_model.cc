#include "weights/gguf/gguf_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "weights/gguf/gguf_config.h"
#include "weights/gguf/gguf_names.h"

namespace kt {
namespace {

constexpr uint32_t kTypeF32 = 0, kTypeF16 = 1;
constexpr uint64_t kMostLayers = 10000;  // looked at; who reads the config refuses more

class Facts {
 public:
  Facts(const GgufHeader& header, const TensorFinder& find, const GgufFamily& family, Json& config)
      : header_(header), find_(find), family_(family), config_(config) {}

  void add() {
    config_["architectures"] = {family_.architecture};
    add_embeddings();
    if (find("blk.0.attn_kv_a_mqa.weight")) {
      add_latent_attention();
    } else {
      add_attention();
    }
    add_rope();
    add_feed_forward();
    add_end_tokens();
  }

 private:
  std::string key(std::string_view tail) const { return text("{}.{}", family_.gguf, tail); }
  std::optional<uint64_t> number(std::string_view tail) const { return gguf_unsigned(header_, key(tail)); }
  std::optional<double> real(std::string_view tail) const {
    const auto found = header_.metadata.find(key(tail));
    if (found == header_.metadata.end()) return std::nullopt;
    if (const auto* value = std::get_if<double>(&found->second)) return *value;
    if (const auto whole = number(tail)) return static_cast<double>(*whole);
    return std::nullopt;
  }
  const Tensor* find(std::string_view name) const { return find_(name); }
  bool is(std::string_view model_type) const { return family_.model_type == model_type; }
  uint64_t known(const char* json_key) const {
    const auto found = config_.find(json_key);
    if (found == config_.end() || !found->is_number_integer() || found->get<int64_t>() < 0) return 0;
    return found->get<uint64_t>();
  }
  template <typename T>
  void add_if_absent(const char* json_key, const T& value) {
    if (!config_.contains(json_key)) config_[json_key] = value;
  }
  uint64_t layers() const { return std::min(known("num_hidden_layers"), kMostLayers); }
  // That of the first layer that has one.
  const Tensor* in_any_layer(std::string_view tail) const {
    for (uint64_t i = 0; i < layers(); ++i)
      if (const Tensor* tensor = find(text("blk.{}.{}", i, tail))) return tensor;
    return nullptr;
  }

  void add_embeddings();
  void add_attention();
  void add_latent_attention();
  void add_rope();
  Json yarn() const;
  Json rope_factors(const Tensor& tensor) const;
  void add_feed_forward();
  void add_dense_layers();
  void add_router();
  void add_end_tokens();

  const GgufHeader& header_;
  const TensorFinder& find_;
  const GgufFamily& family_;
  Json& config_;
};

void Facts::add_embeddings() {
  config_["tie_word_embeddings"] = find("output.weight") == nullptr;
  const auto tokens = header_.metadata.find("tokenizer.ggml.tokens");
  if (tokens != header_.metadata.end())
    if (const auto* list = std::get_if<GgufArray>(&tokens->second)) add_if_absent("vocab_size", list->count);
  const Tensor* const embedding = find("token_embd.weight");
  if (embedding == nullptr) return;
  // The vocabulary of the token list may be shorter than the rows that models are padded to.
  if (embedding->shape.size() == 2) config_["vocab_size"] = static_cast<uint64_t>(embedding->shape[0]);
  config_["torch_dtype"] = embedding->gguf_type == kTypeF32   ? "float32"
                           : embedding->gguf_type == kTypeF16 ? "float16"
                                                              : "bfloat16";
}

void Facts::add_attention() {
  const uint64_t heads = known("num_attention_heads"), hidden = known("hidden_size");
  const uint64_t head = number("attention.key_length").value_or(heads > 0 ? hidden / heads : 0);
  if (head > 0) config_["head_dim"] = head;
  const uint64_t turning = number("rope.dimension_count").value_or(head);
  if (head > 0) {
    double part = static_cast<double>(turning) / static_cast<double>(head);
    // Readers multiply and cut off.
    if (part * static_cast<double>(head) < static_cast<double>(turning)) part = std::nextafter(part, 2.0);
    config_["partial_rotary_factor"] = part;
  }
  const bool bias = find("blk.0.attn_q.bias") != nullptr;
  config_[is("qwen2_moe") ? "qkv_bias" : "attention_bias"] = bias;
  if (is("glm4_moe")) config_["use_qk_norm"] = find("blk.0.attn_q_norm.weight") != nullptr;
}

// Files of the absorbed form count one head of keys and give the dimensions of a real head apart.
void Facts::add_latent_attention() {
  config_["num_key_value_heads"] = config_.value("num_attention_heads", Json());
  const auto length = [&](std::string_view kind) {
    const auto real_head = number(text("attention.{}_length_mla", kind));
    return real_head ? real_head : number(text("attention.{}_length", kind));
  };
  const auto turning = number("rope.dimension_count"), keys = length("key"), values = length("value");
  if (turning) config_["qk_rope_head_dim"] = *turning;
  if (turning && keys && *keys > *turning) config_["qk_nope_head_dim"] = *keys - *turning;
  if (values) config_["v_head_dim"] = *values;
  add_if_absent("q_lora_rank", nullptr);
  config_["attention_bias"] = find("blk.0.attn_kv_a_mqa.bias") != nullptr;
}

Json Facts::yarn() const {
  Json rope = {{"rope_type", "yarn"}, {"type", "yarn"}};
  const auto copy = [&](std::string_view tail, const char* json_key) {
    if (const auto value = real(tail)) rope[json_key] = *value;
  };
  copy("rope.scaling.factor", "factor");
  copy("rope.scaling.yarn_beta_fast", "beta_fast");
  copy("rope.scaling.yarn_beta_slow", "beta_slow");
  copy("rope.scaling.yarn_attn_factor", "attention_factor");
  if (const auto original = number("rope.scaling.original_context_length"))
    rope["original_max_position_embeddings"] = *original;
  // Kept as a tenth of mscale_all_dim; mscale itself is not kept, and every published model has them equal.
  if (const auto tenth = real("rope.scaling.yarn_log_multiplier"))
    rope["mscale"] = rope["mscale_all_dim"] = *tenth * 10;
  if (is("gpt_oss")) rope["truncate"] = false;
  return rope;
}

// Llama 3 stores what each frequency is divided by; config.json can say that with lists for short and long
// texts that are the same.
Json Facts::rope_factors(const Tensor& tensor) const {
  std::vector<float> values(tensor.bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), tensor.bytes.data(), values.size() * sizeof(float));
  return {{"rope_type", "longrope"},
          {"type", "longrope"},
          {"factor", 1.0},
          {"attention_factor", 1.0},
          {"original_max_position_embeddings", config_.value("max_position_embeddings", Json())},
          {"short_factor", values},
          {"long_factor", values}};
}

void Facts::add_rope() {
  add_if_absent("rope_theta", 10000.0);
  const std::string_view type = gguf_string(header_, key("rope.scaling.type"));
  const auto factor = real("rope.scaling.factor") ? real("rope.scaling.factor") : real("rope.scale_linear");
  const Tensor* const factors = find("rope_freqs.weight");
  if (factors != nullptr && factors->gguf_type == kTypeF32) {
    config_["rope_scaling"] = rope_factors(*factors);
  } else if (type == "yarn") {
    config_["rope_scaling"] = yarn();
  } else if ((type == "linear" || type.empty()) && factor.value_or(1) != 1) {
    config_["rope_scaling"] = {{"rope_type", "linear"}, {"type", "linear"}, {"factor", *factor}};
  } else if (!type.empty() && type != "none" && type != "linear") {
    config_["rope_scaling"] = {{"rope_type", type}, {"type", type}};  // for the reader to refuse
  } else if (is("gpt_oss")) {
    config_["rope_scaling"] = {{"rope_type", "default"}};  // where silence means something else
  }
}

void Facts::add_feed_forward() {
  const Tensor* const experts = in_any_layer("ffn_gate_exps.weight");
  if (experts != nullptr && experts->shape.size() == 3)
    add_if_absent("moe_intermediate_size", static_cast<uint64_t>(experts->shape[1]));
  // Families in which every layer has experts say their size in the common word.
  if (is("mixtral") || is("gpt_oss") || is("minimax_m2")) {
    if (known("moe_intermediate_size") > 0) config_["intermediate_size"] = known("moe_intermediate_size");
    config_.erase("moe_intermediate_size");
  }
  const Tensor* const shared = in_any_layer("ffn_gate_shexp.weight");
  if (is("qwen2_moe") && shared != nullptr && !shared->shape.empty())
    add_if_absent("shared_expert_intermediate_size", static_cast<uint64_t>(shared->shape[0]));
  if (family_.model_type == "llama" || family_.model_type == "qwen3") return;
  add_dense_layers();
  add_router();
}

void Facts::add_dense_layers() {
  std::vector<uint64_t> dense;
  for (uint64_t i = 0; i < layers(); ++i)
    if (find(text("blk.{}.ffn_gate.weight", i))) dense.push_back(i);
  const bool leading = dense.empty() || dense.back() + 1 == dense.size();
  if (is("qwen2_moe") || is("qwen3_moe") || !leading) {
    config_["mlp_only_layers"] = dense;
  } else if (is("deepseek_v2") || is("deepseek_v3") || is("glm4_moe")) {
    config_["first_k_dense_replace"] = dense.size();
  }
}

// What runs of such files do where a key is absent.
void Facts::add_router() {
  const bool normalises = is("qwen3_moe");
  if (!is("mixtral") && !is("gpt_oss")) add_if_absent("norm_topk_prob", normalises);
  if (is("deepseek_v2") || is("deepseek_v3") || is("glm4_moe")) add_if_absent("routed_scaling_factor", 1.0);
  if (is("deepseek_v2")) config_["topk_method"] = known("n_group") > 1 ? "group_limited_greedy" : "greedy";
  if (is("deepseek_v3")) config_["topk_method"] = "noaux_tc";
}

void Facts::add_end_tokens() {
  const auto begin = gguf_unsigned(header_, "tokenizer.ggml.bos_token_id");
  if (begin) config_["bos_token_id"] = *begin;
  std::vector<uint64_t> ends;
  for (const char* name : {"eos", "eot", "eom"}) {
    const auto id = gguf_unsigned(header_, text("tokenizer.ggml.{}_token_id", name));
    if (id && std::ranges::find(ends, *id) == ends.end()) ends.push_back(*id);
  }
  if (!ends.empty()) config_["eos_token_id"] = ends;
}

}  // namespace

void add_gguf_model_facts(const GgufHeader& header, const TensorFinder& find, Json& config) {
  const GgufFamily* const family = gguf_family(config.value("model_type", ""));
  // A file of another architecture may call itself by a published type.
  if (family == nullptr || family->gguf != gguf_string(header, "general.architecture")) return;
  Facts(header, find, *family, config).add();
}

}  // namespace kt
