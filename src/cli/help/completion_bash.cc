// The bash script: tables of verbs, options and values by command, and one function that walks the words.
// Needs bash 4.4 and nothing of the bash-completion package.
#include "base/text.h"
#include "cli/help/completion.h"

namespace kt::inline cli {
namespace {

std::string joined(const std::vector<std::string>& words, std::string_view between) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : std::string(between)) + word;
  return out;
}

// What a value completes to, as an assignment for the script.
std::string kind_of(const OptionInfo& option) {
  if (!option.choices.empty()) return text("kind=words words={}", shell_quoted(joined(option.choices, " ")));
  if (names_model(option)) return "kind=model";
  switch (option.completes) {
    case Completes::kFiles:
      return "kind=files";
    case Completes::kFolders:
      return "kind=folders";
    case Completes::kNothing:
      break;
  }
  return "kind=free";
}

std::string verbs_table(const CommandInfo& kt) {
  std::string out = "_kt_verbs() {\n  case $1 in\n";
  for (const CommandInfo* command : all_commands(kt)) {
    std::vector<std::string> names;
    for (const CommandInfo& verb : command->verbs) names.push_back(verb.name);
    if (!names.empty())
      out += text("    {}) words={} ;;\n", shell_quoted(command->path), shell_quoted(joined(names, " ")));
  }
  return out + "    *) words='' ;;\n  esac\n}\n";
}

std::string options_table(const CommandInfo& kt) {
  std::string out = "_kt_options() {\n  case $1 in\n";
  for (const CommandInfo* command : all_commands(kt)) {
    std::vector<std::string> names;
    for (const OptionInfo& option : options_of(*command, kt))
      for (const std::string& name : option.names) names.push_back(name);
    out += text("    {}) words={} ;;\n", shell_quoted(command->path), shell_quoted(joined(names, " ")));
  }
  return out + "    *) words='' ;;\n  esac\n}\n";
}

std::string values_table(const CommandInfo& kt) {
  std::string out =
      "# The value of option $2 of command $1: sets kind and words. False for a flag that takes none.\n"
      "_kt_value() {\n  case \"$1 $2\" in\n";
  for (const CommandInfo* command : all_commands(kt)) {
    for (const OptionInfo& option : options_of(*command, kt)) {
      if (option.value.empty() || option.names.empty()) continue;
      std::vector<std::string> keys;
      for (const std::string& name : option.names) keys.push_back(shell_quoted(command->path + " " + name));
      out += text("    {}) {} ;;\n", joined(keys, " | "), kind_of(option));
    }
  }
  return out + "    *) return 1 ;;\n  esac\n}\n";
}

std::string positionals_table(const CommandInfo& kt) {
  std::string out =
      "# The argument number $2 of command $1 that belongs to no option.\n"
      "_kt_positional() {\n  case \"$1 $2\" in\n";
  for (const CommandInfo* command : all_commands(kt)) {
    int number = 0;
    for (const OptionInfo& option : command->options) {
      if (!option.positional) continue;
      ++number;
      out += text("    {}{}) {} ;;\n", shell_quoted(command->path + " " + std::to_string(number)),
                  option.repeats ? " | " + shell_quoted(command->path + " ") + "[0-9]*" : std::string(),
                  kind_of(option));
    }
  }
  return out + "    *) kind=free ;;\n  esac\n}\n";
}

constexpr std::string_view kWalk = R"(_kt_offer() {
  case $kind in
    words) mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur") ;;
    files | model)
      compopt -o filenames 2> /dev/null
      mapfile -t COMPREPLY < <(compgen -f -- "$cur")
      ;;
    folders)
      compopt -o filenames 2> /dev/null
      mapfile -t COMPREPLY < <(compgen -d -- "$cur")
      ;;
  esac
  [[ $kind != model ]] || _kt_models
}

_kt() {
  local cur=${COMP_WORDS[COMP_CWORD]} path=kt option='' kind='' words='' help='' verb='' word
  local -i at number=1
  COMPREPLY=()
  # "=" is a word of its own here: "--method=int4" is three.
  for ((at = 1; at < COMP_CWORD; ++at)); do
    word=${COMP_WORDS[at]}
    [[ $word != = ]] || continue
    if [[ -n $option ]]; then
      option=''
    elif [[ $word == -* ]]; then
      ! _kt_value "$path" "$word" || option=$word
    else
      _kt_verbs "$path"
      if [[ " $words " == *" $word "* ]]; then
        path+=" $word"
        number=1
        [[ $path != 'kt help' ]] || { path=kt help=yes; }
      else
        number+=1
      fi
    fi
  done
  [[ $cur != = ]] || cur=''
  if [[ -n $option ]]; then
    _kt_value "$path" "$option"
    _kt_offer
    return
  fi
  if [[ $cur == -* ]]; then
    [[ -z $help ]] || path='kt help'
    _kt_options "$path"
    kind=words
    _kt_offer
    return
  fi
  _kt_verbs "$path"
  verb=$words
  if [[ -n $help || ( -n $verb && $number == 1 && $path == kt ) ]]; then
    kind=words
    _kt_offer
    return
  fi
  _kt_positional "$path" "$number"
  _kt_offer
  [[ -z $verb || $number != 1 ]] || mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen -W "$verb" -- "$cur")
}

complete -F _kt kt
)";

}  // namespace

std::string bash_completion(const CommandInfo& kt) {
  std::string out = "# bash completion of kt; written by: kt completion bash\n\n";
  for (const std::string& table :
       {verbs_table(kt), options_table(kt), values_table(kt), positionals_table(kt)})
    out += table + "\n";
  out += "# Names of known models, beside the files.\n_kt_models() {\n  ";
  out += lists_models(kt) ? "mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < "
                            "<(compgen -W \"$(kt model list --names 2> /dev/null)\" -- \"$cur\")"
                          : ":";
  return out + "\n}\n\n" + std::string(kWalk);
}

}  // namespace kt::inline cli
