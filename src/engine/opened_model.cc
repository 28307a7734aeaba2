#include "engine/opened_model.h"

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "base/cpu_choice.h"
#include "base/error.h"
#include "base/log.h"
#include "base/mapped_faults.h"
#include "base/memory.h"
#include "engine/loaded_model.h"
#include "models/families.h"
#include "models/transformer.h"
#include "nn/cpu_ops.h"
#include "nn/gpu_ops.h"

namespace kt::inline engine {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_from(Clock::time_point then) {
  return std::chrono::duration<double>(Clock::now() - then).count();
}

// What would make the model smaller, as far as the options leave it open.
std::string advice(const MemoryPlan& plan, const ModelOptions& options) {
  std::vector<std::string> flags;
  const PlaceMemory host = plan.host();
  if (host.experts > 0 && options.format.empty() && options.weights.empty()) flags.push_back("`format` int4");
  if (host.linears > plan.peak() / 10 && options.linear_format.empty())
    flags.push_back("`linear_format` int8");
  if (host.kv_cache > plan.peak() / 10) flags.push_back("a shorter context");
  std::string out;
  for (size_t i = 0; i < flags.size(); ++i)
    out += (i == 0 ? "; try " : i + 1 < flags.size() ? ", " : " or ") + flags[i];
  return out;
}

void check_memory(const std::string& path, const MemoryPlan& plan, uint64_t base,
                  const ModelOptions& options) {
  const uint64_t needed = base + plan.peak(), available = base + available_memory();
  const bool limited = options.max_memory > 0 && options.max_memory < available;
  const uint64_t most = limited ? options.max_memory : available;
  if (needed <= most) return;
  fail_as(ErrorKind::kMemory, "{}: {} of memory needed ({}), {} {}{}", path, human_bytes(needed),
          largest_parts(plan), human_bytes(most), limited ? "allowed by `max_memory`" : "available",
          advice(plan, options));
}

// Every worker's heap keeps the pieces it packed from, megabytes that no step asks for in such blocks again.
void return_free_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// Experts from elsewhere have to be this model's.
void check_weights(const std::string& weights, const ExpertSource& source, const std::string& path,
                   const ModelSpec& spec) {
  const MoeSpec& moe = *spec.moe();
  if (source.experts() != moe.experts || source.hidden() != spec.hidden || source.inter() != moe.inter)
    fail("{}: holds {} experts of {} x {}, {} has {} of {} x {}", weights, source.experts(), source.hidden(),
         source.inter(), path, moe.experts, spec.hidden, moe.inter);
  const std::vector<int> layers = source.layers();
  for (size_t i = 0; i < spec.layers.size(); ++i)
    if (spec.layers[i].moe() && !std::ranges::binary_search(layers, static_cast<int>(i)))
      fail("{}: has no experts of layer {}, which {} needs; it has {} layers, {} to {}", weights, i, path,
           layers.size(), layers.front(), layers.back());
}

PoolOptions pool_options(const ModelOptions& options) {
  PoolOptions out{.threads = options.threads, .nodes = options.nodes};
  if (!options.node_ids.empty()) out.topology = chosen_nodes(Topology::discover(), options.node_ids);
  return fitted(std::move(out));
}

}  // namespace

OpenedModel::OpenedModel(const std::string& path, ModelOptions options)
    : DescribedModel(path, options.tokenizer), options_(std::move(options)) {
  const auto start = Clock::now();
  if (options_.weights.empty()) options_.weights = experts_path();
  if (options_.dense_attention) attend_to_all();
  open_source();
  if (options_.rules) apply_rules();
  open_adapters();
  pool_ = std::make_shared<Pool>(pool_options(options_));
  open_gpu();
  alone_tokens_ = options_.max_tokens;
  rebuild_sizes();
  take_chunk();
  if (const std::string idle = sizes_->idle().describe(); !idle.empty())
    log_once(LogLevel::kWarning, "{}: {}", this->path(), idle);
  seconds_ = seconds_from(start);
}

OpenedModel::~OpenedModel() = default;

void OpenedModel::note(const std::string& line) const {
  if (options_.on_note) options_.on_note(line);
}

void OpenedModel::attend_to_all() {
  int budget = 0;
  for (const LayerSpec& layer : spec().layers)
    if (layer.indexer()) budget = layer.indexer()->budget;
  if (budget == 0) return note(text("`dense_attention`: {} attends to all keys as it is", spec().family));
  note(
      text("`dense_attention`: indexers choose no keys; texts of more than {} tokens are not what the model "
           "makes of them",
           budget));
  forget_indexers();
}

