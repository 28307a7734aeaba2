// Where converted experts come from: an output without the other tensors names the model it was made of, and
// opening it opens that one for the rest.
#pragma once
#include <memory>
#include <string>

#include "text/json.h"
#include "weights/checkpoint.h"

namespace kt::inline weights {

// "origin" of kt_weights.json: the checkpoint's absolute path, and what tells it from another one: files with their
// sizes, and what they hold. Of large ones little is read, and of experts next to nothing: those are not needed again.
// Nothing of where the output is: one conversion has the same bytes anywhere.
Json kt_origin(const Checkpoint& checkpoint);
// What an output says of its own, for another one that is made of it; null where it says nothing.
Json kt_origin_in(const std::string& path);

// A model that runs: its tensors, and where its experts are.
struct ModelParts {
  std::unique_ptr<Checkpoint> checkpoint;
  std::string experts;  // kt weights without other tensors, the path as given; "": the checkpoint's own
};

// A folder or a file of any kind that Checkpoint opens; kt weights without other tensors come with the
// checkpoint they were made from: where it was, or one of that name beside them. One line naming both where that does
// not say which it was, is not there any more, or has changed.
ModelParts open_model_parts(const std::string& path, GgufFamilies families = {});

}  // namespace kt::inline weights
