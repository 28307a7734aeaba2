// Masks against the machine that reads every token by itself.
#include "text/grammar/masks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>

#include "base/error.h"

namespace kt::inline texts {
namespace {

using Json = nlohmann::ordered_json;

const Tokenizer& demo() {
  static const Tokenizer tokenizer = Tokenizer::from_file(std::string(KT_DEMO_MODEL) + "/tokenizer.json");
  return tokenizer;
}
const TokenTrie& demo_trie() {
  static const TokenTrie trie(demo());
  return trie;
}

bool reads(GrammarMachine& machine, ConfigId config, std::string_view bytes) {
  for (char c : bytes) config = machine.step(config, static_cast<uint8_t>(c));
  return config != 0;
}

std::vector<TokenId> readable(GrammarMachine& machine, ConfigId config) {
  std::vector<TokenId> out;
  for (size_t i = 0; i < demo().size(); ++i) {
    const auto id = static_cast<TokenId>(i);
    const std::string_view bytes = demo().token_bytes(id);
    if (!demo().is_special(id) && !bytes.empty() && reads(machine, config, bytes)) out.push_back(id);
  }
  return out;
}

void compare_along_walk(const Grammar& grammar, unsigned seed) {
  GrammarMachine machine(grammar), plain(grammar);
  Masks masks(demo_trie().state(), machine);
  ConfigId now = machine.start(), reference = plain.start();
  std::mt19937 rng(seed);
  for (int step = 0; step < 120; ++step) {
    const TokenBits bits = masks.after(now);
    std::vector<TokenId> allowed;
    for (size_t i = 0; i < demo().size(); ++i) {
      const auto id = static_cast<TokenId>(i);
      const std::string_view bytes = demo().token_bytes(id);
      const bool expected = !demo().is_special(id) && !bytes.empty() && reads(plain, reference, bytes);
      ASSERT_EQ(bits.has(id), expected) << "step " << step << ", token " << i;
      if (expected) allowed.push_back(id);
    }
    if (allowed.empty()) {
      EXPECT_TRUE(machine.ends(now));
      return;
    }
    for (char c : demo().token_bytes(allowed[rng() % allowed.size()])) {
      now = machine.step(now, static_cast<uint8_t>(c));
      reference = plain.step(reference, static_cast<uint8_t>(c));
    }
    ASSERT_EQ(machine.ends(now), plain.ends(reference));
    if (step % 40 != 39) continue;
    masks.forget();
    now = machine.forget_but(now);
  }
}

TEST(Masks, AreWhatTheMachineReads) {
  const char* schemas[] = {
      R"({})",
      R"({"type": "object", "properties": {"a": {"type": "string", "maxLength": 300}, "b": {"type": "integer"}},
          "required": ["a", "b"], "additionalProperties": false})",
      R"({"type": "array", "items": {"type": "string", "minLength": 50, "maxLength": 400}, "minItems": 2})",
      R"({"anyOf": [{"type": "string", "pattern": "^[a-z ]+$"}, {"type": "array", "items": {"enum": ["one", "two"]}},
          {"type": "number", "minimum": -3.5, "maximum": 12}]})",
      R"({"type": "object", "properties": {"next": {"$ref": "#"}, "text": {"type": "string"}}})"};
  unsigned seed = 1;
  for (const char* schema : schemas) {
    SCOPED_TRACE(schema);
    for (int i = 0; i < 3; ++i) compare_along_walk(json_schema_grammar(Json::parse(schema)), seed++);
  }
  const Grammar text = sequence_grammar({text_without_grammar("<tool_call>"), literal_grammar("<tool_call>"),
                                         json_object_grammar(), repeat_grammar(literal_grammar("\n"), 0, 2)});
  for (int i = 0; i < 3; ++i) compare_along_walk(text, seed++);
}

// Far from its ends every place in a long string has the same mask, found once.
TEST(Masks, LongStringsShareThem) {
  GrammarMachine machine(json_schema_grammar(Json::parse(R"({"type": "string", "maxLength": 5000})")));
  Masks masks(demo_trie().state(), machine);
  ConfigId now = machine.step(machine.start(), '"');
  for (int i = 0; i < 1000; ++i) {
    masks.after(now);
    now = machine.step(now, 'x');
  }
  EXPECT_LT(machine.size(), 3500u);
}

