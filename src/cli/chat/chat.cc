// kt chat: a conversation with a server or with a model in this process, on a terminal or through a pipe.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "base/utf8.h"
#include "cli/chat/chat_backend.h"
#include "cli/chat/chat_console.h"
#include "cli/chat/chat_session.h"
#include "cli/home.h"
#include "cli/model_flags.h"
#include "cli/server_trust.h"
#include "cli/settings.h"
#include "terminal/input_history.h"
#include "terminal/language.h"
#include "terminal/line_editor.h"
#include "terminal/report.h"
#include "terminal/terminal.h"
#include "terminal/terminal_text.h"

namespace kt::inline cli {
namespace {

constexpr int kDefaultPort = 30000;
constexpr int kDefaultContext = 32768;  // what most conversations stay below; the cache is allocated whole

struct ChatFlags {
  ModelFlags model;  // with a model's path only
  int context = kDefaultContext;
  ChatServer server;
  std::string host;  // with `port`, in place of the server's URL
  int port = 0;
  std::string system, history_file;
  ChatOptions options;
  bool json = false, keep_history = true, stream = true;
};

enum class Left { kDone, kInterrupted };

std::string url_of(std::string host, int64_t port) {
  if (host == "0.0.0.0" || host == "::" || host.empty()) host = "127.0.0.1";
  if (host.find(':') != std::string::npos && !host.starts_with('[')) host = "[" + host + "]";
  return text("http://{}:{}", host, port > 0 ? port : kDefaultPort);
}

// The server of this machine as kt's settings have it.
std::string local_server(const Settings& settings) {
  return url_of(settings.text("server.host"), settings.integer("server.port"));
}

// What the command line leaves open.
ChatFlags with_settings(ChatFlags flags, const Settings& settings) {
  const bool local = flags.host.empty() && flags.port > 0;
  if (local || !flags.host.empty())
    flags.server.url = url_of(local ? settings.text("server.host") : flags.host,
                              flags.port > 0 ? flags.port : settings.integer("server.port"));
  if (local && flags.server.api_key.empty()) flags.server.api_key = settings.text("server.api-key");
  if (flags.server.url.empty()) flags.server.url = settings.text("chat.url");
  if (flags.server.url.empty()) {
    flags.server.url = local_server(settings);
    // The key of our own server is for nobody else.
    if (flags.server.api_key.empty()) flags.server.api_key = settings.text("server.api-key");
  }
  if (flags.system.empty()) flags.system = settings.text("chat.system");
  ChatOptions& options = flags.options;
  if (!options.temperature) options.temperature = settings.number("chat.temperature");
  if (!options.top_p) options.top_p = settings.number("chat.top-p");
  if (!options.max_tokens) options.max_tokens = static_cast<int>(settings.integer("chat.max-tokens"));
  return flags;
}

std::unique_ptr<ChatBackend> backend_of(const ChatFlags& flags) {
  if (flags.model.model.empty()) return server_backend(flags.server);
  flags.model.note_idle_flags();
  StatusLine status;
  if (!flags.json) status.show(text("loading {}", flags.model.model));
  flags.model.one_adapter();
  return model_backend(flags.model.model, flags.model.options(), flags.context);
}

std::optional<std::string> read_plain_line() {
  char* buffer = nullptr;
  size_t room = 0;
  const ssize_t length = ::getline(&buffer, &room, stdin);
  std::string line(buffer ? buffer : "", length > 0 ? static_cast<size_t>(length) : 0);
  std::free(buffer);
  if (length < 0) return std::nullopt;
  while (line.ends_with('\n') || line.ends_with('\r')) line.pop_back();
  return replace_invalid_utf8(line);
}

void write_out(std::string_view bytes) {
  std::fwrite(bytes.data(), 1, bytes.size(), stdout);
  std::fflush(stdout);
}

nlohmann::ordered_json json_of(const ChatAnswer& answer, const std::string& model) {
  nlohmann::ordered_json out = {{"model", model}, {"content", answer.message.content}};
  if (!answer.message.reasoning.empty()) out["reasoning_content"] = answer.message.reasoning;
  const ChatFinish& finish = answer.finish;
  out["finish_reason"] = finish.reason;
  if (finish.prompt_tokens) out["prompt_tokens"] = *finish.prompt_tokens;
  if (finish.cached_tokens) out["cached_tokens"] = *finish.cached_tokens;
  if (finish.output_tokens) out["completion_tokens"] = *finish.output_tokens;
  out["seconds_to_first"] = finish.seconds_to_first;
  out["seconds"] = finish.seconds;
  return out;
}

// --history-file: the conversation so far, after every answer.
class ConversationFile {
 public:
  explicit ConversationFile(std::string path) : path_(std::move(path)) {}
  void keep(const ChatSession& session) const {
    if (!path_.empty() && !session.messages().empty()) session.save(path_);
  }
  // On a terminal the talk goes on where it cannot be kept, which is said once.
  void keep_or_complain(const ChatSession& session) {
    try {
      keep(session);
    } catch (const Error& error) {
      if (!complained_) write_terminal(text("kt: the conversation is not kept: {}\n", error.what()));
      complained_ = true;
    }
  }

