#include "cli/quant/conversion_report.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "terminal/amounts.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

constexpr double kSecondsBetweenLines = 5;

std::string rate(const ConversionProgress& at) {
  return at.seconds > 0
             ? text("  {} GB/s", fixed(static_cast<double>(at.source_bytes) / at.seconds * 1e-9, 2))
             : "";
}

// Nothing before there is something to go by: the first pieces say little.
std::string remaining(const ConversionProgress& at) {
  constexpr double kLeastSeconds = 1;
  if (at.source_bytes == 0 || at.seconds < kLeastSeconds) return "";
  const double left = static_cast<double>(at.source_total - at.source_bytes);
  return "  ETA " + duration(at.seconds * left / static_cast<double>(at.source_bytes));
}

double done(const ConversionProgress& at) {
  if (at.check_total > 0) return static_cast<double>(at.checked_bytes) / static_cast<double>(at.check_total);
  return at.source_total == 0 ? 1
                              : static_cast<double>(at.source_bytes) / static_cast<double>(at.source_total);
}

std::string bar(double fraction) {
  constexpr int kWidth = 24;
  const int full = static_cast<int>(fraction * kWidth);
  return "[" + std::string(static_cast<size_t>(full), '#') +
         std::string(static_cast<size_t>(kWidth - full), '.') + "]";
}

const WeightError total(const PieceReport& report) {
  WeightError sum = report.gate;
  sum.add(report.up);
  sum.add(report.down);
  return sum;
}

}  // namespace

std::string progress_text(const ConversionProgress& at) {
  if (at.check_total > 0)
    return text("reading finished files again: {} of {}", human_bytes(at.checked_bytes),
                human_bytes(at.check_total));
  return text("{}  {} of {} files{}{}", percent(done(at)), at.shards_done, at.shards, rate(at),
              remaining(at));
}

std::function<void(const ConversionProgress&)> show_progress(bool quiet) {
  if (quiet) return {};
  if (::isatty(STDERR_FILENO)) {
    const auto line = std::make_shared<StatusLine>();
    return [line](const ConversionProgress& at) { line->show(bar(done(at)) + " " + progress_text(at)); };
  }
  const auto last = std::make_shared<double>(0);
  return [last](const ConversionProgress& at) {
    if (at.seconds - *last < kSecondsBetweenLines) return;
    *last = at.seconds;
    std::fprintf(stderr, "%s\n", progress_text(at).c_str());
  };
}

void print_conversion(const ConversionPlan& plan, const ConversionResult& result) {
  const bool outputs = !result.layers.empty() && result.layers.front().report.output.weights > 0;
  std::vector<std::string> heads = {"layer", "gate", "up", "down"};
  if (outputs) heads.push_back("expert output");
  Table table(heads, 0);
  WeightError all, all_outputs;
  for (const LayerQuality& layer : result.layers) {
    const PieceReport& report = layer.report;
    std::vector<std::string> row = {std::to_string(layer.layer), percent(report.gate.relative()),
                                    percent(report.up.relative()), percent(report.down.relative())};
    if (outputs) row.push_back(percent(report.output.relative()));
    table.add(row);
    all.add(total(report));
    all_outputs.add(report.output);
  }
  if (all.weights > 0) {
    std::printf("relative error (root mean square) of the rounded weights\n\n%s\n", table.str().c_str());
    std::printf("all layers: %s, largest single error %s\n", percent(all.relative()).c_str(),
                three_digits(all.largest).c_str());
  }
  if (outputs) std::printf("expert outputs on random inputs: %s\n", percent(all_outputs.relative()).c_str());
  const auto shown = [](double seconds) {
    return seconds < 10 ? fixed(seconds, 1) + "s" : duration(seconds);
  };
  const double pieces = std::max(result.seconds - result.prepare_seconds, 1e-9);
  std::printf("%s: read %s, wrote %s in %s (%s%s GB/s of source, %s)\n", plan.output.c_str(),
              human_bytes(result.source_bytes).c_str(), human_bytes(result.written_bytes).c_str(),
              shown(result.seconds).c_str(),
              plan.prepare && result.prepare_seconds > 0.05
                  ? ("calibration " + shown(result.prepare_seconds) + "; ").c_str()
                  : "",
              fixed(static_cast<double>(result.source_bytes) / pieces * 1e-9, 2).c_str(),
              counted(result.threads, "thread").c_str());
  if (result.shards_kept)
    std::printf("kept %s of an earlier run\n",
                counted(static_cast<int64_t>(result.shards_kept), "file").c_str());
  if (result.shards_skipped)
    std::printf("not complete: %s below --resume-layer are absent; kt quant ... --resume writes them\n",
                counted(static_cast<int64_t>(result.shards_skipped), "layer").c_str());
}

nlohmann::ordered_json conversion_json(const ConversionPlan& plan, const ConversionResult& result) {
  nlohmann::ordered_json out = {{"output", plan.output},
                                {"seconds", result.seconds},
                                {"threads", result.threads},
                                {"source_bytes", result.source_bytes},
                                {"written_bytes", result.written_bytes},
                                {"shards_written", result.shards_written},
                                {"shards_kept", result.shards_kept},
                                {"shards_skipped", result.shards_skipped}};
  WeightError all;
  auto layers = nlohmann::ordered_json::array();
  for (const LayerQuality& layer : result.layers) {
    const PieceReport& report = layer.report;
    nlohmann::ordered_json row = {{"layer", layer.layer},
                                  {"file", layer.file},
                                  {"gate", report.gate.relative()},
                                  {"up", report.up.relative()},
                                  {"down", report.down.relative()}};
    if (report.output.weights > 0) row["output"] = report.output.relative();
    layers.push_back(std::move(row));
    all.add(total(report));
  }
  out["relative_error"] = all.relative();
  out["largest_error"] = all.largest;
  out["layers"] = std::move(layers);
  return out;
}

}  // namespace kt::inline cli
