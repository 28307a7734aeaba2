// A whole server with the demo model, used by many threads at once: what the thread sanitizer is to look at.
// What replies contain is tests/server_api_test.py's business.
#include "server/server.h"

#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "http/client.h"

namespace kt::inline server {
namespace {

using testing::HasSubstr;

HttpRequest post(std::string path, std::string body) {
  return {.method = "POST", .path = std::move(path), .body = std::move(body)};
}

class RunningServer {
 public:
  explicit RunningServer(ServerOptions options = {}) : server(std::move(options)) {
    ServiceOptions service{.name = "demo", .version = "test", .max_running = 4, .pages = 64};
    service.chat_template = model.chat_template();
    server.serve(model, std::move(service));
  }
  HttpClient client() { return HttpClient(parse_url(server.url())); }
  bool settles() {
    for (int i = 0; i < 30'000 && !server.drained(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    return server.drained();
  }

  LoadedModel model = OpenedModel(KT_DEMO_MODEL, {.threads = 2, .max_tokens = 64}).load();
  Server server;
};

TEST(ServerTest, AnswersNothingButHealthWhileTheModelLoads) {
  Server server{ServerOptions{}};
  HttpClient client(parse_url(server.url()));
  EXPECT_EQ(client.send({.path = "/health"}).status, 503);
  EXPECT_EQ(client.send({.path = "/v1/models"}).status, 503);
  EXPECT_EQ(client.send({.path = "/"}).status, 200);
}

TEST(ServerTest, MixedClientsAtOnce) {
  RunningServer running;
  std::atomic<int> whole = 0, streamed = 0, refused = 0;
  std::vector<std::thread> clients;
  for (int i = 0; i < 6; ++i)
    clients.emplace_back([&, i] {
      HttpClient client = running.client();
      for (int round = 0; round < 3; ++round) {
        const auto reply = client.send(post(
            "/v1/chat/completions", R"({"messages":[{"role":"user","content":"Hi"}],"max_tokens":8,"seed":)" +
                                        std::to_string(i) + "}"));
        whole += reply.status == 200;
        std::string body;
        client.stream(
            post("/v1/completions", R"({"prompt":"Once","max_tokens":12,"stream":true,"ignore_eos":true})"),
            [&](std::string_view piece) {
              body += piece;
              return round != 1 || body.size() < 200;  // the second is left in the middle
            });
        // One that is left may have come whole with the piece that ended it.
        streamed += round != 1 && body.ends_with("data: [DONE]\n\n");
        refused += client.send(post("/v1/completions", "{")).status == 400;
        client.send({.path = i % 2 ? "/metrics" : "/kt/status"});
        const auto held = client.send(post(
            "/v1/chat/completions",
            R"({"messages":[{"role":"user","content":"Hi"}],"max_tokens":40,"response_format":{"type":"json_schema",)"
            R"("json_schema":{"name":"x","schema":{"type":"integer","minimum":0,"maximum":99}}}})"));
        EXPECT_EQ(held.status, 200) << held.body;
      }
    });
  for (std::thread& thread : clients) thread.join();
  EXPECT_EQ(whole, 18);
  EXPECT_EQ(streamed, 12);
  EXPECT_EQ(refused, 18);
  running.server.drain();
  EXPECT_TRUE(running.settles());
}

TEST(ServerTest, EndsWhileStreamsRun) {
  std::vector<std::thread> clients;
  {
    RunningServer running;
    std::atomic<int> begun = 0;
    for (int i = 0; i < 4; ++i)
      clients.emplace_back([&begun, url = parse_url(running.server.url())] {
        try {
          HttpClient(url).stream(
              post("/v1/completions",
                   R"({"prompt":"Once","max_tokens":900,"stream":true,"ignore_eos":true})"),
              [&](std::string_view) {
                ++begun;
                return true;
              });
        } catch (const Error&) {
        }  // the connection was closed
      });
    while (begun < 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (std::thread& thread : clients) thread.join();
}

TEST(ServerTest, DrainFinishesWhatRunsAndRefusesTheRest) {
  RunningServer running;
  std::string body;
  std::atomic<bool> begun = false;
  std::thread client([&] {
    running.client().stream(
        post("/v1/completions", R"({"prompt":"Once","max_tokens":60,"stream":true,"ignore_eos":true})"),
        [&](std::string_view piece) {
          body += piece;
          begun = true;
          return true;
        });
  });
  while (!begun) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  running.server.drain();
  int refused = 0;
  std::string why;
  try {
    refused = running.client().send(post("/v1/completions", R"({"prompt":"x"})")).status;
  } catch (const Error& error) {
    why = error.what();
  }
  client.join();
  // A connection that has not said anything yet may also be closed.
  EXPECT_EQ(why.empty() ? refused : 503, 503) << why;
  EXPECT_THAT(body, HasSubstr("[DONE]"));
  EXPECT_TRUE(running.settles());
}

}  // namespace
}  // namespace kt::inline server
