// Configs of families whose layers choose their keys, as published, small; and configs that say too little or the wrong
// thing.
#include <gtest/gtest.h>

#include "models/module_tree.h"
#include "models/testing/described_config.h"
#include "models/testing/family_configs.h"

namespace kt::inline models {
namespace {

using namespace testing_configs;

// "FSSF": the layers that choose and those that share.
std::string kinds(const ModelSpec& spec) {
  std::string out;
  for (const LayerSpec& layer : spec.layers) out += layer.indexer()->shared ? 'S' : 'F';
  return out;
}

TEST(DsaFamilies, BothReadTheirIndexers) {
  const ModelSpec glm = described(kGlmMoeDsa), v32 = described(kDeepseekV32);
  for (const ModelSpec* spec : {&glm, &v32}) {
    EXPECT_STREQ(spec->host_only(), "layers that choose the keys they attend to");
    EXPECT_EQ(kinds(*spec), "FFFF");
    const IndexerSpec& indexer = *spec->layers.back().indexer();
    EXPECT_EQ(indexer.heads, 24);
    EXPECT_EQ(indexer.dim, 40);
    EXPECT_EQ(indexer.budget, 16);
    EXPECT_EQ(indexer.rope.dims, 8);
    const auto& mla = std::get<MlaSpec>(spec->layers.back().mixer);
    EXPECT_TRUE(mla.rope.interleaved);
    EXPECT_EQ(indexer.rope.interleaved, spec == &glm);
    EXPECT_EQ(indexer.rope.scaling, mla.rope.scaling);
    EXPECT_EQ(mla.norm_eps, 1e-6);
    EXPECT_EQ(spec->context_of_single_layers(), spec->context);
  }
  const auto without_eps = [](const Json& config) {
    return described(with(config, R"({"rms_norm_eps": null})"));
  };
  EXPECT_EQ(without_eps(kGlmMoeDsa).norm_eps, 1e-5);
  EXPECT_EQ(without_eps(kDeepseekV32).norm_eps, 1e-6);
}

TEST(DsaFamilies, SharedLayersAreListedPatternedOrCounted) {
  const auto changed = [](const char* changes) { return described(with(kGlmMoeDsa, changes)); };
  const ModelSpec listed = changed(R"({"indexer_types": ["full", "shared", "full", "shared"]})");
  EXPECT_EQ(kinds(listed), "FSFS");
  EXPECT_EQ(listed.context_of_single_layers(), 16);
  EXPECT_EQ(kinds(changed(R"({"index_topk_pattern": "FSSF"})")), "FSSF");
  // The list speaks first, then the pattern.
  EXPECT_EQ(kinds(changed(R"({"index_topk_pattern": "FSSF", "index_topk_freq": 2,
                              "indexer_types": ["full", "full", "full", "shared"]})")),
            "FFFS");
  const Json ten = with(kGlmMoeDsa, R"({"num_hidden_layers": 10})");
  EXPECT_EQ(kinds(described(with(ten, R"({"index_topk_freq": 4, "index_skip_topk_offset": 3})"))),
            "FFFSSSFSSS");
  EXPECT_EQ(kinds(described(with(ten, R"({"index_topk_freq": 4})"))), "FFSSSFSSSF");
}

TEST(DsaFamilies, WhatIsMissingOrWrongIsNamed) {
  const auto refusal = [](const char* changes) { return refused(with(kGlmMoeDsa, changes)); };
  for (const char* key : {"index_topk", "index_n_heads", "index_head_dim"}) {
    Json without = kGlmMoeDsa, none = kGlmMoeDsa;
    without.erase(key);
    none[key] = 0;
    EXPECT_EQ(refused(without), text("config.json: {} is missing", key));
    EXPECT_EQ(refused(none), text("config.json: {} is 0, expected a whole number from 1 to 16777216", key));
  }
  EXPECT_EQ(refusal(R"({"indexer_types": ["full", "shared"]})"),
            "config.json: indexer_types is a list of 2, expected one for each of 4 layers");
  EXPECT_EQ(refusal(R"({"indexer_types": ["full", "half", "full", "full"]})"),
            "unsupported: config.json: indexer_types[1] is half; supported: full, shared");
  EXPECT_EQ(refusal(R"({"indexer_types": ["shared", "full", "full", "full"]})"),
            "config.json: indexer_types: layer 0 shares the keys that a layer before it chose, and there is "
            "none before it");
  EXPECT_EQ(refusal(R"({"index_topk_pattern": "FSS"})"),
            "config.json: index_topk_pattern is \"FSS\", expected one letter for each of 4 layers");
  EXPECT_EQ(refusal(R"({"index_topk_pattern": "FSXF"})"),
            "unsupported: config.json: index_topk_pattern is \"FSXF\"; supported: letters F and S");
  EXPECT_EQ(refusal(R"({"index_topk_pattern": "SFFF"})"),
            "config.json: index_topk_pattern: layer 0 shares the keys that a layer before it chose, and "
            "there is none before it");
  EXPECT_EQ(refusal(R"({"index_topk_freq": 4, "index_skip_topk_offset": 0})"),
            "config.json: index_skip_topk_offset: layer 0 shares the keys that a layer before it chose, and "
            "there is none before it");
  EXPECT_EQ(refusal(R"({"index_topk_freq": 0})"),
            "config.json: index_topk_freq is 0, expected a whole number from 1 to 16777216");
  EXPECT_EQ(refusal(R"({"layer_types": ["indexed_attention"]})"),
            "config.json: layer_types is a list of 1, expected one string for each of 4 layers");
  EXPECT_EQ(refusal(R"({"layer_types": ["indexed_attention", "indexed_attention", "full_attention", "x"]})"),
            "unsupported: config.json: layer_types[2] is full_attention; supported: indexed_attention");
  EXPECT_EQ(refusal(R"({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"]})"),
            "config.json: mlp_layer_types is a list of 5, expected one string for each of 4 layers");
  EXPECT_EQ(refusal(R"({"first_k_dense_replace": null})"), "config.json: mlp_layer_types is missing");
  EXPECT_EQ(refusal(R"({"index_head_dim": 6})"),
            "config.json: index_head_dim is 6, expected at least qk_rope_head_dim, 8");
  EXPECT_EQ(
      refusal(R"({"index_n_heads": 1000000})"),
      "config.json: index_n_heads: 1000000 heads of 40 numbers, at most 16777216 numbers together are read");
  EXPECT_EQ(refusal(R"({"q_lora_rank": null})"),
            "config.json: q_lora_rank is missing, expected a whole number of at least 1");
  EXPECT_EQ(refusal(R"({"mlp_bias": true})"), "unsupported: config.json: mlp_bias is true; supported: false");
}

TEST(DsaFamilies, OnlyLayersThatChooseHaveModulesForIt) {
  const ModuleTree tree = module_tree(described(with(kGlmMoeDsa, R"({"index_topk_pattern": "FSSF"})")));
  std::string layers;
  for (const ModelModule& module : tree.modules) {
    if (module.kind != ModuleKind::kIndexer) continue;
    layers += text("{} ", module.layer);
    EXPECT_EQ(module.name, text("model.layers.{}.self_attn.indexer", module.layer));
    EXPECT_EQ(module.part, ModulePart::kAttention);
  }
  EXPECT_EQ(layers, "0 3 ");
}

}  // namespace
}  // namespace kt::inline models
