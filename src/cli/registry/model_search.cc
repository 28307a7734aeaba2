// kt model scan and kt model verify: what is on disk, and whether it is whole.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>

#include "base/error.h"
#include "cli/quant/conversion_report.h"
#include "cli/registry/fetch_model.h"
#include "cli/registry/model_scan.h"
#include "cli/registry/model_verb.h"
#include "cli/registry/model_verify.h"
#include "cli/settings.h"
#include "hub/cache.h"
#include "hub/hub_client.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

struct ScanFlags {
  std::vector<std::string> paths;
  bool json = false, add = false;
  double least_gb = 0;
  int depth = ScanOptions{}.depth;
};

// A finding as the registry sees it.
struct Proposal {
  ModelEntry entry;
  std::string holds;
  bool runs = false, is_new = false, links_are_new = false;

  std::string status() const {
    if (!runs) return "not run";
    return is_new ? "new" : links_are_new ? "new links" : "known";
  }
};

std::vector<std::string> roots_of(const ScanFlags& flags) {
  for (const std::string& path : flags.paths)
    if (!is_folder(path)) fail("{}: no such folder", path);
  if (!flags.paths.empty()) return flags.paths;
  std::vector<std::string> roots = load_settings().list("model.paths");
  if (roots.empty()) fail(tr("no folders to scan: kt model scan PATH, or kt model path-add PATH once"));
  return roots;
}

std::vector<Proposal> proposals_of(const ScanGroups& groups) {
  const std::vector<ModelEntry> known = registered_models();
  std::set<std::string> taken{std::string(kDemoName)};
  for (const ModelEntry& entry : known) taken.insert(entry.name);
  std::vector<Proposal> out;
  for (const ScanModel& model : groups.models) {
    Proposal one{.entry = entry_of(model.files.name, model.files),
                 .holds = std::string(name_of(model.files.kind)),
                 .runs = model.files.runs};
    const auto old = std::ranges::find(known, model.files.path, &ModelEntry::path);
    one.is_new = old == known.end();
    if (!one.is_new) one.entry = *old;
    // Links that somebody chose stay.
    for (const auto& [link, found] :
         {std::pair(&one.entry.weights, &model.weights), {&one.entry.gpu, &model.gpu}}) {
      if (!link->empty() || found->empty()) continue;
      *link = *found;
      one.links_are_new = true;
    }
    const std::string name = one.entry.name;
    for (int i = 2; one.is_new && !taken.insert(one.entry.name).second; ++i)
      one.entry.name = text("{}-{}", name, i);
    out.push_back(std::move(one));
  }
  return out;
}

void print_scan_json(const ScanResult& scan, const ScanGroups& groups, const std::vector<Proposal>& models) {
  nlohmann::ordered_json out = {{"folders", scan.folders},
                                {"models", nlohmann::ordered_json::array()},
                                {"unlinked", nlohmann::ordered_json::array()},
                                {"problems", nlohmann::ordered_json::array()}};
  for (const Proposal& one : models) {
    const ModelEntry& entry = one.entry;
    out["models"].push_back({{"name", entry.name},
                             {"path", entry.path},
                             {"kind", entry.kind},
                             {"holds", one.holds},
                             {"architecture", entry.architecture},
                             {"size", entry.size},
                             {"experts", entry.experts},
                             {"active", entry.active},
                             {"weights", entry.weights},
                             {"gpu", entry.gpu},
                             {"runs", one.runs},
                             {"status", one.status()}});
  }
  for (const ModelFiles& files : groups.lonely)
    out["unlinked"].push_back({{"path", files.path}, {"holds", name_of(files.kind)}, {"size", files.bytes}});
  for (const ScanProblem& problem : scan.problems)
    out["problems"].push_back({{"path", problem.path}, {"reason", problem.reason}});
  print_model_json(out);
}

