#include "http/head.h"

#include <algorithm>
#include <limits>

#include "base/text.h"

namespace kt::inline http {
namespace {

// Chunk extensions mean nothing to us; a line longer than this is somebody wasting our time.
constexpr size_t kMaxChunkLine = 256;

bool is_token_char(char c) {
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')) return true;
  return std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

std::optional<uint64_t> read_length(std::string_view digits) {
  if (digits.empty()) return std::nullopt;
  uint64_t value = 0;
  for (const char c : digits) {
    if (c < '0' || c > '9') return std::nullopt;
    const auto digit = static_cast<uint64_t>(c - '0');
    if (value > (std::numeric_limits<uint64_t>::max() - digit) / 10) return std::nullopt;
    value = value * 10 + digit;
  }
  return value;
}

std::optional<uint64_t> read_hex(std::string_view digits) {
  if (digits.empty() || digits.size() > 16) return std::nullopt;
  uint64_t value = 0;
  for (const char raw : digits) {
    const char c = lower_ascii(raw);
    const bool letter = c >= 'a' && c <= 'f';
    if (!letter && (c < '0' || c > '9')) return std::nullopt;
    value = value << 4 | static_cast<uint64_t>(letter ? c - 'a' + 10 : c - '0');
  }
  return value;
}

}  // namespace

bool same_word(std::string_view a, std::string_view b) {
  return std::ranges::equal(a, b, {}, lower_ascii, lower_ascii);
}

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

bool has_list_word(const HttpHeaders& headers, std::string_view name, std::string_view word) {
  for (const auto& [key, value] : headers) {
    if (!same_word(key, name)) continue;
    std::string_view rest = value;
    while (!rest.empty()) {
      const size_t comma = std::min(rest.find(','), rest.size());
      if (same_word(trimmed(rest.substr(0, comma)), word)) return true;
      rest.remove_prefix(std::min(comma + 1, rest.size()));
    }
  }
  return false;
}

bool is_token(std::string_view text) { return !text.empty() && std::ranges::all_of(text, is_token_char); }

HeadReader::HeadReader(const HttpLimits& limits, FirstLine first)
    : limits_(limits), wants_first_(first == FirstLine::kYes) {}

HeadReader::Step HeadReader::bad(int status, std::string why) {
  failure_ = {status, std::move(why)};
  return Step::kBad;
}

HeadReader::Step HeadReader::push(std::string_view& bytes) {
  while (!bytes.empty()) {
    const char c = bytes.front();
    bytes.remove_prefix(1);
    if (++bytes_ > limits_.head) return bad(431, text("the head is longer than {} bytes", limits_.head));
    const LineReader::Step step = reader_.push(c);
    if (step == LineReader::Step::kMore) continue;
    if (step == LineReader::Step::kBad)
      return bad(400, "the head has a control byte, or a line that does not end with CR LF");
    const Step ended = end_line();
    reader_.next();
    if (ended != Step::kMore) return ended;
  }
  return Step::kMore;
}

HeadReader::Step HeadReader::end_line() {
  const std::string& line = reader_.line();
  if (wants_first_) {
    // Empty lines before a request are allowed: old clients end a body with one.
    if (line.empty()) return Step::kMore;
    wants_first_ = false;
    first_line_ = line;
    return Step::kFirstLine;
  }
  if (line.empty()) return Step::kEnd;
  return add_field(line);
}

HeadReader::Step HeadReader::add_field(std::string_view line) {
  if (line.front() == ' ' || line.front() == '\t')
    return bad(400, "a header line begins with a space; folded headers are not accepted");
  if (headers_.size() >= limits_.fields)
    return bad(431, text("there are more than {} header fields", limits_.fields));
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || !is_token(line.substr(0, colon)))
    return bad(400, "a header line is not \"name: value\"");
  headers_.emplace_back(std::string(line.substr(0, colon)), std::string(trimmed(line.substr(colon + 1))));
  return Step::kField;
}

std::optional<HttpFailure> read_body_frame(const HttpHeaders& headers, BodyFrame& frame) {
  std::optional<std::string_view> length, coding;
  for (const auto& [key, value] : headers) {
    if (same_word(key, "content-length")) {
      if (length) return HttpFailure{400, "there is more than one Content-Length"};
      length = value;
    } else if (same_word(key, "transfer-encoding")) {
      if (coding) return HttpFailure{501, "there is more than one Transfer-Encoding; only chunked is known"};
      coding = value;
    }
  }
  if (length && coding) return HttpFailure{400, "Content-Length and Transfer-Encoding exclude each other"};
  if (coding) {
    if (!same_word(*coding, "chunked"))
      return HttpFailure{501, text("Transfer-Encoding is \"{}\"; only chunked is known", *coding)};
    frame = {.kind = BodyFrame::Kind::kChunked};
  } else if (length) {
    const std::optional<uint64_t> bytes = read_length(*length);
    if (!bytes) return HttpFailure{400, text("Content-Length is \"{}\", not a number of bytes", *length)};
    frame = {.kind = BodyFrame::Kind::kLength, .length = *bytes};
  }
  return std::nullopt;
}

BodyDecoder::BodyDecoder(Kind kind, uint64_t length, const HttpLimits& limits) : limits_(limits) {
  if (kind == Kind::kChunked) {
    stage_ = Stage::kSize;
  } else if (kind == Kind::kUntilClose) {
    stage_ = Stage::kOpen;
  } else if (kind == Kind::kLength && length > limits.body) {
    fail(413, text("the body has {} bytes, at most {} are accepted", length, limits.body));
  } else if (kind == Kind::kLength && length > 0) {
    stage_ = Stage::kLength;
    left_ = length;
  }
}

void BodyDecoder::fail(int status, std::string why) {
  stage_ = Stage::kFailed;
  failure_ = {status, std::move(why)};
}

void BodyDecoder::push(std::string_view& bytes, std::string& out) {
  while (!bytes.empty()) {
    switch (stage_) {
      case Stage::kDone:
      case Stage::kFailed:
        return;
      case Stage::kOpen:
        left_ = std::min<uint64_t>(bytes.size(), limits_.body - total_);
        total_ += left_;
        take(bytes, out);
        if (!bytes.empty())
          return fail(413, text("the body is longer than the {} bytes that are accepted", limits_.body));
        break;
      case Stage::kLength:
      case Stage::kChunk:
        take(bytes, out);
        if (left_ == 0) stage_ = stage_ == Stage::kLength ? Stage::kDone : Stage::kChunkEnd;
        break;
      case Stage::kSize:
        push_size(bytes);
        break;
      case Stage::kChunkEnd:
        push_chunk_end(bytes);
        break;
      case Stage::kTrailers:
        push_trailers(bytes);
        break;
    }
  }
}

void BodyDecoder::take(std::string_view& bytes, std::string& out) {
  const size_t n = std::min<uint64_t>(left_, bytes.size());
  out.append(bytes.substr(0, n));
  bytes.remove_prefix(n);
  left_ -= n;
}

void BodyDecoder::push_size(std::string_view& bytes) {
  while (!bytes.empty()) {
    const LineReader::Step step = line_.push(bytes.front());
    bytes.remove_prefix(1);
    if (step == LineReader::Step::kBad || line_.line().size() > kMaxChunkLine)
      return fail(400, "a chunk does not begin with a line that gives its size");
    if (step == LineReader::Step::kMore) continue;
    start_chunk(line_.line());
    line_.next();
    return;
  }
}

void BodyDecoder::start_chunk(std::string_view line) {
  const std::optional<uint64_t> size = read_hex(line.substr(0, std::min(line.find(';'), line.size())));
  if (!size) return fail(400, "a chunk does not begin with a line that gives its size");
  if (*size == 0) {
    trailers_.emplace(limits_, HeadReader::FirstLine::kNo);
    stage_ = Stage::kTrailers;
    return;
  }
  if (*size > limits_.body || total_ + *size > limits_.body)
    return fail(413, text("the body is longer than the {} bytes that are accepted", limits_.body));
  total_ += *size;
  left_ = *size;
  stage_ = Stage::kChunk;
}

void BodyDecoder::push_chunk_end(std::string_view& bytes) {
  while (!bytes.empty()) {
    const LineReader::Step step = line_.push(bytes.front());
    bytes.remove_prefix(1);
    if (step == LineReader::Step::kBad || !line_.line().empty())
      return fail(400, "a chunk is longer than its size says");
    if (step == LineReader::Step::kMore) continue;
    stage_ = Stage::kSize;
    return;
  }
}

void BodyDecoder::push_trailers(std::string_view& bytes) {
  const HeadReader::Step step = trailers_->push(bytes);
  if (step == HeadReader::Step::kBad) {
    stage_ = Stage::kFailed;
    failure_ = trailers_->failure();
  } else if (step == HeadReader::Step::kEnd) {
    stage_ = Stage::kDone;
  }
}

}  // namespace kt::inline http
