// kt microbench roofline: what this machine can read and multiply, measured with the ISA's own loops.
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/cpu.h"
#include "base/cpu_choice.h"
#include "base/text.h"
#include "bench/measure.h"
#include "cli/verbs.h"
#include "kernels/table.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

struct RooflineFlags {
  int threads = 0;
  std::string isa;
  bool json = false;
};

nlohmann::ordered_json json_of(const Roofline& r, const Kernels& kernels, int threads) {
  const auto tera = [](const Peak& p, double value) {
    return p.best ? nlohmann::ordered_json(value / 1e12) : nullptr;
  };
  nlohmann::ordered_json out;
  out["isa"] = kernels.name;
  out["threads"] = threads;
  out["read_gb_per_s"] = r.read.median / 1e9;
  out["s8_tops"] = tera(r.s8, r.s8.median);
  out["bf16_tflops"] = tera(r.bf16, r.bf16.median);
  out["f32_tflops"] = tera(r.f32, r.f32.median);
  out["best"] = {{"read_gb_per_s", r.read.best / 1e9},
                 {"s8_tops", tera(r.s8, r.s8.best)},
                 {"bf16_tflops", tera(r.bf16, r.bf16.best)},
                 {"f32_tflops", tera(r.f32, r.f32.best)}};
  out["read_buffer_bytes"] = r.read_bytes;
  out["l3_bytes"] = cpu().l3;
  return out;
}

void print_table(const Roofline& r, const Kernels& kernels, int threads) {
  std::printf("%s, %s; reading over %s\n\n", kernels.name, counted(threads, "thread").c_str(),
              human_bytes(r.read_bytes).c_str());
  Table table({"", "median", "best"}, 1);
  table.add({"read, GB/s", three_digits(r.read.median / 1e9), three_digits(r.read.best / 1e9)});
  const auto add = [&](const char* name, const Peak& p) {
    const auto cell = [&](double rate) { return p.best ? three_digits(rate / 1e12) : "none"; };
    table.add({name, cell(p.median), cell(p.best)});
  };
  add("s8 multiply, TOPS", r.s8);
  add("bf16 multiply, TFLOPS", r.bf16);
  add("f32 multiply, TFLOPS", r.f32);
  std::fputs(table.str().c_str(), stdout);
}

void run_roofline(const RooflineFlags& flags) {
  const Kernels& used = flags.isa.empty() ? best_kernels() : kernels_named(flags.isa);
  const auto pool = std::make_shared<Pool>(fitted({.threads = flags.threads}));
  const Roofline r = measure_roofline(pool, used);
  if (flags.json)
    std::printf("%s\n", json_of(r, used, pool->threads()).dump(2).c_str());
  else
    print_table(r, used, pool->threads());
}

}  // namespace

void add_microbench_roofline(CLI::App& microbench, Invocation& run) {
  CLI::App* verb = microbench.add_subcommand("roofline", "Read bandwidth and multiply peaks of this machine");
  const auto flags = std::make_shared<RooflineFlags>();
  verb->add_option("--threads", flags->threads, "Workers; default: one for each core")->check(positive());
  verb->add_option("--isa", flags->isa,
                   "Instruction set to measure (see kt version); default: the best here");
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Operations count multiply and add. Medians are over windows of 256 MiB and 20 ms, all workers at "
      "once.\n\n"
      "Examples:\n"
      "  kt microbench roofline\n"
      "  kt microbench roofline --threads 1 --json\n"
      "  kt microbench roofline --isa portable");
  verb->callback([&run, flags] { run.action = [flags] { run_roofline(*flags); }; });
}

}  // namespace kt::inline cli
