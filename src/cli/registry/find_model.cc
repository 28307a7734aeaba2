// What a name on the command line means: the one place that says so, for every verb.
#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "cli/registry/aliases.h"
#include "cli/registry/model_files.h"
#include "cli/registry/registry.h"
#include "hub/cache.h"
#include "models/families.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "text/shown.h"
#include "weights/checkpoint_files.h"

namespace kt::inline cli {
namespace {

namespace fs = std::filesystem;

bool is_path(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

ResolvedModel resolved(const ModelEntry& entry) {
  return {
      .path = entry.path, .weights = entry.weights, .gpu = entry.gpu, .name = entry.name, .repo = entry.repo};
}

ResolvedModel resolved_demo() { return {.path = demo_path(), .name = std::string(kDemoName)}; }

std::string known_names(const std::vector<ModelEntry>& entries) {
  std::vector<std::string> names{std::string(kDemoName)};
  for (const ModelEntry& entry : entries) names.push_back(entry.name);
  return shown_list(names);
}

// A registered name or demo, as written or in other letters.
std::optional<ResolvedModel> match_whole(const std::string& name, const std::vector<ModelEntry>& entries) {
  const std::string wanted = lower_case(name);
  for (const ModelEntry& entry : entries)
    if (entry.name == name) return resolved(entry);
  for (const ModelEntry& entry : entries)
    if (lower_case(entry.name) == wanted) return resolved(entry);
  return wanted == kDemoName ? std::optional(resolved_demo()) : std::nullopt;
}

// The beginning of one.
std::optional<ResolvedModel> match_beginning(const std::string& name,
                                             const std::vector<ModelEntry>& entries) {
  const std::string wanted = lower_case(name);
  std::vector<const ModelEntry*> begun;
  for (const ModelEntry& entry : entries)
    if (lower_case(entry.name).starts_with(wanted)) begun.push_back(&entry);
  const bool demo = kDemoName.starts_with(wanted);
  if (begun.size() + (demo ? 1 : 0) == 1) return demo ? resolved_demo() : resolved(*begun[0]);
  if (begun.empty()) return std::nullopt;
  std::vector<std::string> names;
  if (demo) names.emplace_back(kDemoName);
  for (const ModelEntry* entry : begun) names.push_back(entry->name);
  fail(tr("'{}' begins {} names: {}; type more of one"), shown(name), names.size(), shown_list(names));
}

std::optional<ResolvedModel> match_repo(const ModelReference& reference,
                                        const std::vector<ModelEntry>& entries) {
  const std::string wanted = lower_case(reference.repo.str());
  std::vector<std::string> names;
  const ModelEntry* found = nullptr;
  for (const ModelEntry& entry : entries) {
    if (lower_case(entry.repo) != wanted) continue;
    if (!reference.file.empty() && fs::path(entry.path).filename() != fs::path(reference.file).filename())
      continue;
    names.push_back(entry.name);
    found = &entry;
  }
  if (names.size() > 1)
    fail(tr("{} is {} registered models: {}; name one of them"), reference.str(), names.size(),
         shown_list(names));
  return found ? std::optional(resolved(*found)) : std::nullopt;
}

bool is_weights(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.ends_with(".safetensors") || name.ends_with(".gguf") ||
         name.ends_with(".safetensors.index.json");
}

// Names of weight files, also one folder down.
std::vector<fs::path> weights_in(const std::string& folder) {
  std::vector<fs::path> out;
  std::error_code code;
  for (fs::recursive_directory_iterator at(folder, code), end; !code && at != end; at.increment(code)) {
    if (at.depth() >= 1) at.disable_recursion_pending();
    if (is_weights(at->path())) out.push_back(at->path());
  }
  std::ranges::sort(out);
  return out;
}

// A .gguf by its path in the repository, or by its last name.
std::string file_in(const CachedRepo& cached, const ModelReference& reference) {
  if (const fs::path at = fs::path(cached.path) / reference.file; is_path(at.string())) return at.string();
  for (const fs::path& path : weights_in(cached.path))
    if (path.filename() == reference.file && is_path(path.string())) return path.string();
  return "";
}

// Error unless the files of a model are all there.
void check_whole(const std::string& path, const ModelReference& reference, const CachedRepo& cached) {
  refuse_unfinished(path);
  CheckpointFiles files;
  try {
    files = checkpoint_files(path);
    for (const std::string& file : files.files)
      if (!is_path(file)) fail("{}: missing", file);
  } catch (const Error& error) {
    fail(tr("{} is in the cache, but not whole: {}{}; kt model download {} completes it"), reference.str(),
         error.what(),
         cached.unfinished_by_others ? tr_now("; another program has not finished, or not yet") : "",
         reference.str());
  }
  if (!files.unrelated) return;
  std::vector<std::string> names;
  for (const std::string& file : files.files)
    names.push_back(fs::path(file).lexically_relative(path).string());
  fail(tr("{} holds several models; name one, as {}:{}: {}"), reference.str(), reference.str(), names.front(),
       shown_list(names));
}

ResolvedModel locate_repo(const ModelReference& reference, const std::vector<ModelEntry>& entries) {
  if (const auto found = match_repo(reference, entries)) return *found;
  ResolvedModel out{.repo = reference.repo.str()};
  const auto cached = find_cached(reference.repo);
  if (cached && !reference.file.empty())
    out.path = file_in(*cached, reference);
  else if (cached && !weights_in(cached->path).empty())
    out.path = cached->path;
  if (out.path.empty() && cached) refuse_unfinished(cached->path);
  if (out.path.empty())
    out.absent = reference;
  else
    check_whole(out.path, reference, *cached);
  return out;
}

std::string published_size(const ModelAlias* alias) {
  return alias && alias->gigabytes > 0 ? text(", {} GB", alias->gigabytes) : "";
}

}  // namespace

std::optional<ResolvedModel> locate_model(const std::string& model) {
  if (model.empty()) return std::nullopt;
  const bool there = is_path(model), slash = model.find('/') != model.npos;
  const auto reference = slash && !there ? parse_model_reference(model) : std::nullopt;
  if (reference) return locate_repo(*reference, registered_models());
  if (slash || model == "." || model == ".." || (there && holds_model_files(model))) {
    if (there) refuse_unfinished(model);
    return ResolvedModel{.path = model};
  }
  const std::vector<ModelEntry> entries = registered_models();
  if (const auto found = match_whole(model, entries)) {
    refuse_unfinished(found->path);
    return found;
  }
  if (const ModelAlias* const alias = find_alias(model)) {
    const auto repo = parse_repo(alias->repository);
    KT_CHECK(repo, "{}", alias->repository);
    ResolvedModel out = locate_repo({.repo = *repo, .file = {}}, entries);
    out.alias = alias;
    return out;
  }
  if (const auto found = match_beginning(model, entries)) return found;
  if (there) return ResolvedModel{.path = model};
  return std::nullopt;
}

void refuse_unknown_family(const ResolvedModel& model) {
  if (model.alias && !runs_family(model.alias->type))
    fail_as(ErrorKind::kUnsupported,
            "{} is of family {}, which this version does not run; nothing was downloaded",
            model.alias->repository, model.alias->type);
}

void refuse_absent(const ResolvedModel& model, std::string_view way) {
  refuse_unknown_family(model);
  const std::string name = model.absent->str();
  fail(tr("{}: no such file or folder, not registered, and not in the caches of hubs ({}, {}): {}kt model "
          "download {} fetches "
          "it{}"),
       name, hub_cache_folder(), modelscope_cache_folder(), way, name, published_size(model.alias));
}

std::optional<ResolvedModel> try_find_model(const std::string& model) {
  auto found = locate_model(model);
  return found && found->absent ? std::nullopt : found;
}

ResolvedModel find_model(const std::string& model) {
  const auto found = locate_model(model);
  if (found && found->absent) refuse_absent(*found, "");
  if (found) return *found;
  fail(
      tr("no model named '{}': known are {}; a path must exist; kt model add NAME PATH gives one a name, and "
         "ORG/REPO "
         "means one of a hub"),
      shown(model), known_names(registered_models()));
}

std::string resolve_model(const std::string& model) { return find_model(model).path; }

}  // namespace kt::inline cli
