// A placement written as rules is read as the same value: random ones of every family, by rules and by flags, on
// the CPU and beside a GPU.
#include "models/decided_placement.h"

#include <gmock/gmock.h>

#include <random>

#include "base/testing/error_of.h"
#include "formats/known_formats.h"
#include "models/families.h"
#include "models/testing/family_configs.h"

namespace kt::inline models {
namespace {

using testing::HasSubstr;

class RandomPlacement {
 public:
  RandomPlacement(const ModelSpec& spec, uint32_t seed) : rng_(seed) {
    tree_ = module_tree(spec);
    for (ModelModule& module : tree_.modules) {
      using enum ModuleKind;
      if (module.kind == kLinear || module.kind == kRouter || module.kind == kEmbedding)
        module.formats = {stored()};
      if (module.kind == kExperts) module.formats = {stored(), stored(), stored()};
      if (!module.formats.empty()) module.stored = name_of(module.formats.front());
    }
    for (const LayerSpec& layer : spec.layers)
      sizes_.layers.push_back({.dense = 100, .page = 10, .experts = layer.moe() ? layer.moe()->experts : 0});
    for (PlacementSizes::Layer& layer : sizes_.layers)
      if (layer.experts > 0) layer.expert = {7};
  }

  DecidedPlacement decide(RuleFile file, const RuleDefaults& flags, bool gpu, const ExpertWish& wish) const {
    const PlacedRules placed = place_by_rules(std::move(file), tree_, flags);
    gpu = (gpu && placed.dense != PlacedRules::Dense::kCpu) || placed.dense == PlacedRules::Dense::kGpu;
    if (!gpu) return decided(placed, nullptr);
    const Placement beside = decide_placement(sizes_, {.devices = {{.index = 0, .free = 1 << 30}},
                                                       .use = {.sequences = 1, .context = 64},
                                                       .experts = wish,
                                                       .ruled = placed.experts});
    return decided(placed, &beside);
  }

  DecidedPlacement made() {
    const bool gpu = chance(2);
    RuleDefaults flags{.gpu = gpu};
    if (chance(3)) flags.experts = format_named(format());
    if (chance(3)) flags.linears = format_named(format());
    const ExpertWish wish =
        chance(2) ? ExpertWish{} : ExpertWish{ExpertWish::Kind::kPerLayer, double(draw(5))};
    std::vector<std::string> place;
    for (int i = draw(6); i > 0; --i) place.push_back(rule(gpu));
    if (place.empty()) return decide({.name = "flags"}, flags, gpu, wish);
    if (gpu && chance(2)) place.push_back("layers\\.\\d+$=cuda");
    return decide(*read_rules(RuleWords{.place = place}), flags, gpu, wish);
  }

 private:
  int draw(int below) { return static_cast<int>(rng_() % static_cast<uint32_t>(below)); }
  bool chance(int of) { return draw(of) == 0; }
  // That any number of columns has.
  std::string format() {
    constexpr const char* kNames[] = {"int8", "int4", "fp8", "bf16", "int4_g32"};
    return kNames[draw(5)];
  }
  Format stored() {
    constexpr const char* kNames[] = {"bf16", "fp8", "fp8_row", "int4_g32", "q8_0"};
    return format_named(kNames[draw(5)]);
  }
  // Of one module, of one kind of module in some layers, of single experts.
  std::string rule(bool gpu) {
    const ModelModule& module =
        tree_.modules[static_cast<size_t>(draw(static_cast<int>(tree_.modules.size())))];
    const bool expert = module.kind == ModuleKind::kExpert;
    const bool experts = module.kind == ModuleKind::kExperts;
    const bool to_gpu = gpu && ((!expert && !experts) || chance(2));
    std::string name = module.name;
    if (!expert && module.layer >= 0 && chance(2)) {
      const std::string number = text(".{}.", module.layer);
      if (const size_t at = name.find(number); at != name.npos) name.replace(at, number.size(), ".\\d+.");
    }
    const bool rounds = !expert && module.kind != ModuleKind::kMlp && chance(2);
    return text("^{}$={}{}", name, to_gpu ? "cuda" : "cpu",
                rounds                 ? ":" + format()
                : chance(3) && !expert ? ":stored"
                                       : "");
  }

