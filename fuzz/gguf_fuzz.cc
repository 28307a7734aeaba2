// Any bytes as a GGUF file: an Error, or metadata and tensors whose bytes all lie in it.
#include <cstdlib>

#include "base/error.h"
#include "weights/config.h"
#include "weights/gguf/gguf.h"
#include "weights/gguf/gguf_config.h"
#include "weights/gguf/gguf_model.h"

namespace {

// Architectures of the corpus; families of models/ would bring kernels along, which take long to instrument.
constexpr kt::GgufFamily kLlama{.gguf = "llama"}, kQwen{.gguf = "qwen3moe"}, kDeepseek{.gguf = "deepseek2"};
constexpr const kt::GgufFamily* kAll[] = {&kLlama, &kQwen, &kDeepseek};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = std::as_bytes(std::span(data, size));
  try {
    const kt::GgufHeader header = kt::parse_gguf(file, "input");
    for (const kt::Tensor& t : header.tensors)
      if (!t.bytes.empty() &&
          (t.bytes.data() < file.data() || t.bytes.data() + t.bytes.size() > file.data() + file.size()))
        std::abort();
    constexpr uint32_t kStrings = 8;
    for (const auto& [key, value] : header.metadata)
      if (const auto* array = std::get_if<kt::GgufArray>(&value);
          array != nullptr && array->element_type == kStrings && array->strings().size() != array->count)
        std::abort();
    const auto find = [&](std::string_view name) -> const kt::Tensor* {
      for (const kt::Tensor& t : header.tensors)
        if (t.name == name) return &t;
      return nullptr;
    };
    const kt::GgufFamily* const family = kt::find_gguf_family(kAll, header, find);
    kt::Json config = kt::gguf_config(header, family);
    if (family) kt::GgufFacts(header, find, *family, config).add();
    kt::read_model_config(config, "input", kt::gguf_key_names(header));
  } catch (const kt::Error&) {
  }
  return 0;
}
