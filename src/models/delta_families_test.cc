// Configs of the families of the gated delta rule, as published, small; and configs that say too little or the wrong
// thing.
#include <gtest/gtest.h>

#include "models/testing/described_config.h"
#include "models/testing/family_configs.h"

namespace kt::inline models {
namespace {

using namespace testing_configs;

TEST(DeltaFamilies, EveryFourthLayerAttends) {
  for (const Json* config : {&kQwen3Next, &kQwen35Moe, &kQwen35}) {
    const ModelSpec spec = described(*config);
    ASSERT_EQ(spec.layers.size(), 8u);
    EXPECT_TRUE(spec.norms_add_one);
    EXPECT_STREQ(spec.host_only(), "layers that keep a state of each sequence");
    for (size_t i = 0; i < 8; ++i) {
      const auto* gqa = std::get_if<GqaSpec>(&spec.layers[i].mixer);
      const auto* delta = std::get_if<DeltaSpec>(&spec.layers[i].mixer);
      ASSERT_EQ(gqa != nullptr, i % 4 == 3);
      if (gqa) {
        EXPECT_TRUE(gqa->gated && gqa->norm == GqaSpec::Norm::kHead && !gqa->qkv_bias);
        EXPECT_EQ(gqa->head_dim, 32);
        EXPECT_EQ(gqa->rope.dims, 8);
        EXPECT_EQ(gqa->rope.theta, 1e7);
      } else {
        EXPECT_EQ(delta->shape,
                  (DeltaShape{.key_heads = 3, .value_heads = 6, .key_dim = 24, .value_dim = 40}));
        EXPECT_EQ(delta->taps, 4);
        EXPECT_EQ(delta->mixed(), config == &kQwen3Next);
      }
    }
  }
}

TEST(DeltaFamilies, FeedForwardParts) {
  const ModelSpec next = described(kQwen3Next), moe = described(kQwen35Moe), dense = described(kQwen35);
  EXPECT_EQ(next.family, "qwen3_next");
  EXPECT_EQ(moe.family, "qwen3_5_moe_text");
  EXPECT_EQ(dense.family, "qwen3_5_text");
  for (const ModelSpec* spec : {&next, &moe}) {
    EXPECT_TRUE(spec->moe()->router.normalise && spec->moe()->shared_gate);
    EXPECT_EQ(spec->moe()->shared_inter, 80);
    EXPECT_EQ(spec->moe()->names.shared, "mlp.shared_expert");
  }
  EXPECT_EQ(std::get<DenseSpec>(dense.layers[0].feed_forward).inter, 96);
  EXPECT_FALSE(described(with(kQwen3Next, R"({"norm_topk_prob": false})")).moe()->router.normalise);
  EXPECT_FALSE(described(with(kQwen3Next, R"({"mlp_only_layers": [2]})")).layers[2].moe());
}

TEST(DeltaFamilies, ListedLayers) {
  const Json listed = with(kQwen3Next, R"({"num_hidden_layers": 3, "full_attention_interval": null,
      "layer_types": ["full_attention", "linear_attention", "full_attention"]})");
  const ModelSpec spec = described(listed);
  EXPECT_TRUE(std::holds_alternative<GqaSpec>(spec.layers[0].mixer));
  EXPECT_TRUE(std::holds_alternative<DeltaSpec>(spec.layers[1].mixer));
  EXPECT_TRUE(std::holds_alternative<GqaSpec>(spec.layers[2].mixer));
  EXPECT_EQ(refused(with(listed, R"({"num_hidden_layers": 4})")),
            "config.json: layer_types is a list of 3, expected one string for each of 4 layers");
  EXPECT_EQ(refused(with(listed, R"({"layer_types": []})")),
            "config.json: layer_types is a list of 0, expected one string for each of 3 layers");
  EXPECT_EQ(
      refused(with(listed, R"({"layer_types": ["full_attention", "sliding_attention", "full_attention"]})")),
      "unsupported: config.json: layer_types[1] is sliding_attention; supported: full_attention, "
      "linear_attention");
  EXPECT_EQ(refused(with(kQwen3Next, R"({"full_attention_interval": 0})")),
            "config.json: full_attention_interval is 0, expected a whole number from 1 to 16777216");
}

TEST(DeltaFamilies, WhatIsMissingOrWrongIsNamed) {
  for (const char* key :
       {"linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim", "shared_expert_intermediate_size"}) {
    Json without = kQwen3Next, none = kQwen3Next;
    without.erase(key);
    none[key] = 0;
    EXPECT_EQ(refused(without), text("config.json: {} is missing", key));
    EXPECT_EQ(refused(none), text("config.json: {} is 0, expected a whole number from 1 to 16777216", key));
  }
  EXPECT_EQ(refused(with(kQwen3Next, R"({"linear_num_value_heads": 7})")),
            "config.json: linear_num_value_heads is 7, expected a multiple of linear_num_key_heads, 3");
  EXPECT_EQ(refused(with(kQwen3Next, R"({"linear_conv_kernel_dim": 17})")),
            "config.json: linear_conv_kernel_dim is 17, expected at most 16");
  EXPECT_EQ(refused(with(kQwen3Next, R"({"linear_value_head_dim": 9000000})")),
            "config.json: linear_num_value_heads: 54000000 numbers of all heads, at most 16777216 are read");
  EXPECT_EQ(refused(with(kQwen3Next, R"({"hidden_act": "gelu"})")),
            "unsupported: config.json: hidden_act is \"gelu\"; supported: silu");
  EXPECT_EQ(refused(with(kQwen35Moe, R"({"text_config": {"attn_output_gate": false}})")),
            "unsupported: config.json: text_config.attn_output_gate is false; supported: true");
  EXPECT_EQ(refused(with(kQwen35Moe, R"({"text_config": {"output_gate_type": "sigmoid"}})")),
            "unsupported: config.json: text_config.output_gate_type is \"sigmoid\"; supported: silu");
  EXPECT_EQ(refused(with(kQwen35Moe, R"({"text_config": {"norm_topk_prob": false}})")),
            "unsupported: config.json: text_config.norm_topk_prob is false; supported: true");
}

}  // namespace
}  // namespace kt::inline models
