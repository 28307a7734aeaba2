// Any bytes as JSON, and any JSON as a config.
#include <cstdlib>

#include "base/error.h"
#include "weights/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const kt::Json value = kt::parse_json({reinterpret_cast<const char*>(data), size}, "input");
    if (kt::parse_json(value.dump(), "again") != value) std::abort();
    const kt::ModelConfig config = kt::read_model_config(value, "input");
    for (int layer = 0; layer < 100; ++layer)
      if (config.is_moe_layer(layer) && layer >= config.layers) std::abort();
  } catch (const kt::Error&) {
  }
  return 0;
}
