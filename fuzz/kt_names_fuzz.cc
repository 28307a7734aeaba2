// Names of kt weights: whatever parses is made again to the same characters.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "weights/kt/kt_names.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string name(data, data + size);
  if (const auto parsed = kt::parse_kt_tensor_name(name))
    if (kt::kt_tensor_name(*parsed) != name) std::abort();
  if (const auto parsed = kt::parse_kt_file_name(name)) {
    const std::string path = kt::kt_file_name(parsed->name, parsed->bits, parsed->bytes);
    if (path != "_layer_0/_numa_0/" + name) std::abort();
  }
  if (const auto layer = kt::parse_kt_layer_folder(name))
    if ("_layer_" + std::to_string(*layer) != name) std::abort();
  if (const auto part = kt::parse_kt_part_folder(name))
    if ("_numa_" + std::to_string(*part) != name) std::abort();
  return 0;
}
