#include "cli/chat/chat_session.h"

#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "terminal/language.h"

namespace kt::inline cli {
namespace {

std::string with_home(const std::string& path) {
  const char* const home = std::getenv("HOME");
  return path.starts_with("~/") && home ? home + path.substr(1) : path;
}

struct Loaded {
  std::string system;
  std::vector<ChatMessage> messages;
  std::optional<std::string> unanswered;  // a user's message at the end
};

std::string text_member(const Json& object, const char* key, const std::string& name) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) fail("{}: expected a text \"{}\"", name, key);
  return found->get<std::string>();
}

Loaded loaded_from(const std::string& path) {
  const Json file = read_json(path);
  const Json* list = &file;
  if (file.is_object() && file.contains("messages")) list = &file["messages"];
  if (!list->is_array())
    fail("{}: expected a conversation, an object with \"messages\" or a list of them", path);
  Loaded out;
  for (size_t i = 0; i < list->size(); ++i) {
    const std::string name = text("{}: messages[{}]", path, i);
    const Json& entry = (*list)[i];
    if (!entry.is_object()) fail("{}: expected an object", name);
    ChatMessage message{.role = text_member(entry, "role", name),
                        .content = text_member(entry, "content", name)};
    if (entry.contains("reasoning_content"))
      message.reasoning = text_member(entry, "reasoning_content", name);
    if (i == 0 && message.role == "system") {
      out.system = message.content;
      continue;
    }
    const char* const expected = out.messages.size() % 2 == 0 ? "user" : "assistant";
    if (message.role != expected) fail("{}: expected the role {}, got {}", name, expected, message.role);
    out.messages.push_back(std::move(message));
  }
  if (out.messages.size() % 2 == 1) {
    out.unanswered = out.messages.back().content;
    out.messages.pop_back();
  }
  return out;
}

}  // namespace

ChatAnswer ChatSession::ask(const std::string& message, const OnPiece& on_piece) {
  std::vector<ChatMessage> sent;
  if (!system_.empty()) sent.push_back({"system", system_});
  sent.insert(sent.end(), messages_.begin(), messages_.end());
  sent.push_back({"user", message});
  unanswered_ = message;
  ChatAnswer answer{.message = {.role = "assistant"}};
  answer.finish = backend_.stream(sent, options_, [&](const ChatPiece& piece) {
    (piece.reasoning ? answer.message.reasoning : answer.message.content) += piece.text;
    on_piece(piece);
  });
  last_ = answer.finish;
  if (answer.finish.reason == "cancelled" && answer.message.content.empty()) return answer;
  unanswered_.reset();
  messages_.push_back({"user", message});
  messages_.push_back(answer.message);
  return answer;
}

ChatAnswer ChatSession::retry(const OnPiece& on_piece) {
  if (unanswered_) return ask(std::string(*unanswered_), on_piece);
  if (messages_.empty()) fail("there is no message yet to answer again");
  const std::vector<ChatMessage> before = messages_;
  const std::string message = messages_[messages_.size() - 2].content;
  messages_.resize(messages_.size() - 2);
  const auto restore = [&] {
    messages_ = before;
    unanswered_.reset();
  };
  try {
    ChatAnswer answer = ask(message, on_piece);
    if (unanswered_) restore();  // stopped before anything came
    return answer;
  } catch (...) {
    restore();
    throw;
  }
}

void ChatSession::clear() {
  messages_.clear();
  unanswered_.reset();
  last_.reset();
}

void ChatSession::save(const std::string& path) const {
  const std::string file = with_home(path);
  std::error_code unknown;  // of a folder that may not be read: writing will say so
  if (std::filesystem::exists(file, unknown)) {
    try {
      loaded_from(file);
    } catch (const Error&) {
      fail(tr("{}: exists and is no conversation; give another name"), file);
    }
  }
  nlohmann::ordered_json out = {{"model", backend_.place().model},
                                {"messages", nlohmann::ordered_json::array()}};
  const auto add = [&](const ChatMessage& message) {
    nlohmann::ordered_json entry = {{"role", message.role}, {"content", message.content}};
    if (!message.reasoning.empty()) entry["reasoning_content"] = message.reasoning;
    out["messages"].push_back(std::move(entry));
  };
  if (!system_.empty()) add({"system", system_});
  for (const ChatMessage& message : messages_) add(message);
  write_atomically(file, out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

void ChatSession::load(const std::string& path) {
  Loaded loaded = loaded_from(with_home(path));
  clear();
  system_ = std::move(loaded.system);
  messages_ = std::move(loaded.messages);
  unanswered_ = std::move(loaded.unanswered);
}

}  // namespace kt::inline cli
