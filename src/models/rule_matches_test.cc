#include "models/rule_matches.h"

#include <gmock/gmock.h>

#include <chrono>
#include <map>

#include "base/testing/error_of.h"
#include "models/testing/sizes_only.h"

namespace kt::inline models {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// As configs of tests are, and of any number of layers.
ModelSpec small_spec(const char* type, int layers, const Json& more = Json::object()) {
  Json config = {{"model_type", type},
                 {"vocab_size", 100},
                 {"hidden_size", 64},
                 {"intermediate_size", 96},
                 {"moe_intermediate_size", 32},
                 {"num_hidden_layers", layers},
                 {"num_attention_heads", 4},
                 {"num_key_value_heads", 2},
                 {"head_dim", 32},
                 {"num_experts", 4},
                 {"num_local_experts", 4},
                 {"num_experts_per_tok", 2},
                 {"shared_expert_intermediate_size", 80},
                 {"max_position_embeddings", 1024},
                 {"tie_word_embeddings", false}};
  config.update(more);
  return describe_model(config, "config");
}

const ModelSpec& deepseek_spec() {
  static const ModelSpec spec = testing_files::deepseek_v3().spec();
  return spec;
}

// "1 model.norm" of the modules that the rules match.
std::vector<std::string> decided(const RuleFile& file, const ModuleTree& tree) {
  const RuleMatches found = match_rules(file, tree);
  std::vector<std::string> out;
  for (size_t i = 0; i < tree.modules.size(); ++i)
    if (found.rule[i] >= 0) out.push_back(text("{} {}", found.rule[i] + 1, tree.modules[i].name));
  return out;
}

std::string flow_rule(std::string_view match, std::string_view replace = "", std::string_view more = "") {
  return text("- {{match: {{{}}}, replace: {{{}}}{}}}\n", match, replace, more);
}

TEST(ModuleTree, HasEveryModuleWithItsShape) {
  const ModuleTree tree = module_tree(small_spec("qwen2_moe", 1));
  std::vector<std::string> found;
  for (const ModelModule& module : tree.modules)
    found.push_back(text("{} {}x{}{}", module.name, module.n, module.k, module.bias ? " bias" : ""));
  const std::string at = "model.layers.0.";
  EXPECT_THAT(
      found, ElementsAre(" 0x0", "model 0x0", "model.embed_tokens 100x64", "model.layers 0x0",
                         "model.layers.0 0x0", at + "self_attn 0x0", at + "self_attn.q_proj 128x64 bias",
                         at + "self_attn.k_proj 64x64 bias", at + "self_attn.v_proj 64x64 bias",
                         at + "self_attn.o_proj 64x128", at + "mlp 0x0", at + "mlp.gate 4x64",
                         at + "mlp.experts 32x64", at + "mlp.experts.0 0x0", at + "mlp.experts.1 0x0",
                         at + "mlp.experts.2 0x0", at + "mlp.experts.3 0x0", at + "mlp.shared_expert 0x0",
                         at + "mlp.shared_expert.gate_proj 80x64", at + "mlp.shared_expert.up_proj 80x64",
                         at + "mlp.shared_expert.down_proj 64x80", at + "mlp.shared_expert_gate 1x64",
                         at + "input_layernorm 64x0", at + "post_attention_layernorm 64x0", "model.norm 64x0",
                         "model.rotary_emb 0x0", "lm_head 100x64"));
  EXPECT_EQ(tree.modules[0].end, tree.modules.size());
  EXPECT_EQ(tree.modules[12].end, 17);
}

// Sizes of DeepSeek-V3 are those of its checkpoint, and formats are read from headers.
TEST(ModuleTree, KnowsHowMatricesAreStored) {
  testing_files::TensorList list;
  list.bf16("model.embed_tokens", 100, 64);
  list.bf16("model.layers.0.self_attn.q_proj", 128, 64);
  const testing_files::TempFolder folder;
  std::string header = safetensors_header(list.tensors, {});
  header.resize(header.size() + (100 * 64 + 128 * 64) * 2);
  folder.put("model.safetensors", header);
  folder.put("config.json", "{}");
  const ModelSpec spec = small_spec("qwen3_moe", 1);
  ModuleTree tree = module_tree(spec);
  const testing_files::ExpertSizes experts(spec, format_named("int4_g32"), false);
  add_stored_formats(tree, Checkpoint(folder.path()), &experts);
  std::map<std::string, std::string> stored;
  for (const ModelModule& module : tree.modules) stored[module.name] = module.stored;
  EXPECT_EQ(stored["model.embed_tokens"], "bf16");
  EXPECT_EQ(stored["model.layers.0.self_attn.q_proj"], "bf16");
  EXPECT_EQ(stored["model.layers.0.self_attn.k_proj"], "");
  EXPECT_EQ(stored["model.layers.0.mlp.experts"], "int4_g32");
  EXPECT_EQ(stored["model.layers.0.mlp.experts.3"], "int4_g32");
}

TEST(RuleMatches, FirstRuleWinsAndNothingIsInherited) {
  const ModuleTree tree = module_tree(small_spec("qwen3_moe", 2));
  const RuleFile file = parse_rules(
      flow_rule("name: 'layers\\.1\\.mlp\\.experts$'", "", ", recursive: false") +
          flow_rule("name: '0\\.mlp\\.experts\\.[02]$'") +
          flow_rule("class: torch.nn.Linear, name: 'q_proj|head'") +
          flow_rule("name: 'layers\\.0\\.self_attn$'") + flow_rule("class: x.Qwen3MoeTopKRouter") +
          flow_rule("name: 'experts|0\\.self_attn\\.[qk]_proj'"),
      "r");
  EXPECT_THAT(decided(file, tree),
              ElementsAre("4 model.layers.0.self_attn", "3 model.layers.0.self_attn.q_proj",
                          "6 model.layers.0.self_attn.k_proj", "5 model.layers.0.mlp.gate",
                          "6 model.layers.0.mlp.experts", "2 model.layers.0.mlp.experts.0",
                          "6 model.layers.0.mlp.experts.1", "2 model.layers.0.mlp.experts.2",
                          "6 model.layers.0.mlp.experts.3", "3 model.layers.1.self_attn.q_proj",
                          "5 model.layers.1.mlp.gate", "1 model.layers.1.mlp.experts", "3 lm_head"));
  // The root's name is empty; below it nothing is looked at.
  const RuleFile root = parse_rules(flow_rule("name: '^$'", "", ", recursive: false"), "r");
  EXPECT_THAT(decided(root, tree), ElementsAre("1 "));
  EXPECT_THAT(match_rules(root, tree).notes,
              ElementsAre("r:1: rule 1: matches the whole model and is not recursive: nothing is placed"));
}

TEST(RuleMatches, ModulesAnswerToOtherSpellings) {
  const auto one = [](const char* type, std::string_view pattern) {
    const auto found = decided(parse_rules(flow_rule(text("name: '{}'", pattern)), "r"),
                               module_tree(small_spec(type, 1, {{"mlp_layer_types", {"sparse"}}})));
    return found.size() == 1 ? found[0] : text("{} modules", found.size());
  };
  EXPECT_EQ(one("mixtral", "\\.mlp\\.experts$"), "1 model.layers.0.block_sparse_moe.experts");
  EXPECT_EQ(one("mixtral", "\\.block_sparse_moe\\.experts$"), "1 model.layers.0.block_sparse_moe.experts");
  EXPECT_EQ(one("qwen3_moe", "\\.block_sparse_moe\\.gate$"), "1 model.layers.0.mlp.gate");
  EXPECT_EQ(one("qwen2_moe", "shared_experts\\.w1$"), "1 model.layers.0.mlp.shared_expert.gate_proj");
  EXPECT_EQ(one("gpt_oss", "mlp\\.gate$"), "1 model.layers.0.mlp.router");
  EXPECT_EQ(one("hy_v3", "layers\\.0\\.feed_forward$"), "1 model.layers.0.mlp");
  // What a pattern excludes in one spelling is not let in through another.
  EXPECT_THAT(error_of([&] { one("mixtral", "layers\\.0\\.(?!block_sparse_moe).*gate"); }),
              HasSubstr("none of 1 rules matches"));
}

TEST(RuleMatches, IdleRulesSayWhy) {
  const ModuleTree tree = module_tree(small_spec("qwen3_moe", 2));
  const RuleFile file =
      parse_rules(flow_rule("name: 'mlp\\.experts$'", "", ", recursive: false") +
                      flow_rule("class: a.Qwen3MoeAttention") + flow_rule("name: 'self_attn$'") +
                      flow_rule("name: 'experts\\.1$'") + flow_rule("name: 'layers\\.9'") +
                      flow_rule("class: a.DeepseekV3MoE") + flow_rule("class: a.Qwen3MoeMPL") +
                      flow_rule("class: a.Qwen3MoeMLP") +
                      flow_rule("name: 'layers\\.0', class: a.Qwen3MoeRotaryEmbedding") +
                      flow_rule("name: 'self_attn$|experts'"),
                  "r");
  std::vector<std::string> said;
  for (const auto& [rule, why] : match_rules(file, tree).idle) said.push_back(text("{}: {}", rule + 1, why));
  EXPECT_THAT(
      said, ElementsAre("3: names only what rule 2 took", "4: names only what is below rule 1, not recursive",
                        "5: matches no module", "6: this model, qwen3_moe, has no class DeepseekV3MoE",
                        "7: no class \"Qwen3MoeMPL\" is known; the nearest is Qwen3MoeMLP",
                        "8: no module of this model is a Qwen3MoeMLP",
                        "9: matches no module: layers have no rotary module of their own",
                        "10: names only what rules 1-2 took, and what is below rule 1, not recursive"));
  const RuleFile other =
      parse_rules(flow_rule("class: a.DeepseekV3MoE") + flow_rule("name: 'q_a_proj'"), "r");
  EXPECT_EQ(
      error_of([&] { match_rules(other, tree); }),
      "r: none of 2 rules matches a module of this model, qwen3_moe; rule 1 this model, qwen3_moe, has no "
      "class DeepseekV3MoE");
}

TEST(RuleMatches, PatternsWithoutEndAreNamed) {
  const RuleFile file = parse_rules("\n" + flow_rule("name: '(.*)(.*)(.*)(.*)(.*)(.*)(.*)x$'"), "r");
  EXPECT_EQ(
      error_of([&] { match_rules(file, module_tree(small_spec("qwen3_moe", 2))); }),
      "r:2: rule 1: match: name: pattern \"(.*)(.*)(.*)(.*)(.*)(.*)(.*)x$\" takes more than 200000 steps on "
      "module \"model.embed_tokens\"");
}

TEST(Operators, SayWhereAndHow) {
  const auto use = [](std::string_view replace) {
    const RuleFile file = parse_rules(flow_rule("name: a", replace), "r");
    std::string out;
    const std::string error = error_of([&] {
      const OperatorUse found = operator_use(file, file.rules[0]);
      out = text("{}/{}/{}/{}", found.name, found.op, found.device, found.format);
    });
    return out.empty() ? error : out;
  };
  EXPECT_EQ(use(""), "default///");
  EXPECT_EQ(use("kwargs: {generate_device: 'cuda:3', format: int8}"), "default//cuda:3/int8");
  const std::string linear = "class: x.y.KTransformersLinear, kwargs: ";
  EXPECT_EQ(use(linear + "{}"), "KTransformersLinear/KLinearMarlin/cuda/int4_g64");
  EXPECT_EQ(use(linear + "{group_size: 128, device: cpu}"),
            "KTransformersLinear/KLinearMarlin/cpu/int4_g128");
  EXPECT_EQ(use(linear + "{num_bits: 8}"), "KTransformersLinear/KLinearMarlin/cuda/int8");
  EXPECT_EQ(use(linear + "{generate_op: KLinearFP8}"), "KTransformersLinear/KLinearFP8/cuda/fp8");
  const std::string experts = "class: KTransformersExperts, kwargs: ";
  EXPECT_EQ(use(experts + "{backend: AMXInt8}"), "KTransformersExperts/KExpertsCPU/cpu/int8");
  EXPECT_EQ(use(experts + "{backend: q4_k}"), "KTransformersExperts/KExpertsCPU/cpu/q4_k");
  EXPECT_EQ(use(experts + "{generate_op: None}"), "KTransformersExperts/None//");
  EXPECT_EQ(use("class: KDeepseekV2Model, kwargs: {transfer_map: {10: cpu}}"), "KDeepseekV2Model///");
  const std::string at = "r:1: rule 1: kwargs: ";
  EXPECT_EQ(
      use("class: a.KTransformerLinear"),
      "r:1: rule 1: replace: class: no operator \"KTransformerLinear\"; the nearest is KTransformersLinear");
  EXPECT_EQ(
      use(linear + "{generate_devise: cpu}"),
      at + "generate_devise: KTransformersLinear takes no such argument; the nearest is generate_device");
  EXPECT_EQ(use(linear + "{backend: llamafile}"),
            at + "backend: KTransformersLinear takes no such argument; the nearest is device");
  EXPECT_EQ(use(linear + "{generate_op: KLinearMarlim}"),
            at + "generate_op: no operation \"KLinearMarlim\"; the nearest is KLinearMarlin");
  EXPECT_EQ(use(linear + "{generate_op: KExpertsCPU}"),
            at + "generate_op: no operation \"KExpertsCPU\"; the nearest is KLinearFP8");
  EXPECT_EQ(use(linear + "{group_size: 48}"), at + "group_size: no format of 4 bits in groups of 48");
  EXPECT_EQ(use(linear + "{num_bits: four}"), at + "num_bits: expected a number, found text");
  EXPECT_EQ(use(experts + "{generate_device: cuda}"),
            at + "generate_device: KExpertsCPU runs on the cpu, found cuda");
  EXPECT_EQ(use(experts + "{backend: AMXInt9}"),
            at + "backend: no backend \"AMXInt9\"; the nearest is AMXInt8");
  EXPECT_EQ(use("kwargs: {device: gpu}"), at + "device: no device \"gpu\"; the nearest is cpu");
  EXPECT_EQ(use("kwargs: {device: 'cuda:x'}"), at + "device: no device \"cuda:x\"; the nearest is cuda:0");
  EXPECT_EQ(use("kwargs: {device: 0}"), at + "device: expected a device, found an integer");
  EXPECT_EQ(use("kwargs: {format: int5}"), at + "format: no format \"int5\"; the nearest is int8");
  EXPECT_EQ(use("class: KDeepseekV2Model, kwargs: {transfer_map: {ten: cpu}}"),
            at + "transfer_map: expected the number of a layer, found \"ten\"");
}

// 60 rules over DeepSeek-V3 as published files for eight GPUs have them, then without the rule that ends the walk
// above its 14,848 experts. The bounds allow for a busy machine; what is expected is a tenth.
TEST(RuleMatches, CostLittle) {
  using Clock = std::chrono::steady_clock;
  const auto rules = [](std::string_view recursive) {
    std::string out;
    for (int i = 0; i < 30; ++i)
      out += flow_rule(text("name: '^model\\.layers\\.({}|{})\\.(?!.*self_attn\\.kv_b_proj).*$', class: "
                            "torch.nn.Linear",
                            2 * i, 2 * i + 1)) +
             flow_rule(text("name: '^model\\.layers\\.({}|{})\\.mlp\\.experts$'", 2 * i, 2 * i + 1), "",
                       recursive);
    return parse_rules(out, "r");
  };
  const ModuleTree tree = module_tree(deepseek_spec());
  EXPECT_EQ(tree.modules.size(), 7 + 61 * 11 + 3 * 4 + 58 * 263);
  for (const bool experts : {false, true}) {
    const RuleFile file = rules(experts ? "" : ", recursive: false");
    const auto start = Clock::now();
    const RuleMatches found = match_rules(file, tree);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    EXPECT_LT(seconds, experts ? 20 : 0.5);
    RecordProperty(experts ? "single_experts_us" : "layers_us", static_cast<int>(seconds * 1e6));
    // Layer 60 has no rule, so that its experts are looked at in both.
    EXPECT_EQ(std::ranges::count(found.rule, RuleMatches::kBelow), experts ? 0 : 57 * 256);
  }
}

}  // namespace
}  // namespace kt::inline models
