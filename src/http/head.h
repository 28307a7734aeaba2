// The parts that requests and replies of HTTP/1.1 have in common: lines, header fields, bodies. Bytes in,
// values or a failure out; every failure belongs to one byte, so how the bytes are cut makes no difference.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "http/message.h"

namespace kt::inline http {

struct HttpLimits {
  size_t head = 32 << 10;  // bytes of the first line and the headers, and again of trailers
  size_t body = 16 << 20;
  size_t fields = 128;  // header fields
};

// Why no request or reply could be made of the bytes: the status to answer with, and one line.
struct HttpFailure {
  int status = 400;
  std::string why = {};
};

bool same_word(std::string_view a, std::string_view b);  // whatever the case
// Whether the comma-separated lists in all fields of that name hold the word.
bool has_list_word(const HttpHeaders& headers, std::string_view name, std::string_view word);
bool is_token(std::string_view text);  // not empty, and all of it "tchar"
// Without spaces and tabs at the ends.
std::string_view trimmed(std::string_view text);

// One line at a time. It must end with CR LF, and no other control byte but the tab may be in it.
class LineReader {
 public:
  enum class Step { kMore, kLine, kBad };
  Step push(char c) {
    const auto byte = static_cast<unsigned char>(c);
    if (after_return_) {
      after_return_ = false;
      return c == '\n' ? Step::kLine : Step::kBad;
    }
    if (c == '\r') {
      after_return_ = true;
      return Step::kMore;
    }
    if ((byte < 0x20 && c != '\t') || byte == 0x7f) return Step::kBad;
    line_ += c;
    return Step::kMore;
  }
  const std::string& line() const { return line_; }
  void next() { line_.clear(); }

 private:
  std::string line_;
  bool after_return_ = false;
};

// A first line and header fields up to the empty line.
class HeadReader {
 public:
  enum class FirstLine { kYes, kNo };  // kNo: trailers
  enum class Step { kMore, kFirstLine, kField, kEnd, kBad };
  HeadReader(const HttpLimits& limits, FirstLine first);

  // Takes bytes off the front of `bytes`, to the end of a line at most.
  Step push(std::string_view& bytes);
  bool begun() const { return bytes_ > 0; }
  const std::string& first_line() const { return first_line_; }
  HttpHeaders& headers() { return headers_; }
  const HttpFailure& failure() const { return failure_; }

 private:
  Step bad(int status, std::string why);
  Step end_line();
  Step add_field(std::string_view line);

  HttpLimits limits_;
  bool wants_first_;
  size_t bytes_ = 0;
  LineReader reader_;
  std::string first_line_;
  HttpHeaders headers_;
  HttpFailure failure_;
};

// How long a body is, as its header fields say.
struct BodyFrame {
  enum class Kind { kUnsaid, kLength, kChunked } kind = Kind::kUnsaid;
  uint64_t length = 0;
};
// A failure for lengths that are no numbers, come twice or beside Transfer-Encoding, and for codings other
// than chunked.
std::optional<HttpFailure> read_body_frame(const HttpHeaders& headers, BodyFrame& frame);

// A body out of its framing.
class BodyDecoder {
 public:
  enum class Kind { kNone, kLength, kChunked, kUntilClose };
  BodyDecoder() = default;  // no body: done
  BodyDecoder(Kind kind, uint64_t length, const HttpLimits& limits);

  // Takes bytes off the front of `bytes` until the body ends or fails, and appends what they mean to `out`.
  void push(std::string_view& bytes, std::string& out);
  bool done() const { return stage_ == Stage::kDone; }
  bool failed() const { return stage_ == Stage::kFailed; }
  bool until_close() const { return stage_ == Stage::kOpen; }
  const HttpFailure& failure() const { return failure_; }

 private:
  enum class Stage { kDone, kFailed, kOpen, kLength, kSize, kChunk, kChunkEnd, kTrailers };
  void fail(int status, std::string why);
  void take(std::string_view& bytes, std::string& out);
  void push_size(std::string_view& bytes);
  void start_chunk(std::string_view line);
  void push_chunk_end(std::string_view& bytes);
  void push_trailers(std::string_view& bytes);

  Stage stage_ = Stage::kDone;
  HttpLimits limits_;
  uint64_t left_ = 0;   // of the body or the chunk
  uint64_t total_ = 0;  // of the chunks so far, with the one begun
  LineReader line_;
  std::optional<HeadReader> trailers_;
  HttpFailure failure_;
};

}  // namespace kt::inline http
