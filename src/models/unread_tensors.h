// What a checkpoint has and a model did not read: nothing of it may be a part that a family does not know.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "models/spec.h"
#include "weights/checkpoint.h"
#include "weights/experts.h"

namespace kt::inline models {

struct IdleTensors {
  size_t count = 0;
  // Each kind once, with its first tensor: "layers for further tokens (model.layers.61.eh_proj.weight and 13
  // more)".
  std::vector<std::string> why;
  std::string describe() const;  // one line; "": none
};

// Of the tensors that are not in `read` (as stored) nor a routed expert's: those known to be idle. Error(kInput)
// naming the others. `routed` may be null where the experts come from elsewhere; what is named like one is
// then left alone. `root` is what the names of the model begin with ("model.", "language_model.model.").
IdleTensors idle_tensors(const Checkpoint& checkpoint, const ModelSpec& spec,
                         const std::set<std::string>& read, const ExpertSource* routed,
                         const std::string& root);

}  // namespace kt::inline models
