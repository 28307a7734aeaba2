#include "cli/sft/output_folder.h"

#include <charconv>
#include <filesystem>
#include <optional>

#include "text/shown.h"

namespace kt::inline cli {
namespace {

namespace fs = std::filesystem;

bool has_file(const std::string& folder, const char* name) {
  std::error_code ignored;
  return fs::is_regular_file(folder + "/" + name, ignored);
}

// What of a checkpoint is missing to go on from it; "": nothing. Checkpoints get their name when all of them is on
// disk.
std::string missing_of(const std::string& checkpoint) {
  for (const char* const name :
       {"trainer_state.json", "adapter_model.safetensors", "optimizer.pt", "scheduler.pt"})
    if (!has_file(checkpoint, name)) return name;
  return "";
}

struct Checkpoints {
  std::string last;  // the whole one of the most steps
  int whole = 0, others = 0;
};

Checkpoints checkpoints_of(const std::string& folder) {
  Checkpoints out;
  long most = -1;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    constexpr std::string_view kPrefix = "checkpoint-";
    if (!name.starts_with(kPrefix) || !entry.is_directory(ignored)) continue;
    long step = 0;
    const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), step);
    if (error != std::errc() || end != name.data() + name.size()) continue;
    if (!missing_of(entry.path().string()).empty()) {
      ++out.others;
      continue;
    }
    ++out.whole;
    if (step > most) {
      most = step;
      out.last = entry.path().string();
    }
  }
  return out;
}

}  // namespace

OutputFolder look_at_output(const Recipe& recipe) {
  const std::string output = recipe.text("output_dir");
  std::error_code ignored;
  if (fs::exists(output, ignored) && !fs::is_directory(output, ignored))
    recipe.fail("output_dir", "{} is no folder", shown(output));
  const Json resume = recipe.value("resume_from_checkpoint");
  if (resume.is_string()) {
    const std::string folder = resume.get<std::string>();
    if (!fs::is_directory(folder, ignored))
      recipe.fail("resume_from_checkpoint", "no such folder: {}", shown(folder));
    if (const std::string missing = missing_of(folder); !missing.empty())
      recipe.fail(
          "resume_from_checkpoint", "{} has no {}{}", shown(folder), missing,
          missing == "optimizer.pt" ? "; one that was written with save_only_model cannot be resumed" : "");
    return {.resume = folder, .note = {}};
  }
  const Checkpoints found = checkpoints_of(output);
  if (resume.is_boolean() && resume.get<bool>()) {
    if (found.last.empty())
      recipe.fail("resume_from_checkpoint", "{} holds no checkpoint that can be resumed{}", shown(output),
                  found.others > 0
                      ? text("; {} in it are not whole, or were written with save_only_model", found.others)
                      : "");
    return {.resume = found.last, .note = {}};
  }
  if (recipe.flag("overwrite_output_dir") || resume.is_boolean() || !fs::exists(output, ignored)) return {};
  if (!found.last.empty())
    return {.resume = found.last,
            .note = text("output_dir: goes on from {}; overwrite_output_dir: true begins anew", found.last)};
  if (!fs::is_empty(output, ignored))
    recipe.fail(
        "output_dir",
        "{} is not empty, and has no checkpoint to go on from; overwrite_output_dir: true writes there",
        shown(output));
  return {};
}

void check_adapter(const Recipe& recipe, const std::string& path) {
  constexpr const char* kKey = "adapter_name_or_path";
  std::error_code ignored;
  if (path.ends_with(".gguf"))
    recipe.fail(
        kKey,
        "{} is a GGUF adapter, which kt chat and kt run take; training goes on with the folder PEFT saved",
        shown(path));
  if (!fs::is_directory(path, ignored)) recipe.fail(kKey, "no such folder: {}", shown(path));
  for (const char* const name : {"adapter_config.json", "adapter_model.safetensors"})
    if (!has_file(path, name)) recipe.fail(kKey, "{} has no {}", shown(path), name);
}

}  // namespace kt::inline cli
