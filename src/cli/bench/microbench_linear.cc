// kt microbench linear: flags, table and JSON; the measuring is in linear_bench.cc.
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/cpu_choice.h"
#include "base/text.h"
#include "bench/limit_report.h"
#include "bench/linear_bench.h"
#include "cli/bench/format_list.h"
#include "cli/bench/measure_flags.h"
#include "cli/verbs.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

struct LinearFlags {
  int n = 4096, k = 4096, copies = 0, threads = 0;
  std::vector<int> tokens = {1, 16};
  std::vector<std::string> formats = {"int8", "bf16"};
  std::string isa, acts = "default";
  BatchFlags batch;
  MeasureFlags measure;
};

struct LinearRow {
  std::string format;
  int tokens = 0, copies = 0;
  size_t weight_bytes = 0;
  double packed_bytes_ratio = 0;
  LimitFigures figures;
};

nlohmann::ordered_json json_of(const LinearRow& row, const LinearSetup& setup, const LinearFlags& flags) {
  const LimitFigures& f = row.figures;
  nlohmann::ordered_json out;
  out["format"] = row.format;
  out["isa"] = setup.kernels->name;
  out["tokens"] = row.tokens;
  out["n"] = setup.n;
  out["k"] = setup.k;
  out["copies"] = row.copies;
  out["threads"] = setup.pool->threads();
  out["acts"] = flags.acts;
  out["us"] = f.seconds * 1e6;
  out["us_best"] = f.best_seconds * 1e6;
  out["gb_per_s"] = f.bytes / f.seconds / 1e9;
  out["tops"] = f.operations / f.seconds / 1e12;
  put_limit(out, f);
  out["stored_bytes"] = f.bytes;
  out["operations"] = f.operations;
  out["weight_bytes"] = row.weight_bytes;
  out["packed_bytes_ratio"] = row.packed_bytes_ratio;
  put_windows(out, f);
  return out;
}

void print_linear_heads() {
  std::printf("%-15s %6s %6s %10s %7s %8s  %s %7s %9s\n", "format", "tokens", "copies", "us", "GB/s", "TOPS",
              limit_heads().c_str(), "packed", "dropped");
}

void print_row(const LinearRow& row) {
  const LimitFigures& f = row.figures;
  std::printf("%-15s %6d %6d %10.0f %7.1f %8s  %s %6.2fx %9s%s\n", row.format.c_str(), row.tokens, row.copies,
              f.seconds * 1e6, f.bytes / f.seconds / 1e9,
              three_digits(f.operations / f.seconds / 1e12).c_str(), limit_cells(f).c_str(),
              row.packed_bytes_ratio, dropped_cell(f).c_str(), remark(f).c_str());
  std::fflush(stdout);
}

LinearSetup setup_of(const LinearFlags& flags) {
  LinearSetup setup;
  setup.kernels = flags.isa.empty() ? &best_kernels() : &kernels_named(flags.isa);
  setup.n = flags.n;
  setup.k = flags.k;
  setup.copies = flags.copies;
  setup.precision = precision_named(flags.acts);
  setup.pool = std::make_shared<Pool>(fitted({.threads = flags.threads}));
  return setup;
}

void run_linear(const LinearFlags& flags) {
  const LinearSetup setup = setup_of(flags);
  const std::vector<NamedFormat> formats = listed_formats(
      flags.formats, [&](const Format& format) { check_shape(format, setup.n, setup.k, "linear"); });
  if (!flags.measure.json) {
    std::printf("[%d, %d]; %s, %s; %s activations\n\n", setup.n, setup.k, setup.kernels->name,
                counted(setup.pool->threads(), "thread").c_str(), flags.acts.c_str());
    print_linear_heads();
  }
  Reader reader(setup.pool, *setup.kernels, read_buffer_bytes());
  auto rows = nlohmann::ordered_json::array();
  bool above = false;
  for (const NamedFormat& format : formats) {
    std::optional<StatusLine> status(std::in_place);
    status->show(text("packing {}", format.name));
    const LinearBench bench(setup, format.format);
    for (const int tokens : flags.tokens) {
      if (!status) status.emplace();
      status->show(text("{}, {} tokens", format.name, tokens));
      const LinearRow row{std::string(format.name),
                          tokens,
                          bench.copies(),
                          bench.bytes(),
                          bench.packed_bytes_ratio(),
                          bench.measure(reader, tokens, flags.measure.time)};
      status.reset();
      above |= above_limit(row.figures);
      rows.push_back(json_of(row, setup, flags));
      if (!flags.measure.json) print_row(row);
    }
  }
  flags.measure.report(rows);
  if (above && !flags.measure.json) std::printf("\n%s\n", std::string(limit_note()).c_str());
}

}  // namespace

void add_microbench_linear(CLI::App& microbench, Invocation& run) {
  CLI::App* verb =
      microbench.add_subcommand("linear", "One dense linear layer: time, and its fraction of the limit");
  const auto flags = std::make_shared<LinearFlags>();
  verb->add_option("--outputs", flags->n, "Outputs")->check(within(1, kMostWidth))->capture_default_str();
  verb->add_option("--inputs", flags->k, "Inputs")->check(within(1, kMostWidth))->capture_default_str();
  CLI::Option* const tokens =
      verb->add_option("--tokens", flags->tokens, "Tokens of a call; a list measures each")
          ->delimiter(',')
          ->check(within(1, kMostTokens))
          ->capture_default_str();
  verb->add_option("--format", flags->formats, "Weight formats, or all")
      ->delimiter(',')
      ->capture_default_str();
  verb->add_option("--copies", flags->copies,
                   "Copies to rotate over; default: enough that no cache holds them")
      ->check(within(1, kMostLayers));
  verb->add_option("--threads", flags->threads, "Workers; default: one for each core")->check(positive());
  verb->add_option("--isa", flags->isa, "Instruction set (see kt version); default: the best here");
  verb->add_option("--acts", flags->acts, "Precision of activations")
      ->check(CLI::IsMember({"default", "int8", "bf16", "f32"}))
      ->capture_default_str();
  flags->batch.add_to(*verb, tokens);
  flags->measure.add_to(*verb);
  verb->footer(
      "The limit of a call is the larger of two times: the stored bytes of the weights / read bandwidth,\n"
      "and 2 x outputs x inputs operations for each token / multiply peak (s8 for integer codes, bf16 for "
      "float codes).\n\n"
      "Examples:\n"
      "  kt microbench linear --outputs 4096 --inputs 2048 --tokens 1,16,512 --format int8,bf16\n"
      "  kt microbench linear --outputs 151936 --inputs 2048 --tokens 1 --format q6_k\n"
      "  kt microbench linear --tokens 8 --format all --json");
  verb->callback([&run, flags] {
    flags->batch.apply(flags->tokens);
    run.action = [flags] { run_linear(*flags); };
  });
}

}  // namespace kt::inline cli