 private:
  std::string path_;
  bool complained_ = false;
};

// For scripts: every line is a message and nothing is a command, whoever wrote it. The first error ends it.
void talk_through_pipe(ChatSession& session, bool json, const ConversationFile& file) {
  const bool to_terminal = ::isatty(STDOUT_FILENO) == 1;  // what a model says must not steer it
  while (const std::optional<std::string> line = read_plain_line()) {
    if (line->find_first_not_of(" \t") == std::string::npos) continue;
    bool line_open = false;
    const ChatAnswer answer = session.ask(*line, [&](const ChatPiece& piece) {
      if (json || piece.reasoning) return;
      write_out(to_terminal ? harmless(piece.text) : piece.text);
      line_open = !piece.text.ends_with('\n');
    });
    if (json) {
      const auto out = json_of(answer, session.backend().place().model);
      write_out(out.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    } else if (line_open) {
      write_out("\n");
    }
    if (std::ferror(stdout)) return;  // main reports it
    file.keep(session);
  }
}

// A terminal that obeys no escape sequences: its own line editing, our multi-line rules.
void talk_in_plain_lines(ChatConsole& console, const std::function<void()>& keep) {
  while (true) {
    write_out("> ");
    std::optional<std::string> typed = read_plain_line();
    while (typed) {
      const std::optional<std::string> more = unfinished(*typed);
      if (!more) break;
      write_out(". ");
      const std::optional<std::string> next = read_plain_line();
      typed = next ? std::optional(*more + *next) : std::nullopt;
    }
    if (!typed) return write_out("\n");
    if (!console.take(*typed)) return;
    keep();
  }
}

// "" where there is no place for it.
std::string history_file() {
  try {
    return kt_home() + "/chat_history";
  } catch (const Error&) {
    return "";
  }
}

// Adds to the history; says once that it cannot be kept.
void remember(InputHistory& history, const std::string& typed, bool& complained) {
  try {
    history.add(typed);
  } catch (const Error& error) {
    if (!complained) write_terminal(text("kt: the history is not kept: {}\n", error.what()));
    complained = true;
  }
}

struct EditorUse {
  bool colour = false;
  std::string history;         // file of what was typed; "": none
  std::function<void()> keep;  // called after each answer
};

Left talk_with_editor(ChatConsole& console, const EditorUse& use) {
  InputHistory history(use.history);
  EditorOptions options{.colour = use.colour,
                        .complete = [&](std::string_view before) { return console.complete(before); },
                        .go_on = unfinished};
  LineEditor editor(std::move(options), history.entries());
  Terminal terminal;
  bool warned = false, complained = false;
  while (true) {
    switch (terminal.read_line(editor)) {
      case EditEvent::kEnd:
        return Left::kDone;
      case EditEvent::kInterrupt:
        if (warned && editor.text().empty()) return Left::kInterrupted;
        warned = editor.text().empty();
        if (warned) write_terminal("(Ctrl-C again or Ctrl-D leaves)\n");
        continue;
      default:
        break;
    }
    warned = false;
    const std::string typed = editor.text();
    remember(history, typed, complained);
    if (!console.take(typed)) return Left::kDone;
    use.keep();
  }
}

// Ctrl-C stops the answer, wherever the chat runs on a terminal.
class StoppableBackend final : public ChatBackend {
 public:
  explicit StoppableBackend(std::unique_ptr<ChatBackend> backend) : backend_(std::move(backend)) {}
  ChatPlace place() const override { return backend_->place(); }
  void stop() noexcept override { backend_->stop(); }
  ChatFinish stream(const std::vector<ChatMessage>& messages, const ChatOptions& options,
                    const std::function<void(const ChatPiece&)>& on_piece) override {
    const OnInterrupt stopping(*backend_);
    return backend_->stream(messages, options, on_piece);
  }

 private:
  std::unique_ptr<ChatBackend> backend_;
};

// --no-stream: an answer comes when it is whole, its thinking before it.
class WholeAnswers final : public ChatBackend {
 public:
  explicit WholeAnswers(std::unique_ptr<ChatBackend> backend) : backend_(std::move(backend)) {}
  ChatPlace place() const override { return backend_->place(); }
  void stop() noexcept override { backend_->stop(); }
  ChatFinish stream(const std::vector<ChatMessage>& messages, const ChatOptions& options,
                    const std::function<void(const ChatPiece&)>& on_piece) override {
    std::string thought, answer;
    const ChatFinish finish = backend_->stream(messages, options, [&](const ChatPiece& piece) {
      (piece.reasoning ? thought : answer) += piece.text;
    });
    if (!thought.empty()) on_piece({.text = thought, .reasoning = true});
    if (!answer.empty()) on_piece({.text = answer});
    return finish;
  }

 private:
  std::unique_ptr<ChatBackend> backend_;
};

bool wants_colour() {
  const char* const no = std::getenv("NO_COLOR");
  return !(no && *no);
}

Left talk(const ChatFlags& flags) {
  const TerminalKind kind = terminal_kind();
  const bool interactive = kind.interactive && !flags.json;
  std::unique_ptr<ChatBackend> backend = backend_of(flags);
  if (interactive) backend = std::make_unique<StoppableBackend>(std::move(backend));
  if (!flags.stream) backend = std::make_unique<WholeAnswers>(std::move(backend));
  ChatSession session(*backend, flags.system, flags.options);
  ConversationFile file(flags.history_file);
  if (!interactive) return talk_through_pipe(session, flags.json, file), Left::kDone;
  const bool colour = kind.escapes && wants_colour();
  ChatScreen screen{.colour = colour};
  if (kind.escapes) screen.width = [] { return Terminal::size().width; };
  ChatConsole console(session, write_terminal, std::move(screen));
  console.greet();
  const auto keep = [&] { file.keep_or_complain(session); };
  if (!kind.escapes) return talk_in_plain_lines(console, keep), Left::kDone;
  return talk_with_editor(
      console, {.colour = colour, .history = flags.keep_history ? history_file() : "", .keep = keep});
}

bool is_url(const std::string& value) {
  return value.starts_with("http://") || value.starts_with("https://");
}

void run_chat(ChatFlags flags) {
  if (is_url(flags.model.model)) flags.server.url = std::exchange(flags.model.model, {});
  if (talk(with_settings(flags, load_settings())) == Left::kInterrupted)
    std::raise(SIGINT);  // ends as every interrupted verb
}

void add_sampling(CLI::App& verb, ChatOptions& options) {
  verb.add_option("-t,--temperature", options.temperature, "0: always the most probable token")
      ->check(within(0, 100));
  verb.add_option("--top-p", options.top_p, "Choose among the most probable that hold this probability")
      ->check(within(0, 1));
  verb.add_option("--top-k", options.top_k, "Choose among the k most probable");
  verb.add_option("--max-tokens", options.max_tokens, "Tokens of an answer at most")->check(positive());
  verb.add_option("--seed", options.seed, "Of the random choices");
}

}  // namespace

void add_chat(CLI::App& kt, Invocation& run) {
  CLI::App* verb = kt.add_subcommand("chat", "Talk to a running server, or to a model in this process");
  const auto flags = std::make_shared<ChatFlags>();
  CLI::Option* const model = take_model(
      *verb, run,
      verb->add_option(
          "MODEL", flags->model.model,
          "A model to run here: its folder, a .gguf file, or a name of kt model list; or the URL of a "
          "server; default: talk to a server"),
      {.path = &flags->model.model, .found = &flags->model.found, .is_other = is_url});
  flags->model.add_options(*verb);
  CLI::Option* const url =
      verb->add_option("--url", flags->server.url,
                       "The server; default: chat.url of kt config, else the one on this machine")
          ->excludes(model);
  verb->add_option("-H,--host", flags->host, "The server's address, with --port in place of --url")
      ->excludes(model)
      ->excludes(url);
  verb->add_option("-p,--port", flags->port, "Its port; default: server.port of kt config")
      ->check(CLI::Range(1, 65535))
      ->excludes(model)
      ->excludes(url);
  verb->add_option("--api-key", flags->server.api_key, "The server's key; also from KT_API_KEY")
      ->envname("KT_API_KEY");
  verb->add_option("--ca-file", flags->server.ca_file, kCaFileHelp)->check(CLI::ExistingFile);
  verb->add_option("-m,--model", flags->server.model, "Which of the server's models; default: its first");
  verb->add_option("-s,--system", flags->system, "System message");
  verb->add_option("--history-file", flags->history_file,
                   "Keep the conversation in this file, as /save writes it, after every answer");
  verb->add_flag("--save-history,!--no-save-history", flags->keep_history,
                 "Whether lines that are typed are kept for the next time (--no-save-history: not)");
  verb->add_flag("--stream,!--no-stream", flags->stream,
                 "Whether an answer is shown as it comes (--no-stream: when it is whole)");
  add_sampling(*verb, flags->options);
  verb->add_option("--max-total-tokens", flags->context, "Tokens of a conversation with a model run here")
      ->check(positive())
      ->capture_default_str();
  verb->add_flag("--json", flags->json, "Print one JSON object for each answer");
  verb->footer(
      "Examples:\n"
      "  kt chat                                       with the server on this machine\n"
      "  kt chat --url http://server:30000 --system 'Answer in one sentence.'\n"
      "  kt chat https://models.example --api-key KEY\n"
      "  kt chat -H server -p 8080 -m qwen3 -t 0.2 -s 'Answer in one sentence.' --history-file talk.json\n"
      "  kt chat demo                                  with the small model that comes with kt\n"
      "  echo 'Why is the sky blue?' | kt chat         a line is a message; answers on standard output\n\n"
      "On a terminal, /help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves.");
  verb->callback([&run, flags] {
    if (!flags->keep_history && !flags->history_file.empty())
      fail(tr("--no-save-history and --history-file: give one of them"));
    if (!flags->server.model.empty() && !flags->model.model.empty() && !is_url(flags->model.model))
      fail(tr("MODEL and --model: a model that runs here is no server's; give one of them"));
    run.action = [flags] { run_chat(*flags); };
  });
}

}  // namespace kt::inline cli
