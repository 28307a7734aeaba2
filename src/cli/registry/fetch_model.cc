#include "cli/registry/fetch_model.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "cli/questions.h"
#include "cli/registry/aliases.h"
#include "cli/settings.h"
#include "hub/download.h"
#include "models/families.h"
#include "terminal/amounts.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "text/json.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

constexpr double kSecondsBetweenReports = 5;

std::string download_text(const DownloadProgress& at) {
  const double rate = at.seconds > 0 ? static_cast<double>(at.fetched) / at.seconds : 0;
  const double left = static_cast<double>(at.total - std::min(at.total, at.bytes));
  return text("{} of {}  {}/s  ETA {}  {} of {} files", human_bytes(at.bytes), human_bytes(at.total),
              human_bytes(static_cast<uint64_t>(rate)), rate > 0 ? duration(left / rate) : "?", at.files_done,
              at.files);
}

bool agrees(const Download& download, const std::string& name, const FetchConsent& consent) {
  if (consent.agreed) return true;
  Prompts prompts(stdin, stderr);
  return prompts.ask_yes(text(tr("{} is not on this disk. Download {} to {}"), name,
                              human_bytes(download.bytes_to_fetch()), download.folder()),
                         false);
}

// Before the weights: a config is a few kilobytes.
void refuse_what_cannot_run(Download& download, const std::string& name) {
  const std::string config = download.read("config.json");
  if (config.empty()) return;
  try {
    describe_model(parse_json(config, name + ": config.json"), name);
  } catch (const Error& error) {
    fail_as(error.kind(), tr("{}; nothing was downloaded"), error.what());
  }
}

void note_on_stderr(const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); }

}  // namespace

HubSource usual_source() {
  return load_settings().text("model.source") == "modelscope" ? HubSource::kModelScope
                                                              : HubSource::kHuggingFace;
}

std::function<void(const DownloadProgress&)> show_download(bool quiet) {
  if (quiet) return {};
  const auto line = std::make_shared<StatusLine>();
  const auto last = std::make_shared<double>(0);
  const bool terminal = ::isatty(STDERR_FILENO) != 0;
  return [=](const DownloadProgress& at) {
    if (terminal) return line->show(download_text(at));
    if (at.seconds - *last < kSecondsBetweenReports) return;
    *last = at.seconds;
    std::fprintf(stderr, "%s\n", download_text(at).c_str());
  };
}

ResolvedModel named_model(const std::string& model) {
  const auto found = locate_model(model);
  return found ? *found : find_model(model);  // which says what is known
}

void fetch_model(ResolvedModel& model, const FetchConsent& consent) {
  if (!model.absent) return;
  if (consent.use == ModelUse::kRun) refuse_unknown_family(model);
  if (!consent.agreed && !can_ask()) refuse_absent(model, tr_now("--download with this command or "));
  const ModelReference wanted = *model.absent;
  Download download({.repo = wanted.repo,
                     .source = usual_source(),
                     .revision = {},
                     .include = {},
                     .file = wanted.file,
                     .folder = {},
                     .progress = show_download(false),
                     .note = note_on_stderr});
  if (consent.use == ModelUse::kRun) refuse_what_cannot_run(download, wanted.str());
  if (!agrees(download, wanted.str(), consent)) fail(tr("{} was not downloaded"), wanted.str());
  const DownloadResult result = download.run();
  note_on_stderr(text("{}: {} downloaded to {}", wanted.str(), human_bytes(result.fetched), result.path));
  model.path = result.path;
  model.absent.reset();
}

void fetch_dataset(const std::string& name, const FetchConsent& consent) {
  std::error_code ignored;
  const std::string kind = std::filesystem::path(name).extension().string();
  const bool file =
      kind == ".jsonl" || kind == ".json" || kind == ".txt" || kind == ".parquet" || kind == ".csv";
  const auto repo = parse_repo(name, RepoKind::kDataset);
  if (!repo || file || std::filesystem::exists(name, ignored)) return;
  if (const auto cached = find_cached(*repo)) return refuse_unfinished(cached->path);
  if (!consent.agreed && !can_ask()) return;  // who opens it says what is missing
  Download download({.repo = *repo,
                     .revision = {},
                     .include = {},
                     .file = {},
                     .folder = {},
                     .progress = show_download(false),
                     .note = note_on_stderr});
  if (!agrees(download, "The dataset " + name, consent)) fail(tr("{} was not downloaded"), name);
  download.run();
}

}  // namespace kt::inline cli
