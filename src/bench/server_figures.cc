#include "bench/server_figures.h"

#include <algorithm>

#include "base/text.h"
#include "bench/measure.h"
#include "terminal/report.h"

namespace kt::inline bench {
namespace {

using OrderedJson = nlohmann::ordered_json;
using Stretch = std::pair<double, double>;

// Seconds covered by at least one of them.
double covered(std::vector<Stretch> stretches) {
  std::ranges::sort(stretches);
  double sum = 0, until = 0;
  for (const auto& [begin, end] : stretches) {
    sum += std::max(0.0, end - std::max(begin, until));
    until = std::max(until, end);
  }
  return sum;
}

std::string ms(double seconds) { return three_digits(1000 * seconds); }

OrderedJson json_of(const Percentiles& at) {
  return {{"p50", 1000 * at.p50}, {"p90", 1000 * at.p90}, {"p95", 1000 * at.p95}, {"p99", 1000 * at.p99}};
}

void add_point(Chart& chart, const std::string& name, double x, double y) {
  auto at = std::ranges::find(chart.series, name, &Series::name);
  if (at == chart.series.end()) at = chart.series.insert(at, {name, {}});
  at->points.emplace_back(x, y);
}

}  // namespace

Percentiles percentiles_of(const std::vector<double>& values) {
  return {quantile(values, 0.5), quantile(values, 0.9), quantile(values, 0.95), quantile(values, 0.99)};
}

ErrorFigures figures_of(const ProbeResult& probes, int asked) {
  return {.asked = asked,
          .answered = static_cast<int>(probes.seconds.size()),
          .first_byte = percentiles_of(probes.seconds),
          .failures = probes.failures,
          .streams_failed = probes.streams_failed};
}

LevelFigures figures_of(const StreamsResult& result, int streams, int prompt) {
  LevelFigures level{.streams = streams, .prompt = prompt};
  level.window = result.end - result.start;
  level.client_cpu = result.cpu_seconds;
  std::vector<double> first, per_token, request;
  std::vector<Stretch> decoding;
  int64_t decoded = 0;
  for (const StreamOutcome& at : result.requests) {
    if (!at.failure.empty()) {
      ++level.failed;
      ++level.failures[at.failure];
      continue;
    }
    ++level.ok;
    level.counted &= at.counted;
    level.output_tokens += at.tokens;
    level.prompt_tokens += at.counted ? at.prompt_tokens : prompt;
    level.longest_gap = std::max(level.longest_gap, at.longest_gap);
    first.push_back(at.first - at.start);
    request.push_back(at.end - at.start);
    if (at.tokens < 2) continue;
    per_token.push_back((at.last - at.first) / static_cast<double>(at.tokens - 1));
    decoding.emplace_back(at.first, at.last);
    decoded += at.tokens - 1;
  }
  level.first_token = percentiles_of(first);
  level.per_token = percentiles_of(per_token);
  level.request = percentiles_of(request);
  if (level.window > 0) {
    level.output_rate = static_cast<double>(level.output_tokens) / level.window;
    level.total_rate = static_cast<double>(level.output_tokens + level.prompt_tokens) / level.window;
  }
  if (const double time = covered(std::move(decoding)); time > 0)
    level.decode_rate = static_cast<double>(decoded) / time;
  return level;
}

std::string table_of(const std::vector<LevelFigures>& levels) {
  Table table({"streams", "prompt", "ok", "failed", "TTFT ms p50", "p90", "p99", "TPOT ms p50", "p90", "p99",
               "longest gap ms", "request s p50", "output tokens/s", "decode", "total", "client CPU s"},
              0);
  std::string below;
  for (const LevelFigures& at : levels) {
    const double prompts = at.ok ? static_cast<double>(at.prompt_tokens) / at.ok : at.prompt;
    table.add({std::to_string(at.streams), fixed(prompts, 0), std::to_string(at.ok),
               std::to_string(at.failed), ms(at.first_token.p50), ms(at.first_token.p90),
               ms(at.first_token.p99), ms(at.per_token.p50), ms(at.per_token.p90), ms(at.per_token.p99),
               ms(at.longest_gap), three_digits(at.request.p50), three_digits(at.output_rate),
               three_digits(at.decode_rate), three_digits(at.total_rate), three_digits(at.client_cpu)});
    const std::string where = text("{}, prompts of {}", counted(at.streams, "stream"), at.prompt);
    for (const auto& [kind, n] : at.failures) below += text("{}: {} x {}\n", where, n, kind);
    if (!at.errors) continue;
    const ErrorFigures& errors = *at.errors;
    below += text("{}: first byte of an error in ms: p50 {}, p95 {}, p99 {} over {} of {} replies\n", where,
                  ms(errors.first_byte.p50), ms(errors.first_byte.p95), ms(errors.first_byte.p99),
                  errors.answered, errors.asked);
    for (const auto& [kind, n] : errors.failures) below += text("{}: errors: {} x {}\n", where, n, kind);
    if (errors.streams_failed)
      below += text("{}: {} failed beside the errors\n", where, counted(errors.streams_failed, "stream"));
  }
  if (!std::ranges::all_of(levels, &LevelFigures::counted))
    below += "the server gives no usage: tokens are pieces of text, prompts as long as asked\n";
  return table.str() + below;
}

OrderedJson json_of(const LevelFigures& at) {
  OrderedJson out = {{"concurrency", at.streams},
                     {"prompt", at.prompt},
                     {"requests", at.ok + at.failed},
                     {"ok", at.ok},
                     {"failed", at.failed},
                     {"failures", at.failures},
                     {"ttft_ms", json_of(at.first_token)},
                     {"tpot_ms", json_of(at.per_token)},
                     {"request_ms", json_of(at.request)},
                     {"inter_token_max_ms", 1000 * at.longest_gap},
                     {"prompt_tokens", at.prompt_tokens},
                     {"output_tokens", at.output_tokens},
                     {"tokens_from", at.counted ? "usage" : "pieces"},
                     {"window_s", at.window},
                     {"output_tokens_per_s", at.output_rate},
                     {"decode_tokens_per_s", at.decode_rate},
                     {"total_tokens_per_s", at.total_rate},
                     {"client_cpu_s", at.client_cpu}};
  if (at.errors)
    out["errors"] = {{"asked", at.errors->asked},
                     {"answered", at.errors->answered},
                     {"failures", at.errors->failures},
                     {"streams_failed", at.errors->streams_failed},
                     {"first_byte_ms", json_of(at.errors->first_byte)}};
  return out;
}

std::vector<Chart> charts_of(const std::vector<LevelFigures>& levels) {
  Chart rate{"Throughput", "streams", "tokens/s", true, {}},
      first{"Time to first token", "streams", "ms", true, {}},
      per_token{"Time per token after it", "streams", "ms", true, {}};
  for (const LevelFigures& at : levels) {
    if (at.ok == 0) continue;
    const std::string after = text("after {}", at.prompt);
    add_point(rate, text("output, {}", after), at.streams, at.output_rate);
    add_point(first, text("p50, {}", after), at.streams, 1000 * at.first_token.p50);
    add_point(first, text("p99, {}", after), at.streams, 1000 * at.first_token.p99);
    add_point(per_token, text("p50, {}", after), at.streams, 1000 * at.per_token.p50);
    add_point(per_token, text("p99, {}", after), at.streams, 1000 * at.per_token.p99);
  }
  return {rate, first, per_token};
}

}  // namespace kt::inline bench
