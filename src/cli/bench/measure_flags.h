// Flags that the kernel benchmarks share: how long to measure, and where the figures go.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/limit_bench.h"
#include "cli/verbs.h"

namespace kt::inline cli {

struct MeasureFlags {
  MeasureFor time{.seconds = 2};
  std::string output;  // a file for the JSON; "": none
  bool json = false;   // on standard output, in place of the table

  void add_to(CLI::App& verb);
  // One object, or an array when there are several rows: to the file, and to standard output with --json.
  void report(const nlohmann::ordered_json& rows) const;
};

// --batch-size and --seq-len of layers that know only rows: so many sequences of so many tokens in one call, in place
// of what `tokens`, which must be an option of the verb, says.
class BatchFlags {
 public:
  void add_to(CLI::App& verb, CLI::Option* tokens);
  void apply(std::vector<int>& tokens) const;

 private:
  int batch_ = 0, length_ = 0;  // 0: not given
};

// A path for a file of figures or a picture, as a check of its option: its folder must be there, before anything is
// measured.
CLI::Validator writable();

// Writes a file whole or not at all. A link's file is replaced, not the link; a pipe or a device is written into.
void write_out(const std::string& path, const std::string& content);
void write_figures(const std::string& path, const nlohmann::ordered_json& figures);

}  // namespace kt::inline cli
