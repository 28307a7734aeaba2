// A conversion as a plan, and the one driver that runs every plan: claims pieces of work on all cores within
// a memory bound, writes each file whole or not at all, resumes after a kill with the same bytes, and ends
// with a manifest. What is in the files is the planner's business (kt_plan.h, compressed_plan.h, ...).
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "text/json.h"
#include "weights/plans/quality.h"
#include "weights/safetensors.h"

namespace kt::inline weights {

// Where a piece puts its bytes: tensor number of its shard, offset in that tensor. Any thread; each byte
// once.
class ShardOutput {
 public:
  virtual ~ShardOutput() = default;
  virtual void write(size_t tensor, uint64_t offset, std::span<const std::byte> bytes) = 0;
};

// Memory of one worker, kept between pieces. Grow what you need; a piece's total is its `scratch_bytes`.
struct Scratch {
  std::vector<float> values;
  std::vector<float> scales;
  std::vector<std::byte> packed;
  std::vector<std::byte> more;
};

// What a piece has to say about itself; figures of one shard are added up in the order of its pieces.
struct PieceReport {
  WeightError gate, up, down;  // or, where projections mean nothing, everything in gate
  WeightError output;          // of the expert's output on random inputs, where asked for
};

struct Piece {
  uint64_t source_bytes = 0;   // read by it, for progress
  uint64_t scratch_bytes = 0;  // anonymous memory it needs while it runs
  std::function<void(ShardOutput&, Scratch&, PieceReport&)> run;
};

// One safetensors file, or one folder of files that appear together (`folder`): then a tensor's name is its
// path in the output folder and its bytes are the whole file.
struct ShardPlan {
  std::string file;
  bool folder = false;
  int layer = -1;  // -1: no layer's (non-experts)
  std::vector<TensorSpec> tensors;
  Metadata metadata;
  std::vector<Piece> pieces;
};

// A small file beside the shards: the text, or a copy of `from`.
struct SideFile {
  std::string name;
  std::string text;
  std::string from;
};

struct ConversionPlan {
  std::string input,
      output;     // folders; input is only for messages and the check that neither contains the other
  Json settings;  // what the bytes depend on: method, parts, source files and, as "contents", what they hold
                  // (source_identity.h); resume demands equality
  std::vector<ShardPlan> shards;     // names final, in order
  std::vector<SideFile> side_files;  // config.json, tokenizer, ...; copied before the manifest
  bool index = true;                 // write model.safetensors.index.json
  // Work that pieces depend on: called once, before the first of them, if there is anything left to write.
  // The folder is for what it wants to keep: there again when an interrupted conversion is resumed, gone at
  // the end (after side files were copied).
  std::function<void(const std::string& folder)> prepare;
  uint64_t prepare_bytes = 0;  // of disk that it keeps there at most, beside the output
  // More words for a conversion that is refused because its settings were others: those before.
  std::function<std::string(const Json& before)> resume_hint;
  std::function<void()> check_source;  // throws if the source changed; called before each shard is committed
};

// The folder that `prepare` is given: side files may be copied from there.
std::string conversion_work_folder(const std::string& output);

struct ConversionProgress {
  // Of finished files that are read again before the first piece of a resumed conversion.
  uint64_t checked_bytes = 0, check_total = 0;
  uint64_t source_bytes = 0, source_total = 0, written_bytes = 0;
  size_t shards_done = 0, shards = 0;
  int layer = -1;      // last one finished
  double seconds = 0;  // since the first piece; what prepare took is not in it
};

struct ConversionOptions {
  int threads = 0;          // 0: all cores
  uint64_t max_memory = 0;  // 0: no bound but the machine's; fewer workers run when pieces would not fit
  bool resume = false;      // keep finished shards of the same settings that have the bytes they had
  std::optional<int> resume_layer;  // leave layers below it alone, finished or not
  bool overwrite = false;           // replace an output of other settings
  std::function<void(const ConversionProgress&)>
      progress;  // from worker threads, one at a time, a few times a second
};

struct LayerQuality {
  int layer = -1;
  std::string file;
  PieceReport report;
};

struct ConversionResult {
  std::vector<LayerQuality> layers;  // one for each shard that holds a layer, also those kept by resume
  uint64_t source_bytes = 0, written_bytes = 0;  // of this run
  size_t shards_kept = 0, shards_written = 0, shards_skipped = 0;
  int threads = 0;
  double seconds = 0, prepare_seconds = 0;  // of the whole, and of them in ConversionPlan::prepare
};

// Errors before the first byte: output exists (without resume or overwrite), output inside input or the
// reverse, not enough disk (needed and free), memory bound too small (needed and given), settings that differ
// from those being resumed (which). On a failure later, finished shards stay and can be resumed.
ConversionResult run_conversion(const ConversionPlan& plan, const ConversionOptions& options);

// Gives a side file of a finished conversion another text, in the manifest too. Interrupted between the two,
// resuming the conversion makes the manifest right.
void replace_side_file(const std::string& output, const std::string& name, std::string_view content);

}  // namespace kt::inline weights
