#include "cli/bench/bench_server.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "bench/load_prompts.h"
#include "bench/server_figures.h"
#include "bench/stream_event.h"
#include "cli/bench/measure_flags.h"
#include "cli/server_trust.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "text/json.h"

namespace kt::inline cli {
namespace {

// The server as it is asked before the measurement: what it serves, how it counts.
class Asker {
 public:
  explicit Asker(const LoadTarget& target)
      : client_(target.url, {.read_timeout = std::chrono::milliseconds(60'000), .trust = target.trust}),
        key_(target.api_key) {}

  std::string first_model() {
    const HttpReply reply = ask("GET", "/v1/models", "");
    if (reply.status != 200)
      fail(tr("/v1/models: HTTP {}: {}; --model NAME does without it"), reply.status,
           error_message(reply.body));
    const OrderedJson parsed = OrderedJson::parse(reply.body, nullptr, false);
    if (!parsed.is_object() || !parsed.contains("data") || !parsed["data"].is_array() ||
        parsed["data"].empty() || !parsed["data"][0].is_object() || !parsed["data"][0].contains("id") ||
        !parsed["data"][0]["id"].is_string())
      fail(tr("/v1/models: no model in the reply; --model NAME does without it"));
    return parsed["data"][0]["id"].get<std::string>();
  }

  // Servers disagree on the text's name; nullopt: /tokenize is not there, or says something else.
  std::optional<int64_t> count_tokens(const std::string& model, const std::string& prompt) {
    for (; tried_ < 3; ++tried_) {
      static constexpr const char* kNames[] = {"prompt", "content", "text"};
      const OrderedJson body = {{"model", model}, {kNames[tried_], prompt}};
      const HttpReply reply = ask("POST", "/tokenize", body.dump());
      const OrderedJson parsed = OrderedJson::parse(reply.body, nullptr, false);
      if (reply.status == 200 && parsed.is_object() && parsed.contains("tokens") &&
          parsed["tokens"].is_array() && !parsed["tokens"].empty())
        return static_cast<int64_t>(parsed["tokens"].size());
    }
    return std::nullopt;
  }

 private:
  HttpReply ask(std::string method, std::string path, std::string body) {
    HttpRequest request{.method = std::move(method), .path = std::move(path), .body = std::move(body)};
    if (!request.body.empty()) request.headers.emplace_back("Content-Type", "application/json");
    if (!key_.empty()) request.headers.emplace_back("Authorization", "Bearer " + key_);
    return client_.send(request);
  }

  HttpClient client_;
  std::string key_;
  size_t tried_ = 0;  // names of the text that did not work
};

class ServerBench {
 public:
  ServerBench(const ServerBenchFlags& flags, const ServerBenchCase& at)
      : flags_(flags),
        case_(at),
        target_{.url = parse_url(flags.url),
                .path = {},
                .api_key = flags.api_key,
                .timeout = flags.timeout,
                .trust = trust_of(flags.ca_file)},
        asker_(target_),
        model_(flags.model.empty() ? asker_.first_model() : flags.model),
        prompts_(flags.seed) {
    target_.path = flags.api == "chat" ? "/v1/chat/completions" : "/v1/completions";
    // Told nothing, a token is a word.
    if (!asker_.count_tokens(model_, "once upon a time")) counts_ = false;
    if (flags.shared_prefix) prefix_ = prompts_.shared(words_for(flags.shared_prefix));
  }

  std::vector<LevelFigures> run();
  const std::string& model() const { return model_; }
  bool counts() const { return counts_; }

 private:
  int words_for(int64_t tokens) {
    if (!counts_) return static_cast<int>(std::max<int64_t>(tokens, 1));
    return LoadPrompts::words_for(
        tokens, [&](const std::string& prompt) { return asker_.count_tokens(model_, prompt).value_or(0); });
  }
  std::string body(int words);
  LevelFigures level(int streams, int prompt, int words);

  const ServerBenchFlags& flags_;
  const ServerBenchCase& case_;
  LoadTarget target_;
  Asker asker_;
  std::string model_;
  LoadPrompts prompts_;
  std::string prefix_;
  bool counts_ = true;  // /tokenize is there
};

std::string ServerBench::body(int words) {
  const std::string prompt = prompts_.next(words, prefix_);
  OrderedJson out = {{"model", model_}};
  if (flags_.api == "chat")
    out["messages"] = {{{"role", "user"}, {"content", prompt}}};
  else
    out["prompt"] = prompt;
  out["max_tokens"] = case_.tokens;
  out["temperature"] = 0;
  out["ignore_eos"] = true;
  out["stream"] = true;
  out["stream_options"] = {{"include_usage", true}};
  return out.dump();
}

LevelFigures ServerBench::level(int streams, int prompt, int words) {
  const int requests = flags_.requests ? flags_.requests : 4 * streams;
  // Made before the clock runs.
  std::vector<std::string> bodies;
  for (int i = 0; i < requests; ++i) bodies.push_back(body(words));
  size_t at = 0;
  const StreamsResult result =
      run_streams(target_, std::min(streams, requests), [&]() -> std::optional<std::string> {
        if (at == bodies.size()) return std::nullopt;
        return std::move(bodies[at++]);
      });
  LevelFigures out = figures_of(result, streams, prompt);
  if (flags_.errors && out.ok)
    out.errors = figures_of(
        probe_errors(
            target_, streams, [&]() -> std::optional<std::string> { return body(words); }, flags_.errors),
        flags_.errors);
  return out;
}

std::vector<LevelFigures> ServerBench::run() {
  StatusLine status;
  std::vector<LevelFigures> out;
  for (const int prompt : case_.prompts) {
    status.show(text("prompts of {} tokens: warming up", prompt));
    const int words = words_for(std::max(1, prompt - flags_.shared_prefix));
    int left = flags_.warmup;
    run_streams(target_, std::max(1, left), [&]() -> std::optional<std::string> {
      if (left-- <= 0) return std::nullopt;
      return body(words);
    });
    for (const int streams : flags_.concurrency) {
      status.show(text("prompts of {} tokens: {}", prompt, counted(streams, "stream")));
      out.push_back(level(streams, prompt, words));
    }
  }
  return out;
}

void print(const ServerBenchFlags& flags, const ServerBenchCase& at, const ServerBench& bench,
           const std::vector<LevelFigures>& levels) {
  if (!at.json) std::printf("%s", table_of(levels).c_str());
  if (!at.json && at.file.empty()) return;
  OrderedJson out = {{"server", flags.url},
                     {"model", bench.model()},
                     {"api", flags.api},
                     {"max_tokens", at.tokens},
                     {"shared_prefix", flags.shared_prefix},
                     {"seed", flags.seed},
                     {"prompts_from", bench.counts() ? "tokenize" : "words"},
                     {"points", OrderedJson::array()}};
  for (const LevelFigures& level : levels) out["points"].push_back(json_of(level));
  const std::string content = out.dump(2, ' ', false, OrderedJson::error_handler_t::replace) + "\n";
  if (!at.file.empty()) write_out(at.file, content);
  if (at.json) std::printf("%s", content.c_str());
}

}  // namespace

void ServerBenchFlags::add_to(CLI::App& verb) {
  CLI::Option* server = verb.add_option(
      "--server", url,
      "Measure this running server, http://HOST:PORT or https://..., instead of a model in this process");
  const auto add = [&](const char* name, auto& value, const char* help) {
    return verb.add_option(name, value, help)->needs(server);
  };
  add("--concurrency", concurrency, "Streams at once")
      ->delimiter(',')
      ->check(positive())
      ->capture_default_str();
  add("--requests", requests, "Requests for each point; default: 4 for each stream")->check(positive());
  add("--api", api, "Which endpoint")->check(CLI::IsMember({"completions", "chat"}))->capture_default_str();
  add("--api-key", api_key, "The server's key");
  add("--ca-file", ca_file, kCaFileHelp)->check(CLI::ExistingFile);
  verb.add_option("-m,--model", model,
                  "MODEL; with --server its name in requests, by default the first of /v1/models");
  add("--shared-prefix", shared_prefix, "Tokens at the beginning that all prompts share; default: none")
      ->check(positive());
  add("--seed", seed, "Of the prompts")->capture_default_str();
  add("--warmup", warmup, "Requests before the measurement")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  add("--timeout", timeout, "Seconds that one request may take")->check(positive())->capture_default_str();
  add("--errors", errors,
      "While streams run, also time so many bad requests to the first byte of their error")
      ->check(positive());
}

void bench_server(const ServerBenchFlags& flags, const ServerBenchCase& at) {
  ServerBench bench(flags, at);
  const std::vector<LevelFigures> levels = bench.run();
  if (!at.plot.empty()) write_out(at.plot, svg(charts_of(levels)));
  print(flags, at, bench, levels);
  if (std::ranges::any_of(levels, [](const LevelFigures& level) { return level.ok > 0; })) return;
  const auto& failures = levels.front().failures;
  fail("{}: every request failed; the first kind: {}", flags.url,
       failures.empty() ? "none" : failures.begin()->first);
}

}  // namespace kt::inline cli
