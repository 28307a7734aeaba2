// OpenedModel beside a GPU: the device and what is free there, the placement, and what is said of it.
#include <algorithm>
#include <atomic>
#include <bit>
#include <numeric>

#include "base/error.h"
#include "base/file.h"
#include "engine/opened_model.h"
#include "models/transformer.h"
#include "nn/gpu_ops.h"
#include "terminal/report.h"

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
    open_devices();
  } catch (const Error& error) {
    if (placed_rules_ && placed_rules_->dense == PlacedRules::Dense::kGpu)
      throw Error(error.kind(), text("{}: on cuda:{}: {}; `rule_devices` cuda=cpu puts all on the CPU",
                                     placed_rules_->gpu_from, placed_rules_->gpus - 1, error.what()));
    if (options_.gpu.kind != GpuChoice::Kind::kAuto) throw;
    leave_gpus();
    note(text("everything runs on the CPU: {}", error.what()));
    note_idle_copies();
  }
}

// One that is named several times is opened once, and its memory is shared out evenly.
void OpenedModel::open_devices() {
  const std::vector<int>& numbers = options_.gpu.numbers;
  for (const int number : numbers) {
    const auto same = std::ranges::find(devices_, number, &DeviceMemory::index);
    if (same == devices_.end()) {
      gpus_.push_back(std::make_shared<Gpu>(number));
      devices_.push_back(memory_of(*gpus_.back()));
      devices_.back().free /= static_cast<uint64_t>(std::ranges::count(numbers, number));
    } else {
      gpus_.push_back(gpus_[static_cast<size_t>(same - devices_.begin())]);
      DeviceMemory share = *same;
      share.share = static_cast<int>(std::ranges::count(devices_, number, &DeviceMemory::index));
      share.taken = 0;  // the driver's context is one
      devices_.push_back(std::move(share));
    }
  }
}

void OpenedModel::leave_gpus() {
  gpus_.clear();
  devices_.clear();
}

// Rules number GPUs as `gpu` lists them; where it leaves that open they are those that the driver numbers so.
void OpenedModel::take_ruled_gpus() {
  const int named = placed_rules_->gpus;
  std::vector<int>& numbers = options_.gpu.numbers;
  if (options_.gpu.kind == GpuChoice::Kind::kAuto) {
    numbers.resize(static_cast<size_t>(named));
    std::iota(numbers.begin(), numbers.end(), 0);
  } else if (named > std::ssize(numbers)) {
    fail(
        "{}: on cuda:{}, and `gpu` names {}: name as many as rules do, or `rule_devices` cuda:{}=cuda:0 puts "
        "two on one",
        placed_rules_->gpu_from, named - 1, counted(std::ssize(numbers), "device"), named - 1);
  }
  options_.gpu.kind = GpuChoice::Kind::kNumber;  // who cannot have it is told
}

bool OpenedModel::in_several_places() const {
  if (gpus_.size() > 1) return true;
  const auto on_host = [&](const PlacedRules& rules) {
    return rules.head_on == kOnHost || std::ranges::find(rules.layers_on, kOnHost) != rules.layers_on.end();
  };
  return !gpus_.empty() && placed_rules_ && on_host(*placed_rules_);
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
  const std::string most = placed_rules_ ? largest_rules(*placed_rules_, device, !gpus_.empty()) : "";
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
  if (gpus_.empty()) return {};
  MemoryRequest use = possible(wanted);
  use.context = std::max(use.context, 1);
  const PlacementOptions& how = options_.placement;
  PlacementWish wish{.devices = devices_,
                     .layers_on = placed_rules_ ? placed_rules_->layers_on : std::vector<int>(),
                     .head_on = placed_rules_ ? placed_rules_->head_on : kUndecided,
                     .gpu_memory = how.gpu_memory,
                     .use = use,
                     .experts = how.experts,
                     .strategy = how.strategy,
                     .statistics = statistics_ ? &*statistics_ : nullptr,
                     .ruled = expert_rules_,
                     .linears_as_stored = options_.linear_format.empty() && !options_.rounding.linears};
  if (how.share > 0) {
    uint64_t least = UINT64_MAX;
    for (const auto& gpu : gpus_)
      least = std::min<uint64_t>(least,
                                 gpu->facts().memory / static_cast<uint64_t>(std::ranges::count(gpus_, gpu)));
    wish.gpu_memory = static_cast<uint64_t>(how.share * static_cast<double>(least));
    wish.gpu_memory_from = text("`mem_fraction_static` {}", how.share);
  }
  PlacementSizes sizes = sizes_->placement_sizes(use);
  sizes.model = path();
  try {
    return decide_placement(sizes, wish);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kMemory && placed_rules_)
      throw Error(error.kind(), with_ruled_bytes(error.what(), device_of_line(error.what())));
    if (error.kind() != ErrorKind::kInput || !statistics_) throw;
    throw Error(error.kind(), text("{}: {}", how.statistics, error.what()));
  }
}

