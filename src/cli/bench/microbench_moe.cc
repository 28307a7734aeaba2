// kt microbench moe: flags, table and JSON; the measuring is in moe_bench.cc.
#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/cpu_choice.h"
#include "base/error.h"
#include "base/text.h"
#include "bench/limit_report.h"
#include "bench/moe_bench.h"
#include "cli/bench/format_list.h"
#include "cli/bench/measure_flags.h"
#include "cli/bench/moe_training.h"
#include "cli/verbs.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

struct NamedShape {
  const char* name;
  ExpertsShape shape;
  int top_k;
};
constexpr auto kShapes = std::to_array<NamedShape>({
    {"qwen3-30b", {128, 2048, 768}, 8},
    {"deepseek-v3", {32, 7168, 2048}, 8},  // 32 of its 256 experts: a layer that fits small machines
});

struct MoeFlags {
  std::string shape = kShapes[0].name;
  int experts = 0, hidden = 0, inter = 0, top_k = 0;  // 0: the named shape's
  std::vector<int> tokens = {1, 16};
  int layers = 0, threads = 0, shards = 0;
  std::vector<std::string> formats = {"int4", "int8"};
  std::string isa, routing = "uniform", acts = "default";
  BatchFlags batch;
  MeasureFlags measure;
  TrainFlags train;
};

struct MoeRow {
  std::string format;
  int tokens = 0, layers = 0;
  size_t weight_bytes = 0;
  double packed_bytes_ratio = 0;
  MoeFigures figures;
};

nlohmann::ordered_json json_of(const MoeRow& row, const MoeSetup& setup, const MoeFlags& flags) {
  const MoeFigures& f = row.figures;
  nlohmann::ordered_json out;
  out["format"] = row.format;
  out["isa"] = setup.kernels->name;
  out["tokens"] = row.tokens;
  out["experts"] = setup.shape.experts;
  out["hidden"] = setup.shape.hidden;
  out["inter"] = setup.shape.inter;
  out["top_k"] = setup.top_k;
  out["layers"] = row.layers;
  out["threads"] = setup.pool->threads();
  out["shards"] = setup.pool->nodes();
  out["routing"] = flags.routing;
  out["acts"] = flags.acts;
  out["us_per_layer"] = f.seconds * 1e6;
  out["us_per_layer_best"] = f.best_seconds * 1e6;
  out["gb_per_s"] = f.bytes / f.seconds / 1e9;
  out["tops"] = f.operations / f.seconds / 1e12;
  put_limit(out, f);
  out["experts_hit"] = f.experts_hit;
  out["stored_bytes"] = f.bytes;
  out["weight_bytes"] = row.weight_bytes;
  out["packed_bytes_ratio"] = row.packed_bytes_ratio;
  put_windows(out, f);
  out["plan"] = f.plan;
  return out;
}

void print_moe_heads() {
  std::printf("%-15s %6s %6s %7s %10s %7s %8s  %s %7s %9s\n", "format", "tokens", "layers", "experts",
              "us/layer", "GB/s", "TOPS", limit_heads().c_str(), "packed", "dropped");
}

void print_row(const MoeRow& row) {
  const MoeFigures& f = row.figures;
  std::printf("%-15s %6d %6d %7.1f %10.0f %7.1f %8s  %s %6.2fx %9s%s\n", row.format.c_str(), row.tokens,
              row.layers, f.experts_hit, f.seconds * 1e6, f.bytes / f.seconds / 1e9,
              three_digits(f.operations / f.seconds / 1e12).c_str(), limit_cells(f).c_str(),
              row.packed_bytes_ratio, dropped_cell(f).c_str(), remark(f).c_str());
  std::fflush(stdout);
}

MoeSetup setup_of(const MoeFlags& flags) {
  const auto named = std::find_if(kShapes.begin(), kShapes.end(),
                                  [&](const NamedShape& s) { return flags.shape == s.name; });
  KT_CHECK(named != kShapes.end(), "shape {}", flags.shape);
  const auto given = [](int flag, int otherwise) { return flag ? flag : otherwise; };
  MoeSetup setup;
  setup.kernels = flags.isa.empty() ? &best_kernels() : &kernels_named(flags.isa);
  setup.shape = {given(flags.experts, named->shape.experts), given(flags.hidden, named->shape.hidden),
                 given(flags.inter, named->shape.inter)};
  setup.top_k = given(flags.top_k, named->top_k);
  setup.layers = flags.layers;
  setup.max_tokens = *std::max_element(flags.tokens.begin(), flags.tokens.end());
  setup.precision = precision_named(flags.acts);
  if (setup.top_k > setup.shape.experts)
    fail("--top-k {} is more than the {} experts", setup.top_k, setup.shape.experts);
  setup.pool = std::make_shared<Pool>(fitted({.threads = flags.threads, .nodes = flags.shards}));
  return setup;
}

std::vector<NamedFormat> formats_of(const MoeFlags& flags, const ExpertsShape& shape) {
  return listed_formats(flags.formats, [&](const Format& format) {
    check_shape(format, shape.inter, shape.hidden, "gate and up");
    check_shape(format, shape.hidden, shape.inter, "down");
  });
}

