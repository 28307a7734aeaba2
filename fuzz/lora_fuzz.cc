// Any bytes as the files of an adapter (weights/testing/adapter_bytes.h): an Error, or factors of the sizes that were
// asked for; and what can be exported is an adapter that can be exported.
#include <unistd.h>

#include <cstdlib>

#include "weights/gguf/gguf_config.h"
#include "weights/testing/adapter_bytes.h"

namespace {

namespace fs = std::filesystem;

constexpr kt::GgufFamily kLlama{.gguf = "llama"}, kQwen{.gguf = "qwen3moe"};
constexpr const kt::GgufFamily* kAll[] = {&kLlama, &kQwen};

const fs::path& folder() {
  static const fs::path path =
      fs::path(fs::exists("/dev/shm") ? "/dev/shm" : "/tmp") / ("kt-lora-fuzz-" + std::to_string(::getpid()));
  return path;
}

template <typename Call>
bool accepts(Call&& call) {
  try {
    call();
    return true;
  } catch (const kt::Error& error) {
    const std::string line = error.what();
    if (error.kind() == kt::ErrorKind::kInternal || line.find('\n') != line.npos || line.size() > 2000)
      std::abort();
    return false;
  }
}

void export_all(const std::string& from) {
  const std::string out = folder().string() + "-out";
  for (const kt::LoraLayout layout : {kt::LoraLayout::kPerExpert, kt::LoraLayout::kFused}) {
    fs::remove_all(out);
    kt::LoraExported made;
    if (!accepts([&] { made = kt::export_lora({.from = from, .to = out, .layout = layout}); })) continue;
    const kt::AdapterFiles read = kt::read_adapter(out);
    if (static_cast<int>(read.layers.size()) != made.layers || read.found != layout) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  fs::remove_all(folder());
  fs::create_directories(folder());
  const std::string path = kt::testing_files::write_adapter(folder(), input);
  accepts([&] { kt::testing_files::read_adapter_whole(path, kAll); });
  if (path == folder()) export_all(path);
  return 0;
}
