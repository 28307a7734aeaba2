#include "models/placement.h"

#include <algorithm>
#include <numeric>

#include "base/checked.h"
#include "base/error.h"

namespace kt::inline models {
namespace {

// Of what is free, where nobody says how much may be taken: others on the card grow, and a driver rounds up.
constexpr uint64_t kSparePercent = 5;
constexpr uint64_t kGiB = uint64_t{1} << 30;

// What a GPU holds whatever experts are hot.
struct FixedBytes {
  uint64_t taken = 0, dense = 0, cache = 0, workspace = 0;
  uint64_t sum() const { return taken + dense + cache + workspace; }
};

int64_t pages_of(const PlacementSizes& sizes, const MemoryRequest& use) {
  return ceil_div(int64_t{use.context}, int64_t{sizes.page_tokens}) * use.sequences;
}

template <typename Of>
uint64_t sum_of_layers(const PlacementSizes& sizes, Of of) {
  uint64_t sum = 0;
  for (const PlacementSizes::Layer& layer : sizes.layers) sum += of(layer);
  return sum;
}

FixedBytes fixed_bytes(const PlacementSizes& sizes, const PlacementWish& wish, const DeviceMemory& device) {
  const auto pages = static_cast<uint64_t>(pages_of(sizes, wish.use));
  const auto sequences = static_cast<uint64_t>(wish.use.sequences);
  return {.taken = device.taken,
          .dense = sizes.head + sum_of_layers(sizes, [](const auto& layer) { return layer.dense; }),
          .cache = sum_of_layers(
              sizes, [&](const auto& layer) { return pages * layer.page + sequences * layer.state; }),
          .workspace = sizes.workspace};
}

std::string device_text(const DevicePlacement& device) {
  return device.name.empty() ? name_of(device.place) : text("{} ({})", name_of(device.place), device.name);
}

DevicePlacement allowed_on(const DeviceMemory& device, const PlacementWish& wish) {
  DevicePlacement out{.place = {.kind = Place::Kind::kGpu, .index = device.index},
                      .name = device.name,
                      .free = device.free,
                      .taken = device.taken,
                      .allowed = wish.gpu_memory,
                      .decided_by = wish.gpu_memory_from};
  if (wish.gpu_memory > device.free + device.taken)
    fail_as(ErrorKind::kMemory, "{}: {} is {}, {} are free: {} too much", device_text(out), out.decided_by,
            human_bytes(wish.gpu_memory), human_bytes(device.free + device.taken),
            human_bytes(wish.gpu_memory - device.free - device.taken));
  if (wish.gpu_memory == 0) {
    out.allowed = device.taken + device.free / 100 * (100 - kSparePercent);
    out.decided_by = text("{} free less {} %", human_bytes(device.free), kSparePercent);
  }
  return out;
}

// The longest context whose cache fits beside everything else; 0: none does.
int64_t longest_context(const PlacementSizes& sizes, const PlacementWish& wish, const FixedBytes& fixed,
                        uint64_t allowed) {
  const auto sequences = static_cast<uint64_t>(wish.use.sequences);
  const uint64_t page = sum_of_layers(sizes, [](const auto& layer) { return layer.page; });
  const uint64_t other = fixed.sum() - fixed.cache +
                         sequences * sum_of_layers(sizes, [](const auto& layer) { return layer.state; });
  if (page == 0 || other >= allowed) return 0;
  return static_cast<int64_t>((allowed - other) / page / sequences) * sizes.page_tokens;
}

// "27.7 GiB": rounded up, for a person to type.
std::string at_least(uint64_t bytes) {
  const uint64_t unit = bytes < kGiB ? kGiB / 1024 : kGiB, tenths = ceil_div(bytes * 10, unit);
  return text("{}.{} {}", tenths / 10, tenths % 10, unit == kGiB ? "GiB" : "MiB");
}

// What would make room, with what each gives.
std::string advice(const PlacementSizes& sizes, const PlacementWish& wish, const FixedBytes& fixed,
                   const DevicePlacement& device) {
  std::vector<std::string> ways;
  const auto pages = static_cast<uint64_t>(pages_of(sizes, wish.use));
  const uint64_t narrower =
      pages * sum_of_layers(sizes, [](const auto& layer) { return layer.page - layer.page_int8; });
  if (narrower > 0) ways.push_back(text("`kv` int8 ({} less)", human_bytes(narrower)));
  if (wish.linears_as_stored) ways.push_back("`linear_format` int4_g64");
  const int64_t context = longest_context(sizes, wish, fixed, device.allowed);
  if (context > 0 && context < wish.use.context)
    ways.push_back(text("a context of at most {} tokens", context));
  if (wish.gpu_memory > 0 && fixed.sum() <= device.free + device.taken)
    ways.push_back(text("`gpu_memory` of {} or more", at_least(fixed.sum())));
  ways.push_back("`gpu` off");
  std::string out;
  for (size_t i = 0; i < ways.size(); ++i)
    out += (i == 0 ? "; try " : i + 1 < ways.size() ? ", " : " or ") + ways[i];
  return out;
}

void check_fixed(const PlacementSizes& sizes, const PlacementWish& wish, const FixedBytes& fixed,
                 const DevicePlacement& device) {
  const uint64_t needed = fixed.sum();
  if (needed <= device.allowed) return;
  fail_as(
      ErrorKind::kMemory,
      "{}: {} needed without any expert (dense parts {}, cache of {} tokens {}, workspace {}, driver {}), {} "
      "allowed ({}): {} too much{}",
      device_text(device), human_bytes(needed), human_bytes(fixed.dense),
      int64_t{wish.use.sequences} * wish.use.context, human_bytes(fixed.cache), human_bytes(fixed.workspace),
      human_bytes(fixed.taken), human_bytes(device.allowed), device.decided_by,
      human_bytes(needed - device.allowed), advice(sizes, wish, fixed, device));
}

// Experts whose copies are held, and of each layer who says so.
struct HotChoice {
  std::vector<ExpertOfLayer> experts = {};
  std::vector<std::string> decided_by = {};
};

// The first of the order, as many as fit.
size_t longest_that_fits(const PlacementSizes& sizes, const std::vector<ExpertOfLayer>& order,
                         uint64_t left) {
  size_t count = 0;
  for (const ExpertOfLayer& each : order) {
    const uint64_t bytes = sizes.layers[static_cast<size_t>(each.layer)].expert_bytes();
    if (bytes > left) break;
    left -= bytes;
    ++count;
  }
  return count;
}

class HotChooser {
 public:
  HotChooser(const PlacementSizes& sizes, const PlacementWish& wish, uint64_t left,
             const DevicePlacement& device)
      : sizes_(sizes), wish_(wish), device_(device), left_(left) {
    out_.decided_by.resize(sizes.layers.size());
  }

