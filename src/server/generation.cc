#include "server/generation.h"

#include <sys/random.h>

#include <charconv>

#include "base/error.h"
#include "base/text.h"
#include "base/utf8.h"
#include "server/api_error.h"
#include "server/service.h"
#include "text/tokenizer/detokenizer.h"

namespace kt::inline server {
namespace {

constexpr size_t kMostStops = 16;
constexpr size_t kMostBiases = 1024;

uint64_t random_seed() {
  uint64_t seed = 0;
  if (::getrandom(&seed, sizeof seed, 0) != sizeof seed) fail_as(ErrorKind::kInternal, "getrandom failed");
  return seed;
}

// {"1234": -100, ...}: token ids spelled as keys.
std::vector<std::pair<TokenId, double>> read_bias(const Service& service, const Fields& body) {
  std::vector<std::pair<TokenId, double>> out;
  const OrderedJson* bias = body.find("logit_bias");
  if (!bias) return out;
  if (!bias->is_object() || bias->size() > kMostBiases)
    body.refuse("logit_bias", text("an object of at most {} token ids", kMostBiases));
  const int vocabulary = service.model().spec().vocab;
  for (const auto& [key, value] : bias->items()) {
    int id = -1;
    const auto end = std::from_chars(key.data(), key.data() + key.size(), id);
    if (end.ptr != key.data() + key.size() || id < 0 || id >= vocabulary)
      body.refuse_as("logit_bias",
                     text("expected token ids below {}, one is {}", vocabulary, shown_value(key)));
    const double number = value.is_number() ? value.get<double>() : 1e9;
    if (!(number >= -100 && number <= 100))
      body.refuse_as("logit_bias",
                     text("expected numbers in [-100, 100], {} has {}", id, shown_value(value)));
    out.emplace_back(id, number);
  }
  return out;
}

OrderedJson token_json(const Tokenizer& tokenizer, TokenId id, double logprob) {
  OrderedJson bytes = OrderedJson::array();
  for (char byte : tokenizer.token_bytes(id)) bytes.push_back(static_cast<unsigned char>(byte));
  // JSON has no infinities; OpenAI writes -9999 for a token that cannot come.
  return {{"token", token_text(tokenizer, id)},
          {"logprob", std::max(logprob, -9999.0)},
          {"bytes", std::move(bytes)}};
}

}  // namespace

GenerateRequest read_generation(const Service& service, const Fields& body) {
  GenerateRequest out;
  if (!service.model().adapters().empty())
    if (const auto model = body.string("model")) out.adapter = service.adapter_named(*model);
  SamplingOptions& sampling = out.sampling;
  sampling = service.default_sampling();
  const auto number = [&](const char* name, double low, double high, double& into) {
    if (const auto value = body.number(name, low, high)) into = *value;
  };
  number("temperature", 0, 100, sampling.temperature);
  number("top_p", 0, 1, sampling.top_p);
  if (sampling.top_p == 0) sampling.top_p = 1e-9;  // clients mean the most probable token
  if (const auto top_k = body.integer("top_k", -1, 1'000'000)) sampling.top_k = static_cast<int>(*top_k);
  number("min_p", 0, 1, sampling.min_p);
  number("repetition_penalty", 0.01, 100, sampling.repetition_penalty);
  number("presence_penalty", -2, 2, sampling.presence_penalty);
  number("frequency_penalty", -2, 2, sampling.frequency_penalty);
  sampling.logit_bias = read_bias(service, body);
  const auto seed = body.integer("seed", INT64_MIN, INT64_MAX);
  sampling.seed = seed ? static_cast<uint64_t>(*seed) : random_seed();
  out.stop = body.strings("stop", kMostStops);
  std::erase(out.stop, "");  // some clients send one
  if (!body.flag("ignore_eos", false)) out.end_tokens = service.model().end_ids();
  if (!body.flag("skip_special_tokens", true)) out.special = SpecialTokens::kKeep;
  return out;
}

std::vector<GenerateRequest> copies(const GenerateRequest& request, int64_t n) {
  std::vector<GenerateRequest> out(static_cast<size_t>(n), request);
  for (size_t i = 0; i < out.size(); ++i) out[i].sampling.seed += i;
  return out;
}

std::string token_text(const Tokenizer& tokenizer, TokenId id) {
  if (id < 0 || static_cast<size_t>(id) >= tokenizer.size())
    return {};  // a row that pads the model's vocabulary
  Detokenizer one(tokenizer, SpecialTokens::kKeep, TextPlace::kMiddle);
  std::string out = one.push(id);
  return out + one.flush();
}

OrderedJson logprob_json(const Tokenizer& tokenizer, const SampledToken& token) {
  OrderedJson out = token_json(tokenizer, token.id, token.logprob.value_or(0));
  OrderedJson top = OrderedJson::array();
  for (const TokenLogprob& other : token.top) top.push_back(token_json(tokenizer, other.id, other.logprob));
  out["top_logprobs"] = std::move(top);
  return out;
}

Grammar response_grammar(Service& service, const Fields& body) {
  const auto format = body.object("response_format");
  if (!format) return nullptr;
  const std::string type = format->string("type").value_or("");
  if (type == "text") return nullptr;
  if (type == "json_object") return json_object_grammar();
  if (type != "json_schema") format->refuse("type", "\"text\", \"json_object\" or \"json_schema\"");
  const auto holder = format->object("json_schema");
  if (!holder) format->refuse("json_schema", "an object with a schema");
  const OrderedJson* schema = holder->find("schema");
  if (!schema) holder->refuse("schema", "a JSON schema");
  try {
    return service.schema_grammar(*schema);
  } catch (const Error& error) {
    throw ApiError(400, text("response_format: {}", error.what()), "response_format");
  }
}

StreamOptions read_stream_options(const Fields& body) {
  StreamOptions out{.stream = body.flag("stream", false)};
  if (const auto options = body.object("stream_options")) out.usage = options->flag("include_usage", false);
  return out;
}

}  // namespace kt::inline server
