// The life of one connection in the loop: read, answer, flush, and the ways to end.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>

#include "base/log.h"
#include "base/text.h"
#include "http/io_loop.h"

namespace kt::inline http {
namespace {

using namespace std::chrono_literals;

constexpr int kReadsPerTurn = 4;  // one connection's share before the others have theirs
constexpr auto kLinger = 1s;
constexpr size_t kLingerBytes = 64 << 20;
constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";
constexpr size_t kKeptBuffer = 256 << 10;  // a larger one is given back when it is empty
constexpr size_t kMostUnasked =
    256 << 10;  // bytes that a TLS session may want sent before there is a request

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

// A client that closed its sending side has mostly closed both, but may be waiting for its reply (echo ... | nc). TCP
// says the same in both cases until bytes are sent: what is closed answers them with a reset, which comes as EPOLLERR.
// A stream sends some soon; where nothing was sent yet, an interim reply does, which clients have to pass over (RFC
// 9110, 15.2). HTTP/1.0 has none, so there the kernel asks from time to time.
void IoLoop::on_half_close(Connection& c) {
  c.half_closed = true;
  watch_peer(c.socket.get());
  if (!c.reply_begun && !c.exchange->old_version()) put(c, std::string(kContinue));
  flush(c);
}

void IoLoop::read_some(Connection& c) {
  for (int i = 0; i < kReadsPerTurn && c.phase == Phase::kReading; ++i) {
    const ssize_t n = recv(c.socket.get(), buffer_.data(), buffer_.size(), 0);
    if (n > 0) {
      take(c, {buffer_.data(), static_cast<size_t>(n)});
      if (static_cast<size_t>(n) < buffer_.size()) return;
      continue;
    }
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    return close(c);
  }
}

void IoLoop::take(Connection& c, std::string_view wire) {
  if (!c.tls) return feed(c, wire);
  if (!take_tls(c, wire)) return;
  feed(c, plain_);
  if (c.phase == Phase::kReading && c.tls->ended()) close(c);
}

// What the bytes mean, into plain_; false where they were the connection's end.
bool IoLoop::take_tls(Connection& c, std::string_view wire) {
  if (!std::exchange(c.greeted, true)) {
    set_deadline(c, Clock::now() + options_.request_timeout);
    // No handshake begins with a letter, and every request does.
    if (wire.front() >= 'A' && wire.front() <= 'Z') {
      c.tls.reset();
      refuse(c, 400,
             "this port speaks HTTPS, and the request came without: its address begins with https://");
      return false;
    }
  }
  const bool was_open = c.tls->open();
  plain_.clear();
  c.tls->receive(wire, plain_, c.out);
  if (!c.tls->failure().empty()) {  // an alert says why, and nothing else can be said
    c.phase = Phase::kFlushing;
    set_deadline(c, Clock::now() + options_.write_timeout);
    flush(c);
    return false;
  }
  if (!was_open && c.tls->open()) {
    set_deadline(c, Clock::now() + options_.idle_timeout);
    if (!c.refusal.empty()) {
      refuse(c, 503, c.refusal);
      return false;
    }
  }
  if (c.out.size() - c.out_at > kMostUnasked) {  // it asks for more and more answers of TLS, and reads none
    close(c);
    return false;
  }
  if (!c.out.empty()) flush(c);
  return c.phase == Phase::kReading;
}

// Bytes that are meant, to be sent.
void IoLoop::put(Connection& c, std::string bytes) {
  if (c.tls) {
    c.tls->seal(bytes, c.out);
  } else if (c.out.empty()) {
    c.out = std::move(bytes);
  } else {
    c.out += bytes;
  }
}

void IoLoop::feed(Connection& c, std::string_view bytes) {
  using Stage = RequestParser::Stage;
  if (bytes.empty()) return;
  if (c.parser.stage() == Stage::kIdle) {
    c.since = Clock::now();
    set_deadline(c, c.since + options_.request_timeout);
  }
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
  put(c, std::string(kContinue));
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
  begin_record(c);
  set_deadline(c, Clock::time_point::max());
  dispatch_(
      {.request = c.parser.take(), .share = std::exchange(c.share, Share(bodies_)), .exchange = c.exchange});
}

void IoLoop::end_exchange(Connection& c, Reply reply) {
  if (options_.on_done) {
    c.record.status = c.exchange->status();
    c.record.note = c.exchange->take_note();
    end_record(c, reply);
  }
  c.exchange.reset();
  --busy_;
}

void IoLoop::begin_record(Connection& c) {
  if (!options_.on_done) return;
  c.record = {.client = c.socket ? peer_text(c.socket.get()) : "-",
              .method = c.parser.request().method,
              .path = c.parser.request().path};
}

void IoLoop::end_record(Connection& c, Reply reply) {
  if (!options_.on_done) return;
  const bool timed = c.since != Clock::time_point{};
  c.record.whole = reply == Reply::kWhole;
  c.record.seconds = timed ? std::chrono::duration<double>(Clock::now() - c.since).count() : 0;
  try {
    options_.on_done(c.record);
  } catch (const std::exception& e) {
    KT_LOG(LogLevel::kError, "http: what is told of requests failed: {}", e.what());
  }
}

void IoLoop::pump(Connection& c) {
  Exchange::Taken taken = c.exchange->take();
  if (taken.failure) {
    taken.bytes = encode_reply(error_reply(500, *taken.failure), c.exchange->form_now());
    taken.ended = true;
  }
  put(c, std::move(taken.bytes));
  c.reply_ended = taken.ended;
  c.reply_begun = c.reply_begun || !c.out.empty();
  flush(c);
  if (!taken.cut) return;
  c.tls.reset();  // an end without its word for it, so that nobody takes the reply for whole
  close(c);
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
  end_exchange(c, Reply::kWhole);
  if (closes) return linger(c);
  if (*draining_) return close(c);
  c.phase = Phase::kReading;
  set_deadline(c, Clock::now() + options_.idle_timeout);
  const std::string next = std::exchange(c.in, {});
  feed(c, next);
}

// TLS's word for the end. Where the kernel has no room for so few bytes, nobody reads.
void IoLoop::say_end(Connection& c) {
  if (!c.tls) return;
  std::string wire;
  c.tls->end(wire);
  if (!wire.empty()) send(c.socket.get(), wire.data(), wire.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void IoLoop::linger(Connection& c) {
  say_end(c);
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

}  // namespace kt::inline http
