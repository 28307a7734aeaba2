// Configs of Gemma 4: as published, small; the other ways they turn; and those that say too little or the wrong thing.
#include <gtest/gtest.h>

#include <cmath>

#include "models/module_tree.h"
#include "models/testing/described_config.h"
#include "models/testing/family_configs.h"

namespace kt::inline models {
namespace {

using namespace testing_configs;

Json gemma4(const char* changes) {
  Json out = kGemma4;
  out["text_config"].merge_patch(Json::parse(changes));
  return out;
}

const GqaSpec& attention_of(const ModelSpec& spec, size_t layer) {
  return std::get<GqaSpec>(spec.layers[layer].mixer);
}

TEST(Gemma4, LayersOfTwoKinds) {
  const ModelSpec spec = described(kGemma4);
  EXPECT_EQ(spec.family, "gemma4_text");
  EXPECT_STREQ(spec.host_only(), "norms of values");
  EXPECT_TRUE(spec.tied_embeddings && !spec.norms_add_one);
  EXPECT_EQ(spec.embedding_scale, 8);
  EXPECT_EQ(spec.logit_cap, 30);
  EXPECT_EQ(spec.context, 262144);
  for (size_t i = 0; i < 6; ++i) {
    const GqaSpec& gqa = attention_of(spec, i);
    const bool full = i == 5;
    EXPECT_EQ(gqa.head_dim, full ? 48 : 24);
    EXPECT_EQ(gqa.kv_heads, full ? 1 : 2);
    EXPECT_EQ(gqa.window, full ? 0 : 24);
    EXPECT_EQ(gqa.keys_as_values, full);
    EXPECT_TRUE(gqa.v_norm && gqa.norm == GqaSpec::Norm::kHead && !gqa.qkv_bias && gqa.scale == 1);
    EXPECT_EQ(gqa.rope.theta, full ? 1e6 : 1e4);
    EXPECT_EQ(gqa.rope.dims, gqa.head_dim);
    EXPECT_EQ(gqa.rope.still, full ? 18 : 0);
    const LayerSpec& layer = spec.layers[i];
    EXPECT_EQ(layer.residual, Residual::kBothNorms);
    EXPECT_EQ(layer.post_norm, "pre_feedforward_layernorm");
    const MoeSpec& moe = *layer.moe();
    EXPECT_TRUE(moe.apart && moe.router.normalise && !moe.router.score_of_chosen && !moe.shared_gate);
    EXPECT_EQ(moe.activation.kind, ActivationKind::kGeluTanh);
    EXPECT_EQ(moe.experts, 8);
    EXPECT_EQ(moe.top_k, 3);
    EXPECT_EQ(moe.inter, 32);
    EXPECT_EQ(moe.shared_inter, 80);
  }
}

TEST(Gemma4, WhereAConfigIsSilent) {
  const ModelSpec spec =
      described(gemma4(R"({"layer_types": null, "rope_parameters": null, "num_hidden_layers": 8,
      "tie_word_embeddings": null, "final_logit_softcapping": null, "hidden_activation": null})"));
  for (size_t i = 0; i < 8; ++i) {
    const bool full = i == 5 || i == 7;
    EXPECT_EQ(attention_of(spec, i).window == 0, full) << i;
    EXPECT_EQ(attention_of(spec, i).rope, attention_of(described(kGemma4), full ? 5 : 0).rope) << i;
  }
  EXPECT_TRUE(spec.tied_embeddings);
  EXPECT_EQ(spec.logit_cap, 0);
  EXPECT_EQ(spec.layers[0].moe()->activation.kind, ActivationKind::kGeluTanh);
}

// Newer programs list what each layer has of its own.
TEST(Gemma4, SizesOfEachLayer) {
  const ModelSpec spec = described(gemma4(R"({"global_head_dim": null, "num_global_key_value_heads": null,
      "per_layer_config": {"5": {"head_dim": 48, "num_key_value_heads": 1}, "2": {"head_dim": 40}}})"));
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(attention_of(spec, i).head_dim, i == 5 ? 48 : i == 2 ? 40 : 24);
    EXPECT_EQ(attention_of(spec, i).kv_heads, i == 5 ? 1 : 2);
  }
}

TEST(Gemma4, KeysThatAreNoValues) {
  const ModelSpec spec = described(gemma4(R"({"attention_k_eq_v": false})"));
  EXPECT_FALSE(attention_of(spec, 5).keys_as_values);
  EXPECT_EQ(attention_of(spec, 5).kv_heads, 2);
  EXPECT_EQ(attention_of(spec, 5).head_dim, 48);
}

TEST(Gemma4, WithoutExperts) {
  const ModelSpec spec = described(gemma4(R"({"enable_moe_block": false, "num_experts": null})"));
  EXPECT_EQ(spec.moe(), nullptr);
  const auto& dense = std::get<DenseSpec>(spec.layers[0].feed_forward);
  EXPECT_EQ(dense.inter, 80);
  EXPECT_EQ(dense.activation.kind, ActivationKind::kGeluTanh);
}

TEST(Gemma4, ModulesOfALayer) {
  const ModuleTree tree = module_tree(described(kGemma4));
  const auto kind_of = [&](const std::string& name) {
    for (const ModelModule& module : tree.modules)
      if (module.name == "model.layers.5." + name) return static_cast<int>(module.kind);
    return -1;
  };
  EXPECT_EQ(kind_of("experts"), static_cast<int>(ModuleKind::kExperts));
  EXPECT_EQ(kind_of("experts.7"), static_cast<int>(ModuleKind::kExpert));
  EXPECT_EQ(kind_of("router.proj"), static_cast<int>(ModuleKind::kRouter));
  EXPECT_EQ(kind_of("mlp.up_proj"), static_cast<int>(ModuleKind::kLinear));
  EXPECT_EQ(kind_of("self_attn.k_proj"), static_cast<int>(ModuleKind::kLinear));
  EXPECT_EQ(kind_of("self_attn.v_proj"), -1);
  EXPECT_EQ(kind_of("router"), -1);
  for (const char* norm : {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                           "pre_feedforward_layernorm_2", "post_feedforward_layernorm",
                           "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"})
    EXPECT_EQ(kind_of(norm), static_cast<int>(ModuleKind::kNorm)) << norm;
}

TEST(Gemma4, WhatIsMissingOrWrongIsNamed) {
  const std::pair<const char*, const char*> kCases[] = {
      {R"({"layer_types": ["full_attention"]})",
       "config.json: text_config.layer_types is a list of 1, expected one string for each of 6 layers"},
      {R"({"num_hidden_layers": 1, "layer_types": ["chunked_attention"]})",
       "unsupported: config.json: text_config.layer_types[0] is chunked_attention; supported: "
       "full_attention, "
       "sliding_attention"},
      {R"({"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]})",
       "config.json: text_config.layer_types[1] is sliding_attention, expected full_attention in the last "
       "layer"},
      {R"({"hidden_activation": "tanh"})",
       "unsupported: config.json: text_config.hidden_activation is \"tanh\"; supported: silu, gelu, "
       "gelu_pytorch_tanh, relu"},
      {R"({"hidden_size_per_layer_input": 256})",
       "unsupported: config.json: text_config.hidden_size_per_layer_input is 256; supported: 0"},
      {R"({"hidden_size_per_layer_input": null})",
       "config.json: text_config.hidden_size_per_layer_input is missing"},
      {R"({"num_kv_shared_layers": 2})",
       "unsupported: config.json: text_config.num_kv_shared_layers is 2; supported: 0"},
      {R"({"use_bidirectional_attention": "all"})",
       "unsupported: config.json: text_config.use_bidirectional_attention is \"all\"; supported: vision, "
       "null"},
      {R"({"final_logit_softcapping": -30})",
       "config.json: text_config.final_logit_softcapping is -30, expected a number of at least 0"},
      {R"({"sliding_window": 0})",
       "config.json: text_config.sliding_window is 0, expected a whole number from 1 to 16777216"},
      {R"({"global_head_dim": 47})",
       "config.json: text_config.global_head_dim is 47, expected an even number"},
      {R"({"num_global_key_value_heads": 3})",
       "config.json: text_config.num_global_key_value_heads is 3, expected a divisor of num_attention_heads, "
       "4"},
      {R"({"top_k_experts": 9})", "config.json: text_config.top_k_experts: 9 of 8 experts cannot be chosen"},
      {R"({"moe_intermediate_size": null})", "config.json: text_config.moe_intermediate_size is missing"},
      {R"({"rope_parameters": {"full_attention": null}})",
       "config.json: text_config.rope_parameters.full_attention is missing"},
      {R"({"rope_parameters": {"full_attention": {"partial_rotary_factor": 1.5}}})",
       "config.json: text_config.rope_parameters.full_attention.partial_rotary_factor is 1.5, expected a "
       "number "
       "from 0 to 1"},
      {R"({"rope_parameters": {"sliding_attention": {"rope_type": "axial"}}})",
       "unsupported: config.json: text_config.rope_parameters.sliding_attention.rope_type is \"axial\"; "
       "supported: default, linear, dynamic, yarn, llama3, longrope, proportional"},
  };
  for (const auto& [changes, expected] : kCases) EXPECT_EQ(refused(gemma4(changes)), expected);
}

}  // namespace
}  // namespace kt::inline models
