// Which files are meant by a path: a folder, a shard, an index, a part of a split set, a cache of the hub.
// Looks at names and at the index only.
#pragma once
#include <string>
#include <vector>

namespace kt::inline weights {

struct IndexEntry {
  std::string tensor;
  int file = 0;
};

struct CheckpointFiles {
  std::string folder;              // where config.json is looked for
  bool gguf = false;               // else safetensors
  std::vector<std::string> files;  // in the order of their numbers, else by name
  std::string index;               // path of the index the files came from; empty without one
  std::vector<IndexEntry> map;     // what it lists, by name
  // Several GGUF files that no numbering joins: whether they are one model is for their contents to say.
  bool unrelated = false;
};

// Error naming the path and all that is missing; see Checkpoint.
CheckpointFiles checkpoint_files(const std::string& path);

}  // namespace kt::inline weights
