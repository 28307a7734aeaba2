#include "cli/questions.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <span>
#include <thread>

#include "base/error.h"
#include "cli/registry/registry.h"
#include "cli/settings.h"

namespace kt {
namespace {

namespace fs = std::filesystem;

using Answers = std::map<std::string, std::string, std::less<>>;  // by the question's id

enum class Ask : uint8_t {
  kText,
  kOptional,     // text that may be left out; then its flag is left out as well
  kMaybeFolder,  // one that exists, or nothing
  kModel,        // a name from the registry, or a path
  kNamed,        // a registered name
  kFile,         // one that exists
  kFolder,       // one that exists
  kNew,          // a path to be written
  kChoice,
  kKey,  // a setting's name
  kNumber,
  kConfirm,  // a flag without a value; "no" ends it all
};

struct Question {
  std::string_view id;  // for defaults of later questions
  Ask ask = Ask::kText;
  std::string_view flag;  // "" for an argument without one
  std::string_view words;
  std::string_view standard = {};  // as typed; for a choice, one of its words
  std::string_view choices = {};   // "a|b|c"
  int64_t least = 0, most = 0;
  std::string (*made)(const Answers&) = nullptr;  // a default that depends on the machine or on answers
  bool (*asked)(const Answers&) = nullptr;        // whether the question comes at all; without one, always
};

// A verb that chooses among sub-verbs, or one with questions.
struct Verb {
  std::string_view path;  // "quant gpu"
  std::span<const Question> questions = {};
  std::string_view menu = {};  // "list: what it does|..."; then the questions of what was chosen
};

std::string output_name(const Answers& answers, const std::string& suffix) {
  const auto model = answers.find("model");
  if (model == answers.end()) return "";
  std::string name = model->second;
  if (const auto found = try_find_model(name)) name = found->path;
  while (name.size() > 1 && name.ends_with('/')) name.pop_back();
  name = fs::path(name).filename().string();
  if (name.ends_with(".gguf")) name.resize(name.size() - 5);
  return "./" + name + "-" + suffix;
}

std::string cpu_output(const Answers& answers) { return output_name(answers, answers.at("method")); }
std::string gpu_output(const Answers& answers) { return output_name(answers, answers.at("type")); }

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

bool config_exists(const Answers&) {
  std::error_code ignored;
  return fs::exists(settings_path(), ignored);
}

constexpr Question kModelQuestion{.id = "model", .ask = Ask::kModel, .words = "Model"};

constexpr Question kQuant[] = {
    kModelQuestion,
    {.id = "method",
     .ask = Ask::kChoice,
     .flag = "--method",
     .words = "Method",
     .standard = "int4",
     .choices = "int4: half the size, a little less exact|int8: close to the original"},
    {.id = "output", .ask = Ask::kNew, .flag = "--output", .words = "Folder to write", .made = cpu_output},
};
constexpr Question kQuantGpu[] = {
    kModelQuestion,
    {.id = "method",
     .ask = Ask::kChoice,
     .flag = "--method",
     .words = "Method",
     .standard = "RTN",
     .choices = "RTN: round to nearest"},
    {.id = "type",
     .ask = Ask::kChoice,
     .flag = "--type",
     .words = "Bits of weights and activations",
     .standard = "W4A16",
     .choices = "W4A16|W8A16"},
    {.id = "output", .ask = Ask::kNew, .flag = "--output", .words = "Folder to write", .made = gpu_output},
};
constexpr Question kGenerate[] = {
    kModelQuestion,
    {.id = "prompt", .flag = "--prompt", .words = "Prompt"},
    {.id = "tokens",
     .ask = Ask::kNumber,
     .flag = "--max-tokens",
     .words = "Tokens to generate at most",
     .standard = "128",
     .least = 1,
     .most = 1 << 20},
};
constexpr Question kPerplexity[] = {
    kModelQuestion,
    {.id = "file", .ask = Ask::kFile, .flag = "--file", .words = "File with the text"},
    {.id = "format",
     .ask = Ask::kOptional,
     .flag = "--format",
     .words = "Round the experts to a format (empty: as stored)"},
};
constexpr Question kBench[] = {
    kModelQuestion,
    {.id = "prompt", .flag = "--prompt", .words = "Prompt lengths, in tokens", .standard = "128,512"},
    {.id = "batch", .flag = "--batch", .words = "Sequences at once", .standard = "1,4"},
};
constexpr Question kEstimate[] = {
    kModelQuestion,
    {.id = "context",
     .ask = Ask::kOptional,
     .flag = "--context",
     .words = "Tokens of a request (empty: 4096, or the model's)"},
    {.id = "format",
     .ask = Ask::kOptional,
     .flag = "--format",
     .words = "Round the experts to a format (empty: as stored)"},
};
constexpr Question kRun[] = {
    kModelQuestion,
    {.id = "port",
     .ask = Ask::kNumber,
     .flag = "--port",
     .words = "Port",
     .least = 0,
     .most = 65535,
     .made = usual_port},
};
constexpr Question kModelAdd[] = {
    {.id = "name", .words = "Name"},
    {.id = "path", .ask = Ask::kModel, .words = "Folder or .gguf file"},
    {.id = "weights", .ask = Ask::kOptional, .flag = "--weights", .words = "CPU weights of it (empty: none)"},
    {.id = "gpu", .ask = Ask::kOptional, .flag = "--gpu", .words = "GPU weights of it (empty: none)"},
};
constexpr Question kNamed[] = {{.id = "model", .ask = Ask::kNamed, .words = "Name"}};
constexpr Question kAnyModel[] = {kModelQuestion};
constexpr Question kFolder[] = {{.id = "path", .ask = Ask::kFolder, .words = "Folder"}};
constexpr Question kOldFolder[] = {{.id = "path", .words = "Folder, as kt model path-list has it"}};
constexpr Question kKey[] = {{.id = "key", .ask = Ask::kKey, .words = "Key"}};
constexpr Question kKeyValue[] = {kKey[0], {.id = "value", .words = "Value"}};
constexpr Question kInit[] = {
    {.id = "yes",
     .ask = Ask::kConfirm,
     .flag = "--yes",
     .words = "There is a config.yaml; write it anew",
     .standard = "no",
     .asked = config_exists},
    {.id = "path",
     .ask = Ask::kMaybeFolder,
     .flag = "--model-path",
     .words = "Folder with your models (empty: none)",
     .made = usual_models},
    {.id = "port",
     .ask = Ask::kNumber,
     .flag = "--port",
     .words = "Port of kt run",
     .standard = "30000",
     .least = 0,
     .most = 65535},
    {.id = "threads",
     .ask = Ask::kNumber,
     .flag = "--cpu-threads",
     .words = "Threads",
     .least = 0,
     .most = 65536,
     .made = this_many_threads},
};

constexpr auto kVerbs = std::to_array<Verb>({
    {.path = "quant", .questions = kQuant},
    {.path = "quant gpu", .questions = kQuantGpu},
    {.path = "generate", .questions = kGenerate},
    {.path = "perplexity", .questions = kPerplexity},
    {.path = "bench", .questions = kBench},
    {.path = "estimate", .questions = kEstimate},
    {.path = "run", .questions = kRun},
    {.path = "model",
     .menu = "list: the models that have names|scan: find models below the folders of path-list|add: give a "
             "model a "
             "name|info: what is known about a model|verify: check that a model is whole|remove: forget a "
             "name; no file is deleted|path-add: add a folder for scan|path-list: those folders|path-remove: "
             "take one off"},
    {.path = "model add", .questions = kModelAdd},
    {.path = "model info", .questions = kAnyModel},
    {.path = "model verify", .questions = kAnyModel},
    {.path = "model remove", .questions = kNamed},
    {.path = "model path-add", .questions = kFolder},
    {.path = "model path-remove", .questions = kOldFolder},
    {.path = "config",
     .menu =
         "show: all keys and values|get: one value|set: change one|reset: forget one|path: where the file "
         "is|init: write a first one"},
    {.path = "config get", .questions = kKey},
    {.path = "config set", .questions = kKeyValue},
    {.path = "config reset", .questions = kKey},
    {.path = "config init", .questions = kInit},
});

std::vector<Prompts::Choice> choices_of(std::string_view list) {
  std::vector<Prompts::Choice> out;
  while (!list.empty()) {
    const std::string_view one = list.substr(0, list.find('|'));
    list.remove_prefix(std::min(one.size() + 1, list.size()));
    const size_t colon = one.find(": ");
    const bool helped = colon != one.npos;
    out.push_back({std::string(one.substr(0, colon)), std::string(helped ? one.substr(colon + 2) : "")});
  }
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
    const std::string path = resolve_model(expanded(answer));
    std::error_code ignored;
    return fs::exists(path, ignored) ? "" : path + ": no such file or folder";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string ask_model(Prompts& prompts, std::string_view words) {
  std::vector<Prompts::Choice> names;
  if (const std::string usual = load_settings().text("run.model"); !usual.empty())
    names.push_back({usual, "run.model of kt config"});
  names.push_back({std::string(kDemoName), "comes with kt"});
  for (const ModelEntry& entry : registered_models()) names.push_back({entry.name, entry.path});
  return expanded(prompts.ask_choice({.question = text("{}: a number or name of these, or a path", words),
                                      .choices = std::move(names),
                                      .standard = 0,
                                      .free = true,
                                      .problem = model_problem}));
}

std::string ask_named(Prompts& prompts, std::string_view words) {
  std::vector<Prompts::Choice> names;
  for (const ModelEntry& entry : registered_models()) names.push_back({entry.name, entry.path});
  if (names.empty()) fail("no model is registered yet: kt model add NAME PATH");
  return prompts.ask_choice({.question = std::string(words), .choices = std::move(names)});
}

std::string ask_key(Prompts& prompts, std::string_view words) {
  std::vector<Prompts::Choice> keys;
  for (const Setting& setting : known_settings())
    keys.push_back({std::string(setting.name), std::string(setting.help)});
  return prompts.ask_choice({.question = std::string(words), .choices = std::move(keys)});
}

std::string path_problem(Ask ask, const std::string& given) {
  const std::string answer = expanded(given);
  std::error_code ignored;
  const bool folder = fs::is_directory(answer, ignored), there = fs::exists(answer, ignored);
  if (ask == Ask::kNew) return there && !fs::is_empty(answer, ignored) ? "that exists; choose another" : "";
  if (ask == Ask::kFolder || ask == Ask::kMaybeFolder) return folder ? "" : "no such folder";
  return there && !folder ? "" : "no such file";
}

std::string ask_one(Prompts& prompts, const Question& question, const Answers& answers) {
  const std::string standard = question.made ? question.made(answers) : std::string(question.standard);
  const Prompts::Text asked{.question = std::string(question.words), .standard = standard};
  switch (question.ask) {
    case Ask::kText:
      return prompts.ask_text(asked);
    case Ask::kOptional:
      return expanded(prompts.ask_text({.question = asked.question, .standard = standard, .optional = true}));
    case Ask::kModel:
      return ask_model(prompts, question.words);
    case Ask::kNamed:
      return ask_named(prompts, question.words);
    case Ask::kFile:
    case Ask::kFolder:
    case Ask::kMaybeFolder:
    case Ask::kNew:
      return prompts.ask_text(
          {.question = asked.question,
           .standard = standard,
           .optional = question.ask == Ask::kMaybeFolder,
           .problem = [&](const std::string& answer) { return path_problem(question.ask, answer); }});
    case Ask::kChoice: {
      const auto choices = choices_of(question.choices);
      return prompts.ask_choice(
          {.question = asked.question, .choices = choices, .standard = index_of(choices, standard)});
    }
    case Ask::kKey:
      return ask_key(prompts, question.words);
    case Ask::kNumber:
      return std::to_string(
          prompts.ask_number(question.words, std::stoll(standard), question.least, question.most));
    case Ask::kConfirm:
      if (!prompts.ask_yes(question.words, standard == "yes")) fail("nothing was changed");
      return "yes";
  }
  return "";
}

std::string joined(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : " ") + word;
  return out;
}

const Verb* find_verb(const std::vector<std::string>& words) {
  const auto at = std::ranges::find(kVerbs, joined(words), &Verb::path);
  return at == kVerbs.end() ? nullptr : &*at;
}

void append_answer(std::vector<std::string>& words, const Question& question, const std::string& answer) {
  if (answer.empty()) return;
  if (question.ask == Ask::kConfirm) {
    words.emplace_back(question.flag);
  } else if (question.flag.empty()) {
    words.push_back(answer);
  } else if (answer.starts_with('-')) {  // by itself it would be read as another flag
    words.push_back(text("{}={}", question.flag, answer));
  } else {
    words.emplace_back(question.flag);
    words.push_back(answer);
  }
}

}  // namespace

bool can_ask() { return ::isatty(STDIN_FILENO) && ::isatty(STDERR_FILENO); }

std::vector<std::string> with_answers(const std::vector<std::string>& words, Prompts& prompts) {
  std::vector<std::string> out = words;
  const Verb* verb = find_verb(out);
  if (!verb) return out;
  prompts.say(text("kt {}; Ctrl-D ends", verb->path));
  if (!verb->menu.empty()) {
    out.push_back(prompts.ask_choice({.question = "What", .choices = choices_of(verb->menu)}));
    verb = find_verb(out);
  }
  Answers answers;
  for (const Question& question : verb ? verb->questions : std::span<const Question>()) {
    if (question.asked && !question.asked(answers)) continue;
    const std::string answer = ask_one(prompts, question, answers);
    answers.emplace(question.id, answer);
    append_answer(out, question, answer);
  }
  prompts.say("$ " + command_line(out));
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

}  // namespace kt
