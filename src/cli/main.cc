// The kt program: a row per verb, and how failures end. What a verb does is in its own file.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <new>

#include "base/error.h"
#include "base/log.h"
#include "base/mapped_faults.h"
#include "base/utf8.h"
#include "cli/chinese_words.h"
#include "cli/chosen_language.h"
#include "cli/first_page.h"
#include "cli/help/flag_words.h"
#include "cli/help/help_page.h"
#include "cli/next_step.h"
#include "cli/questions.h"
#include "cli/saved_runs.h"
#include "cli/verbs.h"
#include "terminal/language.h"
#include "terminal/terminal.h"

namespace {

using AddVerb = void (*)(CLI::App&, kt::Invocation&);
constexpr auto kVerbs = std::to_array<AddVerb>({
    kt::add_run,
    kt::add_chat,
    kt::add_generate,
    kt::add_model,
    kt::add_quant,
    kt::add_estimate,
    kt::add_bench,
    kt::add_microbench,
    kt::add_perplexity,
    kt::add_sft,
    kt::add_doctor,
    kt::add_config,
    kt::add_version,
    kt::add_help,
    kt::add_completion,
});

constexpr int kInterrupted = 130;

extern "C" void on_interrupt(int) {
  constexpr char kLine[] = "\nkt: interrupted\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kLine, sizeof kLine - 1);
  ::_exit(kInterrupted);
}

const char* kind_name(kt::ErrorKind kind) {
  switch (kind) {
    case kt::ErrorKind::kInput:
      return "input";
    case kt::ErrorKind::kMemory:
      return "memory";
    case kt::ErrorKind::kUnsupported:
      return "unsupported";
    case kt::ErrorKind::kInternal:
      return "internal";
  }
  return "unknown";
}

int report(kt::ErrorKind kind, std::string_view message, bool debug) {
  std::fflush(stdout);
  std::fprintf(stderr, "kt: %s\n", kt::message_line(message).c_str());
  if (debug) {
    std::fprintf(stderr, "kt: error kind %s, exit code %d, version %s\n", kind_name(kind),
                 static_cast<int>(kind), kt::version().c_str());
  }
  return static_cast<int>(kind);
}

// Programs that ask for JSON read English.
void choose_language(int argc, char** argv) {
  const auto is_json = [](const char* word) { return std::string_view(word) == "--json"; };
  if (kt::chosen_language() == kt::Language::kChinese && std::none_of(argv, argv + argc, is_json))
    kt::speak(kt::chinese_words());
}

// What was wrong with the command line, and the help to read.
std::string usage_error(CLI::App& app, const CLI::ParseError& error) {
  CLI::App* at = &app;
  std::string path = "kt", problem = error.what();
  while (!at->get_subcommands().empty()) {
    at = at->get_subcommands().front();
    path += " " + at->get_name();
  }
  // "--port: 1 required INT:INT in [0 - 65535] missing"
  if (const size_t at = problem.find(": 1 required "); at != problem.npos && problem.ends_with(" missing"))
    problem.replace(at, problem.npos, kt::tr_now(": expected a value behind it"));
  const std::vector<std::string> rest = app.remaining(true);
  if (dynamic_cast<const CLI::RequiredError*>(&error) && !rest.empty()) {
    std::string known;
    for (const CLI::App* verb : at->get_subcommands([](CLI::App*) { return true; }))
      known += (known.empty() ? "" : ", ") + verb->get_name();
    if (!known.empty()) problem = kt::text(kt::tr("unknown verb '{}': {} are known"), rest.front(), known);
    // One of that name may stand below another verb.
    const auto is_it = [&](const CLI::App* one) { return one->check_name(rest.front()); };
    for (const CLI::App* verb : at->get_subcommands([](CLI::App*) { return true; }))
      if (!verb->get_subcommands(is_it).empty())
        problem = kt::text(kt::tr("unknown verb '{}': there is {} {} {}"), rest.front(), path,
                           verb->get_name(), rest.front());
  }
  return kt::text(kt::tr("{}; see {} --help"), problem, path);
}

// The arguments; on a terminal a verb without any asks for them.
std::vector<std::string> words_of(CLI::App& app, int argc, char** argv) {
  const std::vector<std::string> words(argv + std::min(argc, 1), argv + argc);
  const auto is_named = [&](const CLI::App* verb) { return verb->get_name() == words[0]; };
  if (words.empty() || app.get_subcommands(is_named).empty() || !kt::can_ask()) return words;
  kt::Prompts prompts(stdin, stderr);
  return kt::with_answers(app, words, prompts);
}

// A verb that flushed by itself leaves the failure in the stream's state only.
int end_of_output() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout)) kt::fail("writing to standard output failed");
  return 0;
}

