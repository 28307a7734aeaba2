// What a LoraFile holds: the pairs of factors in its files, by what they belong to. For the files beside this one that
// answer for it.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "text/json.h"
#include "text/regex.h"
#include "weights/lora/lora_file.h"

namespace kt::inline weights {

// Which matrix a pair of factors belongs to: a module, or a projection of an expert.
struct LoraTarget {
  std::string module = {};                    // from "layers." on
  int layer = -1;                             // of experts
  int expert = -1;                            // -1: all of them together
  std::optional<Projection> projection = {};  // none: gate and up together, or told by shapes
  auto key() const { return std::tie(module, layer, expert, projection); }
  bool operator<(const LoraTarget& other) const { return key() < other.key(); }
};

struct LoraPair {
  const Tensor *a = nullptr, *b = nullptr;
  std::string name = {};  // the module's as PEFT's patterns meet it
  int file = 0;           // which of the adapter's
};

// Of a config.json, or of the text model's part in it.
std::optional<int64_t> number_in_config(const Json& config, const char* key);
// "language_model.model.layers.3.mlp" as "layers.3.mlp".
std::string_view from_layers(std::string_view module);
// "layers.3.mlp.experts", ".base_layer" behind it, or ".7.gate_proj": whose experts that is; nothing for a module.
std::optional<LoraTarget> expert_target(std::string_view module);

struct LoraFile::State {
  std::string path;
  std::vector<Checkpoint> files;
  const GgufFamily* family = nullptr;
  double alpha = 0;
  bool rank_stabilised = false;
  std::vector<std::pair<Regex, double>> alphas;  // of modules whose names match, in order
  std::map<LoraTarget, LoraPair> pairs;
  std::map<int, std::vector<const LoraPair*>> fused_pairs;  // of all experts of a layer, by layers
  AttentionHeads heads;                                     // of the model
  mutable std::set<const Tensor*> taken;
  bool every_layer = false;                  // it says of no module that only some layers' have factors
  mutable std::vector<std::string> lacking;  // modules that were asked for and have none

  void open_folder();
  void read_config(const std::string& file);
  void read_patterns(const Json& config, const std::string& file);
  void open_gguf(GgufFamilies families);
  void add(const LoraTarget& target, char factor, const Tensor& tensor, std::string name, int file);
  void add_peft(const Tensor& tensor, int file);
  void add_fused(const Tensor& tensor, int file);
  void add_gguf(const Tensor& tensor);
  void order_rows(std::string_view module, const LoraPair& pair, LowRankFactors& factors) const;
  std::optional<LowRankFactors> joined_halves(const std::string& module, int64_t n, int64_t k) const;
  double alpha_of(const LoraPair& pair, std::string_view parameter) const;
  float scale_of(const LoraPair& pair, std::string_view parameter, int rank) const;
  std::vector<float> values(const LoraPair& pair, const Tensor& tensor) const;
  const LoraPair* find(const LoraTarget& target) const;
  void check_layers() const;
  [[noreturn]] void wrong_shape(const Tensor& tensor, const std::string& expected) const;
  LowRankFactors matrix(const LoraPair& pair, std::string_view parameter, int64_t n, int64_t k) const;
  bool is_fused(const LoraPair& pair, const ExpertSizes& sizes, bool gate_up) const;
  LowRankFactors fused(const LoraPair& pair, const char* parameter, int experts) const;
  LowRankFactors stacked(const LoraPair& pair, int experts, int64_t n, int64_t k) const;
  LowRankFactors gathered(int layer, Projection projection, int experts, int64_t n, int64_t k) const;
  FactorViews whole(const LoraPair& pair, int64_t n, int64_t k) const;
  std::optional<FactorViews> of_expert(const LoraTarget& target, int64_t n, int64_t k, int experts) const;
  FactorViews part_of(const LoraPair& pair, std::string_view parameter, const LoraView& a,
                      const LoraView& b) const;
  LowRankFactors projection_of(int layer, Projection projection, int experts, int64_t n, int64_t k) const;
};

}  // namespace kt::inline weights