  // What rules number comes first, then what fits where they say auto, then the flags' of the other layers.
  HotChoice choose() {
    std::vector<int> others;
    for (size_t i = 0; i < sizes_.layers.size(); ++i)
      if (sizes_.layers[i].experts > 0 && !is_ruled(static_cast<int>(i)))
        others.push_back(static_cast<int>(i));
    for (const bool automatic : {false, true})
      for (const ExpertRule& rule : wish_.ruled)
        if ((!rule.ids && rule.wish.kind == ExpertWish::Kind::kAuto) == automatic) add_ruled(rule);
    if (!others.empty()) add_flags(others);
    return std::move(out_);
  }

 private:
  bool is_ruled(int layer) const {
    return std::ranges::any_of(wish_.ruled, [&](const ExpertRule& rule) {
      return std::ranges::find(rule.layers, layer) != rule.layers.end();
    });
  }

  // The experts of these layers in the strategy's order.
  std::vector<ExpertOfLayer> order_of(const std::vector<int>& layers, ExpertStrategy strategy,
                                      const ExpertStatistics* statistics) const {
    ExpertOrderInput input{.statistics = statistics, .seed = wish_.seed};
    for (const PlacementSizes::Layer& layer : sizes_.layers) input.experts.push_back(layer.experts);
    std::vector<ExpertOfLayer> out = expert_order(strategy, input);
    std::erase_if(out, [&](const ExpertOfLayer& each) {
      return std::ranges::find(layers, each.layer) == layers.end();
    });
    return out;
  }

