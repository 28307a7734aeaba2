#include "cli/ignored_flags.h"

#include <algorithm>
#include <cstddef>

#include "cli/sglang_flags.h"

namespace kt::inline cli {

std::vector<IgnoredFlag> ignored_flags(const CLI::App& kt, const Words& words,
                                       const std::vector<const CLI::Option*>& accepted) {
  std::vector<IgnoredFlag> out;
  for (const WordGroup& group : told_apart(kt, words).groups)
    if (group.foreign || std::ranges::find(accepted, group.option) != accepted.end())
      out.push_back({.flag = group.flag,
                     .values = Words(words.begin() + static_cast<ptrdiff_t>(group.begin) + 1,
                                     words.begin() + static_cast<ptrdiff_t>(group.end))});
  return out;
}

std::string ignored_names(const std::vector<IgnoredFlag>& ignored) {
  std::string out;
  for (const IgnoredFlag& one : ignored) out += (out.empty() ? "" : ", ") + one.flag;
  return out;
}

void print_ignored(const std::vector<IgnoredFlag>& ignored, std::FILE* out) {
  if (ignored.empty()) return;
  std::fprintf(out, "note: ignored, for they mean nothing here: %s\n", ignored_names(ignored).c_str());
  for (const IgnoredFlag& one : ignored)
    if (const std::string_view why = reason_to_ignore(one.flag); !why.empty())
      std::fprintf(out, "note: %s is ignored: %s\n", one.flag.c_str(), std::string(why).c_str());
  std::fflush(out);
}

}  // namespace kt::inline cli
