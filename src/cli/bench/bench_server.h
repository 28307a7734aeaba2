// kt bench --server: a running server under so many streams at once.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cli/verbs.h"

namespace kt::inline cli {

struct ServerBenchFlags {
  std::string url;  // empty: not asked for
  std::string api = "completions", api_key, model, ca_file;
  std::vector<int> concurrency = {1, 4, 16, 64};
  int requests = 0, shared_prefix = 0, warmup = 2, errors = 0;
  uint64_t seed = 1;
  double timeout = 600;
  void add_to(CLI::App& verb);
};

// What it shares with a bench of a model.
struct ServerBenchCase {
  std::vector<int> prompts;
  int tokens = 0;
  std::string plot, file;  // file: of the JSON
  bool json = false;
};

// Reports to standard output. Error(kInput) if the server cannot be asked, or every request failed.
void bench_server(const ServerBenchFlags& flags, const ServerBenchCase& at);

}  // namespace kt::inline cli
