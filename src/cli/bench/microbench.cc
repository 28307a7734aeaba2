// kt microbench: the parent of the kernel benchmarks.
#include "cli/verbs.h"

#include "base/text.h"
#include "terminal/language.h"

namespace kt::inline cli {

CLI::Validator positive() {
  const auto check = [](const std::string& word) -> std::string {
    double value = 0;
    if (CLI::detail::lexical_cast(word, value) && value > 0) return {};
    return text(tr("expected a number above 0, got '{}'"), word);
  };
  return {check, "> 0"};
}

CLI::Validator within(double least, double most) {
  const auto check = [=](const std::string& word) -> std::string {
    double value = 0;
    if (CLI::detail::lexical_cast(word, value) && value >= least && value <= most) return {};
    return text(tr("expected a number from {} to {}, got '{}'"), least, most, word);
  };
  return {check, text("{} to {}", least, most)};
}

void add_microbench(CLI::App& kt, Invocation& run) {
  CLI::App* verb =
      kt.add_subcommand("microbench", "Speed of the kernels, as fractions of this machine's measured limits");
  verb->require_subcommand(1);
  verb->footer(
      "Examples:\n"
      "  kt microbench roofline\n"
      "  kt microbench moe --shape qwen3-30b --format all\n"
      "  kt microbench mla -b 1 -s 8192 -n 100 -w 10 -o mla.json\n"
      "  kt microbench linear --outputs 4096 --inputs 2048 --format int8,bf16\n"
      "  kt microbench attention --context 1024,16384 --tokens 1,512\n"
      "  kt microbench gpu --tokens 1,2048\n"
      "  kt microbench gptq --threads 1\n\n"
      "Without the name of a kernel it is moe: kt microbench -b 4 -n 100 is kt microbench moe -b 4 -n 100.");
  add_microbench_roofline(*verb, run);
  add_microbench_moe(*verb, run);
  add_microbench_linear(*verb, run);
  add_microbench_attention(*verb, run);
  add_microbench_mla(*verb, run);
  add_microbench_gptq(*verb, run);
  add_microbench_gpu(*verb, run);
  add_microbench_load(*verb, run);
}

}  // namespace kt::inline cli
