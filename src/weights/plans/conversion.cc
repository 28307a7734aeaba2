#include "weights/plans/conversion.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <mutex>

#include "base/error.h"
#include "base/mapped_faults.h"
#include "base/memory.h"
#include "base/pool.h"
#include "weights/plans/conversion_output.h"

namespace kt::inline weights {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// Everything but the pieces' scratch: headers, the plan itself, code.
constexpr uint64_t kFixedMemory = 64u << 20;

bool inside(const fs::path& inner, const fs::path& outer) {
  const auto [at, rest] = std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end());
  return at == outer.end();
}

void check_folders(const std::string& input, const std::string& output) {
  if (output.empty()) fail("no folder to write was given; `output` names it");
  if (input.empty()) return;
  fs::path from = fs::weakly_canonical(input), to = fs::weakly_canonical(output);
  if (!fs::is_directory(from)) from = from.parent_path();
  if (from == to) fail("{}: input and output are the same folder", output);
  // A file's folder may hold anything, the output too.
  if (!fs::is_regular_file(input) && inside(to, from))
    fail("{}: the output lies inside the input {}", output, input);
  if (inside(from, to)) fail("{}: the output contains the input {}", output, input);
}

void check_resume_layer(const ConversionPlan& plan, const ConversionOptions& options) {
  int last = -1;
  for (const ShardPlan& shard : plan.shards) last = std::max(last, shard.layer);
  if (options.resume_layer && *options.resume_layer > last)
    fail("`resume_layer` {}: the last layer with experts is {}", *options.resume_layer, last);
}

// The nearest folder that exists, for asking about the disk.
fs::path existing_parent(fs::path path) {
  path = fs::absolute(path);
  while (!fs::exists(path) && path.has_parent_path() && path != path.parent_path()) path = path.parent_path();
  return path;
}

// `work`: bytes of a folder that is gone at the end, beside the output's.
void check_disk(const std::string& output, uint64_t bytes, uint64_t work) {
  const uint64_t needed = bytes + work;
  struct statvfs facts{};
  if (statvfs(existing_parent(output).c_str(), &facts) != 0) return;  // writing will tell
  const uint64_t free = static_cast<uint64_t>(facts.f_bavail) * facts.f_frsize;
  if (needed > free)
    fail_as(ErrorKind::kMemory,
            "{}: not enough disk: the output needs {} ({} bytes){}, {} ({} bytes) are free", output,
            human_bytes(bytes), bytes,
            work == 0 ? std::string() : text(" and the work on it {} ({} bytes)", human_bytes(work), work),
            human_bytes(free), free);
}

uint64_t folder_bytes(const std::string& folder) {
  uint64_t sum = 0;
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(folder, code)) {
    const uint64_t size = entry.is_regular_file(code) ? entry.file_size(code) : 0;
    sum += code ? 0 : size;
  }
  return sum;
}

int workers_for(const ConversionPlan& plan, const ConversionOptions& options) {
  uint64_t largest = 1, pieces = 0;
  for (const ShardPlan& shard : plan.shards)
    for (const Piece& piece : shard.pieces) {
      largest = std::max(largest, piece.scratch_bytes);
      ++pieces;
    }
  const uint64_t available = available_memory();
  const uint64_t bound = options.max_memory == 0 ? available : std::min(options.max_memory, available);
  if (bound < kFixedMemory + largest)
    fail_as(ErrorKind::kMemory, "not enough memory: one worker needs {}, {} {}",
            human_bytes(kFixedMemory + largest), human_bytes(bound),
            bound == available ? "are available" : "are allowed by `max_memory`");
  // More workers than cpus gain nothing; people paste the numbers of bigger machines.
  const Topology machine = Topology::discover();
  const int threads = options.threads <= 0 ? machine.cores() : std::min(options.threads, machine.pus());
  return static_cast<int>(std::clamp<uint64_t>(
      (bound - kFixedMemory) / largest, 1,
      std::min<uint64_t>(static_cast<uint64_t>(threads), std::max<uint64_t>(pieces, 1))));
}

