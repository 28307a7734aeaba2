// kt model edit, link and unlink: what the registry says of a model that it knows.
#include <algorithm>
#include <cstdio>
#include <memory>

#include "base/error.h"
#include "cli/registry/model_verb.h"
#include "terminal/language.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

struct EditFlags {
  std::string name, rename, path, repo, weights;
  bool gpu = false;
};

struct LinkCpuFlags {
  std::string weights;
  std::vector<std::string> models;
};

// The old entry goes last: at no moment is there none.
void replace_entry(const std::string& old, const ModelEntry& entry) {
  put_models({entry});
  if (entry.name != old) remove_model(old);
}

void run_edit(const EditFlags& flags) {
  ModelEntry entry = entry_named(flags.name);
  if (flags.rename.empty() && flags.path.empty() && flags.repo.empty())
    fail(tr("nothing to change: give --name, --path or --repo; kt model link and unlink change its weights"));
  if (!flags.rename.empty() && flags.rename != entry.name) {
    const std::vector<ModelEntry> known = registered_models();
    if (std::ranges::find(known, flags.rename, &ModelEntry::name) != known.end())
      fail(tr("{} is the name of another model; kt model remove {} first"), flags.rename, flags.rename);
    entry.name = flags.rename;
  }
  if (!flags.path.empty()) {
    const ModelFiles files = inspect_model(flags.path);
    if (files.kind == FilesKind::kCpuWeights)
      fail(tr("{}: holds experts for the CPU only; kt model link {} {} links them"), flags.path, entry.name,
           flags.path);
    // What was linked must fit what it is linked to now.
    if (!entry.weights.empty()) checked_link(files, entry.weights, "its CPU weights,");
    if (!entry.gpu.empty()) checked_link(files, entry.gpu, "its GPU weights,");
    ModelEntry moved = entry_of(entry.name, files);
    moved.weights = entry.weights;
    moved.gpu = entry.gpu;
    moved.repo = entry.repo;
    moved.added = entry.added;
    entry = std::move(moved);
  }
  if (flags.repo == "none")
    entry.repo.clear();
  else if (!flags.repo.empty() && !parse_repo(flags.repo))
    fail(tr("--repo '{}': expected ORG/REPO, or none"), shown(flags.repo));
  else if (!flags.repo.empty())
    entry.repo = flags.repo;
  replace_entry(flags.name, entry);
  std::printf("%s: %s\n", entry.name.c_str(), entry.path.c_str());
}

void run_link(const EditFlags& flags) {
  ModelEntry entry = entry_named(flags.name);
  const std::string path = checked_link(inspect_model(entry.path), flags.weights, "");
  (inspect_model(path).kind == FilesKind::kGpuWeights ? entry.gpu : entry.weights) = path;
  put_models({entry});
  std::printf("%s uses %s\nnext: kt run %s\n", entry.name.c_str(), path.c_str(), entry.name.c_str());
}

void run_unlink(const EditFlags& flags) {
  ModelEntry entry = entry_named(flags.name);
  std::string& link = flags.gpu ? entry.gpu : entry.weights;
  if (link.empty()) fail("{} has no {} weights linked", entry.name, flags.gpu ? "GPU" : "CPU");
  std::printf("%s no longer uses %s, which stays where it is\n", entry.name.c_str(), link.c_str());
  link.clear();
  put_models({entry});
}

// The weights that a name or a path means.
std::string weights_named(const std::string& model) {
  const auto found = try_find_model(model);
  return found ? found->path : model;
}

void run_link_cpu(const LinkCpuFlags& flags) {
  std::vector<ModelEntry> entries;  // all are checked before any is changed
  const std::string weights = weights_named(flags.weights);
  const ModelFiles files = inspect_model(weights);
  if (files.kind != FilesKind::kCpuWeights && files.kind != FilesKind::kGguf)
    fail(tr("{}: holds a {}, and CPU weights were expected: what kt quant writes, or a .gguf file"), weights,
         name_of(files.kind));
  for (const std::string& name : flags.models) {
    ModelEntry entry = entry_named(name);
    entry.weights = checked_link(inspect_model(entry.path), weights, "");
    entries.push_back(std::move(entry));
  }
  put_models(entries);
  for (const ModelEntry& entry : entries)
    std::printf("%s uses %s\n", entry.name.c_str(), entry.weights.c_str());
}

