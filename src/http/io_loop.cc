#include "http/io_loop.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/error.h"
#include "base/log.h"

namespace kt::inline http {
namespace {

using namespace std::chrono_literals;

constexpr size_t kReadBytes = 64 << 10;
constexpr int kAcceptsPerTurn = 64;
constexpr int kRefused = 64;  // connections above max_connections that are told so; more are just closed
constexpr auto kAcceptPause = 100ms;

// Keys of epoll that are no connection's: the mailbox, then the listeners.
constexpr uint64_t kMailKey = 0, kFirstListenerKey = 1;

}  // namespace

IoLoop::IoLoop(HttpServerOptions options, std::vector<Fd> listeners, std::function<void(HttpJob)> dispatch)
    : options_(std::move(options)),
      limits_{.head = options_.max_head, .body = options_.max_body},
      dispatch_(std::move(dispatch)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      listeners_(std::move(listeners)),
      next_id_(kFirstListenerKey + listeners_.size()),
      buffer_(kReadBytes) {
  if (!epoll_) fail_as(ErrorKind::kUnsupported, "epoll: {}", error_name(errno));
  // Edge-triggered: a wake-up need not be read back.
  epoll_event wake{.events = EPOLLIN | EPOLLET, .data = {.u64 = kMailKey}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, mailbox_->wake_fd(), &wake);
  for (size_t i = 0; i < listeners_.size(); ++i) {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = kFirstListenerKey + i}};
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listeners_[i].get(), &event);
  }
}

IoLoop::~IoLoop() = default;

void IoLoop::run() {
  while (!mailbox_->stopping()) {
    try {
      turn();
    } catch (const std::exception& e) {
      KT_LOG(LogLevel::kError, "http: {}", e.what());
    }
  }
  run_mail();
  mailbox_->close();
  close_all();
}

void IoLoop::turn() {
  run_mail();
  std::array<epoll_event, 256> events;
  const int timeout = mailbox_->may_sleep() ? sleep_ms() : 0;
  const int n = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
  mailbox_->awake();
  for (int i = 0; i < n; ++i) {
    const uint64_t key = events[static_cast<size_t>(i)].data.u64;
    if (key == kMailKey) continue;
    if (key < kFirstListenerKey + listeners_.size()) {
      accept_all(listeners_[key - kFirstListenerKey].get());
      continue;
    }
    const auto found = all_.find(key);
    if (found == all_.end()) continue;
    Connection& c = *found->second;
    try {
      on_event(c, events[static_cast<size_t>(i)].events);
    } catch (const std::exception& e) {
      KT_LOG(LogLevel::kError, "http: a connection was closed: {}", e.what());
      close(c);
    }
  }
  if (Clock::now() >= std::min(next_check_, accept_again_)) check_deadlines();
  free_closed();
}

void IoLoop::run_mail() {
  const Mailbox::Mail mail = mailbox_->take();
  for (const auto& call : mail.calls) {
    try {
      call();
    } catch (const std::exception& e) {
      KT_LOG(LogLevel::kError, "http: a posted call failed: {}", e.what());
    }
  }
  for (const auto& exchange : mail.ready) {
    const auto found = all_.find(exchange->connection());
    if (found == all_.end() || found->second->exchange != exchange) continue;
    try {
      pump(*found->second);
    } catch (const std::exception& e) {
      KT_LOG(LogLevel::kError, "http: a connection was closed: {}", e.what());
      close(*found->second);
    }
  }
  free_closed();
}

void IoLoop::close_all() {
  listeners_.clear();
  for (const auto& [id, connection] : all_) close(*connection);
  free_closed();
}

