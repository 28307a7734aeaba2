#include "cli/sft/training_memory.h"

#include <algorithm>

#include "base/text.h"

namespace kt::inline cli {
namespace {

// A Python with torch, transformers and PEFT imported, as its resident size was measured.
constexpr uint64_t kPythonBytes = uint64_t{560} << 20;
// f32 value, gradient, and two moments.
constexpr uint64_t kTrainableBytes = 16;
constexpr int64_t kF32 = 4;

uint64_t bytes(int64_t count, int64_t of_each) {
  return static_cast<uint64_t>(count) * static_cast<uint64_t>(of_each);
}

// One layer's inputs and outputs of matrices in torch, a token: what its backward keeps.
int64_t widest_layer(const ModuleTree& tree, const ModelSpec& spec) {
  std::vector<int64_t> sums(spec.layers.size());
  for (const ModelModule& module : tree.modules)
    if (module.kind == ModuleKind::kLinear && module.layer >= 0)
      sums[static_cast<size_t>(module.layer)] += module.n + module.k;
  return sums.empty() ? 0 : *std::ranges::max_element(sums);
}

// Of one layer's experts: input and output rows, gate and up of each token's experts, ids and weights, and the
// low-rank products.
uint64_t record_bytes(const ModelSpec& spec, const TrainingLoad& load) {
  const MoeSpec& moe = *spec.moe();
  const int64_t pairs = load.tokens() * moe.top_k;
  const int64_t kept = load.retain ? 2 * moe.inter * load.expert_bytes : 0;
  return bytes(load.tokens(), 2 * spec.hidden * load.torch_bytes) + bytes(pairs, kept + 16) +
         (load.experts_trained ? bytes(pairs, 2 * load.rank * kF32) : 0);
}

}  // namespace

uint64_t expert_parameters(const ModelSpec& spec) {
  uint64_t out = 0;
  for (const LayerSpec& layer : spec.layers)
    if (const MoeSpec* const moe = layer.moe())
      out += 3 * static_cast<uint64_t>(moe->experts) * static_cast<uint64_t>(moe->inter) *
             static_cast<uint64_t>(spec.hidden);
  return out;
}

uint64_t dense_parameters(const ModelSpec& spec, const ModuleTree& tree) {
  uint64_t out = 0;
  for (const ModelModule& module : tree.modules) {
    if (module.part == ModulePart::kExperts) continue;
    if (module.part == ModulePart::kHead && spec.tied_embeddings) continue;
    out +=
        bytes(module.n, std::max<int64_t>(module.k, 1)) + (module.bias ? static_cast<uint64_t>(module.n) : 0);
  }
  return out;
}

TrainingMemory training_memory(const ModelSpec& spec, const ModuleTree& tree, const TrainingLoad& load) {
  TrainingMemory out{.experts = load.packed_experts, .process = kPythonBytes, .gpu = load.gpu};
  const auto layers = static_cast<int64_t>(spec.layers.size());
  const auto routed = std::ranges::count_if(spec.layers, [](const LayerSpec& layer) { return layer.moe(); });
  out.dense = dense_parameters(spec, tree) * static_cast<uint64_t>(load.torch_bytes);
  out.lora = kTrainableBytes * (load.trainable + load.whole);
  out.records = record_bytes(spec, load) * static_cast<uint64_t>(routed);
  const int64_t tokens = load.tokens(), one = widest_layer(tree, spec);
  // A block that runs again keeps its input; the one that is computed again has all of its own, and their gradients.
  const int64_t kept = load.checkpointing ? layers * spec.hidden + 2 * one : layers * one + one;
  out.layers = bytes(tokens, kept * load.torch_bytes);
  // The loss is of f32 copies: logits, their softmax and the gradient.
  out.logits = bytes(tokens, int64_t{spec.vocab} * (load.torch_bytes + 12));
  return out;
}

std::vector<std::pair<std::string, uint64_t>> TrainingMemory::parts() const {
  std::vector<std::pair<std::string, uint64_t>> out = {
      {"routed experts", experts},
      {"other weights", dense},
      {"LoRA, gradients, moments", lora},
      {"kept for the experts' backward", records},
      {"activations", layers},
      {"logits", logits},
      {"Python itself", process},
  };
  std::erase_if(out, [](const auto& part) { return part.second == 0; });
  return out;
}

std::string TrainingMemory::largest(int most) const {
  auto all = parts();
  std::ranges::stable_sort(all, std::greater(), &std::pair<std::string, uint64_t>::second);
  std::string out;
  for (size_t i = 0; i < std::min(all.size(), static_cast<size_t>(most)); ++i)
    out += text("{}{} {}", i == 0 ? "" : ", ", all[i].first, human_bytes(all[i].second));
  return out;
}

}  // namespace kt::inline cli