// A shard while its pieces are worked on.
struct OpenShard {
  size_t number = 0;  // in the plan
  std::once_flag opened;
  std::unique_ptr<ShardSink> sink;
  std::vector<PieceReport> reports;  // [pieces]
  std::atomic<size_t> left{0};
};

class Driver {
 public:
  Driver(const ConversionPlan& plan, const ConversionOptions& options, OutputRecord& record)
      : plan_(plan), options_(options), record_(record) {}

  void choose_shards(ConversionResult& result);
  uint64_t bytes_to_write() const;
  bool any_left() const { return !shards_.empty(); }
  void run(int threads);
  void tally(ConversionResult& result) const;

 private:
  void work(const Worker& worker);
  void finish_shard(OpenShard& shard);
  void report(bool always);

  const ConversionPlan& plan_;
  const ConversionOptions& options_;
  OutputRecord& record_;
  std::vector<std::unique_ptr<OpenShard>> shards_;
  struct Item {
    OpenShard* shard;
    size_t piece;
  };
  std::vector<Item> items_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};

  std::mutex progress_mutex_;
  ConversionProgress progress_;
  const Clock::time_point begun_ = Clock::now();
  Clock::time_point start_ = begun_, shown_{};  // of the pieces
  std::atomic<uint64_t> read_{0};
};

void Driver::choose_shards(ConversionResult& result) {
  for (size_t i = 0; i < plan_.shards.size(); ++i) {
    const ShardPlan& shard = plan_.shards[i];
    if (record_.finished(i)) {
      ++result.shards_kept;
      continue;
    }
    if (options_.resume_layer && shard.layer >= 0 && shard.layer < *options_.resume_layer) {
      ++(record_.exists(i) ? result.shards_kept : result.shards_skipped);
      continue;
    }
    auto open = std::make_unique<OpenShard>();
    open->number = i;
    open->reports.resize(shard.pieces.size());
    open->left = shard.pieces.size();
    for (size_t piece = 0; piece < shard.pieces.size(); ++piece) {
      items_.push_back({open.get(), piece});
      progress_.source_total += shard.pieces[piece].source_bytes;
    }
    shards_.push_back(std::move(open));
  }
  progress_.shards = shards_.size();
}

uint64_t Driver::bytes_to_write() const {
  uint64_t bytes = 1 << 20;  // manifest and index of a small model
  for (const auto& shard : shards_) bytes += shard_bytes(plan_.shards[shard->number]);
  for (const SideFile& file : plan_.side_files) {
    std::error_code code;
    const uint64_t size = file.from.empty() ? file.text.size() : fs::file_size(file.from, code);
    bytes += code ? 0 : size;
  }
  return bytes;
}

void Driver::finish_shard(OpenShard& shard) {
  ShardRecord record;
  for (const PieceReport& piece : shard.reports) {
    record.report.gate.add(piece.gate);
    record.report.up.add(piece.up);
    record.report.down.add(piece.down);
    record.report.output.add(piece.output);
  }
  record.files = shard.sink->digest();
  check_mapped_files();
  if (plan_.check_source) plan_.check_source();
  record_.add(shard.number, std::move(record));
  shard.sink->commit();
  shard.sink.reset();
  const std::lock_guard lock(progress_mutex_);
  ++progress_.shards_done;
  progress_.written_bytes += shard_bytes(plan_.shards[shard.number]);
  if (plan_.shards[shard.number].layer >= 0) progress_.layer = plan_.shards[shard.number].layer;
}

void Driver::report(bool always) {
  if (!options_.progress) return;
  std::unique_lock lock(progress_mutex_, std::defer_lock);
  if (always) {
    lock.lock();
  } else if (!lock.try_lock()) {
    return;
  }
  const auto now = Clock::now();
  if (!always && now - shown_ < std::chrono::milliseconds(100)) return;
  shown_ = now;
  progress_.source_bytes = read_;
  progress_.seconds = std::chrono::duration<double>(now - start_).count();
  options_.progress(progress_);
}

