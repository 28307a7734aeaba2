#include "models/operators.h"

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "formats/known_formats.h"
#include "text/shown.h"

namespace kt::inline models {
namespace {

// Classes: <family><suffix>, as modeling files call them, and names of their own.
struct ClassPrefix {
  std::string_view prefix;
  std::vector<std::string_view> families;  // none: no model of these runs here
  bool mlp_routes = false;                 // its MLP is the block of experts
};
const std::vector<ClassPrefix>& class_prefixes() {
  static const std::vector<ClassPrefix> all = {
      {"DeepseekV2", {"deepseek_v2"}},
      {"DeepseekV3", {"deepseek_v3", "kimi_k2", "kimi_k25"}},
      {"DeepseekV32", {"deepseek_v32"}},
      {"Dots1", {"dots1"}},
      {"Ernie4_5_Moe", {"ernie4_5_moe"}},
      {"Gemma4", {"gemma4", "gemma4_text"}},
      {"Gemma4Text", {"gemma4", "gemma4_text"}},
      {"Glm4Moe", {"glm4_moe"}},
      {"Glm4MoeLite", {"glm4_moe_lite"}},
      {"GlmMoeDsa", {"glm_moe_dsa"}},
      {"GptOss", {"gpt_oss"}, true},
      {"HYV3", {"hy_v3"}},
      {"Llama", {"llama"}},
      {"Llama4", {"llama4", "llama4_text"}},
      {"Llama4Text", {"llama4", "llama4_text"}},
      {"MiniMaxM2", {"minimax_m2"}},
      {"Mistral4", {"mistral4"}},
      {"Mixtral", {"mixtral"}},
      {"Qwen2Moe", {"qwen2_moe"}},
      {"Qwen3", {"qwen3"}},
      {"Qwen3Moe", {"qwen3_moe"}},
      {"SolarOpen", {"solar_open"}},
      {"Qwen3Next", {"qwen3_next"}},
      {"Qwen3_5", {"qwen3_5", "qwen3_5_text"}},
      {"Qwen3_5Moe", {"qwen3_5_moe", "qwen3_5_moe_text"}},
      {"Smallthinker", {"smallthinker"}},
      {"SmallThinker", {"smallthinker"}},
  };
  return all;
}

struct ClassSuffix {
  std::string_view suffix;
  ModuleKind kind;
};
constexpr ClassSuffix kClassSuffixes[] = {
    {"ForCausalLM", ModuleKind::kModel},
    {"Model", ModuleKind::kDecoder},
    {"DecoderLayer", ModuleKind::kLayer},
    {"Attention", ModuleKind::kAttention},
    {"SdpaAttention", ModuleKind::kAttention},
    {"FlashAttention2", ModuleKind::kAttention},
    {"MLP", ModuleKind::kMlp},
    {"MoE", ModuleKind::kMoe},
    {"Moe", ModuleKind::kMoe},
    {"SparseMoeBlock", ModuleKind::kMoe},
    {"MoeBlock", ModuleKind::kMoe},
    {"DenseMlpBlock", ModuleKind::kMlp},
    {"GatedDeltaNet", ModuleKind::kRecurrent},
    {"Indexer", ModuleKind::kIndexer},
    {"TopkRouter", ModuleKind::kRouter},
    {"TopKRouter", ModuleKind::kRouter},
    {"Router", ModuleKind::kRouter},
    {"Experts", ModuleKind::kExperts},
    {"RMSNorm", ModuleKind::kNorm},
    {"RMSNormGated", ModuleKind::kGatedNorm},
    {"RotaryEmbedding", ModuleKind::kRotary},
    {"YarnRotaryEmbedding", ModuleKind::kRotary},
};

struct OtherClass {
  std::string_view name;
  ModuleKind kind;
  std::string_view prefix;  // of the families that have it; empty: all
};
constexpr OtherClass kOtherClasses[] = {
    {"Linear", ModuleKind::kLinear, ""},
    {"Embedding", ModuleKind::kEmbedding, ""},
    {"ModuleList", ModuleKind::kList, ""},
    {"LayerNorm", ModuleKind::kLayerNorm, "DeepseekV32"},
    {"LayerNorm", ModuleKind::kLayerNorm, "GlmMoeDsa"},
    {"MoEGate", ModuleKind::kRouter, "DeepseekV2"},
    {"MoEGate", ModuleKind::kRouter, "DeepseekV3"},
    {"Qwen2MoeRotaryEmbedding", ModuleKind::kRotary, "Qwen3Moe"},  // files for Qwen3 name it so
};

bool is_prefix_of(const ClassPrefix& prefix, std::string_view family) {
  return std::ranges::find(prefix.families, family) != prefix.families.end();
}

std::vector<std::string> known_classes() {
  std::vector<std::string> out = {"Module"};
  for (const OtherClass& other : kOtherClasses) out.emplace_back(other.name);
  for (const ClassPrefix& prefix : class_prefixes())
    for (const ClassSuffix& suffix : kClassSuffixes)
      out.push_back(text("{}{}", prefix.prefix, suffix.suffix));
  return out;
}

// Operators, by what they replace.
struct OperatorRow {
  std::string_view name;
  Replaces what;
  std::string_view op = {};      // generate_op where a rule is silent
  std::string_view device = {};  // generate_device where a rule is silent
};
constexpr OperatorRow kOperators[] = {
    {"default", Replaces::kAnything},
    {"KTransformersLinear", Replaces::kLinears, "KLinearMarlin", "cuda"},
    {"KTransformersLinearW8A8A2", Replaces::kLinears, "KLinearTorchW8A8A2", "npu"},
    {"KTransformersExperts", Replaces::kExperts, "KExpertsCPU", "cpu"},
    {"KTransformersExpertsV2", Replaces::kExperts, "KExpertsCPU", "cpu"},
    {"KTransformersExpertsW8A8", Replaces::kExperts, "KExpertsCPUW8A8", "cpu"},
    {"KExpertsCPU", Replaces::kExperts, "KExpertsCPU", "cpu"},
    {"KExpertsCPUW8A8", Replaces::kExperts, "KExpertsCPUW8A8", "cpu"},
    {"KGlm4Experts", Replaces::kExperts, "KExpertsCPU", "cpu"},
    {"KSmallthinkerExperts", Replaces::kExperts, "KExpertsCPU", "cpu"},
    {"KDeepseekV2Attention", Replaces::kAttention},
    {"KDeepseekV2AttentionW8A8A2", Replaces::kAttention},
    {"KDeepseekV2AttentionW8A8A2Serve", Replaces::kAttention},
    {"flashinfer_attn", Replaces::kAttention},
    {"KQwen2MoeAttention", Replaces::kAttention},
    {"KQwen3MoeAttention", Replaces::kAttention},
    {"KQwen3MoeAttentionIPEXLLM", Replaces::kAttention},
    {"KQwen3MoeAttentionW8A8A2Serve", Replaces::kAttention},
    {"KQwen3NextAttention", Replaces::kAttention},
    {"KQwen3NextGatedDeltaNet", Replaces::kAttention},
    {"KGlm4MoeAttention", Replaces::kAttention},
    {"KSmallthinkerAttention", Replaces::kAttention},
    {"KLlamaAttention", Replaces::kAttention},
    {"KDeepseekV2MoE", Replaces::kBlocks},
    {"KDeepseekV3MoE", Replaces::kBlocks},
    {"KDeepseekV3MoEV2", Replaces::kBlocks},
    {"KDeepseekV3MoEW8A8", Replaces::kBlocks},
    {"KQwen2MoeSparseMoeBlock", Replaces::kBlocks},
    {"KQwen2MoeSparseMoeBlockV2", Replaces::kBlocks},
    {"KQwen3MoeSparseMoeBlock", Replaces::kBlocks},
    {"KQwen3MoeSparseMoeBlockV2", Replaces::kBlocks},
    {"KQwen3MoeSparseMoeBlockW8A8", Replaces::kBlocks},
    {"KQwen3NextSparseMoeBlockV2", Replaces::kBlocks},
    {"KMistralSparseMoEBlock", Replaces::kBlocks},
    {"KGlm4MoeMoE", Replaces::kBlocks},
    {"KSmallthinkerMoeBlock", Replaces::kBlocks},
    {"KSmallthinkerDenseMlpBlock", Replaces::kBlocks},
    {"KMoEGate", Replaces::kBlocks},
    {"KMoEGateIPEXLLM", Replaces::kBlocks},
    {"KDeepseekV3GateA2", Replaces::kBlocks},
    {"RMSNorm", Replaces::kBlocks},
    {"KDeepseekRMSNormIPEXLLM", Replaces::kBlocks},
    {"KDeepseekV3RMSNormW8A8", Replaces::kBlocks},
    {"KQwen2MoeRMSNorm", Replaces::kBlocks},
    {"KQwen3MoeRMSNorm", Replaces::kBlocks},
    {"KQwen3MoeRMSNormW8A8", Replaces::kBlocks},
    {"KQwen3NextRMSNorm", Replaces::kBlocks},
    {"KGlm4MoeRMSNorm", Replaces::kBlocks},
    {"KSmallthinkerRMSNorm", Replaces::kBlocks},
    {"kDeepseekV3MLP", Replaces::kBlocks},
    {"KDeepseekV3MLPW8A8A2V1", Replaces::kBlocks},
    {"KDeepseekV3MLPW8A8A2V2", Replaces::kBlocks},
    {"KQwen2MoeMLP", Replaces::kBlocks},
    {"KGlm4MoeMLP", Replaces::kBlocks},
    {"RotaryEmbedding", Replaces::kBlocks},
    {"RotaryEmbeddingV2", Replaces::kBlocks},
    {"RotaryEmbeddingV3", Replaces::kBlocks},
    {"RotaryEmbeddingV4", Replaces::kBlocks},
    {"YarnRotaryEmbedding", Replaces::kBlocks},
    {"YarnRotaryEmbeddingV3", Replaces::kBlocks},
    {"KQwen3MoeRotaryEmbedding", Replaces::kBlocks},
    {"KGlm4MoeRotaryEmbedding", Replaces::kBlocks},
    {"KSmallthinkerRotaryEmbedding", Replaces::kBlocks},
    {"KDeepseekV2Model", Replaces::kModels},
    {"KQwen2MoeModel", Replaces::kModels},
    {"KQwen3MoeModel", Replaces::kModels},
    {"KLlamaModel", Replaces::kModels},
};

// What a linear or experts may be run by, and the format that asks for: "stored", a name, or "int4" with the group
// that the rule has.
struct OperationRow {
  std::string_view name;
  Replaces what;
  std::string_view format;
  bool cpu_only = false;
};
constexpr OperationRow kOperations[] = {
    {"KLinearMarlin", Replaces::kLinears, "marlin"},
    {"VLinearMarlin", Replaces::kLinears, "marlin"},
    {"QuantizedLinearMarlin", Replaces::kLinears, "marlin"},
    {"KLinearTorch", Replaces::kLinears, "stored"},
    {"KLinearCPUInfer", Replaces::kLinears, "stored", true},
    {"KLinearFP8", Replaces::kLinears, "fp8"},
    {"KLinearQ8", Replaces::kLinears, "int8"},
    {"KLinearTorchW8A8A2", Replaces::kLinears, "int8"},
    {"KLinearIPEXLLM", Replaces::kLinears, "int4_g64"},
    {"KExpertsCPU", Replaces::kExperts, "stored", true},
    {"KSFTExpertsCPU", Replaces::kExperts, "stored", true},
    {"MLPCPUExperts", Replaces::kExperts, "stored", true},
    {"KExpertsCPUW8A8", Replaces::kExperts, "int8", true},
    {"KExpertsMarlin", Replaces::kExperts, "marlin"},
    {"MLPCUDAExperts", Replaces::kExperts, "marlin"},
    {"KExpertsTorch", Replaces::kExperts, "stored"},
};

// Arguments, by the operators that take them.
enum class KwargType : uint8_t {
  kDevice,
  kOperation,
  kBackend,
  kFormat,
  kBoolean,
  kInteger,
  kText,
  kDevices,
  kAny
};
struct KwargRow {
  std::string_view name;
  KwargType type;
  std::vector<Replaces> of = {};  // none: any operator
};
const std::vector<KwargRow>& kwarg_rows() {
  using enum Replaces;
  static const std::vector<KwargRow> all = {
      {"generate_device", KwargType::kDevice},
      {"prefill_device", KwargType::kDevice},
      {"device", KwargType::kDevice},
      {"format", KwargType::kFormat},
      {"dump_enable", KwargType::kBoolean},
      {"dump_dir", KwargType::kText},
      {"generate_op", KwargType::kOperation, {kLinears, kExperts}},
      {"prefill_op", KwargType::kOperation, {kLinears, kExperts}},
      {"out_device", KwargType::kDevice, {kLinears, kExperts}},
      {"num_bits", KwargType::kInteger, {kLinears}},
      {"group_size", KwargType::kInteger, {kLinears}},
      {"act_order", KwargType::kBoolean, {kLinears}},
      {"is_k_full", KwargType::kBoolean, {kLinears}},
      {"stride", KwargType::kInteger, {kLinears}},
      {"group_max_len", KwargType::kInteger, {kLinears}},
      {"block_size", KwargType::kInteger, {kLinears}},
      {"precision", KwargType::kText, {kLinears}},
      {"backend", KwargType::kBackend, {kExperts}},
      {"rounds_again", KwargType::kBoolean},
      {"gpu_experts", KwargType::kAny, {kExperts, kAnything}},
      {"strategy", KwargType::kText, {kExperts, kAnything}},
      {"statistics", KwargType::kText, {kExperts, kAnything}},
      {"prefill", KwargType::kText, {kExperts, kAnything}},
      {"chunck_size", KwargType::kInteger, {kAttention}},
      {"absorb_for_prefill", KwargType::kBoolean, {kAttention}},
      {"per_layer_prefill_intput_threshold", KwargType::kInteger, {kModels}},
      {"prefill_threshold", KwargType::kInteger, {kModels, kAnything}},
      {"transfer_map", KwargType::kDevices, {kModels}},
  };
  return all;
}

// Of experts: what AMX kernels are called, and the rest of the formats by their own names.
std::optional<std::string> backend_format(std::string_view backend) {
  constexpr std::pair<std::string_view, std::string_view> kBackends[] = {
      {"llamafile", "stored"}, {"AMXBF16", "bf16"}, {"AMXInt8", "int8"}, {"AMXInt4", "int4"}};
  for (const auto& [name, format] : kBackends)
    if (name == backend) return std::string(format);
  const auto found = std::ranges::find(kFormats, backend, &NamedFormat::name);
  return found == kFormats.end() ? std::nullopt : std::optional<std::string>(backend);
}

template <typename Rows>
std::vector<std::string> names_of(const Rows& rows) {
  std::vector<std::string> out;
  for (const auto& row : rows) out.emplace_back(row.name);
  return out;
}

// The arguments of one rule, checked.
class KwargReader {
 public:
  KwargReader(const RuleFile& file, const Rule& rule, const OperatorRow& row)
      : file_(file), rule_(rule), row_(row) {}

