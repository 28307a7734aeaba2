#include "server/chat_plan.h"

#include <algorithm>
#include <span>

#include "base/error.h"
#include "server/api_error.h"
#include "server/generation.h"
#include "server/prompt_guard.h"
#include "server/service.h"

namespace kt::inline server {
namespace {

struct Conversation {
  OrderedJson messages, tools;  // as the template gets them; tools null: none
  OrderedJson offered;          // tools the answer may call, for the grammar
  ToolChoice choice;
  ChatSyntax syntax;
};

Conversation read_conversation(Service& service, const OrderedJson& body) {
  const std::string& source = service.options().chat_template;
  Conversation out{.syntax = service.options().syntax};
  const auto messages = body.find("messages");
  if (messages == body.end()) throw ApiError(400, "messages: expected a list, got nothing", "messages");
  out.messages = template_messages(*messages, source);
  out.offered = request_tools(body);
  out.choice = tool_choice_of(body);
  const OrderedJson none = OrderedJson::array();
  const OrderedJson& callable = out.choice.kind == ToolChoice::Kind::kNone ? none : out.offered;
  if (template_knows_tools(source) && out.syntax.tools != ToolSyntax::kNone) {
    if (!callable.empty()) out.tools = callable;
    return out;
  }
  out.messages = with_tool_prompt(std::move(out.messages), callable);
  out.syntax = with_tool_syntax(std::move(out.syntax), ToolSyntax::kHermes);
  return out;
}

TemplateVariables variables_of(Service& service, const OrderedJson& body, const Conversation& talk) {
  TemplateVariables variables = service.model().template_tokens();
  variables["documents"] = nullptr;  // templates ask whether it is none
  variables["add_generation_prompt"] = true;
  if (const auto more = body.find("chat_template_kwargs"); more != body.end() && !more->is_null()) {
    if (!more->is_object()) Fields(body).refuse("chat_template_kwargs", "an object");
    for (const auto& [key, value] : more->items())
      if (!key.ends_with("_token")) variables[key] = value;  // markers are the model's to name
  }
  variables["messages"] = talk.messages;
  variables["tools"] = talk.tools;
  return variables;
}

// The prompt's tokens, and whether it ends inside a thought.
std::vector<TokenId> render(Service& service, const TemplateVariables& variables, const Conversation& talk,
                            ReplyParser::Start& start) {
  PromptGuard guard(service.tokenizer());
  const std::string rendered = service.chat_template()->render(guard.protect(variables));
  start.thinking = prompt_opens_thinking(talk.syntax, guard.plain(rendered));
  service.check_length(rendered, "messages");
  return guard.encode(rendered);
}

// How many of the prompt's tokens stay when its last message is another. 0 where the template says nothing of that:
// some refuse a conversation that ends elsewhere.
size_t without_last_message(Service& service, TemplateVariables variables, std::span<const TokenId> prompt) {
  OrderedJson& messages = variables["messages"];
  if (messages.size() < 2) return 0;
  messages.erase(messages.size() - 1);
  variables["add_generation_prompt"] = false;
  try {
    PromptGuard guard(service.tokenizer());
    const std::vector<TokenId> shorter =
        guard.encode(service.chat_template()->render(guard.protect(variables)));
    return static_cast<size_t>(std::ranges::mismatch(shorter, prompt).in1 - shorter.begin());
  } catch (const Error&) {
    return 0;
  }
}

Grammar grammar_of(Service& service, const Fields& body, const Conversation& talk,
                   const ReplyParser::Start& start) {
  if (talk.choice.kind == ToolChoice::Kind::kRequired)
    return tool_call_grammar(talk.syntax, service.tokenizer(), talk.offered, talk.choice, start);
  Grammar grammar = response_grammar(service, body);
  // Only what comes after the thought is held to the format.
  return grammar ? answer_grammar(talk.syntax, service.tokenizer(), std::move(grammar), start) : nullptr;
}

}  // namespace

ChatPlan plan_chat(Service& service, const OrderedJson& json) {
  if (!service.chat_template())
    throw ApiError(
        400,
        text("{} has no chat template; use /v1/completions, or start the server with one (chat_template)",
             service.options().name));
  const Fields body(json);
  const int64_t n = body.integer("n", 1, service.options().max_answers).value_or(1);
  GenerateRequest base = read_generation(service, body);
  auto most = body.integer("max_completion_tokens", 1, INT32_MAX);
  if (!most) most = body.integer("max_tokens", 1, INT32_MAX);
  base.max_tokens = static_cast<int>(most.value_or(INT32_MAX));
  const auto top = body.integer("top_logprobs", 0, kMostLogprobs);
  const bool logprobs = body.flag("logprobs", false);
  if (top && !logprobs) body.refuse_as("top_logprobs", "only with \"logprobs\": true");
  if (logprobs) base.sampling.logprobs = static_cast<int>(top.value_or(0));
  ChatPlan plan;
  Grammar grammar;
  try {
    const Conversation talk = read_conversation(service, json);
    plan.syntax = talk.syntax;
    plan.start.tools = talk.choice.kind != ToolChoice::Kind::kNone;
    if (plan.start.tools) plan.start.types = std::make_shared<const ArgumentTypes>(talk.offered);
    const TemplateVariables variables = variables_of(service, json, talk);
    base.prompt = render(service, variables, talk, plan.start);
    if (service.runner().state_slots() > 0)
      base.likely_shared = without_last_message(service, variables, base.prompt);
    grammar = grammar_of(service, body, talk, plan.start);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kInternal) throw;
    throw ApiError(error.kind() == ErrorKind::kMemory ? 503 : 400, error.what());
  }
  if (plan.start.tools || !plan.syntax.think_end.empty() || plan.syntax.channels || plan.syntax.frames)
    base.special = answer_decoding(plan.syntax, service.tokenizer());
  if (!body.flag("ignore_eos", false))
    for (const TokenId id : answer_end_tokens(plan.syntax, service.tokenizer()))
      base.end_tokens.push_back(id);
  constexpr size_t kMostStates = 2'000'000;  // of all answers
  if (grammar && grammar_size(grammar) * static_cast<size_t>(n) > kMostStates)
    body.refuse_as("n", text("{} answers held to so large a schema take too much memory", n));
  plan.requests = copies(base, n);
  if (grammar)
    for (GenerateRequest& request : plan.requests) request.constraint = service.constraint(grammar);
  return plan;
}

}  // namespace kt::inline server
