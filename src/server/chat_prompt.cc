#include "server/chat_prompt.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>

#include "base/error.h"
#include "base/utf8.h"
#include "server/syntax/json_scanner.h"
#include "server/template_needs.h"
#include "text/json.h"
#include "text/message_text.h"

namespace kt::inline server {
namespace {

constexpr size_t kMostMessages = 4096, kMostTools = 128, kMostCalls = 128, kLongestName = 128;

// The member, or null where it is missing; null and missing are the same in this API.
const OrderedJson& member(const OrderedJson& object, const char* name) {
  static const OrderedJson none;
  const auto found = object.find(name);
  return found == object.end() ? none : *found;
}

const OrderedJson& expect_object(const OrderedJson& value, const std::string& place) {
  if (!value.is_object()) fail("{}: expected an object, got {}", place, json_kind_of(value));
  return value;
}

const OrderedJson& expect_array(const OrderedJson& value, const std::string& place, size_t most) {
  if (!value.is_array()) fail("{}: expected an array, got {}", place, json_kind_of(value));
  if (value.size() > most) fail("{}: expected at most {} items, got {}", place, most, value.size());
  return value;
}

const std::string& expect_string(const OrderedJson& object, const char* name, const std::string& place) {
  const OrderedJson& value = member(object, name);
  if (!value.is_string()) fail("{}.{}: expected a string, got {}", place, name, json_kind_of(value));
  return value.get_ref<const std::string&>();
}

const std::string& expect_name(const OrderedJson& object, const std::string& place) {
  const std::string& name = expect_string(object, "name", place);
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  };
  if (name.empty() || name.size() > kLongestName || !std::ranges::all_of(name, fits))
    fail("{}.name: expected 1 to {} of the characters a-z A-Z 0-9 _ - . , got \"{}\"", place, kLongestName,
         printable(name));
  return name;
}

OrderedJson call_arguments(const OrderedJson& given, const std::string& place, ArgumentForm form) {
  if (given.is_object()) return form == ArgumentForm::kText ? OrderedJson(spaced_json(given)) : given;
  if (given.is_null()) return form == ArgumentForm::kText ? OrderedJson("{}") : OrderedJson::object();
  if (!given.is_string()) fail("{}: expected JSON in a string, got {}", place, json_kind_of(given));
  const std::string& spelled = given.get_ref<const std::string&>();
  if (spelled.find_first_not_of(" \n\r\t") == std::string::npos)
    return form == ArgumentForm::kText ? OrderedJson("{}") : OrderedJson::object();
  OrderedJson parsed;
  try {
    parsed = parse_ordered_json(spelled, place, {.depth = 64, .values = 1u << 20});
  } catch (const Error&) {
    // said below, with what came
  }
  if (!parsed.is_object())
    fail("{}: expected a JSON object in a string, got \"{}\"", place, printable(spelled));
  return form == ArgumentForm::kText ? given : parsed;
}

OrderedJson called_function(const OrderedJson& function, const std::string& place, ArgumentForm form) {
  expect_object(function, place);
  const std::string& name = expect_name(function, place);
  return {{"name", name},
          {"arguments", call_arguments(member(function, "arguments"), place + ".arguments", form)}};
}

OrderedJson earlier_calls(const OrderedJson& calls, const std::string& place, ArgumentForm form) {
  OrderedJson out = OrderedJson::array();
  expect_array(calls, place, kMostCalls);
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string here = text("{}[{}]", place, i);
    const OrderedJson& type = member(expect_object(calls[i], here), "type");
    if (!type.is_null() && type != "function")
      fail("{}.type: expected \"function\", got {}", here,
           type.is_string() ? printable(type.dump()) : json_kind_of(type));
    OrderedJson call = OrderedJson::object();
    if (!member(calls[i], "id").is_null()) call["id"] = expect_string(calls[i], "id", here);
    call["type"] = "function";
    call["function"] = called_function(member(calls[i], "function"), here + ".function", form);
    out.push_back(std::move(call));
  }
  return out;
}

void copy_strings(const OrderedJson& from, OrderedJson& to, const std::string& place,
                  std::initializer_list<const char*> names) {
  for (const char* name : names)
    if (!member(from, name).is_null()) to[name] = expect_string(from, name, place);
}

