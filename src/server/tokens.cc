// POST /tokenize and /detokenize.
#include "base/error.h"
#include "server/api_error.h"
#include "server/chat_plan.h"
#include "server/endpoints.h"
#include "server/fields.h"
#include "server/service.h"

namespace kt::inline server {
namespace {

constexpr size_t kMostText = 4 << 20;  // bytes that /tokenize cuts; a second or so

}  // namespace

// {"prompt" | "content" | "text": "..."} or {"messages": [...]}: the names that vLLM, llama.cpp and others
// use.
void post_tokenize(Service& service, HttpRequest& request, const Responder& responder) {
  const OrderedJson json = parse_body(request);
  const Fields body(json);
  std::vector<TokenId> ids;
  if (body.find("messages")) {
    ids = std::move(plan_chat(service, json).requests.front().prompt);
  } else {
    auto prompt = body.string("prompt");
    for (const char* name : {"content", "text"})
      if (!prompt) prompt = body.string(name);
    if (!prompt) body.refuse("prompt", "a string, or \"messages\"");
    if (prompt->size() > kMostText)
      throw ApiError(413, text("prompt: {} bytes, at most {} are taken", prompt->size(), kMostText),
                     "prompt");
    const bool special = body.flag("add_special_tokens", body.flag("add_special", true));
    ids = service.tokenizer().encode(*prompt, {.special = SpecialText::kRecognise, .add_special = special});
  }
  OrderedJson out = {{"tokens", ids}, {"count", ids.size()}, {"max_model_len", service.longest()}};
  if (body.flag("with_pieces", false) || body.flag("return_token_strs", false)) {
    out["token_strs"] = OrderedJson::array();
    for (TokenId id : ids) out["token_strs"].push_back(service.tokenizer().token_of(id).value_or(""));
  }
  service.metrics().count_reply(200);
  responder.reply({.body = json_text(out)});
}

void post_detokenize(Service& service, HttpRequest& request, const Responder& responder) {
  const OrderedJson json = parse_body(request);
  const Fields body(json);
  const std::vector<TokenId> ids = body.token_ids("tokens");
  std::string decoded;
  try {
    const bool skip = body.flag("skip_special_tokens", false);
    decoded = service.tokenizer().decode(ids, skip ? SpecialTokens::kSkip : SpecialTokens::kKeep);
  } catch (const Error& error) {
    body.refuse_as("tokens", error.what());
  }
  const OrderedJson out = {{"prompt", decoded}, {"content", decoded}, {"text", decoded}};
  service.metrics().count_reply(200);
  responder.reply({.body = json_text(out)});
}

}  // namespace kt::inline server
