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

#include "models/layer.h"

namespace kt::inline models {

class LayerWalk {
 public:
  // Reads headers only. `owner` says which tensors are routed experts', so that they are left alone; null for
  // a dense model. options.max_tokens bounds one call; checkpoint and owner must outlive this.
  LayerWalk(const Checkpoint& checkpoint, ModelSpec spec, std::shared_ptr<Ops> ops, const ExpertSource* owner,
            const WeightOptions& options);
  ~LayerWalk();

  const ModelSpec& spec() const { return spec_; }
  // Of any layer, without weights: the mixer's matrices in the order of computing, the MLP that every token
  // visits, what it keeps of sequences, and how many weights it has outside of routed experts.
  const std::vector<Stage>& stages(int layer) const { return at(layer).mixer().stages(); }
  const std::optional<MlpModules>& mlp(int layer) const { return at(layer).feed_forward().mlp_modules(); }
  SequenceShape keeps(int layer) const { return at(layer).mixer().keeps(kKvType); }
  uint64_t weights(int layer) const;
  // A matrix as the checkpoint has it.
  std::unique_ptr<StoredMatrix> stored(const std::string& module) const { return loader_.stored(module); }

  // x: [tokens, hidden]. Error for an id outside of the vocabulary.
  void embed(std::span<const int32_t> tokens, float* x) const;
  // Reads and packs layer `layer` but for its routed experts, and forgets the one before. `rounding` may put
  // other matrices in the place of the mixer's and of the MLP's; it is asked now and by reload...().
  void open(int layer, MatrixRounding rounding = {});
  // Asks and reads again: matrices that were replaced since.
  void reload(size_t stage);
  void reload_mlp();

  // Rows of whole sequences, one after the other, each from position 0.
  struct SequenceRows {
    std::span<const int> lengths;  // of the sequences
    float* x = nullptr;            // [tokens, hidden]: the layer's input, then with the mixer's output added
    float* normed = nullptr;       // [tokens, hidden] out: what experts and MLPs see
    float* routed =
        nullptr;             // [tokens, hidden] out, where routed experts see something else (MoeSpec::Apart)
    int32_t* ids = nullptr;  // [tokens, top_k] out, where the layer routes: as ForwardArgs
    float* weights = nullptr;  // [tokens, top_k] out
  };
  void mix(const SequenceRows& rows);
  // The mixer as far as that stage: see(rows, stride) gets what its matrices multiply. rows.x stays as it is;
  // the others are not used.
  void visit(const SequenceRows& rows, size_t stage,
             const std::function<void(const float* rows, int64_t stride)>& see);
  // The end of a layer, from what mix() gave: adds the MLP that every token visits, where there is one, and what routed
  // experts gave, [tokens, hidden]; null: nothing.
  void finish(int tokens, const float* normed, const float* routed, float* x);
  // [tokens] factors that its output gets there: 1 but for shared experts with a gate.
  void mlp_factors(int tokens, const float* normed, float* factors);

 private:
  static constexpr KvType kKvType = KvType::kBf16;
  const Layer& at(int layer) const { return *layers_.at(static_cast<size_t>(layer)); }
  Layer& open_layer();
  std::unique_ptr<Layer> make(int layer);
  // Calls run() as a step over these rows, which are the layer's input.
  void step(const SequenceRows& rows, const std::function<void(int tokens)>& run);
  // The same over rows without sequences.
  void step(int tokens, const float* normed, const std::function<void()>& run);

  const ModelSpec spec_;
  std::shared_ptr<Ops> ops_;
  WeightLoader loader_;
  Rows x_, normed_, out_;
  std::unique_ptr<StoredMatrix> embedding_;
  std::vector<std::unique_ptr<Layer>> layers_;  // the open one has weights
  int open_ = -1;
  std::unique_ptr<KvCache> cache_;
};

}  // namespace kt::inline models
