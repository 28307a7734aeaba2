// with_tool_prompt: tools for models whose template has no place for them.
#include "server/chat_prompt.h"

namespace kt::inline server {
namespace {

void append_spaced(const OrderedJson& value, std::string& out) {
  if (!value.is_structured()) {
    out += value.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
    return;
  }
  const bool object = value.is_object();
  out += object ? '{' : '[';
  bool first = true;
  for (const auto& [key, item] : value.items()) {
    if (!first) out += ", ";
    first = false;
    if (object) out += OrderedJson(key).dump(-1, ' ', false, OrderedJson::error_handler_t::replace) + ": ";
    append_spaced(item, out);
  }
  out += object ? '}' : ']';
}

std::string tool_description(const OrderedJson& tools) {
  std::string out =
      "# Tools\n\nYou may call one or more functions to help with the request. Their signatures are within "
      "<tools></tools>:\n<tools>";
  for (const OrderedJson& tool : tools) out += "\n" + spaced_json(tool);
  return out +
         "\n</tools>\n\nFor each call, answer with a JSON object of the function's name and arguments within "
         "<tool_call></tool_call>:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": "
         "<arguments-object>}\n</tool_call>";
}

std::string call_text(const OrderedJson& call) {
  const OrderedJson& function = call["function"];
  const OrderedJson& given = function["arguments"];
  const std::string arguments = given.is_string() ? given.get<std::string>() : spaced_json(given);
  return "<tool_call>\n{\"name\": " + spaced_json(function["name"]) + ", \"arguments\": " + arguments +
         "}\n</tool_call>";
}

void append_line(std::string& to, const std::string& line) { to += (to.empty() ? "" : "\n") + line; }

std::string content_of(const OrderedJson& message) {
  const auto found = message.find("content");
  return found != message.end() && found->is_string() ? found->get<std::string>() : "";
}

}  // namespace

std::string spaced_json(const OrderedJson& value) {
  std::string out;
  append_spaced(value, out);
  return out;
}

OrderedJson with_tool_prompt(OrderedJson messages, const OrderedJson& tools) {
  OrderedJson out = OrderedJson::array();
  std::string results;
  const auto tell_results = [&] {
    if (!results.empty()) out.push_back({{"role", "user"}, {"content", results}});
    results.clear();
  };
  for (OrderedJson& message : messages) {
    if (message["role"] == "tool") {
      append_line(results, "<tool_response>\n" + content_of(message) + "\n</tool_response>");
      continue;
    }
    tell_results();
    if (message.contains("tool_calls")) {
      std::string said = content_of(message);
      for (const OrderedJson& call : message["tool_calls"]) append_line(said, call_text(call));
      message["content"] = said;
      message.erase("tool_calls");
    }
    out.push_back(std::move(message));
  }
  tell_results();
  if (tools.empty()) return out;
  if (!out.empty() && out[0]["role"] == "system") {
    std::string said = content_of(out[0]);
    out[0]["content"] = said + (said.empty() ? "" : "\n\n") + tool_description(tools);
  } else {
    out.insert(out.begin(), OrderedJson{{"role", "system"}, {"content", tool_description(tools)}});
  }
  return out;
}

}  // namespace kt::inline server
