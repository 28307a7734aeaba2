// kt microbench gpu: flags, tables and JSON; the measuring is in gpu_bench.cc.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/cpu_choice.h"
#include "base/text.h"
#include "bench/gpu_bench.h"
#include "cli/bench/format_list.h"
#include "cli/bench/measure_flags.h"
#include "cli/verbs.h"
#include "terminal/amounts.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

struct GpuFlags {
  int number = 0, n = 8192, k = 4096;
  std::vector<int> tokens = {1, 8, 16, 2048}, contexts = {1024, 16384};
  std::vector<std::string> formats = {"bf16", "int4", "fp8", "q4_k"};
  std::string memory = "1GiB", kv = "bf16";
  MeasureFlags measure{.time = {.seconds = 0.3}};
};

struct GpuRow {
  std::string what, of;
  int count;  // tokens, or tokens of context
  GpuFigure figure;
};

struct AttentionKind {
  const char* name;
  int heads;
  KvShape shape;
};

// Grouped heads as Qwen3-30B has them, latent ones as DeepSeek-V3.
std::vector<AttentionKind> attention_kinds(KvType type) {
  return {{"grouped", 32, {.heads = 4, .d = 128, .dv = 128, .type = type}},
          {"latent", 128, {.heads = 1, .d = 576, .dv = 512, .shared = true, .type = type}}};
}

nlohmann::ordered_json json_of(const GpuRow& row) {
  const GpuFigure& f = row.figure;
  return {{"what", row.what},
          {"of", row.of},
          {row.what == "product" ? "tokens" : "context", row.count},
          {"us", f.seconds * 1e6},
          {"gb_per_s", f.bytes / f.seconds / 1e9},
          {"tflops", f.operations / f.seconds / 1e12},
          {"limit_us", f.limit_seconds * 1e6},
          {"limit", f.by_memory ? "memory" : "bf16"},
          {"fraction_of_limit", f.limit_seconds / f.seconds}};
}

void print_limits(const GpuBench& bench) {
  const GpuLimits& limits = bench.limits();
  std::printf(
      "%s: memory %s GB/s (copied, read and written), link %s GB/s to it and %s back, bf16 %s TFLOPS\n\n",
      bench.gpu().facts().describe().c_str(), three_digits(limits.copied / 1e9).c_str(),
      three_digits(limits.to_gpu / 1e9).c_str(), three_digits(limits.to_host / 1e9).c_str(),
      three_digits(limits.operations / 1e12).c_str());
}

void run_gpu(const GpuFlags& flags) {
  const std::vector<NamedFormat> formats = listed_formats(
      flags.formats, [&](const Format& format) { check_shape(format, flags.n, flags.k, "linear"); });
  const GpuBench bench(flags.number, std::make_shared<Pool>(fitted({})),
                       parse_bytes(flags.memory, "--memory"), flags.measure.time);
  std::vector<GpuRow> rows;
  StatusLine status;
  for (const NamedFormat& format : formats)
    for (const int tokens : flags.tokens) {
      status.show(text("{}, {} tokens", format.name, tokens));
      rows.push_back({"product", std::string(format.name), tokens,
                      bench.product(format.format, flags.n, flags.k, tokens)});
    }
  for (const AttentionKind& kind : attention_kinds(kv_type_named(flags.kv)))
    for (const int context : flags.contexts) {
      status.show(text("{} attention, {} tokens", kind.name, context));
      rows.push_back({"attention", kind.name, context, bench.attention(kind.shape, kind.heads, context)});
    }
  status.show("");
  auto all = nlohmann::ordered_json::array();
  for (const GpuRow& row : rows) all.push_back(json_of(row));
  const GpuLimits& limits = bench.limits();
  flags.measure.report({{"gpu", bench.gpu().facts().name},
                        {"copy_gb_per_s", limits.copied / 1e9},
                        {"to_gpu_gb_per_s", limits.to_gpu / 1e9},
                        {"to_host_gb_per_s", limits.to_host / 1e9},
                        {"bf16_tflops", limits.operations / 1e12},
                        {"rows", std::move(all)}});
  if (flags.measure.json) return;
  print_limits(bench);
  Table table({"", "of", "tokens", "us", "GB/s", "TFLOPS", "limit", "of limit"}, 2);
  for (const GpuRow& row : rows) {
    const GpuFigure& f = row.figure;
    table.add({row.what, row.of, std::to_string(row.count), three_digits(f.seconds * 1e6),
               three_digits(f.bytes / f.seconds / 1e9), three_digits(f.operations / f.seconds / 1e12),
               f.by_memory ? "memory" : "bf16", percent(f.limit_seconds / f.seconds)});
  }
  std::printf("%s", table.str().c_str());
}

}  // namespace

void add_microbench_gpu(CLI::App& microbench, Invocation& run) {
  CLI::App* verb = microbench.add_subcommand(
      "gpu", "A GPU: memory, link, matrix units; products and attention as fractions of them");
  const auto flags = std::make_shared<GpuFlags>();
  verb->add_option("--gpu", flags->number, "Which one")->check(within(0, 1023))->capture_default_str();
  verb->add_option("--outputs", flags->n, "Outputs of products")
      ->check(within(1, kMostWidth))
      ->capture_default_str();
  verb->add_option("--inputs", flags->k, "Inputs of products")
      ->check(within(1, kMostWidth))
      ->capture_default_str();
  verb->add_option("--tokens", flags->tokens, "Tokens of a product; a list measures each")
      ->delimiter(',')
      ->check(within(1, 1 << 16))
      ->capture_default_str();
  verb->add_option("--format", flags->formats, "Weight formats of products, or all")
      ->delimiter(',')
      ->capture_default_str();
  verb->add_option("--context", flags->contexts, "Tokens that attention of one token looks at")
      ->delimiter(',')
      ->check(within(1, 1 << 20))
      ->capture_default_str();
  verb->add_option("--kv", flags->kv, "Precision of cached keys and values")
      ->check(CLI::IsMember({"bf16", "int8", "f32"}))
      ->capture_default_str();
  verb->add_option("--memory", flags->memory,
                   "Memory to copy; a quarter of it is what products and caches rotate over")
      ->capture_default_str();
  flags->measure.add_to(*verb);
  verb->footer(
      "The limit of a call is the larger of two times: the bytes of weights, or of keys and values, / the "
      "bandwidth\n"
      "of copies in the GPU's memory, and operations / the bf16 peak, both measured by this command "
      "first.\n\n"
      "Examples:\n"
      "  kt microbench gpu\n"
      "  kt microbench gpu --format all --tokens 1,16 --json\n"
      "  kt microbench gpu --context 16384,131072 --kv int8");
  verb->callback([&run, flags] { run.action = [flags] { run_gpu(*flags); }; });
}

}  // namespace kt::inline cli
