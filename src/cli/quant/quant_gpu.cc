// kt quant gpu: weights for the GPU, compressed-tensors W4A16 and W8A16.
#include <memory>

#include "base/error.h"
#include "base/log.h"
#include "cli/model_flags.h"
#include "cli/quant/conversion_report.h"
#include "cli/quant/quant.h"
#include "cli/quant/quant_calibrated.h"
#include "models/families.h"
#include "terminal/amounts.h"
#include "terminal/language.h"
#include "weights/plans/compressed_plan.h"

namespace kt::inline cli {
namespace {

constexpr const char *kDefaultDataset = "HuggingFaceH4/ultrachat_200k", *kDefaultSplit = "train_sft";

struct GpuFlags {
  std::string input, output;
  std::string method = "GPTQ", type = "W8A16", targets = "experts";
  std::optional<int> group_size;
  std::vector<std::string> ignore;
  CalibrationFlags calibration;
  std::string max_gpu_memory;
  bool force_cpu = false, trust = false;
  RunFlags run;
};

// A dense model has Linears but no experts.
std::unique_ptr<ExpertSource> experts_of(const Checkpoint& checkpoint, const GpuFlags& flags) {
  try {
    return open_experts(checkpoint);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUnsupported || flags.targets != "all") throw;
  }
  return nullptr;
}

void run_gpu(const GpuFlags& flags) {
  const bool calibrated = flags.method == "GPTQ";
  if (!flags.max_gpu_memory.empty()) parse_bytes(flags.max_gpu_memory, "--max-gpu-memory");
  if (!calibrated && !flags.calibration.perplexity.file.empty())
    fail(tr("--perplexity: with --method GPTQ; kt perplexity MODEL --weights OUT measures what RTN wrote"));
  const Checkpoint checkpoint(flags.input, gguf_families());
  const std::unique_ptr<ExpertSource> source = experts_of(checkpoint, flags);
  if (source) warn_if_rounded(*source, flags.type);
  const CompressedPlanOptions options{.output = flags.output,
                                      .bits = flags.type == "W4A16" ? 4 : 8,
                                      .group_size = flags.group_size.value_or(128),
                                      .all_linears = flags.targets == "all",
                                      .ignore = flags.ignore,
                                      .version = version()};
  if (calibrated) {
    CalibrationFlags calibration = flags.calibration;
    if (calibration.text.split.empty() && calibration.text.dataset == kDefaultDataset)
      calibration.text.split = kDefaultSplit;
    return convert_calibrated(checkpoint, source.get(), options, calibration, flags.run);
  }
  convert_and_report(plan_model(checkpoint, source.get(), options), flags.run);
}

}  // namespace

void add_quant_gpu(CLI::App& quant, Invocation& run) {
  CLI::App* verb = quant.add_subcommand("gpu", "Convert to W4A16 or W8A16 for the GPU (compressed-tensors)");
  const auto flags = std::make_shared<GpuFlags>();
  CLI::Option* const input =
      verb->add_option("MODEL,--model-id", flags->input,
                       "The checkpoint: a folder or a file, a name of kt model list, or ORG/REPO of a hub");
  // What calibrates runs the model.
  const auto use = [flags] { return flags->method == "GPTQ" ? ModelUse::kRun : ModelUse::kConvert; };
  take_model(*verb, run, input,
             {.path = &flags->input, .use = use, .download = &flags->calibration.download});
  verb->add_option("-o,--output,--output-dir", flags->output, "Folder to write");
  verb->add_option("--method,--quant-method", flags->method,
                   "GPTQ: calibrated with text; RTN: round to nearest")
      ->transform(CLI::IsMember({"GPTQ", "RTN"}, CLI::ignore_case))
      ->capture_default_str();
  verb->add_option("--type,--quant-type", flags->type, "Bits of weights and activations")
      ->transform(CLI::IsMember({"W4A16", "W8A16"}, CLI::ignore_case))
      ->capture_default_str();
  verb->add_option("--group-size", flags->group_size,
                   "Weights that share a scale; -1: one for each output; default 128")
      ->check([](const std::string& value) -> std::string {
        const int group = std::atoi(value.c_str());
        return group == -1 || (group > 0 && group % 32 == 0)
                   ? ""
                   : "expected -1 or a multiple of 32, got " + value;
      });
  verb->add_option("--targets", flags->targets, "experts, or all Linears")
      ->check(CLI::IsMember({"experts", "all"}))
      ->capture_default_str();
  verb->add_option("--ignore,--ignore-patterns", flags->ignore,
                   "Modules to leave as they are: names, or re:REGEX");
  flags->calibration.text.dataset = kDefaultDataset;
  verb->add_option("--dataset", flags->calibration.text.dataset,
                   "GPTQ: FILE.jsonl (text, or messages), FILE.txt, or ORG/NAME of the hub")
      ->capture_default_str();
  verb->add_option(
      "--dataset-split", flags->calibration.text.split,
      text("GPTQ: of a dataset in the hub cache, files that it names, as train does train-00000.jsonl; "
           "of the default dataset {}, of others all",
           kDefaultSplit));
  flags->calibration.add_to(*verb);
  verb->add_option("--max-gpu-memory", flags->max_gpu_memory, "Accepted; conversion runs on the CPU");
  verb->add_flag("--force-cpu", flags->force_cpu, "Accepted; conversion runs on the CPU");
  verb->add_flag("--trust-remote-code", flags->trust, "Accepted; no code of a checkpoint is ever run");
  flags->run.memory_flag = "--max-cpu-memory";
  flags->run.add_to(*verb);
  verb->footer(
      "Examples:\n"
      "  kt quant gpu ./Qwen3-30B-A3B -o ./Qwen3-30B-A3B-W4A16 --type W4A16 --dataset text.jsonl\n"
      "  kt quant gpu ./GLM-4.5-Air -o ./GLM-4.5-Air-W4A16 --method RTN --type W4A16\n"
      "  kt quant gpu ./model -o ./out --method RTN --type W8A16 --group-size -1 --targets all\n\n"
      "GPTQ leaves kt_calibration.json and a plot of how many tokens each expert saw beside the weights;\n"
      "--perplexity test.txt adds what rounding cost a text, against the original and rounding to nearest.");
  verb->callback([&run, flags] {
    if (flags->input.empty() && !flags->ignore.empty())
      throw CLI::RequiredError("MODEL (--ignore takes all words that follow it: MODEL comes before it)");
    if (flags->input.empty()) throw CLI::RequiredError("MODEL");
    if (flags->output.empty()) throw CLI::RequiredError("--output");
    run.action = [flags] { run_gpu(*flags); };
  });
}

}  // namespace kt::inline cli
