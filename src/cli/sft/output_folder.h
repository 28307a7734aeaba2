// The folder that training writes to: whether it may, and the checkpoint it goes on from.
#pragma once
#include <string>

#include "cli/sft/recipe.h"

namespace kt::inline cli {

struct OutputFolder {
  std::string resume;  // a checkpoint's folder; "": from the beginning
  std::string note;    // what was decided without being asked; "": nothing
};

// resume_from_checkpoint's folder, or the last whole checkpoint of output_dir where that holds a run that was not to be
// overwritten. Errors: a checkpoint that is not there or not whole; an output_dir that holds something else.
OutputFolder look_at_output(const Recipe& recipe);

// Error unless the folder of adapter_name_or_path holds an adapter of PEFT.
void check_adapter(const Recipe& recipe, const std::string& path);

}  // namespace kt::inline cli
