// What the server says about itself: /v1/models, /kt/status for the page, /metrics for Prometheus; and
// /v1/embeddings, which it does not have.
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <ctime>

#include "cuda/device.h"
#include "kernels/table.h"
#include "nn/step_parts.h"
#include "server/api_error.h"
#include "server/endpoints.h"
#include "server/fields.h"
#include "server/service.h"

namespace kt::inline server {
namespace {

void reply_json(Service& service, const Responder& responder, const OrderedJson& json) {
  service.metrics().count_reply(200);
  responder.reply({.body = json_text(json)});
}

uint64_t resident_bytes() {
  long pages = 0, resident = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  if (!file) return 0;
  if (std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
  std::fclose(file);
  return static_cast<uint64_t>(resident) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

double cpu_seconds() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

OrderedJson heat_json(Service& service) {
  const ExpertCounts* counts = service.runner().expert_counts();
  if (!counts) return nullptr;
  const ExpertHeat heat = service.monitor().heat();
  OrderedJson rows = OrderedJson::array();
  const auto experts = static_cast<size_t>(counts->experts());
  for (size_t first = 0; first < heat.of_expert.size(); first += experts) {
    OrderedJson row = OrderedJson::array();
    for (size_t e = first; e < first + experts; ++e)
      row.push_back(static_cast<double>(std::lround(heat.of_expert[e] * 100)) / 100);
    rows.push_back(std::move(row));
  }
  return {{"layers", counts->layers()},
          {"experts", counts->experts()},
          {"top_k", counts->top_k()},
          {"tokens", heat.tokens},
          {"used", service.monitor().experts_used().distinct},
          {"busiest_share", service.monitor().experts_used().busiest},
          {"heat", std::move(rows)}};
}

// Of steps: the CPU waiting for the GPU.
double seconds_waiting(const StepTotals& totals) {
  for (const StepPart& part : totals.parts)
    if (part.name == kWaitingPart) return part.seconds;
  return 0;
}

// Each once; none where one was lost.
std::vector<std::shared_ptr<const Gpu>> gpus_of(Service& service) {
  std::vector<std::shared_ptr<const Gpu>> out;
  if (lost_gpu()) return out;
  for (const auto& gpu : service.model().gpus())
    if (std::ranges::find(out, gpu) == out.end()) out.push_back(gpu);
  return out;
}

// What the process's GPUs have and do: null without one, and of those of which one was lost.
OrderedJson gpu_json(Service& service) {
  const std::vector<std::shared_ptr<const Gpu>> gpus = gpus_of(service);
  if (gpus.empty()) return nullptr;
  std::string names;
  uint64_t memory = 0, free = 0, held = 0;
  for (const auto& gpu : gpus) {
    names += (names.empty() ? "" : ", ") + gpu->facts().describe();
    memory += gpu->facts().memory;
    free += gpu->free_memory();
    held += gpu->held_memory();
  }
  OrderedJson out{{"name", names}, {"memory", memory}, {"free", free}, {"held", held}};
  if (const ExpertCounts* counts = service.runner().expert_counts()) {
    uint64_t all = 0;
    for (const uint64_t count : counts->snapshot()) all += count;
    out["experts_share"] =
        all > 0 ? static_cast<double>(counts->device_pairs()) / static_cast<double>(all) : 0;
    out["waited_s"] = counts->waited_seconds();
  }
  const StepTotals totals = service.totals();
  out["waited_for_s"] = seconds_waiting(totals);
  out["steps_s"] = totals.seconds;
  return out;
}

// The model itself, or with one of its adapters.
OrderedJson model_json(const Service& service, int adapter) {
  const std::string& name = service.options().name;
  return {{"id", service.model_name(adapter)},
          {"object", "model"},
          {"created", service.started()},
          {"owned_by", "kt"},
          {"root", name},
          {"parent", adapter < 0 ? OrderedJson(nullptr) : OrderedJson(name)},
          {"max_model_len", service.longest()}};
}

void write_engine(MetricsText& out, Service& service) {
  const SchedulerStats stats = service.stats();
  const auto gauge = [&](std::string_view name, std::string_view help, double value) {
    out.gauge(name, help, value);
  };
  gauge("kt_requests_running", "Sequences being generated.", stats.running);
  gauge("kt_requests_waiting", "Sequences in the queue.", stats.waiting);
  gauge("kt_kv_pages", "Pages of the KV cache, of 64 tokens.", stats.pages);
  gauge("kt_kv_pages_held", "Pages that running sequences hold.", stats.pages_held);
  gauge("kt_kv_pages_cached", "Pages kept for prompts that begin alike.", stats.pages_cached);
  gauge("kt_state_slots", "Slots for states of recurrent layers; 0: the model has none.", stats.slots);
  gauge("kt_state_slots_held", "Slots that running sequences hold.", stats.slots_held);
  gauge("kt_state_snapshots", "Slots with a state kept for prompts that begin alike.", stats.snapshots);
  const auto counter = [&](std::string_view name, std::string_view help, double value) {
    out.counter(name, help, value);
  };
  counter("kt_steps_total", "Steps of the model.", static_cast<double>(stats.steps));
  counter("kt_tokens_fed_total", "Tokens that went through the model.",
          static_cast<double>(stats.tokens_fed));
  counter("kt_tokens_reused_total", "Tokens whose keys and values were found in the cache.",
          static_cast<double>(stats.tokens_reused));
  counter("kt_preemptions_total", "Sequences that lost their pages for a while.",
          static_cast<double>(stats.preemptions));
}

void write_speed(MetricsText& out, Service& service) {
  const StepTotals totals = service.totals();
  const Pace pace = service.monitor().pace();
  const Rates& rates = service.monitor().rates();
  out.counter("kt_step_seconds_total", "Time in steps of the model.", totals.seconds);
  out.counter("kt_step_read_bytes_total", "Bytes that steps had to read from memory.",
              totals.work.total().bytes);
  out.gauge("kt_decode_tokens_per_second", "Tokens generated, over the last second.",
            pace.decode_tokens_per_s);
  out.gauge("kt_prefill_tokens_per_second", "Tokens of prompts, over the last second.",
            pace.prefill_tokens_per_s);
  out.gauge("kt_read_bytes_per_second", "Reading while steps ran, over the last second.",
            pace.read_bytes_per_s);
  out.gauge("kt_roofline_read_bytes_per_second", "Reading that this machine can do.", rates.read_bytes);
  out.gauge("kt_roofline_fraction", "Least time the steps could take, over what they took.",
            pace.fraction_of_limit);
  out.head("kt_step_part_seconds_total", "Time in steps, by operation.", "counter");
  for (const StepPart& part : totals.parts)
    out.sample("kt_step_part_seconds_total", text("{{part=\"{}\"}}", part.name), part.seconds);
  const std::vector<std::shared_ptr<const Gpu>> gpus = gpus_of(service);
  if (!gpus.empty())
    out.head("kt_gpu_memory_bytes",
             "Memory of the GPU: all of it, what is free, and what weights, cache and workspace of this "
             "process hold.",
             "gauge");
  for (const auto& gpu : gpus) {
    const std::string which = gpus.size() > 1 ? text("gpu=\"{}\",", gpu->facts().number) : "";
    out.sample("kt_gpu_memory_bytes", text("{{{}kind=\"total\"}}", which),
               static_cast<double>(gpu->facts().memory));
    out.sample("kt_gpu_memory_bytes", text("{{{}kind=\"free\"}}", which),
               static_cast<double>(gpu->free_memory()));
    out.sample("kt_gpu_memory_bytes", text("{{{}kind=\"held\"}}", which),
               static_cast<double>(gpu->held_memory()));
  }
  if (!gpus.empty())
    out.counter("kt_gpu_waited_for_seconds_total", "Time that the CPU waited for the GPU.",
                seconds_waiting(totals));
  const ExpertCounts* counts = service.runner().expert_counts();
  if (!counts) return;
  const ExpertUse use = service.monitor().experts_used();
  out.gauge("kt_experts_used", "Distinct experts of a layer, on average, over the last seconds.",
            use.distinct);
  out.gauge("kt_experts_busiest_share", "Share of the eight busiest experts of a layer.", use.busiest);
  uint64_t calls = 0;
  for (uint64_t count : counts->snapshot()) calls += count;
  out.head("kt_expert_calls_total", "Rows that routed experts computed, by device.", "counter");
  const auto on_gpu = static_cast<double>(counts->device_pairs()), all = static_cast<double>(calls);
  out.sample("kt_expert_calls_total", "{device=\"cpu\"}", std::max(all - on_gpu, 0.0));
  if (on_gpu > 0) out.sample("kt_expert_calls_total", "{device=\"gpu\"}", on_gpu);
  out.head("kt_expert_seconds_total", "Time in routed experts, by device.", "counter");
  out.sample("kt_expert_seconds_total", "{device=\"cpu\"}", counts->seconds());
  out.gauge("kt_expert_hit_rate", "Share of expert calls that the GPU's experts served.",
            all > 0 ? on_gpu / all : 0);
  out.counter("kt_gpu_wait_seconds_total", "Time that the GPU waited for the CPU's experts.",
              counts->waited_seconds());
}

}  // namespace

void get_models(Service& service, HttpRequest& request, const Responder& responder) {
  constexpr std::string_view kList = "/v1/models";
  const int adapters = static_cast<int>(service.model().adapters().size());
  if (request.path == kList) {
    OrderedJson all = OrderedJson::array();
    for (int i = -1; i < adapters; ++i) all.push_back(model_json(service, i));
    return reply_json(service, responder, {{"object", "list"}, {"data", std::move(all)}});
  }
  const std::string name = request.path.substr(kList.size() + 1);
  for (int i = -1; i < adapters; ++i)
    if (name == service.model_name(i)) return reply_json(service, responder, model_json(service, i));
  throw ApiError(
      404, text("no model named {}; this server has {}", shown_value(name), service.options().name), "model");
}

void get_status(Service& service, HttpRequest&, const Responder& responder) {
  const SchedulerStats stats = service.stats();
  const Pace pace = service.monitor().pace();
  reply_json(service, responder,
             {{"model", service.options().name},
              {"experts_format", service.model().experts_dialect()},
              {"isa", best_kernels().name},
              {"threads", service.runner().threads()},
              {"version", service.options().version},
              {"uptime_s", service.uptime()},
              {"context", service.longest()},
              {"running", stats.running},
              {"waiting", stats.waiting},
              {"max_running", service.options().max_running},
              {"kv_tokens",
               {{"total", stats.pages * kPageTokens},
                {"held", stats.pages_held * kPageTokens},
                {"cached", stats.pages_cached * kPageTokens}}},
              {"decode_tokens_per_s", pace.decode_tokens_per_s},
              {"prefill_tokens_per_s", pace.prefill_tokens_per_s},
              {"fraction_of_limit", pace.fraction_of_limit},
              {"limit", pace.limit},
              {"read_gb_per_s", pace.read_bytes_per_s * 1e-9},
              {"limit_read_gb_per_s", service.monitor().rates().read_bytes * 1e-9},
              {"tokens_total", stats.tokens_sampled},
              {"requests_total", service.metrics().requests()},
              {"gpu", gpu_json(service)},
              {"placement", service.options().placement},
              {"experts", heat_json(service)}});
}

void get_metrics(Service& service, HttpRequest&, const Responder& responder) {
  MetricsText out;
  service.metrics().write(out);
  write_engine(out, service);
  write_speed(out, service);
  out.gauge("kt_http_connections", "Open connections.", service.connections());
  out.gauge("process_resident_memory_bytes", "Resident memory.", static_cast<double>(resident_bytes()));
  out.counter("process_cpu_seconds_total", "Processor time.", cpu_seconds());
  out.gauge("process_start_time_seconds", "Start, in seconds since 1970.",
            static_cast<double>(service.started()));
  service.metrics().count_reply(200);
  responder.reply({.type = "text/plain; version=0.0.4; charset=utf-8", .body = out.str()});
}

void post_embeddings(Service& service, HttpRequest&, const Responder&) {
  throw ApiError(404,
                 text("{} is a model that generates text; it has no embeddings", service.options().name));
}

}  // namespace kt::inline server
