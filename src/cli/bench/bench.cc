// kt bench: tokens per second of a whole model, over prompt lengths and batch sizes; or of a running server.
#include "engine/bench.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "bench/measure.h"
#include "bench/plot.h"
#include "cli/bench/bench_server.h"
#include "cli/model_flags.h"
#include "terminal/report.h"

namespace kt {
namespace {

struct BenchFlags {
  ModelFlags model;
  ServerBenchFlags server;
  std::vector<int> prompts = {128, 512, 2048}, batches = {1, 4, 16};
  int output = 32, repeat = 3;
  std::string plot;
  bool json = false;
};

struct Point {
  BenchCase at;
  double prefill = 0, decode = 0;                    // tokens/s, medians
  double prefill_fraction = 0, decode_fraction = 0;  // of the machine's limit, medians
  double outside = 0;  // seconds of a step that are not the model's: choosing tokens, scheduling; median
};

Point measure(LoadedModel& model, const Rates& rates, const BenchCase& at, int repeat) {
  const int step = model.max_tokens();
  const std::unique_ptr<Runner> runner = model.make_runner(bench_pages(at, step));
  std::vector<double> prefill, decode, prefill_fraction, decode_fraction, outside;
  for (int i = 0; i < repeat; ++i) {
    BenchCase once = at;
    once.seed = at.seed + static_cast<uint64_t>(i);
    std::vector<StepTotals> totals;  // at the beginnings and ends of both phases
    const BenchResult result = run_bench(*runner, once, step, [&] {
      totals.push_back(runner->totals());
      return totals.back().work;
    });
    const double in_steps = totals.back().seconds - totals.end()[-2].seconds;
    outside.push_back((result.decode_seconds - in_steps) / at.output);
    prefill.push_back(at.batch * at.prompt / result.prefill_seconds);
    decode.push_back(at.batch * at.output / result.decode_seconds);
    prefill_fraction.push_back(limit_of(result.prefill_work, rates).seconds / result.prefill_seconds);
    decode_fraction.push_back(limit_of(result.decode_work, rates).seconds / result.decode_seconds);
  }
  return {at,
          median(prefill),
          median(decode),
          median(prefill_fraction),
          median(decode_fraction),
          median(outside)};
}

// Lengths that leave no room for the answer are left out, and said so.
std::vector<BenchCase> cases_of(const BenchFlags& flags, const LoadedModel& model) {
  const int step = model.max_tokens(), context = model.spec().context;
  std::vector<BenchCase> out;
  for (int prompt : flags.prompts)
    for (int batch : flags.batches) {
      if (batch > step)
        fail("--batch: {} sequences, and a step takes {} tokens; see --chunked-prefill-size", batch, step);
      const BenchCase at{.prompt = prompt, .batch = batch, .output = flags.output};
      if (bench_tokens(at, step) >= context)
        std::fprintf(stderr, "kt: prompts of %d tokens are left out: the model's context is %d\n", prompt,
                     context);
      else
        out.push_back(at);
    }
  if (out.empty())
    fail("--prompt: no length leaves room for {} more tokens in the context of {}", flags.output, context);
  return out;
}

std::vector<Chart> charts_of(const std::vector<Point>& points) {
  Chart prefill{"Prefill", "prompt tokens", "tokens/s", true, {}},
      decode{"Decode", "sequences", "tokens/s", true, {}};
  const auto put = [](Chart& chart, const std::string& name, double x, double y) {
    auto at = std::ranges::find(chart.series, name, &Series::name);
    if (at == chart.series.end()) at = chart.series.insert(at, {name, {}});
    at->points.emplace_back(x, y);
  };
  for (const Point& point : points) {
    put(prefill, counted(point.at.batch, "sequence"), point.at.prompt, point.prefill);
    put(decode, text("after {} tokens", point.at.prompt), point.at.batch, point.decode);
  }
  return {prefill, decode};
}

void print(const BenchFlags& flags, const LoadedModel& model, const std::vector<Point>& points) {
  if (flags.json) {
    nlohmann::ordered_json out = {{"model", model.path()},
                                  {"experts", model.experts_dialect()},
                                  {"acts", flags.model.acts},
                                  {"output_tokens", flags.output},
                                  {"points", nlohmann::ordered_json::array()}};
    for (const Point& point : points)
      out["points"].push_back({{"prompt", point.at.prompt},
                               {"batch", point.at.batch},
                               {"prefill_tokens_per_s", point.prefill},
                               {"prefill_fraction_of_limit", point.prefill_fraction},
                               {"decode_tokens_per_s", point.decode},
                               {"decode_fraction_of_limit", point.decode_fraction},
                               {"outside_of_steps_us", point.outside * 1e6}});
    std::printf("%s\n", out.dump(2).c_str());
    return;
  }
  Table table(
      {"prompt", "sequences", "prefill tokens/s", "of limit", "decode tokens/s", "of limit", "ms/token"}, 0);
  for (const Point& point : points)
    table.add({std::to_string(point.at.prompt), std::to_string(point.at.batch), three_digits(point.prefill),
               percent(point.prefill_fraction), three_digits(point.decode), percent(point.decode_fraction),
               three_digits(1000 * point.at.batch / point.decode)});
  std::printf("%s", table.str().c_str());
}

void run(const BenchFlags& flags) {
  const MemoryRequest use{.sequences = std::ranges::max(flags.batches),
                          .context = std::ranges::max(flags.prompts) + std::min(flags.output, 1 << 20)};
  LoadedModel model = OpenedModel(flags.model.model, flags.model.options()).load({.use = use});
  const Rates rates = rates_of(
      measure_quickly(std::make_shared<Pool>(PoolOptions{.threads = flags.model.threads}), kernels()));
  std::vector<Point> points;
  StatusLine status;
  for (const BenchCase& at : cases_of(flags, model)) {
    status.show(text("{} x {} tokens", at.batch, at.prompt));
    points.push_back(measure(model, rates, at, flags.repeat));
  }
  status.show("");
  if (!flags.plot.empty()) {
    AtomicFile file(flags.plot);
    file.append(svg(charts_of(points)));
    file.commit();
  }
  print(flags, model, points);
}

}  // namespace

void add_bench(CLI::App& kt, Invocation& invocation) {
  CLI::App* verb = kt.add_subcommand("bench", "Tokens per second of a model, prefill and decode");
  const auto flags = std::make_shared<BenchFlags>();
  flags->model.add_to(*verb);
  flags->server.add_to(*verb);
  CLI::Option* model = verb->get_option("MODEL")->required(false)->excludes("--server");
  CLI::Option* prompt =
      verb->add_option("--prompt", flags->prompts, "Prompt lengths, in tokens; 512 with --server")
          ->delimiter(',')
          ->check(positive())
          ->capture_default_str();
  verb->add_option("--batch", flags->batches, "Sequences at once")
      ->excludes("--server")
      ->delimiter(',')
      ->check(within(1, kMostSequences))
      ->capture_default_str();
  CLI::Option* tokens =
      verb->add_option("--tokens", flags->output, "Tokens to generate and time; 128 with --server")
          ->check(positive())
          ->capture_default_str();
  verb->add_option("--repeat", flags->repeat, "The median of so many runs counts")
      ->excludes("--server")
      ->check(positive())
      ->capture_default_str();
  verb->add_option("--plot", flags->plot, "Draw the figures into this file (SVG)");
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Examples:\n"
      "  kt bench ./demo/tiny-deepseekv3 --prompt 128,512 --batch 1,8\n"
      "  kt bench ./Qwen3-30B-A3B --weights ./Qwen3-30B-A3B-int4 --plot speed.svg --json\n"
      "  kt bench --server http://127.0.0.1:30000 --concurrency 1,8,64 --tokens 128 --plot load.svg");
  verb->callback([&invocation, flags, model, prompt, tokens] {
    if (flags->server.url.empty() && model->empty()) throw CLI::RequiredError("MODEL or --server");
    if (flags->server.url.empty()) {
      invocation.action = [flags] { run(*flags); };
      return;
    }
    if (prompt->empty()) flags->prompts = {512};
    if (tokens->empty()) flags->output = 128;
    invocation.action = [flags] {
      bench_server(flags->server, {flags->prompts, flags->output, flags->plot, flags->json});
    };
  });
}

}  // namespace kt
