#include "cli/bench/format_list.h"

#include <algorithm>
#include <cstdio>

#include "base/error.h"

namespace kt::inline cli {

std::vector<NamedFormat> listed_formats(const std::vector<std::string>& names,
                                        FunctionRef<void(const Format&)> check) {
  std::vector<NamedFormat> out;
  for (const std::string& name : names) {
    if (name != "all") {
      const Format format = format_named(name);
      out.push_back(*std::find_if(kFormats.begin(), kFormats.end(),
                                  [&](const NamedFormat& f) { return f.format == format; }));
      out.back().name = name;
      continue;
    }
    for (const NamedFormat& f : kFormats) {
      try {
        check(f.format);
        out.push_back(f);
      } catch (const Error& error) {
        std::fprintf(stderr, "kt: %s left out: %s\n", std::string(f.name).c_str(), error.what());
      }
    }
  }
  return out;
}

}  // namespace kt::inline cli