// Lines of what does not fit begin with the device.
std::string OpenedModel::device_of_line(std::string_view line) const {
  for (size_t i = 0; i < devices_.size(); ++i) {
    const DeviceMemory& device = devices_[i];
    const Place place{.kind = Place::Kind::kGpu, .index = device.index, .share = device.share};
    if (line.find(text("{} (", name_of(place))) != std::string_view::npos) return text("cuda:{}", i);
  }
  return "cuda:0";
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

// Of a GPU's memory, the smallest of several: for slots that experts pass through, and as much for rows of their
// products.
uint64_t OpenedModel::stream_bytes() const {
  const PlacementOptions& how = options_.placement;
  uint64_t least = kShareOfStream * kMostStream;
  for (size_t i = 0; i < gpus_.size(); ++i)
    least =
        std::min(least, how.gpu_memory > 0 ? how.gpu_memory
                        : how.share > 0
                            ? static_cast<uint64_t>(how.share * static_cast<double>(gpus_[i]->facts().memory))
                            : devices_[i].free);
  return std::max(least / kShareOfStream, kLeastStream);
}

bool OpenedModel::streams() const {
  if (gpus_.empty() || !spec().moe() || options_.precision == Precision::kF32) return false;
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
    rebuild_sizes();
    return;
  }
  const int context = static_cast<int>(std::bit_ceil(static_cast<unsigned>(spec().context)));
  for (int tokens = std::min(kMostChunk, context); tokens > options_.max_tokens; tokens /= 2) {
    alone_tokens_ = tokens;
    rebuild_sizes();
    const PlacementSizes sizes = sizes_->placement_sizes({.sequences = 1, .context = tokens});
    if (sizes.workspace <= kShareOfChunk * stream_bytes()) return;
  }
  alone_tokens_ = options_.max_tokens;
  rebuild_sizes();
}

// Where a use does not fit beside what prompts want, they come in smaller steps, and then experts stay where they are.
void OpenedModel::make_room(const MemoryRequest& use) {
  if (!streams() || options_.placement.prefill_chunk > 0 || fits_gpu(use)) return;
  alone_tokens_ = options_.max_tokens;
  rebuild_sizes();
  if (options_.placement.prefill_from || fits_gpu(use)) return;
  options_.placement.prefill_from = 0;
  rebuild_sizes();
}

void OpenedModel::settle(const MemoryRequest& use) {
  make_room(use);
  try {
    const std::optional<Placement> found = placement(use);
    if (found && found->hot_experts() > 0 && !std::exchange(copies_noted_, true)) note_copies();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMemory || options_.gpu.kind != GpuChoice::Kind::kAuto) return;
    note(text("everything runs on the CPU: {}", error.what()));
    leave_gpus();
    alone_tokens_ = options_.max_tokens;
    rebuild_sizes();
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
  std::string numbers;
  for (const int number : options_.gpu.numbers) numbers += text("{}{}", numbers.empty() ? "" : ", ", number);
  note(text("experts on GPU {} are copies of the CPU's, {}{}; {} stores its own as {}", numbers,
            experts_dialect(), options_.weights.empty() ? "" : " of " + options_.weights, checkpoint().path(),
            own->dialect()));
}

namespace {

// "GPU 0 (NVIDIA H200)"; of several places each with its layers.
std::string devices_text(const Placement& placed) {
  const auto layers_at = [&](const Place& place) {
    std::vector<int> layers;
    for (const LayerPlacement& layer : placed.layers)
      if (layer.dense.place == place) layers.push_back(layer.layer);
    return layers;
  };
  std::string out;
  const bool alone = placed.devices.size() == 1 && layers_at(kHost).empty();
  for (const DevicePlacement& device : placed.devices) {
    out += text("{}{} ({})", out.empty() ? "" : ", ", name_of(device.place), device.name);
    if (!alone) out += text(" layers {}", ranges_text(layers_at(device.place)));
  }
  if (!layers_at(kHost).empty()) out += text(", the CPU layers {}", ranges_text(layers_at(kHost)));
  return out;
}

}  // namespace

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
  note(text("{}: {}", devices_text(placed), parts));
  static std::atomic<bool> screen_noted = false;  // of two models it is the same one
  for (const auto& gpu : gpus_)
    if (gpu->facts().shows_screen && !screen_noted.exchange(true))
      note(
          text("GPU {} shows a screen and ends kernels that wait for long: answers are launched kernel by "
               "kernel, which is "
               "slower than as graphs",
               gpu->facts().number));
}

}  // namespace kt::inline engine
