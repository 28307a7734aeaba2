// kt perplexity: how well a model predicts a text, and what a format costs.
#include "engine/perplexity.h"

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/file.h"
#include "cli/model_flags.h"
#include "cli/report.h"

namespace kt {
namespace {

struct PerplexityFlags {
  ModelFlags model;
  std::string file, against;
  PerplexityOptions options;
  bool json = false;
};

// A format's name means the same model in that format; "stored" the model as it is on disk.
std::unique_ptr<LoadedModel> reference_model(const PerplexityFlags& flags) {
  if (flags.against.empty()) return nullptr;
  ModelOptions options = flags.model.options();
  options.weights.clear();
  options.format.clear();
  for (const NamedFormat& format : kFormats)
    if (format.name == flags.against) {
      options.format = flags.against;
      return std::make_unique<LoadedModel>(flags.model.model, options);
    }
  return std::make_unique<LoadedModel>(flags.against == "stored" ? flags.model.model : flags.against,
                                       options);
}

void run_perplexity(const PerplexityFlags& flags) {
  const MappedFile file(flags.file);
  LoadedModel model(flags.model.model, flags.model.options());
  const std::unique_ptr<LoadedModel> reference = reference_model(flags);
  const std::vector<int32_t> tokens =
      document_tokens(model.tokenizer(), {reinterpret_cast<const char*>(file.bytes().data()), file.size()},
                      flags.options.separator);
  std::optional<StatusLine> status(std::in_place);
  const PerplexityResult result = measure_perplexity(
      model, reference.get(), tokens, flags.options,
      [&](int64_t done, int64_t all) { status->show(text("{} of {} tokens", done, all)); });
  status.reset();
  if (flags.json) {
    nlohmann::ordered_json out = {{"perplexity", result.perplexity()},
                                  {"nll", result.nll},
                                  {"tokens", result.tokens},
                                  {"context", flags.options.context},
                                  {"experts", model.experts_dialect()},
                                  {"acts", flags.model.acts}};
    if (reference) out["kl"] = result.mean_kl();
    std::printf("%s\n", out.dump(2).c_str());
    return;
  }
  std::printf("perplexity %s over %lld tokens (%s experts, windows of %d)",
              fixed(result.perplexity(), 4).c_str(), static_cast<long long>(result.tokens),
              model.experts_dialect().c_str(), flags.options.context);
  if (reference) std::printf(", KL %s against %s", fixed(result.mean_kl(), 5).c_str(), flags.against.c_str());
  std::printf("\n");
}

}  // namespace

void add_perplexity(CLI::App& kt, Invocation& run) {
  CLI::App* verb = kt.add_subcommand("perplexity", "How well a model predicts a text");
  const auto flags = std::make_shared<PerplexityFlags>();
  flags->model.add_to(*verb);
  verb->add_option("--file", flags->file, "The text; documents are separated by <|endoftext|>")->required();
  verb->add_option("--context", flags->options.context, "Tokens of a window")
      ->check(positive())
      ->capture_default_str();
  verb->add_option("--max-tokens", flags->options.max_tokens, "Tokens to predict at most; default: all")
      ->check(positive());
  verb->add_option("--separator", flags->options.separator, "Between documents")->capture_default_str();
  verb->add_option("--kl-against", flags->against,
                   "Also the KL divergence from another model, from a format's name, or from `stored`");
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Examples:\n"
      "  kt perplexity ./demo/tiny-deepseekv3 --file text.txt --format int4 --kl-against stored\n"
      "  kt perplexity ./Qwen3-30B-A3B --weights ./Qwen3-30B-A3B-int4 --file text.txt --max-tokens 10000");
  verb->callback([&run, flags] { run.action = [flags] { run_perplexity(*flags); }; });
}

}  // namespace kt
