// POST /v1/completions: text goes on where the prompt ends.
#include <algorithm>
#include <ctime>

#include "base/error.h"
#include "server/answer.h"
#include "server/api_error.h"
#include "server/endpoints.h"
#include "server/generation.h"
#include "server/service.h"
#include "text/tokenizer/detokenizer.h"

namespace kt::inline server {
namespace {

constexpr int kDefaultTokens = 16;  // as OpenAI has it

// A prompt that stands before its answers.
struct Echo {
  std::string text;
  std::vector<TokenId> ids;  // where logprobs are wanted of them too
};

class CompletionAnswer final : public Answer {
 public:
  CompletionAnswer(Service& service, Responder responder, StreamOptions options,
                   std::span<const GenerateRequest> requests, size_t per_prompt, std::vector<Echo> echoes)
      : Answer(service, std::move(responder), options.stream, requests.size(), per_prompt),
        usage_wanted_(options.usage),
        per_prompt_(per_prompt),
        echoes_(std::move(echoes)),
        choices_(requests.size()) {
    head_ =
        text("{{\"id\":\"{}\",\"object\":\"text_completion\",\"created\":{},\"model\":{}", random_id("cmpl-"),
             std::time(nullptr), json_string(service.model_name(requests.front().adapter)));
  }

 private:
  struct Choice {
    std::string text;                // stream: of this event only
    OrderedJson logprobs = nullptr;  // the same
    std::string finish;
    size_t shown = 0;  // characters of text so far
    bool begun = false;
  };

  void event(size_t sequence, const AnswerEvent& event) override {
    Choice& choice = choices_[sequence];
    if (!choice.begun && !echoes_.empty()) add_echo(choice, echoes_[sequence / per_prompt_], event.prompt);
    choice.begun = true;
    if (event.token && event.token->logprob) add_logprob(choice, *event.token);
    add_text(choice, event.text);
    if (event.finish) choice.finish = name_of(event.finish->reason);
    if (!stream()) return;
    if (choice.text.empty() && choice.finish.empty() && choice.logprobs.is_null()) return;
    std::string chunk = head_ + ",\"choices\":[" + json_of(sequence) + "]";
    if (usage_wanted_) chunk += ",\"usage\":null";
    send_event(chunk + "}");
    choice.text.clear();
    choice.logprobs = nullptr;
  }

  void end() override {
    std::string usage = ",\"usage\":" + usage_json(this->usage()).dump() + "}";
    if (stream()) {
      if (usage_wanted_) send_event(head_ + ",\"choices\":[]" + usage);
      return send("data: [DONE]\n\n");
    }
    std::string whole = head_ + ",\"choices\":[";
    for (size_t i = 0; i < choices_.size(); ++i) whole += (i > 0 ? "," : "") + json_of(i);
    reply(whole + "]" + usage);
  }

  static void add_text(Choice& choice, std::string_view text) {
    choice.text += text;
    choice.shown +=
        static_cast<size_t>(std::ranges::count_if(text, [](char c) { return (c & 0xC0) != 0x80; }));
  }

  // Nothing comes before the first token, so it has no score.
  void add_echo(Choice& choice, const Echo& echo, std::span<const SampledToken> scores) {
    if (echo.ids.empty()) return add_text(choice, echo.text);
    Detokenizer detokenizer(service().tokenizer());
    for (size_t i = 0; i < echo.ids.size(); ++i) {
      add_logprob(choice, i == 0 ? SampledToken{.id = echo.ids[0]} : scores[i - 1]);
      add_text(choice, detokenizer.push(echo.ids[i]));
    }
    add_text(choice, detokenizer.flush());
  }

  void add_logprob(Choice& choice, const SampledToken& token) {
    const Tokenizer& tokenizer = service().tokenizer();
    if (choice.logprobs.is_null()) {
      const OrderedJson none = OrderedJson::array();
      choice.logprobs = {
          {"tokens", none}, {"token_logprobs", none}, {"top_logprobs", none}, {"text_offset", none}};
    }
    OrderedJson score, top;  // null
    if (token.logprob) {
      score = std::max(*token.logprob, -9999.0);
      top = OrderedJson::object();
    }
    for (const TokenLogprob& other : token.top)
      top[token_text(tokenizer, other.id)] = std::max(other.logprob, -9999.0);
    choice.logprobs["tokens"].push_back(token_text(tokenizer, token.id));
    choice.logprobs["token_logprobs"].push_back(std::move(score));
    choice.logprobs["top_logprobs"].push_back(std::move(top));
    choice.logprobs["text_offset"].push_back(choice.shown);
  }

