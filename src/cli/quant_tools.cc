// kt quant merge | compare | dequant: what people do with converted weights and with sources that are
// quantised already.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/quant.h"
#include "cli/report.h"
#include "weights/checkpoint.h"
#include "weights/compare.h"
#include "weights/dequant_plan.h"
#include "weights/kt_plan.h"

namespace kt {
namespace {

struct MergeFlags {
  std::string input, output, original;
  int max_tensors = 0;
  RunFlags run;
};

struct CompareFlags {
  std::string a, b;
  double tolerance = 0;
  bool json = false;
};

struct DequantFlags {
  std::string input, output, config;
  std::vector<std::string> files;
  RunFlags run;
};

std::string vanished_line;  // written by the handler, so made beforehand

extern "C" void on_bus_error(int) {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, vanished_line.data(), vanished_line.size());
  ::_exit(static_cast<int>(ErrorKind::kInput));
}

}  // namespace

void report_vanishing_input(const std::string& input) {
  vanished_line = text(
      "kt: {}: a file shrank while it was read, or its disk failed; finished files are kept, --resume goes "
      "on\n",
      input);
  std::signal(SIGBUS, on_bus_error);
}

void add_quant_merge(CLI::App& quant, Invocation& run) {
  CLI::App* verb = quant.add_subcommand("merge", "Join a folder of .kt files into safetensors");
  const auto flags = std::make_shared<MergeFlags>();
  verb->add_option("INPUT,-i,--input-path", flags->input, "Folder with _layer_* folders")->required();
  verb->add_option("-o,--output", flags->output, "Folder to write")->required();
  verb->add_option("-r,--original-path", flags->original,
                   "The original checkpoint, for everything that is not an expert");
  verb->add_option("--max-tensors", flags->max_tensors,
                   "Tensors in one file at most; default: one layer a file")
      ->check(positive());
  flags->run.add_to(*verb);
  verb->footer("Example:\n  kt quant merge ./out-kt -o ./out -r ./Qwen3-30B-A3B");
  verb->callback([&run, flags] {
    run.action = [flags] {
      convert_and_report(
          plan_merge(flags->input, flags->original,
                     {.output = flags->output, .max_tensors = flags->max_tensors, .version = version()}),
          flags->run);
    };
  });
}

void add_quant_compare(CLI::App& quant, Invocation& run) {
  CLI::App* verb = quant.add_subcommand("compare", "Compare the tensors of two checkpoints");
  const auto flags = std::make_shared<CompareFlags>();
  verb->add_option("A,--path1", flags->a, "A folder or file")->required();
  verb->add_option("B,--path2", flags->b, "Another")->required();
  verb->add_option("--tolerance", flags->tolerance, "Largest difference that counts as equal")
      ->capture_default_str();
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Exit code 0 when they agree, 2 when not.\n\nExample:\n  kt quant compare ./a ./b --tolerance 1e-6");
  verb->callback([&run, flags] {
    run.action = [flags] { run_compare(flags->a, flags->b, flags->tolerance, flags->json); };
  });
}

void add_quant_dequant(CLI::App& quant, Invocation& run) {
  CLI::App* verb = quant.add_subcommand("dequant", "Turn an fp8 or int4 checkpoint into bf16");
  const auto flags = std::make_shared<DequantFlags>();
  verb->add_option("MODEL,--model-dir,--input-fp8-hf-path", flags->input, "The quantised checkpoint")
      ->required();
  verb->add_option("-o,--output,--output-dir,--output-bf16-hf-path", flags->output, "Folder to write")
      ->required();
  verb->add_option("--files", flags->files, "Only these files of the checkpoint")->delimiter(',');
  verb->add_option("--config-path", flags->config, "config.json to use instead of the checkpoint's own");
  flags->run.add_to(*verb);
  verb->footer("Example:\n  kt quant dequant ./Kimi-K2-Instruct -o ./Kimi-K2-bf16");
  verb->callback([&run, flags] {
    run.action = [flags] {
      const Checkpoint checkpoint(flags->input);
      convert_and_report(plan_dequant(checkpoint, {.output = flags->output,
                                                   .files = flags->files,
                                                   .config_path = flags->config,
                                                   .version = version()}),
                         flags->run);
    };
  });
}

}  // namespace kt