void print_scan(const ScanResult& scan, const ScanGroups& groups, const std::vector<Proposal>& models) {
  Table table({"", "name", "architecture", "size", "experts", "path"}, 6);
  for (const Proposal& one : models) {
    const ModelEntry& entry = one.entry;
    table.add({one.status(), entry.name, entry.architecture, human_bytes(entry.size),
               experts_text(entry.active, entry.experts), entry.path});
    if (!entry.weights.empty()) table.add({"", "", "", "", "CPU weights", entry.weights});
    if (!entry.gpu.empty()) table.add({"", "", "", "", "GPU weights", entry.gpu});
  }
  if (!models.empty()) std::printf("%s\n", table.str().c_str());
  for (const ModelFiles& files : groups.lonely)
    std::printf("CPU weights of no model found here: %s (kt model add NAME PATH --weights links them)\n",
                files.path.c_str());
  std::fflush(stdout);  // both streams may go to one place, and this one is sent in blocks
  for (const ScanProblem& problem : scan.problems)
    std::fprintf(stderr, "kt: left out: %s: %s\n", problem.path.c_str(), problem.reason.c_str());
  std::printf("%s in %s\n", counted(static_cast<int64_t>(models.size()), "model").c_str(),
              counted(static_cast<int64_t>(scan.folders), "folder").c_str());
}

void run_scan(const ScanFlags& flags) {
  StatusLine status;
  auto last = std::chrono::steady_clock::now();
  ScanOptions options{.depth = flags.depth};
  options.progress = [&](size_t folders, size_t found) {
    const auto now = std::chrono::steady_clock::now();
    if (now - last < std::chrono::milliseconds(100)) return;
    last = now;
    status.show(text("{} folders, {} found", folders, found));
  };
  ScanResult scan = scan_folders(roots_of(flags), options);
  status.show("");
  std::erase_if(scan.found, [&](const ModelFiles& files) {
    return static_cast<double>(files.bytes) < flags.least_gb * 1e9;
  });
  const ScanGroups groups = group_findings(scan.found);
  const std::vector<Proposal> models = proposals_of(groups);
  std::vector<ModelEntry> fresh;
  for (const Proposal& one : models)
    if (one.runs && (one.is_new || one.links_are_new)) fresh.push_back(one.entry);
  if (flags.json)
    print_scan_json(scan, groups, models);
  else
    print_scan(scan, groups, models);
  if (flags.add && !fresh.empty()) put_models(fresh);
  if (flags.json || fresh.empty()) return;
  if (flags.add)
    std::printf("added or completed %zu; kt model list shows them\n", fresh.size());
  else
    std::printf("%zu not registered yet, or not with these links: kt model scan --add registers them\n",
                fresh.size());
}

struct VerifyFlags {
  std::string model;
  bool json = false, quick = false, hub = false, verbose = false;
};

// Of the commit that a snapshot is called by, or that a download recorded; else of the newest.
std::vector<HubFile> listed_by_hub(const ResolvedModel& model, const std::string& folder) {
  const auto record = read_record(folder);
  const std::string name = record               ? record->repo.str()
                           : model.repo.empty() ? repo_of_folder(folder)
                                                : model.repo;
  const auto repo = parse_repo(name);
  if (!repo)
    fail(tr("{}: nothing says which repository it came from; kt model edit NAME --repo ORG/REPO does"),
         folder);
  const HubSource source = record ? record->source : usual_source();
  std::string revision = record ? record->commit : std::filesystem::path(folder).filename().string();
  if (!record && !is_hex(revision, 40)) revision = source == HubSource::kModelScope ? "master" : "main";
  return HubClient(source).list(*repo, revision).files;
}

VerifyReport verified(const ResolvedModel& model, const VerifyFlags& flags) {
  VerifyOptions options{.checksums = !flags.quick, .progress = show_progress(flags.json)};
  if (flags.hub)
    options.hub_listing = [&](const std::string& folder) { return listed_by_hub(model, folder); };
  return verify_model(model, options);
}

nlohmann::ordered_json verify_json(const std::string& name, const std::string& path,
                                   const VerifyReport& report) {
  nlohmann::ordered_json out = {{"model", name},
                                {"path", path},
                                {"ok", report.faults.empty()},
                                {"checks", report.checks},
                                {"hashed_bytes", report.hashed},
                                {"faults", nlohmann::ordered_json::array()}};
  for (const VerifyFault& fault : report.faults)
    out["faults"].push_back({{"path", fault.path}, {"reason", fault.reason}});
  return out;
}

void print_verified(const VerifyReport& report, const VerifyFlags& flags) {
  for (const std::string& line : report.checks) std::printf("checked  %s\n", line.c_str());
  if (flags.verbose)
    for (const std::string& line : report.sums) std::printf("right    %s\n", line.c_str());
  for (const VerifyFault& fault : report.faults)
    std::printf("%s  %s: %s\n", inked(Ink::kBad, "fault").c_str(), fault.path.c_str(), fault.reason.c_str());
  if (report.faults.empty()) std::printf("%s\n", inked(Ink::kGood, "whole").c_str());
  std::fflush(stdout);
}

