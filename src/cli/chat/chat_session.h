// A conversation and who answers it. Nothing is printed here; an answer that fails leaves the conversation as
// it was.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/chat/chat_backend.h"

namespace kt::inline cli {

struct ChatAnswer {
  ChatMessage message;
  ChatFinish finish;
};

class ChatSession {
 public:
  using OnPiece = std::function<void(const ChatPiece&)>;

  // The backend must outlive it. An empty system message is none.
  ChatSession(ChatBackend& backend, std::string system, ChatOptions options)
      : backend_(backend), system_(std::move(system)), options_(options) {}

  // Sends the conversation with this message. An answer that was stopped keeps what came; stopped before
  // anything came, the message counts as not sent. Error: the same.
  ChatAnswer ask(const std::string& message, const OnPiece& on_piece);
  // Sends a message that got no answer again, or asks for another answer to the last. Error(kInput) if there
  // is nothing to repeat; the old answer stays if there is no new one.
  ChatAnswer retry(const OnPiece& on_piece);

  void clear();  // all but the system message and the options
  // A file of the conversation, JSON: {"model": ..., "messages": [{"role", "content"}, ...]}. An existing
  // file is replaced only if it is such a one.
  void save(const std::string& path) const;
  // Such a file, or a list of messages alone, in place of the conversation; the model is not looked at.
  // Error(kInput) naming the place, and nothing changes.
  void load(const std::string& path);

  const ChatBackend& backend() const { return backend_; }
  const std::vector<ChatMessage>& messages() const { return messages_; }  // user and assistant in turn
  const std::string& system() const { return system_; }
  void set_system(std::string system) { system_ = std::move(system); }
  ChatOptions& options() { return options_; }
  const std::optional<ChatFinish>& last() const { return last_; }  // how the last answer ended

 private:
  ChatBackend& backend_;
  std::string system_;
  ChatOptions options_;
  std::vector<ChatMessage> messages_;
  std::optional<std::string> unanswered_;
  std::optional<ChatFinish> last_;
};

}  // namespace kt::inline cli
