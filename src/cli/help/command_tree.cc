#include "cli/help/command_tree.h"

#include <utility>

#include "base/error.h"
#include "terminal/language.h"

namespace kt::inline cli {
namespace {

// A check of membership describes itself as "{a,b,c}" behind the type.
std::vector<std::string> choices_in(const std::string& type) {
  const size_t from = type.find('{'), to = type.find('}', from);
  if (from == std::string::npos || to == std::string::npos) return {};
  return CLI::detail::split(type.substr(from + 1, to - from - 1), ',');
}

bool starts_with_any(const std::string& text, std::initializer_list<std::string_view> words) {
  for (const std::string_view word : words)
    if (text.starts_with(word)) return true;
  return false;
}

// Numbers complete to nothing. Any other free text may be a path, and says that it is a folder by its type or
// by the first word of its description.
Completes completion_of(const std::string& type, const std::string& description) {
  if (starts_with_any(type, {"INT", "UINT", "FLOAT", "BOOLEAN"})) return Completes::kNothing;
  if (type.find("DIR") != std::string::npos || starts_with_any(description, {"Folder", "The folder"}))
    return Completes::kFolders;
  return Completes::kFiles;
}

}  // namespace

std::string plain_type(const OptionInfo& option) {
  constexpr size_t kFewChoices = 24;  // columns
  std::string choices;
  for (const std::string& choice : option.choices) choices += (choices.empty() ? "" : "|") + choice;
  if (!choices.empty()) return choices.size() <= kFewChoices ? choices : "NAME";
  if (option.value == "INT" || option.value == "UINT") return "N";
  if (option.value == "FLOAT") return "NUMBER";
  if (option.completes == Completes::kFolders) return "FOLDER";
  return option.value;
}

OptionInfo describe_option(const CLI::Option& option) {
  OptionInfo info{.positional = option.get_positional(),
                  .positional_name = option.get_positional() ? option.get_name(true, false) : "",
                  .description = option.get_description(),
                  .preset = option.get_default_str(),
                  .required = option.get_required(),
                  .repeats = option.get_expected_max() > 1};
  if (info.repeats && info.preset.starts_with('[') && info.preset.ends_with(']'))  // as CLI11 has a list
    info.preset = info.preset.substr(1, info.preset.size() - 2);
  for (const std::string& name : option.get_snames()) info.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) info.names.push_back("--" + name);
  if (option.get_type_size_max() == 0 || option.get_expected_max() == 0) return info;
  const std::string type = option.get_type_name();
  info.value = type.substr(0, type.find_first_of(":{[( "));
  if (info.value.empty()) info.value = "TEXT";
  info.choices = choices_in(type);
  if (info.choices.empty()) info.completes = completion_of(type, info.description);
  return info;
}

CommandInfo describe_command(const CLI::App& app, const std::string& path) {
  CommandInfo info{.name = app.get_name(),
                   .path = path,
                   .description = app.get_description(),
                   .footer = app.get_footer(),
                   .needs_verb = app.get_require_subcommand_min() > 0};
  for (const CLI::Option* option : app.get_options())
    if (!option->get_group().empty()) info.options.push_back(describe_option(*option));
  for (const CLI::App* verb : app.get_subcommands({}))
    if (!verb->get_group().empty() && !verb->get_name().empty())
      info.verbs.push_back(describe_command(*verb, path + " " + verb->get_name()));
  return info;
}

const CLI::App& find_verb(const CLI::App& app, const std::vector<std::string>& words) {
  const CLI::App* at = &app;
  std::string path = app.get_name();
  for (const std::string& word : words) {
    const CLI::App* next = nullptr;
    std::string known;
    for (const CLI::App* verb : at->get_subcommands({})) {
      if (verb->check_name(word)) next = verb;
      known += (known.empty() ? "" : ", ") + verb->get_name();
    }
    if (!next && known.empty()) fail("'{}' has no verbs of its own, '{}' came", path, word);
    if (!next) fail(tr("unknown verb '{} {}': {} are known"), path, word, known);
    at = next;
    path += " " + word;
  }
  return *at;
}

CLI::App& find_verb(CLI::App& app, const std::vector<std::string>& words) {
  return const_cast<CLI::App&>(find_verb(std::as_const(app), words));
}

std::vector<const CommandInfo*> all_commands(const CommandInfo& top) {
  std::vector<const CommandInfo*> all = {&top};
  for (const CommandInfo& verb : top.verbs)
    for (const CommandInfo* below : all_commands(verb)) all.push_back(below);
  return all;
}

std::vector<std::string> clauses(const std::string& description) {
  std::vector<std::string> found;
  for (size_t at = 0; at < description.size();) {
    const size_t end = std::min(description.find("; ", at), description.size());
    found.push_back(description.substr(at, end - at));
    at = end + 2;
  }
  return found;
}

std::vector<std::string> paragraphs(const std::string& text) {
  std::vector<std::string> found;
  size_t at = 0;
  while (at < text.size()) {
    const size_t end = std::min(text.find("\n\n", at), text.size());
    if (end > at) found.push_back(text.substr(at, end - at));
    at = end + 2;
  }
  for (std::string& piece : found)
    while (!piece.empty() && piece.back() == '\n') piece.pop_back();
  std::erase(found, "");
  return found;
}

}  // namespace kt::inline cli
