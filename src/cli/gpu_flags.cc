#include "cli/gpu_flags.h"

#include <charconv>

#include "base/error.h"
#include "cli/settings.h"
#include "cuda/driver.h"
#include "terminal/amounts.h"

namespace kt::inline cli {
namespace {

// What `parse` says of words under no name; "": nothing is wrong with them.
template <typename Parse>
std::string problem_of(Parse parse) {
  try {
    parse();
    return {};
  } catch (const Error& error) {
    const std::string line = error.what();
    return line.starts_with(": ") ? line.substr(2) : line;
  }
}

// A flag's value that has to be readable, by the words of who reads it.
CLI::Validator readable(std::string (*problem)(std::string_view), const char* type, const char* name) {
  return CLI::Validator([problem](std::string& value) { return problem(value); }, type, name);
}

std::string size_problem(std::string_view value) {
  return problem_of([&] { parse_bytes(value, ""); });
}

// --gpu-prefill-threshold: none: auto.
std::optional<int> prefill_threshold(std::string_view value) {
  if (value == "auto") return {};
  if (value == "off") return 0;
  int tokens = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), tokens);
  if (error != std::errc() || end != value.data() + value.size() || tokens < 0)
    fail("expected a number of tokens, auto or off, got '{}'", value);
  return tokens;
}

}  // namespace

std::string prefill_threshold_problem(std::string_view value) {
  return problem_of([&] { prefill_threshold(value); });
}

std::string gpu_problem(std::string_view value) {
  const std::string wrong = problem_of([&] { gpu_choice_named(value); });
  return wrong.empty()
             ? ""
             : text("expected the number of a device, or several as 0,1, auto or off, got {}", value);
}

std::string gpu_experts_problem(std::string_view value) {
  return problem_of([&] { parse_expert_wish(value, ""); });
}

std::string expert_placement_problem(std::string_view value) {
  return problem_of([&] { expert_strategy_named(value); });
}

void GpuUseFlags::add_to(CLI::App& verb) {
  gpu_ =
      verb.add_option(
              "--gpu", device,
              text("GPU for attention, dense parts and the cache, and for as many routed experts as fit; all "
                   "others stay on the CPU: its number, auto or off; alone: 0. Layers are split over several "
                   "by their memory: 0,1. Default: {}",
                   kUsualGpu))
          ->expected(0, 1)
          ->type_name("N[,N...]|auto|off")
          ->default_str("0")
          ->check(readable(gpu_problem, "N[,N...]|auto|off", "gpu"));
  options_ = {
      verb.add_option(
              "--gpu-memory", memory,
              "All that this process may take of the GPU, of each of several, such as 24GiB, what the driver "
              "takes for it included; default: what is free, less 5 %")
          ->check(readable(size_problem, "SIZE", "size")),
      verb.add_option("--gpu-experts,--kt-num-gpu-experts", experts,
                      "Routed experts on the GPU: so many a layer on average, a share of all such as 25%, or "
                      "auto: as many as fit beside dense parts, cache and workspace")
          ->type_name("N|P%|auto")
          ->check(readable(gpu_experts_problem, "N|P%|auto", "experts"))
          ->capture_default_str(),
      verb.add_option("--kt-gpu-experts-ratio", experts_ratio,
                      "The same as a share of all, from 0 to 1; wins over the number")
          ->check(within(0, 1)),
      verb.add_option("--expert-placement,--kt-expert-placement-strategy", placement,
                      "Which experts: uniform: the first of each layer, as many in each; frequency: the most "
                      "used, by --expert-statistics; front-loading: whole layers from the first on; random; "
                      "default: frequency with statistics, else uniform")
          ->check(CLI::IsMember({"uniform", "frequency", "front-loading", "random"})),
      verb.add_option("--expert-statistics,--init-expert-location", statistics,
                      "How often each expert was chosen: JSON or a torch file, as SGLang's recorder and "
                      "kt_kernel write them"),
      verb.add_option(
              "--gpu-prefill-threshold,--kt-gpu-prefill-token-threshold,--kt-gpu-prefill-threshold",
              prefill_from,
              "Prompts: from how many tokens of a step on routed experts pass through the GPU, over the "
              "link, instead of staying on the CPU; auto: from where that is faster, measured at the start")
          ->type_name("N|auto|off")
          ->check(readable(prefill_threshold_problem, "N|auto|off", "threshold"))
          ->capture_default_str(),
      verb.add_option("--gpu-prefill-chunk", prefill_chunk,
                      "Tokens of a prompt to run at once while nobody is answering; default: up to 16384, as "
                      "memory allows")
          ->check(positive()),
      verb.add_option("--mem-fraction-static", share,
                      "--gpu-memory as a share of the card, up to 1, as SGLang takes it")
          ->check(positive())
          ->check(within(0, 1)),
  };
}

void GpuUseFlags::take(const Settings& settings, const CLI::App& verb) {
  const auto given = [&](const char* name) { return verb.get_option(name)->count() > 0; };
  if (!given("--gpu")) device = settings.text("run.gpu");
  if (!given("--gpu-memory") && !given("--mem-fraction-static")) {
    const Json& most = settings.value("run.gpu-memory");
    memory = most.is_string() ? most.get<std::string>() : "";
  }
  if (!given("--gpu-experts")) experts = settings.text("run.gpu-experts");
  if (!given("--expert-placement")) placement = settings.text("run.expert-placement");
  if (!given("--expert-statistics")) statistics = settings.text("run.expert-statistics");
  if (!given("--gpu-prefill-threshold")) prefill_from = settings.text("run.gpu-prefill-threshold");
}

GpuChoice GpuUseFlags::choice() const {
  const GpuChoice out = gpu_choice_named(device.empty() ? "0" : device);
  const bool asked = gpu_ && gpu_->count() > 0;
  // A machine without a GPU is told nothing about it unless somebody asked.
  return out.kind == GpuChoice::Kind::kAuto && !asked && cuda_absent() ? GpuChoice{} : out;
}

PlacementOptions GpuUseFlags::placement_options() const {
  PlacementOptions out{.gpu_memory = memory.empty() ? 0 : parse_bytes(memory, "--gpu-memory"),
                       .share = share,
                       .experts = parse_expert_wish(experts, "--gpu-experts"),
                       .statistics = statistics,
                       .prefill_from = prefill_threshold(prefill_from),
                       .prefill_chunk = prefill_chunk};
  if (experts_ratio >= 0) out.experts = {.kind = ExpertWish::Kind::kShare, .amount = experts_ratio};
  if (!placement.empty()) out.strategy = expert_strategy_named(placement);
  return out;
}

std::string GpuUseFlags::given() const {
  std::string out;
  for (const CLI::Option* option : options_)
    if (option->count() > 0) out += text("{}--{}", out.empty() ? "" : ", ", option->get_lnames().front());
  return out;
}

}  // namespace kt::inline cli