  uint64_t bytes_of(const std::vector<ExpertOfLayer>& order, int64_t count) const {
    uint64_t bytes = 0;
    for (int64_t i = 0; i < count; ++i)
      bytes += sizes_.layers[static_cast<size_t>(order[static_cast<size_t>(i)].layer)].expert_bytes();
    return bytes;
  }

  // "3072 experts are 27.0 GiB, 18.3 GiB of 24.0 GiB are left ...: 8.7 GiB too much; 2075 fit".
  std::string too_many(const std::vector<ExpertOfLayer>& order, int64_t wanted, int64_t fit) const {
    const uint64_t bytes = bytes_of(order, wanted);
    return text(
        "{} experts are {}, {} of {} are left beside dense parts, cache and workspace: {} too much; {} fit",
        wanted, human_bytes(bytes), human_bytes(left_), human_bytes(device_.allowed),
        human_bytes(bytes - left_), fit);
  }

  void take(std::vector<ExpertOfLayer> order, int64_t count, const std::vector<int>& layers,
            const std::string& decided_by) {
    left_ -= bytes_of(order, count);
    order.resize(static_cast<size_t>(count));
    out_.experts.insert(out_.experts.end(), order.begin(), order.end());
    for (const int layer : layers) out_.decided_by[static_cast<size_t>(layer)] = decided_by;
  }

  void add_ruled(const ExpertRule& rule) {
    const ExpertStatistics* const statistics = rule.statistics ? rule.statistics.get() : wish_.statistics;
    const ExpertStrategy strategy =
        rule.strategy.value_or(rule.statistics ? ExpertStrategy::kFrequency : strategy_of_flags());
    std::vector<ExpertOfLayer> order;
    if (rule.ids) {
      for (const int layer : rule.layers)
        for (const int expert : *rule.ids) order.push_back({layer, expert});
    } else {
      order = order_of(rule.layers, strategy, statistics);
    }
    const auto fit = static_cast<int64_t>(longest_that_fits(sizes_, order, left_));
    const int64_t all = std::ssize(order);
    const int64_t wanted = rule.ids ? all : rule.wish.total(std::ssize(rule.layers), all).value_or(fit);
    if (wanted > fit)
      fail_as(ErrorKind::kMemory, "{}: {}: experts of layers {}: {}", rule.place, device_text(device_),
              ranges_text(rule.layers), too_many(order, wanted, fit));
    take(std::move(order), wanted, rule.layers, rule.decided_by);
  }

  ExpertStrategy strategy_of_flags() const {
    return wish_.strategy.value_or(wish_.statistics ? ExpertStrategy::kFrequency : ExpertStrategy::kUniform);
  }

  void add_flags(const std::vector<int>& layers) {
    std::vector<ExpertOfLayer> order = order_of(layers, strategy_of_flags(), wish_.statistics);
    const auto fit = static_cast<int64_t>(longest_that_fits(sizes_, order, left_));
    const int64_t count = std::ssize(layers),
                  wanted = wish_.experts.total(count, std::ssize(order)).value_or(fit);
    if (wanted > fit)
      fail_as(ErrorKind::kMemory, "{}: `gpu_experts` {}: {}, {} a layer: try `gpu_experts` {} or auto",
              device_text(device_), text_of(wish_.experts), too_many(order, wanted, fit), fit / count,
              fit / count);
    take(std::move(order), wanted, layers,
         text("`gpu_experts` {}, {}", text_of(wish_.experts), name_of(strategy_of_flags())));
  }

