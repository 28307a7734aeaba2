// For tests: a small config of every family, as published or as transformers writes them.
#pragma once
#include <string>

#include "text/json.h"

namespace kt::testing_configs {

inline Json with(Json base, const char* changes) {
  base.merge_patch(Json::parse(changes));  // null removes the key
  return base;
}

inline const Json kAttention = Json::parse(R"({
  "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
  "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 1024, "rms_norm_eps": 0.001})");
inline const Json kExperts = with(kAttention, R"({"moe_intermediate_size": 32, "num_experts_per_tok": 3})");
inline const Json kLatent = with(kExperts, R"({
  "num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
  "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1})");

inline const Json kQwen3Moe =
    with(kExperts, R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
      "head_dim": 32, "norm_topk_prob": true, "rope_theta": 1000000.0, "rope_scaling": null})");
inline const Json kQwen2Moe =
    with(kExperts, R"({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
      "num_experts": 8, "shared_expert_intermediate_size": 80})");
inline const Json kMixtral =
    with(kAttention, R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
      "num_local_experts": 8, "num_experts_per_tok": 2})");
inline const Json kDeepseekV2 = with(kLatent, R"({"architectures": ["DeepseekV2ForCausalLM"],
      "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
      "routed_scaling_factor": 16, "scoring_func": "softmax", "rope_theta": 10000,
      "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                       "mscale_all_dim": 0.707, "original_max_position_embeddings": 64}})");
inline const Json kDeepseekV3 = with(kLatent, R"({"architectures": ["DeepseekV3ForCausalLM"],
      "model_type": "deepseek_v3", "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 4,
      "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": true, "rope_interleave": true,
      "rope_parameters": {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 40, "mscale": 1.0,
                          "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}})");
inline const Json kGlm4Moe =
    with(kExperts, R"({"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
      "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 2, "head_dim": 32, "n_group": 1,
      "topk_group": 1, "attention_bias": true, "use_qk_norm": true, "routed_scaling_factor": 2.5,
      "rope_theta": 1000000, "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1})");
inline const Json kMiniMaxM2 = with(kAttention, R"({"architectures": ["MiniMaxM2ForCausalLM"],
      "model_type": "minimax_m2", "num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32,
      "rotary_dim": 16, "rope_theta": 5000000, "scoring_func": "sigmoid", "use_qk_norm": true})");
inline const Json kGptOss =
    with(kAttention, R"({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
      "num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "sliding_window": 24,
      "swiglu_limit": 7.0, "rope_theta": 150000,
      "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
      "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                       "truncate": false, "original_max_position_embeddings": 4096}})");
inline const Json kQwen3 =
    with(kAttention, R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})");
inline const Json kLlama = with(kAttention, R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
      "tie_word_embeddings": true, "rope_theta": 500000,
      "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 256}})");

inline const Json kGlm4MoeLite = with(kLatent, R"({"architectures": ["Glm4MoeLiteForCausalLM"],
      "model_type": "glm4_moe_lite", "first_k_dense_replace": null, "n_group": 1, "topk_group": 1,
      "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "norm_topk_prob": true,
      "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}})");
inline const Json kDots1 = with(kExperts, R"({"architectures": ["Dots1ForCausalLM"], "model_type": "dots1",
      "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
      "norm_topk_prob": true, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
      "rope_theta": 10000000})");
inline const Json kHyV3 = with(kExperts, R"({"architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3",
      "num_experts": 8, "num_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 32,
      "router_scaling_factor": 2.5, "moe_router_use_sigmoid": true, "moe_router_enable_expert_bias": true,
      "route_norm": true, "qk_norm": true, "num_nextn_predict_layers": 1,
      "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0}})");
inline const Json kSolarOpen =
    with(kExperts, R"({"architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open",
      "n_routed_experts": 8, "n_shared_experts": 1, "head_dim": 32, "n_group": 1, "topk_group": 1,
      "intermediate_size": null, "first_k_dense_replace": 0, "use_qk_norm": false, "norm_topk_prob": true,
      "partial_rotary_factor": 1.0, "rope_theta": 1000000})");
inline const Json kErnie45Moe = with(kAttention, R"({"architectures": ["Ernie4_5_MoeForCausalLM"],
      "model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32,
      "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1,
      "moe_use_aux_free": true, "moe_gate": "topk", "use_bias": false, "tie_word_embeddings": false,
      "rope_theta": 500000.0})");
inline const Json kMistral4 =
    with(kLatent, R"({"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4",
      "first_k_dense_replace": 0, "norm_topk_prob": true, "n_group": 1, "topk_group": 1, "rope_interleave": true,
      "rope_parameters": {"type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "mscale": 1.0,
          "mscale_all_dim": 1.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1,
          "partial_rotary_factor": 0.25}})");

inline const Json kGlmMoeDsa = with(kLatent, R"({"architectures": ["GlmMoeDsaForCausalLM"],
      "model_type": "glm_moe_dsa", "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
      "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
      "index_topk": 16, "index_n_heads": 24, "index_head_dim": 40, "indexer_rope_interleave": true,
      "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "num_nextn_predict_layers": 1})");
