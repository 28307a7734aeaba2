// What models/<x>.cc say of their GGUF files, through the functions that ask them.
#include "weights/gguf/gguf_names.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "models/families.h"

namespace kt::inline models {
namespace {

const GgufFamily* family(std::string_view model_type) {
  for (const GgufFamily* each : gguf_families())
    if (each->model_type == model_type) return each;
  ADD_FAILURE() << model_type;
  return nullptr;
}

struct Pair {
  std::string_view type, gguf, published;
};
constexpr Pair kPairs[] = {
    {"qwen3_moe", "token_embd.weight", "model.embed_tokens.weight"},
    {"qwen3_moe", "output.weight", "lm_head.weight"},
    {"qwen3_moe", "output_norm.weight", "model.norm.weight"},
    {"qwen3_moe", "blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"},
    {"qwen3_moe", "blk.93.attn_k_norm.weight", "model.layers.93.self_attn.k_norm.weight"},
    {"qwen3_moe", "blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight"},
    {"qwen3_moe", "blk.7.ffn_gate_inp.weight", "model.layers.7.mlp.gate.weight"},
    {"glm4_moe", "blk.7.post_attention_norm.weight", "model.layers.7.post_attention_layernorm.weight"},
    {"glm4_moe", "blk.7.attn_q.bias", "model.layers.7.self_attn.q_proj.bias"},
    {"gpt_oss", "blk.7.ffn_gate_inp.bias", "model.layers.7.mlp.router.bias"},
    {"gpt_oss", "blk.7.attn_sinks.weight", "model.layers.7.self_attn.sinks"},
    {"mixtral", "blk.7.ffn_gate_inp.weight", "model.layers.7.block_sparse_moe.gate.weight"},
    {"minimax_m2", "blk.7.exp_probs_b.bias", "model.layers.7.block_sparse_moe.e_score_correction_bias"},
    {"deepseek_v3", "blk.7.exp_probs_b.bias", "model.layers.7.mlp.gate.e_score_correction_bias"},
    {"deepseek_v3", "blk.7.ffn_down_shexp.weight", "model.layers.7.mlp.shared_experts.down_proj.weight"},
    {"deepseek_v3", "blk.7.attn_kv_a_mqa.weight", "model.layers.7.self_attn.kv_a_proj_with_mqa.weight"},
    {"qwen2_moe", "blk.7.ffn_down_shexp.weight", "model.layers.7.mlp.shared_expert.down_proj.weight"},
    {"qwen2_moe", "blk.7.ffn_gate_inp_shexp.weight", "model.layers.7.mlp.shared_expert_gate.weight"},
    {"llama", "blk.7.ffn_gate.weight", "model.layers.7.mlp.gate_proj.weight"},
    {"dots1", "blk.7.exp_probs_b.bias", "model.layers.7.mlp.gate.e_score_correction_bias"},
    {"ernie4_5_moe", "blk.7.exp_probs_b.bias", "model.layers.7.mlp.moe_statics.e_score_correction_bias"},
    {"ernie4_5_moe", "blk.7.ffn_up_shexp.weight", "model.layers.7.mlp.shared_experts.up_proj.weight"},
    {"hy_v3", "blk.7.ffn_gate_inp.weight", "model.layers.7.mlp.router.gate.weight"},
    {"hy_v3", "blk.7.exp_probs_b", "model.layers.7.mlp.expert_bias"},
    {"hy_v3", "blk.7.ffn_down_shexp.weight", "model.layers.7.mlp.shared_mlp.down_proj.weight"},
    {"mistral4", "blk.7.attn_q_a_norm.weight", "model.layers.7.self_attn.q_a_layernorm.weight"},
};

TEST(GgufNames, OneTableBothWays) {
  for (const Pair& pair : kPairs) {
    EXPECT_EQ(gguf_name(family(pair.type), pair.published), pair.gguf) << pair.type;
    EXPECT_EQ(published_name(family(pair.type), pair.gguf), pair.published) << pair.type;
  }
}

TEST(GgufNames, OtherNamesHaveNone) {
  for (const char* name :
       {"", ".", "blk.", "blk.3", "blk.3.", "blk.x.attn_q.weight", "blk..attn_q.weight", "blk.3.attn_q",
        "blk.3.attn_q.scale", "blk.3.nextn.eh_proj.weight", "rope_freqs.weight", "blk.3.ffn_gate_exps.weight",
        "model.layers.3.self_attn.q_proj.weight"})
    EXPECT_EQ(published_name(family("qwen3_moe"), name), std::nullopt) << name;
  for (const char* name : {"model.layers.3.mlp.experts.0.gate_proj.weight", "model.layers.q.mlp.gate.weight",
                           "blk.3.attn_q.weight", "model.layers.3.mlp.router.weight"})
    EXPECT_EQ(gguf_name(family("qwen3_moe"), name), std::nullopt) << name;
}

TEST(GgufNames, Experts) {
  EXPECT_EQ(published_expert(family("qwen3_moe"), 3, 7, Projection::kGate),
            "model.layers.3.mlp.experts.7.gate_proj");
  EXPECT_EQ(published_expert(family("mixtral"), 3, 7, Projection::kGate),
            "model.layers.3.block_sparse_moe.experts.7.w1");
  EXPECT_EQ(published_expert(family("mixtral"), 3, 7, Projection::kDown),
            "model.layers.3.block_sparse_moe.experts.7.w2");
  EXPECT_EQ(published_expert(family("minimax_m2"), 3, 7, Projection::kUp),
            "model.layers.3.block_sparse_moe.experts.7.w3");
}

TEST(GgufNames, UsualOnesWithoutAFamily) {
  EXPECT_EQ(published_expert(nullptr, 3, 7, Projection::kUp), "model.layers.3.mlp.experts.7.up_proj");
  EXPECT_EQ(gguf_name(nullptr, "model.layers.3.mlp.gate.weight"), "blk.3.ffn_gate_inp.weight");
}

TEST(GgufFamilies, OneForEachFile) {
  EXPECT_EQ(
      gguf_architectures(gguf_families()),
      "deepseek2, deepseek32, dots1, ernie4_5-moe, gemma4, glm4moe, glm-dsa, gpt-oss, hy_v3, llama, llama4, "
      "minimax-m2, "
      "mistral4, qwen2moe, qwen3, qwen3moe, qwen3next, qwen35, qwen35moe, smallthinker");
  EXPECT_EQ(published_name(family("hy_v3"), "blk.7.exp_probs_b.weight"), std::nullopt);
  EXPECT_EQ(gguf_architectures({}), "none");
  for (const GgufFamily* each : gguf_families()) {
    EXPECT_EQ(each->interleaved, each->gguf == "llama") << each->model_type;
    const Json config = {{"model_type", each->model_type}, {"architectures", {each->architecture}}};
    std::string error;
    try {
      describe_model(config, "c");
    } catch (const Error& refused) {
      error = refused.what();
    }
    EXPECT_EQ(error.find("not known"), std::string::npos) << error;  // a family that runs
  }
}

}  // namespace
}  // namespace kt::inline models
