// kt bench: tokens per second of a whole model, over prompt lengths and batch sizes; or of a running server.
#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "bench/model_bench.h"
#include "bench/plot.h"
#include "cli/bench/bench_server.h"
#include "cli/bench/measure_flags.h"
#include "cli/experts_text.h"
#include "cli/model_flags.h"
#include "terminal/language.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

struct BenchFlags {
  ModelFlags model;
  ServerBenchFlags server;
  std::vector<int> prompts = {128, 512, 2048}, batches = {1, 4, 16};
  int output = 32, repeat = 3;
  std::string plot, file, type = "inference", routing;
  bool parts = false, json = false;
};

std::array<std::pair<const char*, const PhaseFigures*>, 2> phases_of(const ModelFigures& point) {
  return {{{"prefill", &point.prefill}, {"decode", &point.decode}}};
}

// Lengths that leave no room for the answer are left out, and said so.
std::vector<BenchCase> cases_of(const BenchFlags& flags, const LoadedModel& model) {
  const int step = model.max_tokens(), context = model.spec().context;
  std::vector<BenchCase> out;
  for (int prompt : flags.prompts)
    for (int batch : flags.batches) {
      if (batch > step)
        fail(tr("--batch: {} sequences, and a step takes {} tokens; see --chunked-prefill-size"), batch,
             step);
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

// What a GPU does has no limit here.
std::string of_limit(double fraction) { return fraction > 0 ? percent(fraction) : "-"; }

std::vector<Chart> charts_of(const std::vector<ModelFigures>& points) {
  Chart prefill{"Prefill", "prompt tokens", "tokens/s", true, {}},
      decode{"Decode", "sequences", "tokens/s", true, {}};
  const auto put = [](Chart& chart, const std::string& name, double x, double y) {
    auto at = std::ranges::find(chart.series, name, &Series::name);
    if (at == chart.series.end()) at = chart.series.insert(at, {name, {}});
    at->points.emplace_back(x, y);
  };
  for (const ModelFigures& point : points) {
    put(prefill, counted(point.at.batch, "sequence"), point.at.prompt, point.prefill.tokens_per_s);
    put(decode, text("after {} tokens", point.at.prompt), point.at.batch, point.decode.tokens_per_s);
  }
  return {prefill, decode};
}

// A step of prefill and one of decode at each point.
std::vector<BarChart> parts_charts(const std::vector<ModelFigures>& points) {
  std::vector<BarChart> out;
  for (const ModelFigures& point : points)
    for (const auto& [name, phase] : phases_of(point)) {
      out.push_back({.title = text("A step of {}, {} x {} tokens", name, point.at.batch, point.at.prompt),
                     .unit = "us",
                     .mark_label = "the least it could take here",
                     .bars = {}});
      for (const PartFigures& part : phase->parts)
        out.back().bars.push_back({part.name, part.seconds * 1e6, part.limit.seconds * 1e6});
    }
  return out;
}

nlohmann::ordered_json parts_json(const PhaseFigures& phase) {
  auto parts = nlohmann::ordered_json::array();
  for (const PartFigures& part : phase.parts)
    parts.push_back({{"name", part.name},
                     {"calls", part.calls},
                     {"us", part.seconds * 1e6},
                     {"limit_us", part.limit.seconds * 1e6},
                     {"limit", part.limit.which}});
  return {{"step_us", phase.step_seconds * 1e6}, {"explained", phase.explained}, {"parts", std::move(parts)}};
}

nlohmann::ordered_json point_json(const BenchFlags& flags, const ModelFigures& point) {
  nlohmann::ordered_json out = {{"prompt", point.at.prompt}, {"batch", point.at.batch}};
  for (const auto& [name, phase] : phases_of(point)) {
    const std::string at = name;
    out[at + "_tokens_per_s"] = phase->tokens_per_s;
    out[at + "_fraction_of_limit"] = phase->fraction;
    out[at + "_limit_read_gb_per_s"] = phase->rates.read_bytes * 1e-9;
    if (phase->experts) {
      out[at + "_distinct_experts"] = phase->experts->distinct;
      out[at + "_even_distinct_experts"] = phase->experts->even;
      out[at + "_busiest_share"] = phase->experts->busiest;
    }
    if (flags.parts) out[at + "_step"] = parts_json(*phase);
  }
  out["outside_of_steps_us"] = point.decode.parts.back().seconds * 1e6;
  return out;
}

std::string experts_cell(const PhaseFigures& phase) {
  return phase.experts ? experts_used_text(*phase.experts) : "-";
}

void print_parts(const ModelFigures& point) {
  for (const auto& [name, phase] : phases_of(point)) {
    std::printf("\nA step of %s, %d x %d tokens: %s us, of which these parts are %s\n\n", name,
                point.at.batch, point.at.prompt, three_digits(phase->step_seconds * 1e6).c_str(),
                percent(phase->explained).c_str());
    Table table({"part", "calls", "us", "of the step", "limit us", "of limit"}, 1);
    for (const PartFigures& part : phase->parts) {
      const bool limited = part.limit.seconds > 0;
      table.add({part.name, three_digits(part.calls), three_digits(part.seconds * 1e6),
                 percent(part.seconds / phase->step_seconds),
                 limited ? three_digits(part.limit.seconds * 1e6) : "-",
                 limited ? percent(part.limit.seconds / part.seconds) : "-"});
    }
    std::printf("%s", table.str().c_str());
  }
}

void print(const BenchFlags& flags, const LoadedModel& model, const std::vector<ModelFigures>& points) {
  if (flags.json || !flags.file.empty()) {
    nlohmann::ordered_json out = {
        {"model", model.path()},         {"experts", model.experts_dialect()},
        {"acts", flags.model.acts},      {"routing", flags.routing.empty() ? "router" : flags.routing},
        {"output_tokens", flags.output}, {"points", nlohmann::ordered_json::array()}};
    for (const ModelFigures& point : points) out["points"].push_back(point_json(flags, point));
    if (!flags.file.empty()) write_figures(flags.file, out);
    if (flags.json) std::printf("%s\n", out.dump(2).c_str());
    if (flags.json) return;
  }
  if (!flags.routing.empty())
    std::printf("tokens go to experts by %s in place of those that the router chose\n\n",
                flags.routing.c_str());
  Table table({"prompt", "sequences", "prefill tokens/s", "of limit", "experts used", "decode tokens/s",
               "of limit", "experts used", "busiest 8", "ms/token"},
              0);
  for (const ModelFigures& point : points) {
    const PhaseFigures &prefill = point.prefill, &decode = point.decode;
    table.add({std::to_string(point.at.prompt), std::to_string(point.at.batch),
               three_digits(prefill.tokens_per_s), of_limit(prefill.fraction), experts_cell(prefill),
               three_digits(decode.tokens_per_s), of_limit(decode.fraction), experts_cell(decode),
               decode.experts ? percent(decode.experts->busiest) : "-",
               three_digits(1000 * point.at.batch / decode.tokens_per_s)});
  }
  std::printf("%s", table.str().c_str());
  if (flags.parts)
    for (const ModelFigures& point : points) print_parts(point);
}

// Figures of a model whose routers hardly choose are those of a cache.
void warn_if_narrow(const std::vector<ModelFigures>& points) {
  for (const ModelFigures& point : points)
    for (const auto& [name, phase] : phases_of(point))
      if (phase->experts && phase->experts->narrow()) {
        std::fprintf(
            stderr,
            "kt: in %s of %d x %d tokens a layer used %s of %d experts where even routing uses %s: caches "
            "may hold them, and the figure is theirs\n",
            name, point.at.batch, point.at.prompt, fixed(phase->experts->distinct, 1).c_str(),
            phase->experts->experts, fixed(phase->experts->even, 1).c_str());
        return;
      }
}

void run(const BenchFlags& flags) {
  const MemoryRequest use{.sequences = std::ranges::max(flags.batches),
                          .context = std::ranges::max(flags.prompts) + std::min(flags.output, 1 << 20)};
  flags.model.note_idle_flags();
  flags.model.one_adapter();
  ModelOptions options = flags.model.options();
  if (!flags.routing.empty()) options.routing = ForcedRouting::parse(flags.routing);
  LoadedModel model = OpenedModel(flags.model.model, options).load({.use = use});
  LimitWindows limits(model.pool(), best_kernels());
  std::vector<ModelFigures> points;
  StatusLine status;
  for (const BenchCase& at : cases_of(flags, model)) {
    status.show(text("{} x {} tokens", at.batch, at.prompt));
    points.push_back(measure_model(model, limits, at, flags.repeat));
  }
  status.show("");
  if (!flags.plot.empty())
    write_out(flags.plot, flags.parts ? svg(parts_charts(points)) : svg(charts_of(points)));
  print(flags, model, points);
  warn_if_narrow(points);
}

// For CLI11: empty where it is one.
std::string error_of_routing(const std::string& word) {
  try {
    ForcedRouting::parse(word);
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

// The model by -m instead of by a word alone.
void take_by_flag(BenchFlags& flags, const CLI::App& verb, Invocation& invocation) {
  if (!flags.model.model.empty()) fail(tr("MODEL and --model: give one of them"));
  const auto model = std::make_shared<ResolvedModel>(named_model(flags.server.model));
  const bool agreed = verb.get_option("--download")->count() > 0;
  invocation.before.emplace_back([&flags, model, agreed] {
    fetch_model(*model, {.agreed = agreed});
    flags.model.found = *model;
    flags.model.model = model->path;
  });
}

}  // namespace

void add_bench(CLI::App& kt, Invocation& invocation) {
  CLI::App* verb = kt.add_subcommand("bench", "Tokens per second of a model, prefill and decode");
  const auto flags = std::make_shared<BenchFlags>();
  flags->model.add_to(*verb, invocation);
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
  verb->add_option("-n,--repeat,--iterations", flags->repeat, "The median of so many runs counts")
      ->excludes("--server")
      ->check(positive())
      ->capture_default_str();
  verb->add_flag("--parts", flags->parts, "Take a step apart: the time and the limit of each operation")
      ->excludes("--server");
  verb->add_option(
          "--routing", flags->routing,
          "Experts by uniform or zipf:S routing in place of those that the router chose, which still runs")
      ->excludes("--server")
      ->check(
          CLI::Validator([](const std::string& word) { return error_of_routing(word); }, "uniform|zipf:S"));
  verb->add_option("--plot", flags->plot, "Draw the figures into this file (SVG); the parts with --parts");
  verb->add_option(
          "-t,--type", flags->type,
          "inference: of the model; all: and of the parts of a step; moe, mla, linear, attention: of that "
          "kernel, as kt microbench")
      ->check(CLI::IsMember({"inference", "all", "moe", "mla", "linear", "attention"}))
      ->excludes("--server")
      ->capture_default_str();
  verb->add_option("-o,--output", flags->file, "Also write the figures to this file, as JSON")
      ->check(writable());
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "Examples:\n"
      "  kt bench ./demo/tiny-deepseekv3 --prompt 128,512 --batch 1,8\n"
      "  kt bench ./Qwen3-30B-A3B --prompt 1024 --batch 1 --parts --plot step.svg\n"
      "  kt bench ./Qwen3-30B-A3B --weights ./Qwen3-30B-A3B-int4 --plot speed.svg --json\n"
      "  kt bench -m demo -t all -n 5 -o figures.json\n"
      "  kt bench --server http://127.0.0.1:30000 --concurrency 1,8,64 --tokens 128 --plot load.svg");
  verb->callback([&invocation, flags, verb, model, prompt, tokens] {
    if (flags->server.url.empty() && model->empty() && flags->server.model.empty())
      throw CLI::RequiredError("MODEL or --server");
    if (flags->type == "all") flags->parts = true;
    if (flags->server.url.empty()) {
      if (!flags->server.model.empty()) take_by_flag(*flags, *verb, invocation);
      invocation.action = [flags] { run(*flags); };
      return;
    }
    if (prompt->empty()) flags->prompts = {512};
    if (tokens->empty()) flags->output = 128;
    invocation.action = [flags] {
      bench_server(flags->server, {flags->prompts, flags->output, flags->plot, flags->file, flags->json});
    };
  });
}

}  // namespace kt::inline cli
