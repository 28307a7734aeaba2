#include "cli/questions.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <span>
#include <thread>

#include "base/error.h"
#include "cli/help/command_tree.h"
#include "cli/quant/quantise.h"
#include "cli/registry/registry.h"
#include "cli/settings.h"
#include "terminal/language.h"

namespace kt::inline cli {
namespace {

namespace fs = std::filesystem;

using Answers = std::map<std::string, std::string, std::less<>>;  // by the option's name

enum class Ask : uint8_t {
  kOption,  // what the option's own checks accept: one of its choices, a number, a text
  kModel,   // a name from the registry, or a path
  kNamed,   // a registered name
  kFile,    // one that exists
  kFolder,  // one that exists
  kNew,     // a path to be written
  kKey,     // a setting's name
  kAgree,   // a flag without a value; "no" ends it all
};

struct Question {
  std::string_view option;  // of the verb: "MODEL", "--output"
  Ask ask = Ask::kOption;
  bool needed = false;                                // also where the option may be left out
  std::string (*standard)(const Answers&) = nullptr;  // in place of the option's own default
  bool (*asked)(const Answers&) = nullptr;  // whether the question comes at all; without one, always
};

// A verb with questions; without any it lets choose among its verbs.
struct Verb {
  std::string_view path;  // "quant gpu"
  std::span<const Question> questions = {};
};

std::string output_name(const Answers& answers, const std::string& suffix) {
  const auto model = answers.find("MODEL");
  if (model == answers.end()) return "";
  const auto found = try_find_model(model->second);
  return default_output(found ? found->path : model->second, suffix);
}

std::string cpu_output(const Answers& answers) { return output_name(answers, answers.at("--method")); }
std::string gpu_output(const Answers& answers) { return output_name(answers, answers.at("--type")); }

std::string this_many_threads(const Answers&) {
  return std::to_string(std::max(1u, std::thread::hardware_concurrency()));
}

std::string usual_port(const Answers&) { return std::to_string(load_settings().integer("server.port")); }

std::string usual_models(const Answers&) {
  const char* home = std::getenv("HOME");
  const std::string folder = home ? std::string(home) + "/models" : "";
  std::error_code ignored;
  return !folder.empty() && fs::is_directory(folder, ignored) ? folder : "";
}

bool is_calibrated(const Answers& answers) { return answers.at("--method") == "GPTQ"; }

bool config_exists(const Answers&) {
  std::error_code ignored;
  return fs::exists(settings_path(), ignored);
}

constexpr Question kModelQuestion{.option = "MODEL", .ask = Ask::kModel};
constexpr Question kQuant[] = {
    kModelQuestion,
    {.option = "--method"},
    {.option = "--output", .ask = Ask::kNew, .standard = cpu_output},
};
constexpr Question kQuantGpu[] = {
    kModelQuestion,
    {.option = "--method"},
    {.option = "--type"},
    {.option = "--dataset", .asked = is_calibrated},
    {.option = "--output", .ask = Ask::kNew, .standard = gpu_output},
};
constexpr Question kGenerate[] = {
    kModelQuestion, {.option = "--prompt", .needed = true}, {.option = "--max-tokens"}};
constexpr Question kPerplexity[] = {
    kModelQuestion, {.option = "--file", .ask = Ask::kFile}, {.option = "--format"}};
constexpr Question kBench[] = {kModelQuestion, {.option = "--prompt"}, {.option = "--batch"}};
constexpr Question kEstimate[] = {kModelQuestion, {.option = "--context"}, {.option = "--format"}};
constexpr Question kTrain[] = {{.option = "FILE", .ask = Ask::kFile}};
constexpr Question kRun[] = {kModelQuestion, {.option = "--port", .standard = usual_port}};
constexpr Question kModelAdd[] = {
    {.option = "NAME"}, {.option = "PATH", .ask = Ask::kModel}, {.option = "--weights"}, {.option = "--gpu"}};
constexpr Question kNamed[] = {{.option = "NAME", .ask = Ask::kNamed}};
constexpr Question kAnyModel[] = {kModelQuestion};
constexpr Question kFolder[] = {{.option = "PATH", .ask = Ask::kFolder}};
constexpr Question kOldFolder[] = {{.option = "PATH"}};
constexpr Question kKey[] = {{.option = "KEY", .ask = Ask::kKey}};
constexpr Question kKeyValue[] = {kKey[0], {.option = "VALUE"}};
constexpr Question kInit[] = {
    {.option = "--yes", .ask = Ask::kAgree, .asked = config_exists},
    {.option = "--model-path", .ask = Ask::kFolder, .standard = usual_models},
    {.option = "--port", .standard = usual_port},
    {.option = "--cpu-threads", .standard = this_many_threads},
};

constexpr auto kVerbs = std::to_array<Verb>({
    {"quant", kQuant},
    {"quant gpu", kQuantGpu},
    {"generate", kGenerate},
    {"perplexity", kPerplexity},
    {"bench", kBench},
    {"estimate", kEstimate},
    {"run", kRun},
    {"sft"},
    {"sft train", kTrain},
    {"sft eval", kTrain},
    {"model"},
    {"model add", kModelAdd},
    {"model info", kAnyModel},
    {"model verify", kAnyModel},
    {"model remove", kNamed},
    {"model path-add", kFolder},
    {"model path-remove", kOldFolder},
    {"config"},
    {"config get", kKey},
    {"config set", kKeyValue},
    {"config reset", kKey},
    {"config init", kInit},
});

// An option as it is asked for.
struct Asked {
  std::string question;
  std::vector<Prompts::Choice>
      choices;  // with what the description says of each: "GPTQ: calibrated with text; RTN: ..."
  std::string standard;
  bool optional = false;  // an empty answer leaves the option out
};

std::string_view bare_name(std::string_view option) { return option.substr(option.find_first_not_of('-')); }

Asked asked_of(const OptionInfo& info, const Question& question, const Answers& answers) {
  Asked out;
  out.standard = question.standard ? question.standard(answers) : info.preset;
  for (const std::string& choice : info.choices) out.choices.push_back({choice});
  for (const std::string& clause : clauses(info.description)) {
    const auto choice = std::ranges::find_if(
        out.choices, [&](const Prompts::Choice& one) { return clause.starts_with(one.word + ": "); });
    if (choice != out.choices.end())
      choice->help = tr_now(clause.substr(choice->word.size() + 2));
    else if (out.standard.empty() || !clause.starts_with("default: "))  // it stands behind the question
      out.question += (out.question.empty() ? "" : tr_now("; ")) + tr_now(clause);
  }
  if (out.question.empty()) out.question = tr_now(bare_name(question.option));
  out.optional = !info.required && !question.needed && out.standard.empty();
  if (out.optional) out.question += tr_now(" (may be left empty)");
  return out;
}

int index_of(const std::vector<Prompts::Choice>& choices, std::string_view word) {
  const auto at = std::ranges::find(choices, word, &Prompts::Choice::word);
  return at == choices.end() ? -1 : static_cast<int>(at - choices.begin());
}

// "~/models" as a shell takes it.
std::string expanded(const std::string& path) {
  const char* home = std::getenv("HOME");
  return home && path.starts_with("~/") ? home + path.substr(1) : path;
}

// What is wrong with a model's name or path; "" if nothing.
std::string model_problem(const std::string& answer) {
  try {
    const auto located = locate_model(expanded(answer));
    if (located && located->absent) return "";  // offered for download, which is another question
    const std::string path = resolve_model(expanded(answer));
    std::error_code ignored;
    return fs::exists(path, ignored) ? "" : text(tr("{}: no such file or folder"), path);
  } catch (const Error& error) {
    return error.what();
  }
}

std::string ask_model(Prompts& prompts) {
  std::vector<Prompts::Choice> names;
  if (const std::string usual = load_settings().text("run.model"); !usual.empty())
    names.push_back({usual, tr_now("run.model of kt config")});
  names.push_back({std::string(kDemoName), tr_now("comes with kt")});
  for (const ModelEntry& entry : registered_models()) names.push_back({entry.name, entry.path});
  return expanded(prompts.ask_choice({.question = tr_now("Model: a number or name of these, or a path"),
                                      .choices = std::move(names),
                                      .standard = 0,
                                      .free = true,
                                      .problem = model_problem}));
}

std::string ask_named(Prompts& prompts, std::string_view question) {
  std::vector<Prompts::Choice> names;
  for (const ModelEntry& entry : registered_models()) names.push_back({entry.name, entry.path});
  if (names.empty()) fail(tr("no model is registered yet: kt model add NAME PATH"));
  return prompts.ask_choice({.question = std::string(question), .choices = std::move(names)});
}

std::string ask_key(Prompts& prompts, std::string_view question) {
  std::vector<Prompts::Choice> keys;
  for (const Setting& setting : known_settings())
    keys.push_back({std::string(setting.name), tr_now(setting.help)});
  return prompts.ask_choice({.question = std::string(question), .choices = std::move(keys)});
}

std::string path_problem(Ask ask, const std::string& given) {
  const std::string answer = expanded(given);
  std::error_code ignored;
  const bool folder = fs::is_directory(answer, ignored), there = fs::exists(answer, ignored);
  if (ask == Ask::kNew)
    return there && !fs::is_empty(answer, ignored) ? tr_now("that exists; choose another") : "";
  if (ask == Ask::kFolder) return folder ? "" : tr_now("no such folder");
  return there && !folder ? "" : tr_now("no such file");
}

// The parser's own "Value 70000 not in range [0 - 65535]" in our words; other checks have them.
std::string validator_message(const std::string& problem, const std::string& answer) {
  constexpr std::string_view kRange = " not in range ";
  const size_t at = problem.find(kRange);
  if (at == problem.npos) return problem;
  return text(tr("expected a number of {}, got '{}'"), problem.substr(at + kRange.size()), answer);
}

// What the option's own checks say of an answer; empty: nothing.
std::string option_problem(CLI::Option& option, const OptionInfo& info, const std::string& answer) {
  const char delimiter = option.get_delimiter();
  for (std::string piece : delimiter ? CLI::detail::split(answer, delimiter) : std::vector{answer}) {
    double number = 0;
    int64_t whole = 0;
    if ((info.value == "INT" || info.value == "UINT") && !CLI::detail::lexical_cast(piece, whole))
      return text(tr("expected a whole number, got '{}'"), piece);
    if (info.value == "FLOAT" && !CLI::detail::lexical_cast(piece, number))
      return text(tr("expected a number, got '{}'"), piece);
    try {
      for (int i = 0;; ++i)
        if (std::string problem = (*option.get_validator(i))(piece); !problem.empty())
          return validator_message(problem, piece);
    } catch (const CLI::OptionNotFound&) {  // there are no more
    }
  }
  return "";
}

std::string ask_option(Prompts& prompts, CLI::Option& option, const OptionInfo& info, const Asked& asked) {
  if (!asked.choices.empty())
    return prompts.ask_choice({.question = asked.question,
                               .choices = asked.choices,
                               .standard = index_of(asked.choices, asked.standard)});
  const std::string answer = prompts.ask_text(
      {.question = asked.question,
       .standard = asked.standard,
       .optional = asked.optional,
       .problem = [&](const std::string& given) { return option_problem(option, info, given); }});
  return info.completes == Completes::kNothing ? answer : expanded(answer);
}

std::string ask_one(Prompts& prompts, CLI::Option& option, const Question& question, const Answers& answers) {
  const OptionInfo info = describe_option(option);
  const Asked asked = asked_of(info, question, answers);
  switch (question.ask) {
    case Ask::kOption:
      return ask_option(prompts, option, info, asked);
    case Ask::kModel:
      return ask_model(prompts);
    case Ask::kNamed:
      return ask_named(prompts, asked.question);
    case Ask::kFile:
    case Ask::kFolder:
    case Ask::kNew:
      return prompts.ask_text(
          {.question = asked.question,
           .standard = asked.standard,
           .optional = asked.optional,
           .problem = [&](const std::string& answer) { return path_problem(question.ask, answer); }});
    case Ask::kKey:
      return ask_key(prompts, asked.question);
    case Ask::kAgree:
      if (!prompts.ask_yes(tr_now(info.description), false)) fail(tr("nothing was changed"));
      return "yes";
  }
  return "";
}

std::string joined(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : " ") + word;
  return out;
}

const Verb* verb_asked(const std::vector<std::string>& words) {
  const auto at = std::ranges::find(kVerbs, joined(words), &Verb::path);
  return at == kVerbs.end() ? nullptr : &*at;
}

std::string ask_verb(Prompts& prompts, const CLI::App& app) {
  std::vector<Prompts::Choice> choices;
  for (const CommandInfo& verb : describe_command(app, "").verbs)
    choices.push_back({verb.name, tr_now(verb.description)});
  return prompts.ask_choice({.question = tr_now("What"), .choices = std::move(choices)});
}

void append_answer(std::vector<std::string>& words, const Question& question, const std::string& answer) {
  if (answer.empty()) return;
  if (question.ask == Ask::kAgree) {
    words.emplace_back(question.option);
  } else if (!question.option.starts_with('-')) {
    words.push_back(answer);
  } else if (answer.starts_with('-')) {  // by itself it would be read as another flag
    words.push_back(text("{}={}", question.option, answer));
  } else {
    words.emplace_back(question.option);
    words.push_back(answer);
  }
}

}  // namespace

