#include "terminal/prompts.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>

#include "base/error.h"
#include "base/text.h"
#include "base/utf8.h"
#include "terminal/language.h"
#include "terminal/terminal_text.h"

namespace kt::inline terminal {
namespace {

std::string trimmed(const std::string& line) {
  const size_t first = line.find_first_not_of(" \t\r\n"), last = line.find_last_not_of(" \t\r\n");
  return first == line.npos ? "" : line.substr(first, last - first + 1);
}

// Columns of the terminal behind a stream; 0 where there is none.
int columns_of(std::FILE* out) {
  winsize size = {};
  return ::ioctl(::fileno(out), TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

// Names and paths among the words may be any bytes.
std::string one_or_more_lines(const std::string& lead, std::string_view message, int width) {
  std::string lines = wrapped(lead, harmless(message), width);
  lines.pop_back();  // say() ends the last one
  return lines;
}

// The choice meant by these words, or -1.
int chosen(const std::vector<Prompts::Choice>& choices, const std::string& answer) {
  size_t number = 0;
  const auto [end, code] = std::from_chars(answer.data(), answer.data() + answer.size(), number);
  for (size_t i = 0; i < choices.size(); ++i)
    if (choices[i].word == answer) return static_cast<int>(i);
  if (code == std::errc() && end == answer.data() + answer.size())
    return number >= 1 && number <= choices.size() ? static_cast<int>(number) - 1 : -1;
  int found = -1;
  for (size_t i = 0; i < choices.size(); ++i) {
    if (!choices[i].word.starts_with(answer)) continue;
    if (found >= 0) return -1;
    found = static_cast<int>(i);
  }
  return found;
}

}  // namespace

void Prompts::say(std::string_view line) {
  std::fprintf(out_, "%.*s\n", static_cast<int>(line.size()), line.data());
  std::fflush(out_);
}

std::string Prompts::read_line(std::string_view question, std::string_view standard) {
  std::string prompt(question);
  if (!standard.empty()) prompt += text(" [{}]", standard);
  prompt += ':';
  prompt = one_or_more_lines("", prompt, columns_of(out_) - 1);
  std::fprintf(out_, "%s ", prompt.c_str());
  std::fflush(out_);
  std::string line;
  for (;;) {
    const int c = std::fgetc(in_);
    if (c == EOF && std::ferror(in_) && errno == EINTR) {
      std::clearerr(in_);
      continue;
    }
    if (c == EOF) {
      say("");
      throw PromptEnded();  // NOLINT(bugprone-std-exception-baseclass): no error, and not for who catches those
    }
    if (c == '\n') return trimmed(line);
    line += static_cast<char>(c);
  }
}

std::string Prompts::ask_text(const Text& asked) {
  for (;;) {
    std::string answer = read_line(asked.question, asked.standard);
    if (answer.empty()) answer = asked.standard;
    if (answer.empty() && asked.optional) return answer;
    std::string problem = answer.empty() ? tr_now("an answer is needed; Ctrl-D ends") : "";
    if (!is_valid_utf8(answer)) problem = tr_now("that is not UTF-8");
    if (problem.empty() && asked.problem) problem = asked.problem(answer);
    if (problem.empty()) return answer;
    say(one_or_more_lines("  ", problem, columns_of(out_)));
  }
}

std::string Prompts::ask_choice(const Choices& asked) {
  const int width = columns_of(out_);
  int widest = 0;
  for (const Choice& choice : asked.choices) widest = std::max(widest, text_width(harmless(choice.word)));
  for (size_t i = 0; i < asked.choices.size(); ++i) {
    const Choice& choice = asked.choices[i];
    const std::string word = text("  {}{}  {}", i < 9 ? " " : "", i + 1, harmless(choice.word));
    const std::string lead = padded_to(word, 6 + widest + 2);
    if (choice.help.empty()) {
      say(word);
    } else if (width > 0 && text_width(lead) > width / 2) {  // too narrow for two columns
      say(word);
      say(one_or_more_lines("          ", choice.help, width));
    } else {
      say(one_or_more_lines(lead, choice.help, width));
    }
  }
  const std::string standard =
      asked.standard >= 0 ? asked.choices.at(static_cast<size_t>(asked.standard)).word : "";
  const auto problem = [&](const std::string& answer) -> std::string {
    if (chosen(asked.choices, answer) >= 0) return "";
    if (asked.free) return asked.problem ? asked.problem(answer) : "";
    return text(tr("expected a number from 1 to {} or a word of the list, got '{}'"), asked.choices.size(),
                answer);
  };
  const std::string answer = ask_text({.question = asked.question, .standard = standard, .problem = problem});
  const int index = chosen(asked.choices, answer);
  return index >= 0 ? asked.choices[static_cast<size_t>(index)].word : answer;
}

int64_t Prompts::ask_number(std::string_view question, int64_t standard, int64_t least, int64_t most) {
  const auto parse = [](const std::string& answer, int64_t& out) {
    const auto [end, code] = std::from_chars(answer.data(), answer.data() + answer.size(), out);
    return code == std::errc() && end == answer.data() + answer.size();
  };
  const auto problem = [&](const std::string& answer) -> std::string {
    int64_t number = 0;
    if (parse(answer, number) && number >= least && number <= most) return "";
    return text(tr("expected a whole number from {} to {}, got '{}'"), least, most, answer);
  };
  int64_t out = 0;
  parse(
      ask_text({.question = std::string(question), .standard = std::to_string(standard), .problem = problem}),
      out);
  return out;
}

bool Prompts::ask_yes(std::string_view question, bool standard) {
  const auto problem = [](const std::string& answer) -> std::string {
    for (const char* word : {"y", "yes", "n", "no", "Y", "N", "Yes", "No", "是", "否"})
      if (answer == word) return "";
    return text(tr("expected yes or no, got '{}'"), answer);
  };
  const std::string answer =
      ask_text({.question = std::string(question), .standard = standard ? "yes" : "no", .problem = problem});
  return answer[0] == 'y' || answer[0] == 'Y' || answer == "是";
}

}  // namespace kt::inline terminal
