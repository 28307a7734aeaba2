// Seeds of fuzz/corpus/lora: bytes that are the files of an adapter, and what a small model asks of it.
//
// The first byte says which files: 'p' what PEFT saves, 'k' experts in a file beside that, 'g' a GGUF adapter; of the
// first two a line of adapter_config.json and then the tensors.
#pragma once
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "base/error.h"
#include "weights/lora/expert_lora.h"
#include "weights/lora/lora_file.h"

namespace kt::testing_files {

inline void write_bytes(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// Into an empty folder; gives what is to be opened.
inline std::string write_adapter(const std::filesystem::path& folder, std::string_view input) {
  if (input.empty() || input[0] == 'g') {
    const auto path = folder / "adapter.gguf";
    write_bytes(path, input.substr(std::min<size_t>(input.size(), 1)));
    return path.string();
  }
  const size_t line = std::min(input.find('\n'), input.size() - 1);
  const std::string_view tensors = input.substr(line + 1);
  constexpr std::string_view kNothing("\x08\0\0\0\0\0\0\0{}      ", 16);
  const bool beside = input[0] == 'k';
  write_bytes(folder / kAdapterConfigFile, input.substr(1, line));
  write_bytes(folder / kAdapterModelFile, beside ? kNothing : tensors);
  if (beside) write_bytes(folder / kOtherExpertsFile, tensors);
  return folder.string();
}

inline void check_factors(const LowRankFactors& f, size_t experts, size_t n, size_t k) {
  const auto rank = static_cast<size_t>(f.rank);
  KT_CHECK(f.a.size() == experts * rank * k && f.b.size() == experts * n * rank,
           "factors of rank {}: {} and {}", f.rank, f.a.size(), f.b.size());
  for (const std::vector<float>* part : {&f.a, &f.b})
    for (const float value : *part) KT_CHECK(std::isfinite(value), "a factor that is not finite");
}

// By a model of two layers, two experts of 3 x 2 and attention of 4 x 3. Errors are those of the reader; factors that
// are not of the sizes asked for are an internal one.
inline void read_adapter_whole(const std::string& path, GgufFamilies families) {
  const LoraFile file(path, families);
  for (const int layer : {0, 1}) {
    const std::string at = text("model.layers.{}.", layer), mlp = at + "mlp.";
    if (const auto q = file.linear(at + "self_attn.q_proj", 4, 3)) check_factors(*q, 1, 4, 3);
    if (const auto dense = file.mlp({mlp + "gate_proj", mlp + "up_proj", mlp + "down_proj"}, 3, 2)) {
      check_factors(dense->gate_up, 1, 4, 3);
      check_factors(dense->down, 1, 3, 2);
    }
    if (const auto experts = file.experts(layer, {.experts = 2, .hidden = 3, .inter = 2})) {
      check_factors(experts->gate_up, 2, 4, 3);
      check_factors(experts->down, 2, 3, 2);
    }
  }
  file.check_all_taken();
}

}  // namespace kt::testing_files
