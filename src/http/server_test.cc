#include "http/server.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "base/error.h"
#include "http/client.h"
#include "http/test_server.h"

namespace kt::inline http {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

TEST_F(HttpServerTest, AnswersManyRequestsOnOneConnection) {
  start();
  HttpClient c = client();
  for (int i = 0; i < 100; ++i) {
    const HttpReply reply = c.send({.path = "/hello"});
    ASSERT_EQ(reply.status, 200);
    ASSERT_EQ(reply.type, "text/plain");
    ASSERT_EQ(reply.body, "hello");
  }
  EXPECT_EQ(server->connections(), 1);
  EXPECT_EQ(c.send({.path = "/nothing there"}).body, "GET /nothing there");
}

TEST_F(HttpServerTest, StreamsFromAnotherThread) {
  start();
  HttpClient c = client();
  for (int round = 0; round < 3; ++round) {
    SseReader sse;
    std::vector<std::string> events;
    const HttpReply reply = c.stream({.path = "/stream", .query = "1000"}, [&](std::string_view piece) {
      for (std::string& event : sse.push(piece)) events.push_back(std::move(event));
      return true;
    });
    ASSERT_EQ(reply.status, 200);
    ASSERT_EQ(reply.type, "text/event-stream");
    ASSERT_EQ(events.size(), 1000u);
    ASSERT_EQ(events[999], "999");
  }
  EXPECT_EQ(server->connections(), 1);
}

TEST_F(HttpServerTest, AnswersPipelinedRequestsInOrder) {
  start({.lanes = {4}});
  TestSocket socket = raw();
  std::string bytes;
  for (int i = 0; i < 200; ++i)
    bytes += "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n\r\n<" + std::to_string(1000 + i) + ">";
  bytes += "GET /hello HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
  ASSERT_TRUE(socket.write(bytes));
  const std::string& got = socket.read_all();
  EXPECT_TRUE(socket.ended());
  size_t at = 0;
  for (int i = 0; i < 200; ++i) {
    at = got.find("<" + std::to_string(1000 + i) + ">", at);
    ASSERT_NE(at, std::string::npos) << i;
  }
  EXPECT_THAT(got, testing::EndsWith("\r\n\r\nhello"));
}

TEST_F(HttpServerTest, TakesAndGivesBigBodies) {
  start({.max_unsent = 1000});
  HttpClient c = client();
  std::string body(10 << 20, 'x');
  for (size_t i = 0; i < body.size(); i += 4096) body[i] = static_cast<char>('a' + i / 4096 % 26);
  EXPECT_EQ(c.send({.method = "POST", .path = "/echo", .body = body}).body, body);
  EXPECT_EQ(c.send({.path = "/big", .query = "30000000"}).body.size(), 30'000'000u);
  EXPECT_EQ(server->connections(), 1);

  TestSocket socket = raw();
  std::string chunked =
      "POST /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
  for (size_t at = 0; at < body.size(); at += 1 << 20)
    chunked += "100000\r\n" + body.substr(at, 1 << 20) + "\r\n";
  ASSERT_TRUE(socket.write(chunked + "0\r\n\r\n"));
  const std::string& got = socket.read_all();
  EXPECT_EQ(got.substr(got.find("\r\n\r\n") + 4), body);
}

TEST_F(HttpServerTest, PassesMethodsAndLeavesOutBodiesOfHead) {
  start();
  HttpClient c = client();
  EXPECT_EQ(c.send({.method = "OPTIONS", .path = "/x"}).body, "OPTIONS /x");
  const HttpReply head = c.send({.method = "HEAD", .path = "/hello"});
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.body, "");
  c.send({.method = "HEAD", .path = "/stream", .query = "3"});
  EXPECT_EQ(c.send({.path = "/hello"}).body, "hello");
  EXPECT_EQ(server->connections(), 1);
  TestSocket socket = raw();
  socket.write("HEAD /hello HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
  EXPECT_THAT(socket.read_all(),
              testing::AllOf(HasSubstr("Content-Length: 5\r\n"), testing::EndsWith("\r\n\r\n")));
}

TEST_F(HttpServerTest, SpeaksTheOldVersion) {
  start();
  TestSocket one = raw();
  one.write("GET /hello HTTP/1.0\r\n\r\n");
  EXPECT_THAT(one.read_all(),
              testing::AllOf(HasSubstr("Connection: close"), testing::EndsWith("\r\n\r\nhello")));
  TestSocket kept = raw();
  for (int i = 0; i < 2; ++i) {
    kept.write("GET /hello HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    EXPECT_THAT(kept.read_until("hello"), HasSubstr("Connection: keep-alive"));
    kept.forget();
  }
  TestSocket stream = raw();
  stream.write("GET /stream?2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
  EXPECT_THAT(stream.read_all(), testing::EndsWith("\r\n\r\ndata: 0\n\ndata: 1\n\n"));
  EXPECT_THAT(stream.read_all(), Not(HasSubstr("chunked")));
}

TEST_F(HttpServerTest, SaysContinue) {
  start();
  TestSocket socket = raw();
  socket.write("POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n");
  EXPECT_EQ(socket.read_until("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  socket.forget();
  socket.write("body");
  EXPECT_THAT(socket.read_until("body"), StartsWith("HTTP/1.1 200 OK\r\n"));
  TestSocket large = raw();
  large.write("POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 99999999\r\n\r\n");
  EXPECT_THAT(large.read_all(), StartsWith("HTTP/1.1 413 "));
}

TEST_F(HttpServerTest, RefusesWithOnErrorAndCloses) {
  start({.on_error = [](int status, const std::string& why) {
    return HttpReply{.status = status, .type = "x/y", .body = "<" + why + ">"};
  }});
  const std::vector<std::pair<int, std::string>> cases = {
      {400, "nonsense\r\n\r\n"},
      {400, "\x16\x03\x01\x02\x00\x01"},
      {431, "GET / HTTP/1.1\r\nA: " + std::string(100'000, 'x')},
      {501, "GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: zip\r\n\r\n"},
      {505, "GET / HTTP/3.0\r\n"},
  };
  for (const auto& [status, bytes] : cases) {
    TestSocket socket = raw();
    socket.write(bytes);
    const std::string& got = socket.read_all();
    EXPECT_THAT(got, StartsWith("HTTP/1.1 " + std::to_string(status))) << bytes.substr(0, 50);
    EXPECT_THAT(got,
                testing::AllOf(HasSubstr("Connection: close"), HasSubstr("x/y"), HasSubstr("\r\n\r\n<")));
    EXPECT_TRUE(socket.ended());
  }
  EXPECT_EQ(requests, 0);
  EXPECT_EQ(client().send({.path = "/hello"}).body, "hello");
}

// The client sends everything before it reads: the reply must not be lost to a reset.
TEST_F(HttpServerTest, LetsItsRefusalBeRead) {
  start();
  for (int i = 0; i < 5; ++i) {
    TestSocket socket = raw();
    const std::string body(20 << 20, 'x');
    EXPECT_TRUE(socket.write("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 20971520\r\n\r\n" + body));
    EXPECT_THAT(socket.read_all(), StartsWith("HTTP/1.1 413 "));
    EXPECT_TRUE(socket.ended());
  }
  EXPECT_EQ(client().send({.method = "POST", .path = "/echo", .body = std::string(20 << 20, 'x')}).status,
            413);
}

TEST_F(HttpServerTest, HandlersThatFailGive500) {
  start({.on_error = [](int status, const std::string& why) {
    return HttpReply{.status = status, .body = why};
  }});
  HttpClient c = client();
  HttpReply reply = c.send({.path = "/throw"});
  EXPECT_EQ(reply.status, 500);
  EXPECT_EQ(reply.body, "thrown on purpose");
  reply = c.send({.path = "/drop"});
  EXPECT_EQ(reply.status, 500);
  EXPECT_EQ(reply.body, "the request was dropped without a reply");
  EXPECT_EQ(server->connections(), 1);
  TestSocket socket = raw();
  socket.write("GET /late HTTP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_THAT(socket.read_all(), testing::EndsWith("\r\n\r\n5\r\nbegun\r\n"));
  EXPECT_TRUE(socket.ended());
}

TEST_F(HttpServerTest, NoticesClientsThatGo) {
  start();
  {
    TestSocket closed = raw(), reset = raw(), pipelined = raw();
    for (TestSocket* s : {&closed, &reset, &pipelined}) s->write("GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    pipelined.write(kHello);
    ASSERT_TRUE(wait_for([&] { return holding == 3; }));
    EXPECT_EQ(gone, 0);
    closed.close();
    EXPECT_TRUE(wait_for([&] { return gone == 1; }));
    const linger hard{.l_onoff = 1, .l_linger = 0};
    setsockopt(reset.fd(), SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    reset.close();
    EXPECT_TRUE(wait_for([&] { return gone == 2; }));
  }
  EXPECT_TRUE(wait_for([&] { return gone == 3; }));
  EXPECT_EQ(requests, 3);
  for (const Responder& to : held) {
    EXPECT_TRUE(to.gone());
    to.reply({});
    int at_once = 0;
    to.on_gone([&] { ++at_once; });
    EXPECT_EQ(at_once, 1);
  }
  EXPECT_TRUE(wait_for([&] { return server->connections() == 0; }));
}

// What comes after an interim reply, if there is one.
std::string final_reply(std::string bytes) {
  constexpr std::string_view kInterim = "HTTP/1.1 100 Continue\r\n\r\n";
  return bytes.starts_with(kInterim) ? bytes.substr(kInterim.size()) : bytes;
}

TEST_F(HttpServerTest, HalfClosedClientsGetTheirAnswer) {
  start();
  const std::string kept = "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n";
  const std::vector<std::string> asked = {kept,
                                          "GET /hold HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n\r\n",
                                          "GET /hold HTTP/1.0\r\n\r\n", kept + std::string(kHello)};
  std::vector<TestSocket> sockets;
  for (const std::string& bytes : asked) {
    sockets.push_back(raw());
    sockets.back().write(bytes);
    sockets.back().half_close();
  }
  ASSERT_TRUE(wait_for([&] { return holding == 4; }));
  sockets[0].read_until("\r\n\r\n");  // the interim reply: its end of sending was seen
  EXPECT_EQ(gone, 0);
  held[0].reply({.body = "worth waiting for"});
  held[1].start({.body = "worth waiting "});
  held[1].send("for");
  held[1].end();
  for (size_t i = 2; i < held.size(); ++i) held[i].reply({.body = "worth waiting for"});
  for (TestSocket& socket : sockets) {
    const std::string got = final_reply(socket.read_all());
    EXPECT_THAT(got,
                testing::AllOf(StartsWith("HTTP/1.1 200 "), HasSubstr("worth waiting "), HasSubstr("for")));
    EXPECT_TRUE(socket.ended());
  }
  EXPECT_THAT(sockets[3].read_all(), testing::EndsWith("hello"));
  EXPECT_EQ(gone, 0);
  EXPECT_TRUE(wait_for([&] { return server->connections() == 0; }));
}

TEST_F(HttpServerTest, OneLaneDoesNotWaitForAnother) {
  start({.lanes = {1, 1},
         .lane_of = [](const HttpRequest& request) -> size_t { return request.path == "/wait"; }});
  TestSocket first = raw(), second = raw();
  for (TestSocket* socket : {&first, &second}) socket->write("GET /wait HTTP/1.1\r\nHost: a\r\n\r\n");
  ASSERT_TRUE(wait_for([&] { return requests == 1; }));
  EXPECT_EQ(client().send({.path = "/hello"}).body, "hello");
  EXPECT_EQ(requests, 2) << "the other one waits in its lane";
  released = true;
  for (TestSocket* socket : {&first, &second})
    EXPECT_THAT(socket->read_until("\r\n\r\n"), StartsWith("HTTP/1.1 200 "));
}

TEST_F(HttpServerTest, DoesNotCallOnGoneAfterTheEnd) {
  start();
  {
    TestSocket socket = raw();
    socket.write("GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    ASSERT_TRUE(wait_for([&] { return holding == 1; }));
    held[0].reply({.body = "done"});
    socket.read_until("done");
  }
  EXPECT_TRUE(wait_for([&] { return server->connections() == 0; }));
  EXPECT_EQ(gone, 0);
}

TEST_F(HttpServerTest, ServesManyStreamsAtOnce) {
  start({.lanes = {4}});
  constexpr int kClients = 64;
  std::atomic<int> whole = 0;
  std::vector<std::thread> clients;
  for (int i = 0; i < kClients; ++i)
    clients.emplace_back([&, i] {
      HttpClient c = client();
      std::string body;
      c.stream({.path = "/stream", .query = std::to_string(200 + i)}, [&](std::string_view piece) {
        body += piece;
        return true;
      });
      if (body.ends_with("data: " + std::to_string(199 + i) + "\n\n")) ++whole;
    });
  for (std::thread& t : clients) t.join();
  EXPECT_EQ(whole, kClients);
}

TEST_F(HttpServerTest, CanEndInTheMiddleOfEverything) {
  start({.max_unsent = size_t{1} << 30});
  std::vector<TestSocket> sockets;
  for (int i = 0; i < 20; ++i) {
    sockets.push_back(raw());
    sockets.back().write(i % 2 ? "GET /hold HTTP/1.1\r\nHost: a\r\n\r\n"
                               : "GET /stream?1000000000 HTTP/1.1\r\nHost: a\r\n\r\n");
  }
  ASSERT_TRUE(wait_for([&] { return requests == 20; }));
  server.reset();
  EXPECT_EQ(gone, 10);
  for (const Responder& to : held) {
    EXPECT_TRUE(to.gone());
    to.start({});
    to.send("nobody reads this");
    to.end();
  }
}

TEST_F(HttpServerTest, EndsWhileHandlersWaitForTheirClients) {
  std::atomic<int> begun = 0;
  server = std::make_unique<HttpServer>(HttpServerOptions{}, [&](const HttpRequest&, Responder to) {
    ++begun;
    while (!to.gone()) std::this_thread::sleep_for(1ms);
  });
  std::vector<TestSocket> sockets;
  for (int i = 0; i < 5; ++i) {
    sockets.push_back(raw());
    sockets.back().write(kHello);
  }
  ASSERT_TRUE(wait_for([&] { return begun == 2; }));
  server.reset();
  EXPECT_EQ(begun, 2);
}

TEST_F(HttpServerTest, PostsInOrder) {
  start();
  std::vector<int> order;
  std::atomic<bool> done = false;
  std::thread::id thread;
  for (int i = 0; i < 1000; ++i) server->post([&, i] { order.push_back(i); });
  server->post([] { fail("thrown on purpose"); });
  server->post([&] {
    thread = std::this_thread::get_id();
    done = true;
  });
  ASSERT_TRUE(wait_for([&] { return done.load(); }));
  EXPECT_EQ(order.size(), 1000u);
  EXPECT_TRUE(std::ranges::is_sorted(order));
  EXPECT_NE(thread, std::this_thread::get_id());
}

TEST_F(HttpServerTest, NamesTheAddressItCannotHave) {
  start();
  const auto message = [](HttpServerOptions options) -> std::string {
    try {
      HttpServer server(std::move(options), [](const HttpRequest&, Responder) {});
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_THAT(message({.port = server->port()}),
              testing::AllOf(StartsWith("127.0.0.1:" + std::to_string(server->port())),
                             HasSubstr("address already in use"), HasSubstr("`port`")));
  EXPECT_THAT(message({.host = "203.0.113.7"}), HasSubstr("does not have that address"));
  EXPECT_THAT(message({.host = "no such host"}), HasSubstr("there is no host \"no such host\""));
  EXPECT_THAT(message({.port = 70'000}), HasSubstr("0 to 65535"));
}

TEST_F(HttpServerTest, ListensOnNamesAndBothVersions) {
  for (const std::string host : {"localhost", "0.0.0.0", "::1", "::"}) {
    try {
      start({.host = host});
    } catch (const Error& e) {
      if (host.find(':') == std::string::npos) throw;
      GTEST_SKIP() << "no IPv6 here: " << e.what();
    }
    EXPECT_EQ(client().send({.path = "/hello"}).body, "hello") << server->url();
    EXPECT_EQ(TestSocket(server->port()).connected(), host != "::1") << "IPv4 to " << server->url();
  }
  EXPECT_EQ(server->url(), "http://[::]:" + std::to_string(server->port()));
}

}  // namespace
}  // namespace kt::inline http
