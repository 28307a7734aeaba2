// What a chat request says, made into what chat templates expect. Knows nothing of HTTP or of answers.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kt::inline server {

using OrderedJson = nlohmann::ordered_json;

// `messages` and `tools` of a chat request, checked and made into what templates expect: contents that are
// lists of text parts joined by line breaks, arguments of earlier calls as objects, developer messages as
// system ones, the older function_call and role "function" as calls and tool messages. Fields that templates
// do not read are left out. Error(kInput) "messages[2].content: ..." names the place.
OrderedJson template_messages(const OrderedJson& messages);
// The same for one template. Templates that append the arguments of a call as text get text, those that test
// for a content that is none get null; the others get objects and "". Those that write a call by its id get ids that
// name the function, those that refuse ids of another length than nine get such ones.
OrderedJson template_messages(const OrderedJson& messages, std::string_view chat_template);
// Each tool is {"type", "function": {"name", "description", "parameters"}}, none of them missing.
OrderedJson template_tools(const OrderedJson& tools);
// template_tools of the request's `tools`, or of the older `functions`; an empty array without either.
OrderedJson request_tools(const OrderedJson& request);

// Calls that an answer may make.
struct ToolChoice {
  enum class Kind { kNone, kAuto, kRequired } kind = Kind::kAuto;
  std::string name = {};  // only this function; kRequired
  bool parallel = true;   // more than one call
};
// tools, tool_choice, parallel_tool_calls, or the older functions and function_call. Without tools: kNone.
ToolChoice tool_choice_of(const OrderedJson& request);

// Whether the template's code reads `tools`.
bool template_knows_tools(std::string_view chat_template);
// For models whose template does not know tools, or whose calls we cannot read: the tools described in a
// system message in the Hermes manner, earlier calls and their results as text. Takes what template_messages
// and template_tools give; the answer is then read by ToolSyntax::kHermes, and the template gets no tools.
OrderedJson with_tool_prompt(OrderedJson messages, const OrderedJson& tools);

// JSON as Python's json.dumps(ensure_ascii=False) writes it, which is what models have seen: ", " and ": ".
std::string spaced_json(const OrderedJson& value);

}  // namespace kt::inline server
