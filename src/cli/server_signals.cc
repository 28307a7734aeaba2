#include "cli/server_signals.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "base/error.h"

namespace kt::inline cli {
namespace {

constexpr int kInterrupted = 130;
int stop_pipe[2] = {-1, -1};
volatile std::sig_atomic_t stop_count = 0;

void on_stop(int) {
  if (stop_count > 0) ::_exit(kInterrupted);
  stop_count = 1;
  [[maybe_unused]] const auto written = ::write(stop_pipe[1], "x", 1);
}

// Where the signal's handler leaves its word: 'r' for reload, 'e' for the end.
int hangup_pipe[2] = {-1, -1};

void on_hangup(int) {
  const int before = errno;
  [[maybe_unused]] const auto written = ::write(hangup_pipe[1], "r", 1);
  errno = before;
}

}  // namespace

StopSignals::StopSignals() {
  if (::pipe2(stop_pipe, O_CLOEXEC | O_NONBLOCK) != 0) fail_as(ErrorKind::kInternal, "pipe: errno {}", errno);
  stop_count = 0;
  for (int signal : {SIGINT, SIGTERM}) {
    struct sigaction action{};
    action.sa_handler = on_stop;
    action.sa_flags = SA_RESTART;
    ::sigaction(signal, &action, nullptr);
  }
}

bool StopSignals::wait(int milliseconds) const {
  pollfd one{stop_pipe[0], POLLIN, 0};
  return ::poll(&one, 1, milliseconds) > 0;
}

ReloadOnHangup::ReloadOnHangup(ServerFiles& files, Server& server) {
  if (::pipe2(hangup_pipe, O_CLOEXEC) != 0) fail_as(ErrorKind::kInternal, "pipe: errno {}", errno);
  ::fcntl(hangup_pipe[1], F_SETFL, O_NONBLOCK);  // a full one has been asked often enough
  struct sigaction action{}, before{};
  action.sa_handler = on_hangup;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGHUP, &action, &before);
  const bool may_hang_up = before.sa_handler != SIG_IGN && ::isatty(STDIN_FILENO) == 1;  // nohup ignores it
  thread_ = std::thread([&files, &server, may_hang_up] {
    char word = 0;
    while (true) {
      const ssize_t n = ::read(hangup_pipe[0], &word, 1);
      if (n < 0 && errno == EINTR) continue;
      if (n != 1 || word == 'e') return;
      if (may_hang_up && ::isatty(STDIN_FILENO) == 0)
        ::kill(::getpid(), SIGTERM);
      else
        files.reload(server);
    }
  });
}

ReloadOnHangup::~ReloadOnHangup() {
  std::signal(SIGHUP, SIG_IGN);
  ::fcntl(hangup_pipe[1], F_SETFL, 0);
  [[maybe_unused]] const auto written = ::write(hangup_pipe[1], "e", 1);
  thread_.join();
  for (int& end : hangup_pipe) {
    ::close(end);
    end = -1;
  }
}

}  // namespace kt::inline cli
