// kt microbench gptq: flags, table and JSON; the measuring is in gptq_bench.cc.
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/cpu_choice.h"
#include "base/error.h"
#include "base/text.h"
#include "bench/gptq_bench.h"
#include "bench/limit_report.h"
#include "cli/verbs.h"
#include "engine/calibration/expert_rounding.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

struct GptqFlags {
  GptqShape shape{.hidden = 2048, .inter = 768, .experts = 128, .top_k = 8, .tokens = 512 * 2048};
  int threads = 0;
  int64_t rows = 2048;  // as conversions have them (engine/calibration)
  std::string format = "int4_g128";
  double seconds = 2;
  bool json = false;
};

// The most this process has held so far.
uint64_t peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_maxrss) << 10;
}

// What a conversion plans for (engine/calibration): an expert on every worker, and all inputs in memory.
struct GptqMemory {
  uint64_t expert = 0, lanes = 0, activations = 0;
};

GptqMemory memory_of(const GptqSetup& setup) {
  const uint64_t expert = ExpertRounder::bytes(setup.shape.hidden, setup.shape.inter);
  return {expert, expert * static_cast<uint64_t>(setup.pool->threads()),
          static_cast<uint64_t>(setup.shape.tokens) * static_cast<uint64_t>(setup.shape.hidden) * 6};
}

nlohmann::ordered_json json_of(const GptqPart& part) {
  const LimitFigures& f = part.figures;
  nlohmann::ordered_json out;
  out["part"] = part.name;
  out["floor"] = part.floor;
  out["ms"] = f.seconds * 1e3;
  out["ms_best"] = f.best_seconds * 1e3;
  out["gflops"] = f.operations / f.seconds / 1e9;
  put_limit(out, f);
  put_windows(out, f);
  out["times_per_expert"] = part.times;
  return out;
}

nlohmann::ordered_json json_of(const GptqSetup& setup, const GptqFlags& flags,
                               const std::vector<GptqPart>& parts) {
  const GptqLayer layer = layer_of(setup, parts);
  const GptqMemory memory = memory_of(setup);
  nlohmann::ordered_json out;
  out["isa"] = setup.kernels->name;
  out["threads"] = setup.pool->threads();
  out["hidden"] = setup.shape.hidden;
  out["inter"] = setup.shape.inter;
  out["experts"] = setup.shape.experts;
  out["top_k"] = setup.shape.top_k;
  out["tokens"] = setup.shape.tokens;
  out["format"] = flags.format;
  out["rows"] = setup.rows;
  for (const GptqPart& part : parts) out["parts"].push_back(json_of(part));
  out["layer"] = {{"seconds", layer.moments + layer.rounding},
                  {"moments_seconds", layer.moments},
                  {"moments_floor_seconds", layer.moments_floor},
                  {"rounding_seconds", layer.rounding},
                  {"rounding_floor_seconds", layer.rounding_floor}};
  out["memory"] = {{"expert_bytes", memory.expert},
                   {"lanes_bytes", memory.lanes},
                   {"activations_bytes", memory.activations},
                   {"measured_peak_bytes", peak_memory()}};
  return out;
}

void print(const GptqSetup& setup, const std::vector<GptqPart>& parts) {
  std::printf("%-22s %9s %9s %9s  %s %9s\n", "part, one expert each", "ms", "best ms", "GFLOPS",
              limit_heads().c_str(), "dropped");
  for (const GptqPart& part : parts) {
    const LimitFigures& f = part.figures;
    std::printf("%-22s %9.2f %9.2f %9.0f  %s %9s%s\n", part.name, f.seconds * 1e3, f.best_seconds * 1e3,
                f.operations / f.seconds / 1e9, limit_cells(f).c_str(), dropped_cell(f).c_str(),
                remark(f).c_str());
  }
  if (std::ranges::any_of(parts, above_limit, &GptqPart::figures))
    std::printf("%s\n", std::string(limit_note()).c_str());
  const GptqLayer layer = layer_of(setup, parts);
  const GptqMemory memory = memory_of(setup);
  std::printf("\nA layer of %d experts, top-%d, %lld tokens (%.0f rows an expert), %s:\n",
              setup.shape.experts, setup.shape.top_k, static_cast<long long>(setup.shape.tokens),
              setup.shape.rows(), counted(setup.pool->threads(), "thread").c_str());
  Table table({"", "s", "floor s", "of floor"}, 1);
  const auto add = [&](const char* name, double seconds, double floor) {
    table.add({name, three_digits(seconds), three_digits(floor), percent(floor / seconds)});
  };
  add("X^T X", layer.moments, layer.moments_floor);
  add("factors and rounding", layer.rounding, layer.rounding_floor);
  add("both", layer.moments + layer.rounding, layer.moments_floor + layer.rounding_floor);
  std::fputs(table.str().c_str(), stdout);
  std::printf(
      "\nMemory: %s for an expert at work, %s for all threads, %s more for all inputs (or on disk);\n"
      "this process held %s at most.\n",
      human_bytes(memory.expert).c_str(), human_bytes(memory.lanes).c_str(),
      human_bytes(memory.activations).c_str(), human_bytes(peak_memory()).c_str());
}

