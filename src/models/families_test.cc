// Configs of every family, as published or as transformers writes them, small; and configs that say too
// little or the wrong thing.
#include "models/families.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"
#include "kernels/table.h"
#include "models/testing/family_configs.h"

namespace kt::inline models {
namespace {

using namespace testing_configs;

constexpr double kTight = 1e-12;

ModelSpec describe(const Json& config) { return describe_model(config, "config.json"); }

// The message of the error, after its kind.
std::string refusal(const Json& config) {
  try {
    describe(config);
  } catch (const Error& error) {
    return (error.kind() == ErrorKind::kUnsupported ? "unsupported: " : "") + std::string(error.what());
  }
  return "no error";
}

// Of the first layer, and of the first that routes.
const GqaSpec& gqa(const ModelSpec& spec) { return std::get<GqaSpec>(spec.layers.front().mixer); }
const MlaSpec& mla(const ModelSpec& spec) { return std::get<MlaSpec>(spec.layers.front().mixer); }
const MoeSpec& moe(const ModelSpec& spec) { return *spec.moe(); }
bool is_mla(const ModelSpec& spec) { return std::holds_alternative<MlaSpec>(spec.layers.front().mixer); }
const RopeSpec& rope(const ModelSpec& spec) { return is_mla(spec) ? mla(spec).rope : gqa(spec).rope; }
double scale(const ModelSpec& spec) { return is_mla(spec) ? mla(spec).scale : gqa(spec).scale; }

std::vector<int> windows(const ModelSpec& spec) {
  std::vector<int> out;
  for (const LayerSpec& layer : spec.layers)
    out.push_back(is_mla(spec) ? std::get<MlaSpec>(layer.mixer).window
                               : std::get<GqaSpec>(layer.mixer).window);
  return out;
}

std::vector<int> dense(const ModelSpec& spec) {
  std::vector<int> out;
  for (const LayerSpec& layer : spec.layers)
    out.push_back(layer.moe() ? 0 : std::get<DenseSpec>(layer.feed_forward).inter);
  return out;
}

TEST(Families, EveryOneReadsItsSizes) {
  for (const Json* const config : kAll) {
    const ModelSpec spec = describe(*config);
    EXPECT_EQ(spec.family, (*config)["model_type"].get<std::string>());
    EXPECT_EQ(spec.hidden, 64);
    EXPECT_EQ(spec.vocab, 300);
    EXPECT_EQ(spec.layers.size(), 4u);
    EXPECT_EQ(spec.norm_eps, 0.001) << spec.family;
    EXPECT_EQ(is_mla(spec) ? mla(spec).norm_eps : 1e-6, 1e-6) << spec.family;
    EXPECT_EQ(spec.tied_embeddings, spec.family == "llama");
    EXPECT_EQ(spec.moe() ? moe(spec).experts : 0,
              config->contains("num_experts_per_tok") || config->contains("moe_k") ? 8 : 0)
        << spec.family;
    EXPECT_EQ(is_mla(spec), config->contains("kv_lora_rank"));
  }
}

TEST(Families, Qwen3Moe) {
  const ModelSpec spec = describe(kQwen3Moe);
  EXPECT_EQ(gqa(spec).heads, 4);
  EXPECT_EQ(gqa(spec).kv_heads, 2);
  EXPECT_EQ(gqa(spec).head_dim, 32);
  EXPECT_EQ(gqa(spec).norm, GqaSpec::Norm::kHead);
  EXPECT_FALSE(gqa(spec).qkv_bias || gqa(spec).o_bias || gqa(spec).sinks);
  EXPECT_NEAR(scale(spec), 1 / std::sqrt(32.0), kTight);
  EXPECT_EQ(rope(spec).dims, 32);
  EXPECT_EQ(rope(spec).theta, 1e6);
  EXPECT_EQ(rope(spec).scaling, RopeSpec::Scaling::kNone);
  EXPECT_FALSE(rope(spec).interleaved);
  EXPECT_EQ(moe(spec).top_k, 3);
  EXPECT_EQ(moe(spec).inter, 32);
  EXPECT_EQ(moe(spec).shared_inter, 0);
  EXPECT_EQ(moe(spec).router.score, RouterSpec::Score::kSoftmax);
  EXPECT_TRUE(moe(spec).router.normalise);
  EXPECT_FALSE(moe(spec).router.correction_bias || moe(spec).router.bias);
  EXPECT_EQ(dense(spec), (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(windows(spec), (std::vector<int>{0, 0, 0, 0}));
}

TEST(Families, Qwen3MoeInOtherWords) {
  // As transformers 5 writes it, inside another model's config, with dense layers, a window and a long
  // context.
  const Json text = with(kQwen3Moe, R"({"num_experts": null, "num_local_experts": 8, "rope_theta": null,
      "rope_scaling": null, "norm_topk_prob": null, "head_dim": null, "mlp_only_layers": [2],
      "decoder_sparse_step": 2, "use_sliding_window": true, "sliding_window": 24,
      "max_position_embeddings": 40960, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000.0,
      "factor": 4.0, "original_max_position_embeddings": 32768}})");
  const Json nested = {{"model_type", "seen_and_read"}, {"tie_word_embeddings", true}, {"text_config", text}};
  const ModelSpec spec = describe(nested);
  EXPECT_EQ(spec.family, "qwen3_moe");
  EXPECT_TRUE(spec.tied_embeddings);
  EXPECT_EQ(moe(spec).experts, 8);
  EXPECT_EQ(gqa(spec).head_dim, 16);
  EXPECT_FALSE(moe(spec).router.normalise);
  EXPECT_EQ(dense(spec), (std::vector<int>{96, 0, 96, 0}));
  EXPECT_EQ(windows(spec), (std::vector<int>{24, 24, 24, 24}));
  EXPECT_EQ(rope(spec).theta, 1e6);
  EXPECT_EQ(rope(spec).original_context, 32768);
  EXPECT_NEAR(rope(spec).attention_factor, 0.1 * std::log(4.0) + 1, kTight);
  EXPECT_EQ(spec.context, 131072);
}

TEST(Families, Qwen2Moe) {
  const ModelSpec spec = describe(kQwen2Moe);
  EXPECT_TRUE(gqa(spec).qkv_bias);
  EXPECT_FALSE(gqa(spec).o_bias);
  EXPECT_EQ(gqa(spec).norm, GqaSpec::Norm::kNone);
  EXPECT_EQ(gqa(spec).head_dim, 16);
  EXPECT_EQ(moe(spec).shared_inter, 80);
  EXPECT_TRUE(moe(spec).shared_gate);
  EXPECT_EQ(moe(spec).names.shared, "mlp.shared_expert");
  EXPECT_EQ(moe(spec).names.shared_gate, "mlp.shared_expert_gate");
  EXPECT_FALSE(moe(spec).router.normalise);
  const Json window = with(kQwen2Moe, R"({"use_sliding_window": true, "sliding_window": 24,
      "max_window_layers": 2, "decoder_sparse_step": 2})");
  EXPECT_EQ(windows(describe(window)), (std::vector<int>{24, 0, 0, 0}));
  EXPECT_EQ(dense(describe(window)), (std::vector<int>{96, 0, 96, 0}));
}

TEST(Families, Mixtral) {
  const ModelSpec spec = describe(kMixtral);
  EXPECT_EQ(moe(spec).inter, 96);
  EXPECT_EQ(moe(spec).top_k, 2);
  EXPECT_TRUE(moe(spec).router.normalise);
  EXPECT_EQ(moe(spec).names.router, "block_sparse_moe.gate");
  EXPECT_EQ(rope(spec).theta, 1e6);
  EXPECT_EQ(windows(spec), (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(windows(describe(with(kMixtral, R"({"sliding_window": 24})"))),
            (std::vector<int>{24, 24, 24, 24}));
}

TEST(Families, DeepseekV2) {
  const ModelSpec spec = describe(kDeepseekV2);
  EXPECT_EQ(mla(spec).heads, 4);
  EXPECT_EQ(mla(spec).q_rank, 48);
  EXPECT_EQ(mla(spec).kv_rank, 32);
  EXPECT_EQ(mla(spec).nope, 24);
  EXPECT_EQ(mla(spec).rotated, 8);
  EXPECT_EQ(mla(spec).v, 16);
  EXPECT_TRUE(rope(spec).interleaved);
  EXPECT_EQ(rope(spec).dims, 8);
  EXPECT_EQ(rope(spec).factor, 40);
  EXPECT_EQ(rope(spec).attention_factor, 1);  // mscale over mscale_all_dim
  const double gain = 0.0707 * std::log(40.0) + 1;
  EXPECT_NEAR(scale(spec), gain * gain / std::sqrt(32.0), kTight);
  EXPECT_EQ(moe(spec).shared_inter, 64);
  EXPECT_EQ(dense(spec), (std::vector<int>{96, 0, 0, 0}));
  const RouterSpec& router = moe(spec).router;
  EXPECT_EQ(router.score, RouterSpec::Score::kSoftmax);
  EXPECT_EQ(router.group_score, RouterSpec::GroupScore::kMax);
  EXPECT_EQ(router.groups, 4);
  EXPECT_EQ(router.top_groups, 2);
  EXPECT_EQ(router.scale, 16);
  EXPECT_FALSE(router.normalise || router.correction_bias);
}

TEST(Families, DeepseekV2Lite) {
  const ModelSpec spec = describe(with(kDeepseekV2, R"({"q_lora_rank": null, "topk_method": "greedy",
      "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0})"));
  EXPECT_EQ(mla(spec).q_rank, 0);
  EXPECT_EQ(moe(spec).router.groups, 1);
  EXPECT_EQ(moe(spec).router.scale, 1);
}

TEST(Families, DeepseekV3) {
  const ModelSpec spec = describe(kDeepseekV3);
  EXPECT_TRUE(rope(spec).interleaved);
  EXPECT_EQ(rope(spec).theta, 50000);
  EXPECT_EQ(rope(spec).original_context, 64);
  EXPECT_EQ(rope(spec).attention_factor, 1);
  const double gain = 0.1 * std::log(40.0) + 1;
  EXPECT_NEAR(scale(spec), gain * gain / std::sqrt(32.0), kTight);
  EXPECT_EQ(spec.context, 2560);
  const RouterSpec& router = moe(spec).router;
  EXPECT_EQ(router.score, RouterSpec::Score::kSigmoid);
  EXPECT_EQ(router.group_score, RouterSpec::GroupScore::kTopTwo);
  EXPECT_TRUE(router.correction_bias && router.normalise);
  EXPECT_EQ(router.normalise_floor, 1e-20);
  EXPECT_EQ(router.groups, 4);
  EXPECT_EQ(router.top_groups, 2);
  EXPECT_EQ(router.scale, 2.5);
  EXPECT_EQ(moe(spec).names.correction_bias, "mlp.gate.e_score_correction_bias");
}

TEST(Families, KimiK2IsDeepseekV3) {
  const ModelSpec spec =
      describe(with(kDeepseekV3, R"({"model_type": "kimi_k2", "n_group": 1, "topk_group": 1})"));
  EXPECT_EQ(spec.family, "kimi_k2");
  EXPECT_EQ(moe(spec).router.groups, 1);
  EXPECT_TRUE(is_mla(spec));
  EXPECT_EQ(describe(with(kDeepseekV3, R"({"model_type": null})")).family, "deepseek_v3");
}

// Published with the text model's config inside that of a model that sees images.
TEST(Families, KimiK25IsDeepseekV3Inside) {
  const Json outer = {{"architectures", {"KimiK25ForConditionalGeneration"}},
                      {"model_type", "kimi_k25"},
                      {"vision_config", {{"vt_hidden_size", 1152}, {"num_hidden_layers", 27}}}};
  Json config = outer;
  config["text_config"] = with(kDeepseekV3, R"({"model_type": "kimi_k2", "n_group": 1, "topk_group": 1})");
  EXPECT_EQ(describe(config).family, "kimi_k2");
  EXPECT_EQ(describe(config).layers.size(), 4u);
  config["text_config"].erase("model_type");
  EXPECT_EQ(describe(config).family, "kimi_k25");
  EXPECT_EQ(moe(describe(config)).router.scale, 2.5);
}

TEST(Families, Glm4MoeLite) {
  const ModelSpec spec = describe(kGlm4MoeLite);
  EXPECT_TRUE(rope(spec).interleaved);
  EXPECT_EQ(rope(spec).dims, 8);
  EXPECT_EQ(rope(spec).scaling, RopeSpec::Scaling::kNone);
  EXPECT_NEAR(scale(spec), 1 / std::sqrt(32.0), kTight);
  EXPECT_EQ(mla(spec).growth.beta, 0);
  EXPECT_EQ(dense(spec), (std::vector<int>{96, 0, 0, 0}));
  EXPECT_EQ(moe(spec).shared_inter, 64);
  const RouterSpec& router = moe(spec).router;
  EXPECT_EQ(router.score, RouterSpec::Score::kSigmoid);
  EXPECT_TRUE(router.correction_bias && router.normalise);
  EXPECT_EQ(router.scale, 1.8);
  // As it is published: a count instead of a list.
  const Json counted = with(kGlm4MoeLite, R"({"mlp_layer_types": null, "first_k_dense_replace": 2,
      "routed_scaling_factor": 1.5, "rope_interleave": false})");
  EXPECT_EQ(dense(describe(counted)), (std::vector<int>{96, 96, 0, 0}));
  EXPECT_EQ(moe(describe(counted)).router.scale, 1.5);
  EXPECT_FALSE(rope(describe(counted)).interleaved);
  EXPECT_EQ(describe(with(kGlm4MoeLite, R"({"rms_norm_eps": null})")).norm_eps, 1e-5);
}

TEST(Families, Dots1) {
  const ModelSpec spec = describe(kDots1);
  EXPECT_EQ(gqa(spec).norm, GqaSpec::Norm::kHead);
  EXPECT_EQ(gqa(spec).head_dim, 16);
  EXPECT_FALSE(gqa(spec).qkv_bias || gqa(spec).o_bias);
  EXPECT_EQ(rope(spec).theta, 1e7);
  EXPECT_FALSE(rope(spec).interleaved);
  EXPECT_EQ(dense(spec), (std::vector<int>{96, 0, 0, 0}));
  EXPECT_EQ(moe(spec).shared_inter, 64);
  EXPECT_EQ(moe(spec).router.scale, 2.5);
  EXPECT_TRUE(moe(spec).router.correction_bias && moe(spec).router.normalise);
  EXPECT_FALSE(moe(describe(with(kDots1, R"({"norm_topk_prob": null})"))).router.normalise);
  EXPECT_EQ(windows(spec), (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(windows(describe(with(kDots1, R"({"sliding_window": 24, "max_window_layers": 3})"))),
            (std::vector<int>{0, 0, 0, 24}));
  const ModelSpec biased = describe(with(kDots1, R"({"attention_bias": true})"));
  EXPECT_TRUE(gqa(biased).qkv_bias && gqa(biased).o_bias);
}

TEST(Families, HyV3) {
  const ModelSpec spec = describe(kHyV3);
  EXPECT_EQ(gqa(spec).norm, GqaSpec::Norm::kHead);
  EXPECT_EQ(gqa(spec).head_dim, 32);
  EXPECT_EQ(dense(spec), (std::vector<int>{96, 0, 0, 0}));
  EXPECT_EQ(moe(spec).shared_inter, 32);
  const RouterSpec& router = moe(spec).router;
  EXPECT_EQ(router.score, RouterSpec::Score::kSigmoid);
  EXPECT_TRUE(router.correction_bias && router.normalise);
  EXPECT_EQ(router.normalise_floor, 1e-20);
  EXPECT_EQ(router.scale, 2.5);
  EXPECT_EQ(router.groups, 1);
  EXPECT_EQ(moe(spec).names.router, "mlp.router.gate");
  EXPECT_EQ(moe(spec).names.correction_bias, "mlp.expert_bias");
  EXPECT_EQ(moe(spec).names.shared, "mlp.shared_mlp");
  const ModelSpec silent = describe(with(kHyV3, R"({"rope_parameters": null, "router_scaling_factor": null,
      "moe_intermediate_size": null, "expert_hidden_dim": 48})"));
  EXPECT_EQ(rope(silent).theta, 11158840);
  EXPECT_EQ(moe(silent).router.scale, 2.826);
  EXPECT_EQ(moe(silent).inter, 48);
}

TEST(Families, SolarOpen) {
  const ModelSpec spec = describe(kSolarOpen);
  EXPECT_EQ(gqa(spec).norm, GqaSpec::Norm::kNone);
  EXPECT_EQ(rope(spec).dims, 32);
  EXPECT_EQ(dense(spec), (std::vector<int>{0, 0, 0, 0}));
  EXPECT_EQ(moe(spec).shared_inter, 32);
  EXPECT_EQ(moe(spec).router.scale, 1);
  EXPECT_TRUE(moe(spec).router.correction_bias && moe(spec).router.normalise);
  const ModelSpec silent = describe(with(kSolarOpen, R"({"rope_theta": null, "head_dim": null,
      "partial_rotary_factor": null, "attention_bias": true})"));
  EXPECT_EQ(rope(silent).theta, 1e6);
  EXPECT_EQ(rope(silent).dims, 128);
  EXPECT_TRUE(gqa(silent).qkv_bias);
  EXPECT_FALSE(gqa(silent).o_bias);
}

TEST(Families, Ernie45Moe) {
  const ModelSpec spec = describe(kErnie45Moe);
  EXPECT_EQ(gqa(spec).norm, GqaSpec::Norm::kNone);
  EXPECT_TRUE(rope(spec).interleaved);
  EXPECT_EQ(rope(spec).theta, 500000);
  EXPECT_EQ(dense(spec), (std::vector<int>{96, 0, 0, 0}));
  EXPECT_EQ(moe(spec).top_k, 3);
  EXPECT_EQ(moe(spec).shared_inter, 64);
  const RouterSpec& router = moe(spec).router;
  EXPECT_EQ(router.score, RouterSpec::Score::kSoftmax);
  EXPECT_TRUE(router.correction_bias && router.normalise);
  EXPECT_EQ(router.normalise_least, 1e-12);
  EXPECT_EQ(router.normalise_floor, 0);
  EXPECT_EQ(moe(spec).names.correction_bias, "mlp.moe_statics.e_score_correction_bias");
  EXPECT_TRUE(describe(with(kErnie45Moe, R"({"tie_word_embeddings": null})")).tied_embeddings);
  const auto layers = [](const char* changes) { return dense(describe(with(kErnie45Moe, changes))); };
  EXPECT_EQ(layers(R"({"moe_layer_interval": 2})"), (std::vector<int>{96, 0, 96, 0}));
  EXPECT_EQ(layers(R"({"moe_layer_end_index": 2})"), (std::vector<int>{96, 0, 0, 96}));
  EXPECT_EQ(layers(R"({"moe_layer_end_index": -1, "moe_layer_start_index": 0})"),
            (std::vector<int>{0, 0, 0, 0}));
}

TEST(Families, Mistral4) {
  const ModelSpec spec = describe(kMistral4);
  EXPECT_TRUE(rope(spec).interleaved);
  EXPECT_EQ(rope(spec).dims, 8);
  EXPECT_EQ(rope(spec).original_context, 64);
  EXPECT_EQ(mla(spec).growth.beta, 0.1);
  EXPECT_EQ(mla(spec).growth.length, 64);
  const double gain = 0.1 * std::log(128.0) + 1;
  EXPECT_NEAR(scale(spec), gain * gain / std::sqrt(32.0), kTight);
  EXPECT_EQ(dense(spec), (std::vector<int>{0, 0, 0, 0}));
  const RouterSpec& router = moe(spec).router;
  EXPECT_EQ(router.score, RouterSpec::Score::kSoftmax);
  EXPECT_EQ(router.group_score, RouterSpec::GroupScore::kTopTwo);
  EXPECT_TRUE(router.normalise);
  EXPECT_FALSE(router.correction_bias);
  EXPECT_EQ(router.scale, 1);
  EXPECT_EQ(rope(describe(with(kMistral4, R"({"rope_parameters": {"partial_rotary_factor": null}})"))).dims,
            8);
  EXPECT_EQ(refusal(with(kMistral4, R"({"rope_parameters": {"partial_rotary_factor": 0.5}})")),
            "config.json: qk_rope_head_dim is 8, but 16 of 32 numbers of a head turn");
  EXPECT_EQ(refusal(with(kMistral4, R"({"rope_parameters": {"llama_4_scaling_beta": null}})")),
            "config.json: rope_parameters.llama_4_scaling_beta is missing");
  // As it is published, inside a model that sees images.
  const Json outer = {{"architectures", {"Mistral3ForConditionalGeneration"}},
                      {"model_type", "mistral3"},
                      {"text_config", kMistral4}};
  EXPECT_EQ(describe(outer).family, "mistral4");
}

TEST(Families, MscalesThatDiffer) {
  const ModelSpec apart = describe(with(kDeepseekV3, R"({"rope_parameters": {"mscale_all_dim": 0.5}})"));
  const double whole = 0.1 * std::log(40.0) + 1, half = 0.05 * std::log(40.0) + 1;
  EXPECT_NEAR(rope(apart).attention_factor, whole / half, kTight);
  EXPECT_NEAR(scale(apart), half * half / std::sqrt(32.0), kTight);
  // mscale alone counts for nothing, and neither does any of it without scaling.
  const ModelSpec alone =
      describe(with(kDeepseekV3, R"({"rope_parameters": {"mscale": 3, "mscale_all_dim": null}})"));
  EXPECT_NEAR(rope(alone).attention_factor, whole, kTight);
  EXPECT_NEAR(scale(alone), 1 / std::sqrt(32.0), kTight);
  const ModelSpec none = describe(with(kDeepseekV3, R"({"rope_parameters": {"rope_type": "default"}})"));
  EXPECT_EQ(rope(none).scaling, RopeSpec::Scaling::kNone);
  EXPECT_EQ(rope(none).attention_factor, 1);
  EXPECT_NEAR(scale(none), 1 / std::sqrt(32.0), kTight);
}

TEST(Families, Glm4Moe) {
  const ModelSpec spec = describe(kGlm4Moe);
  EXPECT_TRUE(gqa(spec).qkv_bias);
  EXPECT_FALSE(gqa(spec).o_bias);
  EXPECT_EQ(gqa(spec).norm, GqaSpec::Norm::kHead);
  EXPECT_EQ(rope(spec).dims, 16);
  EXPECT_FALSE(rope(spec).interleaved);
  EXPECT_NEAR(scale(spec), 1 / std::sqrt(32.0), kTight);
  EXPECT_EQ(dense(spec), (std::vector<int>{96, 96, 0, 0}));
  EXPECT_EQ(moe(spec).shared_inter, 32);
  EXPECT_TRUE(moe(spec).router.correction_bias && moe(spec).router.normalise);
  EXPECT_EQ(moe(spec).router.scale, 2.5);
  EXPECT_EQ(gqa(describe(with(kGlm4Moe, R"({"use_qk_norm": false})"))).norm, GqaSpec::Norm::kNone);
  EXPECT_EQ(rope(describe(with(kGlm4Moe, R"({"partial_rotary_factor": null})"))).dims, 16);
  EXPECT_EQ(rope(describe(with(kGlm4Moe, R"({"rope_parameters": {"partial_rotary_factor": 0.25}})"))).dims,
            8);
}

TEST(Families, MiniMaxM2) {
  const ModelSpec spec = describe(kMiniMaxM2);
  EXPECT_EQ(gqa(spec).norm, GqaSpec::Norm::kAll);
  EXPECT_EQ(rope(spec).dims, 16);
  EXPECT_EQ(rope(spec).theta, 5e6);
  EXPECT_EQ(moe(spec).inter, 96);
  EXPECT_EQ(moe(spec).router.score, RouterSpec::Score::kSigmoid);
  EXPECT_TRUE(moe(spec).router.correction_bias && moe(spec).router.normalise);
  EXPECT_EQ(moe(spec).router.normalise_floor, 0);
  EXPECT_EQ(moe(spec).names.router, "block_sparse_moe.gate");
  EXPECT_EQ(moe(spec).names.correction_bias, "block_sparse_moe.e_score_correction_bias");
}

TEST(Families, GptOss) {
  const ModelSpec spec = describe(kGptOss);
  EXPECT_TRUE(gqa(spec).qkv_bias && gqa(spec).o_bias && gqa(spec).sinks);
  EXPECT_EQ(windows(spec), (std::vector<int>{24, 0, 24, 0}));
  EXPECT_EQ(rope(spec).theta, 150000);
  EXPECT_FALSE(rope(spec).truncate);
  EXPECT_NEAR(rope(spec).attention_factor, 0.1 * std::log(32.0) + 1, kTight);
  EXPECT_NEAR(scale(spec), 1 / std::sqrt(32.0), kTight);
  EXPECT_TRUE(moe(spec).router.score_of_chosen && moe(spec).router.bias);
  EXPECT_FALSE(moe(spec).router.normalise);
  EXPECT_EQ(moe(spec).activation.limit, 7.0f);
  EXPECT_EQ(moe(spec).activation.alpha, 1.702f);
  EXPECT_EQ(moe(spec).names.router, "mlp.router");
  // What it says by saying nothing.
  const ModelSpec silent = describe(with(kGptOss, R"({"rope_scaling": null, "layer_types": null})"));
  EXPECT_EQ(rope(silent).factor, rope(spec).factor);
  EXPECT_EQ(rope(silent).original_context, rope(spec).original_context);
  EXPECT_EQ(rope(silent).truncate, rope(spec).truncate);
  EXPECT_EQ(rope(silent).attention_factor, rope(spec).attention_factor);
  EXPECT_EQ(windows(silent), windows(spec));
}

TEST(Families, DenseOnes) {
  const ModelSpec qwen = describe(kQwen3);
  EXPECT_EQ(gqa(qwen).head_dim, 128);
  EXPECT_EQ(gqa(qwen).norm, GqaSpec::Norm::kHead);
  EXPECT_EQ(dense(qwen), (std::vector<int>{96, 96, 96, 96}));
  const Json window =
      with(kQwen3, R"({"use_sliding_window": true, "sliding_window": 24, "max_window_layers": 3})");
  EXPECT_EQ(windows(describe(window)), (std::vector<int>{0, 0, 0, 24}));

  const ModelSpec llama = describe(kLlama);
  EXPECT_EQ(gqa(llama).norm, GqaSpec::Norm::kNone);
  EXPECT_EQ(gqa(llama).head_dim, 16);
  EXPECT_EQ(rope(llama).scaling, RopeSpec::Scaling::kLlama3);
  EXPECT_EQ(rope(llama).factor, 8);
  EXPECT_EQ(rope(llama).low_freq_factor, 1);
  EXPECT_EQ(rope(llama).high_freq_factor, 4);
  EXPECT_EQ(rope(llama).original_context, 256);
  EXPECT_EQ(llama.context, 1024);
  const ModelSpec dynamic = describe(with(kLlama, R"({"rope_scaling": {"rope_type": "dynamic"}})"));
  EXPECT_EQ(rope(dynamic).scaling, RopeSpec::Scaling::kNone);
  EXPECT_EQ(dynamic.context, 1024);  // texts that it would stretch positions of do not fit
}

TEST(Families, MissingKeysAreNamed) {
  const auto check = [](const Json& config, std::initializer_list<const char*> keys) {
    for (const char* const key : keys) {
      Json without = config;
      ASSERT_EQ(without.erase(key), 1u) << key;
      EXPECT_EQ(refusal(without), text("config.json: {} is missing", key)) << config["model_type"];
    }
  };
  for (const Json* const config : kAll)
    check(*config, {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                    "max_position_embeddings"});
  check(kQwen3Moe, {"num_experts", "num_experts_per_tok", "moe_intermediate_size"});
  check(kQwen2Moe, {"num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"});
  for (const Json* const config : {&kMixtral, &kGptOss, &kMiniMaxM2})
    check(*config, {"num_local_experts", "intermediate_size"});
  for (const Json* const config : {&kDeepseekV2, &kDeepseekV3})
    check(*config, {"n_routed_experts", "moe_intermediate_size", "kv_lora_rank", "qk_nope_head_dim",
                    "qk_rope_head_dim", "v_head_dim", "intermediate_size"});
  check(kGlm4Moe, {"n_routed_experts", "moe_intermediate_size", "intermediate_size"});
  check(kGlm4MoeLite, {"n_routed_experts", "kv_lora_rank", "mlp_layer_types"});
  check(kDots1, {"n_routed_experts", "moe_intermediate_size", "intermediate_size"});
  check(kHyV3, {"num_experts", "num_experts_per_tok"});
  check(kSolarOpen, {"n_routed_experts", "moe_intermediate_size"});
  check(kErnie45Moe, {"moe_num_experts", "moe_k", "moe_intermediate_size"});
  check(kMistral4, {"n_routed_experts", "moe_intermediate_size", "rope_parameters"});
  check(kLlama, {"intermediate_size"});
  EXPECT_EQ(refusal(with(kLlama, R"({"rope_scaling": {"factor": null}})")),
            "config.json: rope_scaling.factor is missing");
  EXPECT_EQ(refusal({{"text_config", with(kQwen3Moe, R"({"vocab_size": null})")}}),
            "config.json: text_config.vocab_size is missing");
}

TEST(Families, WrongValuesAreNamed) {
  const std::pair<const Json*, std::pair<const char*, const char*>> cases[] = {
      {&kLlama, {R"({"vocab_size": "many"})", R"(vocab_size is "many", expected a whole number)"}},
      {&kLlama, {R"({"vocab_size": -1})", "vocab_size is -1, expected a whole number from 1"}},
      {&kLlama, {R"({"vocab_size": 1e99})", "vocab_size is 1e+99, expected a whole number"}},
      {&kLlama, {R"({"vocab_size": 18446744073709551615})", "vocab_size is 18446744073709551615, expected"}},
      {&kLlama, {R"({"num_key_value_heads": 3})", "num_key_value_heads is 3, expected a divisor of"}},
      {&kLlama, {R"({"head_dim": 15})", "head_dim: 15 numbers a head, expected an even number"}},
      {&kLlama, {R"({"num_attention_heads": 16777216, "head_dim": 1048576})", "16777216 heads of 1048576"}},
      {&kLlama, {R"({"rms_norm_eps": "small"})", R"(rms_norm_eps is "small", expected a number)"}},
      {&kLlama, {R"({"rms_norm_eps": -1})", "rms_norm_eps is -1, expected"}},
      {&kLlama, {R"({"rope_theta": 0})", "rope_theta is 0, expected a number above 0"}},
      {&kLlama, {R"({"rope_scaling": "yarn"})", R"(rope_scaling is "yarn", expected an object)"}},
      {&kLlama, {R"({"rope_scaling": {"factor": 0}})", "rope_scaling.factor is 0, expected"}},
      {&kLlama,
       {R"({"rope_scaling": {"high_freq_factor": 0.5}})", "high_freq_factor is 0.5, expected at least"}},
      {&kLlama, {R"({"num_experts": 4})", "4 experts, but llama is a dense family"}},
      {&kGlm4Moe, {R"({"partial_rotary_factor": 7})", "partial_rotary_factor: 224 of 32 numbers"}},
      {&kGlm4Moe, {R"({"attention_bias": 1})", "attention_bias is 1, expected true or false"}},
      {&kQwen3Moe, {R"({"num_experts_per_tok": 9})", "num_experts_per_tok: 9 of 8 experts"}},
      {&kDeepseekV3, {R"({"n_group": 3})", "n_group is 3, expected a divisor of the 8 experts"}},
      {&kDeepseekV3, {R"({"n_group": 8, "topk_group": 4})", "n_group is 8, expected groups of at least 2"}},
      {&kDeepseekV3, {R"({"topk_group": 5})", "topk_group is 5, expected at most n_group, 4"}},
      {&kDeepseekV3, {R"({"topk_group": 1})", "topk_group: 3 experts cannot be chosen, 1 groups have 2"}},
      {&kDeepseekV3, {R"({"n_shared_experts": 16777216})", "n_shared_experts is 16777216, expected at most"}},
      {&kDeepseekV3,
       {R"({"qk_rope_head_dim": 7})", "numbers of a head are rotated, expected an even number"}},
      {&kGptOss,
       {R"({"layer_types": ["full_attention"]})", "layer_types is a list of 1, expected one string"}},
      {&kGptOss, {R"({"layer_types": 3})", "layer_types is 3, expected a list of strings"}},
      {&kGptOss, {R"({"sliding_window": 0})", "sliding_window is 0, expected a whole number from 1"}},
      {&kErnie45Moe, {R"({"moe_k": 9})", "moe_k: 9 of 8 experts"}},
      {&kErnie45Moe,
       {R"({"moe_layer_end_index": -2})", "moe_layer_end_index is -2, expected a whole number from"}},
      {&kErnie45Moe,
       {R"({"moe_num_shared_experts": 16777216})", "moe_num_shared_experts is 16777216, expected"}},
      {&kMistral4,
       {R"({"rope_parameters": {"llama_4_scaling_beta": -1}})",
        "llama_4_scaling_beta is -1, expected a number"}},
  };
  for (const auto& [config, change] : cases) {
    const std::string message = refusal(with(*config, change.first));
    EXPECT_TRUE(message.starts_with("config.json: ")) << message;
    EXPECT_NE(message.find(change.second), message.npos) << message;
    EXPECT_EQ(message.find('\n'), message.npos);
  }
}

TEST(Families, WhatIsNotComputedIsUnsupported) {
  const std::pair<const Json*, std::pair<const char*, const char*>> cases[] = {
      {&kLlama, {R"({"hidden_act": "relu2"})", R"(hidden_act is "relu2"; supported: silu)"}},
      {&kLlama, {R"({"rope_scaling": {"rope_type": "spiral"}})", R"(rope_scaling.rope_type is "spiral")"}},
      {&kLlama,
       {R"({"rope_scaling": {"full_attention": {}}})", "rope_scaling.full_attention: positions that differ"}},
      {&kDeepseekV2, {R"({"topk_method": "other"})", R"(topk_method is "other"; supported: greedy)"}},
      {&kDeepseekV2, {R"({"moe_layer_freq": 2})", "moe_layer_freq is 2; supported: 1"}},
      {&kDeepseekV3, {R"({"moe_layer_freq": 2})", "moe_layer_freq is 2; supported: 1"}},
      {&kDeepseekV2, {R"({"norm_topk_prob": true})", "norm_topk_prob is true; supported: false"}},
      {&kDeepseekV2, {R"({"scoring_func": "sigmoid"})", R"(scoring_func is "sigmoid"; supported: softmax)"}},
      {&kDeepseekV3, {R"({"scoring_func": "softmax"})", R"(scoring_func is "softmax"; supported: sigmoid)"}},
      {&kMiniMaxM2, {R"({"use_qk_norm": false})", "use_qk_norm is false; supported: true"}},
      {&kGlm4MoeLite, {R"({"scoring_func": "softmax"})", R"(scoring_func is "softmax"; supported: sigmoid)"}},
      {&kGlm4MoeLite, {R"({"topk_method": "greedy"})", R"(topk_method is "greedy"; supported: noaux_tc)"}},
      {&kDots1, {R"({"scoring_func": "softmax"})", R"(scoring_func is "softmax"; supported: sigmoid)"}},
      {&kDots1, {R"({"hidden_act": "relu6"})", R"(hidden_act is "relu6"; supported: silu)"}},
      {&kHyV3, {R"({"qk_norm": false})", "qk_norm is false; supported: true"}},
      {&kHyV3, {R"({"route_norm": false})", "route_norm is false; supported: true"}},
      {&kHyV3, {R"({"moe_router_use_sigmoid": false})", "moe_router_use_sigmoid is false; supported: true"}},
      {&kHyV3,
       {R"({"moe_router_enable_expert_bias": false})", "moe_router_enable_expert_bias is false; supported"}},
      {&kHyV3, {R"({"mlp_bias": true})", "mlp_bias is true; supported: false"}},
      {&kSolarOpen, {R"({"use_qk_norm": true})", "use_qk_norm is true; supported: false"}},
      {&kSolarOpen, {R"({"first_k_dense_replace": 1})", "first_k_dense_replace is 1; supported: 0"}},
      {&kErnie45Moe, {R"({"moe_use_aux_free": false})", "moe_use_aux_free is false; supported: true"}},
      {&kErnie45Moe, {R"({"moe_gate": "top2"})", R"(moe_gate is "top2"; supported: topk)"}},
      {&kErnie45Moe, {R"({"moe_gate_act": "sigmoid"})", R"(moe_gate_act is "sigmoid"; supported: softmax)"}},
      {&kErnie45Moe, {R"({"use_bias": true})", "use_bias is true; supported: false"}},
      {&kErnie45Moe, {R"({"compression_ratio": 2.0})", "compression_ratio is 2.0; supported: 1"}},
      {&kErnie45Moe, {R"({"rope_scaling": {"rope_type": "3d"}})", R"(rope_scaling.rope_type is "3d")"}},
      {&kMistral4, {R"({"scoring_func": "sigmoid"})", R"(scoring_func is "sigmoid"; supported: softmax)"}},
      {&kMistral4, {R"({"sliding_window": 4096})", "sliding_window is 4096; supported: null"}},
      {&kDeepseekV3, {R"({"llama_4_scaling_beta": 0.1})", "llama_4_scaling_beta is 0.1; supported: 0"}},
      {&kGptOss,
       {R"({"layer_types": ["a\n", "full_attention", "full_attention", "full_attention"]})",
        "layer_types[0] is a"}},
  };
  for (const auto& [config, change] : cases) {
    const std::string message = refusal(with(*config, change.first));
    EXPECT_TRUE(message.starts_with("unsupported: config.json: ")) << message;
    EXPECT_NE(message.find(change.second), message.npos) << message;
    EXPECT_EQ(message.find('\n'), message.npos);
  }
}

// transformers 5 writes the kind of every layer's MLP instead of a count of dense ones.
TEST(Families, KindsOfMlpsLayerByLayer) {
  for (const Json* config : {&kDeepseekV3, &kGlm4Moe, &kDeepseekV2}) {
    const Json listed = with(*config, R"({"first_k_dense_replace": null,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"]})");
    EXPECT_EQ(dense(describe(listed)), (std::vector<int>{96, 0, 96, 0}));
  }
  EXPECT_EQ(refusal(with(kGlm4Moe, R"({"mlp_layer_types": ["dense", "sparse", "sparse"]})")),
            "config.json: mlp_layer_types has 3 entries for 4 layers");
  EXPECT_EQ(refusal(with(kGlm4Moe, R"({"mlp_layer_types": ["dense", "sparse", "moe", "sparse"]})")),
            "config.json: mlp_layer_types[2] is 'moe', expected 'dense' or 'sparse'");
}

TEST(Families, FrequenciesDividedOneByOne) {
  const char* const factors = R"({"rope_scaling": {"rope_type": "longrope", "attention_factor": 1.5,
      "factor": 1.0, "short_factor": [1.0, 2.5], "long_factor": [1.0, 2.5]}, "head_dim": 4})";
  const ModelSpec spec = describe(with(kLlama, factors));
  EXPECT_EQ(rope(spec).divisors, (std::vector<double>{1.0, 2.5}));
  EXPECT_EQ(rope(spec).attention_factor, 1.5);
  EXPECT_EQ(rope(spec).scaling, RopeSpec::Scaling::kNone);
  const Rope plain({.dims = 4}), divided({.dims = 4, .divisors = {1.0, 2.5}});
  float a[4] = {1, 2, 3, 4}, b[4] = {1, 2, 3, 4};
  const auto rotate = [](const Rope& rope, float* x, int position) {
    float cosines[2], sines[2];
    rope.angles(position, cosines, sines);
    rope.rotate(*best_kernels().rows, x, 1, 4, cosines, sines);
  };
  rotate(plain, a, 2);
  rotate(divided, b, 5);  // the second pair is rotated as far at 5 as it would be at 2
  EXPECT_FLOAT_EQ(a[1], b[1]);
  EXPECT_FLOAT_EQ(a[3], b[3]);
  EXPECT_NE(a[0], b[0]);

  const std::pair<const char*, const char*> cases[] = {
      {R"({"long_factor": [1.0]})", "long_factor has 1 numbers, short_factor 2"},
      {R"({"short_factor": [1.0], "long_factor": [1.0]})", "short_factor has 1 numbers, expected 2"},
      {R"({"short_factor": [0.0, 1.0], "long_factor": [0.0, 1.0]})", "expected numbers above 0"},
      {R"({"short_factor": 1, "long_factor": 1})", "short_factor is 1, expected a list of numbers"},
      {R"({"attention_factor": 0})", "attention_factor is 0, expected a number above 0"},
  };
  for (const auto& [change, message] : cases) {
    Json config = with(kLlama, factors);
    config["rope_scaling"].update(Json::parse(change));
    EXPECT_NE(refusal(config).find(message), std::string::npos) << refusal(config);
  }
}

