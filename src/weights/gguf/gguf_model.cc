#include "weights/gguf/gguf_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "weights/gguf/gguf_config.h"

namespace kt::inline weights {
namespace {

constexpr uint32_t kTypeF32 = 0, kTypeF16 = 1;
constexpr uint64_t kMostLayers = 10000;  // looked at; who reads the config refuses more

}  // namespace

void GgufFacts::add() {
  config_["architectures"] = {family_.architecture};
  add_embeddings();
  if (find("blk.0.attn_kv_a_mqa.weight")) {
    add_latent_attention();
  } else {
    add_attention();
  }
  add_rope();
  const Tensor* const experts = in_any_layer("ffn_gate_exps.weight");
  if (experts != nullptr && experts->shape.size() == 3)
    add_if_absent("moe_intermediate_size", static_cast<uint64_t>(experts->shape[1]));
  add_end_tokens();
  if (family_.complete) family_.complete(*this);
}

std::string GgufFacts::key(std::string_view tail) const { return text("{}.{}", family_.gguf, tail); }

std::optional<uint64_t> GgufFacts::number(std::string_view tail) const {
  return gguf_unsigned(header_, key(tail));
}

std::optional<double> GgufFacts::real(std::string_view tail) const { return gguf_real(header_, key(tail)); }

std::vector<bool> GgufFacts::flags(std::string_view tail) const { return gguf_flags(header_, key(tail)); }

std::vector<uint64_t> GgufFacts::counts(std::string_view tail) const {
  return gguf_counts(header_, key(tail), known("num_hidden_layers"));
}

uint64_t GgufFacts::known(const char* json_key) const {
  const auto found = config_.find(json_key);
  if (found == config_.end() || !found->is_number_integer() || found->get<int64_t>() < 0) return 0;
  return found->get<uint64_t>();
}

uint64_t GgufFacts::layers() const { return std::min(known("num_hidden_layers"), kMostLayers); }

const Tensor* GgufFacts::in_any_layer(std::string_view tail) const {
  for (uint64_t i = 0; i < layers(); ++i)
    if (const Tensor* tensor = find(text("blk.{}.{}", i, tail))) return tensor;
  return nullptr;
}

void GgufFacts::add_embeddings() {
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

void GgufFacts::add_attention() {
  const uint64_t heads = known("num_attention_heads"), hidden = known("hidden_size");
  const uint64_t head = number("attention.key_length").value_or(heads > 0 ? hidden / heads : 0);
  if (head > 0) config_["head_dim"] = head;
  const uint64_t rotated = number("rope.dimension_count").value_or(head);
  if (head > 0) {
    double part = static_cast<double>(rotated) / static_cast<double>(head);
    // Readers multiply and cut off.
    if (part * static_cast<double>(head) < static_cast<double>(rotated)) part = std::nextafter(part, 2.0);
    config_["partial_rotary_factor"] = part;
  }
  const bool bias = find("blk.0.attn_q.bias") != nullptr;
  config_["attention_bias"] = bias;
  if (find("blk.0.ffn_gate.bias") != nullptr) config_["mlp_bias"] = true;
}

// Files of the absorbed form count one head of keys and give the dimensions of a real head apart.
void GgufFacts::add_latent_attention() {
  config_["num_key_value_heads"] = config_.value("num_attention_heads", Json());
  const auto length = [&](std::string_view kind) {
    const auto real_head = number(text("attention.{}_length_mla", kind));
    return real_head ? real_head : number(text("attention.{}_length", kind));
  };
  const auto rotated = number("rope.dimension_count"), keys = length("key"), values = length("value");
  if (rotated) config_["qk_rope_head_dim"] = *rotated;
  if (rotated && keys && *keys > *rotated) config_["qk_nope_head_dim"] = *keys - *rotated;
  if (values) config_["v_head_dim"] = *values;
  add_if_absent("q_lora_rank", nullptr);
  config_["attention_bias"] = find("blk.0.attn_kv_a_mqa.bias") != nullptr;
}

Json GgufFacts::yarn() const {
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
  return rope;
}

std::vector<float> GgufFacts::rope_factors(const Tensor& tensor) const {
  if (tensor.gguf_type != kTypeF32)
    fail("{}: {} is {}, expected F32", header_.name, tensor.name, gguf_type_text(tensor.gguf_type));
  std::vector<float> values(tensor.bytes.size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), tensor.bytes.data(), values.size() * sizeof(float));
  return values;
}

// What each frequency is divided by, in short texts and in long ones; null: for the reader to miss. Without an
// attention factor it computes one from both contexts.
Json GgufFacts::longrope(const Tensor* in_short_texts, const Tensor* in_long_texts) const {
  Json rope = {{"rope_type", "longrope"}, {"type", "longrope"}};
  if (in_short_texts) rope["short_factor"] = rope_factors(*in_short_texts);
  if (in_long_texts) rope["long_factor"] = rope_factors(*in_long_texts);
  if (const auto original = number("rope.scaling.original_context_length"))
    rope["original_max_position_embeddings"] = *original;
  if (const auto gain = real("rope.scaling.attn_factor")) rope["attention_factor"] = *gain;
  return rope;
}

void GgufFacts::add_rope() {
  add_if_absent("rope_theta", 10000.0);
  const std::string_view type = gguf_string(header_, key("rope.scaling.type"));
  const auto factor = real("rope.scaling.factor") ? real("rope.scaling.factor") : real("rope.scale_linear");
  const Tensor *const in_short = find("rope_factors_short.weight"), *const in_long =
                                                                        find("rope_factors_long.weight");
  if (const Tensor* const in_any = find("rope_freqs.weight")) {
    Json& rope = config_["rope_scaling"] = longrope(in_any, in_any);
    rope["factor"] = rope["attention_factor"] = 1.0;
    rope["original_max_position_embeddings"] = config_.value("max_position_embeddings", Json());
  } else if (in_short || in_long || type == "longrope") {
    config_["rope_scaling"] = longrope(in_short, in_long);
  } else if (type == "yarn") {
    config_["rope_scaling"] = yarn();
  } else if ((type == "linear" || type.empty()) && factor.value_or(1) != 1) {
    config_["rope_scaling"] = {{"rope_type", "linear"}, {"type", "linear"}, {"factor", *factor}};
  } else if (!type.empty() && type != "none" && type != "linear") {
    config_["rope_scaling"] = {{"rope_type", type}, {"type", type}};  // for the reader to refuse
  }
}

void GgufFacts::add_dense_layers(DenseLayers how) {
  std::vector<uint64_t> dense;
  for (uint64_t i = 0; i < layers(); ++i)
    if (find(text("blk.{}.ffn_gate.weight", i))) dense.push_back(i);
  const bool leading = dense.empty() || dense.back() + 1 == dense.size();
  if (how == DenseLayers::kListed || !leading) {
    config_["mlp_only_layers"] = dense;
  } else if (how == DenseLayers::kCounted) {
    config_["first_k_dense_replace"] = dense.size();
  }
}

void GgufFacts::rename_expert_size() {
  if (known("moe_intermediate_size") > 0) config_["intermediate_size"] = known("moe_intermediate_size");
  config_.erase("moe_intermediate_size");
}

void GgufFacts::add_end_tokens() {
  const uint64_t tokens = known("vocab_size") > 0 ? known("vocab_size") : INT32_MAX;
  const auto begin = gguf_token_id(header_, "tokenizer.ggml.bos_token_id", tokens);
  if (begin) config_["bos_token_id"] = *begin;
  std::vector<uint64_t> ends;
  for (const char* name : {"eos", "eot", "eom"}) {
    const auto id = gguf_token_id(header_, text("tokenizer.ggml.{}_token_id", name), tokens);
    if (id && std::ranges::find(ends, *id) == ends.end()) ends.push_back(*id);
  }
  if (!ends.empty()) config_["eos_token_id"] = ends;
}

}  // namespace kt::inline weights
