#include "cli/help/help_page.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace kt::inline cli {
namespace {

constexpr int kUsualWidth = 110, kNarrowestPage = 30, kWidestPage = 120;
constexpr int kNarrow = 60, kBelow = 6;
constexpr int kMostNames = 34;  // columns of an option's names before its description moves below them

// Words on lines of `width` columns; the first line begins in column `at`, the others at `indent`.
std::string wrapped(const std::string& text, int width, int at, int indent,
                    std::string_view before_break = "") {
  std::string out;
  int column = at;
  const int room = width - static_cast<int>(before_break.size());
  bool first = true;
  for (const std::string& word : CLI::detail::split(text, ' ')) {
    if (word.empty()) continue;
    const int length = static_cast<int>(word.size());
    if (!first && column + 1 + length > room) {
      out += std::string(before_break) + "\n" + std::string(static_cast<size_t>(indent), ' ');
      column = indent;
    } else if (!first) {
      out += ' ';
      ++column;
    }
    out += word;
    column += length;
    first = false;
  }
  return out;
}

// "-o, --output FOLDER"
std::string names_of(const OptionInfo& option) {
  std::string out;
  if (option.positional && option.names.empty()) out = option.positional_name;
  for (const std::string& name : option.names) out += (out.empty() ? "" : ", ") + name;
  if (!option.names.empty() && !option.value.empty()) out += " " + plain_type(option);
  return out + (option.repeats ? " ..." : "");
}

std::string description_of(const OptionInfo& option) {
  std::string out = option.description;
  if (option.positional && !option.names.empty())
    out += "; also as " + option.positional_name + " without the flag";
  if (!option.choices.empty() && plain_type(option) == "NAME") {
    std::string list;
    for (const std::string& choice : option.choices) list += (list.empty() ? "" : ", ") + choice;
    out += (out.empty() ? "one of " : "; one of ") + list;
  }
  if (!option.preset.empty()) out += " [" + option.preset + "]";
  if (option.required) out += " (required)";
  return out;
}

std::string entry(const std::string& names, const std::string& description, int column, int width) {
  std::string out = "  " + wrapped(names, width, 2, 6);
  const size_t last = out.rfind('\n');
  const int at = static_cast<int>(last == std::string::npos ? out.size() : out.size() - last - 1);
  if (description.empty()) return out + "\n";
  if (at + 2 > column)
    out += "\n" + std::string(static_cast<size_t>(column), ' ');
  else
    out += std::string(static_cast<size_t>(column - at), ' ');
  return out + wrapped(description, width, column, column) + "\n";
}

// A line of examples: a command, and behind a gap what it does.
std::string example(const std::string& line, int width) {
  if (static_cast<int>(line.size()) <= width) return line + "\n";
  const size_t begin = line.find_first_not_of(' '), gap = line.find("   ", begin);
  const std::string indent(begin, ' ');
  std::string out = indent +
                    wrapped(line.substr(begin, gap == std::string::npos ? gap : gap - begin), width,
                            static_cast<int>(begin), static_cast<int>(begin) + 4, " \\") +
                    "\n";
  if (gap == std::string::npos) return out;
  const int deeper = static_cast<int>(begin) + 4;
  return out + std::string(static_cast<size_t>(deeper), ' ') +
         wrapped(line.substr(gap), width, deeper, deeper) + "\n";
}

// Prose is wrapped as a whole, lines that begin with a space each by itself.
std::string paragraph(const std::string& text, int width) {
  std::string out, prose;
  const auto flush = [&] {
    if (!prose.empty()) out += wrapped(prose, width, 0, 0) + "\n";
    prose.clear();
  };
  for (const std::string& line : CLI::detail::split(text, '\n')) {
    if (line.starts_with(' ')) {
      flush();
      out += example(line, width);
    } else {
      prose += (prose.empty() ? "" : " ") + line;
      if (line.ends_with(':')) flush();
    }
  }
  flush();
  return out;
}

std::string usage(const CommandInfo& command) {
  std::string out = "Usage: " + command.path;
  if (std::ranges::any_of(command.options, [](const OptionInfo& one) { return !one.names.empty(); }))
    out += " [OPTIONS]";
  for (const OptionInfo& option : command.options)
    if (option.positional) {
      const std::string name = option.positional_name + (option.repeats ? " ..." : "");
      out += option.required ? " " + name : " [" + name + "]";
    }
  if (!command.verbs.empty()) out += command.needs_verb ? " VERB" : " [VERB]";
  return out;
}

class PageFormatter final : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* app, std::string name, CLI::AppFormatMode) const override {
    return help_page(describe_command(*app, name), help_width());
  }
};

int terminal_width() {
  for (const int file : {STDOUT_FILENO, STDERR_FILENO}) {
    winsize size{};
    if (::ioctl(file, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  }
  return kUsualWidth;
}

}  // namespace

int help_width() {
  const char* const columns = std::getenv("COLUMNS");
  const int given = columns ? std::atoi(columns) : 0;
  return std::clamp(given > 0 ? given : terminal_width(), kNarrowestPage, kWidestPage);
}

std::string help_page(const CommandInfo& command, int width) {
  size_t widest = 0;
  const auto look = [&](const std::string& names) {
    if (static_cast<int>(names.size()) <= kMostNames) widest = std::max(widest, names.size());
  };
  for (const OptionInfo& option : command.options) look(names_of(option));
  for (const CommandInfo& verb : command.verbs) look(verb.name);
  // On a narrow page descriptions stand below the names.
  const int column = width < kNarrow ? kBelow : std::min(static_cast<int>(widest) + 4, width / 2);

  std::string out =
      wrapped(command.description, width, 0, 0) + "\n\n" + wrapped(usage(command), width, 0, 4) + "\n";
  if (!command.verbs.empty()) {
    out += "\nSubcommands:\n";
    for (const CommandInfo& verb : command.verbs) out += entry(verb.name, verb.description, column, width);
  }
  std::string arguments, options;
  for (const OptionInfo& option : command.options)
    (option.names.empty() ? arguments : options) +=
        entry(names_of(option), description_of(option), column, width);
  if (!arguments.empty()) out += "\nArguments:\n" + arguments;
  if (!options.empty()) out += "\nOptions:\n" + options;
  for (const std::string& each : paragraphs(command.footer)) out += "\n" + paragraph(each, width);
  return out;
}

std::shared_ptr<CLI::FormatterBase> help_formatter() { return std::make_shared<PageFormatter>(); }

}  // namespace kt::inline cli
