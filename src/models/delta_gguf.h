// What GGUF files of families of the gated delta rule have in common.
#pragma once
#include "weights/gguf/gguf_model.h"

namespace kt::inline models {

inline constexpr GgufName kDeltaGgufNames[] = {
    {"post_attention_norm", "post_attention_layernorm"},
    {"attn_qkv", "linear_attn.in_proj_qkv"},
    {"attn_gate", "linear_attn.in_proj_z"},
    {"ssm_in", "linear_attn.in_proj_qkvz"},
    {"ssm_ba", "linear_attn.in_proj_ba"},
    {"ssm_beta", "linear_attn.in_proj_b"},
    {"ssm_alpha", "linear_attn.in_proj_a"},
    {"ssm_conv1d", "linear_attn.conv1d"},
    {"ssm_a", "linear_attn.A_log", GgufName::Kind::kTensor},
    {"ssm_dt.bias", "linear_attn.dt_bias"},
    {"ssm_norm", "linear_attn.norm"},
    {"ssm_out", "linear_attn.out_proj"},
    {"ffn_gate_shexp", "mlp.shared_expert.gate_proj"},
    {"ffn_up_shexp", "mlp.shared_expert.up_proj"},
    {"ffn_down_shexp", "mlp.shared_expert.down_proj"},
};

// What only tensors tell.
void complete_delta(GgufFacts& facts);

}  // namespace kt::inline models
