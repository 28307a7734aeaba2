// A model whose headers were read, and what it would take: the plan of its memory comes first, then load().
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/pool.h"
#include "cuda/device.h"
#include "engine/described_model.h"
#include "engine/gpu_choice.h"
#include "kernels/plan.h"
#include "models/decided_placement.h"
#include "models/forced_routing.h"
#include "models/memory_plan.h"
#include "models/placed_rules.h"
#include "models/placement.h"
#include "nn/ops.h"
#include "weights/experts.h"
#include "weights/lora/lora_file.h"
#include "weights/requantise.h"

namespace kt::inline models {
class Transformer;
struct PlacedLayers;
struct TransformerOptions;
}  // namespace kt::inline models

namespace kt::inline engine {

class LoadedModel;

// A low-rank adapter to be loaded beside a model, by the name that requests choose it by.
struct AdapterFile {
  std::string name, path;  // weights/lora/lora_file.h
};

// How a model is held and run.
struct ModelOptions {
  // Experts to use with the folder's other tensors, converted or of any dialect; empty: its own.
  std::string weights = {};
  std::string format = {};         // experts rounded to this format as they are loaded; empty: as stored
  std::string linear_format = {};  // the same for dense matrices (TransformerOptions::linear_format)
  std::shared_ptr<const RuleFile> rules = {};  // win over `format`, `linear_format` and `gpu`; null: none
  std::string rules_out = {};              // load() writes what was decided there, as rules; empty: nothing
  ModelRounding rounding = {};             // in place of both, where a format's name does not say enough
  std::vector<AdapterFile> adapters = {};  // of which each request has one, or none
  Precision precision = Precision::kDefault;
  KvType kv_type = KvType::kBf16;
  bool dense_attention = false;               // to all keys where the model would choose some
  std::optional<ForcedRouting> routing = {};  // of benchmarks; none: as routers choose
  int threads = 0;                            // cut to the cpus there are
  int nodes = 0;                              // NUMA nodes to shard over; 0: all
  std::vector<int> node_ids = {};  // the operating system's numbers of those to use; empty: the first ones
  int max_tokens = 1024;           // of one step
  uint64_t max_memory = 0;         // loading is refused where more is needed; 0: than the machine has
  TokenizerNeed tokenizer = TokenizerNeed::kNeeded;
  GpuChoice gpu = {};  // takes all but the embedding and the experts that `placement` leaves to the CPU
  PlacementOptions placement = {};
  std::function<void(const std::string&)> on_note =
      {};  // what was chosen for the caller, and why; a line each
};

struct LoadOptions {
  // Loading is refused when the model with this use needs more memory than is available, or than
  // ModelOptions::max_memory.
  MemoryRequest use = {.context = 0};
  // After each layer that was read, of how many (TransformerOptions::on_layer).
  std::function<void(int, int)> on_layer = {};
};

class OpenedModel : public DescribedModel {
 public:
  // Of the weights only headers are read. Errors: as DescribedModel's, and anything the weights are missing,
  // by name; as place_by_rules().
  explicit OpenedModel(const std::string& path, ModelOptions options = {});
  ~OpenedModel();

  std::string experts_dialect() const;  // "bf16", "kt-int4", ...; "" for a dense model
  int threads() const;
  int nodes() const;
  double stored_bytes() const;  // of what load() will read, in the formats' own bytes
  // In their order; one that is used as several is there as often. None: the CPU alone.
  const std::vector<std::shared_ptr<const Gpu>>& gpus() const { return gpus_; }
  const PlacedRules* rules() const { return placed_rules_.get(); }  // null: none were given
  // A context longer than the model's counts as that, here and below.
  MemoryPlan memory_plan(const MemoryRequest& use) const;
  // What lies where: a value of sizes and of what was free on the GPUs when this was opened, so that plans and
  // load() have the same for the same use. None: the CPU alone. Errors: as decide_placement's.
  std::optional<Placement> placement(const MemoryRequest& use) const;
  bool fits_gpu(const MemoryRequest& use) const;  // true without one
  // The same of all parts, on the CPU too, and by flags too: as a value, and as programs read it.
  DecidedPlacement decided_placement(const MemoryRequest& use);
  OrderedJson placement_json(const MemoryRequest& use);
  // ModelOptions::rules_out, where there is one: the file is there whole or not at all.
  void write_rules(const MemoryRequest& use);
  // Before plans for such a use: with `gpu` auto a GPU that the model does not fit is left, and notes say what
  // was chosen. Nothing else is an error here.
  void settle(const MemoryRequest& use);
  // As Transformer's, for so many sequences of a context. With a placement the GPU has the share of its experts.
  Work decode_work(int sequences, int context, const Placement* placed = nullptr) const;

  // Reads the weights; this is no longer of use. Error(kMemory), before any is read, if they do not fit.
  LoadedModel load(const LoadOptions& options = {}) &&;

 private:
  void attend_to_all();
  void open_source();
  void open_adapters();
  ModuleTree stored_tree() const;
  RuleDefaults rule_defaults() const;
  const PlacedRules& placed_parts();
  void apply_rules();
  void read_ruled_statistics();
  std::string with_ruled_bytes(const std::string& message, std::string_view device) const;
  void open_gpu();
  uint64_t stream_bytes() const;
  bool streams() const;
  void take_chunk();
  void make_room(const MemoryRequest& use);
  void open_devices();
  void leave_gpus();
  std::unique_ptr<Ops> ops_on(const std::shared_ptr<const Gpu>& gpu, bool sizes_only) const;
  bool in_several_places() const;
  void take_ruled_gpus();
  std::vector<PlacedLayers> places(const Placement* placed, bool sizes_only) const;
  void rebuild_sizes();
  MemoryRequest possible(MemoryRequest use) const;
  std::string device_of_line(std::string_view line) const;
  void note(const std::string& line) const;
  void note_copies() const;
  void note_idle_copies() const;
  void note_placement(const Placement& placed) const;
  std::unique_ptr<Transformer> build(std::vector<PlacedLayers> places, TransformerOptions how) const;
  const ExpertSource* experts() const { return rounded_ ? rounded_.get() : source_.get(); }

  ModelOptions options_;
  std::unique_ptr<Checkpoint> weights_;             // of ModelOptions::weights, where that is one
  std::unique_ptr<ExpertSource> source_, rounded_;  // as stored, and as it will be loaded; null: no experts
  std::unique_ptr<const PlacedRules> placed_rules_, placed_by_flags_;
  std::vector<ExpertRule> expert_rules_;  // of placed_rules_, with the statistics that they name
  std::vector<std::shared_ptr<const LoraFile>> adapters_;
  std::shared_ptr<Pool> pool_;
  std::vector<std::shared_ptr<const Gpu>> gpus_;  // none: the CPU alone
  std::vector<DeviceMemory> devices_;             // theirs, when this was opened
  std::optional<ExpertStatistics> statistics_;
  int alone_tokens_ = 0;  // of one step, where it is one prompt's
  bool copies_noted_ = false;
  std::unique_ptr<Transformer> sizes_;  // no weights: what memory_plan() asks
  double seconds_ = 0;                  // of opening, without what DescribedModel reads
};

}  // namespace kt::inline engine
