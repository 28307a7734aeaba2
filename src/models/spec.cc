#include "models/spec.h"

namespace kt::inline models {
namespace {

const char* of_mixer(const MixerSpec& mixer) {
  if (std::holds_alternative<DeltaSpec>(mixer)) return "layers that keep a state of each sequence";
  if (const auto* const mla = std::get_if<MlaSpec>(&mixer))
    return mla->indexer ? "layers that choose the keys they attend to" : nullptr;
  const auto* const gqa = std::get_if<GqaSpec>(&mixer);
  if (!gqa) return nullptr;
  if (gqa->gated) return "gates of heads";
  if (gqa->chunk > 0) return "layers that see a chunk of the text";
  if (gqa->v_norm) return "norms of values";
  return gqa->norm == GqaSpec::Norm::kHeadLast ? "norms behind the rotation" : nullptr;
}

const char* of_feed_forward(const FeedForwardSpec& part) {
  const auto* const moe = std::get_if<MoeSpec>(&part);
  if (moe && moe->weighs_inputs) return "weights of what experts read";
  if (moe && moe->routes_first) return "routers before attention";
  if (moe && moe->apart) return "experts between norms of their own";
  const Activation& activation = moe ? moe->activation : std::get<DenseSpec>(part).activation;
  return activation.kind == ActivationKind::kRelu ? "experts with ReLU" : nullptr;
}

}  // namespace

const char* ModelSpec::host_only() const {
  for (const LayerSpec& layer : layers) {
    if (const char* const what = of_mixer(layer.mixer)) return what;
    if (const char* const what = of_feed_forward(layer.feed_forward)) return what;
    if (layer.residual != Residual::kPreNorm) return "norms of what the parts of a layer give";
  }
  return logit_cap > 0 ? "a cap of logits" : nullptr;
}

}  // namespace kt::inline models