  OperatorUse read() const {
    for (const auto& [name, value] : rule_.kwargs.items()) check(row_of(name), value);
    OperatorUse use{.name = std::string(row_.name), .what = row_.what};
    use.rounds_again = rule_.kwargs.value("rounds_again", false);
    use.device = file_.device(word("generate_device", word("device", "")));
    if (row_.what != Replaces::kLinears && row_.what != Replaces::kExperts) {
      use.format = word("format", "");
      return use;
    }
    use.op = word("generate_op", row_.op);
    const auto op = std::ranges::find(kOperations, use.op, &OperationRow::name);
    if (use.op == "None") return use;
    const std::string device = use.device.empty() ? file_.device(row_.device) : use.device;
    if (op->cpu_only && device != "cpu")
      bad(rule_.kwargs.contains("generate_device") ? "generate_device" : "generate_op",
          text("{} runs on the cpu, found {}", use.op, device));
    use.device = device;
    use.format = word("format", op->format == "marlin" ? marlin_format() : std::string(op->format));
    if (rule_.kwargs.contains("backend") && op->cpu_only && !rule_.kwargs.contains("format"))
      use.format = *backend_format(word("backend", ""));
    return use;
  }

 private:
  [[noreturn]] void bad(const std::string& kwarg, const std::string& what) const {
    fail("{}: kwargs: {}: {}", file_.place(rule_, rule_.line_of_kwarg(kwarg)), shown(kwarg), what);
  }
  [[noreturn]] void unknown(const std::string& kwarg, std::string_view what, const std::string& found,
                            const std::vector<std::string>& known) const {
    bad(kwarg, text("no {} \"{}\"; the nearest is {}", what, shown(found), nearest_name(found, known)));
  }

