// The routed experts of a layer as a conversion leaves them, made ready to run: rounded matrices, and the
// source's own where they were kept.
#pragma once
#include <memory>
#include <vector>

#include "engine/calibration/rounded_layer.h"
#include "nn/experts.h"
#include "weights/experts.h"

namespace kt::inline engine {

class LayerExperts {
 public:
  // What `rounded` has, in `spec`, and the source's own for the rest. Both are read now and not kept.
  LayerExperts(const std::shared_ptr<Pool>& pool, const ExpertSource& source, const RoundedLayer& rounded,
               const PackedSpec& spec, const ExpertsOptions& rest);
  // args.output gets the sum; ids are the layer's. `scratch` grows to [tokens, hidden] where it is needed.
  void forward(ForwardArgs args, std::vector<float>& scratch) const;

 private:
  // Experts whose matrices have the same formats.
  struct Group {
    Format gate_up, down;
    std::vector<int> members;     // numbers in the layer
    std::vector<int32_t> number;  // [experts of the layer] number here, or -1
    std::unique_ptr<Experts> experts;
  };
  std::vector<Group> groups_;
};

}  // namespace kt::inline engine
