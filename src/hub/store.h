// Where the files of a download go: a hub cache's blobs, snapshots and refs, or a plain folder.
#pragma once
#include <string>
#include <vector>

#include "hub/cache.h"
#include "hub/hub_client.h"

namespace kt::inline hub {

class Store {
 public:
  // `folder` "": the cache of `source`.
  Store(const RepoListing& listing, HubSource source, const std::string& folder);

  const std::string& folder() const { return folder_; }  // where files are seen under their names
  const std::string& state() const { return state_; }    // kt's own: lock, record, parts
  std::string part_path(const HubFile& file) const;

  // Whether the file is there under its name. One in a plain folder that no record vouches for is read: that takes as
  // long as its bytes, and seems_to_have() goes by its size.
  bool has(const HubFile& file) const;
  bool seems_to_have(const HubFile& file) const;
  // Gives a blob that another revision brought its name here, where there is one.
  bool adopt(const HubFile& file);

  void prepare();  // makes the folders
  // A part that is whole becomes the file of these names.
  void place(const std::string& part, const HubFile& file, const std::vector<std::string>& paths);
  // The revision means this commit from now on.
  void finish();

 private:
  bool is_cache() const { return !blobs_.empty(); }
  void link_blob(const std::string& blob, const std::string& path);

  const RepoListing& listing_;
  std::string folder_, state_, blobs_, refs_;  // the last two empty for a plain folder
  std::optional<DownloadRecord> before_;       // what an earlier download brought into a plain folder
};

}  // namespace kt::inline hub