void run_unlink_cpu(const LinkCpuFlags& flags) {
  const std::string path = absolute_path(weights_named(flags.weights));
  std::vector<ModelEntry> changed;
  for (ModelEntry& entry : registered_models()) {
    if (entry.weights != path) continue;
    entry.weights.clear();
    changed.push_back(std::move(entry));
  }
  if (changed.empty()) fail("{}: no registered model uses it", path);
  put_models(changed);
  for (const ModelEntry& entry : changed)
    std::printf("%s no longer uses %s, which stays where it is\n", entry.name.c_str(), path.c_str());
}

// From the weights to the models, as link goes from a model to its weights.
void add_link_cpu(CLI::App& model, Invocation& run) {
  const auto flags = std::make_shared<LinkCpuFlags>();
  const auto action = [&](const char* name, const char* help, void (*what)(const LinkCpuFlags&)) {
    CLI::App* const verb = model.add_subcommand(name, help);
    verb->add_option("WEIGHTS", flags->weights, "CPU weights: a name or a path")->required();
    verb->callback([&run, flags, what] { run.action = [flags, what] { what(*flags); }; });
    return verb;
  };
  CLI::App* const link = action("link-cpu", "Let models use these CPU weights", run_link_cpu);
  link->add_option("MODEL", flags->models, "Names, as kt model list has them")->required();
  link->footer("Example:\n  kt model link-cpu ./Qwen3-30B-A3B-int4 qwen3 qwen3-gptq");
  action("unlink-cpu", "Let no model use these CPU weights; no file is deleted", run_unlink_cpu)
      ->footer("Example:\n  kt model unlink-cpu ./Qwen3-30B-A3B-int4");
}

}  // namespace

ModelEntry entry_named(const std::string& name) {
  const std::vector<ModelEntry> known = registered_models();
  const auto found = std::ranges::find(known, name, &ModelEntry::name);
  if (found != known.end()) return *found;
  if (name == kDemoName) fail("demo comes with kt and stays as it is");
  std::vector<std::string> names;
  for (const ModelEntry& entry : known) names.push_back(entry.name);
  fail("no model named '{}': {}", shown(name),
       names.empty() ? "none is registered" : "known are " + shown_list(names));
}

void add_model_edit(CLI::App& model, Invocation& run) {
  const auto flags = std::make_shared<EditFlags>();
  const auto action = [&](const char* name, const char* help, void (*what)(const EditFlags&)) {
    CLI::App* const verb = model.add_subcommand(name, help);
    verb->add_option("NAME", flags->name, "A name, as kt model list has it")->required();
    verb->callback([&run, flags, what] { run.action = [flags, what] { what(*flags); }; });
    return verb;
  };
  CLI::App* const edit = action("edit", "Change what a name stands for; no file is touched", run_edit);
  edit->add_option("--name", flags->rename, "Another name");
  edit->add_option("--path", flags->path, "Where the model is now");
  edit->add_option("--repo", flags->repo,
                   "The repository of a hub that it came from, ORG/REPO; none: forget it");
  edit->footer(
      "Example:\n  kt model edit qwen3 --name qwen3-30b --path /mnt/Qwen3-30B-A3B --repo Qwen/Qwen3-30B-A3B");
  CLI::App* const link = action("link", "Let a model use weights that kt quant wrote of it", run_link);
  link->add_option("WEIGHTS", flags->weights, "Their folder")->required();
  link->footer("Example:\n  kt model link qwen3 ./Qwen3-30B-A3B-int4");
  CLI::App* const unlink =
      action("unlink", "Let a model use its own weights again; no file is deleted", run_unlink);
  unlink->add_flag("--gpu", flags->gpu, "Its GPU weights; default: its CPU weights");
  unlink->footer("Example:\n  kt model unlink qwen3");
  add_link_cpu(model, run);
}

}  // namespace kt::inline cli
