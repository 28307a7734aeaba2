// Moves the bytes of a download: pieces of files on several connections, tried again where a network fails, summed on a
// thread of their own as files become whole.
#pragma once
#include <string>
#include <vector>

#include "hub/download.h"
#include "hub/store.h"

namespace kt::inline hub {

struct TransferJob {
  HubFile file;
  std::vector<std::string> paths;  // all names of these bytes
};

// Bytes that came over the network. Error naming a file whose bytes are wrong twice, or cannot be had.
uint64_t transfer_files(HubClient& client, const RepoListing& listing, Store& store,
                        const DownloadRequest& request, std::vector<TransferJob> jobs);

}  // namespace kt::inline hub
