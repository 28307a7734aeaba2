// kt model download: files of a hub onto this disk.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <set>

#include "base/error.h"
#include "cli/registry/aliases.h"
#include "cli/registry/fetch_model.h"
#include "cli/registry/model_verb.h"
#include "hub/download.h"
#include "models/families.h"
#include "terminal/amounts.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

struct DownloadFlags {
  std::string repo, source, revision, folder, piece = "16MiB";
  std::vector<std::string> include;
  int connections = 8;
  bool json = false, dataset = false, resume = true, yes = false;
};

ModelReference reference_of(const DownloadFlags& flags) {
  if (flags.dataset) {
    if (const auto repo = parse_repo(flags.repo, RepoKind::kDataset)) return {.repo = *repo, .file = {}};
    fail(tr("'{}' is no dataset of a hub: expected ORG/NAME or NAME"), shown(flags.repo));
  }
  if (const auto reference = parse_model_reference(flags.repo)) return *reference;
  const ModelAlias* const alias = find_alias(flags.repo);
  if (!alias)
    fail(tr("'{}' is no repository of a hub: expected ORG/REPO, ORG/REPO:FILE.gguf, or a short name such as "
            "{}"),
         shown(flags.repo), known_aliases().front().names);
  if (!runs_family(alias->type))
    std::fprintf(stderr, "note: %s is of family %s, which this version does not run\n",
                 std::string(alias->repository).c_str(), std::string(alias->type).c_str());
  const auto repo = parse_repo(alias->repository);
  KT_CHECK(repo, "{}", alias->repository);
  return {.repo = *repo, .file = {}};
}

HubSource source_of(const DownloadFlags& flags) {
  if (flags.source.empty()) return usual_source();
  return flags.source == "modelscope" ? HubSource::kModelScope : HubSource::kHuggingFace;
}

// What lies in a folder of its own is found by its repository through the registry.
void register_folder(const ModelReference& reference, const std::string& path) {
  std::optional<ModelFiles> files;
  try {
    files = try_inspect_model(path);
  } catch (const Error&) {  // some files of a model are none
  }
  if (!files || files->kind == FilesKind::kCpuWeights) return;
  const std::vector<ModelEntry> known = registered_models();
  ModelEntry entry = entry_of(files->name, *files);
  if (const auto old = std::ranges::find(known, files->path, &ModelEntry::path); old != known.end())
    entry = *old;
  std::set<std::string> taken{std::string(kDemoName)};
  for (const ModelEntry& each : known)
    if (each.path != entry.path) taken.insert(each.name);
  const std::string name = entry.name;
  for (int i = 2; taken.contains(entry.name); ++i) entry.name = text("{}-{}", name, i);
  entry.repo = reference.repo.str();
  put_models({entry});
}

void print_download(const DownloadFlags& flags, const ModelReference& reference, const Download& download,
                    const DownloadResult& result) {
  const RepoListing& listing = download.listing();
  if (flags.json)
    return print_model_json({{"repository", listing.repo.str()},
                             {"revision", listing.revision},
                             {"commit", listing.commit},
                             {"path", result.path},
                             {"files", download.choice().wanted.size()},
                             {"left_out", download.choice().left_out},
                             {"bytes", download.bytes()},
                             {"fetched", result.fetched}});
  std::printf("%s\n", result.path.c_str());
  std::printf("%s, %s, %s of them fetched now; sums agree with the hub's\n",
              counted(static_cast<int64_t>(download.choice().wanted.size()), "file").c_str(),
              human_bytes(download.bytes()).c_str(), human_bytes(result.fetched).c_str());
  if (download.choice().left_out > 0 && flags.include.empty())
    std::printf("%s that kt does not read left out; --include '*' fetches all\n",
                counted(static_cast<int64_t>(download.choice().left_out), "file").c_str());
  if (flags.dataset)
    std::printf("next: kt quant gpu MODEL -o OUT --dataset %s\n", listing.repo.str().c_str());
  else if (flags.include.empty())
    std::printf("next: kt run %s\n", reference.str().c_str());
}

