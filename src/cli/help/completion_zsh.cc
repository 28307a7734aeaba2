// The zsh script: one function finds the command the words name, then _arguments completes for it.
#include "base/text.h"
#include "cli/help/completion.h"

namespace kt::inline cli {
namespace {

// Inside the brackets and colons of a specification of _arguments.
std::string escaped(const std::string& string) {
  std::string out;
  for (const char c : string) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out;
}

std::string function_name(const CommandInfo& command) {
  std::string name = "_kt_verbs_" + command.path;
  for (char& c : name)
    if (c == ' ' || c == '-') c = '_';
  return name;
}

// The ":message:action" of a value. `first` is called beside it: the verbs that could stand there instead.
std::string value_action(const OptionInfo& option, const CommandInfo& kt, const std::string& first) {
  std::string action;
  if (!option.choices.empty()) {
    for (const std::string& choice : option.choices) action += (action.empty() ? "(" : " ") + choice;
    return text(":{}:{})", escaped(option.value), action);
  }
  if (option.completes == Completes::kFiles) action = "_files";
  if (option.completes == Completes::kFolders) action = "_files -/";
  if (names_model(option) && lists_models(kt)) action = "_kt_models; " + action;
  if (!first.empty()) action = action.empty() ? first : first + "; " + action;
  if (action.find(';') != std::string::npos) action = "{" + action + "}";
  return text(":{}:{}", escaped(option.positional ? option.positional_name : option.value),
              action.empty() ? " " : action);
}

// One specification for each name; names of one option exclude each other unless it may repeat.
std::string option_specs(const OptionInfo& option, const CommandInfo& kt) {
  std::string together, out;
  for (const std::string& name : option.names) together += (together.empty() ? "" : " ") + name;
  for (const std::string& name : option.names) {
    const bool valued = !option.value.empty();
    std::string spec = option.repeats && valued ? "*" : "(" + together + ")";
    spec += name + (valued && name.starts_with("--") ? "=" : "") + "[" + escaped(option.description) + "]";
    if (valued) {
      OptionInfo flag = option;
      flag.positional = false;
      spec += value_action(flag, kt, "");
    }
    out += text(" \\\n        {}", shell_quoted(spec));
  }
  return out;
}

std::string verbs_function(const CommandInfo& command) {
  std::string out = function_name(command) + "() {\n  local -a verbs=(\n";
  for (const CommandInfo& verb : command.verbs)
    out += text("    {}\n", shell_quoted(verb.name + ":" + escaped(verb.description)));
  return out + "  )\n  _describe verb verbs\n}\n\n";
}

std::string arguments_case(const CommandInfo& command, const CommandInfo& kt) {
  std::string out = text("    ({})\n      _arguments -S", shell_quoted(command.path));
  for (const OptionInfo& option : options_of(command, kt)) out += option_specs(option, kt);
  std::string first = command.verbs.empty() ? "" : function_name(command);
  int number = 0;
  for (const OptionInfo& option : command.options) {
    if (!option.positional) continue;
    const std::string where = option.repeats ? "*" : std::to_string(++number);
    out += text(" \\\n        {}", shell_quoted(where + value_action(option, kt, first)));
    first.clear();
  }
  if (!first.empty()) out += text(" \\\n        {}", shell_quoted("1:verb:" + first));
  return out + "\n      ;;\n";
}

// Cases that move down the tree, and those that skip an option's value.
std::string walk_cases(const CommandInfo& kt) {
  std::string verbs, values;
  for (const CommandInfo* command : all_commands(kt)) {
    if (command != &kt) verbs += (verbs.empty() ? "" : "|") + shell_quoted(command->path);
    for (const OptionInfo& option : options_of(*command, kt))
      if (!option.value.empty())
        for (const std::string& name : option.names)
          values += (values.empty() ? "" : "|") + shell_quoted(command->path + " " + name);
  }
  std::string out = text("      ({}) verb+=\" $words[at]\" last=at ;;\n", verbs);
  if (!values.empty()) out += text("      ({}) (( ++at )) ;;\n", values);
  return out;
}

std::string help_cases(const CommandInfo& kt) {
  std::string out;
  for (const CommandInfo* command : all_commands(kt))
    if (!command->verbs.empty())
      out += text("      ({}) {} ;;\n", shell_quoted(command->path), function_name(*command));
  return out;
}

}  // namespace

std::string zsh_completion(const CommandInfo& kt) {
  std::string out = "#compdef kt\n# zsh completion of kt; written by: kt completion zsh\n\n";
  std::string cases;
  for (const CommandInfo* command : all_commands(kt)) {
    if (!command->verbs.empty()) out += verbs_function(*command);
    cases += arguments_case(*command, kt);
  }
  if (lists_models(kt))
    out += "_kt_models() {\n  compadd -- ${(f)\"$(kt model list --names 2> /dev/null)\"}\n}\n\n";
  out += text(R"(_kt() {{
  local verb=kt help=''
  local -i at last=1
  for ((at = 2; at < CURRENT; ++at)); do
    if [[ "$verb $words[at]" == 'kt help' ]]; then
      help=yes last=at
      continue
    fi
    case "$verb $words[at]" in
{}    esac
  done
  if [[ -n $help && $words[CURRENT] != -* ]]; then
    case $verb in
{}    esac
    return
  fi
  [[ -z $help ]] || verb='kt help'
  words=("${{(@)words[last,-1]}}")
  (( CURRENT -= last - 1 ))
  case $verb in
{}  esac
}}

if [[ $funcstack[1] == _kt ]]; then
  _kt "$@"
else
  compdef _kt kt
fi
)",
              walk_cases(kt), help_cases(kt), cases);
  return out;
}

}  // namespace kt::inline cli
