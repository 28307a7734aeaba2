// Whether a model on disk is whole: files, headers, tensors of its architecture, checksums where some are
// known. Finds as many faults as it can, not the first one only. Reads, never writes.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cli/registry/registry.h"
#include "hub/repository.h"
#include "weights/plans/conversion.h"

namespace kt::inline cli {

struct VerifyOptions {
  bool checksums = true;  // read every byte that a checksum is known for
  std::function<void(const ConversionProgress&)> progress = {};
  // Files and sums of a folder as the hub lists them now; without it, those that were stored with the files.
  std::function<std::vector<HubFile>(const std::string& folder)> hub_listing = {};
};

struct VerifyFault {
  std::string path, reason;
};

struct VerifyReport {
  std::vector<std::string> checks;  // what was looked at, for people
  std::vector<std::string> sums;    // a line for each file whose sum is right
  std::vector<VerifyFault> faults;
  uint64_t hashed = 0;  // bytes
};

// The model and what is linked to it.
VerifyReport verify_model(const ResolvedModel& model, const VerifyOptions& options);

}  // namespace kt::inline cli
