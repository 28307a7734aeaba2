// Requests, and replies, out of the bytes of a connection. Pure and bounded: no sockets, no clocks, and never
// more memory than the limits. Strict, because what two parties read differently can be abused.
#pragma once
#include <optional>
#include <string>
#include <string_view>

#include "http/head.h"
#include "http/message.h"

namespace kt::inline http {

class RequestParser {
 public:
  enum class Stage { kIdle, kHead, kBody, kDone, kFailed };
  explicit RequestParser(const HttpLimits& limits);

  // Takes bytes off the front of `bytes` until a request is whole or has failed; what is left belongs to the
  // next one.
  void push(std::string_view& bytes);
  Stage stage() const { return stage_; }
  const HttpFailure& failure() const { return failure_; }
  // The request waits for "100 Continue" before it sends its body.
  bool awaits_continue() const { return stage_ == Stage::kBody && expects_continue_; }
  bool keep_alive() const { return keep_alive_; }
  bool old_version() const { return old_version_; }  // HTTP/1.0
  const HttpRequest& request() const { return request_; }
  // The whole request; the parser begins the next one.
  HttpRequest take();

 private:
  void fail(HttpFailure failure);
  void fail(int status, std::string why) { fail(HttpFailure{status, std::move(why)}); }
  void read_first_line(std::string_view line);
  void read_target(std::string_view target);
  void end_head();

  HttpLimits limits_;
  Stage stage_ = Stage::kIdle;
  HeadReader head_;
  BodyDecoder body_;
  bool keep_alive_ = false, old_version_ = false, expects_continue_ = false;
  HttpRequest request_;
  HttpFailure failure_;
};

class ReplyReader {
 public:
  enum class Stage { kHead, kBody, kDone, kFailed };
  // `method` of the request: a reply to HEAD has no body.
  ReplyReader(const HttpLimits& limits, std::string_view method);

  // Takes bytes off the front of `bytes` until the reply is whole or has failed; appends the body to `out`.
  void push(std::string_view& bytes, std::string& out);
  // The connection ended.
  void close();
  Stage stage() const { return stage_; }
  const HttpFailure& failure() const { return failure_; }
  bool keep_alive() const { return keep_alive_; }
  // Status, type and headers, from kBody on.
  const HttpReply& reply() const { return reply_; }

 private:
  void fail(HttpFailure failure);
  void fail(int status, std::string why) { fail(HttpFailure{status, std::move(why)}); }
  void read_first_line(std::string_view line);
  void end_head();

  HttpLimits limits_;
  bool head_only_;
  Stage stage_ = Stage::kHead;
  HeadReader head_;
  BodyDecoder body_;
  bool keep_alive_ = false, old_version_ = false;
  HttpReply reply_;
  HttpFailure failure_;
};

// %XX decoded; nullopt for an escape without two hex digits, and for %00.
std::optional<std::string> decode_path(std::string_view path);

}  // namespace kt::inline http
