// kt perplexity: how well a model predicts a text, and what a format costs.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/cpu_choice.h"
#include "base/error.h"
#include "cli/model_flags.h"
#include "engine/model_perplexity.h"
#include "formats/known_formats.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

struct PerplexityFlags {
  ModelFlags model;
  std::string file, against, separator = "<|endoftext|>";
  PerplexityOptions options;
  int64_t context = 0;  // 0: that of the options, or the model's where it is shorter
  bool json = false;
};

// What the divergence is measured from: "f32" means the same weights and cache in f32 arithmetic (what the
// activations cost), a format's name the same model in that format, "stored" the model as it is on disk.
// Decided before anything is loaded.
struct Reference {
  std::string model;  // "": none
  ModelOptions options;
};

Reference reference_of(const PerplexityFlags& flags) {
  if (flags.against.empty()) return {};
  Reference out{.model = flags.model.model, .options = flags.model.options()};
  if (flags.against == "f32") {
    out.options.precision = Precision::kF32;
    return out;
  }
  out.options.weights.clear();
  out.options.format.clear();
  out.options.linear_format.clear();
  out.options.rules.reset();
  if (flags.against == "stored") return out;
  std::string known;
  for (const NamedFormat& format : kFormats) {
    if (format.name == "f32") continue;
    known += text(", {}", format.name);
    if (format.name != flags.against) continue;
    out.options.format = flags.against;
    return out;
  }
  const auto model = try_find_model(flags.against);
  if (!model || !std::filesystem::exists(model->path))
    fail("--kl-against: '{}' is neither a model on disk nor f32, stored{}", flags.against, known);
  out.model = model->path;
  return out;
}

std::optional<LoadedModel> load_reference(const Reference& reference, const LoadedModel& model,
                                          const MemoryRequest& use) {
  if (reference.model.empty()) return std::nullopt;
  std::optional out = OpenedModel(reference.model, reference.options).load({.use = use});
  if (out->spec().vocab != model.spec().vocab)
    fail("--kl-against: {} has a vocabulary of {}, {} of {}", out->path(), out->spec().vocab, model.path(),
         model.spec().vocab);
  return out;
}

Divergence measure(LoadedModel& model, LoadedModel* reference, const PerplexityFlags& flags) {
  const auto end = model.tokenizer().id_of(flags.separator);
  if (!end) fail("--separator: '{}' is not a token of {}", flags.separator, model.path());
  // The first is given, not predicted.
  const size_t targets = flags.options.most_tokens,
               most = targets > 0 && targets < SIZE_MAX ? targets + 1 : SIZE_MAX;
  const std::vector<TokenId> tokens = file_tokens(model, flags.file, *end, flags.separator, most);
  StatusLine status;
  return measure_models(
      tokens, model, reference,
      {.windows = flags.options,
       .threads = fitted({.threads = flags.model.threads}).threads,
       .show = [&](size_t done, size_t all) { status.show(text("{} of {} windows", done, all)); }});
}

void run_perplexity(PerplexityFlags flags) {
  flags.model.note_idle_flags();
  // Two models share the card: neither may fill it with experts, unless so many were asked for.
  if (!flags.against.empty() && flags.model.gpu.experts == "auto") flags.model.gpu.experts = "0";
  const Reference against = reference_of(flags);
  flags.model.one_adapter();
  OpenedModel opened(flags.model.model, flags.model.options());
  const int context = opened.spec().context;
  if (flags.context > context)
    fail("--context: {} has a context of {}, got {}", flags.model.model, context, flags.context);
  flags.options.context = flags.context > 0 ? static_cast<size_t>(flags.context)
                                            : std::min(flags.options.context, static_cast<size_t>(context));
  const MemoryRequest use{.context = static_cast<int>(flags.options.context)};
  LoadedModel model = std::move(opened).load({.use = use});
  std::optional<LoadedModel> reference = load_reference(against, model, use);
  const Divergence found = measure(model, reference ? &*reference : nullptr, flags);
  if (flags.json) {
    nlohmann::ordered_json out = {{"perplexity", found.model.perplexity}, {"nll", found.model.nll},
                                  {"tokens", found.model.tokens},         {"context", flags.options.context},
                                  {"experts", model.experts_dialect()},   {"acts", flags.model.acts}};
    if (reference) {
      out["reference_perplexity"] = found.reference.perplexity;
      out["kl"] = found.kl;
      out["same_top"] = found.same_top;
    }
    std::printf("%s\n", out.dump(2).c_str());
    return;
  }
  const std::string dialect = model.experts_dialect();  // "": a dense model
  std::printf("perplexity %s over %zu tokens (%s%swindows of %zu)", fixed(found.model.perplexity, 4).c_str(),
              found.model.tokens, dialect.c_str(), dialect.empty() ? "" : " experts, ",
              flags.options.context);
  if (reference)
    std::printf("; KL %s and the same best token %s of the time against %s", fixed(found.kl, 5).c_str(),
                percent(found.same_top).c_str(), flags.against.c_str());
  std::printf("\n");
}

}  // namespace

void add_perplexity(CLI::App& kt, Invocation& run) {
  CLI::App* verb = kt.add_subcommand("perplexity", "How well a model predicts a text");
  const auto flags = std::make_shared<PerplexityFlags>();
  flags->model.add_to(*verb, run);
  verb->add_option(
          "--file", flags->file,
          "The text; documents are separated by <|endoftext|>, or, in a .jsonl, rows with text or messages")
      ->required();
  verb->add_option(
          "--context", flags->context,
          text("Tokens of a window; default: {}, or the model's context if shorter", flags->options.context))
      ->check(positive());
  verb->add_option("--max-tokens", flags->options.most_tokens,
                   "Tokens to predict at most, in whole windows; default: all")
      ->check(positive());
  verb->add_option("--separator", flags->separator, "Between documents")->capture_default_str();
  verb->add_option(
      "--kl-against", flags->against,
      "Also the KL divergence: from f32 (the same weights in f32 arithmetic: what the activations cost), "
      "from `stored`, from a format's name, or from another model");
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Examples:\n"
      "  kt perplexity ./demo/tiny-deepseekv3 --file text.txt --format int4 --kl-against stored\n"
      "  kt perplexity ./Qwen3-30B-A3B --file text.txt --max-tokens 4096 --kl-against f32\n"
      "  kt perplexity ./Qwen3-30B-A3B --weights ./Qwen3-30B-A3B-int4 --file text.txt --max-tokens 10000");
  verb->callback([&run, flags] { run.action = [flags] { run_perplexity(*flags); }; });
}

}  // namespace kt::inline cli
