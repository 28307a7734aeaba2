// Models and weights below folders, and which belong together.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "cli/registry/model_files.h"

namespace kt::inline cli {

struct ScanProblem {
  std::string path, reason;
};

struct ScanOptions {
  int depth = 6;             // folders below the one given
  size_t folders = 200'000;  // visited at most, of all
  std::function<void(size_t folders, size_t found)> progress = {};
};

struct ScanResult {
  std::vector<ModelFiles> found;      // by path
  std::vector<ScanProblem> problems;  // unreadable folders, broken models; none of them ends the scan
  size_t folders = 0;                 // visited
};

// Walks the folders, each once. Links to folders are followed within what is scanned; one that leads out of it
// is a problem that names where to. Hidden folders and the insides of models are left out.
ScanResult scan_folders(const std::vector<std::string>& roots, const ScanOptions& options);

// A scan's findings as models with their weights.
struct ScanModel {
  ModelFiles files;
  std::string weights, gpu;  // paths of what belongs to it; the largest where there are several
};

struct ScanGroups {
  std::vector<ScanModel> models;   // GPU weights without a model are one of their own
  std::vector<ModelFiles> lonely;  // CPU weights without a model
};

ScanGroups group_findings(const std::vector<ModelFiles>& found);

}  // namespace kt::inline cli
