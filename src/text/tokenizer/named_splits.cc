// The patterns behind the names of tokenizer.ggml.pre, in the form the models' own tokenizer.json has them.
#include <array>

#include "base/error.h"
#include "text/tokenizer/pretokenizer.h"

namespace kt::inline texts {

const std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

namespace {

#define KT_CONTRACTIONS R"((?i:'s|'t|'re|'ve|'m|'ll|'d))"
constexpr std::string_view kQwen2 =
    KT_CONTRACTIONS R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3 = KT_CONTRACTIONS
    R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen35 = KT_CONTRACTIONS
    R"(|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kMiniCpm5 =
    KT_CONTRACTIONS R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kSeedCoder =
    KT_CONTRACTIONS R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kTekken =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)"
    R"(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kO200k =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)" KT_CONTRACTIONS
    "?"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)" KT_CONTRACTIONS
    "?"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kKimiK2 = R"([\p{Han}]+)"
                                     R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)"
                                     R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)" KT_CONTRACTIONS
                                     "?"
                                     R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)"
                                     R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)" KT_CONTRACTIONS
                                     "?"
                                     R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kExaoneMoe = KT_CONTRACTIONS
    R"(|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+)";
#undef KT_CONTRACTIONS
constexpr std::string_view kBailing =
    R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+)";
constexpr std::string_view kDeepSeekWords =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)"
    R"(| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
// The letters of alphabets with two cases, as Unicode 11 had them.
constexpr std::string_view kCasedLetters =
    R"(\s?[A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF)"
    R"(\u0370-\u0373\u0376\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5)"
    R"(\u03F7-\u0481\u048A-\u052F\u0531-\u0556\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA)"
    R"(\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45)"
    R"(\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE)"
    R"(\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC)"
    R"(\u2102\u2107\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139)"
    R"(\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2\u2CF3)"
    R"(\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF\uFB00-\uFB06)"
    R"(\uFB13-\uFB17\uFF21-\uFF3A\uFF41-\uFF5A\x{10400}-\x{1044F}\x{104B0}-\x{104D3})"
    R"(\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+)";

// Runs of digits in threes from their end: first whatever is more than threes.
constexpr std::string_view kDigitRun = R"(\p{N}+)", kThrees = R"(\A\p{N}{1,2}(?=(?:\p{N}{3})++\z)|\p{N}{3})";
// Scripts without spaces between words: Han, kana, radicals, Thai, Lao, Khmer, Burmese, Hangul.
constexpr std::string_view kUnspaced =
    R"([\u4E00-\u9FFF\u3400-\u4DBF\uF900-\uFAFF\u3040-\u309F\u30A0-\u30FF\uFF65-\uFF9F\u2F00-\u2FDF)"
    R"(\u0E40-\u0E7F\u0E80-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF\uAC00-\uD7AF\u1100-\u11FF]+)";
constexpr std::string_view kLines = R"([^\n]+|[\n]+)";

struct Row {
  std::string_view name;
  NamedSplits splits;
};

const std::vector<Row>& rows() {
  static const NamedSplits deepseek{{R"(\p{N}{1,3})", R"([一-龥\u3040-ゟ゠-ヿ]+)", kDeepSeekWords}};
  static const NamedSplits digits{{R"(\p{N})", kGpt2Pattern}};  // each digit alone
  static const NamedSplits llama3{.patterns = {kLlama3}, .ignore_merges = true, .add_bos = true};
  static const std::vector<Row> table = {
      {"default", {{R"([\p{P}\$\+<=>\^~\|]+)", kGpt2Pattern, R"(\p{N}+)", "[0-9][0-9][0-9]"}}},
      {"gpt-2", {{kGpt2Pattern}}},
      {"a.x-4.0", {{kGpt2Pattern}}},
      {"gigachat", {{kGpt2Pattern}}},
      {"mellum", {{kGpt2Pattern}}},
      {"trillion", {{kGpt2Pattern}}},
      {"exaone4", {{kGpt2Pattern}}},
      {"smollm", digits},
      {"starcoder", digits},
      {"refact", digits},
      {"codeshell", digits},
      {"minerva-7b", digits},
      {"exaone", digits},
      {"mellum2", digits},
      {"gpt-4o", {{kO200k}}},
      {"llama4", {{kO200k}}},
      {"kanana2", {{kO200k}}},
      {"minimax-m2", {{kO200k}}},
      {"qwen2", {{kQwen2}}},
      {"deepseek-r1-qwen", {{kQwen2}}},
      {"megrez", {{kQwen2}}},
      {"kormo", {{kQwen2}}},
      {"grok-2", {{kQwen2}}},
      {"hunyuan", {{kQwen2}}},
      {"solar-open", {{kQwen2}}},
      {"laguna", {{kLines, kQwen2}}},
      {"qwen35", {{kQwen35}}},
      {"seed-coder", {{kSeedCoder}}},
      {"tekken", {.patterns = {kTekken}, .ignore_merges = true, .add_bos = true}},
      {"minicpm5", {{R"(\p{N}{1,3})", kMiniCpm5}, true}},
      {"llama-bpe", llama3},
      {"falcon3", llama3},
      {"midm-2.0", llama3},
      {"lfm2", llama3},
      {"smaug-bpe", {{kLlama3}}},
      {"llama3", llama3},
      {"llama-v3", llama3},
      {"chatglm-bpe", {{kLlama3}}},
      {"glm4", {{kLlama3}}},
      {"kimi-k2", {{kKimiK2}}},
      {"deepseek-v3", deepseek},
      {"joyai-llm", deepseek},
      {"hunyuan-dense", deepseek},
      {"hy_v4", deepseek},
      {"afmoe", {{kDigitRun, kThrees, kUnspaced, kDeepSeekWords}}},
      {"bailingmoe", {{kBailing}}},
      {"bailingmoe2", {{kBailing}}},
      {"llada-moe", {{kBailing}}},
      {"exaone-moe", {{kExaoneMoe}}},
      {"gemma4", {.patterns = {kLines}, .add_bos = true, .escaped = true}},
      {"deepseek-llm",
       {{R"([\r\n])", kCasedLetters, R"(\s?[!-/:-~！-／：-～‘-‟\u3000-。]+)", R"(\s+$)",
         R"([一-龥ࠀ-一가-\uD7FF]+)", R"(\p{N}+)"}}},
      {"deepseek-coder",
       {{R"([\r\n])", R"(\s?\p{L}+)", R"(\s?\p{P}+)", R"([一-龥ࠀ-一가-\uD7FF]+)", R"(\p{N})"}}},
  };
  return table;
}

}  // namespace

std::vector<std::string_view> split_names() {
  std::vector<std::string_view> out;
  for (const Row& row : rows()) out.push_back(row.name);
  return out;
}

const NamedSplits* find_splits(std::string_view name) {
  for (const Row& row : rows())
    if (row.name == name) return &row.splits;
  return nullptr;
}

NamedSplits splits_of(std::string_view name) {
  if (const NamedSplits* const found = find_splits(name)) return *found;
  std::string known;
  for (const Row& row : rows()) known.append(known.empty() ? "" : ", ").append(row.name);
  fail_as(ErrorKind::kUnsupported, "pre-tokenizer \"{}\" is not known; known: {}", printable(name), known);
}

}  // namespace kt::inline texts