  std::mt19937 rng_;
  ModuleTree tree_;
  PlacementSizes sizes_;
};

TEST(DecidedPlacement, IsReadBackAsItWasWritten) {
  int told = 0, beside = 0, rounded = 0, copied = 0;
  std::vector<const Json*> families(std::begin(testing_configs::kAll), std::end(testing_configs::kAll));
  families.insert(families.end(), std::begin(testing_configs::kRecurrent),
                  std::end(testing_configs::kRecurrent));
  families.insert(families.end(), std::begin(testing_configs::kHostOnly),
                  std::end(testing_configs::kHostOnly));
  for (const Json* const config : families) {
    const ModelSpec spec = describe_model(*config, "config.json");
    for (uint32_t seed = 0; seed < 200; ++seed) {
      RandomPlacement random(spec, seed);
      DecidedPlacement made;
      try {
        made = random.made();
      } catch (const Error&) {
        continue;  // rules that cannot be
      }
      const std::string written = rules_text(made, "model");
      const DecidedPlacement read = random.decide(parse_rules(written, "written"), {}, false, {});
      ASSERT_EQ(read, made) << spec.family << " " << seed << "\n" << written;
      ASSERT_EQ(rules_text(read, "model"), written);
      ++told;
      beside += made.beside_gpu;
      for (const DecidedModule& module : made.modules) {
        for (const std::string& format : module.formats) rounded += format != "stored";
        copied += !module.on_gpu.empty();
      }
    }
  }
  EXPECT_GT(told, 16 * 100);
  EXPECT_GT(beside, 500);
  EXPECT_GT(rounded, 1000);
  EXPECT_GT(copied, 500);
}

TEST(DecidedPlacement, IsTheSameByRulesAndByFlags) {
  const RandomPlacement model(describe_model(testing_configs::kQwen2Moe, "config.json"), 3);
  const RuleDefaults flags{.experts = format_named("bf16"), .linears = format_named("bf16"), .gpu = true};
  const DecidedPlacement by_flags = model.decide({.name = "flags"}, flags, true, parse_expert_wish("3", ""));
  const DecidedPlacement by_rules = model.decide(parse_rules(R"(
- match: {name: '\.experts$'}
  replace: {class: default, kwargs: {device: cpu, format: bf16, rounds_again: true, gpu_experts: 3}}
- match: {class: torch.nn.Linear}
  replace: {class: default, kwargs: {device: cuda, format: bf16, rounds_again: true}}
- match: {name: 'layers\.\d+$|norm'}
  replace: {class: default, kwargs: {device: 'cuda:0'}}
)",
                                                             "rules"),
                                                 {}, false, {});
  EXPECT_EQ(by_rules, by_flags);
  const DecidedPlacement other = model.decide({.name = "flags"}, flags, true, parse_expert_wish("2", ""));
  EXPECT_NE(other, by_flags);
}

// Whole layers, single experts, numbers, shares, ids and a strategy.
TEST(DecidedPlacement, RulesPutExpertsOnTheGpu) {
  const RandomPlacement model(describe_model(testing_configs::kQwen3Moe, "config.json"), 1);
  const auto on_gpu = [&](const std::string& kwargs,
                          const std::string& name = "layers\\.(1|2)\\.mlp\\.experts$") {
    const std::string rules = text(
        "- match: {{name: '{}'}}\n  replace: {{class: default, kwargs: {{{}}}}}\n"
        "- match: {{name: 'layers\\.\\d+$'}}\n"
        "  replace: {{class: default, kwargs: {{device: cuda}}}}\n"
        "- match: {{name: 'experts$'}}\n"
        "  replace: {{class: default, kwargs: {{device: cpu, gpu_experts: 0}}}}\n",
        name, kwargs);
    std::vector<std::vector<int>> out(4);
    for (const DecidedModule& module : model.decide(parse_rules(rules, "r"), {}, false, {}).modules)
      if (module.kind == ModuleKind::kExperts) out[static_cast<size_t>(module.layer)] = module.on_gpu;
    return out;
  };
  using Ids = std::vector<std::vector<int>>;
  const std::vector<int> all = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(on_gpu("gpu_experts: 2"), (Ids{{}, {0, 1}, {0, 1}, {}}));
  EXPECT_EQ(on_gpu("gpu_experts: '25%', strategy: front-loading"), (Ids{{}, {0, 1, 2, 3}, {}, {}}));
  EXPECT_EQ(on_gpu("gpu_experts: [7, 3]"), (Ids{{}, {3, 7}, {3, 7}, {}}));
  EXPECT_EQ(on_gpu("device: cuda"), (Ids{{}, all, all, {}}));
  EXPECT_EQ(on_gpu("device: cuda", "layers\\.1\\.mlp\\.experts\\.(2|5)$"), (Ids{{}, {2, 5}, {}, {}}));
  const auto refused = [&](const char* kwargs) { return error_of([&] { on_gpu(kwargs); }); };
  EXPECT_EQ(refused("gpu_experts: 9"), "r:2: rule 1: kwargs: gpu_experts: 9 of 8 experts a layer");
  EXPECT_EQ(refused("gpu_experts: [8]"),
            "r:2: rule 1: kwargs: gpu_experts: expected numbers of experts, 0 to 7, found 8");
  EXPECT_EQ(refused("gpu_experts: [1, 1]"), "r:2: rule 1: kwargs: gpu_experts: expert 1 is named twice");
  EXPECT_THAT(refused("gpu_experts: 1, device: cuda"),
              HasSubstr("copies are of experts that lie on the CPU"));
  EXPECT_THAT(refused("gpu_experts: 1, strategy: unifrom"),
              HasSubstr("unknown placement strategy 'unifrom'"));
}

}  // namespace
}  // namespace kt::inline models
