// Any bytes as requests on a connection, and as a reply: values within the limits or a failure, and the same
// ones however the bytes are cut. The first byte chooses between the two, the second how long the cuts are.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "http/encode.h"
#include "http/parser.h"

namespace kt {
namespace {

constexpr HttpLimits kLimits{.head = 512, .body = 256, .fields = 8};

void require(bool holds) {
  if (!holds) std::abort();
}

void append(std::string& out, std::string_view part) {
  out += part;
  out += '\0';
}

// Everything that was read, in one string.
std::string read_requests(std::string_view bytes, size_t step) {
  RequestParser parser(kLimits);
  std::string seen;
  while (!bytes.empty()) {
    std::string_view piece = bytes.substr(0, step);
    bytes.remove_prefix(piece.size());
    while (!piece.empty()) {
      parser.push(piece);
      if (parser.stage() == RequestParser::Stage::kFailed) {
        require(parser.failure().status >= 400 && !parser.failure().why.empty());
        append(seen, parser.failure().why);
        return seen;
      }
      if (parser.stage() != RequestParser::Stage::kDone) {
        require(piece.empty());
        continue;
      }
      const bool keep_alive = parser.keep_alive();
      const HttpRequest request = parser.take();
      require(request.body.size() <= kLimits.body && request.headers.size() <= kLimits.fields);
      require(request.path.find('\0') == std::string::npos && !request.path.empty());
      append(seen, keep_alive ? "keep" : "close");
      for (const std::string& part : {request.method, request.path, request.query, request.body})
        append(seen, part);
      for (const auto& [name, value] : request.headers) {
        append(seen, name);
        append(seen, value);
      }
    }
  }
  append(seen, std::to_string(static_cast<int>(parser.stage())));
  return seen;
}

std::string read_reply(std::string_view bytes, size_t step, std::string_view method) {
  ReplyReader reader(kLimits, method);
  std::string body, seen;
  while (!bytes.empty() && reader.stage() != ReplyReader::Stage::kFailed) {
    std::string_view piece = bytes.substr(0, step);
    bytes.remove_prefix(piece.size());
    reader.push(piece, body);
    if (reader.stage() == ReplyReader::Stage::kDone) break;
  }
  reader.close();
  require(body.size() <= kLimits.body);
  append(seen, reader.failure().why);
  append(seen, std::to_string(reader.reply().status));
  append(seen, reader.reply().type);
  append(seen, body);
  for (const auto& [name, value] : reader.reply().headers) {
    append(seen, name);
    append(seen, value);
  }
  return seen;
}

// What a request becomes on the wire is read as that request.
void check_round_trip(std::string_view bytes) {
  RequestParser parser({});
  parser.push(bytes);
  if (parser.stage() != RequestParser::Stage::kDone) return;
  const HttpRequest request = parser.take();
  // HTTP/1.0 knows no Expect, so there it may be anything; the wire is always HTTP/1.1.
  if (request.path == "*" || request.header("expect")) return;
  const std::string wire = encode_request(request, request.path, "host");
  RequestParser again({.head = 1 << 20, .fields = 1000});
  std::string_view rest = wire;
  again.push(rest);
  require(again.stage() == RequestParser::Stage::kDone && rest.empty());
  const HttpRequest second = again.take();
  require(second.method == request.method && second.path == request.path);
  require(second.query == request.query && second.body == request.body);
}

}  // namespace
}  // namespace kt

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  const size_t step = data[1] % 61 + 1;
  if (data[0] % 2 == 0) {
    const std::string whole = kt::read_requests(bytes, bytes.size());
    kt::require(kt::read_requests(bytes, step) == whole);
    kt::require(kt::read_requests(bytes, 1) == whole);
    kt::check_round_trip(bytes);
  } else {
    const std::string_view method = data[0] % 4 == 1 ? "GET" : "HEAD";
    const std::string whole = kt::read_reply(bytes, bytes.size(), method);
    kt::require(kt::read_reply(bytes, step, method) == whole);
    kt::require(kt::read_reply(bytes, 1, method) == whole);
  }
  return 0;
}
