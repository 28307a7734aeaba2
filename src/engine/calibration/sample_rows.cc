#include "engine/calibration/sample_rows.h"

#include "base/error.h"
#include "base/utf8.h"
#include "engine/calibration/document_tokens.h"
#include "text/message_text.h"

namespace kt::inline engine {
namespace {

// "from: human" and their like, as templates know them.
std::string role_named(const std::string& name) {
  if (name == "human") return "user";
  if (name == "gpt" || name == "model") return "assistant";
  return name;
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
  const bool only_calls = none && speaker == "assistant" && calls_tools(message);
  if (none && !only_calls)
    fail("{}: a message of role {} without {}; expected a string or an array of text parts", where,
         printable(speaker), content);
  const std::string string =
      only_calls
          ? ""
          : message_text(OrderedJson(*found), text("{}: {} of role {}", where, content, printable(speaker)));
  return {{"role", speaker}, {"content", string}};
}

// {"instruction", "input", "output"}, as a question and its answer; null for other rows.
Json instruction_messages(const Json& row, const std::string& where) {
  if (!row.contains("instruction") || !row.contains("output")) return nullptr;
  const auto string_of = [&](const char* key) {
    const auto found = row.find(key);
    if (found == row.end() || found->is_null()) return std::string();
    if (!found->is_string()) fail("{}: {} is not a string", where, key);
    return found->get<std::string>();
  };
  const std::string input = string_of("input");
  return Json::array(
      {{{"role", "user"}, {"content", string_of("instruction") + (input.empty() ? "" : "\n\n" + input)}},
       {{"role", "assistant"}, {"content", string_of("output")}}});
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
  if (const Json asked = instruction_messages(line, where); !asked.is_null()) {
    // A base model has no template; the words are the same.
    const std::string sample = template_ ? rendered(asked, where)
                                         : text("{}\n\n{}", asked[0]["content"].get<std::string>(),
                                                asked[1]["content"].get<std::string>());
    std::vector<TokenId> tokens = model_.tokenizer().encode(sample, {.add_special = !template_.has_value()});
    return tokens.size() < (template_ ? 2 : around_ + 2) ? std::vector<TokenId>() : tokens;
  }
  std::string columns;
  for (const auto& [key, value] : line.items()) columns += text("{}{}", columns.empty() ? "" : ", ", key);
  fail("{}: columns {}; expected text, messages, conversations, or instruction and output", where,
       columns.empty() ? "(none)" : printable(columns));
}

TokenId document_end(const DescribedModel& model, const std::string& path) {
  if (const auto end = model.tokenizer().id_of("<|endoftext|>")) return *end;
  if (model.end_ids().empty())
    fail("{}: the tokenizer of {} has no token that ends a text", path, model.path());
  return model.end_ids().front();
}

}  // namespace kt::inline engine
