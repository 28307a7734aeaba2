// From a checkpoint to weights where operations run: finds the tensors a spec asks for, checks their shapes,
// rounds them where that was asked for, and hands them to Ops in pieces.
#pragma once
#include <array>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "models/forced_routing.h"
#include "models/spec.h"
#include "nn/ops.h"
#include "weights/checkpoint.h"
#include "weights/experts.h"
#include "weights/linears.h"
#include "weights/lora/lora_file.h"
#include "weights/requantise.h"

namespace kt::inline models {

struct WeightOptions {
  Precision precision = Precision::kDefault;  // of activations
  int max_tokens = 512;                       // of one step
  // Matrices that a user may choose the rounding of are rounded to this; none: as stored.
  std::optional<Format> linear_format = {};
  LinearFormats linear_formats = {};  // in place of it: of single ones
  std::optional<ForcedRouting> routing = {};
  MatrixRounding linear_rounding = {};     // of any matrix outside of routed experts; null: as stored
  std::vector<std::vector<int>> hot = {};  // TransformerOptions'
  std::vector<std::shared_ptr<const LoraFile>> adapters = {};
};

// A gated MLP that every token visits: a dense layer's own, or the shared expert.
struct MlpModules {
  std::array<std::string, 3> modules;  // gate, up, down
  int inter = 0;
  Activation activation;
  bool bias = false;
};

class WeightLoader {
 public:
  // `routed` says which tensors are routed experts', so that they are left alone; null: none are. The
  // checkpoint, the spec and `ops` must outlive this.
  WeightLoader(const Checkpoint& checkpoint, const ModelSpec& spec, Ops& ops, WeightOptions options,
               const ExpertSource* routed);

  Ops& ops() const { return ops_; }
  const ModelSpec& spec() const { return spec_; }
  const Checkpoint& checkpoint() const { return checkpoint_; }
  const WeightOptions& options() const { return options_; }
  void set_rounding(MatrixRounding rounding) { options_.linear_rounding = std::move(rounding); }

  // Modules by the names the checkpoint has.
  std::string rooted(const std::string& name) const;
  std::string in_layer(int layer, const std::string& name) const;
  std::string head() const;

  // Errors name the tensor: missing, or of another shape than expected.
  std::unique_ptr<PlacedVector> vector(const std::string& tensor, int64_t size, double factor = 1) const;
  float number(const std::string& tensor) const;  // a tensor of one
  // What one of the model's norms multiplies by.
  std::unique_ptr<PlacedVector> norm(const std::string& module, int64_t size) const;
  // How fast states decay, below 0: -e^x of what is stored, but for GGUF files, which have the rates.
  std::unique_ptr<PlacedVector> decay_rates(const std::string& tensor, int64_t size) const;
  // A convolution of each channel by itself, stored as [channels, 1, taps] or [channels, taps]: [taps, channels].
  std::unique_ptr<PlacedVector> taps(const std::string& module, int64_t channels, int64_t taps) const;
  std::unique_ptr<StoredMatrix> matrix(const std::string& module, int64_t n, int64_t k) const;
  // A token's row of the embedding, as layers read it.
  void embed(const StoredMatrix& embedding, int64_t token, float* to) const;
  std::unique_ptr<PlacedLinear> linear(const std::string& module, int64_t n, int64_t k, bool bias = false);
  // Of scores that are compared or squashed, close numbers all: as stored, and always in f32.
  std::unique_ptr<PlacedLinear> exact_linear(const std::string& module, int64_t n, int64_t k,
                                             bool bias = false);
  std::unique_ptr<PlacedExperts> mlp(const MlpModules& of);
  // The routed experts of a layer; they have to be as many and of the size that the spec says.
  std::unique_ptr<PlacedExperts> experts(const ExpertSource& source, int layer, const MoeSpec& moe);
  // What each adapter has for a module [n, k]; rank 0 where it has nothing. Those of linear() are given to it.
  std::vector<LowRankFactors> adapters(const std::string& module, int64_t n, int64_t k) const;
  // scale * up down of these numbers, down [rank, k] and up [n, rank], in f32.
  LinearAdapter low_rank(const LowRankFactors& factors, int64_t n, int64_t k, std::string_view name) const;
  // A matrix as the checkpoint has it, whatever rounding was asked for.
  std::unique_ptr<StoredMatrix> stored(const std::string& module) const;

  // Names of all tensors that were read, as stored, but those of routed experts.
  const std::set<std::string>& read() const { return read_; }
  const std::string& root() const { return root_; }

  // The most that one worker took, or would take, while weights were read.
  size_t loading_bytes() const { return loading_bytes_; }
  void will_take(size_t bytes);
  size_t expert_bias_bytes() const { return expert_bias_bytes_; }  // of routed experts

 private:
  void find_root();
  bool has_layers() const;
  const LinearModule* find_module(const std::string& module) const;  // null: there is none
  std::optional<Format> format_of(const std::string& module) const;  // that was asked for
  std::unique_ptr<StoredMatrix> dense_matrix(const std::string& module, int64_t n, int64_t k) const;
  std::vector<float> floats(const std::string& tensor, int64_t size) const;
  std::string adapted_name(const std::string& module) const;
  void adapt(PlacedLinear& linear, const std::string& module) const;
  using FindFactors = FunctionRef<std::optional<ExpertFactors>(const LoraFile&)>;
  void adapt(PlacedExperts& experts, FindFactors find) const;
  std::unique_ptr<PlacedLinear> packed(const StoredMatrix& stored, const std::string& module, bool bias,
                                       Precision precision);
  void count_experts(const ExpertSource& source, int layer);

  const Checkpoint& checkpoint_;
  const ModelSpec& spec_;
  Ops& ops_;
  WeightOptions options_;
  std::map<std::string, LinearModule, std::less<>> modules_;  // every matrix outside routed experts
  std::string root_;  // what stands for the leading "model." of the spec's names
  mutable std::set<std::string> read_;
  size_t loading_bytes_ = 0, expert_bias_bytes_ = 0;
};

}  // namespace kt::inline models
