// kt quant: CPU weights from a checkpoint. Reads flags (also the established spellings), plans, runs,
// reports; everything about bytes is in weights/.
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/cpu_choice.h"
#include "base/error.h"
#include "base/log.h"
#include "base/mapped_faults.h"
#include "base/topology.h"
#include "cli/model_flags.h"
#include "cli/quant/conversion_report.h"
#include "cli/quant/quant.h"
#include "cli/quant/quant_calibrated.h"
#include "cli/quant/quantise.h"
#include "cli/questions.h"
#include "cli/registry/model_files.h"
#include "cli/verbs.h"
#include "engine/gguf_vocabulary.h"
#include "hub/cache.h"
#include "kernels/table.h"
#include "models/families.h"
#include "terminal/amounts.h"
#include "terminal/language.h"
#include "text/json.h"
#include "weights/checkpoint.h"
#include "weights/experts.h"
#include "weights/kt/kt_plan.h"
#include "weights/plans/compressed_plan.h"
#include "weights/plans/source_identity.h"

namespace kt::inline cli {
namespace {

struct QuantFlags {
  std::string input, output;
  std::string method = "int4", input_type = "auto", rounding = "established";
  CalibrationFlags calibration;
  int group_size = 0, parts = 0;
  bool no_merge = false, backward = false, report = false, gpu = false, yes = false;
  RunFlags run;
};

int numa_nodes() { return std::max(1, static_cast<int>(Topology::discover().nodes.size())); }

void refuse_contradictions(const QuantFlags& flags) {
  if (!flags.calibration.text.dataset.empty() && flags.group_size == 0)
    fail(tr("--calibrate: needs int4 in groups: add --group-size {}"), usual_group_text());
  if (flags.group_size == 0) return;
  if (flags.method != "int4")
    fail(tr("--group-size {}: only with --method int4, got {}"), flags.group_size, flags.method);
  if (flags.no_merge || flags.backward || flags.report || flags.rounding != "established")
    fail("--group-size {}: {} belongs to weights without groups", flags.group_size,
         flags.no_merge   ? "--no-merge"
         : flags.backward ? "--backward"
         : flags.report   ? "--report"
                          : "--rounding");
  if (flags.parts > 0)
    KT_LOG(LogLevel::kWarning,
           "--numa-nodes {}: not needed, weights with groups are cut when they are loaded", flags.parts);
}

ConversionPlan plan_for(const Checkpoint& checkpoint, const ExpertSource& source, const QuantFlags& flags) {
  return plan_kt_weights(checkpoint, source,
                         {.output = flags.output,
                          .bits = flags.method == "int4" ? 4 : 8,
                          .parts = flags.parts > 0 ? flags.parts : numa_nodes(),
                          .merge = !flags.no_merge,
                          .backward = flags.backward,
                          .report = flags.report,
                          .rounding = flags.rounding == "direct" ? Rounding::kDirect : Rounding::kEstablished,
                          .tool = "kt " + version()});
}

void run_quant(const QuantFlags& flags) {
  refuse_contradictions(flags);
  if (flags.gpu) KT_LOG(LogLevel::kWarning, "--gpu: not needed, conversion runs on the CPU");
  const Checkpoint checkpoint(flags.input, gguf_families());
  const auto source = open_experts(checkpoint, input_type_named(flags.input_type));
  warn_if_rounded(*source, flags.method);
  if (flags.method == "moe_int8")
    KT_LOG(LogLevel::kWarning, "moe_int8: writing plain int8 weights, which run on every CPU");
  if (flags.group_size == 0) return convert_and_report(plan_for(checkpoint, *source, flags), flags.run);
  const CompressedPlanOptions grouped{
      .output = flags.output, .bits = 4, .group_size = flags.group_size, .version = version()};
  if (!flags.calibration.text.dataset.empty())
    return convert_calibrated(checkpoint, source.get(), grouped, flags.calibration, flags.run);
  convert_and_report(plan_model(checkpoint, source.get(), grouped), flags.run);
}

// Where no output was named. The next command is known then, though no option says it.
void name_output(QuantFlags& flags, Invocation& run) {
  const std::string groups = flags.group_size > 0 ? text("-g{}", flags.group_size) : "";
  flags.output = default_output(flags.input, (flags.method == "moe_int8" ? "int8" : flags.method) + groups);
  if (!flags.run.json && flags.run.resume_layer < 0)
    run.next = NextStep{.line = NextLine::kReport, .command = command_line({"run", flags.output})};
}

// GGUF files hold what their maker chose, unrounded weights too.
bool holds_plain_floats(const ExpertSource& source) {
  for (const int layer : source.layers())
    for (const Projection projection : kProjections) {
      const Code code = source.at(layer, 0, projection)->format.code;
      if (code != Code::kF32 && code != Code::kF16 && code != Code::kBf16) return false;
    }
  return true;
}

}  // namespace

void warn_if_rounded(const ExpertSource& source, std::string_view to) {
  const std::string dialect(source.dialect());
  if (dialect == "bf16" || dialect == "fp16" || dialect == "f32") return;
  if (dialect == "gguf" && holds_plain_floats(source)) return;
  KT_LOG(LogLevel::kWarning,
         "the source is {} already: rounding it again to {} costs accuracy; use the original bf16 weights "
         "if you have them",
         dialect, to);
}

ConversionPlan plan_model(const Checkpoint& checkpoint, const ExpertSource* source,
                          const CompressedPlanOptions& options) {
  ConversionPlan plan = plan_compressed(checkpoint, source, options);
  if (checkpoint.is_gguf())
    for (SideFile& file : gguf_tokenizer_files(checkpoint)) plan.side_files.push_back(std::move(file));
  return plan;
}

std::string default_output(const std::string& model, const std::string& suffix) {
  std::string name = repo_of_folder(model);  // a folder of a cache is called by a commit
  if (name.empty() || model.ends_with(".gguf")) name = absolute_path(model);
  name = std::filesystem::path(name).filename().string();
  if (name.ends_with(".gguf")) name.resize(name.size() - 5);
  return "./" + name + "-" + suffix;
}

bool is_converted(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path + "/kt_manifest.json", ignored) && is_kt_weights(path);
}

