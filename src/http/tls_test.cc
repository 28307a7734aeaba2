// The server and the client over TLS: what holds without it holds with it, and what only TLS can do wrong.
#include "http/tls.h"

#include <gmock/gmock.h>
#include <poll.h>

#include <fstream>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/testing/error_of.h"
#include "http/client.h"
#include "http/test_server.h"
#include "http/test_tls.h"

namespace kt::inline http {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

#ifdef KT_HAS_TLS

constexpr const char* kHere = "DNS:localhost,IP:127.0.0.1";

class TlsTest : public HttpServerTest {
 protected:
  void SetUp() override {
    if (!TestCertificates::can_be_made()) GTEST_SKIP() << "the program openssl is not installed";
    files = certificates.make("server", kHere);
    tls = std::make_shared<TlsServer>(files);
    trust = std::make_shared<TlsTrust>(files.certificate);
  }
  void start_tls(HttpServerOptions options = {}) {
    options.tls = tls;
    start(std::move(options));
  }
  HttpClient secure_client(HttpClientOptions options = {}) {
    options.trust = trust;
    return HttpClient(parse_url(server->url()), std::move(options));
  }
  TestTlsSocket secure() { return TestTlsSocket(server->port(), *trust); }

  TestCertificates certificates;
  TlsFiles files;
  std::shared_ptr<TlsServer> tls;
  std::shared_ptr<TlsTrust> trust;
};

TEST_F(TlsTest, AnswersAndStreamsOnOneConnection) {
  start_tls();
  EXPECT_THAT(server->url(), StartsWith("https://127.0.0.1:"));
  HttpClient c = secure_client();
  for (int i = 0; i < 20; ++i) ASSERT_EQ(c.send({.path = "/hello"}).body, "hello");
  SseReader sse;
  std::vector<std::string> events;
  c.stream({.path = "/stream", .query = "1000"}, [&](std::string_view piece) {
    for (std::string& event : sse.push(piece)) events.push_back(std::move(event));
    return true;
  });
  ASSERT_EQ(events.size(), 1000u);
  EXPECT_EQ(events[999], "999");
  EXPECT_EQ(c.send({.method = "HEAD", .path = "/hello"}).body, "");
  EXPECT_EQ(server->connections(), 1);
}

TEST_F(TlsTest, TakesAndGivesBigBodies) {
  start_tls();
  HttpClient c = secure_client();
  std::string body(5'000'011, 'x');
  for (size_t i = 0; i < body.size(); i += 4096) body[i] = static_cast<char>('a' + i / 4096 % 26);
  EXPECT_EQ(c.send({.method = "POST", .path = "/echo", .body = body}).body, body);
  EXPECT_EQ(c.send({.path = "/big", .query = "20000000"}).body.size(), 20'000'000u);
  EXPECT_EQ(server->connections(), 1);
}

TEST_F(TlsTest, AnswersPipelinedRequestsThatCameInPieces) {
  start_tls();
  TestTlsSocket socket = secure();
  std::string wire;
  for (int i = 0; i < 50; ++i)
    socket.tls->seal(
        "POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n\r\n<" + std::to_string(1000 + i) + ">",
        wire);
  for (size_t at = 0; at < wire.size(); at += 701) ASSERT_TRUE(socket.socket.write(wire.substr(at, 701)));
  EXPECT_THAT(socket.read_until("<1049>"), HasSubstr("<1048>"));
}

TEST_F(TlsTest, WhomAClientBelieves) {
  start_tls();
  const auto told = [&](const std::string& host, std::shared_ptr<const TlsTrust> whom) {
    const HttpUrl url{host, server->port(), "", true};
    return error_of([&] { HttpClient(url, {.trust = std::move(whom)}).send({.path = "/hello"}); });
  };
  EXPECT_EQ(
      HttpClient({"localhost", server->port(), "", true}, {.trust = trust}).send({.path = "/hello"}).status,
      200);
  const TlsFiles other = certificates.make("other", "DNS:other.example,DNS:*.example.org,IP:10.0.0.1,IP:::1");
  EXPECT_THAT(told("127.0.0.1", std::make_shared<TlsTrust>(other.certificate)),
              AllOf(StartsWith("https://127.0.0.1:"), HasSubstr("not trusted"), HasSubstr("`ca_file`")));
  EXPECT_THAT(told("127.0.0.1", std::make_shared<TlsTrust>()), HasSubstr("not trusted"));
  // The other's certificate, trusted, but for other names.
  server.reset();
  tls = std::make_shared<TlsServer>(other);
  start_tls();
  const std::string names = "but for other.example, *.example.org, 10.0.0.1, 0:0:0:0:0:0:0:1";
  EXPECT_THAT(told("127.0.0.1", std::make_shared<TlsTrust>(other.certificate)),
              HasSubstr("its certificate is not for 127.0.0.1 " + names));
  EXPECT_THAT(told("localhost", std::make_shared<TlsTrust>(other.certificate)),
              HasSubstr("not for localhost " + names));
}

TEST_F(TlsTest, ACertificateThatHasRunOut) {
  certificates.run("req -new -key " + files.key + " -subj /CN=old -out " + certificates.path("old.csr"));
  const std::string subjects = certificates.write("subjects", std::string("subjectAltName=") + kHere);
  certificates.run("x509 -req -in " + certificates.path("old.csr") + " -days -1 -signkey " + files.key +
                   " -extfile " + subjects + " -out " + certificates.path("old.pem"));
  tls = std::make_shared<TlsServer>(TlsFiles{certificates.path("old.pem"), files.key});
  trust = std::make_shared<TlsTrust>(certificates.path("old.pem"));
  start_tls();
  EXPECT_THAT(error_of([&] { secure_client().send({}); }), HasSubstr("its certificate ran out on 20"));
}

TEST_F(TlsTest, OneSideWithoutTls) {
  start_tls();
  TestSocket plain = raw();
  plain.write(kHello);
  EXPECT_THAT(plain.read_all(), AllOf(StartsWith("HTTP/1.1 400 "), HasSubstr("this port speaks HTTPS")));
  EXPECT_TRUE(plain.ended());
  server.reset();
  start();
  const HttpUrl url{"127.0.0.1", server->port(), "", true};
  EXPECT_THAT(error_of([&] { HttpClient(url, {.trust = trust}).send({}); }), HasSubstr("does not speak TLS"));
}

TEST_F(TlsTest, TimesOutHandshakes) {
  start_tls({.request_timeout = 300ms, .idle_timeout = 600ms});
  TestSocket silent = raw(), dripping = raw();
  TestTlsSocket idle = secure();
  int sent = 0;
  while (sent < 4'000 && dripping.write("\x16") && server->connections() > 0) {
    std::this_thread::sleep_for(10ms);
    ++sent;
  }
  EXPECT_LT(sent, 4'000);
  silent.read_all();
  EXPECT_TRUE(silent.ended());
  idle.read_all();
  EXPECT_TRUE(idle.tls->ended()) << "the end came without TLS's word for it";
}

TEST_F(TlsTest, BoundsConnectionsThatShakeHands) {
  start_tls({.max_connections = 3});
  std::vector<TestSocket> begun;
  for (int i = 0; i < 3; ++i) {
    begun.push_back(raw());
    begun.back().write("\x16\x03\x01");
  }
  ASSERT_TRUE(wait_for([&] { return server->connections() == 3; }));
  EXPECT_EQ(secure_client().send({.path = "/hello"}).status, 503);
  begun.clear();
  ASSERT_TRUE(wait_for([&] { return server->connections() == 0; }));
  EXPECT_EQ(secure_client().send({.path = "/hello"}).status, 200);
}

TEST_F(TlsTest, SurvivesHandshakesOfNonsense) {
  start_tls();
  std::string hello, plain;
  trust->session("127.0.0.1")->receive({}, plain, hello);
  std::mt19937 random(7);
  for (int i = 0; i < 200; ++i) {
    std::string bytes = hello;
    if (i % 4 == 0) bytes.resize(random() % bytes.size() + 1);
    for (int k = 0; k < i % 4 * 3; ++k) bytes[random() % bytes.size()] = static_cast<char>(random());
    if (i % 4 == 3) bytes += bytes;
    TestSocket socket = raw();
    socket.write(bytes);
    if (i % 2) socket.half_close();
    if (i % 8 == 1) socket.read_all();
  }
  EXPECT_TRUE(wait_for([&] { return server->connections() == 0; }));
  EXPECT_EQ(requests, 0);
  EXPECT_EQ(secure_client().send({.path = "/hello"}).body, "hello");
}

TEST_F(TlsTest, AnswersClientsThatClosedTheirSendingSide) {
  start_tls();
  TestTlsSocket socket = secure();
  socket.write("GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
  socket.half_close();
  ASSERT_TRUE(wait_for([&] { return holding == 1; }));
  held[0].reply({.body = "late"});
  EXPECT_THAT(socket.read_all(), AllOf(HasSubstr("100 Continue"), testing::EndsWith("late")));
  EXPECT_EQ(gone, 0);
  {
    TestTlsSocket leaves = secure();
    leaves.write("GET /hold HTTP/1.1\r\nHost: a\r\n\r\n");
    ASSERT_TRUE(wait_for([&] { return holding == 2; }));
  }
  EXPECT_TRUE(wait_for([&] { return gone == 1; }));
}

TEST_F(TlsTest, ReadsItsFilesAgain) {
  start_tls();
  HttpClient before = secure_client();
  EXPECT_EQ(before.send({.path = "/hello"}).status, 200);
  const TlsFiles fresh = certificates.make("fresh", kHere);
  std::filesystem::copy_file(fresh.key, files.key, std::filesystem::copy_options::overwrite_existing);
  EXPECT_THAT(error_of([&] { tls->reload(); }), HasSubstr("do not belong together"));
  EXPECT_EQ(secure_client().send({.path = "/hello"}).status, 200) << "the old pair goes on";
  std::filesystem::copy_file(fresh.certificate, files.certificate,
                             std::filesystem::copy_options::overwrite_existing);
  tls->reload();
  EXPECT_THAT(error_of([&] { secure_client().send({}); }), HasSubstr("not trusted"));
  trust = std::make_shared<TlsTrust>(files.certificate);
  EXPECT_EQ(secure_client().send({.path = "/hello"}).status, 200);
  EXPECT_EQ(before.send({.path = "/hello"}).status, 200) << "connections outlive their certificate";
}

TEST_F(TlsTest, FilesThatAreNoPair) {
  const auto told = [](const std::string& certificate, const std::string& key) {
    return error_of([&] { TlsServer({certificate, key}); });
  };
  EXPECT_THAT(told("/no/such.pem", files.key), HasSubstr("/no/such.pem"));
  EXPECT_THAT(told(files.certificate, "/no/such.key"), HasSubstr("/no/such.key"));
  EXPECT_THAT(told(files.key, files.key), HasSubstr(files.key + ": expected a certificate in PEM"));
  EXPECT_THAT(told(files.certificate, files.certificate), HasSubstr("expected a private key in PEM"));
  EXPECT_THAT(told(certificates.write("empty", ""), files.key), HasSubstr("expected a certificate"));
  const std::string cut = certificates.write("cut", "-----BEGIN CERTIFICATE-----\nMIIB");
  EXPECT_THAT(told(cut, files.key), HasSubstr(cut));
  const std::string locked = certificates.path("locked");
  certificates.run("ec -in " + files.key + " -aes128 -passout pass:x -out " + locked);
  EXPECT_THAT(told(files.certificate, locked), HasSubstr("locked with a password"));
  EXPECT_THAT(error_of([&] { TlsTrust("/no/such"); }), HasSubstr("/no/such"));
}

// A server that ends its body with the connection, and with or without TLS's word for it.
std::string reply_that_ends(const TlsServer& server, const std::shared_ptr<const TlsTrust>& trust,
                            bool says_so) {
  Listeners made = listen_on("127.0.0.1", 0);
  std::thread other([&] {
    pollfd ready{made.sockets[0].get(), POLLIN, 0};
    poll(&ready, 1, 60'000);
    const Fd socket(accept(made.sockets[0].get(), nullptr, nullptr));
    const auto session = server.session();
    std::array<char, 4096> buffer;
    std::string asked, wire;
    while (asked.empty()) {
      const ssize_t n = recv(socket.get(), buffer.data(), buffer.size(), 0);
      if (n <= 0) return;
      session->receive({buffer.data(), static_cast<size_t>(n)}, asked, wire);
      if (!asked.empty()) session->seal("HTTP/1.1 200 OK\r\n\r\nhalf of it", wire);
      if (!asked.empty() && says_so) session->end(wire);
      ::send(socket.get(), wire.data(), wire.size(), MSG_NOSIGNAL);
      wire.clear();
    }
  });
  std::string out;
  try {
    out = HttpClient({"127.0.0.1", made.port, "", true}, {.trust = trust}).send({}).body;
  } catch (const Error& error) {
    out = error.what();
  }
  other.join();
  return out;
}

TEST_F(TlsTest, ACutConnectionIsNoEndOfABody) {
  EXPECT_EQ(reply_that_ends(*tls, trust, true), "half of it");
  EXPECT_THAT(reply_that_ends(*tls, trust, false), HasSubstr("cut in the middle of a reply"));
}

#else

TEST(TlsTest, IsSaidToBeMissing) {
  EXPECT_THAT(error_of([] { TlsServer({"a", "b"}); }), HasSubstr("without TLS"));
  EXPECT_THAT(error_of([] { HttpClient(parse_url("https://a")); }), HasSubstr("without TLS"));
}

#endif

}  // namespace
}  // namespace kt::inline http