void Driver::work(const Worker&) {
  Scratch scratch;
  try {
    while (!stop_) {
      const size_t at = next_.fetch_add(1);
      if (at >= items_.size()) return;
      OpenShard& shard = *items_[at].shard;
      const ShardPlan& plan = plan_.shards[shard.number];
      std::call_once(shard.opened, [&] { shard.sink = open_shard(plan_.output, plan); });
      const Piece& piece = plan.pieces[items_[at].piece];
      piece.run(*shard.sink, scratch, shard.reports[items_[at].piece]);
      read_ += piece.source_bytes;
      if (shard.left.fetch_sub(1) == 1) finish_shard(shard);
      report(false);
    }
  } catch (...) {
    stop_ = true;
    throw;
  }
}

void Driver::run(int threads) {
  start_ = Clock::now();
  if (!items_.empty()) {
    Pool pool({.threads = threads});
    pool.run([this](const Worker& worker) { work(worker); });
  }
  // A plan may hold shards without pieces: all their tensors are empty.
  for (const auto& shard : shards_)
    if (plan_.shards[shard->number].pieces.empty()) {
      shard->sink = open_shard(plan_.output, plan_.shards[shard->number]);
      finish_shard(*shard);
    }
  report(true);
}

void Driver::tally(ConversionResult& result) const {
  result.source_bytes = read_;
  result.written_bytes = progress_.written_bytes;
  result.shards_written = progress_.shards_done;
  result.seconds = std::chrono::duration<double>(Clock::now() - begun_).count();
  result.prepare_seconds = std::chrono::duration<double>(start_ - begun_).count();
  for (size_t i = 0; i < plan_.shards.size(); ++i) {
    const ShardRecord* record = record_.finished(i);
    if (record && plan_.shards[i].layer >= 0)
      result.layers.push_back({plan_.shards[i].layer, plan_.shards[i].file, record->report});
  }
}

}  // namespace

ConversionResult run_conversion(const ConversionPlan& plan, const ConversionOptions& options) try {
  ConversionResult result;
  check_folders(plan.input, plan.output);
  check_resume_layer(plan, options);
  result.threads = workers_for(plan, options);
  // Before anything is created: a conversion from nothing that cannot fit leaves no trace.
  const bool fresh = !fs::exists(plan.output);
  if (fresh) {
    uint64_t bytes = 0;
    for (const ShardPlan& shard : plan.shards) bytes += shard_bytes(shard);
    check_disk(plan.output, bytes, plan.prepare_bytes);
  }
  OutputRecord record(plan.output, plan, options);
  record.check_finished(result.threads, [&, start = Clock::now(), shown = Clock::time_point()](
                                            uint64_t read, uint64_t total) mutable {
    const auto now = Clock::now();
    if (!options.progress || now - shown < std::chrono::milliseconds(100)) return;
    shown = now;
    options.progress({.checked_bytes = read,
                      .check_total = total,
                      .seconds = std::chrono::duration<double>(now - start).count()});
  });
  Driver driver(plan, options, record);
  driver.choose_shards(result);
  const bool prepare = plan.prepare && driver.any_left();
  const uint64_t kept = prepare ? folder_bytes(record.work_folder()) : 0;
  check_disk(plan.output, driver.bytes_to_write(),
             prepare && plan.prepare_bytes > kept ? plan.prepare_bytes - kept : 0);
  if (prepare) plan.prepare(record.work_folder());
  driver.run(result.threads);
  record.finish();
  driver.tally(result);
  return result;
} catch (const fs::filesystem_error& error) {
  fail("{}: {}", error.path1().string(), error.code().message());
}

}  // namespace kt::inline weights