void run_download(const DownloadFlags& flags) {
  const ModelReference reference = reference_of(flags);
  if (flags.dataset && source_of(flags) == HubSource::kModelScope)
    fail(tr("--dataset: datasets are downloaded from the hub alone; --source hf"));
  Download download(
      {.repo = reference.repo,
       .source = source_of(flags),
       .revision = flags.revision,
       .include = flags.include,
       .file = reference.file,
       .folder = flags.folder.empty() ? "" : absolute_path(flags.folder),
       .piece = parse_bytes(flags.piece, "--piece-size"),
       .connections = flags.connections,
       .fresh = !flags.resume,
       .progress = show_download(flags.json),
       .note = [](const std::string& line) { std::fprintf(stderr, "note: %s\n", line.c_str()); }});
  const RepoListing& listing = download.listing();
  if (!flags.json)
    std::fprintf(stderr, "%s at %s: %s, %s, %s to fetch\n", reference.str().c_str(), listing.commit.c_str(),
                 counted(static_cast<int64_t>(download.choice().wanted.size()), "file").c_str(),
                 human_bytes(download.bytes()).c_str(), human_bytes(download.bytes_to_fetch()).c_str());
  const DownloadResult result = download.run();
  if (!flags.folder.empty() && !flags.dataset) register_folder(reference, result.path);
  print_download(flags, reference, download, result);
}

}  // namespace

void add_model_download(CLI::App& model, Invocation& run) {
  CLI::App* const verb = model.add_subcommand("download", "Fetch a model from a hub, or go on fetching it");
  const auto flags = std::make_shared<DownloadFlags>();
  verb->add_option("REPO", flags->repo, "ORG/REPO, ORG/REPO:FILE.gguf, or a short name")->required();
  verb->add_option("-t,--source,--repo-type", flags->source, "Which hub; default: model.source of kt config")
      ->check(CLI::IsMember({"hf", "huggingface", "modelscope"}));
  verb->add_option("--revision", flags->revision, "A branch, a tag or a commit; default: main");
  verb->add_option("--include", flags->include, "Only files that match, such as '*.json'; may be repeated")
      ->allow_extra_args(false);
  verb->add_option("-d,--local-dir", flags->folder,
                   "Write plain files there; default: the cache that the hub's tools use");
  verb->add_flag(
      "--resume,!--no-resume", flags->resume,
      "Whether to go on where an earlier download of it stopped (--no-resume: from the first byte)");
  verb->add_flag("-y,--yes", flags->yes, "Accepted; nothing is asked");
  verb->add_flag("--dataset", flags->dataset, "REPO is a dataset");
  verb->add_option("--connections", flags->connections, "Connections at once")
      ->check(within(1, 64))
      ->capture_default_str();
  verb->add_option("--piece-size", flags->piece,
                   "Bytes to ask for at once; a killed download loses no more of each")
      ->check([](const std::string& value) -> std::string {
        const uint64_t bytes = parse_bytes(value, "--piece-size");
        return bytes >= 4096 && bytes <= uint64_t{1} << 32 ? "" : "expected 4KiB to 4GiB, got " + value;
      })
      ->capture_default_str();
  verb->add_flag("--json", flags->json, "Print JSON");
  std::string names;
  for (const ModelAlias& alias : known_aliases()) names += text("  {}  {}\n", alias.repository, alias.names);
  verb->footer(
      "The hub's own variables count: HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, "
      "https_proxy.\n"
      "Killed or cut off, the same command goes on where it was. Sums are checked; sets that are not whole "
      "never\n"
      "pass for a model.\n\n"
      "Short names:\n" +
      names +
      "\nExamples:\n"
      "  kt model download Qwen/Qwen3-30B-A3B\n"
      "  kt model download Qwen/Qwen3-30B-A3B-GGUF:Qwen3-30B-A3B-Q4_K_M.gguf --local-dir /data/qwen3\n"
      "  kt model download m2 -t modelscope -d ./m2\n"
      "  kt model download HuggingFaceH4/ultrachat_200k --dataset");
  verb->callback([&run, flags] { run.action = [flags] { run_download(*flags); }; });
}

}  // namespace kt::inline cli
