// kt run: the server. Says what it will take, loads, serves until it is told to stop.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <iterator>

#include "base/checked.h"
#include "base/cpu_choice.h"
#include "base/error.h"
#include "base/file.h"
#include "base/memory.h"
#include "base/topology.h"
#include "cli/experts_text.h"
#include "cli/ignored_flags.h"
#include "cli/load_progress.h"
#include "cli/method_flag.h"
#include "cli/model_estimate.h"
#include "cli/model_flags.h"
#include "cli/parser_flags.h"
#include "cli/quant/quantise.h"
#include "cli/questions.h"
#include "cli/saved_runs.h"
#include "cli/server_files.h"
#include "cli/server_key.h"
#include "cli/server_signals.h"
#include "cli/settings.h"
#include "cuda/device.h"
#include "server/server.h"
#include "terminal/amounts.h"
#include "terminal/language.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

constexpr int kUsualRequests = 8;
constexpr int64_t kUsualTokens = 32768;  // in the cache, if the model's context is no longer
constexpr int64_t kLeastTokens = 4096;   // before memory is called too small

struct RunFlags {
  ModelFlags model;
  std::string positional, option;  // the model, either way
  std::string method, host, name, chat_template, snapshots;
  ParserFlags parsers;
  std::string api_key, api_key_file;  // as given: an empty one is not none
  AccessOptions access;
  TlsFiles tls;
  bool log_requests = false;
  int port = 0, nodes = 0, requests = 0, waiting = ServiceOptions{}.max_waiting, max_pause = 400;
  int64_t tokens = 0;
  double timeout = 0;
  bool dry_run = false, json = false, download = false, quantize = false, strict = false;
  std::string save, forget;                  // names of saved runs
  std::vector<std::string> node_words;       // of --kt-numa-nodes
  std::vector<int> node_ids, pools;          // pools: of --numa-nodes, one number or several
  std::vector<IgnoredFlag> ignored;          // flags that were accepted and mean nothing here
  std::vector<const CLI::Option*> accepted;  // options that mean nothing yet
  int unused = 0;                            // their values
};

// --kt-method says what the experts' weights are: a contradiction is an error, and methods of converted weights round
// other experts as they are loaded.
void apply_method(RunFlags& flags) {
  if (flags.method.empty()) return;
  const std::string& path = flags.model.weights.empty() ? flags.model.model : flags.model.weights;
  const std::string format = checked_method_format(flags.method, path);
  if (flags.model.format.empty()) flags.model.format = format;
}

// A word that is no number and no list of them.
bool may_be_model(const std::string& word) {
  return word.find_first_not_of("0123456789,.- ") != std::string::npos;
}

// Numbers of nodes: "0,2", or "0 1" as several words, behind which the model may stand.
void read_node_ids(RunFlags& flags) {
  std::vector<std::string>& words = flags.node_words;
  // One number says how many, several say which.
  if (flags.pools.size() == 1) flags.nodes = flags.pools[0];
  if (flags.pools.size() == 1 && flags.nodes == 0)
    fail(tr("--numa-nodes 0: expected how many; which ones, where it is given several times"));
  if (flags.pools.size() > 1) {
    if (!words.empty())
      fail("--numa-nodes {} {} ...: --kt-numa-nodes says which nodes, too", flags.pools[0], flags.pools[1]);
    for (const int node : flags.pools) words.push_back(std::to_string(node));
  }
  if (words.size() > 1 && may_be_model(words.back()) && flags.positional.empty()) {
    flags.positional = words.back();
    words.pop_back();
  }
  if (words.empty()) return;
  try {
    const NodeChoice choice = choose_nodes(words, flags.nodes, Topology::discover());
    flags.node_ids = choice.ids;
    flags.nodes = choice.pools;
  } catch (const Error& error) {
    throw Error(error.kind(), text("--{}numa-nodes: {}", flags.pools.size() > 1 ? "" : "kt-", error.what()));
  }
}

