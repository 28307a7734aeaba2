// kt sft export: an adapter in the layout that another program reads, or merged into its model.
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>

#include "base/error.h"
#include "cli/quant/quant.h"
#include "cli/registry/registry.h"
#include "cli/sft/sft.h"
#include "engine/gguf_vocabulary.h"
#include "models/families.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "text/json.h"
#include "weights/lora/gguf_adapter.h"
#include "weights/lora/lora_layouts.h"
#include "weights/plans/dequant_plan.h"

namespace kt::inline cli {
namespace {

struct ExportFlags {
  std::string from, to, model, layout = "per-expert", base_name, expert_folder, rest_folder;
  std::optional<double> alpha;
  RunFlags run;
};

const char* layout_name(LoraLayout layout) { return layout == LoraLayout::kFused ? "fused" : "per-expert"; }

LoraExported export_share(const ExportFlags& flags, const std::string& to, LoraShare share) {
  return export_lora({.from = flags.from,
                      .to = to,
                      .layout = flags.layout == "fused" ? LoraLayout::kFused : LoraLayout::kPerExpert,
                      .overwrite = flags.run.overwrite,
                      .share = share,
                      .base_model = flags.base_name,
                      .alpha = flags.alpha});
}

void export_folder(const ExportFlags& flags) {
  const LoraExported made = export_share(flags, flags.to, LoraShare::kAll);
  if (!flags.expert_folder.empty()) export_share(flags, flags.expert_folder, LoraShare::kExperts);
  if (!flags.rest_folder.empty()) export_share(flags, flags.rest_folder, LoraShare::kRest);
  if (flags.run.json) {
    const OrderedJson out = {
        {"output", flags.to},          {"layout", flags.layout},  {"found", layout_name(made.found)},
        {"layers", made.layers},       {"experts", made.experts}, {"gate_up_rank", made.gate_up_rank},
        {"down_rank", made.down_rank}, {"tensors", made.tensors}, {"bytes", made.bytes}};
    std::printf("%s\n", out.dump(2).c_str());
    return;
  }
  std::printf(
      "%s: %s, %s; experts of %s, %d in each, rank %d for gate and up, %d for down; they were %s%s%s\n",
      flags.to.c_str(), flags.layout.c_str(), human_bytes(made.bytes).c_str(),
      counted(made.layers, "layer").c_str(), made.experts, made.gate_up_rank, made.down_rank,
      layout_name(made.found), made.beside.empty() ? "" : ", in ", made.beside.c_str());
}

// The model that the adapter was trained on: --model, or what the adapter's own file says.
std::string base_model(const ExportFlags& flags) {
  if (!flags.model.empty()) return find_model(flags.model).path;
  const std::string file = flags.from + "/adapter_config.json";
  const Json config = read_json(file);
  const Json base = config.is_object() ? config.value("base_model_name_or_path", Json()) : Json();
  const std::string name = base.is_string() ? base.get<std::string>() : "";
  if (name.empty())
    fail(tr("{}: no base_model_name_or_path: which model is the adapter's? --model says it"), file);
  const std::optional<ResolvedModel> found = try_find_model(name);
  std::error_code ignored;
  if (!found || found->absent || !std::filesystem::exists(found->path, ignored))
    fail(tr("{}: its base model {} is not on this disk; --model names another place"), file, name);
  return found->path;
}

void export_gguf(const ExportFlags& flags) {
  if (!flags.to.ends_with(".gguf"))
    fail(tr("-o {}: a GGUF adapter is one file, and its name ends in .gguf"), flags.to);
  const Checkpoint model(base_model(flags), gguf_families());
  const LoraFile adapter(flags.from, gguf_families());
  const GgufAdapterWritten made = export_gguf_adapter(
      {.adapter = &adapter, .model = &model, .to = flags.to, .overwrite = flags.run.overwrite});
  std::set<std::string> kinds;  // "attn_q_a" of "blk.3.attn_q_a.weight"
  for (const std::string& tensor : made.unused) {
    const size_t from = tensor.find('.', 4) + 1;
    kinds.insert(tensor.substr(from, tensor.rfind('.') - from));
  }
  std::string names;
  for (const std::string& kind : kinds) names += (names.empty() ? "" : ", ") + kind;
  if (!names.empty())
    std::fprintf(
        stderr, "kt: note: %s\n",
        text(tr("{} of the adapter: llama.cpp reads these tensors and does not use them (seen in August "
                "2026: its latent attention multiplies without adapters, but for attn_output); `kt` "
                "uses all, --layout merged is for both"),
             names)
            .c_str());
  if (flags.run.json) {
    const OrderedJson out = {{"output", flags.to},
                             {"layout", flags.layout},
                             {"architecture", made.architecture},
                             {"matrices", made.matrices},
                             {"layers", made.layers},
                             {"experts", made.layers > 0 ? made.experts : 0},
                             {"unused", made.unused},
                             {"bytes", made.bytes}};
    std::printf("%s\n", out.dump(2).c_str());
    return;
  }
  std::printf("%s: %s, %s; %s with factors, experts of %s\n", flags.to.c_str(), made.architecture.c_str(),
              human_bytes(made.bytes).c_str(), counted(made.matrices, "tensor").c_str(),
              counted(made.layers, "layer").c_str());
}

void export_merged(const ExportFlags& flags) {
  const Checkpoint model(base_model(flags), gguf_families());
  const LoraFile adapter(flags.from, gguf_families());
  ConversionPlan plan = plan_dequant(model, {.output = flags.to, .version = version(), .adapter = &adapter});
  if (model.is_gguf())
    for (SideFile& file : gguf_tokenizer_files(model)) plan.side_files.push_back(std::move(file));
  convert_and_report(plan, flags.run);
}

void export_adapter(const ExportFlags& flags, const CLI::App& verb) {
  const bool merged = flags.layout == "merged", needs_model = merged || flags.layout == "gguf";
  for (const char* const flag : {"--resume", "--max-memory", "--threads"})
    if (!merged && verb.get_option(flag)->count() > 0)
      fail(tr("{}: only with --layout merged; the other layouts are written in one go"), flag);
  for (const char* const flag :
       {"--base-model-name", "--lora-alpha", "--expert-output", "--nonexpert-output"})
    if (needs_model && verb.get_option(flag)->count() > 0)
      fail(tr("{}: only with --layout per-expert and fused, which are folders of PEFT"), flag);
  if (!needs_model && !flags.model.empty())
    fail(tr("--model: only with --layout gguf and merged; the others need the adapter alone"));
  if (merged) return export_merged(flags);
  needs_model ? export_gguf(flags) : export_folder(flags);
}

}  // namespace

void add_sft_export(CLI::App& sft, Invocation& run) {
  CLI::App* verb = sft.add_subcommand("export", "Write an adapter in the layout that another program reads");
  const auto flags = std::make_shared<ExportFlags>();
  verb->add_option("ADAPTER", flags->from, "The adapter's folder, as PEFT or kt sft train saved it")
      ->required()
      ->check(CLI::ExistingDirectory);
  verb->add_option("-o,--output", flags->to, "The folder to write; with --layout gguf the file")->required();
  verb->add_option(
          "--layout", flags->layout,
          "What is written. How LoRA of experts is stored, per-expert: a pair for each, as vLLM and SGLang "
          "read; fused: a pair for all of a layer, as transformers 5 and kt sft train have it; gguf: one "
          "file for llama.cpp; merged: the model itself in bf16, with the adapter in its weights")
      ->check(CLI::IsMember({"per-expert", "fused", "gguf", "merged"}))
      ->capture_default_str();
  verb->add_option("--model", flags->model,
                   "The adapter's model, for gguf and merged; default: the one that the adapter names");
  verb->add_option("--base-model-name", flags->base_name,
                   "Of PEFT's layouts: what the file calls the base model; default: as it was");
  verb->add_option("--lora-alpha", flags->alpha,
                   "Of a folder whose adapter_config.json is missing or says none")
      ->check(CLI::PositiveNumber);
  verb->add_option("--expert-output", flags->expert_folder,
                   "Of PEFT's layouts: another folder, for the routed experts alone");
  verb->add_option("--nonexpert-output", flags->rest_folder,
                   "Of PEFT's layouts: another folder, for everything but the routed experts");
  flags->run.add_to(*verb);
  verb->footer(
      "Values are moved, never rounded: both layouts of PEFT give the same model to the bit, and one becomes "
      "the other again.\n"
      "merged: W + scale * B A in f32, rounded to bf16 once; quantised weights are widened on the way.\n\n"
      "Examples:\n"
      "  kt sft export saves/pirate -o saves/pirate-per-expert\n"
      "  kt sft export ./downloaded -o ./fused --layout fused\n"
      "  kt sft export saves/pirate -o pirate.gguf --layout gguf\n"
      "  kt sft export saves/pirate -o ./pirate-merged --layout merged");
  verb->callback([&run, verb, flags] { run.action = [verb, flags] { export_adapter(*flags, *verb); }; });
}

}  // namespace kt::inline cli
