// Questions on a terminal, one line each: the terminal's own line editing, no cursor movement, so that it
// works on the dumbest of them. What is said is broken at the terminal's edge between words. Who asks what is in
// questions.h.
#pragma once
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline terminal {

// The user ended the questions (Ctrl-D). Not an Error: the program says nothing more and exits with 130.
// Ctrl-C does the same by its signal.
struct PromptEnded {};

class Prompts {
 public:
  // Answers come from `in`, questions go to `out`: standard error, so that results can be piped.
  Prompts(std::FILE* in, std::FILE* out) : in_(in), out_(out) {}

  // An answer that `problem` finds nothing wrong with (it returns ""); others are asked for again, with what
  // is wrong. An empty line means `standard`; where that is empty too, the question comes again unless
  // `optional`.
  using Problem = std::function<std::string(const std::string&)>;
  struct Text {
    std::string question, standard = {};
    bool optional = false;
    Problem problem = {};
  };
  std::string ask_text(const Text& text);

  // One of a list by number, or by the first word of its line, or by the beginning of exactly one. `standard`
  // is an index, -1 for none. With `free`, any other text is an answer, too.
  struct Choice {
    std::string word, help = {};
  };
  struct Choices {
    std::string question;
    std::vector<Choice> choices;
    int standard = -1;
    bool free = false;
    Problem problem = {};
  };
  std::string ask_choice(const Choices& choices);

  int64_t ask_number(std::string_view question, int64_t standard, int64_t least, int64_t most);
  bool ask_yes(std::string_view question, bool standard);

  void say(std::string_view line);

 private:
  std::string read_line(std::string_view question, std::string_view standard);

  std::FILE* in_;
  std::FILE* out_;
};

}  // namespace kt::inline terminal
