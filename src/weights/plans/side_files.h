// The small files of a model that a converted copy needs beside its weights.
#pragma once
#include <string>
#include <vector>

#include "weights/plans/conversion.h"

namespace kt::inline weights {

// config.json, generation_config.json, tokenizer, vocabulary, chat templates and processors' settings of a
// folder, in order of their names, as copies. No code (*.py), no weights, no index. Files larger than 1 GiB
// are none of these.
std::vector<SideFile> side_files_of(const std::string& folder);

}  // namespace kt::inline weights
