#include "weights/plans/ignore_list.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"

namespace kt::inline weights {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(IgnoreList, PatternsMatchFromTheStartOrAnywhere) {
  const ModulePatterns patterns({R"(re:.*layers\.2\.self_attn\..*)", "shared_expert", "re:lm"});
  EXPECT_TRUE(patterns.match("model.layers.2.self_attn.q_proj"));
  EXPECT_FALSE(patterns.match("model.layers.22.self_attn.q_proj"));
  EXPECT_TRUE(patterns.match("model.layers.7.mlp.shared_experts.up_proj"));
  EXPECT_TRUE(patterns.match("lm_head"));
  EXPECT_FALSE(patterns.match("model.lm_head"));
  try {
    ModulePatterns({"re:*("});
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("re:*(: not a regular expression that is read: pattern"));
  }
  EXPECT_THROW(ModulePatterns({""}), Error);
}

// std::regex recursed for each character of a name and for each bracket of a pattern.
TEST(IgnoreList, LongNamesAndPatternsThatRunAway) {
  const std::string long_name(60'000, 'a');
  EXPECT_TRUE(ModulePatterns({"re:.*"}).match(long_name));
  EXPECT_FALSE(ModulePatterns({"re:.*z$"}).match(long_name));
  EXPECT_TRUE(ModulePatterns({"re:a"}).match("a\xff\xc0"));
  const auto problem = [](const std::string& pattern, const std::string& name) -> std::string {
    try {
      return ModulePatterns({pattern}).match(name) ? "matched" : "did not match";
    } catch (const Error& error) {
      return error.what();
    }
  };
  EXPECT_THAT(problem("re:" + std::string(20'000, '('), "a"), HasSubstr("a pattern of 20000 bytes"));
  EXPECT_THAT(problem("re:" + std::string(2'000, '('), "a"), HasSubstr("nested deeper than"));
  EXPECT_THAT(problem("re:(.*)*(.*)*z$", "model.layers.0.mlp.gate_proj"),
              HasSubstr("repetition of what may be empty at byte"));
  EXPECT_THAT(problem("re:(.+)+(.+)+z$", "model.layers.0.mlp.gate_proj"),
              HasSubstr("takes more than 200000"));
  EXPECT_EQ(problem(R"(re:.*layers\..*\.mlp\..*experts.*(gate|up)_proj$)",
                    "model.language_model.layers.127.mlp.experts.511.gate_up_proj.experts.gate_proj"),
            "matched");
}

TEST(IgnoreList, NeverQuantised) {
  for (const char* name :
       {"lm_head", "model.embed_tokens", "model.layers.3.mlp.gate", "model.layers.3.mlp.shared_expert_gate",
        "model.layers.3.input_layernorm", "model.visual.blocks.3.mlp.fc1",
        "mtp.layers.0.mlp.experts.1.up_proj", "model.layers.3.block_sparse_moe.gate",
        "model.layers.3.mlp.router", "model.layers.3.mlp.router.gate", "model.mtp_block.0.self_attn.q_proj",
        "model.mtp_linear_proj.0", "mm_projector.proj.0", "model.layers.3.self_attn.indexer.weights_proj"})
    EXPECT_TRUE(never_quantised(name)) << name;
  for (const char* name : {"model.layers.3.mlp.gate_proj", "model.layers.3.self_attn.o_proj",
                           "model.layers.3.mlp.shared_experts.up_proj", "model.layers.3.linear_attn.out_proj",
                           "model.layers.3.self_attn.indexer.wq_b"})
    EXPECT_FALSE(never_quantised(name)) << name;
}

TEST(IgnoreList, LayerOf) {
  EXPECT_EQ(layer_of("model.layers.61.mlp.gate"), 61);
  EXPECT_EQ(layer_of("model.language_model.layers.4.mlp.gate"), 4);
  EXPECT_EQ(layer_of("lm_head"), -1);
  EXPECT_EQ(layer_of("mtp.layers.0.mlp.gate"), -1);
  EXPECT_EQ(layer_of("vision_tower.layers.0.fc1"), -1);
  EXPECT_EQ(layer_of("model.layers.x.fc1"), -1);
  EXPECT_EQ(layer_of("model.layers.99999999999.fc1"), -1);
}

TEST(IgnoreList, EntriesAreGeneralUnlessTheyWouldHitAQuantisedModule) {
  EXPECT_THAT(ignore_entries({"model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.q_proj", "lm_head",
                              "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.experts.1.up_proj",
                              "model.layers.2.mlp.experts.0.up_proj", "mtp.fc", "visual.patch.proj"},
                             {"model.layers.1.mlp.experts.0.up_proj"}, 2),
              ElementsAre("lm_head", "model.layers.1.mlp.experts.1.up_proj", R"(re:.*layers\.2\..*)",
                          R"(re:.*layers\.\d+\.mlp\.gate_proj$)", R"(re:.*layers\.\d+\.self_attn\.q_proj$)",
                          R"(re:mtp\..*)", R"(re:visual\.patch\.proj$)"));
}

}  // namespace
}  // namespace kt::inline weights
