#include "cli/bench/moe_training.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <optional>

#include "base/memory.h"
#include "base/text.h"
#include "bench/limit_report.h"
#include "bench/train_bench.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

constexpr double kMostRank = 4096;

// One training call and what the figures mean together. The limit of forward and backward is the sum of theirs.
struct TrainRow {
  std::string format;
  int tokens = 0, rank = 0, layers = 0;
  double rows_per_expert = 0;
  size_t packed_bytes = 0, resident_above = 0;  // of all layers; of what this process has beside them
  TrainFigures figures;

  static double on_top(const LimitFigures& f, const LimitFigures& of) { return f.seconds / of.seconds - 1; }
  struct Together {
    double seconds = 0, limit_seconds = 0;
    double fraction() const { return limit_seconds / seconds; }
  };
  static Together together(const LimitFigures& a, const LimitFigures& b) {
    return {a.seconds + b.seconds, a.limit_seconds + b.limit_seconds};
  }
  Together both() const { return together(figures.training, figures.backward); }
  Together again() const { return together(figures.lora, *figures.recomputing); }
};

nlohmann::ordered_json json_of_call(const LimitFigures& f) {
  nlohmann::ordered_json out;
  out["us"] = f.seconds * 1e6;
  out["us_best"] = f.best_seconds * 1e6;
  out["tflops"] = f.operations / f.seconds / 1e12;
  put_limit(out, f);
  put_windows(out, f);
  return out;
}

nlohmann::ordered_json json_of_both(const TrainRow::Together& both, const LimitFigures& plain) {
  return {{"us", both.seconds * 1e6},
          {"limit_us", both.limit_seconds * 1e6},
          {"fraction_of_limit", both.fraction()},
          {"of_plain_forward", both.fraction() / plain.fraction}};
}

nlohmann::ordered_json json_of(const TrainRow& row, const TrainRun& run) {
  const TrainFigures& f = row.figures;
  nlohmann::ordered_json out;
  out["format"] = row.format;
  out["isa"] = run.setup.kernels->name;
  out["arithmetic"] = product_name(f.forward.product);
  out["tokens"] = row.tokens;
  out["rank"] = row.rank;
  out["experts"] = run.setup.shape.experts;
  out["hidden"] = run.setup.shape.hidden;
  out["inter"] = run.setup.shape.inter;
  out["top_k"] = run.setup.top_k;
  out["layers"] = row.layers;
  out["threads"] = run.setup.pool->threads();
  out["shards"] = run.setup.pool->nodes();
  out["routing"] = run.routing == Routing::kZipf ? "zipf" : "uniform";
  out["experts_hit"] = f.experts_hit;
  out["rows_per_expert"] = row.rows_per_expert;
  out["stored_bytes"] = f.forward.bytes;
  out["forward"] = json_of_call(f.forward);
  out["forward_keeping"] = json_of_call(f.keeping);
  out["forward_lora"] = json_of_call(f.lora);
  out["forward_training"] = json_of_call(f.training);
  out["backward"] = json_of_call(f.backward);
  out["keeping_on_top"] = TrainRow::on_top(f.keeping, f.forward);
  out["lora_on_top"] = TrainRow::on_top(f.lora, f.forward);
  out["training_on_top"] = TrainRow::on_top(f.training, f.forward);
  out["backward_over_forward"] = f.backward.seconds / f.forward.seconds;
  out["forward_backward"] = json_of_both(row.both(), f.forward);
  if (f.recomputing) {
    out["backward_recomputing"] = json_of_call(*f.recomputing);
    out["recomputing_over_forward"] = f.recomputing->seconds / f.forward.seconds;
    out["forward_backward_recomputing"] = json_of_both(row.again(), f.forward);
  }
  out["memory"] = {{"packed_bytes", row.packed_bytes},
                   {"kept_bytes", f.kept_bytes},
                   {"lora_bytes", f.lora_bytes},
                   {"workspace_bytes", f.workspace_bytes},
                   {"workspace_planned_bytes", f.planned_bytes},
                   {"rotating_bytes", f.rotating_bytes},
                   {"resident_above_packed_bytes", row.resident_above}};
  return out;
}

void print_training_heads(const TrainFlags& flags, const TrainRun& run) {
  std::printf("%d experts, hidden %d, inter %d, top-%d; %s, %s, %s; training in %s\n\n",
              run.setup.shape.experts, run.setup.shape.hidden, run.setup.shape.inter, run.setup.top_k,
              run.setup.kernels->name, counted(run.setup.pool->threads(), "thread").c_str(),
              counted(run.setup.pool->nodes(), "shard").c_str(),
              product_name(training_product(*run.setup.kernels, run.setup.precision)));
  std::printf("%-13s %6s %5s %5s %10s %8s %7s %7s %11s %8s %9s %10s %8s %8s", "format", "tokens", "rows",
              "rank", "forward us", "of limit", "keeping", "LoRA", "backward us", "of limit", "x forward",
              "both us", "of limit", "of plain");
  if (flags.recompute) std::printf(" %11s %8s", "again us", "of limit");
  std::printf("  kept, workspace\n");
}

