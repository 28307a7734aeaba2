#include "http/parser.h"

#include <gmock/gmock.h>

#include <tuple>

#include "http/encode.h"

namespace kt::inline http {
namespace {

using testing::HasSubstr;

// What a connection's bytes come to: requests in order, then perhaps a failure.
struct Parsed {
  std::vector<HttpRequest> requests;
  std::vector<bool> keep_alive;
  int status = 0;  // 0: no failure
  RequestParser::Stage stage = RequestParser::Stage::kIdle;
};

void feed(RequestParser& parser, std::string_view bytes, Parsed& out) {
  while (!bytes.empty() && out.status == 0) {
    parser.push(bytes);
    if (parser.stage() == RequestParser::Stage::kFailed) out.status = parser.failure().status;
    if (parser.stage() != RequestParser::Stage::kDone) continue;
    out.keep_alive.push_back(parser.keep_alive());
    out.requests.push_back(parser.take());
  }
  out.stage = parser.stage();
}

Parsed parse(std::string_view bytes, const HttpLimits& limits = {}) {
  RequestParser parser(limits);
  Parsed out;
  feed(parser, bytes, out);
  return out;
}

bool same_request(const HttpRequest& a, const HttpRequest& b) {
  return std::tie(a.method, a.path, a.query, a.headers, a.body) ==
         std::tie(b.method, b.path, b.query, b.headers, b.body);
}

void expect_same(const Parsed& a, const Parsed& b, size_t cut) {
  ASSERT_EQ(a.status, b.status) << "cut at " << cut;
  ASSERT_EQ(a.stage, b.stage) << "cut at " << cut;
  ASSERT_EQ(a.requests.size(), b.requests.size()) << "cut at " << cut;
  for (size_t i = 0; i < a.requests.size(); ++i)
    ASSERT_TRUE(same_request(a.requests[i], b.requests[i])) << "cut at " << cut;
}

// Every cut in two, and byte by byte.
void expect_cuts_make_no_difference(std::string_view bytes, const HttpLimits& limits = {}) {
  const Parsed whole = parse(bytes, limits);
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    RequestParser parser(limits);
    Parsed out;
    feed(parser, bytes.substr(0, cut), out);
    feed(parser, bytes.substr(cut), out);
    expect_same(whole, out, cut);
  }
  RequestParser parser(limits);
  Parsed out;
  for (size_t i = 0; i < bytes.size(); ++i) feed(parser, bytes.substr(i, 1), out);
  expect_same(whole, out, bytes.size() + 1);
}

std::string repeated(std::string_view text, int times) {
  std::string out;
  for (int i = 0; i < times; ++i) out += text;
  return out;
}

TEST(RequestParser, ReadsARequest) {
  const Parsed p = parse(
      "POST /v1/a%20b/%C3%A9?x=%20&y HTTP/1.1\r\nHost: me\r\nX-Empty:\r\nContent-length: 5\r\n"
      "Accept: \t a, b \t\r\n\r\nhello");
  ASSERT_EQ(p.status, 0);
  ASSERT_EQ(p.requests.size(), 1u);
  const HttpRequest& r = p.requests[0];
  EXPECT_EQ(r.method, "POST");
  EXPECT_EQ(r.path, "/v1/a b/\xC3\xA9");
  EXPECT_EQ(r.query, "x=%20&y");
  EXPECT_EQ(r.body, "hello");
  EXPECT_EQ(r.header("ACCEPT"), "a, b");
  EXPECT_EQ(r.header("x-empty"), "");
  EXPECT_EQ(r.header("cookie"), std::nullopt);
  EXPECT_TRUE(p.keep_alive[0]);
}

TEST(RequestParser, ReadsTargets) {
  const auto path = [](std::string target, std::string method = "GET") {
    const Parsed p = parse(method + " " + target + " HTTP/1.1\r\nHost: a\r\n\r\n");
    return p.status == 0 && p.requests.size() == 1 ? p.requests[0].path + "|" + p.requests[0].query : "bad";
  };
  EXPECT_EQ(path("/"), "/|");
  EXPECT_EQ(path("/?"), "/|");
  EXPECT_EQ(path("/a?b?c"), "/a|b?c");
  EXPECT_EQ(path("http://host:80/a/b?c"), "/a/b|c");
  EXPECT_EQ(path("HTTP://host"), "/|");
  EXPECT_EQ(path("http://host?c"), "/|c");
  EXPECT_EQ(path("*", "OPTIONS"), "*|");
  EXPECT_EQ(path("/%2e%2E/%25"), "/../%|");
  for (const char* target : {"*", "a", "host:80", "http://", "http:///a", "ftp://a/b", "/a b", "/a#b", "/%",
                             "/%4", "/%4g", "/%00", "/a%", "/\xC3\xA9", "/a\tb", ""})
    EXPECT_EQ(path(target), "bad") << target;
}

TEST(RequestParser, ReadsChunks) {
  const Parsed p = parse(
      "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n"
      "5\r\nhello\r\n00A;name=\"value\"\r\n, world...\r\n0\r\nTrailer: x\r\n\r\nGET /next HTTP/1.1\r\nHost: "
      "a\r\n\r\n");
  ASSERT_EQ(p.status, 0);
  ASSERT_EQ(p.requests.size(), 2u);
  EXPECT_EQ(p.requests[0].body, "hello, world...");
  EXPECT_EQ(p.requests[0].header("trailer"), std::nullopt);
  EXPECT_EQ(p.requests[1].path, "/next");
}

TEST(RequestParser, CutsMakeNoDifference) {
  expect_cuts_make_no_difference(
      "\r\nPOST /a%20b?c HTTP/1.1\r\nHost: me\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
      "GET / HTTP/1.0\r\n\r\n"
      "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5;e\r\nhello\r\n1\r\n!\r\n0\r\nT: "
      "x\r\n\r\n"
      "HEAD http://a/b HTTP/1.1\r\nHost: a\r\n\r\nPART");
  expect_cuts_make_no_difference("GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n");
  expect_cuts_make_no_difference("GET / HTTP/1.1\r\nHost: a\n\r\n");
  expect_cuts_make_no_difference("GET / HTTP/1.1\r\nHost: a\r\nA: b\r\nC: d\r\n\r\n", {.head = 30});
  expect_cuts_make_no_difference(
      "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world",
      {.body = 10});
}

TEST(RequestParser, KeepsConnectionsAsAsked) {
  const auto keeps = [](std::string version, std::string connection) -> bool {
    return parse("GET / " + version + "\r\nHost: a\r\n" + connection + "\r\n").keep_alive.at(0);
  };
  EXPECT_TRUE(keeps("HTTP/1.1", ""));
  EXPECT_FALSE(keeps("HTTP/1.1", "Connection: close\r\n"));
  EXPECT_FALSE(keeps("HTTP/1.1", "Connection: upgrade , CLOSE\r\n"));
  EXPECT_FALSE(keeps("HTTP/1.1", "Connection: x\r\nconnection: close\r\n"));
  EXPECT_TRUE(keeps("HTTP/1.1", "Connection: closed\r\n"));
  EXPECT_FALSE(keeps("HTTP/1.0", ""));
  EXPECT_TRUE(keeps("HTTP/1.0", "Connection: Keep-Alive\r\n"));
}

TEST(RequestParser, TellsWhoWaitsForContinue) {
  RequestParser parser({});
  std::string_view head = "POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n";
  parser.push(head);
  EXPECT_TRUE(parser.awaits_continue());
  std::string_view part = "a";
  parser.push(part);
  EXPECT_FALSE(parser.awaits_continue());
  part = "b";
  parser.push(part);
  EXPECT_EQ(parser.stage(), RequestParser::Stage::kDone);
  EXPECT_EQ(parser.take().body, "ab");
}

TEST(RequestParser, RefusesWhatIsMalformed) {
  const std::string host = "Host: a\r\n";
  const auto head = [&](const std::string& fields) { return "POST / HTTP/1.1\r\n" + host + fields + "\r\n"; };
  const auto chunks = [&](const std::string& body) { return head("Transfer-Encoding: chunked\r\n") + body; };
  const std::vector<std::pair<int, std::string>> cases = {
      {400, "GET\r\n"},
      {400, "GET /\r\n"},
      {400, " GET / HTTP/1.1\r\n"},
      {400, "GET  / HTTP/1.1\r\n"},
      {400, "GET / HTTP/1.1 \r\n"},
      {400, "GET / http/1.1\r\n"},
      {400, "GET / HTTP/1.10\r\n"},
      {400, "G@T / HTTP/1.1\r\n"},
      {400, "\x16\x03\x01"},
      {505, "GET / HTTP/2.0\r\n"},
      {505, "PRI * HTTP/2.0\r\n"},
      {505, "GET / HTTP/1.2\r\n"},
      {400, "GET / HTTP/1.1\n"},
      {400, "GET / HTTP/1.1\rX"},
      {400, "GET / HTTP/1.1\r\n\r\n"},
      {400, head("Host: b\r\n")},
      {400, head("A : b\r\n")},
      {400, head(": b\r\n")},
      {400, head("A\r\n")},
      {400, head(" A: b\r\n")},
      {400, head("A: b\r\n\tc\r\n")},
      {400, head("A: b\nC: d\r\n")},
      {400, head("A: b\rc\r\n")},
      {400, head(std::string("A: b\0c\r\n", 8))},
      {400, head("A: \x1b[0m\r\n")},
      {400, head("A: \x7f\r\n")},
      {400, head("A\xC3\xA9: b\r\n")},
      {400, head("Content-Length: -1\r\n")},
      {400, head("Content-Length: +1\r\n")},
      {400, head("Content-Length: 0x1\r\n")},
      {400, head("Content-Length: 1 2\r\n")},
      {400, head("Content-Length: 1,1\r\n")},
      {400, head("Content-Length:\r\n")},
      {400, head("Content-Length: 18446744073709551616\r\n")},
      {400, head("Content-Length: 99999999999999999999999999\r\n")},
      {413, head("Content-Length: 18446744073709551615\r\n")},
      {400, head("Content-Length: 1\r\nContent-Length: 1\r\n")},
      {400, head("Content-Length: 1\r\ncontent-length: 2\r\n")},
      {400, head("Content-Length: 1\r\nTransfer-Encoding: chunked\r\n")},
      {400, head("Transfer-Encoding: chunked\r\nContent-Length: 1\r\n")},
      {400, "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"},
      {501, head("Transfer-Encoding: gzip\r\n")},
      {501, head("Transfer-Encoding: gzip, chunked\r\n")},
      {501, head("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n")},
      {501, head("Transfer-Encoding: xchunked\r\n")},
      {501, head("Transfer-Encoding: \r\n")},
      {417, head("Expect: the unexpected\r\n")},
      {400, chunks("\r\n")},
      {400, chunks("x\r\n")},
      {400, chunks("-1\r\n")},
      {400, chunks("0x1\r\n")},
      {400, chunks("1 \r\n")},
      {400, chunks("1\n")},
      {400, chunks("1\r\nab")},
      {400, chunks("1\r\na\n")},
      {400, chunks("11111111111111111\r\n")},
      {413, chunks("ffffffffffffffff\r\n")},
      {413, chunks("1\r\na\r\nffffffffffffffff\r\n")},
      {400, chunks("1;" + std::string(300, 'x') + "\r\n")},
      {400, chunks("0\r\n bad\r\n")},
      {431, chunks("0\r\nA: " + std::string(40'000, 'x'))},
      {431, "GET /" + std::string(40'000, 'x')},
      {431, head("A: " + std::string(40'000, 'x'))},
      {431, repeated("\r\n", 20'000)},
      {431, head(repeated("A: b\r\n", 200))},
  };
  for (const auto& [status, bytes] : cases) {
    EXPECT_EQ(parse(bytes).status, status) << bytes.substr(0, 200);
    if (bytes.size() < 1000) expect_cuts_make_no_difference(bytes);
  }
}

TEST(RequestParser, FailuresSayWhy) {
  RequestParser parser({.body = 4});
  std::string_view bytes = "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n";
  parser.push(bytes);
  EXPECT_EQ(parser.failure().why, "the body has 5 bytes, at most 4 are accepted");
}

// Status, type, headers, body, keep-alive; "failed: why".
std::string read_reply(std::string_view bytes, std::string_view method, size_t cut) {
  ReplyReader reader({.body = 1000}, method);
  std::string body;
  std::string_view first = bytes.substr(0, cut), second = bytes.substr(first.size());
  reader.push(first, body);
  if (reader.stage() != ReplyReader::Stage::kFailed) reader.push(second, body);
  reader.close();
  if (reader.stage() == ReplyReader::Stage::kFailed) return "failed: " + reader.failure().why;
  std::string out = std::to_string(reader.reply().status) + "|" + reader.reply().type;
  for (const auto& [name, value] : reader.reply().headers) out += "|" + name + "=" + value;
  return out + "|" + body + (reader.keep_alive() ? "|keep" : "|close");
}

std::string read_reply(std::string_view bytes, std::string_view method = "GET") {
  const std::string whole = read_reply(bytes, method, bytes.size());
  for (size_t cut = 0; cut < bytes.size(); ++cut) EXPECT_EQ(read_reply(bytes, method, cut), whole) << cut;
  return whole;
}

TEST(ReplyReader, ReadsReplies) {
  EXPECT_EQ(read_reply("HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nX: y\r\nContent-Length: 2\r\n\r\nhi"),
            "200|a/b|X=y|hi|keep");
  EXPECT_EQ(read_reply("HTTP/1.1 404\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"),
            "404||hi|keep");
  EXPECT_EQ(read_reply("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil close"), "200||until close|close");
  EXPECT_EQ(read_reply("HTTP/1.0 200 Fine by me\r\nContent-Length: 0\r\n\r\n"), "200|||close");
  EXPECT_EQ(read_reply("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n"), "204|||keep");
  EXPECT_EQ(read_reply("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HEAD"), "200|||keep");
}

TEST(ReplyReader, RefusesWhatIsMalformed) {
  for (const char* bytes :
       {"", "HTTP/1.1 200 OK\r\n", "SSH-2.0-OpenSSH\r\n", "HTTP/2.0 200 OK\r\n\r\n", "HTTP/1.1 20 OK\r\n\r\n",
        "HTTP/1.1 2000\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhi",
        "HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n", "HTTP/1.1 200 OK\r\nA b\r\n\r\n"})
    EXPECT_THAT(read_reply(bytes), HasSubstr("failed: ")) << bytes;
  EXPECT_THAT(read_reply("HTTP/1.1 200 OK\r\n\r\n" + std::string(2000, 'x')), HasSubstr("1000 bytes"));
}

TEST(Encode, RepliesComeBack) {
  const HttpReply reply{.status = 429, .type = "a/b", .body = "body", .headers = {{"Retry-After", "1"}}};
  const std::string bytes = encode_reply(reply, {});
  EXPECT_THAT(read_reply(bytes), HasSubstr("|Retry-After=1|body|keep"));
  EXPECT_THAT(encode_reply(reply, {.keep_alive = false}), HasSubstr("\r\nConnection: close\r\n"));
  EXPECT_THAT(read_reply(encode_reply(reply, {.head_only = true}), "HEAD"), HasSubstr("||keep"));
  std::string stream = encode_stream_head(reply, {});
  append_chunk(stream, std::string(0x1a2, 'x'));
  append_chunk(stream, "");
  append_chunk(stream, "y");
  stream += kLastChunk;
  EXPECT_THAT(read_reply(stream), HasSubstr("|" + std::string(0x1a2, 'x') + "y|keep"));
}

TEST(Encode, ValuesCannotBecomeHeaders) {
  const std::string bytes =
      encode_reply({.type = "a\r\nB: c",
                    .headers = {{"X", "y\r\nSet-Cookie: z"}, {"Bad\r\nName", "v"}, {"Content-Length", "9"}}},
                   {});
  EXPECT_EQ(bytes.find("\r\nSet-Cookie"), std::string::npos);
  EXPECT_EQ(bytes.find("\r\nB:"), std::string::npos);
  EXPECT_EQ(bytes.find("Name"), std::string::npos);
  EXPECT_EQ(bytes.find("Length: 9"), std::string::npos);
}

TEST(Encode, RequestsComeBack) {
  const HttpRequest request{
      .method = "POST", .path = "/ignored", .query = "q=1", .headers = {{"A", "b"}}, .body = "x"};
  const Parsed p = parse(encode_request(request, "/a b/\xC3\xA9%?", "host:80"));
  ASSERT_EQ(p.requests.size(), 1u);
  EXPECT_EQ(p.requests[0].path, "/a b/\xC3\xA9%?");
  EXPECT_EQ(p.requests[0].query, "q=1");
  EXPECT_EQ(p.requests[0].header("host"), "host:80");
  EXPECT_EQ(p.requests[0].header("a"), "b");
  EXPECT_EQ(p.requests[0].body, "x");
}

}  // namespace
}  // namespace kt::inline http
