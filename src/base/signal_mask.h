// Which signals a thread takes.
#pragma once
#include <signal.h>

namespace kt::inline base {

// A thread started while this lives takes no signal of those that are sent: they are for the application's
// threads. What a thread brings upon itself (SIGBUS, SIGSEGV, ...) stays its own: blocked, it would end the
// process without asking any handler.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int own : {SIGBUS, SIGSEGV, SIGILL, SIGFPE, SIGTRAP, SIGSYS}) sigdelset(&blocked, own);
    pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace kt::inline base
