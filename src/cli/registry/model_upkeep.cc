// kt model refresh, auto-repo and clear-cache: keeps what the registry says true to what is on disk.
#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "cli/registry/aliases.h"
#include "cli/registry/model_verb.h"
#include "hub/cache.h"
#include "terminal/report.h"
#include "text/json.h"

namespace kt::inline cli {
namespace {

namespace fs = std::filesystem;

struct UpkeepFlags {
  bool json = false, remove = false, apply = false, dry_run = false;
};

bool is_on_disk(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

struct Refreshed {
  ModelEntry entry;
  bool missing = false, changed = false;
  std::vector<std::string> notes;  // for people
};

// What the files say now; a name, its links and its repository stay.
Refreshed refreshed(const ModelEntry& before) {
  Refreshed out{.entry = before};
  for (const auto& [link, what] : {std::pair(&before.weights, "CPU weights"), {&before.gpu, "GPU weights"}})
    if (!link->empty() && !is_on_disk(*link)) out.notes.push_back(text("{} missing: {}", what, *link));
  out.missing = !is_on_disk(before.path);
  if (out.missing) return out;
  try {
    ModelEntry now = entry_of(before.name, inspect_model(before.path));
    now.weights = before.weights;
    now.gpu = before.gpu;
    now.repo = before.repo;
    now.added = before.added;
    out.changed = now.size != before.size || now.architecture != before.architecture ||
                  now.kind != before.kind || now.experts != before.experts || now.active != before.active;
    if (now.size != before.size)
      out.notes.push_back(text("was {}, is {}", human_bytes(before.size), human_bytes(now.size)));
    if (now.path == before.path) out.entry = std::move(now);
  } catch (const Error& error) {
    out.notes.push_back(error.what());
  }
  return out;
}

void run_refresh(const UpkeepFlags& flags) {
  std::vector<ModelEntry> changed;
  auto rows = nlohmann::ordered_json::array();
  Table table({"name", "", "path", ""}, 4);
  size_t gone = 0;
  for (const ModelEntry& before : registered_models()) {
    const Refreshed now = refreshed(before);
    const char* const state = now.missing         ? "missing"
                              : now.changed       ? "updated"
                              : now.notes.empty() ? "ok"
                                                  : "look";
    std::string notes;
    for (const std::string& note : now.notes) notes += (notes.empty() ? "" : "; ") + note;
    rows.push_back({{"name", before.name}, {"path", before.path}, {"state", state}, {"notes", now.notes}});
    table.add({before.name, state, before.path, notes});
    if (now.changed) changed.push_back(now.entry);
    if (!now.missing) continue;
    ++gone;
    if (flags.remove) remove_model(before.name);
  }
  if (!changed.empty()) put_models(changed);
  if (flags.json) return print_model_json(rows);
  if (rows.empty()) {
    std::printf("no model is registered yet\n");
    return;
  }
  std::fputs(table.str().c_str(), stdout);
  if (gone > 0)
    std::printf(
        "%s\n",
        flags.remove
            ? text("{} no longer registered", counted(static_cast<int64_t>(gone), "model")).c_str()
            : "kt model edit NAME --path says where a model is now, kt model refresh --remove forgets "
              "those that are missing");
}

// The repository that a model's own files or its place name; what merely resembles one's name is an alias' alone.
struct FoundRepo {
  std::string repo, by;
};

FoundRepo found_repo(const ModelEntry& entry) {
  std::error_code code;
  const fs::path path = entry.path;
  const std::string folder = fs::is_directory(path, code) ? path.string() : path.parent_path().string();
  if (const auto record = read_record(folder)) return {record->repo.str(), "kt model download"};
  if (const std::string repo = repo_of_folder(folder); !repo.empty()) return {repo, "its place in a cache"};
  const std::string config = folder + "/config.json", leaf = fs::path(folder).filename().string();
  if (fs::exists(config, code)) {
    const Json parsed = read_json(config, {.bytes = size_t{16} << 20});
    const auto name = parsed.is_object() ? parsed.find("_name_or_path") : parsed.end();
    if (parsed.is_object() && name != parsed.end() && name->is_string())
      if (const auto repo = parse_repo(name->get<std::string>());
          repo && !repo->owner.empty() && lower_case(repo->name) == lower_case(leaf))
        return {repo->str(), "config.json"};
  }
  for (const ModelAlias& alias : known_aliases())
    if (const auto repo = parse_repo(alias.repository); repo && lower_case(repo->name) == lower_case(leaf))
      return {repo->str(), "the folder's name"};
  return {};
}

void run_auto_repo(const UpkeepFlags& flags) {
  std::vector<ModelEntry> changed;
  Table table({"name", "repository", "said by"}, 3);
  size_t without = 0;
  for (ModelEntry& entry : registered_models()) {
    if (!entry.repo.empty()) continue;
    FoundRepo found;
    try {
      found = found_repo(entry);
    } catch (const Error& error) {
      std::fprintf(stderr, "kt: left out: %s: %s\n", entry.name.c_str(), error.what());
    }
    without += found.repo.empty();
    table.add({entry.name, found.repo.empty() ? "-" : found.repo, found.by.empty() ? "-" : found.by});
    if (found.repo.empty()) continue;
    entry.repo = found.repo;
    changed.push_back(std::move(entry));
  }
  if (changed.empty() && without == 0) {
    std::printf("every registered model has a repository\n");
    return;
  }
  std::fputs(table.str().c_str(), stdout);
  if (flags.apply && !changed.empty()) put_models(changed);
  if (!changed.empty())
    std::printf("%s\n",
                flags.apply
                    ? text("written for {}", counted(static_cast<int64_t>(changed.size()), "model")).c_str()
                    : "nothing was changed; --apply writes them");
  if (without > 0) std::printf("kt model edit NAME --repo ORG/REPO says it where nothing does\n");
}

void run_clear_cache(const UpkeepFlags&) {
  std::printf(
      "nothing to clear: kt reads a model's own files each time and keeps no analysis of them\n"
      "downloads are in %s; kt deletes none\n",
      hub_cache_folder().c_str());
}

}  // namespace

void add_model_upkeep(CLI::App& model, Invocation& run) {
  const auto flags = std::make_shared<UpkeepFlags>();
  const auto action = [&](const char* name, const char* help, void (*what)(const UpkeepFlags&)) {
    CLI::App* const verb = model.add_subcommand(name, help);
    verb->callback([&run, flags, what] { run.action = [flags, what] { what(*flags); }; });
    return verb;
  };
  CLI::App* const refresh =
      action("refresh", "Look again at every registered model: sizes, links, what is missing", run_refresh);
  refresh->add_flag("--remove", flags->remove, "Forget names whose files are missing");
  refresh->add_flag("--json", flags->json, "Print JSON");
  refresh->footer("Example:\n  kt model refresh");
  CLI::App* const repo =
      action("auto-repo", "Find the repositories that registered models came from", run_auto_repo);
  CLI::Option* const apply = repo->add_flag("-a,--apply", flags->apply, "Write what was found");
  repo->add_flag("-d,--dry-run", flags->dry_run, "Show only, as without flags")->excludes(apply);
  repo->footer(
      "By what kt model download recorded, a hub cache's own names, config.json, or a short name's "
      "repository. No hub "
      "is asked.\n\nExample:\n  kt model auto-repo --apply");
  action("clear-cache", "Says what there is of caches: kt keeps none of models", run_clear_cache)
      ->footer("Example:\n  kt model clear-cache");
}

}  // namespace kt::inline cli
