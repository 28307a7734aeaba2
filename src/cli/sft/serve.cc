// kt sft chat, kt sft api: a recipe's model and adapter in the native engine. They become the words of kt chat and kt
// run, which are shown, and this program again.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "cli/questions.h"
#include "cli/sft/recipe_model.h"
#include "cli/sft/sft.h"

namespace kt::inline cli {
namespace {

struct ServeFlags {
  std::string file;
  std::vector<std::string> changes;
  bool dry_run = false;
};

std::string number_text(const Recipe& recipe, const char* key) { return recipe.value(key).dump(); }

// What both verbs take of a recipe.
std::vector<std::string> model_words(const Recipe& recipe) {
  const RecipeModel found = recipe_model(recipe);
  std::vector<std::string> out = {found.model};
  const auto add = [&](const char* flag, const std::string& value) {
    if (!value.empty()) out.insert(out.end(), {flag, value});
  };
  add("--adapter", found.adapter);
  add("--weights", found.weights);
  add("--threads", found.threads > 0 ? std::to_string(found.threads) : "");
  add("--chunked-prefill-size", found.step_tokens > 0 ? std::to_string(found.step_tokens) : "");
  add("--rules", found.rules);
  return out;
}

[[noreturn]] void become(const std::vector<std::string>& words) {
  std::fprintf(stderr, "$ %s\n", command_line(words).c_str());
  std::fflush(nullptr);
  std::string program = "kt";
  std::vector<std::string> own = words;
  std::vector<char*> list = {program.data()};
  for (std::string& word : own) list.push_back(word.data());
  list.push_back(nullptr);
  ::execv("/proc/self/exe", list.data());
  fail_as(ErrorKind::kInternal, "kt could not start itself: {}", std::strerror(errno));
}

void run_or_show(const std::vector<std::string>& words, const ServeFlags& flags) {
  if (!flags.dry_run) become(words);
  std::printf("%s\n", command_line(words).c_str());
}

void chat(const ServeFlags& flags) {
  const Recipe recipe(flags.file, flags.changes);
  std::vector<std::string> words = {"chat"};
  const std::vector<std::string> model = model_words(recipe);
  words.insert(words.end(), model.begin(), model.end());
  constexpr std::pair<const char*, const char*> kSampling[] = {{"temperature", "--temperature"},
                                                               {"top_p", "--top-p"},
                                                               {"top_k", "--top-k"},
                                                               {"max_new_tokens", "--max-tokens"}};
  const bool greedy = recipe.given("do_sample") && !recipe.flag("do_sample");
  if (greedy) words.insert(words.end(), {"--temperature", "0"});
  for (const auto& [key, flag] : kSampling)
    if (recipe.given(key) && !(greedy && std::strcmp(flag, "--max-tokens") != 0))
      words.insert(words.end(), {flag, number_text(recipe, key)});
  if (recipe.given("default_system")) words.insert(words.end(), {"--system", recipe.text("default_system")});
  run_or_show(words, flags);
}

void api(const ServeFlags& flags) {
  const Recipe recipe(flags.file, flags.changes);
  std::vector<std::string> words = {"run"};
  const std::vector<std::string> model = model_words(recipe);
  words.insert(words.end(), model.begin(), model.end());
  constexpr std::pair<const char*, const char*> kEnvironment[] = {
      {"API_HOST", "--host"}, {"API_PORT", "--port"}, {"API_MODEL_NAME", "--served-model-name"}};
  for (const auto& [name, flag] : kEnvironment)
    if (const char* const value = std::getenv(name); value && *value)
      words.insert(words.end(), {flag, value});
  run_or_show(words, flags);
}

void add_recipe_options(CLI::App& verb, ServeFlags& flags) {
  verb.add_option("FILE", flags.file, "The recipe: a YAML file; kt sft keys says what may stand in it")
      ->required();
  verb.add_option("CHANGES", flags.changes,
                  "Values in place of the recipe's: adapter_name_or_path=saves/pirate")
      ->type_name("KEY=VALUE");
  verb.add_flag("--dry-run", flags.dry_run, "Print the command that this is, and stop");
}

}  // namespace

void add_sft_chat(CLI::App& sft, Invocation& run) {
  CLI::App* verb = sft.add_subcommand("chat", "Talk to a recipe's model with its adapter: kt chat");
  const auto flags = std::make_shared<ServeFlags>();
  add_recipe_options(*verb, *flags);
  verb->footer(
      "The adapter is that of adapter_name_or_path, else what output_dir holds.\n\n"
      "Examples:\n"
      "  kt sft chat demo/sft.yaml\n"
      "  kt sft chat inference.yaml adapter_name_or_path=saves/pirate --dry-run");
  verb->callback([&run, flags] { run.action = [flags] { chat(*flags); }; });
}

void add_sft_api(CLI::App& sft, Invocation& run) {
  CLI::App* verb = sft.add_subcommand("api", "Serve a recipe's model with its adapter: kt run");
  const auto flags = std::make_shared<ServeFlags>();
  add_recipe_options(*verb, *flags);
  verb->footer(
      "API_HOST, API_PORT and API_MODEL_NAME of the environment are --host, --port and "
      "--served-model-name.\n\n"
      "Examples:\n"
      "  API_PORT=8000 kt sft api demo/sft.yaml\n"
      "  kt sft api inference.yaml --dry-run");
  verb->callback([&run, flags] { run.action = [flags] { api(*flags); }; });
}

}  // namespace kt::inline cli
