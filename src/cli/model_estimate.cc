#include "cli/model_estimate.h"

#include <algorithm>
#include <cstdio>

#include "base/cpu_choice.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/text.h"
#include "base/topology.h"
#include "bench/measure.h"
#include "cli/help/flag_words.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

double tokens_per_s(const Work& work, int tokens, const Rates& rates) {
  return tokens / limit_of(work, rates).seconds;
}

// What the host reads of it.
double host_bytes(const Work& work) {
  double bytes = 0;
  for (const Work::At& at : work.places)
    if (at.place.kind == Place::Kind::kNode) bytes += at.amount.bytes;
  return bytes;
}

std::string cache_text(const MemoryRequest& use) {
  return text("KV cache, {} of {} tokens", counted(use.sequences, "request"), use.context);
}

void print_fit(uint64_t there, const char* word, bool fits) {
  std::printf("%s %s: %s\n", human_bytes(there).c_str(), word,
              fits ? inked(Ink::kGood, "fits").c_str() : inked(Ink::kBad, "does not fit").c_str());
}

// What lies where, or why that cannot be.
void print_gpu(const Estimate& e, const CLI::App& verb) {
  std::printf("\n");
  if (!e.placement) {
    std::printf("%s: %s\n", inked(Ink::kBad, "does not fit").c_str(),
                with_flags(e.gpu_problem, verb).c_str());
    return;
  }
  std::fputs(with_flags(describe(*e.placement), verb).c_str(), stdout);
}

struct DeviceBytes {
  std::string name = {};
  uint64_t dense = 0, cache = 0, workspace = 0, experts = 0, driver = 0, allowed = 0, free = 0;

  void add(const DeviceBytes& other) {
    name += (name.empty() ? "" : ", ") + other.name;
    dense += other.dense;
    cache += other.cache;
    workspace += other.workspace;
    experts += other.experts;
    driver += other.driver;
    allowed += other.allowed;
    free += other.free;
  }
};

DeviceBytes bytes_on(const Placement& placed, const DevicePlacement& device) {
  DeviceBytes out{.name = text("{} ({})", name_of(device.place), device.name),
                  .driver = device.taken,
                  .allowed = device.allowed,
                  .free = device.free};
  const auto here = [&](const PlacedPart& part) { return part.place == device.place ? part.bytes : 0; };
  out.dense = here(placed.head);
  out.workspace = here(placed.workspace);
  for (const PlacedPart& part : placed.more_workspaces) out.workspace += here(part);
  for (const LayerPlacement& layer : placed.layers) {
    out.dense += here(layer.dense);
    out.cache += here(layer.cache) + here(layer.states);
    out.experts += here(layer.copies);
  }
  return out;
}

nlohmann::ordered_json json_of(const DeviceBytes& of) {
  return {{"name", of.name},
          {"dense", of.dense},
          {"kv_cache", of.cache},
          {"workspace", of.workspace},
          {"experts", of.experts},
          {"driver", of.driver},
          {"needed", of.dense + of.cache + of.workspace + of.experts + of.driver},
          {"allowed", of.allowed},
          {"free", of.free}};
}

// Its bytes, by what they are for.
nlohmann::ordered_json gpu_json(const Estimate& e) {
  if (!e.placement) return {{"fits", false}, {"problem", e.gpu_problem}};
  const Placement& placed = *e.placement;
  DeviceBytes all;
  nlohmann::ordered_json devices = nlohmann::ordered_json::array();
  for (const DevicePlacement& device : placed.devices) {
    const DeviceBytes one = bytes_on(placed, device);
    devices.push_back(json_of(one));
    all.add(one);
  }
  nlohmann::ordered_json out = json_of(all);
  if (placed.devices.size() > 1) out["devices"] = std::move(devices);
  out["hot_experts"] = placed.hot_experts();
  out["fits"] = true;
  out["placement"] = json_of(placed);
  return out;
}

size_t nodes_there(const std::vector<int>& chosen) {
  return chosen.empty() ? Topology::discover().nodes.size() : chosen.size();
}

void print_nodes(const Estimate& e) {
  if (e.plan.weights_of_node().size() < 2) return;
  std::printf("\n");
  const std::vector<uint64_t> nodes = e.plan.weights_of_node();
  const bool real = nodes.size() <= nodes_there(e.node_ids);
  Table table({real ? "NUMA node" : "thread pool", "weights"}, 1);
  for (size_t node = 0; node < nodes.size(); ++node)
    table.add({std::to_string(real && !e.node_ids.empty() ? e.node_ids[node] : static_cast<int>(node)),
               human_bytes(nodes[node])});
  std::fputs(table.str().c_str(), stdout);
}

}  // namespace

std::string pools_text(int pools, const std::vector<int>& node_ids) {
  std::string named;
  for (const int id : node_ids) named += text("{}{}", named.empty() ? "" : ", ", id);
  if (!named.empty()) named = text("NUMA node{} {}", node_ids.size() == 1 ? "" : "s", named);
  const auto real = static_cast<int64_t>(nodes_there(node_ids));
  if (pools <= real) return named.empty() ? counted(pools, "NUMA node") : named;
  return text("{} on {}", counted(pools, "thread pool"), named.empty() ? counted(real, "NUMA node") : named);
}

