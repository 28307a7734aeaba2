// Any bytes as YAML: an Error of one line that names the place, or a value that is the same when written and
// read again.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "text/yaml.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  kt::Json value;
  try {
    value = kt::parse_yaml({reinterpret_cast<const char*>(data), size}, "input");
  } catch (const kt::Error& error) {
    const std::string message = error.what();
    if (!message.starts_with("input:") || message.find('\n') != message.npos || message.size() > 600)
      std::abort();
    return 0;
  }
  // No Error may come out of these.
  const std::string written = kt::to_yaml(value);
  if (kt::parse_yaml(written, "written") != value) std::abort();
  if (kt::parse_yaml(value.dump(-1, ' ', true), "json") != value) std::abort();
  return 0;
}
