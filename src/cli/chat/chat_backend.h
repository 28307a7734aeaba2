// Who answers in a chat: a server, or a model in this process. The conversation itself is the session's
// (cli/chat/chat_session.h).
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/loaded_model.h"
#include "terminal/terminal.h"

namespace kt::inline cli {

struct ChatMessage {
  std::string role, content;   // "system", "user", "assistant"
  std::string reasoning = {};  // of an answer: shown and saved, not sent again
  bool operator==(const ChatMessage&) const = default;
};

// What is not set is the backend's choice.
struct ChatOptions {
  std::optional<double> temperature = {}, top_p = {};
  std::optional<int> top_k = {}, max_tokens = {};
  std::optional<uint64_t> seed = {};
};

struct ChatPiece {
  std::string_view text;  // whole characters
  bool reasoning = false;
};

struct ChatFinish {
  std::string reason;                                         // "stop", "length", "cancelled", ...
  std::optional<int> prompt_tokens = {}, output_tokens = {};  // where the backend says them
  std::optional<int> cached_tokens = {};                      // of the prompt
  double seconds_to_first = 0, seconds = 0;
};

struct ChatPlace {
  std::string model, where;         // "tiny-deepseekv3", "http://127.0.0.1:30000"
  std::optional<int> context = {};  // tokens
};

class ChatBackend : public OnInterrupt::Stoppable {
 public:
  virtual ~ChatBackend() = default;
  virtual ChatPlace place() const = 0;
  // One answer, its pieces as they come. After stop() it ends soon with "cancelled". Error in one line;
  // pieces may have come by then.
  virtual ChatFinish stream(const std::vector<ChatMessage>& messages, const ChatOptions& options,
                            const std::function<void(const ChatPiece&)>& on_piece) = 0;
};

struct ChatServer {
  std::string url, api_key;
  std::string model;         // "": the first that the server names
  std::string ca_file = {};  // of an https server
};
// Asks the server which models it has. Error(kInput) in one line if it is not there or refuses.
std::unique_ptr<ChatBackend> server_backend(const ChatServer& server);

// The model stays loaded, and so do the keys and values of the conversation: an answer costs its own turn.
// `context`: tokens of a conversation, cut to what the model has.
std::unique_ptr<ChatBackend> model_backend(const std::string& path, ModelOptions options, int context);

}  // namespace kt::inline cli
