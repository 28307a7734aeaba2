// The figures of one level of load, out of the outcomes of its requests; as a table, as JSON, as charts.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/plot.h"
#include "bench/server_load.h"

namespace kt::inline bench {

// Exact: out of all values, sorted.
struct Percentiles {
  double p50 = 0, p90 = 0, p95 = 0, p99 = 0;
};
Percentiles percentiles_of(const std::vector<double>& values);

struct ErrorFigures {
  int asked = 0, answered = 0;
  Percentiles first_byte;  // seconds
  std::map<std::string, int> failures;
  int streams_failed = 0;
};
ErrorFigures figures_of(const ProbeResult& probes, int asked);

// Seconds and tokens per second. Only requests that were answered to the end count, but for `failures`.
struct LevelFigures {
  int streams = 0, prompt = 0;  // at a time; tokens asked for
  int ok = 0, failed = 0;
  std::map<std::string, int> failures;  // by kind
  Percentiles first_token, per_token, request;
  double longest_gap = 0;
  int64_t prompt_tokens = 0, output_tokens = 0;
  double window = 0;  // from the first request's start to the last one's end
  double output_rate = 0, total_rate = 0;
  // Tokens after the first of each request, over the time in which any stream was between its first and its
  // last: what to hold against an engine's own decode rate.
  double decode_rate = 0;
  double client_cpu = 0;
  bool counted =
      true;  // the server gave the numbers of tokens; else pieces were counted and prompts taken as asked
  std::optional<ErrorFigures> errors = {};
};
LevelFigures figures_of(const StreamsResult& result, int streams, int prompt);

std::string table_of(const std::vector<LevelFigures>& levels);  // with lines for failures and errors below
nlohmann::ordered_json json_of(const LevelFigures& level);
std::vector<Chart> charts_of(const std::vector<LevelFigures>& levels);

}  // namespace kt::inline bench
