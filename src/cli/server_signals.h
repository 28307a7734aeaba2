// Signals of kt run: to stop, and to read its files again.
#pragma once
#include <thread>

#include "cli/server_files.h"
#include "server/server.h"

namespace kt::inline cli {

// Signals that ask the server to stop become bytes in a pipe; the second one ends the process at once.
class StopSignals {
 public:
  StopSignals();
  // Waits so long for the first signal.
  bool wait(int milliseconds) const;
};

// While this lives, SIGHUP means ServerFiles::reload, on a thread of its own; where it is the word of a terminal that
// is gone, it means SIGTERM. One at a time.
class ReloadOnHangup {
 public:
  // Both must outlive this.
  ReloadOnHangup(ServerFiles& files, Server& server);
  ~ReloadOnHangup();
  ReloadOnHangup(const ReloadOnHangup&) = delete;
  ReloadOnHangup& operator=(const ReloadOnHangup&) = delete;

 private:
  std::thread thread_;
};

}  // namespace kt::inline cli
