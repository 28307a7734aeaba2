#include "weights/dialects/fused.h"

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "weights/dialects/expert_names.h"

namespace kt::inline weights {
namespace {

// Families whose fused experts are known by name, for shapes that fit both ways.
struct Family {
  std::string_view start;  // of model_type
  bool transposed;
};
constexpr Family kFamilies[] = {
    {"gpt_oss", true},   {"llama4", true},    {"qwen", false},       {"glm", false},    {"mixtral", false},
    {"deepseek", false}, {"kimi", false},     {"minimax", false},    {"dots1", false},  {"ernie", false},
    {"hy_v3", false},    {"mistral4", false}, {"solar_open", false}, {"gemma4", false},
};

const ExpertTensor* with_suffix(std::span<const ExpertTensor> tensors,
                                std::initializer_list<std::string_view> suffixes) {
  for (const ExpertTensor& entry : tensors)
    if (std::ranges::find(suffixes, entry.suffix) != suffixes.end()) return &entry;
  return nullptr;
}

// Whether [E, a, b] and [E, c, d] are gate(s) and down this way round; the config may be silent (0).
bool fits(const Tensor& gate, const Tensor& down, int64_t gates, bool transposed, const ModelConfig& config) {
  const int64_t rows = gate.shape[transposed ? 2 : 1], hidden = gate.shape[transposed ? 1 : 2];
  const int64_t down_rows = down.shape[transposed ? 2 : 1], inter = down.shape[transposed ? 1 : 2];
  return rows % gates == 0 && rows / gates == inter && hidden == down_rows &&
         (config.hidden == 0 || config.hidden == hidden) && (config.inter == 0 || config.inter == inter);
}

bool is_transposed(const Tensor& gate, const Tensor& down, int64_t gates, const ModelConfig& config) {
  for (const Tensor* tensor : {&gate, &down})
    if (tensor->shape.size() != 3)
      fail("{}: expected 3 dimensions, found {}", tensor->name, describe(*tensor));
  const bool plain = fits(gate, down, gates, false, config), turned = fits(gate, down, gates, true, config);
  if (plain != turned) return turned;
  if (!plain)
    fail("{}: {} and {} {} fit neither [E, {}I, H] nor [E, H, {}I] (config: hidden {}, inter {})", gate.name,
         describe(gate), down.name, describe(down), gates, gates, config.hidden, config.inter);
  for (const Family& family : kFamilies)
    if (config.model_type.starts_with(family.start)) return family.transposed;
  fail("{}: {} and {} {} may be either way round, and model_type '{}' does not tell", gate.name,
       describe(gate), down.name, describe(down), config.model_type);
}

}  // namespace

bool has_gate_and_up_in_turns(const ModelConfig& config) { return config.model_type == "gpt_oss"; }

FusedStyle fused_style(std::span<const ExpertTensor> gate_up, std::span<const ExpertTensor> down,
                       const ModelConfig& config) {
  FusedStyle style;
  if (gate_up.empty() || down.empty())
    return style;  // missing projections are reported by who looks for them
  const bool both = gate_up.front().part == static_cast<uint8_t>(NamedPart::kGateUp);
  const ExpertTensor* gate_weight = with_suffix(gate_up, {"", "weight"});
  const ExpertTensor* down_weight = with_suffix(down, {"", "weight"});
  const auto plain_type = [](const ExpertTensor* entry) {
    return entry && (entry->tensor->dtype == Dtype::kBf16 || entry->tensor->dtype == Dtype::kF16 ||
                     entry->tensor->dtype == Dtype::kF32 || entry->tensor->dtype == Dtype::kE4m3);
  };
  // GGUF and packed tensors have one orientation only.
  const bool gguf = gate_up.front().tensor->name.starts_with("blk.");
  if (!gguf && plain_type(gate_weight) && plain_type(down_weight))
    style.transposed = is_transposed(*gate_weight->tensor, *down_weight->tensor, both ? 2 : 1, config);
  // One family interleaves; where the config is silent its biases or its MX blocks give it away.
  const bool silent = config.model_type.empty();
  style.interleaved = both && !gguf &&
                      (has_gate_and_up_in_turns(config) || with_suffix(gate_up, {"blocks"}) ||
                       (silent && style.transposed && with_suffix(gate_up, {"bias"})));
  return style;
}

}  // namespace kt::inline weights