  std::string json_of(size_t index) const {
    const Choice& choice = choices_[index];
    return text("{{\"index\":{},\"text\":{},\"logprobs\":{},\"finish_reason\":{}}}", index,
                json_string(choice.text), json_text(choice.logprobs),
                choice.finish.empty() ? "null" : json_string(choice.finish));
  }

  const bool usage_wanted_;
  const size_t per_prompt_;
  const std::vector<Echo> echoes_;  // of each prompt; empty: no echo
  std::string head_;                // of every JSON object that goes out, without its end
  std::vector<Choice> choices_;
};

// A string, a list of strings, a list of token ids or a list of such lists.
std::vector<std::vector<TokenId>> read_prompts(const Service& service, const Fields& body) {
  const OrderedJson* prompt = body.find("prompt");
  constexpr const char* kExpected = "a string, a list of strings, token ids or lists of token ids";
  if (!prompt) body.refuse("prompt", kExpected);
  const auto encode = [&](const OrderedJson& text) {
    service.check_length(text.get_ref<const std::string&>(), "prompt");
    return service.tokenizer().encode(text.get_ref<const std::string&>(),
                                      {.special = SpecialText::kRecognise, .add_special = true});
  };
  if (prompt->is_string()) return {encode(*prompt)};
  if (!prompt->is_array() || prompt->empty()) body.refuse("prompt", kExpected);
  if (prompt->front().is_number()) return {body.token_ids("prompt")};
  if (prompt->size() > static_cast<size_t>(service.options().max_answers))
    body.refuse_as("prompt",
                   text("{} prompts, at most {} are taken", prompt->size(), service.options().max_answers));
  std::vector<std::vector<TokenId>> out;
  for (const OrderedJson& entry : *prompt) {
    if (entry.is_string()) {
      out.push_back(encode(entry));
    } else if (entry.is_array()) {
      const OrderedJson holder = {{"prompt", entry}};
      out.push_back(Fields(holder).token_ids("prompt"));
    } else {
      body.refuse("prompt", kExpected);
    }
  }
  return out;
}

std::vector<Echo> echoes_of(const Service& service, const Fields& body,
                            const std::vector<std::vector<TokenId>>& prompts, bool scored) {
  std::vector<Echo> out;
  for (const auto& prompt : prompts) {
    try {
      out.push_back({.text = service.tokenizer().decode(prompt), .ids = {}});
    } catch (const Error& error) {
      body.refuse_as("prompt", error.what());
    }
    if (scored) out.back().ids = prompt;
  }
  return out;
}

}  // namespace

void post_completions(Service& service, HttpRequest& request, const Responder& responder) {
  const OrderedJson json = parse_body(request);
  const Fields body(json);
  if (!body.string("suffix").value_or("").empty())
    body.refuse_as("suffix", "filling in the middle is not supported");
  const int64_t n = body.integer("n", 1, service.options().max_answers).value_or(1);
  if (body.integer("best_of", 1, 1 << 20).value_or(n) != n)
    body.refuse_as("best_of", text("only n, {}, is supported", n));
  const auto prompts = read_prompts(service, body);
  if (static_cast<int64_t>(prompts.size()) * n > service.options().max_answers)
    body.refuse_as("n", text("{} answers to each of {} prompts are more than {}", n, prompts.size(),
                             service.options().max_answers));
  GenerateRequest base = read_generation(service, body);
  const bool echo = body.flag("echo", false);
  // An echo alone is an answer too: evaluations ask so for the probability of a text.
  base.max_tokens =
      static_cast<int>(body.integer("max_tokens", echo ? 0 : 1, INT32_MAX).value_or(kDefaultTokens));
  if (const auto logprobs = body.integer("logprobs", 0, kMostLogprobs))
    base.sampling.logprobs = static_cast<int>(*logprobs);
  if (echo) base.prompt_logprobs = base.sampling.logprobs;
  const Grammar grammar = response_grammar(service, body);
  std::vector<GenerateRequest> requests;
  for (const auto& prompt : prompts) {
    base.prompt = prompt;
    for (GenerateRequest& copy : copies(base, n)) {
      if (grammar) copy.constraint = service.constraint(grammar);
      requests.push_back(std::move(copy));
    }
  }
  std::vector<Echo> echoes;
  if (echo) echoes = echoes_of(service, body, prompts, base.prompt_logprobs.has_value());
  const auto answer = std::make_shared<CompletionAnswer>(service, responder, read_stream_options(body),
                                                         requests, static_cast<size_t>(n), std::move(echoes));
  service.run(answer, std::move(requests));
}

}  // namespace kt::inline server
