// kt run: the server. Says what it will take, loads, serves until it is told to stop.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>

#include "base/checked.h"
#include "base/cpu_choice.h"
#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"
#include "base/topology.h"
#include "cli/experts_text.h"
#include "cli/method_flag.h"
#include "cli/model_estimate.h"
#include "cli/model_flags.h"
#include "cli/questions.h"
#include "cli/server_key.h"
#include "cli/settings.h"
#include "server/server.h"
#include "terminal/report.h"

namespace kt {
namespace {

constexpr int kUsualRequests = 8;
constexpr int64_t kUsualTokens = 32768;  // in the cache, if the model's context is no longer
constexpr int64_t kLeastTokens = 4096;   // before memory is called too small
constexpr int kInterrupted = 130;

struct RunFlags {
  ModelFlags model;
  std::string positional, option;  // the model, either way
  std::string method, host, name, chat_template, tool_parser, reasoning_parser;
  std::string api_key, api_key_file;  // as given: an empty one is not none
  AccessOptions access;
  int port = 0, nodes = 0, requests = 0, waiting = ServiceOptions{}.max_waiting;
  int64_t tokens = 0;
  double timeout = 0;
  bool dry_run = false, json = false, download = false;
  std::vector<std::string> node_words;  // of --kt-numa-nodes
  std::vector<int> node_ids;
  std::vector<std::string> foreign;  // flags that were accepted and mean nothing here
};

// Flags of SGLang launch lines that mean nothing to a server that uses no GPU, and why.
struct ForeignFlag {
  const char* names;
  bool has_value;
  const char* note;
};
constexpr auto kForeign = std::to_array<ForeignFlag>({
    {"--mem-fraction-static", true,
     "memory is planned before loading; see --max-total-tokens and --max-memory"},
    {"--enable-mixed-chunk", false, "prompts and answers always share steps"},
    {"--attention-backend", true, "there is one, chosen for this CPU"},
    {"--tensor-parallel-size,--tp-size,--tp", true, "experts are shared by all NUMA nodes"},
    {"--trust-remote-code", false, "no code of a checkpoint is ever run"},
    {"--disable-shared-experts-fusion", false, "shared experts are never fused"},
    {"--enable-p2p-check", false, "kt run uses no GPU"},
    {"--kt-num-gpu-experts", true, "kt run uses no GPU: all experts run on the CPU"},
    {"--kt-gpu-experts-ratio", true, "kt run uses no GPU: all experts run on the CPU"},
    {"--kt-max-deferred-experts-per-token", true, "kt run uses no GPU to hide experts behind"},
    {"--kt-gpu-prefill-token-threshold", true, "kt run uses no GPU"},
    {"--kt-expert-placement-strategy", true, "kt run uses no GPU"},
    {"--kt-enable-dynamic-expert-update", false, "kt run uses no GPU"},
    {"--init-expert-location", true, "kt run uses no GPU"},
});

// --kt-method says what the experts' weights are: a contradiction is an error, and methods of converted weights round
// other experts as they are loaded.
void apply_method(RunFlags& flags) {
  if (flags.method.empty()) return;
  const std::string& path = flags.model.weights.empty() ? flags.model.model : flags.model.weights;
  const std::string format = checked_method_format(flags.method, path);
  if (flags.model.format.empty()) flags.model.format = format;
}

// Numbers of nodes: "0,2", or "0 1" as several words, behind which the model may stand.
void read_node_ids(RunFlags& flags) {
  std::vector<std::string>& words = flags.node_words;
  const auto is_model = [](const std::string& word) {
    return word.find_first_not_of("0123456789,- ") != std::string::npos;
  };
  if (words.size() > 1 && is_model(words.back()) && flags.positional.empty()) {
    flags.positional = words.back();
    words.pop_back();
  }
  if (words.empty()) return;
  try {
    const NodeChoice choice = choose_nodes(words, flags.nodes, Topology::discover());
    flags.node_ids = choice.ids;
    flags.nodes = choice.pools;
  } catch (const Error& error) {
    throw Error(error.kind(), text("--kt-numa-nodes: {}", error.what()));
  }
}

// What the command line leaves open comes from config.yaml.
void apply_settings(RunFlags& flags, const CLI::App& verb) {
  const Settings settings = load_settings();
  const auto given = [&](const char* name) { return verb.get_option(name)->count() > 0; };
  if (!given("--host")) flags.host = settings.text("server.host");
  if (!given("--port")) flags.port = static_cast<int>(settings.integer("server.port"));
  KeySources key{.setting = settings.text("server.api-key")};
  if (given("--api-key")) key.flag = flags.api_key;
  if (given("--api-key-file")) key.file = flags.api_key_file;
  flags.access.api_key = server_key(key);
  if (!given("--served-model-name")) flags.name = settings.text("server.served-model-name");
  if (!given("--max-running-requests"))
    flags.requests = static_cast<int>(settings.integer("server.max-running-requests"));
  if (!given("--max-total-tokens")) flags.tokens = settings.integer("server.max-total-tokens");
  if (!given("--cpu-threads")) flags.model.threads = static_cast<int>(settings.integer("run.cpu-threads"));
  if (!given("--numa-nodes") && !given("--kt-numa-nodes"))
    flags.nodes = static_cast<int>(settings.integer("run.numa-nodes"));
  if (!given("--kt-method")) flags.method = settings.text("run.kt-method");
  if (!given("--chunked-prefill-size"))
    flags.model.step_tokens = static_cast<int>(settings.integer("run.chunked-prefill-size"));
  if (!given("--max-memory")) {
    const Json& most = settings.value("run.max-memory");
    flags.model.max_memory = most.is_string() ? most.get<std::string>() : "";
  }
  if (!given("--kv")) flags.model.kv = settings.text("run.kv");
  read_node_ids(flags);
  if (!flags.positional.empty() && !flags.option.empty()) fail("MODEL and --model-path: give one of them");
  std::string wanted = flags.positional.empty() ? flags.option : flags.positional;
  if (wanted.empty()) wanted = settings.text("run.model");
  if (wanted.empty())
    fail("no model; give a folder, a .gguf file or a name of kt model list, such as kt run demo");
  flags.model.found = named_model(wanted);
  fetch_model(flags.model.found, {.agreed = flags.download});
  flags.model.model = flags.model.found.path;
  if (flags.model.weights.empty() && flags.model.format.empty())
    flags.model.weights = flags.model.found.weights;
}

ModelOptions model_options(const RunFlags& flags) {
  ModelOptions out = flags.model.options();
  out.nodes = flags.nodes;
  out.node_ids = flags.node_ids;
  return out;
}

std::string served_name(const RunFlags& flags) {
  if (!flags.name.empty()) return flags.name;
  if (!flags.model.found.name.empty()) return flags.model.found.name;
  if (!flags.model.found.repo.empty())
    return flags.model.found.repo;  // its folder in a cache is called by a commit
  const std::filesystem::path path = std::filesystem::path(flags.model.model).lexically_normal();
  const std::string leaf =
      path.has_filename() ? path.filename().string() : path.parent_path().filename().string();
  return leaf.empty() ? flags.model.model : leaf;
}

// How many requests share how many tokens of cache.
MemoryRequest planned_use(const RunFlags& flags, const OpenedModel& model, uint64_t max_memory) {
  const int context = model.spec().context;
  const int requests =
      flags.requests > 0 ? flags.requests : std::min(kUsualRequests, flags.model.step_tokens);
  if (requests > flags.model.step_tokens)
    fail("--max-running-requests: {} requests, and a step takes {} tokens; see --chunked-prefill-size",
         requests, flags.model.step_tokens);
  const auto use = [&](int64_t tokens) {
    return MemoryRequest{
        .sequences = requests,
        .context = static_cast<int>(std::max<int64_t>(1, ceil_div(tokens, int64_t{requests})))};
  };
  if (flags.tokens > 0) {
    const int64_t most = int64_t{context} * requests;
    if (flags.tokens > most)
      std::fprintf(
          stderr, "kt: --max-total-tokens: %lld are more than %d requests of %d tokens can use; %lld it is\n",
          static_cast<long long>(flags.tokens), requests, context, static_cast<long long>(most));
    return use(std::min(flags.tokens, most));
  }
  int64_t tokens = std::min(int64_t{context} * requests, std::max<int64_t>(context, kUsualTokens));
  // Half of what the weights leave free, so that the machine stays usable.
  uint64_t most = available_memory() + model.base_bytes();
  if (max_memory > 0) most = std::min(most, max_memory);
  while (tokens > kLeastTokens) {
    const MemoryPlan plan = model.memory_plan(use(tokens));
    const uint64_t others = plan.weights() + plan.host().workspace + model.base_bytes();
    if (others + 2 * plan.host().kv_cache <= most) break;
    tokens = std::max(kLeastTokens, tokens / 2);
  }
  return use(tokens);
}

ChatSyntax syntax_of(const RunFlags& flags, const std::string& chat_template, const Tokenizer& tokenizer) {
  ChatSyntax out = chat_syntax_of(chat_template, tokenizer);
  if (!flags.tool_parser.empty()) out.tools = tool_syntax_named(flags.tool_parser);
  if (!flags.reasoning_parser.empty()) {
    const ChatSyntax named = reasoning_syntax_named(flags.reasoning_parser);
    out.think_begin = named.think_begin;
    out.think_end = named.think_end;
  }
  return out;
}

std::string template_of(const RunFlags& flags, const DescribedModel& model) {
  if (flags.chat_template.empty()) return model.chat_template();
  constexpr size_t kMostTemplate = size_t{16} << 20;
  try {
    return read_file(flags.chat_template, kMostTemplate);
  } catch (const Error& error) {
    throw Error(error.kind(), text("--chat-template: {}", error.what()));
  }
}

void print_plan(const RunFlags& flags, const OpenedModel& model, const Estimate& estimate) {
  std::printf("%s: %s\n", served_name(flags).c_str(), flags.model.model.c_str());
  if (!flags.model.weights.empty()) std::printf("experts from %s\n", flags.model.weights.c_str());
  if (!model.experts_path().empty())
    std::printf("all but the experts from %s\n", model.checkpoint().path().c_str());
  const std::string experts =
      model.experts_dialect().empty()
          ? "a dense model"
          : text("{} experts of {} a layer, {} for each token", model.experts_dialect(),
                 model.spec().moe()->experts, model.spec().moe()->top_k);
  std::printf("%s; context %d; %s kernels on %s, %s; no GPU is used\n\n", experts.c_str(),
              model.spec().context, std::string(kernels().name).c_str(),
              counted(model.threads(), "thread").c_str(), pools_text(model.nodes(), flags.node_ids).c_str());
  print_memory(estimate);
  std::printf("\n");
  print_speed(estimate);
  for (const std::string& note : flags.foreign) std::printf("note: %s\n", note.c_str());
  std::fflush(stdout);
}

// One line while layers are read: how far, how fast, how long still.
class LoadProgress {
 public:
  explicit LoadProgress(double bytes) : bytes_(bytes) {}
  void show(int done, int total) {
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const double share = static_cast<double>(done) / total;
    constexpr int kWidth = 24;
    const int filled = static_cast<int>(share * kWidth);
    std::string bar;
    for (int i = 0; i < kWidth; ++i) bar += i < filled ? "#" : ".";
    status_.show(text("loading [{}] layer {} of {}, {} GB/s, {} s left", bar, done, total,
                      three_digits(bytes_ * share / seconds * 1e-9),
                      three_digits(seconds / share - seconds)));
  }

