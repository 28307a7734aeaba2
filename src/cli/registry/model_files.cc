#include "cli/registry/model_files.h"

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "hub/cache.h"
#include "models/families.h"
#include "terminal/language.h"
#include "weights/checkpoint.h"
#include "weights/checkpoint_files.h"
#include "weights/experts.h"
#include "weights/kt/kt_folder.h"
#include "weights/kt/kt_names.h"
#include "weights/safetensors.h"

namespace kt::inline cli {
namespace {

namespace fs = std::filesystem;

uint64_t size_of(const std::string& path) {
  std::error_code code;
  const uintmax_t bytes = fs::file_size(path, code);
  return code ? 0 : bytes;
}

// Names of merged converted weights: every file but the last holds nothing else.
bool has_kt_names(const std::string& file) {
  const MappedFile mapped(file);
  const SafetensorsHeader header = parse_safetensors(mapped.bytes(), file);
  return std::ranges::any_of(
      header.tensors, [](const Tensor& tensor) { return parse_kt_tensor_name(tensor.name).has_value(); });
}

std::string lower_name(std::string name) {
  for (char& c : name) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
    const bool fits = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' || c == '-' || c == '_';
    if (!fits) c = '-';
  }
  const size_t start = name.find_first_not_of("-._");
  name = start == name.npos ? "model" : name.substr(start);
  return name.substr(0, 64);
}

// ".../models--Qwen--Qwen3-30B-A3B/snapshots/<hash>" is called Qwen3-30B-A3B.
std::string proposed_name(const std::string& path) {
  const fs::path at(path);
  const std::string parent = at.parent_path().filename().string();
  if (parent == "snapshots") {
    const std::string repository = at.parent_path().parent_path().filename().string();
    const size_t dashes = repository.rfind("--");
    if (dashes != repository.npos) return lower_name(repository.substr(dashes + 2));
  }
  std::string name = at.filename().string();
  if (name.ends_with(".gguf")) {
    name.resize(name.size() - 5);
    // "-00001-of-00003" is no part of the name.
    const size_t of = name.rfind("-of-");
    const size_t number = of == name.npos || of == 0 ? name.npos : name.rfind('-', of - 1);
    const auto digits = [](std::string_view word) {
      return !word.empty() && word.find_first_not_of("0123456789") == word.npos;
    };
    if (number != name.npos && digits(std::string_view(name).substr(number + 1, of - number - 1)) &&
        digits(std::string_view(name).substr(of + 4)))
      name.resize(number);
  }
  return lower_name(name);
}

void read_config(ModelFiles& out, const Json& json, const std::string& name) {
  const ModelConfig config = read_model_config(json, name);
  out.type = config.model_type;
  out.architecture = config.architecture.empty() ? config.model_type : config.architecture;
  out.quantisation = config.quantization.method;
  out.layers = config.layers;
  out.experts = config.experts;
  out.active = config.experts > 0 ? config.top_k : 0;
  out.hidden = config.hidden;
  out.inter = config.inter;
}

bool is_runnable(const Json& config, const std::string& name) {
  try {
    describe_model(config, name);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// What kt_manifest.json says the files were made from, in either converter's words. A file that is not one is
// no error here: kt model verify reads it more closely.
void read_sources(ModelFiles& out, const std::string& folder) {
  const std::string path = folder + "/kt_manifest.json";
  if (!fs::exists(path)) return;
  const Json manifest = read_json(path, {.bytes = size_t{1} << 30});
  const Json settings = manifest.is_object() ? manifest.value("settings", Json::object()) : Json::object();
  if (!settings.is_object()) return;
  const auto add = [&](const std::string& name, const Json& bytes) {
    if (bytes.is_number_unsigned()) out.sources[fs::path(name).filename().string()] = bytes.get<uint64_t>();
  };
  if (const auto source = settings.find("source"); source != settings.end() && source->is_object())
    for (const auto& [name, bytes] : source->items()) add(name, bytes);
  if (const auto files = settings.find("files"); files != settings.end() && files->is_array())
    for (const Json& file : *files)
      if (file.is_object() && file.contains("file") && file["file"].is_string() && file.contains("bytes"))
        add(file["file"].get<std::string>(), file["bytes"]);
}

// Sizes from the arrays themselves, for folders without a config.
void read_kt_arrays(ModelFiles& out, const std::string& path) {
  const auto source = open_kt_weights(path);
  out.quantisation = source->dialect();
  out.experts = source->experts();
  out.hidden = source->hidden();
  out.inter = source->inter();
}

void finish_kt_weights(ModelFiles& out, const std::string& folder) {
  out.kind = FilesKind::kCpuWeights;
  const std::string config = folder + "/config.json";
  if (fs::exists(config)) read_config(out, read_json(config), config);
  read_kt_arrays(out, out.path);
  read_sources(out, folder);
}

ModelFiles inspect_kt_folder(const std::string& path) {
  ModelFiles out{.path = path, .name = proposed_name(path)};
  const KtFolder folder(path);
  for (const KtEntry& entry : folder.entries()) out.bytes += entry.bytes;
  out.files = folder.entries().size();
  finish_kt_weights(out, path);
  return out;
}

void add_files(ModelFiles& out, const std::vector<std::string>& files) {
  out.files = files.size();
  for (const std::string& file : files) {
    const uint64_t bytes = size_of(file);
    out.bytes += bytes;
    out.own[fs::path(file).filename().string()] = bytes;
  }
}

ModelFiles inspect_gguf(const std::vector<std::string>& files) {
  ModelFiles out{.kind = FilesKind::kGguf, .path = files.front(), .name = proposed_name(files.front())};
  const Checkpoint checkpoint(files.front(), gguf_families());
  read_config(out, checkpoint.config_json(), out.path);
  out.runs = is_runnable(checkpoint.config_json(), out.path);
  out.quantisation = "gguf";
  add_files(out, files);
  return out;
}

// Nothing if neither the names of tensors nor a config make it a model.
std::optional<ModelFiles> inspect_safetensors(const std::string& path, const CheckpointFiles& files) {
  ModelFiles out{.path = path, .name = proposed_name(path)};
  add_files(out, files.files);
  if (has_kt_names(files.files.front())) {
    finish_kt_weights(out, files.folder);
    return out;
  }
  const std::string name = files.folder + "/config.json";
  if (!fs::exists(name)) return std::nullopt;
  const Json config = read_json(name);
  if (!config.is_object() || !config.contains("architectures")) return std::nullopt;
  read_config(out, config, name);
  out.runs = is_runnable(config, name);
  if (out.quantisation == "compressed-tensors") out.kind = FilesKind::kGpuWeights;
  read_sources(out, files.folder);
  return out;
}

bool same_shape(const ModelFiles& a, const ModelFiles& b) {
  const auto agree = [](auto x, auto y) { return x == 0 || y == 0 || x == y; };
  return a.experts > 0 && a.experts == b.experts && a.hidden == b.hidden && a.inter == b.inter &&
         agree(a.layers, b.layers) && (a.type.empty() || b.type.empty() || a.type == b.type);
}

}  // namespace

std::string lower_case(std::string_view string) {
  std::string out(string);
  for (char& c : out)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return out;
}

std::string_view name_of(FilesKind kind) {
  switch (kind) {
    case FilesKind::kModel:
      return "model";
    case FilesKind::kGguf:
      return "gguf";
    case FilesKind::kCpuWeights:
      return "cpu-weights";
    case FilesKind::kGpuWeights:
      return "gpu-weights";
  }
  return "";
}

std::optional<ModelFiles> try_inspect_model(const std::string& given) {
  const std::string path = absolute_path(given);
  refuse_unfinished(path);
  try {
    if (fs::is_directory(path) && has_kt_layers(path)) return inspect_kt_folder(path);
    const CheckpointFiles files = checkpoint_files(path);
    if (files.files.empty()) return std::nullopt;
    if (!files.gguf) return inspect_safetensors(path, files);
    if (files.unrelated) fail(tr("{}: holds several .gguf models; name one file"), path);
    return inspect_gguf(files.files);
  } catch (const fs::filesystem_error& error) {
    fail("{}: cannot be read: {}", path, error.code().message());
  }
}

ModelFiles inspect_model(const std::string& path) {
  if (const auto found = try_inspect_model(path)) return *found;
  fail("{}: has safetensors, but no config.json that names an architecture", path);
}

bool holds_model_files(const std::string& path) {
  std::error_code code;
  if (!fs::is_directory(path, code)) return true;
  for (fs::directory_iterator at(path, code), end; !code && at != end; at.increment(code)) {
    const std::string name = at->path().filename().string();
    if (name == "config.json" || name == "snapshots" || name.ends_with(".safetensors") ||
        name.ends_with(".gguf") || parse_kt_layer_folder(name))
      return true;
  }
  return false;
}

bool is_folder(const std::string& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

std::string absolute_path(const std::string& path) {
  std::error_code code;
  const fs::path absolute = fs::absolute(path, code);
  std::string out = code ? path : absolute.lexically_normal().string();
  while (out.size() > 1 && out.ends_with('/')) out.pop_back();
  return out;
}

Kinship kinship(const ModelFiles& model, const ModelFiles& weights) {
  if (!same_shape(model, weights)) return Kinship::kNone;
  if (!weights.sources.empty() && weights.sources == model.own) return Kinship::kSource;
  return lower_case(weights.name).starts_with(lower_case(model.name)) ? Kinship::kName : Kinship::kShape;
}

}  // namespace kt::inline cli