// Parses, then runs the verb. Help is text on standard output and success; a usage error names the help to
// read.
int parse_and_run(CLI::App& app, kt::Invocation& run, int argc, char** argv, const bool& debug) {
  if (argc <= 1) {
    if (kt::terminal_kind().interactive)
      kt::print_first_page();
    else
      std::fputs(app.help().c_str(), stdout);
    return end_of_output();
  }
  const std::vector<std::string> words = kt::respelt(app, kt::with_saved_run(app, words_of(app, argc, argv)));
  run.words = words;
  std::vector<std::string> parsed = words;
  kt::take_out_ignored(app, parsed);
  std::vector<std::string> reversed(parsed.rbegin(), parsed.rend());  // CLI11 takes them from the back
  try {
    app.parse(reversed);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::CallForAllHelp& help) {
    return app.exit(help);
  } catch (const CLI::CallForVersion& line) {
    return app.exit(line);
  } catch (const CLI::ParseError& error) {
    return report(kt::ErrorKind::kInput, usage_error(app, error), debug);
  }
  if (debug) kt::set_log_level(kt::LogLevel::kDebug);
  for (const auto& step : run.before) step();
  run.action();
  if (const auto broken = kt::first_broken_mapping()) kt::fail("{}", *broken);
  if (run.status != 0) return end_of_output(), run.status;
  kt::print_next(run.next ? *run.next : kt::next_step(app, words));
  return end_of_output();
}

}  // namespace

// NOLINTNEXTLINE(bugprone-exception-escape): flags that do not fit each other end the program, whatever it was asked
int main(int argc, char** argv) {
  std::signal(SIGINT, on_interrupt);
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit is an error of write(), reported like a full disk
  CLI::App app{"KT runs Mixture-of-Experts language models whose experts live in CPU memory.", "kt"};
  bool debug = false;
  app.add_flag("--debug", debug, "Log everything; say more about an error");
  app.set_version_flag(
      "--version", [] { return "kt " + kt::version(); }, "Print the version; kt version says more");
  app.require_subcommand(1);
  app.fallthrough();
  app.formatter(kt::help_formatter());
  kt::Invocation run;
  for (const AddVerb add : kVerbs) add(app, run);
  // Last: a verb that is added takes over what the program has, and the program's examples are none of its own.
  app.footer(
      "Examples:\n"
      "  kt chat demo                                  talk to the small model that comes with kt\n"
      "  kt run Qwen/Qwen3-30B-A3B                     serve a model: OpenAI's API and a web page\n"
      "  kt generate demo -p 'Once upon a time'        one completion, for scripts\n"
      "  kt quant ./model                              convert a checkpoint's experts for the CPU\n"
      "  kt doctor                                     is this machine ready, and what would make it "
      "faster\n\n"
      "Exit codes: 0 done, 2 bad input, 3 not enough memory or disk, 4 unsupported hardware, 5 internal "
      "error,\n"
      "130 interrupted.");
  try {
    choose_language(argc, argv);
    return parse_and_run(app, run, argc, argv, debug);
  } catch (const kt::Error& error) {
    // Where a file that was read has lost its end, anything else that is wrong comes of that.
    const auto broken = kt::first_broken_mapping();
    const std::string message =
        broken && !std::string_view(error.what()).starts_with(*broken) ? *broken : error.what();
    return report(broken ? kt::ErrorKind::kInput : error.kind(), kt::with_flags(message, app), debug);
  } catch (const kt::PromptEnded&) {
    std::fprintf(stderr, "kt: interrupted\n");
    return kInterrupted;
  } catch (const std::bad_alloc&) {
    return report(kt::ErrorKind::kMemory,
                  kt::tr_now("out of memory; try fewer threads, or --max-memory with kt quant"), debug);
  } catch (const std::exception& error) {
    return report(kt::ErrorKind::kInternal, error.what(), debug);
  }
}
