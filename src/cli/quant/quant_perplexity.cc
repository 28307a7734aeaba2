#include "cli/quant/quant_perplexity.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/cpu_choice.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/sha256.h"
#include "cli/quant/conversion_report.h"
#include "engine/calibration/sample_rows.h"
#include "engine/gguf_vocabulary.h"
#include "engine/model_perplexity.h"
#include "terminal/report.h"
#include "weights/plans/compressed_targets.h"

namespace kt::inline cli {
namespace {

constexpr size_t kContext = 1024;  // kt perplexity's, where the model has as much

std::vector<TokenId> read_tokens(const PerplexityRequest& request, const DescribedModel& model) {
  std::error_code code;
  if (!std::filesystem::is_regular_file(request.file, code))
    fail("--perplexity {}: no such file", request.file);
  std::vector<TokenId> tokens =
      file_tokens(model, request.file, document_end(model, "--perplexity " + request.file), "<|endoftext|>",
                  // The first token is given, not predicted.
                  std::max(request.tokens + 1, kLeastPerplexityTokens));
  if (tokens.size() < kLeastPerplexityTokens)
    fail("--perplexity {}: too short: {} tokens, measuring needs at least {}", request.file, tokens.size(),
         kLeastPerplexityTokens);
  tokens.resize(std::min(tokens.size(), request.tokens + 1));
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0 || tokens[i] >= model.spec().vocab)
      fail("--perplexity {}: token {} at {} is outside the vocabulary of {}, {}", request.file, tokens[i], i,
           model.path(), model.spec().vocab);
  return tokens;
}

Json to_json(const Perplexity& of) { return {{"perplexity", of.perplexity}, {"nll", of.nll}}; }

Json to_json(const Divergence& found) {
  Json out = to_json(found.model);
  out["kl"] = found.kl;
  out["same_top"] = found.same_top;
  return out;
}

}  // namespace

QuantPerplexity::QuantPerplexity(const PerplexityRequest& request, const DescribedModel& model,
                                 const Checkpoint& checkpoint, const ExpertSource* source,
                                 const CompressedPlanOptions& options, const RunFlags& run)
    : model_(checkpoint.path()),
      file_(request.file),
      options_(options),
      targets_(checkpoint, source, options_),
      tokens_(read_tokens(request, model)),
      most_tokens_(request.tokens),
      context_(std::min(kContext, static_cast<size_t>(model.spec().context))),
      threads_(fitted({.threads = run.threads}).threads),
      quiet_(run.json) {
  if (run.resume_layer >= 0)
    fail("--perplexity: measures whole models; --resume-layer {} may leave layers out", run.resume_layer);
  if (source) check_mixtures(*source);
  if (options.all_linears && checkpoint.is_gguf() && gguf_tokenizer_files(checkpoint).empty())
    fail_as(ErrorKind::kUnsupported,
            "--perplexity: the output will have no tokenizer; {} has one that is not written", model.path());
  if (run.memory() > 0) max_memory_ = run.memory();
  Sha256 sum;
  sum.add(std::as_bytes(std::span(tokens_)));
  digest_ = sum.hex();
  check_memory();
}

ModelOptions QuantPerplexity::model_options() const {
  return {.precision = Precision::kBf16,
          .threads = threads_,
          .max_tokens = static_cast<int>(PerplexityOptions{}.chunk)};
}

// Experts of one layer that run together have the same formats.
void QuantPerplexity::check_mixtures(const ExpertSource& source) const {
  for (const int layer : source.layers())
    for (int expert = 0; expert < source.experts(); ++expert)
      for (const Projection projection : kProjections) {
        const Projection like = projection == Projection::kDown ? projection : Projection::kGate;
        if (targets_.expert(layer, expert, projection) != targets_.expert(layer, 0, like))
          fail_as(ErrorKind::kUnsupported,
                  "--perplexity: --ignore leaves only some experts of layer {} as they are; such a layer is "
                  "written, but does not run here",
                  layer);
      }
}

void QuantPerplexity::check_memory() const {
  ModelOptions original = model_options(), rounded = original;
  rounded.rounding = packed_rounding(targets_);
  uint64_t needed = own_memory();
  for (const ModelOptions& options : {original, rounded}) {
    const OpenedModel model(model_, options);
    needed += model.memory_plan(use()).peak() +
              PerplexityOptions{}.chunk * static_cast<uint64_t>(model.spec().vocab) * sizeof(float);
  }
  const uint64_t available = own_memory() + available_memory();
  const bool limited = max_memory_ > 0 && max_memory_ < available;
  if (needed > (limited ? max_memory_ : available))
    fail_as(ErrorKind::kMemory,
            "--perplexity {}: {} of memory needed for the original and a rounded model at once, {} {}", file_,
            human_bytes(needed), human_bytes(limited ? max_memory_ : available),
            limited ? "are allowed" : "are available");
}

Json QuantPerplexity::measure() const {
  StatusLine status;
  const LoadOptions load{.use = use()};
  LoadedModel original = OpenedModel(model_, model_options()).load(load);
  const auto against_original = [&](const std::string& path, const ModelOptions& options,
                                    std::string_view what) {
    LoadedModel model = OpenedModel(path, options).load(load);
    return measure_models(tokens_, model, &original,
                          {.windows = {.context = context_, .most_tokens = most_tokens_},
                           .threads = threads_,
                           .show = [&](size_t done, size_t all) {
                             if (!quiet_)
                               status.show(text("perplexity, {}: {} of {} windows", what, done, all));
                           }});
  };
  ModelOptions nearest = model_options(), written = model_options();
  nearest.rounding = packed_rounding(targets_);
  // Experts alone go with the original's other matrices, which the output has too.
  if (!options_.all_linears) written.weights = options_.output;
  const Divergence rtn = against_original(model_, nearest, "RTN"),
                   gptq = against_original(options_.all_linears ? options_.output : model_, written, "GPTQ");
  return {
      {"tokens", gptq.model.tokens},         {"context", context_}, {"acts", "bf16"},       {"text", digest_},
      {"original", to_json(gptq.reference)}, {"rtn", to_json(rtn)}, {"gptq", to_json(gptq)}};
}

void print_perplexities(const Json& measured, const std::string& file) {
  Table table({"", "perplexity", "KL", "same best token"}, 1);
  for (const auto& [key, name] : {std::pair("original", "original"), {"rtn", "RTN"}, {"gptq", "GPTQ"}}) {
    const Json& of = measured.at(key);
    const bool own = of.contains("kl");
    table.add({name, fixed(of.at("perplexity").get<double>(), 4),
               own ? fixed(of.at("kl").get<double>(), 5) : "-",
               own ? percent(of.at("same_top").get<double>()) : "-"});
  }
  std::printf(
      "%s: %lld tokens in windows of %lld, bf16 activations; KL in nats, mean over tokens, from the "
      "original\n\n%s\n",
      file.c_str(), static_cast<long long>(measured.at("tokens").get<int64_t>()),
      static_cast<long long>(measured.at("context").get<int64_t>()), table.str().c_str());
}

}  // namespace kt::inline cli
