// Short names of local models: models.yaml in kt's folder. Knows names and paths; what lies at a path is
// model_files.h's business. Never touches a model's files.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hub/repository.h"

namespace kt::inline cli {

struct ModelAlias;

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
  std::string repo;          // "ORG/REPO" of a hub that it came from; "": not known
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
  std::string path;     // what to open; "" of one that is not on this disk
  std::string weights;  // CPU weights linked to it; "": none, or it was a path
  std::string gpu;
  std::string name;  // in the registry; "" for a path
  std::string repo;  // "ORG/REPO", where it was named so, by an alias, or the registry knows it
  // Named by a repository, and on no disk of ours: what would have to be downloaded.
  std::optional<ModelReference> absent = std::nullopt;
  const ModelAlias* alias = nullptr;  // by which the absent one was called
};

// In this order: a path that exists; a registered name; `demo`; an alias of a published model; the beginning of exactly
// one registered name (letters of any case); ORG/REPO[:FILE.gguf]. A word without a '/' that is a folder with no model
// in it gives way to a name: there may be a folder called demo here. Repositories, an alias' too, are looked for in the
// registry, then in the caches of hubs (hub/cache.h); one that is in none comes back as absent. Something else with a
// '/' that does not exist comes back as a path, and whoever opens it will say so. Nothing for words that mean nothing.
//
// Errors, a line each: words that match several things; a download that did not end, ours or another program's; a
// cached repository that holds several models.
std::optional<ResolvedModel> locate_model(const std::string& name_or_path);

// The same for those who need it on this disk: Error listing the known names, or what downloads an absent one.
ResolvedModel find_model(const std::string& name_or_path);
std::string resolve_model(const std::string& name_or_path);  // find_model(...).path
// The same, but nothing instead of the error.
std::optional<ResolvedModel> try_find_model(const std::string& name_or_path);

// The error of an absent model: of an alias whose family does not run here, that (kUnsupported); else where was looked
// and what downloads it: `way`, words such as "--download or ", before the verb for it.
[[noreturn]] void refuse_absent(const ResolvedModel& model, std::string_view way);
// Throws that of the family alone.
void refuse_unknown_family(const ResolvedModel& model);

}  // namespace kt::inline cli