bool can_ask() { return ::isatty(STDIN_FILENO) && ::isatty(STDERR_FILENO); }

std::vector<std::string> with_answers(CLI::App& app, const std::vector<std::string>& words,
                                      Prompts& prompts) {
  std::vector<std::string> out = words;
  const Verb* verb = verb_asked(out);
  if (!verb) return out;
  prompts.say(text(tr("kt {}; Ctrl-D ends"), verb->path));
  if (verb->questions.empty()) {
    out.push_back(ask_verb(prompts, find_verb(app, out)));
    verb = verb_asked(out);
  }
  CLI::App& asked = find_verb(app, out);
  Answers answers;
  for (const Question& question : verb ? verb->questions : std::span<const Question>()) {
    if (question.asked && !question.asked(answers)) continue;
    CLI::Option& option = *asked.get_option(std::string(question.option));
    const std::string answer = ask_one(prompts, option, question, answers);
    answers.emplace(question.option, answer);
    append_answer(out, question, answer);
  }
  prompts.say("$ " + command_line(out));
  return out;
}

std::vector<std::string> asked_phrases(CLI::App& app) {
  std::vector<std::string> out;
  for (const Setting& setting : known_settings()) out.emplace_back(setting.help);
  for (const Verb& verb : kVerbs) {
    CLI::App& at = find_verb(app, CLI::detail::split(std::string(verb.path), ' '));
    if (verb.questions.empty())
      for (const CommandInfo& below : describe_command(at, "").verbs) out.push_back(below.description);
    for (const Question& question : verb.questions) {
      if (question.ask == Ask::kModel) continue;  // words of its own
      const OptionInfo info = describe_option(*at.get_option(std::string(question.option)));
      const size_t before = out.size();
      bool named = false;
      for (const std::string& clause : clauses(info.description)) {
        const auto choice = std::ranges::find_if(
            info.choices, [&](const std::string& one) { return clause.starts_with(one + ": "); });
        if (clause.starts_with("default: ") && !info.preset.empty()) continue;
        named = named || choice == info.choices.end();
        out.push_back(choice == info.choices.end() ? clause : clause.substr(choice->size() + 2));
      }
      if (out.size() == before || !named) out.emplace_back(bare_name(question.option));
    }
  }
  return out;
}

std::string command_line(const std::vector<std::string>& words) {
  std::string out = "kt";
  for (const std::string& word : words) {
    const bool plain = !word.empty() && std::ranges::all_of(word, [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
             std::string_view("-_./=,:+@%").find(c) != std::string_view::npos;
    });
    out += ' ';
    if (plain) {
      out += word;
      continue;
    }
    out += '\'';
    for (const char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
    out += '\'';
  }
  return out;
}

}  // namespace kt::inline cli
