#include "http/encode.h"

#include <array>
#include <ctime>

#include "base/text.h"
#include "http/head.h"

namespace kt::inline http {
namespace {

constexpr std::string_view kHex = "0123456789ABCDEF";

// A value that somebody made of what a client sent must not become a header or a reply of its own.
void append_field(std::string& out, std::string_view name, std::string_view value) {
  out += name;
  out += ": ";
  for (const char c : value) {
    const auto byte = static_cast<unsigned char>(c);
    out += (byte < 0x20 && c != '\t') || byte == 0x7f ? ' ' : c;
  }
  out += "\r\n";
}

void append_two_digits(std::string& out, int value) {
  out += static_cast<char>('0' + value / 10 % 10);
  out += static_cast<char>('0' + value % 10);
}

// "Sun, 06 Nov 1994 08:49:37 GMT"; strftime would ask the locale.
void append_date(std::string& out) {
  constexpr std::array<std::string_view, 7> kDays = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  constexpr std::array<std::string_view, 12> kMonths = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                                        "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  const std::time_t now = std::time(nullptr);
  std::tm t{};
  gmtime_r(&now, &t);
  out += "Date: ";
  out += kDays[static_cast<size_t>(t.tm_wday)];
  out += ", ";
  append_two_digits(out, t.tm_mday);
  out += ' ';
  out += kMonths[static_cast<size_t>(t.tm_mon)];
  out += ' ';
  out += std::to_string(t.tm_year + 1900);
  for (const auto& [mark, value] : {std::pair{' ', t.tm_hour}, {':', t.tm_min}, {':', t.tm_sec}}) {
    out += mark;
    append_two_digits(out, value);
  }
  out += " GMT\r\n";
}

bool is_framing(std::string_view name) {
  return same_word(name, "content-length") || same_word(name, "transfer-encoding") ||
         same_word(name, "connection");
}

// Everything but what says how long the body is, and the empty line.
std::string start_head(const HttpReply& reply, const ReplyForm& form) {
  std::string out = "HTTP/1.1 ";
  out.reserve(256);
  out += std::to_string(reply.status);
  out += ' ';
  out += reason_of(reply.status);
  out += "\r\n";
  append_date(out);
  if (may_have_body(reply.status) && !reply.type.empty()) append_field(out, "Content-Type", reply.type);
  const auto append_all = [&](const HttpHeaders& headers) {
    for (const auto& [name, value] : headers)
      if (is_token(name) && !is_framing(name) && !same_word(name, "content-type"))
        append_field(out, name, value);
  };
  if (form.always) append_all(*form.always);
  append_all(reply.headers);
  if (!form.keep_alive) out += "Connection: close\r\n";
  if (form.keep_alive && form.old_version) out += "Connection: keep-alive\r\n";
  return out;
}

bool stays_in_path(char c) {
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')) return true;
  return std::string_view("-._~!$&'()*+,;=:@/").find(c) != std::string_view::npos;
}

}  // namespace

bool may_have_body(int status) { return status >= 200 && status != 204 && status != 304; }

std::string encode_reply(const HttpReply& reply, const ReplyForm& form) {
  std::string out = start_head(reply, form);
  if (may_have_body(reply.status)) out += text("Content-Length: {}\r\n", reply.body.size());
  out += "\r\n";
  if (may_have_body(reply.status) && !form.head_only) out += reply.body;
  return out;
}

std::string encode_stream_head(const HttpReply& reply, const ReplyForm& form) {
  std::string out = start_head(reply, form);
  if (may_have_body(reply.status) && !form.old_version) out += "Transfer-Encoding: chunked\r\n";
  out += "\r\n";
  return out;
}

void append_chunk(std::string& out, std::string_view piece) {
  if (piece.empty()) return;
  int shift = 60;
  while (piece.size() >> shift == 0) shift -= 4;
  for (; shift >= 0; shift -= 4) out += kHex[piece.size() >> shift & 15];
  out += "\r\n";
  out += piece;
  out += "\r\n";
}

std::string encode_request(const HttpRequest& request, std::string_view target, std::string_view host) {
  std::string out = request.method + " ";
  for (const char c : target) {
    const auto byte = static_cast<unsigned char>(c);
    if (stays_in_path(c)) {
      out += c;
    } else {
      out += '%';
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    }
  }
  if (!request.query.empty()) out += "?" + request.query;
  out += " HTTP/1.1\r\n";
  append_field(out, "Host", host);
  for (const auto& [name, value] : request.headers)
    if (is_token(name) && !is_framing(name) && !same_word(name, "host")) append_field(out, name, value);
  if (!request.body.empty() || request.method == "POST" || request.method == "PUT")
    out += text("Content-Length: {}\r\n", request.body.size());
  if (!request.body.empty() && !request.header("content-type")) out += "Content-Type: application/json\r\n";
  out += "\r\n";
  out += request.body;
  return out;
}

}  // namespace kt::inline http
