// A chat as people see it: messages and slash commands in, answers and reports out, as text for a terminal.
// Reads nothing itself.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/chat/chat_session.h"
#include "terminal/word_wrap.h"

namespace kt::inline cli {

// What Enter does with a text that is not finished: the text to go on with. A '\' at the end becomes a line
// end; a text that began with """ goes on until a line ends with """. nullopt: it is finished.
std::optional<std::string> unfinished(const std::string& text);
// The message that a finished text stands for: without """ around it and white space at its ends.
std::string message_of(std::string_view text);

// What the terminal of a chat can do.
struct ChatScreen {
  bool colour = false;
  std::function<int()> width = {};  // columns; empty: lines are not wrapped
};

// One answer on its way to a terminal: control characters left out, thinking set apart, dimmed where there is
// colour, lines broken between words. Ends in the first column.
class AnswerPrinter {
 public:
  using Output = std::function<void(std::string_view)>;
  AnswerPrinter(Output out, const ChatScreen& screen)
      : out_(std::move(out)), colour_(screen.colour), wrap_(screen.width ? screen.width() : 0) {}
  void add(const ChatPiece& piece);
  void end();

 private:
  void switch_to(bool reasoning);

  Output out_;
  const bool colour_;
  WordWrap wrap_;
  bool reasoning_ = false, began_ = false, content_ = false, line_open_ = false;
};

class ChatConsole {
 public:
  using Output = std::function<void(std::string_view)>;
  ChatConsole(ChatSession& session, Output out, ChatScreen screen);

  // A line that was typed, a message or a command. Everything that fails is one line of the output. False:
  // the chat is over.
  bool take(const std::string& typed);
  // What a command, or a name after /set, could become.
  std::vector<std::string> complete(std::string_view before) const;
  void greet() const;

 private:
  struct Command;
  static const std::vector<Command>& commands();

  void answer(const std::function<ChatAnswer(const ChatSession::OnPiece&)>& ask);
  void say(std::string_view line) const { out_(std::string(line) + "\n"); }
  std::string faint(std::string_view line) const;

  void help(const std::string&);
  void clear(const std::string&);
  void retry(const std::string&);
  void history(const std::string&);
  void system(const std::string& message);
  void info(const std::string&);
  void save(const std::string& file);
  void load(const std::string& file);
  void set(const std::string& line);
  void quit(const std::string&) { over_ = true; }

  ChatSession& session_;
  Output out_;
  const ChatScreen screen_;
  bool over_ = false;
};

}  // namespace kt::inline cli
