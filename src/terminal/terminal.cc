#include "terminal/terminal.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace kt::inline terminal {
namespace {

constexpr std::string_view kPasteOn = "\x1b[?2004h", kPasteOff = "\x1b[?2004l\x1b[?25h";
constexpr int kEscapeMs = 50;  // what follows an ESC within a sequence comes faster, also over a network

// What signal handlers need. They have no other way to it; written before the handlers are installed.
struct Shared {
  termios original = {}, current = {};
  int wake = -1;  // write end of the pipe that ends poll()
  volatile sig_atomic_t resized = 0;
};
Shared shared;
std::atomic<OnInterrupt::Stoppable*> stoppable = nullptr;

void write_quietly(int fd, std::string_view bytes) {
  [[maybe_unused]] const auto written = ::write(fd, bytes.data(), bytes.size());
}

extern "C" void kt_on_resize(int) {
  const int kept = errno;
  shared.resized = 1;
  write_quietly(shared.wake, "r");
  errno = kept;
}

extern "C" void kt_on_continue(int) {
  const int kept = errno;
  ::tcsetattr(STDIN_FILENO, TCSANOW, &shared.current);
  write_quietly(STDOUT_FILENO, kPasteOn);
  shared.resized = 1;
  write_quietly(shared.wake, "c");
  errno = kept;
}

// Gives the terminal back, then dies as if there were no handler.
extern "C" void kt_on_death(int number) {
  ::tcsetattr(STDIN_FILENO, TCSANOW, &shared.original);
  write_quietly(STDOUT_FILENO, kPasteOff);
  ::signal(number, SIG_DFL);
  ::raise(number);
}

extern "C" void kt_on_interrupt(int) {
  const int kept = errno;
  if (OnInterrupt::Stoppable* const target = stoppable.load()) target->stop();
  errno = kept;
}

struct Handled {
  int number;
  void (*handler)(int);
  struct sigaction old = {};
};

void install(Handled& row) {
  struct sigaction action = {};
  action.sa_handler = row.handler;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(row.number, &action, &row.old);
}

}  // namespace

TerminalKind terminal_kind() {
  const char* const term = std::getenv("TERM");
  const bool interactive = ::isatty(STDIN_FILENO) && ::isatty(STDOUT_FILENO);
  return {.interactive = interactive,
          .escapes = interactive && term && *term && std::strcmp(term, "dumb") != 0};
}

void write_terminal(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EAGAIN) {
      pollfd ready{.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
      ::poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      fail("writing to the terminal failed: {}", std::strerror(errno));
    }
  }
}

struct Terminal::State {
  termios editing = {}, waiting = {};
  int pipe[2] = {-1, -1};
  std::array<Handled, 6> handled = {{{SIGINT, kt_on_interrupt},
                                     {SIGWINCH, kt_on_resize},
                                     {SIGCONT, kt_on_continue},
                                     {SIGTERM, kt_on_death},
                                     {SIGHUP, kt_on_death},
                                     {SIGQUIT, kt_on_death}}};

  void enter(const termios& mode) {
    shared.current = mode;
    ::tcsetattr(STDIN_FILENO, TCSADRAIN, &mode);
  }
};

Terminal::Terminal() : state_(std::make_unique<State>()) {
  if (::tcgetattr(STDIN_FILENO, &shared.original) != 0)
    fail("standard input is not a terminal: {}", std::strerror(errno));
  if (::pipe2(state_->pipe, O_CLOEXEC | O_NONBLOCK) != 0) fail("pipe: {}", std::strerror(errno));
  shared.wake = state_->pipe[1];
  // Between lines: no echo and no lines put together by the kernel, but Ctrl-C is a signal.
  state_->waiting = shared.original;
  state_->waiting.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO | ECHONL | IEXTEN);
  state_->waiting.c_lflag |= NOFLSH;  // which would else throw away what was typed ahead
  state_->waiting.c_iflag &= ~static_cast<tcflag_t>(ICRNL | INLCR | IGNCR | IXON);
  state_->waiting.c_cc[VMIN] = 1;
  state_->waiting.c_cc[VTIME] = 0;
  state_->waiting.c_cc[VSUSP] = _POSIX_VDISABLE;  // a shell would find the terminal without echo
  state_->editing = state_->waiting;
  state_->editing.c_lflag &= ~static_cast<tcflag_t>(ISIG);
  shared.current = state_->waiting;
  for (Handled& row : state_->handled) install(row);
  state_->enter(state_->waiting);
  write_quietly(STDOUT_FILENO, kPasteOn);
}

Terminal::~Terminal() {
  ::tcsetattr(STDIN_FILENO, TCSADRAIN, &shared.original);
  write_quietly(STDOUT_FILENO, kPasteOff);
  for (const Handled& row : state_->handled) ::sigaction(row.number, &row.old, nullptr);
  shared.wake = -1;
  ::close(state_->pipe[0]);
  ::close(state_->pipe[1]);
}

Terminal::Size Terminal::size() {
  winsize size = {};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return {};
  return {.width = size.ws_col, .height = size.ws_row > 0 ? size.ws_row : 24};
}

void Terminal::suspend() {
  ::tcsetattr(STDIN_FILENO, TCSADRAIN, &shared.original);
  write_quietly(STDOUT_FILENO, kPasteOff);
  ::raise(SIGTSTP);  // returns after SIGCONT, or at once where no shell could wake us
  ::tcsetattr(STDIN_FILENO, TCSADRAIN, &shared.current);
  write_quietly(STDOUT_FILENO, kPasteOn);
}

EditEvent Terminal::read_line(LineEditor& editor) {
  state_->enter(state_->editing);
  struct Back {
    State& state;
    ~Back() { state.enter(state.waiting); }
  } back{*state_};
  const auto resize = [&] {
    shared.resized = 0;
    const Size now = size();
    editor.resize(now.width, now.height);
  };
  const Size first = size();
  editor.begin(first.width, first.height);
  EditEvent event = editor.feed("");
  while (true) {
    write_terminal(editor.take_output());
    if (event == EditEvent::kSuspend) {
      suspend();
      editor.redraw();
      event = EditEvent::kNone;
      continue;
    }
    if (event != EditEvent::kNone) return event;
    std::array<pollfd, 2> ready = {{{STDIN_FILENO, POLLIN, 0}, {state_->pipe[0], POLLIN, 0}}};
    const int count = ::poll(ready.data(), ready.size(), editor.undecided() ? kEscapeMs : -1);
    if (count < 0 && errno != EINTR) fail("poll: {}", std::strerror(errno));
    char bytes[4096];
    if (count > 0 && ready[1].revents) [[maybe_unused]]
      const auto drained = ::read(state_->pipe[0], bytes, sizeof bytes);
    if (shared.resized) resize();
    if (count == 0) event = editor.settle();
    if (count <= 0 || !ready[0].revents) continue;
    const ssize_t got = ::read(STDIN_FILENO, bytes, sizeof bytes);
    if (got > 0) event = editor.feed({bytes, static_cast<size_t>(got)});
    if (got == 0 || (got < 0 && errno != EINTR && errno != EAGAIN)) return EditEvent::kEnd;  // it is gone
  }
}

struct OnInterrupt::State {
  Handled handled{SIGINT, kt_on_interrupt};
};

OnInterrupt::OnInterrupt(Stoppable& target) : state_(std::make_unique<State>()) {
  stoppable.store(&target);
  install(state_->handled);
}

OnInterrupt::~OnInterrupt() {
  ::sigaction(SIGINT, &state_->handled.old, nullptr);
  stoppable.store(nullptr);
}

}  // namespace kt::inline terminal