bool was_made_of(const std::string& output, const std::string& model) {
  const Json manifest = read_json(output + "/kt_manifest.json", {.bytes = size_t{1} << 30});
  const Json settings = manifest.is_object() ? manifest.value("settings", Json::object()) : Json::object();
  const Checkpoint checkpoint(model, gguf_families());
  return settings.is_object() && settings.value("contents", Json()) == source_contents(checkpoint);
}

void quantise(const QuantiseRequest& request) {
  QuantFlags flags;
  flags.output = request.output;
  flags.method = request.method;
  flags.run.threads = request.threads;
  flags.run.resume = is_folder(request.output);
  flags.run.json = request.quiet;
  const Checkpoint checkpoint(request.model, gguf_families());
  const auto source = open_experts(checkpoint);
  warn_if_rounded(*source, flags.method);
  const ConversionPlan plan = plan_for(checkpoint, *source, flags);
  const ConversionResult result = convert(plan, flags.run);
  if (!request.quiet) print_conversion(plan, result);
}

void RunFlags::add_to(CLI::App& verb) {
  verb.add_option("--cpu-threads,--cpuinfer-threads,--threads", threads,
                  "Workers; default: one for each core")
      ->check(positive());
  const std::string names = memory_flag == "--max-memory" ? memory_flag : memory_flag + ",--max-memory";
  verb.add_option(names, max_memory, "Bound on memory, such as 8GiB; fewer workers run within it")
      ->check([](const std::string& value) -> std::string {
        return value.empty() ? "expected a size such as 8GiB" : "";
      });
  verb.add_flag("--resume", resume, "Go on where an interrupted conversion stopped; same bytes in the end");
  verb.add_flag("--overwrite", overwrite, "Replace an earlier conversion in the output folder");
  verb.add_flag("--json", json, "Print JSON");
}

uint64_t RunFlags::memory() const { return max_memory.empty() ? 0 : parse_bytes(max_memory, memory_flag); }

ConversionResult convert(const ConversionPlan& plan, const RunFlags& flags) {
  best_kernels();  // a KT_ISA that is none is refused here as by every other verb
  ConversionOptions options{.threads = fitted({.threads = flags.threads}).threads,
                            .resume = flags.resume,
                            .overwrite = flags.overwrite,
                            .progress = show_progress(flags.json)};
  if (flags.resume_layer >= 0) options.resume_layer = flags.resume_layer;
  if (flags.memory() > 0) options.max_memory = flags.memory();
  try {
    return run_conversion(plan, options);
  } catch (const Error&) {
    // Whatever came of the zeros in place of what was to be read.
    const auto broken = first_broken_mapping();
    if (!broken) throw;
    fail(tr("{}; finished files are kept, `resume` goes on"), *broken);
  }
}

void convert_and_report(const ConversionPlan& plan, const RunFlags& flags) {
  const ConversionResult result = convert(plan, flags);
  if (flags.json)
    std::printf("%s\n", conversion_json(plan, result).dump(2).c_str());
  else
    print_conversion(plan, result);
}

