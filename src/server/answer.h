// One reply being made: the events of its sequences come in, JSON goes out, whole or as server-sent events.
// What the JSON looks like is the business of ChatAnswer, CompletionAnswer and their like.
#pragma once
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/scheduler.h"
#include "http/server.h"
#include "text/json.h"

namespace kt::inline server {

class Service;

// What a token or the end of a sequence brought.
struct AnswerEvent {
  std::optional<SampledToken> token = {};
  std::string text = {};
  std::optional<Finish> finish = {};
  std::vector<SampledToken> prompt = {};  // as GenerateEvent's
};

// The numbers of `usage`, over all sequences.
struct Usage {
  int64_t prompt_tokens = 0, completion_tokens = 0, cached_tokens = 0, reasoning_tokens = 0;
};

class Answer {
 public:
  // Sequences that follow each other in groups of `per_prompt` have one prompt.
  Answer(Service& service, Responder responder, bool stream, size_t sequences, size_t per_prompt);
  virtual ~Answer();
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;

  // On the server's thread.
  void take(size_t sequence, const AnswerEvent& event);
  // From any thread: ends it with this error.
  void abort(int status, std::string why);

  const Responder& responder() const { return responder_; }
  std::chrono::steady_clock::time_point started() const { return started_; }

 protected:
  // Pieces of a stream for one event, and what begins and ends one. Whole answers collect in event() instead.
  virtual void begin() {}
  virtual void event(size_t sequence, const AnswerEvent& event) = 0;
  virtual void end() = 0;
  virtual std::string stream_error(int status, const std::string& why) const;
  virtual HttpReply whole_error(int status, const std::string& why) const;

  bool stream() const { return stream_; }
  size_t sequences() const { return sequences_; }
  const Usage& usage() const { return usage_; }
  void count_reasoning_token() { ++usage_.reasoning_tokens; }
  Service& service() const { return service_; }
  void send(const std::string& piece) const { responder_.send(piece); }
  void send_event(std::string_view json) const;  // "data: ...\n\n"
  void reply(std::string json) const;            // the whole answer

 private:
  friend class Service;
  void refuse(int status, const std::string& why);

  Service& service_;
  const Responder responder_;
  const bool stream_;
  const size_t sequences_, per_prompt_;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  // On the server's thread.
  bool begun_ = false, over_ = false;
  size_t ended_ = 0;
  Usage usage_;

  std::mutex mutex_;  // of what follows
  std::vector<RequestId> ids_;
  bool cancelled_ = false;
  int abort_status_ = 0;
  std::string abort_why_;
};

// "chatcmpl-" and 24 random hexadecimal digits.
std::string random_id(std::string_view prefix);
OrderedJson usage_json(const Usage& usage);

}  // namespace kt::inline server
