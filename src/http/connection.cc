// The life of one connection in the loop: read, answer, flush, and the ways to end.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>

#include "base/text.h"
#include "http/io_loop.h"

namespace kt {
namespace {

using namespace std::chrono_literals;

constexpr int kReadsPerTurn = 4;  // one connection's share before the others have theirs
constexpr auto kLinger = 1s;
constexpr size_t kLingerBytes = 64 << 20;
constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
constexpr size_t kKeptBuffer = 256 << 10;  // a larger one is given back when it is empty

}  // namespace

void IoLoop::set_interest(Connection& c, uint32_t wanted) {
  if (c.interest == wanted) return;
  epoll_event event{.events = wanted, .data = {.u64 = c.id}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, c.socket.get(), &event);
  c.interest = wanted;
}

void IoLoop::set_interest_of_phase(Connection& c) {
  uint32_t wanted = EPOLLIN | EPOLLRDHUP;
  // While a request runs, reading is switched off only when something came: most clients wait for the reply,
  // and each change is a system call.
  if (c.phase == Phase::kRunning) wanted = (c.interest & EPOLLIN) | EPOLLRDHUP;
  if (c.phase == Phase::kRunning && c.half_closed) wanted = 0;
  if (c.phase == Phase::kFlushing) wanted = 0;
  if (c.out.size() > c.out_at) wanted |= EPOLLOUT;
  set_interest(c, wanted);
}

void IoLoop::on_event(Connection& c, uint32_t events) {
  // Both sides have closed: what came meanwhile has to be read, or the close would take the reply back.
  if (events & EPOLLHUP && !(events & EPOLLERR) && c.phase == Phase::kLingering) return throw_away(c);
  if (events & (EPOLLERR | EPOLLHUP)) return close(c);
  if (events & EPOLLOUT) flush(c);
  if (!(events & (EPOLLIN | EPOLLRDHUP))) return;
  if (c.phase == Phase::kReading) return read_some(c);
  if (c.phase == Phase::kLingering) return throw_away(c);
  if (c.phase != Phase::kRunning) return;
  if (events & EPOLLRDHUP) return on_half_close(c);
  set_interest(c, c.interest & ~static_cast<uint32_t>(EPOLLIN));
}

// A client that closed its sending side has mostly closed both, but may be waiting for its reply (echo ... | nc). TCP says
// the same in both cases until bytes are sent: what is closed answers them with a reset, which comes as EPOLLERR. A stream
// sends some soon; where nothing was sent yet, an interim reply does, which clients have to pass over (RFC 9110, 15.2).
// HTTP/1.0 has none, so there the kernel asks from time to time.
void IoLoop::on_half_close(Connection& c) {
  c.half_closed = true;
  watch_peer(c.socket.get());
  if (!c.reply_begun && !c.exchange->old_version()) c.out += kContinue;
  flush(c);
}

void IoLoop::read_some(Connection& c) {
  for (int i = 0; i < kReadsPerTurn && c.phase == Phase::kReading; ++i) {
    const ssize_t n = recv(c.socket.get(), buffer_.data(), buffer_.size(), 0);
    if (n > 0) {
      feed(c, {buffer_.data(), static_cast<size_t>(n)});
      if (static_cast<size_t>(n) < buffer_.size()) return;
      continue;
    }
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    return close(c);
  }
}

void IoLoop::feed(Connection& c, std::string_view bytes) {
  using Stage = RequestParser::Stage;
  if (bytes.empty()) return;
  if (c.parser.stage() == Stage::kIdle) set_deadline(c, Clock::now() + options_.request_timeout);
  c.parser.push(bytes);
  if (c.parser.stage() == Stage::kFailed) {
    const HttpFailure failure = c.parser.failure();
    return refuse(c, failure.status, failure.why);
  }
  c.share.set(c.parser.request().body.size());
  if (*bodies_ > options_.max_bodies)
    return refuse(c, 503, text("the requests that run hold {} bytes already", options_.max_bodies));
  const bool wants_more = c.parser.stage() != Stage::kDone;
  if (*draining_ && (!wants_more || c.parser.awaits_continue()))
    return refuse(c, 503, "the server is shutting down");
  if (!wants_more) return begin_exchange(c, bytes);
  if (!c.parser.awaits_continue() || c.continued) return;
  c.continued = true;
  c.out += kContinue;
  flush(c);
}

void IoLoop::begin_exchange(Connection& c, std::string_view rest) {
  const ReplyForm form{.old_version = c.parser.old_version(),
                       .head_only = c.parser.request().method == "HEAD",
                       .keep_alive = c.parser.keep_alive(),
                       .always = options_.headers};
  c.exchange = std::make_shared<Exchange>(Exchange::Setup{.connection = c.id,
                                                          .form = form,
                                                          .max_unsent = options_.max_unsent,
                                                          .mailbox = mailbox_,
                                                          .draining = draining_});
  c.in.assign(rest);
  c.phase = Phase::kRunning;
  c.reply_ended = c.reply_begun = c.continued = c.half_closed = false;
  ++busy_;
  set_deadline(c, Clock::time_point::max());
  dispatch_(
      {.request = c.parser.take(), .share = std::exchange(c.share, Share(bodies_)), .exchange = c.exchange});
}

void IoLoop::end_exchange(Connection& c) {
  c.exchange.reset();
  --busy_;
}

void IoLoop::pump(Connection& c) {
  Exchange::Taken taken = c.exchange->take();
  if (taken.failure) {
    taken.bytes = encode_reply(error_reply(500, *taken.failure), c.exchange->form_now());
    taken.ended = true;
  }
  if (c.out.empty()) {
    c.out = std::move(taken.bytes);
  } else {
    c.out += taken.bytes;
  }
  c.reply_ended = taken.ended;
  c.reply_begun = c.reply_begun || !c.out.empty();
  flush(c);
  if (taken.cut) close(c);
}

void IoLoop::flush(Connection& c) {
  const size_t before = c.out_at;
  while (c.out_at < c.out.size()) {
    const ssize_t n = send(c.socket.get(), c.out.data() + c.out_at, c.out.size() - c.out_at, MSG_NOSIGNAL);
    if (n > 0) {
      c.out_at += static_cast<size_t>(n);
    } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      break;
    } else if (n < 0 && errno != EINTR) {
      return close(c);
    }
  }
  const bool empty = c.out_at == c.out.size(), moved = c.out_at > before;
  if (empty) {
    c.out.clear();
    c.out_at = 0;
    if (c.out.capacity() > kKeptBuffer) c.out.shrink_to_fit();
  } else {
    if (c.out_at > kKeptBuffer && c.out_at > c.out.size() / 2) {
      c.out.erase(0, c.out_at);
      c.out_at = 0;
    }
    if (c.phase != Phase::kReading && (moved || c.deadline == Clock::time_point::max()))
      set_deadline(c, Clock::now() + options_.write_timeout);
  }
  if (c.exchange) c.exchange->set_waiting(c.out.size() - c.out_at);
  if (empty) on_flushed(c);
  if (c.phase != Phase::kClosed) set_interest_of_phase(c);
}

void IoLoop::on_flushed(Connection& c) {
  if (c.phase == Phase::kFlushing) return linger(c);
  if (c.phase != Phase::kRunning) return;
  set_deadline(c, Clock::time_point::max());
  if (!c.reply_ended) return;
  const bool closes = c.exchange->closes();
  end_exchange(c);
  if (closes) return linger(c);
  if (*draining_) return close(c);
  c.phase = Phase::kReading;
  set_deadline(c, Clock::now() + options_.idle_timeout);
  const std::string next = std::exchange(c.in, {});
  feed(c, next);
}

void IoLoop::linger(Connection& c) {
  shutdown(c.socket.get(), SHUT_WR);
  c.phase = Phase::kLingering;
  set_deadline(c, Clock::now() + kLinger);
}

void IoLoop::throw_away(Connection& c) {
  for (int i = 0; i < kReadsPerTurn; ++i) {
    const ssize_t n = recv(c.socket.get(), buffer_.data(), buffer_.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) return close(c);
    c.thrown_away += static_cast<size_t>(n);
    if (c.thrown_away > kLingerBytes) return close(c);
  }
}

}  // namespace kt
