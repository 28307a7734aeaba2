#include "cli/chat/chat_console.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>

#include "base/error.h"
#include "cli/home.h"
#include "terminal/language.h"
#include "terminal/report.h"
#include "terminal/terminal_text.h"

namespace kt::inline cli {
namespace {

constexpr std::string_view kSpace = " \t\n", kFence = "\"\"\"";

std::string_view trimmed(std::string_view string) {
  const size_t first = string.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return string.substr(first, string.find_last_not_of(kSpace) - first + 1);
}

template <typename T>
T parsed(std::string_view name, std::string_view string, std::string_view kind) {
  T value{};
  const auto [end, error] = std::from_chars(string.data(), string.data() + string.size(), value);
  if (error != std::errc() || end != string.data() + string.size())
    fail("{}: expected {}, got {}", name, kind, harmless_line(string));
  return value;
}

// An option that /set knows.
struct OptionRow {
  const char* name;
  void (*set)(ChatOptions&, std::string_view);  // "": to the default
  std::string (*get)(const ChatOptions&);
};

std::string shown(const auto& value) { return value ? text("{}", *value) : "default"; }

double ranged(std::string_view name, std::string_view string, double low, double high) {
  const auto value = parsed<double>(name, string, "a number");
  if (!(value >= low && value <= high)) fail("{}: expected {} to {}, got {}", name, low, high, string);
  return value;
}

template <typename T>
void put(std::optional<T>& option, std::string_view string, const auto& parse) {
  option = string.empty() ? std::nullopt : std::optional<T>(parse());
}

constexpr auto kOptions = std::to_array<OptionRow>({
    {"temperature",
     [](ChatOptions& o, std::string_view w) {
       put(o.temperature, w, [&] { return ranged("temperature", w, 0, 100); });
     },
     [](const ChatOptions& o) { return shown(o.temperature); }},
    {"top_p",
     [](ChatOptions& o, std::string_view w) { put(o.top_p, w, [&] { return ranged("top_p", w, 0, 1); }); },
     [](const ChatOptions& o) { return shown(o.top_p); }},
    {"top_k",
     [](ChatOptions& o, std::string_view w) {
       put(o.top_k, w, [&] { return parsed<int>("top_k", w, "an integer"); });
     },
     [](const ChatOptions& o) { return shown(o.top_k); }},
    {"max_tokens",
     [](ChatOptions& o, std::string_view w) {
       put(o.max_tokens, w, [&] { return static_cast<int>(ranged("max_tokens", w, 1, 1e9)); });
     },
     [](const ChatOptions& o) { return shown(o.max_tokens); }},
    {"seed",
     [](ChatOptions& o, std::string_view w) {
       put(o.seed, w, [&] { return parsed<uint64_t>("seed", w, "an integer from 0"); });
     },
     [](const ChatOptions& o) { return shown(o.seed); }},
});

std::vector<std::string> option_names() {
  std::vector<std::string> names;
  for (const OptionRow& setting : kOptions) names.emplace_back(setting.name);
  return names;
}

const OptionRow& option_named(const std::string& given) {
  std::string name = given;
  std::ranges::replace(name, '-', '_');
  for (const OptionRow& setting : kOptions)
    if (name == setting.name) return setting;
  fail(tr("/set: no setting {}; the nearest is {}"), harmless_line(name), nearest_name(name, option_names()));
}

// "first rest of it" cut in two.
std::pair<std::string, std::string> first_word(std::string_view line) {
  const size_t end = std::min(line.find_first_of(kSpace), line.size());
  return {std::string(line.substr(0, end)), std::string(trimmed(line.substr(end)))};
}

}  // namespace

std::optional<std::string> unfinished(const std::string& text) {
  const std::string_view message = trimmed(text);
  if (message.starts_with(kFence)) {
    const bool closed = message.size() >= 2 * kFence.size() && message.ends_with(kFence);
    return closed ? std::nullopt : std::optional(text + "\n");
  }
  if (!text.ends_with('\\')) return std::nullopt;
  return text.substr(0, text.size() - 1) + "\n";
}

std::string message_of(std::string_view text) {
  std::string_view message = trimmed(text);
  if (message.size() >= 2 * kFence.size() && message.starts_with(kFence) && message.ends_with(kFence)) {
    message.remove_prefix(kFence.size());
    message.remove_suffix(kFence.size());
    if (message.starts_with('\n')) message.remove_prefix(1);
    if (message.ends_with('\n')) message.remove_suffix(1);
    return std::string(message);
  }
  return std::string(message);
}

void AnswerPrinter::switch_to(bool reasoning) {
  const std::string_view gap = line_open_ ? "\n" : "";
  if (colour_) {
    if (reasoning) out_(std::string(gap) + "\x1b[2m");
    if (!reasoning && began_) out_("\x1b[0m" + std::string(gap) + "\n");
  } else {
    if (reasoning) out_(std::string(gap) + "[thinking]\n");
    if (!reasoning && began_) out_(std::string(gap) + "[answer]\n");
  }
  if (began_ || reasoning) line_open_ = false;
  wrap_.begin_line();
  reasoning_ = reasoning;
}

void AnswerPrinter::add(const ChatPiece& piece) {
  std::string text = harmless(piece.text);
  // Templates of thinking models leave line ends before the answer.
  const bool starts = piece.reasoning ? !began_ : !content_;
  if (starts) text.erase(0, std::min(text.find_first_not_of('\n'), text.size()));
  if (text.empty()) return;
  if (piece.reasoning != reasoning_) switch_to(piece.reasoning);
  began_ = true;
  content_ = content_ || !piece.reasoning;
  line_open_ = !text.ends_with('\n');
  out_(wrap_.add(text));
}

void AnswerPrinter::end() {
  if (reasoning_ && colour_) out_("\x1b[0m");
  if (line_open_) out_("\n");
  line_open_ = false;
}

struct ChatConsole::Command {
  std::string name, argument, what;
  void (ChatConsole::*run)(const std::string&);
};

const std::vector<ChatConsole::Command>& ChatConsole::commands() {
  using C = ChatConsole;
  static const std::vector<Command> all = {
      {"/help", "", tr_later("this list"), &C::help},
      {"/clear", "", tr_later("start the conversation over; the system message stays"), &C::clear},
      {"/retry", "", tr_later("another answer to the last message"), &C::retry},
      {"/history", "", tr_later("the conversation so far"), &C::history},
      {"/system", "[TEXT]", tr_later("show or set the system message; \"\" removes it"), &C::system},
      {"/info", "", tr_later("model, context used, speed of the last answer, settings"), &C::info},
      {"/save", "FILE", tr_later("write the conversation as JSON"), &C::save},
      {"/load", "FILE", tr_later("go on with a saved one"), &C::load},
      {"/set", "NAME VALUE", tr_later("temperature, top_p, top_k, max_tokens, seed; \"default\" as value"),
       &C::set},
      {"/quit", "", tr_later("leave; also /exit and Ctrl-D"), &C::quit},
      {"/exit", "", tr_later("leave"), &C::quit},
  };
  return all;
}

ChatConsole::ChatConsole(ChatSession& session, Output out, ChatScreen screen)
    : session_(session), out_(std::move(out)), screen_(std::move(screen)) {}

std::string ChatConsole::faint(std::string_view line) const {
  return screen_.colour ? text("\x1b[2m{}\x1b[0m", line) : std::string(line);
}

void ChatConsole::greet() const {
  const ChatPlace place = session_.backend().place();
  say(text("{} {}", harmless_line(place.model), faint(text("({})", place.where))));
  std::string keys =
      wrapped("", tr_now("/help lists commands; Alt+Enter or a final \\ adds a line; Ctrl-D leaves"),
              screen_.width ? screen_.width() : 0);
  keys.pop_back();
  say(faint(keys));
}

bool ChatConsole::take(const std::string& typed) {
  const std::string message = message_of(typed);
  if (message.empty()) return true;
  try {
    // A space in front, or """, sends what begins with a slash.
    if (!typed.starts_with('/')) {
      answer([&](const ChatSession::OnPiece& on_piece) { return session_.ask(message, on_piece); });
      return true;
    }
    const auto [name, rest] = first_word(message);
    const auto found = std::ranges::find(commands(), name, &Command::name);
    if (found != commands().end()) {
      (this->*found->run)(rest);
      return !over_;
    }
    std::vector<std::string> names;
    for (const Command& command : commands()) names.push_back(command.name);
    fail(tr("no command {}; did you mean {}? A space in front sends it as a message"), harmless_line(name),
         nearest_name(name, names));
  } catch (const std::exception& error) {  // of any kind: the conversation goes on
    say(text("kt: {}", harmless_line(error.what())));
  }
  return true;
}

void ChatConsole::answer(const std::function<ChatAnswer(const ChatSession::OnPiece&)>& ask) {
  AnswerPrinter printer(out_, screen_);
  ChatFinish finish;
  try {
    finish = ask([&](const ChatPiece& piece) { printer.add(piece); }).finish;
  } catch (...) {
    printer.end();
    throw;
  }
  printer.end();
  if (finish.reason == "cancelled") say(faint(tr_now("(stopped)")));
  if (finish.reason == "length") say(faint(tr_now("(cut: max_tokens, or the context is full)")));
}

void ChatConsole::help(const std::string&) {
  const auto called = [](const Command& command) {
    return command.argument.empty() ? command.name : command.name + " " + command.argument;
  };
  int widest = 0;
  for (const Command& command : commands()) widest = std::max(widest, text_width(called(command)));
  for (const Command& command : commands())
    out_(wrapped(padded_to(called(command), widest + 2), tr_now(command.what),
                 screen_.width ? screen_.width() : 0));
}

void ChatConsole::clear(const std::string&) {
  session_.clear();
  say(faint(tr_now("the conversation is empty")));
}

void ChatConsole::retry(const std::string&) {
  answer([&](const ChatSession::OnPiece& on_piece) { return session_.retry(on_piece); });
}

void ChatConsole::history(const std::string&) {
  if (session_.messages().empty()) return say(faint(tr_now("nothing was said yet")));
  if (!session_.system().empty()) say(faint(tr_now("system: ")) + harmless(session_.system()));
  for (const ChatMessage& message : session_.messages())
    say(faint(message.role == "user" ? tr_now("you: ") : tr_now("model: ")) +
        harmless(trimmed(message.content)));
}

void ChatConsole::system(const std::string& message) {
  if (message == "\"\"") {
    session_.set_system("");
  } else if (!message.empty()) {
    session_.set_system(message);
  }
  say(session_.system().empty() ? faint(tr_now("no system message"))
                                : tr_now("system: ") + harmless(session_.system()));
}

void ChatConsole::info(const std::string&) {
  const ChatPlace place = session_.backend().place();
  say(text(tr("model:    {}, {}"), harmless_line(place.model), place.where));
  say(text(tr("messages: {}"), session_.messages().size()));
  const std::optional<ChatFinish>& last = session_.last();
  const bool counted = last && last->prompt_tokens && last->output_tokens;
  const int used = counted ? *last->prompt_tokens + *last->output_tokens : 0;
  if (place.context && (counted || !last))
    say(text(tr("context:  {} of {} tokens, {}"), used, *place.context,
             percent(static_cast<double>(used) / std::max(1, *place.context))));
  else if (counted)
    say(text(tr("context:  {} tokens"), used));
  if (last) {
    std::string line = text(tr("answer:   {} s, the first token after {} s"), fixed(last->seconds, 2),
                            fixed(last->seconds_to_first, 2));
    const double decoding = last->seconds - last->seconds_to_first;
    if (counted && *last->output_tokens > 1 && decoding > 0)
      line += text(tr(", {} tokens at {} tokens/s"), *last->output_tokens,
                   three_digits((*last->output_tokens - 1) / decoding));
    if (last->cached_tokens && last->prompt_tokens)
      line += text(tr(", {} of {} prompt tokens from the cache"), *last->cached_tokens, *last->prompt_tokens);
    say(line);
  }
  std::string settings = tr_now("settings:");
  for (const OptionRow& setting : kOptions)
    settings += text(" {} {}", setting.name, setting.get(session_.options()));
  say(settings);
}

void ChatConsole::save(const std::string& file) {
  if (file.empty()) fail(tr("/save: name a file"));
  session_.save(file);
  say(faint(text(tr("{} messages are in {}"), session_.messages().size(), file)));
}

void ChatConsole::load(const std::string& file) {
  if (file.empty()) fail(tr("/load: name a file"));
  session_.load(file);
  say(faint(text(tr("{} messages from {}"), session_.messages().size(), file)));
}

void ChatConsole::set(const std::string& line) {
  const auto [name, value] = first_word(line);
  if (name.empty()) {
    for (const OptionRow& setting : kOptions)
      say(text("{} {}", setting.name, setting.get(session_.options())));
    return;
  }
  const OptionRow& setting = option_named(name);
  if (!value.empty()) setting.set(session_.options(), value == "default" ? "" : value);
  say(faint(text("{} {}", setting.name, setting.get(session_.options()))));
}

std::vector<std::string> ChatConsole::complete(std::string_view before) const {
  std::vector<std::string> all, fitting;
  if (before.starts_with("/set ")) {
    for (const std::string& name : option_names()) all.push_back("/set " + name);
  } else if (before.starts_with('/')) {
    for (const Command& command : commands()) all.push_back(command.name);
  }
  std::ranges::copy_if(all, std::back_inserter(fitting),
                       [&](const std::string& word) { return word.starts_with(before); });
  return fitting;
}

}  // namespace kt::inline cli