// As transformers: lists that differ are of texts up to the original context and of longer ones; the attention
// factor, where it is not said, follows from how much longer they may be.
TEST(Families, FrequenciesOfShortTextsEndWithThem) {
  Json config = with(kLlama, R"({"head_dim": 4, "max_position_embeddings": 1024, "rope_scaling": {
      "rope_type": "longrope", "original_max_position_embeddings": 256, "short_factor": [1.0, 2.5],
      "long_factor": [1.0, 4.0]}})");
  config["rope_scaling"].erase("factor");
  const ModelSpec spec = describe(config);
  EXPECT_EQ(rope(spec).divisors, (std::vector<double>{1.0, 2.5}));
  EXPECT_EQ(spec.context, 256);
  EXPECT_DOUBLE_EQ(rope(spec).attention_factor, std::sqrt(1 + std::log(4.0) / std::log(256.0)));
  config["rope_scaling"]["long_factor"] = {1.0, 2.5};
  EXPECT_EQ(describe(config).context, 1024);
  config["rope_scaling"]["factor"] = 1.0;
  EXPECT_EQ(rope(describe(config)).attention_factor, 1.0);
}

TEST(Families, UnknownArchitecturesListTheKnown) {
  const std::string message = refusal(with(
      kLlama, R"({"architectures": ["MambaForCausalLM"], "model_type": "mamba", "rope_scaling": null})"));
  EXPECT_TRUE(message.starts_with(
      "unsupported: config.json: architecture MambaForCausalLM (model_type mamba) is not known; known: "))
      << message;
  for (const Json* const config : kAll)
    EXPECT_NE(message.find((*config)["architectures"][0].get<std::string>()), message.npos);
  EXPECT_NE(refusal(Json::parse(R"({"dtype": "bfloat16"})")).find("architecture (none) (model_type (none))"),
            std::string::npos);
  EXPECT_NE(refusal(Json::object()).find("no config.json"), std::string::npos);
  EXPECT_NE(refusal(Json::array()).find("expected a JSON object"), std::string::npos);
}

}  // namespace
}  // namespace kt::inline models