Estimate estimate_model(OpenedModel& model, const MemoryRequest& use, uint64_t max_memory,
                        const Rates& rates) {
  model.settle(use);
  Estimate out{.use = use, .plan = model.memory_plan(use), .process = model.base_bytes()};
  out.available = available_memory() + out.process;
  if (max_memory > 0) out.available = std::min(out.available, max_memory);
  try {
    out.placement = model.placement(use);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMemory) throw;
    out.gpu_problem = error.what();
  }
  model.write_rules(use);  // what does not fit is an error then
  if (out.gpu_problem.empty()) out.placement_json = model.placement_json(use);
  const Placement* const placed = out.placement ? &*out.placement : nullptr;
  out.one = model.decode_work(1, use.context, placed);
  out.all = model.decode_work(use.sequences, use.context, placed);
  out.rates = rates;
  if (const PlacedRules* const rules = model.rules()) {
    const PlacedRules shown = placed ? with_devices(*rules, *placed) : *rules;
    out.rules = describe(shown, !model.gpus().empty());
    out.rules_json = json_of(shown, !model.gpus().empty());
  }
  return out;
}

Rates measured_rates(int threads) {
  return rates_of(measure_quickly(std::make_shared<Pool>(fitted({.threads = threads})), best_kernels()));
}

nlohmann::ordered_json json_of(const Estimate& e) {
  nlohmann::ordered_json out;
  out["context"] = e.use.context;
  out["max_running_requests"] = e.use.sequences;
  const PlaceMemory host = e.plan.host();
  out["bytes"] = {{"experts", host.experts},
                  {"dense", host.linears + host.vectors},
                  {"kv_cache", host.kv_cache},
                  {"workspace", host.workspace},
                  {"loading", host.loading},
                  {"process", e.process},
                  {"peak", e.needed()},
                  {"available", e.available},
                  {"embedding_mapped", e.plan.embedding}};
  if (e.has_gpu()) out["gpu"] = gpu_json(e);
  out["weights_of_node"] = e.plan.weights_of_node();
  if (!e.rules.empty()) out["rules"] = e.rules_json;
  out["placement"] = e.placement_json;
  out["fits"] = e.fits();
  const Amount one = e.one.total();
  out["decode"] = {{"tokens_per_s", tokens_per_s(e.one, 1, e.rates)},
                   {"all_requests_tokens_per_s", tokens_per_s(e.all, e.use.sequences, e.rates)},
                   {"limit", limit_of(e.one, e.rates).which},
                   {"bytes_per_token", one.bytes},
                   {"operations_per_token", one.integer_operations + one.float_operations},
                   {"read_gb_per_s", e.rates.read_bytes * 1e-9}};
  return out;
}

void print_memory(const Estimate& e, const CLI::App& verb) {
  if (!e.rules.empty()) std::printf("%s\n", with_flags(e.rules, verb).c_str());
  const PlaceMemory host = e.plan.host();
  Table table({"memory", ""}, 1);
  const auto add = [&](const std::string& name, uint64_t bytes) { table.add({name, human_bytes(bytes)}); };
  add("experts", host.experts);
  if (!e.has_gpu() || host.linears > 0) add("dense weights", host.linears + host.vectors);
  if (!e.has_gpu() || host.kv_cache > 0) add(cache_text(e.use), host.kv_cache);
  add("workspace", host.workspace);
  add("the process itself", e.process);
  if (e.plan.weights() + host.loading > e.plan.running())
    add("more, while loading", e.plan.weights() + host.loading - e.plan.running());
  add("in all", e.needed());
  std::fputs(table.str().c_str(), stdout);
  print_fit(e.available, "available", e.needed() <= e.available);
  std::printf("the embedding, %s, stays in the file\n", human_bytes(e.plan.embedding).c_str());
  print_nodes(e);
  if (e.has_gpu()) print_gpu(e, verb);
}

void print_speed(const Estimate& e) {
  const Limit limit = limit_of(e.one, e.rates);
  if (limit.seconds == 0) {
    std::printf("decode: the GPU reads everything; its speed is not estimated\n");
    return;
  }
  std::printf("decode: at most %s tokens/s, limited by %s (%s a token at %s GB/s%s)\n",
              three_digits(tokens_per_s(e.one, 1, e.rates)).c_str(), limit.which,
              human_bytes(static_cast<uint64_t>(host_bytes(e.one))).c_str(),
              three_digits(e.rates.read_bytes * 1e-9).c_str(), e.has_gpu() ? ", without the GPU's time" : "");
  if (e.use.sequences > 1)
    std::printf("%s together: at most %s tokens/s\n", counted(e.use.sequences, "request").c_str(),
                three_digits(tokens_per_s(e.all, e.use.sequences, e.rates)).c_str());
}

}  // namespace kt::inline cli
