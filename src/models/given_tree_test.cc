#include "models/given_tree.h"

#include <gmock/gmock.h>

#include "base/testing/error_of.h"
#include "models/placed_rules.h"

namespace kt::inline models {
namespace {

using testing::HasSubstr;

std::vector<GivenModule> small_model() {
  const auto linear = [](const char* name, int64_t n, int64_t k) {
    return GivenModule{.name = name, .classes = {"Linear", "Module"}, .shape = {n, k}, .stored = "bf16"};
  };
  return {
      {.name = "", .classes = {"Qwen2MoeForCausalLM", "Module"}},
      {.name = "model", .classes = {"Qwen2MoeModel", "Module"}},
      {.name = "model.embed_tokens",
       .classes = {"Embedding", "Module"},
       .shape = {100, 64},
       .stored = "bf16"},
      {.name = "model.layers", .classes = {"ModuleList", "Module"}},
      {.name = "model.layers.0", .classes = {"Qwen2MoeDecoderLayer", "Module"}},
      {.name = "model.layers.0.self_attn", .classes = {"Qwen2MoeAttention", "Module"}},
      linear("model.layers.0.self_attn.q_proj", 64, 64),
      {.name = "model.layers.0.mlp", .classes = {"Qwen2MoeSparseMoeBlock", "Module"}},
      {.name = "model.layers.0.mlp.gate", .classes = {"Qwen2MoeTopKRouter", "Module"}, .shape = {4, 64}},
      {.name = "model.layers.0.mlp.experts",
       .classes = {"Qwen2MoeExperts", "Module"},
       .experts = 4,
       .shape = {32, 64},
       .stored = "bf16"},
      {.name = "model.layers.0.mlp.experts.act_fn", .classes = {"SiLU", "Module"}},
      {.name = "model.layers.0.mlp.shared_expert", .classes = {"Qwen2MoeMLP", "Module"}},
      linear("model.layers.0.mlp.shared_expert.gate_proj", 64, 64),
      linear("model.layers.0.mlp.shared_expert_gate", 1, 64),
      {.name = "model.layers.0.input_layernorm",
       .classes = {"Mine", "Qwen2MoeRMSNorm", "Module"},
       .shape = {64}},
      {.name = "model.norm", .classes = {"Qwen2MoeRMSNorm", "Module"}, .shape = {64}},
      linear("lm_head", 100, 64),
  };
}

ModuleTree small_tree() { return given_tree("qwen2_moe", small_model()); }

const ModelModule& named(const ModuleTree& tree, std::string_view name) {
  const auto found = std::ranges::find(tree.modules, name, &ModelModule::name);
  KT_CHECK(found != tree.modules.end(), "no {}", name);
  return *found;
}

TEST(GivenTree, KindsAndPartsAreThoseOfOurTrees) {
  const ModuleTree tree = small_tree();
  const auto check = [&](std::string_view name, ModuleKind kind, ModulePart part, bool exact) {
    const ModelModule& module = named(tree, name);
    EXPECT_EQ(static_cast<int>(module.kind), static_cast<int>(kind)) << name;
    EXPECT_EQ(name_of(module.part), name_of(part)) << name;
    EXPECT_EQ(module.exact, exact) << name;
  };
  check("", ModuleKind::kModel, ModulePart::kWhole, false);
  check("model.layers.0", ModuleKind::kLayer, ModulePart::kLayer, false);
  check("model.layers.0.self_attn.q_proj", ModuleKind::kLinear, ModulePart::kAttention, false);
  check("model.layers.0.mlp", ModuleKind::kMoe, ModulePart::kMoeBlock, false);
  check("model.layers.0.mlp.gate", ModuleKind::kRouter, ModulePart::kRouter, true);
  check("model.layers.0.mlp.experts", ModuleKind::kExperts, ModulePart::kExperts, false);
  check("model.layers.0.mlp.experts.act_fn", ModuleKind::kOther, ModulePart::kExperts, false);
  check("model.layers.0.mlp.shared_expert.gate_proj", ModuleKind::kLinear, ModulePart::kShared, false);
  check("model.layers.0.mlp.shared_expert_gate", ModuleKind::kLinear, ModulePart::kShared, true);
  check("model.layers.0.input_layernorm", ModuleKind::kNorm, ModulePart::kNorms, false);
  check("model.norm", ModuleKind::kNorm, ModulePart::kFinalNorm, false);
  check("lm_head", ModuleKind::kLinear, ModulePart::kHead, false);
  EXPECT_EQ(named(tree, "model.layers.0.mlp").end, 14u);
  EXPECT_EQ(tree.modules[0].end, tree.modules.size());
}

TEST(GivenTree, ClassesMatchByTheirWordsToo) {
  const PlacedRules placed =
      place_by_rules(parse_rules("- match: {class: a.Mine}\n  replace: {class: default}\n", "r"),
                     small_tree(), {.given = true});
  EXPECT_EQ(std::ranges::count(placed.matches.rule, 0), 1);
}

TEST(GivenTree, ModulesLieWhereTheirRuleOrTheirLayersSays) {
  const PlacedRules placed =
      place_by_rules(parse_rules("- match: {name: 'self_attn$'}\n  replace: {kwargs: {device: 'cuda:1'}}\n"
                                 "- match: {name: 'experts$'}\n  replace: {class: KTransformersExperts, "
                                 "kwargs: {backend: AMXInt8}}\n",
                                 "r"),
                     small_tree(), {.given = true});
  const auto device = [&](std::string_view name) {
    return placed.modules[static_cast<size_t>(&named(placed.tree, name) - placed.tree.modules.data())].device;
  };
  EXPECT_EQ(device("model.layers.0.self_attn.q_proj"), "cuda:1");
  EXPECT_EQ(device("model.layers.0.mlp.gate"), "cuda:1");
  EXPECT_EQ(device("model.layers.0.mlp.experts"), "cpu");
  EXPECT_EQ(device("lm_head"), "");
}

TEST(GivenTree, OperatorsOfTheCallerTakeAnyArgument) {
  RuleFile file = parse_rules(
      "- match: {class: Linear}\n  replace: {class: x.Mine, kwargs: {my_param: true, device: cuda}}\n", "r");
  EXPECT_THAT(error_of([&] { place_by_rules(file, small_tree(), {.given = true}); }),
              HasSubstr("no operator \"Mine\""));
  file.rules[0].own = true;
  const PlacedRules placed = place_by_rules(file, small_tree(), {.given = true});
  EXPECT_EQ(placed.matches.uses[0].name, "Mine");
  EXPECT_EQ(placed.matches.uses[0].device, "cuda");
}

TEST(GivenTree, WhatIsNotDepthFirstIsRefused) {
  std::vector<GivenModule> modules = small_model();
  EXPECT_THAT(error_of([] { given_tree("x", {}); }), HasSubstr("without modules"));
  modules[0].name = "other";
  EXPECT_THAT(error_of([&] { given_tree("x", modules); }),
              HasSubstr("module \"model\": expected the modules of one model"));
}

}  // namespace
}  // namespace kt::inline models
