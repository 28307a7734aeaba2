#include "weights/gguf/gguf_names.h"

#include <array>

#include "base/error.h"

namespace kt::inline weights {
namespace {

// Of a whole model, then of a layer.
constexpr auto kModelNames = std::to_array<GgufName>({
    {"token_embd", "model.embed_tokens"},
    {"output_norm", "model.norm"},
    {"output", "lm_head"},
});
constexpr auto kLayerNames = std::to_array<GgufName>({
    {"attn_norm", "input_layernorm"},
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
    {"ffn_gate_inp", "mlp.gate"},
    {"exp_probs_b.bias", "mlp.gate.e_score_correction_bias"},
    {"ffn_gate", "mlp.gate_proj"},
    {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
    {"ffn_gate_shexp", "mlp.shared_experts.gate_proj"},
    {"ffn_up_shexp", "mlp.shared_experts.up_proj"},
    {"ffn_down_shexp", "mlp.shared_experts.down_proj"},
    {"ffn_gate_inp_shexp", "mlp.shared_expert_gate"},
});

constexpr std::string_view kGgufLayers = "blk.", kPublishedLayers = "model.layers.";

struct Sides {
  std::string_view GgufName::*from, GgufName::*to;
  std::string_view from_layers, to_layers;
};
constexpr Sides kToGguf{&GgufName::published, &GgufName::gguf, kPublishedLayers, kGgufLayers},
    kToPublished{&GgufName::gguf, &GgufName::published, kGgufLayers, kPublishedLayers};

// `name` with what one side says replaced by what the other does.
std::optional<std::string> translate(std::span<const GgufName> names, std::string_view name,
                                     const Sides& sides) {
  const size_t dot = name.rfind('.');
  const std::string_view module = name.substr(0, dot);
  const std::string_view suffix = dot == std::string_view::npos ? std::string_view() : name.substr(dot);
  const bool usual = suffix == ".weight" || suffix == ".bias";
  for (const GgufName& row : names) {
    const bool whole =  // a tensor, suffix and all
        row.kind == GgufName::Kind::kTensor || row.gguf.find('.') != std::string_view::npos;
    if (whole && row.*sides.from == name) return std::string(row.*sides.to);
    if (!whole && usual && row.*sides.from == module) return std::string(row.*sides.to) + std::string(suffix);
  }
  return std::nullopt;
}

std::optional<std::string> translate(const GgufFamily* family, std::string_view name, const Sides& sides) {
  if (!name.starts_with(sides.from_layers)) return translate(kModelNames, name, sides);
  const std::string_view rest = name.substr(sides.from_layers.size());
  const size_t dot = rest.find('.');
  if (dot == 0 || dot == std::string_view::npos ||
      rest.substr(0, dot).find_first_not_of("0123456789") != std::string_view::npos)
    return std::nullopt;
  std::optional<std::string> tail;
  if (family) tail = translate(family->names, rest.substr(dot + 1), sides);
  if (!tail) tail = translate(kLayerNames, rest.substr(dot + 1), sides);
  if (!tail) return std::nullopt;
  return text("{}{}.{}", sides.to_layers, rest.substr(0, dot), *tail);
}

}  // namespace

std::optional<std::string> gguf_name(const GgufFamily* family, std::string_view published) {
  return translate(family, published, kToGguf);
}

std::optional<std::string> published_name(const GgufFamily* family, std::string_view gguf) {
  return translate(family, gguf, kToPublished);
}

std::string published_expert(const GgufFamily* family, int layer, int expert, Projection projection) {
  static constexpr GgufFamily kUsual;
  const GgufFamily& names = family ? *family : kUsual;
  return text("model.layers.{}.{}.{}.{}", layer, names.experts, expert,
              names.projections[static_cast<size_t>(projection)]);
}

}  // namespace kt::inline weights
