#include "http/parser.h"

#include <algorithm>

#include "base/text.h"

namespace kt::inline http {
namespace {

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// "HTTP/1.1" and its like, whatever the numbers.
bool is_version(std::string_view text) {
  return text.size() == 8 && text.starts_with("HTTP/") && is_digit(text[5]) && text[6] == '.' &&
         is_digit(text[7]);
}

bool is_visible(char c) { return c > 0x20 && c < 0x7f; }

// A failure shows what came, but not a screenful of it.
std::string_view start_of(std::string_view text) { return text.substr(0, 80); }

bool has_own_place(std::string_view name) {
  return same_word(name, "content-type") || same_word(name, "content-length") ||
         same_word(name, "transfer-encoding") || same_word(name, "connection");
}

}  // namespace

std::optional<std::string> decode_path(std::string_view path) {
  std::string out;
  out.reserve(path.size());
  for (size_t i = 0; i < path.size(); ++i) {
    if (path[i] != '%') {
      out += path[i];
      continue;
    }
    if (path.size() - i < 3) return std::nullopt;
    const int high = hex_digit(path[i + 1]), low = hex_digit(path[i + 2]);
    if (high < 0 || low < 0 || (high == 0 && low == 0)) return std::nullopt;
    out += static_cast<char>(high << 4 | low);
    i += 2;
  }
  return out;
}

RequestParser::RequestParser(const HttpLimits& limits)
    : limits_(limits), head_(limits, HeadReader::FirstLine::kYes) {}

void RequestParser::fail(HttpFailure failure) {
  stage_ = Stage::kFailed;
  failure_ = std::move(failure);
}

void RequestParser::push(std::string_view& bytes) {
  while (!bytes.empty() && (stage_ == Stage::kIdle || stage_ == Stage::kHead)) {
    stage_ = Stage::kHead;
    const HeadReader::Step step = head_.push(bytes);
    if (step == HeadReader::Step::kBad) fail(head_.failure());
    if (step == HeadReader::Step::kFirstLine) read_first_line(head_.first_line());
    if (step == HeadReader::Step::kEnd) end_head();
  }
  if (stage_ != Stage::kBody || bytes.empty()) return;
  expects_continue_ = false;
  body_.push(bytes, request_.body);
  if (body_.failed()) fail(body_.failure());
  if (body_.done()) stage_ = Stage::kDone;
}

void RequestParser::read_first_line(std::string_view line) {
  const size_t first = line.find(' '), second = line.rfind(' ');
  if (first == std::string_view::npos || first == second)
    return fail(400, text("expected \"METHOD /path HTTP/1.1\", got \"{}\"", start_of(line)));
  const std::string_view method = line.substr(0, first), version = line.substr(second + 1);
  if (!is_token(method) || !is_version(version))
    return fail(400, text("expected \"METHOD /path HTTP/1.1\", got \"{}\"", start_of(line)));
  if (version != "HTTP/1.1" && version != "HTTP/1.0")
    return fail(505, text("{} is not spoken here; HTTP/1.1 and HTTP/1.0 are", version));
  old_version_ = version == "HTTP/1.0";
  request_.method = method;
  read_target(line.substr(first + 1, second - first - 1));
}

void RequestParser::read_target(std::string_view target) {
  if (!std::ranges::all_of(target, is_visible) || target.find('#') != std::string_view::npos)
    return fail(400, text("\"{}\" is not a path", start_of(target)));
  std::string_view path = target;
  if (constexpr std::string_view kScheme = "http://"; same_word(path.substr(0, kScheme.size()), kScheme)) {
    const size_t end = std::min(path.find_first_of("/?", kScheme.size()), path.size());
    if (end == kScheme.size()) return fail(400, text("\"{}\" names no host", start_of(target)));
    path.remove_prefix(end);
  } else if (!path.starts_with('/') && !(path == "*" && request_.method == "OPTIONS")) {
    return fail(400, text("\"{}\" is not a path", start_of(target)));
  }
  const size_t mark = std::min(path.find('?'), path.size());
  request_.query = path.substr(std::min(mark + 1, path.size()));
  std::optional<std::string> decoded = decode_path(path.substr(0, mark));
  if (!decoded) return fail(400, text("\"{}\" has an escape that is not %01 to %FF", start_of(target)));
  request_.path = decoded->empty() ? "/" : std::move(*decoded);
}

void RequestParser::end_head() {
  request_.headers = std::move(head_.headers());
  const HttpHeaders& headers = request_.headers;
  const auto hosts =
      std::ranges::count_if(headers, [](const auto& field) { return same_word(field.first, "host"); });
  if (hosts > 1 || (hosts == 0 && !old_version_)) return fail(400, "expected one Host header");
  BodyFrame frame;
  if (std::optional<HttpFailure> failure = read_body_frame(headers, frame)) return fail(std::move(*failure));
  if (frame.kind == BodyFrame::Kind::kChunked && old_version_)
    return fail(400, "HTTP/1.0 has no Transfer-Encoding");
  keep_alive_ = old_version_ ? has_list_word(headers, "connection", "keep-alive")
                             : !has_list_word(headers, "connection", "close");
  if (const auto expect = request_.header("expect"); expect && !old_version_) {
    if (!same_word(*expect, "100-continue"))
      return fail(417, text("Expect is \"{}\"; only 100-continue is known", start_of(*expect)));
    expects_continue_ = true;
  }
  using Kind = BodyDecoder::Kind;
  if (frame.kind == BodyFrame::Kind::kChunked) body_ = BodyDecoder(Kind::kChunked, 0, limits_);
  if (frame.kind == BodyFrame::Kind::kLength) body_ = BodyDecoder(Kind::kLength, frame.length, limits_);
  if (body_.failed()) return fail(body_.failure());
  stage_ = body_.done() ? Stage::kDone : Stage::kBody;
}

HttpRequest RequestParser::take() {
  HttpRequest whole = std::move(request_);
  *this = RequestParser(limits_);
  return whole;
}

ReplyReader::ReplyReader(const HttpLimits& limits, std::string_view method)
    : limits_(limits), head_only_(method == "HEAD"), head_(limits, HeadReader::FirstLine::kYes) {}

void ReplyReader::fail(HttpFailure failure) {
  stage_ = Stage::kFailed;
  failure_ = std::move(failure);
}

void ReplyReader::push(std::string_view& bytes, std::string& out) {
  while (!bytes.empty() && stage_ == Stage::kHead) {
    const HeadReader::Step step = head_.push(bytes);
    if (step == HeadReader::Step::kBad) fail(head_.failure());
    if (step == HeadReader::Step::kFirstLine) read_first_line(head_.first_line());
    if (step == HeadReader::Step::kEnd) end_head();
  }
  if (stage_ != Stage::kBody || bytes.empty()) return;
  body_.push(bytes, out);
  if (body_.failed()) fail(body_.failure());
  if (body_.done()) stage_ = Stage::kDone;
}

void ReplyReader::close() {
  if (stage_ == Stage::kDone || stage_ == Stage::kFailed) return;
  if (stage_ == Stage::kBody && body_.until_close()) {
    stage_ = Stage::kDone;
    return;
  }
  fail(502, stage_ == Stage::kHead ? "the connection was closed before a reply came"
                                   : "the connection was closed in the middle of a reply");
}

void ReplyReader::read_first_line(std::string_view line) {
  const std::string_view version = line.substr(0, 8);
  const bool status = line.size() >= 12 && line[8] == ' ' && is_digit(line[9]) && is_digit(line[10]) &&
                      is_digit(line[11]) && (line.size() == 12 || line[12] == ' ');
  if (!is_version(version) || !status || line[9] == '0')
    return fail(502, text("expected a reply of HTTP/1.1, got \"{}\"", start_of(line)));
  if (version[5] != '1') return fail(502, text("the reply is {}, not HTTP/1.1", version));
  old_version_ = version == "HTTP/1.0";
  reply_.status = (line[9] - '0') * 100 + (line[10] - '0') * 10 + (line[11] - '0');
}

void ReplyReader::end_head() {
  const int status = reply_.status;
  if (status < 200) {
    // "100 Continue" and its like: the reply is still to come.
    head_ = HeadReader(limits_, HeadReader::FirstLine::kYes);
    return;
  }
  const HttpHeaders& headers = head_.headers();
  BodyFrame frame;
  if (std::optional<HttpFailure> failure = read_body_frame(headers, frame)) return fail(std::move(*failure));
  const bool no_body = head_only_ || status == 204 || status == 304;
  using Kind = BodyDecoder::Kind;
  Kind kind = no_body ? Kind::kNone : Kind::kUntilClose;
  if (!no_body && frame.kind == BodyFrame::Kind::kChunked) kind = Kind::kChunked;
  if (!no_body && frame.kind == BodyFrame::Kind::kLength) kind = Kind::kLength;
  body_ = BodyDecoder(kind, frame.length, limits_);
  if (body_.failed()) return fail(body_.failure());
  keep_alive_ = old_version_ ? has_list_word(headers, "connection", "keep-alive")
                             : !has_list_word(headers, "connection", "close");
  if (kind == Kind::kUntilClose) keep_alive_ = false;
  reply_.type = std::string(find_header(headers, "content-type").value_or(""));
  for (const auto& field : headers)
    if (!has_own_place(field.first)) reply_.headers.push_back(field);
  stage_ = body_.done() ? Stage::kDone : Stage::kBody;
}

}  // namespace kt::inline http