  const PlacementSizes& sizes_;
  const PlacementWish& wish_;
  const DevicePlacement& device_;
  uint64_t left_;
  HotChoice out_;
};

LayerPlacement place_layer(const PlacementSizes& sizes, const PlacementWish& wish, int number,
                           const Place& gpu) {
  const PlacementSizes::Layer& layer = sizes.layers[static_cast<size_t>(number)];
  LayerPlacement out{.layer = number,
                     .dense = {gpu, layer.dense, "`gpu`"},
                     .cache = {gpu, static_cast<uint64_t>(pages_of(sizes, wish.use)) * layer.page, "`gpu`"},
                     .states = {gpu, static_cast<uint64_t>(wish.use.sequences) * layer.state, "`gpu`"},
                     .experts = layer.experts,
                     .expert_bytes = layer.expert_bytes()};
  if (layer.experts == 0) return out;
  for (const uint64_t piece : layer.expert)
    out.routed_of_node.push_back(piece * static_cast<uint64_t>(layer.experts));
  out.routed = {kHost, out.expert_bytes * static_cast<uint64_t>(layer.experts), "run by the CPU"};
  return out;
}

}  // namespace

uint64_t PlacementSizes::Layer::expert_bytes() const {
  return std::accumulate(expert.begin(), expert.end(), uint64_t{0});
}

int64_t Placement::hot_experts() const {
  int64_t sum = 0;
  for (const LayerPlacement& layer : layers) sum += std::ssize(layer.hot);
  return sum;
}

int64_t Placement::all_experts() const {
  int64_t sum = 0;
  for (const LayerPlacement& layer : layers) sum += layer.experts;
  return sum;
}

std::vector<std::vector<int>> Placement::hot() const {
  std::vector<std::vector<int>> out;
  for (const LayerPlacement& layer : layers) out.push_back(layer.hot);
  return out;
}

int Placement::routed_layers() const {
  return static_cast<int>(
      std::ranges::count_if(layers, [](const LayerPlacement& each) { return each.experts > 0; }));
}

Placement decide_placement(const PlacementSizes& sizes, const PlacementWish& wish) {
  if (wish.devices.size() != 1) fail("a placement on {} GPUs: one is needed", wish.devices.size());
  if (wish.use.sequences < 1 || wish.use.context < 1)
    fail("a placement for {} sequences of {} tokens", wish.use.sequences, wish.use.context);
  const DevicePlacement device = allowed_on(wish.devices.front(), wish);
  const FixedBytes fixed = fixed_bytes(sizes, wish, wish.devices.front());
  check_fixed(sizes, wish, fixed, device);
  const HotChoice hot = HotChooser(sizes, wish, device.allowed - fixed.sum(), device).choose();

  Placement out{.model = sizes.model,
                .sequences = wish.use.sequences,
                .context = wish.use.context,
                .pages = pages_of(sizes, wish.use),
                .page_tokens = sizes.page_tokens,
                .layers = {},
                .embedding = {kHost, sizes.embedding, "rows are read from the mapped file"},
                .head = {device.place, sizes.head, "`gpu`"},
                .workspace = {device.place, sizes.workspace, "`gpu`"},
                .host_workspace = {kHost, sizes.host_workspace, "run by the CPU"},
                .devices = {device}};
  for (size_t i = 0; i < sizes.layers.size(); ++i)
    out.layers.push_back(place_layer(sizes, wish, static_cast<int>(i), device.place));
  for (const ExpertOfLayer& each : hot.experts)
    out.layers[static_cast<size_t>(each.layer)].hot.push_back(each.expert);
  for (LayerPlacement& layer : out.layers) {
    if (layer.experts == 0) continue;
    std::ranges::sort(layer.hot);
    layer.copies = {device.place, layer.hot.size() * layer.expert_bytes,
                    hot.decided_by[static_cast<size_t>(layer.layer)]};
  }
  return out;
}

std::vector<PlaceBytes> bytes_by_place(const Placement& placement) {
  std::vector<PlaceBytes> out;
  const auto add = [&](const Place& place, uint64_t bytes) {
    if (bytes == 0) return;
    const auto found = std::ranges::find(out, place, &PlaceBytes::place);
    (found != out.end() ? *found : out.emplace_back(PlaceBytes{.place = place})).bytes += bytes;
  };
  for (const DevicePlacement& device : placement.devices) add(device.place, device.taken);
  for (const LayerPlacement& layer : placement.layers) {
    for (const PlacedPart* part : {&layer.dense, &layer.cache, &layer.states, &layer.copies})
      add(part->place, part->bytes);
    for (size_t node = 0; node < layer.routed_of_node.size(); ++node)
      add({.kind = Place::Kind::kNode, .index = static_cast<int>(node)}, layer.routed_of_node[node]);
  }
  for (const PlacedPart* part : {&placement.head, &placement.workspace, &placement.host_workspace})
    add(part->place, part->bytes);
  return out;
}

}  // namespace kt::inline models
