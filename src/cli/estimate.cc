// kt estimate: the memory a model will take and the speed it can have at best, before loading it.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/model_estimate.h"
#include "cli/model_flags.h"
#include "cli/questions.h"

namespace kt::inline cli {
namespace {

constexpr int kUsualContext = 4096;

struct EstimateFlags {
  ModelFlags model;
  int context = 0, requests = 1;
  double bandwidth = 0;  // GB/s; 0: measured
  bool json = false;
};

int context_of(const EstimateFlags& flags, const ModelSpec& spec) {
  if (flags.context > spec.context)
    fail("--context: {} has a context of {}, got {}", flags.model.model, spec.context, flags.context);
  return flags.context > 0 ? flags.context : std::min(kUsualContext, spec.context);
}

Estimate estimate(const EstimateFlags& flags) {
  ModelOptions options = flags.model.options();
  options.tokenizer = TokenizerNeed::kIfReadable;
  flags.model.note_idle_flags();
  OpenedModel model(flags.model.model, options);
  const MemoryRequest use{.sequences = flags.requests, .context = context_of(flags, model.spec())};
  const Rates rates =
      flags.bandwidth > 0 ? Rates{.read_bytes = flags.bandwidth * 1e9} : measured_rates(options.threads);
  return estimate_model(model, use, options.max_memory, rates);
}

// What makes a model that does not fit smaller, as long as there is something left.
NextStep smaller(const EstimateFlags& flags, const Estimate& found) {
  const ModelFlags& model = flags.model;
  std::vector<std::string> words = {"estimate", model.found.name.empty() ? model.model : model.found.name};
  if (model.format.empty() && model.weights.empty() && found.plan.host().experts > 0)
    words.insert(words.end(), {"--format", "int4"});
  else if (model.linear_format.empty())
    words.insert(words.end(), {"--linear-format", "int8"});
  else
    return {};
  return {.line = NextLine::kReport, .command = command_line(words)};
}

void run_estimate(const EstimateFlags& flags, Invocation& run) {
  const Estimate found = estimate(flags);
  if (!found.fits()) run.next = flags.json ? NextStep{} : smaller(flags, found);
  if (flags.json) {
    std::printf("%s\n", json_of(found).dump(2).c_str());
    return;
  }
  print_memory(found, *flags.model.verb);
  std::printf("\n");
  print_speed(found);
}

}  // namespace

void add_estimate(CLI::App& kt, Invocation& run) {
  CLI::App* verb =
      kt.add_subcommand("estimate", "Memory and the best possible speed of a model, without loading it");
  const auto flags = std::make_shared<EstimateFlags>();
  flags->model.add_to(*verb, run);
  verb->add_option("--context", flags->context,
                   "Tokens of a request, prompt and answer; default: 4096, or the model's context if shorter")
      ->check(positive());
  verb->add_option("--max-running-requests", flags->requests, "Requests at once")
      ->check(within(1, kMostSequences))
      ->capture_default_str();
  verb->add_option("--bandwidth", flags->bandwidth,
                   "GB/s this machine reads from memory; default: measured, which takes a second")
      ->check(positive());
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Of the weights only headers are read. Speed is the limit: weights of one token, and the keys and "
      "values\n"
      "of its context, read once at full bandwidth.\n\n"
      "Examples:\n"
      "  kt estimate ./Qwen3-30B-A3B --format int4 --linear-format int8 --context 32768\n"
      "  kt estimate ./demo/tiny-deepseekv3 --bandwidth 50 --json\n"
      "  kt estimate ./DeepSeek-V3 --rules one-gpu.yaml");
  verb->callback([&run, flags] { run.action = [flags, &run] { run_estimate(*flags, run); }; });
}

}  // namespace kt::inline cli
