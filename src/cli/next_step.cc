#include "cli/next_step.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>

#include "base/error.h"
#include "cli/questions.h"
#include "cli/registry/registry.h"
#include "terminal/language.h"

namespace kt::inline cli {
namespace {

// Words of a command: "{--output}" is the option's value, "[--format]" the option with its value where it was given,
// and a row whose option has none does not count. Of several rows of a verb the first that counts is taken.
struct NextRow {
  std::string_view verb, command;
  NextLine line = NextLine::kReport;
  std::string_view unless = {},
                   only = {};  // options: with the first, or without the second, the row does not count
};

constexpr NextLine kBeside = NextLine::kTerminal;

constexpr auto kNext = std::to_array<NextRow>({
    {"quant", "run {--output}", NextLine::kReport, "--resume-layer"},
    {"quant gpu", "run {--output}"},
    {"quant merge", "run {--output}", NextLine::kReport, "", "--original-path"},
    {"quant merge", "model verify {--output}"},
    {"quant compare", "model verify {B}", kBeside},
    {"quant dequant", "run {--output}", NextLine::kReport, "--files"},
    {"quant dequant", "quant compare {MODEL} {--output}"},
    {"quant dataset", "quant gpu MODEL -o OUT --dataset {NAME}", kBeside},
    {"estimate", "run {MODEL} [--weights] [--format] [--linear-format] [--rules] [--rule-devices]"},
    {"run",
     "run {MODEL} [--weights] [--format] [--linear-format] [--rules] [--rule-devices]"},  // after --dry-run
    {"run", "run --model {--model-path} [--weights] [--format] [--linear-format] [--rules] [--rule-devices]"},
    {"bench", "run {MODEL} [--weights] [--format] [--linear-format] [--rules] [--rule-devices]"},
    {"bench", "chat --url {--server}"},
    {"bench", "run {--model} [--weights] [--format] [--linear-format] [--rules] [--rule-devices]"},
    {"perplexity", "run {MODEL} [--weights] [--format] [--linear-format] [--rules] [--rule-devices]",
     kBeside},
    {"generate", "chat {MODEL} [--weights] [--format] [--linear-format] [--rules] [--rule-devices]", kBeside},
    {"chat", "run {MODEL} [--weights] [--format] [--linear-format] [--rules] [--rule-devices]", kBeside},
    {"microbench roofline", "microbench moe"},
    {"microbench moe", "bench demo"},
    {"microbench linear", "microbench moe"},
    {"microbench attention", "bench demo"},
    {"microbench mla", "bench demo"},
    {"microbench gptq", "bench demo"},
    {"microbench gpu", "bench demo --gpu"},
    {"microbench load", "run {PATH}"},
    {"sft train", "sft train {FILE}", NextLine::kReport, "", "--dry-run"},
    {"sft eval", "sft eval {FILE}", kBeside, "", "--dry-run"},
    {"sft eval", "sft chat {FILE}", kBeside, "--predictions"},
    {"sft eval", "sft eval demo/sft.yaml val_size=0.05 --dry-run", kBeside},
    {"sft chat", "sft chat {FILE}", kBeside},  // after --dry-run
    {"sft api", "sft api {FILE}", kBeside},
    {"sft export", "sft train demo/sft.yaml --dry-run", kBeside},
    {"sft keys", "sft train demo/sft.yaml --dry-run", kBeside},
    {"doctor", "chat demo"},
    {"version", "doctor", kBeside},
    {"model list", "run demo", kBeside, "--names"},
    {"model add", "run {NAME}"},
    {"model download", "model list", kBeside},
    {"model edit", "model info {NAME}"},
    {"model link", "model list"},
    {"model unlink", "model list"},
    {"model link-cpu", "run {MODEL}"},
    {"model unlink-cpu", "model list"},
    {"model refresh", "model list", kBeside},
    {"model verify-all", "model list", kBeside},
    {"model auto-repo", "model list", kBeside},
    {"model clear-cache", "model list", kBeside},
    {"model info", "estimate {MODEL}", kBeside},
    {"model verify", "run {MODEL}"},
    {"model remove", "model list"},
    {"model path-add", "model scan --add"},
    {"model path-list", "model scan", kBeside},
    {"model path-remove", "model path-list", kBeside},
    {"config show", "config set KEY VALUE", kBeside},
    {"config get", "config set {KEY} VALUE", kBeside},
    {"config set", "config show", kBeside},
    {"config reset", "config show", kBeside},
    {"config init", "run demo"},
    {"config path", "config show", kBeside},
});
// What `kt model scan` says depends on what it found; the others print what shells read.
constexpr auto kWithout = std::to_array<std::string_view>({"model scan", "help", "completion"});

// The parsed verb, and its words.
const CLI::App& parsed_verb(const CLI::App& app, std::string& path) {
  const CLI::App* at = &app;
  while (!at->get_subcommands().empty()) {
    at = at->get_subcommands().front();
    path += (path.empty() ? "" : " ") + at->get_name();
  }
  return *at;
}

std::string value_of(const CLI::App& verb, std::string_view option) {
  const CLI::Option* const found = verb.get_option_no_throw(std::string(option));
  return found && found->count() > 0 ? found->results().front() : std::string();
}

bool is_given(const CLI::App& verb, std::string_view option) {
  const CLI::Option* const found = verb.get_option_no_throw(std::string(option));
  return found && found->count() > 0;
}

// A registered name became its path while it was read.
std::string as_typed(const std::string& value, const std::vector<std::string>& typed) {
  if (std::ranges::find(typed, value) != typed.end()) return value;
  for (const std::string& word : typed) {
    if (word.starts_with('-')) continue;
    try {
      if (const auto found = try_find_model(word); found && found->path == value) return word;
    } catch (const Error&) {  // no name after all
    }
  }
  return value;
}

std::optional<std::string> filled(const NextRow& row, const CLI::App& verb,
                                  const std::vector<std::string>& typed) {
  std::vector<std::string> words;
  for (size_t at = 0; at < row.command.size();) {
    const size_t end = std::min(row.command.find(' ', at), row.command.size());
    const std::string_view word = row.command.substr(at, end - at);
    at = end + 1;
    const bool must = word.starts_with('{'), may = word.starts_with('[');
    if (!must && !may) {
      words.emplace_back(word);
      continue;
    }
    const std::string_view option = word.substr(1, word.size() - 2);
    const std::string value = value_of(verb, option);
    if (value.empty() && must) return std::nullopt;
    if (value.empty()) continue;
    if (may) words.emplace_back(option);
    words.push_back(must ? as_typed(value, typed) : value);
  }
  return command_line(words);
}

}  // namespace

bool has_next_step(std::string_view verb) {
  return std::ranges::find(kNext, verb, &NextRow::verb) != kNext.end() ||
         std::ranges::find(kWithout, verb) != kWithout.end();
}

NextStep next_step(const CLI::App& app, const std::vector<std::string>& typed) {
  std::string path;
  const CLI::App& verb = parsed_verb(app, path);
  if (is_given(verb, "--json")) return {};
  if (path == "run" && !is_given(verb, "--dry-run")) return {};  // it named kt chat when it was ready
  for (const NextRow& row : kNext) {
    if (row.verb != path || (!row.unless.empty() && is_given(verb, row.unless))) continue;
    if (!row.only.empty() && !is_given(verb, row.only)) continue;
    if (const auto command = filled(row, verb, typed)) return {.line = row.line, .command = *command};
  }
  return {};
}

void print_next(const NextStep& step) {
  if (step.command.empty() || step.line == NextLine::kNone) return;
  std::fflush(stdout);
  const bool beside = step.line == NextLine::kTerminal;
  if (beside && (::isatty(STDOUT_FILENO) != 1 || ::isatty(STDERR_FILENO) != 1)) return;
  std::fprintf(beside ? stderr : stdout, "%s\n", text(tr("next: {}"), step.command).c_str());
}

}  // namespace kt::inline cli
