// Any bytes up to a zero as a pattern of Python's kind, the rest as a name: an Error of one line, or a match inside the
// name, within the steps that are allowed.
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/utf8.h"
#include "text/regex.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::string_view pattern = input.substr(0, input.find('\0'));
  const std::string name =
      kt::replace_invalid_utf8(input.substr(std::min(size, pattern.size() + 1)).substr(0, 200));
  try {
    const kt::Regex regex(pattern, kt::RegexDialect::kPython);
    kt::RegexSearch search(regex, name, kt::kMostNameSteps);
    const auto found = search.next();
    if (found && (found->begin > found->end || found->end > name.size())) std::abort();
    if (search.steps() > kt::kMostNameSteps) std::abort();
    // From the start alone: what begins there is what the search finds there.
    kt::RegexSearch again(regex, name, kt::kMostNameSteps);
    const auto first = again.at_start();
    if (first && (!found || found->begin != 0 || found->end != first->end)) std::abort();
  } catch (const kt::Error& error) {
    const std::string_view line = error.what();
    if (line.find('\n') != line.npos || line.size() > 2000) std::abort();
  }
  return 0;
}
