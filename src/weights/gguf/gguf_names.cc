#include "weights/gguf/gguf_names.h"

#include <array>

#include "base/error.h"

namespace kt {
namespace {

constexpr auto kFamilies = std::to_array<GgufFamily>({
    {"deepseek2", "deepseek_v2", "DeepseekV2ForCausalLM"},
    {"deepseek2", "deepseek_v3", "DeepseekV3ForCausalLM"},
    {"glm4moe", "glm4_moe", "Glm4MoeForCausalLM"},
    {"gpt-oss", "gpt_oss", "GptOssForCausalLM"},
    {"llama", "llama", "LlamaForCausalLM", true},
    {"llama", "mixtral", "MixtralForCausalLM", true},
    {"minimax-m2", "minimax_m2", "MiniMaxM2ForCausalLM"},
    {"qwen2moe", "qwen2_moe", "Qwen2MoeForCausalLM"},
    {"qwen3", "qwen3", "Qwen3ForCausalLM"},
    {"qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM"},
});

struct NameRow {
  std::string_view gguf, published;
  std::string_view only = {};  // model_types between spaces; empty: all
};
// Of a whole model, then of a layer; modules, ".weight" or ".bias" follows, or whole tensors where the suffix
// differs. Rows of some families stand before those of all.
constexpr auto kModelRows = std::to_array<NameRow>({
    {"token_embd", "model.embed_tokens"},
    {"output_norm", "model.norm"},
    {"output", "lm_head"},
});
constexpr auto kLayerRows = std::to_array<NameRow>({
    {"attn_norm", "input_layernorm"},
    {"post_attention_norm", "post_attention_layernorm", " glm4_moe gpt_oss "},
    {"ffn_norm", "post_attention_layernorm"},
    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"},
    {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"},
    {"attn_sinks.weight", "self_attn.sinks"},
    {"attn_q_a", "self_attn.q_a_proj"},
    {"attn_q_a_norm", "self_attn.q_a_layernorm"},
    {"attn_q_b", "self_attn.q_b_proj"},
    {"attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"},
    {"attn_kv_a_norm", "self_attn.kv_a_layernorm"},
    {"attn_kv_b", "self_attn.kv_b_proj"},
    {"ffn_gate_inp", "mlp.router", " gpt_oss "},
    {"ffn_gate_inp", "block_sparse_moe.gate", " mixtral minimax_m2 "},
    {"ffn_gate_inp", "mlp.gate"},
    {"exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias", " minimax_m2 "},
    {"exp_probs_b.bias", "mlp.gate.e_score_correction_bias"},
    {"ffn_gate", "mlp.gate_proj"},
    {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
    {"ffn_gate_shexp", "mlp.shared_expert.gate_proj", " qwen2_moe "},
    {"ffn_up_shexp", "mlp.shared_expert.up_proj", " qwen2_moe "},
    {"ffn_down_shexp", "mlp.shared_expert.down_proj", " qwen2_moe "},
    {"ffn_gate_shexp", "mlp.shared_experts.gate_proj"},
    {"ffn_up_shexp", "mlp.shared_experts.up_proj"},
    {"ffn_down_shexp", "mlp.shared_experts.down_proj"},
    {"ffn_gate_inp_shexp", "mlp.shared_expert_gate"},
});

constexpr std::string_view kGgufLayers = "blk.", kPublishedLayers = "model.layers.";

// `name` with what `from` says replaced by what `to` says.
template <size_t kCount>
std::optional<std::string> translate(const std::array<NameRow, kCount>& rows, std::string_view model_type,
                                     std::string_view name, std::string_view NameRow::* from,
                                     std::string_view NameRow::* to) {
  const std::string type = text(" {} ", model_type);
  const size_t dot = name.rfind('.');
  const std::string_view module = name.substr(0, dot);
  const std::string_view suffix = dot == std::string_view::npos ? std::string_view() : name.substr(dot);
  const bool usual = suffix == ".weight" || suffix == ".bias";
  for (const NameRow& row : rows) {
    if (!row.only.empty() && row.only.find(type) == std::string_view::npos) continue;
    const bool whole = row.gguf.find('.') != std::string_view::npos;  // a tensor, suffix and all
    if (whole && row.*from == name) return std::string(row.*to);
    if (!whole && usual && row.*from == module) return std::string(row.*to) + std::string(suffix);
  }
  return std::nullopt;
}

struct Sides {
  std::string_view NameRow::*from, NameRow::*to;
  std::string_view from_layers, to_layers;
};

std::optional<std::string> translate(std::string_view model_type, std::string_view name, const Sides& sides) {
  if (!name.starts_with(sides.from_layers))
    return translate(kModelRows, model_type, name, sides.from, sides.to);
  const std::string_view rest = name.substr(sides.from_layers.size());
  const size_t dot = rest.find('.');
  if (dot == 0 || dot == std::string_view::npos ||
      rest.substr(0, dot).find_first_not_of("0123456789") != std::string_view::npos)
    return std::nullopt;
  const auto tail = translate(kLayerRows, model_type, rest.substr(dot + 1), sides.from, sides.to);
  if (!tail) return std::nullopt;
  return text("{}{}.{}", sides.to_layers, rest.substr(0, dot), *tail);
}

}  // namespace

const GgufFamily* gguf_family(std::string_view model_type) {
  for (const GgufFamily& family : kFamilies)
    if (family.model_type == model_type) return &family;
  return nullptr;
}

std::string known_gguf_architectures() {
  std::string out;
  std::string_view last;
  for (const GgufFamily& family : kFamilies) {
    if (family.gguf == last) continue;
    out += text(out.empty() ? "{}" : ", {}", family.gguf);
    last = family.gguf;
  }
  return out;
}

std::optional<std::string> gguf_name(std::string_view model_type, std::string_view published) {
  return translate(model_type, published,
                   {&NameRow::published, &NameRow::gguf, kPublishedLayers, kGgufLayers});
}

std::optional<std::string> published_name(std::string_view model_type, std::string_view gguf) {
  return translate(model_type, gguf, {&NameRow::gguf, &NameRow::published, kGgufLayers, kPublishedLayers});
}

std::string published_expert(std::string_view model_type, int layer, int expert, Projection projection) {
  if (model_type != "mixtral" && model_type != "minimax_m2")
    return text("model.layers.{}.mlp.experts.{}.{}_proj", layer, expert, name_of(projection));
  const int number = projection == Projection::kGate ? 1 : projection == Projection::kUp ? 3 : 2;
  return text("model.layers.{}.block_sparse_moe.experts.{}.w{}", layer, expert, number);
}

std::string stored_name(const Checkpoint& checkpoint, std::string_view published) {
  if (!checkpoint.is_gguf()) return std::string(published);
  return gguf_name(checkpoint.config().model_type, published).value_or(std::string(published));
}

}  // namespace kt
