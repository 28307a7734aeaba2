// A repository's files onto this disk: into the hub cache's own layout, so that other tools find them, or into a
// folder. Several files and ranges at once; killed at any moment, the same request goes on. A file appears under its
// name once its sum is right, and a record of all that was wanted stands there before the first of them (hub/cache.h).
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hub/cache.h"
#include "hub/hub_client.h"

namespace kt::inline hub {

struct DownloadProgress {
  uint64_t bytes = 0,
           total = 0;    // of all files that were not there before; those of earlier runs count as come
  uint64_t fetched = 0;  // by this run
  size_t files = 0, files_done = 0;
  double seconds = 0;
};

struct DownloadRequest {
  RepoId repo;
  HubSource source = HubSource::kHuggingFace;
  std::string revision;              // "": main, of ModelScope master
  std::vector<std::string> include;  // patterns; none: what a model needs (see select_files)
  std::string file;                  // one .gguf, with the other parts of its set; "": by `include`
  std::string folder;                // plain files there; "": the cache of the source
  uint64_t piece = uint64_t{16} << 20;
  int connections = 8;
  bool fresh = false;  // parts of files that an earlier run left are thrown away
  std::function<void(const DownloadProgress&)> progress = {};
  std::function<void(const std::string&)> note = {};
};

struct DownloadResult {
  std::string path;      // the folder, or the .gguf file that was asked for
  uint64_t fetched = 0;  // bytes that came over the network
};

// What of a model's repository is worth fetching: not the same weights in other formats (pickles, onnx, "original/"),
// and of .gguf files one set. Error in one line where nothing is left, or several sets are.
struct FileChoice {
  std::vector<HubFile> wanted;
  size_t left_out = 0;
};
FileChoice select_files(const RepoListing& listing, const DownloadRequest& request);

class Download {
 public:
  explicit Download(DownloadRequest request);  // asks for the listing; Error if the hub has none for us
  ~Download();

  const RepoListing& listing() const { return listing_; }
  const FileChoice& choice() const { return choice_; }
  uint64_t bytes() const;           // of all wanted files
  uint64_t bytes_to_fetch() const;  // of those that are not here yet, judged by their sizes
  const std::string& folder() const { return folder_; }
  // A small file that is wanted, before the others: config.json. "" if the repository has none.
  std::string read(const std::string& path);

  DownloadResult run();  // Error(kMemory) when the disk is too small, before the first byte

 private:
  DownloadRequest request_;
  HubClient client_;
  RepoListing listing_;
  FileChoice choice_;
  std::string folder_;  // where the files are seen: the snapshot, or the plain folder
};

}  // namespace kt::inline hub
