// The control groups of this process, as the kernel lists them.
#pragma once
#include <functional>
#include <string>
#include <string_view>

namespace kt::inline base {

// Calls each(controllers, path) for every line of `list`, the words of /proc/self/cgroup:
// "4:cpu,cpuacct:/path" (v1) gives ",cpu,cpuacct,", so that a name can be looked for between commas, and
// "0::/path" (v2) gives ",,".
void for_each_cgroup(
    std::string_view list,
    const std::function<void(const std::string& controllers, const std::string& path)>& each);

}  // namespace kt::inline base
