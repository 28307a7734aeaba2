// Errors in the shape that clients of OpenAI's API read.
#pragma once
#include <stdexcept>
#include <string>
#include <string_view>

#include "http/message.h"

namespace kt::inline server {

// Thrown by what answers a request; becomes the reply.
class ApiError : public std::runtime_error {
 public:
  // `param` is the field at fault, or empty.
  ApiError(int status, const std::string& message, std::string param = {})
      : std::runtime_error(message), status_(status), param_(std::move(param)) {}
  int status() const noexcept { return status_; }
  const std::string& param() const noexcept { return param_; }

 private:
  int status_;
  std::string param_;
};

// {"error": {"message", "type", "param", "code"}}; the type follows from the status.
std::string error_body(int status, std::string_view message, std::string_view param = {});
// {"type": "error", "error": {...}}: the same for Anthropic's clients, which look at the outer type.
std::string messages_error_body(int status, std::string_view message);
HttpReply error_reply(int status, std::string_view message, std::string_view param = {});

}  // namespace kt::inline server
