// The output side of a conversion: one shard being written, and the folder's own record of what is finished.
// Used by conversion.cc alone.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "weights/plans/conversion.h"

namespace kt {

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

// A finished shard as the record keeps it.
struct ShardRecord {
  std::vector<WrittenFile> files;
  PieceReport report;
};

// What the output folder says about itself. While a conversion runs, `.kt_progress/` holds the settings, one
// small file for each finished shard (written before the shard gets its name, so a shard without one does not
// count), and a lock; the manifest replaces all of it at the end.
class OutputRecord {
 public:
  // Takes the lock; Error if another process has it. Removes what killed runs left half-written.
  OutputRecord(std::string output, const ConversionPlan& plan, const ConversionOptions& options);
  ~OutputRecord();
  OutputRecord(const OutputRecord&) = delete;

  // The record of a shard that an earlier run finished and whose files have the recorded sizes; null
  // otherwise.
  const ShardRecord* finished(size_t shard) const;
  // Whether the shard's file or folder exists at all, whoever wrote it.
  bool exists(size_t shard) const;
  void add(size_t shard, ShardRecord record);  // any thread

  // For what ConversionPlan::prepare keeps.
  std::string work_folder() const;
  // The index where the plan wants one and no shard is missing, side files, manifest; then the progress
  // folder goes.
  void finish();

 private:
  void check_resumable(const ConversionOptions& options) const;
  void check_same(const Json& before) const;
  void clear_for_overwrite() const;
  void remove_leftovers() const;
  void read_records();
  std::string progress(std::string_view name) const;
  Json manifest() const;
  void write_index();
  void write_side(const std::string& name, std::span<const std::byte> bytes);

  std::string output_;
  const ConversionPlan& plan_;
  int lock_ = -1;
  std::vector<std::unique_ptr<ShardRecord>> records_;  // [shards]
  std::vector<WrittenFile> side_;
};

}  // namespace kt
