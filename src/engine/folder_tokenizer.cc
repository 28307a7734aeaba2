#include "engine/folder_tokenizer.h"

#include <charconv>
#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "text/json.h"

namespace kt {
namespace {

constexpr const char* kJsonFile = "/tokenizer.json";
constexpr const char* kPiecesFile = "/tokenizer.model";

TokenId added_id(const std::string& words, const std::string& file) {
  TokenId id = -1;
  const auto [end, problem] = std::from_chars(words.data(), words.data() + words.size(), id);
  if (problem != std::errc() || end != words.data() + words.size() || id < 0)
    fail("{}: added_tokens_decoder has \"{}\"; expected the id of a token", file, printable(words));
  return id;
}

// {"32000": {"content": "<|im_start|>", "special": true, ...}, ...}
void read_added_decoder(const Json& decoder, const std::string& file, SentencePieceExtras& extras) {
  if (!decoder.is_object()) fail("{}: added_tokens_decoder is not an object", file);
  for (const auto& [key, value] : decoder.items()) {
    const TokenId id = added_id(key, file);
    const auto content = value.is_object() ? value.find("content") : value.end();
    if (!value.is_object() || content == value.end() || !content->is_string())
      fail("{}: the added token {} has no content", file, id);
    const auto flag = [&](const char* name) {
      const auto found = value.find(name);
      return found != value.end() && found->is_boolean() && found->get<bool>();
    };
    extras.added.push_back({.id = id,
                            .content = content->get<std::string>(),
                            .special = flag("special"),
                            .single_word = flag("single_word"),
                            .lstrip = flag("lstrip"),
                            .rstrip = flag("rstrip")});
  }
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
    if (const auto found = config.find("added_tokens_decoder"); found != config.end())
      read_added_decoder(*found, config_file, extras);
  }
  if (extras.added.empty() && std::filesystem::exists(ids_file))
    read_added_ids(read_json(ids_file), ids_file, extras);
  return extras;
}

}  // namespace

std::optional<std::string> tokenizer_file_of(const std::string& folder) {
  for (const char* name : {kJsonFile, kPiecesFile})
    if (std::filesystem::exists(folder + name)) return folder + name;
  return std::nullopt;
}

Tokenizer read_folder_tokenizer(const std::string& folder) {
  const std::string file = tokenizer_file_of(folder).value_or(folder + kJsonFile);
  if (!file.ends_with(kPiecesFile)) return Tokenizer::from_file(file);
  return Tokenizer::from_sentencepiece(read_file(file, kSmallFile), file, read_extras(folder));
}

}  // namespace kt
