// A low-rank adapter (LoRA) on disk, W' = W + scale * B A: a folder that PEFT saved, in either of its layouts of
// experts, or a GGUF file of llama.cpp's. Factors are asked for by modules; what nobody asked for is told.
#pragma once
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weights/checkpoint.h"
#include "weights/experts.h"
#include "weights/lora/lora_view.h"

namespace kt::inline weights {

// Of one matrix [out, in]: a [rank, in], b [out, rank]. Of all experts of a layer: the same one after the other.
struct LowRankFactors {
  int rank = 0;  // 0: none
  float scale = 1;
  std::vector<float> a, b;
};

// gate_up: its b has gate's rows first. Where gate and up have factors of their own, rank is the sum of theirs and
// b has zeros where one does not meet the other.
struct ExpertFactors {
  LowRankFactors gate_up, down;
};

struct ExpertSizes {
  int experts = 0, hidden = 0, inter = 0;
};

// Of one matrix, where they lie in the adapter's files: for conversions, which hold many and read each when they need
// it.
struct FactorViews {
  int rank = 0;
  float scale = 1;
  double alpha = 1;            // scale * rank, before it was rounded
  LoraView a, b;               // [rank, in], [out, rank]; live as long as the file
  std::string a_name, b_name;  // for errors
};

// Heads of the model's attention, by which q and k of some GGUF files are stored; 0: not known.
struct AttentionHeads {
  int64_t q = 0, kv = 0;
};

AttentionHeads attention_heads(const Json& config);

class LoraFile {
 public:
  // A folder with adapter_config.json, or a .gguf file, whose names of tensors are those of one of `families`.
  // Errors name file, key or tensor: what is not a LoRA adapter, or one of a kind that is not read (DoRA, trained
  // biases, modules saved whole).
  LoraFile(const std::string& path, GgufFamilies families, const AttentionHeads& heads = {});
  ~LoraFile();
  LoraFile(LoraFile&&) noexcept;

  const std::string& path() const;
  // Of a module by its published name, "model.layers.3.self_attn.q_proj", whatever stands before "layers."; none where
  // the adapter has none. Errors name the tensor and both shapes.
  std::optional<LowRankFactors> linear(std::string_view module, int64_t n, int64_t k) const;
  // Of the three modules of a gated MLP, gate, up and down: those of one expert.
  std::optional<ExpertFactors> mlp(const std::array<std::string, 3>& modules, int hidden, int inter) const;
  // Of a layer's routed experts.
  std::optional<ExpertFactors> experts(int layer, const ExpertSizes& sizes) const;
  // The same of one matrix [n, k] of an adapter in a folder, by its module's published name, which may be one of the
  // routed experts' (of so many): "model.layers.3.mlp.experts.7.up_proj". Not read yet, but as taken.
  std::optional<FactorViews> stored(std::string_view module, int64_t n, int64_t k, int experts) const;
  std::vector<std::string> modules() const;  // all that are no routed experts', from "layers." on
  std::vector<int> expert_layers() const;    // layers whose routed experts have factors
  // An Error that names those tensors that none of the calls so far asked for: they are another model's; or a module
  // that was asked for and has none, where other layers' have, unless the adapter's configuration says that only some
  // layers are trained.
  void check_all_taken() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kt::inline weights