int IoLoop::sleep_ms() const {
  const Clock::time_point next = std::min(next_check_, accept_again_);
  if (next == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

// Later deadlines need no work here: the check finds them when the earlier one has come.
void IoLoop::set_deadline(Connection& c, Clock::time_point when) {
  c.deadline = when;
  next_check_ = std::min(next_check_, when);
}

void IoLoop::check_deadlines() {
  const Clock::time_point now = Clock::now();
  if (now >= accept_again_) {
    accept_again_ = Clock::time_point::max();
    watch_listeners(EPOLLIN);
  }
  next_check_ = Clock::time_point::max();
  for (const auto& [id, connection] : all_) {
    if (connection->phase != Phase::kClosed && connection->deadline <= now) on_deadline(*connection);
    if (connection->phase != Phase::kClosed) next_check_ = std::min(next_check_, connection->deadline);
  }
}

void IoLoop::on_deadline(Connection& c) {
  const bool in_request = c.phase == Phase::kReading && c.parser.stage() != RequestParser::Stage::kIdle;
  if (!in_request) return close(c);
  refuse(c, 408, text("the request did not arrive within {} ms", options_.request_timeout.count()));
}

void IoLoop::watch_listeners(uint32_t events) {
  for (size_t i = 0; i < listeners_.size(); ++i) {
    epoll_event event{.events = events, .data = {.u64 = kFirstListenerKey + i}};
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listeners_[i].get(), &event);
  }
}

void IoLoop::accept_all(int listener) {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    Fd socket(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) {
      adopt(std::move(socket));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return;
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      return pause_accepting(errno);
    }
    // Anything else is the fate of one connection.
  }
}

// The connection stays in the queue and would wake us at once again.
void IoLoop::pause_accepting(int error) {
  log_once(LogLevel::kWarning, "http: no new connections for a moment: {}", error_name(error));
  watch_listeners(0);
  accept_again_ = Clock::now() + kAcceptPause;
}

void IoLoop::adopt(Fd socket) {
  const int others = connections_;
  if (others >= options_.max_connections + kRefused) return;
  set_no_delay(socket.get());
  const uint64_t id = next_id_++;
  auto made = std::make_unique<Connection>(Connection{
      .id = id, .socket = std::move(socket), .parser = RequestParser(limits_), .share = Share(bodies_)});
  epoll_event event{.events = EPOLLIN | EPOLLRDHUP, .data = {.u64 = id}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, made->socket.get(), &event) != 0) return;
  made->interest = event.events;
  if (options_.tls) made->tls = options_.tls->session();
  Connection& c = *all_.emplace(id, std::move(made)).first->second;
  connections_ = others + 1;
  set_deadline(c, Clock::now() + options_.idle_timeout);
  std::string refusal;
  if (*draining_) {
    refusal = "the server is shutting down";
  } else if (others >= options_.max_connections) {
    refusal = text("there are {} connections already", others);
  }
  if (refusal.empty()) return;
  if (c.tls) {
    c.refusal = std::move(refusal);  // for after the handshake
  } else {
    refuse(c, 503, refusal);
  }
}

void IoLoop::drain() {
  mailbox_->post([this] {
    *draining_ = true;
    for (const auto& [id, connection] : all_)
      if (connection->phase == Phase::kReading && connection->parser.stage() == RequestParser::Stage::kIdle)
        close(*connection);
    drain_begun_ = true;
  });
}

void IoLoop::close(Connection& c) {
  if (c.phase == Phase::kClosed) return;
  // Nothing is said where a reply is cut off: nobody shall take it for whole.
  if (c.out.empty() && !c.exchange && c.phase != Phase::kLingering) say_end(c);
  c.phase = Phase::kClosed;
  c.socket.reset();
  closed_.push_back(c.id);
  if (c.exchange) {
    c.exchange->mark_gone();
    end_exchange(c, Reply::kCut);
  }
}

void IoLoop::free_closed() {
  for (const uint64_t id : closed_) all_.erase(id);
  closed_.clear();
  connections_ = static_cast<int>(all_.size());
}

HttpReply IoLoop::error_reply(int status, const std::string& why) const {
  if (options_.on_error) {
    try {
      return options_.on_error(status, why);
    } catch (const std::exception& e) {
      KT_LOG(LogLevel::kError, "http: on_error({}) failed: {}", status, e.what());
    }
  }
  return {.status = status, .type = "text/plain", .body = why + "\n"};
}

void IoLoop::refuse(Connection& c, int status, const std::string& why) {
  const ReplyForm form{.old_version = c.parser.old_version(),
                       .head_only = c.parser.request().method == "HEAD",
                       .keep_alive = false,
                       .always = options_.headers};
  begin_record(c);
  if (c.parser.request().headers.empty()) c.record.method = c.record.path = {};  // nothing was read yet
  c.record.status = status;
  end_record(c, Reply::kWhole);
  put(c, encode_reply(error_reply(status, why), form));
  c.in.clear();
  c.parser = RequestParser(limits_);
  c.share.set(0);
  c.phase = Phase::kFlushing;
  set_deadline(c, Clock::now() + options_.write_timeout);
  flush(c);
}

}  // namespace kt::inline http
