#include "engine/calibration/sample_rows.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/utf8.h"
#include "engine/calibration/document_tokens.h"

namespace kt {
namespace {

// "from: human" and their like, as templates know them.
std::string role_named(const std::string& name) {
  if (name == "human") return "user";
  if (name == "gpt" || name == "model") return "assistant";
  return name;
}

// As the server takes contents: text, or a list of text parts. nullopt: neither.
std::optional<std::string> content_text(const Json& content) {
  constexpr std::array<std::string_view, 3> kText = {"text", "input_text", "output_text"};
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) return std::nullopt;
  std::string joined;
  for (const Json& part : content) {
    const bool known = part.is_object() && part.contains("type") && part.at("type").is_string() &&
                       part.contains("text") && part.at("text").is_string() &&
                       std::ranges::find(kText, part.at("type").get<std::string>()) != kText.end();
    if (!known) return std::nullopt;
    if (&part != &content.front()) joined += '\n';
    joined += part.at("text").get<std::string>();
  }
  return joined;
}

bool calls_tools(const Json& message) {
  const auto given = [&](const char* name) {
    const auto found = message.find(name);
    return found != message.end() && !found->is_null() && !found->empty();
  };
  return given("tool_calls") || given("function_call");
}

TemplateVariables message_of(const Json& message, const std::string& where) {
  const bool named = message.is_object() && message.contains("from");
  const char *role = named ? "from" : "role", *content = named ? "value" : "content";
  if (!message.is_object() || !message.contains(role) || !message.at(role).is_string())
    fail("{}: a message without {}, a string", where, role);
  const std::string speaker = role_named(message.at(role).get<std::string>());
  const auto found = message.find(content);
  const bool none = found == message.end() || found->is_null();
  std::optional<std::string> words;
  if (!none) words = content_text(*found);
  if (none && speaker == "assistant" && calls_tools(message)) words = "";
  if (!words)
    fail("{}: a message of role {}{}; expected {} to be a string or a list of text parts", where,
         printable(speaker), none ? text(" without {}", content) : text(", its {} neither", content),
         content);
  return {{"role", speaker}, {"content", *words}};
}

}  // namespace

SampleRows::SampleRows(const DescribedModel& model) : model_(model) {
  const AroundText around = around_text(model.tokenizer());
  around_ = around.before.size() + around.after.size();
  if (!model.chat_template().empty()) template_.emplace(model.chat_template(), model.path());
}

std::string SampleRows::rendered(const Json& messages, const std::string& where) const {
  if (!template_)
    fail("{}: messages, but {} has no chat template; pass lines with \"text\"", where, model_.path());
  if (!messages.is_array()) fail("{}: messages are no list", where);
  TemplateVariables list = TemplateVariables::array();
  for (const Json& message : messages) list.push_back(message_of(message, where));
  TemplateVariables variables = {{"messages", list}, {"add_generation_prompt", false}};
  for (const auto& [key, value] : model_.template_tokens().items()) variables[key] = value;
  try {
    return template_->render(variables);
  } catch (const Error& error) {
    fail_as(error.kind(), "{}: {}", where, error.what());
  }
}

std::vector<TokenId> SampleRows::tokens(std::string_view row, const std::string& where) const {
  const Json line = Json::parse(row, nullptr, false);
  if (line.is_discarded())
    fail("{}: not JSON{}", where,
         row.find_first_not_of(" \t") == row.find('[') ? "; expected an object a line, not a list of them"
                                                       : "");
  if (!line.is_object()) fail("{}: expected an object", where);
  for (const char* key : {"messages", "conversations"})
    if (const auto found = line.find(key); found != line.end()) {
      std::vector<TokenId> tokens = model_.tokenizer().encode(rendered(*found, where));
      return tokens.size() < 2 ? std::vector<TokenId>() : tokens;
    }
  if (const auto found = line.find("text"); found != line.end()) {
    if (!found->is_string()) fail("{}: text is not a string", where);
    std::vector<TokenId> tokens =
        model_.tokenizer().encode(found->get_ref<const std::string&>(), {.add_special = true});
    return tokens.size() < around_ + 2 ? std::vector<TokenId>() : tokens;
  }
  std::string columns;
  for (const auto& [key, value] : line.items()) columns += text("{}{}", columns.empty() ? "" : ", ", key);
  fail("{}: columns {}; expected text, messages or conversations", where,
       columns.empty() ? "(none)" : printable(columns));
}

TokenId document_end(const DescribedModel& model, const std::string& path) {
  if (const auto end = model.tokenizer().id_of("<|endoftext|>")) return *end;
  if (model.end_ids().empty())
    fail("{}: the tokenizer of {} has no token that ends a text", path, model.path());
  return model.end_ids().front();
}

}  // namespace kt
