#include "models/mixer.h"

namespace kt::inline models {
namespace {

// A kind of spec, and who runs it.
struct MakeMixer {
  const LayerPlace& place;
  std::unique_ptr<Mixer> operator()(const GqaSpec& spec) const { return make_gqa_mixer(spec, place); }
  std::unique_ptr<Mixer> operator()(const MlaSpec& spec) const { return make_mla_mixer(spec, place); }
  std::unique_ptr<Mixer> operator()(const DeltaSpec& spec) const { return make_delta_mixer(spec, place); }
};

}  // namespace

void Mixer::load_matrix(Stage& stage, Stage::Matrix& matrix) {
  matrix.weights = place_.loader.linear(matrix.module, matrix.n, stage.k, matrix.bias);
}

void Mixer::load_stage(size_t stage) {
  for (Stage::Matrix& matrix : stages_.at(stage).matrices) load_matrix(stages_[stage], matrix);
}

void Mixer::for_each(FunctionRef<void(const PlacedWeights&)> use) const {
  for (const Stage& stage : stages_)
    for (const Stage::Matrix& matrix : stage.matrices)
      if (matrix.weights) use(*matrix.weights);
}

std::unique_ptr<Mixer> make_mixer(const MixerSpec& spec, const LayerPlace& place) {
  return std::visit(MakeMixer{place}, spec);
}

}  // namespace kt::inline models
