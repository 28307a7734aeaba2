#include "cli/bench/measure_flags.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/file.h"

namespace kt::inline cli {

namespace fs = std::filesystem;

void MeasureFlags::add_to(CLI::App& verb) {
  CLI::Option* const seconds = verb.add_option("--seconds", time.seconds, "Time to measure each row for")
                                   ->check(positive())
                                   ->capture_default_str();
  verb.add_option("-n,--iterations", time.iterations, "Calls to measure each row for, instead of a time")
      ->check(within(1, kMostTokens))
      ->excludes(seconds);
  verb.add_option("-w,--warmup", time.warmup, "Calls before the first that counts")
      ->check(within(1, kMostTokens))
      ->capture_default_str();
  verb.add_option("-o,--output", output, "Also write the figures to this file, as JSON")->check(writable());
  verb.add_flag("--json", json, "Print JSON: one object, or an array when several rows were asked for");
}

void MeasureFlags::report(const nlohmann::ordered_json& rows) const {
  const nlohmann::ordered_json& figures = rows.size() == 1 ? rows[0] : rows;
  if (!output.empty()) write_figures(output, figures);
  if (json) std::printf("%s\n", figures.dump(2).c_str());
}

void BatchFlags::add_to(CLI::App& verb, CLI::Option* tokens) {
  verb.add_option("-b,--batch-size", batch_, "Sequences of a call, of --seq-len tokens each")
      ->check(within(1, kMostSequences))
      ->excludes(tokens);
  verb.add_option("-s,--seq-len", length_, "Tokens of each sequence; default: 1")
      ->check(within(1, kMostTokens))
      ->excludes(tokens);
}

void BatchFlags::apply(std::vector<int>& tokens) const {
  if (batch_ == 0 && length_ == 0) return;
  const int64_t rows = int64_t{std::max(batch_, 1)} * std::max(length_, 1);
  if (rows > static_cast<int64_t>(kMostTokens))
    fail("--batch-size {} x --seq-len {}: expected at most {} tokens in a call", batch_, length_,
         static_cast<int64_t>(kMostTokens));
  tokens = {static_cast<int>(rows)};
}

CLI::Validator writable() {
  return {[](std::string& path) -> std::string {
            std::error_code ignored;
            if (path.empty()) return "expected a file's name, found none";
            if (fs::is_directory(path, ignored)) return text("{} is a folder", path);
            const fs::path folder = fs::path(path).parent_path();
            if (!folder.empty() && !fs::is_directory(folder, ignored))
              return text("there is no folder {}", folder.string());
            return "";
          },
          "FILE"};
}

void write_out(const std::string& path, const std::string& content) {
  std::error_code ignored;
  const fs::file_status at = fs::status(path, ignored);
  if (!fs::exists(at) || fs::is_regular_file(at)) {
    const fs::path whole = fs::is_symlink(path, ignored) ? fs::weakly_canonical(path, ignored) : fs::path();
    return write_atomically(whole.empty() ? path : whole.string(), content);
  }
  std::ofstream file(path, std::ios::app);
  if (!(file << content << std::flush)) fail("{}: cannot be written to", path);
}

void write_figures(const std::string& path, const nlohmann::ordered_json& figures) {
  write_out(path, figures.dump(2) + "\n");
}

}  // namespace kt::inline cli
