// kt sft: fine-tuning. The verb with its verbs, and the list of a recipe's keys.
#include "cli/sft/sft.h"

#include <cstdio>
#include <memory>

#include "base/error.h"
#include "cli/sft/recipe_keys.h"
#include "terminal/report.h"
#include "text/json.h"
#include "text/shown.h"

namespace kt::inline cli {
namespace {

struct KeysFlags {
  std::string key;
  bool json = false;
};

std::string choices_text(std::string_view choices) {
  std::string out;
  for (const char c : choices) out += c == '|' ? std::string(", ") : std::string(1, c);
  return out;
}

OrderedJson json_of_key(const RecipeKey& key) {
  return {{"group", name_of(key.group)},
          {"type", name_of(key.type)},
          {"use", name_of(key.use)},
          {"default", key.standard.empty() ? OrderedJson() : OrderedJson(key.standard)},
          {"choices", key.choices.empty() ? OrderedJson() : OrderedJson(choices_text(key.choices))},
          {"meaning", key.meaning}};
}

void print_keys(const KeysFlags& flags) {
  std::vector<const RecipeKey*> shown_keys;
  for (const RecipeKey& key : recipe_keys())
    if (flags.key.empty() || key.name == flags.key) shown_keys.push_back(&key);
  if (shown_keys.empty())
    fail("'{}' is no key of a recipe; the nearest is {}", shown(flags.key), nearest_name(flags.key, [] {
           std::vector<std::string> all;
           for (const RecipeKey& key : recipe_keys()) all.emplace_back(key.name);
           return all;
         }()));
  if (flags.json) {
    OrderedJson out = OrderedJson::object();
    for (const RecipeKey* const key : shown_keys) out[std::string(key->name)] = json_of_key(*key);
    std::printf("%s\n", out.dump(2).c_str());
    return;
  }
  Table table({"key", "here", "default", "meaning"}, 4);
  for (const RecipeKey* const key : shown_keys) {
    std::string meaning(key->meaning);
    if (!key->choices.empty()) meaning += text(": {}", choices_text(key->choices));
    table.add({std::string(key->name), std::string(name_of(key->use)),
               key->standard.empty() ? "-" : std::string(key->standard), meaning});
  }
  std::fputs(table.str().c_str(), stdout);
}

}  // namespace

void add_sft_keys(CLI::App& sft, Invocation& run) {
  CLI::App* verb = sft.add_subcommand("keys", "Every key of a recipe, and what becomes of it here");
  const auto flags = std::make_shared<KeysFlags>();
  verb->add_option("KEY", flags->key, "One key; default: all");
  verb->add_flag("--json", flags->json, "Print JSON");
  verb->footer(
      "`used`: it does what it says; `noted`: accepted, and a line says what it means here; `refused`: an "
      "error, unless it\n"
      "asks for nothing.\n\n"
      "Examples:\n"
      "  kt sft keys\n"
      "  kt sft keys lora_target\n"
      "  kt sft keys --json");
  verb->callback([&run, flags] { run.action = [flags] { print_keys(*flags); }; });
}

void add_sft(CLI::App& kt, Invocation& run) {
  CLI::App* verb =
      kt.add_subcommand("sft", "Fine-tune a model: LoRA, with its experts on the CPU in any format");
  verb->require_subcommand(1);
  add_sft_train(*verb, run);
  add_sft_chat(*verb, run);
  add_sft_api(*verb, run);
  add_sft_eval(*verb, run);
  add_sft_export(*verb, run);
  add_sft_keys(*verb, run);
  verb->footer(
      "Examples:\n"
      "  kt sft train demo/sft.yaml --dry-run                what it would train, and the memory that takes\n"
      "  kt sft train demo/sft.yaml max_steps=20             train, with one value changed\n"
      "  kt sft eval demo/sft.yaml val_size=0.05             how well it answers, and what it says\n"
      "  kt sft keys                                         what a recipe may say");
}

}  // namespace kt::inline cli