  std::string word(const char* kwarg, std::string_view otherwise) const {
    const auto found = rule_.kwargs.find(kwarg);
    return found == rule_.kwargs.end() ? std::string(otherwise) : found->get<std::string>();
  }

  // Below 6 bits a source stays as it is; that is for who knows the source.
  std::string marlin_format() const {
    if (rule_.kwargs.value("num_bits", 4) == 8) return "int8";
    const int group = rule_.kwargs.value("group_size", 64);
    const std::string name = group < 0 ? "int4" : text("int4_g{}", group);
    if (std::ranges::find(kFormats, name, &NamedFormat::name) == kFormats.end())
      bad("group_size", text("no format of 4 bits in groups of {}", group));
    return name;
  }

  const KwargRow& row_of(const std::string& name) const {
    std::vector<std::string> taken;
    for (const KwargRow& row : kwarg_rows()) {
      if (!row.of.empty() && std::ranges::find(row.of, row_.what) == row.of.end()) continue;
      if (row.name == name) return row;
      taken.emplace_back(row.name);
    }
    bad(name, text("{} takes no such argument; the nearest is {}", row_.name, nearest_name(name, taken)));
  }

  void check_device(const std::string& kwarg, const Json& value) const {
    if (!value.is_string()) bad(kwarg, text("expected a device, found {}", json_kind(value)));
    const std::string found = value.get<std::string>();
    if (!is_device(found)) unknown(kwarg, "device", found, {"cpu", "cuda", "cuda:0", "cuda:1"});
  }

