// For tests/grammar_test.py.
//   grammar_probe TOKENIZER walk    lines of JSON in and out: {"schema": ..., "walks": N, "seed": N,
//     "texts": [...]} gives {"walks": [text or null, ...], "fits": [true, ...], "seconds": N} or {"error":
//     ...}
//   grammar_probe TOKENIZER speed   microseconds of masks along texts, and of building the trie
// A walk takes any tokens that the mask leaves, with a liking for those that end things; null: it did not
// end. A text fits if the mask leaves each of its tokens and then the end. TOKENIZER may be "synthetic:N".
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <random>

#include "base/error.h"
#include "text/grammar/grammar.h"

namespace kt::inline texts {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;
constexpr int kLongestWalk = 3000;

double microseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// Of the CPU, which other programs on the machine do not stretch.
double cpu_microseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

// Bytes, then words of letters, digits, blanks and marks as large vocabularies have them, some with quotes,
// braces or parts of characters.
Tokenizer synthetic_tokenizer(size_t size) {
  std::mt19937 rng(1);
  TokenizerParts parts{.name = "synthetic"};
  parts.bpe.bytes = true;
  parts.decoding.byte_level = true;
  for (int byte = 0; byte < 256; ++byte)
    parts.tokens.push_back(spell_bytes(std::string(1, static_cast<char>(byte))));
  std::vector<std::string> latin,
      other{"\xC3\xA9", "\xE4\xB8\xAD", "\xF0\x9F\x98\x80", "\xD0\xB6", "\xE4\xBD"};
  const std::vector<std::string> marks{"\"", "\":", "\",", "\": \"", "{\"",
                                       "}",  "\\n", "  ",  "\n    ", ", \""};
  for (char a : std::string_view("bcdfghklmnprstvwz"))
    for (char b : std::string_view("aeiou")) latin.push_back({a, b});
  for (unsigned lead = 0xA0; lead < 0xC0; ++lead) other.push_back({'\xE5', static_cast<char>(lead), '\x90'});
  std::unordered_map<std::string, int> known;
  while (parts.tokens.size() < size) {
    const auto& syllables = rng() % 5 ? latin : other;
    std::string word = rng() % 2 ? " " : "";
    for (size_t i = rng() % 5 + 1; i > 0; --i) word += syllables[rng() % syllables.size()];
    if (rng() % 40 == 0)
      word = (rng() % 2 ? word : "") + marks[rng() % marks.size()] + (rng() % 2 ? word : "");
    std::string spelled = spell_bytes(word);
    if (known.emplace(spelled, 0).second && spelled.size() > 2) parts.tokens.push_back(std::move(spelled));
  }
  AddedToken end;
  end.id = static_cast<TokenId>(parts.tokens.size());
  end.content = "<end of the answer>";
  end.special = true;
  parts.added.push_back(end);
  return Tokenizer(std::move(parts));
}

Tokenizer tokenizer_of(const std::string& name) {
  if (name.starts_with("synthetic:")) return synthetic_tokenizer(std::stoul(name.substr(10)));
  return Tokenizer::from_file(name);
}

TokenId end_token_of(const Tokenizer& tokenizer) {
  for (size_t i = tokenizer.size(); i-- > 0;)
    if (tokenizer.is_special(static_cast<TokenId>(i))) return static_cast<TokenId>(i);
  fail("the tokenizer has no special token");
}

class Prober {
 public:
  explicit Prober(const Tokenizer& tokenizer)
      : tokenizer_(tokenizer), trie_(tokenizer), end_(end_token_of(tokenizer)), logits_(tokenizer.size()) {}

  const TokenTrie& trie() const { return trie_; }
  TokenId end() const { return end_; }

  Json answer(const Json& question) {
    const auto begin = Clock::now();
    Grammar grammar;
    try {
      grammar = json_schema_grammar(question.at("schema"));
    } catch (const Error& error) {
      return {{"error", error.what()}, {"seconds", microseconds_since(begin) / 1e6}};
    }
    const double seconds = microseconds_since(begin) / 1e6;
    Json out{{"walks", Json::array()}, {"fits", Json::array()}, {"seconds", seconds}};
    std::mt19937 rng(question.value("seed", 1u));
    for (int i = 0; i < question.value("walks", 0); ++i) out["walks"].push_back(walked(grammar, rng));
    for (const Json& text : question.value("texts", Json::array()))
      out["fits"].push_back(fits(grammar, text.get<std::string>()));
    return out;
  }

  bool allows(TokenConstraint& constraint, TokenId id) {
    std::ranges::fill(logits_, 0.0f);
    constraint.mask(logits_);
    return logits_[static_cast<size_t>(id)] == 0;
  }

 private:
  Json walked(const Grammar& grammar, std::mt19937& rng) {
    const auto constraint = constrain(trie_, grammar, {&end_, 1});
    std::string text;
    for (int step = 0; step < kLongestWalk; ++step) {
      const TokenId id = choice(*constraint, rng, step);
      constraint->accept(id);
      if (id == end_) return text;
      text += tokenizer_.token_bytes(id);
    }
    return nullptr;
  }

