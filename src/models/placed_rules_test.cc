#include "models/placed_rules.h"

#include <gmock/gmock.h>

#include "base/testing/error_of.h"
#include "formats/known_formats.h"
#include "models/testing/sizes_only.h"

namespace kt::inline models {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Two layers whose matrices are stored in these formats.
ModuleTree stored_tree(const char* linears, const char* experts) {
  ModuleTree tree = module_tree(describe_model({{"model_type", "qwen2_moe"},
                                                {"vocab_size", 100},
                                                {"hidden_size", 256},
                                                {"intermediate_size", 96},
                                                {"moe_intermediate_size", 32},
                                                {"num_hidden_layers", 2},
                                                {"num_attention_heads", 4},
                                                {"num_key_value_heads", 2},
                                                {"num_experts", 4},
                                                {"num_experts_per_tok", 2},
                                                {"shared_expert_intermediate_size", 80},
                                                {"max_position_embeddings", 1024}},
                                               "config"));
  for (ModelModule& module : tree.modules) {
    if (module.kind == ModuleKind::kLinear || module.kind == ModuleKind::kEmbedding)
      module.formats = {format_named(linears)};
    if (module.kind == ModuleKind::kExperts) module.formats.assign(3, format_named(experts));
    if (!module.formats.empty()) module.stored = name_of(module.formats[0]);
  }
  return tree;
}

RuleFile rules_of(const std::vector<std::string>& place, std::string devices = "") {
  return *read_rules(RuleWords{.file = "", .place = place, .devices = std::move(devices)});
}

std::string format_text(const PlacedRules& placed, const std::string& name) {
  for (size_t i = 0; i < placed.modules.size(); ++i) {
    if (placed.tree.modules[i].name != name) continue;
    const auto& rounded = placed.modules[i].rounded.front();
    return rounded ? name_of(*rounded) : "stored";
  }
  return "none";
}

constexpr const char* kQ = "model.layers.1.self_attn.q_proj";
constexpr const char* kRouted = "model.layers.1.mlp.experts";

TEST(PlacedRules, FormatsComeFromRulesThenFlags) {
  const RuleDefaults flags{.experts = format_named("int4"), .linears = format_named("int8")};
  const PlacedRules placed = place_by_rules(
      rules_of({"layers\\.1\\.self_attn\\.q_proj=cpu:q8_0", "layers\\.1\\.mlp\\.experts$=cpu:stored"}),
      stored_tree("bf16", "bf16"), flags);
  EXPECT_EQ(format_text(placed, kQ), "q8_0");
  EXPECT_EQ(format_text(placed, "model.layers.0.self_attn.q_proj"), "int8");
  EXPECT_EQ(format_text(placed, kRouted), "stored");
  EXPECT_EQ(format_text(placed, "model.layers.0.mlp.experts"), "int4");
  EXPECT_EQ(format_text(placed, "model.layers.0.mlp.gate"), "stored");
  EXPECT_EQ(format_text(placed, "model.layers.0.mlp.shared_expert_gate"), "stored");
  const ExpertFormats experts = placed.expert_formats();
  ASSERT_EQ(experts.size(), 2u);
  EXPECT_EQ(experts[0][2], format_named("int4"));
  EXPECT_FALSE(experts[1][0]);
  EXPECT_EQ(placed.linear_formats().at(kQ), format_named("q8_0"));
}

TEST(PlacedRules, FewBitsStayAndStoredFp8Stays) {
  const PlacedRules few = place_by_rules(rules_of({"layers=cpu:int8"}), stored_tree("q5_0", "int4_g32"), {});
  EXPECT_EQ(format_text(few, kQ), "stored");
  EXPECT_EQ(format_text(few, kRouted), "stored");
  EXPECT_THAT(few.notes.back(), HasSubstr("below 6 bits a weight nothing is rounded again (`place` 1)"));
  const PlacedRules fp8 = place_by_rules(rules_of({"layers=cpu:fp8"}), stored_tree("fp8_row", "q8_0"), {});
  EXPECT_EQ(format_text(fp8, kQ), "stored");
  EXPECT_EQ(format_text(fp8, kRouted), "fp8");
}

TEST(PlacedRules, UnmatchedModulesFollowTheirLayer) {
  const PlacedRules placed =
      place_by_rules(rules_of({"layers\\.1$=cpu:int8", "0\\.mlp\\.experts\\.\\d$=cpu:int4"}),
                     stored_tree("bf16", "bf16"), {});
  EXPECT_EQ(format_text(placed, kQ), "int8");
  EXPECT_EQ(format_text(placed, kRouted), "int8");
  EXPECT_EQ(format_text(placed, "model.layers.0.self_attn.q_proj"), "stored");
  EXPECT_EQ(format_text(placed, "model.layers.0.mlp.experts"), "int4");  // single ones, which agree
  EXPECT_EQ(placed.dense, PlacedRules::Dense::kCpu);
}

TEST(PlacedRules, DevicesAreRenamedByNameThenByKind) {
  const RuleFile file = rules_of({"a=cpu"}, "cuda=cpu,cuda:1=cuda:0,xpu:0=cuda");
  EXPECT_EQ(file.device("cuda"), "cpu");
  EXPECT_EQ(file.device("cuda:5"), "cpu");
  EXPECT_EQ(file.device("cuda:1"), "cuda:0");
  EXPECT_EQ(file.device("xpu:0"), "cuda");
  EXPECT_EQ(file.device("xpu"), "xpu");
}

TEST(PlacedRules, DenseParts) {
  const auto dense = [](const std::vector<std::string>& place, bool gpu) {
    return place_by_rules(rules_of(place), stored_tree("bf16", "bf16"), {.gpu = gpu}).dense;
  };
  EXPECT_EQ(dense({"experts$=cpu"}, true), PlacedRules::Dense::kAsFlagsSay);
  EXPECT_EQ(dense({"layers\\.0\\.self_attn=cuda"}, false), PlacedRules::Dense::kGpu);
  EXPECT_EQ(dense({"layers\\.0\\.self_attn=cpu"}, false), PlacedRules::Dense::kCpu);
  EXPECT_EQ(dense({"layers\\.0\\.self_attn=cpu"}, true), PlacedRules::Dense::kAsFlagsSay);
  EXPECT_EQ(dense({"layers=cpu", "lm_head=cpu"}, true), PlacedRules::Dense::kCpu);
  EXPECT_THAT(error_of([&] { dense({"layers\\.0\\.mlp\\.shared_expert\\.=cpu"}, true); }),
              HasSubstr("dense parts of a layer in two places are not there yet"));
}

TEST(PlacedRules, WholeLayers) {
  const auto placed = [](const std::vector<std::string>& place, bool gpu) {
    return place_by_rules(rules_of(place), stored_tree("bf16", "bf16"), {.gpu = gpu});
  };
  EXPECT_THAT(placed({"layers\\.0=cpu"}, true).layers_on, ElementsAre(kOnHost, kUndecided));
  const PlacedRules split = placed({"layers\\.0$=cpu", "layers\\.1$=cuda:2", "lm_head=cpu"}, false);
  EXPECT_THAT(split.layers_on, ElementsAre(kOnHost, 2));
  EXPECT_EQ(split.head_on, kOnHost);
  EXPECT_EQ(split.gpus, 3);
  EXPECT_THAT(split.gpu_from, HasSubstr("model.layers.1"));
  // Who is not named follows the last one before it that is, or the first.
  EXPECT_THAT(placed({"layers\\.1$=cuda:1"}, false).layers_on, ElementsAre(1, 1));
  EXPECT_THAT(placed({"layers\\.1\\.mlp\\.experts$=cuda:1"}, true).layers_on, ElementsAre(1, 1));
  EXPECT_EQ(placed({"experts$=cpu"}, true).head_on, kUndecided);
  EXPECT_THAT(error_of([&] { placed({"norm$=cuda", "lm_head=cpu"}, true); }),
              HasSubstr("the last norm and the head in two places are not there yet"));
}

TEST(PlacedRules, Table) {
  const RuleFile file = [] {
    RuleFile out = parse_rules(
        "- match: {name: 'layers\\.0\\..*experts$'}\n"
        "  replace: {class: KTransformersExperts, kwargs: {backend: AMXInt8}}\n  recursive: false\n"
        "- {match: {class: torch.nn.Linear, name: layers}, replace: {class: KTransformersLinear}}\n"
        "- {match: {name: nothing}, replace: {}}\n",
        "r.yaml");
    out.renamed = {{"cuda", "cpu"}};
    return out;
  }();
  const PlacedRules placed =
      place_by_rules(file, stored_tree("bf16", "bf16"), {.experts = format_named("int4")});
  const std::string said = describe(placed, false);
  EXPECT_THAT(said, HasSubstr("placement of qwen2_moe, 2 layers: r.yaml (3 rules)\n"));
  EXPECT_THAT(said, HasSubstr("idle: rule 3, line 5: matches no module\n"));
  const OrderedJson json = json_of(placed, false);
  std::vector<std::string> experts;
  for (const OrderedJson& part : json["parts"])
    if (part["part"] == "routed experts")
      experts.push_back(text("{} {} {} {}", part["layers"].dump(), part["formats"].dump(),
                             part["decided_by"].get<std::string>(), part["bytes"].get<uint64_t>()));
  EXPECT_THAT(experts,
              ElementsAre(text("[0] [\"int8\"] rule 1, line 1 {}", 4 * (3 * 32 * 256 + 4 * (2 * 32 + 256))),
                          text("[1] [\"int4\"] `format` {}", 4 * (3 * 32 * 256 / 2 + 4 * (2 * 32 + 256)))));
  EXPECT_EQ(json["idle"].dump(), R"([{"rule":3,"line":5,"why":"matches no module"}])");
  EXPECT_THAT(rule_notes(placed)[0], "r.yaml: idle: rule 3 (matches no module)");
  EXPECT_THAT(place_by_rules(rules_of({"layers=cpu"}), stored_tree("bf16", "bf16"), {}).notes, IsEmpty());
}

TEST(PlacedRules, LargestOfADevice) {
  const PlacedRules placed =
      place_by_rules(rules_of({"layers\\.0\\.self_attn=cpu", "layers\\.1\\.self_attn\\.q_proj=cpu:int8"}),
                     stored_tree("bf16", "bf16"), {});
  const std::string said = largest_rules(placed, "cpu", false);
  EXPECT_THAT(said, HasSubstr(" takes "));
  EXPECT_THAT(said, HasSubstr(", "));
  EXPECT_EQ(largest_rules(placed, "cuda:0", false), "");
}

}  // namespace
}  // namespace kt::inline models
