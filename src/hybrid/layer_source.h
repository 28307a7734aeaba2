// One layer's experts in memory as a source: what all such sources say of themselves.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "nn/experts.h"
#include "weights/experts.h"

namespace kt::inline hybrid {

class LayerSource : public ExpertSource {
 public:
  LayerSource(const ExpertsShape& shape, int layer) : shape_(shape), layer_(layer) {}

  std::vector<int> layers() const override { return {layer_}; }
  int experts() const override { return shape_.experts; }
  int64_t hidden() const override { return shape_.hidden; }
  int64_t inter() const override { return shape_.inter; }
  bool owns(std::string_view) const override { return false; }
  std::string module_name(int layer, int expert, Projection projection) const override {
    return text("layer {} expert {} {}", layer, expert, name_of(projection));
  }

 protected:
  // Rows and columns of a projection.
  std::pair<int64_t, int64_t> shape_of(Projection projection) const {
    return projection == Projection::kDown ? std::pair{hidden(), inter()} : std::pair{inter(), hidden()};
  }

 private:
  ExpertsShape shape_;
  int layer_;
};

}  // namespace kt::inline hybrid