void run_gptq(const GptqFlags& flags) {
  GptqSetup setup;
  setup.kernels = &best_kernels();
  setup.shape = flags.shape;
  setup.rows = flags.rows;
  setup.format = format_named(flags.format);
  setup.seconds = flags.seconds;
  if (setup.shape.top_k > setup.shape.experts)
    fail("--top-k {} is more than the {} experts", setup.shape.top_k, setup.shape.experts);
  check_shape(setup.format, setup.shape.inter, setup.shape.hidden, "gate and up");
  check_shape(setup.format, setup.shape.hidden, setup.shape.inter, "down");
  setup.pool = std::make_shared<Pool>(fitted({.threads = flags.threads}));
  if (!flags.json)
    std::printf("hidden %d, inter %d, %s; %s, %s; %lld rows an update\n\n", setup.shape.hidden,
                setup.shape.inter, flags.format.c_str(), setup.kernels->name,
                counted(setup.pool->threads(), "thread").c_str(), static_cast<long long>(setup.rows));
  std::vector<GptqPart> parts;
  {
    StatusLine status;
    status.show("measuring calibrated rounding");
    parts = GptqBench(setup).measure();
  }
  if (flags.json)
    std::printf("%s\n", json_of(setup, flags, parts).dump(2).c_str());
  else
    print(setup, parts);
}

}  // namespace

void add_microbench_gptq(CLI::App& microbench, Invocation& run) {
  CLI::App* verb = microbench.add_subcommand(
      "gptq", "Calibrated rounding of experts: time of a layer against its floors, and memory");
  const auto flags = std::make_shared<GptqFlags>();
  GptqShape& shape = flags->shape;
  const auto number = [&](const char* name, auto& into, double most, const char* what) {
    verb->add_option(name, into, what)->check(within(1, most))->capture_default_str();
  };
  constexpr double kMostText = 1e12;
  number("--hidden", shape.hidden, kMostWidth, "Width of the model");
  number("--inter", shape.inter, kMostWidth, "Width inside an expert");
  number("--experts", shape.experts, kMostExperts, "Experts of the layer");
  number("--top-k", shape.top_k, kMostTopK, "Experts each token goes to");
  number("--tokens", shape.tokens, kMostText, "Tokens of the calibration text");
  number("--rows", flags->rows, kMostTokens, "Rows of one measured update of the moments");
  verb->add_option("--seconds", flags->seconds, "Time to measure each part for")
      ->check(positive())
      ->capture_default_str();
  verb->add_option("--threads", flags->threads, "Workers; default: one for each core")->check(positive());
  verb->add_option("--format", flags->format, "Format that is rounded to")->capture_default_str();
  verb->add_flag("--json", flags->json, "Print JSON: one object");
  verb->footer(
      "Every worker does an expert's part, as a conversion does. The limits are X^T X's useful operations,\n"
      "dims * (dims + 1) a row, over the bf16 multiply peak, and those of factors and rounding over the f32\n"
      "peak, both measured between the calls. The layer is the sum of its experts' parts, without the "
      "model's\n"
      "forward pass.\n\n"
      "Examples:\n"
      "  kt microbench gptq\n"
      "  kt microbench gptq --hidden 4096 --inter 1536 --experts 64 --tokens 262144 --threads 1 --json");
  verb->callback([&run, flags] { run.action = [flags] { run_gptq(*flags); }; });
}

}  // namespace kt::inline cli
