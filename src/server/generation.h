// The fields that all endpoints which generate text share, as a GenerateRequest.
#pragma once
#include "engine/scheduler.h"
#include "server/fields.h"
#include "text/grammar/grammar.h"

namespace kt::inline server {

class Service;

inline constexpr int kMostLogprobs = 20;  // alternatives to a token, as OpenAI has it

// temperature, top_p, top_k, min_p, penalties, logit_bias, seed, stop, ignore_eos, skip_special_tokens;
// defaults are the model's. Without a seed, a random one. The prompt, max_tokens and logprobs are the
// endpoint's business.
GenerateRequest read_generation(const Service& service, const Fields& body);

// So many requests with seeds that follow each other.
std::vector<GenerateRequest> copies(const GenerateRequest& request, int64_t n);

// {"token", "logprob", "bytes"} of a token, and with `top` the alternatives, as chat answers have them.
OrderedJson logprob_json(const Tokenizer& tokenizer, const SampledToken& token);
// The token's bytes as text; what is no whole character becomes U+FFFD.
std::string token_text(const Tokenizer& tokenizer, TokenId id);

// json_object, json_schema: the grammar that response_format asks for; null for text.
Grammar response_grammar(Service& service, const Fields& body);

struct StreamOptions {
  bool stream = false, usage = false;
};
StreamOptions read_stream_options(const Fields& body);

}  // namespace kt::inline server
