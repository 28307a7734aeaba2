#include "weights/plans/compressed_targets.h"

namespace kt::inline weights {

CompressedTargets::CompressedTargets(const Checkpoint& checkpoint, const ExpertSource* source,
                                     const CompressedPlanOptions& options)
    : checkpoint_(checkpoint), source_(source), options_(options), patterns_(options.ignore) {}

bool CompressedTargets::expert(int layer, int expert, Projection projection) const {
  return options_.ignore.empty() || this->expert(source_->module_name(layer, expert, projection));
}

bool CompressedTargets::linear(std::string_view module) const {
  if (!options_.all_linears || never_quantised(module) || patterns_.match(module)) return false;
  const int layers = checkpoint_.config().layers;
  return layers == 0 || layer_of(module) < layers;
}

PackedSpec CompressedTargets::spec_of(const StoredMatrix& matrix) const {
  const std::string& declared = checkpoint_.config().dtype;
  Dtype type = Dtype::kBf16;
  if (matrix.format.code == Code::kF16 && matrix.format.scale == Scale::kNone) type = Dtype::kF16;
  if (matrix.format.code == Code::kF32 && declared == "float16") type = Dtype::kF16;
  if (matrix.format.code == Code::kF32 && declared != "float16" && declared != "bfloat16") type = Dtype::kF32;
  return spec(type);
}

ModelRounding packed_rounding(const CompressedTargets& targets) {
  const auto to_nearest = [&targets](std::unique_ptr<StoredMatrix> matrix) {
    const PackedSpec spec = targets.spec_of(*matrix);
    return requantised(std::move(matrix), spec);
  };
  return {.experts =
              [=, &targets](std::unique_ptr<StoredMatrix> matrix, std::string_view module) {
                return targets.expert(module) ? to_nearest(std::move(matrix)) : std::move(matrix);
              },
          .linears =
              [=, &targets](std::unique_ptr<StoredMatrix> matrix, std::string_view module) {
                return targets.linear(module) ? to_nearest(std::move(matrix)) : std::move(matrix);
              }};
}

PackedSpec CompressedTargets::spec(Dtype type) const {
  return {options_.bits, options_.group_size == -1 ? 0 : options_.group_size, type};
}

}  // namespace kt::inline weights
