#include "cli/model_flags.h"

#include <cstdio>
#include <memory>

#include "base/error.h"
#include "cli/help/flag_words.h"
#include "terminal/amounts.h"
#include "terminal/language.h"

namespace kt {

void add_download_flag(CLI::App& verb, bool& download) {
  verb.add_flag("--download", download,
                "Download a model that is named and not on this disk, without a question");
}

CLI::Option* take_model(CLI::App& verb, Invocation& run, CLI::Option* option, const ModelArgument& argument) {
  const auto own = std::make_shared<bool>(false);
  bool* const download = argument.download ? argument.download : own.get();
  add_download_flag(verb, *download);
  const auto look_up = [&run, argument, own, download](std::string& words) {
    if (argument.is_other && argument.is_other(words)) return std::string();
    const auto model = std::make_shared<ResolvedModel>(named_model(words));
    if (argument.found) *argument.found = *model;
    if (!model->absent) {
      words = model->path;
      return std::string();
    }
    run.before.emplace_back([argument, own, download, model] {
      fetch_model(*model, {.agreed = *download, .use = argument.use ? argument.use() : ModelUse::kRun});
      *argument.path = model->path;
      if (argument.found) *argument.found = *model;
    });
    return std::string();
  };
  return option->transform(CLI::Validator(look_up, "", "model_name"));
}

void ModelFlags::add_to(CLI::App& verb, Invocation& run) {
  take_model(verb, run, verb.add_option("MODEL", model, kModelHelp), {.path = &model, .found = &found})
      ->required();
  add_options(verb);
}

void ModelFlags::add_options(CLI::App& verb) {
  this->verb = &verb;
  verb.add_option("--weights,--weights-path,--kt-weight-path", weights,
                  "Experts to use instead of the model's own: what kt quant wrote, or another checkpoint");
  verb.add_option("--format", format,
                  "Round the experts to this format as they are loaded: int8, int4, int4_g32, ...");
  verb.add_option("--linear-format", linear_format,
                  "Round attention projections, dense and shared MLPs and the head to this format as they "
                  "are loaded; routers, norms, the embedding and latent attention's kv_b stay as they are. A "
                  "matrix that the format's blocks do not divide is an error. Default: as stored");
  verb.add_option("--acts", acts, "Precision of activations")
      ->check(CLI::IsMember({"default", "int8", "bf16", "f32"}))
      ->capture_default_str();
  verb.add_option("--kv", kv, "Precision of cached keys and values; f32 with --acts f32")
      ->check(CLI::IsMember({"bf16", "int8", "f32"}))
      ->capture_default_str();
  verb.add_option("--threads,--cpu-threads,--kt-cpuinfer", threads, "Workers; default: one for each core")
      ->check(positive());
  verb.add_option("--chunked-prefill-size", step_tokens, "Tokens of prompts to run at once")
      ->check(positive())
      ->capture_default_str();
  gpu.add_to(verb);
  verb.add_option("--max-memory", max_memory,
                  "Refuse a model that needs more, such as 8GiB; default: what is available");
}

ModelOptions ModelFlags::options() const {
  // A name's own CPU weights, unless the command line says otherwise.
  return {.weights = weights.empty() && format.empty() ? found.weights : weights,
          .format = format,
          .linear_format = linear_format,
          .precision = precision_named(acts),
          .kv_type = acts == "f32" && kv == "bf16" ? KvType::kF32 : kv_type_named(kv),
          .threads = threads,
          .max_tokens = step_tokens,
          .max_memory = max_memory.empty() ? 0 : parse_bytes(max_memory, "--max-memory"),
          .gpu = gpu.choice(),
          .placement = gpu.placement_options(),
          .on_note = [from = verb](const std::string& line) {
            std::fprintf(stderr, "kt: note: %s\n", with_flags(line, *from).c_str());
          }};
}

void ModelFlags::note_idle_flags() const {
  const std::string idle = uses_gpu() ? "" : gpu.given();
  if (idle.empty()) return;
  std::fprintf(stderr, "kt: note: %s\n", text(tr("{}: ignored, no GPU is used; see --gpu"), idle).c_str());
}

}  // namespace kt
