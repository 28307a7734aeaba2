// The fish script: a function that finds the command the words name, and one `complete` line for each thing.
#include "base/text.h"
#include "cli/help/completion.h"

namespace kt::inline cli {
namespace {

// fish reads backslashes between single quotes.
std::string fish_quoted(const std::string& string) {
  std::string out = "'";
  for (const char c : string) {
    if (c == '\'' || c == '\\') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out + "'";
}

std::string line_for(const CommandInfo& command) {
  return text("complete -c kt -n {}", fish_quoted("__kt_at " + command.path));
}

std::string value_flags(const OptionInfo& option, const CommandInfo& kt) {
  std::string out;
  for (const std::string& choice : option.choices) out += (out.empty() ? "" : " ") + choice;
  if (!out.empty()) return " -x -a " + fish_quoted(out);
  if (names_model(option) && lists_models(kt))
    out = " -a '(type -q kt; and kt model list --names 2> /dev/null)'";
  switch (option.completes) {
    case Completes::kFiles:
      return " -r -F" + out;
    case Completes::kFolders:
      return " -x -a '(__fish_complete_directories)'";
    case Completes::kNothing:
      break;
  }
  return " -x";
}

std::string option_line(const OptionInfo& option, const CommandInfo& command, const CommandInfo& kt) {
  std::string out = line_for(command);
  for (const std::string& name : option.names)
    out += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
  if (!option.value.empty()) out += value_flags(option, kt);
  return out + " -d " + fish_quoted(option.description) + "\n";
}

std::string positional_line(const OptionInfo& option, const CommandInfo& command, const CommandInfo& kt) {
  const std::string flags = value_flags(option, kt);
  if (flags == " -x") return "";
  const bool required = flags.starts_with(" -x") || flags.starts_with(" -r");
  return line_for(command) + (required ? flags.substr(3) : flags) + "\n";
}

std::string walk(const CommandInfo& kt) {
  std::string verbs, values;
  for (const CommandInfo* command : all_commands(kt)) {
    if (command != &kt) verbs += " " + fish_quoted(command->path);
    for (const OptionInfo& option : options_of(*command, kt))
      if (!option.value.empty())
        for (const std::string& name : option.names) values += " " + fish_quoted(command->path + " " + name);
  }
  return text(R"(function __kt_path
    set -l verb kt
    set -l skip
    for word in (commandline -opc)[2..-1]
        if test -n "$skip"
            set skip
            continue
        end
        switch "$verb $word"
            case{}
                set verb "$verb $word"
            case{}
                set skip yes
        end
    end
    echo $verb
end

function __kt_at
    test (__kt_path) = "$argv"
end

)",
              verbs, values.empty() ? " ''" : values);
}

}  // namespace

std::string fish_completion(const CommandInfo& kt) {
  std::string out = "# fish completion of kt; written by: kt completion fish\n\n" + walk(kt);
  out += "complete -c kt -f\n";
  for (const CommandInfo* command : all_commands(kt)) {
    for (const CommandInfo& verb : command->verbs) {
      const std::string offer = text(" -a {} -d {}\n", fish_quoted(verb.name), fish_quoted(verb.description));
      out += line_for(*command) + offer;
      out += "complete -c kt -n '__kt_at kt help'" + offer;
    }
    for (const OptionInfo& option : options_of(*command, kt)) {
      if (!option.names.empty()) out += option_line(option, *command, kt);
      if (option.positional && command->path != "kt help") out += positional_line(option, *command, kt);
    }
  }
  return out;
}

}  // namespace kt::inline cli
