// Configs of Llama 4 and SmallThinker, whose layers differ by lists: as published, small; and configs that say too
// little or the wrong thing.
#include <gtest/gtest.h>

#include <cmath>

#include "models/testing/described_config.h"
#include "models/testing/family_configs.h"

namespace kt::inline models {
namespace {

using namespace testing_configs;

// Llama 4's text part with changes, inside the whole.
Json llama4(const char* changes) {
  Json out = kLlama4;
  out["text_config"].merge_patch(Json::parse(changes));
  return out;
}

const GqaSpec& gqa_of(const ModelSpec& spec, size_t layer) {
  return std::get<GqaSpec>(spec.layers[layer].mixer);
}

TEST(Llama4, EveryFourthLayerDoesNotTurn) {
  const ModelSpec spec = described(kLlama4);
  EXPECT_EQ(spec.family, "llama4_text");
  EXPECT_EQ(spec.context, 10485760);
  EXPECT_STREQ(spec.host_only(), "layers that see a chunk of the text");
  for (size_t i = 0; i < 8; ++i) {
    const GqaSpec& layer = gqa_of(spec, i);
    const bool rotates = i % 4 != 3;
    EXPECT_EQ(layer.rope.dims, rotates ? 24 : 0);
    EXPECT_EQ(layer.chunk, rotates ? 32 : 0);
    EXPECT_EQ(layer.window, 0);
    EXPECT_EQ(layer.norm, rotates ? GqaSpec::Norm::kHeadLast : GqaSpec::Norm::kNone);
    EXPECT_EQ(layer.growth, (rotates ? QueryGrowth{} : QueryGrowth{.beta = 0.1, .length = 8192, .ahead = 1}));
    EXPECT_EQ(layer.rope.interleaved, rotates);
    EXPECT_EQ(layer.rope.theta, rotates ? 500000 : 10000);
    EXPECT_EQ(layer.rope.high_freq_factor, rotates ? 1 : 4);
  }
}

TEST(Llama4, Temperature) {
  const QueryGrowth growth{.beta = 0.1, .length = 8192, .ahead = 1};
  EXPECT_EQ(growth.factor(8190), 1);
  EXPECT_NEAR(growth.factor(8191), 1 + 0.1 * std::log(2.0), 1e-7);
  EXPECT_NEAR(growth.factor(2147483647), 1 + 0.1 * std::log(1 + 262144.0), 1e-6);
  for (const char* off : {R"({"attn_temperature_tuning": false})", R"({"attn_temperature_tuning": 0})"})
    EXPECT_EQ(gqa_of(described(llama4(off)), 3).growth, QueryGrowth{});
}

TEST(Llama4, FeedForwardParts) {
  const ModelSpec spec = described(kLlama4);
  for (size_t i = 0; i < 8; ++i) {
    const MoeSpec* const moe = spec.layers[i].moe();
    ASSERT_EQ(moe != nullptr, i % 2 == 1);
    if (!moe) {
      const auto& dense = std::get<DenseSpec>(spec.layers[i].feed_forward);
      EXPECT_EQ(dense.inter, 80);
      EXPECT_EQ(dense.names.up, "feed_forward.up_proj");
      continue;
    }
    EXPECT_TRUE(moe->weighs_inputs && !moe->routes_first && !moe->shared_gate && !moe->router.normalise);
    EXPECT_EQ(moe->inter, 40);
    EXPECT_EQ(moe->shared_inter, 40);
    EXPECT_EQ(moe->router.score, RouterSpec::Score::kSigmoid);
  }
  const auto routing = [](const char* changes) {
    std::string out;
    for (const LayerSpec& layer : described(llama4(changes)).layers) out += layer.moe() ? 'x' : '.';
    return out;
  };
  EXPECT_EQ(routing(R"({"interleave_moe_layer_step": 1})"), "xxxxxxxx");
  EXPECT_EQ(routing(R"({"moe_layers": [0, 3, 7]})"), "x..x...x");
  EXPECT_EQ(routing(R"({"num_local_experts": 0})"), "........");
}

TEST(Llama4, ListedLayers) {
  const char* const listed =
      R"({"num_hidden_layers": 3, "no_rope_layers": [0, 1, 1],
          "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]})";
  const ModelSpec spec = described(llama4(listed));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(gqa_of(spec, i).rope.dims > 0, i > 0);
    EXPECT_EQ(gqa_of(spec, i).chunk > 0, i != 1);
  }
  EXPECT_EQ(gqa_of(described(llama4(R"({"no_rope_layer_interval": 2})")), 1).rope.dims, 0);
}

TEST(Llama4, WhatIsMissingOrWrongIsNamed) {
  const std::pair<const char*, const char*> kCases[] = {
      {R"({"no_rope_layers": [1, 0]})",
       "config.json: text_config.no_rope_layers is a list of 2, expected one number for each of 8 layers"},
      {R"({"no_rope_layers": [1, 1, 1, 2, 1, 1, 1, 0]})",
       "config.json: text_config.no_rope_layers[3] is 2, expected 0 or 1"},
      {R"({"layer_types": ["full_attention"]})",
       "config.json: text_config.layer_types is a list of 1, expected one string for each of 8 layers"},
      {R"({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]})",
       "unsupported: config.json: text_config.layer_types[0] is sliding_attention; supported: "
       "chunked_attention, "
       "full_attention"},
      {R"({"attention_chunk_size": 0})",
       "config.json: text_config.attention_chunk_size is 0, expected a whole number from 1 to 16777216"},
      {R"({"floor_scale": 0})",
       "config.json: text_config.floor_scale is 0, expected a whole number from 1 to 16777216"},
      {R"({"attn_scale": -1})", "config.json: text_config.attn_scale is -1, expected a number of at least 0"},
      {R"({"attn_temperature_tuning": "on"})",
       "config.json: text_config.attn_temperature_tuning is \"on\", expected true or false"},
      {R"({"moe_layers": [1, 8]})", "config.json: moe_layers names layer 8 of 8"},
      {R"({"interleave_moe_layer_step": 0})", "config.json: experts in every 0th layer"},
      {R"({"num_experts_per_tok": 9})",
       "config.json: text_config.num_experts_per_tok: 9 of 8 experts cannot be chosen"},
      {R"({"intermediate_size_mlp": null})", "config.json: text_config.intermediate_size_mlp is missing"},
      {R"({"hidden_act": "relu6"})",
       "unsupported: config.json: text_config.hidden_act is \"relu6\"; supported: silu, gelu, "
       "gelu_pytorch_tanh, "
       "relu"},
  };
  for (const auto& [changes, expected] : kCases) EXPECT_EQ(refused(llama4(changes)), expected);
}

TEST(SmallThinker, LayersAreListed) {
  const ModelSpec spec = described(kSmallThinker);
  EXPECT_EQ(spec.family, "smallthinker");
  EXPECT_STREQ(spec.host_only(), "routers before attention");
  EXPECT_FALSE(spec.tied_embeddings);
  for (size_t i = 0; i < 5; ++i) {
    const bool far = i % 4 == 0;
    EXPECT_EQ(gqa_of(spec, i).rope.dims, far ? 0 : 24);
    EXPECT_EQ(gqa_of(spec, i).window, far ? 0 : 24);
    EXPECT_EQ(gqa_of(spec, i).norm, GqaSpec::Norm::kNone);
    const MoeSpec& moe = *spec.layers[i].moe();
    EXPECT_TRUE(moe.routes_first && moe.router.score_of_chosen && moe.router.normalise && !moe.weighs_inputs);
    EXPECT_EQ(moe.activation.kind, ActivationKind::kRelu);
    EXPECT_EQ(moe.router.score, RouterSpec::Score::kSigmoid);
    EXPECT_EQ(moe.top_k, 3);
    EXPECT_EQ(moe.inter, 40);
  }
  const ModelSpec other = described(with(kSmallThinker, R"({"sliding_window_layout": null,
      "moe_primary_router_apply_softmax": true, "tie_word_embeddings": null})"));
  EXPECT_EQ(gqa_of(other, 1).window, 0);
  EXPECT_EQ(other.moe()->router.score, RouterSpec::Score::kSoftmax);
  EXPECT_TRUE(other.tied_embeddings);
}

TEST(SmallThinker, WhatIsMissingOrWrongIsNamed) {
  const std::pair<const char*, const char*> kCases[] = {
      {R"({"rope_layout": null})", "config.json: rope_layout is missing"},
      {R"({"rope_layout": [1]})",
       "config.json: rope_layout is a list of 1, expected one number for each of 5 layers"},
      {R"({"sliding_window_layout": [1, 1]})",
       "config.json: sliding_window_layout is a list of 2, expected one number for each of 5 layers"},
      {R"({"sliding_window_layout": [1, 1, 3, 1, 1]})",
       "config.json: sliding_window_layout[2] is 3, expected 0 or 1"},
      {R"({"sliding_window_size": 0})",
       "config.json: sliding_window_size is 0, expected a whole number from 1 to 16777216"},
      {R"({"moe_layer_layout": [1, 1, 0, 1, 1]})",
       "unsupported: config.json: moe_layer_layout is a list of 5; supported: 1 for every layer"},
      {R"({"hidden_act": "silu"})", "unsupported: config.json: hidden_act is \"silu\"; supported: relu"},
      {R"({"moe_enable_early_router": false})",
       "unsupported: config.json: moe_enable_early_router is false; supported: true"},
      {R"({"moe_enable_secondary_experts": true})",
       "unsupported: config.json: moe_enable_secondary_experts is true; supported: false"},
      {R"({"use_qk_norm": true})", "unsupported: config.json: use_qk_norm is true; supported: false"},
      {R"({"moe_shared_primary_experts": 1})",
       "unsupported: config.json: moe_shared_primary_experts is 1; supported: 0"},
      {R"({"moe_num_primary_experts": null})", "config.json: moe_num_primary_experts is missing"},
      {R"({"moe_ffn_hidden_size": null})", "config.json: moe_ffn_hidden_size is missing"},
      {R"({"moe_num_active_primary_experts": 9})",
       "config.json: moe_num_active_primary_experts: 9 of 8 experts cannot be chosen"},
  };
  for (const auto& [changes, expected] : kCases) EXPECT_EQ(refused(with(kSmallThinker, changes)), expected);
}

}  // namespace
}  // namespace kt::inline models
