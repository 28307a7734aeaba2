// kt model: the registry from the command line. Names, links and folders to scan; no verb here deletes a
// model's files.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "cli/registry/model_scan.h"
#include "cli/registry/model_verb.h"
#include "cli/settings.h"
#include "hub/cache.h"
#include "models/families.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "weights/kt/kt_origin.h"

namespace kt::inline cli {
namespace {

struct ModelVerbFlags {
  std::string name, path, weights, gpu;
  bool json = false, verbose = false, names = false, moe = false, no_moe = false, accepted = false;
};

// The built-in model first, where it is there.
std::vector<ModelEntry> all_models() {
  std::vector<ModelEntry> out;
  try {
    out.push_back(entry_of(std::string(kDemoName), inspect_model(demo_path())));
  } catch (const Error&) {  // whoever asks for it by name is told why
  }
  for (ModelEntry& entry : registered_models()) out.push_back(std::move(entry));
  return out;
}

bool is_there(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

nlohmann::ordered_json json_of(const ModelEntry& entry) {
  nlohmann::ordered_json out = {{"name", entry.name},    {"path", entry.path},
                                {"kind", entry.kind},    {"architecture", entry.architecture},
                                {"size", entry.size},    {"experts", entry.experts},
                                {"active", entry.active}};
  for (const auto& [key, value] : {std::pair("weights", &entry.weights),
                                   {"gpu", &entry.gpu},
                                   {"repo", &entry.repo},
                                   {"added", &entry.added}}) {
    out[key] = nullptr;
    if (!value->empty()) out[key] = *value;
  }
  out["builtin"] = entry.name == kDemoName;
  out["exists"] = is_there(entry.path);
  return out;
}

std::string with_absence(const std::string& path) {
  return path.empty() || is_there(path) ? path : path + " (missing)";
}

void list(const ModelVerbFlags& flags) {
  std::vector<ModelEntry> entries = all_models();
  if (flags.moe) std::erase_if(entries, [](const ModelEntry& entry) { return entry.experts == 0; });
  if (flags.names) {
    for (const ModelEntry& entry : entries) std::printf("%s\n", entry.name.c_str());
    return;
  }
  if (flags.json) {
    auto out = nlohmann::ordered_json::array();
    for (const ModelEntry& entry : entries) out.push_back(json_of(entry));
    return print_model_json(out);
  }
  std::vector<std::string> heads = {"name", "kind", "architecture", "size", "experts", "linked", "path"};
  if (flags.verbose) heads.insert(heads.end(), {"added", "CPU weights", "GPU weights"});
  constexpr int kExpertsColumn = 4;
  if (flags.no_moe) heads.erase(heads.begin() + kExpertsColumn);
  Table table(heads, static_cast<int>(heads.size()));
  for (const ModelEntry& entry : entries) {
    const std::string linked = entry.weights.empty() ? entry.gpu.empty() ? "-" : "GPU"
                               : entry.gpu.empty()   ? "CPU"
                                                     : "CPU GPU";
    std::vector<std::string> row = {entry.name,
                                    entry.kind,
                                    entry.architecture.empty() ? "-" : entry.architecture,
                                    human_bytes(entry.size),
                                    experts_text(entry.active, entry.experts),
                                    linked,
                                    with_absence(entry.path)};
    if (flags.verbose)
      row.insert(row.end(), {entry.added.empty() ? "built in" : entry.added, with_absence(entry.weights),
                             with_absence(entry.gpu)});
    if (flags.no_moe) row.erase(row.begin() + kExpertsColumn);
    table.add(std::move(row));
  }
  std::fputs(table.str().c_str(), stdout);
}

// One word is the path, and the name is its own.
void add(ModelVerbFlags flags) {
  if (flags.path.empty()) {
    flags.path = flags.name;
    flags.name = inspect_model(flags.path).name;
  }
  check_model_name(flags.name);
  const auto known_as = try_find_model(flags.path);  // another name of a model will do
  const std::string path = known_as ? known_as->path : flags.path;
  const ModelFiles files = inspect_model(path);
  const bool converted = files.kind == FilesKind::kCpuWeights;
  if (converted)
    open_model_parts(path, gguf_families());  // says what it lacks where it does not run by itself
  ModelEntry entry = entry_of(flags.name, files);
  const std::vector<ModelEntry> known = registered_models();
  const auto old = std::ranges::find(known, flags.name, &ModelEntry::name);
  if (old != known.end() && old->path != entry.path)
    fail(tr("{} is {} already; kt model remove {} first, or choose another name"), flags.name, old->path,
         flags.name);
  if (old != known.end()) {
    entry.weights = old->weights;
    entry.gpu = old->gpu;
    entry.repo = old->repo;
    entry.added = old->added;
  }
  if (!flags.weights.empty()) entry.weights = checked_link(files, flags.weights, "--weights");
  if (!flags.gpu.empty()) entry.gpu = checked_link(files, flags.gpu, "--gpu");
  put_models({entry});
  std::printf("%s: %s\n", entry.name.c_str(), entry.path.c_str());
  if (!files.runs && !converted)
    std::fprintf(stderr,
                 "kt: note: %s is not an architecture that this version runs; kt quant may convert it\n",
                 files.architecture.c_str());
}

void remove(const ModelVerbFlags& flags) {
  if (flags.name == kDemoName) fail("demo comes with kt and stays");
  const std::vector<ModelEntry> known = registered_models();
  const auto entry = std::ranges::find(known, flags.name, &ModelEntry::name);
  if (entry == known.end() || !remove_model(flags.name)) {
    std::string names;
    for (const ModelEntry& each : known) names += (names.empty() ? "" : ", ") + each.name;
    fail("no model named '{}': {}", flags.name, names.empty() ? "none is registered" : "known are " + names);
  }
  std::printf("%s is no longer registered; its files stay in %s\n", entry->name.c_str(), entry->path.c_str());
}

ModelEntry entry_for(const ResolvedModel& model, const ModelFiles& files) {
  for (const ModelEntry& entry : registered_models())
    if (model.name.empty() ? entry.path == files.path : entry.name == model.name) return entry;
  return entry_of(model.name, files);
}

void info(const ModelVerbFlags& flags) {
  const ResolvedModel model = find_model(flags.name);
  const ModelFiles files = inspect_model(model.path);
  const ModelEntry entry = entry_for(model, files);
  if (flags.json) {
    nlohmann::ordered_json out = json_of(entry);
    if (entry.name.empty()) out["name"] = nullptr;
    out["path"] = files.path;
    out["holds"] = name_of(files.kind);
    out["size"] = files.bytes;
    out["files"] = files.files;
    out["model_type"] = files.type;
    out["quantization"] = files.quantisation;
    out["layers"] = files.layers;
    out["hidden"] = files.hidden;
    out["inter"] = files.inter;
    out["runs"] = files.runs;
    return print_model_json(out);
  }
  Table table({"path", files.path}, 2);
  const auto line = [&](const char* name, const std::string& value) {
    if (!value.empty()) table.add({name, value});
  };
  line("name", entry.name);
  line("holds", std::string(name_of(files.kind)));
  line("architecture", files.architecture);
  line("quantisation", files.quantisation);
  line("size",
       text("{} in {}", human_bytes(files.bytes), counted(static_cast<int64_t>(files.files), "file")));
  line("layers", files.layers > 0 ? std::to_string(files.layers) : "");
  line("hidden", files.hidden > 0 ? std::to_string(files.hidden) : "");
  line("experts", files.experts > 0
                      ? text("{}, {} wide", experts_text(files.active, files.experts), files.inter)
                      : "none: a dense model");
  line("CPU weights", with_absence(entry.weights));
  line("GPU weights", with_absence(entry.gpu));
  line("repository", entry.repo.empty() ? repo_of_folder(files.path) : entry.repo);
  line("added", entry.added);
  if (files.kind != FilesKind::kCpuWeights)
    line("runs", files.runs ? "yes" : "no: not an architecture of this version");
  std::fputs(table.str().c_str(), stdout);
}

void path_add(const ModelVerbFlags& flags) {
  if (!is_folder(flags.path)) fail("{}: no such folder", flags.path);
  const std::string path = absolute_path(flags.path);
  if (!add_to_setting("model.paths", path))
    std::fprintf(stderr, "kt: note: %s is in the list\n", path.c_str());
}

void path_list(const ModelVerbFlags& flags) {
  const std::vector<std::string> paths = load_settings().list("model.paths");
  if (flags.json) return print_model_json(paths);
  for (const std::string& path : paths) std::printf("%s\n", with_absence(path).c_str());
}

void path_remove(const ModelVerbFlags& flags) {
  if (remove_from_setting("model.paths", flags.path) ||
      remove_from_setting("model.paths", absolute_path(flags.path)))
    return;
  fail(tr("{}: not in the list; kt model path-list shows it"), flags.path);
}

}  // namespace

ModelEntry entry_of(const std::string& name, const ModelFiles& files) {
  return {.name = name,
          .path = files.path,
          .kind = files.kind == FilesKind::kGguf ? "gguf" : "folder",
          .architecture = files.architecture,
          .size = files.bytes,
          .experts = files.experts,
          .active = files.active};
}

std::string checked_link(const ModelFiles& model, const std::string& path, const char* flag) {
  const ModelFiles weights = inspect_model(path);
  if (kinship(model, weights) == Kinship::kNone)
    fail("{} {}: has {} experts of {} x {} in {} layers ({}), {} has {} of {} x {} in {} ({})", flag, path,
         weights.experts, weights.hidden, weights.inter, weights.layers, weights.architecture, model.path,
         model.experts, model.hidden, model.inter, model.layers, model.architecture);
  return weights.path;
}

std::string experts_text(int active, int experts) {
  if (experts == 0) return "-";
  return active > 0 ? text("{} of {}", active, experts) : std::to_string(experts);
}

void print_model_json(const nlohmann::ordered_json& value) {
  std::printf("%s\n", value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

void add_model(CLI::App& kt, Invocation& run) {
  CLI::App* verb = kt.add_subcommand("model", "Names of local models, and their weights");
  verb->require_subcommand(1);
  const auto flags = std::make_shared<ModelVerbFlags>();
  const auto action = [&](const char* name, const char* help, auto what) {
    CLI::App* const out = verb->add_subcommand(name, help);
    out->callback([&run, flags, what] { run.action = [flags, what] { what(*flags); }; });
    return out;
  };
  CLI::App* const all = action("list", "The models that have names", list);
  all->add_flag("--json", flags->json, "Print JSON");
  all->add_flag("--names", flags->names, "Print the names only, one a line");
  all->add_flag("--moe", flags->moe, "Only those with experts");
  all->add_flag("--no-moe", flags->no_moe, "Without the column of experts");
  all->add_flag("-v,--verbose", flags->verbose, "Also when they were added and what is linked");
  all->add_flag("--all,--no-cache", flags->accepted,
                "Accepted: all are listed, and nothing of them is cached");
  all->footer("Examples:\n  kt model list\n  kt model list --moe --verbose");
  add_model_scan(*verb, run);
  CLI::App* const one = action("add", "Give a model a name, or a named one its weights", add);
  one->add_option("NAME", flags->name, "A name of letters, digits, '.', '_' and '-'; or the path alone")
      ->required();
  one->add_option("PATH", flags->path, "A Hugging Face folder or a .gguf file");
  one->add_option("--weights", flags->weights, "CPU weights of it, as kt quant writes them");
  one->add_option("--gpu", flags->gpu, "GPU weights of it, as kt quant gpu writes them");
  one->footer(
      "Examples:\n  kt model add qwen3 /data/Qwen3-30B-A3B\n  kt model add /data/Qwen3-30B-A3B       under "
      "its folder's name");
  CLI::App* const about = action("info", "What is known about a model", info);
  about->add_option("MODEL", flags->name, "A name, or a path")->required();
  about->add_flag("--json", flags->json, "Print JSON");
  about->footer("Example:\n  kt model info qwen3");
  add_model_download(*verb, run);
  add_model_edit(*verb, run);
  add_model_verify(*verb, run);
  add_model_upkeep(*verb, run);
  CLI::App* const forget = action("remove", "Forget a name; no file is deleted", remove);
  forget->add_option("NAME", flags->name, "A name, as kt model list has it")->required();
  forget->add_flag("-y,--yes", flags->accepted, "Accepted; nothing is asked");
  forget->footer("Example:\n  kt model remove qwen3");
  CLI::App* const more = action("path-add", "Add a folder to those that kt model scan looks into", path_add);
  more->add_option("PATH", flags->path, "A folder")->required();
  more->footer("Example:\n  kt model path-add /data/models");
  CLI::App* const folders = action("path-list", "Those folders", path_list);
  folders->add_flag("--json", flags->json, "Print JSON");
  folders->footer("Example:\n  kt model path-list");
  CLI::App* const less = action("path-remove", "Take a folder off that list", path_remove);
  less->add_option("PATH", flags->path, "A folder, as kt model path-list has it")->required();
  less->footer("Example:\n  kt model path-remove /data/models");
  verb->footer(
      "Every verb that takes a MODEL takes a name, or the beginning of one. demo is built in.\n\n"
      "Examples:\n"
      "  kt model add qwen3 /data/Qwen3-30B-A3B --weights /data/Qwen3-30B-A3B-int4\n"
      "  kt model path-add /data && kt model scan --add\n"
      "  kt model download Qwen/Qwen3-30B-A3B\n"
      "  kt model list\n"
      "  kt model verify qwen3");
}

}  // namespace kt::inline cli