OrderedJson assistant_message(const OrderedJson& message, const std::string& place,
                              const TemplateNeeds& needs) {
  OrderedJson out{{"role", "assistant"}};
  const OrderedJson &content = member(message, "content"), &calls = member(message, "tool_calls"),
                    &old_call = member(message, "function_call"), &refusal = member(message, "refusal");
  const bool has_calls = (!calls.is_null() && !(calls.is_array() && calls.empty())) || !old_call.is_null();
  if (!content.is_null())
    out["content"] = message_text(content, place + ".content");
  else if (!refusal.is_null())
    out["content"] = expect_string(message, "refusal", place);
  else if (!has_calls)
    fail("{}.content: expected a string or an array of text parts, as there are no tool_calls; got null",
         place);
  else
    out["content"] = needs.null_content ? OrderedJson() : OrderedJson("");
  copy_strings(message, out, place, {"name", "reasoning_content"});
  if (!out.contains("reasoning_content") && !member(message, "reasoning").is_null())
    out["reasoning_content"] = expect_string(message, "reasoning", place);
  if (const auto thought = out.find("reasoning_content"); thought != out.end()) {
    const std::string reasoning = thought->get<std::string>();
    if (needs.reasoning) out["reasoning"] = reasoning;
    // gpt-oss's template refuses a thought beside content and calls.
    if (needs.thinking && !(has_calls && out["content"].is_string() && out["content"] != ""))
      out["thinking"] = reasoning;
  }
  if (!has_calls) return out;
  if (!calls.is_null())
    out["tool_calls"] = earlier_calls(calls, place + ".tool_calls", needs.arguments);
  else
    out["tool_calls"] = OrderedJson::array(
        {{{"type", "function"},
          {"function", called_function(old_call, place + ".function_call", needs.arguments)}}});
  return out;
}

OrderedJson template_message(const OrderedJson& message, const std::string& place,
                             const TemplateNeeds& needs) {
  expect_object(message, place);
  const std::string& role = expect_string(message, "role", place);
  if (role == "assistant") return assistant_message(message, place, needs);
  constexpr std::array<std::string_view, 5> kRoles = {"system", "developer", "user", "tool", "function"};
  if (std::ranges::find(kRoles, role) == kRoles.end())
    fail("{}.role: expected system, developer, user, assistant, tool or function, got \"{}\"", place,
         printable(role));
  const bool result = role == "tool" || role == "function";
  OrderedJson out{{"role", result ? "tool" : role == "developer" ? "system" : role}};
  out["content"] = message_text(member(message, "content"), place + ".content");
  if (role == "tool") out["tool_call_id"] = expect_string(message, "tool_call_id", place);
  if (role == "function") out["name"] = expect_name(message, place);
  copy_strings(message, out, place, {"name"});
  return out;
}

constexpr size_t kShortId = 9;

// An id as the model itself would have written it.
bool id_fits(std::string_view id, std::string_view name, CallIds form) {
  if (form == CallIds::kNine)
    return id.size() == kShortId && std::ranges::all_of(id, [](char c) {
             return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
           });
  const std::string head = "functions." + std::string(name) + ":";
  return id.starts_with(head) && id.size() > head.size() &&
         id.find_first_not_of("0123456789", head.size()) == std::string_view::npos;
}

std::string made_id(std::string_view name, size_t number, CallIds form) {
  if (form == CallIds::kNamed) return text("functions.{}:{}", name, number);
  std::string digits = std::to_string(number);  // below kMostMessages * kMostCalls
  digits.insert(0, kShortId - 1 - digits.size(), '0');
  return "c" + digits;
}

// Gives calls that came with other ids such ones, numbered through the conversation, and their results the same.
void remake_call_ids(OrderedJson& messages, CallIds form) {
  std::map<std::string, std::string> renamed;
  size_t number = 0;
  for (OrderedJson& message : messages) {
    if (const auto id = message.find("tool_call_id"); id != message.end()) {
      const auto found = renamed.find(id->get<std::string>());
      if (found != renamed.end()) *id = found->second;
    }
    const auto calls = message.find("tool_calls");
    if (calls == message.end()) continue;
    for (OrderedJson& call : *calls) {
      const std::string name = call["function"]["name"].get<std::string>(), id = call.value("id", "");
      const std::string made = made_id(name, number++, form);
      if (id_fits(id, name, form)) continue;
      call["id"] = made;
      renamed[id] = made;
    }
  }
}

OrderedJson template_function(const OrderedJson& function, const std::string& place) {
  expect_object(function, place);
  OrderedJson out{{"name", expect_name(function, place)}};
  const OrderedJson &description = member(function, "description"),
                    &parameters = member(function, "parameters"), &strict = member(function, "strict");
  out["description"] = description.is_null() ? "" : expect_string(function, "description", place);
  out["parameters"] = parameters.is_null()
                          ? OrderedJson{{"type", "object"}, {"properties", OrderedJson::object()}}
                          : expect_object(parameters, place + ".parameters");
  if (!strict.is_null() && !strict.is_boolean())
    fail("{}.strict: expected a boolean, got {}", place, json_kind_of(strict));
  return {{"type", "function"}, {"function", std::move(out)}};
}

