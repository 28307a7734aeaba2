// A file or a folder of an output while it is written: it appears under its name whole or not at all. Used by
// the conversion's driver and record alone.
#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "weights/plans/conversion.h"

namespace kt::inline weights {

struct WrittenFile {
  std::string name;  // relative to the output folder
  uint64_t bytes = 0;
  std::string sha256;
};

// A shard that appears under its name at commit(): a safetensors file, or a folder renamed into place as a
// whole.
class ShardSink : public ShardOutput {
 public:
  virtual std::vector<WrittenFile> digest() = 0;  // after the last write; reads the bytes back
  virtual void commit() = 0;                      // durable, then visible
};
std::unique_ptr<ShardSink> open_shard(const std::string& output, const ShardPlan& shard);
uint64_t shard_bytes(const ShardPlan& shard);  // on disk, headers included

// Of an errno that writing gave: a full disk or quota is a kind of its own.
ErrorKind write_error_kind(int code);
void make_folder(const std::filesystem::path& path);  // and those above it

}  // namespace kt::inline weights
