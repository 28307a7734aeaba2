// Slow, greedy and vanishing clients, and the end of a server.
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <atomic>
#include <ctime>
#include <thread>

#include "http/server.h"
#include "http/test_server.h"

namespace kt::inline http {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using testing::StartsWith;

using HttpServerLimits = HttpServerTest;

TEST_F(HttpServerLimits, TimesOutSlowRequestsAndIdleConnections) {
  start({.request_timeout = 2s, .idle_timeout = 2s});  // more than a busy machine takes for the next lines
  TestSocket head = raw(), body = raw(), idle = raw(), used = raw();
  head.write("GET / HT");
  body.write("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nabc");
  used.write(kHello);
  EXPECT_EQ(idle.read_all(), "");
  EXPECT_TRUE(idle.ended());
  EXPECT_THAT(used.read_all(), testing::EndsWith("hello"));
  EXPECT_TRUE(used.ended());
  EXPECT_THAT(head.read_all(), StartsWith("HTTP/1.1 408 "));
  EXPECT_THAT(body.read_all(), StartsWith("HTTP/1.1 408 "));
}

TEST_F(HttpServerLimits, SlowDripDoesNotBuyTime) {
  start({.request_timeout = 200ms});
  TestSocket socket = raw();
  // Fewer bytes than a head may have: without a limit on its time it would not end here.
  int sent = 0;
  while (sent < 4'000 && socket.write("A") && server->connections() > 0) {
    std::this_thread::sleep_for(20ms);
    ++sent;
  }
  EXPECT_LT(sent, 4'000);
  EXPECT_THAT(socket.read_all(), StartsWith("HTTP/1.1 408 "));
}

TEST_F(HttpServerLimits, ClosesOnClientsThatDoNotRead) {
  start({.write_timeout = 200ms, .max_unsent = size_t{1} << 30});
  TestSocket socket = raw();
  socket.write("GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
  ASSERT_TRUE(wait_for([&] { return holding == 1; }));
  held[0].start({});
  for (int i = 0; i < 50; ++i) held[0].send(std::string(1 << 20, 'x'));
  EXPECT_TRUE(wait_for([&] { return gone == 1; }));
  EXPECT_TRUE(wait_for([&] { return server->connections() == 0; }));
}

TEST_F(HttpServerLimits, BoundsWhatWaitsForASlowClient) {
  start({.max_unsent = 1 << 20});
  TestSocket socket = raw();
  socket.write("GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
  ASSERT_TRUE(wait_for([&] { return holding == 1; }));
  held[0].start({});
  int sent = 0;
  while (!held[0].gone() && sent < 100'000) {
    held[0].send(std::string(10'000, 'x'));
    if (++sent % 50 == 0) std::this_thread::sleep_for(1ms);
  }
  EXPECT_TRUE(held[0].gone());
  EXPECT_TRUE(wait_for([&] { return gone == 1; }));
}

TEST_F(HttpServerLimits, BoundsConnections) {
  start({.max_connections = 3});
  std::vector<TestSocket> sockets;
  for (int i = 0; i < 3; ++i) sockets.push_back(raw());
  for (TestSocket& s : sockets) {
    s.write(kHello);
    EXPECT_THAT(s.read_until("hello"), StartsWith("HTTP/1.1 200 "));
  }
  TestSocket extra = raw();
  extra.write(kHello);
  EXPECT_THAT(extra.read_all(), StartsWith("HTTP/1.1 503 "));
  extra.close();
  sockets.clear();
  ASSERT_TRUE(wait_for([&] { return server->connections() == 0; }));
  EXPECT_EQ(client().send({.path = "/hello"}).status, 200);
}

TEST_F(HttpServerLimits, BoundsTheSumOfBodies) {
  start({.max_bodies = 1 << 20});
  TestSocket first = raw(), second = raw();
  const std::string body(700'000, 'x');
  first.write("POST /wait HTTP/1.1\r\nHost: a\r\nContent-Length: 700000\r\n\r\n" + body);
  ASSERT_TRUE(wait_for([&] { return requests == 1; }));
  second.write("POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 700000\r\n\r\n" + body);
  EXPECT_THAT(second.read_all(), StartsWith("HTTP/1.1 503 "));
  released = true;
  EXPECT_THAT(first.read_until("\r\n\r\n"), StartsWith("HTTP/1.1 200 "));
  // A body counts until its handler has returned, which may be a moment after the reply.
  HttpClient c = client();
  for (int i = 0; i < 5; ++i)
    EXPECT_TRUE(wait_for([&] {
      return c.send({.method = "POST", .path = "/echo", .body = std::string(900'000, 'x')}).status == 200;
    }));
}

TEST_F(HttpServerLimits, TellsWhatBecameOfEveryRequest) {
  std::mutex records_mutex;
  std::vector<HttpRecord> records;
  const auto told = [&] {
    const std::lock_guard lock(records_mutex);
    return records.size();
  };
  start({.on_done = [&](const HttpRecord& record) {
    const std::lock_guard lock(records_mutex);
    records.push_back(record);
  }});
  HttpClient c = client();
  c.send({.path = "/hello", .query = "secret"});
  c.send({.method = "POST", .path = "/nothing"});
  c.send({.path = "/throw"});
  TestSocket leaves = raw(), broken = raw();
  leaves.write("GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
  ASSERT_TRUE(wait_for([&] { return holding == 1; }));
  held[0].note("noted");
  leaves.close();
  ASSERT_TRUE(wait_for([&] { return told() == 4; }));
  broken.write("nonsense\r\n\r\n");
  broken.read_all();
  ASSERT_TRUE(wait_for([&] { return told() == 5; }));
  const auto line_of = [](const HttpRecord& r) {
    return text("{} {} {} {} {}", r.method, r.path, r.status, r.whole ? "whole" : "cut", r.note);
  };
  EXPECT_EQ(line_of(records[0]), "GET /hello 200 whole ");
  EXPECT_EQ(line_of(records[1]), "POST /nothing 404 whole ");
  EXPECT_EQ(line_of(records[2]), "GET /throw 500 whole ");
  EXPECT_EQ(line_of(records[3]), "GET /hold 0 cut noted");
  EXPECT_EQ(line_of(records[4]), "  400 whole ");
  for (const HttpRecord& record : records) {
    EXPECT_THAT(record.client, StartsWith("127.0.0.1:"));
    EXPECT_GE(record.seconds, 0);
    EXPECT_LT(record.seconds, 300);
  }
}

TEST_F(HttpServerLimits, Drains) {
  start();
  TestSocket running = raw(), idle = raw(), partial = raw();
  idle.write(kHello);
  idle.read_until("hello");
  partial.write("GET /hello HT");
  running.write("GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
  ASSERT_TRUE(wait_for([&] { return holding == 1; }));
  EXPECT_FALSE(server->drained());
  server->drain();
  idle.read_all();
  EXPECT_TRUE(idle.ended());
  EXPECT_EQ(client().send({.path = "/hello"}).status, 503);
  partial.write("TP/1.1\r\nHost: a\r\n\r\n");
  EXPECT_THAT(partial.read_all(), StartsWith("HTTP/1.1 503 "));
  EXPECT_FALSE(server->drained());
  held[0].start({});
  held[0].send("still here");
  EXPECT_THAT(running.read_until("still here"), HasSubstr("Connection: close"));
  EXPECT_FALSE(server->drained());
  held[0].end();
  EXPECT_TRUE(wait_for([&] { return server->drained(); }));
  running.read_all();
  EXPECT_TRUE(running.ended());
  EXPECT_EQ(requests, 2);
}

TEST_F(HttpServerLimits, Survives200ClientsThatVanish) {
  start();
  for (int i = 0; i < 200; ++i) {
    TestSocket socket = raw();
    if (i % 4 == 1) socket.write("GET /hel");
    if (i % 4 == 2) socket.write(kHello);
    if (i % 4 == 3) socket.write("GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
  }
  // a handler may still be on its way to a client that has left
  EXPECT_TRUE(wait_for([&] { return server->connections() == 0 && gone == holding; }));
  EXPECT_EQ(client().send({.path = "/hello"}).body, "hello");
}

TEST_F(HttpServerLimits, SurvivesWithoutFileDescriptors) {
  start();
  std::vector<Fd> mine;
  for (int i = 0; i < 4; ++i) mine.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none{.rlim_cur = static_cast<rlim_t>(mine.back().get()) + 1, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  sockaddr_in where{};
  where.sin_family = AF_INET;
  where.sin_port = htons(static_cast<uint16_t>(server->port()));
  where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (const Fd& fd : mine) connect(fd.get(), reinterpret_cast<sockaddr*>(&where), sizeof where);
  const std::clock_t cpu = std::clock();
  std::this_thread::sleep_for(250ms);
  const double busy = static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC;
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_LT(busy, 0.1) << "the thread spins";
  EXPECT_EQ(client().send({.path = "/hello"}).body, "hello");
}

}  // namespace
}  // namespace kt::inline http
