#include "server/answer.h"

#include <sys/random.h>

#include <cstdio>

#include "base/text.h"
#include "server/api_error.h"
#include "server/service.h"

namespace kt::inline server {
namespace {

int status_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInput:
      return 400;
    case ErrorKind::kMemory:
      return 503;
    case ErrorKind::kUnsupported:
      return 501;
    case ErrorKind::kInternal:
      return 500;
  }
  return 500;
}

}  // namespace

std::string random_id(std::string_view prefix) {
  unsigned char bytes[12];
  if (::getrandom(bytes, sizeof bytes, 0) != sizeof bytes) fail_as(ErrorKind::kInternal, "getrandom failed");
  std::string out(prefix);
  for (unsigned char byte : bytes) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

OrderedJson usage_json(const Usage& usage) {
  OrderedJson out = {{"prompt_tokens", usage.prompt_tokens},
                     {"completion_tokens", usage.completion_tokens},
                     {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
                     {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
  if (usage.reasoning_tokens > 0)
    out["completion_tokens_details"] = {{"reasoning_tokens", usage.reasoning_tokens}};
  return out;
}

Answer::Answer(Service& service, Responder responder, bool stream, size_t sequences, size_t per_prompt)
    : service_(service),
      responder_(std::move(responder)),
      stream_(stream),
      sequences_(sequences),
      per_prompt_(per_prompt) {}

Answer::~Answer() { service_.forget(this); }

void Answer::send_event(std::string_view json) const {
  std::string piece;
  piece.reserve(json.size() + 8);
  piece += "data: ";
  piece += json;
  piece += "\n\n";
  responder_.send(piece);
}

void Answer::reply(std::string json) const {
  service_.metrics().count_reply(200);
  responder_.reply({.body = std::move(json)});
}

std::string Answer::stream_error(int status, const std::string& why) const {
  return "data: " + error_body(status, why) + "\n\ndata: [DONE]\n\n";
}

HttpReply Answer::whole_error(int status, const std::string& why) const { return error_reply(status, why); }

void Answer::refuse(int status, const std::string& why) {
  if (over_) return;
  over_ = true;
  service_.metrics().count_reply(status);
  if (stream_ && begun_) {
    responder_.send(stream_error(status, why));
    responder_.end();
  } else {
    responder_.reply(whole_error(status, why));
  }
  service_.cancel(*this);
}

void Answer::abort(int status, std::string why) {
  {
    const std::lock_guard lock(mutex_);
    abort_status_ = status;
    abort_why_ = std::move(why);
  }
  service_.cancel(*this);
}

void Answer::take(size_t sequence, const AnswerEvent& event) {
  if (event.finish) service_.metrics().count_end(*event.finish);
  if (over_) return;
  if (event.finish && event.finish->reason == FinishReason::kError) {
    const auto fault = Service::model_fault();
    return fault ? refuse(503, *fault) : refuse(status_of(event.finish->error_kind), event.finish->error);
  }
  if (event.finish && event.finish->reason == FinishReason::kCancelled) {
    // Nobody reads a reply to a client that left; it is counted apart.
    const bool left = responder_.gone();
    int status = left ? kClientLeft : 503;
    std::string why = left ? "the client left" : "the server is stopping";
    {
      const std::lock_guard lock(mutex_);
      if (abort_status_ != 0) {
        status = abort_status_;
        why = abort_why_;
      }
    }
    return refuse(status, why);
  }
  if (!begun_) {
    begun_ = true;
    if (stream_) {
      service_.metrics().count_reply(200);
      responder_.start({.type = "text/event-stream; charset=utf-8",
                        .headers = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}}});
    }
    begin();
  }
  if (event.finish) {
    usage_.completion_tokens += event.finish->output_tokens;
    if (sequence % per_prompt_ == 0) {
      usage_.prompt_tokens += event.finish->prompt_tokens;
      usage_.cached_tokens += event.finish->cached_tokens;
    }
  }
  this->event(sequence, event);
  if (!event.finish || ++ended_ < sequences_) return;
  over_ = true;
  responder_.note(text("{}+{}", usage_.prompt_tokens, usage_.completion_tokens));
  end();
  if (stream_) responder_.end();
}

}  // namespace kt::inline server
