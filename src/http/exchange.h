// What passes between the threads that answer and the thread that owns the sockets. Neither waits for the
// other: a lock is held for as long as it takes to append to a string or a list.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "http/encode.h"
#include "http/message.h"
#include "http/server.h"
#include "http/socket.h"

namespace kt::inline http {

class Exchange;

// Work for the server's thread. It outlives the server where a Responder does; then nothing is taken.
class Mailbox {
 public:
  struct Mail {
    std::vector<std::function<void()>> calls = {};
    std::vector<std::shared_ptr<Exchange>> ready = {};  // have something to send
    bool empty() const { return calls.empty() && ready.empty(); }
  };
  Mailbox();

  void post(std::function<void()> call);
  void post(std::shared_ptr<Exchange> ready);

  // The server's thread. Between may_sleep() and awake() the first mail writes to wake_fd(), at other times
  // none does: may_sleep() is false when there is mail.
  Mail take();
  bool may_sleep();
  void awake();
  void close();  // nothing is taken any more
  void stop();   // from any thread: stopping() becomes true, and the thread is woken
  bool stopping() const { return stopping_; }
  int wake_fd() const { return wake_.get(); }

 private:
  template <typename List, typename Item>
  void add(List Mail::* list, Item item);
  void wake() const;

  Fd wake_;
  std::mutex mutex_;
  Mail mail_;                             // under mutex_
  bool closed_ = false, asleep_ = false;  // under mutex_
  std::atomic<bool> stopping_ = false;
};

// One request's answer. The calls of Responder may come from any thread, the others from the server's.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  struct Setup {
    uint64_t connection = 0;
    ReplyForm form = {};
    size_t max_unsent = 0;
    std::shared_ptr<Mailbox> mailbox = {};
    std::shared_ptr<const std::atomic<bool>> draining = {};  // replies say "Connection: close"
  };
  explicit Exchange(Setup setup);

  void reply(const HttpReply& reply);
  void start(const HttpReply& head);
  void send(const std::string& piece);
  void end();
  // No more will come. 500 and `why` if nothing was sent, else the connection is closed.
  void fail(std::string why);
  void note(std::string remark);
  bool gone() const { return gone_; }
  void on_gone(std::function<void()> call);

  struct Taken {
    std::string bytes = {};
    bool ended = false;  // with these bytes the reply is whole
    bool cut = false;    // after these bytes the connection must be closed: the rest will not come
    std::optional<std::string> failure = {};  // make a reply of it
  };
  Taken take();
  void set_waiting(size_t bytes) { waiting_ = bytes; }  // of what was taken, the kernel has not these
  void mark_gone();                                     // calls what on_gone() was given
  // For a reply that begins now; closes() follows it.
  ReplyForm form_now();
  int status() const { return status_; }  // of the reply; 0: none yet
  std::string take_note();
  bool closes() const { return closes_; }  // the reply said "Connection: close"
  uint64_t connection() const { return setup_.connection; }
  bool old_version() const { return setup_.form.old_version; }  // HTTP/1.0

 private:
  enum class Phase { kWaiting, kStream, kEnded };
  void append(std::string_view piece);
  bool queue();  // under mutex_: whether the mailbox must be told
  void tell(bool must);

  const Setup setup_;
  std::atomic<bool> gone_ = false, closes_ = false;
  std::atomic<size_t> waiting_ = 0;
  std::atomic<int> status_ = 0;
  std::mutex mutex_;
  Phase phase_ = Phase::kWaiting;  // under mutex_, as what follows
  bool queued_ = false, cut_ = false;
  bool bare_ = false;  // the reply has no body: to HEAD, or 204
  std::string out_, note_;
  std::optional<std::string> failure_;
  std::function<void()> on_gone_;
};

struct Responder::State {
  std::shared_ptr<Exchange> exchange;
  explicit State(std::shared_ptr<Exchange> of) : exchange(std::move(of)) {}
  // NOLINTNEXTLINE(bugprone-exception-escape): shared_from_this() throws where nobody shares; this does.
  ~State() { exchange->fail("the request was dropped without a reply"); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
};

}  // namespace kt::inline http