std::string signed_share(double on_top) { return (on_top < 0 ? "-" : "+") + percent(std::abs(on_top)); }

void print_training(const TrainRow& row) {
  const TrainFigures& f = row.figures;
  std::printf(
      "%-13s %6d %5.0f %5d %10.0f %8s %7s %7s %11.0f %8s %8.2fx %10.0f %8s %7.2fx", row.format.c_str(),
      row.tokens, row.rows_per_expert, row.rank, f.forward.seconds * 1e6, percent(f.forward.fraction).c_str(),
      signed_share(TrainRow::on_top(f.keeping, f.forward)).c_str(),
      signed_share(TrainRow::on_top(f.lora, f.forward)).c_str(), f.backward.seconds * 1e6,
      percent(f.backward.fraction).c_str(), f.backward.seconds / f.forward.seconds, row.both().seconds * 1e6,
      percent(row.both().fraction()).c_str(), row.both().fraction() / f.forward.fraction);
  if (f.recomputing)
    std::printf(" %11.0f %8s", row.again().seconds * 1e6, percent(row.again().fraction()).c_str());
  std::printf("  %s, %s%s\n", human_bytes(f.kept_bytes).c_str(), human_bytes(f.workspace_bytes).c_str(),
              remark(f.backward).c_str());
  std::fflush(stdout);
}

// Every row beside the plain forward of bf16 weights in the same run, where that was measured.
void compare_with_bf16(const std::vector<TrainRow>& rows, nlohmann::ordered_json& json, bool shown) {
  std::map<int, double> plain;  // by tokens
  for (const TrainRow& row : rows)
    if (row.format == "bf16") plain.emplace(row.tokens, row.figures.forward.fraction);
  bool headed = false;
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto found = plain.find(rows[i].tokens);
    if (found == plain.end()) continue;
    const double share = rows[i].both().fraction() / found->second;
    json[i]["forward_backward"]["of_bf16_forward"] = share;
    if (!shown) continue;
    if (!headed)
      std::printf("\nForward and backward beside the plain forward of bf16, both of their limits:\n");
    headed = true;
    std::printf("%-13s %6d tokens, rank %d: %.2fx\n", rows[i].format.c_str(), rows[i].tokens, rows[i].rank,
                share);
  }
}

}  // namespace

void TrainFlags::add_to(CLI::App& verb) {
  CLI::Option* const train =
      verb.add_flag("--train", on, "Training calls: forward, what keeping and LoRA add to it, and backward");
  verb.add_option("--rank", ranks, "Rank of LoRA on gate, up and down; a list measures each")
      ->delimiter(',')
      ->check(within(1, kMostRank))
      ->needs(train)
      ->capture_default_str();
  verb.add_flag("--recompute", recompute, "Also backwards of forwards that kept nothing")->needs(train);
}

void run_training(const TrainFlags& flags, const TrainRun& run) {
  for (const int rank : flags.ranks) check_factors(run.setup.shape, rank);
  if (!run.measure.json) print_training_heads(flags, run);
  Reader reader(run.setup.pool, *run.setup.kernels, read_buffer_bytes());
  std::vector<TrainRow> rows;
  auto json = nlohmann::ordered_json::array();
  for (const NamedFormat& format : run.formats) {
    std::optional<StatusLine> status(std::in_place);
    status->show(text("packing {}", format.name));
    const uint64_t before = own_memory();
    const MoeModel model(run.setup, format.format);
    for (const int tokens : run.tokens)
      for (const int rank : flags.ranks) {
        if (!status) status.emplace();
        status->show(text("{}, {} tokens, rank {}", format.name, tokens, rank));
        const TrainSetup setup{
            .tokens = tokens, .rank = rank, .routing = run.routing, .recompute = flags.recompute};
        TrainRow row{.format = std::string(format.name),
                     .tokens = tokens,
                     .rank = rank,
                     .layers = model.layers(),
                     .packed_bytes = model.bytes(),
                     .figures = measure_training(model, reader, setup, run.measure.time)};
        row.rows_per_expert = tokens * run.setup.top_k / std::max(row.figures.experts_hit, 1.0);
        const uint64_t known = before + model.bytes();
        row.resident_above =
            row.figures.resident_bytes - std::min<uint64_t>(row.figures.resident_bytes, known);
        status.reset();
        json.push_back(json_of(row, run));
        if (!run.measure.json) print_training(row);
        rows.push_back(std::move(row));
      }
  }
  compare_with_bf16(rows, json, !run.measure.json);
  run.measure.report(json);
}

}  // namespace kt::inline cli
