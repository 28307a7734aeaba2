#include "weights/plans/side_files.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "base/error.h"

namespace kt::inline weights {
namespace {

constexpr uintmax_t kLargest = uintmax_t{1} << 30;

constexpr std::string_view kNames[] = {
    "config.json",        "generation_config.json",        "special_tokens_map.json",
    "added_tokens.json",  "preprocessor_config.json",      "processor_config.json",
    "configuration.json", "video_preprocessor_config.json"};
constexpr std::string_view kStarts[] = {"tokenizer", "vocab",  "merges",       "chat_template",
                                        "tiktoken",  "spiece", "sentencepiece"};

bool is_side_file(std::string_view name) {
  if (name.ends_with(".py") || name.ends_with(".pyc") || name.ends_with(".safetensors")) return false;
  if (name.ends_with(".jinja")) return true;
  return std::ranges::find(kNames, name) != std::end(kNames) ||
         std::ranges::any_of(kStarts, [&](std::string_view start) { return name.starts_with(start); });
}

}  // namespace

std::vector<SideFile> side_files_of(const std::string& folder) {
  namespace fs = std::filesystem;
  std::vector<SideFile> out;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    const std::string name = at->path().filename().string();
    if (!is_side_file(name) || !at->is_regular_file(ignored)) continue;
    const uintmax_t size = at->file_size(ignored);
    if (!ignored && size <= kLargest) out.push_back({.name = name, .text = {}, .from = at->path().string()});
  }
  if (error) fail("{}: {}", folder, error.message());
  std::ranges::sort(out, {}, &SideFile::name);
  return out;
}

}  // namespace kt::inline weights
