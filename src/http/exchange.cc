#include "http/exchange.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>

#include "base/error.h"
#include "base/log.h"

namespace kt::inline http {

Mailbox::Mailbox() : wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!wake_) fail_as(ErrorKind::kUnsupported, "eventfd: {}", error_name(errno));
}

void Mailbox::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
}

template <typename List, typename Item>
void Mailbox::add(List Mail::* list, Item item) {
  bool must_wake;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;  // what the item holds is let go after the lock
    (mail_.*list).push_back(std::move(item));
    must_wake = asleep_;
    asleep_ = false;
  }
  if (must_wake) wake();
}

void Mailbox::post(std::function<void()> call) { add(&Mail::calls, std::move(call)); }
void Mailbox::post(std::shared_ptr<Exchange> ready) { add(&Mail::ready, std::move(ready)); }

Mailbox::Mail Mailbox::take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(mail_, {});
}

bool Mailbox::may_sleep() {
  const std::lock_guard lock(mutex_);
  asleep_ = mail_.empty() && !stopping_;
  return asleep_;
}

void Mailbox::awake() {
  const std::lock_guard lock(mutex_);
  asleep_ = false;
}

void Mailbox::close() {
  Mail dropped;
  const std::lock_guard lock(mutex_);
  closed_ = true;
  std::swap(dropped, mail_);
}

void Mailbox::stop() {
  stopping_ = true;
  wake();
}

Exchange::Exchange(Setup setup) : setup_(std::move(setup)) {}

// A reply that begins while the server drains is the connection's last.
ReplyForm Exchange::form_now() {
  ReplyForm form = setup_.form;
  if (*setup_.draining) form.keep_alive = false;
  closes_ = !form.keep_alive;
  return form;
}

void Exchange::append(std::string_view piece) {
  if (bare_) return;
  if (setup_.form.old_version) {
    out_ += piece;
  } else {
    append_chunk(out_, piece);
  }
}

bool Exchange::queue() { return !std::exchange(queued_, true); }

void Exchange::tell(bool must) {
  if (must) setup_.mailbox->post(shared_from_this());
}

void Exchange::reply(const HttpReply& reply) {
  std::function<void()> dropped;  // may hold a Responder of this exchange: let go after the lock
  bool must_tell;
  {
    const std::lock_guard lock(mutex_);
    if (gone_ || phase_ != Phase::kWaiting) return;
    phase_ = Phase::kEnded;
    status_ = reply.status;
    out_ = encode_reply(reply, form_now());
    dropped = std::exchange(on_gone_, nullptr);
    must_tell = queue();
  }
  tell(must_tell);
}

void Exchange::start(const HttpReply& head) {
  bool must_tell;
  {
    const std::lock_guard lock(mutex_);
    if (gone_ || phase_ != Phase::kWaiting) return;
    phase_ = Phase::kStream;
    status_ = head.status;
    ReplyForm form = form_now();
    bare_ = form.head_only || !may_have_body(head.status);
    if (form.old_version && !bare_) {
      form.keep_alive = false;  // nothing but the close tells where the body ends
      closes_ = true;
    }
    out_ = encode_stream_head(head, form);
    append(head.body);
    must_tell = queue();
  }
  tell(must_tell);
}

void Exchange::send(const std::string& piece) {
  bool must_tell;
  {
    const std::lock_guard lock(mutex_);
    if (gone_ || phase_ != Phase::kStream || piece.empty()) return;
    if (out_.size() + waiting_ > setup_.max_unsent) {
      phase_ = Phase::kEnded;
      cut_ = true;
      gone_ = true;
      out_.clear();
    } else {
      append(piece);
    }
    must_tell = queue();
  }
  tell(must_tell);
}

void Exchange::end() {
  std::function<void()> dropped;
  bool must_tell;
  {
    const std::lock_guard lock(mutex_);
    if (gone_ || phase_ != Phase::kStream) return;
    phase_ = Phase::kEnded;
    if (!setup_.form.old_version && !bare_) out_ += kLastChunk;
    dropped = std::exchange(on_gone_, nullptr);
    must_tell = queue();
  }
  tell(must_tell);
}

void Exchange::fail(std::string why) {
  std::function<void()> dropped;
  bool must_tell;
  {
    const std::lock_guard lock(mutex_);
    if (gone_ || phase_ == Phase::kEnded) return;
    if (phase_ == Phase::kWaiting) {
      failure_ = std::move(why);
      status_ = 500;
    } else {
      cut_ = true;
    }
    phase_ = Phase::kEnded;
    dropped = std::exchange(on_gone_, nullptr);
    must_tell = queue();
  }
  tell(must_tell);
}

void Exchange::on_gone(std::function<void()> call) {
  {
    const std::lock_guard lock(mutex_);
    if (!gone_ && phase_ != Phase::kEnded) std::swap(on_gone_, call);
    if (!gone_) return;
  }
  call();
}

void Exchange::note(std::string remark) {
  const std::lock_guard lock(mutex_);
  note_ = std::move(remark);
}

std::string Exchange::take_note() {
  const std::lock_guard lock(mutex_);
  return std::exchange(note_, {});
}

Exchange::Taken Exchange::take() {
  const std::lock_guard lock(mutex_);
  queued_ = false;
  const bool whole = phase_ == Phase::kEnded && !cut_ && !failure_;
  return {.bytes = std::exchange(out_, {}),
          .ended = whole,
          .cut = cut_,
          .failure = std::exchange(failure_, std::nullopt)};
}

void Exchange::mark_gone() {
  std::function<void()> call;
  {
    const std::lock_guard lock(mutex_);
    gone_ = true;
    call = std::exchange(on_gone_, nullptr);
    out_.clear();
  }
  if (!call) return;
  try {
    call();
  } catch (const std::exception& e) {
    KT_LOG(LogLevel::kError, "http: what a handler left to be called when its client goes failed: {}",
           e.what());
  }
}

Responder::Responder(std::shared_ptr<State> state) : state_(std::move(state)) {}
void Responder::reply(const HttpReply& reply) const { state_->exchange->reply(reply); }
void Responder::start(const HttpReply& head) const { state_->exchange->start(head); }
void Responder::send(const std::string& piece) const { state_->exchange->send(piece); }
void Responder::end() const { state_->exchange->end(); }
void Responder::note(std::string remark) const { state_->exchange->note(std::move(remark)); }
bool Responder::gone() const { return state_->exchange->gone(); }
void Responder::on_gone(std::function<void()> call) const { state_->exchange->on_gone(std::move(call)); }

}  // namespace kt::inline http