inline const Json kDeepseekV32 = with(kDeepseekV3, R"({"architectures": ["DeepseekV32ForCausalLM"],
      "model_type": "deepseek_v32", "index_topk": 16, "index_n_heads": 24, "index_head_dim": 40})");

inline const Json* const kAll[] = {&kQwen3Moe,    &kQwen2Moe,  &kMixtral,    &kDeepseekV2, &kDeepseekV3,
                                   &kGlm4Moe,     &kMiniMaxM2, &kGptOss,     &kQwen3,      &kLlama,
                                   &kGlm4MoeLite, &kDots1,     &kHyV3,       &kSolarOpen,  &kErnie45Moe,
                                   &kMistral4,    &kGlmMoeDsa, &kDeepseekV32};

inline const Json kDelta = Json::parse(R"({
  "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
  "max_position_embeddings": 1024, "rms_norm_eps": 0.001, "hidden_act": "silu", "head_dim": 32,
  "linear_conv_kernel_dim": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 40, "linear_num_key_heads": 3,
  "linear_num_value_heads": 6, "full_attention_interval": 4})");
inline const Json kDeltaExperts =
    with(kDelta, R"({"moe_intermediate_size": 32, "shared_expert_intermediate_size": 80,
      "num_experts": 8, "num_experts_per_tok": 3})");
inline const Json kQwen3Next =
    with(kDeltaExperts, R"({"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
      "intermediate_size": 96, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": true,
      "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_scaling": null, "attention_bias": false})");
inline const Json kRopeOfQwen35 =
    Json::parse(R"({"rope_parameters": {"mrope_interleaved": true, "mrope_section": [2, 1, 1],
      "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}, "attn_output_gate": true,
      "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1})");

// A text model inside one that sees.
inline Json inside(const Json& text, const char* outer) {
  Json out = Json::parse(outer);
  out["text_config"] = text;
  out["text_config"].update(kRopeOfQwen35);
  return out;
}
inline const Json kQwen35Moe =
    inside(with(kDeltaExperts, R"({"model_type": "qwen3_5_moe_text"})"),
           R"({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
                             "vision_config": {"hidden_size": 7}})");
inline const Json kQwen35 =
    inside(with(kDelta, R"({"model_type": "qwen3_5_text", "intermediate_size": 96})"),
           R"({"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
                               "vision_config": {"hidden_size": 7}})");

inline const Json kLlama4 =
    Json::parse(R"({"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
  "boi_token_index": 200080, "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 7},
  "text_config": {"model_type": "llama4_text", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 8,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 10485760,
      "rms_norm_eps": 0.001, "hidden_act": "silu", "intermediate_size": 40, "intermediate_size_mlp": 80,
      "num_local_experts": 8, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_bias": false,
      "attention_chunk_size": 32, "attn_temperature_tuning": 4, "floor_scale": 8192, "attn_scale": 0.1,
      "no_rope_layers": [], "use_qk_norm": true, "for_llm_compressor": false, "router_jitter_noise": 0.0,
      "rope_theta": 500000.0, "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
          "original_max_position_embeddings": 8192, "rope_type": "llama3"}}})");
inline const Json kSmallThinker = Json::parse(R"({"architectures": ["SmallThinkerForCausalLM"],
  "model_type": "smallthinker", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 5,
  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 1024,
  "rms_norm_eps": 0.001, "rope_theta": 1500000, "rope_scaling": null, "rope_layout": [0, 1, 1, 1, 0],
  "sliding_window_layout": [0, 1, 1, 1, 0], "sliding_window_size": 24, "moe_layer_layout": [1, 1, 1, 1, 1],
  "moe_num_primary_experts": 8, "moe_num_active_primary_experts": 3, "moe_ffn_hidden_size": 40,
  "moe_primary_router_apply_softmax": false, "moe_enable_early_router": true,
  "moe_enable_secondary_experts": false, "moe_num_secondary_experts": 0, "tie_word_embeddings": false})");

inline const Json kGemma4 =
    Json::parse(R"({"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
  "image_token_id": 258880, "vision_config": {"model_type": "gemma4_vision", "hidden_size": 7},
  "text_config": {"model_type": "gemma4_text", "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 6,
      "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 24,
      "global_head_dim": 48, "attention_k_eq_v": true, "attention_bias": false, "max_position_embeddings": 262144,
      "rms_norm_eps": 0.001, "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 80,
      "moe_intermediate_size": 32, "num_experts": 8, "top_k_experts": 3, "enable_moe_block": true,
      "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": false,
      "use_bidirectional_attention": "vision", "sliding_window": 24, "final_logit_softcapping": 30.0,
      "tie_word_embeddings": true, "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
          "sliding_attention", "sliding_attention", "full_attention"],
      "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
              "rope_type": "proportional"}, "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}}})");

inline const Json* const kHostOnly[] = {&kLlama4, &kSmallThinker, &kGemma4};

inline const Json* const kRecurrent[] = {&kQwen3Next, &kQwen35Moe, &kQwen35};

}  // namespace kt::testing_configs