[[noreturn]] void refuse_without_model(const RunFlags& flags) {
  for (const IgnoredFlag& one : flags.ignored)
    if (one.values.size() > 1 || (one.values.size() == 1 && may_be_model(one.values[0])))
      fail(tr("no model: {} has taken {}; put the model before it"), one.flag, one.values.back());
  fail(tr("no model; give a folder, a .gguf file or a name of kt model list, such as kt run demo"));
}

// What the command line leaves open comes from config.yaml.
void apply_settings(RunFlags& flags, const CLI::App& verb) {
  const Settings settings = load_settings();
  const auto given = [&](const char* name) { return verb.get_option(name)->count() > 0; };
  if (!given("--host")) flags.host = settings.text("server.host");
  if (flags.host.empty())
    fail(tr("{}: no address; 127.0.0.1 is this machine alone, 0.0.0.0 every network it is in"),
         given("--host") ? "--host" : "server.host");
  for (const char* const file : {"--ssl-certfile", "--ssl-keyfile", "--api-key-file"})
    if (given(file) && verb.get_option(file)->as<std::string>().empty())
      fail(tr("{}: no file is named"), file);
  if (!given("--port")) flags.port = static_cast<int>(settings.integer("server.port"));
  KeySources key{.setting = settings.text("server.api-key")};
  if (given("--api-key")) key.flag = flags.api_key;
  if (given("--api-key-file")) key.file = flags.api_key_file;
  flags.access.api_keys = server_keys(key);
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
  if (!given("--rules")) flags.model.rules.file = settings.text("run.rules");
  read_node_ids(flags);
  if (!flags.positional.empty() && !flags.option.empty())
    fail(tr("MODEL and --model-path: give one of them"));
  std::string wanted = flags.positional.empty() ? flags.option : flags.positional;
  if (wanted.empty()) wanted = settings.text("run.model");
  if (wanted.empty()) refuse_without_model(flags);
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

// Memory for snapshots of states; none: the usual.
std::optional<uint64_t> snapshot_bytes(const RunFlags& flags) {
  if (flags.snapshots.empty()) return {};
  return flags.snapshots == "0" ? 0 : parse_bytes(flags.snapshots, "--state-snapshots");
}

// How many requests share how many tokens of cache.
MemoryRequest planned_use(const RunFlags& flags, OpenedModel& model, uint64_t max_memory) {
  const int context = model.spec().context;
  const int requests =
      flags.requests > 0 ? flags.requests : std::min(kUsualRequests, flags.model.step_tokens);
  if (requests > flags.model.step_tokens)
    fail(tr("--max-running-requests: {} requests, and a step takes {} tokens; see --chunked-prefill-size"),
         requests, flags.model.step_tokens);
  const auto use = [&](int64_t tokens) {
    return MemoryRequest{
        .sequences = requests,
        .context = static_cast<int>(std::max<int64_t>(1, ceil_div(tokens, int64_t{requests}))),
        .snapshots = snapshot_bytes(flags)};
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
  model.settle(use(std::min(tokens, kLeastTokens)));
  // Half of what the weights leave free, so that the machine stays usable.
  uint64_t most = available_memory() + model.base_bytes();
  if (max_memory > 0) most = std::min(most, max_memory);
  while (tokens > kLeastTokens) {
    const MemoryPlan plan = model.memory_plan(use(tokens));
    const uint64_t others = plan.weights() + plan.host().workspace + model.base_bytes();
    if (others + 2 * plan.host().kv_cache <= most && model.fits_gpu(use(tokens))) break;
    tokens = std::max(kLeastTokens, tokens / 2);
  }
  return use(tokens);
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
  std::string gpu = model.gpus().empty() ? "no GPU is used" : "";
  for (const auto& each : model.gpus()) gpu += (gpu.empty() ? "" : ", ") + each->facts().describe();
  std::printf("%s; context %d; %s kernels on %s, %s; %s\n\n", experts.c_str(), model.spec().context,
              std::string(best_kernels().name).c_str(), counted(model.threads(), "thread").c_str(),
              pools_text(model.nodes(), flags.node_ids).c_str(), gpu.c_str());
  print_memory(estimate, *flags.model.verb);
  std::printf("\n");
  print_speed(estimate);
  std::fflush(stdout);
}

// --quantize: what kt quant writes of the model, made once and used from then on.
void apply_quantize(RunFlags& flags) {
  if (!flags.quantize) return;
  if (!flags.model.weights.empty()) {
    std::fprintf(stderr, "kt: note: --quantize: %s uses %s already\n", flags.model.found.name.c_str(),
                 flags.model.weights.c_str());
    return;
  }
  if (is_converted(flags.model.model)) {
    std::fprintf(stderr, "kt: note: --quantize: %s is what kt quant writes\n", flags.model.model.c_str());
    return;
  }
  const std::string method = flags.method == "AMXINT8" || flags.method == "MOE_INT8" ? "int8" : "int4";
  const std::string output = default_output(flags.model.model, method);
  if (flags.dry_run && !is_converted(output)) {
    std::fprintf(stderr, "kt: note: --quantize writes %s first; the plan is that of rounding while loading\n",
                 output.c_str());
    flags.model.format = method;
    return;
  }
  if (is_converted(output) && !was_made_of(output, flags.model.model))
    fail(tr("--quantize: {} was not made of {}; kt quant -o writes to another folder, and --weights uses it"),
         output, flags.model.model);
  if (!is_converted(output))
    quantise({.model = flags.model.model,
              .output = output,
              .method = method,
              .threads = flags.model.threads,
              .quiet = flags.json});
  flags.model.weights = output;
}

void serve(Server& server, const StopSignals& stop, const RunFlags& flags) {
  std::printf("ready: %s (the page and the API; Ctrl-C stops)\n", server.url().c_str());
  if (!flags.json)
    print_next({.line = NextLine::kReport, .command = command_line({"chat", "--url", server.url()})});
  std::fflush(stdout);
  constexpr int kLook = 500;  // ms
  while (!stop.wait(kLook) && !lost_gpu()) {
  }
  const auto lost = lost_gpu();
  if (!lost)
    std::fprintf(stderr,
                 "kt: stopping; answers that run are finished first, a second signal stops at once\n");
  server.drain();
  while (!server.drained()) ::usleep(20'000);
  if (lost) fail_as(ErrorKind::kInternal, "{}", *lost);
  if (const auto use = server.experts_used())
    std::printf("served %s tokens; %s\n", fixed(use->tokens, 0).c_str(), experts_text(*use).c_str());
}

void run(RunFlags flags) {
  apply_quantize(flags);
  apply_method(flags);
  const ModelOptions options = model_options(flags);
  OpenedModel opened(flags.model.model, options);
  const MemoryRequest use = planned_use(flags, opened, options.max_memory);
  const std::string chat_template = template_of(flags, opened);
  ServiceOptions service{.name = served_name(flags),
                         .version = version(),
                         .max_running = use.sequences,
                         .max_pause = std::chrono::milliseconds(flags.max_pause),
                         .max_waiting = flags.waiting,
                         .request_timeout_s = flags.timeout,
                         .syntax = flags.parsers.syntax(chat_template, opened.tokenizer()),
                         .chat_template = chat_template};
  service.state_snapshots = use.snapshots;
  service.pages = use.sequences * static_cast<int>(ceil_div(int64_t{use.context}, int64_t{kPageTokens}));
  ServerFiles files({.api_keys = flags.api_key_file, .tls = flags.tls});
  std::unique_ptr<StopSignals> stop;
  std::unique_ptr<Server> server;
  std::unique_ptr<ReloadOnHangup> reload;  // before the server
  if (!flags.dry_run) {                    // a port that is taken is known now, not after minutes of loading
    server = std::make_unique<Server>(
        ServerOptions{.http = {.host = flags.host, .port = flags.port, .tls = files.tls()},
                      .access = flags.access,
                      .log = flags.log_requests ? print_request : nullptr});
    reload = std::make_unique<ReloadOnHangup>(files, *server);
    if (flags.access.api_keys.empty() && server->reaches_other_machines())
      std::fprintf(stderr,
                   "kt: warning: other machines can reach %s, and no key is asked for; see --api-key-file\n",
                   server->url().c_str());
  }
  service.rates = measured_rates(options.threads);
  Estimate estimate = estimate_model(opened, use, options.max_memory, service.rates);
  estimate.node_ids = flags.node_ids;
  service.placement = estimate.placement_json;
  if (flags.json)
    std::printf("%s\n", json_of(estimate).dump(2).c_str());
  else
    print_plan(flags, opened, estimate);
  print_ignored(flags.ignored, flags.json ? stderr : stdout);  // of stdout programs read the JSON
  if (flags.dry_run) return;
  LoadProgress progress(opened.stored_bytes());
  LoadedModel model = std::move(opened).load(
      {.use = use, .on_layer = [&](int done, int total) { progress.show(done, total); }});
  progress.end();
  std::printf("loaded in %s s\n", three_digits(model.load_seconds()).c_str());
  stop = std::make_unique<StopSignals>();
  // Gone before the model, also where serving ends with an error: its threads look at what the model counts.
  const std::unique_ptr<Server> serving = std::move(server);
  const std::unique_ptr<ReloadOnHangup> reloading = std::move(reload);
  serving->serve(model, std::move(service));
  serve(*serving, *stop, flags);
}

void add_access(CLI::App& verb, RunFlags& flags) {
  CLI::Option* const key =
      verb.add_option("--api-key", flags.api_key,
                      "Clients must send this key: Authorization: Bearer KEY; also from KT_API_KEY");
  verb.add_option("--api-key-file", flags.api_key_file,
                  "A file of keys, one a line, of which clients must send one; read again on SIGHUP")
      ->excludes(key);
  CLI::Option* const certificate =
      verb.add_option("--ssl-certfile", flags.tls.certificate,
                      "Serve https with this certificate (PEM); read again on SIGHUP");
  CLI::Option* const secret = verb.add_option("--ssl-keyfile", flags.tls.key, "The certificate's key (PEM)");
  certificate->needs(secret);
  secret->needs(certificate);
  verb.add_flag(
      "--log-requests", flags.log_requests,
      "Print a line for every request: time, client, method, path, status, tokens, ms; no contents");
  verb.add_option("--allow-host", flags.access.allow_hosts,
                  "A name that clients reach this server by (Host), or * for any; localhost, addresses, the "
                  "machine's own name and --host always are");
  verb.add_option("--allow-origin", flags.access.allow_origin,
                  "Web pages of this origin may use the API too, or * for all; default: only our own page");
}

// Flags of the established kt and of its documents' launch lines.
void add_established(CLI::App& verb, RunFlags& flags) {
  verb.add_flag("-q,--quantize", flags.quantize,
                "Convert the experts first, as kt quant does (int4; int8 with --kt-method AMXINT8), unless "
                "that was "
                "done; then run those")
      ->excludes("--weights")
      ->excludes("--format");
  const auto accepted = [&](const char* names, const char* help) {
    flags.accepted.push_back(verb.add_option(names, flags.unused, help));
  };
  verb.add_option("--lora-paths", flags.model.adapters,
                  "The same as --adapter, several in a row: NAME=PATH ...")
      ->type_name("[NAME=]PATH");
  accepted("--tensor-parallel-size,--tp-size,--tp", "Accepted: experts are shared by all NUMA nodes");
  verb.add_flag("--strict", flags.strict, "Refuse flags that mean nothing here instead of noting them");
  verb.add_option("--save", flags.save, "Keep this command line under a name; kt run @NAME runs it again");
  verb.add_option("--forget", flags.forget, "Forget the command line of that name, and run nothing");
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
          "--numa-nodes,--kt-threadpool-count", flags->pools,
          "NUMA nodes to use; default: all; more than there are: so many pools of threads share them; "
          "repeated, the numbers of the nodes")
      ->allow_extra_args(false)
      ->check(within(0, kMostSequences));
  verb->add_option("--kt-numa-nodes", flags->node_words,
                   "Which NUMA nodes to use, by their numbers, such as 0,2; default: the first ones");
  verb->add_option("-H,--host", flags->host, "Address to listen on; default: 127.0.0.1, this machine only");
  verb->add_option("-p,--port", flags->port, "Port to listen on; 0: any free one; default: 30000")
      ->check(CLI::Range(0, 65535));
  add_access(*verb, *flags);
  verb->add_option("--served-model-name", flags->name, "The model's name in the API; default: its folder's");
  verb->add_option("--max-pause", flags->max_pause,
                   "Milliseconds that answers wait at most while a prompt passes through a GPU")
      ->check(positive())
      ->capture_default_str();
  verb->add_option("--max-running-requests", flags->requests, "Requests at once; others wait; default: 8")
      ->check(positive());
  verb->add_option("--max-queued-requests", flags->waiting, "Requests that may wait; more get status 429")
      ->check(positive())
      ->capture_default_str();
  verb->add_option("--max-total-tokens", flags->tokens,
                   "Tokens of all requests in the KV cache; default: by memory")
      ->check(positive());
  verb->add_option(
      "--state-snapshots", flags->snapshots,
      "Memory for copies of recurrent layers' states, from which prompts that begin alike go on; "
      "0: none; default: an eighth of the cache's");
  verb->add_option("--request-timeout", flags->timeout,
                   "Seconds after which an answer is cut off; default: never")
      ->check(positive());
  verb->add_option("--chat-template", flags->chat_template,
                   "A file with the chat template; default: the model's");
  flags->parsers.add_options(*verb);
  verb->add_flag("--dry-run", flags->dry_run, "Print the plan and stop");
  verb->add_flag("--json", flags->json, "Print the plan as JSON");
  add_established(*verb, *flags);
  verb->footer(
      "What the command line leaves open comes from kt config. Flags of SGLang's server that mean nothing "
      "here are "
      "accepted with a note, or refused with --strict.\n\n"
      "Examples:\n"
      "  kt run demo                                    a small model that comes with kt\n"
      "  kt run ./Qwen3-30B-A3B --kt-method AMXINT4     experts rounded to int4 while loading\n"
      "  kt run ./Qwen3-30B-A3B --weights-path ./Qwen3-30B-A3B-int8 --host 0.0.0.0 --api-key-file KEY\n"
      "  kt run ./model.gguf --max-running-requests 16 --max-total-tokens 65536 --dry-run\n"
      "  kt run m2 --port 8080 --save small             keep it as small\n"
      "  kt run @small --port 8081                      the same on another port");
  verb->callback([&kt, &invocation, flags, verb] {
    if (verb->get_option("--forget")->count() > 0) {
      invocation.action = [flags] { forget_run(flags->forget); };
      return;
    }
    flags->model.gpu.take(load_settings(), *verb);
    std::vector<const CLI::Option*> accepted = flags->accepted;
    if (!flags->model.uses_gpu()) std::ranges::copy(flags->model.gpu.options(), std::back_inserter(accepted));
    flags->ignored = ignored_flags(kt, invocation.words, accepted);
    if (flags->strict && !flags->ignored.empty())
      fail("--strict: these flags mean nothing here: {}", ignored_names(flags->ignored));
    if (verb->get_option("--save")->count() > 0)
      invocation.before.emplace_back([&kt, &invocation, flags] {
        save_run(kt, flags->save, invocation.words);
        std::fprintf(stderr, "note: saved as %s; kt run @%s runs it\n", flags->save.c_str(),
                     flags->save.c_str());
      });
    apply_settings(*flags, *verb);
    invocation.action = [flags] { run(*flags); };
  });
}

}  // namespace kt::inline cli