TEST(Masks, ForgettingKeepsTheStack) {
  GrammarMachine machine(json_value_grammar());
  ConfigId now = machine.start();
  const auto read = [&](std::string_view text) {
    for (char c : text) now = machine.step(now, static_cast<uint8_t>(c));
  };
  read("[{\"a\":[[1,");
  now = machine.forget_but(now);
  EXPECT_EQ(machine.size(), 2u);
  read("2]]}");
  EXPECT_FALSE(machine.ends(now));
  read("]");
  EXPECT_TRUE(machine.ends(now));
  EXPECT_FALSE(machine.goes_on(now));
}

// An answer cannot nest without end.
TEST(Masks, NestingEnds) {
  GrammarMachine machine(json_value_grammar());
  ConfigId now = machine.start();
  int depth = 0;
  while (const ConfigId next = machine.step(now, '[')) {
    now = next;
    ASSERT_LT(++depth, 10'000);
  }
  EXPECT_GT(depth, 100);
  while (depth-- > 0) now = machine.step(now, ']');
  EXPECT_TRUE(machine.ends(now));
}

// Where it ends, masks know it as the machine does.
TEST(Masks, EndOfNestingIsTheMachines) {
  GrammarMachine machine(json_value_grammar()), plain(json_value_grammar());
  Masks masks(demo_trie().state(), machine);
  ConfigId now = machine.start(), reference = plain.start();
  std::vector<std::pair<ConfigId, ConfigId>> places;
  while (const ConfigId next = plain.step(reference, '[')) {
    places.emplace_back(now = machine.step(now, '['), reference = next);
  }
  for (const size_t above : {0, 1, 2, 3, 5, 9, 20}) {
    const auto& [config, same] = places.at(places.size() - 1 - above);
    const TokenBits bits = masks.after(config);
    std::vector<TokenId> found;
    for (size_t i = 0; i < demo().size(); ++i)
      if (bits.has(static_cast<TokenId>(i))) found.push_back(static_cast<TokenId>(i));
    EXPECT_EQ(found, readable(plain, same)) << above << " above the deepest";
  }
}

// A model that opens whatever it may is never offered what is refused, nor led to where nothing can come.
TEST(Masks, DeepAnswersHaveAWayOut) {
  const char* schemas[] = {R"({})", R"({"type": "object", "additionalProperties": {"$ref": "#"}})",
                           R"({"type": "array", "items": {"type": "object", "properties": {
          "k": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["k"]}})"};
  const TokenId end = 0;
  for (const char* schema : schemas) {
    SCOPED_TRACE(schema);
    const auto constraint = constrain(demo_trie(), json_schema_grammar(Json::parse(schema)), {&end, 1});
    std::vector<float> logits(demo().size());
    const auto liking = [&](size_t id) {
      if (logits[id] != 0) return -1;
      const std::string_view bytes = demo().token_bytes(static_cast<TokenId>(id));
      if (bytes == "[" || bytes == "{") return 3;
      return bytes == "\"" || bytes == ":" ? 2 : bytes.size() == 1 && bytes[0] > ' ' ? 1 : 0;
    };
    for (int i = 0; i < 2500; ++i) {
      std::ranges::fill(logits, 0.0f);
      ASSERT_NO_THROW(constraint->mask(logits)) << "token " << i;
      size_t best = 0;
      for (size_t id = 1; id < logits.size(); ++id)
        if (liking(id) > liking(best)) best = id;
      if (best == end) break;
      ASSERT_NO_THROW(constraint->accept(static_cast<TokenId>(best))) << "token " << i;
    }
  }
}

TEST(Masks, AmbiguityIsBounded) {
  // Each of these may end a hundred ways at any place.
  std::vector<Grammar> parts;
  for (int i = 0; i < 100; ++i)
    parts.push_back(repeat_grammar(choice_grammar({literal_grammar("a"), literal_grammar("aa")}), 0, 100));
  const TokenId end = 0;
  const auto begin = std::chrono::steady_clock::now();
  try {
    const auto constraint = constrain(demo_trie(), sequence_grammar(parts), {&end, 1});
    std::vector<float> logits(demo().size());
    for (int i = 0; i < 20; ++i) {
      constraint->mask(logits);
      constraint->accept(demo().encode("a")[0]);
    }
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::minutes(10)) << "it is not bounded";
}

}  // namespace
}  // namespace kt::inline texts
