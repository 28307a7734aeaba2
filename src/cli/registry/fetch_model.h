// Models and datasets that were named and are not on this disk: offered for download, never fetched silently.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "cli/registry/registry.h"

namespace kt::inline hub {
struct DownloadProgress;
}  // namespace kt::inline hub

namespace kt::inline cli {

enum class ModelUse : uint8_t {
  kRun,      // a family that does not run here is refused before anything is fetched
  kConvert,  // its weights may be converted all the same
};

struct FetchConsent {
  bool agreed = false;  // --download; else the user is asked, on a terminal
  ModelUse use = ModelUse::kRun;
};

// What a name or a path means, absent or not; Error listing the known names where it means nothing.
ResolvedModel named_model(const std::string& model);

// Downloads an absent model and makes it one that is there; others stay as they are. Error with what to do where nobody
// agreed.
void fetch_model(ResolvedModel& model, const FetchConsent& consent);

// The same for a dataset of the hub that its cache does not have; does nothing for files, and names that are there.
void fetch_dataset(const std::string& name, const FetchConsent& consent);

// Shows a download's progress: a line that is replaced on a terminal, else a line every few seconds. `quiet`: none.
std::function<void(const DownloadProgress&)> show_download(bool quiet);

HubSource usual_source();  // model.source of kt config

}  // namespace kt::inline cli
