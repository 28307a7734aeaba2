// kt estimate: the memory a model will take and the speed it can have at best, before loading it.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/memory.h"
#include "cli/measure.h"
#include "cli/model_flags.h"
#include "cli/report.h"

namespace kt {
namespace {

constexpr int kUsualContext = 4096;

struct EstimateFlags {
  ModelFlags model;
  int context = 0, requests = 1;
  double bandwidth = 0;  // GB/s; 0: measured
  bool json = false;
};

struct Estimate {
  MemoryRequest use;
  MemoryPlan plan;
  uint64_t process = 0, available = 0;
  Work one, all;  // a token of one request, and of each of them
  Rates rates;

  uint64_t needed() const { return process + plan.peak(); }
  bool fits() const { return needed() <= available; }
};

int context_of(const EstimateFlags& flags, const ModelSpec& spec) {
  if (flags.context > spec.context)
    fail("--context: {} has a context of {}, got {}", flags.model.model, spec.context, flags.context);
  return flags.context > 0 ? flags.context : std::min(kUsualContext, spec.context);
}

Rates rates_for(const EstimateFlags& flags) {
  if (flags.bandwidth > 0) return {.read_bytes = flags.bandwidth * 1e9};
  return rates_of(
      measure_quickly(std::make_shared<Pool>(PoolOptions{.threads = flags.model.threads}), kernels()));
}

Estimate estimate(const EstimateFlags& flags) {
  ModelOptions options = flags.model.options();
  options.sizes_only = true;
  LoadedModel model(flags.model.model, options);
  Estimate out;
  out.use = {.sequences = flags.requests, .context = context_of(flags, model.spec())};
  out.plan = model.transformer().memory_plan(out.use);
  out.process = model.base_bytes();
  out.available = available_memory() + out.process;
  if (options.max_memory > 0) out.available = std::min(out.available, options.max_memory);
  out.one = model.transformer().decode_work(1, out.use.context);
  out.all = model.transformer().decode_work(flags.requests, out.use.context);
  out.rates = rates_for(flags);
  return out;
}

double tokens_per_s(const Work& work, int tokens, const Rates& rates) {
  return tokens / limit_of(work, rates).seconds;
}

nlohmann::ordered_json json_of(const Estimate& e) {
  nlohmann::ordered_json out;
  out["context"] = e.use.context;
  out["max_running_requests"] = e.use.sequences;
  out["bytes"] = {{"experts", e.plan.experts},
                  {"dense", e.plan.linears + e.plan.vectors},
                  {"kv_cache", e.plan.kv_cache},
                  {"workspace", e.plan.workspace},
                  {"loading", e.plan.loading},
                  {"process", e.process},
                  {"peak", e.needed()},
                  {"available", e.available},
                  {"embedding_mapped", e.plan.embedding}};
  out["weights_of_node"] = e.plan.weights_of_node;
  out["fits"] = e.fits();
  out["decode"] = {{"tokens_per_s", tokens_per_s(e.one, 1, e.rates)},
                   {"all_requests_tokens_per_s", tokens_per_s(e.all, e.use.sequences, e.rates)},
                   {"limit", limit_of(e.one, e.rates).which},
                   {"bytes_per_token", e.one.bytes},
                   {"operations_per_token", e.one.integer_operations + e.one.float_operations},
                   {"read_gb_per_s", e.rates.read_bytes * 1e-9}};
  return out;
}

void print_nodes(const Estimate& e) {
  if (e.plan.weights_of_node.size() < 2) return;
  std::printf("\n");
  Table table({"NUMA node", "weights"}, 1);
  for (size_t node = 0; node < e.plan.weights_of_node.size(); ++node)
    table.add({std::to_string(node), human_bytes(e.plan.weights_of_node[node])});
  std::fputs(table.str().c_str(), stdout);
}

void print_report(const Estimate& e) {
  Table table({"memory", ""}, 1);
  const auto add = [&](const std::string& name, uint64_t bytes) { table.add({name, human_bytes(bytes)}); };
  add("experts", e.plan.experts);
  add("dense weights", e.plan.linears + e.plan.vectors);
  add(text("KV cache, {} of {} tokens", counted(e.use.sequences, "request"), e.use.context), e.plan.kv_cache);
  add("workspace", e.plan.workspace);
  add("the process itself", e.process);
  if (e.plan.weights() + e.plan.loading > e.plan.running())
    add("more, while loading", e.plan.weights() + e.plan.loading - e.plan.running());
  add("in all", e.needed());
  std::fputs(table.str().c_str(), stdout);
  std::printf("%s available: %s\n", human_bytes(e.available).c_str(),
              e.fits() ? inked(Ink::kGood, "fits").c_str() : inked(Ink::kBad, "does not fit").c_str());
  std::printf("the embedding, %s, stays in the file\n", human_bytes(e.plan.embedding).c_str());
  print_nodes(e);
  const Limit limit = limit_of(e.one, e.rates);
  std::printf("\ndecode: at most %s tokens/s, limited by %s (%s a token at %s GB/s)\n",
              three_digits(tokens_per_s(e.one, 1, e.rates)).c_str(), limit.which,
              human_bytes(static_cast<uint64_t>(e.one.bytes)).c_str(),
              three_digits(e.rates.read_bytes * 1e-9).c_str());
  if (e.use.sequences > 1)
    std::printf("%s together: at most %s tokens/s\n", counted(e.use.sequences, "request").c_str(),
                three_digits(tokens_per_s(e.all, e.use.sequences, e.rates)).c_str());
}

void run_estimate(const EstimateFlags& flags) {
  const Estimate found = estimate(flags);
  if (flags.json)
    std::printf("%s\n", json_of(found).dump(2).c_str());
  else
    print_report(found);
}

}  // namespace

void add_estimate(CLI::App& kt, Invocation& run) {
  CLI::App* verb =
      kt.add_subcommand("estimate", "Memory and the best possible speed of a model, without loading it");
  const auto flags = std::make_shared<EstimateFlags>();
  flags->model.add_to(*verb);
  verb->add_option("--context", flags->context,
                   "Tokens of a request, prompt and answer; default: 4096, or the model's context if shorter")
      ->check(positive());
  verb->add_option("--max-running-requests", flags->requests, "Requests at once")
      ->check(positive())
      ->capture_default_str();
  verb->add_option("--bandwidth", flags->bandwidth,
                   "GB/s this machine reads from memory; default: measured, which takes a second")
      ->check(positive());
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Only headers are read. Speed is the limit: weights of one token, and the keys and values of its\n"
      "context, read once at full bandwidth.\n\n"
      "Examples:\n"
      "  kt estimate ./Qwen3-30B-A3B --format int4 --linear-format int8 --context 32768\n"
      "  kt estimate ./demo/tiny-deepseekv3 --bandwidth 50 --json");
  verb->callback([&run, flags] { run.action = [flags] { run_estimate(*flags); }; });
}

}  // namespace kt
