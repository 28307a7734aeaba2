// Short names of local models: models.yaml in kt's folder. Knows names and paths; what lies at a path is
// model_files.h's business. Never touches a model's files.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kt {

struct ModelEntry {
  std::string name;
  std::string path;          // absolute: a folder, or a .gguf file (the first of a split set)
  std::string kind;          // "folder" or "gguf"
  std::string architecture;  // as its config says it
  uint64_t size = 0;         // bytes of its weights
  int experts = 0;           // routed ones of a layer; 0: a dense model
  int active = 0;            // of them for each token
  std::string weights;       // CPU weights that belong to it; "": none
  std::string gpu;           // GPU weights
  std::string added;         // "2026-01-31"
};

std::string registry_path();  // models.yaml in kt_home()
std::vector<ModelEntry>
registered_models();  // by name; Error naming file, entry and key for what is wrong there

// Error unless fit for a name: letters, digits, '.', '_', '-', the first a letter or digit, 64 at most, and
// not the built-in one's.
void check_model_name(std::string_view name);
// Adds entries or replaces those of the same name, all in one step. What `entries` leaves empty in `added`
// becomes today.
void put_models(std::vector<ModelEntry> entries);
bool remove_model(std::string_view name);  // false: there is none

inline constexpr std::string_view kDemoName = "demo";
// The small model that comes with kt: $KT_DEMO_MODEL, beside a build tree, or under the prefix of an
// installation. Error listing where it looked.
std::string demo_path();

// A name or a path as the command line has it.
struct ResolvedModel {
  std::string path;     // what to open
  std::string weights;  // CPU weights linked to it; "": none, or it was a path
  std::string gpu;
  std::string name;  // in the registry; "" for a path
};

// In this order: a path that exists; a registered name; `demo`; the beginning of exactly one name (letters of
// any case). A word without a '/' that is a folder with no model in it gives way to a name: there may be a
// folder called demo here. Something with a '/' that does not exist comes back as a path, and whoever opens
// it will say so. Error listing the known names otherwise.
ResolvedModel find_model(const std::string& name_or_path);
std::string resolve_model(const std::string& name_or_path);  // find_model(...).path
// The same, but nothing instead of the error.
std::optional<ResolvedModel> try_find_model(const std::string& name_or_path);

}  // namespace kt
