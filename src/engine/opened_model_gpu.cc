// OpenedModel beside a GPU: the device and what is free there, the placement, and what is said of it.
#include <algorithm>
#include <atomic>
#include <bit>

#include "base/error.h"
#include "base/file.h"
#include "engine/opened_model.h"
#include "models/transformer.h"
#include "nn/gpu_ops.h"

namespace kt::inline engine {
namespace {

// CUDA does not tell what its context takes. No more than the card has not free, and some hundred MiB in any case.
constexpr uint64_t kMostOfContext = uint64_t{512} << 20;
// Of what may be taken of a GPU, for experts that pass through it.
constexpr uint64_t kShareOfStream = 16, kLeastStream = uint64_t{64} << 20, kMostStream = uint64_t{1} << 30;
constexpr uint64_t kShareOfChunk = 4;  // of that, for all that a prompt's step takes
constexpr int kMostChunk = 16384;

DeviceMemory memory_of(const Gpu& gpu) {
  const uint64_t free = gpu.free_memory(), all = std::max(gpu.facts().memory, free);
  return {.index = gpu.facts().number,
          .name = gpu.facts().name,
          .free = free,
          .taken = std::min(all - free, kMostOfContext)};
}

bool same_formats(const ExpertSource& one, const ExpertSource& other) {
  const int layer = one.layers().front();
  return std::ranges::all_of(kProjections, [&](Projection projection) {
    return one.at(layer, 0, projection)->format == other.at(layer, 0, projection)->format;
  });
}

}  // namespace

void OpenedModel::open_gpu() {
  const PlacementOptions& how = options_.placement;
  if (options_.gpu.kind == GpuChoice::Kind::kOff) return note_idle_copies();
  if (how.gpu_memory > 0 && how.share > 0) fail("`gpu_memory` and `mem_fraction_static`: give one of them");
  if (!how.statistics.empty() && how.strategy && *how.strategy != ExpertStrategy::kFrequency)
    fail("`expert_statistics` {}: a placement by frequency reads them, `expert_placement` is {}",
         how.statistics, name_of(*how.strategy));
  // A benchmark's own routing says which experts are popular, as statistics of a real model would.
  if (!how.statistics.empty())
    statistics_ = read_expert_statistics(how.statistics);
  else if (options_.routing && options_.routing->exponent > 0 && !how.strategy && spec().moe())
    statistics_ = forced_statistics(*options_.routing, spec());
  try {
    if (spec().host_only()) fail_as(ErrorKind::kUnsupported, "{}: {}", path(), not_on_gpu(spec()));
    if (!adapters_.empty())
      fail_as(ErrorKind::kUnsupported,
              "{}: models with adapters do not run on a GPU yet; without `gpu` all of it runs on the CPU",
              adapters_.front()->path());
    gpu_ = std::make_shared<Gpu>(options_.gpu.number);
    device_ = memory_of(*gpu_);
  } catch (const Error& error) {
    if (placed_rules_ && placed_rules_->dense == PlacedRules::Dense::kGpu)
      throw Error(error.kind(), text("{}: on cuda:0: {}; `rule_devices` cuda=cpu puts all on the CPU",
                                     placed_rules_->gpu_from, error.what()));
    if (options_.gpu.kind != GpuChoice::Kind::kAuto) throw;
    gpu_.reset();
    note(text("everything runs on the CPU: {}", error.what()));
    note_idle_copies();
  }
}

void OpenedModel::note_idle_copies() const {
  for (const ExpertRule& rule : expert_rules_)
    if (rule.asks()) note(text("{}: gpu_experts: no GPU is used", rule.place));
}

void OpenedModel::read_ruled_statistics() {
  expert_rules_ = placed_rules_->experts;
  for (ExpertRule& rule : expert_rules_)
    if (!rule.statistics_file.empty()) try {
        rule.statistics =
            std::make_shared<const ExpertStatistics>(read_expert_statistics(rule.statistics_file));
      } catch (const Error& error) {
        throw Error(error.kind(), text("{}: kwargs: statistics: {}", rule.place, error.what()));
      }
}

// Who is refused for want of memory is told which rules take it.
std::string OpenedModel::with_ruled_bytes(const std::string& message, std::string_view device) const {
  const std::string most = placed_rules_ ? largest_rules(*placed_rules_, device, gpu_ != nullptr) : "";
  return most.empty() ? message : text("{}; of {} {}", message, placed_rules_->file.name, most);
}

const PlacedRules& OpenedModel::placed_parts() {
  if (placed_rules_) return *placed_rules_;
  if (!placed_by_flags_)
    placed_by_flags_ = std::make_unique<const PlacedRules>(
        place_by_rules({.name = "flags"}, stored_tree(), rule_defaults()));
  return *placed_by_flags_;
}

DecidedPlacement OpenedModel::decided_placement(const MemoryRequest& use) {
  const std::optional<Placement> beside = placement(use);
  return decided(placed_parts(), beside ? &*beside : nullptr);
}

OrderedJson OpenedModel::placement_json(const MemoryRequest& wanted) {
  const MemoryRequest use = possible(wanted);
  const std::optional<Placement> beside = placement(use);
  PlannedCache cache{.sequences = use.sequences, .context = use.context};
  if (!beside) cache.bytes = memory_plan(use).host().kv_cache;
  for (size_t i = 0; beside && i < beside->layers.size(); ++i)
    cache.bytes += beside->layers[i].cache.bytes + beside->layers[i].states.bytes;
  return json_of(placed_parts(), beside ? &*beside : nullptr, cache);
}

void OpenedModel::write_rules(const MemoryRequest& use) {
  if (options_.rules_out.empty()) return;
  write_atomically(options_.rules_out, rules_text(decided_placement(use), path()));
}

MemoryRequest OpenedModel::possible(MemoryRequest use) const {
  use.context = std::min(use.context, spec().context);  // no caller gets further
  return use;
}

std::optional<Placement> OpenedModel::placement(const MemoryRequest& wanted) const {
  if (!gpu_) return {};
  MemoryRequest use = possible(wanted);
  use.context = std::max(use.context, 1);
  const PlacementOptions& how = options_.placement;
  PlacementWish wish{.devices = {device_},
                     .gpu_memory = how.gpu_memory,
                     .use = use,
                     .experts = how.experts,
                     .strategy = how.strategy,
                     .statistics = statistics_ ? &*statistics_ : nullptr,
                     .ruled = expert_rules_,
                     .linears_as_stored = options_.linear_format.empty() && !options_.rounding.linears};
  if (how.share > 0) {
    wish.gpu_memory = static_cast<uint64_t>(how.share * static_cast<double>(gpu_->facts().memory));
    wish.gpu_memory_from = text("`mem_fraction_static` {}", how.share);
  }
  PlacementSizes sizes = sizes_->placement_sizes(use);
  sizes.model = path();
  try {
    return decide_placement(sizes, wish);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kMemory && placed_rules_)
      throw Error(error.kind(), with_ruled_bytes(error.what(), "cuda:0"));
    if (error.kind() != ErrorKind::kInput || !statistics_) throw;
    throw Error(error.kind(), text("{}: {}", how.statistics, error.what()));
  }
}