  void check(const KwargRow& row, const Json& value) const {
    const std::string name(row.name);
    const auto expect = [&](bool right, std::string_view what) {
      if (!right) bad(name, text("expected {}, found {}", what, json_kind(value)));
    };
    switch (row.type) {
      case KwargType::kAny:
        return expect(!value.is_null() && !value.is_object(), "a number, a percentage or a list of them");
      case KwargType::kBoolean:
        return expect(value.is_boolean(), "true or false");
      case KwargType::kInteger:
        return expect(value.is_number_integer() && value >= -1 && value <= 1 << 30, "a number");
      case KwargType::kText:
        return expect(value.is_string(), "text");
      case KwargType::kDevice:
        return check_device(name, value);
      case KwargType::kDevices:
        expect(value.is_object(), "a mapping of layers to devices");
        for (const auto& [layer, device] : value.items()) {
          if (layer.empty() || layer.size() > 5 || layer.find_first_not_of("0123456789") != layer.npos)
            bad(name, text("expected the number of a layer, found \"{}\"", shown(layer)));
          check_device(name, device);
        }
        return;
      default:
        expect(value.is_string(), "text");
        return check_name(row, name, value.get<std::string>());
    }
  }

  void check_name(const KwargRow& row, const std::string& kwarg, const std::string& found) const {
    if (row.type == KwargType::kFormat) {
      if (found == "stored" || std::ranges::find(kFormats, found, &NamedFormat::name) != kFormats.end())
        return;
      unknown(kwarg, "format", found, names_of(kFormats));
    }
    if (row.type == KwargType::kBackend) {
      if (backend_format(found)) return;
      std::vector<std::string> known = names_of(kFormats);
      known.insert(known.end(), {"llamafile", "AMXBF16", "AMXInt8", "AMXInt4"});
      unknown(kwarg, "backend", found, known);
    }
    std::vector<std::string> known = {"None"};
    for (const OperationRow& each : kOperations)
      if (each.what == row_.what) known.emplace_back(each.name);
    if (std::ranges::find(known, found) == known.end()) unknown(kwarg, "operation", found, known);
  }

