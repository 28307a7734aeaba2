#include "base/cgroups.h"

#include <algorithm>

namespace kt::inline base {

void for_each_cgroup(
    std::string_view list,
    const std::function<void(const std::string& controllers, const std::string& path)>& each) {
  for (size_t at = 0; at < list.size();) {
    const size_t end = std::min(list.find('\n', at), list.size());
    const std::string line(list.substr(at, end - at));
    at = end + 1;
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    each("," + line.substr(first + 1, second - first - 1) + ",", line.substr(second + 1));
  }
}

}  // namespace kt::inline base