bool OpenedModel::fits_gpu(const MemoryRequest& use) const {
  try {
    placement(use);
    return true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMemory) throw;
    return false;
  }
}

// Of the GPU's memory: for slots that experts pass through, and as much for rows of their products.
uint64_t OpenedModel::stream_bytes() const {
  const PlacementOptions& how = options_.placement;
  const uint64_t allowed = how.gpu_memory > 0 ? how.gpu_memory
                           : how.share > 0
                               ? static_cast<uint64_t>(how.share * static_cast<double>(gpu_->facts().memory))
                               : device_.free;
  return std::clamp(allowed / kShareOfStream, kLeastStream, kMostStream);
}

bool OpenedModel::streams() const {
  if (!gpu_ || !spec().moe() || options_.precision == Precision::kF32) return false;
  if (options_.placement.prefill_from) return *options_.placement.prefill_from > 0;
  const PlacementSizes sizes = sizes_->placement_sizes({.sequences = 1, .context = 1});
  return std::ranges::any_of(sizes.layers, [](const PlacementSizes::Layer& layer) {
    return layer.expert_bytes() * static_cast<uint64_t>(layer.experts) >= kLeastPassed;
  });
}

// A pass of all weights over the link takes as long for few tokens as for many, so prompts run in steps as large as a
// small part of the GPU's memory has rows for.
void OpenedModel::take_chunk() {
  const int given = options_.placement.prefill_chunk;
  if (!streams()) return;
  if (given > 0) {
    alone_tokens_ = std::max(given, options_.max_tokens);
    sizes_ = build(make_ops(true), {});
    return;
  }
  const int context = static_cast<int>(std::bit_ceil(static_cast<unsigned>(spec().context)));
  for (int tokens = std::min(kMostChunk, context); tokens > options_.max_tokens; tokens /= 2) {
    alone_tokens_ = tokens;
    sizes_ = build(make_ops(true), {});
    const PlacementSizes sizes = sizes_->placement_sizes({.sequences = 1, .context = tokens});
    if (sizes.workspace <= kShareOfChunk * stream_bytes()) return;
  }
  alone_tokens_ = options_.max_tokens;
  sizes_ = build(make_ops(true), {});
}

