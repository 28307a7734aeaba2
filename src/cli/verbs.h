// What main.cc and the verbs share: each verb adds itself to the command line and leaves an action to run.
#pragma once
#include <CLI/CLI.hpp>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/command_words.h"
#include "cli/next_step.h"

namespace kt::inline cli {

// Filled while the command line is parsed, read afterwards by main.
struct Invocation {
  Words words;  // from main: the arguments, saved ones in place of their name; also those that are not parsed
  std::vector<std::function<void()>>
      before;                    // run before the action, once the whole command line is known to be right
  std::function<void()> action;  // of the verb that was named; reports to standard output, throws on failure
  // What comes after it, where that depends on what it found; else the table of next_step.cc says.
  std::optional<NextStep> next;
  int status = 0;  // of the program, where the action ended early and has said so
};

void add_version(CLI::App& kt, Invocation& run);
void add_help(CLI::App& kt, Invocation& run);
void add_completion(CLI::App& kt, Invocation& run);
void add_doctor(CLI::App& kt, Invocation& run);
void add_microbench(CLI::App& kt, Invocation& run);
void add_quant(CLI::App& kt, Invocation& run);
void add_run(CLI::App& kt, Invocation& run);
void add_estimate(CLI::App& kt, Invocation& run);
void add_generate(CLI::App& kt, Invocation& run);
void add_chat(CLI::App& kt, Invocation& run);
void add_perplexity(CLI::App& kt, Invocation& run);
void add_bench(CLI::App& kt, Invocation& run);
void add_model(CLI::App& kt, Invocation& run);
void add_config(CLI::App& kt, Invocation& run);
void add_sft(CLI::App& kt, Invocation& run);
void add_microbench_roofline(CLI::App& microbench, Invocation& run);
void add_microbench_moe(CLI::App& microbench, Invocation& run);
void add_microbench_linear(CLI::App& microbench, Invocation& run);
void add_microbench_attention(CLI::App& microbench, Invocation& run);
void add_microbench_mla(CLI::App& microbench, Invocation& run);
void add_microbench_gptq(CLI::App& microbench, Invocation& run);
void add_microbench_gpu(CLI::App& microbench, Invocation& run);
void add_microbench_load(CLI::App& microbench, Invocation& run);

// Accepts numbers above zero; says what came otherwise.
CLI::Validator positive();
// Accepts numbers from least to most, so nothing that is no number.
CLI::Validator within(double least, double most);
// Sizes that flags take: above those of any model, and small enough that products of them fit 64 bits. What
// they need of memory is for who takes it to refuse.
constexpr double kMostWidth = 1 << 20, kMostExperts = 1 << 16, kMostTopK = 1 << 10, kMostHeads = 1 << 14,
                 kMostHeadWidth = 1 << 16, kMostLayers = 1 << 24, kMostTokens = 1 << 24,
                 kMostSequences = 1 << 16;

std::string version();  // "0.2.0" at a tag, "0.1.0+g3f2a9c1b0d" without one; see cmake/version.cmake

}  // namespace kt::inline cli
