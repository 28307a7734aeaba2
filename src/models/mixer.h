// What mixes tokens in a layer. A kind of mixer is one file: which matrices it has and which rows they
// multiply, what it keeps of tokens and of sequences, and how it runs, written in operations (nn/ops.h).
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/function_ref.h"
#include "models/spec.h"
#include "models/weight_loader.h"
#include "nn/ops.h"

namespace kt::inline models {

// Where a part of a layer stands: whose weights it has, and the rows it reads and writes.
struct LayerPlace {
  WeightLoader& loader;
  int layer = 0;
  Rows x, normed, out;  // [tokens, hidden]: the stream of activations, after a norm, what a part gives

  Ops& ops() const { return loader.ops(); }
  int hidden() const { return loader.spec().hidden; }
  std::string named(const std::string& name) const { return loader.in_layer(layer, name); }
};

// Matrices that multiply the same rows, in the order of computing.
struct Stage {
  Rows input;
  int64_t k = 0;  // numbers of a row that they multiply
  struct Matrix {
    std::string module;
    int64_t n = 0;
    bool bias = false;
    std::unique_ptr<PlacedLinear> weights = {};  // null before they are read, or where they run as others
  };
  std::vector<Matrix> matrices;
};

// How a layer runs in one step.
struct MixerStep {
  int plane = 0;  // the first of this layer's in the cache
  int state = 0;  // the first of its states
  // Called with the number of a stage before its matrices multiply; true: the rest is left out. Null: nobody
  // watches.
  FunctionRef<bool(size_t)>* watch = nullptr;
  bool stops_at(size_t stage) const { return watch && (*watch)(stage); }
};

class Mixer {
 public:
  virtual ~Mixer() = default;

  // Planes for the keys of tokens and states of sequences: what this layer keeps.
  virtual SequenceShape keeps(KvType type) const = 0;
  const std::vector<Stage>& stages() const { return stages_; }
  // Reads what is not a matrix of a stage; then each stage, which can be read again.
  virtual void load_vectors() = 0;
  void load_stage(size_t stage);
  // Every weight it holds.
  virtual void for_each(FunctionRef<void(const PlacedWeights&)> use) const;
  // From place.normed to place.out.
  virtual void run(Ops& ops, const MixerStep& step) const = 0;

 protected:
  explicit Mixer(const LayerPlace& place) : place_(place) {}
  virtual void load_matrix(Stage& stage, Stage::Matrix& matrix);
  const PlacedLinear* weights(size_t stage, size_t matrix) const {
    return stages_[stage].matrices[matrix].weights.get();
  }

  const LayerPlace place_;
  std::vector<Stage> stages_;
};

// Nothing is read yet. Rows are asked for under names that all layers share.
std::unique_ptr<Mixer> make_gqa_mixer(const GqaSpec& spec, const LayerPlace& place);
std::unique_ptr<Mixer> make_mla_mixer(const MlaSpec& spec, const LayerPlace& place);
std::unique_ptr<Mixer> make_delta_mixer(const DeltaSpec& spec, const LayerPlace& place);
std::unique_ptr<Mixer> make_mixer(const MixerSpec& spec, const LayerPlace& place);

}  // namespace kt::inline models
