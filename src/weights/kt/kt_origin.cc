#include "weights/kt/kt_origin.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "text/shown.h"
#include "weights/kt/kt_arrays.h"
#include "weights/kt/kt_folder.h"
#include "weights/kt/kt_names.h"
#include "weights/kt/kt_shards.h"
#include "weights/plans/source_identity.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;

// Whoever opens these loads the other tensors next, so that reading a little of each costs nothing.
constexpr IdentitySampling kLittle{.whole = uint64_t{16} << 20, .expert_tensors = 1};

std::string absolute(const std::string& path) {
  std::error_code code;
  const fs::path whole = fs::absolute(path, code);
  std::string out = (code ? fs::path(path) : whole).lexically_normal().string();
  if (out.size() > 1 && out.ends_with('/')) out.pop_back();
  return out;
}

std::string folder_of(const std::string& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored) ? path : fs::path(path).parent_path().string();
}

std::string string_in(const Json& origin, const char* key) {
  const auto found = origin.find(key);
  return found != origin.end() && found->is_string() ? found->get<std::string>() : std::string();
}

// Folders of `.kt` files, and nothing beside them that would be a model by itself.
bool is_layers_only(const std::string& path) {
  if (!has_kt_layers(path)) return false;
  std::error_code error;
  for (fs::directory_iterator at(path, error), end; !error && at != end; at.increment(error))
    if (at->path().extension() == ".safetensors" || at->path().extension() == ".gguf") return false;
  return true;
}

bool has_only_experts(const Checkpoint& checkpoint) {
  return checkpoint.has_kt_experts() && std::ranges::all_of(checkpoint.tensors(), [](const Tensor& tensor) {
           return parse_kt_tensor_name(tensor.name).has_value();
         });
}

// The first file that is not as it was, in words; nothing where all are.
std::string change_since(const Json& origin, const Checkpoint& now) {
  const Json files = source_files(now), before = origin.value("files", Json::array()),
             contents = source_contents(now, kLittle), then = origin.value("contents", Json::object());
  if (files != before) {
    for (const Json& file : before)
      if (std::ranges::find(files, file) == files.end())
        return text("{} is not the file that it was", shown(string_in(file, "file")));
    return text("{} files where there were {}", files.size(), before.size());
  }
  for (const auto& [file, sum] : contents.items())
    if (string_in(then, file.c_str()) != sum.get<std::string>())
      return text("{} holds something else", shown(file));
  return "";
}

// Where the model was, and one of its name beside the experts, whose folders may have been moved together; as far as
// something is there.
std::vector<std::string> candidates(const std::string& origin, const std::string& path) {
  const fs::path beside = fs::path(absolute(folder_of(path))).parent_path() / fs::path(origin).filename();
  std::vector<std::string> out = {origin, beside.string()};
  std::error_code ignored;
  std::erase_if(out, [&](const std::string& one) { return !fs::exists(one, ignored); });
  return out;
}

std::unique_ptr<Checkpoint> open_origin(const std::string& path, GgufFamilies families) {
  const Json origin = kt_origin_in(path);
  const std::string first = string_in(origin, "path");
  if (first.empty())
    fail(
        "{}: holds converted experts only and does not name the model they were made from, which newer "
        "conversions do; give that model, and `weights` {}",
        path, path);
  std::string changed;
  for (const std::string& candidate : candidates(first, path)) {
    auto checkpoint = std::make_unique<Checkpoint>(candidate, families);
    const std::string change = change_since(origin, *checkpoint);
    if (change.empty()) return checkpoint;
    if (changed.empty()) changed = text("{}, has changed: {}", candidate, change);
  }
  fail(
      "{}: holds converted experts only, and the model they were made from, {}; give the model, and "
      "`weights` {}, to run them together",
      path, changed.empty() ? first + ", is not there" : changed, path);
}

}  // namespace

Json kt_origin(const Checkpoint& checkpoint) {
  return {{"path", absolute(checkpoint.path())},
          {"files", source_files(checkpoint)},
          {"contents", source_contents(checkpoint, kLittle)}};
}

Json kt_origin_in(const std::string& path) {
  const std::string file = text("{}/{}", folder_of(path), kKtFactsFile);
  std::error_code ignored;
  if (!fs::exists(file, ignored)) return Json();
  const Json facts = read_json(file);
  const auto found = facts.is_object() ? facts.find("origin") : facts.end();
  if (!facts.is_object() || found == facts.end()) return Json();
  if (!found->is_object()) fail("{}: \"origin\" is not an object", file);
  return *found;
}

ModelParts open_model_parts(const std::string& path, GgufFamilies families) {
  if (is_layers_only(path)) return {.checkpoint = open_origin(path, families), .experts = path};
  auto checkpoint = std::make_unique<Checkpoint>(path, families);
  if (!has_only_experts(*checkpoint)) return {.checkpoint = std::move(checkpoint), .experts = {}};
  return {.checkpoint = open_origin(path, families), .experts = path};
}

}  // namespace kt::inline weights