  const RuleFile& file_;
  const Rule& rule_;
  const OperatorRow& row_;
};

}  // namespace

std::string_view last_word(std::string_view dotted) { return dotted.substr(dotted.rfind('.') + 1); }

bool MatchedClass::matches(ModuleKind kind) const {
  return state == State::kAny || std::ranges::find(kinds, kind) != kinds.end();
}

MatchedClass matched_class(std::string_view dotted, std::string_view family) {
  const std::string_view word = last_word(dotted);
  using State = MatchedClass::State;
  MatchedClass out;
  if (word == "Module") return {.state = State::kAny};
  const auto add = [&](ModuleKind kind, bool here) {
    out.state = here || out.state == State::kHere ? State::kHere : State::kElsewhere;
    if (here) out.kinds.push_back(kind);
  };
  for (const ClassPrefix& prefix : class_prefixes()) {
    const bool here = is_prefix_of(prefix, family);
    for (const OtherClass& other : kOtherClasses)
      if (other.name == word && other.prefix == prefix.prefix) add(other.kind, here);
    if (!word.starts_with(prefix.prefix)) continue;
    const auto found =
        std::ranges::find(kClassSuffixes, word.substr(prefix.prefix.size()), &ClassSuffix::suffix);
    if (found == std::end(kClassSuffixes)) continue;
    add(prefix.mlp_routes && found->kind == ModuleKind::kMlp ? ModuleKind::kMoe : found->kind, here);
  }
  for (const OtherClass& other : kOtherClasses)
    if (other.name == word && other.prefix.empty()) add(other.kind, true);
  if (out.state == State::kUnknown) out.nearest = nearest_name(word, known_classes());
  return out;
}

bool is_operator(std::string_view dotted) {
  return std::ranges::find(kOperators, last_word(dotted), &OperatorRow::name) != std::end(kOperators);
}

OperatorUse operator_use(const RuleFile& file, const Rule& rule) {
  const std::string_view word = last_word(rule.replace);
  if (rule.own) {
    // Of a caller's operator only the device is ours to know.
    OperatorUse use{.name = std::string(word)};
    for (const char* kwarg : {"generate_device", "device"})
      if (const auto found = rule.kwargs.find(kwarg); use.device.empty() && found != rule.kwargs.end())
        if (found->is_string() && is_device(found->get<std::string>()))
          use.device = file.device(found->get<std::string>());
    return use;
  }
  const auto row = std::ranges::find(kOperators, word, &OperatorRow::name);
  if (row == std::end(kOperators))
    fail("{}: replace: class: no operator \"{}\"; the nearest is {}",
         file.place(rule, rule.lines.of("replace").of("class").line), shown(word),
         nearest_name(word, names_of(kOperators)));
  return KwargReader(file, rule, *row).read();
}

}  // namespace kt::inline models