std::unique_ptr<Ops> OpenedModel::ops_on(const std::shared_ptr<const Gpu>& gpu, bool sizes_only) const {
  if (!gpu) return make_cpu_ops(pool_, {.sizes_only = sizes_only});
  return make_gpu_ops(pool_,
                      {.number = gpu->facts().number,
                       .sizes_only = sizes_only,
                       .gpu = sizes_only ? nullptr : gpu,
                       .stream_from = options_.placement.prefill_from.value_or(GpuOpsOptions::kMeasured),
                       .stream_bytes = stream_bytes()});
}

// Whose operations run which layers; without a placement one has all.
std::vector<PlacedLayers> OpenedModel::places(const Placement* placed, bool sizes_only) const {
  const auto ops_of = [&](const Place& place) {
    const auto found = std::ranges::find(placed->devices, place, &DevicePlacement::place);
    return ops_on(found == placed->devices.end()
                      ? nullptr
                      : gpus_[static_cast<size_t>(found - placed->devices.begin())],
                  sizes_only);
  };
  std::vector<PlacedLayers> out;
  if (!placed) {
    out.push_back({ops_on(gpus_.empty() ? nullptr : gpus_.front(), sizes_only),
                   static_cast<int>(std::ssize(spec().layers))});
    return out;
  }
  const Place* before = nullptr;
  for (const LayerPlacement& layer : placed->layers) {
    const Place& place = layer.dense.place;
    if (!before || *before != place) out.push_back({ops_of(place), 0});
    ++out.back().layers;
    before = &place;
  }
  if (placed->head.place != *before) out.push_back({ops_of(placed->head.place), 0});
  return out;
}

// Of one place, where all would fit: who decides what lies where asks these.
void OpenedModel::rebuild_sizes() { sizes_ = build(places(nullptr, true), {}); }

void OpenedModel::open_source() {
  const bool moe = spec().moe() != nullptr;
  for (const auto& [flag, value] :
       {std::pair("`weights`", &options_.weights), {"`format`", &options_.format}})
    if (!moe && !value->empty()) fail("{} {}: {} has no routed experts", flag, *value, path());
  if (!moe) return;
  if (options_.weights.empty()) {
    source_ = open_own_experts(checkpoint());
  } else if (is_kt_weights(options_.weights)) {
    source_ = open_kt_weights(options_.weights);
  } else {
    weights_ = std::make_unique<Checkpoint>(options_.weights, gguf_families());
    source_ = open_experts(*weights_);
  }
  if (!options_.weights.empty() || checkpoint().has_kt_experts())
    check_weights(options_.weights.empty() ? path() : options_.weights, *source_, path(), spec());
  if (!options_.format.empty()) rounded_ = requantised(*source_, format_named(options_.format));
  if (options_.rounding.experts) rounded_ = requantised(*source_, options_.rounding.experts, "rounded");
}

void OpenedModel::open_adapters() {
  const AttentionHeads heads = attention_heads(checkpoint().config_json());
  for (const AdapterFile& adapter : options_.adapters) {
    const auto same = [&](const AdapterFile& other) { return other.name == adapter.name; };
    if (std::ranges::count_if(options_.adapters, same) > 1)
      fail("two adapters are named {}: name them apart, `adapter` NAME=PATH", adapter.name);
    adapters_.push_back(std::make_shared<const LoraFile>(adapter.path, gguf_families(), heads));
  }
}

ModuleTree OpenedModel::stored_tree() const {
  ModuleTree tree = module_tree(spec());
  add_stored_formats(tree, checkpoint(), source_.get());
  return tree;
}

RuleDefaults OpenedModel::rule_defaults() const {
  const auto named = [](const std::string& format) {
    return format.empty() ? std::nullopt : std::optional(format_named(format));
  };
  return {.experts = named(options_.format),
          .linears = named(options_.linear_format),
          .gpu = options_.gpu.kind == GpuChoice::Kind::kNumber};
}