void run_verify(const VerifyFlags& flags) {
  const ResolvedModel model = find_model(flags.model);
  const VerifyReport report = verified(model, flags);
  if (flags.json)
    print_model_json(verify_json(flags.model, model.path, report));
  else
    print_verified(report, flags);
  std::fflush(stdout);
  if (!report.faults.empty())
    fail("{}: {}", flags.model, counted(static_cast<int64_t>(report.faults.size()), "fault"));
}

void run_verify_all(const VerifyFlags& flags) {
  const std::vector<ModelEntry> entries = registered_models();
  auto out = nlohmann::ordered_json::array();
  std::vector<std::string> broken;
  for (const ModelEntry& entry : entries) {
    const ResolvedModel model{.path = entry.path,
                              .weights = entry.weights,
                              .gpu = entry.gpu,
                              .name = entry.name,
                              .repo = entry.repo};
    if (!flags.json) std::printf("%s\n", entry.name.c_str());
    const VerifyReport report = verified(model, flags);
    if (flags.json)
      out.push_back(verify_json(entry.name, entry.path, report));
    else
      print_verified(report, flags);
    if (!report.faults.empty()) broken.push_back(entry.name);
  }
  if (flags.json) print_model_json(out);
  if (!flags.json && entries.empty()) std::printf("no model is registered yet\n");
  std::fflush(stdout);
  if (!broken.empty())
    fail("{} of {} have faults: {}", broken.size(), counted(static_cast<int64_t>(entries.size()), "model"),
         shown_list(broken));
}

void add_verify_flags(CLI::App& verb, VerifyFlags& flags) {
  verb.add_flag("--quick", flags.quick, "Sizes and headers only, no checksums");
  verb.add_flag("--hub", flags.hub, "Ask the hub for sizes and sums, also where none were stored");
  verb.add_flag("-v,--verbose", flags.verbose, "Also list each file whose sum was right");
  verb.add_flag("--json", flags.json, "Print JSON");
}

}  // namespace

void add_model_scan(CLI::App& model, Invocation& run) {
  CLI::App* const verb = model.add_subcommand("scan", "Find models below folders");
  const auto flags = std::make_shared<ScanFlags>();
  verb->add_option("PATH", flags->paths, "Folders; default: those of kt model path-list");
  verb->add_flag("--add", flags->add, "Register what is new");
  verb->add_option("--min-size", flags->least_gb, "Leave out models of fewer GB (10^9 bytes)")
      ->check(CLI::NonNegativeNumber);
  verb->add_option("--max-depth", flags->depth, "Folders below the ones given to look into")
      ->check(within(0, 64))
      ->capture_default_str();
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Finds Hugging Face folders, .gguf files, CPU weights (kt quant) and GPU weights "
      "(compressed-tensors).\n"
      "Weights are linked to a model of the same architecture and sizes if their manifest lists its files, "
      "or\n"
      "their name begins with its name.\n\n"
      "Example:\n  kt model scan /data --add --min-size 2");
  verb->callback([&run, flags] { run.action = [flags] { run_scan(*flags); }; });
}

void add_model_verify(CLI::App& model, Invocation& run) {
  CLI::App* const verb = model.add_subcommand("verify", "Check that a model on disk is whole");
  const auto flags = std::make_shared<VerifyFlags>();
  verb->add_option("MODEL", flags->model, "A name, or a path; a name's linked weights are checked too")
      ->required();
  add_verify_flags(*verb, *flags);
  verb->footer(
      "Files, headers, every tensor of the architecture; sums where kt_manifest.json or the hub's "
      "listing\n"
      "knows them. Exit code 2 with a list if anything is wrong.\n\n"
      "Example:\n  kt model verify qwen3");
  verb->callback([&run, flags] { run.action = [flags] { run_verify(*flags); }; });
  CLI::App* const all = model.add_subcommand("verify-all", "Check that every registered model is whole");
  add_verify_flags(*all, *flags);
  all->footer(
      "Goes on after a fault. Exit code 2 if any model has one.\n\nExample:\n  kt model verify-all --quick");
  all->callback([&run, flags] { run.action = [flags] { run_verify_all(*flags); }; });
}

}  // namespace kt::inline cli
