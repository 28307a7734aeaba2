// Requests and replies as the bytes that go over the wire.
#pragma once
#include <memory>
#include <string>
#include <string_view>

#include "http/message.h"

namespace kt::inline http {

struct ReplyForm {
  bool old_version = false;  // the request was HTTP/1.0
  bool head_only = false;    // the request was HEAD
  bool keep_alive = true;
  std::shared_ptr<const HttpHeaders> always = {};  // sent with every reply
};

bool may_have_body(int status);  // not 204, 304, 1xx
// The head and the whole body.
std::string encode_reply(const HttpReply& reply, const ReplyForm& form);
// The head of a body that comes in pieces: chunked, or until close for HTTP/1.0.
std::string encode_stream_head(const HttpReply& reply, const ReplyForm& form);
void append_chunk(std::string& out, std::string_view piece);  // nothing for an empty piece
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";

// `target` is the path as it was decoded; `host` what the Host header says.
std::string encode_request(const HttpRequest& request, std::string_view target, std::string_view host);

}  // namespace kt::inline http
