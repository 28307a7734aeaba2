#include "cli/model_flags.h"

#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/error.h"
#include "cli/help/flag_words.h"
#include "terminal/amounts.h"
#include "terminal/language.h"

namespace kt::inline cli {

void add_download_flag(CLI::App& verb, bool& download) {
  verb.add_flag("--download", download,
                "Download a model that is named and not on this disk, without a question");
}

CLI::Option* take_model(CLI::App& verb, Invocation& run, CLI::Option* option, const ModelArgument& argument) {
  const auto own = std::make_shared<bool>(false);
  bool* const download = argument.download ? argument.download : own.get();
  add_download_flag(verb, *download);
  const auto look_up = [&run, argument, own, download](std::string& value) {
    if (argument.is_other && argument.is_other(value)) return std::string();
    const auto model = std::make_shared<ResolvedModel>(named_model(value));
    if (argument.found) *argument.found = *model;
    if (!model->absent) {
      value = model->path;
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
  add_rules(verb);
  add_adapters(verb);
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
  verb.add_flag(
      "--dense-attention", dense_attention,
      "Attend to all keys where the model's indexers would choose some: the same as long as a text has "
      "no more than they choose, and another model beyond");
  gpu.add_to(verb);
  verb.add_option("--max-memory", max_memory,
                  "Refuse a model that needs more, such as 8GiB; default: what is available");
}

void ModelFlags::add_rules(CLI::App& verb) {
  verb.add_option(
      "--rules,--optimize_config_path,--optimize_rule_path,--kt_optimize_rule", rules.file,
      "A YAML file of placement rules: which parts of the model lie where, and in which format; see "
      "the plan with kt estimate. Wins over --format, --linear-format and --gpu");
  verb.add_option(
          "--place", rules.place,
          "A rule in one line, before those of the file: a pattern of modules' names, where they lie, "
          "and the format they are rounded to; may be repeated")
      ->type_name("REGEX=DEVICE[:FORMAT]")
      ->allow_extra_args(false);
  verb.add_option("--rule-devices", rules.devices,
                  "Other devices than the rules name: cuda=cpu puts all on the CPU, cuda:1=cuda:0 two on one")
      ->type_name("OLD=NEW,...");
  verb.add_option(
          "--rules-out", rules_out,
          "Write what was decided, by rules, flags and the plan, as a file of rules: --rules reads it")
      ->type_name("FILE");
}

void ModelFlags::add_adapters(CLI::App& verb) {
  verb.add_option(
          "--adapter,--lora,--kt-expert-lora-path", adapters,
          "A low-rank adapter (LoRA) to run the model with: a folder that PEFT saved, or a .gguf file; with "
          "kt run several, which requests choose by model NAME:ADAPTER")
      ->type_name("[NAME=]PATH")
      ->allow_extra_args(false);
}

namespace {

// NAME=PATH; without a name that of the folder or of the file.
AdapterFile adapter_file(const std::string& word) {
  const size_t at = word.find('=');
  AdapterFile out{.path = word};
  if (at != std::string::npos && word.find('/') > at) {
    out = {.name = word.substr(0, at), .path = word.substr(at + 1)};
    if (out.name.empty() || out.path.empty()) fail(tr("--adapter {}: expected NAME=PATH"), word);
  }
  const std::filesystem::path path = std::filesystem::path(out.path).lexically_normal();
  const std::filesystem::path leaf = path.has_filename() ? path : path.parent_path();
  if (out.name.empty())
    out.name = leaf.extension() == ".gguf" ? leaf.stem().string() : leaf.filename().string();
  if (out.name.find(':') != std::string::npos)
    fail(tr("--adapter {}: a name without a colon is needed: NAME=PATH"), word);
  return out;
}

}  // namespace

int ModelFlags::one_adapter() const {
  if (adapters.size() > 1)
    fail(tr("--adapter: {} were given; several at once only with kt run"), adapters.size());
  return static_cast<int>(adapters.size()) - 1;
}

ModelOptions ModelFlags::options() const {
  std::vector<AdapterFile> files;
  for (const std::string& word : adapters) files.push_back(adapter_file(word));
  std::optional<RuleFile> file = read_rules(rules);
  // A name's own CPU weights, unless the command line says otherwise.
  return {.weights = weights.empty() && format.empty() ? found.weights : weights,
          .format = format,
          .linear_format = linear_format,
          .rules = file ? std::make_shared<const RuleFile>(std::move(*file)) : nullptr,
          .rules_out = rules_out,
          .adapters = std::move(files),
          .precision = precision_named(acts),
          .kv_type = acts == "f32" && kv == "bf16" ? KvType::kF32 : kv_type_named(kv),
          .dense_attention = dense_attention,
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

}  // namespace kt::inline cli
