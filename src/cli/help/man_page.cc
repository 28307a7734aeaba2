#include "cli/help/man_page.h"

#include <array>

#include "base/text.h"

namespace kt::inline cli {
namespace {

// Words as roff prints them: backslashes and hyphens as such, and no line that starts like a request.
std::string roff(const std::string& string) {
  std::string out;
  bool fresh = true;
  for (const char c : string) {
    if (fresh && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\')
      out += "\\e";
    else if (c == '-')
      out += "\\-";
    else if (c == '\'')
      out += "\\(aq";
    else if (c == '`')
      out += "\\(ga";
    else if (c == '^')
      out += "\\(ha";
    else if (c == '~')
      out += "\\(ti";
    else
      out += c;
    fresh = c == '\n';
  }
  return out;
}

std::string verbatim(const std::string& string) { return ".PP\n.nf\n" + roff(string) + "\n.fi\n"; }

constexpr std::string_view kExamples = "Examples:\n", kExitCodes = "Exit codes: ";

bool is_examples(const std::string& paragraph) { return paragraph.starts_with(kExamples); }
bool is_exit_codes(const std::string& paragraph) { return paragraph.starts_with(kExitCodes); }

// "-o, --output FILE", names bold.
std::string option_heading(const OptionInfo& option) {
  std::string out;
  if (option.positional) out = "\\fI" + roff(option.positional_name) + "\\fR";
  for (const std::string& name : option.names) out += (out.empty() ? "\\fB" : ", \\fB") + roff(name) + "\\fR";
  if (option.value.empty() || option.names.empty()) return out;
  return out + " \\fI" + roff(plain_type(option)) + "\\fR";
}

std::string option_text(const OptionInfo& option) {
  std::string out = option.description;
  if (!option.choices.empty()) {
    std::string list;
    for (const std::string& choice : option.choices) list += (list.empty() ? "" : ", ") + choice;
    out += text("{}One of: {}.", out.empty() ? "" : out.ends_with('.') ? " " : ". ", list);
  }
  if (!option.preset.empty()) out += text(" [{}]", option.preset);
  if (option.required) out += " (required)";
  return ".TP\n" + option_heading(option) + "\n" + roff(out.empty() ? "No description." : out) + "\n";
}

std::string synopsis(const CommandInfo& command) {
  std::string out = ".B " + roff(command.path) + "\n";
  bool flags = false;
  for (const OptionInfo& option : command.options) flags = flags || !option.names.empty();
  if (flags) out += "[\\fIOPTIONS\\fR]\n";
  for (const OptionInfo& option : command.options)
    if (option.positional)
      out += text("{}\\fI{}\\fR{}{}\n", option.required ? "" : "[", roff(option.positional_name),
                  option.repeats ? " ..." : "", option.required ? "" : "]");
  if (!command.verbs.empty()) out += command.needs_verb ? "\\fIVERB\\fR\n" : "[\\fIVERB\\fR]\n";
  return out;
}

std::string verb_section(const CommandInfo& command) {
  std::string out = ".SS \"" + roff(command.path) + "\"\n";
  if (!command.description.empty()) out += roff(command.description) + ".\n";
  out += ".PP\n" + synopsis(command);
  for (const OptionInfo& option : command.options) out += option_text(option);
  for (const std::string& paragraph : paragraphs(command.footer))
    if (!is_examples(paragraph) && !is_exit_codes(paragraph)) out += verbatim(paragraph);
  return out;
}

// "0 done, 2 bad input, ...": the list that the program's own help ends with.
std::string exit_status(const CommandInfo& kt) {
  for (const std::string& paragraph : paragraphs(kt.footer))
    if (is_exit_codes(paragraph)) return roff(paragraph.substr(kExitCodes.size())) + "\n";
  return "0 done; anything else is a failure that standard error names.\n";
}

struct Entry {
  const char *name, *what;
};

constexpr auto kFiles = std::to_array<Entry>({
    {"~/.config/kt/",
     "Settings and the registry of models; $XDG_CONFIG_HOME/kt where that is set, $KT_HOME "
     "before both."},
    {"kt_manifest.json", "In a folder that kt quant wrote: files, checksums, the error of every layer."},
});

constexpr auto kEnvironment = std::to_array<Entry>({
    {"KT_API_KEY", "The key that clients of kt run have to send, and that kt chat sends; flags go first."},
    {"KT_HOME", "The folder of settings, instead of ~/.config/kt."},
    {"KT_ISA", "Forces an instruction set of the table of kt version; one that this CPU lacks is an error."},
    {"KT_KERNEL_CPU_VARIANT", "The same under its established name; KT_ISA goes first."},
    {"KT_LOG_LEVEL", "debug, info, warning, error or off; warning where it is not set."},
    {"NO_COLOR", "Set to anything: no colours."},
});

template <size_t N>
std::string entries(const std::array<Entry, N>& list) {
  std::string out;
  for (const Entry& entry : list) out += text(".TP\n\\fB{}\\fR\n{}\n", roff(entry.name), roff(entry.what));
  return out;
}

}  // namespace

std::string man_page(const CommandInfo& kt, const std::string& version) {
  std::string out = text(".TH KT 1 \"\" \"kt {}\" \"User Commands\"\n.nh\n.ad l\n", roff(version));
  out +=
      ".SH NAME\nkt \\- runs Mixture\\-of\\-Experts language models on CPUs\n.SH SYNOPSIS\n" + synopsis(kt);
  out += ".SH DESCRIPTION\n" + roff(kt.description) + "\n";
  for (const OptionInfo& option : kt.options) out += option_text(option);
  std::string examples;
  out += ".SH VERBS\n";
  for (const CommandInfo* command : all_commands(kt)) {
    if (command != &kt) out += verb_section(*command);
    for (const std::string& paragraph : paragraphs(command->footer))
      if (is_examples(paragraph)) examples += verbatim(paragraph.substr(kExamples.size()));
  }
  out += ".SH EXIT STATUS\n" + exit_status(kt);
  out += ".SH FILES\n" + entries(kFiles);
  out += ".SH ENVIRONMENT\n" + entries(kEnvironment);
  return out + ".SH EXAMPLES\n" + examples;
}

}  // namespace kt::inline cli