// Formats for the loader, and which place dense parts are in, before a GPU is opened.
void OpenedModel::apply_rules() {
  if (options_.rounding.experts || options_.rounding.linears)
    fail("{}: rules beside another rounding", options_.rules->name);
  placed_rules_ =
      std::make_unique<const PlacedRules>(place_by_rules(*options_.rules, stored_tree(), rule_defaults()));
  const PlacedRules& placed = *placed_rules_;
  if (source_) {
    const ExpertFormats formats = placed.expert_formats();
    std::set<std::string> names;  // of what they become
    for (const auto& layer : formats)
      for (const auto& format : layer)
        names.insert(format ? name_of(*format) : std::string(source_->dialect()));
    const bool as_stored = names == std::set{std::string(source_->dialect())};
    rounded_.reset();
    if (!as_stored) rounded_ = requantised(*source_, formats, names.size() == 1 ? *names.begin() : "mixed");
  }
  read_ruled_statistics();
  if (placed.dense == PlacedRules::Dense::kCpu) options_.gpu = {};
  if (placed.dense != PlacedRules::Dense::kGpu) return;
  if (options_.gpu.kind == GpuChoice::Kind::kOff)
    fail(
        "{}: on cuda:0, and no GPU is used here: `gpu` N takes one, `rule_devices` cuda=cpu puts all on the "
        "CPU",
        placed.gpu_from);
  take_ruled_gpus();
}

// The one place that says what the weights are held in, for plans and for loading alike.
std::unique_ptr<Transformer> OpenedModel::build(std::vector<PlacedLayers> places,
                                                TransformerOptions how) const {
  how.precision = options_.precision;
  how.kv_type = options_.kv_type;
  how.max_tokens = alone_tokens_;
  how.experts = experts();
  if (options_.weights.empty()) how.own_experts = source_.get();
  how.linear_rounding = options_.rounding.linears;
  how.routing = options_.routing;
  how.adapters = adapters_;
  if (placed_rules_)
    how.linear_formats = placed_rules_->linear_formats();
  else if (!options_.linear_format.empty())
    how.linear_format = format_named(options_.linear_format);
  return std::make_unique<Transformer>(checkpoint(), spec(), std::move(places), std::move(how));
}

std::string OpenedModel::experts_dialect() const {
  return experts() ? std::string(experts()->dialect()) : std::string();
}

int OpenedModel::threads() const { return pool_->threads(); }
int OpenedModel::nodes() const { return pool_->nodes(); }
double OpenedModel::stored_bytes() const { return sizes_->stored_bytes(); }

MemoryPlan OpenedModel::memory_plan(const MemoryRequest& use) const {
  if (!in_several_places()) return sizes_->memory_plan(possible(use));
  try {
    const std::optional<Placement> placed = placement(use);
    return build(places(&*placed, true), {})->memory_plan(possible(use));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMemory) throw;
    return sizes_->memory_plan(possible(use));  // what is too much on a GPU says nothing of the host
  }
}

Work OpenedModel::decode_work(int sequences, int context, const Placement* placed) const {
  if (!placed || (placed->hot_experts() == 0 && !in_several_places()))
    return sizes_->decode_work(sequences, context);
  return build(places(placed, true), {.hot = placed->hot()})->decode_work(sequences, context);
}

LoadedModel OpenedModel::load(const LoadOptions& options) && {
  const auto start = Clock::now();
  settle(options.use);
  const MemoryPlan plan = memory_plan(options.use);
  try {
    check_memory(path(), plan, base_bytes(), options_);
  } catch (const Error& error) {
    throw Error(error.kind(), with_ruled_bytes(error.what(), "cpu"));
  }
  write_rules(options.use);
  const std::optional<Placement> placed = placement(options.use);
  if (placed_rules_)
    for (const std::string& line : rule_notes(*placed_rules_)) note(line);
  if (placed) note_placement(*placed);
  std::string dialect = experts_dialect();
  sizes_.reset();
  TransformerOptions how{.on_layer = options.on_layer};
  if (placed) how.hot = placed->hot();
  auto transformer = build(places(placed ? &*placed : nullptr, false), std::move(how));
  check_mapped_files();
  checkpoint().check_sizes();
  if (weights_) weights_->check_sizes();
  rounded_.reset();
  source_.reset();
  weights_.reset();
  return_free_memory();
  const double seconds = seconds_ + seconds_from(start);
  std::vector<std::string> adapters;
  for (const AdapterFile& adapter : options_.adapters) adapters.push_back(adapter.name);
  return {static_cast<DescribedModel&&>(*this),
          std::move(dialect),
          std::move(adapters),
          pool_,
          gpus_,
          std::move(transformer),
          options_.max_tokens,
          seconds};
}

}  // namespace kt::inline engine