  TokenId choice(TokenConstraint& constraint, std::mt19937& rng, int step) {
    std::ranges::fill(logits_, 0.0f);
    constraint.mask(logits_);
    std::vector<TokenId> all, closing;
    for (size_t i = 0; i < logits_.size(); ++i) {
      if (logits_[i] != 0) continue;
      const auto id = static_cast<TokenId>(i);
      const std::string_view bytes = tokenizer_.token_bytes(id);
      all.push_back(id);
      if (id == end_ || (!bytes.empty() && std::string_view("\"}]").find(bytes[0]) != std::string_view::npos))
        closing.push_back(id);
    }
    const bool close = static_cast<int>(rng() % 100) < std::min(25 + step, 92);
    const auto& list = close && !closing.empty() ? closing : all;
    return list[rng() % list.size()];
  }

  bool fits(const Grammar& grammar, const std::string& text) {
    const auto constraint = constrain(trie_, grammar, {&end_, 1});
    for (TokenId id : tokenizer_.encode(text, {.special = SpecialText::kAsText})) {
      if (!allows(*constraint, id)) return false;
      constraint->accept(id);
    }
    return allows(*constraint, end_);
  }

  const Tokenizer& tokenizer_;
  TokenTrie trie_;
  TokenId end_;
  std::vector<float> logits_;
};

void report(std::string_view name, std::vector<double> times) {
  std::ranges::sort(times);
  double sum = 0;
  for (double time : times) sum += time;
  std::printf("%-28.*s %5zu masks: median %7.1f us, mean %7.1f us, 95%% %7.1f us, max %7.1f us\n",
              static_cast<int>(name.size()), name.data(), times.size(), times[times.size() / 2],
              sum / static_cast<double>(times.size()), times[times.size() * 95 / 100], times.back());
}

void time_masks(const Tokenizer& tokenizer, Prober& prober, const char* name, const Grammar& grammar,
                const std::string& text) {
  std::vector<double> times;
  std::vector<float> logits(tokenizer.size());
  const TokenId end = prober.end();
  const auto constraint = constrain(prober.trie(), grammar, {&end, 1});
  for (TokenId id : tokenizer.encode(text)) {
    std::ranges::fill(logits, 0.0f);
    const double begin = cpu_microseconds();
    constraint->mask(logits);
    times.push_back(cpu_microseconds() - begin);
    if (logits[static_cast<size_t>(id)] != 0) fail("{}: token {} is not allowed", name, id);
    constraint->accept(id);
  }
  report(name, std::move(times));
}

void speed(const Tokenizer& tokenizer) {
  const double begin = cpu_microseconds();
  Prober prober(tokenizer);
  std::printf("%zu tokens, trie in %.1f ms\n", tokenizer.size(), (cpu_microseconds() - begin) / 1000);
  std::mt19937 rng(3);
  const auto words = [&](int count) {
    std::string out;
    for (int i = 0; i < count; ++i)
      out += std::string(i ? " " : "") + "banu tile" + std::to_string(rng() % 1000);
    return out;
  };
  Json people = Json::array(), schema;
  for (int i = 0; i < 8; ++i)
    people.push_back(
        {{"name", words(2)}, {"age", 20 + i}, {"bio", words(20)}, {"tags", {"a", "be", words(1)}}});
  const Json value{{"people", people}, {"note", words(40)}};
  schema =
      Json::parse(R"({"type": "object", "properties": {"people": {"type": "array", "maxItems": 100, "items":
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4000}, "age": {"type": "integer",
    "minimum": 0, "maximum": 150}, "bio": {"type": "string"}, "tags": {"type": "array", "items":
    {"type": "string", "pattern": "^[a-z0-9 ]+$"}}}, "required": ["name", "age", "bio", "tags"],
    "additionalProperties": false}}, "note": {"type": "string", "maxLength": 2000}}, "required": ["people", "note"],
    "additionalProperties": false})");
  time_masks(tokenizer, prober, "schema, compact", json_schema_grammar(schema), value.dump());
  time_masks(tokenizer, prober, "schema, indented", json_schema_grammar(schema), value.dump(2));
  time_masks(tokenizer, prober, "any JSON, indented", json_value_grammar(), value.dump(2));
  time_masks(tokenizer, prober, "text without a marker", text_without_grammar("<tool_call>"), words(500));
}

int run(int argc, char** argv) {
  if (argc != 3) fail("expected grammar_probe TOKENIZER walk|speed");
  const Tokenizer tokenizer = tokenizer_of(argv[1]);
  if (std::string_view(argv[2]) == "speed") {
    speed(tokenizer);
    return 0;
  }
  Prober prober(tokenizer);
  for (std::string line; std::getline(std::cin, line);)
    std::cout << prober.answer(Json::parse(line)).dump(-1, ' ', true, Json::error_handler_t::replace)
              << std::endl;
  return 0;
}

}  // namespace
}  // namespace kt::inline texts

int main(int argc, char** argv) {
  try {
    return kt::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "grammar_probe: %s\n", error.what());
    return 1;
  }
}