// Where a use does not fit beside what prompts want, they come in smaller steps, and then experts stay where they are.
void OpenedModel::make_room(const MemoryRequest& use) {
  if (!streams() || options_.placement.prefill_chunk > 0 || fits_gpu(use)) return;
  alone_tokens_ = options_.max_tokens;
  sizes_ = build(make_ops(true), {});
  if (options_.placement.prefill_from || fits_gpu(use)) return;
  options_.placement.prefill_from = 0;
  sizes_ = build(make_ops(true), {});
}

void OpenedModel::settle(const MemoryRequest& use) {
  make_room(use);
  try {
    const std::optional<Placement> found = placement(use);
    if (found && found->hot_experts() > 0 && !std::exchange(copies_noted_, true)) note_copies();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMemory || options_.gpu.kind != GpuChoice::Kind::kAuto) return;
    note(text("everything runs on the CPU: {}", error.what()));
    gpu_.reset();
    sizes_ = build(make_ops(true), {});
  }
}

// Hot experts are never read from MODEL where the CPU's come from elsewhere: who expects its own format on the GPU is
// told.
void OpenedModel::note_copies() const {
  if (options_.weights == experts_path() && !options_.weights.empty())
    return;  // MODEL is what kt quant wrote
  std::unique_ptr<ExpertSource> stored;
  const ExpertSource* own = source_.get();
  if (!options_.weights.empty()) {
    try {
      stored = open_own_experts(checkpoint());
    } catch (const Error&) {
      return;  // it has none
    }
    own = stored.get();
  }
  if (own == experts() || same_formats(*own, *experts())) return;
  note(text("experts on GPU {} are copies of the CPU's, {}{}; {} stores its own as {}", gpu_->facts().number,
            experts_dialect(), options_.weights.empty() ? "" : " of " + options_.weights, checkpoint().path(),
            own->dialect()));
}

void OpenedModel::note_placement(const Placement& placed) const {
  const int64_t hot = placed.hot_experts(), all = placed.all_experts();
  // Without rounding a prompt's experts stay on the CPU.
  const bool exact = options_.precision == Precision::kF32;
  const std::string parts =
      hot == 0 ? "attention, dense parts and the cache; the CPU: routed experts"
      : hot == all
          ? text("attention, dense parts, the cache and all routed experts{}",
                 exact ? "; the CPU: those of prompts" : "")
          : text("attention, dense parts, the cache and {} of {} routed experts; the CPU: the others{}", hot,
                 all, exact ? ", and those of prompts" : "");
  note(text("{}: {}", gpu_->facts().describe(), parts));
  static std::atomic<bool> screen_noted = false;  // of two models it is the same one
  if (gpu_->facts().shows_screen && !screen_noted.exchange(true))
    note(
        text("GPU {} shows a screen and ends kernels that wait for long: answers are launched kernel by "
             "kernel, which is "
             "slower than as graphs",
             gpu_->facts().number));
}

}  // namespace kt::inline engine
