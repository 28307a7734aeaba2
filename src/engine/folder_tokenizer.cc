#include "engine/folder_tokenizer.h"

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "text/json.h"

namespace kt::inline engine {
namespace {

constexpr const char* kJsonFile = "/tokenizer.json";
constexpr const char* kPiecesFile = "/tokenizer.model";
constexpr const char* kRanksFile = "/tiktoken.model";

TokenId added_id(const std::string& key, const std::string& file) {
  TokenId id = -1;
  const auto [end, problem] = std::from_chars(key.data(), key.data() + key.size(), id);
  if (problem != std::errc() || end != key.data() + key.size() || id < 0)
    fail("{}: added_tokens_decoder has \"{}\"; expected the id of a token", file, printable(key));
  return id;
}

// {"32000": {"content": "<|im_start|>", "special": true, ...}, ...}
std::vector<AddedToken> read_added_decoder(const Json& config, const std::string& file) {
  std::vector<AddedToken> added;
  const auto decoder = config.find("added_tokens_decoder");
  if (decoder == config.end()) return added;
  if (!decoder->is_object()) fail("{}: added_tokens_decoder is not an object", file);
  for (const auto& [key, value] : decoder->items()) {
    const TokenId id = added_id(key, file);
    const auto content = value.is_object() ? value.find("content") : value.end();
    if (!value.is_object() || content == value.end() || !content->is_string())
      fail("{}: the added token {} has no content", file, id);
    const auto flag = [&](const char* name) {
      const auto found = value.find(name);
      return found != value.end() && found->is_boolean() && found->get<bool>();
    };
    added.push_back({.id = id,
                     .content = content->get<std::string>(),
                     .special = flag("special"),
                     .single_word = flag("single_word"),
                     .lstrip = flag("lstrip"),
                     .rstrip = flag("rstrip")});
  }
  return added;
}

// {"<|im_start|>": 32000, ...}, of older folders.
void read_added_ids(const Json& ids, const std::string& file, SentencePieceExtras& extras) {
  if (!ids.is_object()) fail("{}: expected an object", file);
  for (const auto& [content, value] : ids.items()) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > 0x7FFFFFFF)
      fail("{}: \"{}\" is {}; expected the id of a token", file, printable(content), printable(value.dump()));
    extras.added.push_back({.id = value.get<TokenId>(), .content = content, .special = true});
  }
}

SentencePieceExtras read_extras(const std::string& folder) {
  SentencePieceExtras extras;
  const std::string config_file = folder + "/tokenizer_config.json", ids_file = folder + "/added_tokens.json";
  if (std::filesystem::exists(config_file)) {
    const Json config = read_json(config_file);
    const auto flag = [&](const char* name, bool otherwise) {
      const auto found = config.find(name);
      return found != config.end() && found->is_boolean() ? found->get<bool>() : otherwise;
    };
    extras.add_bos = flag("add_bos_token", true);
    extras.add_eos = flag("add_eos_token", false);
    extras.added = read_added_decoder(config, config_file);
  }
  if (extras.added.empty() && std::filesystem::exists(ids_file))
    read_added_ids(read_json(ids_file), ids_file, extras);
  return extras;
}

// "tokenization_kimi.TikTokenTokenizer": the code by which transformers would read the ranks, and which is not run
// here. Empty where nothing is said.
std::string tokenizer_code_of(const Json& config) {
  if (const auto map = config.find("auto_map"); map != config.end() && map->is_object())
    if (const auto found = map->find("AutoTokenizer"); found != map->end()) {
      const Json& slow = found->is_array() && !found->empty() ? found->front() : *found;  // [slow, fast]
      if (slow.is_string()) return slow.get<std::string>();
    }
  const auto name = config.find("tokenizer_class");
  return name != config.end() && name->is_string() ? name->get<std::string>() : std::string();
}

// A ranks file says neither how text is split into words nor which ids are special. Both follow from whose it is.
struct RanksKind {
  std::string_view code;    // as tokenizer_code_of says; the class alone where no module is named
  std::string_view splits;  // in named_splits.cc
  size_t reserved;          // as in TiktokenRanks
};
constexpr RanksKind kRanksKinds[] = {
    {"tokenization_kimi.TikTokenTokenizer", "kimi-k2", 256},      // Kimi-K2 and later, Kimi-Linear
    {"tokenization_moonshot.TikTokenTokenizer", "kimi-k2", 256},  // Moonlight, Kimi-VL
    {"TikTokenTokenizer", "kimi-k2", 256},
};

Tokenizer read_ranks_folder(const std::string& folder, const std::string& file) {
  const std::string config_file = folder + "/tokenizer_config.json";
  if (!std::filesystem::exists(config_file))
    fail("{}: tokenizer_config.json, which says whose ranks these are, is not beside it", file);
  const Json config = read_json(config_file);
  std::string code = tokenizer_code_of(config);
  if (const size_t repository = code.find("--"); repository != std::string::npos)
    code.erase(0, repository + 2);  // "moonshotai/Kimi-K2-Base--tokenization_kimi. ..."
  const auto kind = std::ranges::find(kRanksKinds, std::string_view(code), &RanksKind::code);
  if (kind == std::end(kRanksKinds))
    fail_as(ErrorKind::kUnsupported,
            "{}: ranks of the tokenizer \"{}\" are not read, only those of Kimi's TikTokenTokenizer", file,
            printable(code));
  const std::string ranks = read_file(file, kSmallFile);
  return Tokenizer::from_tiktoken({.name = file,
                                   .characters = ranks,
                                   .pattern = splits_of(kind->splits).patterns.front(),
                                   .added = read_added_decoder(config, config_file),
                                   .reserved = kind->reserved});
}

}  // namespace

std::optional<std::string> tokenizer_file_of(const std::string& folder) {
  for (const char* name : {kJsonFile, kPiecesFile, kRanksFile})
    if (std::filesystem::exists(folder + name)) return folder + name;
  return std::nullopt;
}

Tokenizer read_folder_tokenizer(const std::string& folder) {
  const std::string file = tokenizer_file_of(folder).value_or(folder + kJsonFile);
  if (file.ends_with(kRanksFile)) return read_ranks_folder(folder, file);
  if (!file.ends_with(kPiecesFile)) return Tokenizer::from_file(file);
  return Tokenizer::from_sentencepiece(read_file(file, kSmallFile), file, read_extras(folder));
}

}  // namespace kt::inline engine
