// The output folder's own record of a conversion: what is finished, and what of an earlier one may go. Nothing
// outside of the folder is written or removed. Used by conversion.cc alone.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "weights/plans/shard_sink.h"

namespace kt::inline weights {

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
  // Takes the lock; Error if another process has it, or if a symbolic link stands where files of ours are.
  // Removes what killed runs left half-written.
  OutputRecord(std::string output, const ConversionPlan& plan, const ConversionOptions& options);
  ~OutputRecord();
  OutputRecord(const OutputRecord&) = delete;

  // Reads the files of shards that an earlier run finished and forgets those that do not have their recorded
  // sums: they are written again. `read` is told how many bytes were, from one thread at a time.
  void check_finished(int threads, const std::function<void(uint64_t read, uint64_t total)>& read);
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
  bool is_ours(const std::string& name) const;
  void refuse_links() const;
  void check_resumable(const ConversionOptions& options) const;
  void check_same(const Json& before) const;
  void clear_for_overwrite() const;
  void remove_side_files() const;
  void remove_leftovers() const;
  void read_records();
  std::string progress_folder() const;
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

}  // namespace kt::inline weights
