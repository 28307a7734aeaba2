// A model one layer at a time, over activations that the caller keeps: for work that has to see what goes
// into a layer's experts and puts others in their place (calibration). Routed experts are the caller's
// business.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

#include "models/transformer.h"

namespace kt {

struct TransformerLoader;

class LayerWalk {
 public:
  // Reads headers only. `owner` says which tensors are routed experts', so that they are left alone; null for
  // a dense model. options.max_tokens bounds one call; checkpoint and owner must outlive this.
  LayerWalk(const Checkpoint& checkpoint, ModelSpec spec, std::shared_ptr<Pool> pool,
            const ExpertSource* owner, const TransformerOptions& options);
  ~LayerWalk();

  const ModelSpec& spec() const { return spec_; }
  // x: [tokens, hidden]. Error for an id outside of the vocabulary.
  void embed(std::span<const int32_t> tokens, float* x) const;
  // Reads and packs layer `layer` but for its routed experts, and forgets the one before.
  void open(int layer);

  // Rows of whole sequences, one after the other, each from position 0.
  struct Rows {
    std::span<const int> lengths;  // of the sequences
    float* x = nullptr;            // [tokens, hidden]: the layer's input, then with attention added
    float* normed = nullptr;       // [tokens, hidden] out: what experts and dense MLPs see
    int32_t* ids = nullptr;        // [tokens, top_k] out, where the layer routes: as ForwardArgs
    float* weights = nullptr;      // [tokens, top_k] out
  };
  void attend(const Rows& rows);
  // Adds the dense MLP or the shared expert, where the layer has one: x += mlp(normed).
  void add_dense(int tokens, const float* normed, float* x);

 private:
  const ModelSpec spec_;
  int layer_ = -1;
  std::unique_ptr<Transformer::State> state_;  // of a model with one layer, the open one
  std::unique_ptr<TransformerLoader> loader_;
  std::unique_ptr<KvCache> cache_;
};

}  // namespace kt
