// What lies at a path: a model, its CPU or GPU weights, or nothing of the kind. Reads listings, configs and
// headers, no weights.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline cli {

enum class FilesKind : uint8_t {
  kModel,       // a Hugging Face folder
  kGguf,        // a .gguf file, or the first of a split set
  kCpuWeights,  // what kt quant writes: experts in kt's packing
  kGpuWeights,  // compressed-tensors; runs by itself, too
};
std::string lower_case(std::string_view string);  // of ASCII letters: so are names compared
std::string_view name_of(FilesKind kind);         // "model", "gguf", "cpu-weights", "gpu-weights"

struct ModelFiles {
  FilesKind kind = FilesKind::kModel;
  std::string path;          // absolute
  std::string name;          // proposed for the registry: its folder's or file's, in lower case
  std::string architecture;  // as the config says it; of a GGUF file, or without a config, "" or its type
  std::string type;          // model_type; "" where nothing says it
  bool runs = false;         // whether it is of a family that kt runs; weights by themselves do not
  std::string quantisation;  // "fp8", "compressed-tensors", ...; "" if none
  int layers = 0, experts = 0, active = 0;
  int64_t hidden = 0, inter = 0;
  uint64_t bytes = 0;  // of its weight files
  size_t files = 0;
  // Names and sizes of weight files, own ones and those that it was converted from (its manifest's).
  std::map<std::string, uint64_t> own, sources;
};

// The model or weights at a path. Error if there is none, or what is wrong with it: shards that are missing,
// a config that cannot be read.
ModelFiles inspect_model(const std::string& path);
// The same for those who look around: nothing where no model is, also for a folder with safetensors and no
// config that names an architecture (adapters, parts of other pipelines).
std::optional<ModelFiles> try_inspect_model(const std::string& path);
// Whether a folder has any file or folder in it that could be a model's; true for any file. Looks at names
// only.
bool holds_model_files(const std::string& path);

bool is_folder(const std::string& path);  // that can be reached; a link to one counts
// Absolute, without "." and ".." and without a '/' at its end; links stay as they are.
std::string absolute_path(const std::string& path);

// Whether `weights` are those of `model`.
enum class Kinship : uint8_t {
  kNone,    // another architecture or other sizes
  kShape,   // could be: the same architecture and sizes, as those of every fine-tune
  kName,    // and its name begins with the model's
  kSource,  // it says so: the manifest lists the model's files
};
Kinship kinship(const ModelFiles& model, const ModelFiles& weights);

}  // namespace kt::inline cli
