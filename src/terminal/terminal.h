// The terminal of standard input and output while a program talks through it: its modes, its size and the
// signals that concern it, all given back at the end, however that comes. At most one at a time.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <string_view>

#include "terminal/line_editor.h"

namespace kt::inline terminal {

// Standard input and output are both a terminal. `escapes`: one that obeys escape sequences (TERM is set and
// not "dumb").
struct TerminalKind {
  bool interactive = false, escapes = false;
};
TerminalKind terminal_kind();

void write_terminal(std::string_view bytes);  // to standard output, past stdio; Error if that fails

// Between construction and destruction keys are not echoed, Ctrl-C ends nothing (see OnInterrupt), and
// pastes come in brackets. What is typed while nobody reads waits for the next read_line().
class Terminal {
 public:
  Terminal();  // Error(kInput) if standard input is not a terminal
  ~Terminal();
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  struct Size {
    int width = 80, height = 24;
  };
  static Size size();  // now; the usual one if there is no telling

  // Runs the editor until it has an event; kSuspend stops the program and goes on when it is continued.
  EditEvent read_line(LineEditor& editor);

 private:
  void suspend();

  struct State;
  std::unique_ptr<State> state_;
};

// While it lives, Ctrl-C (SIGINT) calls `stop` of the object from the signal handler, instead of ending the
// program. One at a time.
class OnInterrupt {
 public:
  class Stoppable {
   public:
    virtual void stop() noexcept = 0;  // safe in a signal handler: atomics and system calls only

   protected:
    ~Stoppable() = default;
  };
  explicit OnInterrupt(Stoppable& target);
  ~OnInterrupt();
  OnInterrupt(const OnInterrupt&) = delete;
  OnInterrupt& operator=(const OnInterrupt&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kt::inline terminal