void run_moe(const MoeFlags& flags) {
  const MoeSetup setup = setup_of(flags);
  const std::vector<NamedFormat> formats = formats_of(flags, setup.shape);
  const Routing routing = flags.routing == "zipf" ? Routing::kZipf : Routing::kUniform;
  if (flags.train.on)
    return run_training(flags.train, {.setup = setup,
                                      .formats = formats,
                                      .tokens = flags.tokens,
                                      .routing = routing,
                                      .measure = flags.measure});
  if (!flags.measure.json) {
    std::printf("%d experts, hidden %d, inter %d, top-%d; %s, %s, %s; %s routing, %s activations\n\n",
                setup.shape.experts, setup.shape.hidden, setup.shape.inter, setup.top_k, setup.kernels->name,
                counted(setup.pool->threads(), "thread").c_str(),
                counted(setup.pool->nodes(), "shard").c_str(), flags.routing.c_str(), flags.acts.c_str());
    print_moe_heads();
  }
  Reader reader(setup.pool, *setup.kernels, read_buffer_bytes());
  auto rows = nlohmann::ordered_json::array();
  bool above = false;
  for (const NamedFormat& format : formats) {
    std::optional<StatusLine> status(std::in_place);
    status->show(text("packing {}", format.name));
    const MoeModel model(setup, format.format);
    for (const int tokens : flags.tokens) {
      if (!status) status.emplace();
      status->show(text("{}, {} tokens", format.name, tokens));
      const MoeRow row{std::string(format.name),
                       tokens,
                       model.layers(),
                       model.bytes(),
                       model.packed_bytes_ratio(),
                       measure_moe(model, reader, routing, tokens, flags.measure.time)};
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

void add_microbench_moe(CLI::App& microbench, Invocation& run) {
  CLI::App* verb =
      microbench.add_subcommand("moe", "One MoE layer: time, and its fraction of the machine's limit");
  const auto flags = std::make_shared<MoeFlags>();
  std::vector<std::string> shapes;
  for (const NamedShape& s : kShapes) shapes.push_back(s.name);
  verb->add_option("--shape", flags->shape, "Sizes by name; the four flags below override")
      ->check(CLI::IsMember(shapes))
      ->capture_default_str();
  verb->add_option("--experts", flags->experts, "Experts of a layer")->check(within(1, kMostExperts));
  verb->add_option("--hidden", flags->hidden, "Width of the model")->check(within(1, kMostWidth));
  verb->add_option("--inter", flags->inter, "Width inside an expert")->check(within(1, kMostWidth));
  verb->add_option("--top-k", flags->top_k, "Experts each token goes to")->check(within(1, kMostTopK));
  CLI::Option* const tokens =
      verb->add_option("--tokens", flags->tokens, "Tokens of a call; a list measures each")
          ->delimiter(',')
          ->check(within(1, kMostTokens))
          ->capture_default_str();
  verb->add_option("--layers", flags->layers,
                   "Layers to rotate over; default: enough that no cache holds them")
      ->check(within(1, kMostLayers));
  verb->add_option("--format", flags->formats, "Weight formats, or all")
      ->delimiter(',')
      ->capture_default_str();
  verb->add_option("--threads", flags->threads, "Workers; default: one for each core")->check(positive());
  verb->add_option("--shards", flags->shards, "Slices of every expert; default: one for each NUMA node")
      ->check(positive());
  verb->add_option("--isa", flags->isa, "Instruction set (see kt version); default: the best here");
  verb->add_option("--routing", flags->routing, "How tokens choose experts")
      ->check(CLI::IsMember({"uniform", "zipf"}))
      ->capture_default_str();
  verb->add_option("--acts", flags->acts, "Precision of activations")
      ->check(CLI::IsMember({"default", "int8", "bf16", "f32"}))
      ->capture_default_str();
  flags->batch.add_to(*verb, tokens);
  flags->measure.add_to(*verb);
  flags->train.add_to(*verb);
  verb->footer(
      "The limit of a call is the larger of two times: the stored bytes of the experts that got a token / "
      "read\n"
      "bandwidth, and operations / multiply peak (s8 for integer codes, bf16 for float codes). It is "
      "measured in\n"
      "windows between the calls; `experts` is how many of a layer got a token, `of limit` is the median "
      "ratio, p90 what nine windows in ten reached. "
      "`packed` is\n"
      "packed over stored bytes, `dropped` the windows in which other processes took a worker's core.\n\n"
      "Examples:\n"
      "  kt microbench moe --shape qwen3-30b --tokens 1,16,1024 --format int4,int8\n"
      "  kt microbench moe --shape deepseek-v3 --tokens 1 --format all\n"
      "  kt microbench moe --experts 64 --hidden 1024 --inter 512 --top-k 4 --tokens 8 --format q4_k --json\n"
      "  kt microbench moe --train --rank 8,64 --tokens 1024,4096 --format bf16,int8,int4");
  verb->callback([&run, flags] {
    flags->batch.apply(flags->tokens);
    run.action = [flags] { run_moe(*flags); };
  });
}

}  // namespace kt::inline cli
