// A model one layer at a time, over activations that the caller keeps: for work that has to see what goes
// into a layer's matrices and puts others in their place (calibration). Routed experts are the caller's
// business.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "models/transformer.h"

namespace kt {

struct TransformerLoader;
enum class AttentionInput : uint8_t;

// Matrices of attention that multiply the same rows [tokens, k].
struct AttentionStage {
  AttentionInput input;
  int64_t k = 0;
  std::vector<std::string> modules;
  std::vector<int64_t> n;  // their rows
};

// The gated MLP that every token visits: a dense layer's own, or the shared expert.
struct DenseModules {
  std::string modules[3];  // gate, up, down
  int64_t inter = 0;
  Activation activation;
};

class LayerWalk {
 public:
  // Reads headers only. `owner` says which tensors are routed experts', so that they are left alone; null for
  // a dense model. options.max_tokens bounds one call; checkpoint and owner must outlive this.
  LayerWalk(const Checkpoint& checkpoint, ModelSpec spec, std::shared_ptr<Pool> pool,
            const ExpertSource* owner, const TransformerOptions& options);
  ~LayerWalk();

  const ModelSpec& spec() const { return spec_; }
  // Of any layer: matrices outside of routed experts, in the order of computing.
  std::vector<AttentionStage> stages(int layer) const;
  std::optional<DenseModules> dense(int layer) const;
  // A matrix as the checkpoint has it.
  std::unique_ptr<StoredMatrix> stored(const std::string& module) const;

  // x: [tokens, hidden]. Error for an id outside of the vocabulary.
  void embed(std::span<const int32_t> tokens, float* x) const;
  // Reads and packs layer `layer` but for its routed experts, and forgets the one before. `rounding` may put
  // other matrices in the place of attention's and of the dense MLP's; it is asked now and by reload...().
  void open(int layer, MatrixRounding rounding = {});
  // Asks and reads again: matrices that were replaced since.
  void reload(AttentionInput stage);
  void reload_dense();

  // Rows of whole sequences, one after the other, each from position 0.
  struct Rows {
    std::span<const int> lengths;  // of the sequences
    float* x = nullptr;            // [tokens, hidden]: the layer's input, then with attention added
    float* normed = nullptr;       // [tokens, hidden] out: what experts and dense MLPs see
    int32_t* ids = nullptr;        // [tokens, top_k] out, where the layer routes: as ForwardArgs
    float* weights = nullptr;      // [tokens, top_k] out
  };
  void attend(const Rows& rows);
  // Attention as far as that stage: see(rows, stride) gets what its matrices multiply. rows.x stays as it is;
  // the others are not used.
  void visit(const Rows& rows, AttentionInput stage,
             const std::function<void(const float* rows, int64_t stride)>& see);
  // Adds the dense MLP or the shared expert, where the layer has one: x += mlp(normed).
  void add_dense(int tokens, const float* normed, float* x);
  // [tokens] factors that its output gets there: 1 but for shared experts with a gate.
  void dense_scale(int tokens, const float* normed, float* factors);

 private:
  void run_attention(const Rows& rows);

  const ModelSpec spec_;
  int layer_ = -1;
  std::unique_ptr<Transformer::State> state_;  // of a model with one layer, the open one
  std::unique_ptr<TransformerLoader> loader_;
  std::unique_ptr<KvCache> cache_;
};

}  // namespace kt