  void end() { status_.show(""); }

 private:
  double bytes_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  StatusLine status_;
};

// Signals that ask the server to stop become bytes in a pipe; the second one ends the process at once.
class StopSignals {
 public:
  StopSignals() {
    if (::pipe2(pipe_, O_CLOEXEC | O_NONBLOCK) != 0) fail_as(ErrorKind::kInternal, "pipe: errno {}", errno);
    count_ = 0;
    for (int signal : {SIGINT, SIGTERM}) {
      struct sigaction action{};
      action.sa_handler = on_signal;
      action.sa_flags = SA_RESTART;
      ::sigaction(signal, &action, nullptr);
    }
  }
  // Waits so long for the first signal.
  bool wait(int milliseconds) const {
    pollfd one{pipe_[0], POLLIN, 0};
    return ::poll(&one, 1, milliseconds) > 0;
  }

 private:
  static void on_signal(int) {
    if (count_ > 0) ::_exit(kInterrupted);
    count_ = 1;
    [[maybe_unused]] const auto written = ::write(pipe_[1], "x", 1);
  }
  static inline int pipe_[2] = {-1, -1};
  static inline volatile std::sig_atomic_t count_ = 0;
};

void serve(Server& server, const StopSignals& stop, const RunFlags& flags) {
  std::printf("ready: %s (the page and the API; Ctrl-C stops)\n", server.url().c_str());
  if (!flags.json)
    print_next({.line = NextLine::kReport, .command = command_line({"chat", "--url", server.url()})});
  std::fflush(stdout);
  while (!stop.wait(60'000)) {
  }
  std::fprintf(stderr, "kt: stopping; answers that run are finished first, a second signal stops at once\n");
  server.drain();
  while (!server.drained()) ::usleep(20'000);
  if (const auto use = server.experts_used())
    std::printf("served %s tokens; %s\n", fixed(use->tokens, 0).c_str(), experts_text(*use).c_str());
}

void run(RunFlags flags) {
  apply_method(flags);
  const ModelOptions options = model_options(flags);
  OpenedModel opened(flags.model.model, options);
  const MemoryRequest use = planned_use(flags, opened, options.max_memory);
  const std::string chat_template = template_of(flags, opened);
  ServiceOptions service{.name = served_name(flags),
                         .version = version(),
                         .max_running = use.sequences,
                         .max_waiting = flags.waiting,
                         .request_timeout_s = flags.timeout,
                         .syntax = syntax_of(flags, chat_template, opened.tokenizer()),
                         .chat_template = chat_template};
  service.pages = use.sequences * static_cast<int>(ceil_div(int64_t{use.context}, int64_t{kPageTokens}));
  std::unique_ptr<StopSignals> stop;
  std::unique_ptr<Server> server;
  if (!flags.dry_run) {  // a port that is taken is known now, not after minutes of loading
    server = std::make_unique<Server>(
        ServerOptions{.http = {.host = flags.host, .port = flags.port}, .access = flags.access});
    if (flags.access.api_key.empty() && server->reaches_other_machines())
      std::fprintf(stderr,
                   "kt: warning: other machines can reach %s, and no key is asked for; see --api-key-file\n",
                   server->url().c_str());
  }
  service.rates = measured_rates(options.threads);
  Estimate estimate = estimate_model(opened, use, options.max_memory, service.rates);
  estimate.node_ids = flags.node_ids;
  if (flags.json)
    std::printf("%s\n", json_of(estimate).dump(2).c_str());
  else
    print_plan(flags, opened, estimate);
  if (flags.dry_run) return;
  LoadProgress progress(opened.stored_bytes());
  LoadedModel model = std::move(opened).load(
      {.use = use, .on_layer = [&](int done, int total) { progress.show(done, total); }});
  progress.end();
  std::printf("loaded in %s s\n", three_digits(model.load_seconds()).c_str());
  stop = std::make_unique<StopSignals>();
  server->serve(model, std::move(service));
  serve(*server, *stop, flags);
  server.reset();  // before the model
}

void add_access(CLI::App& verb, RunFlags& flags) {
  CLI::Option* const key =
      verb.add_option("--api-key", flags.api_key,
                      "Clients must send this key: Authorization: Bearer KEY; also from KT_API_KEY");
  verb.add_option("--api-key-file", flags.api_key_file, "A file with that key, which other users cannot list")
      ->excludes(key);
  verb.add_option("--allow-host", flags.access.allow_hosts,
                  "A name that clients reach this server by (Host), or * for any; localhost, addresses, the "
                  "machine's own name and --host always are");
  verb.add_option("--allow-origin", flags.access.allow_origin,
                  "Web pages of this origin may use the API too, or * for all; default: only our own page");
}

}  // namespace

void add_run(CLI::App& kt, Invocation& invocation) {
  CLI::App* verb = kt.add_subcommand("run", "Serve a model: OpenAI's API and a web page");
  const auto flags = std::make_shared<RunFlags>();
  verb->add_option("MODEL", flags->positional, kModelHelp);
  verb->add_option("--model-path,--model", flags->option, "The same");
  flags->model.add_options(*verb);
  add_download_flag(*verb, flags->download);
  verb->add_option("--kt-method", flags->method,
                   "How the experts' weights are stored; AMXINT4 and AMXINT8, as int4 and int8, also round "
                   "experts that are not converted while they are loaded")
      ->transform(weight_method_name());
  verb->add_option(
          "--numa-nodes,--kt-threadpool-count", flags->nodes,
          "NUMA nodes to use; default: all; more than there are: so many pools of threads share them")
      ->check(within(1, kMostSequences));
  verb->add_option("--kt-numa-nodes", flags->node_words,
                   "Which NUMA nodes to use, by their numbers, such as 0,2; default: the first ones");
  verb->add_option("--host", flags->host, "Address to listen on; default: 127.0.0.1, this machine only");
  verb->add_option("--port", flags->port, "Port to listen on; 0: any free one; default: 30000")
      ->check(CLI::Range(0, 65535));
  add_access(*verb, *flags);
  verb->add_option("--served-model-name", flags->name, "The model's name in the API; default: its folder's");
  verb->add_option("--max-running-requests", flags->requests, "Requests at once; others wait; default: 8")
      ->check(positive());
  verb->add_option("--max-queued-requests", flags->waiting, "Requests that may wait; more get status 429")
      ->check(positive())
      ->capture_default_str();
  verb->add_option("--max-total-tokens", flags->tokens,
                   "Tokens of all requests in the KV cache; default: by memory")
      ->check(positive());
  verb->add_option("--request-timeout", flags->timeout,
                   "Seconds after which an answer is cut off; default: never")
      ->check(positive());
  verb->add_option("--chat-template", flags->chat_template,
                   "A file with the chat template; default: the model's");
  verb->add_option(
      "--tool-call-parser", flags->tool_parser,
      "Syntax of tool calls: hermes, qwen, deepseekv3, deepseekv31, none; default: by the template");
  verb->add_option("--reasoning-parser", flags->reasoning_parser,
                   "Syntax of thinking: qwen3, deepseek-r1, glm45, none; default: by the template");
  verb->add_flag("--dry-run", flags->dry_run, "Print the plan and stop");
  verb->add_flag("--json", flags->json, "Print the plan as JSON");
  for (const ForeignFlag& foreign : kForeign) {
    const auto note = [flags, &foreign] {
      const std::string name = foreign.names;
      flags->foreign.push_back(text("{} is ignored: {}", name.substr(0, name.find(',')), foreign.note));
    };
    if (foreign.has_value)
      verb->add_option_function<std::string>(foreign.names, [note](const std::string&) { note(); })
          ->group("");
    else
      verb->add_flag_callback(foreign.names, note)->group("");
  }
  verb->footer(
      "What the command line leaves open comes from kt config. Flags of SGLang's launch lines that mean "
      "nothing\n"
      "here are accepted with a note.\n\n"
      "Examples:\n"
      "  kt run demo                                    a small model that comes with kt\n"
      "  kt run ./Qwen3-30B-A3B --kt-method AMXINT4     experts rounded to int4 while loading\n"
      "  kt run ./Qwen3-30B-A3B --weights-path ./Qwen3-30B-A3B-int8 --host 0.0.0.0 --api-key-file KEY\n"
      "  kt run ./model.gguf --max-running-requests 16 --max-total-tokens 65536 --dry-run");
  verb->callback([&invocation, flags, verb] {
    apply_settings(*flags, *verb);
    invocation.action = [flags] { run(*flags); };
  });
}

}  // namespace kt
