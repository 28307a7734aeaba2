#include "server/responses_request.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "server/api_error.h"
#include "server/fields.h"

namespace kt::inline server {
namespace {

// What a server that keeps nothing cannot do.
void refuse_state(const Fields& body) {
  for (const char* name : {"previous_response_id", "conversation"})
    if (body.find(name))
      body.refuse_as(name, "this server keeps no answers; send the whole conversation as `input`");
  if (body.find("prompt"))
    body.refuse_as("prompt", "this server keeps no prompts; send `instructions` and `input`");
  if (body.flag("store", false))
    body.refuse_as("store", "this server keeps no answers; send false, or leave it out");
  if (body.flag("background", false))
    body.refuse_as("background", "this server keeps no answers; send false, or leave it out");
  if (body.string("truncation").value_or("disabled") != "disabled") body.refuse("truncation", "\"disabled\"");
  if (body.integer("top_logprobs", 0, 20).value_or(0) > 0)
    body.refuse_as("top_logprobs", "not in this API; /v1/chat/completions has them");
  for (const std::string& what : body.strings("include", 16))
    if (what != "reasoning.encrypted_content")  // thoughts come in the open
      body.refuse_as("include", text("{} is not there to be included", shown_value(what)));
}

// The text of a content: a string, or parts of text.
std::string content_text(const Fields& item, const char* name, const std::string& path) {
  const OrderedJson* content = item.find(name);
  if (!content) item.refuse(name, "a string or a list of parts");
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) item.refuse(name, "a string or a list of parts");
  std::string out;
  for (size_t i = 0; i < content->size(); ++i) {
    const OrderedJson& part = (*content)[i];
    const std::string here = text("{}.{}[{}]", path, name, i);
    if (!part.is_object())
      throw ApiError(400, text("{}: expected an object, got {}", here, shown_value(part)), here);
    const Fields fields(part, here + ".");
    const std::string type = fields.string("type").value_or("");
    const bool refusal = type == "refusal";
    if (!refusal && type != "input_text" && type != "output_text" && type != "text")
      fields.refuse("type", "input_text or output_text: text is all that is read");
    out += (out.empty() ? "" : "\n") + fields.string(refusal ? "refusal" : "text").value_or("");
  }
  return out;
}

void add_call(OrderedJson& messages, const Fields& item) {
  const auto id = item.string("call_id"), name = item.string("name"), arguments = item.string("arguments");
  if (!id) item.refuse("call_id", "a string");
  if (!name) item.refuse("name", "a string");
  if (messages.empty() || messages.back()["role"] != "assistant")
    messages.push_back({{"role", "assistant"}, {"content", nullptr}});
  messages.back()["tool_calls"].push_back(
      {{"id", *id},
       {"type", "function"},
       {"function", {{"name", *name}, {"arguments", arguments.value_or("{}")}}}});
}

void add_item(OrderedJson& messages, const OrderedJson& item, const std::string& path) {
  if (!item.is_object())
    throw ApiError(400, text("{}: expected an object, got {}", path, shown_value(item)), path);
  const Fields fields(item, path + ".");
  const std::string type = fields.string("type").value_or("message");
  if (type == "reasoning") return;  // what was thought is not thought again
  if (type == "function_call") return add_call(messages, fields);
  if (type == "function_call_output") {
    const auto id = fields.string("call_id");
    if (!id) fields.refuse("call_id", "a string");
    return messages.push_back(
        {{"role", "tool"}, {"tool_call_id", *id}, {"content", content_text(fields, "output", path)}});
  }
  if (type == "item_reference") fields.refuse_as("type", "this server keeps no items; send the item itself");
  if (type != "message") fields.refuse("type", "message, function_call, function_call_output or reasoning");
  const std::string role = fields.string("role").value_or("");
  constexpr std::array<std::string_view, 4> kRoles = {"user", "assistant", "system", "developer"};
  if (std::ranges::find(kRoles, role) == kRoles.end())
    fields.refuse("role", "user, assistant, system or developer");
  messages.push_back({{"role", role}, {"content", content_text(fields, "content", path)}});
}

OrderedJson messages_of(const Fields& body) {
  OrderedJson out = OrderedJson::array();
  if (const auto instructions = body.string("instructions"))
    out.push_back({{"role", "system"}, {"content", *instructions}});
  const OrderedJson* input = body.find("input");
  if (!input || (!input->is_string() && !input->is_array()))
    body.refuse("input", "a string or a list of items");
  if (input->is_array() && input->empty()) body.refuse("input", "at least one item");
  if (input->is_string()) {
    out.push_back({{"role", "user"}, {"content", *input}});
    return out;
  }
  for (size_t i = 0; i < input->size(); ++i) add_item(out, (*input)[i], text("input[{}]", i));
  return out;
}

// Functions, with their names where chat requests have them.
void add_tools(const Fields& body, OrderedJson& out) {
  if (const OrderedJson* tools = body.find("tools")) {
    if (!tools->is_array()) body.refuse("tools", "a list");
    out["tools"] = OrderedJson::array();
    for (size_t i = 0; i < tools->size(); ++i) {
      const OrderedJson& tool = (*tools)[i];
      const std::string here = text("tools[{}]", i);
      if (!tool.is_object())
        throw ApiError(400, text("{}: expected an object, got {}", here, shown_value(tool)), here);
      const Fields fields(tool, here + ".");
      if (fields.string("type").value_or("") != "function")
        fields.refuse("type", "\"function\": tools that a server runs itself are not here");
      if (fields.string("name").value_or("").empty()) fields.refuse("name", "the function's name");
      OrderedJson function = OrderedJson::object();
      for (const char* name : {"name", "description", "parameters", "strict"})
        if (const OrderedJson* value = fields.find(name)) function[name] = *value;
      out["tools"].push_back({{"type", "function"}, {"function", std::move(function)}});
    }
  }
  if (const OrderedJson* parallel = body.find("parallel_tool_calls")) out["parallel_tool_calls"] = *parallel;
  const OrderedJson* choice = body.find("tool_choice");
  if (!choice) return;
  out["tool_choice"] = *choice;
  if (!choice->is_object()) return;
  const Fields named(*choice, "tool_choice.");
  if (named.string("type").value_or("") != "function") named.refuse("type", "\"function\"");
  out["tool_choice"] = {{"type", "function"}, {"function", {{"name", named.string("name").value_or("")}}}};
}

void add_format(const Fields& body, OrderedJson& out) {
  const auto about = body.object("text");
  const auto format = about ? about->object("format") : std::nullopt;
  if (!format) return;
  const std::string type = format->string("type").value_or("");
  if (type == "text") return;
  OrderedJson made = {{"type", type}};
  if (type == "json_schema") {
    const OrderedJson* schema = format->find("schema");
    if (!schema || !schema->is_object()) format->refuse("schema", "a JSON schema");
    made["json_schema"] = {{"name", format->string("name").value_or("")}, {"schema", *schema}};
  } else if (type != "json_object") {
    format->refuse("type", "\"text\", \"json_object\" or \"json_schema\"");
  }
  out["response_format"] = std::move(made);
}

}  // namespace

OrderedJson chat_of_responses(const OrderedJson& json) {
  const Fields body(json);
  refuse_state(body);
  // Those that are only given back, so that nothing else would look at them.
  for (const char* name : {"metadata", "reasoning"}) body.object(name);
  body.string("user");
  OrderedJson out = OrderedJson::object();
  out["messages"] = messages_of(body);
  if (const OrderedJson* most = body.find("max_output_tokens")) {
    if (!body.integer("max_output_tokens", 1, INT32_MAX))
      body.refuse("max_output_tokens", "a number of tokens");
    out["max_tokens"] = *most;
  }
  for (const char* name : {"model", "temperature", "top_p", "top_k", "min_p", "seed", "chat_template_kwargs"})
    if (const OrderedJson* value = body.find(name)) out[name] = *value;
  add_tools(body, out);
  add_format(body, out);
  return out;
}

}  // namespace kt::inline server
