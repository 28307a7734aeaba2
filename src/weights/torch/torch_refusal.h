// What is said of a torch file that only Python can read: what was found, and the line that makes JSON of it.
#pragma once
#include <string_view>

#include "base/error.h"

namespace kt::inline weights {

// Python runs what such a file says, which nothing here does.
inline constexpr std::string_view kStatisticsToJson =
    "python3 -c \"import json, torch; t = torch.load('FILE.pt', 'cpu', weights_only=False)['logical_count']; "
    "json.dump({'logical_count': torch.as_tensor(t).to_dense().tolist()}, open('FILE.json', 'w'))\"";

// Error(kInput): the file is no damaged one, it says more than is read here.
[[noreturn]] inline void refuse_torch_file(std::string_view file, std::string_view found) {
  fail("{}: {}; if you trust it, this makes JSON of it: {}", file, found, kStatisticsToJson);
}

}  // namespace kt::inline weights
