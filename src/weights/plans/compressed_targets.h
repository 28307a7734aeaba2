// What of a checkpoint a conversion to compressed-tensors quantises, and how each matrix is written: asked by
// whoever plans the conversion and by whoever rounds for it.
#pragma once
#include <string_view>

#include "weights/plans/compressed_plan.h"
#include "weights/plans/ignore_list.h"
#include "weights/requantise.h"

namespace kt::inline weights {

// Checkpoint and source must outlive it. Any thread.
class CompressedTargets {
 public:
  // Error naming a pattern that is no regular expression.
  CompressedTargets(const Checkpoint& checkpoint, const ExpertSource* source,
                    const CompressedPlanOptions& options);

  bool expert(int layer, int expert, Projection projection) const;
  bool expert(std::string_view module) const { return !patterns_.match(module); }  // by its name
  bool linear(std::string_view module) const;  // outside of routed experts
  PackedSpec spec(Dtype type = Dtype::kBf16) const;
  // The library works in the weight's type. Sources that were quantised already become bf16 first; f32 files
  // of a model declared as something else become that, as they would when loaded.
  PackedSpec spec_of(const StoredMatrix& matrix) const;
  // Of all matrices of the layer's experts.
  PackedSpec expert_spec(int layer) const { return spec_of(*source_->at(layer, 0, Projection::kGate)); }

 private:
  const Checkpoint& checkpoint_;
  const ExpertSource* source_;
  const CompressedPlanOptions options_;
  ModulePatterns patterns_;
};

// What a conversion that rounds to nearest does to every matrix, for doing it while a model is read instead.
// The targets must outlive it.
ModelRounding packed_rounding(const CompressedTargets& targets);

}  // namespace kt::inline weights
