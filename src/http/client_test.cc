#include "http/client.h"

#include <gmock/gmock.h>
#include <poll.h>

#include <atomic>
#include <thread>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "http/socket.h"
#include "http/test_socket.h"

namespace kt::inline http {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Serves one scripted reply for each request it reads, a list of them for each connection.
class Script {
 public:
  explicit Script(std::vector<std::vector<std::string>> connections) {
    Listeners made = listen_on("127.0.0.1", 0);
    port = made.port;
    thread_ = std::thread([script = std::move(connections), listener = std::move(made.sockets[0])] {
      for (const std::vector<std::string>& replies : script) {
        pollfd ready{listener.get(), POLLIN, 0};
        poll(&ready, 1, 10'000);
        const Fd socket(accept(listener.get(), nullptr, nullptr));
        for (const std::string& reply : replies) {
          std::array<char, 4096> buffer;
          if (recv(socket.get(), buffer.data(), buffer.size(), 0) <= 0) break;
          ::send(socket.get(), reply.data(), reply.size(), MSG_NOSIGNAL);
        }
        shutdown(socket.get(), SHUT_WR);
        std::array<char, 4096> rest;
        while (recv(socket.get(), rest.data(), rest.size(), 0) > 0) {
        }
      }
    });
  }
  ~Script() { thread_.join(); }
  HttpClient client(HttpClientOptions options = {}) const {
    return HttpClient({"127.0.0.1", port, ""}, options);
  }
  int port = 0;

 private:
  std::thread thread_;
};

const std::string kHi = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";

TEST(ParseUrl, ReadsParts) {
  const auto parts = [](std::string_view url) {
    const HttpUrl u = parse_url(url);
    return u.host + "|" + std::to_string(u.port) + "|" + u.path;
  };
  EXPECT_EQ(parts("http://a:8080/v1/"), "a|8080|/v1");
  EXPECT_EQ(parts("HTTP://a"), "a|80|");
  EXPECT_EQ(parts("localhost:30000"), "localhost|30000|");
  EXPECT_EQ(parts("http://[::1]:5/"), "::1|5|");
  EXPECT_EQ(parts("[::1]"), "::1|80|");
  EXPECT_EQ(parts("a/b/c"), "a|80|/b/c");
  for (const char* url : {"", "http://", "ftp://a", "http://:80", "http://a:", "http://a:0", "http://a:65536",
                          "a:b", "http://a:99999999999999999999", "http://[::1", "http://[::1]x",
                          "http://u@a", "http://a/?b", "http://a b"})
    EXPECT_THAT(error_of([&] { parse_url(url); }), HasSubstr("\"" + std::string(url) + "\"")) << url;
  EXPECT_EQ(parts("https://a/v1"), "a|443|/v1");
  EXPECT_TRUE(parse_url("HTTPS://a:8").secure);
  EXPECT_FALSE(parse_url("a:443").secure);
}

TEST(HttpClient, ReadsBodiesOfEveryLength) {
  const Script script(
      {{kHi, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nX: y\r\n\r\nuntil close"}});
  HttpClient c = script.client();
  EXPECT_EQ(c.send({}).body, "hi");
  EXPECT_EQ(c.send({}).body, "abc");
  const HttpReply last = c.send({});
  EXPECT_EQ(last.status, 201);
  EXPECT_EQ(last.body, "until close");
  EXPECT_THAT(last.headers, ElementsAre(std::pair<std::string, std::string>("X", "y")));
}

TEST(HttpClient, OpensAgainWhenTheServerHasClosed) {
  // The first connection ends after its reply; the second when it has read the next request.
  const Script script({{kHi}, {kHi, ""}, {kHi}});
  HttpClient c = script.client();
  EXPECT_EQ(c.send({}).body, "hi");
  EXPECT_EQ(c.send({}).body, "hi");
  EXPECT_EQ(c.send({.method = "POST", .body = "x"}).body, "hi");
}

TEST(HttpClient, TriesAgainOnlyOnce) {
  const Script script({{kHi, ""}, {""}});
  HttpClient c = script.client();
  EXPECT_EQ(c.send({}).body, "hi");
  EXPECT_THAT(error_of([&] { c.send({}); }), HasSubstr("closed before a reply came"));
}

TEST(HttpClient, SaysWhatIsWrongWithTheServer) {
  int port = 0;
  {
    const Script script({{"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhi"}, {"SSH-2.0-OpenSSH_9\r\n"}});
    port = script.port;
    HttpClient c = script.client();
    EXPECT_THAT(error_of([&] { c.send({}); }), HasSubstr("closed in the middle of a reply"));
    EXPECT_THAT(error_of([&] { c.send({}); }), HasSubstr("expected a reply of HTTP/1.1, got \"SSH-2.0"));
  }
  const std::string message = error_of([&] { HttpClient({"127.0.0.1", port, ""}).send({}); });
  EXPECT_EQ(message,
            "http://127.0.0.1:" + std::to_string(port) + ": connection refused; is the server running?");
  EXPECT_THAT(error_of([] { HttpClient({"no such host", 80, ""}).send({}); }), HasSubstr("there is no host"));
}

TEST(HttpClient, WaitsOnlySoLong) {
  const Script script({{""}});
  TestSocket other(script.port);  // the script waits for its bytes, and nobody accepts ours
  HttpClient c = script.client({.read_timeout = 50ms});
  EXPECT_THAT(error_of([&] { c.send({}); }), HasSubstr("no answer within 50 ms"));
}

TEST(HttpClient, StreamsPieces) {
  const std::string stream =
      "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n";
  const Script script({{stream, "HTTP/1.1 400 Bad\r\nContent-Length: 3\r\n\r\nbad", stream}, {stream}});
  HttpClient c = script.client();
  std::string got;
  const auto collect = [&](std::string_view piece) {
    got += piece;
    return true;
  };
  EXPECT_EQ(c.stream({}, collect).body, "");
  EXPECT_EQ(got, "abc");
  EXPECT_EQ(c.stream({}, collect).body, "bad");
  EXPECT_EQ(got, "abc");
  EXPECT_EQ(c.stream({}, [](std::string_view) { return false; }).status, 200);
  EXPECT_EQ(c.stream({}, collect).status, 200);  // on a new connection
  EXPECT_EQ(got, "abcabc");
}

TEST(HttpClient, CanBeCancelled) {
  const Script script({{"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n", ""}, {kHi}});
  HttpClient c = script.client();
  c.cancel();  // no call runs: nothing happens
  std::atomic<bool> begun = false;
  std::thread other([&] {
    while (!begun) std::this_thread::sleep_for(1ms);
    c.cancel();
  });
  // The script waits for a second request in the middle of its reply.
  const HttpReply reply = c.stream({}, [&](std::string_view) { return begun = true; });
  other.join();
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(c.send({}).body, "hi");
}

TEST(HttpClient, CanBeCancelledBeforeTheReply) {
  const Script script({{""}});
  TestSocket first(script.port);
  HttpClient c = script.client();
  std::atomic<bool> ended = false;
  std::thread other([&] {
    while (!ended) {  // one that comes before the call does nothing
      c.cancel();
      std::this_thread::sleep_for(1ms);
    }
  });
  EXPECT_EQ(c.send({}).status, 0);
  ended = true;
  other.join();
}

TEST(SseReader, ReadsEvents) {
  const std::string bytes =
      "data: one\n\ndata:two\r\n\r\n: comment\nevent: x\ndata: a\ndata:  b\rdata\r\rid: 1\n\ndata: "
      "[DONE]\n\ndata: cut";
  SseReader whole;
  EXPECT_THAT(whole.push(bytes), ElementsAre("one", "two", "a\n b\n", "[DONE]"));
  SseReader single;
  std::vector<std::string> events;
  for (const char c : bytes)
    for (std::string& event : single.push({&c, 1})) events.push_back(std::move(event));
  EXPECT_THAT(events, ElementsAre("one", "two", "a\n b\n", "[DONE]"));
  EXPECT_THAT(SseReader().push("database: 1\n\n\n\n"), IsEmpty());
}

}  // namespace
}  // namespace kt::inline http
