// Load for a server that speaks OpenAI's API: so many streams at a time, from one thread and one epoll loop,
// each piece timed as it is read. The generator shares the cores with the server it measures, so it does
// little for each event and says what it cost.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "http/client.h"

namespace kt::inline bench {

struct LoadTarget {
  HttpUrl url;
  std::string path;                            // appended to the URL's: "/v1/completions"
  std::string api_key = {};                    // sent as a bearer token; empty: none
  double timeout = 600;                        // seconds that one request may take
  std::shared_ptr<const TlsTrust> trust = {};  // for https; empty: the system's
};

// One streamed request. Times are seconds of the steady clock; `start` is before connecting or sending.
struct StreamOutcome {
  std::string failure = {};                        // what kind; empty: answered to the end
  double start = 0, first = 0, last = 0, end = 0;  // first and last piece of the answer; the whole reply
  double longest_gap = 0;                          // between two pieces
  int64_t prompt_tokens = 0, tokens = 0;           // as the server counted them
  int64_t pieces = 0;                              // events with text
  bool counted = false;  // the server said how many tokens; else `tokens` is `pieces`
};

struct StreamsResult {
  std::vector<StreamOutcome> requests;
  double start = 0, end = 0;
  double cpu_seconds = 0;  // of this process, from start to end
};

// The JSON body of the next request; nullopt: no more.
using NextBody = std::function<std::optional<std::string>()>;

// Sends all that `next` gives, `streams` at a time; a stream's connection is kept for its next request.
// Failures are outcomes. Error(kInput) if the host's name has no address, Error(kUnsupported) for https in a build
// without TLS.
StreamsResult run_streams(const LoadTarget& target, int streams, const NextBody& next);

struct ProbeResult {
  std::vector<double> seconds;          // from before connecting to the first byte of the reply
  std::map<std::string, int> failures;  // of the probes, by kind
  int streams_failed = 0;
};

// While `streams` streams run, sends `count` bodies that are not JSON, one after the other with a few
// milliseconds between, each over a connection of its own. Begins when every stream has had its first byte. A
// stream that fails is not begun again; when none is left, the probes end early.
ProbeResult probe_errors(const LoadTarget& target, int streams, const NextBody& next, int count);

}  // namespace kt::inline bench