void add_quant(CLI::App& kt, Invocation& run) {
  CLI::App* verb = kt.add_subcommand("quant", "Convert a model's experts to int4 or int8 for the CPU");
  verb->require_subcommand(0, 1);
  const auto flags = std::make_shared<QuantFlags>();
  CLI::Option* const input = verb->add_option("MODEL,--input-path", flags->input,
                                              "The checkpoint: a folder, a .safetensors or a .gguf file, a "
                                              "name of kt model list, or ORG/REPO of a hub");
  // What calibrates runs the model.
  const auto use = [flags] {
    return flags->calibration.text.dataset.empty() ? ModelUse::kConvert : ModelUse::kRun;
  };
  take_model(*verb, run, input,
             {.path = &flags->input, .use = use, .download = &flags->calibration.download});
  verb->add_option("-o,--output", flags->output,
                   "Folder to write; default: the model's name and the method, here");
  verb->add_option(
          "-m,--method,--quant-method", flags->method,
          "int4: half the size, a little less exact; int8: close to the original; moe_int8: writes int8")
      ->check(CLI::IsMember({"int4", "int8", "moe_int8"}))
      ->capture_default_str();
  verb->add_option("-i,--input-type", flags->input_type,
                   "What the source is: auto, bf16, fp16, f32, fp8, int4, gguf")
      ->capture_default_str();
  verb->add_option(
          "--group-size", flags->group_size,
          text("int4 with one scale for each {} weights, written as compressed-tensors", usual_group_text()))
      ->check(CLI::IsMember(usual_group_sizes()));
  verb->add_option("--numa-nodes,--threadpool-count", flags->parts,
                   "Parts every expert is cut into; default: this machine's NUMA nodes")
      ->check(positive());
  verb->add_flag("--no-merge,--no-merge-safetensor", flags->no_merge,
                 "Write folders of .kt files instead of safetensors");
  verb->add_option("--resume-layer", flags->run.resume_layer, "Leave layers below this one alone")
      ->check(CLI::NonNegativeNumber);
  verb->add_flag("--backward,--save-backward-weights", flags->backward, "Add transposed copies for training");
  verb->add_flag("--report", flags->report, "Also measure the error of expert outputs on random inputs");
  verb->add_option("--rounding", flags->rounding,
                   "established: int4 as existing files have it; direct: rounded once, a little better")
      ->check(CLI::IsMember({"established", "direct"}))
      ->capture_default_str();
  flags->calibration.text.option = "calibrate";
  CLI::Option* calibrate =
      verb->add_option(
              "--calibrate", flags->calibration.text.dataset,
              "With --group-size: round with regard to this text, .jsonl (text, or messages) or .txt")
          ->check([](const std::string& value) { return value.empty() ? "expected a file" : std::string(); });
  for (CLI::Option* option : flags->calibration.add_to(*verb)) option->needs(calibrate);
  verb->add_flag("--gpu", flags->gpu, "Accepted; conversion needs no GPU");
  verb->add_flag("-y,--yes", flags->yes, "Accepted; nothing is asked");
  flags->run.add_to(*verb);
  verb->footer(
      "Examples:\n"
      "  kt quant ./Qwen3-30B-A3B                            writes ./Qwen3-30B-A3B-int4\n"
      "  kt quant ./Qwen3-30B-A3B -o ./out -m int8 -i bf16 -y\n"
      "  kt quant ./DeepSeek-V3.1 -o ./out --method int8 --numa-nodes 2 --resume\n"
      "  kt quant ./model -o ./out --group-size 32           int4 of better quality, compressed-tensors "
      "files\n"
      "  kt quant ./model -o ./out --no-merge                folders of .kt files; kt quant merge joins "
      "them\n\n"
      "Every file appears whole or not at all: after a crash or a full disk repeat the command with "
      "--resume.\n"
      "kt_manifest.json in the output lists files, checksums and the error of every layer.");
  verb->callback([verb, &run, flags] {
    if (!verb->get_subcommands().empty()) return;
    if (flags->input.empty()) throw CLI::RequiredError("MODEL");
    run.action = [&run, flags] {
      if (flags->output.empty()) name_output(*flags, run);
      run_quant(*flags);
    };
  });
  add_quant_gpu(*verb, run);
  add_quant_merge(*verb, run);
  add_quant_compare(*verb, run);
  add_quant_dequant(*verb, run);
  add_quant_dataset(*verb, run);
}

}  // namespace kt::inline cli
