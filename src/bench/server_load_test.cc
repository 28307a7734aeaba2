#include "bench/server_load.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/text.h"
#include "http/server.h"

namespace kt::inline bench {
namespace {

constexpr int kTokens = 5;

// Streams kTokens words; what a body holds asks for something else.
void answer(const HttpRequest& request, const Responder& responder) {
  const auto asks = [&](std::string_view word) { return request.body.find(word) != std::string::npos; };
  if (!request.body.ends_with('}'))
    return responder.reply({.status = 400, .body = R"({"error":{"message":"bad"}})"});
  if (asks("refuse")) return responder.reply({.status = 503, .body = R"({"error":{"message":"full"}})"});
  if (asks("plain")) return responder.reply({.body = "{}"});
  responder.start({.type = "text/event-stream"});
  if (asks("vanish")) return;  // without the final chunk
  for (int i = 0; i < kTokens; ++i) responder.send("data: {\"choices\":[{\"text\":\"a\"}]}\n\n");
  if (asks("sleep")) std::this_thread::sleep_for(std::chrono::milliseconds(600));
  responder.send(text(
      "data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":3,\"completion_tokens\":{}}}}}\n\n", kTokens));
  if (!asks("endless")) responder.send("data: [DONE]\n\n");
  responder.end();
}

LoadTarget target_of(const HttpServer& server, double timeout = 300) {
  return {.url = parse_url(server.url()), .path = "/v1/completions", .timeout = timeout};
}

NextBody repeat(std::string body, int times) {
  return [body = std::move(body), times]() mutable -> std::optional<std::string> {
    if (times-- <= 0) return std::nullopt;
    return body;
  };
}

TEST(ServerLoad, EveryRequestIsAnsweredAndTimed) {
  std::atomic<int> seen = 0;
  HttpServer server({}, [&](const HttpRequest& request, Responder responder) {
    ++seen;
    answer(request, responder);
  });
  const StreamsResult result = run_streams(target_of(server), 4, repeat("{}", 40));
  ASSERT_EQ(result.requests.size(), 40u);
  EXPECT_EQ(seen, 40);
  for (const StreamOutcome& at : result.requests) {
    EXPECT_EQ(at.failure, "");
    EXPECT_EQ(at.tokens, kTokens);
    EXPECT_EQ(at.pieces, kTokens);
    EXPECT_EQ(at.prompt_tokens, 3);
    EXPECT_TRUE(at.counted);
    EXPECT_LE(at.start, at.first);
    EXPECT_LE(at.first, at.last);
    EXPECT_LE(at.last, at.end);
  }
  EXPECT_LE(server.connections(), 4);
}

TEST(ServerLoad, FailuresAreNamed) {
  HttpServer server({}, answer);
  const auto failure = [&](const std::string& body, double timeout = 300) {
    return run_streams(target_of(server, timeout), 1, repeat(body, 1)).requests.at(0).failure;
  };
  EXPECT_EQ(failure("{refuse}"), "HTTP 503: full");
  EXPECT_EQ(failure("{plain}"), "a reply that is no event stream");
  EXPECT_EQ(failure("{endless}"), "a stream without [DONE]");
  EXPECT_NE(failure("{vanish}"), "");
  EXPECT_NE(failure("{sleep}", 0.1).find("0.1 s"), std::string::npos);
}

TEST(ServerLoad, NoServerIsAFailureOfEachRequest) {
  int port = 0;
  {
    HttpServer server({}, answer);
    port = server.port();
  }
  const LoadTarget target{.url = parse_url(text("http://127.0.0.1:{}", port)), .path = "/"};
  const StreamsResult result = run_streams(target, 2, repeat("{}", 5));
  ASSERT_EQ(result.requests.size(), 5u);
  for (const StreamOutcome& at : result.requests) EXPECT_EQ(at.failure, "connect: Connection refused");
}

TEST(ServerLoad, ALargeBodyArrivesWhole) {
  std::atomic<size_t> size = 0;
  HttpServer server({}, [&](const HttpRequest& request, Responder responder) {
    size = request.body.size();
    answer(request, responder);
  });
  const std::string body = "{" + std::string(8 << 20, 'a') + "}";
  EXPECT_EQ(run_streams(target_of(server), 1, repeat(body, 1)).requests.at(0).failure, "");
  EXPECT_EQ(size, body.size());
}

TEST(ServerLoad, ErrorsAreTimedWhileStreamsRun) {
  HttpServer server({}, answer);
  const ProbeResult result = probe_errors(target_of(server), 3, repeat("{}", 1'000'000), 10);
  EXPECT_EQ(result.seconds.size(), 10u);
  EXPECT_TRUE(result.failures.empty());
  EXPECT_EQ(result.streams_failed, 0);
  for (double seconds : result.seconds) EXPECT_GT(seconds, 0);
}

TEST(ServerLoad, ProbesEndWithTheLastStream) {
  HttpServer server({}, answer);
  const ProbeResult result = probe_errors(target_of(server), 2, repeat("{refuse}", 100), 1'000'000);
  EXPECT_EQ(result.streams_failed, 2);
}

}  // namespace
}  // namespace kt::inline bench
