#include "weights/gguf/gguf_family.h"

#include <algorithm>
#include <vector>

#include "base/text.h"
#include "weights/gguf/gguf_config.h"

namespace kt::inline weights {

const GgufFamily* find_gguf_family(GgufFamilies families, const GgufHeader& header,
                                   const TensorFinder& find) {
  const std::string_view architecture = gguf_string(header, "general.architecture");
  for (const GgufFamily* const family : families)
    if (family->gguf == architecture && (!family->owns || family->owns(header, find))) return family;
  return nullptr;
}

std::string gguf_architectures(GgufFamilies families) {
  std::vector<std::string_view> known;
  std::string out;
  for (const GgufFamily* const family : families) {
    if (std::ranges::find(known, family->gguf) != known.end()) continue;
    known.push_back(family->gguf);
    out += text_of(out.empty() ? "{}" : ", {}", family->gguf);
  }
  return out.empty() ? "none" : out;
}

}  // namespace kt::inline weights
