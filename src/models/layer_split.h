// Which device has each layer of a model that has several, or that rules put in several places. From sizes alone.
#pragma once
#include <cstdint>
#include <vector>

#include "models/placement.h"

namespace kt::inline models {

struct LayerSplit {
  std::vector<int> layers;  // of each which of the wish's devices, or kOnHost
  int head = 0;             // the same of the last norm and the head
};

// Layers that the wish leaves open are given to devices in their order, so that each is filled by as large a share of
// what `allowed` lets it have as the others; where that is too much for one, devices are filled one after the other.
// What does not fit even so is more than the last one's.
LayerSplit split_layers(const PlacementSizes& sizes, const PlacementWish& wish,
                        const std::vector<DevicePlacement>& allowed);

}  // namespace kt::inline models