void expect_new_name(const OrderedJson& tools, const OrderedJson& tool, const std::string& place) {
  for (const OrderedJson& other : tools)
    if (other["function"]["name"] == tool["function"]["name"])
      fail("{}.name: two tools are called \"{}\"", place, other["function"]["name"].get<std::string>());
}

OrderedJson template_functions(const OrderedJson& functions) {
  OrderedJson out = OrderedJson::array();
  expect_array(functions, "functions", kMostTools);
  for (size_t i = 0; i < functions.size(); ++i) {
    const std::string place = text("functions[{}]", i);
    OrderedJson tool = template_function(functions[i], place);
    expect_new_name(out, tool, place);
    out.push_back(std::move(tool));
  }
  return out;
}

ToolChoice required(std::string name, const OrderedJson& tools, const std::string& place) {
  std::string known;
  for (const OrderedJson& tool : tools) {
    const std::string& other = tool["function"]["name"].get_ref<const std::string&>();
    if (other == name) return {.kind = ToolChoice::Kind::kRequired, .name = std::move(name)};
    known += text("{}{}", known.empty() ? "" : ", ", other);
  }
  fail("{}: no function \"{}\" among the tools: {}", place, printable(name),
       known.empty() ? "(none)" : known);
}

// tool_choice and function_call, which differ in where a function's name stands.
ToolChoice choice_of(const OrderedJson& given, const OrderedJson& tools, const std::string& place) {
  using Kind = ToolChoice::Kind;
  if (given.is_object()) {
    const OrderedJson* named = &given;
    std::string at = place;
    if (place == "tool_choice") {
      const std::string& type = expect_string(given, "type", place);
      if (type != "function") fail("tool_choice.type: expected \"function\", got \"{}\"", printable(type));
      at += ".function";
      named = &expect_object(member(given, "function"), at);
    }
    return required(expect_string(*named, "name", at), tools, at + ".name");
  }
  if (given == "none") return {.kind = Kind::kNone};
  if (given.is_null() || given == "auto") return {.kind = tools.empty() ? Kind::kNone : Kind::kAuto};
  if (given != "required" || place != "tool_choice")
    fail("{}: expected \"none\", \"auto\"{} or an object that names a function, got {}", place,
         place == "tool_choice" ? ", \"required\"" : "",
         given.is_string() ? "\"" + printable(given.get<std::string>()) + "\""
                           : std::string(json_kind_of(given)));
  if (tools.empty()) fail("tool_choice: \"required\" needs tools, and there are none");
  return {.kind = Kind::kRequired};
}

}  // namespace

OrderedJson template_messages(const OrderedJson& messages) { return template_messages(messages, {}); }

OrderedJson template_messages(const OrderedJson& messages, std::string_view chat_template) {
  expect_array(messages, "messages", kMostMessages);
  if (messages.empty()) fail("messages: expected at least one message");
  const TemplateNeeds needs = template_needs(chat_template);
  OrderedJson out = OrderedJson::array();
  for (size_t i = 0; i < messages.size(); ++i)
    out.push_back(template_message(messages[i], text("messages[{}]", i), needs));
  if (needs.ids != CallIds::kAny) remake_call_ids(out, needs.ids);
  return out;
}

OrderedJson template_tools(const OrderedJson& tools) {
  OrderedJson out = OrderedJson::array();
  expect_array(tools, "tools", kMostTools);
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string place = text("tools[{}]", i);
    const std::string& type = expect_string(expect_object(tools[i], place), "type", place);
    if (type != "function")
      fail("{}.type: tools of type \"{}\" are not supported; expected \"function\"", place, printable(type));
    OrderedJson tool = template_function(member(tools[i], "function"), place + ".function");
    expect_new_name(out, tool, place + ".function");
    out.push_back(std::move(tool));
  }
  return out;
}

OrderedJson request_tools(const OrderedJson& request) {
  if (!member(request, "tools").is_null()) return template_tools(request["tools"]);
  if (!member(request, "functions").is_null()) return template_functions(request["functions"]);
  return OrderedJson::array();
}

ToolChoice tool_choice_of(const OrderedJson& request) {
  const OrderedJson tools = request_tools(request);
  const OrderedJson &given = member(request, "tool_choice"), &old = member(request, "function_call"),
                    &parallel = member(request, "parallel_tool_calls");
  ToolChoice choice =
      !given.is_null() ? choice_of(given, tools, "tool_choice") : choice_of(old, tools, "function_call");
  if (!parallel.is_null() && !parallel.is_boolean())
    fail("parallel_tool_calls: expected a boolean, got {}", json_kind_of(parallel));
  // Who names a function wants one call of it.
  choice.parallel = choice.name.empty() && (parallel.is_null() || parallel.get<bool>());
  // The older interface knows one call in an answer.
  if (member(request, "tools").is_null() && !member(request, "functions").is_null()) choice.parallel = false;
  return choice;
}

}  // namespace kt::inline server
