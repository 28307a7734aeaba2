// A decoder-only transformer built from a spec and a checkpoint, run by operations that live in one place. One
// forward for every family: new tokens of several sequences in, logits out; keys, values and states go to a
// cache the caller owns.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/plan.h"
#include "models/expert_counts.h"
#include "models/forced_routing.h"
#include "models/memory_plan.h"
#include "models/spec.h"
#include "models/unread_tensors.h"
#include "nn/ops.h"
#include "weights/checkpoint.h"
#include "weights/experts.h"
#include "weights/lora/lora_file.h"
#include "weights/requantise.h"

namespace kt::inline models {

struct PlacementSizes;

struct TransformerOptions {
  Precision precision = Precision::kDefault;  // of activations
  KvType kv_type = KvType::kBf16;
  int max_tokens = 512;  // of one forward, all sequences together
  // Routed experts from here instead of the checkpoint (converted weights); null: the checkpoint's own.
  const ExpertSource* experts = nullptr;
  // With `experts`: the checkpoint's own, who say which of its tensors are theirs; null: names like theirs do.
  const ExpertSource* own_experts = nullptr;
  // Attention projections, dense and shared experts' MLPs and the head are rounded to this format as they are
  // read; routers, latent attention's halves of kv_b and the embedding stay as they are. None: as stored.
  std::optional<Format> linear_format = {};
  LinearFormats linear_formats = {};          // in place of it: of single ones
  MatrixRounding linear_rounding = {};        // of any matrix outside of routed experts; null: as stored
  std::optional<ForcedRouting> routing = {};  // of benchmarks; none: as routers choose
  // Of each layer the routed experts, by ascending ids, whose copies the operations' device holds and runs
  // (Placement::hot); empty: none.
  std::vector<std::vector<int>> hot = {};
  // Low-rank adapters, of which a forward names one by its number here. What they have must fit the model.
  std::vector<std::shared_ptr<const LoraFile>> adapters = {};
  // After each layer that was read: how many, of how many. From the thread that constructs.
  std::function<void(int, int)> on_layer = {};
};

// New tokens of one sequence, at positions [position, position + tokens.size()).
struct SequenceInput {
  std::span<const int32_t> tokens;
  int position = 0;
  const int32_t* pages = nullptr;  // of the cache: tokens 0..63, 64..127, ...; enough for the new ones too
  int32_t slot = -1;               // of its state, where the model keeps one
  enum class Logits { kNone, kLast, kAll } logits = Logits::kLast;  // of which new tokens
  int adapter = -1;  // its number in TransformerOptions, the same for all of a forward; -1: none
};

// A model's next layers, and whose operations run them. None: the last norm and the head alone, which are the last's in
// any case.
struct PlacedLayers {
  std::shared_ptr<Ops> ops;
  int layers = 0;
};

// Of a spec that has something for the host only: why operations that do not run_all() cannot run it, and what to use.
std::string not_on_gpu(const ModelSpec& spec);

class Transformer {
 public:
  // Reads and packs all weights but the embedding, whose rows are read from the checkpoint as tokens need
  // them: it must outlive this. Errors name the tensor that is missing or has the wrong shape.
  // Operations that are for sizes only (CpuOpsOptions::sizes_only) read nothing but headers, and nothing can
  // run: for memory_plan().
  Transformer(const Checkpoint& checkpoint, ModelSpec spec, std::shared_ptr<Ops> ops,
              TransformerOptions options = {});
  // The same with layers in several places, in their order; each has operations of its own. Rows of x pass through
  // the host. Whatever the places, an operation gives what it gives there.
  Transformer(const Checkpoint& checkpoint, ModelSpec spec, std::vector<PlacedLayers> places,
              TransformerOptions options = {});
  ~Transformer();
  Transformer(Transformer&&) noexcept;

  const ModelSpec& spec() const;
  const IdleTensors& idle() const;     // of the checkpoint
  const SequenceShape& keeps() const;  // of sequences, layer by layer
  size_t packed_bytes() const;
  int max_tokens() const;       // of one forward
  int adapters() const;         // how many there are
  double stored_bytes() const;  // of all that was packed, in the formats' own bytes

  // Not beside a forward, as decode_work().
  MemoryPlan memory_plan(const MemoryRequest& request) const;
  // The same bytes part by part, for deciding what lies where (models/placement.h), of a model whose operations are
  // one's. Operations of a device say
  // what a step takes there and on the host; of those of a CPU rows and logits count where dense parts would
  // run, scratch beyond them beside the experts.
  PlacementSizes placement_sizes(const MemoryRequest& request) const;
  // One token for each of `sequences` at the end of a context of that length; experts as if routing were
  // even.
  Work decode_work(int sequences, int context) const;
  // Of all forwards so far, with the experts that tokens really went to.
  const Work& work() const;
  const std::vector<StepPart>& parts() const;  // where their time went
  // The same choices expert by expert, readable from any thread; null for a dense model.
  const ExpertCounts* expert_counts() const;

  // Rows of logits a forward writes for these inputs.
  static int64_t logit_rows(std::span<const SequenceInput> inputs);
  // Slots for states of so many sequences beside so many pages, and for snapshots in that memory (MemoryRequest's); 0
  // where the model keeps no states.
  int state_slots(int64_t pages, int sequences, std::optional<uint64_t> snapshots) const;
  // Of what keeps() says, where the operations run that have the layers. Error(kMemory) if pages and slots do not fit.
  std::unique_ptr<SequenceCache> make_cache(int pages, int slots = 0) const;
  // logits: [logit_rows, vocab]. Errors: token ids out of range, more tokens than max_tokens, positions past
  // the context.
  void forward(SequenceCache& cache, std::span<const SequenceInput> inputs, float* logits);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kt::inline models
